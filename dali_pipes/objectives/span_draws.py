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
    entry: Spans, lengths: Int64Array, keys: npt.NDArray[np.uint64], first_output: int, widths: SpanWidths
) -> DrawnSpans:
    """lengths: tokens in R rows, 1 or more; keys: of the rows. first_output: of the row's generator, that is used."""
    draws = splitmix64(keys, np.array(first_output, np.uint64)) >> np.uint64(32)
    chosen = np.searchsorted(np.array(entry.thresholds, np.uint64), draws, side="right")
    noise, count = np.zeros((2, len(lengths)), np.int64)
    for number, own in enumerate(entry.denoisers):
        at = chosen == number
        noise[at], count[at] = span_counts(lengths[at], own.rate, own.mean)
    drawn = no_spans(len(lengths), widths)
    drawn.table[:, COUNT] = count
    modes = np.array([-1 if own.mode_token is None else own.mode_token for own in entry.denoisers], np.int32)
    drawn.table[:, MODE] = modes[chosen]
    totals = np.stack((lengths - noise, noise), 1)
    number_of_cuts = (count - 1).repeat(2)
    of_parts = np.array([first_output + 1, first_output + 2], np.uint64)
    cuts = np.broadcast_to(totals[:, :, None], (*totals.shape, widths.spans)).reshape(-1, widths.spans).copy()
    places = np.arange(widths.spans)
    is_cut = places < number_of_cuts[:, None]
    indices = np.broadcast_to(places, is_cut.shape)[is_cut]
    sizes, cut_keys = np.maximum(totals - 1, 1).reshape(-1), splitmix64(keys[:, None], of_parts).reshape(-1)
    cuts[is_cut] = permute_each(indices, number_of_cuts, sizes, cut_keys) + 1
    cuts.sort(axis=1)
    drawn.table[:, FIRST_COLUMNS:] = cuts.reshape(len(lengths), -1)
    has_end = entry.end_id is not None
    encoder = (modes[chosen] >= 0) + totals[:, 0] + count + has_end
    return drawn._replace(encoder_lengths=encoder, decoder_lengths=noise + count + has_end)
