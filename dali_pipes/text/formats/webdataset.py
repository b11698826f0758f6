"""Documents of a WebDataset tar: one per sample, the field `.txt`, else the text in the field `.json`.

    a/001.json  a/001.txt  a/002.txt        sample a/001 has the fields json and txt, a/002 has txt

The key of a sample is the path up to the first dot of its last part. The files of a sample are adjacent, and nothing
follows the end-of-archive marker.
"""

import hashlib
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import IO, Self, cast

from dali_pipes.corpus.discovery.file_names import is_litter
from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.record_text import text_of
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8, parse_object
from dali_pipes.text.streams import ByteMeter, ChunkReader
from dali_pipes.uris import FilePath

_WANTED = ("txt", "json")
_BLOCK_BYTES = 256 << 10
_KEY_BYTES = 8  # of a sample's key that is remembered


def read_webdataset(path: FilePath, chunks: Iterator[bytes], key: str) -> Iterator[Document]:
    """The text of each sample; `key` is where it is in a `.json`. Memory holds one sample, and about 100 bytes for
    each one that was read.

    Raises CorpusFormatError for a damaged tar, a sample without text, members that appear twice or apart from their
    sample, and invalid UTF-8.
    """
    seen: set[bytes] = set()
    for number, (sample, members) in enumerate(groupby(_members(path, chunks), key=lambda member: member[0]), 1):
        fields: dict[str, bytes | None] = {}
        digest = hashlib.blake2b(sample.encode("utf-8", "surrogateescape"), digest_size=_KEY_BYTES).digest()
        for _, field, data in members:
            if digest in seen:
                raise CorpusFormatError(
                    f"{path}: member {sample}.{field} is separated from the other files of its sample, which must be "
                    "adjacent. Create the archive with `tar --sort=name`."
                )
            if field in fields:
                raise CorpusFormatError(
                    f"{path}: member {sample}.{field} appears twice; remove one of the two, or rename it"
                )
            fields[field] = data
        seen.add(digest)
        yield Document(_text(f"{path}: sample {sample}", fields, key), path, "sample", number)


def _members(path: FilePath, chunks: Iterator[bytes]) -> Iterator[tuple[str, str, bytes | None]]:
    """(key, field, content) of each regular file; None for the content of a field that is not read."""
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], ChunkReader(chunks)), mode="r|", tarinfo=_Member, encoding="utf-8"
        ) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it keeps a record of every member it has passed
                folder, slash, name = member.name.rpartition("/")
                stem, _, field = name.partition(".")
                if (member.islnk() or member.issym()) and field in _WANTED:
                    raise CorpusFormatError(
                        f"{path}: member {member.name} is a link to {member.linkname}, so its text would be missing; "
                        "create the archive with `tar --dereference --hard-dereference`"
                    )
                if not member.isreg() or is_litter(name):
                    continue
                content = None
                if field in _WANTED:
                    file = archive.extractfile(member)
                    assert file is not None
                    content = file.read()
                    if len(content) != member.size:
                        raise tarfile.ReadError(f"{member.name} has {len(content):,} of {member.size:,} bytes")
                yield folder + slash + stem, field, content
            _refuse_more(path, archive)
    except tarfile.TarError as error:
        raise CorpusFormatError(
            f"{path}: the tar archive is damaged or truncated ({error}); copy or recreate it"
        ) from error


class _Member(tarfile.TarInfo):
    """A member whose header must be whole. `tarfile` takes a damaged header, and a missing end, for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the end-of-archive marker
            raise
        except tarfile.HeaderError as error:
            what = "it ends without an end-of-archive marker" if str(error) == "empty header" else error
            raise tarfile.ReadError(f"at byte {archive.offset:,}: {what}") from error


def _refuse_more(path: FilePath, archive: tarfile.TarFile) -> None:
    """Read to the end of the file. Raise CorpusFormatError for data after the end-of-archive marker."""
    rest = cast(IO[bytes], archive.fileobj)
    while block := rest.read(_BLOCK_BYTES):
        if block.strip(b"\0"):
            raise CorpusFormatError(
                f"{path}: contains data after its end-of-archive marker at byte {archive.offset:,}: the file is "
                "damaged, or archives were joined with `cat`. Name the archives separately, or join them with "
                "`tar --concatenate`"
            )


def _text(place: str, fields: dict[str, bytes | None], key: str) -> str:
    name = next((name for name in _WANTED if name in fields), None)
    if name is None:
        raise CorpusFormatError(
            f"{place}: found the fields {', '.join(sorted(fields))}; expected txt, or json with a text in it"
        )
    data = fields[name]
    assert data is not None
    place = f"{place}: field {name}"
    text = decode_utf8(data, place)
    return text if name == "txt" else text_of(parse_object(text, place), key, place)


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    assert key is not None, "samples are not read as whole records"
    return read_webdataset(file.path, file.chunks(meter), key)


def _is_tar(start: FileStart) -> bool:
    return start.head[257:262] == b"ustar" or start.suffix == ".tar"


WEBDATASET = TextFormat("WebDataset (.tar)", _is_tar, _read, has_records=False)
