"""Files whose tokens tell where they are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from oracle import IntArray


class CountingCorpus:
    """Files in which the token at corpus position i is i (modulo `vocab_size`)."""

    def __init__(self, folder: Path, sizes: Sequence[int], dtype: str = "uint32", vocab_size: int | None = None):
        self.folder = folder
        self.dtype = dtype
        folder.mkdir(exist_ok=True)
        total = sum(sizes)
        limit = vocab_size if vocab_size is not None else min(int(np.iinfo(dtype).max) + 1, 2**62)
        self.tokens: IntArray = np.arange(total, dtype=np.int64) % limit
        self.files = []
        start = 0
        for number, size in enumerate(sizes):
            path = folder / f"shard_{number:03d}.bin"
            self.tokens[start : start + size].astype(dtype).tofile(path)
            self.files.append(path)
            start += size

    @property
    def pattern(self) -> str:
        return str(self.folder / "*.bin")
