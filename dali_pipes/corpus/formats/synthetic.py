"""Synthetic ids by formula, `synthetic:10B`: any number of them, the same on every machine, without files or memory.

    word w      a hash of w, 64 bits        splitmix64's output function, of (w + 1) * its step
    word w      ids 4w ... 4w + 3           two from each half, by multiplying with the vocabulary's size; 2w, 2w + 1
                                            where the vocabulary is larger than 2^16: one from each half
    boundary k  k * 1024 + (0 ... 1023)     another hash of k: documents of 1 to 2,047 tokens, 1,024 in the mean
    last token of each document             the end id, which does not occur elsewhere

They cannot be learned: the loss of a model stays at about ln(vocab_size). They are for smoke tests and benchmarks of a
trainer. The formula is frozen as version 1, which is part of the fingerprint.
"""

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.amounts import parse_amount
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.errors import ConfigError

FORMAT = "synthetic"
PREFIX = f"{FORMAT}:"
DEFAULT_VOCAB_SIZE = 50257
"""GPT-2's."""
MOST_TOKENS = 10**15
MOST_DOCUMENTS = 1 << 26
"""A larger corpus does not index its documents, because the offsets would take more than 512 MiB."""
MEAN_DOCUMENT = 1024

_VERSION = 1
_LARGEST_SHORT_VOCABULARY = 1 << 16
_LARGEST_VOCABULARY = 1 << 31
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_BOUNDARIES = np.int64(1 << 62)  # boundary k is hashed as word 2^62 + k, which ids never use
_TILE_WORDS = 1 << 15
"""Words that are hashed in one step, so that the arrays stay in a core's cache: 1.6 to 2 ns an id, 2.5 with 1 << 12."""


