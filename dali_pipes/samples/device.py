"""What happens to fetched batches: nothing, a copy to the GPU on a side stream, or a DALI graph.

A stage works on at most `depth` batches at a time and finishes them in order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from dali_pipes.config.validators import shown
from dali_pipes.errors import BackendError, ConfigError, GraphError
from dali_pipes.runtime.ranks import environment_number
from dali_pipes.samples.fetch import Request, item_text, sample_error
from dali_pipes.samples.structure import with_fields


class Stage(Protocol):
    """What happens to a batch after its samples have been fetched."""

    depth: int

    def begin(self, request: Request, batch: Any) -> Any: ...

    def finish(self, begun: Any) -> Any: ...

    def reset(self) -> None:
        """Drop batches that were begun but not finished."""

    def close(self) -> None: ...


class AsFetched:
    """Batches stay as they are."""

    depth = 1

    def begin(self, request: Request, batch: Any) -> Any:
        return batch

    def finish(self, begun: Any) -> Any:
        return begun

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


class ToGpu:
    """Copies tensors to a GPU on a separate stream, one batch ahead of the trainer."""

    depth = 2

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device, self._pin, self._stream = device, pin, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, request: Request, batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            copied = on_tensors(batch, self._copied)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return copied, event

    def finish(self, begun: tuple[Any, torch.cuda.Event]) -> Any:
        batch, event = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        on_tensors(batch, lambda tensor: tensor.record_stream(stream))  # or its memory could be reused too early
        return batch

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pin and not tensor.is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


class ThroughGraph:
    """Decodes and augments samples with a DALI graph, whose random numbers are keyed by the rows."""

    def __init__(
        self, graph: Callable[..., Any], *, num_draws: int, seed: int, device: torch.device, name: str
    ) -> None:
        from dali_pipes.samples.graph import SampleGraph
        from dali_pipes.samples.keyed_numbers import uniform

        self.depth = 2
        device_id = device.index if device.type == "cuda" else None
        self._graph = SampleGraph(graph, num_draws=num_draws, device_id=device_id, depth=self.depth)
        self._uniform, self._seed, self._num_draws = uniform, seed, num_draws
        self._name, self._device = name, device

    def begin(self, request: Request, batch: list[Any]) -> Request:
        rows = np.array(request.rows, np.int64)
        self._graph.submit(batch, self._uniform(self._seed, request.epoch, rows, self._num_draws))
        return request

    def finish(self, begun: Request) -> Any:
        try:
            return self._graph.result(self._stream())
        except GraphError as error:
            if error.position is None:
                raise
            item, row = begun.items[error.position], begun.rows[error.position]
            raise sample_error(f"{item_text(item, self._name, begun.epoch, row)}: {error}", begun, row) from error

    def reset(self) -> None:
        self._graph.reset()

    def close(self) -> None:
        self._graph.close()

    def _stream(self) -> int | None:
        if self._device.type == "cpu":
            return None
        return torch.cuda.current_stream(self._device).cuda_stream


def staged(fetched: Iterator[tuple[Request, Any]], stage: Stage) -> Iterator[tuple[Request, Any]]:
    """Batches through a stage. An error of `fetched` is raised after the batches before it."""
    under_way: deque[tuple[Request, Any]] = deque()
    failure: Exception | None = None
    ended = False
    while True:
        while not ended and len(under_way) < stage.depth:
            try:
                request, batch = next(fetched)
                under_way.append((request, stage.begin(request, batch)))
            except StopIteration:
                ended = True
            except Exception as error:
                failure, ended = error, True
            batch = None  # held by its consumer alone
        if not under_way:
            if failure is not None:
                raise failure
            return
        yield under_way[0][0], stage.finish(under_way.popleft()[1])


def on_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A batch with all of its tensors changed; other fields are kept."""
    return with_fields(batch, lambda _, value: change(value) if isinstance(value, torch.Tensor) else value)


def chosen_device(requested: Any) -> torch.device:
    """The device of batches. "auto" is the GPU of the launcher's local rank if torch sees one, else the CPU.

    Raises `ConfigError` for other kinds of devices, and `BackendError` for a GPU that does not exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "auto":
        requested = "cuda" if count else "cpu"
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device = {shown(requested)}: expected "auto", "cpu", "cuda" or "cuda:N"') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f'device = "{device}" is not supported: expected "auto", "cpu", "cuda" or "cuda:N"')
    if not count:
        raise BackendError(f'device = "{device}": torch {torch.__version__} does not see a GPU; use device = "cpu"')
    index: int | None = device.index
    if index is None:
        current, local_rank = torch.cuda.current_device(), environment_number("LOCAL_RANK")
        index = local_rank if current == 0 and local_rank is not None and count > 1 else current
    if index >= count:
        raise BackendError(
            f"device cuda:{index} does not exist: torch sees {count} GPU{'s' * (count > 1)}; use cuda:0"
            + (f" to cuda:{count - 1}" if count > 1 else "")
        )
    return torch.device("cuda", index)
