"""The paths that the user names, as text files in a fixed order.

- folder: its files in natural order, without side files (but `.txt`, `.csv` and `.tsv` are data here); of a Hugging
  Face `save_to_disk` folder its Arrow files in the order of `state.json`, of a MosaicML one its shards in the order of
  `index.json`;
- glob: like a folder; list: in the order of the list; a file that appears twice is refused;
- a URI: the same in a store that has listings, or a file on a web server.
"""

import contextvars
import glob
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dali_pipes.corpus.discovery.duplicates import refuse_repeats
from dali_pipes.corpus.discovery.file_names import data_paths, is_side_file
from dali_pipes.corpus.discovery.find_files import entries_of, folder_entries, meant_as, natural_key, unfinished_beside
from dali_pipes.corpus.discovery.globs import matches_of
from dali_pipes.corpus.discovery.object_names import mode_of, uris_matching
from dali_pipes.corpus.discovery.shard_sets import find_index, kind_of_index
from dali_pipes.corpus.discovery.splits import refuse_mixed_splits
from dali_pipes.corpus.formats.huggingface import list_shards
from dali_pipes.corpus.formats.mds.shards import list_shard_files
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import look_up_all, open_file
from dali_pipes.storage.fingerprint import read_samples
from dali_pipes.storage.listings import Listings, can_list
from dali_pipes.storage.retries import DEFAULT_REQUESTS
from dali_pipes.text.formats.registry import DATA_SUFFIXES, TEXT_FORMATS, recognize_file
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.streams import suffix_inside
from dali_pipes.uris import FilePath, Uri, is_uri

_SIDE_STEMS = ("license", "notice", "readme")
_LISTED_BY: dict[str | None, Callable[[FilePath], list[FilePath]]] = {
    "huggingface": list_shards,
    "mds": list_shard_files,
}


def find_text_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], notes: list[str] | None = None
) -> list[TextFile]:
    """The text files that `paths` name. Blocks for a few reads per file. notes: takes sentences about files left out.

    Raises CorpusReadError for a missing or unreadable file, CorpusError for a folder or glob without data, with files
    of several splits or unfinished ones, and for a file that appears twice, CorpusFormatError for a file that is not
    text.
    """
    named: list[tuple[str, FilePath]] = []
    with Listings().in_use():
        entries = entries_of(paths)
        uris = [Uri(entry) for entry in entries if is_uri(entry)]
        look_up_all(uri for uri in uris if not (uri.query or glob.has_magic(uri.path)))
        for entry in entries:
            files = _expand(entry, [] if notes is None else notes)
            if is_uri(entry) or not os.path.isfile(os.path.expanduser(entry)):  # as the index of a set may be
                refuse_mixed_splits(entry, files)
            named += [(entry, file) for file in files]
        refuse_repeats(named)
        found = [file for _, file in named]
        _refuse_two_copies(found)
        return _checked_together(found) if uris else [_checked(path) for path in found]


