"""Copy corpora from object stores and web servers to a local folder; a copy that was interrupted goes on where it was.

    s3://bucket/data/*.bin      data/a.bin                     complete: compared with its size and samples, and kept
                                data/b.bin.5f2c9a01.part       so far; the digits are of the object's identity
                                data/.copy.lock                held by the process that copies

Every read names the identity that the object has, so a copy is of one version, and appears under its name when whole.
"""

import contextlib
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dali_pipes.corpus.discovery.find_files import entries_of, find_files
from dali_pipes.corpus.discovery.manifests import MANIFEST
from dali_pipes.corpus.discovery.object_names import entries_in, mode_of
from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.corpus.formats.huggingface import list_shards
from dali_pipes.corpus.opener import open_corpus
from dali_pipes.errors import ConfigError, CorpusError, CorpusReadError
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.storage.byte_file import look_up_all, open_file
from dali_pipes.storage.fingerprint import read_samples
from dali_pipes.storage.listings import Listings, can_list, current_listings
from dali_pipes.storage.object_file import ObjectFile
from dali_pipes.storage.retries import DEFAULT_REQUESTS, DEFAULT_RETRIES, ReadRetries
from dali_pipes.uris import Uri, is_uri

_STEP_BYTES = 64 << 20
"""Read together, in requests of several megabytes each, and written."""
_BESIDE = (".idx", ".loss", ".index", ".metadata")
"""Ends of the names of files that belong to a data file: instead of its suffix, or after it."""


class Copied(NamedTuple):
    """What a copy did. found: files that were there and are the same, and need not be copied."""

    folder: Path
    files: int
    found: int
    copied_bytes: int


class _Item(NamedTuple):
    uri: Uri
    path: Path
    size: int


def copy_corpus(
    entries: str | Sequence[str],
    folder: str | os.PathLike[str],
    *,
    read_retries: int = DEFAULT_RETRIES,
    read_requests: int = DEFAULT_REQUESTS,
    progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]] | None = None,
) -> Copied:
    """Copy the files that URIs name, and the indexes, masks and manifests next to them, to `folder`. Blocks.

    entries:  URIs of files, folders or patterns, as `open_corpus` takes them. Names below the folder, or below the part
              of a pattern before its first `*`, are kept.
    progress: takes the bytes to copy; a context that gives a function, which is called with the bytes of each step

    A file of the same size and samples is kept. Raises ConfigError for what is not a URI, CorpusReadError for what
    cannot be read, and CorpusError for what cannot be written or if another process copies to the folder.
    """
    given = entries_of(entries, "copy")
    local = next((entry for entry in given if not is_uri(entry)), None)
    if local is not None:
        raise ConfigError(f"copy: {local!r} is a local path; give a URI, such as s3://bucket/data")
    target = Path(folder).expanduser().absolute()
    with ReadRetries(read_retries, read_requests).in_use(), Listings().in_use(), _writing(target):
        items = list(_items(given, target))
        missing = [item for item in items if not _is_there(item)]
        total = sum(item.size for item in missing)
        with contextlib.nullcontext(lambda done: None) if progress is None else progress(total) as advance:
            for item in missing:
                _copy(item, advance)
    return Copied(target, len(items), len(items) - len(missing), total)


def _items(entries: Sequence[str], target: Path) -> Iterator[_Item]:
    seen: dict[Path, Uri] = {}
    for entry in entries:
        for uri, name in _named(Uri(entry)):
            parts = name.split("/")
            if ".." in parts or "" in parts or "\0" in name:
                raise CorpusError(f"{uri}: the name {name!r} does not fit a local folder; copy it under another name")
            path = target / name
            other = seen.setdefault(path, uri)
            if other != uri:
                raise CorpusError(f"{other} and {uri} would both become {path}; copy them to different folders")
            facts = current_listings().facts(uri)
            if facts is None:
                raise CorpusReadError(f"{uri}: does not exist")
            yield _Item(uri, path, facts.size)


def _named(uri: Uri) -> Iterator[tuple[Uri, str]]:
    """The objects that an entry stands for, each once, with their names below the target."""
    if not glob.has_magic(uri.path) and mode_of(uri) == stat.S_IFDIR:
        found = current_listings().below(uri.as_folder())
        root = uri.path
    else:
        data = [file for file in find_files([uri], use_indexes=True) if isinstance(file, Uri)]
        found = [file for one in data for file in (one, *_shards(one))]
        root = os.path.commonpath([one.parent.path for one in found]) if found[0].parent.path else ""
        found += [one for one in _beside(found) if one not in set(found)]
    start = len(root) + 1 if root else 0
    yield from ((one, one.path[start:]) for one in dict.fromkeys(found))


def _shards(index: Uri) -> list[Uri]:
    """The files that an index lists; none for another file."""
    kind = kind_of_index(index)
    if kind == "huggingface":
        files: Sequence[object] = list_shards(index)
    elif kind is not None:
        with open_corpus(index) as corpus:
            files = corpus.files
    else:
        files = []
    return [file for file in files if isinstance(file, Uri)]


def _beside(data: Sequence[Uri]) -> Iterator[Uri]:
    """Files that belong to the data, from listings, or by asking for each."""
    for uri in dict.fromkeys(one.parent for one in data):
        here = [one for one in data if one.parent == uri]
        names = {MANIFEST} | {one.name + end for one in here for end in _BESIDE}
        names |= {one.with_suffix(".idx").name for one in here} | {one.with_suffix(".bin").name for one in here}
        if can_list(uri):
            yield from (one for one in entries_in(uri) if one.name in names)
        else:
            asked = [uri / name for name in sorted(names)]
            look_up_all(asked)
            yield from (one for one in asked if current_listings().facts(one) is not None)


def _is_there(item: _Item) -> bool:
    """Whether the local file has the size and samples of the object."""
    if not item.path.is_file() or item.path.stat().st_size != item.size:
        return False
    with open_file(item.path) as local, open_file(item.uri) as remote:
        return remote.size == item.size and read_samples(local) == read_samples(remote)


def _copy(item: _Item, advance: Callable[[int], None]) -> None:
    with open_file(item.uri) as source:
        assert isinstance(source, ObjectFile)
        version = hashlib.sha256(f"{source.identity} {source.size}".encode()).hexdigest()[:8]
        part = item.path.with_name(f"{item.path.name}.{version}.part")
        try:
            item.path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                done = file.seek(0, os.SEEK_END)
                advance(done)
                while done < source.size:
                    step = source.read(done, min(_STEP_BYTES, source.size - done))
                    file.write(step)
                    done += len(step)
                    advance(len(step))
                file.flush()
                os.fsync(file.fileno())
            with open_file(part) as local:
                is_same = local.size == source.size and read_samples(local) == read_samples(source)
            if not is_same:
                part.unlink()
                raise CorpusReadError(f"{item.uri}: the copy differs from the object and was removed. Copy it again.")
            part.replace(item.path)
        except CorpusReadError:
            raise
        except OSError as error:
            raise CorpusError(
                f"{part}: cannot be written: {error.strerror}. Free some space or correct the permissions, and run the "
                "command again: it goes on from there."
            ) from error


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """The folder is there, and no other process copies to it."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        held, _ = lock(target / ".copy.lock", wait=False)
    except BlockingIOError:
        raise CorpusError(f"{target}: another process is copying to this folder; wait for it to finish") from None
    except OSError as error:
        raise CorpusError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        if held is not None:
            (target / ".copy.lock").unlink(missing_ok=True)
            unlock(held)
