"""One loader over the server, in a process that has not read anything before: started by `remote_loaders.py`.

    python -m comparison.remote_child '{"source": "dali_pipes", "url": ...}'     the last line is a JSON line

Imports are not timed: a training job has them anyway.
"""

import importlib
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from comparison.remote_server import SETTLES_S, counted
from comparison.remote_sources import SOURCES, use_server
from comparison.work import RESUME_AT, Work


def first_epoch(task: dict[str, Any], work: Work) -> dict[str, float]:
    """The first batch with nothing cached, a paced consumer, the rest of the epoch as fast as it goes.

    The state at 80 % and the row after it go to a file, for the other process.
    """
    counted(task["url"])
    begin = time.perf_counter()
    opened = SOURCES[task["source"]].open(work, task["url"], Path(task["cache"]), None)
    batches = iter(opened.batches)
    next(batches)
    found = {"first_batch_s": time.perf_counter() - begin}
    done, state, saved_at = 1, None, int(RESUME_AT * work.epoch_batches)
    wait_s, settled_s, start = 0.0, 0.0, time.perf_counter()
    step_s = work.batch_tokens / (1e6 * task["rate"])
    rest_begin, rest_from, begin = 0.0, 0, time.perf_counter()
    while True:
        now = time.perf_counter()
        paced = now - start < SETTLES_S + task["seconds"]
        if not paced and not rest_begin:
            rest_begin, rest_from = now, done
        row = next(batches, None)
        if row is None or now - start > task["most_s"]:
            break
        done += 1
        if done == saved_at + 1:
            Path(task["state"]).write_bytes(pickle.dumps((state, row.tolist())))
        if done == saved_at:
            state = opened.state()
        if paced:
            got = time.perf_counter()
            if now - start >= SETTLES_S:
                wait_s += got - now
                settled_s = settled_s or now
                found["paced_wait_pct"] = 100 * wait_s / max(got - settled_s + step_s, step_s)
            time.sleep(step_s)
    if rest_begin and done > rest_from:
        found["tokens_per_s"] = (done - rest_from) * work.batch_tokens / (time.perf_counter() - rest_begin)
    answered = counted(task["url"])
    used = done * work.batch_size * 2 * (work.seq_len + 1)
    found["epoch_share"] = done / work.epoch_batches
    found["bytes_read_per_used"] = answered["bytes"] / used
    found["requests_per_mtok"] = answered["requests"] / (done * work.batch_tokens / 1e6)
    return found


def resumed(task: dict[str, Any], work: Work) -> dict[str, float]:
    """As on another machine: a new process, an empty folder, and the saved state."""
    if not Path(task["state"]).exists():
        return {}
    state, expected = pickle.loads(Path(task["state"]).read_bytes())
    begin = time.perf_counter()
    opened = SOURCES[task["source"]].open(work, task["url"], Path(task["cache"]), state)
    row = next(iter(opened.batches))
    elapsed_s = time.perf_counter() - begin
    return {"resume_s": elapsed_s, "resume_exact": float(row.tolist() == expected)}


def main() -> None:
    task = json.loads(sys.argv[1])
    use_server(task["url"])
    for package in SOURCES[task["source"]].packages:
        importlib.import_module(package)
    importlib.import_module("torch")
    importlib.import_module("dali_pipes.loader.token_loader")
    work = Work(**task["work"])
    found = resumed(task, work) if task["is_resume"] else first_epoch(task, work)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
