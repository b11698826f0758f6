"""Time the first start and the resume of one `TokenLoader`, in a separate child process: see `comparison.child`.

The corpus is a sparse file: as long as it should be, all zeros, no blocks on the disk. After the first start, marks
are written where `locate` says that the rows of the resumed step lie; the resumed loader must deliver just them.
"""

import importlib
import json
import os
import time
from itertools import islice
from typing import Any

import numpy as np
import torch

from comparison.check import CheckError, problems_as_results
from comparison.child import serve
from comparison.process import MemoryWatch
from comparison.work import RESUME_AT
from dali_pipes import LoaderConfig, TokenLoader

_MEMORY_BATCHES = 200
_MEMORY_EVERY = 20


def measure(files: list[str], batch_size: int, seq_len: int) -> dict[str, Any]:
    """Seconds to the first batch, from the start and at 80 % of the epoch, and the memory the loader adds."""
    config = LoaderConfig(corpus=files, dtype="uint16", batch_size=batch_size, seq_len=seq_len, device="cpu")
    memory = MemoryWatch()
    began = time.perf_counter()
    loader = TokenLoader(config)
    next(iter(loader))
    figures: dict[str, Any] = {"tokens": loader.corpus.num_tokens, "first_batch_s": time.perf_counter() - began}
    for number, _ in enumerate(islice(loader, _MEMORY_BATCHES)):
        if number % _MEMORY_EVERY == 0:
            memory.look()
    figures |= memory.added()
    step = int(RESUME_AT * len(loader))
    state = loader.state_dict() | {"epoch": 0, "rows": step * batch_size}
    figures["state_bytes"] = len(json.dumps(state))
    expected = mark_rows(loader, step, batch_size, seq_len)
    loader.close()
    began = time.perf_counter()
    with TokenLoader(config) as resumed:
        resumed.load_state_dict(state)
        batch = next(iter(resumed))
        figures["resume_s"] = time.perf_counter() - began
        if not (torch.equal(batch["input_ids"], expected[:, :-1]) and torch.equal(batch["labels"], expected[:, 1:])):
            raise CheckError(f"the batch after the resume is not the one that locate() reports for step {step}")
    return figures


def mark_rows(loader: TokenLoader, step: int, batch_size: int, seq_len: int) -> torch.Tensor:
    """Write a pattern over each row of a step of epoch 0; returns the patterns, int64 `(B, T + 1)`."""
    rows = np.arange(seq_len + 1) + 1 + 1000 * np.arange(batch_size)[:, None]
    rows = rows.astype(np.uint16)
    for number, row in enumerate(rows):
        place = loader.locate(step, number, epoch=0)
        file = os.open(place.file, os.O_WRONLY)
        try:
            os.pwrite(file, row.tobytes(), row.itemsize * place.offset)
        finally:
            os.close(file)
    return torch.from_numpy(rows.astype(np.int64))


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task."""
    return measure(**task)


def load(task: dict[str, Any]) -> None:
    """Import DALI's parts, which the loader else imports when it is built."""
    del task
    for module in ("nvidia.dali.fn", "nvidia.dali.types", "nvidia.dali.plugin.pytorch"):
        importlib.import_module(module)


if __name__ == "__main__":
    serve(load, run)
