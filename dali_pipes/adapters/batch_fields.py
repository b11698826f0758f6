"""A field of a batch that an adapter needs."""

from collections.abc import Mapping
from typing import Any

from dali_pipes.errors import ConfigError


def field_of(batch: Mapping[str, Any], name: str) -> Any:
    """The field. Raises `ConfigError` if the batch does not contain it."""
    if name not in batch:
        raise ConfigError(f"the batch does not contain {name!r}, only {', '.join(batch)}; add {name!r} to outputs")
    return batch[name]
