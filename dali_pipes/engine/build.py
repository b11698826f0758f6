"""From a configuration to a block source: corpus, rows, schedule, outputs, device and placement, each decided here."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dali_pipes.config import LoaderConfig
from dali_pipes.config.outputs import OUTPUTS, arrays_of
from dali_pipes.config.skip_steps import in_steps
from dali_pipes.corpus import Corpus
from dali_pipes.corpus.joined import JoinedCorpora
from dali_pipes.engine.block_source import BlockSource
from dali_pipes.engine.mixture import mix, open_corpora
from dali_pipes.engine.node_caching import NodeCaching, check_cache_folder
from dali_pipes.engine.profiling import open_ranges
from dali_pipes.engine.read_ahead import Autotune, choose_read_ahead
from dali_pipes.errors import BackendError, ConfigError
from dali_pipes.monitoring.stats import BlockLimits
from dali_pipes.placement.base import Batches, Placement
from dali_pipes.placement.cpu import CpuPlacement, is_plain
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.pool_order import PoolOrder
from dali_pipes.placement.selection import GPU_PLACEMENTS, choose_device, choose_placement, require_pool
from dali_pipes.rows.base import ReadableRows, key_names, order_key
from dali_pipes.rows.make import make_rows
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.runtime.cpus import cpus_of_a_rank, numa_node, usable_cpus
from dali_pipes.runtime.messages import counted
from dali_pipes.runtime.ranks import environment_number
from dali_pipes.schedule import Interleave, Schedule, of_one_source
from dali_pipes.schedule.curriculum import Curriculum

if TYPE_CHECKING:
    from dali_pipes.engine.node_plans import NodePlans
    from dali_pipes.objectives import RowDraws, Transforms
    from dali_pipes.schedule.mixed_rows import MixedRows

TARGET_DIRECT_BLOCK_TOKENS = 1 << 18
"""Tokens of a block with `batches_per_run = "auto"`: 2 MiB of inputs as int64, and as much of labels. Twice as
many are delivered 4 to 14% faster in large batches, and take twice the memory."""

TARGET_STORED_BLOCK_BYTES = 3 << 19
"""Bytes of ids in a block that is kept in the type of the files. With two thirds of that, batches of 64K tokens came 5%
to 20% slower; with a third, 40%."""

TARGET_OBJECTIVE_BLOCK_TOKENS = 1 << 19
"""Tokens of a block if objectives change rows: draws and kernels have a fixed cost of up to 1 ms a block. Span
corruption takes 10 to 20% less CPU time than in blocks of half the size."""

TARGET_BLOCK_TOKENS = 1 << 20
"""The same for DALI on the CPU: 2 MiB as uint16. A quarter of it cost twice the CPU."""

TARGET_GPU_BLOCK_TOKENS = 1 << 22
"""The same on a GPU, where a run costs DALI more of the host while the device is busy (`benchmarks/README.md`)."""

Cut = Callable[[Batches, Outputs, int | None], list[Any]]
"""The arrays of a block's batches, and their GPU if they are on one → the batches that a loader hands out."""

Graph = Callable[[dict[str, Any]], Mapping[str, Any]]
"""DALI data nodes by output name → nodes of the same names, rows still in the first axis."""