def is_synthetic(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], format: str) -> bool:
    """Whether `paths` name a synthetic corpus. An existing file of that name is a file unless `format` is "synthetic".

    Raises ConfigError if one is named together with other data, or `format` is "synthetic" and none is named.
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Sequence) else []
    named = [entry for entry in entries if isinstance(entry, str) and entry.startswith(PREFIX)]
    if format == "auto":
        named = [entry for entry in named if not os.path.lexists(entry)]
    if format not in ("auto", FORMAT) or not (named or format == FORMAT):
        return False
    if not named:
        raise ConfigError(f'format = "synthetic" needs a corpus such as "synthetic:10B", found {paths!r}')
    if len(entries) > 1:
        raise ConfigError(
            f"corpus: {named[0]!r} cannot be combined with other data, but {len(entries)} entries are listed. List it "
            "alone."
        )
    return True


def open_synthetic(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    vocab_size: int | None,
    dtype: np.dtype[Any] | None,
    eos_id: int | None,
) -> tuple[DataFile, int]:
    """The corpus that `paths` name (see `is_synthetic`), as one file; and the id that ends its documents.

    vocab_size: ids are below it, 50257 if not given
    dtype:      in which they are served; by default uint16 if they fit, else uint32
    eos_id:     ends each document; by default the largest id

    Raises ConfigError for an invalid size, vocabulary or type.
    """
    name = str(paths if isinstance(paths, str | os.PathLike) else paths[0])
    ids = SyntheticIds(parse_size(name), DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size, eos_id)
    smallest = np.dtype(np.uint16 if ids.is_short else np.uint32)
    stored: np.dtype[Any] = smallest if dtype is None else dtype.newbyteorder("=")
    largest = ids.vocab_size - 1
    if largest > np.iinfo(stored).max or stored == np.uint64:
        raise ConfigError(
            f"dtype = {stored.name!r}: ids of {name} go up to {largest:,} (vocab_size - 1); expected {smallest.name}, "
            "int32 or int64. Leave dtype out."
        )
    about = f"dali_pipes synthetic {_VERSION} {ids.num_tokens} {ids.vocab_size} {ids.end_id}"
    file = DataFile(
        path=Path(name),
        format=FORMAT,
        size=0,
        stored=stored,
        data_offset=0,
        extents=np.array([[0, ids.num_tokens]], np.int64),
        digest=hashlib.sha256(about.encode()).digest(),
        num_documents=ids.num_documents,
        read_document_offsets=None if ids.num_documents is None else ids.document_offsets,
        generate=ids.fill,
    )
    return file, ids.end_id


def parse_size(name: str) -> int:
    """Tokens of `synthetic:10B`: a number with K, M, B or T for thousands to trillions. Raises ConfigError."""
    size = parse_amount(name.removeprefix(PREFIX))
    if size is None:
        raise ConfigError(
            f"corpus {name!r}: expected a number of tokens with an optional K, M, B or T (thousands to trillions), "
            'such as "synthetic:10B"'
        )
    if size != int(size) or not 1 <= size <= MOST_TOKENS:
        raise ConfigError(f"corpus {name!r}: {size:f} tokens; expected an integer from 1 to {MOST_TOKENS:,}")
    return int(size)


class SyntheticIds:
    """The ids of one synthetic corpus. Pure arithmetic: safe for any number of threads and processes."""

    def __init__(self, num_tokens: int, vocab_size: int, eos_id: int | None = None) -> None:
        if not 1 <= vocab_size <= _LARGEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size = {vocab_size}: expected 1 to {_LARGEST_VOCABULARY:,} for a synthetic corpus"
            )
        if eos_id is not None and eos_id >= vocab_size:
            raise ConfigError(
                f"eos_id = {eos_id}: expected an id below vocab_size = {vocab_size} for a synthetic corpus; or leave "
                "eos_id out, and the largest id ends documents"
            )
        self.num_tokens, self.vocab_size = num_tokens, vocab_size
        self.end_id = vocab_size - 1 if eos_id is None else eos_id
        self.is_short = vocab_size <= _LARGEST_SHORT_VOCABULARY
        self._ids_in_a_word = 4 if self.is_short else 2
        self._others = np.uint64(max(1, vocab_size - 1))  # all ids but the end id, which would end documents elsewhere
        last = (num_tokens - 1) // MEAN_DOCUMENT  # the last boundary that may be inside the corpus
        inside = last - (last > 0 and int(_boundaries(np.array([last], np.int64))[0]) >= num_tokens)
        self.num_documents = inside + 1 if inside < MOST_DOCUMENTS else None

    def fill(self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        """Put the `lengths[p]` ids from position positions[p] at out[targets[p]]; pieces are inside the corpus."""
        firsts = positions // self._ids_in_a_word
        words = (positions + lengths - 1) // self._ids_in_a_word + 1 - firsts
        long = np.flatnonzero(words > _TILE_WORDS)
        if len(long):
            for piece in long.tolist():
                self._fill_long(int(positions[piece]), int(lengths[piece]), int(targets[piece]), out)
            short = words <= _TILE_WORDS
            positions, lengths, targets, firsts, words = (
                column[short] for column in (positions, lengths, targets, firsts, words)
            )
        if not len(positions):
            return
        tiles = np.cumsum(words) // _TILE_WORDS
        cuts = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(words)]
        skipped = positions - firsts * self._ids_in_a_word
        for begin, end in itertools.pairwise(cuts):
            counts = words[begin:end]
            before = np.cumsum(counts) - counts
            numbers = np.repeat(firsts[begin:end] - before, counts)
            numbers += np.arange(len(numbers))
            ids = self._ids(_hashed(numbers))
            sources = before * self._ids_in_a_word + skipped[begin:end]
            columns = sources.tolist(), targets[begin:end].tolist(), lengths[begin:end].tolist()
            for source, target, length in zip(*columns, strict=True):
                out[target : target + length] = ids[source : source + length]
        self._put_ends(positions, lengths, targets, out)

    def document_offsets(self) -> Int64Array:
        """Where each document begins, and the end: int64 (num_documents + 1,)."""
        assert self.num_documents is not None
        offsets = np.zeros(self.num_documents + 1, np.int64)
        for begin in range(1, self.num_documents, 1 << 20):
            part = offsets[begin : min(begin + (1 << 20), self.num_documents)]
            part[:] = _boundaries(np.arange(begin, begin + len(part)))
        offsets[-1] = self.num_tokens
        return offsets

    def _fill_long(self, position: int, length: int, target: int, out: npt.NDArray[Any]) -> None:
        tile = _TILE_WORDS // 2 * self._ids_in_a_word
        starts = np.arange(0, length, tile)
        self.fill(position + starts, np.minimum(tile, length - starts), target + starts, out)

    def _ids(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """The ids of some words, one after another."""
        halves = words.astype("<u8", copy=False).view("<u4")  # the low one first
        products = halves * self._others  # an id is the product's high half
        high = products.astype("<u8", copy=False).view("<u4")[1::2]
        if self.is_short:  # and its low half gives another one
            ids: npt.NDArray[Any] = np.empty((len(halves), 2), np.uint16)
            ids[:, 0] = high
            products &= _LOW_HALF
            products *= self._others
            ids[:, 1] = products.astype("<u8", copy=False).view("<u4")[1::2]
            ids = ids.reshape(-1)
        else:
            ids = high.astype(np.uint32)
        if self.end_id < self.vocab_size - 1:
            ids += ids >= self.end_id
        return ids

    def _put_ends(self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        """Put the end id where documents end: before each boundary, and at the end of the corpus."""
        # Boundary k is in [k, k + 1) * MEAN_DOCUMENT, so boundaries in (position, position + length] are among these.
        firsts = np.maximum(1, (positions + 1) // MEAN_DOCUMENT)
        counts = np.maximum(0, (positions + lengths) // MEAN_DOCUMENT + 1 - firsts)
        pieces = np.repeat(np.arange(len(positions)), counts)
        numbers = np.arange(len(pieces)) + (firsts - np.cumsum(counts) + counts)[pieces]
        columns = np.minimum(_boundaries(numbers), self.num_tokens) - 1 - positions[pieces]
        inside = (columns >= 0) & (columns < lengths[pieces])
        out[targets[pieces[inside]] + columns[inside]] = self.end_id
        last = np.flatnonzero((positions + lengths == self.num_tokens) & (lengths > 0))
        out[targets[last] + lengths[last] - 1] = self.end_id


def _hashed(numbers: Int64Array) -> npt.NDArray[np.uint64]:
    """splitmix64 of words by number, in place of the numbers."""
    hashed = numbers.view(np.uint64)
    hashed += np.uint64(1)
    hashed *= _STEP
    shifted = hashed >> np.uint64(30)
    hashed ^= shifted
    hashed *= _MULTIPLIERS[0]
    np.right_shift(hashed, np.uint64(27), out=shifted)
    hashed ^= shifted
    hashed *= _MULTIPLIERS[1]
    np.right_shift(hashed, np.uint64(31), out=shifted)
    hashed ^= shifted
    return hashed


def _boundaries(numbers: Int64Array) -> Int64Array:
    """Position after the last token of documents 1, 2, ... by number."""
    hashed = _hashed(numbers + _BOUNDARIES)
    hashed &= np.uint64(MEAN_DOCUMENT - 1)
    return numbers * MEAN_DOCUMENT + hashed.astype(np.int64)
