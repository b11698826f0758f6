"""How many threads read ahead, and how many blocks: chosen at the start, and adapted while the trainer waits for data.

    after a start   the first blocks are not judged: files are cold
    a window        some blocks, and at least half a second: which share of it did the trainer wait?
    too much        twice the threads and blocks ahead, and another window once the blocks on their way have come
    no gain         back, and no further attempt until the trainer waits for twice that share
    CPUs in use     no attempt: threads that do not wait for a disk gain nothing where each CPU has one

Only what is "auto" changes. Nothing here has a clock or a thread: the block source says how long it waited.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dali_pipes.config import LoaderConfig
from dali_pipes.monitoring.stats import AutotuneState, ReadAhead, ReadAheadChange

MOST_AUTO_THREADS = 32
MOST_AUTO_DEPTH = 16
MOST_AHEAD_BYTES = 256 << 20
"""Host memory of blocks that are read ahead, beyond which "auto" does not grow."""
MOST_DALI_BYTES = 64 << 20
"""Blocks in DALI's queue, if more than two of them fit into it; at most `_MOST_DALI_DEPTH`."""
_MOST_DALI_DEPTH = 4

SHORT_ROW_BYTES = 3 << 10
"""Of a plain row, below which two threads read from the start."""

WINDOW_S = 0.5
MUCH_WAIT = 0.01
"""Share of the time that the trainer waits for blocks, above which more threads are tried."""
GAIN = 1.1
"""By what factor more blocks must come in a second for more threads to stay."""
BUSY = 0.4
"""Share of the time in which threads made blocks that they were on a CPU, from which on they do not wait for a disk.
Where the rest is waiting for the interpreter lock, more threads wait longer, and their blocks leave the caches."""
_NOISE = 0.95
"""A step that takes a little longer is no reason to go back, if the trainer waits for less than half of what it did."""
_CALM_WINDOWS = 20
"""Windows without waiting after which an attempt that gained nothing is forgotten."""
_PAUSE = 4
"""Work, in multiples of the usual one, beyond which it was a pause: a checkpoint, a validation."""
_ROUNDS = 4
"""Of all threads, in a window at least. Threads that wait for a disk may all end at the same moment."""
_MOST_CHANGES = 20
"""Changes that are remembered: the last ones."""


class Window(NamedTuple):
    """What was seen of some blocks."""

    blocks: int
    wait_s: float
    work_s: float
    """Of the trainer between two calls, without pauses."""

    @classmethod
    def of(cls, wait_s: float, works_s: Sequence[float], round_blocks: int) -> "Window":
        """From the work before each block. DALI may ask for the blocks of one round of the threads in one go."""
        rounds = [sum(works_s[first : first + round_blocks]) for first in range(0, len(works_s), round_blocks)]
        longest = _PAUSE * median(rounds)
        return cls(len(works_s), wait_s, sum(min(work_s, longest) for work_s in rounds))

    @property
    def seconds(self) -> float:
        return self.wait_s + self.work_s

    @property
    def share(self) -> float:
        """Of the time, that the trainer waited."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Blocks in a second."""
        return self.blocks / self.seconds if self.seconds else float("inf")

    def is_better(self, before: "Window") -> bool:
        """Whether data comes faster than before, or the trainer waits much less."""
        waits_less = self.share <= before.share / 2 and self.rate >= _NOISE * before.rate
        return self.rate >= GAIN * before.rate or waits_less


