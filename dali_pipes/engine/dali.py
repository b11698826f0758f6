"""The DALI graph around a block source.

    external_source (block source) ─▶ cast to int64 ─▶ the user's own DALI operators ─▶ prefetch queue

One DALI run yields one block: a single sample of shape (K * B, T), since a run costs about the same whatever it
carries. This module alone imports DALI.
"""

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dali_pipes.config import LoaderConfig, Paths
from dali_pipes.config.skip_steps import in_steps
from dali_pipes.corpus import Corpus
from dali_pipes.corpus_or_text import open_corpus
from dali_pipes.documents import find_documents
from dali_pipes.engine.block_source import BlockInfo, BlockSource
from dali_pipes.engine.profiling import open_ranges
from dali_pipes.errors import BackendError, ConfigError, LoaderClosedError
from dali_pipes.monitoring.stats import BlockLimits
from dali_pipes.placement.base import Placement
from dali_pipes.placement.cpu import ShiftedPlacement, StagedPlacement
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.gpu import DevicePlacement, HostPlacement
from dali_pipes.placement.selection import choose_device, choose_placement
from dali_pipes.rows.document_rows import DocumentRows, split_documents
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.rows.outputs import HOST_OUTPUTS, RowOutputs
from dali_pipes.rows.windows import Windows, split_windows
from dali_pipes.runtime.ranks import environment_number, resolve_ranks
from dali_pipes.schedule import Schedule
from dali_pipes.schedule.plans import STEP_ROWS_PLANNED, Layout, PackedPieces, StreamPieces, token_span

TARGET_BLOCK_TOKENS = 1 << 20
"""Tokens of a block when the user sets no `batches_per_run`: 2 MiB as uint16. A quarter of it cost twice the CPU."""

TARGET_GPU_BLOCK_TOKENS = 1 << 22
"""The same on a GPU, where a run costs DALI more of the host while the device is busy (`benchmarks/README.md`)."""

Graph = Callable[[dict[str, Any]], Mapping[str, Any]]
"""DALI data nodes by output name → nodes of the same names, rows still in the first axis."""


class BuiltSource:
    """A block source with what was decided while building it.

    `for_loader`: nobody but a loader sees the blocks. `staged`: so they are, on the CPU, `tokens` in the file's width,
    which it widens itself. `why_not`: see `choose_device`.
    """

    gpu: Gpu | None = None

    def __init__(
        self,
        config: LoaderConfig,
        *,
        endless: bool,
        for_loader: bool = False,
        why_not: Callable[[], str | None] = lambda: None,
    ) -> None:
        if config.length_buckets is not None and not for_loader:
            raise ConfigError(
                "length_buckets make batches of several widths, which a DALI graph has no place for; leave them "
                "out, or use a TokenLoader without graph"
            )
        corpus = open_corpus(
            config.corpus,
            format=config.format,
            dtype=config.dtype,
            eos_id=config.eos_id,
            tokenizer=config.tokenizer,
            text_key=config.text_key,
            loss_masks=config.loss_masks,
            token_column=config.token_column,
            cache_bytes=config.decoded_cache_bytes,
            eager=config.eager,
            verify=config.verify_checksums,
            read_retries=config.read_retries,
            vocab_size=config.vocab_size,
        )
        try:
            self.schedule, self.layout, self.warning = make_schedule(config, corpus)
            self.row_outputs = None if self.layout is None else make_row_outputs(config)
            self.device, self.device_reason = choose_device(config.device, environment_number("LOCAL_RANK"), why_not)
            self.staged = for_loader and self.device is None
            self.batches_per_run = batches_per_run(config, self.schedule, on_gpu=self.device is not None)
            self.placement, self.placement_reason, placement = _make_placement(config, corpus, self)
        except BaseException:
            corpus.close()
            raise
        self.ranges = open_ranges(config.nvtx)
        staging = ("tokens",) if corpus.loss_mask is None else ("tokens", "learn")
        self.source = BlockSource(
            corpus,
            self.schedule,
            placement,
            outputs=staging if self.staged else tuple(name for name in config.outputs if name != "max_seqlen"),
            batches_per_run=self.batches_per_run,
            num_threads=config.num_threads,
            prefetch_queue_depth=config.prefetch_queue_depth,
            endless=endless,
            layout=self.layout,
            ranges=self.ranges,
        )
        self._config = config
        self._epoch_steps = self._steps_known()

    @property
    def device_name(self) -> str:
        """Of the device that blocks are delivered to, as torch calls it."""
        return "cpu" if self.device is None else f"cuda:{self.device}"

    def block_limits(self) -> BlockLimits:
        """What caps `batches_per_run`. Plans nothing: the steps are unknown until all rows are counted."""
        self._epoch_steps = self._epoch_steps or self._steps_known()
        return BlockLimits(self._epoch_steps, _counted_bytes(self._config), self._config.max_block_bytes)

    def _steps_known(self) -> int | None:
        documents = self.schedule.documents
        known = documents is None or documents.is_complete(0)
        return self.schedule.steps_of(self.schedule.rows_known(0, 0)) if known else None

    def batch_bytes(self, name: str, width: int) -> int:
        """Bytes of an output of one delivered batch of `width` positions a row."""
        rows = self._config.batch_size
        if name == "row_ids" or self.row_outputs is None:
            return 8 * rows * (1 if name == "row_ids" else width)
        return math.prod(self.row_outputs.shape(name, rows, width)) * (4 if name == "cu_seqlens" else 8)


