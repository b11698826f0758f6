"""How evenly the ranks of a step share its work: without balancing, with `balance = "cost"`, and in two other ways.

    python benchmarks/balance.py
    python benchmarks/balance.py --ranks 48 --batch-size 2
    python benchmarks/balance.py --corpus long-context --rows pack --seq-len 131072 --batch-size 1 --documents 1048576 \
        --window 1048576

131,072 documents with log-normal lengths, in rows of at most 8,192 tokens, one document each (`pad`) or packed
(`pack`); of "long-context", one document in 100 has 32,000 to 131,072 tokens. A document of L tokens costs a L + b L^2,
as in a training step of a decoder (see `LoaderConfig.cost_weights`). Of each step: the cost of the rank that has most,
by the mean over the ranks. The figure is the sum of the one over all steps by the sum of the other, so 1.04 is 4 % of
the time lost; then the worst step, and the share of steps up to 1.05.

    none        rows in random order, row i to rank i % ranks
    dali_pipes  the same rows with `balance = "cost"`, as a loader plans them
    sorted      the same rows in the best order for just this number of ranks: all rows of the epoch by cost, dealt to
                the ranks back and forth
    even rows   only `pack`: documents packed into as many rows, each one, longest first, into the row that costs least
                and has room, so that sums of a L + b L^2 are as even as they can be; rows in random order
    even, sorted  those rows, sorted
    verl        rows in random order; the rows of each step are gathered and divided into equal numbers of rows by the
                largest differencing method (N. Karmarkar and R. Karp, "The differencing method of set partitioning",
                1982), as verl's `seqlen_balancing` does: re-implemented, with the same costs
    WLB-LLM     documents in random order; those of each step are dealt, longest first, to the rank with the least work
                that has room, in sequences of at most 1.25 times the average; outliers wait in queues until each rank
                gets one (Z. Wang et al., "WLB-LLM", OSDI 2025): re-implemented from the paper. Sequences then have
                different lengths, and documents are delayed

Time: documents planned per second of CPU time by a loader without and with balance, in turns, and milliseconds a step
of the others, whose step also waits for the lengths or rows of all ranks, which is not measured. Every method's tokens
are counted. The last line is one JSON line.
"""

import heapq
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from comparison.report import machine, wide_console
from rich.console import Console
from rich.table import Table

from dali_pipes.rows.cost_balance import CostBalance
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.step_costs import EVEN

Int64Array = npt.NDArray[np.int64]
Mode = Literal["pad", "pack"]
MODES: tuple[Mode, ...] = ("pad", "pack")

CORPORA = {"web-like": (400.0, 1.2), "code-like": (250.0, 1.7)}
"""Median tokens of a document, and sigma of the logarithm."""
LONG_CONTEXT = "long-context"
_LONG_PART, _LONG_TOKENS = 0.01, (32_000, 131_072)
OURS = "dali_pipes"
_ROOM = 1.25
"""Longest sequence of WLB-LLM, by the average."""
_OUTLIERS = (2, 4)
"""Documents from a half and from a quarter of a row on wait in a queue."""


class Work(NamedTuple):
    """What the ranks of a method's steps do: cost and tokens, (steps, ranks) each."""

    costs: Int64Array
    tokens: Int64Array
    left: int = 0
    """Tokens in no whole step."""


