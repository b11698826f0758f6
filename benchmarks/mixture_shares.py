"""How exactly rows follow the weights of a mixture: our rule and those of other loaders.

    python benchmarks/mixture_shares.py
    python benchmarks/mixture_shares.py --sources 5,100 --rows 1e4,1e5

Rows off: the rows of a source so far minus its share of them, the worst over all sources. Every prefix is looked at.
Share error: half the sum over the sources of |share - weight|, in percent; the share of all rows that went to a source
they should not have gone to. Rank error: rows are dealt to 8 ranks in turn; how far the most uneven source is from an
even split, in standard deviations of a random one. See `benchmarks/README.md`. The last line is one JSON line.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from comparison.report import machine, wide_console
from mixture_rules import RULES, Int64Array, Rule, Weights
from rich.table import Table

from dali_pipes.schedule.mixture import STRATUM

RANKS = 8
_DIGITS = 9
_DOMINANT = Fraction(9, 10)


def equal(count: int) -> Weights:
    return [Fraction(1, count)] * count


def zipf(count: int) -> Weights:
    """Source i has weight 1 / (i + 1), with nine digits as a configuration would have it."""
    weights = [Fraction(round(10**_DIGITS / (number + 1)), 10**_DIGITS) for number in range(count)]
    return [weight / sum(weights) for weight in weights]


def dominant(count: int) -> Weights:
    """One source has nine tenths, and the others share the rest evenly."""
    return [_DOMINANT, *[(1 - _DOMINANT) / (count - 1)] * (count - 1)]


FAMILIES: dict[str, Callable[[int], Weights]] = {"equal": equal, "Zipf": zipf, "one 0.9": dominant}


class RowsOff(NamedTuple):
    """The worst over all sources."""

    every_row: float
    """After any number of rows."""
    stratum_ends: float
    """After any multiple of `STRATUM` rows."""


def rows_off(sources: Int64Array, weights: Weights) -> RowsOff:
    """How far the rows of a source are from its share at worst, over every prefix. Exact but for float64."""
    shares = np.array(weights, np.float64)
    order = np.argsort(sources, kind="stable")
    counts = np.bincount(sources, minlength=len(shares))
    firsts = np.cumsum(counts) - counts
    # A source falls below its share until just before its next row, and is highest above it just after one.
    own = sources[order]
    before = np.arange(len(sources)) - firsts[own] - shares[own] * order
    after = before + 1 - shares[own]
    at_end = counts - shares * len(sources)
    worst = max(float(np.abs(off).max()) for off in (before, after, at_end))
    strata = len(sources) // STRATUM
    whole = sources[: strata * STRATUM]
    cells = np.repeat(np.arange(strata), STRATUM) * len(shares) + whole
    by_stratum = np.bincount(cells, minlength=strata * len(shares)).reshape(strata, len(shares)).cumsum(axis=0)
    ends = np.arange(1, strata + 1)[:, None] * STRATUM
    return RowsOff(worst, float(np.abs(by_stratum - ends * shares).max(initial=0)))


def share_error(sources: Int64Array, weights: Weights) -> float:
    """Half the sum of |share - weight| over the sources, 0 to 1."""
    counts = np.bincount(sources, minlength=len(weights))
    return float(np.abs(counts / len(sources) - np.array(weights, np.float64)).sum() / 2)


def rank_error(sources: Int64Array, num_sources: int) -> float:
    """How uneven the most uneven source is over the ranks, in standard deviations of a random split."""
    cells = np.arange(len(sources)) % RANKS * num_sources + sources
    by_rank = np.bincount(cells, minlength=RANKS * num_sources).reshape(RANKS, num_sources)
    counts = by_rank.sum(axis=0)
    deviation = np.sqrt(counts * (1 - 1 / RANKS) / RANKS)
    used = counts > 0
    return float((np.abs(by_rank - counts / RANKS)[:, used] / deviation[used]).max())


def measure(rule: Rule, weights: Weights, prefixes: list[int], seed: int) -> dict[str, Any]:
    """All figures of one rule; `prefixes` rise, and the last one is all rows."""
    sources = rule.sources(weights, prefixes[-1], seed)
    off = rows_off(sources, weights)
    return {
        "rule": rule.name,
        "rows_off_every_row": off.every_row,
        "rows_off_stratum_ends": off.stratum_ends,
        "share_error": {str(rows): share_error(sources[:rows], weights) for rows in prefixes},
        "rank_error": rank_error(sources, len(weights)),
    }


def main(
    sources: Annotated[str, typer.Option(help="numbers of sources, separated by commas")] = "5,100,1000",
    rows: Annotated[
        str, typer.Option(help="numbers of rows after which share errors are measured, separated by commas")
    ] = ("1e4,1e6"),
    seed: Annotated[int, typer.Option(min=0)] = 1,
) -> None:
    """Run every rule, print a table and, as the last line, one line of JSON."""
    about, console = machine(), wide_console()
    prefixes = sorted(int(float(text)) for text in rows.split(","))
    entries = []
    for count in map(int, sources.split(",")):
        for family, weights_of in FAMILIES.items():
            of_case = [measure(rule, weights_of(count), prefixes, seed) for rule in RULES]
            ours = of_case[0]
            for entry in of_case:
                ratio = entry["rows_off_stratum_ends"] / ours["rows_off_stratum_ends"]
                entries.append({"sources": count, "weights": family, **entry, "stratum_ends_ratio": ratio})
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    for rule in RULES:
        console.print(f"{rule.name}: {rule.origin}", markup=False, highlight=False)
    console.print(_table(entries, prefixes))
    report = {"benchmark": "mixture_shares", "machine": about, "rows": prefixes, "seed": seed}
    print(json.dumps({**report, "origins": {rule.name: rule.origin for rule in RULES}, "entries": entries}))


def _table(entries: list[dict[str, Any]], prefixes: list[int]) -> Table:
    table = Table(title=f"{prefixes[-1]:,} rows: worst rows off, share error, error over {RANKS} ranks")
    for heading in ("sources", "weights", "rule"):
        table.add_column(heading)
    errors = [f"share error\n{count:,} rows, %" for count in prefixes]
    for heading in ("rows off,\nevery row", "rows off,\nevery 128", "ratio\nto ours", *errors, "ranks, sd"):
        table.add_column(heading, justify="right")
    for entry in entries:
        off = [f"{entry[name]:.2f}" for name in ("rows_off_every_row", "rows_off_stratum_ends")]
        shares = [f"{100 * error:.4f}" for error in entry["share_error"].values()]
        ratio = f"{entry['stratum_ends_ratio']:.2f}"
        case = [f"{entry['sources']:,}", entry["weights"], entry["rule"]]
        table.add_row(
            *case, *off, ratio, *shares, f"{entry['rank_error']:.1f}", end_section=entry["rule"] == RULES[-1].name
        )
    return table


if __name__ == "__main__":
    typer.run(main)