def build_pipeline(config: LoaderConfig | Paths | None = None, *, graph: Graph | None = None, **settings: Any) -> Any:
    """A DALI `Pipeline`, not yet built, for trainers that drive DALI themselves.

    Takes what a `TokenLoader` takes: a `LoaderConfig`, or the path or paths of the corpus, and settings as keywords.

    Its outputs are `config.outputs`, in that order, each one sample (batch size 1) of shape (K * B, T), int64
    ((K * B,) for row_ids); the last block of an epoch is shorter. It raises `StopIteration` at the end of an epoch and
    starts the next one, in a new order, after `reset()`; with `repeat` it never ends. `batches_per_run = 1` gives one
    batch a run. `graph` may add DALI operators between the casts and the outputs.

    `DALIGenericIterator([pipe], list(config.outputs), auto_reset=True)` gives (1, K * B, T) tensors.

    Raises `BackendError` without DALI, `ConfigError` and `CorpusError` for bad settings and data.
    """
    config = LoaderConfig.of(config, settings)
    if "max_seqlen" in config.outputs:
        raise ConfigError('outputs: "max_seqlen" is a number on the host, which a DALI pipeline has no place for')
    if config.context_parallel is not None:
        raise ConfigError("context_parallel: a TokenLoader gives shares of rows; a pipeline makes whole ones")
    config = resolve_ranks(config)
    in_steps(config.skip_steps, config.batch_size * (config.world_size or 1), config.seq_len, start=(0, 0))
    return define_pipeline(BuiltSource(config, endless=config.repeat), config, graph)


def define_pipeline(built: BuiltSource, config: LoaderConfig, graph: Graph | None) -> Any:
    """The DALI graph around a source: its outputs, cast to int64 where they are wanted and are not yet."""
    names = built.source.outputs
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise BackendError(
            'DALI is not installed: pip install "dali-pipes[cpu]" on a machine without a GPU, "dali-pipes[cuda12]" or '
            '"dali-pipes[cuda13]" on one with'
        ) from error
    # exec_dynamic: outputs own their memory, so a batch stays as it was for as long as someone holds it. The older
    # executor was seen to overwrite outputs that torch still held through DLPack.
    pipe = Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=built.device,
        prefetch_queue_depth=config.prefetch_queue_depth,
        exec_dynamic=True,
    )
    _survive_forks(pipe)
    pipe._block_source = built.source
    with pipe:
        nodes = fn.external_source(
            _SourceOf(built.source),
            num_outputs=len(names),
            batch=True,
            batch_info=True,
            ndim=[_axes(built, config, name) for name in names],
            device="cpu" if built.device is None else "gpu",
            cuda_stream=None if built.gpu is None else built.gpu.stream,
        )
        named = dict(zip(names, nodes, strict=True))
        if built.device is None and not built.staged:
            narrow = built.row_outputs is None
            named = {n: fn.cast(v, dtype=types.INT64) if narrow and n != "row_ids" else v for n, v in named.items()}
        if graph is not None:
            named = dict(graph(named))
            if set(named) != set(names):
                raise ConfigError(f"graph returned {sorted(named)}, expected nodes named {sorted(names)}")
        pipe.set_outputs(*(named[name] for name in names))
    return pipe


