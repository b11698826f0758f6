"""Shares of objectives, exact, and lists of them: what holds from how many tokens of the run on.

rate = 0.15
rate = [[0, 0.3], ["10B", 0.15]]        # 30%, and 15% after 10 billion tokens

A share is exact, as weights are: 0.15 is 15/100, and a draw of 32 bits is compared with floor(share * 2**32).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from dali_pipes.config.amounts import parse_count, parse_fraction, plain_fraction
from dali_pipes.config.validators import as_value_error, shown

WHOLE = 2**32
"""Exclusive upper bound of a 32-bit draw."""

RateSteps = tuple[tuple[int, Fraction], ...]
"""(tokens of the run, number): from when on each holds. The first is at 0, and the tokens rise."""

_LARGEST = 2**63
_EXPECTED = 'expected a list of [tokens, number], such as [[0, 0.3], ["10B", 0.15]]'


def parse_share(value: Any) -> Fraction:
    """ValueError for anything but a number from 0 to 1."""
    number: Fraction = parse_fraction(value)
    if not 0 <= number <= 1:
        raise ValueError(f"expected a number from 0 to 1, found {shown(value)}")
    return number


def _weight(value: Any, *, zero: bool) -> Fraction:
    number: Fraction = parse_fraction(value)
    if number < 0 or (number == 0 and not zero):
        raise ValueError(f"must be {'at least' if zero else 'above'} 0, found {shown(value)}")
    return number


def _parse_steps(value: Any, one: Callable[[Any], Fraction], in_list: Callable[[Any], Fraction]) -> RateSteps:
    """one, in_list: parse a number that is given alone, and one of a list."""
    if not isinstance(value, list | tuple):
        return ((0, one(value)),)
    steps: list[tuple[int, Fraction]] = []
    for entry in value:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise ValueError(f"{_EXPECTED}; found {entry!r}")
        at, least = parse_count(entry[0]), steps[-1][0] + 1 if steps else 0
        is_count = isinstance(at, int) and not isinstance(at, bool)
        if not is_count or not least <= at < (_LARGEST if steps else 1):
            raise ValueError(
                f"{shown(entry)}: expected token counts that start at 0 and increase, found {shown(entry[0])}"
            )
        steps.append((at, (in_list if len(value) > 1 else one)(entry[1])))
    if not steps:
        raise ValueError(f"{_EXPECTED}; found an empty list")
    return tuple(steps)


def plain_steps(steps: RateSteps) -> Any:
    """As a configuration spells it: JSON-serializable."""
    if len(steps) == 1:
        return plain_fraction(steps[0][1])
    return [[at, plain_fraction(number)] for at, number in steps]


def _steps(one: Callable[[Any], Fraction], in_list: Callable[[Any], Fraction]) -> Any:
    return PlainValidator(as_value_error(partial(_parse_steps, one=one, in_list=in_list)))


Share = Annotated[Fraction, PlainValidator(parse_share), PlainSerializer(plain_fraction)]
"""From 0 to 1, exact."""

Rates = Annotated[RateSteps, _steps(parse_share, parse_share), PlainSerializer(plain_steps, return_type=Any)]
"""A share, or a list of [tokens, share] by the tokens of the run."""

WeightSteps = Annotated[
    RateSteps,
    _steps(partial(_weight, zero=False), partial(_weight, zero=True)),
    PlainSerializer(plain_steps, return_type=Any),
]
"""The same of a weight above 0, or in a list of at least 0."""


def value_at(steps: RateSteps, tokens: int) -> Fraction:
    """The number that holds after `tokens` of the run."""
    return steps[bisect_right(steps, tokens, key=lambda step: step[0]) - 1][1]


def places_of_changes(lists: Iterable[RateSteps]) -> list[int]:
    """The tokens of the run, rising and from 0 on, at which any of some lists changes."""
    return sorted({at for steps in lists for at, _ in steps})


def threshold(share: Fraction) -> int:
    """A draw of 32 bits is below it with this chance, rounded down to a multiple of 2**-32."""
    return share.numerator * WHOLE // share.denominator
