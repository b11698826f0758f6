"""How many random examples a test draws: fewer in `make test`, more in `make test-slow`."""

from hypothesis import settings

QUICK = 30
"""Examples of a test that does not say how many, in `make test`."""
PROFILES = {"quick": QUICK, "fast": 10, "thorough": 200}


def examples(quick: int) -> int:
    """As many as a test wants in `make test`; in other profiles in the same proportion."""
    return max(1, quick * settings().max_examples // QUICK)
