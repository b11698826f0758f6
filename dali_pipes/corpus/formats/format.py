"""What a format of token files is to the rest: how to tell its files, and how to find out what is in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dali_pipes.corpus.columns.kept_tables import KeptTables
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.storage.byte_file import ByteFile


@dataclass(frozen=True, eq=False, repr=False)
class OpenOptions:
    """What the user set for the files of a corpus.

    scans:        threads and a progress bar for what has to be read whole
    tables:       what earlier starts found in tables
    id_type:      integer type of the ids; None: not given
    token_column: column that holds the ids; None: not given
    verify:       compare recorded checksums
    use_masks:    whether columns that say which ids are learned are used
    """

    scans: ColumnScans
    tables: KeptTables
    id_type: np.dtype[Any] | None = None
    token_column: str | None = None
    verify: bool = False
    use_masks: bool = True


def _always(file: ByteFile) -> bool:
    return True


def never(file: ByteFile) -> bool:
    """For formats without such files."""
    return False


@dataclass(frozen=True, eq=False, repr=False)
class Format:
    """One line of the registry.

    recognize:          whether an open file, of which the first 4 KiB are given, has the mark of this format
    inspect:            check an open file and say where its ids are; of an index, those of every file that it lists.
                        Blocks. Raises CorpusFormatError, CorpusReadError, ConfigError
    recognize_unmarked: whether a file without the mark of any format is of this one
    is_whole:           whether a file with the mark is a whole one, so that reading it as ids alone must be a mistake
    index:              whether folders of this format have an index file that lists their shards
    is_table:           whether it is read by pyarrow, which takes long enough to open several files in parallel
    has_header:         False for ids alone
    has_columns:        whether `token_column` applies
    has_checksums:      whether `verify_checksums` applies
    """

    name: str
    recognize: Callable[[ByteFile, bytes], bool]
    inspect: Callable[[ByteFile, OpenOptions], list[DataFile]]
    recognize_unmarked: Callable[[ByteFile], bool] = never
    is_whole: Callable[[ByteFile], bool] = _always
    index: Literal["none", "optional", "required"] = "none"
    is_table: bool = False
    has_header: bool = True
    has_columns: bool = False
    has_checksums: bool = False
