"""`TokenLoader`: batches for a PyTorch training loop.

    loader = TokenLoader("data/*.bin", batch_size=16, seq_len=1024)
    for batch in loader:                                       # one epoch
        loss = model(batch["input_ids"], batch["labels"])      # int64 (B, T) each, on loader.device

The labels are shifted here: `labels[b, t]` is the token after `input_ids[b, t]` (`label_shift=False`: equal to it).
"""

import inspect
import itertools
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch

from dali_pipes.config import LoaderConfig, Paths
from dali_pipes.config.validators import shown
from dali_pipes.corpus import Corpus
from dali_pipes.engine.block_stream import BlockStream
from dali_pipes.engine.build import BuiltSource, Graph
from dali_pipes.engine.mixture import in_rows
from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.loader.announcements import WaitWatch, say_resumed, say_start, start_text
from dali_pipes.loader.batches import (
    Batch,
    RowShare,
    StaticBatch,
    cuda_problem,
    current_stream,
    row_positions,
    sliced,
)
from dali_pipes.loader.dataset_guards import DatasetGuards, refuse_workers
from dali_pipes.loader.handout import Handout
from dali_pipes.loader.loader_table import NOT_BUILT, loader_table
from dali_pipes.loader.plan_reports import reports_of_source
from dali_pipes.loader.ranks_agree import refuse_differing_ranks
from dali_pipes.loader.state import OnChange, States
from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.monitoring.stats import CacheStats, LoaderStats
from dali_pipes.runtime.ranks import check_ranks, ranks_on_mesh, resolve_ranks
from dali_pipes.runtime.threads import end_thread_at_exit, stop_with_process
from dali_pipes.schedule import Position, StepRange
from dali_pipes.schedule.plans import RowLocation, locate_row, plan_step

if TYPE_CHECKING:
    from dali_pipes.loader.batch_view import BatchPreview
    from dali_pipes.loader.state_change import StateChange
    from dali_pipes.rows.plan_report import PlanReport
    from dali_pipes.schedule.mixed_rows import MixedRows
    from dali_pipes.schedule.mixture_report import MixtureReport

_group_exists = getattr(torch.distributed, "is_initialized", bool)  # not there in a build without it


