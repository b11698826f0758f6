"""Loaders that fetch the blocks of a window before it begins: the same batches, no block twice, nothing in the way."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held import wait_for
from range_server import RangeServer

from dali_pipes import TokenLoader
from dali_pipes.corpus import block_reads
from dali_pipes.corpus.block_reads import BlockReads
from dali_pipes.corpus.blocks_ahead import BlocksAhead
from dali_pipes.errors import CorpusReadError
from dali_pipes.rows import make
from dali_pipes.storage import node_cache
from dali_pipes.storage.eviction import Entry
from dali_pipes.storage.node_cache import Ahead, NodeCache

T, BLOCK_ROWS, WINDOW, WINDOWS = 16, 32, 3, 3
BLOCKS = WINDOW * WINDOWS
BLOCK_BYTES = (BLOCK_ROWS * T + 1) * 2
"""With the label of the last row."""
STEPS = BLOCK_ROWS * BLOCKS // 4
WINDOW_STEPS = STEPS // WINDOWS
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "seq_len": T,
    "device": "cpu",
    "seed": 3,
    "quiet": True,
    "order": "blocks",
    "shuffle_window": WINDOW,
    "batches_per_run": 1,
    "num_threads": 1,
    "prefetch_queue_depth": 1,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "BLOCK_TOKENS", BLOCK_ROWS * T)


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(0).integers(1, 60_000, BLOCKS * BLOCK_ROWS * T + 1).astype(np.uint16).tobytes()


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> str:
    (tmp_path / "a.bin").write_bytes(data)
    return str(tmp_path / "a.bin")


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the blocks that a batch had to wait for."""
    names: list[str] = []
    fetch = BlockReads._fetch

    def noted(self: BlockReads, entry: Entry) -> Any:
        names.append(entry.name)
        return fetch(self, entry)

    monkeypatch.setattr(BlockReads, "_fetch", noted)
    return names


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the blocks that were to be fetched ahead, of each call."""
    names: list[list[str]] = []
    fetch_ahead = BlockReads.fetch_ahead

    def noted(self: BlockReads, blocks: Sequence[int], owner: object) -> None:
        names.append([self._entry(block).name for block in blocks])
        fetch_ahead(self, blocks, owner)

    monkeypatch.setattr(BlockReads, "fetch_ahead", noted)
    return names


@pytest.fixture
def nothing_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reads, "_SPARE_PART", 10**9)


def rows_of(loader: TokenLoader, after: Callable[[int], object] = lambda step: None) -> list[Any]:
    found = []
    for step, batch in enumerate(loader):
        found.append((batch["input_ids"].tolist(), batch["labels"].tolist()))
        after(step)
    return found


def in_cache(folder: Path) -> int:
    return len(list(folder.glob("*.ids")))


@pytest.mark.usefixtures("nothing_to_spare")
def test_after_a_window_that_is_consumed_slowly_the_next_ones_are_all_there(
    path: str, tmp_path: Path, waited_for: list[str]
) -> None:
    """Slowly: where the blocks of the window after this one have come by the time that half of it is consumed."""
    cache = tmp_path / "cache"
    with TokenLoader(path, **SETTINGS) as loader:
        expected = rows_of(loader)

    def slowly(step: int) -> None:
        window, place = divmod(step, WINDOW_STEPS)
        if place == WINDOW_STEPS // 2:
            wait_for(lambda: in_cache(cache) == min(BLOCKS, (window + 2) * WINDOW))

    with TokenLoader(path, **SETTINGS, cache_dir=str(cache)) as loader:
        ours = rows_of(loader, slowly)
        stats = loader.stats().cache
    assert ours == expected
    assert len(set(waited_for)) <= WINDOW  # in the first window
    assert stats is not None
    assert (stats.misses, stats.fetched_bytes) == (BLOCKS, BLOCKS * BLOCK_BYTES)


@pytest.mark.usefixtures("nothing_to_spare")
@pytest.mark.parametrize("room", [WINDOW, 2 * WINDOW - 1, 2 * WINDOW])
def test_with_little_room_what_is_needed_sooner_stays(
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waited_for: list[str],
    wanted: list[list[str]],
    room: int,
) -> None:
    """Two passes with room for less than one of them."""
    monkeypatch.setattr(node_cache, "_LOOK_PART", 0)
    cache, windows = tmp_path / "cache", 2 * WINDOWS
    with TokenLoader(path, **SETTINGS, repeat=True) as loader:
        expected = [batch["input_ids"].tolist() for batch, _ in zip(loader, range(2 * STEPS), strict=False)]
    ours = []
    given = {**SETTINGS, "cache_dir": str(cache), "cache_bytes": room * BLOCK_BYTES, "repeat": True}
    with TokenLoader(path, **given) as loader:
        for step, batch in zip(range(windows * WINDOW_STEPS), loader, strict=False):
            ours.append(batch["input_ids"].tolist())
            if step % WINDOW_STEPS == WINDOW_STEPS // 2:
                assert len(wanted[-1]) == 2 * WINDOW  # also from the last window of a pass to the first of the next
                wait_for(lambda: sum((cache / name).exists() for name in wanted[-1]) >= room)
                waited = len(waited_for)
                now = wanted[-1][:WINDOW]
            if WINDOW_STEPS // 2 <= step % WINDOW_STEPS < WINDOW_STEPS - 8:
                assert all((cache / name).exists() for name in now)
                assert len(waited_for) == waited
    assert ours == expected
    if room == 2 * WINDOW:
        assert len(set(waited_for)) <= WINDOW  # in the first window


def test_only_who_goes_on_fetches_for_the_next_pass(path: str, tmp_path: Path, wanted: list[list[str]]) -> None:
    with TokenLoader(path, **SETTINGS, cache_dir=str(tmp_path / "cache")) as loader:
        rows_of(loader)
        assert len(wanted[-1]) == WINDOW
        rows_of(loader)
        assert len(wanted[-1]) == 2 * WINDOW


def test_two_ranks_fetch_each_block_once(path: str, tmp_path: Path, nothing_to_spare: None) -> None:
    """In one process, which the cache does not know; see `test_ranks_of_a_node_make_each_part_once`."""
    loaders = [
        TokenLoader(path, **SETTINGS, cache_dir=str(tmp_path / "cache"), rank=rank, world_size=2) for rank in range(2)
    ]
    found: dict[int, list[Any]] = {}

    def read(rank: int) -> None:
        found[rank] = rows_of(loaders[rank])

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = [loader.stats().cache for loader in loaders]
    for rank, loader in enumerate(loaders):
        loader.close()
        with TokenLoader(path, **SETTINGS, rank=rank, world_size=2) as other:
            assert found[rank] == rows_of(other)
    assert sum(one.misses for one in stats if one is not None) == BLOCKS
    assert sum(one.fetched_bytes for one in stats if one is not None) == BLOCKS * BLOCK_BYTES


def test_a_start_with_an_empty_cache_does_not_wait_for_blocks(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_for: list[str]
) -> None:
    """Rows are read in pieces until their blocks have come, which is never here, as far as there are bytes to spare."""
    monkeypatch.setattr(NodeCache, "make_ahead", lambda self, entry, make: Ahead.ELSEWHERE)
    with TokenLoader(path, **SETTINGS) as loader:
        expected = rows_of(loader)
    row_bytes = (T + 1) * 2
    for part in (0.5, 10, 10**6):
        monkeypatch.setattr(block_reads, "_SPARE_PART", part)
        waited_for.clear()
        with TokenLoader(path, **SETTINGS, cache_dir=str(tmp_path / f"{part}")) as loader:
            assert rows_of(loader) == expected
            stats = loader.stats().cache
        assert stats is not None
        in_pieces = stats.fetched_bytes - stats.num_bytes
        if part < 1:
            assert in_pieces == BLOCKS * BLOCK_ROWS * row_bytes
            assert waited_for == []
        else:
            most = BLOCKS * (BLOCK_BYTES - 2) / part
            assert most - row_bytes * 4 <= in_pieces <= most  # less by the rows of the batch that is too much
            assert len(waited_for) >= BLOCKS


@pytest.mark.needs("obstore")
def test_close_while_blocks_are_fetched(
    data: bytes, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads have ended, no file is unfinished, and another loader goes on with what is there.

    Other threads may be left: those of remote reads stay with the process.
    """
    fetch_all, fetching = BlocksAhead._fetch_all, set()

    def noted(self: BlocksAhead) -> None:
        fetching.add(threading.current_thread())
        fetch_all(self)

    monkeypatch.setattr(BlocksAhead, "_fetch_all", noted)
    cache = tmp_path / "cache"
    with TokenLoader(path, **SETTINGS) as loader:
        expected = rows_of(loader)
    with RangeServer({"a.bin": data}) as server:
        loader = TokenLoader(f"{server.url}/a.bin", **SETTINGS, cache_dir=str(cache))
        server.latency_s = 0.2
        next(iter(loader))
        assert in_cache(cache) < 2 * WINDOW
        loader.close()
        assert fetching
        assert not any(thread.is_alive() for thread in fetching)
        assert list(cache.glob("*.tmp")) == []
        server.latency_s = 0
        with TokenLoader(f"{server.url}/a.bin", **SETTINGS, cache_dir=str(cache)) as loader:
            assert rows_of(loader) == expected


@pytest.mark.needs("obstore")
def test_an_error_is_raised_by_the_batch_that_needs_the_block(
    data: bytes, path: str, tmp_path: Path, wanted: list[list[str]]
) -> None:
    with TokenLoader(path, **SETTINGS, cache_dir=str(tmp_path / "local")) as loader:
        rows_of(loader)
    begins = {int(name.split("-")[1], 16) * 2 for name in wanted[0][WINDOW:]}  # of the second window
    with RangeServer({"a.bin": data}) as server:
        given = {**SETTINGS, "cache_dir": str(tmp_path / "cache"), "read_retries": 0}
        with TokenLoader(f"{server.url}/a.bin", **given) as loader:
            server.fault = lambda request: (
                "404" if any(begin <= (request.first or 0) < begin + BLOCK_BYTES - 2 for begin in begins) else None
            )
            steps: list[int] = []
            with pytest.raises(CorpusReadError):
                rows_of(loader, steps.append)
    assert steps == list(range(WINDOW_STEPS))
