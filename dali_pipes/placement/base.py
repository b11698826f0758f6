"""A placement: where the tokens of a block are kept and gathered. Placements change cost, never content."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.config.loader_config import INT32_IDS
from dali_pipes.errors import TokenRangeError
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Plan, steps_reading

Array = Any  # a NumPy array, or a CuPy array where the placement is on a GPU


class Batches(NamedTuple):
    """The batches of a block, or some of them."""

    arrays: dict[str, Any]
    """By field: the rows of the batches one after another; fields of segment bounds have a line for each batch. Empty
    where the arrays are elsewhere."""
    sizes: list[int]
    """Rows of each batch."""
    values: list[dict[str, int]]
    """Of each batch, the fields that are numbers on the host."""
    widths: list[int]
    """Positions in a row, of each batch."""
    is_flat: bool
    """Whether arrays of positions are in one line, because the batches may have different widths."""


@dataclass
class Slot:
    """Memory of one block on its way; reused block after block. `arrays` belongs to the placement."""

    arrays: dict[str, Array] = field(default_factory=dict)
    fields: dict[str, Array] = field(default_factory=dict)
    """On the CPU, the fields of the batches of the block: memory that is not reused while anyone holds them."""
    stored: Array | None = None
    """On the CPU, rows (R, row_tokens) in the type of the files, if fields are made from them later."""
    steps: StepRange | None = None
    """Steps of the block."""
    plan: Plan | None = None
    """Rows of the block, where the placement wants them planned."""
    num_pieces: int = 0
    """In all rows of the block, where they are put together from pieces."""
    cpu_share: float = 0.0
    """Of the time that it took to read the block, when the thread was on a CPU."""


class Placement(Protocol):
    """Where a block's tokens come from and go to. Placements change cost, never content."""

    plans_rows: bool
    """Whether `prepare` needs the rows of a block planned; a GPU that holds the corpus may compute them itself."""

    def new_slot(self, max_rows: int) -> Slot:
        """Memory for blocks of up to `max_rows` rows."""

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read a block; called in a reader thread."""

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        """Arrays of a prepared block, (1, R, ...) each, valid until the next call; called in the pipeline's thread."""

    def check(self, iteration: int | None = None) -> None:
        """Raise the error found after delivery in a block up to `iteration`; None: only if it is already known."""

    def restart(self) -> None:
        """Forget the blocks delivered so far."""

    def memory(self) -> MemoryHeld:
        """Bytes held on a GPU and for it."""

    def end(self) -> None:
        """Let `prepare` return soon, with an error if need be: no further block is asked for. Does not block."""

    def close(self) -> None:
        """Release device memory; idempotent."""


def fields_of(plan: Plan, outputs: Outputs) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `outputs.from_plan`, by name."""
    drawn = outputs.drawn(plan.steps.epoch, plan.row_ids, plan.rows, plan.widths)
    return {name: drawn[name] if name in drawn else plan.field(name) for name in outputs.from_plan}


def range_error(
    source: Source, schedule: Schedule, plan: Plan, row: int, column: int, vocab_size: int | None
) -> TokenRangeError:
    """The error for the id at `column` of a block's row `row`; reads it from the corpus again."""
    position = plan.position(row, column)
    token, place = source.token(position), source.locate(position)
    found = (
        plan.steps.first_step + -(-plan.steps.base // schedule.global_rows) + plan.batch_of(row, schedule.batch_size)
    )
    others = steps_reading(schedule, plan.steps, position)
    steps = sorted({found, *(others or ())})
    expected, advice = "0 <= id < 2**63", "Check vocab_size, which must include added tokens, and"
    if vocab_size == INT32_IDS:
        expected, advice = '0 <= id < 2**31 for index_dtype = "int32"', 'Set index_dtype = "int64", or check'
    elif vocab_size is not None:
        expected = f"0 <= id < vocab_size = {vocab_size}"
    _, name, _ = source.origin(position)
    whose = "" if name is None else f"mixture.{name}: "
    return TokenRangeError(
        f"{whose}{place.file}: token {place.offset:,} (corpus position {position:,}) is {token}, expected {expected}; "
        f"it is in step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))} of epoch {plan.steps.epoch}"
        f"{' and in others' if others is None else ''}. {advice} the file's dtype, which was read as {source.dtype}"
    )


def find_bad_id(tokens: npt.NDArray[Any], vocab_size: int | None) -> int | None:
    """Place of the first id in `tokens` (N,) that is negative or at or above `vocab_size`."""
    limit = vocab_size if vocab_size is not None else 2**63
    lowest, highest = _range_of(tokens.dtype)
    too_large = limit <= highest and int(tokens.max()) >= limit
    negative = lowest < 0 and int(tokens.min()) < 0
    if not (too_large or negative):
        return None
    bad = np.zeros(tokens.shape, dtype=bool)
    if limit <= highest:
        bad |= tokens >= limit
    if lowest < 0:
        bad |= tokens < 0
    return int(np.argmax(bad))


@cache
def _range_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def refuse_bad_id(
    source: Source, schedule: Schedule, plan: Plan, tokens: npt.NDArray[Any], vocab_size: int | None
) -> None:
    """Raise `TokenRangeError` for the first bad id among the tokens that were read for a plan (N,), row after row."""
    bad = find_bad_id(tokens, vocab_size)
    if bad is not None:
        begins = plan.row_begins(source.rows)
        row = int(np.searchsorted(begins, bad, side="right")) - 1
        raise range_error(source, schedule, plan, row, bad - int(begins[row]), vocab_size)
