"""Pieces that are read through the cache of the node are those of the files, wherever blocks begin and end."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.storage.node_cache import NodeCache

TOKENS = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of one corpus; the ids are wider in the second one."""
    folder = tmp_path_factory.mktemp("files")
    ids = np.random.default_rng(0).integers(0, 60_000, TOKENS)
    np.save(folder / "a.npy", ids[:117].astype(np.uint16))
    np.save(folder / "b.npy", ids[117:].astype(">u4"))
    return [folder / "a.npy", folder / "b.npy"]


@st.composite
def grids(draw: st.DrawFn) -> BlockGrid:
    first, lookahead = draw(st.integers(0, 40)), draw(st.integers(0, 9))
    end = draw(st.integers(first + 20, TOKENS))
    if draw(st.booleans()):
        size = draw(st.integers(1, 90))
        return BlockGrid(first, size, -(-(end - first) // size), lookahead, end)
    inner = draw(st.lists(st.integers(first, end), max_size=6))
    bounds = np.array(sorted([first, *inner, end]), np.int64)
    return BlockGrid(first, 0, len(bounds) - 1, 0, end, bounds)


@given(
    grid=grids(),
    pieces=st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, 200)), min_size=1, max_size=8),
    room=st.sampled_from([0, 100, 400, 10_000]),
)
def test_pieces_anywhere(files: list[Path], grid: BlockGrid, pieces: list[tuple[int, int]], room: int) -> None:
    starts = np.array([start for start, _ in pieces])
    lengths = np.array([min(length, TOKENS - start) for start, length in pieces])
    targets = np.cumsum(lengths + 1) - lengths  # a place before each stays as it is
    with tempfile.TemporaryDirectory() as folder, open_corpus(files) as corpus:
        expected = np.full(int(lengths.sum()) + len(pieces) + 1, 7, corpus.dtype)
        for start, length, target in zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
            expected[target : target + length] = corpus.tokens(start, length)
        corpus.read_by_blocks(NodeCache(Path(folder), max(1, room), "cache_bytes"), grid)
        for _ in range(2):
            out = np.full(len(expected), 7, corpus.dtype)
            corpus.read_pieces(starts, lengths, targets, out)
            assert np.array_equal(out, expected)


@given(grid=grids(), row=st.integers(1, 30), data=st.data())
def test_rows_anywhere(files: list[Path], grid: BlockGrid, row: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, TOKENS - row), min_size=1, max_size=12))
    with tempfile.TemporaryDirectory() as folder, open_corpus(files) as corpus:
        expected = np.stack([corpus.tokens(start, row) for start in starts])
        corpus.read_by_blocks(NodeCache(Path(folder), 10_000, "cache_bytes"), grid)
        out = np.empty_like(expected)
        corpus.read_rows(starts, out)
        assert np.array_equal(out, expected)
