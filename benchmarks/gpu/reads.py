"""How fast this machine's threads read a file that lies in the page cache, with no GPU in it: a ceiling of placements.

Data is read by calls that can fail, never mapped, so every token is copied once by a core. Where that is slower than
the link, the link is not what `host` and the loading of a corpus are held up by.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dali_pipes import open_corpus
from dali_pipes.placement.device import LOAD_CHUNK_BYTES, LOAD_THREADS
from gpu.session import Session

ROW_READ, CHUNK_READ = "rows of 4097 tokens", "4 MiB at a time"
THREADS = min(LOAD_THREADS, os.cpu_count() or 1)
_ROWS = 2048  # in one call, as in a block of large batches


def read_rates(session: Session) -> dict[str, float]:
    """Bytes a second, by what is read and by threads: "WHAT, N threads". Measured once a run."""
    return session.kept("read_rates", lambda: _measure(session))


def rate_name(what: str, threads: int) -> str:
    """The name of a figure of `read_rates`."""
    return f"{what}, {threads} thread{'s' * (threads > 1)}"


def _measure(session: Session) -> dict[str, float]:
    tokens, row = session.pick(200_000_000, 2 * 16 * 20 + 1), session.pick(4097, 17)
    chunk = min(LOAD_CHUNK_BYTES // 2, tokens)
    rates = {}
    with open_corpus(session.corpus("training", tokens)) as corpus:
        generator = np.random.default_rng(1)
        for what, width, pieces in ((CHUNK_READ, chunk, 1), (ROW_READ, row, session.pick(_ROWS, 4))):
            for threads in sorted({1, THREADS}):
                # Pinned, as theirs are: whether pages are at hand is part of the speed.
                buffers = [session.machine.pinned(2 * width * pieces).numpy().view(np.uint16) for _ in range(threads)]
                targets = width * np.arange(pieces)
                lengths = np.full(pieces, width)
                calls = max(1, session.pick(1 << 27, 1 << 10) // (width * pieces))
                places = generator.integers(0, tokens - width + 1, (threads, calls, pieces))

                def read(thread: int) -> None:
                    for starts in places[thread]:  # noqa: B023  (run to its end within this turn)
                        corpus.read_pieces(starts, lengths, targets, buffers[thread])  # noqa: B023

                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read, range(threads)))  # once for the threads' own memory
                    started = time.perf_counter()
                    list(pool.map(read, range(threads)))
                    seconds = time.perf_counter() - started
                rates[rate_name(what, threads)] = 2 * width * pieces * calls * threads / seconds
    return rates
