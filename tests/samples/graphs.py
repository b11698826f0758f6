"""Images and runs of graphs for several tests."""

import functools
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.samples.graph import Graph, SampleGraph
from dali_pipes.samples.keyed_numbers import uniform

NUM_DRAWS = 12


def numbers_of(rows: Iterable[int], num_draws: int = NUM_DRAWS) -> npt.NDArray[np.float32]:
    return uniform(3, 1, np.array(list(rows), np.int64), num_draws)


@functools.cache
def jpeg(number: int, size: tuple[int, int] = (48, 40)) -> bytes:
    """Smooth spots of color, width by height."""
    spots = np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(spots).resize(size, Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def run(graph: Graph, samples: list[Any], numbers: npt.NDArray[np.float32] | None = None, num_threads: int = 1) -> Any:
    """What one batch becomes; without numbers, those of rows 0, 1, ..."""
    numbers = numbers_of(range(len(samples))) if numbers is None else numbers
    one = SampleGraph(graph, num_draws=numbers.shape[1], device_id=None, num_threads=num_threads)
    try:
        one.submit(samples, numbers)
        return one.result()
    finally:
        one.close()
