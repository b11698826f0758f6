"""segments: rows of packed documents, with positions, masks, and document boundaries, in one pass.

    tokens (N,)   10 11 12 13   20 21   30        three documents, which end at 4, 6 and 7        seq_len T = 5
    row 0: three tokens of the first document, then the second; row 1: the third, then four positions of padding

    row_offsets (R + 1,)   0 2 3     piece_starts (P,)   0 4 6     piece_lengths   3 2 1     piece_ends   4 6 7

    input_ids (R, T)     10 11 12 20 21     labels           11   12   13   21 -100     position_ids   0 1 2 0 1
                         30  0  0  0  0                    -100 -100 -100 -100 -100                    0 0 0 0 0

    segment_ids           1  1  1  2  2     attention_mask    1    1    1    1    1     loss_mask      1 1 1 1 0
                          1  0  0  0  0                       1    0    0    0    0                    0 0 0 0 0

    num_segments   4     cu_seqlens   0 3 5 6 10 10 10 10 10 10 10

The label of 12 is 13, which is in the document but not in the row. Padding is identified by position, not by value, so
`pad_id` may also be the id of a token. The padding of a row counts as one segment.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row
from dali_pipes.operators._array import require_inside, require_same_kind
from dali_pipes.operators._pieces import PieceLayout, PieceTables, Shown
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array


class _Batches(NamedTuple):
    """`rows`: per batch, 1 or more. `axis`: the shape of the batch axis in `cu_seqlens`, () for a single batch."""

    rows: int
    axis: tuple[int, ...]

    @classmethod
    def of(cls, num_rows: int, batch_rows: int | None) -> Self:
        if batch_rows is None:
            return cls(max(num_rows, 1), ())
        batch_rows = operator.index(batch_rows)
        require_inside("segments", 1, 63, batch_rows=batch_rows)
        return cls(batch_rows, (-(-num_rows // batch_rows),))


class _Dtypes(NamedTuple):
    """Of outputs with a value for each position."""

    indices: np.dtype[Any]
    masks: np.dtype[Any]


class LabelRule(NamedTuple):
    """`cross`: labels may come from the next pieces of the row. `learn`: 0 for tokens that are not labels; or None."""

    num_labels: int
    cross: bool
    learn: Any


def segments(
    tokens: Array,
    row_offsets: Array,
    piece_starts: Array,
    piece_lengths: Array,
    piece_ends: Array,
    seq_len: int,
    *,
    outputs: Collection[str],
    pad_id: int = 0,
    mtp: int = 0,
    mask_boundaries: bool = True,
    loss_mask: Array | None = None,
    batch_rows: int | None = None,
    cu_capacity: int | None = None,
    out: Mapping[str, Array] | None = None,
    index_dtype: npt.DTypeLike = np.int64,
    mask_dtype: npt.DTypeLike | None = None,
    vocab_size: int | None = None,
    bad: Array | None = None,
    work: Array | None = None,
) -> dict[str, Array]:
    """The requested `outputs`, by name, for R rows of T = `seq_len` positions.

    tokens: (N,), any integer dtype, contiguous, NumPy or CuPy; all other arrays are of the same kind.
    row_offsets: int64 (R + 1,). Row r consists of the pieces row_offsets[r] : row_offsets[r + 1], one after another
        from position 0; the rest of the row is padding.
    piece_starts, piece_lengths: int64 (P,). Piece p is tokens[start : start + length], length >= 1.
    piece_ends: int64 (P,), start + length or more: the end of the tokens that may be labels of the piece, which is the
        end of its document or of the part of it that was read.
    mtp: 0 for one label per position, the next token; k for k labels, where label j is the token j + 1 ahead.
    mask_boundaries: whether labels stop at the end of a piece's document. If False, labels are the tokens ahead in the
        row, in any piece, and after the row's last token those up to the end of its last piece.
    loss_mask: uint8 (N,), contiguous: a token with a 0 is not a label.
    batch_rows: B, for a block of K = ceil(R / B) batches, where the last may be shorter: batch k has the rows from
        k * B on. cu_seqlens is then (K, C + 1) and num_segments (K,), counted per batch. By default all rows are one
        batch, without that axis.
    cu_capacity: C, the number of segments per batch that `cu_seqlens` has room for, at least one per row; by default
        B * T, or as in `out`.
    out: contiguous arrays to fill and return, by output, which must not overlap the input. Missing ones are allocated.
    index_dtype: int64 or int32, of all outputs (R, T) but the masks. Values keep their low bits, so ids of 2**31 or
        more do not fit int32; `pad_id` must.
    mask_dtype: of attention_mask and loss_mask: bool, or `index_dtype` as by default.
    bad: as in `rows`, for the tokens in the rows, without padding, and for labels after them, whether `loss_mask` hides
        them or not. Position p is position p % T of row p // T; an id that is only a label counts at the last position
        of its piece.
    work: for CuPy, int64 with at least `work_size` elements: scratch memory for the kernels. By default it is allocated
        for each call.

    Outputs, (R, T) unless stated otherwise, and 0 on padding:
    input_ids: the tokens; `pad_id` on padding.
    labels: (R, T), with `mtp` (R, T, mtp); -100 without a label and on padding.
    position_ids: 0, 1, ... in each piece. segment_ids: number of the piece in its row, from 1. attention_mask: 1.
    loss_mask: 1 where the label, the first of `mtp`, is not -100.
    cu_seqlens: int32 (C + 1,), for all positions of a batch in one line: the start of each segment, then the number of
        positions, B * T, up to the end of the array. The padding of a row is its last segment.
    num_segments: int64 (1,), the number of segments, also if `cu_seqlens` does not have room for them.

    NumPy checks the tables and the capacity. CuPy launches two kernels on the current stream for any number of batches
    and does not block. It checks neither: wrong tables read out of bounds; segments beyond the capacity are left out.
    """
    seq_len, pad_id, mtp = operator.index(seq_len), operator.index(pad_id), operator.index(mtp)
    on_device = _row.require_tokens("segments", tokens, seq_len)
    dtypes = _dtypes(index_dtype, mask_dtype)
    bits = 8 * dtypes.indices.itemsize - 1
    require_inside("segments", -(2**bits), bits, pad_id=pad_id)
    require_inside("segments", 0, 31, mtp=mtp)
    pieces = PieceTables(row_offsets, piece_starts, piece_lengths, piece_ends)
    _require_tables(pieces, on_device)
    if loss_mask is not None:
        _row.require_array("segments", "loss_mask", loss_mask, tokens.shape, np.dtype(np.uint8), on_device)
    limit = _row.id_limit("segments", tokens.dtype, vocab_size, bad, on_device)
    shape = row_offsets.size - 1, seq_len
    batch = _Batches.of(shape[0], batch_rows)
    results = _results(outputs, shape, batch, mtp, cu_capacity, out or {}, dtypes, on_device)
    rule = LabelRule(max(mtp, 1), not mask_boundaries, loss_mask)
    if not shape[0]:
        for name in {"cu_seqlens", "num_segments"} & results.keys():
            results[name].fill(0)
        return results
    if not on_device:
        layout = PieceLayout(_checked(pieces, tokens.size, seq_len), shape)
        fill_segments(tokens, layout, results, rule, pad_id=pad_id, batch_rows=batch.rows)
        if limit is not None and bad is not None:
            num_labels = rule.num_labels if "labels" in results else int("loss_mask" in results)
            _check_ids(tokens, layout, num_labels, rule.cross, limit, bad)
        return results
    needed = work_size(piece_starts.size, shape[0], batch.rows)
    if work is None:
        import cupy

        work = cupy.empty((needed,), np.int64)
    else:
        _row.require_array("segments", "work", work[:needed], (needed,), np.dtype(np.int64), on_device)
    _segments_cupy(tokens, pieces, shape, batch.rows, rule, pad_id, results, dtypes, limit, bad, work)
    return results


def work_size(num_pieces: int, num_rows: int, batch_rows: int | None = None) -> int:
    """Elements of `work` that `segments` needs for these numbers of pieces and rows."""
    batch_rows = max(num_rows, 1) if batch_rows is None else batch_rows
    return max(num_pieces, 1) + -(-num_rows // batch_rows) * _padded_words(batch_rows)


def _padded_words(batch_rows: int) -> int:
    """Eight-byte words that hold one byte per row of a batch."""
    return -(-batch_rows // 8)


def fill_segments(
    tokens: NDArray[Any],
    layout: PieceLayout,
    results: Mapping[str, NDArray[Any]],
    rule: LabelRule,
    *,
    pad_id: int,
    batch_rows: int,
) -> None:
    """What `segments` does with NumPy arrays, without its checks but that of the capacity of `cu_seqlens`.

    layout: of the pieces in one row or more. results: the arrays to fill, as `segments` makes them.
    """
    flat = {name: array.reshape(-1) for name, array in results.items()}
    if "cu_seqlens" in flat:
        layout.fill_bounds(results["cu_seqlens"].reshape(-1, results["cu_seqlens"].shape[-1]), batch_rows)
    if "num_segments" in flat:
        flat["num_segments"][:] = layout.segment_counts(batch_rows)
    if "segment_ids" in flat:
        layout.number_pieces(flat["segment_ids"])
        layout.pad(flat["segment_ids"], 0)
    if "position_ids" in flat:
        layout.count_positions(flat["position_ids"])
        layout.pad(flat["position_ids"], 0)
    if "attention_mask" in flat:
        flat["attention_mask"].fill(1)
        layout.pad(flat["attention_mask"], 0)
    if not {"input_ids", "labels", "loss_mask"} & flat.keys():
        return
    shown = Shown(tokens, layout)
    if "input_ids" in flat:
        shown.copy(flat["input_ids"])
        layout.pad(flat["input_ids"], pad_id)
    if "labels" in flat or "loss_mask" in flat:
        _fill_labels(shown, layout, rule, tokens.dtype, flat.get("labels"), flat.get("loss_mask"))


def _check_ids(
    tokens: NDArray[Any], layout: PieceLayout, num_labels: int, cross: bool, limit: int, bad: NDArray[np.int64]
) -> None:
    """Count the ids outside [0, limit) in the rows, and among their labels, `num_labels` for each position."""
    if num_labels:
        positions, behind = layout.labels_behind(num_labels, cross)
        _count_outside(tokens[behind].astype(np.int64), positions, limit, bad)
    ids = np.empty(layout.size, np.int64)
    Shown(tokens, layout).copy(ids)
    layout.pad(ids, 0)
    _count_outside(ids, None, limit, bad)


def _count_outside(
    ids: NDArray[np.int64], positions: NDArray[np.int64] | None, limit: int, bad: NDArray[np.int64]
) -> None:
    """Count the ids outside [0, limit), which are at rising `positions`, or at all positions if None."""
    outside = ids.view(np.uint64) >= np.uint64(limit)  # as an unsigned number a negative id is huge
    if outside.any():
        first = int(outside.argmax())
        bad[0] += np.count_nonzero(outside)
        bad[1] = min(int(bad[1]), first if positions is None else int(positions[first]))


def _fill_labels(
    shown: Shown,
    layout: PieceLayout,
    rule: LabelRule,
    token_dtype: np.dtype[Any],
    flat_labels: NDArray[Any] | None,
    loss_mask: NDArray[Any] | None,
) -> None:
    next_tokens = layout.ends_of_pieces(1, rule.cross)
    shown_learn, learned = None, None
    if rule.learn is not None:
        shown_learn, learned = Shown(rule.learn, layout), np.empty(layout.size, np.uint8)
    if flat_labels is not None:
        labels = flat_labels.reshape(layout.size, rule.num_labels)
        for step, label in enumerate(labels.T, 1):
            ends = next_tokens if step == 1 else layout.ends_of_pieces(step, rule.cross)
            shown.look_ahead(step, ends, IGNORE_INDEX, label)
            if shown_learn is not None and learned is not None:
                shown_learn.look_ahead(step, ends, 0, learned)
                np.copyto(label, IGNORE_INDEX, where=learned == 0)
            layout.pad(label, IGNORE_INDEX)
    if loss_mask is None:
        return
    if shown_learn is not None and learned is not None:
        shown_learn.look_ahead(1, next_tokens, 0, learned)
        loss_mask[...] = learned != 0
    else:
        loss_mask.fill(1)
        loss_mask[next_tokens.ignored] = 0
    if not np.can_cast(token_dtype, np.uint32):  # a token may be -100 itself: only its own dtype tells
        next_token = np.empty(layout.size, token_dtype)
        shown.look_ahead(1, next_tokens, 0, next_token)
        loss_mask[next_token == np.int64(IGNORE_INDEX).astype(token_dtype)] = 0
    layout.pad(loss_mask, 0)


def _segments_cupy(
    tokens: cupy.ndarray,
    pieces: PieceTables,
    shape: tuple[int, int],
    batch_rows: int,
    rule: LabelRule,
    pad_id: int,
    results: dict[str, cupy.ndarray],
    dtypes: _Dtypes,
    limit: int | None,
    bad: cupy.ndarray | None,
    work: cupy.ndarray,
) -> None:
    import cupy

    count, seq_len = shape
    null = np.uint64(0)
    offsets, starts, lengths, ends = (cupy.ascontiguousarray(table) for table in pieces)
    # Written by the first kernel for the second: where each piece begins in its row, and whether a row has padding, in
    # whole words per batch.
    begins, padded = work, work[max(lengths.size, 1) :]
    words = _padded_words(batch_rows)
    cu_seqlens = results.get("cu_seqlens", null)
    room = np.int64(0 if cu_seqlens is null else cu_seqlens.shape[-1] - 1)
    sizes = np.int64(count), np.int64(seq_len), np.int64(batch_rows), np.int64(words)
    launch_shape = _row.launch_shape(count, seq_len)
    kernel = _kernel.load("segments", "piece_begins")
    kernel(*launch_shape, (offsets, lengths, *sizes, begins, padded, cu_seqlens, room))
    learn = null if rule.learn is None else rule.learn
    labels = np.int64(rule.num_labels), np.int64(rule.cross)
    wanted = [results.get(name, null) for name in _ROW_OUTPUTS]
    bounds = cu_seqlens, room, results.get("num_segments", null)
    check = (null, null) if limit is None else (np.uint64(limit), bad)
    tables = offsets, starts, lengths, ends, begins, padded
    kernel = _kernel.load("segments", _kernel.expression("segments", tokens.dtype, *dtypes))
    kernel(*launch_shape, (tokens, learn, *sizes, *tables, np.int64(pad_id), *labels, *wanted, *bounds, *check))


# In the order of the kernel's parameters.
_ROW_OUTPUTS = ("input_ids", "labels", "position_ids", "segment_ids", "attention_mask", "loss_mask")
_MASKS = ("attention_mask", "loss_mask")
OUTPUTS = (*_ROW_OUTPUTS, "cu_seqlens", "num_segments")
"""Valid names in `outputs`."""


def _dtypes(index_dtype: npt.DTypeLike, mask_dtype: npt.DTypeLike | None) -> _Dtypes:
    index = np.dtype(index_dtype)
    if index not in (np.int64, np.int32):
        raise TypeError(f"segments: index_dtype is {index}, expected int64 or int32")
    mask = index if mask_dtype is None else np.dtype(mask_dtype)
    if mask not in (index, np.bool_):
        raise TypeError(f"segments: mask_dtype is {mask}, expected bool or {index}, the index_dtype")
    return _Dtypes(index, mask)


def _results(
    outputs: Collection[str],
    shape: tuple[int, int],
    batch: _Batches,
    mtp: int,
    cu_capacity: int | None,
    out: Mapping[str, Array],
    dtypes: _Dtypes,
    on_device: bool,
) -> dict[str, Any]:
    """The arrays to fill, by output: those of `out` after a check, or new ones."""
    unknown = {*outputs, *out}.difference(OUTPUTS)
    if unknown:
        raise ValueError(f"segments: unknown output {min(unknown)!r}, expected some of {', '.join(OUTPUTS)}")
    if on_device:
        import cupy as module
    else:
        module = np
    results = {}
    for name in dict.fromkeys(outputs):
        wanted: tuple[int, ...] = shape
        dtype = dtypes.masks if name in _MASKS else dtypes.indices
        if name == "labels" and mtp:
            wanted = *shape, mtp
        elif name == "num_segments":
            wanted, dtype = batch.axis or (1,), np.dtype(np.int64)
        elif name == "cu_seqlens":
            places = batch.rows if batch.axis else shape[0], shape[1]
            wanted = *batch.axis, _capacity(places, cu_capacity, out.get(name)) + 1
            dtype = np.dtype(np.int32)
        if name in out:
            _row.require_array("segments", f"out[{name!r}]", out[name], wanted, dtype, on_device)
        results[name] = out[name] if name in out else module.empty(wanted, dtype)
    return results


def _capacity(shape: tuple[int, int], cu_capacity: int | None, array: Array | None) -> int:
    count, size = shape[0], shape[0] * shape[1]
    if size >= 2**31:
        raise ValueError(
            f"segments: a batch has {size:,} positions, expected fewer than 2**31, because cu_seqlens is int32"
        )
    capacity = (
        operator.index(cu_capacity) if cu_capacity is not None else size if array is None else array.shape[-1] - 1
    )
    if capacity < count:
        raise ValueError(
            f"segments: cu_seqlens has room for {capacity:,} segments, expected at least one per row, {count:,}"
        )
    return capacity


def _require_tables(pieces: PieceTables, on_device: bool) -> None:
    names = "row_offsets", "piece_starts", "piece_lengths", "piece_ends"
    require_same_kind("segments", on_device, **dict(zip(names, pieces, strict=True)))
    for name, table in zip(names, pieces, strict=True):
        if table.dtype != np.int64:
            raise TypeError(f"segments: {name} have dtype {table.dtype}, expected int64")
        if table.ndim != 1 or table.size == (0 if table is pieces.row_offsets else -1):
            raise ValueError(f"segments: {name} have shape {table.shape}, expected one axis with R + 1 or P elements")
    if not pieces.starts.size == pieces.lengths.size == pieces.ends.size:
        sizes = f"{pieces.starts.size}, {pieces.lengths.size} and {pieces.ends.size}"
        raise ValueError(
            f"segments: piece_starts, piece_lengths, and piece_ends have {sizes} elements, expected equal sizes"
        )


def _checked(pieces: PieceTables, num_tokens: int, seq_len: int) -> PieceTables:
    """The pieces in the rows, numbered from the first of them. Raises ValueError for pieces that cannot be read."""
    offsets, num_pieces = pieces.row_offsets, pieces.starts.size
    if offsets[0] < 0 or offsets[-1] > num_pieces or np.count_nonzero(offsets[1:] < offsets[:-1]):
        raise ValueError(
            f"segments: row_offsets must not decrease and must be inside [0, {num_pieces}], the number of pieces"
        )
    first = int(offsets[0])
    starts, lengths, ends = (table[first : int(offsets[-1])] for table in pieces[1:])
    # In this order, no difference of values that pass the earlier tests overflows 64 bits.
    wrong = (starts < 0) | (lengths < 1) | (lengths > seq_len) | (ends > num_tokens) | (ends < starts)
    wrong |= ends - starts < lengths
    if np.count_nonzero(wrong):
        at = int(wrong.argmax())
        raise ValueError(
            f"segments: piece {first + at:,} starts at token {starts[at]:,}, has {lengths[at]:,}, and its labels end "
            f"at {ends[at]:,}; expected 1 to {seq_len:,} tokens inside the {num_tokens:,} tokens, and an end after them"
        )
    return PieceTables(offsets - first, starts, lengths, ends)
