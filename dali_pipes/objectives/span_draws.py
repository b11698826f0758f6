"""Where the spans of rows are: what `corrupted_spans` needs of each row, planned on the host by integers.

    draw of the row ─▶ denoiser ─▶ tokens and spans to take out ─▶ cuts of what is kept, and of what is taken out

To cut n tokens into k parts, T5 shuffles k - 1 ones and n - k zeros, each for a place between two tokens. Here the ones
are drawn by `drawn_places`, which makes every choice of places equally likely, too.
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config.objectives import Denoiser, Spans
from dali_pipes.config.span_counts import SpanWidths, span_counts
from dali_pipes.objectives.drawn_places import drawn_places
from dali_pipes.operators.corrupted_spans import COUNT, FIRST_COLUMNS, MODE
from dali_pipes.operators.permute import splitmix64

Int64Array = npt.NDArray[np.int64]

_PART = 2**18  # places that are drawn from together


class DrawnSpans(NamedTuple):
    """R rows: int32 (R, 2 + 2 S) as the operator takes it, and the numbers of inputs and of targets, with `end_id`."""

    table: npt.NDArray[np.int32]
    encoder_lengths: Int64Array
    decoder_lengths: Int64Array


def no_spans(rows: int, widths: SpanWidths) -> DrawnSpans:
    """Of rows of padding."""
    table = np.zeros((rows, FIRST_COLUMNS + 2 * widths.spans), np.int32)
    table[:, MODE] = -1
    return DrawnSpans(table, *np.zeros((2, rows), np.int64))


def draw_spans(
    entry: Spans,
    lengths: Int64Array,
    keys: npt.NDArray[np.uint64],
    tokens: Int64Array,
    first_output: int,
    widths: SpanWidths,
) -> DrawnSpans:
    """lengths: tokens in R rows, 1 or more; keys: of the rows. first_output: of the row's generator, that is used.

    tokens: of the run, before each row
    """
    chosen = _chosen(entry, keys, tokens, first_output)
    noise, count, mode = np.empty((3, len(lengths)), np.int64)
    for number, denoiser in enumerate(entry.denoisers):
        own = (chosen == number).nonzero()[0]
        noise[own], count[own] = _counts(lengths[own], denoiser)
        mode[own] = -1 if denoiser.mode_token is None else denoiser.mode_token
    kept, has_end = lengths - noise, entry.end_id is not None
    table = np.empty((len(lengths), FIRST_COLUMNS + 2 * widths.spans), np.int32)
    table[:, COUNT], table[:, MODE] = count, mode
    # All denoisers in one call, though some need fewer draws: a call for each would take longer.
    for part, parted in enumerate((kept, noise)):
        cut_keys = splitmix64(keys, np.array(first_output + 1 + part, np.uint64))
        first = FIRST_COLUMNS + part * widths.spans
        table[:, first : first + widths.spans] = _sums(parted, count, cut_keys, widths.spans)
    return DrawnSpans(table, (mode >= 0) + kept + count + has_end, noise + count + has_end)


def _chosen(entry: Spans, keys: npt.NDArray[np.uint64], tokens: Int64Array, output: int) -> Int64Array:
    """(R,): the denoiser of each row."""
    chosen, changes = np.zeros(len(keys), np.int64), entry.changes
    if len(entry.denoisers) == 1:
        return chosen
    draws = splitmix64(keys, np.array(output, np.uint64)) >> np.uint64(32)
    stages = np.searchsorted(changes, tokens, side="right") - 1
    for stage, at in enumerate(changes):
        own = stages == stage
        chosen[own] = np.searchsorted(np.array(entry.thresholds(at), np.uint64), draws[own], side="right")
    return chosen


def _counts(lengths: Int64Array, denoiser: Denoiser) -> tuple[Int64Array, Int64Array]:
    """`span_counts`, which takes a while, of rows that most often are equally long."""
    if len(lengths) and (lengths == lengths[0]).all():
        noise, count = _counts_of(int(lengths[0]), denoiser.rate, denoiser.mean)
        return np.full_like(lengths, noise), np.full_like(lengths, count)
    return span_counts(lengths, denoiser.rate, denoiser.mean)


@lru_cache(maxsize=256)
def _counts_of(length: int, rate: Fraction, mean: Fraction | None) -> tuple[int, int]:
    noise, count = span_counts(np.array([length]), rate, mean)
    return int(noise[0]), int(count[0])


def _sums(tokens: Int64Array, count: Int64Array, keys: npt.NDArray[np.uint64], most: int) -> npt.NDArray[np.int32]:
    """(R, most): tokens in the first 1, 2, ... of `count` parts of `tokens`, cut at drawn places."""
    cuts, places = np.maximum(count - 1, 0), np.maximum(tokens - 1, 0)
    sums = np.empty((len(tokens), most), np.int32)
    size = _PART // (1 + int(places.max(initial=0))) + 1
    for first in range(0, len(sums), size):
        own = slice(first, first + size)
        sums[own] = drawn_places(places[own], cuts[own], keys[own], most)
    sums += tokens[:, None] > 0  # a cut at a place is after its token
    return sums