class TokenLoader(DatasetGuards, ShownAsTable):
    """An iterable over batches. Each `for` is one epoch, shuffled in its own order (all epochs, with `repeat`).

    Batches are dicts of contiguous tensors (B, T) on `loader.device`: int64, or int32 with `index_dtype = "int32"`,
    where PyTorch's `cross_entropy` needs `labels.long()`. `row_ids` is int64 (B,). With `length_buckets` T
    is the width of the batch, the same on all ranks at the same step; with `batch_tokens` both B and T are those of the
    batch, and may differ between ranks. Batches are views of a block of several batches,
    which stays in memory, unchanged, while any of them is held; `clone()` a batch that you keep for long.

    Leaving a `for` early ends that epoch for this object: the next `for` is the next epoch. `state_dict()` still points
    after the last batch handed out, so a resumed run continues there. After an error in `next()`, the next `for`
    continues after the last good batch.

    `next()` blocks until a block is ready. Iterate in one thread at a time; `state_dict()`, `stats()`, `locate()` and
    `close()` may be called from any thread. A signal handler should only set a flag that the training loop reads after
    each step: anything else it calls would run in the middle of the interrupted code.

    Takes the path of the corpus, or a list of paths, and settings as keywords; or a `LoaderConfig`, or both (keywords
    win). `graph` adds DALI operators, see `build_pipeline`. With `static_buffers` every batch is copied to the same
    addresses, in the order of the consumer's stream, and is valid until the next one is requested.

    Rank and world size are those of the configuration, else of `mesh`, a torch `DeviceMesh`: its dimensions `data_dims`
    ("dp") number the ranks, and along `context_dim` ranks share each row; ranks that differ only in other dimensions
    get the same batches. Without either they come from torch.distributed if it is initialized, else from RANK and
    WORLD_SIZE, which launchers such as torchrun set, else the loader is rank 0 of 1. If a process group that is
    initialized later has other ranks, using the loader raises `ConfigError`.

    Raises `ConfigError`, `CorpusError` and `BackendError` before the first batch for every problem that can be found by
    then.
    """

    state_change: "StateChange | None"
    """What `on_change` changed when the last state was loaded: a `MixtureChange` with "mixture", else a `StateChange`.
    None if nothing changed.
    """
    _consumed: Position  # before the current block
    _last_block: tuple[StepRange, int] | None  # steps of the block before it, and how many of them were taken
    _begun: bool  # this object had begun the epoch of `_consumed`, and it was not complete
    _counted: tuple[int, int, float | None] = (0, 0, None)
    """Batches and tokens before the block whose batches are being handed out, and when it was taken; None: no block. In
    one object, because other threads ask."""
    _weights_changed = False  # since the last batch: what has been read ahead is of the old order
    _wait_s = _wall_s = 0.0  # the latter before the current block

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
        refuse_workers(ranks_given=config.rank is not None)
        self._group_may_differ = config.rank is None  # from these ranks, until a process group has agreed with them
        self._ranks_given = config.rank is not None
        config = resolve_ranks(config)
        self._closed, self._is_fresh, self._handout = False, True, Handout()
        stop_with_process(self._handout)
        self._blocks: Callable[[], Generator[Iterator[Batch], None, None] | None] = lambda: None  # unless gone
        self._built = built = BuiltSource(config, endless=True, cut=sliced, graph=graph, gpu_problem=cuda_problem)
        self._source, self._schedule = built.source, built.schedule
        self._stream = BlockStream(built, config, graph)
        try:
            self._states = States(config, built.corpora, self._schedule, built.mixture)
            parallel = config.context_parallel
            self._reports = None if built.mixture is not None else reports_of_source(built, config, "", config)
            self._share = None if parallel is None else RowShare(*parallel, config.context_split)
            self._context_size = 1 if self._share is None else self._share.size
            self._static = StaticBatch(config.batch_size, self._stream.order) if config.static_buffers else None
            self._adapts = built.device is not None or self._share is not None or self._static is not None
            self._watch = WaitWatch(config)
            self._start_at(self._schedule.normalize(Position(0, 0)), None, run=0)
            self._config = config
            say_start(config, self.summary, built.warning)
        except BaseException:
            self._stream.close()
            raise

    @property
    def config(self) -> LoaderConfig:
        """The settings, with the rank and world size that were detected."""
        return self._config

    @property
    def corpus(self) -> Corpus:
        """The opened corpus. Raises `ConfigError` for a mixture: see `corpora`."""
        return self._built.corpus

    @property
    def corpora(self) -> Mapping[str, Corpus]:
        """The opened corpora of a mixture, by source name; without a mixture, the only one by the name ""."""
        return MappingProxyType(self._built.corpora)

    @property
    def device(self) -> torch.device:
        """Where batches are delivered."""
        return torch.device(self._built.device_name)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._next().epoch

    @property
    def step(self) -> int:
        """Number of the next batch within its epoch, as `locate` counts them."""
        self._check_ranks()
        return self._schedule.step_number(self._next().rows)

    @property
    def step_end(self) -> bool:
        """Whether the last batch handed out completes an optimizer step of `global_batch` rows over all ranks.

            for batch in loader:
                loss = model(batch) / loader.batches_per_step
                loss.backward()
                if loader.step_end:
                    optimizer.step()

        Without `global_batch`, every batch is a step, so this is always true. Blocks only if rows of documents in
        earlier epochs have to be counted after a resume.
        """
        curriculum = self._schedule.curriculum
        return curriculum is None or curriculum.is_step_end(*self._position)

    @property
    def batches_per_step(self) -> int:
        """Batches of this rank in the optimizer step of the last batch handed out, or of the next one before it."""
        curriculum, (epoch, rows) = self._schedule.curriculum, self._position
        if curriculum is None:
            return 1
        if self._last is not None:  # the position may be in another step: after steps that are skipped, or an epoch
            steps, taken = self._last
            epoch, rows = steps.epoch, steps.base + (steps.first_step + taken - 1) * self._schedule.global_rows
        return curriculum.segment(epoch, rows).global_batch // self._schedule.global_rows

    @property
    def tokens_seen(self) -> int:
        """Tokens of the run up to the last batch handed out, over all ranks and epochs, with padding.

        `total_tokens`, `stages`, and `seq_len` and `global_batch` lists count the same way: `seq_len` for each row,
        including rows that `drop_last` or `skip_steps` leave out. If rows hold documents, those of earlier epochs have
        to be counted, which blocks the first time.
        """
        curriculum, (epoch, rows) = self._schedule.curriculum, self._position
        if curriculum is not None:
            return curriculum.tokens_before(epoch, rows)
        if self._built.mixture is not None:
            return self._built.mixture.place(epoch, rows) * self.config.row_len
        interleave = self._schedule.interleave
        whole = epoch * interleave.count(0) if interleave.is_uniform else sum(map(interleave.count, range(epoch)))
        return (whole + rows) * self.config.place_tokens

    def __len__(self) -> int:
        """Batches in the epoch of the next batch, without those of `skip_steps`: exact, and the same on every rank.

        When a run resumes within an epoch with a different global batch, steps are counted as `step` counts them:
        `len(loader) - loader.step` are left, apart from those of `skip_steps`, which `step` counts too. Rows made of
        documents must be planned to be counted, for the whole epoch, as `plan_report()` does: that blocks once an
        epoch, unless the count is known already (`length_is_known`).
        """
        self._check_ranks()
        epoch, schedule = self.epoch, self._schedule
        reports = self._reports if schedule.curriculum is None else None  # which counts rows of whole steps alone
        rows = schedule.rows_known(epoch) if reports is None else reports.rows(epoch)
        base = schedule.counted_from(self._resumed, epoch)
        return schedule.left_of(schedule.step_number(base) + schedule.steps_of(rows - base), epoch)

    @property
    def length_is_known(self) -> bool:
        """Whether `len()` returns immediately, without planning."""
        reports, epoch = self._reports, self.epoch
        return self._schedule.interleave.is_counted(epoch) if reports is None else reports.knows_rows(epoch)

    def plan_report(self, source: str | None = None) -> "PlanReport":
        """A report on the rows of the next batch's epoch: rows, fill, padding, and dropped and split documents.

        Plans the whole epoch, which blocks (less than a second for a million documents) and shows its progress.
        Training does not need it. The report is cached in the user's cache folder, like document offsets.

        source: in a mixture, the source to report on, in the pass that it has reached; `epoch` of the report is the
                number of the pass. Raises `ConfigError` with `rows = "stream"`, and for a wrong or missing source.
        """
        if self._built.mixture is None:
            if source is not None:
                self._mixture(f"plan_report({source!r})")
            if self._reports is None:
                raise ConfigError('plan_report() applies to rows = "pack" and rows = "pad", but rows = "stream"')
            return self._reports.report(self.epoch)
        mixture = self._built.mixture
        if source not in mixture.names:
            raise ConfigError(
                f"plan_report({'' if source is None else repr(source)}) of a mixture needs the name of a source: "
                f"expected one of {shown(list(mixture.names))}"
            )
        number = mixture.names.index(source)
        rows = mixture.sources[number]
        reports = reports_of_source(self._built, self.config, source, self.config.sources[source])
        if reports is None:
            raise ConfigError(
                f'plan_report({source!r}) applies to rows = "pack" and rows = "pad", but mixture.{source} has rows = '
                '"stream"'
            )
        counts = mixture.order.counts_before(self._place_of_run(mixture, self._position))
        passes, _ = rows.at(counts[number : number + 1])
        return reports.report(int(passes[0]))

    def __iter__(self) -> Iterator[Batch]:
        self._check_open()
        self._check_ranks()
        if self._is_fresh:  # else the state has been checked against them
            self._states.check_ranges(Position(0, 0))
        self._run += 1
        self._count_block(time.perf_counter())
        self._running = False
        blocks = self._blocks_from(self._run, self._handout)
        self._blocks = weakref.ref(blocks)
        return self._built.ranges.each("next", itertools.chain.from_iterable(blocks))

    def state_dict(self) -> dict[str, Any]:
        """The position of the run, after the last batch handed out; prefetched ones do not count. Does not block.

        A new, JSON-serializable dict, the same on every rank, with the corpus fingerprint and the settings that decide
        the order: under 1 KB, except for loss masks and `length_buckets`. After the last batch of an epoch it is the
        start of the next epoch.
        """
        return self._states.at(self._position)

    def load_state_dict(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> None:
        """Resume after the last batch that the saving run had handed out. Costs the same at any position.

        World size, batch size, block size, threads, device and placement may differ from the saving run. With
        `on_change` "nearest" (None: the setting's value) the lengths of rows may differ too: the run then resumes at
        the row nearest to the same number of tokens, prints a line to standard error, and records the change in
        `state_change`. With "mixture", sources and weights may differ: every source continues where it stopped.
        Ends an iteration in progress. Raises `StateError` listing the differences if the corpus or the order has
        changed.
        """
        self._check_open()
        self._check_ranks()
        saved = self._states.load(state, on_change)
        self._start_at(self._schedule.normalize(saved.position), saved.change, run=self._run + 1)
        self._is_fresh = False
        say_resumed(self.config, self._schedule, self._resumed, saved.step_rows, saved.change)

    def row_positions(self, width: int | None = None) -> torch.Tensor:
        """The positions, in a row of `width` (None: seq_len), of a batch's columns: int64 (T,), on the CPU.

        0, 1, ..., or with `context_parallel` this rank's share of them. For positions within documents use the output
        `position_ids`.
        """
        return row_positions(self.config.row_len if width is None else width, self._share)

    def locate(self, step: int, row: int, epoch: int | None = None) -> RowLocation:
        """Where row `row` of this rank's batch number `step` comes from.

        epoch: by default that of the last batch handed out; before the first batch, or if a state has been loaded
        since, that of the next batch.

        Any past or future step; reads no data. Raises `ConfigError` for a step or row that does not exist, and for
        steps before a resume that changed the number of rows in a step.
        """
        self._check_ranks()
        if epoch is None:
            epoch = self.epoch if self._last is None else self._last[0].epoch
        base = self._schedule.counted_from(self._resumed, epoch)
        return locate_row(self._built.rows, plan_step(self._schedule, epoch, step, base), step, row)

    def preview(
        self,
        step: int | None = None,
        *,
        epoch: int | None = None,
        rows: int = 4,
        tokens: int = 256,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> "BatchPreview":
        """This rank's batch of a step as text, with documents, ignored labels, padding, and the origin of each row.

        step, epoch: by default, those of the next batch
        rows:        maximum number of rows to show
        tokens:      maximum number of tokens per row to show
        tokenizer:   `tokenizer.json` to decode ids with, or its folder. None: that of `config`; if unset, shows ids

        Show the result in a notebook, or print it. Reads the batch on the CPU with the current order of the loader, and
        does not change the position of the run. Blocks. Raises `ConfigError` for a step that does not exist and for
        a tokenizer that cannot be loaded, and `CorpusError` for data that cannot be read.
        """
        self._check_open()
        self._check_ranks()
        position = self._next()
        epoch = position.epoch if epoch is None else epoch
        step = self._schedule.step_number(position.rows) if step is None else step
        path = self.config.tokenizer if tokenizer is None else tokenizer
        # Not needed to train: the start does not wait for these imports.
        from dali_pipes.loader.batch_origin import beside_on_cpu
        from dali_pipes.loader.batch_preview import BatchPreviewer, shown_outputs
        from dali_pipes.text.token_text import TokenText

        text, config = None if path is None else TokenText(path), shown_outputs(self.config)
        base = self._schedule.counted_from(self._resumed, epoch)
        with closing(BatchPreviewer(beside_on_cpu(self._built, config), config, text)) as previewer:
            return previewer.batch(step, epoch, base, rows=rows, tokens=tokens)

    def stats(self) -> LoaderStats:
        """The statistics so far. Does not block."""
        batches, tokens = self._counts()
        autotune = self._source.autotune
        return LoaderStats(
            batches=batches,
            tokens=tokens,
            wall_s=self._wall_s_now(),
            data_wait_s=self._data_wait_s,
            queue_depth=self._stream.queue_depth,
            block_times=self._source.block_times(),
            device=self._built.device_name,
            placement=self._built.placement,
            placement_reason=self._built.placement_reason,
            rank=self.config.rank or 0,
            num_threads=autotune.now.num_threads,
            prefetch_queue_depth=autotune.now.prefetch_queue_depth,
            autotune=autotune.state,
            changes=autotune.changes,
            numa_node=self._built.numa_node,
            reads=self.config.reads,
            batches_per_run=self._built.batches_per_run,
            block_limits=self._built.block_limits(),
            memory=self._stream.memory(),
            engine=self._built.engine,
            cache=CacheStats.sum(corpus.cache_stats() for corpus in self._built.corpora.values()),
            read_retries=sum(corpus.read_retries for corpus in self._built.corpora.values()),
            source_rows=self._source_rows(),
        )

    def _source_rows(self) -> dict[str, int]:
        mixture = self._built.mixture
        if mixture is None:
            return {}
        counts = mixture.order.counts_before(self._place_of_run(mixture, self._position))
        return dict(zip(mixture.names, counts.tolist(), strict=False))  # the order also knows sources that left

    def _table(self) -> Table:
        if not hasattr(self, "_config"):  # a debugger shows a loader whose settings were refused
            return NOT_BUILT
        stats = LoaderStats(*self._counts(), self._wall_s_now(), self._data_wait_s, queue_depth=0)
        left, closed = self._is_begun and not self._running, self._closed
        return loader_table(self.config, self._built, stats, self._position, was_left=left, is_closed=closed)

    def set_weights(self, weights: Mapping[str, Any]) -> int:
        """Change the weights of a mixture from the next multiple of 128 rows on. Returns the row at which they begin.

        weights: for every source its new share of the tokens, as in `mixture`; 0 pauses a source, which later continues
                 where it stopped. They hold until the next of `stages`, if there is one. A running `for` continues:
                 what was read ahead is planned again, which costs about as much as a resume.

        Call it in the thread that iterates, between two batches, and on every rank after the same step: with a process
        group, the ranks compare position and weights, which blocks until all have called. Later states contain the
        change. Raises `ConfigError` without a mixture, for unknown or missing sources, if ranks differ, and if a source
        would exceed its `max_epochs`; the old weights then stay.
        """
        self._check_open()
        self._check_ranks()
        mixture = self._mixture("set_weights()")
        from dali_pipes.config.mixture import parse_weights  # with the first mixture

        position = self._position
        place = self._place_of_run(mixture, position)
        given, problem = {}, None
        try:
            given = parse_weights(weights, mixture.names)
        except ConfigError as error:  # the other ranks wait for an answer from this one, too
            problem = error
        told = str(problem) if problem is not None else {name: str(weight) for name, weight in given.items()}
        refuse_differing_ranks((place, told))
        if problem is not None:
            raise problem
        begin = mixture.next_stratum(place)
        sources = dict(zip(mixture.names, mixture.sources, strict=True))
        order = mixture.order.with_stage(begin, in_rows(given, sources), keep_later=True)
        mixture.check_caps(mixture.first_place(position.epoch) + mixture.total, order)
        if mixture.order.end is not None:  # where the epoch begins does not change with the end
            mixture.begin_at(position.epoch, mixture.first_place(position.epoch))
        mixture.set_order(order)
        self._source.forget_plans()
        self._stream.read_again()
        self._weights_changed = True
        self._handout.stop()
        return begin

    def mixture_report(self, step: int | None = None) -> "MixtureReport":
        """What a mixture has used of each source: share asked and achieved, tokens, passes, rows left.

        step: a step of the next batch's epoch; the report is computed for the moment before its first row. The number
              of steps stands for the end of the epoch. None: up to now

        Raises `ConfigError` without a mixture, and for a step that does not exist.
        """
        mixture = self._mixture("mixture_report()")
        from dali_pipes.schedule.mixture_report import mixture_report  # with the first mixture

        epoch, rows = self._position
        if step is not None:
            base = self._schedule.counted_from(self._resumed, epoch)
            first = self._schedule.step_number(base)
            if step < first:
                raise ConfigError(
                    f"step {step:,} of epoch {epoch:,} does not exist in this run, which began at {first:,}"
                )
            end = first + self._schedule.steps(base, epoch)
            if step > end:
                raise ConfigError(f"step {step:,} of epoch {epoch:,} does not exist: the epoch ends after step {end:,}")
            rows = min(base + (step - first) * self._schedule.global_rows, self._schedule.rows_known(epoch))
        return mixture_report(mixture, self._place_of_run(mixture, Position(epoch, rows)))

    def validation_loaders(self, **settings: Any) -> dict[str, "TokenLoader"]:
        """A loader for the validation split of each source of a mixture, by name: every row once over all ranks.

        Needs `validation_fraction`. Rows are not shuffled, have `order_len` tokens if `seq_len` is a list, and the last
        step is kept. `settings` override others, such as `batch_size`. Close each loader after use. Raises as
        `TokenLoader`.
        """
        self._mixture("validation_loaders()")
        if not self.config.validation_fraction:
            raise ConfigError("validation_loaders() needs a validation_fraction above 0, such as 0.01")
        fixed = {"split": "validation", "shuffle": False, "drop_last": False, "quiet": True, "skip_steps": ()}
        fixed |= {"random_offset": False, "repeat": False}
        loaders: dict[str, TokenLoader] = {}
        try:
            for name, own in self.config.sources.items():
                loaders[name] = TokenLoader(own.replace(**{**fixed, **settings}))
        except BaseException:
            for loader in loaders.values():
                loader.close()
            raise
        return loaders

    def summary(self) -> str:
        """The start lines: the corpus, rows of an epoch, what long documents lose, and where batches come from.

        Reads no data. Rows made from documents are estimated ("about") from at least one planned window until the whole
        epoch has been planned.
        """
        built, state = self._built, self._states.at(self._position)
        where = f"{built.device_name}, placement {built.placement}: {built.placement_reason}"
        return start_text(self.config, built.corpora, self._schedule, state, where, built.mixture)

    def close(self) -> None:
        """Stop the threads and close the files; idempotent. Batches already handed out stay valid.

        A `for` that runs meanwhile ends with `LoaderClosedError`. If it is inside `next()` at this moment, in another
        thread, that call stops the threads and closes the files as it ends.
        """
        self._closed = True
        self._handout.stop()
        self._run += 1
        self._running = False
        blocks = self._blocks()
        if blocks is not None and inspect.getgeneratorstate(blocks) == inspect.GEN_RUNNING:
            self._source.end()  # `next()` may hold a lock that a reader thread waits for
        else:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _mixture(self, what: str) -> "MixedRows":
        if self._built.mixture is None:
            raise ConfigError(f"{what} applies to a mixture, but this loader reads one corpus: set mixture")
        return self._built.mixture

    def _place_of_run(self, mixture: "MixedRows", position: Position) -> int:
        """The first row of the order, over all epochs, that a run which stands there has not begun."""
        return mixture.place(position.epoch, self._schedule.places(position))

    def _next(self) -> Position:
        position, is_begun = self._standing()
        if is_begun and not self._running:  # a `for` was left early: the next one is the next epoch
            return self._schedule.next_epoch(position.epoch)
        return position

    def _blocks_from(self, run: int, handout: Handout) -> Generator[Iterator[Batch], None, None]:
        """The batches of one block after another. Runs where a block ends, and where `handout` was stopped."""
        try:
            asked = time.perf_counter()
            self._check_current(run)
            self._check_ranks()
            start, self._weights_changed = self._next(), False
            self._stream.seek(start)
            while True:
                steps = self._stream.peek()
                if steps.epoch != start.epoch and not self.config.repeat:
                    return
                if self._group_may_differ and _group_exists():
                    self._check_ranks()
                consumer = None if self._built.device is None else current_stream(self._built.device)
                taken = self._stream.take(consumer)
                batches = handout.fill(taken.groups, steps, taken.num_tokens)
                del taken  # or it would be held here while the next one is made
                if self._adapts:
                    batches = map(partial(self._adapted, consumer), batches)
                handed_out = time.perf_counter()
                self._wait_s += handed_out - asked
                self._wall_s += handed_out - asked
                self._running, self._counted = True, (*self._counted[:2], handed_out)
                yield batches
                asked = time.perf_counter()
                self._check_current(run)
                handout.check()
                if self._count_block(asked) < steps.num_steps or self._weights_changed:
                    # New weights, or an interrupt in a call that would have ended this iteration.
                    self._weights_changed = False
                    self._stream.read_again()
                    self._stream.seek(self._consumed)
                if self._wall_s >= self._watch.next_s:
                    self._watch.look(self._counted[0], self.stats)
        except Exception as error:  # not an interrupt: it may come in the loop's body too, where it ends the epoch
            if run == self._run:
                self._count_block(time.perf_counter())
                if self._running:
                    self._begun = False  # the trainer did not leave this epoch: its next `for` continues it
            if not isinstance(error, LoaderClosedError):
                self._check_open()  # an error met because another thread closed the loader says that
            raise
        finally:
            if run == self._run:
                self._count_block(time.perf_counter())
                self._running = False
            if self._closed:
                self._stream.close()  # `close()` left that to this call

    @property
    def _data_wait_s(self) -> float:
        """Spent in `next()`: where a block begins, and where batches of it are made."""
        return self._wait_s + self._handout.made_s

    def _count_block(self, now: float) -> int:
        """Add what was handed out of the current block to what came before it. Returns its number of batches."""
        before, tokens_before, begin_s = self._counted
        self._handout.stop()
        if begin_s is None:
            return 0
        steps, batches, num_tokens = self._handout.taken()
        taken = (steps, batches) if batches else None
        consumed, begun = self._standing_after(taken)
        self._consumed, self._begun, self._last_block = consumed, begun, taken or self._last_block
        # In one step, or an interrupt could count the block twice.
        counts = before + batches, tokens_before + num_tokens // self._context_size
        self._wall_s, self._counted = self._wall_s + (now - begin_s), (*counts, None)
        return batches

    def _wall_s_now(self) -> float:
        begin_s = self._counted[2]  # another thread may change it meanwhile
        return self._wall_s + (0.0 if begin_s is None else time.perf_counter() - begin_s)

    def _counts(self) -> tuple[int, int]:
        """Batches and tokens handed out so far."""
        while True:
            batches, tokens, begin_s = counted = self._counted
            if begin_s is None:
                return batches, tokens
            _, more, num_tokens = self._handout.taken()
            if self._counted is counted:  # else these have been counted meanwhile
                return batches + more, tokens + num_tokens // self._context_size

    def _adapted(self, taken_for: int | None, batch: Batch) -> Batch:
        """What has to be done to each batch when it is handed out: its stream, its share of rows, fixed addresses."""
        asked, stream = time.perf_counter(), current_stream(self._built.device)
        if stream is not None and stream != taken_for:
            self._stream.use(stream)
        if self._share is not None:
            batch = self._share.of(batch)
        if self._static is not None:
            batch = self._static.fill(batch, stream)
        self._wait_s += time.perf_counter() - asked
        return batch

    @property
    def _taken(self) -> tuple[StepRange, int] | None:
        """Steps of the current block, and how many of their batches were handed out; None for none."""
        if self._counted[2] is None:
            return None
        steps, batches, _ = self._handout.taken()  # in one call: another thread may begin the next block
        return (steps, batches) if batches else None

    @property
    def _last(self) -> tuple[StepRange, int] | None:
        """Steps whose last one is the last batch handed out, since a state was loaded."""
        return self._taken or self._last_block

    @property
    def _position(self) -> Position:
        """After the last batch handed out: what a state says. Computed when asked for, not at every batch."""
        return self._standing()[0]

    @property
    def _is_begun(self) -> bool:
        """Whether this object has begun the epoch of `_position`, and it is not complete."""
        return self._standing()[1]

    def _standing(self) -> tuple[Position, bool]:
        return self._standing_after(self._taken)

    def _standing_after(self, taken: tuple[StepRange, int] | None) -> tuple[Position, bool]:
        if taken is None:
            return self._consumed, self._begun
        steps, count = taken
        position = self._schedule.after(steps, count)
        return position, count < steps.num_steps or position.epoch == steps.epoch

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosedError("this loader is closed; build a new one")

    def _check_current(self, run: int) -> None:
        end_thread_at_exit()
        if run != self._run:
            self._check_open()
        self._source.check_usable()  # before anything else in a forked child, where CUDA's own error would not say why
        if run != self._run:
            raise LoaderClosedError(
                "this iterator was superseded: the loader was iterated again, or a state was loaded; use the newest one"
            )

    def _check_ranks(self) -> None:
        """Raise `ConfigError` if a process group says that this is another rank: it would share another one's rows."""
        if not self._ranks_given and check_ranks(self.config.rank, self.config.world_size):
            self._group_may_differ = False

    def _start_at(self, position: Position, change: "StateChange | None", *, run: int) -> None:
        self._count_block(time.perf_counter())
        self._run = run  # number of the newest iterator; older ones are superseded
        self._consumed = self._resumed = position  # the latter is where this object began, and its epoch
        self.state_change = change
        self._running = False  # the newest iterator has handed out a batch and has not ended
        self._begun = False  # the epoch of `_position` was begun by this object and is not complete
        self._last_block = None
