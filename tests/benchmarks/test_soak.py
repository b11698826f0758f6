"""The soak run ends well at small size; what it looks for is found: a leak, another descriptor, a row out of order."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak
import typer


def samples(rss: Any, threads: Any = 5.0) -> soak.Samples:
    count = len(rss)
    columns = {"rss_bytes": rss, "descriptors": np.full(count, 9.0), "threads": np.broadcast_to(threads, count)}
    return {"batch": list(range(0, 100 * count, 100)), **{name: list(column) for name, column in columns.items()}}


@pytest.mark.slow
def test_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each loader goes through a small corpus more than once, but ends too early for its memory to be judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "_CORPUS_TOKENS", 12_000)
        soak.main(batches=300, rows=None, trace_python=False, out=tmp_path)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == []
    assert [entry["rows"] for entry in last["entries"]] == list(soak.MODES)
    for entry in json.loads((tmp_path / "soak.json").read_text())["entries"]:
        assert entry["batches"] == 60
        assert entry["epochs"] >= 1
        assert not entry["is_judged"]
        assert all(len(column) == 60 for column in entry["samples"].values())
        assert min(entry["samples"]["tokens_per_s"]) > 0
    assert (tmp_path / "soak.png").read_bytes()[:4] == b"\x89PNG"


def test_a_leak_ends_the_run_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_save_plot", lambda *drawn: None)
    kept: list[mmap.mmap] = []
    real = soak.handed_out

    def leaking(*arguments: Any) -> Iterator[dict[str, Any]]:
        for batch in real(*arguments):
            kept.append(mmap.mmap(-1, 16384))  # fresh pages, where malloc may have old ones to give
            kept[-1].write(bytes(16384))
            yield batch

    monkeypatch.setattr(soak, "handed_out", leaking)
    with pytest.raises(typer.Exit) as end:
        soak.main(batches=2 * soak.FEWEST_BATCHES, rows=["stream"], trace_python=False, out=tmp_path)
    assert end.value.exit_code == 1
    for block in kept:
        block.close()
    (failed,) = json.loads((tmp_path / "soak.json").read_text())["failed"]
    assert failed.startswith("stream: memory grew by 3")


def test_a_batch_out_of_order_ends_the_run_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_save_plot", lambda *drawn: None)
    monkeypatch.setattr(soak, "_CORPUS_TOKENS", 30_000)
    real = soak.handed_out

    def swapped(*arguments: Any) -> Iterator[dict[str, Any]]:
        first, second, *others = real(*arguments)
        return iter([second, first, *others])

    monkeypatch.setattr(soak, "handed_out", swapped)
    with pytest.raises(typer.Exit):
        soak.main(batches=50, rows=["pack"], trace_python=False, out=tmp_path)
    (failed,) = json.loads((tmp_path / "soak.json").read_text())["failed"]
    assert failed.startswith("pack: the rows of 50 batches ")


def test_what_counts_as_growth() -> None:
    """A line that rises by more than noise; not a rise in the first half, nor a step that goes back."""
    noise = np.random.default_rng(0).normal(0, 2 << 20, 200)
    line = np.linspace(0, 40 << 20, 200)
    flat = 300 << 20
    assert soak.grown(samples(flat + noise)) == []
    assert soak.grown(samples(flat + np.minimum(line, 20 << 20))) == []
    assert soak.grown(samples(flat - line)) == []
    (found,) = soak.grown(samples(flat + line + noise))
    assert found.startswith("memory grew by 19.6 MiB")
    assert soak.grown(samples(flat + line / 40)) == []  # half a MiB: as malloc likes
    (found,) = soak.grown(samples(flat + noise, np.arange(200) // 150))
    assert found == "threads: 1 in the second half, at most 0 in the first"
