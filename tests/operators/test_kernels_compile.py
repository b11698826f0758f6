"""Every `.cu` file compiles for the cards in use, with the compilers that users and developers have. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cuda_on_cpu
import pytest

from dali_pipes.operators import _kernel

ARCHITECTURES = ("80", "90", "100")
OPERATORS = sorted(cuda_on_cpu.kernel_names())


def test_every_source_is_listed() -> None:
    assert sorted(path.stem for path in cuda_on_cpu.OPERATORS.glob("*.cu")) == OPERATORS


def test_sources_need_no_headers() -> None:
    """NVRTC has none of the standard ones unless a CUDA toolkit is installed beside it."""
    for operator in OPERATORS:
        assert "#include" not in _kernel.source_of(operator)


def compile_with_nvrtc(operator: str, source: str, names: list[str], architecture: str) -> tuple[bytes, str]:
    """Device code for one architecture and the compiler's log; a RuntimeError with that log where it fails."""
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
            nvrtc.compileProgram(program, (*_kernel.OPTIONS, f"-arch=sm_{architecture}", "--ptxas-options=-v"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        assert all(nvrtc.getLoweredName(program, name) for name in names)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_with_nvrtc_and_spills_no_register(operator: str, architecture: str) -> None:
    names = cuda_on_cpu.kernel_names()[operator]
    binary, log = compile_with_nvrtc(operator, _kernel.source_of(operator), names, architecture)
    assert binary.startswith(b"\x7fELF")
    assert "warning" not in log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) == len(names)
    assert set(spills) == {("0", "0")}
    assert max(registers) <= 64, "more would leave less than half of a multiprocessor's threads"


def test_nvrtc_refuses_a_broken_source() -> None:
    source = _kernel.source_of("permute").replace("blockIdx", "blockIndex", 1)
    with pytest.raises(RuntimeError, match="blockIndex"):
        compile_with_nvrtc("permute", source, ["permute"], "90")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    mangled = rf"_Z{len(operator)}{operator}[A-Z]\w+".encode()
    assert len(set(re.findall(mangled, (tmp_path / "unit.cubin").read_bytes()))) == len(names)
