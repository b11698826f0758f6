"""Where the spans of rows are: what `corrupted_spans` needs of each row, planned on the host by integers.

    draw of the row ─▶ denoiser ─▶ tokens and spans to take out ─▶ cuts of what is kept, and of what is taken out

To cut n tokens into k parts, T5 shuffles k - 1 ones and n - k zeros, each for a place between two tokens. Here the ones
are the first k - 1 images of the keyed permutation of the n - 1 places: every choice of places is as likely.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config.objectives import Spans
from dali_pipes.config.span_counts import SpanWidths, span_counts
from dali_pipes.operators.corrupted_spans import COUNT, FIRST_COLUMNS, MODE
from dali_pipes.operators.permute import permute_each, splitmix64

Int64Array = npt.NDArray[np.int64]


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
    draws = splitmix64(keys, np.array(first_output, np.uint64)) >> np.uint64(32)
    chosen, changes = np.empty(len(lengths), np.int64), entry.changes
    stages = np.searchsorted(changes, tokens, side="right") - 1
    for stage, at in enumerate(changes):
        own = stages == stage
        chosen[own] = np.searchsorted(np.array(entry.thresholds(at), np.uint64), draws[own], side="right")
    table, encoder_lengths, decoder_lengths = no_spans(len(lengths), widths)
    has_end = entry.end_id is not None
    for number, denoiser in enumerate(
        entry.denoisers
    ):  # whose rows often are equally long: one domain for a permutation
        at = (chosen == number).nonzero()[0]
        noise, count = span_counts(lengths[at], denoiser.rate, denoiser.mean)
        kept, mode = lengths[at] - noise, -1 if denoiser.mode_token is None else denoiser.mode_token
        table[at, COUNT], table[at, MODE] = count, mode
        encoder_lengths[at] = (mode >= 0) + kept + count + has_end
        decoder_lengths[at] = noise + count + has_end
        for part, tokens in enumerate((kept, noise)):
            cut_keys = splitmix64(keys[at], np.array(first_output + 1 + part, np.uint64))
            first = FIRST_COLUMNS + part * widths.spans
            table[at, first : first + widths.spans] = _sums(tokens, count, cut_keys, widths.spans)
    return DrawnSpans(table, encoder_lengths, decoder_lengths)


def _sums(tokens: Int64Array, count: Int64Array, keys: npt.NDArray[np.uint64], most: int) -> npt.NDArray[np.int32]:
    """(R, most): tokens in the first 1, 2, ... of `count` parts of `tokens`, cut at drawn places."""
    sums = tokens.astype(np.int32)[:, None].repeat(most, 1)
    numbers = np.arange(most)
    is_cut = numbers < count[:, None] - 1
    indices = np.broadcast_to(numbers, is_cut.shape)[is_cut]
    sums[is_cut] = permute_each(indices, count - 1, np.maximum(tokens - 1, 1), keys) + 1
    sums.sort(axis=1)
    return sums
