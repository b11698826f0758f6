"""Lines on standard error."""

import contextlib
import functools
import sys


@functools.lru_cache(maxsize=256)
def say_once(text: str) -> None:
    """Put lines on standard error, the same ones once in a process."""
    if sys.stderr is not None:  # None in a process without one, for which `print` would take standard output
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"dali_pipes: {text}\n")
            sys.stderr.flush()
