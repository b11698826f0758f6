"""What is drawn for each row, on the host: its key, how many of its tokens are chosen, its prefix. Integers only.

    seed, source, pass ─▶ key of the pass ─▶ position of the row's first token in the source ─▶ key of the row

So the draws of a row are the same on any rank, with any batch size, number of batches in a block and device, and after
any resume, and other sources of a mixture do not change them. Thresholds are compared with draws of 32 bits. Those that
change with the tokens of the run are what holds where the row begins.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config.objectives import Diffusion, Drop, Mlm, Objective, Prefix, Spans
from dali_pipes.config.rates import WHOLE, RateSteps, places_of_changes, threshold
from dali_pipes.config.span_counts import SpanWidths
from dali_pipes.objectives.span_draws import DrawnSpans, draw_spans, no_spans
from dali_pipes.operators.noised_rows import KEY, LENGTH, NUMBER, PREFIX, RATE, ROW_COLUMNS
from dali_pipes.operators.permute import permute_each, splitmix64

Int64Array = npt.NDArray[np.int64]

STRATA = 64
"""Consecutive rows of the order in which the masked share of `diffusion` lies once in each 64th of its range."""

_OF_ROW = 2**62
"""Outputs of a row's generator from here on are draws for the row as a whole: those of its positions come before."""
_SHARE, _PREFIX, _SPANS = 1, 2, 3

_ROWS_OF_BATCH = 2**32
"""Numbers for the rows of one batch, where a place of the order is a batch."""
_END_OF_RUN = 2**63 - 1
_SMALL = 2**31
"""Products with lengths of rows have 63 bits."""


class SourceObjectives(NamedTuple):
    """The objectives of one source, those that its rows get, and where its first token is in the joined corpora.

    Rows for validation get fewer, but the same fields.
    """

    name: str | None
    entries: tuple[Objective, ...]
    active: tuple[Objective, ...]
    base: int = 0


class Drawn(NamedTuple):
    """R rows: `rows` as the operator `noised_rows` takes them, and what batches say of each row.

    spans: None without an objective of this kind
    """

    rows: Int64Array
    prefix_lengths: Int64Array
    p_mask: npt.NDArray[np.float32]
    spans: DrawnSpans | None


