"""The settings that change with the tokens of a run: `seq_len` and `global_batch` as lists of [tokens, value].

seq_len = [[0, 2048], ["20B", 8192]]       # rows of 2,048 tokens, and of 8,192 after 20 billion tokens
global_batch = [[0, 256], ["10B", 512]]    # rows of an optimizer step, over all ranks
"""

from bisect import bisect_right
from collections.abc import Iterable
from numbers import Integral
from typing import Annotated, Any, NamedTuple

from pydantic import Discriminator, Field, PlainSerializer, PlainValidator, Tag

from dali_pipes.config.amounts import parse_count
from dali_pipes.config.validators import as_value_error, shown

Steps = tuple[tuple[int, int], ...]
"""(tokens, value): from how many tokens of the run on which value holds. The first is at 0, and they rise."""

_LARGEST = 2**63
_EXPECTED = 'expected a list of [tokens, value], such as [[0, 2048], ["20B", 8192]]'


class CurriculumStage(NamedTuple):
    """What holds from `at` tokens of the run on."""

    at: int
    seq_len: int
    """Tokens of a row."""
    global_batch: int
    """Rows of an optimizer step, over all ranks."""


@as_value_error
def _parse_steps(value: Any) -> Steps:
    steps: list[tuple[int, int]] = []
    for entry in value:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise ValueError(f"{_EXPECTED}; found {shown(entry)}")
        at, number = parse_count(entry[0]), entry[1]
        for what, found, least in (("tokens", at, 0), ("value", number, 1)):
            if isinstance(found, bool) or not isinstance(found, Integral) or not least <= int(found) < _LARGEST:
                raise ValueError(
                    f"{shown(entry)}: {what}: expected a whole number of at least {least}, found {shown(found)}"
                )
        if not steps and at:
            raise ValueError(
                f"the first entry is {shown(entry)}, but it must begin at 0 tokens: write [0, {number}], or put "
                "another entry before it"
            )
        if steps and at <= steps[-1][0]:
            raise ValueError(
                f"{shown(entry)} comes after an entry at {steps[-1][0]:,} tokens: list entries by increasing tokens, "
                "each number once"
            )
        steps.append((int(at), int(number)))
    if not steps:
        raise ValueError(f"{_EXPECTED}; found an empty list")
    return tuple(steps)


def _kind(value: Any) -> str:
    return "stages" if isinstance(value, list | tuple) else "one"


def plain_steps(value: int | Steps | None) -> int | list[list[int]] | None:
    """As a configuration spells it."""
    return [list(step) for step in value] if isinstance(value, tuple) else value


Scheduled = Annotated[
    Annotated[Annotated[int, Field(gt=0)], Tag("one")] | Annotated[Steps, PlainValidator(_parse_steps), Tag("stages")],
    Discriminator(_kind),
    PlainSerializer(plain_steps, return_type=int | list[list[int]] | None),
]
"""A positive integer, or a list of [tokens, value]."""


def steps_of(value: int | Steps) -> Steps:
    """As a list, also of one value for the whole run."""
    return ((0, value),) if isinstance(value, int) else value


def merged_stages(seq_len: Steps, global_batch: Steps) -> tuple[CurriculumStage, ...]:
    """Both schedules as one, by rising tokens."""
    places = sorted({at for at, _ in (*seq_len, *global_batch)})
    return tuple(CurriculumStage(at, _value_at(seq_len, at), _value_at(global_batch, at)) for at in places)


def values(steps: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The different values, rising."""
    return tuple(sorted({value for _, value in steps}))


def _value_at(steps: Steps, at: int) -> int:
    return steps[bisect_right(steps, at, key=lambda step: step[0]) - 1][1]
