"""`xp`: the same test on every backend: NumPy, the CUDA sources run on the CPU, and CuPy where a GPU is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import backends
import cuda_on_cpu
import pytest
from hypothesis import settings

from dali_pipes.operators import _kernel

if cuda_on_cpu.SANITISE_VARIABLE in os.environ:  # several times as slow, and drawn anew in every run
    settings.register_profile(
        "sanitised", settings.default, max_examples=int(os.environ[cuda_on_cpu.SANITISE_VARIABLE])
    )
    settings.load_profile("sanitised")


class Built(Mapping[str, Mapping[str, cuda_on_cpu.CpuKernel]]):
    """The kernels of each operator, made when they are first asked for."""

    def __init__(self, how: Mapping[str, Callable[[], Mapping[str, cuda_on_cpu.CpuKernel]]]) -> None:
        self._how, self._made = how, dict[str, Mapping[str, cuda_on_cpu.CpuKernel]]()

    def __getitem__(self, operator: str) -> Mapping[str, cuda_on_cpu.CpuKernel]:
        if operator not in self._made:
            self._made[operator] = self._how[operator]()
        return self._made[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self._how)

    def __len__(self) -> int:
        return len(self._how)


@pytest.fixture(scope="session")
def cpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, cuda_on_cpu.CpuKernel]]:
    """Every kernel of every `.cu` file, compiled for the CPU once a session, when the first test needs it."""
    if cuda_on_cpu.find_compiler() is None:
        pytest.skip("no compiler: neither g++ nor clang++ is installed, so the CUDA sources cannot run on the CPU")
    flags = cuda_on_cpu.SANITISERS if cuda_on_cpu.SANITISE_VARIABLE in os.environ else ()

    def build(operator: str, names: list[str]) -> Mapping[str, cuda_on_cpu.CpuKernel]:
        folder = tmp_path_factory.mktemp(operator)
        return cuda_on_cpu.build(operator, _kernel.source_of(operator), names, folder, flags)

    return Built({operator: partial(build, operator, names) for operator, names in cuda_on_cpu.kernel_names().items()})


@pytest.fixture(params=["numpy", "cuda_on_cpu", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    """One backend after another."""
    if request.param == "numpy":
        yield backends.NUMPY
    elif request.param == "cuda_on_cpu":
        with backends.cuda_sources_on_cpu(request.getfixturevalue("cpu_kernels")) as backend:
            yield backend
    else:
        yield backends.cupy_on_a_gpu()
