"""noised_rows: every element, on every backend, against Python integers."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import cuda_on_cpu
import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from objective_oracle import WORD, splitmix64

from dali_pipes.operators import noised_rows
from dali_pipes.operators.noised_rows import SPECIAL, STARTS_WORD, NoiseRule


def by_element(
    ids: list[list[int]],
    rows: list[list[int]],
    rule: NoiseRule,
    labels: list[list[list[int]]],
    flags: list[int],
    learn: list[list[int]],
    shift: int,
    copies: bool,
    out: list[list[int]],
    masked: list[list[int]],
    loss_mask: list[list[int]],
) -> None:
    """Slow and independent: changes the lists."""

    def flag(token: int) -> int:
        return flags[token] if 0 <= token < len(flags) else 0

    for r, (key, length, rate, number, prefix) in enumerate(rows):
        if number != rule.number and not copies:
            continue
        for t, token in enumerate(ids[r]):
            out[r][t], masked[r][t] = token, 0
            if number == rule.number:
                first = t
                while rule.whole_words and first and not flag(ids[r][first]) and not flag(ids[r][first - 1]) & SPECIAL:
                    first -= 1
                chosen = splitmix64(key % WORD, 2 * first + 1) >> 32 < rate
                chosen = chosen and t < length and not flag(token) & SPECIAL and bool(learn[r][t])
                if chosen:
                    action = splitmix64(key % WORD, 2 * t + 1) % 2**32
                    random = (splitmix64(key % WORD, 2 * t + 2) >> 32) * rule.num_random >> 32
                    kept = token if action < rule.keep_below else rule.mask_id
                    out[r][t], masked[r][t] = random if action < rule.random_below else kept, 1
                if rule.own_labels:
                    labels[r][t] = [token if chosen else -100]
            for j in range(len(labels[r][t])):
                if copies and t + shift + j < prefix:
                    labels[r][t][j] = -100
            if (number == rule.number and rule.own_labels) or (copies and prefix > 0):
                loss_mask[r][t] = int(labels[r][t][0] != -100)


def _special(ids: set[int]) -> list[int]:
    return [SPECIAL * (token in ids) for token in range(max(ids, default=0) + 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_equals_the_rule_by_element(xp: Backend, data: st.DataObject) -> None:
    draw = data.draw
    dtype, mask_dtype = draw(st.sampled_from(cuda_on_cpu.noised_dtypes()))
    num_rows, seq_len, vocabulary = (
        draw(st.integers(0, 4)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 6) | st.integers(1, 60)),
    )
    random = np.random.default_rng(draw(st.integers(0, 99)))
    own_labels = draw(st.booleans())
    label_axis = () if own_labels else draw(st.sampled_from([(), (1,), (3,)]))
    ids = random.integers(0, vocabulary, (num_rows, seq_len)).astype(dtype)
    rates = st.sampled_from([0, 1, 2**30, 2**31, 2**32 - 1, 2**32])
    rows = np.array(
        [
            [
                draw(st.integers(-(2**63), 2**63 - 1)),
                draw(st.integers(0, seq_len)),
                draw(rates),
                draw(st.integers(-1, 1)),
                draw(st.integers(0, seq_len)),
            ]
            for _ in range(num_rows)
        ],
        np.int64,
    ).reshape(num_rows, 5)
    random_below = draw(st.sampled_from([0, 2**29, 2**32]))
    rule = NoiseRule(
        draw(st.integers(0, 1)),
        99,
        random_below,
        max(random_below, draw(st.sampled_from([0, 2**30, 2**32]))),
        vocabulary,
        draw(st.booleans()),
        own_labels,
    )
    labels = random.integers(0, 9, (num_rows, seq_len, *label_axis)).astype(dtype)
    flags = draw(
        st.none()
        | st.sets(st.integers(0, 59), max_size=6).map(_special)
        | st.lists(st.sampled_from([0, SPECIAL, STARTS_WORD, SPECIAL | STARTS_WORD]), min_size=1, max_size=60)
    )
    learn = random.integers(0, 2, ids.shape).astype(dtype) if draw(st.booleans()) else None
    shift, copies = draw(st.integers(0, 1)), draw(st.booleans())
    before = np.full(ids.shape, 7, dtype), *(random.integers(0, 2, ids.shape).astype(mask_dtype) for _ in range(2))
    out, masked, loss_mask = (xp.array(array.copy()) for array in before)
    given_labels = xp.array(labels.copy())
    with mock.patch.object(sys.modules[noised_rows.__module__], "_PART", draw(st.sampled_from([1, 64, 2**16]))):
        noised_rows(
            xp.array(ids),
            xp.array(rows),
            rule,
            out=out,
            labels=given_labels,
            copies=copies,
            label_shift=shift,
            id_flags=None if flags is None else xp.array(np.array(flags, np.uint8)),
            learn=None if learn is None else xp.array(learn),
            masked=masked,
            loss_mask=loss_mask,
        )
    expected = [array.astype(np.int64).tolist() for array in before]
    wide_labels = labels.reshape(num_rows, seq_len, -1).tolist() if labels.size else []
    all_learn = np.ones_like(ids) if learn is None else learn
    by_element(
        ids.tolist(), rows.tolist(), rule, wide_labels, flags or [], all_learn.tolist(), shift, copies, *expected
    )
    assert xp.numpy(given_labels).reshape(num_rows, seq_len, -1).tolist() == wide_labels if labels.size else True
    assert [xp.numpy(array).astype(np.int64).tolist() for array in (out, masked, loss_mask)] == expected


def test_only_a_prefix_changes_labels_alone(xp: Backend) -> None:
    ids = np.arange(8).reshape(2, 4)
    labels = xp.array(ids + 1)
    rows = np.array([[0, 4, 0, -1, 3], [0, 4, 0, -1, 0]])
    noised_rows(xp.array(ids), xp.array(rows), NoiseRule(-2), out=None, labels=labels)
    assert xp.numpy(labels).tolist() == [[-100, -100, 3, 4], [5, 6, 7, 8]]


def test_wrong_arrays_are_refused(xp: Backend) -> None:
    ids, rows = np.zeros((2, 3), np.int64), np.zeros((2, 5), np.int64)

    def call(**changed: NDArray[Any]) -> None:
        arrays = {"ids": ids, "rows": rows, "out": ids.copy(), "labels": ids.copy(), **changed}
        on_device = {name: xp.array(array) for name, array in arrays.items()}
        noised_rows(on_device.pop("ids"), on_device.pop("rows"), NoiseRule(0), **on_device)

    call()
    for changed in ({"ids": ids.astype(np.uint16)}, {"out": ids.astype(np.int32)}, {"masked": ids.astype(np.int8)}):
        with pytest.raises(TypeError, match=next(iter(changed))):
            call(**changed)
    for wrong in ({"rows": rows[:, :4].copy()}, {"labels": np.zeros((2, 3, 2), np.int64)}, {"learn": ids[:1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            call(**wrong)
