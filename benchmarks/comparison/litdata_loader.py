"""LitData: token chunks written by `optimize`, read with `TokensLoader`, the windows laid end to end."""

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from comparison.alternatives import Pair
from comparison.work import Work

_CHUNK_TOKENS = 1 << 25  # 64 MB of uint16
_PIECES_IN_CHUNK = 64


class LitData:
    def prepare(self, work: Work) -> None:
        target = work.prepared("litdata")
        if target.exists():
            return
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        piece = max(1, _CHUNK_TOKENS // _PIECES_IN_CHUNK // (work.seq_len + 1))  # windows written in one call
        optimize(
            fn=functools.partial(_pieces, work=work, piece=piece),
            inputs=list(range(0, work.windows, piece)),
            output_dir=str(unfinished),
            chunk_size=piece * _PIECES_IN_CHUNK * (work.seq_len + 1),
            item_loader=TokensLoader(block_size=work.seq_len + 1),
            num_workers=1,
            reorder_files=False,
            verbose=False,
        )
        unfinished.rename(target)

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        loader = self._loader(work)
        if state is not None:
            loader.load_state_dict(state)
        while True:
            for rows in loader:
                yield rows[:, :-1].to(torch.int64).contiguous(), rows[:, 1:].to(torch.int64).contiguous()

    def state_after(self, work: Work, batches: int) -> Any:
        """The state after one batch with its counts moved; consuming 80 % of the epoch would take too long."""
        loader = self._loader(work)
        next(iter(loader))
        state = loader.state_dict()
        rows = batches * work.batch_size
        counts = {"num_samples_yielded": rows, "sample_in_epoch": rows}
        return state | {"num_samples_yielded": rows, "dataset": state["dataset"] | counts}

    def _loader(self, work: Work) -> Any:
        dataset = StreamingDataset(
            str(work.prepared("litdata")),
            item_loader=TokensLoader(block_size=work.seq_len + 1),
            shuffle=True,
            drop_last=True,
            seed=work.seed,
        )
        return StreamingDataLoader(dataset, batch_size=work.batch_size, num_workers=0, drop_last=True)


def _pieces(first: int, work: Work, piece: int) -> torch.Tensor:
    """Windows `first` to `first + piece`, one after the other, as one stretch of tokens."""
    return torch.from_numpy(work.window_view()[first : first + piece].reshape(-1).copy())
