"""Every `.cu` file compiles for the cards in use, with the compilers that users and developers have. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import cuda_on_cpu
import numpy as np
import pytest

from dali_pipes.operators import _kernel
from dali_pipes.operators.permute import bijection

TARGETS = [("90", 3), *(pytest.param(number, 1, marks=pytest.mark.slow) for number in ("80", "90", "100"))]
"""Architectures, and which instances of a template: every one, or every third."""
OPERATORS = sorted(cuda_on_cpu.kernel_names())


def test_every_source_is_listed() -> None:
    assert sorted(path.stem for path in cuda_on_cpu.OPERATORS.glob("*.cu")) == OPERATORS


def test_sources_need_no_headers() -> None:
    """NVRTC has none of the standard ones unless a CUDA toolkit is installed beside it, and is not handed ours."""
    for operator in OPERATORS:
        assert "#include" not in _kernel.source_of(operator)
    for name, text in {"shuffled_rows": "shuffled_rows(", "permute": "struct Bijection {", "rows": "copy_row("}.items():
        assert text in _kernel.source_of(name)


def compile_with_nvrtc(operator: str, source: str, names: list[str], target: str) -> tuple[bytes, str]:
    """Device code ("sm_90") or PTX ("compute_90"), and the compiler's log; a RuntimeError with it where it fails."""
    pytest.importorskip("cupy", reason="no compiler: CuPy, through which NVRTC is reached, is not installed")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no compiler: NVRTC cannot be loaded: {error}")
    program = nvrtc.createProgram(source, f"{operator}.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (*_kernel.OPTIONS, f"-arch={target}", "--ptxas-options=-v"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        assert all(nvrtc.getLoweredName(program, name) for name in names)
        code = nvrtc.getPTX(program) if target.startswith("compute") else nvrtc.getCUBIN(program)
        return code, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize(("architecture", "every"), TARGETS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_with_nvrtc_and_spills_no_register(operator: str, architecture: str, every: int) -> None:
    of_operator = cuda_on_cpu.kernel_names()[operator]
    names = [name for at, name in enumerate(of_operator) if at % every == 0 or "<" not in name]
    binary, log = compile_with_nvrtc(operator, _kernel.source_of(operator), names, f"sm_{architecture}")
    assert binary.startswith(b"\x7fELF")
    assert "warning" not in log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) == len(names)
    assert set(spills) == {("0", "0")}
    assert set(re.findall(r"(\d+) bytes stack frame", log)) == {"0"}
    print(f"sm_{architecture}: {operator}: {min(registers)} to {max(registers)} registers")
    assert max(registers) <= 64, "more would leave less than half of a multiprocessor's threads"


@pytest.mark.parametrize("operator", ["rows", "shuffled_rows"])
@pytest.mark.parametrize(
    ("token_dtype", "dtype", "store"),
    [
        ("uint16", "int64", r"v2\.[ub]64"),
        ("uint32", "int64", r"v2\.[ub]64"),
        ("uint16", "int32", r"v4\.[ub]32"),
        ("uint16", "uint16", r"v4\.[ub]32"),
        ("uint8", "uint8", r"v4\.[ub]32"),
    ],
)
def test_stores_have_16_bytes_and_loads_bypass_coherence(
    operator: str, token_dtype: str, dtype: str, store: str
) -> None:
    """Read-only loads (`ld.global.nc`) tell that `__restrict__` and const hold for the compiler, too."""
    name = _kernel.expression(operator, np.dtype(token_dtype), np.dtype(dtype))
    code, _ = compile_with_nvrtc(operator, _kernel.source_of(operator), [name], "compute_90")
    instructions = code.decode()
    bits = 8 * np.dtype(token_dtype).itemsize
    assert len(re.findall(rf"st\.global\.{store}\b", instructions)) >= 2
    assert re.search(rf"ld\.global\.nc\.[ub]{bits}\b", instructions)


def test_round_keys_lie_in_constant_memory() -> None:
    """They are read as a parameter, not from a copy of it in local memory."""
    code, _ = compile_with_nvrtc("permute", _kernel.source_of("permute"), ["permute"], "compute_90")
    instructions = code.decode()
    assert ".local" not in instructions
    assert re.search(r"ld\.param\S* .*_param_2\+", instructions)


def test_cupy_takes_a_struct_as_an_array_of_one_element() -> None:
    """By value, as it takes scalars; what it cannot take it refuses with a TypeError before it asks for a GPU."""
    cupy = pytest.importorskip("cupy")
    function, stream = cupy.cuda.function.Function, SimpleNamespace(ptr=0)

    def launch(argument: object) -> None:
        function.__new__(function)((1,), (1,), (argument,), stream=stream)

    if cupy.cuda.is_available():
        pytest.skip("there is a CUDA device: the operators' own tests launch on it")
    with pytest.raises(TypeError, match="ndarrays of size one can be passed by value"):
        launch(np.zeros(2, bijection(5, 1).dtype))
    for argument in (bijection(5, 1), np.int64(0), np.uint64(0)):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            launch(argument)


def test_nvrtc_refuses_a_broken_source() -> None:
    source = _kernel.source_of("permute").replace("blockIdx", "blockIndex", 1)
    with pytest.raises(RuntimeError, match="blockIndex"):
        compile_with_nvrtc("permute", source, ["permute"], "sm_90")


@pytest.mark.slow  # users have NVRTC
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_with_nvcc(operator: str, architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed; NVRTC compiles the same sources")
    names = cuda_on_cpu.kernel_names()[operator]
    table = ", ".join(f"(void*)&{name}" for name in names)
    unit = tmp_path / "unit.cu"
    unit.write_text(f'#include "{cuda_on_cpu.OPERATORS / operator}.cu"\nvoid* kernels[] = {{{table}}};\n')
    options = [*_kernel.OPTIONS, f"-arch=sm_{architecture}", "-Werror=all-warnings", "-cubin"]
    command = [nvcc, *options, "-o", str(tmp_path / "unit.cubin"), str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = {name.partition("<")[0] for name in names}
    mangled = rf"_Z(?:{'|'.join(f'{len(name)}{name}' for name in functions)})[A-Z]\w+".encode()
    assert len(set(re.findall(mangled, (tmp_path / "unit.cubin").read_bytes()))) == len(names)
