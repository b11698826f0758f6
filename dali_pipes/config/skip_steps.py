"""The setting `skip_steps`: ranges of steps that a run leaves out, given in steps, rows or tokens of an epoch.

    skip_steps = [[100, 120], [7, 9, 2], {rows = [6400, 7680]}, {tokens = ["10B", "10.1B"], epoch = 1}]

Ranges are half-open. Rows are counted from the start of the epoch over all ranks, and a row has `seq_len` tokens, so
ranges in rows and tokens mean the same data in runs with another batch size or number of ranks; a range in steps does
not. With 64 rows in a step and 16 tokens in a row these are the same:

    [100, 120]    {rows = [6400, 7680]}    {tokens = [102400, 122880]}
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dali_pipes.config.amounts import parse_amount
from dali_pipes.config.settings_files import toml_value
from dali_pipes.config.validators import as_value_error, shown
from dali_pipes.errors import ConfigError

_UNITS = ("steps", "rows", "tokens")
_LARGEST = 2**63 - 1
_EXPECTED = "expected [first, end], [first, end, epoch], {rows = [first, end]} or {tokens = [first, end], epoch = 1}"


class SkippedRange(NamedTuple):
    """`first` to `end` - 1 of an epoch."""

    first: int
    end: int
    epoch: int = 0
    unit: str = "steps"

    def plain(self) -> list[int] | dict[str, Any]:
        """As a configuration spells it."""
        if self.unit == "steps":
            return [self.first, self.end, self.epoch] if self.epoch else [self.first, self.end]
        return {self.unit: [self.first, self.end], **({"epoch": self.epoch} if self.epoch else {})}

    def __repr__(self) -> str:
        return repr(self.plain())

    def __str__(self) -> str:
        """As TOML."""
        return toml_value(self.plain())


@as_value_error
def parse_ranges(given: Any) -> tuple[SkippedRange, ...]:
    """Ranges by unit, epoch and first step; those that overlap or meet become one. ValueError."""
    if not isinstance(given, list | tuple):
        raise ValueError(f"expected a list of ranges, such as [[100, 120]]; found {shown(given)}")
    if given and not any(isinstance(item, list | tuple | Mapping) for item in given):
        raise ValueError(f"expected a list of ranges: write [{shown(list(given))}], found {shown(given)}")
    return _merged(map(_parsed, given))


def in_steps(
    ranges: Iterable[SkippedRange], step_rows: int, row_tokens: int, start: tuple[int, int] | None = None
) -> tuple[tuple[int, int, int], ...]:
    """Ranges as (first, end, epoch) in steps of `step_rows` rows of `row_tokens` tokens: rising, merged.

    start: epoch and row where the run begins or resumes. Its steps of that epoch are counted from there, and a range
    after it must begin and end with a step: else ConfigError. With None nothing is checked.
    """
    sizes = {"steps": 1, "rows": step_rows, "tokens": step_rows * row_tokens}
    ranges = tuple(ranges)
    if start is not None:
        for skipped in ranges:
            if skipped.unit != "steps":
                _check_borders(skipped, sizes[skipped.unit], step_rows, start)
    # The step that begins at a row is number ceil(row / step_rows), also where steps are counted from a resume.
    steps = (SkippedRange(-(-r.first // sizes[r.unit]), -(-r.end // sizes[r.unit]), r.epoch) for r in ranges)
    return tuple((first, end, epoch) for first, end, epoch, _ in _merged(steps) if first < end)


def _check_borders(skipped: SkippedRange, size: int, step_rows: int, start: tuple[int, int]) -> None:
    """size: of a step, in the unit of the range."""
    start_epoch, start_row = start if skipped.epoch == start[0] else (start[0], 0)
    begin = start_row * size // step_rows
    if skipped.epoch < start_epoch or skipped.end <= begin:
        return
    first, end = skipped.first - begin, skipped.end - begin
    if (first < 0 or not first % size) and not end % size:
        return
    low = skipped.first if first < 0 else begin + first // size * size
    whole = (max(0, -(-first // size)) * size + begin, end // size * size + begin)
    counted = f", counted from row {start_row:,}, where the run resumes" if start_row % step_rows else ""
    less = f", or {skipped._replace(first=whole[0], end=whole[1])} for its whole steps only" * (whole[0] < whole[1])
    tokens = f" ({size:,} tokens)" if skipped.unit == "tokens" else ""
    raise ConfigError(
        f"skip_steps: {skipped} does not fall on step boundaries: in this run a step has {step_rows:,} rows{tokens}"
        f"{counted}. Use {skipped._replace(first=low, end=begin - (-end // size) * size)} to skip the whole range{less}"
    )


def _merged(ranges: Iterable[SkippedRange]) -> tuple[SkippedRange, ...]:
    merged: list[SkippedRange] = []
    for new in sorted(ranges, key=lambda skipped: (_UNITS.index(skipped.unit), skipped.epoch, skipped.first)):
        last = merged[-1] if merged else None
        if last is not None and last[2:] == new[2:] and new.first <= last.end:
            merged[-1] = last._replace(end=max(last.end, new.end))
        else:
            merged.append(new)
    return tuple(merged)


def _parsed(item: Any) -> SkippedRange:
    if isinstance(item, SkippedRange):
        return item
    unit, bounds, epoch = "steps", item, 0
    if isinstance(item, Mapping):
        unit = next((name for name in _UNITS if name in item), "")
        bounds, epoch = None if {*item} - {unit, "epoch"} else item.get(unit), item.get("epoch", 0)
    elif isinstance(item, list | tuple) and len(item) == 3:
        *bounds, epoch = item
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise ValueError(f"{shown(item)}: {_EXPECTED}")
    first, end = map(_amount, bounds) if isinstance(item, Mapping) else bounds
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in (first, end, epoch)):
        raise ValueError(f"{shown(item)}: expected whole numbers")
    if not 0 <= first < end <= _LARGEST or not 0 <= epoch <= _LARGEST:
        raise ValueError(f"{shown(item)}: expected 0 <= first < end (the first one that is not skipped) and epoch >= 0")
    return SkippedRange(first, end, epoch, unit)


def _amount(value: Any) -> Any:
    """The number of "10B"; a value that is not text is returned unchanged."""
    number = parse_amount(value) if isinstance(value, str) else None
    return int(number) if number is not None and number == int(number) else value
