"""Which entries of a cache go first: those whose next use is furthest away, by the formulas of the jobs that live.

    wanted by nobody that lives     c  (oldest first)                            goes first
    next use unknown                a  (oldest first: least recently used)
    next use known                  e in 9 million tokens, b in 2, d now         goes last, the furthest first

The furthest next use is the best choice that there is (L. Belady, "A study of replacement algorithms for a
virtual-storage computer", 1966). An entry is only replaced by one that is needed sooner: with less room than one window
needs, the entries that are there stay, instead of all replacing one another.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

Order: TypeAlias = dict[str, Any]
"""What a job publishes of one corpus, as JSON; `corpus` is the key of its content."""

NextUses: TypeAlias = Callable[[Order, Int64Array, Int64Array], Float64Array | None]
"""The tokens that a job delivers until it needs entries again, which hold ids begins[e] to ends[e] - 1 of a corpus.

Infinity: never. None: unknown, as for a job that does not use an order by blocks.
"""


class Entry(NamedTuple):
    """One file of the cache: ids `begin` to `end` - 1 of a corpus. used_at: in nanoseconds."""

    name: str
    corpus: str
    begin: int
    end: int
    num_bytes: int = 0
    used_at: int = 0


def next_uses(entries: Sequence[Entry], orders: Sequence[Order], formula: NextUses) -> Float64Array:
    """The smallest next use over the orders that live, (E,): infinity if nobody needs it, NaN if it is unknown."""
    found = np.full(len(entries), np.inf)
    corpora = np.array([entry.corpus for entry in entries], np.str_)
    begins = np.array([entry.begin for entry in entries], np.int64)
    ends = np.array([entry.end for entry in entries], np.int64)
    for order in orders:
        here = np.flatnonzero(corpora == order["corpus"])
        if len(here):
            uses = formula(order, begins[here], ends[here])
            found[here] = np.nan if uses is None else np.minimum(found[here], uses)  # NaN stays
    return found


def choose_victims(
    entries: Sequence[Entry], uses: Float64Array, needed_bytes: int, new_use: float, spare_bytes: int = 0
) -> list[Entry] | None:
    """Entries to remove so that `needed_bytes` are free, for one that is needed in `new_use`; None if that is too much.

    spare_bytes: most bytes to remove beyond those, of entries that may go, so that the next calls need not look
    """
    used_at = np.array([entry.used_at for entry in entries], np.int64)
    rank = np.where(np.isposinf(uses), 0, np.where(np.isnan(uses), 1, 2))
    furthest = np.where(rank == 2, -uses, 0.0)
    limit = 0.0 if np.isnan(new_use) else new_use
    chosen, freed = [], 0
    for at in np.lexsort((used_at, furthest, rank)).tolist():
        is_enough = freed >= needed_bytes and freed + entries[at].num_bytes > needed_bytes + spare_bytes
        if is_enough or (rank[at] == 2 and uses[at] <= limit):
            break
        chosen.append(entries[at])
        freed += entries[at].num_bytes
    return chosen if freed >= needed_bytes else None
