"""Measure loaders of samples in a separate child process: see `comparison.child`.

rates   items per second and CPU time of several loaders over one dataset, in turn, in short slices
start   the first batch, and a resume at 80 % of the epoch: by a state, or as torch does it, by skipping batches
"""

import contextlib
import itertools
import random
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from comparison.check import CheckError, problems_as_results
from comparison.child import serve
from comparison.process import CpuMeter
from comparison.sample_sets import BATCH_SIZES, DATASETS, decode_and_crop, encoded_jpegs
from comparison.work import RESUME_AT
from dali_pipes import SampleLoader

UNTIMED = 0.25
"""Of a slice, at its beginning: takes the batches that were made ahead of it."""
_SETTLE_S, _SETTLE_TRIES = 0.05, 40


def open_loader(name: str, kind: str, folder: Path, items: int) -> Any:
    """`torch_0`, `ours_2`, `monai_2`: whose it is, and the number of workers; `ours_graph`: decoded by DALI."""
    settings: dict[str, Any] = {"batch_size": BATCH_SIZES[kind], "shuffle": True, "drop_last": True}
    maker, _, workers = name.partition("_")
    if workers == "graph":
        return SampleLoader(encoded_jpegs(folder, items), graph=decode_and_crop, device="cpu", **settings)
    dataset = DATASETS[kind](folder, items)
    settings["num_workers"] = int(workers)
    if maker == "torch":
        torch.manual_seed(0)
        return DataLoader(dataset, persistent_workers=workers != "0", **settings)
    if maker == "monai":
        from monai.data import DataLoader as MonaiDataLoader

        return MonaiDataLoader(dataset, persistent_workers=True, **settings)
    return SampleLoader(dataset, device="cpu", **settings)


def rates(
    names: list[str], kind: str, folder: str, items: int, slices: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Items per second and CPU seconds an item of each loader in each slice.

    All loaders are open; those whose turn it is not have made their batches ahead, and sleep. Each round of slices
    has another order. Raises `CheckError` where the first batch of ours is not the one that `locate` names, or
    is augmented otherwise by workers.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        streams: dict[str, Generator[Any, None, None]] = {}
        augmented: list[torch.Tensor] = []
        for name in names:
            loader = open_loader(name, kind, Path(folder), items)
            if name.startswith("ours"):
                stack.enter_context(loader)
            streams[name] = stack.enter_context(contextlib.closing(_epochs(loader)))
            if name.startswith("ours"):
                batch = next(streams[name])
                _check(loader, batch, 0)
                augmented += [] if name == "ours_graph" else [batch[0].clone()]
            next(streams[name])
        if not all(torch.equal(batch, augmented[0]) for batch in augmented):
            raise CheckError("the first batch is not the same with another number of workers")
        for number in range(slices):
            for name in random.Random(number).sample(names, len(names)):
                _slice(streams[name], UNTIMED * seconds)
                found[name].append(_slice(streams[name], seconds))
                _settle()
    return found


def start(name: str, kind: str, folder: str, items: int) -> dict[str, float]:
    """Seconds and CPU seconds to the first batch, and to the batch at 80 % of an epoch for a new loader."""
    loader = open_loader(name, kind, Path(folder), items)
    step, state = int(RESUME_AT * len(loader)), None
    if name.startswith("ours"):
        state = loader.state_dict() | {"rows": step * BATCH_SIZES[kind]}
        loader.close()
    del loader
    figures: dict[str, float] = {}
    for what, skipped in (("first_batch", 0), ("resume", step)):
        meter, began = CpuMeter(), time.perf_counter()
        loader = open_loader(name, kind, Path(folder), items)
        if skipped and state is not None:
            loader.load_state_dict(state)
        stream = iter(loader)
        batch = next(stream if state is not None else itertools.islice(stream, skipped, None))
        figures |= {f"{what}_s": time.perf_counter() - began, f"{what}_cpu_s": meter.elapsed_s()}
        if state is not None:
            _check(loader, batch, skipped)
            loader.close()
        del loader, stream
    return figures


def _epochs(loader: Any) -> Generator[Any, None, None]:
    while True:
        yield from loader


def _check(loader: Any, batch: Any, step: int) -> None:
    expected = [loader.locate(step, row, epoch=0).item for row in range(len(batch[1]))]
    if batch[1].tolist() != expected:
        raise CheckError(f"step {step} has the items {batch[1].tolist()}; locate() names {expected}")


def _slice(stream: Iterator[Any], seconds: float) -> dict[str, float]:
    items, meter, began = 0, CpuMeter(), time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        items += len(next(stream)[1])
    taken, cpu = time.perf_counter() - began, meter.elapsed_s()
    return {"items_per_s": items / taken, "cpu_s_per_item": cpu / items}


def _settle() -> None:
    """Wait until the workers of the last slice have made what they make ahead, or the next one would pay for it."""
    for _ in range(_SETTLE_TRIES):
        meter = CpuMeter()
        time.sleep(_SETTLE_S)
        if meter.elapsed_s() < _SETTLE_S / 10:
            return


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task."""
    return {"rates": rates(**task)} if "names" in task else start(**task)


def load(task: dict[str, Any]) -> None:
    """Import what is imported when a loader is first used."""
    from dali_pipes.samples import sample_loader  # noqa: F401

    if task["kind"] == "volume":
        import zarr  # noqa: F401
    if any(name.endswith("graph") for name in task.get("names", [task.get("name")])):
        from nvidia.dali import fn, math, types  # noqa: F401

        from dali_pipes.samples import graph  # noqa: F401


if __name__ == "__main__":
    serve(load, run)
