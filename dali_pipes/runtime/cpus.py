"""The CPUs that this process may use: how many, and on which NUMA node.

Launchers bind processes, such as `torchrun --numa-binding`; here nothing is bound. Threads inherit the CPUs of the one
that starts them, and memory is on the node of the thread that touches it first.
"""

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def usable_cpus() -> set[int]:
    """Numbers of the CPUs that the calling thread, and threads that it starts, may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return set(range(os.cpu_count() or 1)) if affinity is None else set(affinity(0))


def numa_node(cpus: set[int], nodes: Path = _NODES) -> str | None:
    """Number of the NUMA node that all of these CPUs are on, if the machine has CPUs on several nodes; else None."""
    found = {}
    for path in nodes.glob("node[0-9]*/cpulist"):
        try:
            found[path.parent.name.removeprefix("node")] = parse_cpu_list(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not readable in this container
            return None
    found = {node: of_node for node, of_node in found.items() if of_node}  # a node may have memory alone
    return next((node for node, of_node in found.items() if cpus <= of_node), None) if len(found) > 1 else None


def parse_cpu_list(text: str) -> set[int]:
    """A list as the kernel writes it: `0-3,8` → {0, 1, 2, 3, 8}. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return cpus


def cpus_of_a_rank(cpus: set[int], ranks: int, node: str | None) -> int:
    """How many of the usable CPUs are the share of one of the node's ranks, at least 1.

    Ranks that are bound to NUMA nodes, each to one, share the machine's CPUs; others share those that they all may use.
    """
    all_cpus = len(cpus) if node is None else os.cpu_count() or 1
    return max(1, min(len(cpus), all_cpus // ranks))
