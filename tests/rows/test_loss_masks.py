"""A loss mask stays with its tokens: through cut, pack, pad and shift, on every device, before and after a resume."""

import contextlib
import gc
import itertools
import json
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, IGNORED, batch_outputs, problem
from streams import loader_stream, take
from test_batches import DEVICES, rows_of, windows_of

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import BackendError, ConfigError, StateError

X = IGNORED


def write(folder: Path, parts: Sequence[Sequence[int]], masks: Sequence[Sequence[int] | None]) -> str:
    """uint16 files of ids, with the mask of each beside it unless that is None; the folder's name."""
    folder.mkdir(exist_ok=True)
    for number, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        np.array(part, np.uint16).tofile(folder / f"s_{number}.bin")
        if mask is not None:
            (folder / f"s_{number}.bin.loss").write_bytes(bytes(mask))
    return str(folder)


def on(place: str, order: str = "late") -> AbstractContextManager[Any]:
    if place == "cpu":
        return contextlib.nullcontext()
    reason = gpu_stand_in.why_not()
    return pytest.skip(reason) if reason else gpu_stand_in.installed(order)


def served(corpus: str, place: str = "cpu", **changes: Any) -> list[dict[str, Any]]:
    """All batches of an epoch, as lists."""
    common: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "batch_size": 1, "shuffle": False, "drop_last": False}
    common |= {"outputs": ("labels", "loss_mask"), **DEVICES[place], **changes}
    with on(place), TokenLoader(corpus=corpus, **common) as loader:
        return [{n: v if isinstance(v, int) else v.tolist() for n, v in batch.items()} for batch in loader]


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_output_equals_the_oracle(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Files, with and without a mask, that begin and end anywhere in the documents."""
    draw = data.draw
    documents = draw(st.lists(st.lists(st.integers(1, 8), max_size=12), min_size=2, max_size=25))
    tokens = [token for document in documents for token in (*document, END)]
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=3)))
    parts = [tokens[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(tokens)])]
    values = st.sampled_from([0, 1])
    masks = [draw(st.none() | st.lists(values, min_size=len(p), max_size=len(p))) for p in parts]
    learn = [bit for part, mask in zip(parts, masks, strict=True) for bit in (mask or [1] * len(part))]
    corpus = write(tmp_path_factory.mktemp("corpus"), parts, masks)
    rows = draw(st.sampled_from(["stream", "pack", "pad"]))
    knows = rows != "stream" or draw(st.booleans())  # whether documents are told apart
    boundaries, mtp = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 3]))
    seq_len, world_size = draw(st.sampled_from([1, 4, 7, 16])), draw(st.integers(1, 2))
    mtp = min(mtp, seq_len - 1)
    place = draw(st.sampled_from(sorted(DEVICES)))
    held_out = draw(st.sampled_from([0.0, 0.0, 0.6]))
    common: dict[str, Any] = {
        "dtype": "uint16",
        "eos_id": END,
        "vocab_size": 10,
        "split": "validation" if held_out else "train",  # which ends with the corpus, as the oracle does
        "validation_fraction": held_out,
        "rows": rows,
        "window_documents": draw(st.integers(1, 30)),
        "batch_size": draw(st.integers(1, 3)),
        "seq_len": seq_len,
        "drop_last": False,
        "shuffle": draw(st.booleans()),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "batches_per_run": draw(st.integers(1, 3)),
        "static_buffers": draw(st.booleans()),
        "outputs": (*OUTPUT_NAMES,) if knows else ("input_ids", "labels", "loss_mask", "row_ids"),
        "mtp": mtp,
        "mask_boundaries": boundaries if knows else False,
        **DEVICES[place],
    }
    with on(place):
        try:
            loader = TokenLoader(corpus=corpus, **common)
        except ConfigError as error:
            assert any(text in str(error) for text in ("fewer than one step", "reads", "is empty"))  # noqa: PT017
            return
        with loader:
            assert (loader.corpus.loss_mask is None) == all(mask is None for mask in masks)
            for epoch in range(2):
                for step, batch in enumerate(loader):
                    row_ids = batch["row_ids"].tolist()
                    if rows == "stream":
                        real = [row for row, number in enumerate(row_ids) if number >= 0]
                        starts = [loader.locate(step, row, epoch).position for row in real]
                        ahead = max(1, mtp)
                        plan = windows_of(tokens, starts, seq_len, ahead, END if knows else None)
                        plan += [[]] * (len(row_ids) - len(real))
                        expected = batch_outputs(tokens, plan, seq_len, mtp=mtp, learn=learn)
                        if not boundaries:  # labels go on into the next document
                            plain = windows_of(tokens, starts, seq_len, ahead, None) + [[]] * (len(row_ids) - len(real))
                            crossing = batch_outputs(tokens, plain, seq_len, mtp=mtp, learn=learn)
                            expected |= {name: crossing[name] for name in ("labels", "loss_mask")}
                        elif not knows:
                            plain = windows_of(tokens, starts, seq_len, ahead, None) + [[]] * (len(row_ids) - len(real))
                            expected = batch_outputs(tokens, plain, seq_len, mtp=mtp, learn=learn)
                    else:
                        plan = rows_of(loader, epoch, row_ids)
                        options: dict[str, Any] = {"mtp": mtp, "mask_boundaries": boundaries}
                        expected = batch_outputs(tokens, plan, seq_len, learn=learn, **options)
                    assert problem(batch, expected) == "", (epoch, step)


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_plain_windows_written_out(tmp_path: Path, place: str) -> None:
    """No documents, no outputs but the labels: the mask alone makes the difference, over a file border."""
    corpus = write(tmp_path, [[1, 2, 3, 4, 5], [6, 7, 8, 9]], [[0, 0, 1, 0, 1], None])
    batches = served(corpus, place, seq_len=4, eos_id=None, outputs=("input_ids", "labels"))
    assert batches == [
        {"input_ids": [[1, 2, 3, 4]], "labels": [[X, 3, X, 5]]},
        {"input_ids": [[5, 6, 7, 8]], "labels": [[6, 7, 8, 9]]},
    ]
    plain = served(corpus, place, seq_len=4, eos_id=None, outputs=("labels",), loss_masks=[])
    assert [batch["labels"] for batch in plain] == [[[2, 3, 4, 5]], [[6, 7, 8, 9]]]


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_long_documents_with_a_mask(tmp_path: Path, place: str) -> None:
    """The documents 1-4, 5-6, 7-9 and 10, each learned from its second token on, in rows of 3.

    What a later piece begins with is no label of the one before.
    """
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    pair = write_pair(tmp_path / "pair", tokens, [4, 2, 3, 1], bytes([0, 1, 1, 1, 0, 1, 0, 1, 1, 0]))
    split = served(pair, place, rows="pad", seq_len=3, eos_id=None, dtype=None)
    assert [batch["labels"][0] for batch in split] == [[2, 3, X], [X, X, X], [6, X, X], [8, 9, X], [X, X, X]]
    assert [batch["loss_mask"][0] for batch in split] == [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    cut = served(pair, place, rows="pad", seq_len=3, eos_id=None, dtype=None, long_documents="truncate")
    assert [batch["labels"][0] for batch in cut] == [[2, 3, X], [6, X, X], [8, 9, X], [X, X, X]]
    dropped = served(pair, place, rows="pad", seq_len=3, eos_id=None, dtype=None, long_documents="drop")
    assert [batch["labels"][0] for batch in dropped] == [[6, X, X], [8, 9, X], [X, X, X]]
    packed = served(pair, place, rows="pack", seq_len=3, eos_id=None, dtype=None, outputs=("input_ids", "labels"))
    labels = {tuple(batch["input_ids"][0]): batch["labels"][0] for batch in packed}
    assert labels[1, 2, 3] == [2, 3, X]
    assert labels[7, 8, 9] == [8, 9, X]
    assert sorted(token for row in labels for token in row if token) == tokens
    one = served(pair, place, rows="pad", seq_len=1, eos_id=None, dtype=None)
    assert [batch["loss_mask"] for batch in one] == [[[0]]] * 10, "no piece has a label, and that is to be seen"


def write_pair(prefix: Path, tokens: Sequence[int], lengths: Sequence[int], mask: bytes) -> str:
    """A Megatron pair of int32 ids with a document a sequence, and its mask."""
    count, width = len(lengths), 4
    offsets = width * (np.cumsum(lengths) - lengths)
    index = b"MMIDIDX\0\0" + np.array([1], "<i8").tobytes() + bytes([4])
    index += np.array([count, count + 1], "<i8").tobytes() + np.array(lengths, "<i4").tobytes()
    index += offsets.astype("<i8").tobytes() + np.arange(count + 1, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, "<i4").tobytes())
    Path(f"{prefix}.bin.loss").write_bytes(mask)
    return f"{prefix}.bin"


SAMPLE, ANSWER = list(range(101, 126)), [0] * 20 + [1] * 5


@pytest.mark.parametrize("place", sorted(DEVICES))
@pytest.mark.parametrize("mtp", [0, 2])
def test_a_sample_whose_answer_is_at_its_end(tmp_path: Path, place: str, mtp: int) -> None:
    """25 tokens of which the last five are learned, in a row of 32 and cut off in one of 16."""
    pair = write_pair(tmp_path / "pair", SAMPLE, [25], bytes(ANSWER))
    common: dict[str, Any] = {"rows": "pad", "eos_id": None, "dtype": None, "mtp": mtp}
    (batch,) = served(pair, place, seq_len=32, **common)
    assert batch["loss_mask"] == [[0] * 19 + [1] * 5 + [0] * 8]
    columns = [[X] * 19 + SAMPLE[20:] + [X] * 8, [X] * 18 + SAMPLE[20:] + [X] * 9]
    wanted = columns[0] if not mtp else [list(both) for both in zip(*columns, strict=True)]
    assert batch["labels"] == [wanted]
    (batch,) = served(pair, place, seq_len=16, long_documents="truncate", **common)
    assert batch["loss_mask"] == [[0] * 16], "visible to who looks"
    assert np.array(batch["labels"]).max() == X


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_samples_with_and_without_a_mask_in_one_row(tmp_path: Path, place: str) -> None:
    """The mask of the third would slide over the second, if what is missing were left out."""
    middle = list(range(1, 8))
    parts = [[*SAMPLE[:-1], END], [*middle[:-1], END], [*SAMPLE[:-1], END]]
    corpus = write(tmp_path, parts, [ANSWER, None, ANSWER])
    (batch,) = served(corpus, place, rows="pack", seq_len=64, outputs=("input_ids", "loss_mask"))
    row, learned = batch["input_ids"][0], batch["loss_mask"][0]
    assert len(learned) == 64
    for part, wanted in ((parts[0], [0] * 19 + [1] * 5 + [0]), (parts[1], [1] * 6 + [0])):
        at = next(t for t in range(64) if row[t : t + len(part)] == part)
        assert learned[at : at + len(part)] == wanted


MODES: list[dict[str, Any]] = [{"rows": "stream"}, {"rows": "pack"}, {"rows": "pad"}, {"rows": "stream", "mtp": 2}]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_a_resume_at_every_step_on_every_device(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Each stop goes on somewhere else: with other placements, block sizes and threads."""
    draw = random.Random(2)
    tokens = [draw.choice([1, 2, 3, 4, END]) for _ in range(90)]
    first = [draw.randint(0, 1) for _ in range(33)]
    corpus = write(tmp_path, [tokens[:33], tokens[33:50], tokens[50:]], [first, None, [0, 1] * 20])
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "eos_id": END, "batch_size": 2, "seq_len": 6, **mode}
    common |= {"window_documents": 5, "drop_last": False, "outputs": ("input_ids", "labels", "row_ids")}
    per_run = (("cpu", 3), ("host", 2), ("device", 1), ("pinned", 2))
    places: list[dict[str, Any]] = [{**DEVICES[place], "batches_per_run": count} for place, count in per_run]
    with on("host"):
        with TokenLoader(**common, **places[0]) as loader:
            expected = take(loader_stream(loader), 24)
            assert any((batch["labels"] == X).any() for batch in expected)
        state = None
        for step, wanted in enumerate(expected):
            with TokenLoader(**common, **places[step % 3]) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                batch = next(iter(loader))
                for name, tensor in wanted.items():
                    assert batch[name].equal(tensor), (step, name)
                state = loader.state_dict()


