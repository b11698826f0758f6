"""MosaicML Streaming: one sample a window in local MDS shards."""

import gc
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from comparison.alternatives import Pair
from comparison.loops import widened
from comparison.work import Work

_COLUMN = "tokens"


class Mosaic:
    def prepare(self, work: Work) -> None:
        target = work.prepared("mds")
        if target.exists():
            return
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        columns = {_COLUMN: f"ndarray:uint16:{work.seq_len + 1}"}
        with MDSWriter(out=str(unfinished), columns=columns) as writer:
            for row in work.window_view():
                writer.write({_COLUMN: row})
        unfinished.rename(target)

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        dataset = self._dataset(work)
        if state is not None:
            dataset.load_state_dict(state)
        loader = StreamingDataLoader(
            dataset, batch_size=work.batch_size, num_workers=0, drop_last=True, collate_fn=_collate
        )
        try:
            while True:
                yield from loader
        finally:
            del dataset, loader
            _forget()

    def state_after(self, work: Work, batches: int) -> Any:
        dataset = self._dataset(work)
        state = dataset.state_dict(batches * work.batch_size, from_beginning=True)
        del dataset
        _forget()
        return state | {"epoch": 0}

    def _dataset(self, work: Work) -> Any:
        return StreamingDataset(
            local=str(work.prepared("mds")), shuffle=True, shuffle_seed=work.seed, batch_size=work.batch_size
        )


def _forget() -> None:
    """Let go of the shared memory by which a second dataset over the same folder would be refused."""
    gc.collect()
    clean_stale_shared_memory()


def _collate(samples: list[dict[str, Any]]) -> Pair:
    return widened(np.stack([sample[_COLUMN] for sample in samples]))
