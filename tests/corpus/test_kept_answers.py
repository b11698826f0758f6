"""What opening many objects takes is asked once on a node: not by other processes, nor at the next start."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from range_server import RangeServer

from dali_pipes.corpus import open_corpus

pytestmark = pytest.mark.needs("obstore")

COUNT = 20


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path))
    ids = np.random.default_rng(0)
    files = {f"s_{n}.bin": ids.integers(0, 50_000, 20_000 + n).astype(np.uint16).tobytes() for n in range(COUNT)}
    with RangeServer(files) as server:
        yield server


def opened(server: RangeServer) -> tuple[str, int]:
    """Fingerprint, and the number of reads that it took."""
    server.requests = []
    with open_corpus([f"{server.url}/s_{number}.bin" for number in range(COUNT)]) as corpus:
        return corpus.fingerprint, sum(request.method == "GET" for request in server.requests)


def test_a_second_start_reads_nothing(server: RangeServer, tmp_path: Path) -> None:
    first = opened(server)
    assert first[1] >= 2 * COUNT
    assert opened(server) == (first[0], 0)
    server.files["s_3.bin"] = server.files["s_3.bin"][::-1]
    replaced = opened(server)
    assert replaced[0] != first[0]
    assert 1 < replaced[1] < 10, "the object that was replaced"
    assert opened(server) == (replaced[0], 0)
    (kept,) = tmp_path.glob("answers-*[0-9a-f]")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    assert opened(server) == (replaced[0], first[1]), "a damaged file is not used"
    server.tags = False
    opened(server)
    assert opened(server)[1] == first[1], "times tell too little"


def test_others_wait_for_the_first(server: RangeServer, tmp_path: Path) -> None:
    """As the ranks of a node do, that start together: locks are of open files, so threads are as good as processes."""
    alone = opened(server)
    for path in server.files:
        server.files[path] = server.files[path][::-1]
    server.requests, server.latency_s = [], 0.005
    prints: list[str] = []

    def rank() -> None:
        with open_corpus([f"{server.url}/s_{number}.bin" for number in range(COUNT)]) as corpus:
            prints.append(corpus.fingerprint)

    for kept in tmp_path.glob("answers-*[0-9a-f]"):
        kept.unlink()
    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert len(set(prints)) == 1
    assert prints[0] != alone[0]
    assert sum(request.method == "GET" for request in server.requests) == alone[1]
