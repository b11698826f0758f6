"""Samples and batches are nested: dicts, lists, tuples and named tuples of fields.

{"image": array, "box": (1, 2)}      fields    ("image",), ("box", 0), ("box", 1)
                                     names     image, box[0], box[1]
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

FieldPath: TypeAlias = tuple[str | int, ...]
"""Keys, attributes of named tuples and places in lists that lead from a sample to one of its fields."""


def fields_of(sample: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """The fields of a sample, each with its path, in the sample's order."""
    parts = _parts(sample)
    if parts is None:
        yield path, sample
        return
    for key, part in parts:
        yield from fields_of(part, (*path, key))


def with_fields(sample: Any, field: Callable[[FieldPath, Any], Any], path: FieldPath = ()) -> Any:
    """The same structure, with `field(path, value)` in place of each field's value. Mappings become dicts."""
    parts = _parts(sample)
    if parts is None:
        return field(path, sample)
    changed = [(key, with_fields(part, field, (*path, key))) for key, part in parts]
    if isinstance(sample, Mapping):
        return dict(changed)
    values = [part for _, part in changed]
    return type(sample)(*values) if hasattr(sample, "_fields") else type(sample)(values)


def name_of(path: FieldPath) -> str:
    """As a reader would write it: `image`, `[1]`, `box[0]`, `meta.id`; "sample" for a sample that is one field."""
    name = ""
    for key in path:
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else str(key)
    return name or "sample"


def _parts(sample: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(sample, Mapping):
        return list(sample.items())
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return list(zip(sample._fields, sample, strict=True))
    return list(enumerate(sample)) if isinstance(sample, list | tuple) else None
