"""DALI operators over batches of samples: decoding and augmentation by `graph=`.

    samples [{"image": bytes, "label": 3}, ...]  ─▶ nodes["image"], nodes["label"] ─┐
    numbers float32 (B, num_draws)               ─▶ u[0] ... u[num_draws - 1]      ─┴▶ graph ─▶ {"image": (B, ...), ...}

def graph(nodes, u):
    image = fn.decoders.image(nodes["image"], device="cpu")  # "mixed": decode on the GPU
    image = fn.crop(fn.resize(image, size=(256, 256)), crop=(224, 224), crop_pos_x=u[0], crop_pos_y=u[1])
    image = fn.flip(image, horizontal=fn.cast(u[2] < 0.5, dtype=types.INT32))
    return {"image": image, "label": nodes["label"]}

DALI's own random operators depend on how often they have been called, so a sample would look different with another
batch size or after a resume. With parameters from `u`, it is the same wherever it is computed.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from dali_pipes.engine.dali import dali_package, survive_forks
from dali_pipes.errors import GraphError, LoaderClosedError
from dali_pipes.runtime.cpus import usable_cpus
from dali_pipes.samples.draws import Draws, noise_keys
from dali_pipes.samples.graph_inputs import Field, columns, fields_like
from dali_pipes.samples.structure import FieldPath, fields_of, name_of, with_fields

Graph: TypeAlias = Callable[[Any, Draws], Any]
_MOST_THREADS = 4
_REPORT = re.compile(r"operator `(?:nvidia\.dali\.)?([^`]*)`.*encountered:(.*)", re.DOTALL)
_NOT_FOR_USERS = re.compile(r"C\+\+ context: .*|Current pipeline object is no longer valid\.")


class SampleGraph:
    """Runs a graph over batches of samples, in order of submission. Use it in one thread at a time.

    graph:       takes `nodes`, in the structure of a sample, and `u`; returns one node, or nodes nested in dicts, lists
                 and tuples. Called for the first batch, and again if a later batch is larger
    num_draws:   number of random numbers per sample
    device_id:   CUDA device of the outputs; None: the CPU
    num_threads: number of DALI threads; by default, the number of usable CPUs, at most 4
    depth:       number of batches that are processed at the same time; later ones are queued

    Fields of samples are NumPy arrays, torch tensors and PIL images of any shape, but with the same dtype and number of
    axes in all samples; `bytes`, such as an encoded image, which become uint8 (n,); and bool, int and float, which
    become bool, int64 and float64 scalars. Other values, such as str, bypass DALI: the graph can only return their
    nodes, and the batch contains their values as a list.
    """

    def __init__(
        self, graph: Graph, *, num_draws: int, device_id: int | None, num_threads: int | None = None, depth: int = 2
    ) -> None:
        """Imports DALI. Raises `BackendError` if it is not installed."""
        with dali_package("for graph="):
            import nvidia.dali  # noqa: F401
        threads = min(len(usable_cpus()), _MOST_THREADS) if num_threads is None else num_threads
        self._settings = _Settings(graph, num_draws, device_id, threads)
        self._depth = depth
        self._fields: list[Field] | None = None
        self._pipeline: _Pipeline | None = None  # for batches to come
        self._batches: deque[_Batch] = deque()
        self._is_closed = False

    def submit(self, samples: list[Any], numbers: npt.NDArray[np.float32]) -> None:
        """Start processing a batch, or queue it. Copies arrays to DALI; does not wait for operators.

        samples: B >= 1 samples, which must not change before `result` returns the batch
        numbers: (B, num_draws), in [0, 1)

        Raises `LoaderClosedError` after `close`. Errors of the batch are raised by its `result`.
        """
        self._check_open()
        assert numbers.shape == (len(samples), self._settings.num_draws), (numbers.shape, len(samples))
        assert len(samples) > 0
        self._batches.append(_Batch(samples, numbers))
        self._start()

    def result(self, stream: int | None = None) -> Any:
        """The next batch: the structure that the graph returned, with tensors (B, ...) in place of nodes. Blocks.

        stream: handle of the CUDA stream that will use the tensors; None: synchronize with the device

        The tensors own their memory. Raises the errors of the graph; `GraphError` if a sample does not match the first
        one, if an operator fails, and if outputs cannot be stacked; and `LoaderClosedError` after `close`. After an
        error, the next call returns the next batch.
        """
        self._check_open()
        assert self._batches, "result() without a submitted batch"
        batch = self._batches[0]
        try:
            if batch.error is not None:
                raise batch.error
            assert batch.pipeline is not None
            try:
                outputs = batch.pipeline.take(stream)
            except BaseException as error:  # DALI chooses the class by what failed
                self._abandon(batch.pipeline)
                if isinstance(error, Exception):
                    raise self._failure(batch, error) from error
                raise
            return batch.pipeline.results(outputs, batch.samples)
        finally:
            del batch  # an error's traceback holds this frame
            self._batches.popleft()
            self._start()

    def reset(self) -> None:
        """Drop all submitted batches and their errors. Waits for those in progress; the next one builds a pipeline."""
        if self._batches:
            self._batches.clear()
            self._pipeline = None

    def close(self) -> None:
        """Drop all batches and stop DALI's threads once they are idle. Idempotent."""
        self._is_closed = True
        self._batches.clear()
        self._pipeline = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise LoaderClosedError("this SampleGraph is closed")

    def _start(self) -> None:
        for batch in list(self._batches)[: self._depth]:
            if batch.pipeline is None and batch.error is None:
                try:
                    self._fields = fields_like(batch.samples[0]) if self._fields is None else self._fields
                    values = columns(self._fields, batch.samples)
                    pipeline = self._pipeline
                    if pipeline is None or pipeline.max_batch_size < len(batch.samples):
                        pipeline = self._pipeline = _Pipeline(self._settings, batch.samples, self._fields)
                    batch.pipeline = pipeline
                    pipeline.start(values, batch.numbers)
                except BaseException as error:
                    self._pipeline = batch.pipeline = None  # it may have got some of the values
                    if not isinstance(error, Exception):
                        raise
                    batch.error = error

    def _abandon(self, pipeline: "_Pipeline | None") -> None:
        """After an error a pipeline is not usable, and after an interrupt it may not be: its batches get a new one."""
        if self._pipeline is pipeline:
            self._pipeline = None
        for batch in self._batches:
            if batch.pipeline is pipeline:
                batch.pipeline = None

    def _failure(self, batch: "_Batch", error: Exception) -> GraphError:
        """The error for a batch that DALI failed on. It does not say at which sample: look for one that fails alone."""
        assert self._fields is not None
        alone = _Pipeline(self._settings, batch.samples[:1], self._fields)
        for position, sample in enumerate(batch.samples):
            try:
                alone.start(columns(self._fields, [sample]), batch.numbers[position : position + 1])
                alone.take()
            except Exception as found:
                return GraphError(f"graph failed on sample {position} of the batch: {_essence(found)}", position)
        return GraphError(
            f"graph failed on the batch, although it works on each of its samples alone: {_essence(error)}"
        )


