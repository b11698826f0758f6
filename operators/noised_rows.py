"""noised_rows: mask ids of rows by keyed draws, and set the labels.

    rows (R, 5)    key   length   rate      number   prefix         mask_id 99, mask everything that is chosen
                    7      5      2**31        0        0

    ids (R, T)     10 11 12 13 14  0     chosen   . # . # . .       out      10 99 12 99 14  0
                                                                    labels -100 11 -100 13 -100 -100

The draws at position t of a row are output 2t + 1 of splitmix64 seeded with the row's key: its upper half chooses, its
lower half says what becomes of a chosen id, and the upper half of output 2t + 2 is the random id. Whole words have the
choice of their first position.

A block may hold rows of several rules. Each has a number, a call applies the rule of one number, and `copies` tells
which call copies the rows of the others, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row
from dali_pipes.operators._array import is_cupy, require_same_kind
from dali_pipes.operators.permute import splitmix64
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

KEY, LENGTH, RATE, NUMBER, PREFIX = range(5)
"""Columns of `rows`."""
ROW_COLUMNS = 5
SPECIAL, STARTS_WORD = 1, 2
"""Bits of `id_flags`."""

_FEW = 4
_PART = 1 << 16  # positions of the reference that are worked on together, which stay in the cache of the second level


class NoiseRule(NamedTuple):
    """What becomes of the ids that are chosen, of rows with `number`.

    random_below, keep_below: of the 2**32 draws, those below the first give a random id in [0, num_random), those from
                              there to the second keep the id, and others give `mask_id`
    whole_words: choose words, which begin where `id_flags` say so, after special ids, and where a row begins
    own_labels:  the labels are the chosen ids at their own positions; else labels stay
    """

    number: int
    mask_id: int = 0
    random_below: int = 0
    keep_below: int = 0
    num_random: int = 1
    whole_words: bool = False
    own_labels: bool = True


def noised_rows(
    ids: Array,
    rows: Array,
    rule: NoiseRule,
    *,
    out: Array | None,
    labels: Array,
    copies: bool = True,
    label_shift: int = 1,
    id_flags: Array | None = None,
    learn: Array | None = None,
    masked: Array | None = None,
    loss_mask: Array | None = None,
) -> None:
    """Write `out`, `labels`, `masked` and `loss_mask` of R rows of T positions. All arrays are contiguous, of one kind.

    ids: int64 or int32 (R, T), NumPy or CuPy, not changed.
    rows: int64 (R, 5): key (64 bits), tokens in the row (positions after them are never chosen), chance of a choice
        (0 to 2**32), number of the row's rule (-1: none), and length of the prefix whose tokens are not labels.
    out: like `ids`, a separate array: the ids with chosen ids replaced. None: nothing is chosen, only prefixes apply.
    labels: as `ids`, or (R, T, k) without `own_labels`. copies: whether rows of other numbers are written, too: `out`
        with their ids, `masked` with 0; and of rows of any number label j of position t becomes -100 if its token,
        t + label_shift + j, is in the prefix.
    id_flags: uint8 (V,): bits of each id, SPECIAL: it is never chosen, STARTS_WORD: it begins a word. Ids from V on do
        not have any. learn: as `ids`: positions with 0 are never chosen.
    masked: bool or as `ids` (R, T): 1 where an id was chosen.
    loss_mask: the same type: 1 where the label, the first of k, is not -100; written for rows whose labels may change.

    CuPy launches one kernel on the current stream and does not block. NumPy works in parts that stay in the cache.
    """
    on_device = is_cupy("noised_rows", "ids", ids)
    given = {"out": out, "labels": labels, "rows": rows, "id_flags": id_flags, "learn": learn}
    given |= {"masked": masked, "loss_mask": loss_mask}
    arrays = {name: array for name, array in given.items() if array is not None}
    require_same_kind("noised_rows", on_device, **arrays)
    if ids.ndim != 2 or ids.dtype not in (np.int64, np.int32):
        raise TypeError(f"noised_rows: ids are {ids.dtype} with shape {ids.shape}, expected int64 or int32 (R, T)")
    shapes = dict.fromkeys(("out", "learn", "masked", "loss_mask"), ids.shape)
    shapes |= {"rows": (ids.shape[0], ROW_COLUMNS), "labels": (*ids.shape, *labels.shape[2:3])}
    masks = {array.dtype for array in (masked, loss_mask) if array is not None}
    if len(masks) > 1 or not masks <= {ids.dtype, np.dtype(np.bool_)}:
        raise TypeError(
            f"noised_rows: masked and loss_mask are {', '.join(map(str, masks))}, expected bool or {ids.dtype}"
        )
    for name, array in {"ids": ids, **arrays}.items():
        expected = {"rows": np.int64, "id_flags": np.uint8, "masked": array.dtype, "loss_mask": array.dtype}
        if array.dtype != expected.get(name, ids.dtype):
            raise TypeError(f"noised_rows: {name} has dtype {array.dtype}, expected {expected.get(name, ids.dtype)}")
        if array.shape != shapes.get(name, array.shape) or not array.flags.c_contiguous:
            raise ValueError(
                f"noised_rows: {name} has shape {array.shape} and strides {array.strides}, expected a contiguous array "
                f"of shape {shapes.get(name, array.shape)}"
            )
    if rule.own_labels and labels.ndim != 2:
        raise ValueError(f"noised_rows: labels have shape {labels.shape}, expected one label for each position")
    if not ids.shape[0]:
        return
    if on_device:
        _noised_rows_cupy(ids, rows, rule, out, labels, copies, label_shift, id_flags, learn, masked, loss_mask)
        return
    few = [] if id_flags is None or rule.whole_words else _few_special(id_flags)
    if few:  # compared with ids, which takes less time than a look-up of each
        id_flags = None
    size = max(1, _PART // ids.shape[1])
    optional = out, labels, learn, masked, loss_mask
    for first in range(0, ids.shape[0], size):
        part = slice(first, first + size)
        own = [None if array is None else array[part] for array in optional]
        _noised_rows_numpy(ids[part], rows[part], rule, own, copies, label_shift, id_flags, few)


def _noised_rows_numpy(
    ids: NDArray[Any],
    rows: NDArray[np.int64],
    rule: NoiseRule,
    arrays: list[Any],
    copies: bool,
    label_shift: int,
    id_flags: NDArray[np.uint8] | None,
    few: list[int],
) -> None:
    out, labels, learn, masked, loss_mask = arrays
    is_active = rows[:, NUMBER] == rule.number
    changed = is_active & rule.own_labels
    if out is not None:
        written = slice(None) if copies or is_active.all() else is_active.nonzero()[0]
        is_chosen, words = _chosen(ids, rows, rule, is_active, id_flags, few, learn)
        if masked is not None:
            masked[written] = is_chosen[written]
        if is_active.all() and not rule.keep_below:  # faster than places of many chosen ids
            ones = masked if masked is not None and masked.dtype == ids.dtype else is_chosen.view(np.int8)
            where = np.negative(ones, dtype=ids.dtype)  # all bits of the chosen ones
            _select(ids, rule.mask_id, where, out)
            out ^= ids
            if rule.own_labels:
                _select(ids, IGNORE_INDEX, where, labels)
                labels ^= IGNORE_INDEX
        else:
            out[written] = ids[written]
            chosen = is_chosen.reshape(-1).nonzero()[0]
            ids_there = ids.reshape(-1)[chosen]
            out.reshape(-1)[chosen] = _replaced(ids_there, chosen, words, rows, rule)
            if rule.own_labels:
                labels[is_active] = IGNORE_INDEX
                labels.reshape(-1)[chosen] = ids_there
    if copies and rows[:, PREFIX].any():
        ahead = np.arange(ids.shape[1])[:, None] + label_shift + np.arange(labels.shape[2] if labels.ndim == 3 else 1)
        hidden = ahead < rows[:, PREFIX][:, None, None]
        np.copyto(labels, IGNORE_INDEX, where=hidden.reshape(labels.shape))
        changed |= rows[:, PREFIX] > 0
    if loss_mask is not None and changed.any():
        loss_mask[changed] = (labels if labels.ndim == 2 else labels[..., 0])[changed] != IGNORE_INDEX


def _select(ids: NDArray[Any], other: int, where: NDArray[Any], out: NDArray[Any]) -> None:
    """What ids and `other` differ in, in the bits of `where`."""
    np.bitwise_xor(ids, ids.dtype.type(other), out=out)
    out &= where


def _chosen(
    ids: NDArray[Any],
    rows: NDArray[np.int64],
    rule: NoiseRule,
    is_active: NDArray[np.bool_],
    id_flags: NDArray[np.uint8] | None,
    few: list[int],
    learn: NDArray[Any] | None,
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Which ids are chosen, and the draws of all positions, whose lower halves are not used yet."""
    seq_len = ids.shape[1]
    columns = np.arange(seq_len)
    words = splitmix64(rows[:, KEY].view(np.uint64)[:, None], (2 * columns + 1).astype(np.uint64))
    draws = words
    rates = np.where(is_active, rows[:, RATE], 0)
    flags = None if id_flags is None else _flags_of(ids, id_flags)
    if rule.whole_words:
        begins = np.zeros(ids.shape, np.bool_) if flags is None else flags != 0
        if flags is not None:  # the id after a special one begins a word
            begins[:, 1:] |= (flags[:, :-1] & SPECIAL) != 0
        firsts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        draws = np.take_along_axis(draws, firsts, 1)
    # The upper half is below the rate if the word is at most the last one of that half; the shift of 2**32 wraps.
    is_chosen: NDArray[np.bool_] = draws <= ((rates.astype(np.uint64) << np.uint64(32)) - np.uint64(1))[:, None]
    is_chosen[rates == 0] = False
    if (rows[:, LENGTH] < seq_len).any():
        is_chosen &= columns < rows[:, LENGTH][:, None]
    for special in few:
        is_chosen &= ids != special
    if flags is not None:
        is_chosen &= (flags & SPECIAL) == 0
    if learn is not None:
        is_chosen &= learn != 0
    return is_chosen, words


