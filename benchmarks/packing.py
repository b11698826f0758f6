"""Packing of log-normal document lengths: documents per second and fill, compared with three other methods.

- dali_pipes: `pack`
- best-fit decreasing: one piece at a time, longest first, in plain Python; the baseline for fill
- first fit: one piece at a time as it arrives, into the first row with enough space, in plain Python
- Grain's best fit, with 64 and with 1024 open rows; it copies tokens, the others only plan

A loader's plan also needs the order and the lengths of the documents; its time and memory are reported separately.

All methods assign the same pieces to rows: documents longer than a row are split. Every round uses a different window
of documents, and the methods take turns within it. Fill is tokens / (rows * seq_len), including the window's last row.
"""

import json
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from comparison.report import machine, wide_console
from rich.console import Console
from rich.table import Table

from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.packing import Int64Array, Packing, pack, rows_of_documents

MEDIAN_TOKENS, SIGMA = 400, 1.2
SEQ_LENS = (2048, 8192)
OURS, YARDSTICK = "dali_pipes", "best-fit decreasing"
_GOALS = {  # figure: limit, and whether it is the most that is wanted
    "documents a second": (1e6, False),
    "documents a second, with their order and lengths": (1e6, False),
    "kept bytes a document": (16, True),
    "fill": (0.98, False),
    "fill, points below the yardstick": (0.2, True),
}
_WARM_UP_DOCUMENTS = 1000
_KEYS = ("documents_per_s", "cpu_s_per_mdoc", "fill")


class Window(NamedTuple):
    lengths: Int64Array
    """Tokens of each document."""
    pieces: list[int]
    """Tokens of each piece, in document order."""
    seq_len: int


Method = Callable[[Window], Packing | list[list[int]]]
"""Packs a window and returns its rows: a plan, or the numbers of the pieces in each row."""


def main(
    documents: Annotated[int, typer.Option(min=1, help="documents in a window")] = 65_536,
    rounds: Annotated[int, typer.Option(min=1, help="windows; every method packs each once")] = 5,
    seed: Annotated[int, typer.Option(help="of the lengths")] = 0,
    quick: Annotated[bool, typer.Option(help="two rounds of 2048 documents")] = False,
    out: Annotated[Path, typer.Option(help="folder for the JSON and the PNG")] = Path("runs/packing"),
) -> None:
    """Measure, print a table, write JSON and PNG; the last line is one JSON line. Exit code 1 if a check failed."""
    console = wide_console()
    documents, rounds = (2048, 2) if quick else (documents, rounds)
    about, (methods, skipped) = machine(), available_methods()
    entries, failed = [], []
    for seq_len in SEQ_LENS:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
        rows: dict[str, list[Int64Array]] = {name: [] for name in methods}
        windows = [log_normal_window(documents, seq_len, seed + number) for number in range(rounds)]
        for method in methods.values():
            method(log_normal_window(_WARM_UP_DOCUMENTS, seq_len, seed))
        for number, window in enumerate(windows):
            console.log(f"seq_len {seq_len}: round {number + 1} of {rounds}")
            for name, method in methods.items():
                figures, row_tokens = _measure(method, window)
                found[name].append(figures)
                rows[name].append(row_tokens)
            packed = {name: rows[name][-1] for name in methods}
            failed += [f"seq_len {seq_len}, round {number + 1}: {text}" for text in faults(window, packed)]
        entries.append(_entry(windows, found))
        entries[-1]["histograms"] = _histograms(windows, rows)
    for entry in entries:
        console.print(_table(entry))
    goals = [goal for entry in entries for goal in _goals(entry)]
    for goal in goals:
        console.print(f"{'met' if goal['met'] else 'NOT MET'}: {goal['goal']}: {goal['measured']:.6g}", highlight=False)
    for text in [*(f"skipped {name}: {reason}" for name, reason in skipped.items()), *(f"FAILED {f}" for f in failed)]:
        console.print(text, markup=False, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": "packing", "machine": about, "documents": documents, "rounds": rounds, "seed": seed}
    report |= {"entries": entries, "goals": goals, "skipped": skipped, "failed": failed}
    (out / "packing.json").write_text(json.dumps(report, indent=1) + "\n")
    _save_chart(entries, out / "packing.png", console)
    medians = {
        entry["seq_len"]: {name: result["median"] for name, result in entry["methods"].items()} for entry in entries
    }
    print(json.dumps({"benchmark": "packing", "date": about["date"], "medians": medians, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def log_normal_window(documents: int, seq_len: int, seed: int) -> Window:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA, documents)
    lengths = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return Window(lengths, rows_of_documents(lengths, seq_len, "split").piece_lengths.tolist(), seq_len)


def available_methods() -> tuple[dict[str, Method], dict[str, str]]:
    """The methods by name, and the reason for each that cannot run here."""
    methods: dict[str, Method] = {OURS: _dali_pipes, YARDSTICK: best_fit_decreasing, "first fit": first_fit}
    grain_methods = {f"Grain best fit, {rows} rows": rows for rows in (64, 1024)}
    try:
        import grain.experimental  # noqa: F401
    except ImportError as error:
        return methods, dict.fromkeys(grain_methods, f"{error}; pip install grain (extra: bench)")
    return methods | {name: _grain_best_fit(rows) for name, rows in grain_methods.items()}, {}


def _dali_pipes(window: Window) -> Packing:
    return pack(window.lengths, window.seq_len, "split")


def best_fit_decreasing(window: Window) -> list[list[int]]:
    """Each piece, longest first, goes where it leaves the least space."""
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space, row), in rising order
    for piece in sorted(range(len(window.pieces)), key=window.pieces.__getitem__, reverse=True):
        length = window.pieces[piece]
        index = bisect_left(spaces, (length, 0))
        if index < len(spaces):
            space, row = spaces.pop(index)
        else:
            space, row = window.seq_len, len(rows)
            rows.append([])
        rows[row].append(piece)
        insort(spaces, (space - length, row))
    return rows


def first_fit(window: Window) -> list[list[int]]:
    """Each piece, as it arrives, goes into the first row with enough space: a tree of largest spaces finds it."""
    rows: list[list[int]] = []
    leaves = 1 << (len(window.pieces) - 1).bit_length()
    spaces = [window.seq_len] * (2 * leaves)  # node i has the children 2i and 2i + 1; row r is node leaves + r
    for piece, length in enumerate(window.pieces):
        node = 1
        while node < leaves:
            node *= 2
            node += spaces[node] < length
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(piece)
        spaces[node] -= length
        while node > 1:
            node //= 2
            spaces[node] = max(spaces[2 * node], spaces[2 * node + 1])
    return rows


class _TokenArrays:
    """Random-access source for Grain: item i has as many tokens as piece i, and its number."""

    def __init__(self, window: Window) -> None:
        self._pieces = window.pieces
        self._tokens = np.zeros(window.seq_len, np.int32)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int32] | int]:
        return {"tokens": self._tokens[: self._pieces[index]], "piece": index}


