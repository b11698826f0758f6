"""Find the data files that the user names, by a file, a folder, a glob or a list of these, in a fixed order.

- folder: the files in it, not those in its subfolders (a glob with `**` includes them); for a set, the index of its
  shards (`shard_sets`);
- glob: `*`, `?`, `[...]`, `**`; a name that exists as written is that file;
- list: in the list's own order, each entry expanded in place; a file that is named twice is refused (`duplicates`);
- a Megatron pair can be named by its prefix, its `.bin` or its `.idx`;
- a URI: an object, a folder or a glob of a store that has listings, or a file on a web server;
- a list of URIs in a file, NAME.urls (`url_lists`): as if its lines were named here.

Folders and globs are in natural order, s_1 s_2 s_03 s_10: runs of digits compare as numbers, the rest by code point,
folder by folder from the top; names that then tie (s_3, s_03) compare by code point. The order of the directory does
not matter.

Folders and globs skip files that are clearly not data, and refuse signs of missing or duplicate data: `file_names` has
the rules. Everything else is data or an error; a file named in full is never skipped. Loss masks, `.loss`, are skipped
as data, and used where masks are named. Training and validation files are read together only from a list (`splits`).
"""

import fnmatch
import functools
import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from dali_pipes.corpus.discovery.file_names import data_paths, finished_name, is_side_file, some, utf8_name
from dali_pipes.corpus.discovery.globs import list_folder, matches_of
from dali_pipes.corpus.discovery.manifests import MANIFEST, WORK_FOLDER
from dali_pipes.corpus.discovery.object_names import entries_in, mode_of, uris_matching
from dali_pipes.corpus.discovery.shard_sets import find_index
from dali_pipes.corpus.discovery.splits import refuse_mixed_splits
from dali_pipes.corpus.discovery.url_lists import SUFFIX, is_url_list, read_url_list
from dali_pipes.errors import EMPTY_PATH, WEIGHTS_IN_MIXTURE, ConfigError, CorpusError, CorpusReadError
from dali_pipes.runtime.messages import counted
from dali_pipes.storage.byte_file import look_up_all
from dali_pipes.storage.listings import can_list
from dali_pipes.storage.retries import tried_again
from dali_pipes.uris import FilePath, Uri, check_uri, entry_text, is_uri, named_path

_DIGITS = re.compile(r"([0-9]+)")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?")


def find_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    setting: Literal["corpus", "loss_masks"] = "corpus",
    *,
    use_indexes: bool = False,
) -> list[FilePath]:
    """Absolute paths, or URIs, of the data files; of a Megatron pair the `.bin` if it is found, else the `.idx`.

    setting:     that the paths were given for; for loss_masks, files named `.loss` are data, in the order of the names
                 without it
    use_indexes: replace the folder of a set by its index

    Raises CorpusReadError for missing or unreadable paths, CorpusError for a folder or glob without data, with files of
    several splits, or with unfinished files.
    """
    entries = entries_of(paths, setting)
    return [file for _, file in named_files(entries, setting, use_indexes=use_indexes, notes=[])]


def named_files(
    entries: Sequence[str],
    setting: Literal["corpus", "loss_masks"] = "corpus",
    *,
    use_indexes: bool,
    notes: list[str],
) -> list[tuple[str, FilePath]]:
    """As `find_files` for `entries_of`, each file with its entry. notes: receives notes about files left out."""
    found: list[tuple[str, FilePath]] = []
    uris = [Uri(entry) for entry in entries if is_uri(entry)]
    look_up_all(uri for uri in uris if not (uri.query or glob.has_magic(uri.path)))
    for entry in entries:
        files = _expand(entry, setting, use_indexes, notes)
        if setting == "corpus":  # masks go with data that was checked
            refuse_mixed_splits(entry, _without_indexes(files))
        found += [(entry, file) for file in files]
    # A shell's `data/*` names both files of each Megatron pair: the index is not a second corpus.
    data = set(_without_indexes([file for _, file in found]))
    return [(entry, file) for entry, file in found if file in data]