class _SourceOf:
    """A block source as DALI is to call it, which its pipeline holds instead.

    DALI's operators and nodes hold one another in a circle, which would keep the source, its threads and open files
    until the garbage collector comes by.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = weakref.ref(source)

    def __call__(self, info: BlockInfo) -> tuple[Any, ...]:
        source = self._source()
        if source is None:
            raise LoaderClosedError("the pipeline of this block source is gone; build a new one")
        return source(info)


def _axes(built: BuiltSource, config: LoaderConfig, name: str) -> int:
    if name == "row_ids" or config.length_buckets is not None or (built.staged and built.layout is not None):
        return 1
    return 3 if name == "labels" and config.mtp else 2


def make_schedule(config: LoaderConfig, corpus: Corpus) -> tuple[Schedule, Layout, str | None]:
    """The schedule of one rank, how its rows are put together, and what the user should know about the documents.

    Rank and world size must have been resolved.
    """
    if corpus.loss_mask is not None and not config.label_shift:
        raise ConfigError(
            "label_shift = False copies the inputs, but the corpus has a loss mask, which needs shifted labels; use "
            "label_shift = True, or loss_masks = [] to learn every token"
        )
    if corpus.is_synthetic and config.document_start_id is not None:
        raise ConfigError(
            f"document_start_id = {config.document_start_id} applies to files: documents of a synthetic corpus end "
            "with eos_id; leave it out"
        )
    documents_found = (
        find_documents(corpus, start_id=config.document_start_id, end_at_files=config.documents_end_at_files)
        if config.uses_documents
        else None
    )
    offsets = None if documents_found is None else documents_found.offsets
    shuffle = config.shuffle and config.split == "train"
    layout: Layout = None
    documents: DocumentRows | None = None
    if config.rows == "stream":
        windows = split_windows(
            corpus.num_tokens, config.seq_len, config.stride, config.split, config.validation_fraction
        )
        if config.uses_pieces or corpus.loss_mask is not None:
            limit = windows.first + windows.num_tokens
            layout = StreamPieces(offsets, config.seq_len, max(1, config.mtp), limit, config.masks_boundaries)
    else:
        assert offsets is not None
        offsets = split_documents(offsets, config.split, config.validation_fraction)
        documents = DocumentRows(
            offsets,
            config.seq_len,
            mode=config.rows,
            long_documents=config.long_documents,
            window_documents=config.window_documents,
            shuffle=shuffle,
            seed=config.seed,
            buckets=None if config.bucket_widths is None else LengthBuckets(np.array(config.bucket_widths, np.int64)),
        )
        layout = PackedPieces(documents)
        span = int(offsets[-1] - offsets[0])
        windows = Windows(int(offsets[0]), 0, config.seq_len, config.seq_len, span)
    schedule = Schedule(
        windows,
        config.batch_size,
        rank=config.rank or 0,
        world_size=config.world_size or 1,
        shuffle=shuffle,
        seed=config.seed,
        drop_last=config.drop_last,
        documents=documents,
        skip_steps=in_steps(config.skip_steps, config.batch_size * (config.world_size or 1), config.seq_len),
    )
    return schedule, layout, None if documents_found is None else documents_found.warning


def make_row_outputs(config: LoaderConfig) -> RowOutputs:
    """How outputs are made where rows are put together from pieces."""
    return RowOutputs(
        tuple(name for name in config.outputs if name not in ("row_ids", *HOST_OUTPUTS)),
        config.batch_size,
        config.seq_len,
        pad_id=config.pad_id,
        mtp=config.mtp,
        mask_boundaries=config.masks_boundaries,
    )


def batches_per_run(config: LoaderConfig, schedule: Schedule, *, on_gpu: bool) -> int:
    """Batches in one DALI run (K): the user's, or as many as reach the byte target; both capped by max_block_bytes.

    With rows of documents the target is also one of the rows, over all ranks, whose plan the first batch waits for.
    """
    batch_tokens = config.batch_size * config.seq_len
    wanted = (TARGET_GPU_BLOCK_TOKENS if on_gpu else TARGET_BLOCK_TOKENS) // batch_tokens
    if schedule.documents is not None:
        wanted = min(wanted, STEP_ROWS_PLANNED // schedule.global_rows)
    wanted = config.batches_per_run or wanted
    most = config.max_block_bytes // _counted_bytes(config)
    return max(1, min(wanted, most, schedule.steps(most=min(wanted, most))))


def _counted_bytes(config: LoaderConfig) -> int:
    """What a batch counts for in max_block_bytes: int64 inputs and labels."""
    return config.batch_size * config.seq_len * 8 * 2


def _make_placement(config: LoaderConfig, corpus: Corpus, built: BuiltSource) -> tuple[str, str, Placement]:
    common: Any = {"label_shift": config.label_shift, "vocab_size": config.vocab_size, "layout": built.layout}
    if built.device is None:
        if config.placement == "device":
            raise BackendError(f'placement = "device" needs a GPU: {built.device_reason}')
        if built.staged:
            return "host", built.device_reason, StagedPlacement(corpus, built.schedule, **common)
        shifted = ShiftedPlacement(corpus, built.schedule, **common, row_outputs=built.row_outputs)
        return "host", built.device_reason, shifted
    token_bytes = corpus.dtype.itemsize + (corpus.loss_mask is not None)
    corpus_bytes = token_span(built.schedule, built.layout) * token_bytes
    name, reason = choose_placement(config.placement, built.device, corpus_bytes, config.max_device_bytes)
    gpu_kind = DevicePlacement if name == "device" else HostPlacement
    max_rows = built.batches_per_run * config.batch_size
    placement = gpu_kind(
        corpus,
        built.schedule,
        Gpu(built.device),
        max_rows=max_rows,
        outputs=tuple(name for name in config.outputs if name not in HOST_OUTPUTS),
        row_outputs=built.row_outputs,
        **common,
    )
    built.gpu = placement.gpu
    return name, reason, placement


_pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()
_forks_watched = False


def _survive_forks(pipe: Any) -> None:
    """Keep a forked child from waiting for ever for DALI's threads, which do not exist in it, when it drops `pipe`."""
    global _forks_watched
    if not _forks_watched:
        os.register_at_fork(after_in_child=_abandon_pipelines)
        _forks_watched = True
    _pipelines.add(pipe)


def _abandon_pipelines() -> None:
    for pipe in list(_pipelines):
        backend = getattr(pipe, "_pipe", None)
        if backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # never destroyed: its destructor joins the threads
            pipe._pipe = None
