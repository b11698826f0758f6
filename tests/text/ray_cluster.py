"""A Ray cluster of two nodes with one CPU each, on this machine; for `test_ray_runs`, as a separate process.

Prints the address, then obeys lines of standard input, and answers each with a line: `worker` kills a worker that is
doing an item; `node` kills a node with all its processes, and starts another. Ends with standard input.
"""

import os
import signal
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

TASK = b"ray::_tokenize_item"
_LOOK_EVERY_S = 0.01


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "worker":
                worker = _busy_worker()
                os.kill(worker, signal.SIGKILL)
                print(worker, flush=True)
            else:
                cluster.remove_node(other, allow_graceful=False)
                print("gone", flush=True)
                other = cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()


def _busy_worker() -> int:
    """Waits for a worker of this cluster that is doing an item."""
    while True:
        parents = {pid: parent for pid, parent in map(_parent, _processes()) if parent}
        for pid in parents:
            if _command(pid).startswith(TASK) and os.getpid() in _ancestors(pid, parents):
                return pid
        time.sleep(_LOOK_EVERY_S)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> tuple[int, int]:
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return pid, 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found | {pid}


if __name__ == "__main__":
    main()
