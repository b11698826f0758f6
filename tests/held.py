"""What this process holds: threads, descriptors, child processes."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def threads() -> set[str]:
    """Threads of this process, those of DALI and other libraries included."""
    return set(os.listdir("/proc/self/task"))


def descriptors() -> Counter[str]:
    links: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            links[os.readlink(f"/proc/self/fd/{number}")] += 1
        except OSError:  # the listing's own
            continue
    return links


def open_files(folder: Path) -> list[str]:
    """Files below `folder` that this process has open, sorted; one that is open twice is there twice."""
    return sorted(path for path in descriptors().elements() if path.startswith(f"{folder}/"))


def read_contexts() -> int:
    """Contexts for batches of reads that the kernel keeps for this process."""
    return Path("/proc/self/maps").read_text().count("[aio]")


def children() -> set[str]:
    """Numbers of the processes that this one has started."""
    numbers: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            numbers |= set(path.read_text().split())
        except OSError:  # the thread has ended since
            continue
    return numbers


class Held(NamedTuple):
    """What this process holds.

    What is new is looked for, not what is more or less: a thread that was joined before the first look may be on the
    kernel's list for a moment longer, and may not stand in for one that is left.
    """

    threads: set[str]
    descriptors: Counter[str]
    read_contexts: int
    children: set[str]

    @classmethod
    def now(cls) -> "Held":
        return cls(threads(), descriptors(), read_contexts(), children())

    def left(self) -> dict[str, object]:
        """What is there now and was not then, by kind; waits for threads that are ending."""
        wait_for(lambda: threads() <= self.threads)
        now = Held.now()
        found: dict[str, object] = {
            "threads": now.threads - self.threads,
            "descriptors": now.descriptors - self.descriptors,
            "read contexts": max(0, now.read_contexts - self.read_contexts),
            "children": now.children - self.children,
        }
        return {kind: what for kind, what in found.items() if what}


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; one that never does is ended by the watchdog."""
    while not condition():
        time.sleep(0.01)