def entries_of(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], setting: str = "corpus") -> list[str]:
    """The entries that the user named, those of lists in files among them. Blocks to read these.

    Raises ConfigError for other than a path or a list of paths, and what `read_url_list` raises.
    """
    given = _given_entries(paths, setting)
    return [one for entry in given for one in (read_url_list(entry) if is_url_list(entry) else [entry])]


def _given_entries(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], setting: str) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        return [_entry(paths, setting)]
    if not isinstance(paths, Iterable) or isinstance(paths, (bytes, set, frozenset, dict)):
        weights = f": {WEIGHTS_IN_MIXTURE}" if isinstance(paths, dict) else ""
        raise ConfigError(
            f"{setting}: {paths!r} is a {type(paths).__name__}, expected a path or a list of paths{weights}"
        )
    entries: list[str] = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"{setting}: {path!r} is not a path: {WEIGHTS_IN_MIXTURE}")
        entries.append(_entry(path, setting))
    if not entries:
        raise ConfigError(f"{setting}: an empty list of paths; name at least one file, folder or glob")
    return entries


def _entry(path: str | os.PathLike[str], setting: str) -> str:
    entry = entry_text(path)
    if not entry:  # from a shell variable that is not set; it would be the current folder
        raise ConfigError(f"{setting}: {EMPTY_PATH}")
    check_uri(entry, setting)
    return entry


def meant_as(entry: str) -> str:
    """For a message about an entry that does not exist: its likely meaning and what to do, or an empty text."""
    return f": {WEIGHTS_IN_MIXTURE}" if _NUMBER.fullmatch(entry.strip()) else ""


def natural_key(path: FilePath) -> tuple[list[list[str | int]], str]:
    """The sort key of folders and globs. Text and numbers alternate, so that the two are never compared."""
    text = str(path)
    shown = utf8_name(text)
    parts = path.parts if isinstance(path, Uri) or shown == text else Path(shown).parts
    return [_natural_part(part) for part in parts], shown


@functools.lru_cache(maxsize=256)  # of folders: thousands of files are in the same ones
def _natural_part(part: str) -> list[str | int]:
    return [int(piece) if at % 2 else piece for at, piece in enumerate(_DIGITS.split(part))]


def _without_indexes(files: Sequence[FilePath]) -> list[FilePath]:
    present = set(files)
    return [file for file in files if not (file.suffix == ".idx" and file.with_suffix(".bin") in present)]


def _expand(entry: str, setting: str, use_indexes: bool, notes: list[str]) -> list[FilePath]:
    path = named_path(entry)
    if isinstance(path, Uri) and glob.has_magic(path.path):
        return _files_of_glob(entry, path, setting, notes)
    mode = _mode(path)
    if mode is not None:
        if not stat.S_ISDIR(mode):
            return [_regular(path, mode)]
        index = find_index(path) if use_indexes else None
        return _files_of_folder(path, setting, notes) if index is None else [index]
    if glob.has_magic(entry) and not isinstance(path, Uri):
        return _files_of_glob(entry, path, setting, notes)
    pair = [path.with_name(f"{path.name}{suffix}") for suffix in (".bin", ".idx")] if path.name else []
    if pair and _mode(pair[1]) is not None:  # a Megatron prefix, which may contain dots
        return [next(data for data in pair if _mode(data) is not None)]
    if isinstance(path, Uri) and not can_list(path):
        index = find_index(path) if use_indexes else None
        if index is not None:
            return [index]
        raise CorpusReadError(
            f"{path}: no such file. If it is a folder, name its files in a list, or in a {SUFFIX} file with a URI on "
            f"each line: {path.scheme} does not have listings."
        )
    what = "object, folder" if isinstance(path, Uri) else "file, folder"
    raise CorpusReadError(f"{path}: no such {what} or Megatron prefix (given as {entry!r}){meant_as(entry)}")


def _files_of_folder(folder: FilePath, setting: str, notes: list[str]) -> list[FilePath]:
    entries = folder_entries(folder)
    _refuse_unfinished_run(folder, entries)
    return _data_files(entries, f"the folder {folder}", setting, notes)


