"""Whole numbers written with a unit, as people write numbers of tokens: "10B", "1.5M", "250_000"."""

import re
from decimal import Decimal

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)([A-Za-z]?)")


def parse_amount(text: str) -> Decimal | None:
    """The number that `text` means, with K, M, B or T for 10^3, 10^6, 10^9 or 10^12; None if it is not a number."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    return None if found is None or unit is None else Decimal(found[1]) * unit
