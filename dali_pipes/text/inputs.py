"""From what the user names to text files in an order that never varies, each recognised by its content.

- folder: its files in natural order, without side files (but `.txt`, `.csv` and `.tsv` are data here); of a Hugging
  Face `save_to_disk` folder its Arrow files in the order of `state.json`, of a MosaicML one its shards in the order of
  `index.json`;
- glob: as a folder; list: in the list's own order; a file that is there twice is refused.

Content says what is compressed, and what is Parquet, Arrow, ArrayRecord or tar. MDS shards, lines of JSON, CSV and
plain text have no mark: the suffix decides, and where it is not known, the first character, `{` for lines of JSON.
"""

import glob
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dali_pipes.corpus.discovery.duplicates import refuse_repeats
from dali_pipes.corpus.discovery.file_names import data_paths, is_side_file
from dali_pipes.corpus.discovery.find_files import entries_of, meant_as, natural_key, unfinished_beside
from dali_pipes.corpus.discovery.globs import list_folder, matches_of
from dali_pipes.corpus.discovery.shard_sets import find_index, kind_of_index
from dali_pipes.corpus.discovery.splits import refuse_mixed_splits
from dali_pipes.corpus.formats.arrayrecord import MAGIC as RIEGELI_MAGIC
from dali_pipes.corpus.formats.arrow.messages import is_stream
from dali_pipes.corpus.formats.huggingface import list_shards
from dali_pipes.corpus.formats.mds.shards import list_shard_files
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.fingerprint import read_samples
from dali_pipes.storage.local import LocalFile
from dali_pipes.text.documents import CONTROL_BYTES
from dali_pipes.text.streams import ByteMeter, Compression, read_chunks

Kind: TypeAlias = Literal["jsonl", "plain", "csv", "tsv", "parquet", "arrow", "webdataset", "mds", "arrayrecord"]

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jl")
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_DELIMITED: dict[str, Kind] = {".csv": "csv", ".tsv": "tsv"}
_WRAPPERS = (".gz", ".gzip", ".zst", ".zstd")
_SIDE_STEMS = ("license", "notice", "readme")
_HEAD_BYTES = 4096
_LISTED_BY: dict[str | None, Callable[[Path], list[Path]]] = {"huggingface": list_shards, "mds": list_shard_files}


@dataclass(frozen=True)
class TextFile:
    """One input, which is another one when any field but the folder of its path is.

    size: bytes on the disk. digest: of name, size and sampled bytes, 16 hex digits. modified_ns: time of the last
    change, which an edit has that leaves the size and the samples as they were, Unix nanoseconds.
    """

    path: Path
    kind: Kind
    compression: Compression
    size: int
    digest: str
    modified_ns: int


def find_text_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], notes: list[str] | None = None
) -> list[TextFile]:
    """The text files that `paths` name. Blocks for a few reads a file. notes: takes sentences about files left out.

    Raises CorpusReadError for what is missing or unreadable, CorpusError for a folder or glob without data, with files
    of several splits or unfinished ones, and for a file that is there twice, CorpusFormatError for a file that is not
    text.
    """
    named: list[tuple[str, Path]] = []
    for entry in entries_of(paths):
        files = _expand(entry, [] if notes is None else notes)
        if not os.path.isfile(os.path.expanduser(entry)):  # as the index of a set may be
            refuse_mixed_splits(entry, files)
        named += [(entry, file) for file in files]
    refuse_repeats(named)
    _refuse_twice([file for _, file in named])
    return [_checked(path) for _, path in named]


