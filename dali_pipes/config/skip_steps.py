"""The setting `skip_steps`: ranges of steps that are not handed out, checked and merged.

[[100, 120], [110, 130], [7, 9, 2]]   ->   (100, 130, 0), (7, 9, 2)          first, end, epoch

Steps are counted by their rows over all ranks, so a range means other rows in a run of another step size. Which are
meant has to be said there: `skip_step_rows`. The rows are this run's; where those of the run before had another length
(`on_change = "nearest"`), no number of them would be that run's steps.
"""

from typing import Any

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError

SkippedRange = tuple[int, int, int]
"""Steps `first` to `end` - 1 of an epoch, as (first, end, epoch)."""


def merged_ranges(given: Any) -> tuple[SkippedRange, ...]:
    """Ranges [first, end] or [first, end, epoch] in order of epoch and step; those that meet or overlap become one.

    Raises `ValueError` for anything but whole numbers with 0 <= first < end and epoch >= 0.
    """
    if not isinstance(given, list | tuple):
        raise ValueError(f"expected a list of [first, end] or [first, end, epoch], found {shown(given)}")
    merged: list[SkippedRange] = []
    for first, end, epoch in sorted(map(_checked, given), key=lambda item: (item[2], item[0])):
        if merged and merged[-1][2] == epoch and first <= merged[-1][1]:
            first, before, _ = merged.pop()
            end = max(end, before)
        merged.append((first, end, epoch))
    return tuple(merged)


def in_steps_of(ranges: tuple[SkippedRange, ...], counted_rows: int | None, step_rows: int) -> tuple[SkippedRange, ...]:
    """Ranges in steps of `counted_rows` rows (None: of `step_rows`), in steps of `step_rows`.

    Raises `ConfigError` for one that does not begin and end with such a step.
    """
    if counted_rows is None or counted_rows == step_rows:
        return ranges
    for first, end, _ in ranges:
        if first * counted_rows % step_rows or end * counted_rows % step_rows:
            raise ConfigError(
                f"skip_steps [{first}, {end}] of {counted_rows} rows are rows {first * counted_rows} to "
                f"{end * counted_rows - 1}, which do not begin and end with steps of {step_rows} rows, as this run has;"
                f" with skip_step_rows = {step_rows} the nearest that leave them all out are "
                f"[{first * counted_rows // step_rows}, {-(-end * counted_rows // step_rows)}]"
            )
    return tuple(
        (first * counted_rows // step_rows, end * counted_rows // step_rows, epoch) for first, end, epoch in ranges
    )


def _checked(item: Any) -> SkippedRange:
    numbers = list(item) if isinstance(item, list | tuple) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not whole or len(numbers) not in (2, 3):
        raise ValueError(f"{shown(item)}: expected [first, end] or [first, end, epoch], whole numbers")
    first, end, epoch = numbers if len(numbers) == 3 else (*numbers, 0)
    if not 0 <= first < end or epoch < 0:
        raise ValueError(
            f"{shown(list(item))}: expected 0 <= first < end (the step behind the last one) and epoch >= 0"
        )
    return first, end, epoch
