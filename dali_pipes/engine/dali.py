"""DALI: the graph around a block source, and its prefetch queue.

    external_source (block source) ─▶ cast to index_dtype ─▶ the user's own DALI operators ─▶ prefetch queue

One DALI run yields one block: a single sample of shape (K * B, T), since a run costs about the same whatever it
carries. DALI is imported here and in `samples/`.
"""

import atexit
import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from dali_pipes.config import LoaderConfig, Paths
from dali_pipes.config.outputs import on_host
from dali_pipes.config.skip_steps import in_steps
from dali_pipes.engine.block_source import BlockInfo, BlockSource
from dali_pipes.engine.build import BuiltSource, Graph
from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.loans import Loans, loans_of
from dali_pipes.runtime.optional import optional_package
from dali_pipes.runtime.ranks import resolve_ranks


def build_pipeline(config: LoaderConfig | Paths | None = None, *, graph: Graph | None = None, **settings: Any) -> Any:
    """A DALI `Pipeline`, not yet built, for trainers that drive DALI themselves.

    Takes what a `TokenLoader` takes: a `LoaderConfig`, or the path or paths of the corpus, and settings as keywords.

    Its outputs are `config.outputs`, in that order, each one sample (batch size 1) of shape (K * B, T) ((K * B,) for
    row_ids), in the types of a loader's batches; the last block of an epoch is shorter. It raises `StopIteration` at
    the end of an epoch and starts the next one, in a new order, after `reset()`; with `repeat` it never ends.
    `batches_per_run = 1` gives one batch per run. `graph` may add DALI operators between the casts and the outputs.

    `DALIGenericIterator([pipe], list(config.outputs), auto_reset=True)` gives (1, K * B, T) tensors.

    Raises `BackendError` without DALI, `ConfigError` and `CorpusError` for bad settings and data.
    """
    config = LoaderConfig.of(config, settings)
    numbers = [name for name in config.outputs if on_host(name)]
    if numbers:
        raise ConfigError(
            f'outputs: "{numbers[0]}" is a number on the host, which a DALI pipeline cannot hand out; use a TokenLoader'
        )
    if config.context_parallel is not None:
        raise ConfigError(
            "context_parallel is not supported by build_pipeline, which builds whole rows; use a TokenLoader"
        )
    config = resolve_ranks(config)
    in_steps(config.skip_steps, config.batch_size * (config.world_size or 1), config.row_len, start=(0, 0))
    return define_pipeline(BuiltSource(config, endless=config.repeat), config, graph)


def define_pipeline(built: BuiltSource, config: LoaderConfig, graph: Graph | None) -> Any:
    """The DALI graph around a source: its outputs, cast to the types of a batch where they are not of them yet."""
    names = built.source.arrays
    with dali_package():
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    # exec_dynamic: outputs own their memory, so a batch stays as it was for as long as someone holds it. The older
    # executor was seen to overwrite outputs that torch still held through DLPack.
    pipe = Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=built.device,
        prefetch_queue_depth=built.source.autotune.now.prefetch_queue_depth,
        exec_dynamic=True,
    )
    survive_forks(pipe)
    pipe._block_source = built.source
    if built.gpu is not None:
        _end_before_cuda(built.source)
    with pipe:
        nodes = fn.external_source(
            _SourceOf(built.source),
            num_outputs=len(names),
            batch=True,
            batch_info=True,
            ndim=[built.axes(name) for name in names],
            device="cpu" if built.device is None else "gpu",
            cuda_stream=None if built.gpu is None else built.gpu.stream,
        )
        named = dict(zip(names, nodes, strict=True))
        if built.device is None and not built.outputs.in_pieces:  # these are narrow
            narrow = built.outputs.from_tokens
            wide = types.INT32 if config.index_dtype == "int32" else types.INT64
            named = {n: fn.cast(v, dtype=wide) if n in narrow else v for n, v in named.items()}
        if graph is not None:
            named = dict(graph(named))
            if set(named) != set(names):
                raise ConfigError(
                    f"graph returned nodes named {sorted(named)}; expected one for each of {sorted(names)}"
                )
        pipe.set_outputs(*(named[name] for name in names))
    return pipe


