"""Ends tests that hang, by the CPU time that they and all they have started use, so that a slow machine is no hang.

    python hang_watchdog.py PID       each line on standard input names the test that begins in process PID

A test hangs when it uses less than a tenth of a core over 120 seconds, or longer where processes wait for a core. It
also hangs when it has used far more CPU time than any test needs. Then the processes that have no children are aborted
and write their stacks (`PYTHONFAULTHANDLER`): a child that hangs fails its test, and the run goes on. The process that
runs the tests is aborted last.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LOOK_EVERY_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Rules(NamedTuple):
    """What counts as a hang."""

    still_s: float = 120.0
    """Seconds on an idle machine; on a loaded one times the number of processes that share a core."""
    moved_cpu_s: float = 12.0
    """Using this much CPU time within these seconds is progress. What only polls uses less."""
    most_cpu_s: float = 1800.0
    """CPU seconds of one test after which it goes round in circles."""
    after_abort: float = 0.1
    """The share of all three that the rest of a test gets once some of it has been aborted."""


class Look(NamedTuple):
    """What is seen at one moment."""

    at_s: float
    """On a clock that only goes forward."""
    cpu_s: float
    """CPU time of the test process and of all processes below it; less than before where one of them has got lost."""
    per_core: float
    """Processes that run or wait to, for each core: 1 on a machine that does nothing else."""


class Watch:
    """Decides from one look after another whether the test of the moment hangs."""

    def __init__(self, rules: Rules, first: Look) -> None:
        self._rules, self._last = rules, first
        self.begin()

    def begin(self) -> None:
        """Another test begins."""
        self._share, self._test_cpu_s = 1.0, 0.0
        self._wait_again()

    def _wait_again(self) -> None:
        self._still_s, self._moved_s, self._per_core = 0.0, 0.0, 1.0

    def hang(self, look: Look) -> str | None:
        """How the test hangs, in words; None where it does not."""
        last, self._last = self._last, look
        used_s = max(0.0, look.cpu_s - last.cpu_s)
        self._still_s += min(look.at_s - last.at_s, 2 * LOOK_EVERY_S)  # more: this process did not get to run either
        self._moved_s += used_s
        self._test_cpu_s += used_s
        self._per_core = max(self._per_core, look.per_core)
        if self._test_cpu_s >= self._rules.most_cpu_s * self._share:
            found = f"it has used {self._test_cpu_s:.0f} s of CPU time"
            self._share, self._test_cpu_s = self._rules.after_abort, 0.0
        elif self._moved_s >= self._rules.moved_cpu_s * self._share:
            found = None
        elif self._still_s >= self._rules.still_s * self._share * self._per_core:
            found = f"it has used {self._moved_s:.1f} s of CPU time in {self._still_s:.0f} s"
            self._share = self._rules.after_abort
        else:
            return None
        self._wait_again()
        return found


def started_by(pid: int) -> list[int]:
    """The processes that one has started and that are still there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has ended since
            continue
    return found


def below(root: int) -> dict[int, list[int]]:
    """A process and all below it, each with those it has started; this process is left out."""
    found: dict[int, list[int]] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = [child for child in started_by(pid) if child != os.getpid()]
        waiting += found[pid]
    return found


def cpu_s(pid: int) -> float:
    """CPU time of a process and of those it has waited for; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def processes_per_core() -> float:
    """Processes that run, or wait for a core or a disk, averaged over the last minute."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def look_at(root: int) -> Look:
    return Look(time.monotonic(), sum(map(cpu_s, below(root))), processes_per_core())


class Aborter:
    """Aborts the processes at the ends of a tree, and kills those that outlive it."""

    def __init__(self) -> None:
        self._aborted: set[int] = set()

    def abort(self, ends: list[int]) -> None:
        for pid in ends:
            try:
                os.kill(pid, signal.SIGKILL if pid in self._aborted else signal.SIGABRT)
            except ProcessLookupError:
                continue
        self._aborted |= set(ends)


def watch(root: int, rules: Rules, look_every_s: float, look: Callable[[int], Look] = look_at) -> None:
    """Watch until standard input ends."""
    watched, aborter, name = Watch(rules, look(root)), Aborter(), "no test yet"
    next_look_s, unread = time.monotonic() + look_every_s, b""
    while True:
        readable, _, _ = select.select([0], [], [], max(0.0, next_look_s - time.monotonic()))
        if readable:
            got = os.read(0, 2**16)
            if not got:
                return
            *lines, unread = (unread + got).split(b"\n")
            if lines:
                name = lines[-1].decode()
                watched.begin()
        if time.monotonic() < next_look_s:
            continue
        next_look_s = time.monotonic() + look_every_s
        why = watched.hang(look(root))
        if why is not None:
            ends = [pid for pid, children in below(root).items() if not children]
            what = "\n".join(f"  {pid} {_command(pid)}" for pid in ends)
            print(f"\nwatchdog: {name} hangs: {why}. Aborting:\n{what}", file=sys.stderr, flush=True)
            aborter.abort(ends)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


class Watchdog:
    """A process that watches this one."""

    def __init__(self, rules: Rules | None = None, look_every_s: float = LOOK_EVERY_S) -> None:
        numbers = [os.getpid(), look_every_s, *(rules or Rules())]
        command = [sys.executable, "-S", __file__, *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def begin(self, name: str) -> None:
        """Say what begins now."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), name.replace("\n", " ").encode(errors="replace") + b"\n")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    watch(int(sys.argv[1]), Rules(*map(float, sys.argv[3:])), float(sys.argv[2]))
