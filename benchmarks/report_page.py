"""How long `dali-pipes report` takes, and the size of its page, compared with counting the ids of the whole corpus.

    python benchmarks/report_page.py
    python benchmarks/report_page.py --tokens 20000000 --steps 4 --rounds 1

Each call is a process, with its imports. The page shows the first rows of each step and figures from a sample. If rows
are packed and the corpus is a flat file, the first call also reads the file once, to find the documents; later calls
do not. For comparison, NumPy counts all ids and documents, with the file in the page cache. The numbers of documents
must agree. The last line is one JSON line.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table

LIMIT_S, LIMIT_BYTES = 10.0, 5_000_000
END, VOCABULARY = 0, 50_257
BATCH_SIZE, SEQ_LEN = 8, 1024
CASES = ("stream", "pack, first time", "pack", "NumPy, whole corpus")
COLUMNS = (
    Column("seconds", "seconds (low to high)", 1, "{:.2f}"),
    Column("cpu_s", "CPU seconds", 1, "{:.2f}"),
    Column("ratio", "x NumPy", 1, "{:.2f}"),
    Column("bytes", "page, kB", 1e-3, "{:,.0f}"),
    Column("ids_looked_at", "million ids counted", 1e-6, "{:,.0f}"),
)
_CHUNK = 1 << 22
_WHOLE = f"""
import json, sys
import numpy as np
ids = np.memmap(sys.argv[1], np.uint16, "r")
counts = np.zeros({VOCABULARY}, np.int64)
for begin in range(0, len(ids), {_CHUNK}):
    counts += np.bincount(ids[begin : begin + {_CHUNK}], minlength={VOCABULARY})
print(json.dumps({{"documents": int(counts[{END}]), "ids_looked_at": len(ids)}}))
"""


def write_corpus(path: Path, tokens: int) -> None:
    """Random ids; about every 500th ends a document, and the last one does."""
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, tokens, _CHUNK):
            ids = generator.integers(1, VOCABULARY, min(_CHUNK, tokens - begin), dtype=np.uint16)
            ids[generator.random(len(ids)) < 1 / 500] = END
            if begin + len(ids) == tokens:
                ids[-1] = END
            ids.tofile(file)


def timed(command: list[str], cache: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds and CPU seconds of a process, and the JSON that it prints."""
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "DALI_PIPES_CACHE": str(cache)}
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"seconds": seconds, "cpu_s": usage.ru_utime + usage.ru_stime}, json.loads(printed)


def command_of(case: str, corpus: Path, steps: int) -> list[str]:
    if case == CASES[-1]:
        return [sys.executable, "-c", _WHOLE, str(corpus)]
    rows = case.partition(",")[0]
    settings = {"rows": rows, "eos_id": END, "vocab_size": VOCABULARY, "mask_boundaries": json.dumps(rows == "pack")}
    command = [sys.executable, "-m", "dali_pipes", "report", str(corpus), "--json", "--steps"]
    command += [",".join(map(str, range(steps))), "--out", str(corpus.with_suffix(".html"))]
    command += ["--batch-size", str(BATCH_SIZE), "--seq-len", str(SEQ_LEN)]
    return command + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def measure(folder: Path, tokens: int, steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The figures of each case in every round, in turn. `pack` finds what `pack, first time` of its round has kept."""
    corpus = folder / "corpus.bin"
    write_corpus(corpus, tokens)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(rounds):
        documents = set()
        for case in CASES:
            figures, told = timed(command_of(case, corpus, steps), folder / f"cache_{number}")
            facts = told.get("sections", {}).get("corpus", told)
            documents.add(facts.get("documents"))
            found[case].append({**figures, "ids_looked_at": facts["ids_looked_at"]})
            if "bytes" in told:
                found[case][-1]["bytes"] = told["bytes"]
        if len(documents - {None}) != 1:
            raise SystemExit(f"the numbers of documents differ: {documents}")
        for case in CASES:
            found[case][-1]["ratio"] = found[case][-1]["seconds"] / found[CASES[-1]][-1]["seconds"]
    return found


def main(
    tokens: Annotated[int, typer.Option(min=20_000, help="tokens of the corpus, of 2 bytes each")] = 200_000_000,
    steps: Annotated[int, typer.Option(min=1, help="steps on the page")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="calls of each case")] = 3,
) -> None:
    """Write a corpus, make pages, print a table; the last line is one JSON line."""
    of_machine = machine()
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), tokens, steps, rounds)
    entries = {case: spread(figures) for case, figures in found.items()}
    title = f"{tokens:,} tokens, {steps} steps of {BATCH_SIZE} x {SEQ_LEN}"
    wide_console().print(spread_table(title, "case", COLUMNS, entries.items()))
    pages = [entries[case]["median"] for case in CASES[:-1]]
    report = {
        "benchmark": "report_page",
        "machine": of_machine,
        "tokens": tokens,
        "steps": steps,
        "limit_s": LIMIT_S,
        "limit_bytes": LIMIT_BYTES,
        "within": all(page["seconds"] <= LIMIT_S and page["bytes"] <= LIMIT_BYTES for page in pages),
    }
    print(json.dumps({**report, "entries": [{"case": case, **entry} for case, entry in entries.items()]}))


if __name__ == "__main__":
    typer.run(main)
