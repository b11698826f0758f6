"""Documents of plain text files: the file is one document, or several with a separator between them.

A byte order mark at the start is accepted; line ends stay as they are.
"""

import codecs
from collections.abc import Iterator

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.documents import Document, looks_like_text
from dali_pipes.text.formats.text_format import TextFile, TextFormat
from dali_pipes.text.streams import ByteMeter
from dali_pipes.uris import FilePath

_SUFFIXES = (".txt", ".text", ".md")


def read_plain_text(path: FilePath, chunks: Iterator[bytes], separator: str | None) -> Iterator[Document]:
    """The file as one document; with `separator`, the texts between its occurrences.

    Nothing after the last separator is not a document; nothing between two of them is an empty one.
    """
    if separator is None:
        text = "".join(_decoded(path, chunks))
        yield Document(text, path, "document", 1)
        return
    number, overlap = 1, len(separator) - 1
    pending: list[str] = []  # of a document that goes on, without its tail, which may begin a separator
    tail = ""
    for piece in _decoded(path, chunks):
        first, *others = (tail + piece).split(separator)
        for other in others:
            yield Document("".join([*pending, first]), path, "document", number)
            pending, first, number = [], other, number + 1
        kept = max(0, len(first) - overlap)
        pending.append(first[:kept])
        tail = first[kept:]
    rest = "".join([*pending, tail])
    if rest:
        yield Document(rest, path, "document", number)


def _decoded(path: FilePath, chunks: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    is_start = True
    for chunk, is_last in _with_last(chunks):
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, is_last)
        except UnicodeDecodeError as error:
            raise CorpusFormatError(
                f"{path}: byte {before - held + error.start:,} of the text is not valid UTF-8 ({error.reason}); "
                "save the file as UTF-8"
            ) from None
        before += len(chunk)
        if is_start and text:
            text, is_start = text.removeprefix("\ufeff"), False
        yield text


def _with_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        yield chunk, False
    yield b"", True


def _read(file: TextFile, _: str | None, separator: str | None, meter: ByteMeter) -> Iterator[Document]:
    return read_plain_text(file.path, file.chunks(meter), separator)


PLAIN_TEXT = TextFormat(
    "plain text (.txt)",
    lambda start: start.suffix in _SUFFIXES,
    _read,
    looks_like=lambda start: looks_like_text(start.head),
    has_records=False,
)
