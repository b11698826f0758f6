"""How many spans and tokens span corruption takes out of a row, and how wide its outputs are: by arithmetic alone.

The rule of T5's `random_spans_noise_mask` (Raffel et al., 2019), with exact fractions:

    512 tokens, rate 0.15, mean length 3        noise tokens round(76.8) = 77, spans round(77 / 3) = 26
    encoder                                     435 tokens + 26 sentinels
    decoder                                      77 tokens + 26 sentinels
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class SpanWidths(NamedTuple):
    """Room for a row: its spans, and positions of `encoder_ids`, of `decoder_labels` and of `causal_ids`."""

    spans: int
    encoder: int
    decoder: int
    causal: int


def span_counts(lengths: Int64Array, rate: Fraction, mean_length: Fraction | None) -> tuple[Int64Array, Int64Array]:
    """(noise tokens, spans) of rows with these lengths. mean_length: None for one span, at the end of the row.

    Each part between spans keeps a token, so a row of one token gets an empty span; an empty row does not get any.
    """
    noise = _rounded(lengths, rate).clip(1, np.maximum(lengths - 1, 1))
    noise = np.where(lengths < 2, 0, noise)
    spans = np.ones_like(noise) if mean_length is None else _rounded(noise, 1 / mean_length)
    spans = np.maximum(np.minimum(spans, np.minimum(noise, lengths - noise)), 1)
    return noise, np.where(lengths < 1, 0, spans)


def span_widths(
    lengths: Int64Array, denoisers: Iterable[tuple[Fraction, Fraction | None, bool]], *, has_end: bool
) -> SpanWidths:
    """The most that a row of any of these lengths needs, with any denoiser: (rate, mean length, has a mode token)."""
    most = [0, 0, 0, 0]
    for rate, mean_length, has_mode in denoisers:
        noise, spans = span_counts(lengths, rate, mean_length)
        encoder, decoder = has_mode + lengths - noise + spans, noise + spans + has_end
        needed = spans, encoder + has_end, decoder, encoder + decoder
        most = [max(before, int(size.max())) for before, size in zip(most, needed, strict=True)]
    return SpanWidths(*most)


def _rounded(values: Int64Array, factor: Fraction) -> Int64Array:
    """The products, to the nearest integer, and halves to the even one. Numerator and denominator are below 2**31."""
    quotients, rests = np.divmod(values * factor.numerator, factor.denominator)
    twice = 2 * rests
    is_up = (twice > factor.denominator) | ((twice == factor.denominator) & (quotients % 2 == 1))
    rounded: Int64Array = quotients + is_up
    return rounded