def _replaced(
    ids_there: NDArray[Any],
    chosen: NDArray[np.int64],
    words: NDArray[np.uint64],
    rows: NDArray[np.int64],
    rule: NoiseRule,
) -> NDArray[Any]:
    """What chosen ids become, by their places in all rows as one line."""
    values = np.full(len(chosen), rule.mask_id, ids_there.dtype)
    if rule.keep_below:
        actions = words.reshape(-1)[chosen] & np.uint64(2**32 - 1)
        kept = (actions >= np.uint64(rule.random_below)) & (actions < np.uint64(rule.keep_below))
        values[kept] = ids_there[kept]
        at = (actions < np.uint64(rule.random_below)).nonzero()[0]
        row, column = np.divmod(chosen[at], words.shape[1])
        random = splitmix64(rows[row, KEY].view(np.uint64), (2 * column + 2).astype(np.uint64)) >> np.uint64(32)
        values[at] = ((random * np.uint64(rule.num_random)) >> np.uint64(32)).astype(ids_there.dtype)
    return values


def _few_special(id_flags: NDArray[np.uint8]) -> list[int]:
    """The special ids if they are few; else none of them."""
    whole = len(id_flags) // 8 * 8
    used = id_flags[:whole].view(np.uint64).nonzero()[0]  # eight flags at a time
    if len(used) > _FEW:
        return []
    places = np.append((used[:, None] * 8 + np.arange(8)).reshape(-1), np.arange(whole, len(id_flags)))
    special: list[int] = places[(id_flags[places] & SPECIAL) != 0].tolist()
    return special if len(special) <= _FEW else []


