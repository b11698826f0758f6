"""Ranges on a profiler's timeline: what a thread of the loader is doing.

    reader thread       plan | read | batches      plan | read | batches     (batches: rows of documents on a CPU)
    another thread                     batches                  batches      (with DALI's queue, one block ahead)
    trainer's thread    next( deliver )   next( )   next( batches )   ...    (batches: plain rows on a CPU)

All are named `dali_pipes: ...` and end before the trainer's own code goes on. Without a profiler there are none.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, TypeVar

from dali_pipes.placement.cuda import cupy_nvtx

Item = TypeVar("Item")
Open = Callable[[str], contextlib.AbstractContextManager[Any]]

_NOTHING = contextlib.nullcontext()
_END: Any = object()


class Ranges:
    """Opens ranges with `open_range`, or none. Safe for several threads; ranges of a thread nest."""

    def __init__(self, open_range: Open | None = None) -> None:
        self._open = open_range

    def around(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A context with the range `name` around it."""
        return _NOTHING if self._open is None else self._open(f"dali_pipes: {name}")

    def run(self, name: str, function: Callable[..., Item], *arguments: Any) -> Item:
        """Call the function in the range `name`: in fewer steps than `around` where there are no ranges."""
        if self._open is None:
            return function(*arguments)
        with self.around(name):
            return function(*arguments)

    def each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items, with a range around the making of each, but not around what is done with it.

        Without ranges it is `items` itself, which costs nothing.
        """
        return items if self._open is None else self._each(name, items)

    def _each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        while True:
            item = self.run(name, next, items, _END)
            if item is _END:
                return
            yield item
            del item  # or it would be held while the next one is made


def open_ranges(wanted: bool | None) -> Ranges:
    """Ranges for NVTX where CuPy is installed, else for torch's profiler where torch has been imported.

    `wanted` None: where a profiler that takes NVTX ranges is attached. torch's profiler sees ranges of the thread that
    it was started in.
    """
    if not (profiler_attached() if wanted is None else wanted):
        return Ranges()
    nvtx = cupy_nvtx()
    if nvtx is not None:
        return Ranges(lambda name: _nvtx_range(nvtx, name))
    torch = sys.modules.get("torch")
    return Ranges(None if torch is None else torch.profiler.record_function)


def profiler_attached() -> bool:
    """Whether Nsight Systems, or another profiler that takes NVTX ranges, has started this process.

    Images that set CUPTI itself as the library for NVTX do so in every process, profiled or not. A range would load it
    there, and torch's profiler, which cannot share it, would then see no kernels.
    """
    library = PurePath(os.environ.get("NVTX_INJECTION64_PATH", "")).name
    return library != "" and not library.startswith("libcupti")


@contextlib.contextmanager
def _nvtx_range(nvtx: Any, name: str) -> Iterator[None]:
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()
