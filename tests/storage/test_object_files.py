"""Objects read by ranges from a server with faults: the right bytes or one error, and no more requests than needed."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from range_server import RangeServer, Request

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import object_file, stores
from dali_pipes.storage.object_file import ObjectFile, read_together
from dali_pipes.storage.retries import ReadRetries
from dali_pipes.uris import Uri

pytestmark = pytest.mark.needs("obstore")

CONTENT = np.random.default_rng(0).bytes(300_000)
PASSING = ["503", "500", "429", "short", "whole", "reset"]


@pytest.fixture(scope="module")
def server() -> Iterator[RangeServer]:
    with RangeServer({"a.bin": CONTENT, "b.bin": CONTENT[::-1], "empty.bin": b""}) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(server: RangeServer) -> None:
    server.fault, server.requests, server.if_match, server.tags = lambda request: None, [], True, True
    server.files["a.bin"] = CONTENT


@pytest.fixture
def opened(server: RangeServer) -> Callable[..., ObjectFile]:
    def make(name: str = "a.bin", most: int = 4, requests: int = 8) -> ObjectFile:
        return ObjectFile(Uri(f"{server.url}/{name}"), ReadRetries(most, requests))

    return make


def faults_by_place(plan: dict[int, list[str]]) -> Callable[[Request], str | None]:
    """The first answers for a place fail as planned, by the place's number in order of appearance."""
    seen: dict[tuple[str, int | None], list[str]] = {}
    lock = threading.Lock()

    def fault(request: Request) -> str | None:
        with lock:
            left = seen.setdefault((request.path, request.first), [*plan.get(len(seen) % 7, [])])
            return left.pop(0) if left else None

    return fault


RANGES = st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(0, 20_000)), max_size=30)
FAULTS = st.dictionaries(st.integers(0, 6), st.lists(st.sampled_from(PASSING), max_size=4), max_size=7)


@settings(max_examples=examples(40), deadline=None)
@given(RANGES, RANGES, FAULTS)
def test_every_range_has_its_bytes(
    server: RangeServer, ranges: list[tuple[int, int]], others: list[tuple[int, int]], plan: dict[int, list[str]]
) -> None:
    server.fault, server.requests = lambda request: None, []
    retries = ReadRetries(4, 8)
    files = [ObjectFile(Uri(f"{server.url}/{name}"), retries) for name in ("a.bin", "b.bin")]
    wanted, expected, place = [], b"", 0
    for file, content, some in zip(files, (CONTENT, CONTENT[::-1]), (ranges, others), strict=True):
        rows = []
        for offset, count in some:
            count = min(count, len(CONTENT) - offset)
            rows.append((offset, count, place))
            expected += content[offset : offset + count]
            place += count
        wanted.append((file, rows))
    server.fault, server.requests = faults_by_place(plan), []
    out = bytearray(len(expected))
    read_together(wanted, memoryview(out))
    assert bytes(out) == expected
    answered = Counter((request.path, request.first) for request in server.requests)
    assert retries.count == len(server.requests) - len(answered), "each retry is counted"
    read = sum(
        (request.last or 0) - (request.first or 0) + 1 for request in {r[2:5]: r for r in server.requests}.values()
    )
    used = {(file.path, byte) for file, rows in wanted for o, c, _ in rows for byte in range(o, o + c)}
    assert read <= len(used) + 4096 * sum(len(rows) for _, rows in wanted)


@pytest.mark.parametrize("fault", PASSING)
def test_an_error_that_stays_is_raised_once_with_its_place(
    server: RangeServer, opened: Callable[..., ObjectFile], fault: str
) -> None:
    file = opened(most=2)
    server.requests, server.fault = [], lambda request: fault
    with pytest.raises(CorpusReadError) as raised:
        file.read(100_000, 5000)
    assert len(server.requests) == 3
    assert file.retries.count == 2
    message = str(raised.value)
    said = {"short": "closed", "whole": "range", "reset": "closed"}.get(fault, fault)
    for part in (f"{server.url}/a.bin", "5,000 bytes", "byte 100,000", "tried 3 times", said):
        assert part in message


@pytest.mark.parametrize("status", ["401", "403", "404", "400"])
def test_what_does_not_pass_is_not_tried_again(
    server: RangeServer, opened: Callable[..., ObjectFile], status: str
) -> None:
    file = opened()
    server.requests, server.fault = [], lambda request: status
    with pytest.raises(CorpusReadError, match=status):
        file.read(0, 5000)
    assert len(server.requests) == 1