class BuiltSource:
    """A block source, and what was decided while building it.

    cut:    makes the batches of a loader from the arrays of a block; None without one, where DALI hands out arrays
    engine: "dali", or on a CPU "direct": blocks are taken from the source itself
    gpu_problem: returns why the consumer of the batches cannot use a GPU, None if it can; see `choose_device`.
    """

    gpu: Gpu | None = None
    _owns_rows = True
    _node_plans: "NodePlans | None" = None

    def __init__(
        self,
        config: LoaderConfig,
        *,
        endless: bool,
        cut: Cut | None = None,
        graph: Graph | None = None,
        gpu_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        if config.varies_width and (graph is not None or cut is None):
            others = "a seq_len list" if config.batch_tokens is None else "batch_tokens"
            name = others if config.length_buckets is None else "length_buckets"
            raise ConfigError(
                f"{name} yields batches of different widths, which a DALI pipeline does not support; remove it, or use "
                "a TokenLoader without graph"
            )
        check_cache_folder(config)
        self._config = config
        corpora = open_corpora(config)
        self.corpora: Mapping[str, Corpus] = corpora
        """The opened corpora by the names of their sources; of the only one, the name is ""."""
        self.mixture: MixedRows | None = None
        self._caching = NodeCaching(config, corpora)
        try:
            if config.mixture is None:
                rows, self.warning = make_rows(config, self.corpus)
                self.rows, self._in_pieces = Source(self.corpus, rows), rows.in_pieces
                interleave = of_one_source(rows)
            else:
                joined = JoinedCorpora(corpora, together=self._caching.reads_together)
                self.mixture, self.warning = mix(config, corpora, joined.bases)
                self.rows, self._in_pieces = Source(joined, self.mixture), self.mixture.in_pieces
                interleave = self.mixture
            self.warning = "\n".join(filter(None, (self.warning, self._caching.unused))) or None
            self.schedule = make_schedule(config, with_curriculum(config, interleave))
            is_planned = self.schedule.interleave.most_planned is not None
            if is_planned and (environment_number("LOCAL_WORLD_SIZE") or 1) > 1:
                from dali_pipes.engine.node_plans import share_plans  # with the first rows of documents

                sources = [rows] if self.mixture is None else self.mixture.sources
                self._node_plans = share_plans(config, corpora.values(), sources, self.schedule.global_rows)
            self._caching.begin(self.schedule, rows if self.mixture is None else self.mixture)
            if self.mixture is not None and config.on_change != "mixture":  # else a state may come with other weights
                self.mixture.check_caps(self.mixture.total)
            self.outputs = make_outputs(config, self.schedule, self.mixture, self.rows, in_pieces=self._in_pieces)
            self.device, self.device_reason = choose_device(
                config.device, environment_number("LOCAL_RANK"), gpu_problem
            )
            self.engine = self._choose_engine(graph, cut)
            self.batches_per_run = batches_per_run(config, self.schedule, self._target_tokens())
            self.placement, self.placement_reason, placement = self._place()
        except BaseException:
            self._caching.close()
            if self._node_plans is not None:
                self._node_plans.close()
            for corpus in corpora.values():
                corpus.close()
            raise
        self.ranges = open_ranges(config.nvtx)
        cpus = usable_cpus()
        self.numa_node = numa_node(cpus)
        """The NUMA node of all CPUs that this thread may run on, which its reader threads inherit; see `numa_node`."""
        self._make_source(placement, cpus, endless=endless, cut=cut)
        self._epoch_steps = self._steps_known()

    def on_cpu(self, config: LoaderConfig, cut: Cut) -> "BuiltSource":
        """The same rows in the same order, skipped steps included, delivered to the CPU one batch at a time.

        config: with other outputs, or other settings of reading. Closing the result leaves the corpora open.
        """
        other = copy.copy(self)
        other._config, other._owns_rows = config, False
        other.schedule = replace(self.schedule, skip_steps=())
        other.outputs = make_outputs(config, other.schedule, self.mixture, self.rows, in_pieces=self._in_pieces)
        other.device, other.gpu, other.engine, other.batches_per_run = None, None, "direct", 1
        other.placement, other.placement_reason, placement = other._place()
        other._make_source(placement, usable_cpus(), endless=True, cut=cut)
        return other

    def _make_source(self, placement: Placement, cpus: set[int], *, endless: bool, cut: Cut | None) -> None:
        self.cut = None if cut is None else partial(_cut, cut, self.outputs, self.device)
        is_direct = self.engine == "direct"
        self.source = BlockSource(
            self.rows,
            self.schedule,
            placement,
            self.outputs,
            arrays=() if is_direct else arrays_of(self._config.outputs),
            batches_per_run=self.batches_per_run,
            max_rows=block_rows(self._config, self.batches_per_run),
            autotune=self._read_ahead(cpus),
            endless=endless,
            keeps_blocks=cut is not None,
            cut=self.cut if is_direct else None,
            note=self._caching.note if self._owns_rows and self._caching.cache is not None else None,
            ranges=self.ranges,
        )

    @property
    def corpus(self) -> Corpus:
        """The only corpus. Raises `ConfigError` for a mixture, which has several."""
        if self._config.mixture is not None:
            raise ConfigError("a mixture does not have a single corpus: use loader.corpora, a dict by source name")
        return self.corpora[""]

    @property
    def device_name(self) -> str:
        """Of the device that blocks are delivered to, as torch calls it."""
        return "cpu" if self.device is None else f"cuda:{self.device}"

    def block_limits(self) -> BlockLimits:
        """What caps `batches_per_run`. Plans nothing: the steps are unknown until all rows are counted."""
        self._epoch_steps = self._epoch_steps or self._steps_known()
        return BlockLimits(self._epoch_steps, _counted_bytes(self._config), self._config.max_block_bytes)

    def block_bytes(self, sizes: Sequence[int], widths: Sequence[int]) -> int:
        """Bytes of a delivered block of batches with these rows and widths, each counted as a whole batch."""
        arrays = arrays_of(self._config.outputs)
        least = 0 if self._config.batch_tokens is not None else self._config.batch_size
        return sum(
            self.outputs.num_bytes(name, max(rows, least), width)
            for name in arrays
            for rows, width in zip(sizes, widths, strict=True)
        )

    @property
    def whole_block_bytes(self) -> int:
        """Bytes of a delivered block in which every position is used."""
        return self.block_bytes([block_rows(self._config, self.batches_per_run)], [self._config.row_len])

    def axes(self, name: str) -> int:
        """Axes of an array of a block, as DALI sees it."""
        if self._config.varies_width and not OUTPUTS[name].from_plan:
            return 1
        return len(self.outputs.shape(name, 1))

    def close(self) -> None:
        """Stop the reader threads, free the buffers and close the files. Idempotent."""
        if self._owns_rows:
            self._caching.end()
            if self._node_plans is not None:
                self._node_plans.close()  # first: reader threads do not wait for other ranks any more
        self.source.close()
        if self._owns_rows:
            self._caching.close()
            self.rows.close()

    def _choose_engine(self, graph: Graph | None, cut: Cut | None) -> Literal["dali", "direct"]:
        """Raises `ConfigError` for a direct queue where only DALI's works."""
        needs_dali = {
            "batches are delivered to a GPU": self.device is not None,
            "graph adds DALI operators": graph is not None,
            "build_pipeline builds a DALI pipeline": cut is None,
        }
        reason = next((reason for reason, is_so in needs_dali.items() if is_so), None)
        if self._config.engine == "direct" and reason is not None:
            raise ConfigError(f'engine = "direct" does not support this: {reason}; use engine = "auto" or "dali"')
        return "direct" if reason is None and self._config.engine != "dali" else "dali"

    def _target_tokens(self) -> int:
        if self.device is not None:
            return TARGET_GPU_BLOCK_TOKENS
        if self.engine == "dali":
            return TARGET_BLOCK_TOKENS
        if is_plain(self.rows, self.outputs):
            return TARGET_STORED_BLOCK_BYTES // self.rows.dtype.itemsize
        return TARGET_DIRECT_BLOCK_TOKENS if self.outputs.transforms is None else TARGET_OBJECTIVE_BLOCK_TOKENS

    def _read_ahead(self, cpus: set[int]) -> Autotune:
        config = self._config
        delivered_bytes = self.whole_block_bytes
        row_bytes = self.rows.rows.row_tokens * self.rows.token_bytes
        staged_bytes = block_rows(config, self.batches_per_run) * row_bytes
        return choose_read_ahead(
            config,
            cpus=cpus_of_a_rank(cpus, environment_number("LOCAL_WORLD_SIZE") or 1, self.numa_node),
            is_direct=self.engine == "direct",
            plain_row_bytes=row_bytes if self.engine == "direct" and is_plain(self.rows, self.outputs) else None,
            block_bytes=staged_bytes + (delivered_bytes if self.device is None else 0),
            delivered_bytes=delivered_bytes,
        )

    def _steps_known(self) -> int | None:
        known = self.schedule.interleave.is_counted(0)
        return self.schedule.steps_of(self.schedule.rows_known(0, 0)) if known else None

    def _place(self) -> tuple[str, str, Placement]:
        """The name of the placement, why it was chosen, and the placement."""
        config = self._config
        if self.device is None:
            if config.placement not in ("auto", "host"):
                raise BackendError(
                    f'placement = "{config.placement}" needs a GPU ({self.device_reason}); use placement = "host"'
                )
            narrow = self.engine == "dali"
            on_cpu = CpuPlacement(self.rows, self.schedule, self.outputs, vocab_size=config.id_limit, narrow=narrow)
            return "host", self.device_reason, on_cpu
        if config.placement == "pool" and config.split == "validation":
            name, reason = "host", 'placement = "pool" is for shuffled rows, and those of validation are not'
        else:
            is_hashed = self.outputs.goldfish is not None  # which keeps a byte for each token, too
            corpus_bytes = self.rows.rows.span * (self.rows.token_bytes + is_hashed)
            name, reason = choose_placement(config.placement, self.device, corpus_bytes, config.max_device_bytes)
        if name == "pool":
            order = PoolOrder(self.schedule, self.rows)
            most = order.most_steps()
            self.batches_per_run = self.batches_per_run if most is None else min(self.batches_per_run, most)
            require_pool(order, self.rows.token_bytes, self.device, config.max_device_bytes)
        placement = GPU_PLACEMENTS[name](
            self.rows,
            self.schedule,
            self.outputs,
            Gpu(self.device),
            max_rows=block_rows(self._config, self.batches_per_run),
            vocab_size=config.id_limit,
        )
        self.gpu = placement.gpu
        return name, reason, placement


def _cut(cut: Cut, outputs: Outputs, device: int | None, block: Batches) -> list[Any]:
    return cut(block, outputs, device)


def with_curriculum(config: LoaderConfig, interleave: Interleave) -> Interleave:
    """Rows as `seq_len` and `global_batch` want them in the course of the run. Raises `ConfigError`."""
    if not config.curriculum:
        return interleave
    # With the first curriculum: most runs do not have one.
    from dali_pipes.rows.document_rows import DocumentRows
    from dali_pipes.schedule.mixed_rows import MixedRows

    rows = config.batch_size * (config.world_size or 1)
    for stage in config.curriculum:
        if stage.global_batch % rows:
            raise ConfigError(
                f"global_batch = {stage.global_batch:,} is not a multiple of {counted(rows, 'row')}, one batch on "
                f"every rank ({counted(config.world_size or 1, 'rank')} x batch_size {config.batch_size:,}); use a "
                f"multiple of {rows:,}, or another batch_size"
            )
    mixture = interleave if isinstance(interleave, MixedRows) else None
    if mixture is not None and config.has_total:
        tokens = mixture.total * config.row_len
        for stage in config.curriculum:
            if stage.at >= tokens:
                raise ConfigError(
                    f"seq_len or global_batch changes at {stage.at:,} tokens, but the mixture has a total of only "
                    f"{tokens:,}; use a larger total, or an earlier change"
                )
    return Curriculum(
        interleave,
        config.curriculum,
        cuts=config.cuts_rows,
        seed=config.seed,
        growing=interleave if config.grows_by_window and isinstance(interleave, DocumentRows) else None,
        first_place=None if mixture is None else mixture.first_place,
    )


def make_schedule(config: LoaderConfig, interleave: Interleave) -> Schedule:
    """The schedule of one rank. Rank and world size must have been resolved."""
    world_size = config.world_size or 1
    return Schedule(
        interleave,
        config.batch_size,
        rank=config.rank or 0,
        world_size=world_size,
        drop_last=config.drop_last,
        skip_steps=in_steps(config.skip_steps, config.batch_size * world_size, config.place_tokens),
    )


def make_objectives(
    config: LoaderConfig, schedule: Schedule, mixture: "MixedRows | None", rows: ReadableRows
) -> "tuple[RowDraws | None, Transforms | None]":
    """What is drawn for rows, and what is done to them. None, None where that is nothing."""
    if not config.all_objectives and not any(OUTPUTS[name].needs_objective for name in config.outputs):
        return None, None
    # With the first objective: most runs do not have one.
    from dali_pipes.config.objectives import Users
    from dali_pipes.objectives import RowDraws, SourceObjectives, Transforms

    if mixture is None:
        sources = [SourceObjectives(None, config.objective, config.objectives)]
    else:
        bases = mixture.bases.tolist()
        sources = [
            SourceObjectives(name, own.objective, own.objectives, bases[number])
            for number, (name, own) in enumerate(config.sources.items())
        ]
    users = [entry for entry in config.objectives if isinstance(entry, Users)]
    transforms = Transforms.of(sources, users, config.vocab_size, config.pad_id)
    if transforms is None:
        return None, None
    draws = RowDraws(
        sources,
        transforms.numbers,
        key=partial(_objective_key, config.seed),
        strata_key=partial(order_key, "objective strata", config.seed),
        tokens_before=_tokens_before(config, schedule.interleave, mixture, rows),
        repeats=config.split == "validation",
        in_batches=config.batch_tokens is not None,
        span_widths=config.span_widths,
    )
    return draws, transforms


def _tokens_before(
    config: LoaderConfig, interleave: Interleave, mixture: "MixedRows | None", rows: ReadableRows
) -> Callable[[int, int], int]:
    """Tokens of the run before a row of an epoch, padding included; of documents, by packing windows."""
    from dali_pipes.rows.document_rows import DocumentRows  # with the first objective, which alone needs it

    if isinstance(rows, DocumentRows):
        return rows.tokens_before
    if isinstance(interleave, Curriculum):
        return interleave.tokens_before
    if mixture is not None:
        return lambda epoch, row: (mixture.first_place(epoch) + row) * config.row_len
    return lambda epoch, row: (epoch * interleave.count(0) + row) * config.row_len


def _objective_key(seed: int, name: str | None, pass_number: int) -> int:
    return order_key("objective", seed, *key_names(name), pass_number)


def make_outputs(
    config: LoaderConfig, schedule: Schedule, mixture: "MixedRows | None", source: Source, *, in_pieces: bool
) -> Outputs:
    """The fields of a batch, and how they are made from tokens."""
    draws, transforms = make_objectives(config, schedule, mixture, source.rows)
    return Outputs(
        config.batch_names,
        config.batch_size if config.batch_tokens is None else None,
        config.row_len,
        in_pieces,
        label_shift=config.label_shift,
        pad_id=config.pad_id,
        mtp=config.mtp,
        mask_boundaries=config.masks_boundaries,
        index_dtype=np.dtype(config.index_dtype),
        mask_dtype=np.dtype(config.mask_dtype or config.index_dtype),
        draws=draws,
        transforms=transforms,
        has_loss_mask=source.has_loss_mask,
        goldfish=config.goldfish,
        span_widths=config.span_widths,
    )


def block_rows(config: LoaderConfig, batches_per_run: int) -> int:
    """Rows of `row_len` positions that a block of K batches has room for."""
    if config.batch_tokens is None:
        return batches_per_run * config.batch_size
    return -(-batches_per_run * (config.batch_tokens + 1) // config.row_len)  # `cu_seqlens` has an entry more a batch


def batches_per_run(config: LoaderConfig, schedule: Schedule, target_tokens: int) -> int:
    """Batches in a block (K): the user's, or as many as reach the target; both capped by max_block_bytes.

    Where documents have to be planned, the target is also one of rows, over all ranks, whose plan the first batch waits
    for.
    """
    batch_tokens = config.batch_size * config.place_tokens
    wanted = target_tokens // batch_tokens
    if schedule.interleave.most_planned is not None:
        wanted = min(wanted, schedule.interleave.most_planned // schedule.global_rows)
    wanted = wanted if config.batches_per_run == "auto" else config.batches_per_run
    most = config.max_block_bytes // _counted_bytes(config)
    return max(1, min(wanted, most, schedule.steps(most=min(wanted, most))))


def _counted_bytes(config: LoaderConfig) -> int:
    """What a batch counts for in max_block_bytes: inputs and labels."""
    return config.batch_size * config.place_tokens * np.dtype(config.index_dtype).itemsize * 2
