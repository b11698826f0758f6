"""`SampleLoader` compared with torch's `DataLoader`: rate, CPU time, start, resume, on the same datasets and workers.

    python benchmarks/samples.py
    python benchmarks/samples.py --kinds jpeg --slices 20 --rounds 0

JPEGs of 256 x 256 with a random resized crop to 224 x 224 by PIL, crops of 64^3 of a zarr volume, and rows in memory;
0 and 2 workers. Crops are also loaded by MONAI's `DataLoader`, if it is installed. `ours_graph` decodes and crops the
same JPEGs with DALI instead, without workers. One process opens all loaders of a dataset and times them in turn, in
short slices; ratios are taken within a slice. Every start runs in a new process; imports are not timed. See
`benchmarks/README.md`. The last line is one JSON line.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.child import Order, run_children
from comparison.report import machine, wide_console
from comparison.sample_sets import BATCH_SIZES, make_data
from rich.table import Table

LOADERS = ("torch_0", "ours_0", "torch_2", "ours_2")
KINDS = {"jpeg": (*LOADERS, "ours_graph"), "volume": (*LOADERS, "monai_2"), "arrays": LOADERS}
AIMED_AT = ("jpeg", "volume")
"""Datasets whose rates have an aim: rows in memory show what a loader costs beside no work at all."""
RATE_AIM, START_AIM_S, RESUME_AIM = 0.95, 0.1, 10.0
_TIMEOUT_S = 900.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""torch's threads spin where they wait for one another, which costs more than they save in `default_collate`."""