class DaliQueue:
    """DALI's prefetch queue over a pipeline.

    Blocks are counted where DALI asks for them: its first `schedule_run` asks for as many as the queue is deep, later
    ones for one each, and an error may come after some of them.
    """

    _pipe: Any = None
    _loans: Loans | None = None

    def __init__(self, pipe: Any, source: BlockSource, gpu: Gpu | None = None) -> None:
        self._on_device: Callable[[], AbstractContextManager[Any]] = nullcontext if gpu is None else gpu.on_device
        self.depth = pipe.prefetch_queue_depth
        self._source = source
        self._before = source.delivered
        self._taken = 0
        with self._on_device():
            pipe.build()
        self._pipe = pipe
        if gpu is not None:
            self._loans = loans_of(gpu.number)
            self._loans.enter(self)

    @property
    def in_flight(self) -> int:
        return self._source.delivered - self._before - self._taken

    def schedule(self) -> None:
        with self._on_device():
            self._pipe.schedule_run()

    def take(self, stream: int | None = None) -> list[Any]:
        pipe = self._pipe  # another thread may close the queue meanwhile
        if pipe is None:
            raise LoaderClosedError("this queue is closed")
        with self._on_device():  # 0 is the default stream of the current device, whichever DALI works for
            outputs = [output[0] for output in pipe.share_outputs(stream)]
            pipe.release_outputs()  # gives DALI its queue place back; the outputs own their memory (exec_dynamic)
        self._taken += 1
        return outputs

    def drain(self) -> int:
        while self.in_flight:
            self.take()
        return self._taken

    def close(self) -> None:
        self._end(is_collected=False)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end(is_collected=True)

    def _end(self, *, is_collected: bool) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is None or self._source.is_forked:
            return
        with suppress(RuntimeError), self._on_device():  # nothing else holds it, so its threads end here
            del pipe
        if self._loans is not None:
            self._loans.leave(self, release_unused_memory, is_collected=is_collected)


def release_unused_memory() -> None:
    """Let DALI's pools return what no pipeline uses, on the device and page-locked: torch cannot use it there."""
    from nvidia.dali import backend

    backend.ReleaseUnusedMemory()  # type: ignore[attr-defined]


def require_dali() -> None:
    """Raise `BackendError` if DALI is not installed. Imports nothing."""
    with dali_package():
        if importlib.util.find_spec("nvidia.dali") is None:  # raises ModuleNotFoundError without any package nvidia
            raise ModuleNotFoundError("nvidia.dali")


def dali_package(purpose: str = "to build a pipeline") -> AbstractContextManager[None]:
    """Inside, an `ImportError` becomes a `BackendError` that says how to install DALI."""
    advice = " (cpu: without a GPU; else the CUDA version of the driver)"
    return optional_package("DALI", "cpu", "cuda12", "cuda13", purpose=purpose, advice=advice)


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
            raise LoaderClosedError("the DALI pipeline of this block source was deleted; build a new one")
        return source(info)


_on_gpus: "weakref.WeakSet[BlockSource]" = weakref.WeakSet()
_at_exit: list[Callable[[], None]] = []


def _end_before_cuda(source: BlockSource) -> None:
    """Close a source at exit, whose pipeline nobody may have dropped: copies from its pinned memory may be queued."""
    _on_gpus.add(source)
    if not _at_exit:  # registered after DALI's own handler, so it runs before that one
        _at_exit.append(atexit.register(_close_sources))


def _close_sources() -> None:
    for source in list(_on_gpus):
        if not source.is_forked:
            source.end()
            source.placement.close()


_pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()
_forks_watched = False


def survive_forks(pipe: Any) -> None:
    """Keep a forked child from waiting forever for DALI's threads, which do not exist in it, when it drops `pipe`."""
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
