"""Which rows a step holds: pure integer arithmetic. No files, no DALI, no torch, no array larger than a block."""

from dali_pipes.schedule.schedule import PADDING, Blocks, Position, Schedule, StepRange
from dali_pipes.schedule.windows import Windows, split_windows

__all__ = ["PADDING", "Blocks", "Position", "Schedule", "StepRange", "Windows", "split_windows"]
