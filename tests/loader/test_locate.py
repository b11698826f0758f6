"""`locate` names the file and offset of any row of any step, and reads nothing to know it."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from streams import take, write_counting

from dali_pipes import RowLocation, TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.errors import ConfigError

T = 5
Load = Callable[..., TokenLoader]


def first_token(place: RowLocation, dtype: str = "uint32") -> int:
    width = np.dtype(dtype).itemsize
    return int(np.fromfile(place.file, dtype, count=1, offset=place.offset * width)[0])


def check_epoch(loader: TokenLoader, batches: list[Any], epoch: int, first_step: int = 0) -> None:
    """Every row of some batches is where `locate` says; files hold consecutive integers."""
    for step, batch in enumerate(batches, first_step):
        for row, (row_id, inputs) in enumerate(zip(batch["row_ids"].tolist(), batch["input_ids"], strict=True)):
            place = loader.locate(step, row, epoch)
            assert first_token(place) == place.position == int(inputs[0])
            assert place.row_id == row_id
            assert place.source == 0


def test_hand_written(tmp_path: Path) -> None:
    """Files of 4 and 7 tokens, rows of 3: row 1 begins on the last token of the first file."""
    np.array([10, 11, 12, 13], np.uint16).tofile(tmp_path / "a.bin")
    np.array([14, 15, 16, 17, 18, 19, 20], np.uint16).tofile(tmp_path / "b.bin")
    with TokenLoader(
        corpus=str(tmp_path), batch_size=2, seq_len=3, shuffle=False, device="cpu", drop_last=False
    ) as loader:
        places = [loader.locate(step, row) for step, row in ((0, 0), (0, 1), (1, 0))]
        a, b = tmp_path / "a.bin", tmp_path / "b.bin"
        assert places == [(a, 0, 0, 0, 0, None), (a, 3, 0, 3, 1, None), (b, 2, 0, 6, 2, None)]
        with pytest.raises(ConfigError, match="row 1"):
            loader.locate(1, 1)
        with pytest.raises(ConfigError, match="step 2"):
            loader.locate(2, 0)


@settings(max_examples=examples(8))
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) >= 20),
    stride=st.none() | st.integers(1, 9),
    batch_size=st.integers(1, 5),
    ranks=st.integers(1, 3).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_past_current_and_future_steps(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    stride: int | None,
    batch_size: int,
    ranks: tuple[int, int],
    drop_last: bool,
    shuffle: bool,
) -> None:
    pattern, _ = write_counting(tmp_path_factory.mktemp("corpus"), sizes)
    try:
        loader = TokenLoader(
            corpus=pattern,
            dtype="uint32",
            device="cpu",
            batch_size=batch_size,
            seq_len=T,
            stride=stride,
            rank=ranks[0],
            world_size=ranks[1],
            drop_last=drop_last,
            shuffle=shuffle,
            outputs=("input_ids", "row_ids"),
        )
    except ConfigError:  # fewer rows than a step
        return
    with loader:
        shape = [(step, row) for step in range(len(loader)) for row in range(batch_size)]
        foretold = {(*place, epoch): _try_locate(loader, *place, epoch) for epoch in (0, 1) for place in shape}
        for epoch in range(2):
            for step, batch in enumerate(loader):
                for row, (row_id, inputs) in enumerate(zip(batch["row_ids"].tolist(), batch["input_ids"], strict=True)):
                    place = _try_locate(loader, step, row, epoch)
                    assert place == foretold[step, row, epoch]
                    if row_id < 0:
                        assert isinstance(place, str)
                        assert "padding" in place
                    else:
                        assert isinstance(place, RowLocation)
                        assert first_token(place) == place.position == int(inputs[0])
                        assert place.row_id == row_id
        assert {key: _try_locate(loader, *key) for key in foretold} == foretold


def _try_locate(loader: TokenLoader, step: int, row: int, epoch: int) -> RowLocation | str:
    try:
        return loader.locate(step, row, epoch)
    except ConfigError as error:
        return str(error)


def test_step_and_epoch_of_the_next_batch(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """`locate(loader.step, row, loader.epoch)` before a batch is that batch, over epoch borders, breaks and resumes.

    Behind it, to the end of its epoch and after that, the step alone says it.
    """
    corpus = counting(60, 41)
    loader = load(corpus, batch_size=3, seq_len=T, batches_per_run=2)
    batches = iter(loader)
    state: dict[str, Any] = {}
    for number in range(20):
        step, epoch = loader.step, loader.epoch
        places = [loader.locate(step, row, epoch) for row in range(3)]
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        assert [place.position for place in places] == batch["input_ids"][:, 0].tolist()
        assert [loader.locate(step, row) for row in range(3)] == places
        check_epoch(loader, [batch], epoch, step)
        if number == 9:
            state = loader.state_dict()
        if number == 15:
            loader.load_state_dict(state)
            batches = iter(loader)


def test_after_a_resume_with_another_step_size(counting: Callable[..., Any], load: Load) -> None:
    """Steps are then counted from the row where the run went on; earlier ones of that epoch cannot be told."""
    corpus = counting(300, 201)
    first = load(corpus, batch_size=7, seq_len=T)
    take(first, 4)
    loader = load(corpus, batch_size=10, seq_len=T)
    loader.load_state_dict(first.state_dict())  # at row 28
    start = loader.step
    places = [loader.locate(start + number, 4) for number in range(7)]
    rest = list(loader)
    assert len(rest) == 7
    assert [place.row_id for place in places] == [28 + 10 * number + 4 for number in range(7)]
    check_epoch(loader, rest, 0, start)
    for step in (start - 1, start + 7):
        with pytest.raises(ConfigError, match=f"expected step {start} to {start + 6}"):
            loader.locate(step, 0, 0)
    check_epoch(loader, list(loader), 1)


def test_it_reads_no_file(counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one call that opens or reads a file, also with many files and far away, nor a thread."""
    corpus = counting(*[13] * 40)
    loader = load(corpus, batch_size=3, seq_len=T)
    calls: list[str] = []
    for name in ("open", "pread", "preadv", "read", "stat", "fstat", "lseek", "scandir", "listdir"):
        monkeypatch.setattr(os, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(Corpus, "read_rows", lambda *_: calls.append("read_rows"))
    places = [
        loader.locate(step, row, epoch)
        for step, row, epoch in itertools.product((0, 17, len(loader) - 1), range(3), (None, 0, 1, 10**6, 10**15))
    ]
    monkeypatch.undo()
    assert calls == []
    assert loader.stats().block_times.blocks == 0
    assert loader.state_dict()["rows"] == 0
    assert all(first_token(place) == place.position for place in places)
    loader.close()
    assert loader.locate(0, 0) == places[0]


@pytest.mark.parametrize(
    ("step", "row", "epoch", "message"),
    [
        (-1, 0, 0, "step -1"),
        (6, 0, 0, "expected step 0 to 5"),
        (10**20, 0, 0, "expected step 0 to 5"),
        (0, -1, 0, "row -1"),
        (0, 3, 0, "row 3"),
        (0, 0, -1, "epoch -1"),
    ],
)
def test_places_that_do_not_exist(
    counting: Callable[..., Any], load: Load, step: int, row: int, epoch: int, message: str
) -> None:
    loader = load(counting(101), batch_size=3, seq_len=T)
    with pytest.raises(ConfigError, match=message):
        loader.locate(step, row, epoch)
