"""Checks of an operator's arguments: numbers, and kinds of arrays, without importing CuPy for users without it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import cupy

    Array: TypeAlias = NDArray[Any] | cupy.ndarray


def is_cupy(operator: str, name: str, array: object) -> bool:
    """True for a CuPy array, False for a NumPy array. Raises TypeError for anything else."""
    if isinstance(array, np.ndarray):
        return False
    if _is_cupy_array(array):
        return True
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    raise TypeError(f"{operator}: {name} must be a numpy.ndarray or a cupy.ndarray, not {kind}")


def require_same_kind(operator: str, on_device: bool, **arrays: object) -> None:
    """Raise TypeError unless all arrays are CuPy arrays (`on_device`) or all are NumPy arrays."""
    for name, array in arrays.items():
        if is_cupy(operator, name, array) != on_device:
            first, other = ("cupy", "numpy") if on_device else ("numpy", "cupy")
            raise TypeError(
                f"{operator}: {name} is a {other}.ndarray, but other arrays are {first}.ndarray; "
                "pass all arrays as NumPy arrays or all as CuPy arrays"
            )


def require_inside(operator: str, lowest: int, bits: int, **values: int) -> None:
    """Raise ValueError unless every value is in [lowest, 2**bits)."""
    for name, value in values.items():
        if not lowest <= value < 2**bits:
            raise ValueError(f"{operator}: {name} is {value}, expected {lowest} <= {name} < 2**{bits}")


def _is_cupy_array(array: object) -> TypeGuard[cupy.ndarray]:
    module = sys.modules.get("cupy")  # an array of a package that was never imported cannot exist
    return module is not None and isinstance(array, module.ndarray)
