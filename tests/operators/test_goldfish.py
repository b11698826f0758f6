"""goldfish: every token, on every backend, against Python integers."""

from __future__ import annotations

from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from objective_oracle import is_dropped

from dali_pipes.operators import goldfish


def run(xp: Backend, tokens: Any, pieces: list[list[int]], h: int, k: int, loss_mask: Any = None) -> list[int]:
    starts, lookback = [piece[0] for piece in pieces], [piece[1:] for piece in pieces]
    out = xp.array(np.full(len(tokens), 7, np.uint8))
    goldfish(
        xp.array(tokens),
        xp.array(np.array(starts, np.int64)),
        xp.array(np.array(lookback, np.int64).reshape(-1, 3)),
        out,
        h=h,
        k=k,
        loss_mask=None if loss_mask is None else xp.array(loss_mask),
    )
    found: list[int] = xp.numpy(out).tolist()
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_equals_the_rule_by_token(xp: Backend, data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(cuda_on_cpu.TOKEN_DTYPES))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    h, k = draw(st.integers(1, 6)), draw(st.integers(2, 5))
    pieces, expected, at = [], {}, 0
    sizes = draw(st.lists(st.tuples(*[st.integers(0, 30)] * 3), max_size=5))
    tokens = random.integers(0, 3, sum(map(sum, sizes)) + 1).astype(dtype)
    loss_mask = random.integers(0, 2, len(tokens)).astype(np.uint8) if draw(st.booleans()) else None
    for before, inside, tail in sizes:
        start = at + before
        pieces.append([start, before, inside, inside + tail])
        for n in range(start, start + inside + tail):
            known = tokens[max(at, n - h) : n].tolist()
            dropped = n < start + inside and len(known) == h and is_dropped(known, k)
            expected[n] = int(not dropped and (loss_mask is None or bool(loss_mask[n])))
        at = start + inside + tail
    found = run(xp, tokens, pieces, h, k, loss_mask)
    assert {n: found[n] for n in expected} == expected


def test_parts_of_the_reference_go_on_where_the_last_ended(xp: Backend) -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 40_000).astype(np.uint16)
    found = run(xp, tokens, [[0, 0, len(tokens), len(tokens)]], 13, 4)
    for n in (0, 12, 13, 14, 16_383, 16_384, 16_390, 32_768, 39_999):
        assert found[n] == int(n < 13 or not is_dropped(tokens[n - 13 : n].tolist(), 4))
    assert abs(found.count(0) / len(tokens) - 1 / 4) < 0.01


def test_copies_lose_the_same_tokens(xp: Backend) -> None:
    text = np.random.default_rng(2).integers(0, 100, 200)
    tokens = np.concatenate((text, np.arange(3), text)).astype(np.int64)
    found = run(xp, tokens, [[0, 0, 200, 200], [203, 0, 200, 200]], 4, 3)
    assert found[:200] == found[203:]
    assert 0 in found[:200]


def test_wrong_arrays_are_refused(xp: Backend) -> None:
    tokens = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="lookback"):
        goldfish(
            xp.array(tokens),
            xp.array(np.zeros(1, np.int64)),
            xp.array(np.zeros((2, 3), np.int64)),
            xp.array(np.zeros(4, np.uint8)),
            h=2,
            k=2,
        )
    with pytest.raises(ValueError, match="h is 0"):
        run(xp, tokens, [[0, 0, 1, 1]], 0, 2)