def test_the_direct_queue_serves_the_same_as_dali(tmp_path: Path) -> None:
    corpus = write(tmp_path, [list(range(40))], [[0, 1] * 20])
    with_dali = served(corpus, seq_len=5, eos_id=None, engine="dali")
    assert served(corpus, seq_len=5, eos_id=None, engine="direct") == with_dali
    assert with_dali[0] == {"labels": [[1, X, 3, X, 5]], "loss_mask": [[1, 0, 1, 0, 1]]}


@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_a_bare_pipeline_serves_masked_labels(tmp_path: Path, rows: str) -> None:
    pytest.importorskip("nvidia.dali")
    tokens = [END if n % 4 == 3 else n % 4 + 1 for n in range(41)]
    corpus = write(tmp_path, [tokens], [[0, 1, 1, 0, 1] * 8 + [0]])
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "eos_id": END, "rows": rows, "device": "cpu"}
    common |= {"batch_size": 2, "seq_len": 4, "outputs": ("input_ids", "labels")}
    pipe = build_pipeline(LoaderConfig(**common, batches_per_run=1))
    pipe.build()
    with TokenLoader(**common) as loader:
        for batch in loader:
            for output, tensor in zip(pipe.run(), batch.values(), strict=True):
                assert output.as_array()[0].tolist() == tensor.tolist()


