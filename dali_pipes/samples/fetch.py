"""What a worker does: it reads the samples of a request, each with its own random state, and makes a batch.

This runs in torch's worker processes or, without workers, in the trainer's process. If an item raises an error, a
`Failure` takes the place of its batch, so that the batches before it are still delivered.
"""

import contextlib
import copy
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import RawArray
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset, get_worker_info

from dali_pipes.errors import SampleError
from dali_pipes.samples.collate import Collate
from dali_pipes.samples.item_seeds import Generators, kept_states

IDLE = -1


class Request(NamedTuple):
    """The batch of one step."""

    epoch: int
    rows: list[int]
    items: list[int]
    after: tuple[int, int]
    """Epoch and row of the run after the batch has been delivered."""
    ends_epoch: bool = False
    repeated: int = 0
    """Rows at the end of the batch that another rank also has."""


@dataclass
class Failure:
    """Why there is no batch."""

    message: str
    epoch: int
    row: int | None
    item: int | None
    error: Exception | None
    text: str = ""
    """The traceback of an error that was raised in another process."""

    def __reduce__(self) -> tuple[Callable[..., "Failure"], tuple[Any, ...]]:
        """Errors that cannot be pickled are left out: their text says what they were."""
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(self.error)
            pickle.loads(pickled)
        text = "".join(traceback.format_exception(self.error)) if self.error is not None else ""
        return _received, (self.message, self.epoch, self.row, self.item, pickled, text)

    def as_error(self) -> SampleError:
        """The error to be raised, with the original one as its cause."""
        error = SampleError(self.message)
        error.epoch, error.row, error.item = self.epoch, self.row, self.item
        error.__cause__ = self.error
        if self.text:
            (error if self.error is None else self.error).add_note(f"In a worker process:\n{self.text}")
        return error


def _received(message: str, epoch: int, row: int | None, item: int | None, pickled: bytes | None, text: str) -> Failure:
    error = None
    with contextlib.suppress(Exception):
        error = None if pickled is None else pickle.loads(pickled)
    return Failure(message, epoch, row, item, error, text)


