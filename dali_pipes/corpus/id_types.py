"""The integer types of the ids in the files of a corpus: usually one; files of several types can be read together."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.storage.batched_reads import RawReads
from dali_pipes.storage.file_pool import FilePool
from dali_pipes.storage.mapped_reads import MappedReads

Reads: TypeAlias = Literal["calls", "mapped"]
"""How ids that need no decoding get from a file to memory: with positioned reads, or from a map of the file."""

_SERVED = {np.dtype(np.uint64): np.dtype(np.int64)}


class StoredType(NamedTuple):
    """How the ids of some files are stored. native: the same type in this machine's order. raw: reads such ids."""

    native: np.dtype[Any]
    is_swapped: bool
    raw: RawReads | MappedReads

    @property
    def served(self) -> np.dtype[Any]:
        """The type in which such ids are handed out."""
        return _SERVED.get(self.native, self.native)


def stored_types(types: Sequence[np.dtype[Any]], pool: FilePool, reads: Reads) -> tuple[list[StoredType], Int64Array]:
    """The different types, and the number among these of each file's. types: of each file of the pool."""
    different = list(dict.fromkeys(types))
    reader = MappedReads if reads == "mapped" and pool.is_local else RawReads
    found = [StoredType(one.newbyteorder("="), not one.isnative, reader(pool, one.itemsize)) for one in different]
    return found, np.array([different.index(one) for one in types], np.int64)
