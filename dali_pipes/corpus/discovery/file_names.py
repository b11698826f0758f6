"""Distinguish data from auxiliary files, backups and unfinished downloads by file names.

    a.json  README.md  Thumbs.db              side files: left out
    a.bin~  a.bin.bak  a.bin.orig  #a.bin#    backups: left out, with a note
    cache-0123456789abcdef.arrow              results that Hugging Face datasets caches beside its data: the same
    a.bin.part  a.bin.aria2  .a.bin.Xy12Zq    unfinished downloads and copies: refused, since data is missing
    a.bin.1  a (1).bin                        copies beside a.bin: refused

The rules apply to folders and patterns. A file named in full is always taken.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence

from dali_pipes.errors import CorpusError
from dali_pipes.uris import FilePath

# fmt: off
SIDE_SUFFIXES = (
    ".bak", ".cfg", ".crc", ".csv", ".csv.gz", ".csv.zst", ".html", ".index", ".ini", ".ipynb", ".json", ".lock",
    ".log", ".loss", ".md", ".md5", ".meta", ".metadata", ".old", ".orig", ".part", ".partial", ".pdf", ".pickle",
    ".pkl", ".png", ".py", ".rst", ".sh", ".sha256", ".svg", ".swp", ".temp", ".tmp", ".toml", ".tsv", ".tsv.gz",
    ".tsv.zst", ".txt", ".urls", ".yaml", ".yml",
)
# fmt: on
_LITTER = frozenset({"desktop.ini", "ehthumbs.db", "icon\r", "thumbs.db"})
SIDE_NAMES = frozenset({"license", "makefile", "readme"}) | _LITTER

_DATA = (
    r"\.(?:(?:array_?record|tfrecords?)(?:-\d{1,6}-of-\d{1,6})?|arrow|bin|csv|ds|feather|gz|gzip|idx|jl|jsonl|loss|mds|"
    r"ndjson|npy|parquet|tar|tgz|tsv|txt|zst|zstd)"
)
# Few names need these, so they are compiled with the first one.
_UNFINISHED = (
    r"\.?(.+)\.(?:aria2|crdownload|filepart|incomplete|opdownload|!ut|!qb)",
    rf"\.?(.+{_DATA})(?:\.[0-9a-z]+)?\.(?:download|part|partial|temp|tmp)",
    rf"\.?(.+{_DATA})(?:_temp|_tmp|_?\.gstmp)",
    rf"\.(.+{_DATA})\.(?![a-z]{{6}}$)[0-9a-z]{{6}}",  # rsync: six random letters and digits
    rf"(.+{_DATA})\.(?!\d{{8}}$)[0-9a-f]{{8}}",  # aws s3 cp: eight random hexadecimal digits
)
_COPY = (
    rf"(.+{_DATA})()\.\d{{1,3}}",  # wget
    r"(.+?)(\.[^ ]*)?(?: \(\d+\)| copy(?: \d+)?| - Copy(?: \(\d+\))?)(\.[^ ]+)",  # browsers and file managers
    r"Copy of (.+)()",
)
_BACKUP = rf"#.+#|.+\.orig|.+{_DATA}(?:~|\.bak|\.old|\.swp)"
_OF_DATASETS = re.compile(r"(cache-[0-9a-f]{16})(?:_\d{5}_of_\d{5})?\.arrow|tmp[a-z0-9_]{8}")
_PLAIN = re.compile(rf"[^.#_ ][^ ]*{_DATA}", re.IGNORECASE)
"""Names that none of the other rules reject, nearly all of those in a large folder: one match instead of nine."""
_MOST_NAMES_IN_MESSAGE = 5


def is_side_file(name: str) -> bool:
    """Whether a file of this name is clearly not data, so that folders and patterns leave it out."""
    lower = name.lower()
    is_hidden = name.startswith((".", "_")) or name.endswith("~")
    return is_hidden or lower in SIDE_NAMES or lower.endswith(SIDE_SUFFIXES) or _is_backup(name)


def _is_backup(name: str) -> bool:
    return not _PLAIN.fullmatch(name) and re.fullmatch(_BACKUP, name, re.IGNORECASE) is not None


def is_litter(name: str) -> bool:
    """Whether file managers create files of this name everywhere."""
    return name.startswith(("._", ".DS_Store")) or name.lower() in _LITTER


def finished_name(name: str) -> str | None:
    """The final name of an unfinished download or copy; None if the name does not look like one."""
    if name.startswith(("._", "_")) or _PLAIN.fullmatch(name):
        return None
    found = next((found for pattern in _UNFINISHED if (found := re.fullmatch(pattern, name, re.IGNORECASE))), None)
    return None if found is None else found[1]


def data_paths(
    candidates: Collection[FilePath], where: str, is_side: Callable[[str], bool], notes: list[str]
) -> tuple[list[FilePath], list[str]]:
    """The paths of a folder or pattern that may be data by their names, and the names of the side files.

    where: the folder or pattern, for messages. notes: receives a note about files left out that may matter.
    Raises CorpusError for unfinished files and copies.
    """
    names = {path: path.name for path in candidates}
    present = set(candidates)
    found, side, backups = [], [], []
    for path, name in names.items():
        if _PLAIN.fullmatch(name) and not is_side(name):
            found.append(path)
            continue
        finished = finished_name(name)
        if finished is not None and not is_side(finished.removesuffix(".loss")):  # a missing mask would go unnoticed
            raise CorpusError(
                f"{path}: looks like an unfinished download or copy of {finished}, so {where} may be incomplete. "
                "Finish or remove it, or list the files to use."
            )
        if is_side(name):
            side.append(name)
            if not name.startswith((".", "_")) and _is_backup(name):
                backups.append(name)
            continue
        _refuse_copy(path, present)
        found.append(path)
    if backups:
        notes.append(f"{where}: {len(backups):,} backup files are skipped{some(sorted(backups))}")
    return _without_results_of_datasets(found, where, notes), side


def some(names: Sequence[str]) -> str:
    """A few of the names for a message, in parentheses; empty without names."""
    if not names:
        return ""
    return f" ({', '.join(names[:_MOST_NAMES_IN_MESSAGE])}{', ...' if len(names) > _MOST_NAMES_IN_MESSAGE else ''})"


def utf8_name(name: str) -> str:
    """A file's name as text, the same whatever the locale: bytes that are not UTF-8 are lone surrogates."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")


