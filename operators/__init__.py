"""Token kernels: arrays in, arrays out. No files, no DALI, no torch.

Each operator is one module with a NumPy reference, which is also the CPU path, and a CUDA kernel in the `.cu` file of
the same name; device code that several kernels share is in `.cuh` files. The public function follows its input: NumPy
arrays run the reference, CuPy arrays run the kernel, and anything else raises TypeError. As in NumPy, a wrong type
raises TypeError, and a wrong shape or value raises ValueError.
"""

if __name__ != "dali_pipes.operators":
    raise ImportError(f"import this package as dali_pipes.operators, not as {__name__}")

from dali_pipes.operators.corrupted_spans import corrupted_spans
from dali_pipes.operators.gather_runs import gather_runs
from dali_pipes.operators.goldfish import goldfish
from dali_pipes.operators.keyed_draws import keyed_draws
from dali_pipes.operators.noised_rows import noised_rows
from dali_pipes.operators.permute import permute
from dali_pipes.operators.rows import rows
from dali_pipes.operators.segments import segments
from dali_pipes.operators.shuffled_rows import shuffled_rows

__all__ = [
    "corrupted_spans",
    "gather_runs",
    "goldfish",
    "keyed_draws",
    "noised_rows",
    "permute",
    "rows",
    "segments",
    "shuffled_rows",
]
