"""The form of a saved state, of any loader: a dict of Python's own types, with a version and all of its entries."""

from collections.abc import Iterable, Mapping
from typing import Any

from dali_pipes.errors import StateError
from dali_pipes.loader.state_change import short

_MOST_BYTES = 1 << 16


def state_of(given: Any, version: int) -> dict[str, Any]:
    """What the user loads, as `plain` makes it. Raises `StateError` for what is not a state of this version."""
    if not isinstance(given, Mapping) or not isinstance(plain(given.get("version")), int):
        entries = given.items() if isinstance(given, Mapping) else ()
        inside = [name for name, entry in entries if isinstance(entry, Mapping) and "version" in entry]
        hint = f"; pass its entry {inside[0]!r}" if inside else ""
        raise StateError(f"this is not a loader state: expected a dict from state_dict(), got {short(given)}{hint}")
    state: dict[str, Any] = plain(given)
    if state["version"] != version:
        raise StateError(
            f"the state has version {short(state['version'])}, but this release reads version {version}; load it "
            "with the release that saved it"
        )
    return state


def check_entries(state: Mapping[str, Any], names: Iterable[str], *, dicts: Iterable[str]) -> None:
    """Raise `StateError` if an entry is missing, or one of `dicts` is not a dict."""
    missing = [name for name in names if name not in state]
    if missing:
        raise StateError(f"the state is incomplete: {', '.join(missing)} missing; use an unchanged copy")
    for name in dicts:
        if not isinstance(state[name], Mapping):
            raise StateError(f"the state is damaged: {name} is {short(state[name])}, expected a dict")


def plain(value: Any, depth: int = 4) -> Any:
    """A fresh copy in Python's own types: a checkpoint library may have made NumPy or torch objects of them."""
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {name: plain(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, depth - 1) for entry in value]
    if not hasattr(value, "tolist"):
        return value
    try:
        small = getattr(value, "nbytes", 0) <= _MOST_BYTES
        return plain(value.tolist(), depth - 1) if small else f"a {type(value).__name__} of {value.nbytes} bytes"
    except (RuntimeError, TypeError, ValueError):  # a tensor without data, or with another layout
        return f"a {type(value).__name__}"
