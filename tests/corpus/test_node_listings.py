"""The ranks of a node open a corpus with the requests of one, and a process that is killed meanwhile hangs nobody."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer

from dali_pipes.corpus import open_corpus
from dali_pipes.storage import kept_listings

pytestmark = pytest.mark.needs("obstore")

COUNT = 20
FOLDER = "hf://datasets/org/name/d"
RANK = """
    import glob, json, sys, time
    from dali_pipes.corpus import open_corpus
    import obstore

    if sys.argv[3:4] == ["told"]:
        print("ready", file=sys.stderr, flush=True)
    while sys.argv[3:4] != ["told"] and len(glob.glob("out_*")) < int(sys.argv[2]):
        time.sleep(0.001)  # until all have started: one that starts later lists anew
    with open_corpus(sys.argv[4:]) as corpus:
        print(json.dumps([corpus.fingerprint, len(corpus.files)]), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Files, and the Hub's listing of their folder."""
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    ids = np.random.default_rng(0)
    files = {f"s_{n}.bin": ids.integers(0, 50_000, 9_000 + n).astype(np.uint16).tobytes() for n in range(COUNT)}
    with RangeServer({}, latency_s=0.002) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        entries = []
        for name, content in files.items():
            server.files[name] = server.files[f"datasets/org/name/resolve/main/d/{name}"] = content
            entries.append({"type": "file", "oid": name, "size": len(content), "path": f"d/{name}"})
        server.files["api/datasets/org/name/tree/main/d"] = json.dumps(entries).encode()
        yield server


def addresses(server: RangeServer) -> list[str]:
    return [f"{server.url}/s_{number}.bin" for number in range(COUNT)]


def asked(server: RangeServer) -> Counter[tuple[str, str, int | None]]:
    found = Counter((request.method, request.path, request.first) for request in server.requests)
    server.requests = []
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_ask_no_more_than_one(
    server: RangeServer,
    run_ranks: Callable[..., list[Any]],
    tmp_path: Path,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_corpus(addresses(server)) as corpus:
        expected = [corpus.fingerprint, COUNT]
    alone = asked(server)
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "another"))
    assert run_ranks(RANK, ranks, "", *addresses(server), forked=True) == [expected] * ranks
    assert asked(server) == alone
    assert run_ranks(RANK, ranks, "", FOLDER, forked=True) == [expected] * ranks
    assert sum(count for (_, path, _), count in asked(server).items() if path.startswith("api/")) == 1
    # The next start lists anew: files may have come since.
    assert run_ranks(RANK, 1, "", FOLDER, forked=True) == [expected]
    assert sum(path.startswith("api/") for _, path, _ in asked(server)) == 1


def test_a_process_lists_anew_each_time(server: RangeServer) -> None:
    """And not what it found itself, nor what began before it or long ago."""
    for _ in range(2):
        with open_corpus(FOLDER) as corpus:
            assert len(corpus.files) == COUNT
        assert sum(path.startswith("api/") for _, path, _ in asked(server)) == 1


@pytest.mark.parametrize(
    ("start", "now", "last", "is_used"),
    [
        (50.0, 150.0, 99.0, True),
        (101.0, 150.0, 0.0, False),
        (50.0, 150.0, 100.0, False),
        (50.0, 171.0, 0.0, False),
    ],
)
def test_what_may_be_used(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, start: float, now: float, last: float, is_used: bool
) -> None:
    """A listing from second 100 to 110."""
    monkeypatch.setattr(kept_listings, "_process_start", lambda: start)
    times = iter([100.0, 110.0])
    monkeypatch.setattr(kept_listings, "_now", lambda: next(times))
    open_corpus(FOLDER).close()
    (path,) = kept_listings._last_used.keys() & {*Path(os.environ["DALI_PIPES_CACHE"]).glob("listing-*[0-9a-f]")}
    kept_listings._last_used[path] = last
    asked(server)
    monkeypatch.setattr(kept_listings, "_now", lambda: now)
    open_corpus(FOLDER).close()
    assert (("GET", "api/datasets/org/name/tree/main/d", None) in asked(server)) != is_used


def test_a_damaged_listing_is_not_used(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    open_corpus(FOLDER).close()
    (path,) = Path(os.environ["DALI_PIPES_CACHE"]).glob("listing-*[0-9a-f]")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    kept_listings._last_used.clear()
    with open_corpus(FOLDER) as corpus:
        assert len(corpus.files) == COUNT


def test_credentials_are_not_kept(server: RangeServer, tmp_path: Path) -> None:
    signed = [f"{address.replace('//', '//me:hunter2@')}?X-Amz-Signature=5f2c9a" for address in addresses(server)]
    open_corpus(signed).close()
    kept = [path.read_bytes() for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert any(b"s_19.bin" in content for content in kept)
    assert not any(secret in content for content in kept for secret in (b"hunter2", b"5f2c9a"))


def test_a_lister_that_is_killed_hangs_nobody(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("\n".join(line[4:] for line in RANK.splitlines()))
    has_stalled, stalls = threading.Event(), iter(["stall"])

    def fault(request: object) -> str | None:
        found = next(stalls, None)
        if found is not None:
            has_stalled.set()
        return found

    server.fault = fault
    command = [sys.executable, str(tmp_path / "rank.py"), "0", "2", "told", *addresses(server)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        has_stalled.wait()
        with subprocess.Popen(command, **pipes) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "ready\n"
            first.send_signal(signal.SIGKILL)
            out, err = second.communicate()
        assert second.returncode == 0, err
        assert json.loads(out)[1] == COUNT
        first.communicate()
