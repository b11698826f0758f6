"""Settings that are exact numbers: 0.1 is 1/10 as written, not the nearest float."""

from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from dali_pipes.config.amounts import parse_count, parse_fraction, plain_fraction
from dali_pipes.config.validators import shown


def exact_number(value: Any, *, zero: bool = False, most: int | None = None) -> Fraction:
    """Above 0, or with `zero` at least 0. ValueError for anything else."""
    number: Fraction = parse_fraction(value)
    if number < 0 or (number == 0 and not zero) or (most is not None and number > most):
        limits = ("at least 0" if zero else "above 0") + (f" and at most {most}" if most is not None else "")
        raise ValueError(f"must be {limits}, found {shown(value)}")
    return number


def _weight(value: Any) -> Fraction | Literal["size"]:
    if not isinstance(value, str):
        return exact_number(value, zero=True)
    if value == "size":
        return "size"
    try:
        return exact_number(value, zero=True)
    except ValueError as error:
        raise ValueError(f'{error}; for weights in proportion to tokens, use "size"') from None


def _plain_weight(weight: Fraction | Literal["size"]) -> int | float | str:
    return weight if isinstance(weight, str) else plain_fraction(weight)


Weight = Annotated[Fraction | Literal["size"], PlainValidator(_weight), PlainSerializer(_plain_weight)]
Part = Annotated[Fraction, PlainValidator(partial(exact_number, most=1)), PlainSerializer(plain_fraction)]
"""Above 0 and at most 1."""
Subset = Annotated[Fraction, PlainValidator(partial(exact_number, most=1)), PlainSerializer(str)]
"""The same, spelled "1/16"."""
Positive = Annotated[Fraction, PlainValidator(exact_number), PlainSerializer(plain_fraction)]
NotNegative = Annotated[Fraction, PlainValidator(partial(exact_number, zero=True)), PlainSerializer(plain_fraction)]
Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0, lt=2**63)]
"""Of tokens, rows or steps; "300B" is accepted."""