def _files_of_glob(entry: str, pattern: FilePath, setting: str, notes: list[str]) -> list[FilePath]:
    matches = uris_matching(pattern) if isinstance(pattern, Uri) else matches_of(pattern)
    if not matches:
        raise CorpusReadError(f"{pattern}: no file matches this pattern (given as {entry!r}){meant_as(entry)}")
    return _data_files([*matches, *unfinished_beside(pattern, matches)], f"the pattern {pattern}", setting, notes)


def folder_entries(folder: FilePath) -> Sequence[FilePath]:
    """All files and folders in a folder, in any order. Blocks for a listing. Raises CorpusReadError."""
    return entries_in(folder) if isinstance(folder, Uri) else [Path(entry.path) for entry in list_folder(folder)]


def _refuse_unfinished_run(folder: FilePath, entries: Sequence[FilePath]) -> None:
    """Raise CorpusError for the output folder of a run that is not finished, with or without finished shards."""
    names = {entry.name for entry in entries}
    if WORK_FOLDER in names and MANIFEST not in names:
        raise CorpusError(
            f"{folder}: is the output of a `dali-pipes tokenize` run that is not finished. Run the same command again, "
            "with --shard for every shard if there are several, to finish it, or list the files to use."
        )


def unfinished_beside(pattern: FilePath, matches: Iterable[FilePath]) -> list[FilePath]:
    """Unfinished files next to the matches of a pattern that would match once they are finished.

    Raises CorpusError for matches in the output folder of an unfinished run.
    """
    beside: list[FilePath] = []
    for folder in {path.parent for path in matches}:
        entries = folder_entries(folder)
        _refuse_unfinished_run(folder, entries)
        beside += entries
    if pattern.name == "**":
        return []
    finished = ((path, finished_name(path.name)) for path in beside)
    return [path for path, name in finished if name is not None and fnmatch.fnmatchcase(name, pattern.name)]


def _data_files(candidates: Iterable[FilePath], where: str, setting: str, notes: list[str]) -> list[FilePath]:
    def data_path(path: FilePath) -> FilePath:
        """The name that decides the order: for a mask, that of its data file."""
        return path.with_name(path.name.removesuffix(".loss")) if setting == "loss_masks" else path

    def sort_key(path: FilePath) -> tuple[list[list[str | int]], str]:
        return natural_key(data_path(path))

    files: list[FilePath] = []
    folders: list[FilePath] = []

    def is_side(name: str) -> bool:
        return is_side_file(name.removesuffix(".loss") if setting == "loss_masks" else name)

    found, side = data_paths(set(candidates), where, is_side, notes)
    side.sort()
    for path in sorted(found, key=sort_key):
        mode = _mode(path)
        if mode is None:
            raise CorpusReadError(f"{path}: cannot be found, but its folder lists it; it may be a broken link")
        if stat.S_ISDIR(mode):
            folders.append(path)
        else:
            files.append(_regular(path, mode))
    if not files:
        sets = [folder.name for folder in folders if find_index(folder) is not None]
        if sets:
            raise CorpusError(
                f"{where} does not contain data files, only folders of sets, such as splits{some(sets)}; "
                "name one of them, or list the ones to use"
            )
        names = [folder.name for folder in folders]
        raise CorpusError(
            f"{where} does not contain data files, only {counted(len(side), 'auxiliary file')}{some(side)} and "
            f"{counted(len(folders), 'folder')}{some(names)}. Name files in full, or use a pattern that includes "
            "subfolders, such as 'folder/**/*.bin'."
        )
    return files


def _mode(path: FilePath) -> int | None:
    if isinstance(path, Uri):
        return mode_of(path)
    try:
        return tried_again(lambda: os.stat(path)).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CorpusReadError(f"{path}: cannot be accessed: {error}") from error


def _regular(path: FilePath, mode: int) -> FilePath:
    if not stat.S_ISREG(mode):
        raise CorpusReadError(f"{path}: is neither a regular file nor a folder")
    return path