class _Settings(NamedTuple):
    graph: Graph
    num_draws: int
    device_id: int | None
    num_threads: int


class _Batch:
    """A submitted batch. pipeline: where it is in work; None: it waits, or could not be started for an error."""

    def __init__(self, samples: list[Any], numbers: npt.NDArray[np.float32]) -> None:
        self.samples, self.numbers = samples, numbers
        self.pipeline: _Pipeline | None = None
        self.error: Exception | None = None


@dataclass(frozen=True)
class _Passed:
    """The node of a field that passes around DALI."""

    path: FieldPath


class _Pipeline:
    """A DALI pipeline for batches of at most as many samples as these, with these fields."""

    def __init__(self, settings: _Settings, samples: list[Any], fields: list[Field]) -> None:
        from nvidia.dali import fn, types
        from nvidia.dali.data_node import DataNode
        from nvidia.dali.pipeline import Pipeline

        self.max_batch_size = len(samples)
        # exec_dynamic: outputs own their memory, and any number of runs may be scheduled. A queue of one keeps the
        # first `schedule_run` from starting as many as the queue is deep.
        pipe = Pipeline(
            batch_size=self.max_batch_size,
            num_threads=settings.num_threads,
            device_id=settings.device_id,
            prefetch_queue_depth=1,
            exec_dynamic=True,
        )
        survive_forks(pipe)
        with pipe:
            inputs = {
                field.path: _Passed(field.path)
                if field.dtype is None
                else fn.external_source(
                    name=_input_name(number), ndim=field.ndim, dtype=types.to_dali_type(field.dtype.name)
                )
                for number, field in enumerate(fields)
            }
            numbers = fn.external_source(name="numbers", ndim=1, dtype=types.FLOAT)
            keys = fn.external_source(name="keys", ndim=1, dtype=types.UINT64)
            nodes = with_fields(samples[0], lambda path, _: inputs[path])
            try:
                self._structure = settings.graph(nodes, Draws(numbers, settings.num_draws, keys))
            except Exception as error:
                error.add_note("graph= raised this error while the DALI pipeline was being built")
                raise
            returned: list[Any] = []
            for path, node in fields_of(self._structure):
                if isinstance(node, DataNode):
                    returned.append(node if settings.device_id is None else node.gpu())
                elif not isinstance(node, _Passed):
                    raise GraphError(
                        f"graph returned a {type(node).__name__} as {name_of(path)}; expected a DALI node: one of "
                        "nodes, or the output of an operator"
                    )
            if not returned:
                raise GraphError("graph did not return a DALI node; expected at least one")
            pipe.set_outputs(*returned)
        pipe.build()
        self._pipe = pipe
        # DALI removes inputs that the graph does not use, and refuses data for them.
        self._inputs = [(_input_name(number), field) for number, field in enumerate(fields) if field.dtype is not None]
        self._inputs = [(name, field) for name, field in self._inputs if self._is_used(name)]
        self._uses_numbers, self._uses_keys = self._is_used("numbers"), self._is_used("keys")

    def start(self, values: dict[FieldPath, list[Any]], numbers: npt.NDArray[np.float32]) -> None:
        """Begin a run, with what `columns` returned for the batch."""
        for name, field in self._inputs:
            column = values[field.path]
            self._pipe.feed_input(name, column if field.ndim else np.stack(column))
        if self._uses_numbers:
            self._pipe.feed_input("numbers", np.ascontiguousarray(numbers, np.float32))
        if self._uses_keys:
            self._pipe.feed_input("keys", noise_keys(numbers))
        self._pipe.schedule_run()

    def take(self, stream: int | None = None) -> list[Any]:
        """The outputs of the earliest run that were not taken yet. Blocks; raises what DALI raises."""
        outputs = self._pipe.share_outputs(stream)
        self._pipe.release_outputs()
        return list(outputs)

    def results(self, outputs: list[Any], samples: list[Any]) -> Any:
        """The structure that the graph returned. Raises GraphError for outputs that cannot be stacked."""
        left = iter(outputs)
        passed = {path for path, node in fields_of(self._structure) if isinstance(node, _Passed)}
        values = [dict(fields_of(sample)) for sample in samples] if passed else []

        def result(path: FieldPath, node: Any) -> Any:
            if path in passed:
                return [of_sample[node.path] for of_sample in values]
            return _stacked(name_of(path), next(left), len(samples))

        return with_fields(self._structure, result)

    def _is_used(self, name: str) -> bool:
        try:
            return bool(self._pipe.input_feed_count(name))
        except KeyError:
            return False


