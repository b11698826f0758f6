"""corrupted_spans: rows without some spans, and these spans as targets, for T5's and UL2's span corruption.

    ids (R, T)       10 11 12 13 14 15        spans (R, 2 + 2 S)   count  mode  kept   noise
                     --- kept ---                                     2    -1    2 4    1 2
    taken out              12       15

    sentinels 99, 98, ...; end_id 1; start_id 0
    encoder_ids        10 11 99 13 14 98  1         causal_ids     10 11 99 13 14 98 99 12 98 15  1
    decoder_labels     99 12 98 15  1               causal_labels  ...            99 12 98 15  1 -100
    decoder_input_ids   0 99 12 98 15

A row is made of `count` parts that are kept, each followed by a span that is taken out; `kept` and `noise` are the
tokens in the first 1, 2, ... parts and spans. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer", 2019; the rule is the one of `random_spans_noise_mask`, `noise_span_to_unique_sentinel` and
`nonnoise_span_to_unique_sentinel` there. Rows for a decoder alone as in Tay et al., "UL2", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row
from dali_pipes.operators._array import is_cupy, require_same_kind
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

COUNT, MODE = range(2)
"""Columns of `spans` before those of each span."""
FIRST_COLUMNS = 2

OUTPUTS = ("encoder_ids", "decoder_input_ids", "decoder_labels", "causal_ids", "causal_labels")

_INPUT, _TARGET, _TOKEN, _END = 1, 2, 4, 8
_SENTINEL = _INPUT | _TARGET
"""Kinds of columns: bits. The end is one of the inputs of an encoder, and one of the targets."""

_PART = 1 << 15  # positions of the reference that are worked on together, which stay in the cache


class SpanRule(NamedTuple):
    """Ids that are put into rows. The sentinel of span k is `sentinel + k * step`. end_id: -1 for none."""

    sentinel: int
    step: int = -1
    start_id: int = 0
    end_id: int = -1
    pad_id: int = 0


def corrupted_spans(
    ids: Array,
    spans: Array,
    rule: SpanRule,
    out: Mapping[str, Array],
    *,
    label_shift: int = 1,
    learn: Array | None = None,
) -> None:
    """Write arrays of R rows; all are of one kind, contiguous.

    ids: int64 or int32 (R, T), NumPy or CuPy.
    spans: int32 (R, 2 + 2 S): number of spans in the row, up to S (0: a row of padding); the mode token before its
        inputs, or -1; and two times S sums, of which those from the row's last span on are equal: tokens in the first
        parts that are kept, and in the first spans. The last of both add up to the tokens in the row.
    out: as `ids`, of R rows, by name, some of: `encoder_ids` (R, E); `decoder_labels` and `decoder_input_ids` (R, D);
        `causal_ids` and `causal_labels` (R, C). They must be wide enough for each row; what is beyond is cut off.
        `causal_labels` are at the position of the target, or with `label_shift` at the one before.
    learn: as `ids`: tokens with 0 are -100 in labels; None: all are learned. Sentinels and `end_id` always are.

    CuPy launches one kernel on the current stream and does not block. NumPy works in parts that stay in the cache.
    """
    on_device = is_cupy("corrupted_spans", "ids", ids)
    arrays = {"spans": spans, **out} | ({} if learn is None else {"learn": learn})
    require_same_kind("corrupted_spans", on_device, **arrays)
    if ids.ndim != 2 or ids.dtype not in (np.int64, np.int32):
        raise TypeError(f"corrupted_spans: ids are {ids.dtype} with shape {ids.shape}, expected int64 or int32 (R, T)")
    unknown = [name for name in out if name not in OUTPUTS]
    if unknown or not out:
        raise ValueError(f"corrupted_spans: out has {', '.join(unknown) or 'no array'}, expected {', '.join(OUTPUTS)}")
    for name, array in {"ids": ids, **arrays}.items():
        dtype = np.dtype(np.int32) if name == "spans" else ids.dtype
        if array.dtype != dtype:
            raise TypeError(f"corrupted_spans: {name} has dtype {array.dtype}, expected {dtype}")
        rows, *width = array.shape
        of_width = width == [ids.shape[1]] if name in ("ids", "learn") else len(width) == 1 and width[0] > 0
        of_width &= name != "spans" or (width[0] > FIRST_COLUMNS and width[0] % 2 == 0)
        if rows != ids.shape[0] or not of_width or not array.flags.c_contiguous:
            raise ValueError(
                f"corrupted_spans: {name} has shape {array.shape} and strides {array.strides}, expected a contiguous "
                f"array of {ids.shape[0]} rows, for ids of shape {ids.shape}"
            )
    for names in (OUTPUTS[1:3], OUTPUTS[3:]):
        widths = {out[name].shape[1] for name in names if name in out}
        if len(widths) > 1:
            raise ValueError(f"corrupted_spans: {' and '.join(names)} have different widths, {sorted(widths)}")
    if not ids.shape[0]:
        return
    if on_device:
        _corrupted_spans_cupy(ids, spans, rule, out, label_shift, learn)
        return
    size = max(1, _PART // ids.shape[1])
    for first in range(0, ids.shape[0], size):
        part = slice(first, first + size)
        own = {name: array[part] for name, array in out.items()}
        learned = None if learn is None else learn[part]
        _corrupted_spans_numpy(ids[part], spans[part].astype(np.int64), rule, own, label_shift, learned)


def _corrupted_spans_numpy(
    ids: NDArray[Any],
    spans: NDArray[np.int64],
    rule: SpanRule,
    out: Mapping[str, NDArray[Any]],
    label_shift: int,
    learn: NDArray[Any] | None,
) -> None:
    most = (spans.shape[1] - FIRST_COLUMNS) // 2
    count, mode = spans[:, COUNT], spans[:, MODE]
    kept, noise = spans[:, FIRST_COLUMNS : FIRST_COLUMNS + most], spans[:, FIRST_COLUMNS + most :]
    has_mode, has_end = (count > 0) & (mode >= 0), (count > 0) & (rule.end_id >= 0)
    inputs, targets = has_mode + kept[:, -1] + count, noise[:, -1] + count + has_end
    # Columns of one kind are many in a row, and masks copy them several times as fast as places of each id would.
    kinds = _kinds(ids.shape[1], count, kept, noise, has_mode, has_end)
    is_token, is_input, is_target = ((kinds & kind) != 0 for kind in (_TOKEN, _INPUT, _TARGET | _END))
    line = np.empty(kinds.shape, ids.dtype)
    line[:, 0], line[:, -1] = mode, rule.end_id
    # Sentinels that a row does not have are in no mask.
    sentinels = kept + np.arange(most) + 1
    sentinels[:, 1:] += noise[:, :-1]
    np.put_along_axis(line, sentinels, rule.sentinel + rule.step * np.arange(most)[None], 1)
    line[is_token] = ids.reshape(-1)
    of_targets = of_labels = _taken(line, is_target)
    if learn is not None:
        is_learned = np.ones(kinds.shape, np.bool_)
        is_learned[is_token] = learn.reshape(-1) != 0
        of_labels = np.where(is_learned[is_target], of_targets, ids.dtype.type(IGNORE_INDEX))
    first = np.zeros(len(ids), np.int64)
    if "encoder_ids" in out:
        with_end = _taken(line, (kinds & (_INPUT | _END)) != 0)
        _put(out["encoder_ids"], rule.pad_id, (with_end, first, inputs + has_end))
    if "decoder_labels" in out:
        _put(out["decoder_labels"], IGNORE_INDEX, (of_labels, first, targets))
    if "decoder_input_ids" in out:
        out["decoder_input_ids"][:, 0] = np.where(count > 0, rule.start_id, rule.pad_id)
        _put(out["decoder_input_ids"][:, 1:], rule.pad_id, (of_targets, first, targets))
    if "causal_ids" in out:
        _put(out["causal_ids"], rule.pad_id, (_taken(line, is_input), first, inputs), (of_targets, inputs, targets))
    if "causal_labels" in out:
        labels = out["causal_labels"]
        width = labels.shape[1] - label_shift
        labels[:, width:] = IGNORE_INDEX
        _put(labels[:, :width], IGNORE_INDEX, (of_labels, np.maximum(inputs - label_shift, 0), targets))


def _taken(line: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    """`line[mask]`, which takes longer: its branches depend on where runs end."""
    found: NDArray[Any] = line.reshape(-1).take(np.flatnonzero(mask))
    return found


def _kinds(
    seq_len: int,
    count: NDArray[np.int64],
    kept: NDArray[np.int64],
    noise: NDArray[np.int64],
    has_mode: NDArray[np.bool_],
    has_end: NDArray[np.bool_],
) -> NDArray[np.uint8]:
    """What a row has in each of its columns: its mode, parts and spans with a sentinel between them, padding, its end.

    Sentinels that a row does not have keep their columns, of kind 0: rows have as many columns.
    """
    rows, most = kept.shape
    lengths, kinds = np.ones((rows, 3 * most + 3), np.int64), np.empty((rows, 3 * most + 3), np.uint8)
    lengths[:, 1:-2:3], lengths[:, 3:-2:3] = np.diff(kept, prepend=0), np.diff(noise, prepend=0)
    lengths[:, -2] = seq_len - kept[:, -1] - noise[:, -1]
    kinds[:, 0], kinds[:, -2], kinds[:, -1] = has_mode * _INPUT, _TOKEN, has_end * _END
    kinds[:, 1:-2:3], kinds[:, 3:-2:3] = _TOKEN | _INPUT, _TOKEN | _TARGET
    kinds[:, 2:-2:3] = (np.arange(most) < count[:, None]) * np.uint8(_SENTINEL)
    return kinds.reshape(-1).repeat(lengths.reshape(-1)).reshape(rows, seq_len + most + 2)


def _put(out: NDArray[Any], fill: int, *parts: tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]) -> None:
    """Write rows: values of all rows in a line, and of each row the column of its first and how many are its own.

    Parts follow one another. Columns without a value get `fill`, and what is beyond the last column is cut off.
    """
    begins, ends = parts[0][1], parts[-1][1] + parts[-1][2]
    width = max(out.shape[1], int(ends.max()))
    wide = out if width == out.shape[1] else np.empty((len(out), width), out.dtype)
    if all((numbers == numbers[0]).all() for part in parts for numbers in part[1:]):
        for values, firsts, counts in parts:
            wide[:, firsts[0] : firsts[0] + counts[0]] = values.reshape(len(out), counts[0])
        wide[:, : begins[0]] = wide[:, ends[0] :] = fill
    else:
        wide[:] = fill
        columns = np.arange(width)
        for values, firsts, counts in parts:
            wide[(columns >= firsts[:, None]) & (columns < (firsts + counts)[:, None])] = values
    if wide is not out:
        out[:] = wide[:, : out.shape[1]]


def _corrupted_spans_cupy(
    ids: cupy.ndarray,
    spans: cupy.ndarray,
    rule: SpanRule,
    out: Mapping[str, cupy.ndarray],
    label_shift: int,
    learn: cupy.ndarray | None,
) -> None:
    count, seq_len = ids.shape
    widths = {
        names[0]: next((out[name].shape[1] for name in names if name in out), 0)
        for names in (OUTPUTS[:1], OUTPUTS[1:3], OUTPUTS[3:])
    }
    most = (spans.shape[1] - FIRST_COLUMNS) // 2
    _kernel.load("corrupted_spans", _kernel.expression("corrupted_spans", ids.dtype))(
        *_row.launch_shape(count, max(widths.values())),
        (
            *(ids, spans, np.int64(count), np.int64(seq_len), np.int64(most)),
            *(np.int64(value) for value in rule),
            np.int64(label_shift),
            *map(np.int64, widths.values()),
            *(np.uint64(0) if array is None else array for array in (learn, *map(out.get, OUTPUTS))),
        ),
    )
