"""Placements on a GPU change cost, never content: the same batches as the oracle's and the CPU's, bit for bit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracle import epoch_batches, same
from profiles import examples
from readers_at_once import EagerReaders
from streams import all_same, loader_stream, oracle_stream, take

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.engine import block_source as source
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.placement.selection import GPU_PLACEMENTS
from dali_pipes.rows import make
from dali_pipes.rows.windows import WindowRows
from dali_pipes.runtime.ranks import resolve_ranks

OUTPUTS = ("input_ids", "labels", "row_ids")
PLACEMENTS = tuple(name for name in GPU_PLACEMENTS if name != "pool")  # which is for orders by blocks: test_pool.py


@hypothesis_settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_two_epochs_equal_the_oracle(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    folder = tmp_path_factory.mktemp("corpus")
    dtype = draw(st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"]))
    world_size = draw(st.integers(1, 3))
    order: dict[str, Any] = {
        "batch_size": draw(st.integers(1, 4)),
        "seq_len": draw(st.sampled_from([1, 2, 3, 4, 8, 15, 33])),
        "stride": draw(st.sampled_from([None, 1, 5, 40])),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "label_shift": draw(st.booleans()),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    rows = order["batch_size"] * world_size
    least = (rows - 1) * (order["stride"] or order["seq_len"]) + order["seq_len"] + 1
    sizes = [draw(st.integers(1, 40)), least + draw(st.integers(0, 120))]
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(0, min(np.iinfo(dtype).max, 2**40), sum(sizes))
    for number, part in enumerate(np.split(tokens, [sizes[0]])):
        part.astype(dtype).tofile(folder / f"{number}.bin")
    vocab_size = draw(st.sampled_from([None, int(tokens.max()) + 1]))
    cost: dict[str, Any] = {
        "batches_per_run": draw(st.integers(1, 5)),
        "prefetch_queue_depth": draw(st.integers(1, 4)),
        "num_threads": draw(st.integers(1, 3)),
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "static_buffers": draw(st.booleans()),
    }
    with gpu_stand_in.installed(draw(st.sampled_from(["late", "early", "random"])), seed=draw(st.integers(0, 99))):
        loader = TokenLoader(
            corpus=str(folder), dtype=dtype, vocab_size=vocab_size, device="cuda", outputs=OUTPUTS, **order, **cost
        )
        with loader:
            for epoch in range(2):
                expected = epoch_batches(tokens, epoch=epoch, **order)
                for number, (batch, wanted) in enumerate(itertools.zip_longest(loader, expected)):
                    assert batch is not None, (epoch, number)
                    assert wanted is not None, (epoch, number)
                    assert same(batch, wanted), (epoch, number)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("label_shift", [True, False])
def test_an_order_without_a_formula_is_planned(
    gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    label_shift: bool,
) -> None:
    """A row source need not have a formula, nor rows of pieces: the places of its rows are sent to the GPU."""
    monkeypatch.setattr(WindowRows, "formula", lambda rows, pass_number: None)
    corpus = counting(30, 71)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": 4, "drop_last": False, "rank": 1, "world_size": 2}
    order |= {"split": "validation", "validation_fraction": 0.7, "label_shift": label_shift}
    common = {"corpus": corpus.pattern, "dtype": "uint32", "outputs": OUTPUTS, "batches_per_run": 2, **order}
    with (
        TokenLoader(**common, device="cuda", placement=placement) as loader,
        TokenLoader(**common, device="cpu") as on_cpu,
    ):
        padded = 0
        for _ in range(3):
            for batch, expected in itertools.zip_longest(loader, on_cpu):
                assert same(batch, {name: values.numpy() for name, values in expected.items()})
                padded += int((expected["row_ids"] < 0).sum())
        assert padded


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("outputs", [OUTPUTS, ("input_ids", "labels", "position_ids", "row_ids")])
def test_an_order_by_blocks_is_that_of_the_cpu(
    gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    outputs: tuple[str, ...],
) -> None:
    """Not that of a keyed range, which kernels compute: its rows are planned on the host."""
    monkeypatch.setattr(make, "BLOCK_TOKENS", 24)
    common: dict[str, Any] = {"corpus": counting(130, 271).pattern, "dtype": "uint32", "outputs": outputs, "eos_id": 5}
    common |= {"batch_size": 3, "seq_len": 4, "rank": 1, "world_size": 2, "batches_per_run": 2}
    common |= {"order": "blocks", "shuffle_window": 3}
    with (
        TokenLoader(**common, device="cuda", placement=placement) as loader,
        TokenLoader(**common, device="cpu") as on_cpu,
        TokenLoader(**{**common, "order": "rows", "shuffle_window": 512}, device="cpu") as by_rows,
    ):
        for _ in range(2):
            for batch, expected in itertools.zip_longest(loader, on_cpu):
                assert same(batch, {name: values.numpy() for name, values in expected.items()})
        assert not same(take(loader, 1)[0], {name: values.numpy() for name, values in take(by_rows, 1)[0].items()})


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_state_goes_on_on_either_device_from_every_step(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(30, 71)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": 4, "drop_last": False, "rank": 1, "world_size": 2}
    common = {"corpus": corpus.pattern, "dtype": "uint32", "outputs": OUTPUTS, "placement": "auto", **order}
    there = {"device": "cuda", "placement": placement}
    steps = 2 * len(TokenLoader(**{**common, "device": "cpu"}))
    for count in range(steps):
        expected = oracle_stream(corpus.tokens, **order)
        state = None
        for settings in ({"device": "cpu"}, {**there, "batches_per_run": 2}, {"device": "cpu"}, there):
            with TokenLoader(**{**common, **settings}) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                assert all_same(take(loader_stream(loader), count), take(expected, count)), (count, settings)
                state = loader.state_dict()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_world_size_and_batch_size_go_on(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(400)
    common: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "seq_len": 4, "outputs": OUTPUTS}
    there: dict[str, Any] = {"device": "cuda", "placement": placement, "batches_per_run": 3}
    with TokenLoader(**common, **there, batch_size=3, rank=0, world_size=2) as loader:
        take(iter(loader), 5)
        state = loader.state_dict()
    for rank, world_size, batch_size in ((0, 1, 4), (2, 3, 5)):
        order: dict[str, Any] = {"batch_size": batch_size, "seq_len": 4, "rank": rank, "world_size": world_size}
        with TokenLoader(**{**common, **there, **order}) as loader:
            loader.load_state_dict(state)
            expected = epoch_batches(corpus.tokens, first_row=30, **order)
            assert all_same(loader, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_epoch_left_early_and_a_state_loaded_in_mid_block(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(400)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": 4}
    with TokenLoader(
        corpus=corpus.pattern, dtype="uint32", device="cuda", placement=placement, batches_per_run=4, **order
    ) as loader:
        take(loader, 6)
        state = loader.state_dict()
        expected = oracle_stream(corpus.tokens, epoch=1, **order)
        assert all_same(take(loader_stream(loader), 40), take(expected, 40))
        loader.load_state_dict(state)
        expected = oracle_stream(corpus.tokens, first_row=18, **order)
        assert all_same(take(loader_stream(loader), 40), take(expected, 40))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_split_loads_its_own_part_only(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str, split: str
) -> None:
    corpus = counting(1000, 1000)
    part = corpus.tokens[:1500] if split == "train" else corpus.tokens[1500:]
    with TokenLoader(
        corpus=corpus.pattern,
        dtype="uint32",
        batch_size=2,
        seq_len=8,
        split=split,
        validation_fraction=0.25,
        device="cuda",
        placement=placement,
    ) as loader:
        shuffle = split == "train"
        assert all_same(loader, epoch_batches(part, batch_size=2, seq_len=8, shuffle=shuffle))
        if placement == "device":
            assert loader.stats().memory.device_bytes < 4 * len(part) + 40_000


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_source_without_a_loader_ends_epochs(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    """What `build_pipeline` gives DALI: blocks by number in each epoch, StopIteration behind the last."""
    corpus = counting(101)
    config = resolve_ranks(
        LoaderConfig(
            corpus=corpus.pattern,
            dtype="uint32",
            batch_size=3,
            seq_len=4,
            device="cuda",
            placement=placement,
            batches_per_run=5,
            outputs=("labels", "row_ids"),
        )
    )
    blocks = BuiltSource(config, endless=False).source
    for epoch in range(2):
        got: dict[str, list[Any]] = {"labels": [], "row_ids": []}
        for number in range(2):
            for name, exported in zip(got, blocks(BlockInfo(number, epoch)), strict=True):
                got[name].append(late_gpu.asnumpy(exported._array)[0])
        with pytest.raises(StopIteration):
            blocks(BlockInfo(2, epoch))
        expected = list(epoch_batches(corpus.tokens, batch_size=3, seq_len=4, epoch=epoch))
        for name, parts in got.items():
            assert np.array_equal(np.concatenate(parts), np.concatenate([batch[name] for batch in expected]))
    blocks.close()
    blocks.rows.close()


def test_a_large_order_needs_no_table(late_gpu: gpu_stand_in.StandInGpu, tmp_path: Path) -> None:
    """Starts past 2**32 bytes and rows, `host`: the corpus is a sparse file."""
    tokens = 2**32 + 1000
    with (tmp_path / "zeros.bin").open("wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (2**31 + 3))
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    settings: dict[str, Any] = {"batch_size": 2, "seq_len": 2, "stride": 1, "shuffle": False, "batches_per_run": 4}
    with TokenLoader(corpus=str(tmp_path), **settings, device="cuda", placement="host") as loader:
        state = loader.state_dict()
        loader.load_state_dict({**state, "rows": 2**31 + 2})
        batch = next(iter(loader))
        assert batch["input_ids"].tolist() == [[0, 7], [7, 8]]
        assert batch["labels"].tolist() == [[7, 8], [8, 9]]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_next_blocks_are_on_their_way_while_one_is_used(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    depth: int,
) -> None:
    """Copies and kernels of the blocks behind it are queued before the first batch of a block is handed out."""
    monkeypatch.setattr(source, "ReaderThreads", EagerReaders)
    corpus = counting(600)
    with TokenLoader(
        corpus=corpus.pattern,
        dtype="uint32",
        batch_size=3,
        seq_len=4,
        batches_per_run=2,
        prefetch_queue_depth=depth,
        device="cuda",
        placement=placement,
    ) as loader:
        for number, _batch in enumerate(loader):
            assert len(late_gpu.kernels) == number // 2 + depth
