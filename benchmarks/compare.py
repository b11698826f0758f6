"""Compare `dali_pipes` with other token loaders on the same work: `python benchmarks/compare.py --help`.

int64 `input_ids` and `labels` of shape (B, T), on the CPU, shuffled without replacement, from one flat uint16 corpus
in a warm page cache. `benchmarks/README.md` says what each column means and how noise is handled.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.alternatives import ALTERNATIVES, choose
from comparison.charts import save_chart
from comparison.report import YARDSTICK, goals_table, machine, summarise, table, wide_console
from comparison.runner import run_rounds
from comparison.work import SIZES, Limits, Work, make_corpus
from rich.console import Console

_NAMES_HELP = "NAME, or several separated by commas; can be repeated. Names: " + ", ".join(ALTERNATIVES)


def main(
    batch_size: Annotated[int, typer.Option(min=1, help="B, rows per batch")] = 8,
    seq_len: Annotated[int, typer.Option(min=2, help="T, tokens per row")] = 1024,
    all_sizes: Annotated[bool, typer.Option(help="run the four sizes of the README instead of one")] = False,
    batches: Annotated[int, typer.Option(min=1, help="timed batches; --max-seconds may end sooner")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per alternative")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=_NAMES_HELP)] = None,
    skip: Annotated[list[str] | None, typer.Option(help="alternatives to skip, as in --only")] = None,
    corpus: Annotated[Path | None, typer.Option(help="a flat uint16 file; default: generate a random one")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the random corpus")] = 200_000_000,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder for corpora, which are kept; default: temporary")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON and the charts")] = Path("runs/compare"),
    depth: Annotated[int | None, typer.Option(help="prefetch_queue_depth of the DALI alternatives")] = None,
    threads: Annotated[int | None, typer.Option(help="num_threads of the DALI alternatives")] = None,
    torch_threads: Annotated[int | None, typer.Option(help="OMP_NUM_THREADS for all; default: torch's")] = None,
    min_seconds: Annotated[float, typer.Option(help="minimum length of the timed part")] = Limits.min_s,
    max_seconds: Annotated[float, typer.Option(help="approximate maximum length of the timed part")] = Limits.max_s,
    check_seconds: Annotated[
        float, typer.Option(help="time for checking the data of an epoch, per alternative")
    ] = Limits.check_s,
) -> None:
    """Measure, print tables, write JSON and charts; the last line is one JSON line. Exit code 1 if any failed."""
    console = wide_console()
    try:
        alternatives = choose(_split(only), _split(skip))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    folder = data_dir or Path(tempfile.gettempdir()) / "dali_pipes_benchmark"
    path = corpus or make_corpus(folder, tokens)
    folder.mkdir(parents=True, exist_ok=True)
    limits = Limits(batches, min_seconds, max_seconds, check_seconds)
    about = machine()
    console.print(" ".join(f"{name}={value}" for name, value in about.items() if name != "versions"))
    runs = []
    for size in SIZES if all_sizes else [(batch_size, seq_len)]:
        work = Work(str(path), path.stat().st_size // 2, *size, str(folder), depth=depth, threads=threads)
        if work.epoch_batches < 2:
            raise typer.BadParameter(
                f"{path.name} has {work.windows:,} rows of {size[1]} tokens, too few for batches of {size[0]}"
            )
        environment = {} if torch_threads is None else {"OMP_NUM_THREADS": str(torch_threads)}
        run = summarise(work, run_rounds(alternatives, work, limits, rounds, console.log, environment))
        runs.append(run)
        _show(console, run)
    report = {
        "benchmark": "compare",
        "machine": about,
        "setting": _setting(path, limits, rounds, torch_threads),
        "runs": runs,
    }
    _write(console, out, report)
    failed = sorted({name for run in runs for name, result in run["alternatives"].items() if "failed" in result})
    print(json.dumps(_last_line(report, failed)))
    if failed:
        raise typer.Exit(1)


def _show(console: Console, run: dict[str, Any]) -> None:
    console.print(table(run))
    for name, result in run["alternatives"].items():
        for problem in ("skipped", "failed"):
            if problem in result:
                console.print(f"{name} {problem}: {result[problem]}", markup=False, highlight=False)
        if "skip_to_resume_s_estimate" in result:
            seconds = result["skip_to_resume_s_estimate"]
            console.print(f"{name} does not have a state: skipping to 80% at its rate would take about {seconds:.1f} s")
    for name, noise in run["noise"].items():
        label = "baseline" if name == YARDSTICK else "same figure"
        console.print(f"noise: the rate of {name} ({label}) varied by {100 * noise:.1f}% of its median over the rounds")
    if run["goals"]:
        console.print(goals_table(run))


def _setting(path: Path, limits: Limits, rounds: int, torch_threads: int | None) -> dict[str, Any]:
    corpus = {"corpus": path.name, "tokens": path.stat().st_size // 2}
    return corpus | {"rounds": rounds, "torch_threads": torch_threads} | asdict(limits)


def _write(console: Console, out: Path, report: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    for run in report["runs"]:
        try:
            save_chart(run, out / f"compare-{run['batch_size']}x{run['seq_len']}.png")
        except ImportError as error:
            console.print(f"no charts: {error}; they need the `bench` or `demo` extra")
            return


def _last_line(report: dict[str, Any], failed: list[str]) -> dict[str, Any]:
    rates = {
        f"{run['batch_size']}x{run['seq_len']}": {
            name: round(result["median"]["tokens_per_s"])
            for name, result in run["alternatives"].items()
            if result.get("median")
        }
        for run in report["runs"]
    }
    unmet = [
        f"{run['batch_size']}x{run['seq_len']}: {goal['goal']}"
        for run in report["runs"]
        for goal in run["goals"]
        if not goal["met"]
    ]
    return {
        "benchmark": "compare",
        "date": report["machine"]["date"],
        "tokens_per_s": rates,
        "unmet": unmet,
        "failed": failed,
    }


def _split(names: list[str] | None) -> list[str]:
    return [name for text in names or [] for name in text.replace(",", " ").split()]


if __name__ == "__main__":
    typer.run(main)
