"""What every alternative is asked to deliver, and the corpus it is cut from.

The corpus is one flat file of uint16 tokens. Row `i` of the epoch is window `w(i)`, the tokens
`[w * T, w * T + T + 1)`: its first T are `input_ids`, its last T are `labels`, so windows share one token:

    T = 4      tokens   10 11 12 13 14 15 16 17 18
    window 0            [10 11 12 13] 14                  input_ids 10 11 12 13   labels 11 12 13 14
    window 1                        [14 15 16 17] 18      input_ids 14 15 16 17   labels 15 16 17 18
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 50257  # the ids of GPT-2, so that the values have the spread of a real corpus
_CHUNK_TOKENS = 1 << 22
_CHUNK_BYTES = 1 << 24
RESUME_AT = 0.8  # of the epoch
SIZES = [(8, 1024), (32, 1024), (16, 4096), (64, 2048)]  # batch_size and seq_len that the README reports


@dataclass(frozen=True)
class Work:
    """One size of the comparison. `batch_size` is B rows, `seq_len` is T tokens."""

    corpus: str
    tokens: int
    batch_size: int
    seq_len: int
    folder: str
    seed: int = 1234
    depth: int | None = None
    threads: int | None = None

    @property
    def windows(self) -> int:
        """Rows in an epoch: windows of T + 1 tokens at multiples of T."""
        return (self.tokens - 1) // self.seq_len

    @property
    def epoch_batches(self) -> int:
        """Whole batches in an epoch; the rows left over are dropped by every alternative."""
        return self.windows // self.batch_size

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def resume_batch(self) -> int:
        """Batches consumed before the resume that is measured."""
        return int(RESUME_AT * self.epoch_batches)

    def prepared(self, format_name: str) -> Path:
        """Folder for this corpus in another format. Windows depend on T, so each T has its own."""
        size, modified = os.stat(self.corpus).st_size, os.stat(self.corpus).st_mtime_ns
        return Path(self.folder) / f"{format_name}-{Path(self.corpus).stem}-{size}-{modified}-T{self.seq_len}"

    def mapped(self) -> "np.memmap[Any, np.dtype[np.uint16]]":
        """The corpus as most training scripts open it."""
        return np.memmap(self.corpus, dtype=np.uint16, mode="r")

    def view(self) -> "np.ndarray[Any, np.dtype[np.uint16]]":
        """The same as a plain array: a slice of it costs about a third of a slice of an `np.memmap`."""
        return np.asarray(self.mapped())

    def window_view(self) -> "np.ndarray[Any, np.dtype[np.uint16]]":
        """All windows as an overlapping view, uint16 `(windows, T + 1)`. Copies nothing."""
        shape = (self.windows, self.seq_len + 1)
        return np.lib.stride_tricks.as_strided(self.view(), shape, (2 * self.seq_len, 2), writeable=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def at(self, batch_size: int, seq_len: int) -> "Work":
        return replace(self, batch_size=batch_size, seq_len=seq_len)


@dataclass(frozen=True)
class Limits:
    """The timed part ends after `batches` batches, but not before `min_s` and not after `max_s` seconds."""

    batches: int = 2000
    min_s: float = 0.3
    max_s: float = 0.7
    check_s: float = 1.5
    """Time for the check of a fresh epoch; 0 leaves only the last timed batch and the resumed one to be checked."""

    def without_check(self) -> "Limits":
        return replace(self, check_s=0)


def make_corpus(folder: Path, tokens: int) -> Path:
    """Write a random corpus of `tokens` uint16 ids, or reuse the one of that size in `folder`."""
    path = folder / f"random-{tokens}.bin"
    if path.exists() and path.stat().st_size == 2 * tokens:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(tokens)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        for start in range(0, tokens, _CHUNK_TOKENS):
            count = min(_CHUNK_TOKENS, tokens - start)
            file.write(generator.integers(0, VOCABULARY, count, dtype=np.uint16).tobytes())
    unfinished.rename(path)
    return path


def warm(path: Path) -> None:
    """Read a file, or every file under a folder, so that it is in the page cache. Blocks until it is."""
    buffer = bytearray(_CHUNK_BYTES)
    for file_path in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file_path.is_file():
            with file_path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
