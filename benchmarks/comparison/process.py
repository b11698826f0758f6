"""CPU time and memory of this process and all its descendants, read from /proc. Linux only.

Memory is the sum of `Pss_Anon` and `Pss_Shmem` over the tree: pages that a file does not back, each counted once
however many of the processes share it. `Private_*` alone would miss what worker processes share by fork and through
shared memory, and would count as a loader's own the cached corpus pages that it maps.
"""

import contextlib
import gc
import os
import time
from pathlib import Path

_MEBIBYTE = 1 << 20
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def descendants(root: int | None = None) -> list[int]:
    """Process ids below `root` (default: this process)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended between the listing and the reading
                parents[int(entry)] = int(_stat_fields(int(entry))[1])
    found: list[int] = []
    frontier = [os.getpid() if root is None else root]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found.extend(frontier)
    return found


class CpuMeter:
    """CPU seconds, user and system, of this process, its living descendants and the children it has waited for.

    The part of living descendants comes in ticks of the kernel's clock, usually 0.01 s.
    """

    def __init__(self) -> None:
        self._others = _others_cpu_s()  # before our own clock, so that reading /proc is not measured
        self._own = time.process_time()

    def elapsed_s(self) -> float:
        """CPU seconds since the meter was made."""
        own = time.process_time() - self._own
        return own + _others_cpu_s() - self._others


def tree_memory_bytes() -> dict[str, int]:
    """Bytes held over the tree: `unshared` (see above), and the kernel's `private_dirty` and `private_clean`."""
    total = {"unshared": 0, "private_dirty": 0, "private_clean": 0}
    for process in [os.getpid(), *descendants()]:
        with contextlib.suppress(OSError):
            sizes = _rollup_kib(process)
            total["unshared"] += 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])
            total["private_dirty"] += 1024 * sizes["Private_Dirty"]
            total["private_clean"] += 1024 * sizes["Private_Clean"]
    return total


class MemoryWatch:
    """Peak memory over the process tree, above what it was when the watch began."""

    def __init__(self) -> None:
        gc.collect()
        self._start = self._peak = tree_memory_bytes()

    def look(self) -> None:
        now = tree_memory_bytes()
        self._peak = {name: max(now[name], self._peak[name]) for name in now}

    def added(self) -> dict[str, float]:
        return {f"{name}_added_mb": (self._peak[name] - self._start[name]) / _MEBIBYTE for name in self._peak}


def _stat_fields(process: int) -> list[str]:
    """Fields of /proc/PID/stat after the command, which may itself hold spaces and brackets: state, ppid, …"""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _rollup_kib(process: int) -> dict[str, int]:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _others_cpu_s() -> float:
    ended = os.times()
    total = ended.children_user + ended.children_system
    for process in descendants():
        with contextlib.suppress(OSError):
            total += sum(int(ticks) for ticks in _stat_fields(process)[11:15]) / _TICKS_PER_SECOND
    return total