class RowDraws:
    """The draws of rows. Safe for several threads.

    sources: in the order of the numbers that plans have; numbers: of each, the rule that its ids are changed by, or -1
    key:     of a source and a pass; strata_key: of an epoch, 64 bits each
    tokens_before: tokens of the run before a row of an epoch; they rise. May block.
    repeats: whether every pass has the draws of the first, and what holds at the end of the run, so that what is
             learned of two passes can be compared
    in_batches: whether a place of the order is a batch of several rows
    span_widths: room for the spans of a row, if any source has this objective
    """

    def __init__(
        self,
        sources: Sequence[SourceObjectives],
        numbers: Sequence[int],
        *,
        key: Callable[[str | None, int], int],
        strata_key: Callable[[int], int],
        tokens_before: Callable[[int, int], int],
        repeats: bool = False,
        in_batches: bool = False,
        span_widths: SpanWidths | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._key, self._strata_key = lru_cache(4 * len(sources))(key), lru_cache(8)(strata_key)
        self._tokens_before, self._span_widths = tokens_before, span_widths
        self._repeats, self._in_batches = repeats, in_batches
        self._numbers = np.array(numbers, np.int64)
        self._bases = np.array([source.base for source in sources], np.int64)
        self._changes = np.array(
            places_of_changes(own for source in sources for entry in source.active for own in entry.lists)
        )

    def draw(
        self,
        epoch: int,
        row_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        sources: Int64Array | None,
        passes: Int64Array | None,
    ) -> Drawn:
        """row_ids: places of R rows in their epoch, -1 for padding, at the end.

        starts, lengths: positions of their first tokens, and how many they have.
        sources, passes: of each; None: the only one, and the epoch.
        """
        count = len(row_ids)
        rows, p_mask = np.zeros((count, ROW_COLUMNS), np.int64), np.zeros(count, np.float32)
        rows[:, NUMBER] = -1
        spans = None if self._span_widths is None else no_spans(count, self._span_widths)
        numbers = np.minimum(row_ids, 0) if sources is None else sources
        real = np.flatnonzero((row_ids >= 0) & (lengths > 0))
        tokens = self._tokens(epoch, row_ids[real])
        if self._repeats:
            epoch, passes = 0, None
        places = _places_of_rows(row_ids[real]) if self._in_batches else row_ids[real]
        whose = numbers[real]
        rows[real, LENGTH] = lengths[real]
        rows[real, NUMBER] = self._numbers[whose]
        pass_keys = self._pass_keys(whose, np.full(len(real), epoch) if passes is None else passes[real])
        keys = splitmix64(pass_keys, (starts[real] - self._bases[whose] + 1).astype(np.uint64))
        rows[real, KEY] = keys.view(np.int64)
        for number, source in enumerate(self._sources):
            own = np.flatnonzero(whose == number)
            if not len(own):
                continue
            at, begun = real[own], tokens[own]
            for entry in source.active:
                if isinstance(entry, Mlm | Drop):
                    rows[at, RATE] = _thresholds(entry.rate, begun)
                elif isinstance(entry, Diffusion):
                    rows[at, RATE] = rates = self._strata(entry, epoch, places[own], keys[own], begun)
                    p_mask[at] = rates / WHOLE
                elif isinstance(entry, Prefix):
                    rows[at, PREFIX] = _prefixes(entry, rows[at, LENGTH], keys[own], begun)
                elif isinstance(entry, Spans):
                    assert spans is not None
                    assert self._span_widths is not None
                    of_row = rows[at, LENGTH], keys[own], begun
                    found = draw_spans(entry, *of_row, _OF_ROW + _SPANS, self._span_widths)
                    spans.table[at] = found.table
                    spans.encoder_lengths[at] = found.encoder_lengths
                    spans.decoder_lengths[at] = found.decoder_lengths
        return Drawn(rows, rows[:, PREFIX].copy(), p_mask, spans)

    def _pass_keys(self, sources: Int64Array, passes: Int64Array) -> npt.NDArray[np.uint64]:
        """(R,): of the pass of a source that each row is in."""
        if len(sources) and (sources == sources[0]).all() and (passes == passes[0]).all():
            key = self._key(self._sources[int(sources[0])].name, int(passes[0]))
            return np.full(len(sources), key, np.uint64)
        pairs = np.stack((sources, passes), 1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        keys = [self._key(self._sources[number].name, of_pass) for number, of_pass in distinct.tolist()]
        return np.array(keys, np.uint64)[which.reshape(-1)]

    def _tokens(self, epoch: int, row_ids: Int64Array) -> Int64Array:
        """(R,): tokens of the run before rows (rising), as far as it matters: the first of rows with the same rates."""
        if len(self._changes) < 2 or not len(row_ids):
            return np.zeros_like(row_ids)
        if self._repeats:
            return np.full(len(row_ids), _END_OF_RUN)
        ends = np.array([self._tokens_before(epoch, int(row)) for row in row_ids[[0, -1]]])
        before, after = np.searchsorted(self._changes, ends, side="right")
        if before == after:
            return np.full(len(row_ids), ends[0])
        distinct, which = np.unique(row_ids, return_inverse=True)
        return np.array([self._tokens_before(epoch, row) for row in distinct.tolist()])[which.reshape(-1)]

    def _strata(
        self, entry: Diffusion, epoch: int, row_ids: Int64Array, keys: npt.NDArray[np.uint64], tokens: Int64Array
    ) -> Int64Array:
        """Thresholds of rows: in a keyed order each of 64 rows has another 64th of the range, and a place within it."""
        groups, in_group = np.divmod(row_ids, STRATA)
        order = np.argsort(groups, kind="stable")
        distinct, counts = np.unique(groups, return_counts=True)
        epoch_key = np.array(self._strata_key(epoch), np.uint64)
        group_keys = splitmix64(epoch_key, (distinct + 1).astype(np.uint64))
        strata = np.empty_like(row_ids)
        strata[order] = permute_each(in_group[order], counts, np.full(len(distinct), STRATA), group_keys)
        within = splitmix64(keys, np.array(_OF_ROW + _SHARE, np.uint64)) >> np.uint64(38)
        shares = (strata.astype(np.uint64) << np.uint64(26)) | within  # of 2**32
        least = _thresholds(entry.min_rate, tokens).astype(np.uint64)
        rates: Int64Array = (least + ((shares * (np.uint64(WHOLE) - least)) >> np.uint64(32))).astype(np.int64)
        return rates


def _places_of_rows(batches: Int64Array) -> Int64Array:
    """(R,): a number for each row, by the places (rising) of their batches and by which row of its batch it is."""
    firsts = np.searchsorted(batches, batches)
    return batches * _ROWS_OF_BATCH + np.arange(len(batches)) - firsts


def _thresholds(steps: RateSteps, tokens: Int64Array) -> Int64Array:
    """(R,): the numbers that hold at these tokens of the run, for a draw of 32 bits."""
    begins = np.array([at for at, _ in steps], np.int64)
    values = np.array([threshold(share) for _, share in steps], np.int64)
    return values[np.searchsorted(begins, tokens, side="right") - 1]


def _prefixes(entry: Prefix, lengths: Int64Array, keys: npt.NDArray[np.uint64], tokens: Int64Array) -> Int64Array:
    """Uniform from the shortest to the longest length, both included."""
    shortest, longest = (_parts(lengths, steps, tokens) for steps in (entry.shortest, entry.longest))
    draws = splitmix64(keys, np.array(_OF_ROW + _PREFIX, np.uint64)) >> np.uint64(32)
    choices = (longest - shortest + 1).astype(np.uint64)
    return shortest + ((draws * choices) >> np.uint64(32)).astype(np.int64)


def _parts(lengths: Int64Array, steps: RateSteps, tokens: Int64Array) -> Int64Array:
    """Shares of rows, rounded down."""
    which = np.searchsorted([at for at, _ in steps], tokens, side="right") - 1
    parts = np.empty_like(lengths)
    for number, (_, share) in enumerate(steps):
        own = which == number
        parts[own] = _part(lengths[own], share)
    return parts


def _part(lengths: Int64Array, share: Fraction) -> Int64Array:
    if share.numerator < _SMALL:
        return lengths * share.numerator // share.denominator
    return np.array([length * share.numerator // share.denominator for length in lengths.tolist()], np.int64)