def _input_name(number: int) -> str:
    return f"field {number}"


def _stacked(name: str, output: Any, batch_size: int) -> torch.Tensor:
    """The samples of an output as one tensor that shares its memory, where that is contiguous."""
    shapes = output.shape()
    if len(shapes) != batch_size:
        raise GraphError(
            f"output {name} of the graph has {len(shapes)} samples; expected the {batch_size} samples of the batch. "
            "Compute it from nodes or u."
        )
    position = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
    if position is not None:
        raise GraphError(
            f"output {name} of the graph has shape {shapes[0]} for sample 0 of the batch, but {shapes[position]} for "
            f"sample {position}. Give all samples the same shape, for example with fn.resize, fn.crop or fn.pad.",
            position,
        )
    if output.is_dense_tensor():
        return from_dlpack(output.as_tensor())
    return torch.stack([from_dlpack(output[place]) for place in range(batch_size)])


def _essence(error: Exception) -> str:
    """The operator and what it says, from DALI's report about one sample, which is many lines long."""
    found = _REPORT.search(str(error))
    operator, cause = found.groups() if found else ("DALI", str(error))
    cause = " ".join(_NOT_FOR_USERS.sub("", cause).replace("sample #0", "the sample").split())
    return f"{operator}: {cause.rstrip(' :')}"
