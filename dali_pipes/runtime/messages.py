"""Messages: lines on standard error, and numbers with their nouns."""

import contextlib
import functools
import sys


@functools.lru_cache(maxsize=256)
def say_once(text: str) -> None:
    """Write a message to standard error; the same message only once per process."""
    if sys.stderr is not None:  # a process without one: `print` would write to standard output instead
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"dali_pipes: {text}\n")
            sys.stderr.flush()


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,203 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """`text` with escapes for what is not printable: control characters, newlines, surrogates, invisible marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
