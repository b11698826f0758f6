"""Token kernels: arrays in, arrays out. No files, no DALI, no torch.

Each operator is one module with a NumPy twin (the reference, and the CPU path) and a CUDA kernel in the `.cu` file of
the same name; device code that several kernels need is in `.cuh` files. The public function follows its input: NumPy
arrays run the twin, CuPy arrays the kernel, anything else is a TypeError. Arguments of a wrong type are a TypeError, of
a wrong shape or value a ValueError, as in NumPy.
"""

if __name__ != "dali_pipes.operators":
    raise ImportError(f"import this package as dali_pipes.operators, not as {__name__}")

from dali_pipes.operators.permute import permute
from dali_pipes.operators.rows import rows
from dali_pipes.operators.segments import segments
from dali_pipes.operators.shuffled_rows import shuffled_rows

__all__ = ["permute", "rows", "segments", "shuffled_rows"]
