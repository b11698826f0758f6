"""Ids that the kernels find out of range: the CPU's error, before the block that holds one reaches the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from profiles import examples
from streams import loader_stream, take

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.errors import TokenRangeError
from dali_pipes.runtime.ranks import resolve_ranks

PLACEMENTS = ("host", "device", "pinned")


def batches_until_error(loader: TokenLoader) -> tuple[list[Any], str]:
    """Batches of one epoch that were handed out, and the error behind them, empty where there was none."""
    batches: list[Any] = []
    try:
        batches.extend({name: tensor.tolist() for name, tensor in batch.items()} for batch in loader)
    except TokenRangeError as error:
        return batches, str(error)
    return batches, ""


@hypothesis_settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_same_error_at_the_same_block_as_on_the_cpu(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    folder = tmp_path_factory.mktemp("corpus")
    dtype = draw(st.sampled_from(["uint8", "uint16", "int32", "int64"]))
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, 101)
    wrong = [100, 120] if dtype == "uint8" else [100, 60_000] if dtype == "uint16" else [100, -1, 2**31 - 1, -(2**31)]
    for _ in range(draw(st.integers(1, 3))):
        tokens[draw(st.integers(0, 100))] = draw(st.sampled_from(wrong))
    tokens[:40].astype(dtype).tofile(folder / "a.bin")
    tokens[40:].astype(dtype).tofile(folder / "b.bin")
    common: dict[str, Any] = {
        "corpus": str(folder),
        "dtype": dtype,
        "vocab_size": 100,
        "batch_size": 2,
        "seq_len": 4,
        "shuffle": draw(st.booleans()),
        "label_shift": draw(st.booleans()),
        "drop_last": False,
        "batches_per_run": draw(st.integers(1, 4)),
        "prefetch_queue_depth": draw(st.integers(1, 4)),
    }
    placement, order = draw(st.sampled_from(PLACEMENTS)), draw(st.sampled_from(["late", "early", "random"]))
    with TokenLoader(**common, device="cpu") as loader:
        expected = batches_until_error(loader)
        # Without shifted labels nothing reads the token behind the last window's inputs.
        assert expected[1] or not common["label_shift"]
        state = loader.state_dict()
        expected_again = batches_until_error(loader)
    with (
        gpu_stand_in.installed(order) as gpu,
        TokenLoader(**common, device="cuda", placement=placement) as loader,
    ):
        assert batches_until_error(loader) == expected
        assert loader.state_dict() == state
        assert batches_until_error(loader) == expected_again
        assert gpu.default_stream_work == 0


@hypothesis_settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bad_id_is_handed_out_in_rows_of_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Not as a label that no row shows either, behind a row or at the end of the corpus.

    Where labels end with their documents the CPU also checks the tokens that it reads behind a row for nothing; else
    the errors are the same.
    """
    draw = data.draw
    folder = tmp_path_factory.mktemp("corpus")
    size = draw(st.integers(60, 110))
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, size).astype(np.uint16)
    tokens[:: draw(st.integers(5, 30))] = 0
    rows = draw(st.sampled_from(["stream", "stream", "pack", "pad"]))
    for _ in range(draw(st.integers(0, 2))):
        tokens[draw(st.sampled_from([size - 1, *range(4, size, 4), *range(size)]))] = 60_000
    tokens.tofile(folder / "a.bin")
    if draw(st.booleans()):
        np.random.default_rng(size).integers(0, 2, size, dtype=np.uint8).tofile(folder / "a.bin.loss")
    within_documents = draw(st.booleans())
    common: dict[str, Any] = {
        "corpus": str(folder),
        "dtype": "uint16",
        "eos_id": 0,
        "vocab_size": 100,
        "rows": rows,
        "outputs": draw(st.sampled_from([("input_ids", "labels", "position_ids"), ("labels", "segment_ids")])),
        "mtp": draw(st.sampled_from([0, 0, 3])),
        "mask_boundaries": within_documents,
        "batch_size": draw(st.integers(1, 2)),
        "seq_len": 4,
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "batches_per_run": draw(st.integers(1, 4)),
    }
    if rows == "pad" and draw(st.booleans()):
        common["length_buckets"] = [2, 4]
    placement, order = draw(st.sampled_from(PLACEMENTS)), draw(st.sampled_from(["late", "early", "random"]))
    with TokenLoader(**common, device="cpu") as loader:
        expected, message = batches_until_error(loader)
    with gpu_stand_in.installed(order), TokenLoader(**common, device="cuda", placement=placement) as loader:
        found, message_found = batches_until_error(loader)
    for batch in found:
        assert np.max(batch["labels"], initial=0) < 100
    if rows == "stream" and within_documents:
        assert found[: len(expected)] == expected
        assert message or not message_found
    else:
        assert (found, message_found) == (expected, message)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("at", [20, 40])
