"""A document as it comes from a file, before it is tokens."""

from pathlib import Path
from typing import Any, NamedTuple

CONTROL_BYTES = frozenset(range(0x20)) - frozenset(b"\t\n\v\f\r\x1b")
"""What the beginning of a text does not hold."""


class Document(NamedTuple):
    """content: the text; for readers of whole records a dict, such as a conversation with its `messages`.

    number: from 1 on, counted in `unit`s (line, row, sample, document) of `file`
    """

    content: Any
    file: Path
    unit: str
    number: int

    @property
    def place(self) -> str:
        """For messages: where it was found."""
        return f"{self.file}: {self.unit} {self.number}"
