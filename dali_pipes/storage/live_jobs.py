"""What the processes that share a folder tell one another: a small file each, which is locked while its process lives.

    4711-5f2c9a01.job      {"most_bytes": 50000000000, "orders": [{"corpus": "...", "place": 81920, ...}]}

The file is replaced as a whole. The system releases the lock of a process that is killed; whoever looks next removes
its file.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dali_pipes.runtime.locks import hold, remove_unlocked

_SUFFIX = ".job"


class LiveJob:
    """What this process says in a folder. Not for several threads at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        self._descriptor = -1

    def publish(self, most_bytes: int, orders: Sequence[dict[str, Any]]) -> None:
        """Replace what was said before. OSError."""
        temporary = self._path.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            hold(descriptor)
            os.write(descriptor, json.dumps({"most_bytes": most_bytes, "orders": list(orders)}).encode())
            temporary.replace(self._path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._let_go()
        self._descriptor = descriptor

    def close(self) -> None:
        """Say nothing any more. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def live_jobs(folder: Path) -> list[dict[str, Any]]:
    """What all processes that live say, this one too. Removes files of those that do not. Blocks for small reads."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            if not remove_unlocked(path):
                found.append(json.loads(path.read_bytes()))
    return found