def test_unshifted_labels_have_no_place_for_a_mask(tmp_path: Path) -> None:
    corpus = write(tmp_path, [list(range(40))], [[0, 1] * 20])
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "batch_size": 1, "seq_len": 4, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"label_shift = False .* loss_masks = \[\]"):
        TokenLoader(**common, label_shift=False)
    with TokenLoader(**common, label_shift=False, loss_masks=[]) as loader:
        assert next(iter(loader))["labels"].ne(X).all()


def test_a_changed_mask_is_refused_by_name(tmp_path: Path) -> None:
    corpus = write(tmp_path, [list(range(40))] * 3, [[1] * 40, [0, 1] * 20, None])
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "batch_size": 1, "seq_len": 4, "device": "cpu"}
    with TokenLoader(**common) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    write(tmp_path, [list(range(40))] * 3, [[1] * 40, [1, 0] * 20, None])
    with TokenLoader(**common) as loader, pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert "loss mask of corpus file s_1.bin: " in str(caught.value)
    assert "s_0.bin" not in str(caught.value)
    with TokenLoader(**common, loss_masks=[]) as loader, pytest.raises(StateError, match="saved with, now without"):
        loader.load_state_dict(state)


def test_the_state_of_many_masks_is_small(tmp_path: Path) -> None:
    corpus = write(tmp_path, [[1, 2, END]] * 61, [[1, 0, 1]] * 61)
    settings: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "eos_id": END, "rows": "pack", "device": "cpu"}
    settings |= {"batch_size": 1, "seq_len": 4096, "seed": 2**64 - 1, "validation_fraction": 0.0123456789012345}
    with TokenLoader(**settings) as loader:
        state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    (tmp_path / "s_17.bin.loss").write_bytes(bytes(3))
    with TokenLoader(**settings) as loader, pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert "loss mask of corpus file s_12.bin or " in str(caught.value)


def test_a_mask_on_the_card_counts(tmp_path: Path) -> None:
    corpus = write(tmp_path, [[1, 2, 3, 4] * 20], [[0, 1] * 40])
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "batch_size": 1, "seq_len": 4, "device": "cuda"}
    common |= {"outputs": ("labels",), "batches_per_run": 1}
    with on("host") as gpu:
        with pytest.raises(BackendError, match=r"231 bytes.*max_device_bytes = 230"):  # 77 ids and masks
            TokenLoader(**common, placement="device", max_device_bytes=230)
        before = gpu.allocated
        with TokenLoader(**common, placement="device", max_device_bytes=231) as loader:
            assert 3 * 77 < loader.stats().memory.device_bytes == gpu.allocated - before
        gc.collect()
        gpu.stream(0).run()
        assert gpu.allocated == before
