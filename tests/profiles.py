"""How many random examples a test draws: fewer in `make test`, more in `make test-slow`."""

from hypothesis import settings

USUAL = 30
"""What `examples` counts by: a test that does not say how many examples it draws takes this many."""
PROFILES = {"quick": 12, "fast": 10, "thorough": 200}


def examples(count: int) -> int:
    """As many of a profile's examples as a test wants, by how many it takes beside the usual 30."""
    return max(1, count * settings().max_examples // USUAL)
