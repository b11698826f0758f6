"""A bar with tokens a second and the time left, on a terminal."""

import contextlib
import sys
import time
from collections.abc import Iterator

from dali_pipes.text.tokenize import Advance


@contextlib.contextmanager
def show_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """A function that takes the input bytes and tokens just done. The time left goes by bytes of the inputs."""
    if not sys.stderr.isatty():
        yield lambda done, tokens: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=total_bytes, rate="")
        start, all_tokens = time.monotonic(), 0

        def advance(done: int, tokens: int) -> None:
            nonlocal all_tokens
            all_tokens += tokens
            rate = all_tokens / max(1e-9, time.monotonic() - start)
            progress.update(bar, advance=done, rate=f"{rate / 1e6:.2f} Mtok/s, {all_tokens:,} tokens")

        yield advance
