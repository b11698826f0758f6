"""Whether two checkouts make the same batches, states and origins of random settings, also after a resume.

    python tests/compare_checkouts.py ../the-old-one . 200

Each checkout runs in a process of its own, on the same corpora, and goes on with its own states and with the other's.
The last line counts the cases that are equal; the first that is not is printed with its settings, and the exit status
is 1. Settings that both refuse are counted apart.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]
FORMATS = ("flat", "npy", "llmc", "megatron", "parquet")
OUTPUTS = ("labels", "position_ids", "segment_ids", "loss_mask", "attention_mask", "cu_seqlens", "max_seqlen")
STEPS_AFTER = 6
"""Batches that are compared after a resume."""


def write_corpora(folder: Path, dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Corpora of documents that end in 0 (of llm.c's format: that begin with it); the settings that read each."""
    sys.path.insert(0, str(Path(__file__).parent / "corpus"))
    import pyarrow as pa
    import pyarrow.parquet
    from corpus_files import write_megatron, write_shard

    corpora = []
    for number in range(count):
        form = FORMATS[number % len(FORMATS)]
        dtype = "int32" if form == "parquet" else dice.choice(("uint16", "uint32"))
        here = folder / f"{number}_{form}"
        here.mkdir()
        longest = dice.choice((3, 20, 90))
        for shard in range(dice.randint(1, 3)):
            lengths = [dice.randint(1, longest) for _ in range(dice.randint(20, 160))]
            documents = [np.array([*dice.choices(range(1, 999), k=n - 1), 0], dtype) for n in lengths]
            path = here / f"s_{shard}{'.npy' if form == 'npy' else '.parquet' if form == 'parquet' else '.bin'}"
            if form == "parquet":
                rows = pa.table({"input_ids": pa.array([ids.tolist() for ids in documents], pa.list_(pa.int32()))})
                pyarrow.parquet.write_table(rows, path, row_group_size=dice.randint(5, 50))
                continue
            if form == "megatron":
                write_megatron(path.with_suffix(""), documents)
            elif form == "llmc":
                write_shard(path, np.concatenate([ids[::-1] for ids in documents]), form)
            else:
                write_shard(path, np.concatenate(documents), form)
            if number % 3 == 2:
                mask = bytes(dice.choices((0, 1), k=sum(lengths)))
                path.with_name(f"{path.name}.loss").write_bytes(mask)
        reads: dict[str, Any] = {"corpus": [str(here)]}
        if form in ("flat", "npy"):
            reads["eos_id"] = 0
        if form == "flat":
            reads["dtype"] = dtype
        if form == "llmc":
            reads["document_start_id"] = 0
        corpora.append(reads)
    return corpora


def random_case(corpora: list[dict[str, Any]], dice: random.Random) -> Case:
    """Settings of a loader, after how many batches the state is saved, and other sizes to go on with."""
    rows = dice.choice(("stream", "stream", "pack", "pad"))
    seq_len = dice.choice((4, 8, 16, 33, 64))
    world_size = dice.choice((1, 1, 2, 3))
    settings = dice.choice(corpora) | {
        "rows": rows,
        "seq_len": seq_len,
        "batch_size": dice.randint(1, 5),
        "seed": dice.randrange(1 << 40),
        "shuffle": dice.random() < 0.8,
        "drop_last": dice.random() < 0.5,
        "repeat": dice.random() < 0.3,
        "world_size": world_size,
        "rank": dice.randrange(world_size),
        "batches_per_run": dice.choice((None, 1, 2, 5, 16)),
        "num_threads": dice.randint(1, 3),
        "outputs": ["input_ids", "row_ids", *dice.sample(OUTPUTS, dice.randint(0, len(OUTPUTS)))],
        "device": "cpu",
        "quiet": True,
    }
    maybe: dict[str, Any] = {
        "mask_boundaries": dice.random() < 0.5,
        "mtp": dice.randint(1, 3),
        "static_buffers": True,
        "skip_steps": [[2, dice.randint(3, 6)]],
        "loss_masks": [],
        "context_parallel": [dice.randrange(2), 2],
    }
    if rows == "stream":
        maybe |= {
            "stride": dice.randint(1, 2 * seq_len),
            "label_shift": False,
            "validation_fraction": 0.3,
        }
    else:
        maybe |= {
            "long_documents": dice.choice(("truncate", "drop")),
            "window_documents": dice.randint(1, 100),
            "pad_id": dice.randint(1, 9),
        }
        if rows == "pad":
            maybe["length_buckets"] = sorted({*dice.sample(range(1, seq_len), 2), seq_len})
    settings |= {name: value for name, value in maybe.items() if dice.random() < 0.2}
    if "validation_fraction" in settings and dice.random() < 0.5:
        settings["split"] = "validation"
    later = {"batches_per_run": dice.choice((1, 3, None)), "num_threads": dice.randint(1, 3)}
    if "skip_steps" not in settings and dice.random() < 0.5:
        others = dice.choice((1, 2))
        later |= {"world_size": others, "rank": dice.randrange(others), "batch_size": dice.randint(1, 5)}
    return {"settings": settings, "later": later, "taken": dice.randint(0, 40), "seed": dice.randrange(1 << 30)}


