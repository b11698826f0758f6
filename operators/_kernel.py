"""Loads kernels from the `.cu` files of this folder: source text, compile options, C names of dtypes, and a cache."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

OPTIONS = ("-std=c++17",)

# `long long`, not `long`: it has 64 bits in every compiler that is used (NVRTC, nvcc, g++).
_C_TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
}


def expression(function: str, *dtypes: np.dtype[Any]) -> str:
    """C++ name of a kernel template for these dtypes, such as `rows<unsigned short, long long>`."""
    return f"{function}<{', '.join(_C_TYPES[dtype.name] for dtype in dtypes)}>"


def source_of(operator: str) -> str:
    """Text of `<operator>.cu` with its included `.cuh` files inserted.

    A single text, because NVRTC does not get any files and CuPy's disk cache identifies a kernel by its text.
    """
    folder = Path(__file__).parent
    source = (folder / f"{operator}.cu").read_text(encoding="utf-8")
    return re.sub(
        r'^#include "(\w+\.cuh)"$',
        lambda line: (folder / line[1]).read_text(encoding="utf-8"),
        source,
        flags=re.MULTILINE,
    )


def load(operator: str, name: str) -> Any:
    """The kernel `name` of `<operator>.cu` for the current device, called as `kernel(grid, block, arguments)`.

    The first call for a kernel and a device compiles it, or loads it from CuPy's disk cache, and blocks for up to about
    a second; later calls are a dictionary lookup. A launch uses CuPy's current stream and does not block.

    Arguments are CuPy arrays, NumPy scalars of the parameter's width, and, for a struct passed by value, a NumPy array
    with one element of the structured dtype.
    """
    import cupy

    return _load(operator, name, cupy.cuda.Device().id)


@functools.cache
def _load(operator: str, name: str, device: int) -> Any:
    import cupy

    # A function belongs to the device that was current when it was created: hence `device` in the key.
    module = cupy.RawModule(code=source_of(operator), options=OPTIONS, name_expressions=[name])
    return module.get_function(name)
