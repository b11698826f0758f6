"""The order of a mixture: which source each place takes its row from, and how many-th row of that source it is.

    place          0   1   2  ...  127 | 128  ...    a stratum is 128 places
    k              5  90  17  ...    3 | 201  ...    the places of a stratum, permuted with its own key
    source, count  row k of a tree over the sources

    all: k rows ─┬─ a .2
                 └─ .8 ─┬─ b .3
                        └─ c .5

Of its first k rows, a node gives (k p + 2^63) >> 64 to its first half, with p = floor(2^64 first / (first + second)) of
the weights, and the others to its second half. What k comes to at a leaf is the count of that source's rows so far.

The sources of a stage with a weight above 0 stand sorted by weight, lowest first, ties by name. A node is cut where the
weights of its two halves are nearest; of two equally near cuts, the one with fewer sources in the first half wins.

No source is two rows off its share, after any whole number of strata of a stage: a cut adds at most half a row to what
the sources below it are off, and what a node is off reaches each half in proportion to its weight. A half of several
sources has at most 2/3 of its node's weight, because otherwise the next cut would be nearer. So such a half is off by
at most 1/2 + 2/3 of what its node is off, hence never by more than 1.5, and a source by less than 2. Random weights
have shown up to 1.3 rows. (The shares' 64 bits add less than 10^-4 rows a cut below 10^15 places.)

Everything here is integer arithmetic on weights that are fractions. No floats take part, so the order is the same on
every machine. It is fixed under MIXTURE_ORDER_NAME, which saved states contain.
"""

from __future__ import annotations

import hashlib
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, compress, pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import permute_each, splitmix64

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Weights = Mapping[str, Fraction | int]

MIXTURE_ORDER_NAME = "mixture128-v1"
STRATUM = 128
MOST_PLACES = 2**62
"""Places from here on are in no order; a multiple of a stratum."""

_HALF = 2**63
_LOW = np.array(2**32 - 1, np.uint64)
_SHIFT = np.array(32, np.uint64)
_HALF_WORD = np.array(_HALF, np.uint64)


class Exhausted(NamedTuple):
    """A source that left because its next stratum would need more rows than its cap."""

    name: str
    place: int
    rows_used: int
    cap: int


