"""The formats of token files, and which of them a file has.

Suffixes are ambiguous (`.bin` has four meanings, `.npy` two, `.arrow` two), so content decides. Formats are asked in
the order of the table. A file without any mark may be foreign, which is refused by name; if not, it is ids alone.
"""

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.corpus.formats import flat, llmc, marks, npy, synthetic
from dali_pipes.corpus.formats.foreign import refuse_foreign
from dali_pipes.corpus.formats.format import Format, OpenOptions, never
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

# Most corpora are plain runs of ids. The modules of other formats are imported with the first such file.


def _is_datatrove(file: ByteFile, head: bytes) -> bool:
    if file.path.suffix != marks.DATATROVE_SUFFIX:
        return False
    from dali_pipes.corpus.formats import datatrove

    return datatrove.recognize(file, head)


def _inspect_mds(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import mds

    return mds.inspect(file, options)


def _inspect_litdata(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import litdata

    return litdata.inspect(file, options)


def _inspect_datatrove(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import datatrove

    return datatrove.inspect(file, options)


def _inspect_megatron(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import megatron

    return megatron.inspect(file, options)


def _inspect_parquet(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import parquet

    return parquet.inspect(file, options)


def _inspect_arrow(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import arrow

    return arrow.inspect(file, options)


def _inspect_arrayrecord(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import arrayrecord

    return arrayrecord.inspect(file, options)


def _inspect_tfrecord(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    from dali_pipes.corpus.formats import tfrecord

    return tfrecord.inspect(file, options)


_TABLE = (
    Format("mds", marks.is_mds, _inspect_mds, index="required", is_whole=never, has_columns=True, has_checksums=True),
    Format("litdata", marks.is_litdata, _inspect_litdata, index="required", is_whole=never),
    Format("datatrove", _is_datatrove, _inspect_datatrove, is_whole=never),
    Format("npy", npy.recognize, npy.inspect, is_whole=npy.is_whole),
    Format("megatron", marks.is_megatron, _inspect_megatron, recognize_unmarked=marks.has_index_beside),
    Format(
        "parquet",
        marks.is_parquet,
        _inspect_parquet,
        is_whole=marks.is_whole_parquet,
        is_table=True,
        has_columns=True,
    ),
    Format(
        "arrow",
        marks.is_arrow,
        _inspect_arrow,
        is_whole=marks.is_whole_arrow,
        index="optional",
        is_table=True,
        has_columns=True,
    ),
    Format("llmc", llmc.recognize, llmc.inspect, is_whole=llmc.is_whole),
    Format("arrayrecord", marks.is_arrayrecord, _inspect_arrayrecord, has_columns=True),
    Format(
        "tfrecord",
        marks.is_tfrecord,
        _inspect_tfrecord,
        recognize_unmarked=marks.is_named_tfrecord,
        is_whole=marks.is_whole_tfrecord,
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
