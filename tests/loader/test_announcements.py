"""The start line, in its exact form and under any names and numbers, and the one warning when the trainer waits."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.loader import announcements as announce
from dali_pipes.loader import token_loader as loader
from dali_pipes.monitoring.stats import BlockTimes, LoaderStats
from dali_pipes.rows import document_rows
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.runtime.messages import say_once


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    say_once.cache_clear()


def load(corpus: Any, **settings: Any) -> TokenLoader:
    common: dict[str, Any] = {"dtype": "uint32", "batch_size": 4, "seq_len": 8, "device": "cpu"}
    return TokenLoader(corpus=corpus.pattern, **{**common, **settings})


@pytest.mark.parametrize(
    ("settings", "epoch"),
    [
        ({}, "epoch: 50 rows, 12 steps of 1 rank x (4, 8); order philox24-v1"),
        ({"drop_last": False}, "epoch: 50 rows, 13 steps of 1 rank x (4, 8); order philox24-v1"),
        ({"rank": 0, "world_size": 3}, "epoch: 50 rows, 4 steps of 3 ranks x (4, 8); order philox24-v1"),
        (
            {"rank": 0, "world_size": 3, "context_parallel": (0, 2)},
            "epoch: 50 rows, 4 steps of 3 ranks x (4, 8 / 2); order philox24-v1",
        ),
        (
            {"batch_size": 1, "seq_len": 400},
            "epoch: 1 row, 1 step of 1 rank x (1, 400); order philox24-v1",
        ),
        ({"shuffle": False}, "epoch: 50 rows, 12 steps of 1 rank x (4, 8); order sequential-v1"),
        (
            {"split": "validation", "validation_fraction": 0.5},
            "epoch of validation: 24 rows, 6 steps of 1 rank x (4, 8); order sequential-v1",
        ),
    ],
)
def test_the_start_line(
    counting: Callable[..., Any], capfd: pytest.CaptureFixture[str], settings: dict[str, Any], epoch: str
) -> None:
    with load(counting(150, 120, 131), **settings) as ours:
        captured = capfd.readouterr()
        first, *rest = ours.summary().splitlines()
        assert captured == ("", f"dali_pipes: {ours.summary()}\n")
        assert re.fullmatch(r".*data/shard_000\.bin and 2 more files: flat, 401 tokens, fingerprint [0-9a-f]{8}", first)
        assert first.endswith(ours.corpus.fingerprint[:8])
        assert rest == [f"  {epoch}", '  cpu, placement host: device = "cpu"']


@pytest.mark.parametrize("masked", [1, 2, 3])
def test_loss_masks_are_counted(counting: Callable[..., Any], masked: int) -> None:
    """Also where all files have one: a run that should have masks and does not is told from its first lines."""
    corpus = counting(150, 120, 131)
    for path in sorted(Path(corpus.pattern).parent.glob("*.bin"))[:masked]:
        path.with_name(f"{path.name}.loss").write_bytes(bytes([1] * (path.stat().st_size // 4)))
    with load(corpus, quiet=True) as ours:
        expected = f"50 rows, 12 steps of 1 rank x (4, 8); loss masks of {masked} of 3 files; order philox24-v1"
        assert ours.summary().splitlines()[1] == f"  epoch: {expected}"


@pytest.mark.parametrize(
    ("settings", "group", "speaks"),
    [
        ({}, None, True),
        ({"rank": 1, "world_size": 2}, None, False),
        ({"rank": 0, "world_size": 2, "context_parallel": (0, 2)}, None, True),
        ({"rank": 0, "world_size": 2, "context_parallel": (1, 2)}, None, False),
        ({"rank": 0, "world_size": 2}, (0, 4), True),
        ({"rank": 0, "world_size": 2}, (1, 4), False),  # tensor parallel: two processes have the same data rank
    ],
)
def test_one_process_speaks(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], group: tuple[int, int] | None, speaks: bool
) -> None:
    monkeypatch.setattr(announce, "process_group", lambda: group)
    assert announce.speaks_for_all(LoaderConfig(corpus="x", batch_size=1, seq_len=4, **settings)) == speaks


def test_the_start_plans_no_epoch_and_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of documents are estimated, by the window that the loader needs anyway, until they have been counted."""
    np.tile(np.array([1, 2, 3, 0], np.uint16), 400).tofile(tmp_path / "tokens.bin")
    settings: dict[str, Any] = {"eos_id": 0, "dtype": "uint16", "rows": "pack", "window_documents": 40, "quiet": True}
    settings |= {"batches_per_run": 2}
    with TokenLoader(corpus=tmp_path, batch_size=4, seq_len=8, device="cpu", **settings) as ours:
        with monkeypatch.context() as patch:
            for owner, name in ((DocumentRows, "_make_plan"), (Corpus, "_read"), (Path, "open")):
                patch.setattr(owner, name, None)
            assert "  epoch: about 200 rows, 50 steps of 1 rank x (4, 8); order philox24-v1" in ours.summary()
        assert not ours.length_is_known
        for _ in itertools.islice(ours, 49):
            pass
        assert "  epoch: 200 rows, 50 steps of 1 rank x (4, 8); order philox24-v1" in ours.summary()


