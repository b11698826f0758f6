"""The CUDA sources, run on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer.

The sanitisers' library has to be in a process before Python allocates, hence processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_on_cpu
import pytest
from profiles import examples

HERE = Path(__file__).parent

RUN_ONE = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
import numpy as np
import cuda_on_cpu
kernel = cuda_on_cpu.build("sample", {source!r}, ["sample"], Path({folder!r}), cuda_on_cpu.SANITISERS)["sample"]
out = cuda_on_cpu.DeviceArray(np.zeros(1000, np.int64))
kernel((1,), (8,), (out, np.int64({count})))
print("finished")
"""


def sanitised(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitisers loaded first."""
    compiler = cuda_on_cpu.find_compiler()
    if compiler is None:
        pytest.skip("no compiler: neither g++ nor clang++ is installed, so the CUDA sources cannot run on the CPU")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [compiler, f"-print-file-name={name}"]
        path = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        if not path.is_absolute():
            pytest.skip(f"no compiler: {compiler} has no {name} for a sanitised build")
        libraries.append(str(path.resolve()))
    environment = os.environ | {
        cuda_on_cpu.SANITISE_VARIABLE: str(examples(10)),
        "LD_PRELOAD": ":".join(libraries),
        # Python's own allocations at exit are no leaks of ours; NumPy's small blocks need no recycling to be watched
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "operator",
    [
        name if name == "keyed_draws" else pytest.param(name, marks=pytest.mark.slow)
        for name in cuda_on_cpu.kernel_names()
    ],
)
def test_kernels_are_clean_on_random_and_edge_inputs(operator: str) -> None:
    # `random` of Hypothesis draws anew in every run; a failure prints its example
    file = str(HERE / f"test_{operator}.py")
    done = sanitised(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda_on_cpu", file])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("source", "count", "words"),
    [
        ("for (long long i = threadIdx.x; i <= count; i += blockDim.x) out[i] = i;", 1000, "heap-buffer-overflow"),
        ("out[0] = 1LL << (count + (long long)threadIdx.x);", 64, "shift exponent"),
        pytest.param("out[0] = count + threadIdx.x;", 2**63 - 1, "signed integer overflow", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_a_kernel_ends_the_process(source: str, count: int, words: str, tmp_path: Path) -> None:
    kernel = f"__global__ void sample(long long* out, long long count)\n{{ {source} }}\n"
    arguments = {"here": str(HERE), "source": kernel, "folder": str(tmp_path), "count": count}
    done = sanitised(["-c", RUN_ONE.format(**arguments)])
    assert done.returncode != 0
    assert words in done.stderr
    assert "finished" not in done.stdout
