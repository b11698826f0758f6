"""`dali_pipes.TokenLoader`, and DALI as its tutorials use it: one batch a run."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from comparison.alternatives import Pair
from comparison.loops import Loop, epoch_orders
from comparison.work import Work
from dali_pipes import TokenLoader

_DEFAULT_DEPTH, _DEFAULT_THREADS = 2, 2


class DaliPipes(Loop):
    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        with self._loader(work) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while True:
                for batch in loader:
                    yield batch["input_ids"], batch["labels"]

    def state_after(self, work: Work, batches: int) -> Any:
        """The state of a fresh loader with its count of rows moved: a state is arithmetic."""
        with self._loader(work) as loader:
            return loader.state_dict() | {"rows": batches * work.batch_size}

    def _loader(self, work: Work) -> TokenLoader:
        given = {"prefetch_queue_depth": work.depth, "num_threads": work.threads, **self._settings}
        return TokenLoader(
            corpus=work.corpus,
            batch_size=work.batch_size,
            seq_len=work.seq_len,
            seed=work.seed,
            device="cpu",
            **{name: value for name, value in given.items() if value is not None},
        )


class PlainDali(Loop):
    """The callback gathers one uint16 `(B, T + 1)` batch; DALI cuts it twice and widens; its iterator makes tensors.

    DALI's own checkpoints are not used: a state at 80 % of the epoch could only be had by running to there.
    """

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        del state
        threads, depth = work.threads or _DEFAULT_THREADS, work.depth or _DEFAULT_DEPTH
        pipeline = Pipeline(batch_size=work.batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=depth)
        with pipeline:
            rows = fn.external_source(
                source=_Batches(work), cycle="raise", batch=True, dtype=types.DALIDataType.UINT16, ndim=1
            )
            inputs = fn.cast(rows[: work.seq_len], dtype=types.DALIDataType.INT64)
            labels = fn.cast(rows[1:], dtype=types.DALIDataType.INT64)
            pipeline.set_outputs(inputs, labels)
        loader = DALIGenericIterator(
            [pipeline], ["input_ids", "labels"], auto_reset=True, last_batch_policy=LastBatchPolicy.DROP
        )
        while True:
            for (batch,) in loader:
                yield batch["input_ids"], batch["labels"]


class _Batches:
    """Iterable over an epoch's gathered batches; each `iter` is the next epoch."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._windows = work.window_view()
        self._orders = epoch_orders(work)

    def __iter__(self) -> Iterator["np.ndarray[Any, np.dtype[np.uint16]]"]:
        _, order = next(self._orders)
        batch_size = self._work.batch_size
        for first in range(0, self._work.epoch_batches * batch_size, batch_size):
            yield self._windows[order[first : first + batch_size]]
