"""The corpora of a mixture, one after another in one space of positions.

    web     0 ... 999          positions    0 ...  999
    code    0 ... 499                    1000 ... 1499

So a plan, a read, or an error about a token needs one number for it, whichever corpus it is in.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.corpus import Corpus, TokenLocation, TokenMask
from dali_pipes.corpus.spans import cut_at, read_through
from dali_pipes.errors import ConfigError
from dali_pipes.storage.linux_aio import runs_of_equal

Int64Array = npt.NDArray[np.int64]


class JoinedCorpora:
    """The corpora of several sources, by name. Safe for several threads, as they are.

    dtype:      the narrowest integer type that holds the ids of all corpora
    bases:      int64 (S + 1,): position of each corpus's first token, and the end of the last
    loss_mask:  None if no corpus has one; corpora without one count as learned
    """

    def __init__(self, corpora: Mapping[str, Corpus], *, together: bool = True) -> None:
        """together: whether corpora that need no decoding are read in one call; else each by its own `read_pieces`."""
        self.names, self.corpora = tuple(corpora), tuple(corpora.values())
        self.dtype: np.dtype[Any] = np.result_type(*(corpus.dtype for corpus in self.corpora))
        if self.dtype.kind != "i" and self.dtype.kind != "u":
            types = ", ".join(f"{name}: {corpus.dtype}" for name, corpus in corpora.items())
            raise ConfigError(f"mixture: no integer type holds the ids of all sources ({types}); convert one of them")
        self.bases: Int64Array = np.cumsum([0, *(corpus.num_tokens for corpus in self.corpora)])
        in_place = [corpus for corpus in self.corpora if corpus.is_in_place]
        self._together = Corpus.joined(in_place) if together and len(in_place) > 1 else None
        """The corpora that need no decoding, so that a block is read in one call, whatever number of sources it has."""
        self._is_together = np.array([self._together is not None and corpus.is_in_place for corpus in self.corpora])
        sizes = np.diff(self.bases)
        self._shifts = np.cumsum(sizes * self._is_together) - sizes - self.bases[:-1]
        """(S,): from a position here to that in the corpora that are read together."""
        masks = [corpus.loss_mask for corpus in self.corpora]
        self.loss_mask = None if not any(mask is not None for mask in masks) else _JoinedMasks(self, masks)

    def source_of(self, position: int) -> int:
        """The number of the corpus that holds a position."""
        return int(np.searchsorted(self.bases, position, side="right")) - 1

    def read_pieces(self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        """Put the `lengths[p]` ids from position starts[p] at out[targets[p]]. Blocks.

        Arguments and errors as of `Corpus.read_pieces`; `out` is of `dtype`.
        """
        if self._together is not None and self._is_together.all():
            _read(self._together, starts, lengths, targets, out)
            return
        begins, sizes, places, numbers = cut_at(self.bases, starts, lengths, targets)
        together = self._is_together[numbers]
        if self._together is not None and together.any():
            positions = (begins + self._shifts[numbers])[together]
            _read(self._together, positions, sizes[together], places[together], out)
        alone = ~together
        for number, own in _by_corpus(self.bases, begins[alone], sizes[alone], places[alone], numbers[alone]):
            _read(self.corpora[number], *own, out)

    def read_rows(self, starts: Int64Array, out: npt.NDArray[Any]) -> None:
        """Fill row r of `out` (R, L) with the ids from position starts[r]. Blocks; as `Corpus.read_rows`."""
        if self._together is not None and self._is_together.all() and self._together.dtype == self.dtype:
            self._together.read_rows(starts, out)
            return
        lengths = np.full(len(out), out.shape[1])
        self.read_pieces(starts, lengths, lengths.cumsum() - lengths, out.reshape(-1))

    def in_corpora(
        self, starts: Int64Array, lengths: Int64Array, targets: Int64Array
    ) -> Iterator[tuple[int, tuple[Int64Array, Int64Array, Int64Array]]]:
        """The pieces in each corpus by its own positions: cut where corpora end."""
        return _by_corpus(self.bases, *cut_at(self.bases, starts, lengths, targets))

    def tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        """Ids `start` ... `start + count - 1` of one corpus in a fresh array (count,). Blocks."""
        out = np.empty(count, self.dtype)
        self.read_pieces(np.array([start]), np.array([count]), np.zeros(1, np.int64), out)
        return out

    def locate(self, position: int) -> TokenLocation:
        """The file of the token at `position`, and its offset there in tokens. Does not read data."""
        number = self.source_of(position)
        return self.corpora[number].locate(position - int(self.bases[number]))

    def end_retries(self) -> None:
        """Stop retrying, as `Corpus.end_retries`. Idempotent."""
        for corpus in self.corpora:
            corpus.end_retries()

    def close(self) -> None:
        """Close the files of all corpora. Idempotent."""
        for corpus in self.corpora:
            corpus.close()
        if self._together is not None:
            self._together.close()


def _by_corpus(
    bases: Int64Array, begins: Int64Array, sizes: Int64Array, places: Int64Array, numbers: Int64Array
) -> Iterator[tuple[int, tuple[Int64Array, Int64Array, Int64Array]]]:
    if not len(numbers):
        return
    for first, count in zip(*(column.tolist() for column in runs_of_equal(numbers)), strict=True):
        here, number = slice(first, first + count), int(numbers[first])
        yield number, (begins[here] - bases[number], sizes[here], places[here])


def _read(corpus: Corpus, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
    if corpus.dtype == out.dtype:
        corpus.read_pieces(starts, lengths, targets, out)
    else:
        read_through(corpus.read_pieces, corpus.dtype, starts, lengths, targets, out)


class _JoinedMasks:
    """The loss masks of joined corpora, as one."""

    def __init__(self, joined: JoinedCorpora, masks: list[TokenMask | None]) -> None:
        self._joined, self._masks = joined, masks

    def read_pieces(self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        # First, as a mask looks for values other than 0 and 1 in all of `out`.
        for length, target in zip(lengths.tolist(), targets.tolist(), strict=True):
            out[target : target + length] = 1
        for number, columns in self._joined.in_corpora(starts, lengths, targets):
            mask = self._masks[number]
            if mask is not None:
                mask.read_pieces(*columns, out)