def test_a_stall_ends(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL_S", 0.3)
    stalls = iter(["stall"])
    file = ObjectFile(Uri(f"{server.url}/a.bin"), ReadRetries(1))
    server.fault = lambda request: next(stalls, None)
    assert file.read(50_000, 9) == CONTENT[50_000:50_009]
    server.fault = lambda request: "stall"
    with pytest.raises(CorpusReadError, match=r"0\.3 s.* \(tried 2 times\)"):
        file.read(0, 5000)


@pytest.mark.parametrize("if_match", [True, False])
@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", CONTENT[:90_000]])
def test_a_replaced_object_is_noticed(
    server: RangeServer, opened: Callable[..., ObjectFile], content: bytes, if_match: bool
) -> None:
    server.if_match = if_match
    file = opened()
    assert file.read(100_000, 3) == CONTENT[100_000:100_003]
    server.files["a.bin"] = content
    server.requests = []
    for known in (file, ObjectFile(file.path, file.retries, (file.size, file.identity))):
        with pytest.raises(CorpusReadError, match="was replaced or modified"):
            known.read(100_000, 3)
    assert len(server.requests) == 2


def test_without_tags_size_and_time_are_compared(server: RangeServer, opened: Callable[..., ObjectFile]) -> None:
    server.tags = False
    file = opened()
    assert file.read(100_000, 3) == CONTENT[100_000:100_003]
    server.files["a.bin"] = CONTENT + b"x"
    with pytest.raises(CorpusReadError, match="was replaced or modified"):
        file.read(100_000, 3)


def test_requests_in_flight_have_a_limit() -> None:
    with RangeServer({"a.bin": CONTENT}, latency_s=0.02) as server:
        file = ObjectFile(Uri(f"{server.url}/a.bin"), ReadRetries(0, 5))
        file.read_ranges([(10_000 * at, 10, 10 * at) for at in range(1, 30)], memoryview(bytearray(400)))
        assert 2 <= server.most_in_flight <= 5


def test_near_ranges_are_one_request_and_long_ones_several(
    server: RangeServer, opened: Callable[..., ObjectFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_file, "_MOST_BYTES", 50_000)
    file = opened()
    server.requests = []
    out = bytearray(200_020)
    file.read_ranges([(250_000, 10, 0), (250_020, 10, 10), (10_000, 200_000, 20)], memoryview(out))
    assert bytes(out) == CONTENT[250_000:250_010] + CONTENT[250_020:250_030] + CONTENT[10_000:210_000]
    assert sorted((r.first, r.last) for r in server.requests) == [
        *((begin, begin + 49_999) for begin in range(10_000, 210_000, 50_000)),
        (250_000, 250_029),
    ]


def test_opening_asks_once(server: RangeServer, opened: Callable[..., ObjectFile]) -> None:
    file = opened()
    assert (file.size, file.read(0, 4096)) == (len(CONTENT), CONTENT[:4096])
    assert len(server.requests) == 1
    assert (opened("empty.bin").size, opened("empty.bin").read(0, 0)) == (0, b"")


def test_an_error_leaves_the_memory_alone(server: RangeServer, opened: Callable[..., ObjectFile]) -> None:
    """Answers that come after the error are not written into memory that is used for something else by then."""
    file = opened()
    server.fault = lambda request: "403" if request.first == 10_000 else None
    out = bytearray(30)
    with pytest.raises(CorpusReadError):
        file.read_ranges([(10_000 * at, 10, 10 * (at - 1)) for at in (1, 2, 3)], memoryview(out))
    assert bytes(out) == bytes(30)


def test_a_fork_says_that_it_cannot_read(server: RangeServer, opened: Callable[..., ObjectFile]) -> None:
    """Its parent's requests run in threads that it lacks: they would wait forever."""
    file = opened()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        for read in (lambda: file.read(100_000, 10), opened):
            try:
                read()
            except BaseException as error:
                os.write(write_end, f"{type(error).__name__} {error}\n".encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    assert len(said.splitlines()) == 2
    assert all(line.startswith("CorpusReadError") and "spawn" in line for line in said.splitlines())
    assert file.read(100_000, 10) == CONTENT[100_000:100_010], "the parent goes on"
