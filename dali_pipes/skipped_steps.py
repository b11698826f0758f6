"""The setting `skip_steps`: ranges of steps that are not handed out, checked and merged.

[[100, 120], [110, 130], [7, 9, 2]]   ->   (100, 130, 0), (7, 9, 2)          first, end, epoch
"""

from typing import Any

SkippedRange = tuple[int, int, int]
"""Steps `first` to `end` - 1 of an epoch, as (first, end, epoch)."""


def merged_ranges(given: Any) -> tuple[SkippedRange, ...]:
    """Ranges [first, end] or [first, end, epoch] in order of epoch and step; those that meet or overlap become one.

    Raises `ValueError` for anything but whole numbers with 0 <= first < end and epoch >= 0.
    """
    if not isinstance(given, list | tuple):
        raise ValueError(f"expected a list of [first, end] or [first, end, epoch], found {given!r}")
    merged: list[SkippedRange] = []
    for first, end, epoch in sorted(map(_checked, given), key=lambda item: (item[2], item[0])):
        if merged and merged[-1][2] == epoch and first <= merged[-1][1]:
            first, before, _ = merged.pop()
            end = max(end, before)
        merged.append((first, end, epoch))
    return tuple(merged)


def _checked(item: Any) -> SkippedRange:
    numbers = list(item) if isinstance(item, list | tuple) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not whole or len(numbers) not in (2, 3):
        raise ValueError(f"{item!r}: expected [first, end] or [first, end, epoch], whole numbers")
    first, end, epoch = numbers if len(numbers) == 3 else (*numbers, 0)
    if not 0 <= first < end or epoch < 0:
        raise ValueError(f"{list(item)!r}: expected 0 <= first < end (the step behind the last one) and epoch >= 0")
    return first, end, epoch
