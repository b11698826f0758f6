"""Weighted items: each appears in an epoch in proportion to its weight, rounded up or down.

    weights     1     2         1         W = 4, N = 3 rows of an epoch
    0 ..... 1 ......... 3 ..... 4         their cumulative sum
       ^        ^        ^                points W/N apart, from one keyed offset on

The points are an arithmetic progression, so an interval of length w holds the floor or the ceiling of w N / W of them
(systematic sampling; W. G. Madow, L. H. Madow, "On the Theory of Systematic Sampling", 1944). Rows visit the points in
a keyed order. Each epoch has its own offset and order. All of it is integer arithmetic: the same on every machine.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError
from dali_pipes.operators.permute import permute
from dali_pipes.rows.base import order_key

Int64Array = npt.NDArray[np.int64]
WEIGHTED_ORDER_NAME = "weighted-v1"
MOST_ROWS = 2**31
"""Rows of an epoch: the product of two row numbers fits 63 bits."""
_MOST_TOTAL_BITS = 61
_MOST_DECIMALS = 9
_CHUNK = 1 << 18


class WeightedItems:
    """Items by weight. Holds 8 bytes an item; a row costs a binary search."""

    is_uniform = True
    name = WEIGHTED_ORDER_NAME

    def __init__(self, weights: Any, num_items: int, num_rows: int, seed: int) -> None:
        if num_rows > MOST_ROWS:
            raise ConfigError(f"num_samples = {num_rows:,}: with weights, expected at most {MOST_ROWS:,}")
        self._num_rows, self._seed = num_rows, seed
        self._ends = running_sum(weights, num_items)
        self._total = int(self._ends[-1])
        digest = hashlib.sha256(self._ends.data).hexdigest()[:16]
        self.settings: dict[str, Any] = {"num_samples": num_rows, "weights": digest}

    def count(self, epoch: int, at_least: int | None = None) -> int:
        return self._num_rows

    def items(self, epoch: int, rows: Int64Array) -> Int64Array:
        points = permute(rows, self._num_rows, order_key("weights", self._seed, epoch))
        offset = order_key("weights offset", self._seed, epoch) % self._total
        # (points * total + offset) // rows, in parts whose products fit 63 bits.
        whole, rest = divmod(self._total, self._num_rows)
        offset_whole, offset_rest = divmod(offset, self._num_rows)
        at = points * whole + offset_whole + (points * rest + offset_rest) // self._num_rows
        found: Int64Array = np.searchsorted(self._ends, at, side="right")
        return found

    def group(self, epoch: int, row: int) -> str | None:
        return None

    def digest(self, epoch: int) -> str | None:
        return None


def running_sum(weights: Any, num_items: int) -> Int64Array:
    """The cumulative sum of the weights as integers, (N,). Raises `ConfigError` for invalid weights.

    Decimals of up to nine places become integers exactly; others are rounded to 2^-61 of N times the largest.
    """
    given = _array(weights, num_items)
    _check(given)
    places = _decimals(given) if given.dtype.kind == "f" else 0
    largest = given.max()
    bits = _MOST_TOTAL_BITS - num_items.bit_length()
    exponent = bits - math.frexp(float(largest))[1]
    if given.dtype.kind != "f" and int(largest) * num_items >= 2**62:
        raise ConfigError(
            f"weights: integers up to {int(largest):,} overflow 64 bits when summed; divide them by a common factor"
        )
    ends, total = np.empty(num_items, np.int64), 0
    for part, chunk in _chunks(given):
        if given.dtype.kind != "f":
            whole = chunk.astype(np.int64)
        elif places is None:
            whole = np.rint(np.ldexp(chunk.astype(np.float64), exponent)).astype(np.int64)
        else:
            whole = np.rint(chunk.astype(np.float64) * 10**places).astype(np.int64)
        np.cumsum(whole, out=ends[part])
        ends[part] += total
        total = int(ends[part][-1])
    return ends


def _array(weights: Any, num_items: int) -> npt.NDArray[Any]:
    if hasattr(weights, "detach"):  # a tensor
        weights = weights.detach().cpu()
    try:
        given = np.asarray(weights)
    except ValueError as error:
        raise ConfigError(f"weights = {shown(weights)}: expected one number per item") from error
    if given.dtype.kind not in "fiu" or given.ndim != 1:
        raise ConfigError(
            f"weights: found an array of {given.dtype} with shape {given.shape}, expected one number per item, "
            f"{num_items:,} in all"
        )
    if len(given) != num_items:
        raise ConfigError(f"weights: found {len(given):,} numbers, expected {num_items:,}, one per item of the dataset")
    return given


def _chunks(given: npt.NDArray[Any]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Parts that fit a processor's cache: whole arrays of intermediate results would take several times the memory."""
    for first in range(0, len(given), _CHUNK):
        part = slice(first, min(first + _CHUNK, len(given)))
        yield part, given[part]


def _check(given: npt.NDArray[Any]) -> None:
    for part, chunk in _chunks(given):
        wrong = ~np.isfinite(chunk) | (chunk < 0)
        if wrong.any():
            item = part.start + int(np.argmax(wrong))
            raise ConfigError(f"weights: item {item:,} has weight {given[item]}, expected a number, 0 or more")
    if not given.any():
        raise ConfigError("weights: all are 0; give at least one item a weight above 0")


def _decimals(given: npt.NDArray[Any]) -> int | None:
    """The decimal places that write all weights exactly; None: more than nine, or too large for integers then."""
    places = 0
    largest = float(given.max())
    for _, chunk in _chunks(given):
        values = chunk.astype(np.float64)
        while not _fits(values, chunk, places):
            places += 1
            if places > _MOST_DECIMALS:
                return None
    total_bits = math.frexp(largest * 10**places)[1] + len(given).bit_length()
    return places if total_bits <= _MOST_TOTAL_BITS and largest * 10**places < 2**53 else None


def _fits(values: npt.NDArray[np.float64], chunk: npt.NDArray[Any], places: int) -> bool:
    with np.errstate(over="ignore"):
        return bool(((np.rint(values * 10**places) / 10**places).astype(chunk.dtype) == chunk).all())