@pytest.mark.parametrize("rows", ["pack", "pad"])
@pytest.mark.parametrize("long_documents", ["truncate", "drop", "split"])
def test_what_long_documents_lose_is_said(tmp_path: Path, rows: str, long_documents: str) -> None:
    """The figures are those of the plan, which is not made for it."""
    lengths = [3, 30, 9, 8, 0, 17, 4, 200, 6] * 9
    np.concatenate([[*[1] * length, 0] for length in lengths]).astype(np.uint16).tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"eos_id": 0, "rows": rows, "long_documents": long_documents, "window_documents": 7}
    with TokenLoader(tmp_path, batch_size=2, seq_len=9, device="cpu", quiet=True, **settings) as ours:
        lines = ours.summary().splitlines()
        report = ours.plan_report()
        if long_documents == "split":
            assert (report.dropped_tokens, len(lines)) == (0, 3)
            return
        count, share = report.dropped_tokens, 100 * report.dropped_tokens / report.tokens
        documents = report.dropped_documents + report.truncated_documents
        assert lines[2].startswith(f'  long_documents = "{long_documents}" ')
        assert lines[2].endswith(f" {count:,} tokens ({share:.1f}%) of {documents} documents")
        assert len(lines) == 4


@settings(max_examples=examples(18))
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=300).filter(any),
    st.integers(1, 20),
    st.sampled_from(["truncate", "drop"]),
)
def test_of_very_many_documents_some_are_looked_at(lengths: list[int], seq_len: int, long_documents: Any) -> None:
    """The share is that of runs of neighbours over all the corpus, and no document counts in two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_rows, "_MOST_LENGTHS", 40)
        patch.setattr(document_rows, "_RUNS", 4)
        rows = DocumentRows(
            np.cumsum([5, *lengths]),
            seq_len,
            mode="pack",
            long_documents=long_documents,
            window_documents=8,
            shuffle=True,
            seed=0,
        )
        lost = rows.left_out()
    firsts = [0, (len(lengths) - 10) // 3, 2 * (len(lengths) - 10) // 3, len(lengths) - 10]
    seen = lengths if len(lengths) <= 40 else [length for first in firsts for length in lengths[first : first + 10]]
    long = [length for length in seen if length > seq_len]
    gone = sum(long) - (seq_len * len(long) if long_documents == "truncate" else 0)
    assert lost.is_exact == (len(lengths) <= 40)
    assert lost.share == (gone / sum(seen) if sum(seen) else 0)
    if lost.is_exact:
        assert (lost.documents, lost.tokens) == (len(long), gone)
    else:
        assert lost.tokens == round(lost.share * sum(lengths))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 4}, False),
        ({"batch_size": 2, "rank": 0, "world_size": 2}, False),
        ({"batch_size": 3}, True),
        ({"batch_size": 2}, True),
        ({"batch_size": 3, "quiet": True}, False),
        ({"batch_size": 3, "rank": 1, "world_size": 2}, False),
    ],
    ids=str,
)
def test_a_resume_with_steps_of_another_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: bool
) -> None:
    """A trainer that counts steps itself would leave out a part of the epoch; at its beginning nothing is lost."""
    say_once.cache_clear()
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    common: dict[str, Any] = {"dtype": "uint16", "seq_len": 8, "device": "cpu"}
    with TokenLoader(corpus=tmp_path, **common, batch_size=4, quiet=True) as first:
        states = [first.state_dict()]
        for _ in itertools.islice(first, 2):
            states.append(first.state_dict())
    with TokenLoader(corpus=tmp_path, **common, **settings) as ours:
        ours.load_state_dict(states[0])
        assert "resuming" not in capsys.readouterr().err
        ours.load_state_dict(states[2])
        text = capsys.readouterr().err
        assert ("resuming epoch 0 at row 8 " in text) == said
        assert (f"step {ours.step} of the epoch" in text) == said


@given(
    path=st.text(min_size=1, max_size=300),
    numbers=st.tuples(*[st.integers(1, 10**15)] * 3),
    world_size=st.integers(1, 20_000),
    reason=st.text(max_size=300),
    masks=st.none() | st.integers(1, 10**6),
    notes=st.booleans(),
)
@example("data\n/weird\tname.bin", (1, 1, 1), 1, "two\nlines", 1, True)
@example("a" * 300, (10**15, 10**15, 10**15), 20_000, "b" * 300, None, False)
@example("a" * 300, (10**15, 10**15, 10**15), 20_000, "b" * 300, 10**6, True)
def test_three_lines_of_120_columns(
    path: str, numbers: tuple[int, int, int], world_size: int, reason: str, masks: int | None, notes: bool
) -> None:
    tokens, rows, files = numbers
    config = LoaderConfig(corpus="x", batch_size=4, seq_len=8)
    corpus: Any = SimpleNamespace(
        files=Paths(path, min(files, 10**7)),
        format="flat",
        num_tokens=tokens,
        fingerprint="0123456789abcdef",
        loss_mask=None if masks is None else SimpleNamespace(num_files=masks),
        notes=("labels: 5 of 10 tokens are learned", "a\tb: not used") * notes,
    )
    schedule: Any = SimpleNamespace(
        curriculum=None,
        interleave=SimpleNamespace(
            estimate=lambda epoch: rows, count_by_now=lambda epoch: (rows, True), left_out=lambda: None
        ),
        world_size=world_size,
        steps_of=lambda rows: rows,
        left_of=lambda steps, epoch: steps,
        skip_steps=(),
    )
    state = {"epoch": 0, "order": "philox24-v1"}
    text = announce.start_text(config, {"": corpus}, schedule, state, f"cuda:0, placement host: {reason}")
    lines = f"dali_pipes: {text}".split("\n")
    assert lines[3:] == ["  labels: 5 of 10 tokens are learned", "  a?b: not used"] * notes
    assert max(map(len, lines)) <= announce.COLUMNS
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith(f": flat, {tokens:,} token{'s' * (tokens > 1)}, fingerprint 01234567")
    assert f" {rows:,} row{'s' * (rows > 1)}, {rows:,} step{'s' * (rows > 1)} of " in lines[1]
    assert lines[1].endswith(("order philox24-v1", "..."))
    assert (masks is not None) == ("; loss masks of" in lines[1])
    if masks is None:
        assert lines[1].endswith("; order philox24-v1")
    assert lines[2].startswith("  cuda:0, placement host: ")
    if len(path) < 10 and path.isprintable():
        assert lines[0].startswith(f"dali_pipes: {path}")


class Paths:
    """As many files as asked for, the first of this name."""

    def __init__(self, first: str, count: int) -> None:
        self._first, self._count = first, count

    def __getitem__(self, number: int) -> str:
        assert number == 0
        return self._first

    def __len__(self) -> int:
        return self._count


Step = tuple[float, float]
"""Seconds in `next()` and in the loop body."""


def watch(steps: list[Step], **settings: Any) -> tuple[announce.WaitWatch, list[LoaderStats]]:
    """Run a watch over these steps as a loader does; the snapshots that it asked for."""
    ours = announce.WaitWatch(LoaderConfig(corpus="x", batch_size=1, seq_len=1, **settings))
    now = LoaderStats(batches=0, tokens=0, wall_s=0.0, data_wait_s=0.0, queue_depth=0)
    asked: list[LoaderStats] = []

    def stats() -> LoaderStats:
        asked.append(now)
        return now

    for wait_s, body_s in steps:
        times = BlockTimes(wait_s=now.block_times.wait_s + wait_s, read_s=now.block_times.read_s + wait_s)
        now = replace(
            now,
            batches=now.batches + 1,
            data_wait_s=now.data_wait_s + wait_s,
            wall_s=now.wall_s + wait_s + body_s,
            block_times=times,
        )
        if now.wall_s >= ours.next_s:
            ours.look(now.batches, stats)
    return ours, asked


SLOW, FAST = (0.1, 0.9), (0.01, 0.99)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([SLOW] * 500, "10% of the last 50.0 s (50 batches)"),
        ([SLOW] * 69, None),  # 20 that never count and 49
        ([SLOW] * 70, "10% of the last 50.0 s (50 batches)"),
        ([(30.0, 0.1)] * 20 + [FAST] * 500, None),  # a cold start
        ([FAST] * 3600 + [SLOW] * 100, "of the last 50.0 s (50 batches)"),  # slow after an hour
        ([FAST] * 60 + [(0.01, 900.0)] + [FAST] * 500, None),  # an evaluation
        ([(0.0005, 0.0095)] * 3000, "5% of the last 10.0 s (1,00"),
        ([(0.0004, 0.0096)] * 3000, None),
    ],
)
def test_waiting_is_said_once_and_for_the_last_seconds(
    capfd: pytest.CaptureFixture[str], steps: list[Step], said: str | None
) -> None:
    watch(steps)
    captured = capfd.readouterr()
    assert captured.out == ""
    if said is None:
        assert captured.err == ""
    else:
        assert re.fullmatch(r"dali_pipes: the trainer waited for data [^\n]*\n", captured.err)
        assert said in captured.err
        assert "num_threads = 2 (now 1)" in captured.err


def test_the_rank_is_said_where_there_are_several(capfd: pytest.CaptureFixture[str]) -> None:
    watch([SLOW] * 100, rank=3, world_size=4)
    assert capfd.readouterr().err.startswith("dali_pipes: rank 3: the trainer waited")
    watch([SLOW] * 100, rank=2, world_size=4, quiet=True)
    assert capfd.readouterr().err == ""


@given(
    st.lists(st.sampled_from([SLOW, FAST, (0.0, 0.01), (0.0, 100.0), (3.0, 0.0), (0.06, 1.0)]), max_size=60),
    st.integers(1, 12),
)
def test_it_is_said_when_a_window_passes_5_percent(pattern: list[Step], repeats: int) -> None:
    """Against a plain walk over the steps; and figures are asked for every ten seconds and fifty batches at most."""
    steps = pattern * repeats
    ours, asked = watch(steps)
    assert math.isinf(ours.next_s) == (first_slow_window(steps) is not None)
    for before, after in itertools.pairwise(asked):
        assert after.wall_s - before.wall_s >= announce.WINDOW_S
        assert after.batches - before.batches >= announce.WINDOW_BATCHES


def first_slow_window(steps: list[Step]) -> int | None:
    wait_s = wall_s = 0.0
    count = 0
    for number, (wait, body) in enumerate(steps[20:]):
        wait_s, wall_s, count = wait_s + wait, wall_s + wait + body, count + 1
        if wall_s >= 10 - 1e-9 and count >= 50:
            if wait_s >= 0.05 * wall_s:
                return number
            wait_s = wall_s = 0.0
            count = 0
    return None


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever the loader looks at the clock: in every `next()`, and in every loop body."""
    seconds = iter(range(10**9))
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


@pytest.mark.usefixtures("slow_clock")
def test_a_loader_says_that_its_trainer_waits(counting: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    corpus = counting(401)
    with load(corpus, rank=1, world_size=2, repeat=True, batches_per_run=2) as ours:
        for _ in itertools.islice(ours, 300):
            pass
    (line,) = capfd.readouterr().err.splitlines()
    facts = ("dali_pipes: rank 1: ", "50%", "50.0 s", "50 batches", "batches_per_run = 4 (now 2)", "quiet = true")
    assert all(fact in line for fact in facts), line
    with load(corpus, quiet=True, repeat=True) as ours:
        for _ in itertools.islice(ours, 300):
            pass
    assert capfd.readouterr() == ("", "")
