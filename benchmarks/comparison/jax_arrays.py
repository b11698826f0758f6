"""Measure one way to arrays of JAX once, in a separate child process: see `comparison.child`.

Every way delivers the task of `comparison.work` as two int32 `jax.Array`s (B, T) on a mesh of one CPU device, each
epoch shuffled. From Grain's batches they are made by the call that `jax_batches` uses, the cheapest there is.
"""

import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from comparison.check import Checker, CheckError, problems_as_results
from comparison.child import serve
from comparison.process import CpuMeter
from comparison.work import Limits, Work
from dali_pipes import LoaderConfig
from dali_pipes.adapters.jax import JaxBatches, jax_batches

Arrays = tuple[Any, Any]
_WARMUP_S = 0.5


class Ours:
    """`jax_batches` with the defaults of the loader."""

    def __init__(self, work: Work, mesh: Any) -> None:
        config = LoaderConfig(
            corpus=work.corpus,
            dtype="uint16",
            batch_size=work.batch_size,
            seq_len=work.seq_len,
            seed=work.seed,
            repeat=True,
            quiet=True,
        )
        self._batches: JaxBatches = jax_batches(config, mesh)
        self._global_rows = work.batch_size

    def __iter__(self) -> Iterator[Arrays]:
        for batch in self._batches:
            yield batch["input_ids"], batch["labels"]

    def go_to(self, step: int) -> None:
        self._batches.load_state_dict(self._batches.state_dict() | {"rows": step * self._global_rows})

    def close(self) -> None:
        self._batches.close()


class Grain:
    """Grain's windows, shuffled and batched, with its default threads or with worker processes."""

    def __init__(self, work: Work, mesh: Any, workers: int = 0) -> None:
        import absl.flags
        import grain

        from comparison.grain_loader import WindowRows

        dataset = grain.MapDataset.source(WindowRows(work)).shuffle(seed=work.seed)
        dataset = dataset.batch(work.batch_size, drop_remainder=True).map(_split).repeat().to_iter_dataset()
        if workers:
            absl.flags.FLAGS.mark_as_parsed()  # Grain reads some, also in a program that is not one of absl
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self._iterator = iter(dataset)
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def __iter__(self) -> Iterator[Arrays]:
        for inputs, labels in self._iterator:
            yield self._array(inputs), self._array(labels)

    def _array(self, rows: Any) -> Any:
        return jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])

    def go_to(self, step: int) -> None:
        """Set the one number of its state; with workers it has one for each of them."""
        state = self._iterator.get_state()
        if list(state) != ["next_index"]:
            raise RuntimeError(f"expected Grain's state to be its next index, found {state}")
        self._iterator.set_state({"next_index": step})

    def close(self) -> None:
        self._iterator.close()


def _split(rows: Any) -> Any:
    return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)


WAYS: dict[str, Any] = {
    "dali_pipes": Ours,
    "grain": Grain,
    "grain_2_workers": lambda work, mesh: Grain(work, mesh, workers=2),
}


def measure(name: str, work: Work, limits: Limits) -> dict[str, Any]:
    """All figures of one run. Raises `CheckError` where the delivered data is wrong."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    jax.block_until_ready(jax.device_put(0))  # JAX has started
    began = time.perf_counter()
    source = WAYS[name](work, mesh)
    stream = iter(source)
    first = jax.block_until_ready(next(stream))
    figures: dict[str, Any] = {"first_batch_s": time.perf_counter() - began}
    checker = Checker(work)
    checker.check(*_as_torch(first))
    warm_until = time.perf_counter() + _WARMUP_S
    while time.perf_counter() < warm_until:
        batch = next(stream)
    meter, began, batches = CpuMeter(), time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < limits.max_s:
        batch = next(stream)
        batches += 1
    jax.block_until_ready(batch)
    tokens = batches * work.batch_tokens
    figures |= {"tokens_per_s": tokens / seconds, "cpu_s_per_mtok": meter.elapsed_s() / tokens * 1e6}
    checker.restart()
    checker.check(*_as_torch(batch))
    source.close()
    figures["resume_s"] = None if name == "grain_2_workers" else _resume(name, work, mesh, checker)
    return figures


def _resume(name: str, work: Work, mesh: Any, checker: Checker) -> float:
    """Seconds from a new object to the batch at 80 % of the epoch, which is compared with that of a whole run."""
    began = time.perf_counter()
    source = WAYS[name](work, mesh)
    source.go_to(work.resume_batch)
    resumed = jax.block_until_ready(next(iter(source)))
    seconds = time.perf_counter() - began
    source.close()
    checker.restart()
    checker.check(*_as_torch(resumed))
    return seconds


def _as_torch(batch: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    if {array.dtype for array in batch} != {np.dtype(np.int32)}:
        raise CheckError(f"expected int32, found {batch[0].dtype} and {batch[1].dtype}")
    inputs, labels = (torch.from_numpy(np.array(array, np.int64)) for array in batch)
    return inputs, labels


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task."""
    return measure(task["name"], Work(**task["work"]), Limits(**task["limits"]))


def load(task: dict[str, Any]) -> None:
    """Import what is otherwise imported when a loader is built."""
    importlib.import_module("dali_pipes.loader.token_loader" if task["name"] == "dali_pipes" else "grain")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    serve(load, run)
