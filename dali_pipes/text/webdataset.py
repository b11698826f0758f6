"""Documents of a WebDataset tar: one a sample, the field `.txt`, else the text in the field `.json`.

    a/001.json  a/001.txt  a/002.txt        sample a/001 has the fields json and txt, a/002 has txt

The key of a sample is the path up to the first dot of its last part; the files of a sample lie side by side.
"""

import json
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.lines import text_of
from dali_pipes.text.streams import ChunkReader

_WANTED = ("txt", "json")


def read_webdataset(path: Path, chunks: Iterator[bytes], key: str) -> Iterator[Document]:
    """The text of each sample; `key` is where it is in a `.json`. The memory is that of one sample.

    Raises CorpusFormatError for a damaged tar, a sample without a text, and a text that is not UTF-8.
    """
    for number, (sample, members) in enumerate(groupby(_members(path, chunks), key=lambda member: member[0]), 1):
        fields = {field: data for _, field, data in members}
        yield Document(_text(f"{path}: sample {sample}", fields, key), path, "sample", number)


def _members(path: Path, chunks: Iterator[bytes]) -> Iterator[tuple[str, str, bytes | None]]:
    """(key, field, content) of each regular file; the content of fields that are not wanted is left out."""
    try:
        with tarfile.open(fileobj=cast(IO[bytes], ChunkReader(chunks)), mode="r|") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                folder, slash, name = member.name.rpartition("/")
                stem, _, field = name.partition(".")
                content = None
                if field in _WANTED:
                    file = archive.extractfile(member)
                    assert file is not None
                    content = file.read()
                    if len(content) != member.size:
                        raise tarfile.ReadError(f"{member.name} has {len(content)} of {member.size} bytes")
                archive.members = []  # type: ignore[attr-defined]  # it keeps a record of every member it has passed
                yield folder + slash + stem, field, content
    except tarfile.TarError as error:
        raise CorpusFormatError(f"{path}: is a damaged or cut off tar archive: {error}") from error


def _text(place: str, fields: dict[str, bytes | None], key: str) -> str:
    name = next((name for name in _WANTED if name in fields), None)
    if name is None:
        raise CorpusFormatError(
            f"{place}: has the fields {', '.join(sorted(fields))}; one named txt is expected, or json with a text in it"
        )
    data = fields[name]
    assert data is not None
    try:
        text = data.decode("utf-8")
        if name == "txt":
            return text
        record: Any = json.loads(text)
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{place}: the field {name} is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{place}: the field json cannot be parsed: {error}") from None
    if not isinstance(record, dict):
        raise CorpusFormatError(f"{place}: the field json is a {type(record).__name__}; an object is expected")
    return text_of(record, key, place)
