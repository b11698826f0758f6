"""Fields of samples as the arrays that a graph takes in.

{"image": b"...", "label": 3, "name": "cat"}     image    uint8 with 1 axis, of any length
                                                 label    int64 with 0 axes
                                                 name     not an array: passes around the graph
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dali_pipes.errors import GraphError
from dali_pipes.samples.structure import FieldPath, fields_of, name_of

_LARGEST_ITEM_BYTES = 8
_SAME_FIELDS = "as in the first sample of the first batch"


class Field(NamedTuple):
    """What a field is in all samples. dtype: None if its values are not arrays, and pass around the graph."""

    path: FieldPath
    dtype: np.dtype[Any] | None
    ndim: int

    def __str__(self) -> str:
        if self.dtype is None:
            return "not an array"
        return f"{self.dtype} with {self.ndim} {'axis' if self.ndim == 1 else 'axes'}"


def fields_like(sample: Any) -> list[Field]:
    """The fields that all samples are expected to have, by one that is the first of its batch. Raises GraphError."""
    return [_field(path, _array(path, value, 0)) for path, value in fields_of(sample)]


def columns(fields: list[Field], samples: list[Any]) -> dict[FieldPath, list[Any]]:
    """For each field its values, one a sample: contiguous arrays of its dtype, or what passes around the graph.

    Raises GraphError, with the sample's position, for one that differs in structure, dtype or number of axes.
    """
    found: dict[FieldPath, list[Any]] = {field.path: [] for field in fields}
    for position, sample in enumerate(samples):
        values = dict(fields_of(sample))
        if values.keys() != found.keys():
            there, expected = (", ".join(map(name_of, paths)) for paths in (values, found))
            raise GraphError(
                f"sample {position} of the batch has the fields {there}; expected {expected}, {_SAME_FIELDS}. Return "
                "the same fields for every item.",
                position,
            )
        for field in fields:
            value = values[field.path]
            array = _array(field.path, value, position)
            if (own := _field(field.path, array)) != field:
                raise GraphError(
                    f"{name_of(field.path)} of sample {position} of the batch is {own}; expected {field}, "
                    f"{_SAME_FIELDS}. Convert it in the dataset.",
                    position,
                )
            found[field.path].append(value if array is None else array)
    return found


def _field(path: FieldPath, array: npt.NDArray[Any] | None) -> Field:
    return Field(path, None, 0) if array is None else Field(path, array.dtype, array.ndim)


def _array(path: FieldPath, value: Any, position: int) -> npt.NDArray[Any] | None:
    """A value as an array, without a copy where its memory is contiguous; None if it passes around the graph."""
    try:
        array = _as_array(value)
        if array is None:
            return None
        dtype = array.dtype
        if dtype.kind not in "biuf" or dtype.itemsize > _LARGEST_ITEM_BYTES:  # DALI would take complex for real numbers
            raise TypeError(f"its dtype, {dtype}, is not supported")
        return np.asarray(array, dtype.newbyteorder("="), order="C")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor that requires grad
        raise GraphError(
            f"{name_of(path)} of sample {position} of the batch cannot be passed to DALI: {error}. Expected bool, "
            "integers or floats of up to 64 bits, on the CPU.",
            position,
        ) from error


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, bool | int | float):  # the dtypes that torch's default_collate gives them
        return np.asarray(
            value, bool if isinstance(value, bool) else np.int64 if isinstance(value, int) else np.float64
        )
    if isinstance(value, torch.Tensor):
        array: npt.NDArray[Any] = value.numpy()
        return array
    return np.asarray(value) if hasattr(value, "__array_interface__") else None  # an image of PIL