def _refuse_copy(path: FilePath, present: Collection[FilePath]) -> None:
    for pattern in _COPY:
        found = re.fullmatch(pattern, path.name)
        original = None if found is None else path.with_name("".join(part or "" for part in found.groups()))
        if original is not None and original in present:
            raise CorpusError(
                f"{path}: looks like a copy of {original.name} in the same folder, so its tokens would be read twice. "
                "Remove one of them, or list the files to use."
            )


def _without_results_of_datasets(paths: list[FilePath], where: str, notes: list[str]) -> list[FilePath]:
    """The paths without cached results of `map`, `filter` and `sort` that are beside their inputs.

    Results of one call with nothing beside them are data.
    """
    if not any(path.suffix == ".arrow" for path in paths):
        return paths
    results = {path: found for path in paths if (found := _OF_DATASETS.fullmatch(path.name))}
    others = [path for path in paths if path not in results]
    if not results or (not others and len({found[1] for found in results.values()}) == 1):
        return paths
    names = some(sorted(path.name for path in results))
    if not others:
        raise CorpusError(
            f"{where}: contains cached results of several Hugging Face datasets calls{names}, which may contain the "
            "same rows. List the files to use."
        )
    notes.append(
        f"{where}: {len(results):,} results that Hugging Face datasets cached next to its data are skipped{names}; to "
        "read them, list the files to use"
    )
    return others
