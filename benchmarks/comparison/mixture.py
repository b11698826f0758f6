"""Measure one `TokenLoader` over one source or a mixture, in a separate child process: see `comparison.child`.

rate    tokens per second and CPU time, and whether the last batch holds what `locate` says
start   the first batch, and a resume at 80 % of the epoch, whose rows are marked beforehand as in `comparison.start`
"""

import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from comparison.alternatives import Pair
from comparison.check import CheckError
from comparison.child import serve
from comparison.measure import timed, warm_up
from comparison.start import mark_rows
from comparison.work import RESUME_AT, Limits
from dali_pipes import TokenLoader
from dali_pipes.schedule import Position


def open_loader(sources: list[list[str]], total_tokens: int, batch_size: int, seq_len: int) -> TokenLoader:
    """A loader over one corpus, or a mixture of several in proportion to their sizes. Each source lists its files."""
    settings: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "device": "cpu", "quiet": True}
    if len(sources) == 1:
        return TokenLoader(corpus=sources[0], dtype="uint16", repeat=True, **settings)
    mixture = {
        f"source_{number:04d}": {"corpus": files, "dtype": "uint16", "weight": "size"}
        for number, files in enumerate(sources)
    }
    return TokenLoader(mixture=mixture, total_tokens=total_tokens, repeat=True, **settings)


def rate(sources: list[list[str]], total_tokens: int, batch_size: int, seq_len: int, limits: Limits) -> dict[str, Any]:
    """Rates and CPU time of a stream of batches. Raises `CheckError` where the last one is not what `locate` says."""
    with open_loader(sources, total_tokens, batch_size, seq_len) as loader:
        stream = _pairs(loader)
        batches = warm_up(stream)
        figures, (inputs, labels) = timed(stream, batch_size * seq_len, limits)
        batches += figures["batches"]
        epoch, step = divmod(batches - 1, len(loader))
        for row in range(batch_size):
            place = loader.locate(step, row, epoch=epoch)
            expected = torch.from_numpy(
                np.fromfile(place.file, np.uint16, seq_len + 1, offset=2 * place.offset).astype(np.int64)
            )
            if not (torch.equal(inputs[row], expected[:-1]) and torch.equal(labels[row], expected[1:])):
                raise CheckError(f"row {row} of step {step} is not at token {place.offset:,} of {place.file}")
    return figures


def start(sources: list[list[str]], total_tokens: int, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Seconds to the first batch, from the start and at 80 % of the epoch. Writes marks into the files."""
    began = time.perf_counter()
    loader = open_loader(sources, total_tokens, batch_size, seq_len)
    next(iter(loader))
    figures: dict[str, Any] = {"first_batch_s": time.perf_counter() - began}
    step = int(RESUME_AT * len(loader))
    state = loader._states.at(Position(0, step * batch_size))  # that of a run which got there, by arithmetic
    expected = mark_rows(loader, step, batch_size, seq_len)
    loader.close()
    began = time.perf_counter()
    with open_loader(sources, total_tokens, batch_size, seq_len) as resumed:
        resumed.load_state_dict(state)
        batch = next(iter(resumed))
        figures["resume_s"] = time.perf_counter() - began
        if not (torch.equal(batch["input_ids"], expected[:, :-1]) and torch.equal(batch["labels"], expected[:, 1:])):
            raise CheckError(f"the batch after the resume is not the one that locate() reports for step {step}")
    return figures


def _pairs(loader: TokenLoader) -> Iterator[Pair]:
    for batch in loader:
        yield batch["input_ids"], batch["labels"]


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task; problems come back as `failed` with the reason."""
    limits = task.pop("limits")
    try:
        return start(**task) if limits is None else rate(**task, limits=Limits(**limits))
    except CheckError as error:
        return {"failed": f"wrong data: {error}"}
    except Exception:
        return {"failed": traceback.format_exc(limit=-4)}


def load(task: dict[str, Any]) -> None:
    """Hand out a batch of another corpus, so that everything is imported that a loader imports when it is built."""
    del task
    with TokenLoader(corpus="synthetic:1M", batch_size=2, seq_len=16, device="cpu", quiet=True) as loader:
        next(iter(loader))


if __name__ == "__main__":
    serve(load, run)