def list_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Absolute paths of the files that may be text, of whatever splits. Raises as `find_text_files`; opens none."""
    return [file for entry in entries_of(paths) for file in _expand(entry, [])]


def recognise(path: Path) -> tuple[Kind, Compression] | None:
    """What kind of text file it is, None if it is none. Reads its start. A table may have no column of text, though."""
    with LocalFile(path) as file:
        head = file.read(0, min(file.size, _HEAD_BYTES))
        is_empty = file.size == 0
        is_arrow = head.startswith(b"ARROW1\0\0") or is_stream(file, head)
    compression: Compression = ""
    if head.startswith(b"\x1f\x8b\x08"):
        compression = "gzip"
    elif head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        compression = "zstd"  # the second: a skippable frame
    if compression:
        head = next(read_chunks(path, compression, ByteMeter()), b"")[:_HEAD_BYTES]
        is_empty = not head
    if not compression and (is_arrow or head.startswith(b"PAR1")):
        return "arrow" if is_arrow else "parquet", ""
    if head.startswith(RIEGELI_MAGIC) and not compression:
        return "arrayrecord", ""
    suffix = _inner_suffix(path)
    if suffix == ".mds":
        return "mds", compression
    if head[257:262] == b"ustar" or suffix == ".tar":
        return "webdataset", compression
    if suffix in _JSON_SUFFIXES:
        return "jsonl", compression
    if suffix in _DELIMITED:
        return _DELIMITED[suffix], compression
    if suffix in _PLAIN_SUFFIXES:
        return "plain", compression
    if is_empty or not _looks_like_text(head):
        return None
    return ("jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" else "plain"), compression


def _refuse_twice(files: Sequence[Path]) -> None:
    """Raise CorpusError for a shard that is there as it is and compressed, as readers of MDS may leave it."""
    present = set(files)
    twice = next((f for f in files if _inner_suffix(f) == ".mds" != f.suffix and f.with_suffix("") in present), None)
    if twice is not None:
        raise CorpusError(
            f"{twice} and {twice.with_suffix('')} are one shard: its texts would be there twice. Name the folder with "
            "its index.json, or one of the two"
        )


def _checked(path: Path) -> TextFile:
    found = recognise(path)
    if found is None:
        raise CorpusFormatError(
            f"{path}: is not text; expected .txt, .jsonl, .csv and .tsv (also .gz, .zst), Parquet and Arrow tables "
            "and MDS shards with a column of strings, ArrayRecord, and tar archives of .txt or .json"
        )
    with LocalFile(path) as file:
        modified_ns = os.fstat(file.descriptor).st_mtime_ns  # before the samples: a change meanwhile shows at the end
        digest = hashlib.sha256(os.fsencode(path.name) + struct.pack("<Q", file.size))
        for sample in read_samples(file):
            digest.update(sample)
        return TextFile(path, *found, file.size, digest.hexdigest()[:16], modified_ns)


def _inner_suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1][1:].isdigit():  # rows.csv.1
        suffixes.pop()
    if suffixes and suffixes[-1] in _WRAPPERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _looks_like_text(head: bytes) -> bool:
    if not CONTROL_BYTES.isdisjoint(head):
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3  # the head may end within a character
    return True


def _expand(entry: str, notes: list[str]) -> list[Path]:
    path = Path(os.path.abspath(os.path.expanduser(entry)))
    try:
        if path.is_dir():
            return _files_of_folder(path, notes)
        if path.is_file():
            return list_shard_files(path) if kind_of_index(path) == "mds" else [path]
        if path.exists():
            raise CorpusReadError(f"{path}: is neither a regular file nor a folder")
        matches = matches_of(path) if glob.has_magic(entry) else []
    except OSError as error:
        if isinstance(error, CorpusReadError):
            raise
        raise CorpusReadError(f"{path}: cannot be looked up: {error.strerror or error}") from error
    if not matches:
        raise CorpusReadError(
            f"{path}: there is no such file or folder, and nothing matches it (given as {entry!r}){meant_as(entry)}"
        )
    return _data_files([*matches, *unfinished_beside(path, matches)], f"the pattern {path}", notes)


def _files_of_folder(folder: Path, notes: list[str]) -> list[Path]:
    index = find_index(folder)
    kind = None if index is None else kind_of_index(index)
    if index is not None and kind in _LISTED_BY:
        return _LISTED_BY[kind](index)
    return _data_files([Path(entry.path) for entry in list_folder(folder)], f"the folder {folder}", notes)


def _data_files(candidates: Sequence[Path], where: str, notes: list[str]) -> list[Path]:
    files = []
    found, _ = data_paths(set(candidates), where, _is_side, notes)
    for path in sorted(found, key=natural_key):
        if not path.is_dir():
            if not path.exists():
                raise CorpusReadError(f"{path}: is listed in its folder but is not there: a broken link?")
            files.append(path)
    rows = [path for path in files if _inner_suffix(path) in _DELIMITED]
    others = len(files) - len(rows)
    if rows and others:  # earlier releases left them out
        notes.append(f"{where}: {len(rows)} .csv or .tsv files are read by column, along with {others} other files")
    if not files:
        raise CorpusError(
            f"{where} holds no text file. Go down into folders with a pattern such as 'folder/**/*.jsonl'."
        )
    return files


def _is_side(name: str) -> bool:
    stem, _, suffix = name.lower().partition(".")
    if suffix == "txt" or suffix.endswith(".txt"):
        return name.startswith((".", "_")) or stem in _SIDE_STEMS
    return is_side_file(name) and (name.startswith((".", "_")) or _inner_suffix(Path(name)) not in _DELIMITED)
