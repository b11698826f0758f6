"""Tokens per second of `dali-pipes tokenize` on gzip JSONL, and of the tokenizers library on the same texts in memory.

- dali-pipes: the command in a separate process: startup, reading, decompression, parsing, encoding, writing, checksums.
  Its rate is computed for the whole process, and without Python's startup and imports (a run on one document).
- encode_batch, encode_batch_fast: only the library, all texts in one call, without extracting the ids. The second does
  not compute offsets into the text.
- encode_batch_fast in batches: 1000 texts per call, which takes less memory.

All use the same cores. The methods take turns within each round. The ids that the command writes are compared with
those of the library.
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from decode import GPT2_END_OF_TEXT, decode, load_pieces
from gpt2_tokenizer import tokenizer_json
from rich.table import Table

from dali_pipes import open_corpus

OURS, LIBRARY, LIBRARY_FAST = "dali-pipes tokenize", "encode_batch", "encode_batch_fast"
LIBRARY_BATCHES = "encode_batch_fast in batches"
LIBRARIES = (LIBRARY, LIBRARY_FAST, LIBRARY_BATCHES)
_BATCH_TEXTS = 1000
GOAL = 0.9
_DATA = Path(__file__).resolve().parent / "data" / "tinyshakespeare"
_COMMAND = "from dali_pipes.tools.cli import app; app()"


def main(
    copies: Annotated[int, typer.Option(min=1, help="slightly different copies of the 380 documents")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="rounds; each measures every method once")] = 5,
    quick: Annotated[bool, typer.Option(help="one copy, two rounds")] = False,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/tokenize_text"),
) -> None:
    """Measure, print a table, write JSON; the last line is one JSON line. Exit code 1 if the ids differ."""
    from tokenizers import Tokenizer

    copies, rounds = (1, 2) if quick else (copies, rounds)
    console, about = wide_console(), machine()
    texts = documents(copies)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        source = write_jsonl(folder / "texts.jsonl.gz", texts)
        start = write_jsonl(folder / "one.jsonl.gz", texts[:1])
        expected = expected_ids(tokenizer, texts)
        seconds: dict[str, list[float]] = {name: [] for name in (OURS, "start", *LIBRARIES)}
        failed = []
        for number in range(rounds):
            console.log(f"round {number + 1} of {rounds}")
            seconds["start"].append(run_command(start, folder / f"start-{number}"))
            seconds[OURS].append(run_command(source, folder / f"out-{number}"))
            with open_corpus(folder / f"out-{number}") as corpus:
                if not np.array_equal(corpus.tokens(0, corpus.num_tokens), expected):
                    failed.append(f"round {number + 1}: the ids differ from the library's")
            for method in LIBRARIES:
                seconds[method].append(run_library(tokenizer, method, texts))
        bytes_in = source.stat().st_size
    entries = summarise(len(expected), seconds)
    table = Table("method", "Mtok/s best", "median", "spread", title=f"{len(expected)} tokens, {len(texts)} documents")
    for method, entry in entries.items():
        figures = (entry["best"] / 1e6, entry["median"] / 1e6, entry["spread"])
        table.add_row(method, f"{figures[0]:.3f}", f"{figures[1]:.3f}", f"{figures[2]:.0%}")
    console.print(table)
    ours = entries[f"{OURS}, start left out"]["best"]
    ratios = {f"to {method}": ours / entries[method]["best"] for method in LIBRARIES}
    for method, ratio in ratios.items():
        console.print(f"{'met' if ratio >= GOAL else 'NOT MET'}: {GOAL} {method}: {ratio:.3f}", highlight=False)
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    report = {"benchmark": "tokenize_text", "machine": about, "tokens": len(expected), "gzip_bytes": bytes_in}
    report |= {"methods": entries, "seconds": seconds, "ratios_of_best": ratios, "failed": failed}
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenize_text.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "tokenize_text", "date": about["date"], "ratios_of_best": ratios, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def documents(copies: int) -> list[str]:
    """The documents of Tiny Shakespeare, each copy with a line of its own in every document."""
    ids = np.concatenate([np.fromfile(_DATA / name, "<u2") for name in ("train.bin", "val.bin")])
    pieces = load_pieces()
    ends = np.flatnonzero(ids == GPT2_END_OF_TEXT)
    texts = [decode(part[part != GPT2_END_OF_TEXT], pieces) for part in np.split(ids, ends + 1)[:-1]]
    return [f"{text}\nCopy {copy}, document {at}.\n" for copy in range(copies) for at, text in enumerate(texts)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8", newline="\n") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    return path


def expected_ids(tokenizer: Any, texts: list[str]) -> Any:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*encoding.ids, GPT2_END_OF_TEXT], np.uint16) for encoding in encodings])


def run_command(source: Path, out: Path) -> float:
    """Seconds of a whole run."""
    command = [sys.executable, "-c", _COMMAND, "tokenize", str(source), "--out", str(out)]
    command += ["--tokenizer", str(source.with_name("tokenizer.json"))]
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "true"})
    return time.perf_counter() - begin


def run_library(tokenizer: Any, method: str, texts: list[str]) -> float:
    """Seconds of encoding all texts; the result is released after the clock has stopped."""
    encode = tokenizer.encode_batch if method == LIBRARY else tokenizer.encode_batch_fast
    count = _BATCH_TEXTS if method == LIBRARY_BATCHES else len(texts)
    seconds = 0.0
    for at in range(0, len(texts), count):
        batch = texts[at : at + count]
        begin = time.perf_counter()
        encodings = encode(batch, add_special_tokens=False)
        seconds += time.perf_counter() - begin
        del encodings
    return seconds


def summarise(tokens: int, seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Tokens a second of each method: best, median, and spread, (high - low) / median."""
    start = min(seconds["start"])
    runs = {
        OURS: seconds[OURS],
        f"{OURS}, start left out": [max(1e-9, run - start) for run in seconds[OURS]],
        **{method: seconds[method] for method in LIBRARIES},
    }
    found = {}
    for method, times in runs.items():
        rates = [tokens / time_s for time_s in times]
        median = statistics.median(rates)
        found[method] = {"best": max(rates), "median": median, "spread": (max(rates) - min(rates)) / median}
    return found


if __name__ == "__main__":
    typer.run(main)
