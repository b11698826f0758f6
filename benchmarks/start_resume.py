"""First start and resume of `TokenLoader` on corpora of 10^8 to 10^12 tokens, and the memory it adds.

The corpora are sparse files, so 10^12 tokens do not take disk space; on a file system that does not allow a 2 TB file,
they are lists of links to a smaller file. Each measurement runs in a new process and excludes the imports. See
`benchmarks/README.md`.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.child import Order, run_children
from comparison.report import machine, wide_console
from comparison.work import SIZES
from rich.table import Table

_TIMEOUT_S = 120.0
_LARGEST_PIECE_TOKENS = 10**10
_SIZES_HELP = "corpus size, can be repeated; default: 1e8, 1e10, and 1e12"
_KEYS = ("first_batch_s", "resume_s", "unshared_added_mb", "state_bytes")


def main(
    tokens: Annotated[list[str] | None, typer.Option(help=_SIZES_HELP)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="new processes per measurement")] = 3,
    sizes: Annotated[bool, typer.Option(help="also measure the memory at the four batch shapes of the README")] = True,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder for the sparse files, which are removed at the end")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/start_resume"),
) -> None:
    """Measure, print a table, write a JSON; the last line is one JSON line. Exit code 1 if a check failed."""
    console = wide_console()
    counts = sorted(int(float(text)) for text in tokens or ["1e8", "1e10", "1e12"])
    shapes = [(count, SIZES[0]) for count in counts] + [(counts[0], size) for size in SIZES[1:] if sizes]
    about = machine()
    entries: list[dict[str, Any]] = [
        {"corpus_tokens": count, "batch_size": batch_size, "seq_len": seq_len, "rounds": []}
        for count, (batch_size, seq_len) in shapes
    ]
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        corpora = {count: sparse_corpus(Path(folder), count) for count in counts}
        for number in range(rounds):
            for entry in entries:
                console.log(f"round {number + 1} of {rounds}: {_label(entry)}")
                files = [str(path) for path in corpora[entry["corpus_tokens"]]]
                task = {"files": files, "batch_size": entry["batch_size"], "seq_len": entry["seq_len"]}
                entry["rounds"] += run_children([Order("comparison.start", task)], _TIMEOUT_S)
        for entry in entries:
            entry["files"] = len(corpora[entry["corpus_tokens"]])
    failed = []
    for entry in entries:
        failed += [f"{_label(entry)}: {result['failed']}" for result in entry["rounds"] if "failed" in result]
        good = [result for result in entry["rounds"] if "failed" not in result]
        if good:
            for name, pick in (("median", statistics.median), ("low", min), ("high", max)):
                entry[name] = {key: pick([result[key] for result in good]) for key in _KEYS}
    console.print(_table(entries))
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": "start_resume", "machine": about, "entries": entries}
    (out / "start_resume.json").write_text(json.dumps(report, indent=1) + "\n")
    medians = {_label(entry): entry.get("median") for entry in entries}
    print(json.dumps({"benchmark": "start_resume", "date": about["date"], "medians": medians, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def sparse_corpus(folder: Path, tokens: int) -> list[Path]:
    """Files that together read as `tokens` uint16 zeros, without blocks on the disk."""
    path = folder / f"zeros-{tokens}.bin"
    try:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(2 * tokens)
        return [path]
    except OSError:  # the file system's largest file is smaller; links to one smaller file are as long together
        path.unlink(missing_ok=True)
        if tokens <= _LARGEST_PIECE_TOKENS or tokens % _LARGEST_PIECE_TOKENS:
            raise
    (piece,) = sparse_corpus(folder, _LARGEST_PIECE_TOKENS)
    links = [folder / f"links-{tokens}" / f"{number:05d}.bin" for number in range(tokens // _LARGEST_PIECE_TOKENS)]
    links[0].parent.mkdir()
    for link in links:
        link.hardlink_to(piece)
    return links


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['corpus_tokens']:.0e} tokens, {entry['batch_size']} x {entry['seq_len']}"


def _table(entries: list[dict[str, Any]]) -> Table:
    grid = Table(title="TokenLoader: median (low to high)")
    for heading in ("corpus, batch", "files", "first batch ms", "resume at 80% ms", "memory +MB", "state bytes"):
        grid.add_column(heading, justify="left" if heading == "corpus, batch" else "right", no_wrap=True)
    for entry in entries:
        cells = []
        for key, factor in zip(_KEYS, (1e3, 1e3, 1, 1), strict=True):
            middle, low, high = (entry.get(part, {}).get(key, 0) * factor for part in ("median", "low", "high"))
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})" if "median" in entry else "failed")
        grid.add_row(_label(entry), str(entry["files"]), *cells)
    return grid


if __name__ == "__main__":
    typer.run(main)
