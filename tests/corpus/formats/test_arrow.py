"""Arrow files whose ids are read as they lie: offsets beyond 32 bits, lists that share values or leave some out."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from table_files import table_of, write_arrow

from dali_pipes.corpus import open_corpus


class SparseFile:
    """A file in which large writes leave a hole; remembers where each of them begins."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.holes: list[int] = []

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < 1 << 20:
            return self._file.write(data)
        self.holes.append(self._file.tell())
        self._file.seek(size, 1)
        return size

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("stream", [True, False])
def test_ids_beyond_32_bits(tmp_path: Path, stream: bool) -> None:
    """2^31 + 1000 ids in a batch, and a second batch behind byte 2^32; the ids of the first are a hole of zeros."""
    count = 2**31 + 1000
    ends = np.array([0, 5, 2**31 - 2, 2**31 + 2, count])
    large = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.zeros(count, np.uint16)))
    small = pa.LargeListArray.from_arrays(pa.array([0, 3], pa.int64()), pa.array([7, 8, 9], pa.uint16()))
    path = tmp_path / "a.arrow"
    schema = pa.schema([("tokens", large.type)])
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    new_writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with (
        contextlib.closing(SparseFile(path)) as sink,
        new_writer(pa.PythonFile(sink, mode="w"), schema, options=options) as writer,
    ):
        for array in (large, small):
            writer.write_batch(pa.record_batch([array], schema))
    (hole,) = sink.holes
    markers = {position: position % 50000 + 1 for position in (0, *range(2**31 - 2, 2**31 + 3), count - 1)}
    with path.open("r+b") as file:
        for position, marker in markers.items():
            file.seek(hole + 2 * position)
            file.write(marker.to_bytes(2, "little"))
    with open_corpus(path) as corpus:
        assert corpus.num_tokens == count + 3
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.tolist() == [*ends.tolist(), count + 3]
        for position in markers:
            around = range(max(0, position - 3), min(position + 4, count + 3))
            expected = [[7, 8, 9][at - count] if at >= count else markers.get(at, 0) for at in around]
            assert corpus.tokens(around.start, len(around)).tolist() == expected


def test_lists_that_share_values_or_leave_some_out(tmp_path: Path) -> None:
    values = pa.array(range(100, 120), pa.int32())
    view = pa.ListViewArray.from_arrays(pa.array([3, 0, 3, 19], pa.int32()), pa.array([4, 2, 4, 1], pa.int32()), values)
    path = write_arrow(tmp_path / "a", table_of([view]))
    with open_corpus(path) as corpus:
        assert corpus.cache_stats() is None
        assert corpus.tokens(0, 11).tolist() == [103, 104, 105, 106, 100, 101, 103, 104, 105, 106, 119]
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.tolist() == [0, 4, 6, 10, 11]


def test_a_null_value_outside_of_all_rows_is_passed_over(tmp_path: Path) -> None:
    values = pa.array([1, None, 2, 3, None], pa.int32())
    view = pa.ListViewArray.from_arrays(pa.array([2, 0], pa.int32()), pa.array([2, 1], pa.int32()), values)
    for compression in (None, "zstd"):
        with open_corpus(write_arrow(tmp_path / "a", table_of([view]), compression)) as corpus:
            assert corpus.tokens(0, 3).tolist() == [2, 3, 1]


def test_dictionaries_that_grow_and_are_replaced(tmp_path: Path) -> None:
    """In a stream, each batch is read with the dictionaries that hold for it, of other columns too."""
    ids = [[[5, 6], [5]], [[6, 7, 5]], [[900]], [[5]]]
    dictionaries = [[5, 6], [5, 6, 7], [900], [5]]
    element = pa.dictionary(pa.int8(), pa.int32())
    schema = pa.schema([("word", pa.dictionary(pa.int8(), pa.string())), ("tokens", pa.list_(element))])
    path = tmp_path / "a"
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(path, schema, options=options) as writer:
        for number, (rows, known) in enumerate(zip(ids, dictionaries, strict=True)):
            indices = pa.array([known.index(token) for row in rows for token in row], pa.int8())
            values = pa.DictionaryArray.from_arrays(indices, pa.array(known, pa.int32()))
            ends = pa.array([0, *np.cumsum([len(row) for row in rows])], pa.int32())
            words = pa.array([f"word {number}"] * len(rows)).dictionary_encode()
            words = pa.DictionaryArray.from_arrays(words.indices.cast(pa.int8()), words.dictionary)
            lists = pa.ListArray.from_arrays(ends, values)
            writer.write_batch(pa.record_batch([words, lists.cast(pa.list_(element))], schema))
    with open_corpus(path, cache_bytes=0) as corpus:
        expected = [token for rows in ids for row in rows for token in row]
        assert corpus.tokens(0, len(expected)).tolist() == expected
        assert corpus.tokens(5, 1).tolist() == [5]
