"""Resuming with rows of another length: at the row nearest to the token where the saving run stopped.

    saved    100 rows, one every 1024 tokens     102,400 tokens of the epoch
    now      a row every 768 tokens              row 133, at 102,144 tokens

Rows made from documents count as full: what is in them is not known without planning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dali_pipes.errors import StateError
from dali_pipes.rows.item_order import SEQUENTIAL
from dali_pipes.schedule import Position, Schedule


@dataclass(frozen=True)
class StateChange:
    """How `on_change = "nearest"` resumed from a state that was saved with rows of another length."""

    settings: Mapping[str, tuple[Any, Any]]
    """Name of each setting that differs: what was saved, and what is set now."""
    epoch: int
    rows_before: int
    """Rows of the epoch, over all ranks, that the saving run had consumed."""
    rows: int
    """The row at which this run resumes, before any steps that are skipped."""
    tokens_before: int
    """Tokens between the epoch's first row and the place where the saving run stopped."""
    tokens: int
    """The same for the row at which this run resumes."""
    is_exact: bool
    """Whether the epoch's tokens are in the same order as before, so that only those between the two counts are
    repeated or missed. With `shuffle`, or with rows made from documents, any token of the epoch may be."""

    def differences(self) -> str:
        """The settings that differ, as text for a message."""
        return ", ".join(f"{name} {saved!r} is now {now!r}" for name, (saved, now) in self.settings.items())

    def line(self) -> str:
        """All of it, in one line for a log."""
        warning = "" if self.is_exact else ". The order differs: tokens of this epoch may be repeated or missed"
        return (
            f"the state was saved with rows of a different length ({self.differences()}); resuming epoch {self.epoch} "
            f"at row {self.rows:,} (was {self.rows_before:,}), after {self.tokens:,} tokens (was "
            f"{self.tokens_before:,}){warning}"
        )


@dataclass(frozen=True)
class MixtureChange(StateChange):
    """How `on_change = "mixture"` resumed with other sources or weights: every source continues where it stopped.

    `settings` has "mixture.NAME" for each source that was added, removed or has another weight: its share of the rows,
    0 to 1, before and from `begin` on, None where it is not in the mixture. Rows and tokens stay as they were saved.
    """

    begin: int
    """Row of the run, over all epochs and ranks, from which the new sources and weights hold; of `order_len` tokens if
    `seq_len` is a list.
    """

    def differences(self) -> str:
        """The sources that differ, as text for a message."""
        return ", ".join(
            f"{name} {'removed' if now is None else f'{now:.2%}'} ({'new' if saved is None else f'was {saved:.2%}'})"
            for name, (saved, now) in self.settings.items()
        )

    def line(self) -> str:
        """All of it, in one line for a log."""
        return (
            f"the state was saved with a different mixture; from row {self.begin:,} of the run on, the shares of rows "
            f"are: {self.differences()}"
        )


def nearest_position(
    position: Position, saved: Mapping[str, Any], settings: Mapping[str, tuple[Any, Any]], schedule: Schedule
) -> StateChange:
    """Where a run resumes whose state says `position` and has the settings `saved`.

    At the row nearest to the same number of tokens (the earlier of two), or else at the end of the epoch. Rows made of
    documents are planned up to that row, which blocks.
    """
    epoch, rows_before = position
    interleave = schedule.interleave
    tokens_a_row = interleave.stride
    tokens_before = rows_before * saved["stride"]
    if interleave.is_uniform and tokens_before > interleave.num_tokens + saved["stride"]:
        raise StateError(
            f"the state is damaged: {rows_before:,} rows, one every {saved['stride']:,} tokens, are more than the "
            f"{interleave.num_tokens:,} tokens of an epoch"
        )
    nearest = (2 * tokens_before + tokens_a_row - 1) // (2 * tokens_a_row)
    rows = min(nearest, schedule.rows_known(epoch, nearest))
    is_exact = not rows_before or (interleave.is_uniform and interleave.order_name == SEQUENTIAL)
    return StateChange(settings, epoch, rows_before, rows, tokens_before, rows * tokens_a_row, is_exact)
