"""Files compared with the checksums in manifests next to the data (`corpus.discovery.manifests`)."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.corpus.discovery.manifests import recorded_checksums
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.tools.reports.problem import Problem
from dali_pipes.uris import FilePath, Uri

_PIECE_BYTES = 4 << 20
_MOST_THREADS = 8


@dataclass(frozen=True)
class RecordedFile:
    """A file that a manifest lists. `size` in bytes, 0 if the file is missing."""

    path: Path
    sha256: str
    manifest: Path
    exists: bool
    size: int


def recorded_files(data_files: Sequence[FilePath]) -> list[RecordedFile]:
    """The manifest entries for these files, for files that belong to them (`a.idx` to `a.bin`), and for missing files.

    Empty without a manifest. A file that cannot be parsed as a manifest is ignored.
    """
    names: dict[Path, set[str]] = {}
    for file in data_files:
        if isinstance(file, Uri):  # reading them whole twice would cost too much
            continue
        names.setdefault(file.parent, set()).add(_stem(file.name))
    found: list[RecordedFile] = []
    for folder, stems in names.items():
        for manifest in sorted(folder.glob("manifest*.json")):
            for name, sha256 in sorted(recorded_checksums(manifest).items()):
                path = folder / os.fsdecode(name.encode("utf-8", "surrogateescape"))  # whatever the locale
                exists = path.is_file()
                if not exists or _stem(path.name) in stems:
                    size = path.stat().st_size if exists else 0
                    found.append(RecordedFile(path, sha256.lower(), manifest, exists, size))
    return found


def wrong_files(files: Sequence[RecordedFile], advance: Callable[[int], None]) -> Iterator[Problem]:
    """Files that are missing or have another SHA-256. Reads them in parallel; any thread may call `advance(bytes)`."""
    present = [file for file in files if file.exists]
    readers = ReaderThreads(max(1, min(_MOST_THREADS, os.cpu_count() or 1, len(present))))
    try:
        digests = [readers.submit(_sha256, file.path, advance) for file in present]
        for file in files:
            if not file.exists:
                message = f"{file.path}: file is missing, but {file.manifest} lists it"
                yield Problem("missing_file", message, file.path)
        for file, digest in zip(present, digests, strict=True):
            try:
                found = digest.result()
            except OSError as error:
                yield Problem("unreadable", f"{file.path}: cannot read the file: {error.strerror or error}", file.path)
                continue
            if found != file.sha256:
                message = (
                    f"{file.path}: SHA-256 is {found}, expected {file.sha256} ({file.manifest}); copy the file again"
                )
                yield Problem("checksum", message, file.path)
    finally:
        for digest in digests:
            digest.cancel()
        readers.stop()


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


def _stem(name: str) -> str:
    return name.partition(".")[0]
