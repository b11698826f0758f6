"""By blocks, each chunk of a decoded corpus is decoded once in each window, where a window fits the cache."""

import itertools
from pathlib import Path
from typing import Any

import block_oracle
import numpy as np
import pyarrow as pa
import pytest
from shard_files import write_litdata, write_mds
from table_files import list_array, write_parquet

from dali_pipes import open_corpus
from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.windows import WindowRows, split_windows

CHUNK, CHUNKS, T = 128, 60, 16
IDS = np.random.default_rng(1).integers(1, 60_000, CHUNK * CHUNKS).astype(np.uint16)
DOCUMENTS = [list(part) for part in np.split(IDS, range(32, len(IDS), 32))]
SHAPE = BlockShape(window_blocks=4, tokens=2 * CHUNK)


def write(folder: Path, kind: str) -> Path:
    if kind == "parquet":
        rows = [[int(token) for token in part] for part in DOCUMENTS]
        table = pa.table({"input_ids": list_array(rows)})
        return write_parquet(folder / "a.parquet", table, row_group_size=CHUNK // 32)
    chunks = [DOCUMENTS[first : first + CHUNK // 32] for first in range(0, len(DOCUMENTS), CHUNK // 32)]
    arrays = [[np.array(part, np.uint16) for part in chunk] for chunk in chunks]
    if kind == "mds":
        samples = [[{"tokens": part} for part in chunk] for chunk in arrays]
        return write_mds(folder / "mds", {"tokens": "ndarray:uint16"}, samples, compression=["zstd"])
    return write_litdata(folder / "litdata", arrays, compression="zstd")


@pytest.mark.parametrize("kind", ["parquet", "mds", "litdata"])
def test_chunks_are_decoded_once_a_window(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    window_chunks = SHAPE.window_blocks * 3  # a block begins and ends within a chunk
    decoded: dict[str, int] = {}
    for name, shape in (("blocks", SHAPE), ("rows", None)):
        with open_corpus(path, cache_bytes=0) as corpus:
            width = corpus.dtype.itemsize
        with open_corpus(path, cache_bytes=window_chunks * CHUNK * width) as corpus:
            rows = WindowRows(split_windows(corpus.num_tokens, T), seed=3, blocks=shape)
            most = 0
            for begin, end in itertools.pairwise([0, *ends_of(rows)]):
                touched: set[int] = set()
                for first in range(begin, end, 4):
                    starts = rows.plan(0, np.arange(first, min(first + 4, end))).starts
                    tokens = np.empty((len(starts), T + 1), corpus.dtype)
                    corpus.read_rows(starts, tokens)
                    assert all(
                        row.tolist() == IDS[start : start + T + 1].tolist()
                        for row, start in zip(tokens, starts.tolist(), strict=True)
                    )
                    touched.update((starts // CHUNK).tolist(), ((starts + T) // CHUNK).tolist())
                most += len(touched)
            cache: Any = corpus.cache_stats()
            decoded[name] = cache.misses
            if shape is not None:
                assert CHUNKS <= decoded[name] <= most
    assert decoded["blocks"] < 2 * CHUNKS
    assert decoded["rows"] > 3 * CHUNKS


def ends_of(rows: WindowRows) -> list[int]:
    key = rows.key(0)
    assert key is not None
    return [rows.count(0)] if rows.order.blocks is None else block_oracle.ends_in(rows.order.blocks, key)