def list_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Absolute paths of the local files that may be text, of all splits. Raises as `find_text_files`; opens none.

    Raises CorpusReadError for a URI.
    """
    entries = entries_of(paths)
    uri = next((entry for entry in entries if is_uri(entry)), None)
    if uri is not None:
        raise CorpusReadError(
            f"{uri}: loaders read text from local files only. Tokenize it with `dali-pipes tokenize`, and open the "
            "output."
        )
    return [file for entry in entries for file in _expand(entry, []) if isinstance(file, Path)]


def _refuse_two_copies(files: Sequence[FilePath]) -> None:
    """Raise CorpusError for a shard that is there both compressed and decompressed, as MDS readers may leave it."""
    present = set(files)
    twice = next((f for f in files if suffix_inside(f) == ".mds" != f.suffix and f.with_suffix("") in present), None)
    if twice is not None:
        raise CorpusError(
            f"{twice} and {twice.with_suffix('')} are the same shard, so its texts would be read twice; name the "
            "folder with its index.json, or remove one of the two"
        )


def _checked_together(paths: Sequence[FilePath]) -> list[TextFile]:
    with ThreadPoolExecutor(DEFAULT_REQUESTS) as pool:
        try:
            # Each in a copy of the context, for the listings in use.
            futures = [pool.submit(contextvars.copy_context().run, _checked, path) for path in paths]
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _checked(path: FilePath) -> TextFile:
    with open_file(path) as file:
        found = recognize_file(file)
        if found is None:
            raise CorpusFormatError(
                f"{path}: not a text file; expected {', '.join(one.description for one in TEXT_FORMATS.values())}"
            )
        digest = hashlib.sha256(os.fsencode(path.name) + struct.pack("<Q", file.size))
        for sample in read_samples(file):
            digest.update(sample)
        return TextFile(path, *found, file.size, digest.hexdigest()[:16], file.identity)


def _expand(entry: str, notes: list[str]) -> list[FilePath]:
    if is_uri(entry):
        return _expand_uri(Uri(entry), notes)
    path = Path(os.path.abspath(os.path.expanduser(entry)))
    try:
        if path.is_dir():
            return _files_of_folder(path, notes)
        if path.is_file():
            return list_shard_files(path) if kind_of_index(path) == "mds" else [path]
        if path.exists():
            raise CorpusReadError(f"{path}: neither a file nor a folder")
        matches = matches_of(path) if glob.has_magic(entry) else []
    except OSError as error:
        if isinstance(error, CorpusReadError):
            raise
        raise CorpusReadError(f"{path}: cannot be looked up: {error.strerror or error}") from error
    if not matches:
        raise CorpusReadError(
            f"{path}: no such file or folder, and nothing matches it as a pattern (given as {entry!r}){meant_as(entry)}"
        )
    return _data_files([*matches, *unfinished_beside(path, matches)], f"the pattern {path}", notes)


def _expand_uri(uri: Uri, notes: list[str]) -> list[FilePath]:
    if glob.has_magic(uri.path):
        matches: list[FilePath] = [*uris_matching(uri)]
        if not matches:
            raise CorpusReadError(f"{uri}: no object matches this pattern")
        return _data_files([*matches, *unfinished_beside(uri, matches)], f"the pattern {uri}", notes)
    mode = mode_of(uri)
    if mode == stat.S_IFREG:
        return list_shard_files(uri) if kind_of_index(uri) == "mds" else [uri]
    if mode == stat.S_IFDIR:
        return _files_of_folder(uri.as_folder(), notes)
    advice = (
        "" if can_list(uri) else f"; if it is a folder, list its files, because {uri.scheme} does not support listings"
    )
    raise CorpusReadError(f"{uri}: no such object or folder{advice}")


def _files_of_folder(folder: FilePath, notes: list[str]) -> list[FilePath]:
    index = find_index(folder)
    kind = None if index is None else kind_of_index(index)
    if index is not None and kind in _LISTED_BY:
        return _LISTED_BY[kind](index)
    return _data_files(folder_entries(folder), f"the folder {folder}", notes)


def _data_files(candidates: Sequence[FilePath], where: str, notes: list[str]) -> list[FilePath]:
    files: list[FilePath] = []
    found, _ = data_paths(set(candidates), where, _is_side, notes)
    for path in sorted(found, key=natural_key):
        if isinstance(path, Uri):
            if mode_of(path) == stat.S_IFREG:
                files.append(path)
        elif not path.is_dir():
            if not path.exists():
                raise CorpusReadError(f"{path}: listed in its folder, but does not exist; it may be a broken link")
            files.append(path)
    rows = [path for path in files if suffix_inside(path) in DATA_SUFFIXES]
    others = len(files) - len(rows)
    if rows and others:  # earlier releases left them out
        suffixes = " or ".join(DATA_SUFFIXES)
        notes.append(
            f"{where}: {suffixes} files are read as tables, along with other files: {len(rows):,} and {others:,}"
        )
    if not files:
        raise CorpusError(
            f"{where} does not contain any text file; to read subfolders, use a pattern such as 'folder/**/*.jsonl'"
        )
    return files


def _is_side(name: str) -> bool:
    stem, _, suffix = name.lower().partition(".")
    if suffix == "txt" or suffix.endswith(".txt"):
        return name.startswith((".", "_")) or stem in _SIDE_STEMS
    return is_side_file(name) and (name.startswith((".", "_")) or suffix_inside(Path(name)) not in DATA_SUFFIXES)
