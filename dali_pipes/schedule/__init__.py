"""Which rows a step of a rank holds: integer arithmetic. No files, no DALI, no torch, no array larger than a block."""

from dali_pipes.schedule.schedule import PADDING, Blocks, Position, Schedule, StepRange

__all__ = ["PADDING", "Blocks", "Position", "Schedule", "StepRange"]