def test_a_label_that_no_row_shows_before_it(
    gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str, at: int
) -> None:
    """The last label of a row is the first token of the next one, or of nothing."""
    tokens = np.arange(41, dtype=np.uint16) % 40
    tokens[at] = 77
    tokens.tofile(tmp_path / "a.bin")
    common: dict[str, Any] = {
        "outputs": ("labels", "position_ids"),
        "eos_id": 78,
        "vocab_size": 40,
        "batches_per_run": 1,
    }
    with TokenLoader(
        corpus=str(tmp_path / "a.bin"),
        dtype="uint16",
        batch_size=1,
        seq_len=4,
        shuffle=False,
        device="cuda",
        placement=placement,
        **common,
    ) as loader:
        batches, message = batches_until_error(loader)
    assert len(batches) == at // 4 - 1
    assert f"a.bin: token {at} (corpus position {at}) is 77" in message


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ids_without_a_vocabulary(gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str) -> None:
    tokens = np.arange(41, dtype=np.int64)
    tokens[30] = -5
    tokens.tofile(tmp_path / "a.bin")
    with TokenLoader(
        corpus=str(tmp_path), dtype="int64", batch_size=2, seq_len=4, shuffle=False, device="cuda", placement=placement
    ) as loader:
        message = batches_until_error(loader)[1]
    assert "a.bin: token 30 (corpus position 30) is -5, expected 0 <= id < 2**63; it is in step 3 of epoch 0" in message


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_loader_goes_on_behind_the_bad_block(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    """A state that points behind the bad id: the check forgets what it found in blocks that nobody will take."""
    corpus = counting(401, dtype="uint16")
    common: dict[str, Any] = {
        "corpus": corpus.pattern,
        "dtype": "uint16",
        "vocab_size": 150,
        "batch_size": 2,
        "seq_len": 4,
        "shuffle": False,
        "batches_per_run": 2,
    }
    with TokenLoader(**common, device="cuda", placement=placement) as loader:
        batches = iter(loader)
        assert len(take(batches, 18)) == 18
        with pytest.raises(TokenRangeError, match=r"token 150 .* in step 18 of epoch 0"):
            next(batches)
        state = loader.state_dict()
        assert state["rows"] == 36
        loader.load_state_dict({**state, "rows": 2 * 20})  # tokens 150 to 159 are behind it
        with pytest.raises(TokenRangeError, match=r"token 160 .* in steps 19, 20 of epoch 0"):
            next(iter(loader))
        loader.load_state_dict({**state, "rows": 0})
        assert len(take(loader_stream(loader), 18)) == 18


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bad_block", [6, 11])
def test_a_source_without_a_loader_says_it_one_block_later(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str, bad_block: int
) -> None:
    """Or where the next block would be, behind the last one of an epoch, whose kernel is waited for."""
    corpus = counting(101, dtype="uint16")
    config = LoaderConfig(
        corpus=corpus.pattern,
        dtype="uint16",
        vocab_size=8 * bad_block + 2,
        batch_size=2,
        seq_len=4,
        shuffle=False,
        device="cuda",
        placement=placement,
        batches_per_run=1,
    )
    source = BuiltSource(resolve_ranks(config), endless=False).source
    for number in range(bad_block + 1):
        source(BlockInfo(number, 0))
    if bad_block < 11:
        for stream in list(gpu.streams.values()):
            stream.run()
    for _ in range(2):
        with pytest.raises(TokenRangeError, match=rf"token {8 * bad_block + 2} .* in step {bad_block} of epoch 0"):
            source(BlockInfo(bad_block + 1, 0))
    source.close()
    source.rows.close()