class Autotune:
    """What to use of a row of settings, each of which reads more ahead than the one before it.

    rungs:          the settings; the first is used at the start, and a single one is never changed
    adapts_threads: whether they differ in threads, or would if more were allowed
    cpus:           of this rank
    is_direct:      blocks wait where they were read; else in DALI's queue, which has its own depth
    in_trainer:     the trainer's thread makes the batches, which takes as long as reading them
    """

    def __init__(
        self,
        rungs: Sequence[ReadAhead],
        *,
        adapts_threads: bool,
        cpus: int,
        is_direct: bool,
        in_trainer: bool = False,
    ) -> None:
        self._rungs, self._adapts_threads, self._is_direct = rungs, adapts_threads, is_direct
        self._cpus = max(1, cpus - in_trainer)
        self._use(0)
        self.most_blocks = blocks_on_their_way(rungs[-1], is_direct=is_direct)
        """`blocks` with the largest setting."""
        self.changes: tuple[ReadAheadChange, ...] = ()
        """The last ones, oldest first."""
        self._run_s = 0.0
        self._before: Window | None = None  # the last attempt, if that is not yet judged
        self._futile_share: float | None = None  # that was waited before an attempt that gained nothing
        self._calm_windows = 0
        self._is_busy = False  # in the last window more threads could not have helped
        self.restart()

    @property
    def state(self) -> AutotuneState:
        """What may come: see `LoaderStats.autotune`."""
        if not self._adapts_threads:
            return "fixed"
        if self._is_busy:
            return "no gain"
        if self._before is not None or (self._futile_share is None and self._rung + 1 < len(self._rungs)):
            return "adapting"
        return "at limit" if self.now.num_threads == self._rungs[-1].num_threads else "no gain"

    def _use(self, rung: int) -> None:
        self._rung, self.now = rung, self._rungs[rung]
        """Its number, and the setting to use."""
        self.blocks = blocks_on_their_way(self.now, is_direct=self._is_direct)
        """Blocks to have on their way, those that threads work on and those that wait."""

    def restart(self) -> None:
        """Blocks are read from another place on: those that come first are not judged."""
        self._passing = self.blocks + 1
        self._clear()

    def add(self, wait_s: float, work_s: float, cpu_share: float = 0.0) -> None:
        """A block has been handed out, for which the trainer waited, after so much work since the one before it.

        cpu_share: of the time that it took to make the block, when the thread was on a CPU
        """
        if len(self._rungs) == 1:
            return
        self._run_s += wait_s + work_s
        if self._passing:
            self._passing -= 1
            return
        self._wait_s += wait_s
        self._works_s.append(work_s)
        self._cpu_shares += cpu_share
        self._window_s += wait_s + work_s
        blocks, round_blocks = len(self._works_s), min(self.now.num_threads, MOST_AUTO_THREADS)
        if self._window_s < WINDOW_S or blocks < _ROUNDS * round_blocks or blocks % round_blocks:
            return
        window, cpu_share = Window.of(self._wait_s, self._works_s, round_blocks), self._cpu_shares / blocks
        self._clear()
        self._judge(window, is_busy=cpu_share >= BUSY and self.now.num_threads >= self._cpus)

    def _clear(self) -> None:
        self._wait_s = self._window_s = self._cpu_shares = 0.0
        self._works_s: list[float] = []

    def _judge(self, window: Window, *, is_busy: bool) -> None:
        before, self._before = self._before, None
        self._is_busy = is_busy and window.share >= MUCH_WAIT
        if before is not None and not window.is_better(before):
            self._futile_share = before.share
            self._move(-1, f"no gain: {window.rate:.3g} blocks a second, {before.rate:.3g} before")
            return
        if window.share < MUCH_WAIT:
            self._calm_windows += 1
            if self._calm_windows >= _CALM_WINDOWS:
                self._futile_share = None
            return
        self._calm_windows = 0
        if is_busy:
            return
        if self._rung + 1 < len(self._rungs) and window.share >= 2 * (self._futile_share or 0.0):
            self._futile_share, self._before = None, window
            self._move(1, f"waited {window.share:.1%} of {window.seconds:.1f} s")

    def _move(self, by: int, why: str) -> None:
        before = self.now
        self._use(self._rung + by)
        self._passing = blocks_on_their_way(max(before, self.now), is_direct=self._is_direct)
        change = ReadAheadChange(self._run_s, before, self.now, why)
        self.changes = (*self.changes[1 - _MOST_CHANGES :], change)


def choose_read_ahead(
    config: LoaderConfig,
    *,
    cpus: int,
    is_direct: bool,
    block_bytes: int,
    delivered_bytes: int,
    plain_row_bytes: int | None = None,
) -> Autotune:
    """Threads and depth to start with, and what they may become.

    cpus:            those of this rank
    block_bytes:     host memory of a block on its way
    delivered_bytes: a block in DALI's queue
    plain_row_bytes: read for each of the plain rows, whose batches the trainer's thread makes; None for other rows
    """
    most_threads = min(MOST_AUTO_THREADS, max(4, 2 * cpus))
    dali_depth = max(2, min(_MOST_DALI_DEPTH, MOST_DALI_BYTES // max(1, delivered_bytes)))  # fixed in a pipeline
    in_trainer = plain_row_bytes is not None
    # Of short rows, the kernel's calls take longer than all else: two threads deliver rows of 1,024 tokens 5% to 20%
    # faster than one, with four blocks waiting.
    is_short = plain_row_bytes is not None and plain_row_bytes < SHORT_ROW_BYTES and config.reads == "calls"
    # On one CPU, two threads need 6 to 15% more time than one; also on two CPUs if the trainer's thread makes batches.
    # With a depth of 1 that is given, one thread would not read ahead at all.
    has_one = cpus == 1 or (in_trainer and not is_short and config.prefetch_queue_depth != 1)
    first, most = (
        ReadAhead(
            threads if config.num_threads == "auto" else config.num_threads,
            depth if config.prefetch_queue_depth == "auto" else config.prefetch_queue_depth,
        )
        for threads, depth in (
            (1 if has_one else 2, (4 if is_short and not has_one else 2) if is_direct else dali_depth),
            (most_threads, MOST_AUTO_DEPTH if is_direct else dali_depth),
        )
    )
    found = rungs(first, most, MOST_AHEAD_BYTES // block_bytes, is_direct=is_direct)
    return Autotune(
        found, adapts_threads=config.num_threads == "auto", cpus=cpus, is_direct=is_direct, in_trainer=in_trainer
    )


def rungs(first: ReadAhead, most: ReadAhead, most_blocks: int, *, is_direct: bool) -> list[ReadAhead]:
    """Settings from the first one on, each with twice what the one before it has, up to the limits."""
    found = [first]
    while True:
        threads, depth = found[-1]
        following = ReadAhead(min(2 * threads, most.num_threads), min(2 * depth, most.prefetch_queue_depth))
        if following == found[-1] or blocks_on_their_way(following, is_direct=is_direct) > most_blocks:
            return found
        found.append(following)


def blocks_on_their_way(setting: ReadAhead, *, is_direct: bool) -> int:
    """Blocks that threads work on, and those that wait to be asked for; DALI's queue holds others."""
    return setting.num_threads + (setting.prefetch_queue_depth - 1 if is_direct else 1)