def _grain_best_fit(open_rows: int) -> Method:
    import grain
    from grain.experimental import BestFitPackIterDataset

    def run(window: Window) -> list[list[int]]:
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        pieces = grain.MapDataset.source(_TokenArrays(window)).to_iter_dataset(in_this_thread)
        rows = BestFitPackIterDataset(
            pieces,
            length_struct={"tokens": window.seq_len},
            num_packing_bins=open_rows,
            shuffle_bins=False,
            meta_features=("piece",),
        )
        return [row["piece"] for row in rows]

    return run


def row_tokens_of(window: Window, packed: Packing | list[list[int]]) -> Int64Array:
    """Tokens in each row. Raises `ValueError` unless every piece is in exactly one row."""
    if isinstance(packed, Packing):
        return np.add.reduceat(packed.piece_lengths, packed.row_offsets[:-1])
    if sorted(piece for row in packed for piece in row) != list(range(len(window.pieces))):
        raise ValueError("expected every piece in exactly one row")
    return np.array([sum(window.pieces[piece] for piece in row) for row in packed])


def _measure(method: Method, window: Window) -> tuple[dict[str, Any], Int64Array]:
    wall, cpu = time.perf_counter(), time.process_time()
    packed = method(window)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row_tokens, documents = row_tokens_of(window, packed), window.lengths.size
    figures = {
        "documents_per_s": documents / wall,
        "cpu_s_per_mdoc": cpu / documents * 1e6,
        "fill": float(row_tokens.sum() / (row_tokens.size * window.seq_len)),
        "rows": row_tokens.size,
    }
    return figures, row_tokens


def faults(window: Window, packed: dict[str, Int64Array]) -> list[str]:
    """What is wrong with the rows of one round, by method: tokens in each row."""
    tokens = int(window.lengths.sum())
    found = [
        f"{name} packed {rows.sum()} of {tokens} tokens, at most {rows.max()} in a row"
        for name, rows in packed.items()
        if rows.sum() != tokens or rows.max() > window.seq_len
    ]
    if not np.array_equal(np.sort(packed[OURS]), np.sort(packed[YARDSTICK])):
        found.append(f"{OURS} and {YARDSTICK} filled their rows differently")
    return found


