"""EncodedFiles: encoded image files for DALI to decode in `graph=`. They do not need worker processes.

root/cat/1.jpg     item 0   {"image": uint8 (n,), "label": 0}
root/cat/2.jpg     item 1   {"image": uint8 (n,), "label": 0}
root/dog/a/1.jpg   item 2   {"image": uint8 (n,), "label": 1}
"""

import functools
import hashlib
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.storage.byte_file import open_file

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What torchvision's `ImageFolder` takes for images."""


class EncodedFiles(Dataset[dict[str, Any]]):
    """A map-style dataset of encoded image files, for `graph=` to decode.

    paths:   paths of the files; a file is opened only when it is read
    labels:  one integer per file; None: samples do not contain "label"
    threads: number of files that `read_items` reads concurrently
    classes: names of the labels; `from_folder` sets them

    Samples are {"image": uint8 (bytes of the file,), "label": int}. Reading does not use random numbers, so loaders
    prefetch items with `read_items`.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        labels: Sequence[int] | None = None,
        *,
        threads: int = 8,
        classes: Sequence[str] = (),
    ) -> None:
        """Raises ConfigError if the numbers of labels and paths differ."""
        self.paths, self.classes = [os.fspath(path) for path in paths], list(classes)
        self.labels = None if labels is None else [operator.index(label) for label in labels]
        if self.labels is not None and len(self.labels) != len(self.paths):
            raise ConfigError(
                f"EncodedFiles: found {len(self.labels):,} labels for {len(self.paths):,} paths; expected one per path"
            )
        self._threads, self._num_threads = _Threads(), threads

    @classmethod
    def from_folder(cls, root: str | os.PathLike[str], suffixes: Iterable[str] = IMAGE_SUFFIXES, **more: Any) -> Self:
        """The files `root/class/.../file`, in the order and with the labels of torchvision's `ImageFolder`.

        Classes are the folders in `root`, sorted by name; the files of a class are sorted by folder and name. Blocks
        while it lists the folders. Raises CorpusReadError if `root` cannot be listed or does not contain folders, and
        for a class without files that end in one of the suffixes.
        """
        suffixes, root = tuple(suffix.lower() for suffix in suffixes), os.fspath(root)
        try:
            classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        except OSError as error:
            raise CorpusReadError(f"{root}: cannot be listed: {error.strerror}") from error
        if not classes:
            raise CorpusReadError(f"{root}: contains no folders; expected one for each class, such as {root}/cat/1.jpg")
        paths, labels = [], []
        for label, name in enumerate(classes):
            found = list(_files_below(os.path.join(root, name), suffixes))
            if not found:
                raise CorpusReadError(
                    f"{os.path.join(root, name)}: contains no files that end in {', '.join(suffixes)}. Remove the "
                    "folder, or pass other suffixes."
                )
            paths += found
            labels += [label] * len(found)
        return cls(paths, labels, classes=classes, **more)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: label for label, name in enumerate(self.classes)}

    @functools.cached_property
    def _fingerprint(self) -> str:
        """What a saved state compares: names below the common folder, so that a copy elsewhere is the same, and labels.

        Computed when first asked for, at about a second for a million files.
        """
        digest, common = hashlib.sha256(), os.path.commonpath(self.paths) if self.paths else ""
        for path in self.paths:
            digest.update(os.fsencode(os.path.relpath(path, common)) + b"\0")
        digest.update(repr(self.labels).encode())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one file. Blocks. Raises a CorpusReadError that names the file."""
        index = operator.index(index)
        sample: dict[str, Any] = {"image": _content(self.paths[index])}
        if self.labels is not None:
            sample["label"] = self.labels[index]
        return sample

    def read_items(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of these items; several threads read the files. Blocks; thread-safe.

        A loader without worker processes calls this method instead of `dataset[i]` if the dataset defines it. A dataset
        that defines it must be thread-safe and must not use random numbers. Raises CorpusReadError for the first item
        that cannot be read.
        """
        if not indices:
            return []
        threads = self._threads.get(self._num_threads)
        size = -(-len(indices) // threads.count)
        parts = [threads.submit(self._read, indices[first : first + size]) for first in range(0, len(indices), size)]
        return [sample for part in parts for sample in threads.result(part)]

    def _read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def _content(path: str) -> npt.NDArray[np.uint8]:
    with open_file(Path(path)) as file:
        content = np.empty(file.size, np.uint8)
        if not file.size:
            raise CorpusReadError(f"{path} is empty; expected an encoded image. Remove it or copy it again.")
        file.read_ranges([(0, file.size, 0)], content.data)
    return content


def _files_below(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    for inside, _, names in sorted(os.walk(folder, followlinks=True)):
        yield from (os.path.join(inside, name) for name in sorted(names) if name.lower().endswith(suffixes))


class _Threads:
    """Reader threads, started when first asked for. Not pickled, and not shared with a fork, in which none run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: tuple[int, ReaderThreads] | None = None

    def get(self, count: int) -> ReaderThreads:
        with self._lock:
            if self._started is None or self._started[0] != os.getpid():
                self._started = os.getpid(), ReaderThreads(count)
            return self._started[1]

    def __reduce__(self) -> tuple[type["_Threads"], tuple[()]]:
        return _Threads, ()
