"""Measure `TokenLoader`s over one source and over mixtures, in a separate child process: see `comparison.child`.

rates   tokens per second and CPU time of several in turn, and whether the last batches hold what `locate` says
start   the first batch, and a resume at 80 % of the epoch, whose rows are marked beforehand as in `comparison.start`
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from comparison.alternatives import Pair
from comparison.check import CheckError, problems_as_results
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


def rates(
    cases: list[list[list[str]]], total_tokens: int, batch_size: int, seq_len: int, rounds: int, seconds: float
) -> list[list[dict[str, Any]]]:
    """Rates and CPU time of each case in each round, case by case, in slices of `seconds`.

    All loaders are open, and those whose turn it is not have read ahead what they may and sleep, so that a slow moment
    of the machine is one of all cases. The first fifth of a slice, which begins with what was read ahead, is not timed.
    Raises `CheckError` where the last batch is not what `locate` says.
    """
    limits = Limits(batches=1, min_s=seconds, max_s=seconds)
    untimed = Limits(batches=1, min_s=seconds / 5, max_s=seconds / 5)
    with contextlib.ExitStack() as stack:
        loaders = [stack.enter_context(open_loader(sources, total_tokens, batch_size, seq_len)) for sources in cases]
        streams = [_pairs(loader) for loader in loaders]
        batches = [warm_up(stream) for stream in streams]
        found: list[list[dict[str, Any]]] = [[] for _ in cases]
        last: list[Pair] = []
        for _ in range(rounds):
            last = []
            for case, stream in enumerate(streams):
                before, _ = timed(stream, batch_size * seq_len, untimed)
                figures, batch = timed(stream, batch_size * seq_len, limits)
                found[case].append(figures)
                batches[case] += before["batches"] + figures["batches"]
                last.append(batch)
        for loader, sources, count, (inputs, labels) in zip(loaders, cases, batches, last, strict=True):
            _check(loader, sources, count - 1, inputs, labels)
    return found


def _check(
    loader: TokenLoader, sources: list[list[str]], number: int, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """Compare a batch, by its number from the start on, with the files where `locate` says that it is."""
    epoch, step = divmod(number, len(loader))
    following = {path: later for files in sources for path, later in itertools.pairwise(files)}
    for row, (own, shifted) in enumerate(zip(inputs, labels, strict=True)):
        place = loader.locate(step, row, epoch=epoch)
        tokens = np.fromfile(place.file, np.uint16, len(own) + 1, offset=2 * place.offset)
        if len(tokens) <= len(own) and str(place.file) in following:  # the row goes on in the next file
            rest = np.fromfile(following[str(place.file)], np.uint16, len(own) + 1 - len(tokens))
            tokens = np.concatenate((tokens, rest))
        if not (np.array_equal(own, tokens[:-1]) and np.array_equal(shifted, tokens[1:])):
            raise CheckError(f"row {row} of step {step} is not at token {place.offset:,} of {place.file}")


def start(sources: list[list[str]], total_tokens: int, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Seconds, and CPU seconds of all threads, to the first batch, from the start and at 80 % of the epoch.

    Writes marks into the files.
    """
    began, cpu = time.perf_counter(), time.process_time()
    loader = open_loader(sources, total_tokens, batch_size, seq_len)
    next(iter(loader))
    figures: dict[str, Any] = {
        "first_batch_s": time.perf_counter() - began,
        "first_batch_cpu_s": time.process_time() - cpu,
    }
    step = int(RESUME_AT * len(loader))
    state = loader._states.at(Position(0, step * batch_size))  # that of a run which got there, by arithmetic
    expected = mark_rows(loader, step, batch_size, seq_len)
    loader.close()
    began, cpu = time.perf_counter(), time.process_time()
    with open_loader(sources, total_tokens, batch_size, seq_len) as resumed:
        resumed.load_state_dict(state)
        batch = next(iter(resumed))
        figures |= {"resume_s": time.perf_counter() - began, "resume_cpu_s": time.process_time() - cpu}
        if not (torch.equal(batch["input_ids"], expected[:, :-1]) and torch.equal(batch["labels"], expected[:, 1:])):
            raise CheckError(f"the batch after the resume is not the one that locate() reports for step {step}")
    return figures


def _pairs(loader: TokenLoader) -> Iterator[Pair]:
    for batch in loader:
        yield batch["input_ids"], batch["labels"]


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task."""
    return start(**task) if "sources" in task else {"cases": rates(**task)}


def load(task: dict[str, Any]) -> None:
    """Hand out a batch of another corpus, so that everything is imported that a loader imports when it is built."""
    del task
    with TokenLoader(corpus="synthetic:1M", batch_size=2, seq_len=16, device="cpu", quiet=True) as loader:
        next(iter(loader))


if __name__ == "__main__":
    serve(load, run)
