"""Runs the real CUDA sources on the CPU: compiled by g++ behind a shim, reached through a stand-in for CuPy.

The stand-in has only the calls that the launchers in `dali_pipes.operators` make. Its arrays are no NumPy arrays and
cannot be computed with, so a launcher that touched device data on the host would fail here.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel

SHIM = Path(__file__).with_name("cuda_on_cpu.h")
OPERATORS = Path(_kernel.__file__).parent

# -Wconversion: no position is cut to 32 bits unseen; the pragmas are for the compilers of the device.
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wno-unknown-pragmas", "-Werror")
SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
SANITISE_VARIABLE = "DALI_PIPES_SANITISE_KERNELS"  # set in the environment of a test run: builds with SANITISERS

TOKEN_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
)


def rows_dtype_pairs() -> list[tuple[np.dtype[Any], np.dtype[Any]]]:
    """Every pair of token and output dtype that `rows` and `shuffled_rows` take."""
    wide: tuple[np.dtype[Any], ...] = (np.dtype(np.int64), np.dtype(np.int32))
    return [(token, output) for token in TOKEN_DTYPES for output in dict.fromkeys((*wide, token))]


def segments_dtypes() -> list[tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]]:
    """Token, index and mask dtypes of `segments`: all of each, and for one token dtype every combination of the others.

    All combinations would take twice as long to compile.
    """
    wide, narrow, masks = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.bool_)
    most = [(token, *others) for token in TOKEN_DTYPES for others in ((wide, wide), (narrow, masks))]
    return [*most, (np.dtype(np.uint16), wide, masks), (np.dtype(np.uint16), narrow, narrow)]


def noised_dtypes() -> list[tuple[np.dtype[Any], np.dtype[Any]]]:
    """Index and mask dtypes of `noised_rows`."""
    wide, narrow, masks = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.bool_)
    return [(wide, wide), (wide, masks), (narrow, narrow), (narrow, masks)]


def kernel_names() -> dict[str, list[str]]:
    """Operator -> the C++ name of every kernel that can be asked of its `.cu` file."""
    return {
        "permute": ["permute"],
        "corrupted_spans": [_kernel.expression("corrupted_spans", np.dtype(kind)) for kind in (np.int64, np.int32)],
        "goldfish": [_kernel.expression("goldfish", dtype) for dtype in TOKEN_DTYPES],
        "keyed_draws": ["keyed_draws"],
        "noised_rows": [_kernel.expression("noised_rows", *pair) for pair in noised_dtypes()],
        **{
            name: [_kernel.expression(name, *pair) for pair in rows_dtype_pairs()] for name in ("rows", "shuffled_rows")
        },
        "gather_runs": [_kernel.expression("gather_runs", dtype) for dtype in TOKEN_DTYPES],
        "segments": [*(_kernel.expression("segments", *dtypes) for dtypes in segments_dtypes()), "piece_begins"],
    }


def find_compiler() -> str | None:
    """A C++ compiler for the CPU, or None."""
    return next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)


class DeviceArray:
    """Stands in for `cupy.ndarray`."""

    def __init__(self, host: NDArray[Any]) -> None:
        self._host = host
        self.dtype, self.shape, self.ndim, self.size = host.dtype, host.shape, host.ndim, host.size
        self.strides, self.flags = host.strides, SimpleNamespace(c_contiguous=host.flags.c_contiguous)

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, part: slice) -> DeviceArray:
        return DeviceArray(self._host[part])

    def reshape(self, *shape: int) -> DeviceArray:
        return DeviceArray(self._host.reshape(*shape))

    def copy(self) -> DeviceArray:
        return DeviceArray(self._host.copy())

    def fill(self, value: int) -> None:
        self._host.fill(value)

    def get(self) -> NDArray[Any]:
        """The values on the host; a synchronisation in CuPy, so for tests alone."""
        return self._host.copy()

    @property
    def address(self) -> int:
        return self._host.ctypes.data


class CpuKernel:
    """One kernel of a CPU build, called as CuPy's: `kernel(grid, block, arguments)`."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._launch = getattr(library, f"launch_{index}")
        sizes = (ctypes.c_size_t * 32)()
        count = getattr(library, f"sizes_{index}")(sizes)
        self._parameter_sizes = list(sizes[:count])

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        values = [
            np.uint64(argument.address) if isinstance(argument, DeviceArray) else argument for argument in arguments
        ]
        assert all(
            isinstance(value, np.number) or (isinstance(value, np.ndarray) and value.size == 1) for value in values
        ), "pass scalars of a known width, and structs as arrays of one element: CuPy takes nothing else everywhere"
        assert [value.itemsize for value in values] == self._parameter_sizes, "widths of arguments and parameters"
        assert all(size >= 1 for size in (*grid, *block)), "CUDA refuses an empty grid or block"
        assert np.prod(block) <= 1024, "CUDA refuses more threads in a block"
        assert all(size <= 65535 for size in grid[1:]), "CUDA refuses more blocks along the second and third axis"
        held = [np.array(value) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        axes = [(ctypes.c_uint * 3)(*size, *[1] * (3 - len(size))) for size in (grid, block)]
        self._launch(*axes, pointers)


def build(
    operator: str, source: str, names: Sequence[str], folder: Path, flags: Sequence[str] = ()
) -> Mapping[str, CpuKernel]:
    """Compile a CUDA source for the CPU, with an entry for each kernel name; raises with the compiler's words."""
    compiler = find_compiler()
    assert compiler is not None
    (folder / f"{operator}.cu").write_text(source)
    entries = "\n".join(
        f'extern "C" void launch_{i}(const unsigned* grid, const unsigned* block, void** arguments)\n'
        f"{{ launch(&{name}, grid, block, arguments); }}\n"
        f'extern "C" std::size_t sizes_{i}(std::size_t* sizes) {{ return parameter_sizes(&{name}, sizes); }}'
        for i, name in enumerate(names)
    )
    unit, library = folder / f"{operator}.cpp", folder / f"{operator}.so"
    unit.write_text(f'#include "{SHIM}"\n#include "{operator}.cu"\n{entries}\n')
    command = [compiler, *_kernel.OPTIONS, "-O1", "-fPIC", "-shared", *WARNINGS, *flags, str(unit), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    loaded = ctypes.CDLL(str(library))
    return {name: CpuKernel(loaded, i) for i, name in enumerate(names)}


def stand_in_for_cupy(kernels: Mapping[str, Mapping[str, CpuKernel]]) -> SimpleNamespace:
    """What `import cupy` gives while a test runs the kernels on the CPU. `kernels`: operator -> name -> kernel."""
    operators = {_kernel.source_of(operator): operator for operator in kernels}

    def raw_module(*, code: str, options: tuple[str, ...], name_expressions: list[str]) -> SimpleNamespace:
        assert options == _kernel.OPTIONS
        built = kernels[operators[code]]
        return SimpleNamespace(get_function={name: built[name] for name in name_expressions}.__getitem__)

    def contiguous(array: DeviceArray) -> DeviceArray:
        return DeviceArray(np.ascontiguousarray(array._host))

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        host = np.empty(shape, dtype)
        host.view(np.uint8).fill(0xA5)  # whatever a kernel leaves out shows
        return DeviceArray(host)

    return SimpleNamespace(
        ndarray=DeviceArray,
        RawModule=raw_module,
        ascontiguousarray=contiguous,
        cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=0)),
        empty=empty,
    )
