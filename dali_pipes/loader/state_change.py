"""Going on with rows of another length: at the row that is nearest to where a saved run stopped, counted in tokens.

    saved    100 rows, one every 1024 tokens     102,400 tokens of the epoch
    now      a row every 768 tokens              row 133, at 102,144 tokens

Rows made of documents are counted as if they were full, since what is in them is not known without planning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dali_pipes.errors import StateError
from dali_pipes.schedule import Position, Schedule

MAY_CHANGE = ("seq_len", "stride", "length_buckets")
"""Settings after whose change `on_change = "nearest"` goes on."""


@dataclass(frozen=True)
class StateChange:
    """What `on_change = "nearest"` made of a state that was saved with rows of another length."""

    settings: Mapping[str, tuple[Any, Any]]
    """Name of each setting that differs: what was saved, and what is set now."""
    epoch: int
    rows_before: int
    """Rows of the epoch, over all ranks, that the saving run had consumed."""
    rows: int
    """The row at which this one goes on, before any steps that are left out."""
    tokens_before: int
    """Tokens between the epoch's first row and the place where the saving run stopped."""
    tokens: int
    """The same for the row at which this one goes on."""
    is_exact: bool
    """Whether the tokens of the epoch lie in the same order, so that none but those between the two counts come again
    or are missed; with `shuffle`, and with rows made of documents, any of the epoch may."""

    def differences(self) -> str:
        """The settings that differ, for a message."""
        return ", ".join(f"{name} {saved!r} is now {now!r}" for name, (saved, now) in self.settings.items())

    def line(self) -> str:
        """All of it, in one line for a log."""
        warning = "" if self.is_exact else "; tokens of this epoch may come again or be missed, its order is another"
        return (
            f"the state was saved with rows of another length ({self.differences()}): going on in epoch {self.epoch} "
            f"at row {self.rows} for {self.rows_before}, {self.tokens} tokens for {self.tokens_before}{warning}"
        )


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of `MAY_CHANGE` that differ: what was saved, and what is set now.

    Raises `StateError` for saved ones that no run can have had.
    """
    lengths = {name: saved.get(name) for name in ("seq_len", "stride")}
    buckets = saved.get("length_buckets")
    damaged = {name: value for name, value in lengths.items() if not _is_length(value)}
    if buckets is not None and not (isinstance(buckets, list | tuple) and all(map(_is_length, buckets))):
        damaged["length_buckets"] = buckets
    if damaged:
        name, value = next(iter(damaged.items()))
        raise StateError(f"the state is damaged: {name} is {short(value)}, expected whole numbers above 0")
    return {name: (saved.get(name), now.get(name)) for name in MAY_CHANGE if saved.get(name) != now.get(name)}


def nearest_position(
    position: Position, saved: Mapping[str, Any], settings: Mapping[str, tuple[Any, Any]], schedule: Schedule
) -> StateChange:
    """Where a run goes on whose state says `position` and has the settings `saved`.

    At the row nearest to the same count of tokens, the earlier of two that are, and at most at the end of the epoch.
    Rows made of documents are planned as far as that row, which blocks.
    """
    epoch, rows_before = position
    interleave = schedule.interleave
    tokens_a_row = interleave.stride
    tokens_before = rows_before * saved["stride"]
    if interleave.is_uniform and tokens_before > interleave.num_tokens + saved["stride"]:
        raise StateError(
            f"rows {rows_before}, one every {saved['stride']} tokens: there are {interleave.num_tokens} tokens"
        )
    nearest = (2 * tokens_before + tokens_a_row - 1) // (2 * tokens_a_row)
    rows = min(nearest, schedule.rows_known(epoch, nearest))
    is_exact = not rows_before or (interleave.is_uniform and interleave.keeps_order)
    return StateChange(settings, epoch, rows_before, rows, tokens_before, rows * tokens_a_row, is_exact)


def is_count(value: Any) -> bool:
    """Whether a value of a state is a whole number that a run can have got to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def short(value: Any) -> str:
    """A value of a state for a message, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, lists in lists
        text = f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_length(value: Any) -> bool:
    return is_count(value) and value > 0
