"""Ids keep their value through every stored width, and an id out of range is named before it does harm."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import epoch_batches
from streams import all_same

from dali_pipes import TokenLoader
from dali_pipes.errors import TokenRangeError

T = 4
OUTPUTS = ("input_ids", "labels", "row_ids")

EXTREMES = {
    "uint8": [0, 1, 127, 128, 255],
    "uint16": [0, 32767, 32768, 65535],
    "uint32": [0, 65535, 65536, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1],
    "int8": [0, 127],
    "int16": [0, 32767],
    "int32": [0, 65536, 2**31 - 1],
    "int64": [0, 2**31 + 5, 2**32, 2**53 + 1, 2**63 - 1],
    ">u2": [0, 1, 256, 32768, 65535],
    ">u4": [0, 1, 2**31, 2**32 - 1],
}


@pytest.mark.parametrize("dtype", EXTREMES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_extremes_keep_their_value_and_sign(
    tmp_path: Path, engine: str, dtype: str, world_size: int, drop_last: bool
) -> None:
    """With padding rows in play too, for which labels pass through a signed type."""
    values = EXTREMES[dtype]
    tokens = np.resize(np.array(values, np.int64), 9 * T + 1)
    tokens.astype(dtype).tofile(tmp_path / "a.bin")
    for rank in range(world_size):
        order: dict[str, Any] = {
            "batch_size": 2,
            "seq_len": T,
            "rank": rank,
            "world_size": world_size,
            "drop_last": drop_last,
        }
        with TokenLoader(
            corpus=str(tmp_path / "a.bin"), dtype=dtype, format="flat", device="cpu", outputs=OUTPUTS, **order
        ) as loader:
            for epoch in range(2):
                batches = list(loader)
                assert all_same(batches, epoch_batches(tokens, epoch=epoch, **order))
                assert all(tensor.dtype == torch.int64 for batch in batches for tensor in batch.values())
                assert all(int(batch["input_ids"].min()) >= 0 for batch in batches)
                labels = {int(label) for batch in batches for label in batch["labels"].flatten()}
                assert labels - {-100} <= set(values)
            if rank == 0:
                assert max(values) in labels


def write(
    folder: Path, sizes: tuple[int, ...], bad: dict[int, int], dtype: str
) -> tuple[np.ndarray[Any, Any], list[Path]]:
    tokens = np.arange(sum(sizes), dtype=np.int64) % 100
    for position, value in bad.items():
        tokens[position] = value
    files, start = [], 0
    for number, size in enumerate(sizes):
        files.append(folder / f"part_{number}.bin")
        tokens[start : start + size].astype(dtype).tofile(files[-1])
        start += size
    return tokens, files


def hand_out(loader: TokenLoader) -> tuple[list[Any], str]:
    """Batches up to the error, and its message; it comes once, and the iterator is over then."""
    batches: list[Any] = []
    iterator = iter(loader)
    with pytest.raises(TokenRangeError) as caught:
        batches.extend(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    return batches, str(caught.value)


@pytest.mark.parametrize(("per_run", "depth", "shuffle"), [(1, 1, True), (1, 6, False), (3, 2, True), (None, 2, True)])
@pytest.mark.parametrize(
    ("dtype", "value", "vocab_size"),
    [
        ("uint16", 60000, 50304),
        ("uint16", 50304, 50304),
        ("uint16", 65535, 65535),
        ("uint32", 2**31 + 7, 119_546),
        ("int32", 2**31 - 1, 100),
        ("int64", 2**40, 2**32),
        ("int32", -1, None),
        ("int32", -(2**31), 50304),
        ("int64", -5, None),
        ("int16", -1, None),
        ("int8", -128, 200),
    ],
)
def test_an_id_out_of_range_is_named_in_time(
    tmp_path: Path,
    engine: str,
    dtype: str,
    value: int,
    vocab_size: int | None,
    depth: int,
    per_run: int | None,
    shuffle: bool,
) -> None:
    """Good batches first, then one error with file, position and id; no bad batch ever."""
    position = 70
    tokens, files = write(tmp_path, (45, 60, 56), {position: value}, dtype)  # 40 rows, 20 batches
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "shuffle": shuffle, "seed": 3}
    common: dict[str, Any] = {
        "corpus": str(tmp_path),
        "dtype": dtype,
        "vocab_size": vocab_size,
        "device": "cpu",
        "outputs": OUTPUTS,
    }
    expected = list(epoch_batches(tokens, **order))
    first_bad = next(n for n, batch in enumerate(expected) if value in batch["labels"] or value in batch["input_ids"])
    assert first_bad > 3
    with TokenLoader(**common, **order, batches_per_run=per_run, prefetch_queue_depth=depth) as loader:
        batches, message = hand_out(loader)
        state = loader.state_dict()
    assert all_same(batches, expected[: len(batches)])
    # A block is checked as a whole: what stands before the bad id in its own block is served after a resume.
    block = per_run or len(expected)
    assert len(batches) == first_bad // block * block
    assert state["rows"] == 2 * len(batches)
    assert str(files[1]) in message
    assert re.search(rf"\btoken {position - 45}\b", message)
    assert re.search(rf"\bposition {position}\b", message)
    assert re.search(rf"is {value}\b", message)
    assert vocab_size is None or f"{vocab_size}" in message
    assert "dtype" in message
    with TokenLoader(**common, **order, batches_per_run=1) as loader:
        loader.load_state_dict(state)
        rest, again = hand_out(loader)
        assert len(batches) + len(rest) == first_bad
        assert again == message


@pytest.mark.parametrize("bad_column", ["first input", "last label"])
def test_inputs_and_labels_are_both_checked(tmp_path: Path, bad_column: str) -> None:
    """The first token of row 2 is the last label of row 1, whose batch must not be handed out either."""
    tokens, _ = write(tmp_path, (41,), {8: 500}, "uint16")
    common: dict[str, Any] = {
        "corpus": str(tmp_path),
        "vocab_size": 500,
        "device": "cpu",
        "batches_per_run": 1,
        "batch_size": 1,
    }
    common |= {"shuffle": False, "seq_len": T, "outputs": ["input_ids"] if bad_column == "first input" else ["labels"]}
    with TokenLoader(**common) as loader:
        assert len(hand_out(loader)[0]) == 1
    with TokenLoader(**common, label_shift=False) as loader:  # then row 1 does not read that token
        assert len(hand_out(loader)[0]) == 2
    assert tokens[8] == 500


def test_ids_no_row_reads_are_not_the_loaders_affair(tmp_path: Path) -> None:
    """A bad id in the other split, or behind the last row, stops nobody who does not read it."""
    tokens, _ = write(tmp_path, (103,), {80: 60000, 102: 60001}, "uint16")
    common: dict[str, Any] = {
        "corpus": str(tmp_path),
        "vocab_size": 50304,
        "device": "cpu",
        "batch_size": 2,
        "seq_len": T,
    }
    with TokenLoader(**common, validation_fraction=0.25) as loader:
        expected = epoch_batches(tokens[: 103 - 25], batch_size=2, seq_len=T)
        assert all_same(loader, expected)
    with TokenLoader(**common, validation_fraction=0.25, split="validation") as loader:
        assert "is 60000" in hand_out(loader)[1]
    tokens, _ = write(tmp_path, (103,), {102: 60001}, "uint16")
    with TokenLoader(**common) as loader:
        assert all_same(loader, epoch_batches(tokens, batch_size=2, seq_len=T))


def test_the_largest_id_of_a_vocabulary_is_good(tmp_path: Path) -> None:
    for vocab_size, dtype in (
        (50304, "uint16"),
        (65536, "uint16"),
        (65537, "uint16"),
        (256, "uint8"),
        (2**32, "uint32"),
    ):
        top = min(vocab_size - 1, np.iinfo(dtype).max)
        tokens, _ = write(tmp_path, (41,), {n: int(top) for n in range(0, 41, 3)}, dtype)
        with TokenLoader(
            corpus=str(tmp_path), dtype=dtype, vocab_size=vocab_size, device="cpu", batch_size=2, seq_len=T
        ) as loader:
            assert all_same(loader, epoch_batches(tokens, batch_size=2, seq_len=T))


def test_uint64_files(tmp_path: Path) -> None:
    """The one type that may not fit int64: what fits is served, what does not is named."""
    tokens = np.arange(41, dtype=np.uint64) + 2**62
    np.save(tmp_path / "a.npy", tokens)
    common: dict[str, Any] = {
        "corpus": str(tmp_path / "a.npy"),
        "device": "cpu",
        "batch_size": 2,
        "seq_len": T,
        "shuffle": False,
    }
    with TokenLoader(**common, batches_per_run=1) as loader:
        assert all_same(loader, epoch_batches(tokens.astype(np.int64), batch_size=2, seq_len=T, shuffle=False))
    tokens[20] = 2**63 + 3
    np.save(tmp_path / "a.npy", tokens)
    with TokenLoader(**common, batches_per_run=1) as loader:
        batches, message = hand_out(loader)
    assert len(batches) == 2  # token 20 is the last label of row 4
    assert f"token 20 is {2**63 + 3}" in message


def test_a_loader_goes_on_behind_a_bad_block(tmp_path: Path) -> None:
    """Who wants to skip the bad rows can say so by the state, in the same loader."""
    tokens, _ = write(tmp_path, (161,), {70: 999}, "uint16")
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "shuffle": False}
    common: dict[str, Any] = {
        "corpus": str(tmp_path / "part_0.bin"),
        "vocab_size": 100,
        "device": "cpu",
        "batches_per_run": 1,
    }
    with TokenLoader(**common, **order) as loader:
        batches, _ = hand_out(loader)
        assert len(batches) == 8
        state = loader.state_dict()
        loader.load_state_dict({**state, "rows": state["rows"] + 2})
        assert all_same(loader, epoch_batches(tokens, first_row=18, **order))
        loader.load_state_dict(state)
        assert hand_out(loader)[0] == []
        assert loader.state_dict() == state
