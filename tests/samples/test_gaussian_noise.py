"""keyed_noise: equal to an oracle in plain integers, normal, and independent between samples and streams."""

import math
from typing import Any

import numpy as np
import pytest
from graphs import numbers_of, run

from dali_pipes.errors import GraphError
from dali_pipes.samples.gaussian_noise import keyed_noise
from dali_pipes.samples.graph import SampleGraph

pytest.importorskip("nvidia.dali")

WORD = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def splitmix64(seed: int, number: int) -> int:
    state = (seed + number * STEP) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def entry(numbers: list[float], stream: int, place: int) -> float:
    bits = [int(np.float32(number).view(np.uint32)) for number in numbers]
    key = sum(splitmix64(value << 32, draw + 1) for draw, value in enumerate(bits)) & WORD
    word = splitmix64(splitmix64(key, stream + 1), place + 1)
    upper, lower = word >> 32, word & (2**32 - 1)
    return math.sqrt(-2 * math.log((upper + 0.5) / 2**32)) * math.cos(2 * math.pi * lower / 2**32)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4, 2)])
@pytest.mark.parametrize("stream", [0, 5])
def test_noise_equals_the_oracle(shape: tuple[int, ...], stream: int) -> None:
    numbers = numbers_of([3, 0, 8], 3)
    found = run(lambda nodes, u: keyed_noise(u, shape, stream=stream), [0, 0, 0], numbers).numpy()
    assert found.shape == (3, *shape)
    assert found.dtype == np.float32
    expected = [[entry(own, stream, place) for place in range(math.prod(shape))] for own in numbers.tolist()]
    np.testing.assert_allclose(found.reshape(3, -1), expected, rtol=1e-5, atol=2e-6)


def test_noise_is_normal_and_independent() -> None:
    """Fixed draws; the bounds are five standard deviations of truly normal ones."""
    samples, shape = 16, (32, 64, 3)
    count = math.prod(shape)

    def graph(nodes: Any, u: Any) -> Any:
        return [keyed_noise(u, shape), keyed_noise(u, shape, stream=1)]

    first, second = run(graph, [0] * samples, numbers_of(range(samples), 2))
    noise = np.concatenate([first.numpy().reshape(samples, count), second.numpy().reshape(samples, count)]).astype(
        float
    )
    total = noise.size
    assert abs(noise.mean()) < 5 / np.sqrt(total)
    assert abs((noise**2).mean() - 1) < 5 * np.sqrt(2 / total)
    assert abs((noise**3).mean()) < 5 * np.sqrt(15 / total)
    assert abs((noise**4).mean() - 3) < 5 * np.sqrt(96 / total)
    assert np.abs(noise.mean(1)).max() < 5 / np.sqrt(count)
    between = noise @ noise.T / count - np.eye(2 * samples)
    np.fill_diagonal(between, 0)
    assert np.abs(between).max() < 5 / np.sqrt(count)
    for distance in (1, 3, 64 * 3):
        assert abs((noise[:, distance:] * noise[:, :-distance]).mean()) < 5 / np.sqrt(total)
    ordered = np.sort(noise.ravel())
    normal = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in ordered[::97]])
    assert np.abs(normal - np.arange(total)[::97] / total).max() < 2.3 / np.sqrt(total)  # Kolmogorov: 5e-5


def test_noise_follows_every_number_of_a_sample() -> None:
    numbers = np.tile(numbers_of([0], 4), (6, 1))
    for draw in range(4):
        numbers[draw + 1, draw] = 0.25
    found = run(lambda nodes, u: keyed_noise(u, (8,)), [0] * 6, numbers).numpy()
    assert np.array_equal(found[0], found[5])
    assert len(np.unique(found, axis=0)) == 5


@pytest.mark.parametrize("num_threads", [1, 4])
def test_noise_depends_on_neither_batch_nor_threads(num_threads: int) -> None:
    whole = run(lambda nodes, u: keyed_noise(u, (5, 500)), [0] * 7)
    graph = SampleGraph(
        lambda nodes, u: keyed_noise(u, (5, 500)), num_draws=12, device_id=None, num_threads=num_threads
    )
    for rows in ([6, 2, 3], [5], [0, 1, 4, 5]):
        graph.submit([0] * len(rows), numbers_of(rows))
        assert np.array_equal(graph.result(), whole[rows])
    graph.close()


@pytest.mark.parametrize(
    ("num_draws", "shape", "stream", "words"),
    [
        (1, (2,), 0, "num_draws.*1"),
        (2, (0,), 0, r"\(0,\)"),
        (2, (2**16, 2**16), 0, r"65536.*2,147,483,647"),
        (2, (2,), -1, "stream -1"),
    ],
)
def test_what_is_refused(num_draws: int, shape: tuple[int, ...], stream: int, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        run(lambda nodes, u: keyed_noise(u, shape, stream=stream), [0], numbers_of([0], num_draws))
    assert not isinstance(raised.value, GraphError)
