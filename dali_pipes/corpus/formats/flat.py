"""Headerless files: ids back to back, as nanoGPT (`.bin`) and the Dolma toolkit (`.npy` without a header) write them.

Such a file does not state the width of its ids. uint16 is the default; whatever can be checked is checked:

    uint32 ids  [464, 3290, 70000]   read as uint16:  464 0  3290 0  4464 1      every second value next to nothing
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.token_run import Layout, token_run
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.storage.fingerprint import read_samples
from dali_pipes.uris import FilePath

DEFAULT_DTYPE = np.dtype("<u2")
_ONLY_IDS = "If it contains only ids, set format = 'flat' and dtype."
_TABLE_SUFFIXES = (".arrow", ".feather", ".parquet")
_TEXT_SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")


def recognize(file: ByteFile, head: bytes) -> bool:
    """False: these files are without a mark."""
    return False


def recognize_unmarked(file: ByteFile) -> bool:
    """True unless its name or a file next to it indicates another format; then CorpusFormatError.

    With an index next to it, it is part of a set; a file named like a table or text would be read as junk ids.
    """
    path = file.path
    index = path.with_name("index.json")
    kind = kind_of_index(index)
    if kind is not None:
        raise CorpusFormatError(
            f"{path}: looks like a shard of format {kind}, because {index.name} is next to it. Name the folder "
            f"instead. {_ONLY_IDS}"
        )
    if path.suffix.lower() in _TABLE_SUFFIXES:
        raise CorpusFormatError(
            f"{path}: is named like a table but does not start like a Parquet or Arrow file: it is truncated, damaged, "
            f"or in an old version of the format. Copy or recreate it. {_ONLY_IDS}"
        )
    if path.suffix.lower() in _TEXT_SUFFIXES:  # its content tells only from some length on
        raise CorpusFormatError(
            f"{path}: is named like text, not like token ids. Set tokenizer = 'tokenizer.json', or convert it with "
            f"`dali-pipes tokenize`. {_ONLY_IDS}"
        )
    return True


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. The ids are of the type that the user gave, else uint16."""
    samples = read_samples(file)
    layout = parse_flat(file, options.id_type)
    if options.id_type is None:
        refuse_wider_ids(file, samples)
    return [token_run(file, "flat", layout, samples)]


def parse_flat(file: ByteFile, dtype: np.dtype[Any] | None) -> Layout:
    """Where the ids are, `dtype` (uint16 if None) being their type.

    Raises CorpusFormatError for uint64 ids, and for a size that is not a multiple of the width.
    """
    if dtype is not None and dtype.name == "uint64":
        raise CorpusFormatError(
            f"{file.path}: dtype = 'uint64' is not supported for a file without a header; set dtype = 'int64', which "
            "reads the same bytes for every id below 2^63"
        )
    stored = DEFAULT_DTYPE if dtype is None else dtype
    if file.size % stored.itemsize:
        raise CorpusFormatError(
            f"{file.path}: {file.size:,} bytes are not a multiple of {stored.itemsize}, the width of {stored.name}: "
            "the file is truncated, its ids have another width (set dtype), or it has a header (set format)"
        )
    return Layout(stored, 0, file.size // stored.itemsize)


def refuse_wider_ids(file: ByteFile, samples: Sequence[bytes]) -> None:
    """Raise CorpusFormatError if the samples, read as uint16 because no dtype was given, show wider ids.

    samples: pieces of the file, each starting at a multiple of 8 bytes.
    """
    values = b"".join(sample[: len(sample) // 8 * 8] for sample in samples)
    words = np.frombuffer(values, DEFAULT_DTYPE)
    for width, names, example in ((4, "int64 or uint64", "int64"), (2, "uint32 or int32", "uint32")):
        if _looks_padded(words.reshape(-1, width)):
            raise CorpusFormatError(
                f"{file.path}: would be read as uint16, but its ids look like {names}: only the first of every {width} "
                f"values contains an id. Set dtype, for example dtype = '{example}'; if the ids are uint16, set dtype "
                f"= 'uint16'.{_missing_index(file.path)}"
            )


def _missing_index(path: FilePath) -> str:
    index = path.with_suffix(".idx").name
    return f" If it belongs to a Megatron pair, its index {index} is missing." if path.suffix == ".bin" else ""


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
