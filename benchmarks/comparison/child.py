"""Run tasks in processes of their own, so that memory, threads and imports of two tasks never mix.

Imports take longer than most measurements. So a group of children starts together and imports side by side; when all
of them are idle, they are told to go one after the other, each while the others sleep:

    child 1   import ──── ready │ go ── measure ── result
    child 2   import ─ ready    │                  sleeps       go ── measure ── result
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_BENCHMARKS = Path(__file__).resolve().parents[1]
_POLL_S = 0.02

Result = dict[str, Any]


class Order(NamedTuple):
    """A task, JSON-able, for `python -m module`, with what to add to its environment."""

    module: str
    task: Result
    environment: Mapping[str, str] = {}


def run_children(orders: list[Order], timeout_s: float) -> list[Result]:
    """Run the orders as a group, see above, and return their results in that order. Blocks until all have ended.

    A child gets a session of its own, so that its workers end with it. What it prints is shown only where it leaves
    no result: then, and where importing or measuring takes more than `timeout_s`, its result is `failed` with why.
    """
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_Child(order)) for order in orders]
        deadline = time.monotonic() + timeout_s
        while any(child.importing() for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [child.result(timeout_s) for child in children]


def serve(load: Callable[[Result], object], run: Callable[[Result], Result]) -> None:
    """The child's side: `load` the imports, say so, wait for the word, `run`, leave the result."""
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    load(task)
    (folder / "ready").touch()
    sys.stdin.readline()
    (folder / "result.json").write_text(json.dumps(run(task)))


class _Child:
    def __init__(self, order: Order) -> None:
        self._order = order

    def __enter__(self) -> "_Child":
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        (self._folder / "task.json").write_text(json.dumps(self._order.task))
        search_path = os.pathsep.join(filter(None, [str(_BENCHMARKS), os.environ.get("PYTHONPATH")]))
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._order.module, str(self._folder)],
                env=os.environ | dict(self._order.environment) | {"PYTHONPATH": search_path},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def importing(self) -> bool:
        return self._process.poll() is None and not (self._folder / "ready").exists()

    def result(self, timeout_s: float) -> Result:
        """Let it measure, wait for it to end, and take what it left."""
        try:
            self._process.communicate(b"go\n", timeout_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {timeout_s:.0f} s"}
        result_path = self._folder / "result.json"
        if not result_path.exists():
            tail = (self._folder / "output").read_text(errors="replace")[-2000:]
            return {"failed": f"the process exited with {self._process.returncode} without a result: {tail}"}
        result: Result = json.loads(result_path.read_text())
        return result

    def __exit__(self, *exception: object) -> None:
        """End what is left of the session: workers, and the child itself after a timeout or an interrupt."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._temporary.cleanup()
