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

from collections.abc import Mapping, Sequence
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

_PART = 1 << 18  # positions of the reference that are worked on together; smaller parts are limited by their calls


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

    CuPy launches one kernel on the current stream and does not block. NumPy works in parts.
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
    parts = _Parts.of(spans, rule)
    modes = parts.has_mode.nonzero()[0]
    before = -parts.has_mode  # the place of a mode token, before the row's first token
    if "encoder_ids" in out:
        line = out["encoder_ids"]
        _joined(ids, parts, rule, before, [(parts.input_columns, parts.noise_lengths, 1)], parts.inputs, line, None)
        line[modes, 0] = parts.mode[modes]
    of_decoder = out.get("decoder_labels", out.get("decoder_input_ids"))
    if of_decoder is not None:
        line = of_decoder if "decoder_labels" in out else np.empty_like(of_decoder)
        runs = [(parts.target_columns, parts.kept_lengths, 0)]
        learned = _joined(ids, parts, rule, parts.kept_lengths[:, 0] - 1, runs, parts.targets, line, learn)
        if "decoder_input_ids" in out:
            inputs = out["decoder_input_ids"]
            inputs[:, 0] = np.where(parts.spans > 0, rule.start_id, rule.pad_id)
            inputs[:, 1:] = line[:, :-1]
        _fill_after(line, parts.targets + parts.has_end, IGNORE_INDEX)
        if learned is not None:
            np.copyto(line, IGNORE_INDEX, where=~learned)
    of_both = out.get("causal_ids", out.get("causal_labels"))
    if of_both is not None:
        line = of_both if "causal_ids" in out else np.empty_like(of_both)
        # From the last sentinel of the inputs, in the place of the first token taken out, back into the first part.
        steps, last = parts.kept_lengths.copy(), np.maximum(parts.spans - 1, 0)
        steps[:, 0] -= parts.inputs - parts.has_mode - parts.spans + parts.target_columns[parts.rows, last] - last + 1
        runs = [
            (parts.input_columns, parts.noise_lengths, 1),
            (parts.target_columns + parts.inputs[:, None], steps, 0),
        ]
        ends = parts.inputs + parts.targets
        learned = _joined(ids, parts, rule, before, runs, ends, line, learn)
        line[modes, 0] = parts.mode[modes]
        if "causal_labels" in out:
            labels, columns = out["causal_labels"], np.arange(label_shift, line.shape[1])
            is_target = (columns >= parts.inputs[:, None]) & (columns < (ends + parts.has_end)[:, None])
            if learned is not None:
                is_target &= learned[:, label_shift:]
            labels.fill(IGNORE_INDEX)
            np.copyto(labels[:, : len(columns)], line[:, label_shift:], where=is_target)


class _Parts(NamedTuple):
    """R rows: their table, (R,) or (R, S), and how many inputs and targets they have, without ends."""

    rows: NDArray[np.int64]
    spans: NDArray[np.int64]
    mode: NDArray[np.int64]
    has_mode: NDArray[np.int64]
    has_end: NDArray[np.int64]
    used: NDArray[np.bool_] | None
    """Spans that a row has. None: all rows have all."""
    kept_lengths: NDArray[np.int64]
    noise_lengths: NDArray[np.int64]
    input_columns: NDArray[np.int64]
    """Of sentinels, among the inputs; and among the targets."""
    target_columns: NDArray[np.int64]
    sentinels: NDArray[np.int64]
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @classmethod
    def of(cls, spans: NDArray[np.int64], rule: SpanRule) -> _Parts:
        most = (spans.shape[1] - FIRST_COLUMNS) // 2
        rows, numbers, count, mode = np.arange(len(spans)), np.arange(most), spans[:, COUNT], spans[:, MODE]
        kept, noise = spans[:, FIRST_COLUMNS : FIRST_COLUMNS + most], spans[:, FIRST_COLUMNS + most :]
        has_mode = ((mode >= 0) & (count > 0)).astype(np.int64)
        kept_lengths, noise_lengths = _differences(kept), _differences(noise)
        input_columns, target_columns = kept + has_mode[:, None], noise - noise_lengths
        input_columns += numbers
        target_columns += numbers
        return cls(
            rows=rows,
            spans=count,
            mode=mode,
            has_mode=has_mode,
            has_end=((count > 0) & (rule.end_id >= 0)).astype(np.int64),
            used=None if count.min() == most else numbers < count[:, None],
            kept_lengths=kept_lengths,
            noise_lengths=noise_lengths,
            input_columns=input_columns,
            target_columns=target_columns,
            sentinels=np.tile(rule.sentinel + rule.step * numbers, (len(spans), 1)),
            inputs=has_mode + kept[:, -1] + count,
            targets=noise[:, -1] + count,
        )


def _differences(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = sums.copy()
    lengths[:, 1:] -= sums[:, :-1]
    return lengths


def _joined(
    ids: NDArray[Any],
    parts: _Parts,
    rule: SpanRule,
    first: NDArray[np.int64],
    runs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]],
    ends: NDArray[np.int64],
    out: NDArray[Any],
    learn: NDArray[Any] | None,
) -> NDArray[np.bool_] | None:
    """Write lines of tokens and sentinels, the id at their ends, and padding. With `learn`: which of them are learned.

    Tokens of neighboring columns are neighbors, except around sentinels. So sums over steps are their places, and one
    look-up moves all of them.

    first: the place in its row of the first column's token. ends: columns of tokens and sentinels.
    runs:  of some sentinels their columns, steps, and how many columns after them (0 or 1) these steps are
    """
    rows, width = out.shape
    steps, begins, at_sentinels = np.ones(rows * width + 1, np.int64), (parts.rows * width)[:, None], []
    for columns, lengths, after in runs:
        used: Any = ... if parts.used is None else parts.used
        if columns[:, -1].max() >= width:
            used = columns < width if parts.used is None else parts.used & (columns < width)
        at = (columns + begins)[used].reshape(-1)
        steps[after:][at] = lengths[used].reshape(-1)
        at_sentinels.append((at, parts.sentinels[used].reshape(-1)))
    of_rows = steps[:-1].reshape(rows, width)
    of_rows[:, 0] = first + parts.rows * ids.shape[1]  # over the step after the last sentinel of the row before
    places = np.add.accumulate(of_rows, axis=1, out=of_rows)
    ids.reshape(-1).take(places, mode="clip", out=out)
    for at, sentinels in at_sentinels:
        out.reshape(-1)[at] = sentinels
    learned: NDArray[np.bool_] | None = None
    if learn is not None:
        learned = learn.reshape(-1).take(places, mode="clip") != 0
        for at, _ in at_sentinels:
            learned.reshape(-1)[at] = True
    ended = (parts.has_end & (ends < width)).nonzero()[0]
    out[ended, ends[ended]] = rule.end_id
    if learned is not None:
        learned[ended, ends[ended]] = True
    _fill_after(out, ends + parts.has_end, rule.pad_id)
    return learned


def _fill_after(out: NDArray[Any], ends: NDArray[np.int64], value: int) -> None:
    """Rows from their ends on."""
    low = int(ends.min())
    if low < out.shape[1]:
        np.copyto(out[:, low:], value, where=np.arange(low, out.shape[1]) >= ends[:, None])


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
