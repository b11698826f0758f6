"""`TokenLoader`: batches for a PyTorch training loop.

    loader = TokenLoader("data/*.bin", batch_size=16, seq_len=1024)
    for batch in loader:                                       # one epoch
        loss = model(batch["input_ids"], batch["labels"])      # int64 (B, T) each, on loader.device

The labels are shifted here: `labels[b, t]` is the token after `input_ids[b, t]` (`label_shift=False`: equal to it).
"""

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from dali_pipes.config import LoaderConfig, Paths
from dali_pipes.corpus import Corpus
from dali_pipes.engine.block_stream import Batches
from dali_pipes.engine.build import Graph
from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.loader.announcements import say_resumed, say_start, start_text
from dali_pipes.loader.batches import Batch, current_stream, row_positions, sliced
from dali_pipes.loader.loader_parts import LoaderParts
from dali_pipes.loader.loader_table import NOT_BUILT, loader_table
from dali_pipes.loader.not_a_dataset import NotADataSet, refuse_workers
from dali_pipes.loader.state import OnChange, Saved
from dali_pipes.loader.state_change import StateChange
from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.monitoring.stats import LoaderStats
from dali_pipes.rows.document_rows import PlanReport
from dali_pipes.runtime.ranks import RankWatch, ranks_on_mesh, resolve_ranks
from dali_pipes.runtime.threads import end_thread_at_exit
from dali_pipes.schedule import Position, StepRange
from dali_pipes.schedule.plans import RowLocation, locate_row, plan_step

_group_exists = getattr(torch.distributed, "is_initialized", bool)  # not there in a build without it


