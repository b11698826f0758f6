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
    parts = _Parts.of(spans)
    of_decoder = out.get("decoder_labels", out.get("decoder_input_ids"))
    if "encoder_ids" in out or of_decoder is not None:
        decoder = 0 if of_decoder is None else of_decoder.shape[1]
        begin = int(parts.inputs.max()) + 1  # after the inputs of any row, and their end
        first = np.full(len(ids), begin)
        line, places = _joined(ids, parts, rule, first, begin + decoder)
        if "encoder_ids" in out:
            if rule.end_id >= 0:
                real = parts.spans.nonzero()[0]
                line[real, parts.inputs[real]] = rule.end_id
            common = min(out["encoder_ids"].shape[1], begin)
            out["encoder_ids"][:, :common] = line[:, :common]
            out["encoder_ids"][:, common:] = rule.pad_id
        if "decoder_labels" in out:
            _labels(line, places, parts, rule, first, learn, begin, out["decoder_labels"])
        if "decoder_input_ids" in out:
            inputs = out["decoder_input_ids"]
            inputs[:, 0] = np.where(parts.spans > 0, rule.start_id, rule.pad_id)
            inputs[:, 1:] = line[:, begin : begin + decoder - 1]
    of_both = out.get("causal_ids", out.get("causal_labels"))
    if of_both is not None:
        width = of_both.shape[1]
        line, places = _joined(ids, parts, rule, parts.inputs, width)
        if "causal_ids" in out:
            out["causal_ids"][:] = line[:, :width]
        if "causal_labels" in out:
            labels = out["causal_labels"]
            labels[:, width - label_shift :] = IGNORE_INDEX
            own = labels[:, : width - label_shift]
            _labels(line, places, parts, rule, parts.inputs, learn, label_shift, own)


class _Parts(NamedTuple):
    """R rows: their table, (R,) or (R, S), and how many inputs and targets they have, without ends."""

    spans: NDArray[np.int64]
    mode: NDArray[np.int64]
    kept: NDArray[np.int64]
    noise: NDArray[np.int64]
    noise_before: NDArray[np.int64]
    is_used: NDArray[np.bool_]
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    most: int

    @classmethod
    def of(cls, spans: NDArray[np.int64]) -> _Parts:
        most = (spans.shape[1] - FIRST_COLUMNS) // 2
        count, mode = spans[:, COUNT], spans[:, MODE]
        kept, noise = spans[:, FIRST_COLUMNS : FIRST_COLUMNS + most], spans[:, FIRST_COLUMNS + most :]
        is_used = np.arange(most) < count[:, None]
        noise_before = np.concatenate((np.zeros((len(spans), 1), np.int64), noise[:, :-1]), 1)
        inputs, targets = (mode >= 0) * (count > 0) + kept[:, -1] + count, noise[:, -1] + count
        return cls(count, mode, kept, noise, noise_before, is_used, inputs, targets, most)


def _joined(
    ids: NDArray[Any],
    parts: _Parts,
    rule: SpanRule,
    first: NDArray[np.int64],
    width: int,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Inputs, and targets from column `first` of each row on, in `width` columns and one more that is not used.

    And the place of each token in these rows as one line.
    """
    rows, seq_len = ids.shape
    numbers, has_mode = np.arange(parts.most), (parts.mode >= 0)[:, None]
    # Tokens of one part or span stay together: they move by the same number of columns.
    lengths, moves = np.empty((2, rows, 2 * parts.most + 1), np.int64)
    for own, sums in ((lengths[:, 0:-1:2], parts.kept), (lengths[:, 1::2], parts.noise)):
        own[:, 0] = sums[:, 0]
        np.subtract(sums[:, 1:], sums[:, :-1], out=own[:, 1:])
    lengths[:, -1] = seq_len - parts.kept[:, -1] - parts.noise[:, -1]
    moves[:, 0:-1:2] = has_mode + numbers - parts.noise_before
    moves[:, 1::2] = first[:, None] + numbers + 1 - parts.kept
    moves[:, -1] = width  # what is after the tokens of the row
    moves += np.arange(rows)[:, None] * (width + 1)
    places = moves.reshape(-1).repeat(lengths.reshape(-1)).reshape(rows, seq_len)
    places += np.arange(seq_len)
    if lengths[:, -1].any() or (first + parts.targets).max() > width:
        np.minimum(places, np.arange(1, rows + 1)[:, None] * (width + 1) - 1, out=places)
    line = np.full((rows, width + 1), rule.pad_id, ids.dtype)
    line.reshape(-1)[places] = ids
    # Sentinels of spans that a row does not have go to the column that is not used.
    unused, begins = np.arange(1, rows + 1)[:, None] * (width + 1) - 1, np.arange(rows)[:, None] * (width + 1)
    for columns in (has_mode + parts.kept + numbers, first[:, None] + parts.noise_before + numbers):
        columns += begins
        np.copyto(columns, unused, where=~parts.is_used | (columns > unused))
        line.reshape(-1)[columns] = rule.sentinel + rule.step * numbers
    real = parts.spans.nonzero()[0]
    with_mode = real[parts.mode[real] >= 0]
    line[with_mode, 0] = parts.mode[with_mode]
    if rule.end_id >= 0:
        line[real, np.minimum(first + parts.targets, width)[real]] = rule.end_id
    return line, places


def _labels(
    line: NDArray[Any],
    places: NDArray[np.int64],
    parts: _Parts,
    rule: SpanRule,
    first: NDArray[np.int64],
    learn: NDArray[Any] | None,
    begin: int,
    out: NDArray[Any],
) -> None:
    """Write what `_joined` returned from column `begin` on as labels: -100 where there is no target that is learned."""
    own = slice(begin, begin + out.shape[1])
    columns = np.arange(own.start, own.stop)
    ends = first + parts.targets + (parts.spans > 0) * (rule.end_id >= 0)
    is_target = (columns >= first[:, None]) & (columns < ends[:, None])
    if learn is not None:
        is_learned = np.ones(line.shape, np.bool_)
        is_learned.reshape(-1)[places] = learn != 0
        is_target &= is_learned[:, own]
    out[:] = IGNORE_INDEX
    np.copyto(out, line[:, own], where=is_target)


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