def _entry(windows: list[Window], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for name, figures in found.items():
        methods[name] = {"rounds": figures}
        for part, pick in (("median", statistics.median), ("low", min), ("high", max)):
            methods[name][part] = {key: pick([one[key] for one in figures]) for key in _KEYS}
    return {"seq_len": windows[0].seq_len, "methods": methods, "loader_plan": _loader_plan(windows)}


def _loader_plan(windows: list[Window]) -> dict[str, float]:
    """What a loader does and keeps for a window: shuffled order and lengths of its documents, and their packing."""
    speeds, sizes = [], []
    for window in windows:
        offsets = np.concatenate(([0], np.cumsum(window.lengths)))
        documents = window.lengths.size
        rows = DocumentRows(
            offsets,
            window.seq_len,
            mode="pack",
            long_documents="split",
            window_documents=documents,
            shuffle=True,
            seed=0,
        )
        begin = time.perf_counter()
        rows.count(0)
        speeds.append(documents / (time.perf_counter() - begin))
        sizes.append(rows.plan_bytes() / documents)
    return {"documents_per_s": statistics.median(speeds), "kept_bytes_per_document": statistics.median(sizes)}


def _histograms(windows: list[Window], rows: dict[str, list[Int64Array]]) -> dict[str, Any]:
    """Documents by length (bins of equal width on a log scale), and rows by fill in percent, over all rounds."""
    lengths = np.concatenate([window.lengths for window in windows])
    length_edges = np.geomspace(1, lengths.max() + 1, 61)
    fill_edges = np.linspace(0, 100, 51)
    fills = {name: np.concatenate(parts) / windows[0].seq_len * 100 for name, parts in rows.items()}
    return {
        "length_edges": length_edges.tolist(),
        "documents": np.histogram(lengths, length_edges)[0].tolist(),
        "fill_edges": fill_edges.tolist(),
        "rows": {name: np.histogram(fill, fill_edges)[0].tolist() for name, fill in fills.items()},
    }


def _goals(entry: dict[str, Any]) -> list[dict[str, Any]]:
    ours, best = (entry["methods"][name]["median"] for name in (OURS, YARDSTICK))
    measured = {
        "documents a second": ours["documents_per_s"],
        "documents a second, with their order and lengths": entry["loader_plan"]["documents_per_s"],
        "kept bytes a document": entry["loader_plan"]["kept_bytes_per_document"],
        "fill": ours["fill"],
        "fill, points below the yardstick": 100 * (best["fill"] - ours["fill"]),
    }
    found = []
    for name, (limit, at_most) in _GOALS.items():
        met = measured[name] <= limit if at_most else measured[name] >= limit
        text = f"seq_len {entry['seq_len']}: {name} {'<=' if at_most else '>='} {limit:g}"
        found.append({"goal": text, "measured": measured[name], "met": met})
    return found


def _table(entry: dict[str, Any]) -> Table:
    grid = Table(
        title=f"seq_len {entry['seq_len']}: median (low to high); a kept plan takes "
        f"{entry['loader_plan']['kept_bytes_per_document']:.1f} bytes per document"
    )
    for heading in ("method", "thousand documents/s", "CPU s per million documents", "fill %"):
        grid.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, result in entry["methods"].items():
        cells = []
        for key, factor, digits in zip(_KEYS, (1e-3, 1, 100), (0, 2, 3), strict=True):
            middle, low, high = (f"{result[part][key] * factor:.{digits}f}" for part in ("median", "low", "high"))
            cells.append(f"{middle} ({low} to {high})")
        grid.add_row(name, *cells, style="bold" if name == OURS else None)
    return grid


def _save_chart(entries: list[dict[str, Any]], path: Path, console: Console) -> None:
    """Length and fill histograms, one line of panels for each seq_len."""
    try:
        import matplotlib
    except ImportError as error:
        console.print(f"no chart: {error}; pip install matplotlib (extra: demo)", markup=False)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, panels = pyplot.subplots(len(entries), 2, figsize=(13, 4 * len(entries)), layout="constrained")
    for (left, right), entry in zip(panels, entries, strict=True):
        histograms, seq_len = entry["histograms"], entry["seq_len"]
        left.stairs(histograms["documents"], histograms["length_edges"], fill=True, color="#9aa5b1")
        left.axvline(seq_len, color="#444444", linestyle="--", label=f"seq_len {seq_len}")
        left.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
        for number, (name, counts) in enumerate(histograms["rows"].items()):
            shares = np.array(counts) / sum(counts)
            label = f"{name}: {100 * entry['methods'][name]['median']['fill']:.3f} %"
            # Ours and the yardstick agree: the wider line stays visible below the other.
            width = 4 if name == OURS else 1.3
            colour = "#76b900" if name == OURS else f"C{number - 1}"
            right.stairs(shares, histograms["fill_edges"], label=label, linewidth=width, color=colour, baseline=None)
        right.set(yscale="log", xlabel=f"fill of a row of {seq_len}, %", ylabel="share of rows")
        for panel in (left, right):
            panel.legend(frameon=False, fontsize=8, loc="upper left")
            panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
