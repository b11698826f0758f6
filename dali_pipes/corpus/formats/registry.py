"""The formats of token files, and which of them a file has.

Suffixes are ambiguous (`.bin` has four meanings, `.npy` two, `.arrow` two), so content decides. Formats are asked in
the order of the table. A file without any mark may be foreign, which is refused by name; if not, it is ids alone.
"""

from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.corpus.formats import (
    arrayrecord,
    arrow,
    datatrove,
    flat,
    litdata,
    llmc,
    mds,
    megatron,
    npy,
    parquet,
    synthetic,
    tfrecord,
)
from dali_pipes.corpus.formats.foreign import refuse_foreign
from dali_pipes.corpus.formats.format import Format, never
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

_TABLE = (
    Format("mds", mds.recognize, mds.inspect, index="required", is_whole=never, has_columns=True, has_checksums=True),
    Format("litdata", litdata.recognize, litdata.inspect, index="required", is_whole=never),
    Format("datatrove", datatrove.recognize, datatrove.inspect, is_whole=never),
    Format("npy", npy.recognize, npy.inspect, is_whole=npy.is_whole),
    Format("megatron", megatron.recognize, megatron.inspect, recognize_unmarked=megatron.has_index_beside),
    Format("parquet", parquet.recognize, parquet.inspect, is_whole=parquet.is_whole, is_table=True, has_columns=True),
    Format(
        "arrow",
        arrow.recognize,
        arrow.inspect,
        is_whole=arrow.is_whole,
        index="optional",
        is_table=True,
        has_columns=True,
    ),
    Format("llmc", llmc.recognize, llmc.inspect, is_whole=llmc.is_whole),
    Format("arrayrecord", arrayrecord.recognize, arrayrecord.inspect, has_columns=True),
    Format(
        "tfrecord",
        tfrecord.recognize,
        tfrecord.inspect,
        recognize_unmarked=tfrecord.is_named,
        is_whole=tfrecord.is_whole,
        has_columns=True,
        has_checksums=True,
    ),
    Format("flat", flat.recognize, flat.inspect, recognize_unmarked=flat.recognize_unmarked, has_header=False),
)
_BY_NAME = {format.name: format for format in _TABLE}
FORMATS = tuple(sorted([*_BY_NAME, synthetic.FORMAT]))
"""Names of all formats, including the one without files."""

_HEAD_BYTES = 4096
_BYTE_LEVEL = 1


def check_name(name: str) -> None:
    """Raise ConfigError for a format that is neither known nor "auto"."""
    if name != "auto" and name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; choose auto, {', '.join(FORMATS)}")


def uses_index(name: str) -> bool:
    """Whether a folder may be a set with an index, if the user gave this format."""
    return name == "auto" or (name in _BY_NAME and _BY_NAME[name].index != "none")


def format_named(name: str) -> Format:
    """The format of files with this name."""
    return _BY_NAME[name]


def find_format(file: ByteFile, name: str, id_width: int | None = None) -> Format:
    """The format to read a file with. Blocks for a few reads.

    name:     as the user gave it, "auto" for the one that the file has
    id_width: bytes of an id, if the user gave a type

    Raises CorpusFormatError for a file of another kind, naming it.
    """
    if name == "auto":
        return _recognize(file, id_width)
    format = _BY_NAME[name]
    if format.index != "none":
        _check_index(file, format)
    if not format.has_header:
        _refuse_header(file, format)
    return format


def is_table(file: ByteFile, name: str) -> bool:
    """Whether a file has a format of tables, by its mark or by the name that the user gave."""
    found = format_with_mark(file) if name == "auto" else _BY_NAME[name]
    return found is not None and found.is_table


def format_with_mark(file: ByteFile) -> Format | None:
    """The format whose mark a file has."""
    head = _head(file)
    return next((format for format in _TABLE if format.recognize(file, head)), None)


def _recognize(file: ByteFile, id_width: int | None) -> Format:
    marked = format_with_mark(file)
    if marked is not None:
        return marked
    # Ids of one byte may look like text.
    refuse_foreign(file, _head(file), may_be_text=id_width == _BYTE_LEVEL)
    return next(format for format in _TABLE if format.recognize_unmarked(file))


def _check_index(file: ByteFile, format: Format) -> None:
    kind = kind_of_index(file.path)
    if kind == format.name or (kind is None and format.index == "optional"):
        return
    found = "is not an index.json that lists shards" if kind is None else f"lists the shards of a set of format {kind}"
    raise CorpusFormatError(
        f"{file.path}: {found}, but format = {format.name!r} was given. Name the folder of a set of that format, or "
        "leave format out."
    )


def _refuse_header(file: ByteFile, format: Format) -> None:
    """Refuse a whole file of another format, whose header, or all of it, would be read as ids.

    What merely begins like one is taken as ids.
    """
    head = _head(file)
    other = next((one for one in _TABLE if one.recognize(file, head) and one.is_whole(file)), None)
    if other is not None:
        raise CorpusFormatError(
            f"{file.path}: has format {other.name}; with format = {format.name!r} its header would be read as ids. Set "
            f"format = {other.name!r}, or leave format out."
        )


def _head(file: ByteFile) -> bytes:
    return file.read(0, min(file.size, _HEAD_BYTES))
