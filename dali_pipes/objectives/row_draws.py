"""What is drawn for each row, on the host: its key, how many of its tokens are chosen, its prefix. Integers only.

    seed, source, pass ─▶ key of the pass ─▶ position of the row's first token in the source ─▶ key of the row

So the draws of a row are the same on any rank, with any batch size, number of batches in a block and device, and after
any resume, and other sources of a mixture do not change them. Thresholds are compared with draws of 32 bits.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config.objectives import WHOLE, Diffusion, Drop, Mlm, Objective, Prefix, Spans, threshold
from dali_pipes.config.span_counts import SpanWidths
from dali_pipes.errors import ConfigError
from dali_pipes.objectives.span_draws import DrawnSpans, draw_spans, no_spans
from dali_pipes.operators.noised_rows import KEY, LENGTH, NUMBER, PREFIX, RATE, ROW_COLUMNS
from dali_pipes.operators.permute import permute_each, splitmix64

Int64Array = npt.NDArray[np.int64]

STRATA = 64
"""Consecutive rows of the order in which the masked share of `diffusion` lies once in each 64th of its range."""

_OF_ROW = 2**62
"""Outputs of a row's generator from here on are draws for the row as a whole: those of its positions come before."""
_SHARE, _PREFIX, _SPANS = 1, 2, 3


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
    tokens_before: tokens of the run before an epoch; None: not known, so rates cannot change during the run
    span_widths: room for the spans of a row, if any source has this objective
    """

    def __init__(
        self,
        sources: Sequence[SourceObjectives],
        numbers: Sequence[int],
        *,
        key: Callable[[str | None, int], int],
        strata_key: Callable[[int], int],
        row_len: int,
        tokens_before: Callable[[int], int] | None,
        span_widths: SpanWidths | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._key, self._strata_key = lru_cache(4 * len(sources))(key), lru_cache(8)(strata_key)
        self._row_len, self._tokens_before, self._span_widths = row_len, tokens_before, span_widths
        self._numbers = np.array(numbers, np.int64)
        self._bases = np.array([source.base for source in sources], np.int64)
        for entry in (entry for source in sources for entry in source.active):
            if isinstance(entry, Mlm | Drop) and len(entry.rate) > 1 and tokens_before is None:
                raise ConfigError(
                    f'objective: kind = "{entry.kind}" has a list of rates, which works only with rows = "stream" and '
                    "one seq_len, or with a mixture; set a single rate"
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
            at = real[own]
            for entry in source.active:
                if isinstance(entry, Mlm | Drop):
                    rows[at, RATE] = self._rates(entry, epoch, row_ids[at])
                elif isinstance(entry, Diffusion):
                    rows[at, RATE] = rates = self._strata(entry, epoch, row_ids[at], keys[own])
                    p_mask[at] = rates / WHOLE
                elif isinstance(entry, Prefix):
                    rows[at, PREFIX] = _prefixes(entry, rows[at, LENGTH], keys[own])
                elif isinstance(entry, Spans):
                    assert spans is not None
                    assert self._span_widths is not None
                    found = draw_spans(entry, rows[at, LENGTH], keys[own], _OF_ROW + _SPANS, self._span_widths)
                    spans.table[at] = found.table
                    spans.encoder_lengths[at] = found.encoder_lengths
                    spans.decoder_lengths[at] = found.decoder_lengths
        return Drawn(rows, rows[:, PREFIX].copy(), p_mask, spans)

    def _pass_keys(self, sources: Int64Array, passes: Int64Array) -> npt.NDArray[np.uint64]:
        """(R,): of the pass of a source that each row is in."""
        pairs = np.stack((sources, passes), 1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        keys = [self._key(self._sources[number].name, of_pass) for number, of_pass in distinct.tolist()]
        return np.array(keys, np.uint64)[which.reshape(-1)]

    def _rates(self, entry: Mlm | Drop, epoch: int, row_ids: Int64Array) -> Int64Array:
        thresholds = np.array([threshold(share) for _, share in entry.rate], np.int64)
        if len(thresholds) == 1:
            return thresholds.repeat(len(row_ids))
        assert self._tokens_before is not None
        begins = np.array([at for at, _ in entry.rate], np.int64)
        tokens = self._tokens_before(epoch) + row_ids * self._row_len
        return thresholds[np.searchsorted(begins, tokens, side="right") - 1]

    def _strata(self, entry: Diffusion, epoch: int, row_ids: Int64Array, keys: npt.NDArray[np.uint64]) -> Int64Array:
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
        least = np.uint64(threshold(entry.min_rate))
        rates = least + ((shares * (np.uint64(WHOLE) - least)) >> np.uint64(32))
        return rates.astype(np.int64)


def _prefixes(entry: Prefix, lengths: Int64Array, keys: npt.NDArray[np.uint64]) -> Int64Array:
    """Uniform from the shortest to the longest length, both included."""
    shortest, longest = (lengths * share.numerator // share.denominator for share in (entry.shortest, entry.longest))
    draws = splitmix64(keys, np.array(_OF_ROW + _PREFIX, np.uint64)) >> np.uint64(32)
    choices = (longest - shortest + 1).astype(np.uint64)
    return shortest + ((draws * choices) >> np.uint64(32)).astype(np.int64)
