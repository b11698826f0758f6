"""Refuse a file that is listed twice, even under different names: the run would train on its tokens twice, including
those that `validation_fraction` holds out.

    a.bin  a.bin        a folder and a file in it        a file and a link to it, symbolic or hard
"""

import os
from collections.abc import Iterable
from functools import partial

from dali_pipes.errors import CorpusError
from dali_pipes.storage.retries import tried_again
from dali_pipes.uris import FilePath, Uri


def refuse_repeats(named: Iterable[tuple[str, FilePath]]) -> None:
    """Raise CorpusError if a file is named twice. named: absolute paths, each with the entry that names it."""
    seen: dict[object, tuple[str, FilePath]] = {}
    for entry, path in named:
        identity = _identity(path)
        if identity not in seen:
            seen[identity] = entry, path
            continue
        first_entry, first = seen[identity]
        by = f"by {first_entry!r} and {entry!r}" if first_entry != entry else f"by {entry!r}"
        what = f"is listed twice, {by}" if first == path else f"is the same file as {first}, listed {by}"
        raise CorpusError(
            f"{path}: {what}. The run would train on its tokens twice, including those held out for validation. List "
            "it once; to train on all data again, set repeat = True or run more epochs."
        )


def _identity(path: FilePath) -> object:
    """Equal for two names of one file. Empty files, which have nothing to repeat, are compared by name."""
    if isinstance(path, Uri):
        return path
    try:
        found = tried_again(partial(os.stat, path))
    except (OSError, ValueError):
        return path  # opening it raises the error
    # Size and time guard against file systems that invent inode numbers.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found.st_ino and found.st_size else path
