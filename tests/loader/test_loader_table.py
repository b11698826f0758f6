"""What a loader shows of itself, in each of its states; asking changes nothing, plans nothing, and never fails."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.monitoring.stats import RATED_BATCHES
from dali_pipes.rows.document_rows import DocumentRows

SETTINGS: dict[str, Any] = {"dtype": "uint32", "batch_size": 4, "seq_len": 8, "device": "cpu", "quiet": True}
KINDS: dict[str, dict[str, Any]] = {
    "stream": {},
    "pack": {"rows": "pack", "eos_id": 10, "window_documents": 4},
    "buckets": {"rows": "pad", "eos_id": 10, "window_documents": 4, "length_buckets": [4]},
    "skipped": {"skip_steps": [[1, 3]], "drop_last": False},
}


def rows_of(loader: TokenLoader) -> dict[str, str]:
    title, *lines = repr(loader).splitlines()
    assert title == "TokenLoader"
    width = max(line.index(line.strip().split("  ")[-1]) for line in lines)
    return {line[:width].strip(): line[width:] for line in lines}


def test_a_loader_prints_as_a_small_table(counting: Callable[..., Any]) -> None:
    with TokenLoader(counting(150, 120, 131).pattern, **SETTINGS) as loader:
        found = rows_of(loader)
        assert found.pop("corpus").endswith("data/shard_000.bin and 2 more files: flat, 401 tokens")
        assert found == {
            "epoch": "50 rows, 12 steps of 1 rank x (4, 8)",
            "next batch": "epoch 0, step 0",
            "device": "cpu, placement host",
        }
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        assert rows_of(loader)["next batch"] == "epoch 0, step 5"
        assert rows_of(loader)["data wait"].split(" s: ")[1].startswith("not rated; ")
        list(iterator)
        assert rows_of(loader)["next batch"] == "epoch 1, step 0"
        for _ in itertools.islice(loader, 3):
            pass
        assert rows_of(loader)["next batch"] == "the first of the next epoch; epoch 1 was left at step 3"
        assert str(loader) == repr(loader)
        assert loader._repr_html_().count("<tr>") == len(rows_of(loader))
    assert repr(loader).startswith("TokenLoader, closed\n")


@pytest.mark.parametrize("kind", KINDS)
def test_asking_changes_nothing(counting: Callable[..., Any], kind: str) -> None:
    """The batches and states of a loader that is shown at every step are those of one that never is."""
    settings = {**SETTINGS, **KINDS[kind], "corpus": counting(401, vocab_size=11).pattern}
    with TokenLoader(**settings) as quiet, TokenLoader(**settings) as shown:
        for _ in range(2):
            for ours, theirs in itertools.zip_longest(quiet, shown):
                assert repr(shown), shown._repr_html_()
                assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
                assert quiet.state_dict() == shown.state_dict()
                now = shown.epoch, shown.step
                assert rows_of(shown)["next batch"] == f"epoch {now[0]}, step {now[1]:,}"


@pytest.mark.parametrize("kind", KINDS)
def test_asking_plans_reads_and_waits_for_nothing(
    counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with TokenLoader(counting(401, vocab_size=11).pattern, **SETTINGS, **KINDS[kind]) as loader:
        for taken in (0, 2):
            for _ in itertools.islice(loader, taken):
                pass
            documents = loader._schedule.interleave
            locks = [documents._planning, documents._lock] if isinstance(documents, DocumentRows) else []
            with monkeypatch.context() as patch, held_elsewhere(locks):
                for owner, name in ((DocumentRows, "_make_plan"), (Corpus, "_read"), (Path, "open")):
                    patch.setattr(owner, name, None)
                assert "(4, 8)" in rows_of(loader)["epoch"]


@contextlib.contextmanager
def held_elsewhere(locks: list[Any]) -> Iterator[None]:
    """Another thread has the locks."""
    has_them, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            has_them.set()
            done.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    has_them.wait()
    yield
    done.set()
    holder.join()


def test_rows_of_documents_are_about_as_many_until_they_are_counted(tmp_path: Path) -> None:
    np.tile(np.array([1, 2, 3, 0], np.uint16), 400).tofile(tmp_path / "tokens.bin")
    settings: dict[str, Any] = {**SETTINGS, "eos_id": 0, "dtype": "uint16", "rows": "pack", "window_documents": 40}
    settings["batches_per_run"] = 2
    with TokenLoader(tmp_path, **settings) as loader:
        assert rows_of(loader)["epoch"] == "about 200 rows, 50 steps of 1 rank x (4, 8)"
        state = {**loader.state_dict(), "epoch": 7}
        len(loader)
        assert rows_of(loader)["epoch"] == "200 rows, 50 steps of 1 rank x (4, 8)"
        state.pop("check")
        loader.load_state_dict(state)
        shown = rows_of(loader)
        assert shown["next batch"] == "epoch 7, step 0"
        assert shown["epoch"] in (
            "not planned yet; steps of 1 rank x (4, 8)",
            "about 200 rows, 50 steps of 1 rank x (4, 8)",
        )


def test_a_loader_that_was_never_built_can_be_shown(counting: Callable[..., Any]) -> None:
    """By a debugger, or a traceback with local variables."""
    assert repr(object.__new__(TokenLoader)) == "TokenLoader, not built"
    half_built: list[TokenLoader] = []

    class Watched(TokenLoader):
        def __init__(self, *given: Any, **settings: Any) -> None:
            half_built.append(self)
            super().__init__(*given, **settings)

    with pytest.raises(ConfigError):
        Watched(counting(401).pattern, **SETTINGS, vocab_sise=1)
    with pytest.raises(ConfigError):
        Watched(counting(401).pattern, **{**SETTINGS, "batch_size": 10**6})
    assert [repr(loader) for loader in half_built] == ["TokenLoader, not built"] * 2


def test_a_closed_loader_and_one_with_an_error_can_be_shown(counting: Callable[..., Any]) -> None:
    loader = TokenLoader(counting(401).pattern, **SETTINGS, vocab_size=300, shuffle=False)
    with pytest.raises(ValueError, match="vocab_size"):
        list(loader)
    assert rows_of(loader)["next batch"].startswith("epoch 0, step ")
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(iter(loader))
    assert repr(loader).startswith("TokenLoader, closed\n  corpus ")


def test_names_that_cannot_be_printed_are_shown(tmp_path: Path) -> None:
    path = tmp_path / b"a\xff\n<b>.bin".decode(errors="surrogateescape")
    np.arange(401, dtype=np.uint32).tofile(path)
    with TokenLoader(path, **SETTINGS) as loader:
        assert repr(loader).encode()
        assert "a??<b>.bin: flat, 401 tokens" in repr(loader)
        assert "a??&lt;b&gt;.bin" in loader._repr_html_()


def test_a_rating_needs_a_trainer(counting: Callable[..., Any]) -> None:
    """A loop without a body waits all the time, which says nothing of the loader."""
    with TokenLoader(counting(4001).pattern, **SETTINGS) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
        assert stats.batches > RATED_BATCHES
        assert stats.is_rated == (stats.wall_s - stats.data_wait_s >= 100e-6 * stats.batches)


@pytest.mark.parametrize("name", sorted(LoaderConfig.model_fields))
def test_a_setting_is_not_set_on_a_loader(counting: Callable[..., Any], name: str) -> None:
    """It would have no effect: the configuration is the one that the loader was built with."""
    with TokenLoader(counting(150).pattern, **SETTINGS) as loader:
        before, at_first = repr(loader.config), vars(loader).copy()
        for target in (name, "config"):
            with pytest.raises(AttributeError, match=target):
                setattr(loader, target, 3)
        assert (repr(loader.config), vars(loader)) == (before, at_first)
        if name in ("corpus", "device"):
            return  # what was opened
        assert getattr(loader, name, "absent") == "absent"  # others ask so, and go on without
        assert name not in dir(loader)
        with pytest.raises(AttributeError, match=rf"loader\.config\.{name}$"):
            getattr(loader, name)
