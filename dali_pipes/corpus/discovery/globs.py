"""Files of a glob pattern; a folder that cannot be listed is an error.

`glob.glob` skips such a folder: with one stale NFS handle, a run would train on half of its data. Otherwise the rules
are the same: `*`, `?`, `[...]`, `**` for any folders below, and names that start with a dot only if the pattern does.
Links to folders are followed, but not back to a folder above them.
"""

import errno
import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.retries import tried_again


def matches_of(pattern: Path) -> list[Path]:
    """Files and folders that match an absolute pattern, unordered. Raises CorpusReadError."""
    first, *parts = pattern.parts
    found = [Path(first)]
    for number, part in enumerate(parts):
        if part == "**":
            is_last = number == len(parts) - 1
            below = [path for folder in found if _is_folder(folder) for path in _below(folder, files=is_last)]
            found = list(dict.fromkeys(below))
        elif glob.has_magic(part):
            found = [
                Path(entry.path)
                for folder in found
                for entry in list_folder(folder)
                if _is_shown(entry.name, part) and fnmatch.fnmatchcase(entry.name, part)
            ]
        else:
            found = [folder / part for folder in found]
    return [path for path in found if os.path.lexists(path)]


def list_folder(folder: Path) -> list["os.DirEntry[str]"]:
    """The entries of a folder; none for other than a folder. Raises CorpusReadError if it cannot be read."""
    try:
        with tried_again(lambda: os.scandir(folder)) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise CorpusReadError(f"{folder}: cannot list this folder: {error.strerror}") from error


def _below(folder: Path, *, files: bool) -> Iterator[Path]:
    """The folder, those below it, and the files in them if wanted."""
    yield folder
    for entry in list_folder(folder):
        path = Path(entry.path)
        if not _is_shown(entry.name, "**"):
            continue
        if _is_folder(path):
            if not (entry.is_symlink() and folder.resolve().is_relative_to(path.resolve())):
                yield from _below(path, files=files)
        elif files:
            yield path


def _is_folder(path: Path) -> bool:
    return tried_again(path.is_dir)


def _is_shown(name: str, part: str) -> bool:
    return not name.startswith(".") or part.startswith(".")
