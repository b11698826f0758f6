"""An epoch of 3,000,000,000 rows is planned, read, saved and resumed without an array of that size anywhere."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import take

from dali_pipes import TokenLoader
from dali_pipes.rows.windows import WindowRows, Windows
from dali_pipes.schedule import Blocks, Position, Schedule
from dali_pipes.schedule.plans import plan_steps

T = 8
ROWS = 3_000_000_000


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """Two files of uint8 zeros with a hole in place of data: with stride 1 their tokens make 3e9 rows."""
    for name, size in (("a.bin", 2**31 + 10), ("b.bin", ROWS + T - 2**31 - 10)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    return tmp_path


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails the test if it takes more than 16 MiB of Python and NumPy memory at any time: 0.006 bytes a row."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "corpus": str(folder / "*.bin"),
        "dtype": "uint8",
        "seq_len": T,
        "stride": 1,
        "device": "cpu",
    }
    outputs = ("input_ids", "labels", "row_ids")
    return {**common, "batch_size": 100, "batches_per_run": 4, "outputs": outputs, **more}


def write_marker(folder: Path, position: int, values: list[int]) -> None:
    """Token values at a position of the two files seen as one."""
    for offset, value in enumerate(values):
        name, at = (
            ("a.bin", position + offset)
            if position + offset < 2**31 + 10
            else ("b.bin", position + offset - 2**31 - 10)
        )
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(bytes([value]))


@pytest.mark.parametrize("row", [2**31 - 4, 2**31 + 7, 2**31 + 10, ROWS - 100])
def test_rows_past_32_bits_in_file_order(sparse: Path, little_memory: None, row: int) -> None:
    """Also the row that begins in one file and ends in the other."""
    write_marker(sparse, row, list(range(1, T + 2)))
    with TokenLoader(**settings(sparse, shuffle=False)) as loader:
        assert len(loader) == ROWS // 100
        assert loader.corpus.num_tokens == ROWS + T
        state = {**loader.state_dict(), "rows": row}
        loader.load_state_dict(json.loads(json.dumps(state)))
        batch = next(iter(loader))
        assert batch["row_ids"].tolist() == list(range(row, row + 100))
        assert batch["input_ids"][0].tolist() == list(range(1, T + 1))
        assert batch["labels"][0].tolist() == list(range(2, T + 2))
        assert batch["input_ids"][3].tolist() == [4, 5, 6, 7, 8, 9, 0, 0]
        assert not batch["input_ids"][9:].any()


def test_rows_past_32_bits_in_a_shuffled_epoch(sparse: Path, little_memory: None) -> None:
    """A marker is put where `locate` says that rows far into epoch 5 come from, and found when the run gets there."""
    with TokenLoader(**settings(sparse)) as loader:
        steps = [0, 12_345_678, 21_474_837, 29_999_998]
        rows = [max(range(0, 100, 7), key=lambda row: loader.locate(step, row, 5).position) for step in steps]
        places = [loader.locate(step, row, 5) for step, row in zip(steps, rows, strict=True)]
        assert min(place.position for place in places) > 2**31
    for value, place in enumerate(places, 1):
        write_marker(sparse, place.position, [value] * (T + 1))
    with TokenLoader(**settings(sparse)) as loader:
        state = loader.state_dict()
        for value, (step, row, place) in enumerate(zip(steps, rows, places, strict=True), 1):
            loader.load_state_dict({**state, "epoch": 5, "rows": 100 * step})
            assert loader.locate(step, row) == place
            batch = next(iter(loader))
            assert batch["row_ids"].tolist() == list(range(100 * step, 100 * step + 100))
            assert batch["input_ids"][row].tolist() == [value] * T
            assert loader.state_dict()["rows"] == 100 * step + 100


def test_the_end_of_the_epoch_and_the_next(sparse: Path, little_memory: None) -> None:
    with TokenLoader(**settings(sparse, batch_size=64, world_size=3, rank=2, drop_last=False)) as loader:
        steps = -(-ROWS // 192)
        assert len(loader) == steps
        loader.load_state_dict({**loader.state_dict(), "rows": (steps - 3) * 192})
        batches = take(loader, 10)  # list() would make room for len(loader) of them
        assert [len(batch["row_ids"]) for batch in batches] == [64, 64, -(-(ROWS - (steps - 1) * 192) // 3)]
        assert loader.state_dict()["epoch"] == 1
        assert take(loader, 1)[0]["row_ids"].tolist() == list(range(2, 192, 3))


@pytest.mark.parametrize("rows", [3_000_000_000, 10**12, 2**62])
def test_planning_costs_the_same_anywhere(rows: int, little_memory: None) -> None:
    """Rows of virtual samples, no data behind them: the first, a middle and the last blocks, in several epochs."""
    windows = Windows(first=0, count=rows, seq_len=1, stride=1, num_tokens=rows + 1)
    schedule = Schedule(WindowRows(windows), batch_size=512, world_size=24, rank=23)
    steps = rows // (512 * 24)
    assert schedule.steps() == steps
    for position in (Position(0, 0), Position(7, (steps // 2) * 512 * 24), Position(10**6, 12345)):
        blocks = Blocks(schedule, 4, position)
        for number in (0, 1, steps // 9, 10 * steps):
            block = blocks.steps(number)
            assert block is not None
            plan = plan_steps(schedule, block)
            assert len(plan.row_ids) == 512 * block.num_steps
            assert plan.row_ids.dtype == plan.starts.dtype == np.int64
            first = block.base + block.first_step * 512 * 24 + 23
            assert plan.row_ids[0] == first
            assert plan.row_ids[-1] == first + 24 * (512 * block.num_steps - 1)
            assert 0 <= plan.starts.min() <= plan.starts.max() < rows
            assert len(np.unique(plan.starts)) == len(plan.starts)


@pytest.mark.slow
def test_a_million_rows_of_the_epoch_are_all_different(sparse: Path) -> None:
    """Consecutive parts of a shuffled epoch of 3e9 rows share no window."""
    windows = Windows(first=0, count=ROWS, seq_len=T, stride=1, num_tokens=ROWS + T)
    schedule = Schedule(WindowRows(windows), batch_size=10_000)
    blocks = Blocks(schedule, 10, Position(3, 2_147_000_000))
    starts = np.concatenate(
        [plan_steps(schedule, steps).starts for number in range(10) if (steps := blocks.steps(number))]
    )
    assert len(np.unique(starts)) == len(starts) == 1_000_000
