"""The error for a bad id names every step of the epoch that reads it, so that all can be left out at once."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import window_of_row
from profiles import examples

from dali_pipes import TokenLoader
from dali_pipes.errors import CorpusReadError, TokenRangeError
from dali_pipes.rows.windows import WindowCuts, WindowRows, Windows
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import steps_reading

T = 4
BAD = 60_000


@settings(max_examples=examples(45))
@given(data=st.data())
def test_the_steps_that_read_a_token_are_those_a_slow_search_finds(data: Any) -> None:
    draw = data.draw
    first, stride = draw(st.integers(0, 5)), draw(st.integers(1, 2 * T))
    width = draw(st.integers(T, T + 4))
    count = draw(st.integers(1, 40))
    end = first + (count - 1) * stride + width
    shuffle, drop_last = draw(st.booleans()), draw(st.booleans())
    ranks, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if drop_last and ranks * batch_size > count:
        batch_size, ranks = 1, 1
    windows = Windows(first, count, T, stride, end - first)
    cuts = WindowCuts(None, lookahead=width - T, limit=end, mask_boundaries=False)  # rows that read `width` tokens
    source = WindowRows(windows, shuffle=shuffle, seed=7, cuts=cuts)
    schedule = Schedule(source, batch_size, 0, ranks, drop_last=drop_last)
    base, epoch, step_rows = draw(st.integers(0, count - 1)), draw(st.integers(0, 2)), ranks * batch_size
    position = draw(st.integers(first, end - 1))
    expected = set()
    for row in range(base if base % step_rows else 0, count):
        begin = first + stride * window_of_row(row, count, 7, epoch, shuffle)
        step = -(-base // step_rows) + (row - base) // step_rows
        is_partial = count - base - (row - base) // step_rows * step_rows < step_rows
        if begin <= position < begin + width and not (drop_last and is_partial):
            expected.add(step)
    assert steps_reading(schedule, StepRange(epoch, base, 0, 1), position) == sorted(expected)


def leave_out(path: Path, **more: Any) -> list[list[int]]:
    """The lists of steps that errors name, one after another, leaving out each time what the last one named."""
    named: list[list[int]] = []
    options: dict[str, Any] = {"dtype": "uint16", "vocab_size": BAD, "seq_len": T, "quiet": True, "device": "cpu"}
    while True:
        skip = [[step, step + 1] for steps in named for step in steps]
        with TokenLoader(corpus=str(path), **options, **more, skip_steps=skip) as loader:
            try:
                for _ in loader:
                    pass
            except TokenRangeError as error:
                (found,) = re.findall(r"it is in steps? ([\d, ]+) of epoch 0", str(error))
                named.append([int(number) for number in found.split(",")])
            else:
                return named


@pytest.mark.parametrize(
    ("more", "reads"),
    [
        ({}, 2),
        ({"label_shift": False}, 1),
        ({"shuffle": False}, 2),
        ({"stride": 2}, 3),
        ({"stride": T + 1}, 1),
        ({"mtp": 2, "mask_boundaries": False}, 2),
        ({"mtp": 3, "stride": 2, "mask_boundaries": False}, 4),
        ({"rows": "pack", "eos_id": 9}, 1),
        ({"rows": "pad", "eos_id": 9}, 1),
    ],
)
def test_an_epoch_without_the_steps_named_has_no_error(tmp_path: Path, more: dict[str, Any], reads: int) -> None:
    tokens = np.tile(np.arange(10, dtype=np.uint16), 10)
    tokens[40] = BAD  # where a row begins with every stride here
    tokens.tofile(tmp_path / "a.bin")
    (named,) = leave_out(tmp_path / "a.bin", batch_size=1, **more)
    assert len(named) == reads


def test_of_very_many_rows_one_is_named(tmp_path: Path) -> None:
    tokens = np.zeros(200, np.uint16)
    tokens[100] = BAD
    tokens.tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "a.bin"), "vocab_size": 9, "device": "cpu", "quiet": True}
    with (
        TokenLoader(**settings, batch_size=1, seq_len=64, stride=1, shuffle=False) as loader,
        pytest.raises(TokenRangeError, match="it is in step 36 of epoch 0 and in others"),
    ):
        list(loader)


@pytest.mark.parametrize("batches_per_run", [None, 1, 3])
def test_a_run_goes_on_without_the_steps_named(tmp_path: Path, batches_per_run: int | None) -> None:
    """From the state behind the error; without that, the next `for` has the same error, as often as one tries."""
    tokens = np.arange(400, dtype=np.uint16)
    tokens[200] = BAD
    tokens.tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "a.bin"), "batch_size": 2, "seq_len": T, "device": "cpu"}
    settings |= {"batches_per_run": batches_per_run, "quiet": True}
    found: list[Any] = []

    def serve(loader: TokenLoader) -> None:
        for batch in loader:
            found.append(batch["input_ids"].tolist())

    with TokenLoader(**settings) as loader:
        serve(loader)
    expected, found = found, []
    messages = set()
    with TokenLoader(**settings, vocab_size=BAD) as loader:
        for _ in range(3):
            with pytest.raises(TokenRangeError) as error:
                serve(loader)
            messages.add(str(error.value))
        (named,) = re.findall(r"it is in steps ([\d, ]+) of epoch 0", messages.pop())
        assert not messages
        steps = [int(step) for step in named.split(",")]
        assert found == expected[: loader.step]
        assert (loader.step == min(steps)) if batches_per_run == 1 else (loader.step <= min(steps))
        state = loader.state_dict()
    skip = [[step, step + 1] for step in steps]
    with TokenLoader(**settings, vocab_size=BAD, skip_steps=skip) as loader:
        loader.load_state_dict(state)
        serve(loader)
    assert found == [batch for step, batch in enumerate(expected) if step not in steps]


def test_with_blocks_of_a_batch_any_error_is_at_the_step_of_the_loader(tmp_path: Path) -> None:
    np.arange(4001, dtype=np.uint16).tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "a.bin"), "batch_size": 2, "seq_len": T, "device": "cpu"}
    with TokenLoader(**settings, batches_per_run=1, shuffle=False, quiet=True) as loader:
        batches = iter(loader)
        next(batches)
        os.truncate(tmp_path / "a.bin", 2 * 2001)  # step 250 of 8 tokens reads the first of those that are gone
        with pytest.raises(CorpusReadError):
            list(batches)
        assert loader.step == 250