def main(
    kinds: Annotated[str, typer.Option(help="datasets, separated by commas: jpeg, volume, arrays")] = ",".join(KINDS),
    slices: Annotated[int, typer.Option(min=1, help="timed slices per loader")] = 30,
    seconds: Annotated[float, typer.Option(help="length of a slice")] = 0.3,
    rounds: Annotated[int, typer.Option(min=0, help="starts to measure per loader")] = 3,
    items: Annotated[int, typer.Option(min=1, help="items per dataset")] = 2048,
    data_dir: Annotated[Path | None, typer.Option(help="folder for temporary files")] = None,
) -> None:
    """Measure, print tables and, as the last line, one line of JSON. Exit code 1 if a check failed."""
    about, console = machine(), wide_console()
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=data_dir) as place:
        no_volume = make_data(Path(place) / "data")
        for kind in kinds.split(","):
            if kind == "volume" and no_volume:
                entries.append({"part": "rate", "kind": kind, "skipped": no_volume})
                continue
            names = [name for name in KINDS[kind] if not name.startswith("monai") or find_spec("monai")]
            if len(names) < len(KINDS[kind]):
                text = "monai is not installed; install it with pip install 'dali-pipes[bench]'"
                entries.append({"part": "rate", "kind": f"{kind}, monai_2", "skipped": text})
            console.log(f"rates: {kind}")
            shape = {"kind": kind, "folder": f"{place}/data", "items": max(items, 2 * BATCH_SIZES[kind])}
            task = {"names": names, "slices": slices, "seconds": seconds, **shape}
            (outcome,) = run_children([Order("comparison.samples", task, _ONE_THREAD)], _TIMEOUT_S)
            for name in names:
                found = outcome.get("rates", {}).get(name, [outcome])
                entries.append({"part": "rate", "kind": kind, "loader": name, "rounds": found})
        if rounds:
            console.log("starts")
            entries += _starts(f"{place}/data", items, rounds)
    measured = [entry for entry in entries if "skipped" not in entry]
    failed = [
        f"{entry['part']}, {entry['kind']}, {entry['loader']}: {outcome['failed']}"
        for entry in measured
        for outcome in entry["rounds"]
        if "failed" in outcome
    ]
    aims: list[dict[str, Any]] = []
    if not failed:
        for entry in measured:
            _summarise(entry, measured)
        aims = _aims(measured)
        console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
        console.print(_rate_table([entry for entry in measured if entry["part"] == "rate"]))
        if rounds:
            console.print(_start_table([entry for entry in measured if entry["part"] == "start"]))
        console.print(_aim_table(aims))
    for entry in entries:
        if "skipped" in entry:
            console.print(f"skipped {entry['kind']}: {entry['skipped']}", markup=False)
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    print(json.dumps({"benchmark": "samples", "machine": about, "entries": entries, "aims": aims, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def _starts(folder: str, items: int, rounds: int) -> list[dict[str, Any]]:
    """Of all loaders over the JPEGs. Each round begins with another one."""
    entries: list[dict[str, Any]] = [
        {"part": "start", "kind": "jpeg", "loader": name, "rounds": []} for name in KINDS["jpeg"]
    ]
    for number in range(rounds):
        first = number * len(entries) // rounds
        for entry in entries[first:] + entries[:first]:
            task = {"name": entry["loader"], "kind": "jpeg", "folder": folder, "items": items}
            entry["rounds"] += run_children([Order("comparison.samples", task, _ONE_THREAD)], _TIMEOUT_S)
    return entries


def _summarise(entry: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Spread of every figure, and of the ratio to torch with as many workers, DALI's graph to torch with two."""
    workers = entry["loader"].partition("_")[2]
    name = f"torch_{'2' if workers == 'graph' else workers}"
    torchs = next(
        other
        for other in entries
        if all(other[key] == entry[key] for key in ("part", "kind")) and other["loader"] == name
    )
    for figure in entry["rounds"][0]:
        values = [found[figure] for found in entry["rounds"]]
        against = [found[figure] for found in torchs["rounds"]]
        entry[figure] = _spread(values)
        entry[f"{figure}_ratio"] = _spread([value / other for value, other in zip(values, against, strict=True)])
        entry[f"{figure}_more"] = _spread([value - other for value, other in zip(values, against, strict=True)])
    first = entry[next(iter(entry["rounds"][0]))]
    entry["noise"] = (first["high"] - first["low"]) / first["median"]


def _spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles: on a busy machine, the lowest and the highest of many slices say little."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}


def _aims(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at, for ours with the workers of torch's, and whether it was met."""
    aims: list[dict[str, Any]] = []

    def aim(entry: dict[str, Any], what: str, measured: float, wanted: str, is_met: Callable[[float], bool]) -> None:
        label = f"{what}, {entry['kind']}, {entry['loader']}"
        aims.append({"aim": label, "measured": measured, "wanted": wanted, "met": is_met(measured)})

    for entry in entries:
        if not entry["loader"].startswith("ours"):
            continue
        if entry["part"] == "rate" and entry["kind"] in AIMED_AT and not entry["loader"].endswith("graph"):
            ratio = entry["items_per_s_ratio"]["median"]
            aim(entry, "rate / torch's", ratio, f">= {RATE_AIM}", lambda value: value >= RATE_AIM)
        if entry["part"] == "start":
            more = entry["first_batch_s_more"]["median"]
            what = "first batch, seconds after torch's"
            aim(entry, what, more, f"<= {START_AIM_S}", lambda value: value <= START_AIM_S)
            times = 1 / entry["resume_s_ratio"]["median"]
            aim(
                entry,
                "torch's skip time / resume time",
                times,
                f">= {RESUME_AIM:.0f}",
                lambda value: value >= RESUME_AIM,
            )
    return aims


def _cell(spread: dict[str, float], factor: float = 1.0) -> str:
    figures = {part: value * factor for part, value in spread.items()}
    return "{median:.3g} ({low:.3g} to {high:.3g})".format(**figures)


def _rate_table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="rates: median (quartiles); ratios to torch with the same workers, ours_graph to torch_2")
    for heading in ("dataset", "loader", "items/s", "ratio", "CPU ms per item", "ratio", "noise"):
        table.add_column(heading, justify="left" if heading in ("dataset", "loader") else "right")
    for entry in entries:
        rate, cpu = _cell(entry["items_per_s"]), _cell(entry["cpu_s_per_item"], 1e3)
        ratios = [_cell(entry[f"{figure}_ratio"]) for figure in ("items_per_s", "cpu_s_per_item")]
        noise = f"{100 * entry['noise']:.0f}%"
        table.add_row(entry["kind"], entry["loader"], rate, ratios[0], cpu, ratios[1], noise)
    return table


def _start_table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="JPEGs: seconds, median (quartiles); torch resumes by skipping batches")
    for heading in ("loader", "first batch", "CPU", "resume at 80%", "CPU"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    for entry in entries:
        figures = ("first_batch_s", "first_batch_cpu_s", "resume_s", "resume_cpu_s")
        table.add_row(entry["loader"], *(_cell(entry[figure]) for figure in figures))
    return table


def _aim_table(aims: list[dict[str, Any]]) -> Table:
    table = Table(title="goals (medians)")
    for heading in ("goal", "measured", "target", "met"):
        table.add_column(heading, justify="left" if heading == "goal" else "right")
    for entry in aims:
        table.add_row(entry["aim"], f"{entry['measured']:.3g}", entry["wanted"], "yes" if entry["met"] else "NO")
    return table


if __name__ == "__main__":
    typer.run(main)
