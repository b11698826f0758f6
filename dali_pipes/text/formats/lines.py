"""Lines of text files, cut from chunks of bytes."""

from collections.abc import Iterator


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their `\\n`. Nothing after the last `\\n` is not another line."""
    pending: list[bytes] = []  # of a line that goes on: joined once, however many chunks it spans
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending = [others[-1]]
    last = b"".join(pending)
    if last:
        yield last
