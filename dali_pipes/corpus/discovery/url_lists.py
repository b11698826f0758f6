"""Lists of files in a text file, for servers without listings: a URI or a name next to the list on each line.

    corpus = "https://host/data/tokens.urls"

    # comments and empty lines are skipped
    https://mirror/a.bin?X-Amz-Signature=5f2c
    b.bin                                         https://host/data/b.bin

Each line is what an entry of the setting may be, and they are read in this order.
"""

import os
from pathlib import Path

from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError
from dali_pipes.storage.byte_file import open_file
from dali_pipes.uris import FilePath, Uri, check_uri, entry_text, is_uri, named_path

SUFFIX = ".urls"


def is_url_list(entry: str) -> bool:
    """Whether the entry names such a list, by its suffix."""
    return (Uri(entry) if is_uri(entry) else Path(entry)).suffix.lower() == SUFFIX


def read_url_list(entry: str) -> list[str]:
    """The entries that the list names, in its order. Blocks for a read.

    Raises CorpusReadError if it cannot be read, CorpusFormatError for a line that is not an entry, CorpusError for no
    lines.
    """
    path = named_path(entry)
    with open_file(path) as file:
        content = file.read(0, file.size)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusFormatError(
            f"{path}: byte {error.start:,} is not UTF-8; expected a text file with one URI per line"
        ) from error
    if text.lstrip()[:1] == "<":
        raise CorpusFormatError(
            f"{path}: found an HTML page, expected a list of URIs; check the address, and log in if needed"
        )
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [_entry(path, number, line) for number, line in lines if line and not line.startswith("#")]
    if not found:
        raise CorpusError(f"{path}: this list does not name any files; write one URI per line")
    return found


def _entry(path: FilePath, number: int, line: str) -> str:
    try:
        entry = entry_text(line)
        check_uri(entry, "")
    except ConfigError as error:
        raise CorpusFormatError(f"{path}: line {number:,}: {error}") from error
    if is_url_list(entry):
        raise CorpusFormatError(f"{path}: line {number:,}: {entry} is another list; write its files here instead")
    if is_uri(entry):
        return entry
    return path.parent / entry if isinstance(path, Uri) else os.path.join(path.parent, os.path.expanduser(entry))
