"""keyed_draws: every element, on every backend, against Python integers."""

from __future__ import annotations

import numpy as np
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from objective_oracle import WORD, splitmix64

from dali_pipes.operators import keyed_draws


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    seq_len=st.integers(1, 300),
    stream=st.integers(0, 2**32 - 1),
    is_column=st.booleans(),
)
def test_draws_equal_those_of_python(xp: Backend, keys: list[int], seq_len: int, stream: int, is_column: bool) -> None:
    table = np.array([[key, 7] for key in keys], np.int64).reshape(-1, 2)
    column = xp.array(table)[:, 0] if is_column else xp.array(table[:, 0].copy())
    draws = keyed_draws(column, seq_len, stream)
    seeds = [splitmix64(key % WORD, 2**63 + stream) for key in keys]
    expected = [[splitmix64(seed, t + 1) >> 32 for t in range(seq_len)] for seed in seeds]
    assert draws.dtype == np.uint32
    assert xp.numpy(draws).reshape(len(keys), seq_len).tolist() == expected


def test_draws_in_the_docstring(xp: Backend) -> None:
    draws = xp.numpy(keyed_draws(xp.array(np.array([7, 8])), 3))
    for row in draws.tolist():
        assert " ".join(f"{draw:10}" for draw in row).strip() in str(keyed_draws.__globals__["__doc__"])
