"""gather_runs: every place of the buffer, on every backend and dtype, against a loop."""

from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from profiles import examples

from dali_pipes.operators import gather_runs

settings_with_backend = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


def moved(
    xp: Backend, tokens: NDArray[Any], runs: list[tuple[int, int, int]], size: int, learn: NDArray[np.uint8] | None
) -> tuple[list[int], list[int]]:
    """Tokens and mask in a buffer of 7s and 8s."""
    out, out_mask = xp.array(np.full(size, 7, tokens.dtype)), xp.array(np.full(size, 8, np.uint8))
    starts, lengths, targets = [
        xp.array(np.array(column, np.int64)) for column in np.array(runs, np.int64).reshape(-1, 3).T
    ]
    masks: dict[str, Any] = {} if learn is None else {"loss_mask": xp.array(learn), "out_mask": out_mask}
    longest = max([1, *(length for _, length, _ in runs)])
    gather_runs(xp.array(tokens), starts, lengths, targets, out, longest=longest, **masks)
    return xp.numpy(out).tolist(), xp.numpy(out_mask).tolist()


def test_the_example(xp: Backend) -> None:
    tokens, runs = np.arange(10, 18, dtype=np.uint16), [(-3, 1, 0), (4, 3, 1), (-4, 1, 4), (0, 2, 6)]
    learn = np.array([1, 0, 1, 1, 0, 1, 0, 1], np.uint8)
    assert moved(xp, tokens, runs, 9, learn) == ([2, 14, 15, 16, 3, 7, 10, 11, 7], [1, 0, 1, 0, 1, 8, 1, 0, 8])
    assert moved(xp, tokens, runs, 9, None)[0] == [2, 14, 15, 16, 3, 7, 10, 11, 7]


@settings_with_backend
@given(data=st.data())
def test_it_equals_a_loop(xp: Backend, data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(cuda_on_cpu.TOKEN_DTYPES))
    limits = np.iinfo(dtype)
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    tokens = generator.integers(limits.min, limits.max, draw(st.integers(1, 400)), dtype, endpoint=True)
    learn = generator.integers(0, 2, len(tokens), np.uint8)
    expected, mask, runs = list[int](), list[int](), list[tuple[int, int, int]]()
    for _ in range(draw(st.integers(0, 12))):
        gap = draw(st.integers(0, 3))
        expected, mask = expected + [7] * gap, mask + [8] * gap
        if draw(st.booleans()):
            token = draw(st.integers(0, min(int(limits.max), 2**40)))
            runs.append((-1 - token, 1, len(expected)))
            expected, mask = [*expected, token], [*mask, 1]
        else:
            start = draw(st.integers(0, len(tokens) - 1))
            length = draw(st.integers(1, len(tokens) - start))
            runs.append((start, length, len(expected)))
            expected, mask = (
                expected + tokens[start : start + length].tolist(),
                mask + learn[start : start + length].tolist(),
            )
    expected, mask = [*expected, 7], [*mask, 8]
    assert moved(xp, tokens, runs, len(expected), learn) == (expected, mask)


@pytest.mark.parametrize("run", [(-2, 2, 0), (7, 2, 0), (0, 9, 0), (0, 1, 9), (0, 2, 8), (0, 0, 0), (0, 1, -1)])
def test_runs_outside_are_refused(run: tuple[int, int, int]) -> None:
    starts, lengths, targets = (np.array([number]) for number in run)
    with pytest.raises(ValueError, match="run 0"):
        gather_runs(np.arange(8, dtype=np.uint16), starts, lengths, targets, np.zeros(9, np.uint16), longest=8)


def test_wrong_arrays_are_refused(xp: Backend) -> None:
    one = xp.array(np.zeros(1, np.int64))
    tokens, out = xp.array(np.zeros(4, np.uint16)), xp.array(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"out .*int32.*uint16"):
        gather_runs(tokens, one, one, one, out, longest=1)
    with pytest.raises(ValueError, match="lengths"):
        gather_runs(tokens, one, xp.array(np.zeros(2, np.int64)), one, tokens, longest=1)