class MixtureOrder:
    """The interleave of named sources: `names[i]` is source i. Holds a tree for each stage, and nothing that grows.

    stages: (place, weights of all sources), in rising places, the first at 0. A stage begins at the next start of a
    stratum at or after its place; of two that begin at the same place, the later counts.
    settled: places before this have been used, and no source leaves there: their stages say which had left.
    caps: most rows of a source. A source leaves at the start of the first stratum that would need more than its cap.
    on_exhausted: "drop": the others go on with their weights; "stop": the order ends there.

    stages: what is in effect, (place, weights), with the sources that left at weight 0.
    exhausted: the sources that left, in the order of their places.
    end: places in the order, a multiple of 128; None: it does not end.
    """

    def __init__(
        self,
        names: Sequence[str],
        stages: Sequence[tuple[int, Weights]],
        *,
        seed: int,
        caps: Mapping[str, int] | None = None,
        on_exhausted: Literal["drop", "stop"] = "drop",
        settled: int = 0,
    ) -> None:
        self.names, self.settled = tuple(names), settled
        self.seed = seed
        self.caps = dict(caps or {})
        self.on_exhausted = on_exhausted
        self.given_stages = _checked(self.names, stages, self.caps, on_exhausted)
        self.stages: list[tuple[int, dict[str, Fraction]]] = []
        self.exhausted: list[Exhausted] = []
        self.end: int | None = None
        self._trees: list[_Tree] = []
        self._bases: list[list[int]] = []
        self._lay_out()
        self._pack()
        digest = hashlib.sha256(f"dali_pipes mixture {seed}".encode()).digest()
        self._key = np.array(int.from_bytes(digest[:8], "little"), np.uint64)

    def rows(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source number, and number of the row among all rows of that source, counted from 0, for each place (R,)."""
        if not len(places):
            return places.copy(), places.copy()
        end = MOST_PLACES if self.end is None else self.end
        first, last = int(places.min()), int(places.max())
        if first < 0 or last >= end:
            wrong = (places < 0) | (places >= end)
            raise ValueError(f"place {places[np.argmax(wrong)]:,} is outside the mixture's places 0 to {end:,}")
        stages = np.searchsorted(self._starts, [first, last], side="right") - 1  # where all are of one stage, (1,)
        stages = stages[:1] if stages[0] == stages[1] else np.searchsorted(self._starts, places, side="right") - 1
        k = (self._permuted(places) - self._starts[stages]).view(np.uint64)
        node = np.full(len(places), self._roots[stages])
        for _ in range(self._depths[stages].max()):
            share = self._shares.take(node)
            left, low = _left_rows(k, share)
            # The k-th row is the left half's if the first k + 1 rows give it one more than the first k.
            goes_left = low > ~share
            k = np.where(goes_left, left, k - left)
            node = self._halves.take((node << 1) + goes_left)
        sources = self._sources.take(node)
        return sources, k.view(np.int64) + self._base_array.take(sources + stages * len(self.names))

    def _permuted(self, places: Int64Array) -> Int64Array:
        """Each place's place after the permutation of its stratum."""
        strata = places >> 7
        first_ones = np.flatnonzero(np.diff(strata, prepend=-1))
        counts = np.diff(first_ones, append=len(places))
        keys = splitmix64(self._key, (strata[first_ones] + 1).view(np.uint64))
        inside = permute_each(places & (STRATUM - 1), counts, np.full(len(keys), STRATUM), keys)
        return inside | strata << 7

    def counts_before(self, place: int) -> Int64Array:
        """Rows of each source (S,) in the places before `place`, which may be the order's end."""
        end = MOST_PLACES if self.end is None else self.end
        if not 0 <= place <= end:
            raise ValueError(f"place {place:,} is outside the mixture's places 0 to {end:,}")
        number = bisect_right(self.stages, place, key=lambda stage: stage[0]) - 1
        counts = np.array(self._bases[max(number, 0)], np.int64)
        if place == 0:
            return counts
        whole = place - place % STRATUM
        tree = self._trees[number]
        counts[tree.leaves] += tree.counts(whole - self.stages[number][0])
        if whole < place:
            counts += np.bincount(self.rows(np.arange(whole, place))[0], minlength=len(self.names))
        return counts

    def place_of(self, source: int, count: int) -> int | None:
        """The place of a source's row, by its number among all of that source; None if no place takes that row."""
        number = bisect_right(self._bases, count, key=lambda base: base[source]) - 1
        if not 0 <= number < len(self._trees):
            return None
        # The source's rows before this stage are at most `count`, and those before the next one are more.
        start, tree, wanted = self.stages[number][0], self._trees[number], count - self._bases[number][source]
        strata = range((MOST_PLACES - start) // STRATUM)
        after = bisect_right(strata, wanted, key=lambda stratum: tree.count_of(source, stratum * STRATUM))
        places = np.arange(STRATUM) + (start + (after - 1) * STRATUM)
        sources, counts = self.rows(places)
        found = places[(sources == source) & (counts == count)]  # none, if the weight is too small for a row
        return int(found[0]) if len(found) else None

    def weights_at(self, place: int) -> Mapping[str, Fraction]:
        """The weights in effect at a place, or of the last stage where the order has ended."""
        return self.stages[max(bisect_right(self.stages, place, key=lambda stage: stage[0]) - 1, 0)][1]

    def places_for(self, source: int, rows: int) -> int | None:
        """The fewest places, from the first on, in which a source has `rows` rows; None if it never has that many.

        They are not always its first ones: those of a stratum are permuted.
        """
        if rows == 0:
            return 0
        last = self.place_of(source, rows - 1)
        if last is None:
            return None
        start = last - last % STRATUM
        missing = rows - int(self.counts_before(start)[source])
        sources, _ = self.rows(np.arange(start, start + STRATUM))
        return start + int(np.flatnonzero(sources == source)[missing - 1]) + 1

    def with_stage(self, place: int, weights: Weights, *, keep_later: bool = False) -> MixtureOrder:
        """This order up to the next start of a stratum at or after `place`, and other weights from there on.

        Sources without a weight get 0: former ones of a resumed run. The given stages that begin there or later are
        dropped; `keep_later` keeps those that begin later.
        """
        start = _stratum_start(place)
        before = [stage for stage in self.given_stages if stage[0] < start]
        later = [stage for stage in self.given_stages if stage[0] > start] if keep_later else []
        return MixtureOrder(
            self.names,
            [*before, (start, {**dict.fromkeys(self.names, 0), **weights}), *later],
            seed=self.seed,
            caps=self.caps,
            on_exhausted=self.on_exhausted,
            settled=self.settled,
        )

    def resumed(self, names: Sequence[str], stages: Sequence[tuple[int, Weights]], settled: int) -> MixtureOrder:
        """With the same seed and caps, the order of a run that has used the places before `settled` in these stages."""
        return MixtureOrder(
            names, stages, seed=self.seed, caps=self.caps, on_exhausted=self.on_exhausted, settled=settled
        )

    def _lay_out(self) -> None:
        """Turn the given stages into those in effect, each with its tree and the rows of each source before it."""
        base = [0] * len(self.names)
        caps = {source: self.caps[name] for source, name in enumerate(self.names) if name in self.caps}
        left: set[int] = set()

        def leave(sources: Sequence[int], place: int) -> None:
            left.update(sources)
            for source in sources:
                self.exhausted.append(Exhausted(self.names[source], place, base[source], caps[source]))
            if sources and self.on_exhausted == "stop":
                self.end = place

        nothing = Fraction(0)
        stops = [start for start, _ in self.given_stages[1:]] + [MOST_PLACES]
        for (start, given), stop in zip(self.given_stages, stops, strict=True):
            order, weights = _sorted_whole(given, self.names)
            while start < stop and self.end is None:
                asked = [source for source in order if source not in left]
                if start >= self.settled:
                    leave(
                        [source for source in sorted(asked) if source in caps and base[source] >= caps[source]], start
                    )
                    asked = [source for source in asked if source not in left]
                if not asked:
                    self.end = start
                if self.end is not None:
                    break
                tree = _Tree(asked, weights)
                limits = [caps[source] - base[source] if source in caps else MOST_PLACES for source in tree.leaves]
                most = (stop - start) // STRATUM
                counts = cache(tree.counts)  # the search ends with those that are needed here
                strata = tree.strata_within(limits, most, counts)
                strata = max(strata, min(most, -((start - self.settled) // STRATUM)))
                if strata:
                    self.stages.append((start, {**given, **{self.names[source]: nothing for source in left}}))
                    self._trees.append(tree)
                    self._bases.append(list(base))
                    for source, rows in zip(tree.leaves, counts(strata * STRATUM), strict=True):
                        base[source] += rows
                    start += strata * STRATUM
                if start < stop:
                    exceeds = map(operator.gt, counts((strata + 1) * STRATUM), limits)
                    leave(sorted(compress(tree.leaves, exceeds)), start)
        self._bases.append(base)

    def _pack(self) -> None:
        """Join the trees' nodes, and the right and left halves of each. A leaf's right half is itself: rows stay there.

        Its share is 0, as that of another node may be, too.
        """
        self._starts = np.array([start for start, _ in self.stages], np.int64)
        firsts = np.cumsum([0, *(len(tree.shares) for tree in self._trees)])
        self._roots = firsts[:-1].astype(np.int64)
        self._depths = np.array([tree.depth for tree in self._trees], np.int64)
        halves, shares, sources = [], [], []
        for tree, first in zip(self._trees, firsts[:-1], strict=True):
            halves.append(np.stack((tree.rights, tree.lefts), axis=1).ravel() + first)
            shares.append(np.array(tree.shares, np.uint64))
            sources.append(np.array(tree.sources, np.int64))
        none = np.zeros(0, np.int64)
        self._halves = np.concatenate([none, *halves])
        self._shares = np.concatenate([np.zeros(0, np.uint64), *shares])
        self._sources = np.concatenate([none, *sources])
        self._base_array = np.array(self._bases, np.int64)


class _Tree:
    """The binary tree of one stage: node 0 is the root, every node stands before its halves, and all leaves are last.

    order:   its sources, lowest weight first. weights: of each source, in proportion; integers
    lefts, rights: the halves of a node; of a leaf itself
    shares:  of the left half, in 2**64ths; 0 for a leaf
    sources: of a leaf; -1 for another node. leaves: those of the leaves alone
    depth:   cuts from the root to the farthest leaf
    """

    def __init__(self, order: Sequence[int], weights: Mapping[int, int]) -> None:
        sums = [0, *accumulate(weights[source] for source in order)]
        size = 2 * len(order) - 1
        lefts, rights, shares, parents = list(range(size)), list(range(size)), [0] * size, [-1] * size
        self.weights, self.weight, self._first_leaf = weights, sums[-1], len(order) - 1
        self.leaves = list(order[:1]) if len(order) == 1 else []
        inner, unfinished = 1, [(0, 0, len(order), 1)] if len(order) > 1 else []
        self.depth = 0
        while unfinished:
            node, first, end, depth = unfinished.pop()
            self.depth = max(self.depth, depth)
            cut = _nearest_cut(sums, first, end)
            shares[node] = ((sums[cut] - sums[first]) << 64) // (sums[end] - sums[first])
            for half, begin, stop in ((lefts, first, cut), (rights, cut, end)):
                if stop - begin == 1:
                    half[node] = self._first_leaf + len(self.leaves)
                    self.leaves.append(order[begin])
                else:
                    half[node] = inner
                    unfinished.append((inner, begin, stop, depth + 1))
                    inner += 1
                parents[half[node]] = node
        self.lefts, self.rights, self.shares, self._parents = lefts, rights, shares, parents
        self.sources = [-1] * self._first_leaf + self.leaves

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows each source of `leaves` gets."""
        of_node = [rows] * len(self.shares)
        inner = slice(self._first_leaf)
        for here, share, left, right in zip(of_node, self.shares[inner], self.lefts, self.rights, strict=False):
            of_node[left] = first = (here * share + _HALF) >> 64
            of_node[right] = here - first
        return of_node[self._first_leaf :]

    def count_of(self, source: int, rows: int) -> int:
        """How many of the first `rows` rows a source gets."""
        if source not in self.leaves:
            return 0
        path = []
        node = self._first_leaf + self.leaves.index(source)
        while node:
            path.append(node)
            node = self._parents[node]
        for child in reversed(path):
            left = (rows * self.shares[node] + _HALF) >> 64
            rows = left if child == self.lefts[node] else rows - left
            node = child
        return rows

    def strata_within(self, limits: Sequence[int], most: int, counts: Callable[[int], list[int]]) -> int:
        """The most strata, up to `most`, in which no source of `leaves` takes more than its limit, by `counts`."""

        def fit(strata: int) -> bool:
            return all(map(operator.le, counts(strata * STRATUM), limits))

        # The source that runs out first, by its share, says about where; widen from there until both sides are known.
        shares = (self.weights[source] for source in self.leaves)
        about = min(limit * self.weight // (share * STRATUM) for limit, share in zip(limits, shares, strict=True))
        fits, width = max(min(about, most), 0), 1
        while fits > 0 and not fit(fits):
            fits, width = max(fits - width, 0), width * 2
        too_many, width = fits + 1, 1
        while too_many <= most and fit(too_many):
            fits, too_many, width = too_many, too_many + width, width * 2
        too_many = min(too_many, most + 1)
        return fits + bisect_left(range(fits + 1, too_many), True, key=lambda strata: not fit(strata))


def _nearest_cut(sums: list[int], first: int, end: int) -> int:
    """Where to cut the sources first to end - 1, given the running sums of their weights."""
    both = sums[first] + sums[end]
    cut = bisect_left(sums, (both + 1) // 2, first + 1, end - 1)
    if cut > first + 1 and both - 2 * sums[cut - 1] <= 2 * sums[cut] - both:
        return cut - 1
    return cut


def _left_rows(k: UInt64Array, share: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    """High and low word of k share + 2^63, by halves of 32 bits: rows of the left half, and what is left over."""
    share_high, share_low, low = share >> _SHIFT, share & _LOW, k * share
    low ^= _HALF_WORD
    if k.max() <= _LOW:  # the first 2**32 rows of a stage: fewer operations. No sum here reaches 2**64.
        share_low *= k
        share_low >>= _SHIFT
        share_high *= k
        share_high += share_low
        share_high += _HALF_WORD >> _SHIFT
        share_high >>= _SHIFT
        return share_high, low
    k_high, k_low = k >> _SHIFT, k & _LOW
    middle = k_high * share_low + ((k_low * share_low) >> _SHIFT)
    other = k_low * share_high + (middle & _LOW) + (_HALF_WORD >> _SHIFT)
    return k_high * share_high + (middle >> _SHIFT) + (other >> _SHIFT), low


def _sorted_whole(weights: Weights, names: Sequence[str]) -> tuple[list[int], dict[int, int]]:
    """The numbers of the sources with a weight, lowest first, ties by name; and their weights, scaled to integers."""
    positive = {source: Fraction(weights[name]) for source, name in enumerate(names) if weights[name]}
    scale = math.lcm(*(weight.denominator for weight in positive.values()))
    whole = {source: weight.numerator * (scale // weight.denominator) for source, weight in positive.items()}
    return sorted(whole, key=lambda source: (whole[source], names[source])), whole


def _stratum_start(place: int) -> int:
    return -(-place // STRATUM) * STRATUM


def _checked(
    names: tuple[str, ...], stages: Sequence[tuple[int, Weights]], caps: Mapping[str, int], on_exhausted: str
) -> list[tuple[int, dict[str, Fraction]]]:
    """The stages by the places where they begin, with all weights as fractions."""
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a mixture needs sources of different names, not {list(names)}")
    if on_exhausted not in ("drop", "stop"):
        raise ValueError(f"on_exhausted={on_exhausted!r} is neither 'drop' nor 'stop'")
    unknown = set(caps) - set(names)
    if unknown:
        raise ValueError(f"caps name {sorted(unknown)}, which the mixture's sources {list(names)} do not include")
    negative = {name: cap for name, cap in caps.items() if cap < 0}
    if negative:
        raise ValueError(f"caps are numbers of rows, 0 or more, not {negative}")
    places = [place for place, _ in stages]
    if not places or places[0] != 0 or any(later <= earlier for earlier, later in pairwise(places)):
        raise ValueError(f"stages begin at rising places, the first at 0, not at {places}")
    checked: list[tuple[int, dict[str, Fraction]]] = []
    for place, weights in stages:
        where = f"the stage at place {place:,}"
        if set(weights) != set(names):
            missing, extra = sorted(set(names) - set(weights)), sorted(set(weights) - set(names))
            raise ValueError(f"{where} needs a weight for each source; it lacks {missing} and has others, {extra}")
        for name, weight in weights.items():
            if not isinstance(weight, int | Fraction):
                raise TypeError(
                    f"{where} gives source {name!r} the weight {weight!r}; weights are fractions or integers"
                )
            if weight < 0:
                raise ValueError(f"{where} gives source {name!r} the weight {weight}, which is below 0")
        if not any(weights.values()):
            raise ValueError(f"{where} gives every source the weight 0")
        start = _stratum_start(place)
        if start >= MOST_PLACES:
            raise ValueError(f"{where} is beyond the last place of an order, {MOST_PLACES - 1:,}")
        if checked and checked[-1][0] == start:
            checked.pop()
        checked.append((start, {name: Fraction(weights[name]) for name in names}))
    return checked
