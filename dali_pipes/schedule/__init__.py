"""Which rows a step holds: pure integer arithmetic. No files, no DALI, no torch, no array larger than a block."""

from dali_pipes.schedule.packing import LongDocuments, Packing, PackingCounts, left_out, narrow, pack, rows_of_documents
from dali_pipes.schedule.schedule import PADDING, Blocks, LeftOut, Position, Schedule, StepRange, WindowMark
from dali_pipes.schedule.window_counts import WindowCount, WindowCounts
from dali_pipes.schedule.windows import Windows, split_windows

__all__ = [
    "PADDING",
    "Blocks",
    "LeftOut",
    "LongDocuments",
    "Packing",
    "PackingCounts",
    "Position",
    "Schedule",
    "StepRange",
    "WindowCount",
    "WindowCounts",
    "WindowMark",
    "Windows",
    "left_out",
    "narrow",
    "pack",
    "rows_of_documents",
    "split_windows",
]
