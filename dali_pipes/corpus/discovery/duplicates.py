"""A file that is named twice is refused, by whatever names: its tokens would be trained on twice, also those that
`validation_fraction` keeps for validation.

    a.bin  a.bin        a folder and a file in it        a file and a link to it, symbolic or hard
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from dali_pipes.errors import CorpusError
from dali_pipes.storage.retries import tried_again


def refuse_repeats(named: Iterable[tuple[str, Path]]) -> None:
    """Raise CorpusError if a file is there twice. named: absolute paths, each with the entry that names it."""
    seen: dict[object, tuple[str, Path]] = {}
    for entry, path in named:
        identity = _identity(path)
        if identity not in seen:
            seen[identity] = entry, path
            continue
        first_entry, first = seen[identity]
        by = f"by {first_entry!r} and {entry!r}" if first_entry != entry else f"by {entry!r}"
        what = f"is listed twice, {by}" if first == path else f"is the same file as {first}, listed {by}"
        raise CorpusError(
            f"{path}: {what}. Its tokens would be trained on twice, including those held out for validation. List it "
            "once; to train on all data again, use repeat = True or more epochs."
        )


def _identity(path: Path) -> object:
    """Equal for two names of one file. Empty files, which hold nothing to repeat, are told apart by name."""
    try:
        found = tried_again(partial(os.stat, path))
    except (OSError, ValueError):
        return path  # whoever opens it says what is wrong
    # Size and time guard against file systems whose inode numbers are made up.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found.st_ino and found.st_size else path
