"""Folders and patterns of URIs, from the listings of their store.

s3://bucket/data/*.bin        objects of the folder data
s3://bucket/**/*.bin          objects below the bucket
https://host/data/*.bin       refused: the web does not have listings
"""

import fnmatch
import glob
import stat
from collections.abc import Sequence

from dali_pipes.corpus.discovery.url_lists import SUFFIX
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.listings import can_list, current_listings
from dali_pipes.uris import Uri


def mode_of(uri: Uri) -> int | None:
    """As `st_mode`: of an object, of a folder with objects below it, or None. Blocks for what is not known.

    A web address with a query is taken as a file: a signature for reading may not allow looking it up.
    """
    listings = current_listings()
    if uri.query or (uri.path and not uri.endswith("/") and listings.facts(uri) is not None):
        return stat.S_IFREG
    folder = uri.as_folder()
    if can_list(uri) and (listings.is_folder(folder) or any(listings.folder(folder))):
        return stat.S_IFDIR
    return None


def entries_in(folder: Uri) -> list[Uri]:
    """The objects in a folder, and the folders in it; empty where nothing can be listed. Blocks."""
    if not can_list(folder):
        return []
    objects, folders = current_listings().folder(folder.as_folder())
    return [*objects, *folders]


def uris_matching(pattern: Uri) -> list[Uri]:
    """Objects that match a pattern, and folders where its last part alone is one. Blocks for a listing.

    Raises CorpusReadError for a web address.
    """
    if not can_list(pattern):
        raise CorpusReadError(
            f"{pattern}: this pattern requires a listing, which {pattern.scheme} does not support. Name the files in a "
            f"list, or in a {SUFFIX} file with a URI on each line."
        )
    parts = pattern.path.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    folder = Uri(f"{pattern.full.partition('://')[0]}://{pattern.server}/{'/'.join(parts[:first])}").as_folder()
    wanted = parts[first:]
    found = entries_in(folder) if wanted == [parts[-1]] != ["**"] else current_listings().below(folder)
    return [uri for uri in found if _fits(uri.path.split("/")[first:], wanted)]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        rest = pattern[1:] or ["*"]
        return _fits(parts, rest) or (bool(parts) and _is_shown(parts[0], "**") and _fits(parts[1:], pattern))
    return (
        bool(parts)
        and _is_shown(parts[0], pattern[0])
        and fnmatch.fnmatchcase(parts[0], pattern[0])
        and _fits(parts[1:], pattern[1:])
    )


def _is_shown(name: str, part: str) -> bool:
    return not name.startswith(".") or part.startswith(".")
