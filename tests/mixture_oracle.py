"""The order of a mixture by plain loops over Python's integers and fractions: slow, and written apart from the code."""

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dali_pipes.operators import permute

Weights = Mapping[str, Fraction | int]
Tree = tuple["Tree", "Tree", int] | str
"""A source, or two halves and the share of the first in 2**64ths."""


def tree_of(weights: Weights) -> Tree:
    def cut(items: list[tuple[Fraction, str]]) -> Tree:
        if len(items) == 1:
            return items[0][1]
        total = sum((weight for weight, _ in items), Fraction(0))
        running, best = Fraction(0), (total, 0, Fraction(0))
        for first in range(1, len(items)):
            running += items[first - 1][0]
            best = min(best, (abs(total - 2 * running), first, running))
        _, first, left = best
        return cut(items[:first]), cut(items[first:]), int(left / total * 2**64)

    return cut(sorted((Fraction(weight), name) for name, weight in weights.items() if weight > 0))


def counts_of(tree: Tree, k: int) -> dict[str, int]:
    """Rows of each source among the first `k`."""
    if isinstance(tree, str):
        return {tree: k}
    left = (k * tree[2] + 2**63) // 2**64
    return {**counts_of(tree[0], left), **counts_of(tree[1], k - left)}


def row_of(tree: Tree, k: int) -> tuple[str, int]:
    """Row `k` is the one by which the first k + 1 differ from the first k."""
    before, after = counts_of(tree, k), counts_of(tree, k + 1)
    [name] = [name for name in before if after[name] != before[name]]
    assert after[name] == before[name] + 1
    return name, before[name]


def permuted(place: int, seed: int) -> int:
    """The place whose row `place` takes, in the same 128."""
    stratum, inside = divmod(place, 128)
    digest = hashlib.sha256(f"dali_pipes mixture {seed}".encode()).digest()
    z = (int.from_bytes(digest[:8], "little") + (stratum + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % 2**64
    return stratum * 128 + int(permute(np.array([inside]), 128, z ^ z // 2**31)[0])


class Walked(NamedTuple):
    rows: list[tuple[str, int]]
    left: list[tuple[str, int, int]]
    """Sources that left: name, place, rows used."""
    end: int | None


def walk(
    names: Sequence[str],
    stages: Sequence[tuple[int, Weights]],
    seed: int,
    caps: Mapping[str, int],
    on_exhausted: str,
    strata: int,
) -> Walked:
    """The first `strata` strata, one after the other."""
    walked = Walked([], [], None)
    used = dict.fromkeys(names, 0)
    gone: set[str] = set()
    given: Weights | None = None
    tree: Tree = ""
    base: dict[str, int] = {}
    stage_start = 0
    for start in range(0, strata * 128, 128):
        begun = [weights for place, weights in stages if place <= start]
        fresh = begun[-1] is not given
        given = begun[-1]
        while True:
            if fresh:
                leaving = [n for n in names if given[n] and n not in gone and n in caps and used[n] >= caps[n]]
            else:
                after = counts_of(tree, start + 128 - stage_start)
                leaving = [n for n, rows in after.items() if n in caps and base[n] + rows > caps[n]]
            for name in leaving:
                gone.add(name)
                walked.left.append((name, start, used[name]))
            if leaving and on_exhausted == "stop":
                return walked._replace(end=start)
            if fresh or leaving:
                rest = {n: given[n] for n in names if given[n] and n not in gone}
                if not rest:
                    return walked._replace(end=start)
                again = not fresh  # a new stage begins here, so what is at its cap leaves
                tree, base, stage_start, fresh = tree_of(rest), dict(used), start, again
                continue
            break
        for place in range(start, start + 128):
            name, count = row_of(tree, permuted(place, seed) - stage_start)
            walked.rows.append((name, base[name] + count))
        for name, rows in counts_of(tree, start + 128 - stage_start).items():
            used[name] = base[name] + rows
    return walked
