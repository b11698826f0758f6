"""Which rows a step of a rank holds: integer arithmetic. No files, no DALI, no torch, no array larger than a block."""

from dali_pipes.rows.base import PADDING
from dali_pipes.schedule.interleave import Counted, Interleave, of_one_source
from dali_pipes.schedule.schedule import Blocks, Position, Schedule, StepRange, Steps

__all__ = ["PADDING", "Blocks", "Counted", "Interleave", "Position", "Schedule", "StepRange", "Steps", "of_one_source"]