def main(
    documents: Annotated[int, typer.Option(min=2048, help="documents of each corpus")] = 131_072,
    ranks: Annotated[int, typer.Option(min=2)] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a rank")] = 8,
    seq_len: Annotated[int, typer.Option(min=64)] = 8192,
    window: Annotated[int, typer.Option(min=1, help="window_documents")] = 65_536,
    corpus: Annotated[str | None, typer.Option(help=f"one of the corpora, or {LONG_CONTEXT}")] = None,
    rows: Annotated[str, typer.Option(help="kinds of rows")] = "pad,pack",
    hidden_size: Annotated[int, typer.Option(min=1)] = 2048,
    num_layers: Annotated[int, typer.Option(min=1)] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of timing")] = 5,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder for the JSON and the PNG")] = Path("runs/balance"),
) -> None:
    """Measure, print a table, write JSON and PNG; the last line is one JSON line. Exit code 1 if tokens are lost."""
    if corpus not in (None, LONG_CONTEXT, *CORPORA):
        raise typer.BadParameter(f"--corpus {corpus}: expected one of {', '.join([*CORPORA, LONG_CONTEXT])}")
    about, console = machine(), wide_console()
    balance = CostBalance(12 * num_layers * hidden_size, num_layers)
    entries, failed, shown = [], [], dict[tuple[str, str, str], Any]()
    for name in CORPORA if corpus is None else (corpus,):
        lengths = lengths_of(name, documents, seed)
        for mode in MODES:
            if mode not in rows.split(","):
                continue
            steps = _methods(lengths, mode, seq_len, balance, (ranks, batch_size), window, seed)
            methods: dict[str, Any] = {}
            for method, (work, ms_a_step) in steps.items():
                found = int(work.tokens.sum()) + work.left
                if found != lengths.sum():
                    failed.append(f"{name}, {mode}, {method}: {found:,} of {lengths.sum():,} tokens")
                methods[method] = {**figures(work.costs), "ms_a_step": ms_a_step, "steps": len(work.costs)}
                shown[name, mode, method] = work.costs.max(axis=1) / work.costs.mean(axis=1)
            speed = _speed(lengths, mode, seq_len, balance, window, rounds)
            entries.append({"corpus": name, "rows": mode, "methods": methods, "speed": speed})
            console.print(_table(entries[-1]))
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": "balance", "machine": about, "documents": documents, "ranks": ranks, "seq_len": seq_len}
    report |= {
        "batch_size": batch_size,
        "window_documents": window,
        "cost": [balance.a, balance.b],
        "seed": seed,
        "rounds": rounds,
    }
    report |= {"entries": entries, "failed": failed}
    (out / "balance.json").write_text(json.dumps(report, indent=1) + "\n")
    _save_chart(shown, out / "balance.png", console)
    print(json.dumps({"benchmark": "balance", "date": about["date"], "entries": entries, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def lengths_of(corpus: str, documents: int, seed: int) -> Int64Array:
    """Tokens of each document."""
    draw = np.random.default_rng(seed)
    median, sigma = CORPORA["web-like" if corpus == LONG_CONTEXT else corpus]
    drawn = draw.lognormal(np.log(median), sigma, documents)
    if corpus == LONG_CONTEXT:
        is_long = draw.random(documents) < _LONG_PART
        drawn[is_long] = draw.uniform(*_LONG_TOKENS, np.count_nonzero(is_long))
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def figures(costs: Int64Array) -> dict[str, float]:
    """Of costs (steps, ranks): all steps together, the worst one, and the share of those up to `EVEN`."""
    most, mean = costs.max(axis=1).astype(float), costs.mean(axis=1)
    ratios = most / mean
    return {
        "ratio": float(most.sum() / mean.sum()),
        "worst": float(ratios.max()),
        "even_steps": float(np.mean(ratios <= EVEN)),
    }


def _methods(
    lengths: Int64Array,
    mode: Mode,
    seq_len: int,
    balance: CostBalance,
    shape: tuple[int, int],
    window: int,
    seed: int,
) -> dict[str, tuple[Work, float | None]]:
    """Each method's work, and milliseconds of its own a step."""
    plain, balanced = (_loader(lengths, mode, seq_len, option, window, seed) for option in (None, balance))
    costs, tokens = _rows_of(plain, balance)
    found: dict[str, tuple[Work, float | None]] = {"none": (_in_turn(costs, tokens, *shape), None)}
    found[OURS] = (_in_turn(*_rows_of(balanced, balance), *shape), None)
    found["sorted"] = (_in_turn(*_sorted(costs, tokens, *shape), *shape), None)
    begin = time.perf_counter()
    work = by_differencing(costs, tokens, *shape)
    found["verl"] = (work, 1e3 * (time.perf_counter() - begin) / len(work.costs))
    pieces = plain.plan(0, np.arange(plain.count(0))).pieces
    assert pieces is not None
    begin = time.perf_counter()
    outliers = [seq_len // part for part in _OUTLIERS]
    work = by_wlb_llm(pieces.lengths, int(tokens.sum() / len(tokens)) * shape[1], shape[0], balance, outliers)
    found["WLB-LLM"] = (work, 1e3 * (time.perf_counter() - begin) / len(work.costs))
    if mode == "pack":
        windows = -(-len(lengths) // window)
        firsts = np.linspace(0, len(costs), windows + 1).astype(int)
        parts = [
            even_rows(pieces.lengths[pieces.row_offsets[low] : pieces.row_offsets[high]], high - low, seq_len, balance)
            for low, high in itertools.pairwise(firsts.tolist())
        ]
        draw = np.random.default_rng(seed)
        orders = [draw.permutation(len(part[0])) for part in parts]
        costs, tokens = (
            np.concatenate([part[column][order] for part, order in zip(parts, orders, strict=True)])
            for column in (0, 1)
        )
        found["even rows"] = (_in_turn(costs, tokens, *shape), None)
        found["even, sorted"] = (_in_turn(*_sorted(costs, tokens, *shape), *shape), None)
    return found


def _sorted(costs: Int64Array, tokens: Int64Array, ranks: int, batch_size: int) -> tuple[Int64Array, Int64Array]:
    """Rows by falling cost, every other row of a step in reverse; the last ones, which fill no step, as they are."""
    order = np.argsort(-costs)
    whole = len(order) // (ranks * batch_size) * ranks * batch_size
    dealt = order[:whole].reshape(-1, batch_size, ranks)  # a view
    dealt[:, 1::2] = dealt[:, 1::2, ::-1].copy()
    return costs[order], tokens[order]


def even_rows(lengths: Int64Array, num_rows: int, seq_len: int, balance: CostBalance) -> tuple[Int64Array, Int64Array]:
    """Cost and tokens of `num_rows` rows, or more if a document finds no room, that cost about the same."""
    costs, tokens = [0] * num_rows, [0] * num_rows
    heap = [(0, row) for row in range(num_rows)]  # the cheapest first
    parked: list[tuple[int, int]] = []  # rows without room for the next documents, those with most room first
    for length in np.sort(lengths)[::-1].tolist():
        while parked and -parked[0][0] >= length:
            _, row = heapq.heappop(parked)
            heapq.heappush(heap, (costs[row], row))
        while heap and tokens[heap[0][1]] + length > seq_len:
            _, row = heapq.heappop(heap)
            heapq.heappush(parked, (tokens[row] - seq_len, row))
        if not heap:
            heap.append((0, len(costs)))
            costs.append(0)
            tokens.append(0)
        row = heap[0][1]
        costs[row] += length * (balance.a + balance.b * length)
        tokens[row] += length
        heapq.heapreplace(heap, (costs[row], row))
    return np.array(costs), np.array(tokens)


def _loader(
    lengths: Int64Array, mode: Mode, seq_len: int, balance: CostBalance | None, window: int, seed: int
) -> DocumentRows:
    return DocumentRows(
        np.concatenate(([0], np.cumsum(lengths))),
        seq_len,
        mode=mode,
        long_documents="split",
        window_documents=window,
        shuffle=True,
        seed=seed,
        balance=balance,
    )


def _rows_of(rows: DocumentRows, balance: CostBalance) -> tuple[Int64Array, Int64Array]:
    """Cost and tokens of each row of an epoch, in its order."""
    pieces = rows.plan(0, np.arange(rows.count(0))).pieces
    assert pieces is not None
    first, sizes = pieces.row_offsets[:-1], pieces.lengths
    return np.add.reduceat(sizes * (balance.a + balance.b * sizes), first), np.add.reduceat(sizes, first)


def _in_turn(costs: Int64Array, tokens: Int64Array, ranks: int, batch_size: int) -> Work:
    """Row i to rank i % ranks."""
    whole = len(costs) // (ranks * batch_size) * ranks * batch_size
    of_ranks = [column[:whole].reshape(-1, batch_size, ranks).sum(axis=1) for column in (costs, tokens)]
    return Work(of_ranks[0], of_ranks[1], int(tokens[whole:].sum()))


def by_differencing(costs: Int64Array, tokens: Int64Array, ranks: int, batch_size: int) -> Work:
    """The rows of each step in equal numbers to the ranks, by the largest differencing method."""
    size = ranks * batch_size
    whole = len(costs) // size * size
    found: list[list[Int64Array]] = [[], []]
    for first in range(0, whole, size):
        parts = [np.array(part) + first for part in largest_differencing(costs[first : first + size].tolist(), ranks)]
        for column, sums in zip((costs, tokens), found, strict=True):
            sums.append(np.array([column[part].sum() for part in parts]))
    return Work(np.array(found[0]), np.array(found[1]), int(tokens[whole:].sum()))


def largest_differencing(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of `costs` in `parts` parts of equal size and about equal sums."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, at in enumerate(range(0, len(order), parts)):  # one for each part, so that all get equally many
        state = [(costs[item], [item]) for item in order[at : at + parts]]
        heap.append((state[-1][0] - state[0][0], number, state))  # parts fall; the widest spread comes first
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [items for _, items in heap[0][2]]


def by_wlb_llm(lengths: Int64Array, average: int, ranks: int, balance: CostBalance, outliers: Sequence[int]) -> Work:
    """Documents of about `average` tokens a rank and step, dealt by work; outliers wait until each rank gets one."""
    most = int(average * _ROOM)
    queues: list[deque[int]] = [deque() for _ in outliers]
    waiting: list[int] = []
    costs, tokens = [], []
    batches = list(_batches(lengths.tolist(), average * ranks))
    for batch in batches[:-1]:
        work, sizes, left = [0] * ranks, [0] * ranks, []
        for length in batch:
            queue = next((queue for queue, least in zip(queues, outliers, strict=True) if length >= least), None)
            (waiting if queue is None else queue).append(length)
        dealt: list[int] = []
        for queue in queues:
            if len(queue) >= ranks:
                dealt += [queue.popleft() for _ in range(ranks)]
        for length in sorted([*dealt, *waiting], reverse=True):
            rank = min(range(ranks), key=work.__getitem__)
            if sizes[rank] + length > most:
                rank = min(range(ranks), key=sizes.__getitem__)
            if sizes[rank] + length > most:
                left.append(length)
                continue
            sizes[rank] += length
            work[rank] += length * (balance.a + balance.b * length)
        waiting = left
        costs.append(work)
        tokens.append(sizes)
    return Work(np.array(costs), np.array(tokens), sum(waiting) + sum(map(sum, queues)) + sum(batches[-1]))


def _batches(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Batches of at least `tokens` tokens; the last one may have fewer, or none."""
    batch: list[int] = []
    size = 0
    for length in lengths:
        batch.append(length)
        size += length
        if size >= tokens:
            yield batch
            batch, size = [], 0
    yield batch


def _speed(
    lengths: Int64Array, mode: Mode, seq_len: int, balance: CostBalance, window: int, rounds: int
) -> dict[str, Any]:
    """Million documents planned per second of CPU time, without and with balance, in turns; and the ratio."""
    speeds: dict[str, list[float]] = {"none": [], OURS: []}
    for number in range(rounds):
        for name, option in (("none", None), (OURS, balance)):
            rows = _loader(lengths, mode, seq_len, option, window, number)
            begin = time.process_time()
            rows.plan(0, np.arange(rows.count(0)))
            speeds[name].append(len(lengths) / (time.process_time() - begin) / 1e6)
    ratios = [ours / none for ours, none in zip(speeds[OURS], speeds["none"], strict=True)]
    return {
        **{name: {"median": statistics.median(s), "low": min(s), "high": max(s)} for name, s in speeds.items()},
        "ratio": statistics.median(ratios),
    }


def _table(entry: dict[str, Any]) -> Table:
    speed = entry["speed"]
    grid = Table(
        title=f"{entry['corpus']}, {entry['rows']}: {speed['none']['median']:.1f} million documents planned per CPU "
        f"second, {speed[OURS]['median']:.1f} ({speed[OURS]['low']:.1f} to {speed[OURS]['high']:.1f}) if balanced"
    )
    for heading in ("method", "most / mean", "worst step", "steps up to 1.05", "ms a step"):
        grid.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, found in entry["methods"].items():
        own = "" if found["ms_a_step"] is None else f"{found['ms_a_step']:.1f}"
        cells = (f"{found['ratio']:.4f}", f"{found['worst']:.3f}", f"{found['even_steps']:.1%}", own)
        grid.add_row(name, *cells, style="bold" if name == OURS else None)
    return grid


def _save_chart(shown: dict[tuple[str, str, str], npt.NDArray[np.float64]], path: Path, console: Console) -> None:
    """For each corpus and kind of rows, the steps by their ratio."""
    try:
        import matplotlib
    except ImportError as error:
        console.print(f"no chart: {error}; pip install matplotlib (extra: demo)", markup=False)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    cases = list(dict.fromkeys(case[:2] for case in shown))
    figure, grid = pyplot.subplots(
        1, len(cases), figsize=(4.5 * len(cases), 4), layout="constrained", sharey=True, squeeze=False
    )
    panels = grid[0]
    for panel, case in zip(panels, cases, strict=True):
        for (*of, method), ratios in shown.items():
            if tuple(of) == case:
                shares = np.arange(1, len(ratios) + 1) / len(ratios) * 100
                panel.plot(shares, np.sort(ratios), label=method, linewidth=3 if method == OURS else 1.5)
        panel.axhline(EVEN, color="#888888", linestyle="--", linewidth=1)
        panel.set(title=", ".join(case), xlabel="% of steps", yscale="log")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="cost of the rank that has most / mean")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
