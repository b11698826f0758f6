"""Headerless files: ids back to back, as nanoGPT (`.bin`) and the Dolma toolkit (`.npy` without a header) write them.

Nothing in such a file says how wide an id is. uint16 is the default; what can be checked is checked:

    uint32 ids  [464, 3290, 70000]   read as uint16:  464 0  3290 0  4464 1      every second value next to nothing
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import Layout
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.local import OpenFile

DEFAULT_DTYPE = np.dtype("<u2")


def parse_flat(file: OpenFile, dtype: np.dtype[Any] | None) -> Layout:
    """Where the ids are, `dtype` (uint16 if None) being their type.

    Raises CorpusFormatError for a size that is no multiple of the width.
    """
    stored = DEFAULT_DTYPE if dtype is None else dtype
    if file.size % stored.itemsize:
        raise CorpusFormatError(
            f"{file.path}: {file.size} bytes is not a multiple of {stored.itemsize}, the width of {stored.name}: the "
            f"file is truncated, or its ids have another width (dtype=), or it has a header (format=)"
        )
    return Layout(stored, 0, file.size // stored.itemsize)


def refuse_wider_ids(file: OpenFile, samples: Sequence[bytes]) -> None:
    """Raise CorpusFormatError if the samples, read as uint16 because no dtype was given, show wider ids.

    samples: pieces of the file, each starting at a multiple of 8 bytes.
    """
    values = b"".join(sample[: len(sample) // 8 * 8] for sample in samples)
    words = np.frombuffer(values, DEFAULT_DTYPE)
    for width, names, example in ((4, "int64 or uint64", "int64"), (2, "uint32 or int32", "uint32")):
        if _looks_padded(words.reshape(-1, width)):
            raise CorpusFormatError(
                f"{file.path}: was about to be read as uint16, but its ids look like {names}: of every {width} values "
                f"only the first carries an id. Say which with dtype=, for example dtype='{example}'; if the ids "
                f"really are uint16, say dtype='uint16'.{_missing_index(file.path)}"
            )


def _missing_index(path: Path) -> str:
    index = path.with_suffix(".idx").name
    return f" If it is of a Megatron pair, {index} is missing beside it." if path.suffix == ".bin" else ""


def _looks_padded(columns: npt.NDArray[np.uint16]) -> bool:
    """Whether only column 0 carries ids. Lenient towards made-up data with many zeros or few distinct values."""
    low, second, rest = columns[:, 0], columns[:, 1], columns[:, 2:]
    if len(columns) < 8 or rest.any() or np.count_nonzero(low) * 4 < len(low) * 3:
        return False
    if not second.any():
        return len(np.unique(low)) >= 4
    # Ids up to 2^20: the upper half is small, never all over the place as the lower half is.
    if len(columns) < 32 or second.max() >= 16 or low.max() < 256:
        return False
    return len(np.unique(low)) >= 16
