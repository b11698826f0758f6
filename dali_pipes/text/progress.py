"""A progress bar with tokens per second; the remaining time is estimated from the bytes of the inputs."""

import contextlib
import time
from collections.abc import Callable, Iterator

from dali_pipes.runtime.progress import ProgressBar


@contextlib.contextmanager
def show_progress(text: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """A function that takes the input bytes and the tokens done since the last call."""
    bar = ProgressBar(text)
    bar.expect(total_bytes)
    start, all_tokens = time.monotonic(), 0

    def advance(done: int, tokens: int) -> None:
        nonlocal all_tokens
        all_tokens += tokens
        rate = all_tokens / max(1e-9, time.monotonic() - start)
        bar.advance(done, f"{rate / 1e6:.2f} Mtok/s, {all_tokens:,} tokens")

    try:
        yield advance
    finally:
        bar.close()
