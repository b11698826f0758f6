"""Reports of plans are kept for the next start: exact at once, never trusted blindly, and no row depends on them."""

import dataclasses
import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents

from dali_pipes import TokenLoader
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.plan_reports import PlanReports
from dali_pipes.runtime import progress

DOCUMENTS = [[number % 7 + 1] * (number * 7 % 23) + [END] for number in range(60)]
TOKENS = sum(map(len, DOCUMENTS))
WINDOWS = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_documents(tmp_path / "corpus", DOCUMENTS)
    return str(tmp_path / "corpus")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Grows by each window that is planned."""
    windows: list[tuple[int, int]] = []
    plan = DocumentRows._make_plan

    def watched(self: DocumentRows, epoch: int, window: int) -> Any:
        windows.append((epoch, window))
        return plan(self, epoch, window)

    monkeypatch.setattr(DocumentRows, "_make_plan", watched)
    return windows


def load(corpus: str, **changes: Any) -> TokenLoader:
    common: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "device": "cpu", "rows": "pack", "seq_len": 16}
    common |= {
        "window_documents": len(DOCUMENTS) // WINDOWS,
        "batch_size": 3,
        "batches_per_run": 1,
        "num_threads": 1,
        "outputs": ("input_ids", "row_ids"),
    }
    return TokenLoader(corpus=corpus, **{**common, **changes})


def is_exact(loader: TokenLoader) -> bool:
    return loader.length_is_known


def served(loader: TokenLoader) -> list[Any]:
    return [[tensor.tolist() for tensor in batch.values()] for batch in loader]


def kept(cache: Path) -> Path:
    [path] = cache.glob("plan-*.json")
    return path


def rows_counted(corpus: str, epoch: int = 0, **changes: Any) -> int:
    with load(corpus, **changes) as loader:
        return loader._schedule.interleave.count(epoch)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_second_start_knows_the_length_without_planning(
    corpus: str, cache: Path, planned: list[tuple[int, int]], drop_last: bool
) -> None:
    with load(corpus, drop_last=drop_last) as loader:
        assert not is_exact(loader)
        report = loader.plan_report()
        assert is_exact(loader)
        steps = len(loader)
        batches = served(loader)
        assert steps == len(batches)
    assert sorted(path.suffix for path in cache.glob("plan-*")) == [".json", ".lock"]
    with load(corpus, drop_last=drop_last) as loader:
        planned.clear()
        assert (is_exact(loader), len(loader), loader.plan_report()) == (True, steps, report)
        assert planned == []
        assert served(loader) == batches
        assert loader.plan_report().epoch == 1
        assert is_exact(loader)
    assert len(list(cache.glob("plan-*.json"))) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"seq_len": 15},
        {"rows": "pad"},
        {"long_documents": "drop"},
        {"window_documents": 13},
        {"shuffle": False},
        {"eos_id": 7},
        {"validation_fraction": 0.2},
        {"split": "validation", "validation_fraction": 0.2, "window_documents": 3},
    ],
    ids=str,
)
def test_plans_are_kept_apart_and_do_not_depend_on_ranks(corpus: str, cache: Path, change: dict[str, Any]) -> None:
    with load(corpus, rank=1, world_size=2) as loader:
        report = loader.plan_report()
    with load(corpus, rank=0, world_size=3, batch_size=2, pad_id=4, drop_last=False) as loader:
        assert is_exact(loader)
        assert len(loader) == -(-report.rows // 6)
        assert loader.plan_report() == report
    with load(corpus, **change) as loader:
        assert not is_exact(loader)
        assert loader.plan_report().rows == rows_counted(corpus, **change)
        assert is_exact(loader)
    assert len(list(cache.glob("plan-*.json"))) == 2


def test_another_corpus_has_other_plans(tmp_path: Path, corpus: str) -> None:
    with load(corpus) as loader:
        loader.plan_report()
    write_documents(tmp_path / "corpus", [*DOCUMENTS[1:], DOCUMENTS[0]])
    with load(corpus) as loader:
        assert not is_exact(loader)


def check_replaced(corpus: str, path: Path, damaged: bytes) -> None:
    """What is at `path` is not believed, does no harm, and makes room for the right report."""
    whole = path.read_bytes()
    path.write_bytes(damaged)
    with load(corpus) as loader:
        assert not is_exact(loader)
        assert path.read_bytes() == damaged
        assert len(loader) == rows_counted(corpus) // 3
        assert is_exact(loader)
        assert path.read_bytes() == whole
        assert loader.plan_report().rows == rows_counted(corpus)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[:100],
        lambda whole: whole + b" ",
        lambda whole: bytes(len(whole)),
        lambda whole: b"\xff\xfe" + whole,
        lambda whole: b"[" * 50_000,
        lambda whole: b"[1, 2]",
        lambda whole: b'{"report": 3}',
        lambda whole: b'{"report": {"rows": "many"}}',
        lambda whole: whole.replace(b" epoch 0", b" epoch 1"),
        lambda whole: json.dumps(json.loads(whole), indent=1).encode(),
    ],
)
def test_a_damaged_file_is_replaced(corpus: str, cache: Path, damage: Any) -> None:
    with load(corpus) as loader:
        loader.plan_report()
    whole = kept(cache).read_bytes()
    assert damage(whole) != whole
    check_replaced(corpus, kept(cache), damage(whole))


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_noticed(tmp_path: Path, cache: Path, corpus: str, data: st.DataObject) -> None:
    with load(corpus) as loader:
        loader.plan_report()
        reports = loader._reports
        assert reports is not None
        whole = bytearray(kept(cache).read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (tmp_path / "flipped").write_bytes(whole)
        assert reports._load(0, kept(cache)) is not None
        assert reports._load(0, tmp_path / "flipped") is None


def written(corpus: str, cache: Path, **changes: Any) -> tuple[Path, PlanReport]:
    """The file of epoch 0, with some figures changed and all else made to fit, and the right report."""
    with load(corpus) as loader:
        report = loader.plan_report()
        assert isinstance(loader._reports, PlanReports)
        path = kept(cache)
        path.write_bytes(loader._reports._content(0, dataclasses.replace(report, **changes)))
    return path, report


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 1},
        {"documents": 61},
        {"tokens": TOKENS + 1},
        {"rows": 1},
        {"rows": -1},
        {"rows": "40"},
        {"rows": None},
        {"padding_tokens": 0},
        {"dropped_tokens": 5},
        {"dropped_tokens": TOKENS + 5, "padding_tokens": TOKENS},
        {"rows": 10**9, "padding_tokens": 16 * 10**9 - TOKENS},
        {"rows": 0, "padding_tokens": -TOKENS},
    ],
    ids=str,
)
def test_figures_that_cannot_be_are_not_believed(corpus: str, cache: Path, changes: dict[str, Any]) -> None:
    path, _ = written(corpus, cache, **changes)
    wrong = path.read_bytes()
    path.unlink()
    with load(corpus) as loader:
        loader.plan_report()
    check_replaced(corpus, path, wrong)


def test_no_row_depends_on_a_kept_report(corpus: str, cache: Path) -> None:
    """Figures that could be right but are not: no batch changes, and the length is right once rows are counted."""
    with load(corpus) as loader:
        batches = [served(loader) for _ in range(2)]
    for more in (-3, 7):
        path, report = written(corpus, cache)
        changed = {"rows": report.rows + more, "padding_tokens": report.padding_tokens + 16 * more}
        written(corpus, cache, **changed)
        with load(corpus) as loader:
            assert len(loader) == (report.rows + more) // 3
            assert [served(loader) for _ in range(2)] == batches
        with load(corpus) as loader:
            assert loader._schedule.steps() == len(loader) == len(batches[0])
            assert loader.plan_report() == report
        assert json.loads(path.read_text())["report"]["rows"] == report.rows


def test_a_resumed_run_knows_its_length(corpus: str, planned: list[tuple[int, int]]) -> None:
    with load(corpus) as loader:
        steps, report = len(served(loader)), loader.plan_report()
        assert report.epoch == 1
    with load(corpus) as loader:
        loader.plan_report()
        for number, _ in enumerate(loader):
            if number == 8:
                break
        state = loader.state_dict()
    assert state["window"][0] > 0
    with load(corpus) as loader:
        loader.load_state_dict(state)
        planned.clear()
        assert (len(loader), is_exact(loader)) == (steps, True)
        assert planned == []
        assert len(served(loader)) == steps - 9


@pytest.fixture(params=["a file in the way", "a folder in the way", "the data are there", "no home"])
def hindrance(
    request: pytest.FixtureRequest, cache: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with load(corpus, eos_id=8):  # another scan, so that the folder is there
        pass
    if request.param == "a file in the way":
        monkeypatch.setenv("DALI_PIPES_CACHE", str(Path(corpus) / "tokens.bin" / "below"))
    elif request.param == "a folder in the way":
        with load(corpus) as loader:
            assert loader._reports is not None
            (cache / loader._reports._name(0)).mkdir()
    elif request.param == "the data are there":
        monkeypatch.setenv("DALI_PIPES_CACHE", corpus)
    else:
        for name in ("DALI_PIPES_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
    yield request.param
    assert [path.name for path in Path(corpus).iterdir()] == ["tokens.bin"]


def test_a_report_that_cannot_be_kept_is_made_all_the_same(
    corpus: str, hindrance: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with load(corpus) as loader:
            assert not is_exact(loader)
            report = loader.plan_report()
            assert (report.documents, report.tokens) == (60, TOKENS)
            assert is_exact(loader)
            assert loader.plan_report() == report
    assert "the plan report cannot be cached: " in capfd.readouterr().err


def test_training_does_not_wait_for_those_who_plan(corpus: str, cache: Path) -> None:
    """Another process has been making the report for long: batches come, a report and a length alone wait for it."""
    with load(corpus) as loader:
        report, steps = loader.plan_report(), len(loader)
        path = kept(cache)
        whole = path.read_bytes()
        path.unlink()
    holder = os.open(path.with_suffix(".lock"), os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with load(corpus) as loader, load(corpus) as asked:
        assert not is_exact(loader)
        assert len(served(loader)) == steps
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend((len(asked), asked.plan_report())))
        waiting.start()
        waiting.join(0.2)  # time to go wrong; what is right takes until the lock is free
        assert found == []
        path.write_bytes(whole)
        os.close(holder)
        waiting.join()
        assert found == [steps, report]


def test_of_several_that_ask_at_once_one_plans(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = DocumentRows.report

    def counting(self: DocumentRows, epoch: int, *options: Any) -> PlanReport:
        made.append(epoch)
        return make(self, epoch, *options)

    monkeypatch.setattr(DocumentRows, "report", counting)
    loaders = [load(corpus, rank=rank, world_size=4) for rank in range(4)]
    found: list[PlanReport] = []
    threads = [threading.Thread(target=lambda each=each: found.append(each.plan_report())) for each in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in loaders:
        each.close()
    assert made == [0]
    assert found == [found[0]] * 4


@pytest.mark.parametrize(("is_terminal", "is_long"), [(True, True), (True, False), (False, True)])
def test_progress_is_for_terminals_and_long_plans(
    corpus: str, is_terminal: bool, is_long: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with load(corpus) as loader:
        capsys.readouterr()
        monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0 if is_long else 1000)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        monkeypatch.setenv("TERM", "xterm")
        loader.plan_report()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("planning epoch 0" in shown.err) == (is_terminal and is_long)
