"""Files with one run of ids, back to back, after a header or none: what simple formats share.

byte 0     data_offset
header     ids ...                   num_tokens * itemsize bytes, up to the end of the file
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.storage.fingerprint import PIECE_BYTES, digest_file, read_samples
from dali_pipes.uris import FilePath


@dataclass(frozen=True)
class Layout:
    """Where the ids of a file are.

    stored:      integer dtype as stored, with byte order
    data_offset: byte of the first id
    num_tokens:  number of ids
    """

    stored: np.dtype[Any]
    data_offset: int
    num_tokens: int

    @property
    def extents(self) -> Int64Array:
        """As in DataFile: int64 (1, 2), or (0, 2) for no ids."""
        runs = [[self.data_offset, self.num_tokens]] if self.num_tokens else []
        return np.array(runs, np.int64).reshape(-1, 2)


def check_stated_type(path: FilePath, format: str, stated: np.dtype[Any], given: np.dtype[Any] | None) -> None:
    """Raise CorpusFormatError where the user gave another id type than the file states."""
    if given is not None and given.newbyteorder("=") != stated.newbyteorder("="):
        raise CorpusFormatError(
            f"{path}: the {format} file holds {stated.name} ids, but dtype = {given.name!r} was given. Leave dtype out."
        )


def token_run(file: ByteFile, format: str, layout: Layout, samples: Sequence[bytes] | None = None) -> DataFile:
    """The file as a corpus takes it. Blocks for a few reads. samples: what `read_samples` gives, if it is known."""
    samples = read_samples(file) if samples is None else samples
    header = file.read(0, layout.data_offset)
    return DataFile(
        path=file.path,
        format=format,
        size=file.size,
        identity=file.identity,
        stored=layout.stored,
        data_offset=layout.data_offset,
        extents=layout.extents,
        digest=digest_file(file.path, file.size, layout.stored, header, samples),
        zeros_last=file.size - layout.data_offset >= PIECE_BYTES and not any(samples[-1][-PIECE_BYTES:]),
    )
