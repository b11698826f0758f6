"""A placement: where the tokens of a block are kept and gathered. Placements change cost, never content."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from dali_pipes.corpus import Corpus
from dali_pipes.errors import TokenRangeError
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Plan, steps_reading

Array = Any  # a NumPy array, or a CuPy array where the placement is on a GPU

_MOST_OVERLAPPING_ROWS = 16
"""Rows that a token is read for, where rows overlap, up to which an error names the steps of all."""


@dataclass
class Slot:
    """Memory of one block on its way; reused block after block. `arrays` belongs to the placement."""

    arrays: dict[str, Array] = field(default_factory=dict)
    plan: Plan | None = None
    """Rows of the block, where the placement wants them planned."""
    num_pieces: int = 0
    """In all rows of the block, where they are made of pieces."""


class Placement(Protocol):
    """Where a block's tokens come from and go to. Placements change cost, never content."""

    plans_rows: bool
    """Whether `prepare` needs the rows of a block planned; a GPU that holds the corpus computes them itself."""

    def new_slot(self, max_rows: int) -> Slot:
        """Memory for blocks of up to `max_rows` rows."""

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read a block; called in a reader thread."""

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        """Arrays of a prepared block, (1, R, ...) each, valid until the next call; called in the pipeline's thread."""

    def check(self, iteration: int | None = None) -> None:
        """Raise what was found wrong, after its delivery, with blocks up to `iteration`; None: with those known now."""

    def restart(self) -> None:
        """Forget the blocks delivered so far."""

    def memory(self) -> MemoryHeld:
        """Bytes held on a GPU and for it."""

    def close(self) -> None:
        """Let go of device memory; idempotent."""


def range_error(
    corpus: Corpus, schedule: Schedule, plan: Plan, row: int, column: int, vocab_size: int | None, *, width: int
) -> TokenRangeError:
    """The error for the id at `column` of a block's row `row`, of `width` tokens; reads it from the corpus again."""
    position = plan.position(row, column)
    token, place = int(corpus.tokens(position, 1)[0]), corpus.locate(position)
    found = plan.steps.first_step + -(-plan.steps.base // schedule.global_rows) + row // schedule.batch_size
    steps = {found}
    is_rare = width <= _MOST_OVERLAPPING_ROWS * schedule.windows.stride
    if schedule.documents is None and is_rare:  # else a row alone has it, or there are too many to be named
        steps.update(steps_reading(schedule, plan.steps, position, width))
    named = ", ".join(map(str, sorted(steps)))
    expected = f"0 <= id < vocab_size = {vocab_size}" if vocab_size is not None else "0 <= id < 2**63"
    return TokenRangeError(
        f"{place.file}: token {place.offset} (corpus position {position}) is {token}, expected {expected}; it is in "
        f"step{'s' * (len(steps) > 1)} {named} of epoch {plan.steps.epoch}{'' if is_rare else ' and in others'}; check "
        f"vocab_size (it must count added tokens) and the file's dtype (read as {corpus.dtype})"
    )