def _flags_of(ids: NDArray[Any], id_flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    flags: NDArray[np.uint8] = id_flags.take(ids, mode="clip")
    outside = ids.view(f"u{ids.itemsize}") >= len(id_flags)  # without its sign, a negative id is a large one
    if outside.any():
        flags[outside] = 0
    return flags


def _noised_rows_cupy(
    ids: cupy.ndarray,
    rows: cupy.ndarray,
    rule: NoiseRule,
    out: cupy.ndarray | None,
    labels: cupy.ndarray,
    copies: bool,
    label_shift: int,
    id_flags: cupy.ndarray | None,
    learn: cupy.ndarray | None,
    masked: cupy.ndarray | None,
    loss_mask: cupy.ndarray | None,
) -> None:
    null = np.uint64(0)
    count, seq_len = ids.shape
    label_count = labels.shape[2] if labels.ndim == 3 else 1
    mask = next((array.dtype for array in (masked, loss_mask) if array is not None), ids.dtype)
    flags = (null, np.int64(0)) if id_flags is None else (id_flags, np.int64(id_flags.size))
    kernel = _kernel.load("noised_rows", _kernel.expression("noised_rows", ids.dtype, mask))
    kernel(
        *_row.launch_shape(count, seq_len),
        (
            *(ids, rows, np.int64(count), np.int64(seq_len), np.int64(rule.number), np.int64(copies)),
            *(np.int64(rule.mask_id), np.uint64(rule.random_below), np.uint64(rule.keep_below)),
            *(np.uint64(rule.num_random), np.int64(rule.whole_words), np.int64(rule.own_labels)),
            *(np.int64(label_shift), np.int64(label_count), *flags),
            *(null if array is None else array for array in (learn, out, labels, masked, loss_mask)),
        ),
    )