class Progress:
    """Which row of which epoch each worker is at, in memory that is shared with them."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.renew()

    def renew(self) -> None:
        """Use other memory, for other workers."""
        self._shared = RawArray("q", 2 * self._num_workers)

    @property
    def of_workers(self) -> npt.NDArray[np.int64]:
        """(W, 2): epoch and row, which is `IDLE` between two requests."""
        return np.frombuffer(self._shared, np.int64).reshape(-1, 2)


class Fetch:
    """A dataset whose "items" are requests."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        seed: int,
        item_seed: bool,
        progress: Progress | None,
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> None:
        self._dataset, self._name, self._seed, self._progress = dataset, dataset_name(dataset), seed, progress
        self._collate = Collate(collate_fn, self._name)
        self._generators = Generators(dataset, collate_fn) if item_seed else None
        self._worker_init_fn = worker_init_fn
        self._read_items = getattr(dataset, "read_items", None) if progress is None else None

    @property
    def may_read_ahead(self) -> bool:
        """Whether batches may be made in another thread: the dataset has `read_items`, and there are no workers."""
        return self._read_items is not None

    def begin_worker(self, worker_id: int) -> None:
        """Called as torch calls `worker_init_fn`: `get_worker_info().dataset` is the user's dataset."""
        object.__setattr__(get_worker_info(), "dataset", self._dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)

    def in_this_process(self) -> Self:
        """The same without workers. It searches for generators separately: workers would inherit what was found here,
        and miss the generators that `worker_init_fn` makes.
        """
        here = copy.copy(self)
        here._progress, here._generators = None, copy.copy(self._generators)
        return here

    def __getitem__(self, request: Request) -> Any:
        """The batch of a request, or a `Failure`; in a worker, pickled."""
        if self._progress is None:
            draws = self._generators is not None and self._read_items is None
            with kept_states() if draws else contextlib.nullcontext():
                return self._batch(request, None)
        worker = get_worker_info()
        assert worker is not None
        at = self._progress.of_workers[worker.id]
        batch = self._batch(request, at)
        if not isinstance(batch, Failure):
            try:
                batch = _Pickled(bytes(ForkingPickler.dumps(batch)))
            except Exception as error:
                text = f"cannot be sent from a worker process ({type(error).__name__}: {error}); return tensors"
                batch = self._batch_failure(request, text, error)
        at[1] = IDLE
        return batch

    def _batch(self, request: Request, at: Any) -> Any:
        samples = self._samples(request, at)
        if isinstance(samples, Failure):
            return samples
        try:
            return self._collate(samples, request.items)
        except Exception as error:
            return self._batch_failure(request, self._collate.problem(samples, request.items, error), error)

    def _samples(self, request: Request, at: Any) -> list[Any] | Failure:
        """The samples of all rows, one after another; as torch does, all together if nothing has to be seeded."""
        together = self._read_items
        if together is None and self._generators is None:
            together = getattr(self._dataset, "__getitems__", None)
        if callable(together):
            if at is not None:
                at[:] = request.epoch, request.rows[0]
            try:
                samples = list(together(list(request.items)))
            except Exception as error:
                return self._batch_failure(request, f"cannot be read: {type(error).__name__}: {error}", error)
            if len(samples) != len(request.items):
                name = getattr(together, "__name__", "the dataset")
                text = f"cannot be read: {name} returned {len(samples):,} samples for {len(request.items):,} items"
                return self._batch_failure(request, text, None)
            return samples
        keys: Sequence[Sequence[int]] = ()
        if self._generators is not None:
            keys = self._generators.keys(self._seed, request.epoch, request.rows)
        samples = []
        for number, (row, item) in enumerate(zip(request.rows, request.items, strict=True)):
            if at is not None:
                at[:] = request.epoch, row
            try:
                if self._generators is not None:
                    self._generators.seed_each(keys[number])
                samples.append(self._dataset[item])
            except Exception as error:
                return Failure(
                    f"{item_text(item, self._name, request.epoch, row)} raised {type(error).__name__}: {error}",
                    request.epoch,
                    row,
                    item,
                    error,
                )
        return samples

    def _batch_failure(self, request: Request, problem: str, error: Exception | None) -> Failure:
        return Failure(f"{batch_text(request, self._name)} {problem}", request.epoch, request.rows[0], None, error)


class _Pickled:
    """A batch that was pickled where an error can be caught: in the queue's own thread it would be lost, and the
    trainer would wait forever. It is unpickled as the batch.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


def dataset_name(dataset: Any) -> str:
    """`Crops`, `Subset of Crops`, `ConcatDataset of Crops and Scans`."""
    name = type(dataset).__name__
    if isinstance(dataset, Subset):
        return f"{name} of {dataset_name(dataset.dataset)}"
    if isinstance(dataset, ConcatDataset):
        return f"{name} of {' and '.join(dict.fromkeys(map(dataset_name, dataset.datasets)))}"
    return name


def sample_error(message: str, request: Request, row: int) -> SampleError:
    """An error about one row of a request."""
    return Failure(message, request.epoch, row, request.items[request.rows.index(row)], None).as_error()


def item_text(item: int, name: str, epoch: int, row: int) -> str:
    """One sample, for a message."""
    return f"item {item:,} of {name} (epoch {epoch:,}, row {row:,})"


def batch_text(request: Request, name: str) -> str:
    """The samples of a batch, for a message."""
    items = ", ".join(f"{item:,}" for item in request.items[:4]) + ", ..." * (len(request.items) > 4)
    return f"the batch of items {items} of {name} (epoch {request.epoch:,}, rows {_rows_text(request.rows)})"


def _rows_text(rows: Sequence[int]) -> str:
    if not rows:
        return "none"
    return f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