def digest(batch: dict[str, Any]) -> str:
    """Of every byte, shape, type and name of a batch."""
    whole = hashlib.sha256()
    for name, value in batch.items():
        if hasattr(value, "numpy"):
            array = value.numpy()
            whole.update(f"{name} {array.dtype} {array.shape} {value.is_contiguous()}".encode() + array.tobytes())
        else:
            whole.update(f"{name} {value!r}".encode())
    return whole.hexdigest()[:16]


def batches_of(loader: Any, count: int) -> Iterator[dict[str, Any]]:
    """At most so many batches, over as many epochs."""
    epochs = 0
    while count > 0 and epochs < 4:
        epochs += 1
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return


def went_on(loader: Any, state: dict[str, Any]) -> list[Any]:
    """What comes after a state: batches, lengths, and the state then."""
    loader.load_state_dict(state)
    found: list[Any] = [loader.epoch, loader.step, *map(digest, batches_of(loader, STEPS_AFTER))]
    return [*found, loader.state_dict()]


def origins(loader: Any, batch_size: int, dice: random.Random) -> list[str]:
    """Where some rows of this epoch and of another one come from."""
    found = []
    for _ in range(3):
        step, row, epoch = dice.randrange(30), dice.randrange(batch_size), dice.randrange(3)
        try:
            found.append(repr(tuple(loader.locate(step, row, epoch=epoch))[:5]))  # without what newer ones add
        except Exception as error:
            found.append(type(error).__name__)
    return found


def run(case: Case) -> dict[str, Any]:
    """What a case is here: batches, states and origins, or the kind of error."""
    from dali_pipes import TokenLoader

    dice, settings = random.Random(case["seed"]), case["settings"]
    try:
        with TokenLoader(**settings) as loader:
            found: dict[str, Any] = {"length": len(loader), "fingerprint": loader.corpus.fingerprint}
            found["batches"] = list(map(digest, batches_of(loader, case["taken"])))
            found["state"] = loader.state_dict()
            found["origins"] = origins(loader, settings["batch_size"], dice)
        with TokenLoader(**settings | case["later"]) as loader:
            found["after"] = went_on(loader, found["state"])
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return found


def run_from(case: Case, state: dict[str, Any]) -> list[Any]:
    """What comes after a state that the other checkout saved."""
    from dali_pipes import TokenLoader

    try:
        with TokenLoader(**case["settings"] | case["later"]) as loader:
            return went_on(loader, state)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def work(checkout: Path, tasks: Path, results: Path) -> None:
    """The cases, or the cases and states, of a file, run with the package of `checkout`."""
    import dali_pipes

    assert Path(str(dali_pipes.__file__)).is_relative_to(checkout), dali_pipes.__file__
    found = [
        run(task["case"]) if "state" not in task else run_from(task["case"], task["state"])
        for task in json.loads(tasks.read_text())
    ]
    results.write_text(json.dumps(found))


def run_in(checkout: Path, tasks: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The results of `tasks` in a process that imports the package from `checkout`."""
    given, results = folder / "tasks.json", folder / "results.json"
    given.write_text(json.dumps(tasks))
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONSAFEPATH": "1",  # not the folder of this script
        "DALI_PIPES_CACHE": str(folder / f"cache_{checkout.name}"),
    }
    command = [sys.executable, __file__, "--work", str(checkout), str(given), str(results)]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return list(json.loads(results.read_text()))


def differences(case: Case, one: Any, other: Any, crossed: list[list[Any]]) -> str | None:
    """What differs first between two results, if anything; `crossed`: what each made of the other's state."""
    if "refused" in one or "refused" in other:
        return None if "refused" in one and "refused" in other else f"refused\n  A: {one}\n  B: {other}"
    for name in one:
        if one[name] != other[name]:
            return f"{name}\n  A: {one[name]}\n  B: {other[name]}"
    for name, found in zip(("A going on with the state of B", "B going on with the state of A"), crossed, strict=True):
        if found != one["after"]:
            return f"{name}\n  {found}\n  expected {one['after']}"
    return None


def compare(checkouts: list[Path], count: int, seed: int) -> int:
    """Run `count` cases in both; returns how many differ."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = write_corpora(folder, dice, 15)
        cases = [random_case(corpora, dice) for _ in range(count)]
        tasks = [{"case": case} for case in cases]
        found = [run_in(checkout, tasks, folder) for checkout in checkouts]
        crossed = []
        for checkout, others in zip(checkouts, reversed(found), strict=True):
            states = [{"case": case, "state": other.get("state")} for case, other in zip(cases, others, strict=True)]
            crossed.append(run_in(checkout, states, folder))
    refused = sum("refused" in one and "refused" in other for one, other in zip(*found, strict=True))
    bad = 0
    for case, one, other, *after in zip(cases, *found, *crossed, strict=True):
        difference = differences(case, one, other, after)
        if difference is not None:
            bad += 1
            if bad == 1:
                print(f"{json.dumps(case)}\n{difference}")
    batches = sum(len(one.get("batches", ())) for one in found[0])
    print(
        f"seed {seed}: {count - bad - refused} equal ({batches:,} batches), {refused} refused by both, {bad} different"
    )
    return bad


def main() -> int:
    """0 where all cases are equal."""
    if sys.argv[1:2] == ["--work"]:
        work(*map(Path, sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs=2, type=lambda path: Path(path).resolve())
    parser.add_argument("count", nargs="?", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of the cases; another one each time if not given")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 20) if given.seed is None else given.seed
    return int(compare(given.checkouts, given.count, seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
