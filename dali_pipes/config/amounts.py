"""Numbers as people write them: amounts of tokens ("10B", "250_000"), sizes in bytes ("50GB"), and exact fractions."""

import re
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from dali_pipes.config.validators import as_value_error, shown

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)([A-Za-z]?)")
_SIZE = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?) ?(?:([KMGT])(i?))?B?", re.IGNORECASE)
_FRACTION = re.compile(r"[+-]?(?:[0-9]+/[0-9]*[1-9][0-9]*|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)")
_LONGEST = 60
"""Characters of a number; longer ones take long to convert, and are mistakes."""
_LARGEST = 2**64


def parse_amount(text: str) -> Decimal | None:
    """The number that `text` means, with K, M, B or T for 10^3, 10^6, 10^9 or 10^12; None if it is not a number."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    return None if found is None or unit is None else Decimal(found[1]) * unit


@as_value_error
def parse_count(value: Any) -> Any:
    """A whole number, also from text such as "300B"; a value that is not text is returned unchanged."""
    if not isinstance(value, str):
        return value
    number = parse_amount(value) if len(value) <= _LONGEST else None
    if number is None or number != int(number):
        raise ValueError(f'expected a whole number, such as 250_000_000_000 or "250B"; found {shown(value)}')
    return int(number)


@as_value_error
def parse_bytes(value: Any) -> Any:
    """A number of bytes, also from text such as "50GB" or "64 GiB"; a value that is not text is returned unchanged."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip()) if len(value) <= _LONGEST else None
    if found is None:
        raise ValueError(f'expected a number of bytes, such as 50_000_000_000, "50GB" or "64GiB"; found {shown(value)}')
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return int(Decimal(found[1]) * (1024 if found[3] else 1000) ** power)


@as_value_error
def parse_fraction(value: Any) -> Fraction:
    """The exact number: of a float the decimal that it is written as, so 0.1 is 1/10; also from text such as "1/16"."""
    text = ""
    if isinstance(value, str):
        text = value.strip()
    elif isinstance(value, float):
        text = float.__repr__(value)
    elif isinstance(value, Real | Decimal) and not _is_unfit(value):
        text = str(value)
    if len(text) > _LONGEST or not _FRACTION.fullmatch(text) or abs(number := Fraction(text)) > _LARGEST:
        raise ValueError(f"expected a number, found {shown(value)}")
    return number


def _is_unfit(value: Any) -> bool:
    """Whether a value is a truth value, or has too many digits to become text."""
    if isinstance(value, bool) or not isinstance(value, Rational):
        return isinstance(value, bool)
    return max(int(value.numerator).bit_length(), int(value.denominator).bit_length()) > _LONGEST * 4


def plain_fraction(number: Fraction) -> int | float | str:
    """As a configuration spells it: a number that `parse_fraction` reads as the same, else text such as "1/3"."""
    if number.denominator == 1:
        return int(number)
    decimal = float(number)
    return decimal if Fraction(repr(decimal)) == number else str(number)
