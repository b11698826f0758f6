"""The integer types of the ids in the files of a corpus: usually one; files of several types can be read together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.storage.batched_reads import RawReads
from dali_pipes.storage.file_pool import FilePool

_SERVED = {np.dtype(np.uint64): np.dtype(np.int64)}


class StoredType(NamedTuple):
    """How the ids of some files are stored. native: the same type in this machine's order. raw: reads such ids."""

    native: np.dtype[Any]
    is_swapped: bool
    raw: RawReads

    @property
    def served(self) -> np.dtype[Any]:
        """The type in which such ids are handed out."""
        return _SERVED.get(self.native, self.native)


def stored_types(types: Sequence[np.dtype[Any]], pool: FilePool) -> tuple[list[StoredType], Int64Array]:
    """The different types, and the number among these of each file's. types: of each file of the pool."""
    different = list(dict.fromkeys(types))
    found = [StoredType(one.newbyteorder("="), not one.isnative, RawReads(pool, one.itemsize)) for one in different]
    return found, np.array([different.index(one) for one in types], np.int64)
