"""Where an operator's arrays can live, so that one test runs on all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from numpy.typing import NDArray

from dali_pipes.operators import _kernel


@dataclass(frozen=True)
class Backend:
    """`array` and `numpy` go there and back. `checks_values`: whether the values in arrays are checked."""

    name: str
    array: Callable[[NDArray[Any]], Any]
    numpy: Callable[[Any], NDArray[Any]]
    checks_values: bool

    def bad(self) -> Any:
        """An array for the `bad` of an operator."""
        return self.array(np.array([0, 2**63 - 1]))


NUMPY = Backend("numpy", np.asarray, np.asarray, checks_values=True)


@contextmanager
def cuda_sources_on_cpu(kernels: Mapping[str, Mapping[str, cuda_on_cpu.CpuKernel]]) -> Iterator[Backend]:
    """The public operators, their launchers and the real CUDA sources, with a stand-in where CuPy would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cuda_on_cpu.stand_in_for_cupy(kernels))
        _kernel._load.cache_clear()
        try:
            yield Backend("cuda_on_cpu", cuda_on_cpu.DeviceArray, cuda_on_cpu.DeviceArray.get, checks_values=False)
        finally:
            _kernel._load.cache_clear()


def cupy_on_a_gpu() -> Backend:
    """Skips where there is no CuPy or no GPU."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    return Backend("cupy", cupy.asarray, cupy.asnumpy, checks_values=False)


def outside(values: Sequence[Sequence[int]], vocab_size: int | None) -> list[int]:
    """What `bad` holds after the rows in `values`, all their tokens; slow and independent, over Python integers."""
    flat = [value for row in values for value in row]
    positions = [place for place, value in enumerate(flat) if not 0 <= value < (vocab_size or 2**63)]
    return [len(positions), min(positions, default=2**63 - 1)]