class TokenLoader(NotADataSet, ShownAsTable):
    """An iterable over batches; each `for` is one epoch, in its own order (all epochs, with `repeat`).

    Batches are dicts of int64 tensors (B, T), contiguous, on `loader.device`; `row_ids` is (B,). With `length_buckets`
    T is the width of the batch, the same on all ranks at the same step. They are views of a block of several batches
    that stays alive and unchanged as long as any of them is held; `clone()` a batch that you keep for long.

    Leaving a `for` early ends that epoch for this object: the next `for` is the next epoch. `state_dict()` still points
    behind the last batch handed out, so a resume goes on there. After an error in `next()` the next `for` goes on there
    too, behind the last good batch.

    `next()` blocks while no block is ready. One thread at a time may iterate; `state_dict()`, `stats()` and `locate()`
    may be called from any. Takes the path of the corpus, or a list of paths, and settings as keywords; or a
    `LoaderConfig`, or both (keywords win). `graph` adds DALI operators, see `build_pipeline`. With `static_buffers`
    every batch is copied to the same addresses, in the order of the consumer's stream, and is valid until the next one
    is asked for.

    Rank and world size are those of the configuration, else of `mesh`, a torch `DeviceMesh`: its dimensions `data_dims`
    ("dp") number the ranks, and `context_dim` those that share each row; ranks that differ in its other dimensions
    alone get the same batches. Without either they come from an initialised torch.distributed, also one that is
    initialised after the loader was built and before its first batch, else from RANK and WORLD_SIZE.

    Raises `ConfigError`, `CorpusError` and `BackendError` before the first batch for all that can be known by then.
    """

    state_change: StateChange | None
    """What `on_change = "nearest"` changed when the last state was loaded; None where that state fitted."""
    _behind: Position | tuple[StepRange, int]  # the last batch handed out; or behind so many of a block
    _loaded: Saved | None  # until the ranks are settled
    _last_epoch: int | None  # of the last batch handed out, since a state was loaded
    _batches = _tokens = 0
    _wait_s = _wall_s = 0.0

    def __init__(
        self,
        config: LoaderConfig | Paths | None = None,
        *,
        graph: Graph | None = None,
        mesh: Any = None,
        data_dims: str | Sequence[str] | None = None,
        context_dim: str | None = None,
        **settings: Any,
    ) -> None:
        config = ranks_on_mesh(LoaderConfig.of(config, settings), mesh, data_dims, context_dim)
        self._ranks = RankWatch(given=config.rank is not None)
        refuse_workers(ranks_given=self._ranks.given)
        self._graph = graph
        self._closed = self._close_behind = False
        self._loaded, self._run = None, 0
        self._open(resolve_ranks(config))
        self._iterator: Callable[[], Generator[Batch, None, None] | None] = lambda: None  # the newest one, unless gone
        say_start(self.config, self.summary, self._built.warning)

    def _open(self, config: LoaderConfig) -> None:
        parts = LoaderParts.of(config, self._graph, self._loaded)
        # The configuration last: an interrupt before that leaves it another rank's, and all of this is done again.
        self._go_on(parts.saved, parts.behind, self._run)
        self._built, self._schedule, self._source = parts.built, parts.built.schedule, parts.built.source
        self._stream, self._states, self._reports = parts.stream, parts.states, parts.reports
        self._share, self._static, self._watch = parts.share, parts.static, parts.watch
        self._config = config

    @property
    def config(self) -> LoaderConfig:
        """The settings, with the rank that was found."""
        return self._config

    @property
    def corpus(self) -> Corpus:
        """The opened corpus."""
        return self._built.rows.corpus

    @property
    def device(self) -> torch.device:
        """Where batches are delivered."""
        return torch.device(self._built.device_name)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        self._settle()
        return self._next().epoch

    @property
    def step(self) -> int:
        """Number of the next batch within its epoch, as `locate` counts them."""
        self._settle()
        return self._schedule.step_number(self._next().rows)

    def __len__(self) -> int:
        """Batches in the epoch of the next batch, without those of `skip_steps`: exact, and the same on every rank.

        Where a run goes on within an epoch with steps of another size, they are counted as `step` counts them: so many
        less `step` are left, and less those of `skip_steps`, which `step` counts. Rows made of documents have to be
        planned to be counted, all of the epoch's, as `plan_report()` does: that blocks once an epoch, unless it is
        known already (`length_is_known`).
        """
        epoch, schedule = self.epoch, self._schedule
        rows = schedule.rows_known(epoch) if self._reports is None else self._reports.rows(epoch)
        base = schedule.counted_from(self._resumed, epoch)
        return schedule.left_of(schedule.step_number(base) + schedule.steps_of(rows - base), epoch)

    @property
    def length_is_known(self) -> bool:
        """Whether `len()` needs no planning. Plans nothing."""
        return self._reports is None or self._reports.knows_rows(self.epoch)

    def plan_report(self) -> PlanReport:
        """What the plan of the next batch's epoch makes of the documents: rows, fill, padding, dropped and split ones.

        Plans the whole epoch, which blocks (less than a second for a million documents) and shows its progress;
        training needs none of it. The report is kept in the user's cache folder, like offsets of documents, so it is
        known at once the next time. Raises `ConfigError` where rows are windows of the stream.
        """
        if self._reports is None:
            raise ConfigError('rows = "stream" have no plan; rows = "pack" and "pad" do')
        return self._reports.report(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        self._check_open()
        self._settle(again=True)
        self._run += 1
        self._running = False
        iterator = self._batches_from(self._run)
        self._iterator = weakref.ref(iterator)
        return self._built.ranges.each("next", iterator)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: behind the last batch handed out, whatever has been prefetched. Does not block.

        A fresh, JSON-able dict, the same on every rank, with the corpus fingerprint and the settings that decide the
        order: under 1 KB, but for loss masks and `length_buckets`. Behind the last batch it says the next epoch.
        """
        if self._loaded is not None:
            self._settle()
        return self._states.at(self._position)

    def load_state_dict(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> None:
        """Go on behind the batch after which `state` was taken; costs the same at any position.

        The world size, batch size, block size, threads, device and placement may differ from the saving run, and with
        `on_change` "nearest" (None: the setting's) the lengths of rows: the run then goes on at the row nearest to the
        same count of tokens, says so on standard error, and keeps what changed as `state_change`. Ends an iteration in
        progress. Raises `StateError` listing the differences when the corpus or the order has changed. What
        `skip_steps` count depends on the ranks: where a process group may yet come, the next use raises that.
        """
        self._check_open()
        self._follow_process_group(again=True)
        saved = self._states.read(state, on_change)
        if self._ranks.settled or self._batches:
            self._states.check_steps(saved)
        self._go_on(saved, self._schedule.normalise(saved.position), self._run + 1)
        self._say_resumed(saved)

    def row_positions(self, width: int | None = None) -> torch.Tensor:
        """Which positions of a row of `width` (None: seq_len) the columns of a batch are: int64 (T,), on the CPU.

        0, 1, ..., or with `context_parallel` this rank's share of them. Positions within documents are the output
        `position_ids`.
        """
        return row_positions(self.config.seq_len if width is None else width, self._share)

    def locate(self, step: int, row: int, epoch: int | None = None) -> RowLocation:
        """Where row `row` of this rank's batch number `step` comes from.

        epoch: None is that of the last batch that was handed out; before the first one, or when a state has been
        loaded since, that of the next.

        Any past or future step; reads no data. Raises `ConfigError` for a step or row that does not exist, and for
        steps before a resume that changed the number of rows in a step.
        """
        self._settle()
        if epoch is None:
            epoch = self.epoch if self._last_epoch is None else self._last_epoch
        base = self._schedule.counted_from(self._resumed, epoch)
        return locate_row(self._built.rows, plan_step(self._schedule, epoch, step, base), step, row)

    def stats(self) -> LoaderStats:
        """What was measured so far. Does not block."""
        times = self._source.block_times()
        times.kernels_s += self._stream.kernels_s
        return LoaderStats(
            batches=self._batches,
            tokens=self._tokens,
            wall_s=self._wall_s,
            data_wait_s=self._wait_s,
            queue_depth=self._stream.queue_depth,
            block_times=times,
            device=self._built.device_name,
            placement=self._built.placement,
            placement_reason=self._built.placement_reason,
            rank=self.config.rank or 0,
            num_threads=self.config.num_threads,
            batches_per_run=self._built.batches_per_run,
            block_limits=self._built.block_limits(),
            memory=self._stream.memory(),
            engine=self._stream.engine,
            cache=self.corpus.cache_stats(),
            read_retries=self.corpus.read_retries,
        )

    def _table(self) -> Table:
        if not hasattr(self, "config"):
            return NOT_BUILT
        stats = LoaderStats(self._batches, self._tokens, self._wall_s, self._wait_s, queue_depth=0)
        left, closed = self._begun and not self._running, self._closed
        return loader_table(self.config, self._built, stats, self._position, was_left=left, is_closed=closed)

    def summary(self) -> str:
        """What is said at the start: the corpus, rows of an epoch, what long documents lose, where batches come from.

        Reads no data. Rows made of documents are counted as they are planned and estimated until then ("about"), by one
        window of the epoch at least.
        """
        built, state = self._built, self._states.at(self._position)
        where = f"{built.device_name}, placement {built.placement}: {built.placement_reason}"
        return start_text(self.config, self.corpus, self._schedule, state, where)

    def close(self) -> None:
        """Stop the threads and close the files; idempotent. Batches already handed out stay valid.

        A `for` that runs meanwhile, in another thread or under a signal handler, ends by `LoaderClosedError`. What is
        open when the handler interrupts `next()` itself is closed as `next()` is left; where it interrupts another call
        in planning documents, when the loader is gone.
        """
        self._closed = True
        self._run += 1
        self._running = False
        iterator = self._iterator()
        is_in_next = iterator is not None and inspect.getgeneratorstate(iterator) == inspect.GEN_RUNNING
        documents: Any = self._built.rows.rows
        if (is_in_next and self._stream.user == threading.get_ident()) or getattr(documents, "is_busy_here", False):
            self._close_behind = is_in_next  # a lock may be held under this call that a reader thread waits for
            self._source.end()
        else:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next(self) -> Position:
        if self._begun and not self._running:  # a `for` was left early: the next one is the next epoch
            return self._schedule.epoch_behind(self._position.epoch)
        return self._position

    def _batches_from(self, run: int) -> Generator[Batch, None, None]:
        try:
            asked = time.perf_counter()
            self._check_current(run)
            self._settle()
            start = self._next()
            self._stream.seek(start)
            while True:
                steps = self._stream.peek()
                if steps.epoch != start.epoch and not self.config.repeat:
                    return
                consumer = current_stream(self._built.device)
                batches = self._batches_of(self._stream.take(consumer), consumer)
                for taken, batch in enumerate(batches, 1):
                    is_last = taken == steps.num_steps
                    behind = self._schedule.behind(steps, taken) if is_last else (steps, taken)
                    begun = not is_last or behind[0] == steps.epoch
                    handed_out = time.perf_counter()
                    self._wait_s += handed_out - asked
                    self._wall_s += handed_out - asked
                    # No call from here on: there an interrupt might come, and the state count what nobody was handed.
                    self._behind, self._begun, self._running, self._last_epoch = behind, begun, True, steps.epoch
                    yield batch
                    asked = time.perf_counter()
                    self._check_current(run)
                    if not self._ranks.settled and _group_exists():
                        self._follow_process_group()
                    self._wall_s += asked - handed_out
                    if self._wall_s >= self._watch.next_s:
                        self._watch.look(self._batches, self.stats)
                assert taken == steps.num_steps, "a block has a batch for each of its steps"
                del batch, batches  # or the block would be held here while the next one is made
        except Exception as error:  # an interrupt may as well come in the loop's body, so there it ends the epoch too
            if run == self._run and self._running:
                self._begun = False  # the trainer did not leave this epoch: its next `for` goes on in it
            if not isinstance(error, LoaderClosedError):
                self._check_open()  # whatever it met while another thread or a signal handler closed all there is
            raise
        finally:
            if run == self._run:
                self._running = False
            if self._close_behind:
                self._stream.close()

    def _batches_of(self, parts: Iterator[Batches], taken_for: int | None) -> Iterator[Batch]:
        """Batches as views of the parts of a block: no copies, unless they must be at fixed addresses."""
        for part in parts:
            batches = sliced(part, self._built.outputs, self._built.device)
            for size, width, batch in zip(part.sizes, part.widths, batches, strict=True):
                self._batches += 1
                self._tokens += size * width if self._share is None else size * width // self._share.size
                stream = current_stream(self._built.device)
                if stream is not None and stream != taken_for:
                    self._stream.use(stream)
                if self._share is not None:
                    batch = self._share.of(batch)
                if self._static is not None:
                    batch = self._static.fill(batch, stream)
                yield batch

    @property
    def _position(self) -> Position:
        """Behind the last batch handed out: what a state says. Worked out when asked for, not at every batch."""
        behind = self._behind
        return behind if isinstance(behind, Position) else self._schedule.behind(*behind)

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosedError("this loader is closed; build a new one")

    def _check_current(self, run: int) -> None:
        end_thread_at_exit()
        if run != self._run:
            self._check_open()
        self._source.check_usable()  # first of all in a forked child: CUDA's own error there names no cause
        if run != self._run:
            raise LoaderClosedError(
                "this iterator was superseded: the loader was iterated again or a state was loaded; use the newest one"
            )

    def _go_on(self, saved: Saved, behind: Position, run: int) -> None:
        self._run = run  # number of the newest iterator; older ones are superseded
        self._behind = self._resumed = behind  # the latter is where this object began, and its epoch
        self._loaded, self.state_change = saved, saved.change
        self._running = False  # the newest iterator has handed out a batch and has not ended
        self._begun = False  # the epoch of `_position` was begun by this object and is not complete
        self._last_epoch = None

    def _say_resumed(self, saved: Saved) -> None:
        say_resumed(self.config, self._schedule, self._resumed, saved.step_rows, saved.change)

    def _settle(self, again: bool = False) -> None:
        """As `_follow_process_group`, and refuse a loaded state whose steps may be others for the ranks there are."""
        self._follow_process_group(again)
        loaded = self._loaded
        if loaded is not None:
            self._states.check_steps(loaded)
            if self._ranks.settled or self._batches:
                self._loaded = None

    def _follow_process_group(self, again: bool = False) -> None:
        """Become the rank of a process group that came after the loader was built without any."""
        if not self._closed:
            self._ranks.follow(lambda: self.config, self._become_late, handed_out=self._batches > 0, again=again)

    def _become_late(self) -> None:
        before = self._stream
        self._open(resolve_ranks(self.config.replace(rank=None, world_size=None)))
        before.close()
        if self._closed:  # by a signal's handler or another thread meanwhile, who knew the stream before alone
            self._stream.close()
            self._check_open()
        if self._loaded is not None:
            self._say_resumed(self._loaded)
        say_start(self.config, self.summary, self._built.warning)
