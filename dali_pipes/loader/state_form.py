"""The form of a saved state, of any loader: a dict of Python's own types, with a version and all of its entries."""

from collections.abc import Iterable, Mapping
from typing import Any

from dali_pipes.errors import StateError

MAY_CHANGE = ("seq_len", "stride", "length_buckets")
"""Settings that may change between saving and loading with `on_change = "nearest"`."""

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


def is_count(value: Any) -> bool:
    """Whether a value of a state is an integer that a run can have reached."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def short(value: Any) -> str:
    """Any value of a state, as text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of `MAY_CHANGE` that differ: what was saved, and what is set now.

    Raises `StateError` for saved values that are not valid.
    """
    lengths = {name: saved.get(name) for name in ("seq_len", "stride")}
    buckets = saved.get("length_buckets")
    damaged = {name: value for name, value in lengths.items() if not _is_length(value)}
    if buckets is not None and not (isinstance(buckets, list | tuple) and all(map(_is_length, buckets))):
        damaged["length_buckets"] = buckets
    if damaged:
        name, value = next(iter(damaged.items()))
        raise StateError(f"the state is damaged: {name} is {short(value)}, expected positive integers")
    return {name: (saved.get(name), now.get(name)) for name in MAY_CHANGE if saved.get(name) != now.get(name)}


def _is_length(value: Any) -> bool:
    return is_count(value) and value > 0
