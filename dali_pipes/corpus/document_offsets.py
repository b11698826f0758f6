"""Where the documents of a corpus begin, from the indexes of its files, or from reading the lengths of rows.

    a.parquet    0 3 5          b.parquet    0 0 4          the corpus    0 3 5 5 9

The lengths of rows in a large table have a file in the user's cache folder (`row_chunks`); those of many small tables
are cached here, together.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from dali_pipes.corpus.columns import kept_tables
from dali_pipes.corpus.columns.scans import LARGE_TABLE_BYTES, ColumnScans
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.runtime import offset_cache
from dali_pipes.uris import Uri


def join_offsets(files: Sequence[DataFile], content_key: str) -> Int64Array:
    """Token position of each document's start, and the end: int64 (D + 1,), read-only. Each file has documents.

    content_key: of the corpus. Blocks; raises CorpusReadError and CorpusFormatError.
    """
    # With the first documents: rows cut from the stream do not need the modules of tables.
    from dali_pipes.corpus.columns import row_chunks
    from dali_pipes.corpus.columns.row_facts import KEPT_VERSION

    small = [file for file in files if file.measure_rows is not None and file.size < row_chunks.LEAST_KEPT_BYTES]
    if len(small) < kept_tables.LEAST_FILES:
        return _read(files)
    first_documents = np.cumsum([0, *(file.num_documents or 0 for file in files)])
    first_tokens = np.cumsum([0, *(file.num_tokens for file in files)])

    def is_plausible(offsets: Int64Array) -> bool:
        is_whole = len(offsets) == first_documents[-1] + 1
        agrees = is_whole and np.array_equal(offsets[first_documents], first_tokens)
        return agrees and offset_cache.may_be_offsets(offsets, strictly=False)

    about = f"dali_pipes rows of {len(files)} tables {KEPT_VERSION} {content_key}".encode()
    paths = [file.path for file in files]
    return offset_cache.find_or_make(paths, "rows", about, is_plausible, partial(_read, files))[0]


def _read(files: Sequence[DataFile]) -> Int64Array:
    measures = [file.measure_rows for file in files if file.measure_rows is not None]
    if measures:
        with ColumnScans("reading row lengths") as scans:
            waits = isinstance(files[0].path, Uri)
            if waits or files[0].size >= LARGE_TABLE_BYTES:
                scans.for_files(lambda measure: measure(scans), measures, waits=waits)
            else:
                for measure in measures:
                    measure(scans)
    parts, before = [np.zeros(1, np.int64)], 0
    for file in files:
        assert file.read_document_offsets is not None
        parts.append(before + file.read_document_offsets()[1:])
        before += file.num_tokens
    offsets = np.concatenate(parts)
    offsets.flags.writeable = False
    return offsets
