"""One damaged copy of the files of a kind, read with a watch on errors, memory and the files that are opened."""

import os
import shutil
import sys
import tracemalloc
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from mutations import mutate
from seeds import KINDS

from dali_pipes.errors import DaliPipesError

MOST_BYTES = 4 << 20
"""What a parser may take beside a multiple of the files' size: buffers of its own, chunks of decompressed data."""
MOST_TIMES = 100
OUTSIDE = "outside"
"""A file beside the folder, which nothing may open."""


class Watch:
    """Remembers opened files. An audit hook cannot be taken away, so there is one."""

    is_on = False
    opened: list[str]

    def __init__(self) -> None:
        self.opened = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event == "open":
            name = arguments[0]
            self.opened.append(os.fsdecode(name) if isinstance(name, str | bytes) else "")


_watch = Watch()


def seeds(kind: str, folder: Path) -> dict[str, bytes]:
    """The valid files of a kind, by name; `folder` must not exist."""
    folder.mkdir(parents=True)
    KINDS[kind].write(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def damaged(random: Random, kind: str, files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """Some of the files changed, or one gone or the content of another."""
    out = dict(files)
    names = sorted(name for name in files if name.startswith(KINDS[kind].damage) and not name.endswith(".lock"))
    others = list(files.values())
    for _ in range(random.choice([1, 1, 1, 2])):
        name = random.choice(names)
        only_json = KINDS[kind].only_json
        change = random.random()
        if change < 0.03 and not only_json:
            out.pop(name, None)
        elif change < 0.06:
            out[name] = files[random.choice(names)]
        elif name in out:
            out[name] = mutate(random, out[name], others, str(folder.parent)[1:], only_json)
    return out


def read(kind: str, folder: Path, files: dict[str, bytes]) -> Any:
    """What is read of `files` put into `folder`; None for an error of ours.

    Raises AssertionError for too much memory and for files opened outside, and whatever else the parser raises.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)
    (folder.parent / OUTSIDE).write_bytes(b"\0" * 4096)
    pool, before = pa.proxy_memory_pool(pa.system_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    result = None
    tracemalloc.start()
    _watch.opened.clear()
    _watch.is_on = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of Python, about a damaged literal
            warnings.simplefilter("ignore", DeprecationWarning)
            result = KINDS[kind].read(folder)
    except DaliPipesError:
        pass
    finally:
        _watch.is_on = False
        peak = tracemalloc.get_traced_memory()[1] + max(0, pool.max_memory())
        tracemalloc.stop()
        pa.set_memory_pool(before)
    most = MOST_BYTES + MOST_TIMES * KINDS[kind].expands * sum(map(len, files.values()))
    assert peak <= most, f"{peak} bytes of memory for {sum(map(len, files.values()))} bytes of files"
    strangers = [
        name for name in _watch.opened if OUTSIDE in name and not os.path.normpath(name).startswith(f"{folder}{os.sep}")
    ]
    assert not strangers, f"opened outside of the folder: {strangers}"
    return result
