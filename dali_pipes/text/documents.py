"""A document as it comes from a file, before it is tokens."""

from typing import Any, NamedTuple

from dali_pipes.uris import FilePath

CONTROL_BYTES = frozenset(range(0x20)) - frozenset(b"\t\n\v\f\r\x1b")
"""Bytes that the beginning of a text does not contain."""


class Document(NamedTuple):
    """content: the text; for readers of whole records a dict, such as a conversation with its `messages`.

    number: of the `unit` (line, row, record, sample, document) in `file`, from 1.
    """

    content: Any
    file: FilePath
    unit: str
    number: int

    @property
    def place(self) -> str:
        """Where it was found, for messages."""
        return f"{self.file}: {self.unit} {self.number}"


def looks_like_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 without control characters; False for an empty file."""
    if not head or not CONTROL_BYTES.isdisjoint(head):
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # the head may end within a character
    return True
