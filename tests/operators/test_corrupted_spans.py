"""corrupted_spans: every element, on every backend, against the rule of T5 token by token."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dali_pipes.operators import corrupted_spans
from dali_pipes.operators.corrupted_spans import OUTPUTS, SpanRule


def by_token(
    ids: list[int], learn: list[int], mode: int, parts: list[tuple[int, int]], rule: SpanRule, shift: int
) -> dict[str, list[int]]:
    """Slow and independent: the arrays of a row without padding, from the lengths of its parts and spans."""
    if not parts:
        return {name: [] for name in OUTPUTS}
    inputs, targets, labels, at = [mode] * (mode >= 0), [], [], 0
    for number, (kept, noise) in enumerate(parts):
        sentinel = rule.sentinel + number * rule.step
        inputs += [*ids[at : at + kept], sentinel]
        taken = slice(at + kept, at + kept + noise)
        targets += [sentinel, *ids[taken]]
        labels += [sentinel, *(token if own else -100 for token, own in zip(ids[taken], learn[taken], strict=True))]
        at += kept + noise
    end = [rule.end_id] * (rule.end_id >= 0)
    return {
        "encoder_ids": inputs + end,
        "decoder_input_ids": [rule.start_id, *targets, *end],
        "decoder_labels": labels + end,
        "causal_ids": inputs + targets + end,
        "causal_labels": ([-100] * len(inputs) + labels + end)[shift:],
    }


@st.composite
def rows_of_parts(draw: Any) -> list[list[tuple[int, int]]]:
    part = st.tuples(st.integers(1, 5) | st.integers(1, 40), st.integers(0, 4) | st.integers(0, 40))
    rows: list[list[tuple[int, int]]] = draw(st.lists(st.lists(part, max_size=5), max_size=4))
    times: int = draw(st.integers(1, 3))
    return rows * times


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(rows=rows_of_parts(), data=st.data())
def test_equals_the_rule_by_token(xp: Backend, rows: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    draw = data.draw
    dtype: Any = draw(st.sampled_from([np.int64, np.int32]))
    most = max([1, *map(len, rows)]) + draw(st.integers(0, 2))
    seq_len = max([1, *(sum(map(sum, parts)) for parts in rows)]) + draw(st.integers(0, 3))
    ids = np.arange(len(rows) * seq_len).reshape(len(rows), seq_len).astype(dtype) + 100
    learn = None
    if draw(st.booleans()):
        learn = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, ids.shape).astype(dtype)
    modes = [draw(st.sampled_from([-1, 70])) for _ in rows]
    rule = SpanRule(50, draw(st.sampled_from([-1, 1])), 3, draw(st.sampled_from([-1, 1])), 4)
    shift = draw(st.integers(0, 1))
    table = np.zeros((len(rows), 2 + 2 * most), np.int32)
    for row, parts in enumerate(rows):
        table[row, :2] = len(parts), modes[row]
        for column, lengths in ((2, [kept for kept, _ in parts]), (2 + most, [noise for _, noise in parts])):
            sums = np.cumsum(lengths, dtype=np.int32)
            table[row, column : column + most] = [*sums, *[sums[-1] if len(sums) else 0] * (most - len(sums))]
    all_learn = np.ones_like(ids) if learn is None else learn
    expected = [by_token(*own, rule, shift) for own in zip(ids.tolist(), all_learn.tolist(), modes, rows, strict=True)]
    names = draw(st.lists(st.sampled_from(OUTPUTS), min_size=1, unique=True))
    widths: dict[str, int] = {}
    for group in (OUTPUTS[:1], OUTPUTS[1:3], OUTPUTS[3:]):
        needed = max([1, *(len(row[name]) for row in expected for name in group)])
        width = max(1, needed + draw(st.integers(-2, 2)))  # what does not fit is cut off
        widths |= dict.fromkeys(group, width)
    out = {name: xp.array(np.full((len(rows), widths[name]), 7, dtype)) for name in names}
    on_device = None if learn is None else xp.array(learn)
    with mock.patch.object(sys.modules[corrupted_spans.__module__], "_PART", draw(st.sampled_from([1, 64, 2**18]))):
        corrupted_spans(xp.array(ids), xp.array(table), rule, out, label_shift=shift, learn=on_device)
    for name, array in out.items():
        padding = -100 if name.endswith("labels") else rule.pad_id
        padded = [(row[name] + [padding] * widths[name])[: widths[name]] for row in expected]
        if name == "causal_labels" and shift:  # the target after the last column is not known
            padded = [[*row[:-1], -100] for row in padded]
        assert xp.numpy(array).tolist() == padded, name


def test_the_docstring(xp: Backend) -> None:
    ids, spans = xp.array(np.arange(10, 16)[None]), xp.array(np.array([[2, -1, 2, 4, 1, 2]], np.int32))
    out = {
        name: xp.array(np.zeros((1, width), np.int64)) for name, width in zip(OUTPUTS, (7, 5, 5, 11, 11), strict=True)
    }
    corrupted_spans(ids, spans, SpanRule(99, end_id=1), out)
    text = " ".join(str(corrupted_spans.__globals__["__doc__"]).split())
    found = {name: xp.numpy(array)[0].tolist() for name, array in out.items()}
    for name in OUTPUTS[:4]:
        assert f"{name} {' '.join(map(str, found[name]))}" in text
    assert f"... {' '.join(map(str, found['causal_labels'][5:]))}" in text


def test_wrong_arrays_are_refused(xp: Backend) -> None:
    ids, spans, out = np.zeros((2, 3), np.int64), np.zeros((2, 4), np.int32), np.zeros((2, 5), np.int64)

    def call(ids: NDArray[Any] = ids, spans: NDArray[Any] = spans, learn: Any = None, **arrays: NDArray[Any]) -> None:
        of_out = {name: xp.array(array) for name, array in arrays.items()}
        on_device = None if learn is None else xp.array(learn)
        corrupted_spans(xp.array(ids), xp.array(spans), SpanRule(9), of_out, learn=on_device)

    call(encoder_ids=out)
    wrong_types: list[tuple[str, dict[str, Any]]] = [
        ("ids", {"ids": ids.astype(np.uint16)}),
        ("spans", {"spans": spans.astype(np.int64)}),
        ("causal_ids", {"causal_ids": out.astype(np.int32)}),
    ]
    for name, arrays in wrong_types:
        with pytest.raises(TypeError, match=name):
            call(**{"encoder_ids": out, **arrays})
    wrong_shapes: list[tuple[str, dict[str, Any]]] = [
        ("spans", {"spans": np.zeros((2, 5), np.int32)}),
        ("learn", {"learn": out}),
        ("encoder_ids", {"encoder_ids": out[:1]}),
        ("noisy_ids", {"noisy_ids": out}),
        ("decoder_labels", {"decoder_labels": out, "decoder_input_ids": ids}),
    ]
    for name, arrays in wrong_shapes:
        with pytest.raises(ValueError, match=name):
            call(**{"encoder_ids": out, **arrays})
    with pytest.raises(ValueError, match="no array"):
        call()
