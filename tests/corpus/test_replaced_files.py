"""A file that another of the same size takes the place of, between two reads, is told instead of served."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import CorpusReadError

IDS = np.arange(5000, dtype=np.int32)


def write_flat(path: Path, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    ids.tofile(path)


def write_parquet(path: Path, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    table = pa.table(
        {"tokens": pa.ListArray.from_arrays(pa.array(np.arange(0, 5001, 50, dtype=np.int32)), pa.array(ids))}
    )
    parquet.write_table(table, path, compression="none", use_dictionary=False, row_group_size=50)


def write_arrow(path: Path, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    table = pa.table(
        {"tokens": pa.ListArray.from_arrays(pa.array(np.arange(0, 5001, 50, dtype=np.int32)), pa.array(ids))}
    )
    with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(compression="lz4")) as file:
        file.write_table(table)


def overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def replace(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


def forget(corpus: Corpus) -> None:
    """As if so many other files had been read that this one is not kept any more."""
    while corpus._pool._evict_one():
        pass
    corpus._chunks.clear()


@pytest.mark.parametrize("put", [overwrite, replace])
@pytest.mark.parametrize("write", [write_flat, write_parquet, write_arrow])
def test_other_content_of_the_same_size(
    tmp_path: Path, write: Callable[..., None], put: Callable[[Path, bytes], None]
) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    write(path, IDS)
    os.utime(path, ns=(10**18, 10**18))
    write(other, IDS[::-1].copy())
    content = other.read_bytes()
    content += bytes(path.stat().st_size - len(content))  # compressed sizes may differ by a few bytes
    with open_corpus(path, dtype="int32" if write is write_flat else None, cache_bytes=0) as corpus:
        assert corpus.tokens(0, 5000).tolist() == IDS.tolist()
        put(path, content[: corpus._data_files[0].size])
        forget(corpus)
        with pytest.raises(CorpusReadError, match=r"a: .*after the corpus was opened"):
            corpus.tokens(0, 5000)


def test_a_file_that_is_left_alone_may_be_given_up_and_opened_again(tmp_path: Path) -> None:
    for write in (write_flat, write_parquet, write_arrow):
        write(tmp_path / "a", IDS)
        with open_corpus(tmp_path / "a", dtype="int32" if write is write_flat else None, cache_bytes=0) as corpus:
            for _ in range(3):
                assert corpus.tokens(100, 3000).tolist() == IDS[100:3100].tolist()
                forget(corpus)
