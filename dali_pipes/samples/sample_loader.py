"""`SampleLoader`: the interface of torch's `DataLoader`, with exact order, exact resume and keyed augmentation.

loader = SampleLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
for images, labels in loader:                              # one epoch; on loader.device
    loss = model(images, labels)
"""

import inspect
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.runtime.messages import counted, say_once
from dali_pipes.runtime.ranks import check_ranks
from dali_pipes.samples.contact_sheet import write_contact_sheet
from dali_pipes.samples.datasets import fingerprint_of, num_items
from dali_pipes.samples.device import AsFetched, Stage, ThroughGraph, ToGpu, chosen_device, staged
from dali_pipes.samples.fetch import Failure, Fetch, Progress, Request, dataset_name
from dali_pipes.samples.order import SampleLocation
from dali_pipes.samples.plan import RequestPlan
from dali_pipes.samples.read_ahead import ReadAhead
from dali_pipes.samples.settings import check_settings, chosen_order, chosen_ranks, refuse_torch_settings
from dali_pipes.samples.state import SampleStates
from dali_pipes.samples.stats import SampleStats
from dali_pipes.samples.workers import Workers
from dali_pipes.schedule import Position, Steps


class SampleLoader(ShownAsTable):
    """An iterable over batches of a map-style dataset. Each `for` loop is one epoch, in a new order with `shuffle`.

    Arguments that are not listed here work as in torch's `DataLoader`. Batches come from torch's `default_collate` or
    from `collate_fn`, and are delivered on `loader.device`.

    dataset:     an object with `__getitem__` and `__len__`
    shuffle:     False keeps the order of the dataset
    sampler:     a torch sampler, which is seeded from `seed` and the epoch and read for each epoch.
                 `WeightedRandomSampler` is converted to `weights`; `DistributedSampler` raises an error
    num_workers: number of torch worker processes; 0: samples are read in the trainer's thread
    pin_memory:  "auto": True if batches go to a GPU
    timeout:     seconds to wait for a batch from the workers; 0: no limit
    seed:        seed of the order and of the random state of each item
    weights:     how often items appear: one number per item, or with `groups` a dict of numbers by group. The order is
                 always shuffled
    groups:      a dict of ranges or lists of items, or one label per item. Without `weights`, all groups appear equally
                 often
    num_samples: rows per epoch over all ranks; None: the number of items
    repeat:      True: one `for` loop runs through all epochs
    rank, world_size, mesh, data_dims: as for `TokenLoader`; detected if not given
    device:      "auto" is the GPU if torch sees one, else the CPU
    graph:       a DALI graph that decodes and augments the samples
    num_draws:   number of random numbers per sample that the graph gets; they depend on seed, epoch and row
    item_seed:   True: before each `dataset[item]`, seed `random`, `numpy.random`, torch's default generator, and the
                 generators stored on the dataset, `collate_fn` or their parts from (seed, epoch, row), and call
                 `seed_item(seed)` on the parts that define it. Without workers, the global random states are restored
                 afterwards
    fingerprint: any text that identifies the data; None: the dataset's `_fingerprint`, if it has one

    Row i of an epoch belongs to step i // (world_size * batch_size) and rank i % world_size. All ranks get the same
    number of batches. With `drop_last=False`, the last batch may be shorter, and one row shorter on some ranks than on
    others. If the last step has fewer rows than there are ranks, each rank without a row repeats a row of another rank;
    see `repeated`.

    Leaving a `for` loop early ends the epoch for this object; `state_dict()` still returns the position after the last
    delivered batch. After an error in `next()`, the next `for` loop continues after the last good batch, with new
    workers.

    `next()` blocks until a batch is ready. Iterate in one thread at a time. Raises `ConfigError` for invalid settings,
    and `BackendError` for a device that does not exist.
    """

    _last: Request | None
    """Of the last batch handed out, since a state was loaded."""
    _again: int | None
    """An epoch that was begun, and which the next `for` is to begin once more."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = False,
        sampler: Any = None,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | str = "auto",
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = True,
        seed: int = 0,
        weights: Any = None,
        groups: Any = None,
        num_samples: int | None = None,
        repeat: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        data_dims: str | Sequence[str] | None = None,
        device: Any = "auto",
        graph: Callable[..., Any] | None = None,
        num_draws: int = 16,
        item_seed: bool = True,
        fingerprint: str | None = None,
        **of_torch: Any,
    ) -> None:
        refuse_torch_settings(of_torch, inspect.signature(type(self)).parameters)
        prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        check_settings(
            batch_size=batch_size,
            num_workers=num_workers,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            seed=seed,
            num_samples=num_samples,
            num_draws=num_draws,
            pin_memory=pin_memory,
            collates=graph is None or collate_fn is None,
        )
        # Of NumPy, for one: states are JSON, and multiprocessing takes integers of Python alone.
        batch_size, num_workers, seed = map(operator.index, (batch_size, num_workers, seed))
        self.dataset, self.batch_size, self.num_workers, self.drop_last = dataset, batch_size, num_workers, drop_last
        self.seed, self.repeat, self.collate_fn = seed, repeat, collate_fn
        self._length = length = num_items(dataset)
        self._ranks_given = rank is not None or mesh is not None
        self.rank, self.world_size = chosen_ranks(rank, world_size, mesh, data_dims)
        self.device = chosen_device(device)
        order = chosen_order(
            length, shuffle=shuffle, sampler=sampler, weights=weights, groups=groups, num_samples=num_samples, seed=seed
        )
        self._order, self._name = order, dataset_name(dataset)
        self._steps = Steps(order, batch_size, self.rank, self.world_size, drop_last)
        self._plan = RequestPlan(self._steps, order)
        self._states = SampleStates(
            order,
            seed,
            length=length,
            fingerprint=fingerprint_of(dataset) if fingerprint is None else fingerprint,
            name=self._name,
            step_rows=self._steps.global_rows,
        )
        progress = Progress(num_workers) if num_workers else None
        self._fetch = Fetch(
            dataset,
            list if graph is not None else collate_fn,
            seed=seed,
            item_seed=item_seed,
            progress=progress,
            worker_init_fn=worker_init_fn,
        )
        pins = torch.cuda.is_available() and (self.device.type == "cuda" if pin_memory == "auto" else bool(pin_memory))
        self._workers: Workers | ReadAhead | None = None
        if progress is not None:
            self._workers = Workers(
                self._fetch,
                progress,
                self._name,
                num_workers=num_workers,
                pin_memory=pins and graph is None,
                timeout=timeout,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
            )
        elif self._fetch.may_read_ahead:
            self._workers = ReadAhead(self._fetch, prefetch_factor)
        self._make_stage: Callable[[], Stage] = AsFetched
        if graph is not None:
            self._make_stage = partial(
                ThroughGraph, graph, num_draws=num_draws, seed=seed, device=self.device, name=self._name
            )
        elif self.device.type == "cuda":
            self._make_stage = partial(ToGpu, self.device, pin=pins)
        self._stage: Stage | None = None
        self._closed, self._run = False, 0
        self._batches = self._samples = 0
        self._wall_s = self._wait_s = 0.0
        self._start_at(self._steps.normalize(Position(0, 0)))
        repeats = 0 if not order.is_uniform else self._plan.repeats()
        if repeats and not self.rank:
            say_once(
                f"{self._name}: the last step of an epoch has {counted(self.world_size - repeats, 'row')} for "
                f"{self.world_size:,} ranks; {counted(repeats, 'rank')} will repeat a row (loader.repeated is 1). To "
                "drop that step, set drop_last=True"
            )

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._next().epoch

    @property
    def step(self) -> int:
        """Number of the next batch within its epoch, as `locate` counts them."""
        return self._steps.step_number(self._next().rows)

    @property
    def repeated(self) -> int:
        """Number of rows at the end of the last delivered batch that another rank also has: 1 on ranks that repeat a
        row because the last step has fewer rows than ranks, else 0. Exclude them from exact metrics.
        """
        return 0 if self._last is None else self._last.repeated

    def __len__(self) -> int:
        """Number of batches in the current epoch, the same on every rank."""
        epoch = self.epoch
        base = self._steps.counted_from(self._resumed, epoch)
        return self._steps.step_number(base) + self._steps.steps(base, epoch)

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        self._check_ranks()
        self._check_length()
        self._run += 1
        if self._left and self._again == self._position.epoch:
            self._start_at(self._steps.normalize(Position(self._again, 0)))
        self._running, self._again = False, None
        return self._batches_of(self._run)

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` loop run this epoch, for training loops written for torch's samplers.

        Not required, because each `for` loop runs the next epoch. Does nothing if the run is already in that epoch, so
        a resumed run keeps its position.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}): expected an epoch of 0 or more")
        if epoch != self.epoch:
            self._run += 1
            self._start_at(self._steps.normalize(Position(epoch, 0)))
        elif self._running:  # this epoch, by an iterator that someone holds: the next `for` begins it anew
            self._again = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch; prefetched batches do not count.

        Returns a new, JSON-serializable dict under 1 KB, the same on every rank. After the last batch of an epoch, it
        is the start of the next epoch; with `sampler=`, it is the end of the finished epoch. Does not block.
        """
        position = self._position
        # A sampler is not asked for an epoch that may never come: its state may stand at the end of one.
        return self._states.at(self._steps.normalize(position) if self._order.is_uniform else position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch that the saved run delivered. Costs the same at any position.

        World size, batch size, workers, device and graph may differ from the saved run. Ends an iteration in progress,
        but keeps its workers. Raises a `StateError` that lists the differences if the dataset or the order has changed.
        """
        self._check_open()
        self._check_ranks()
        position = self._states.read(state)
        self._run += 1
        self._start_at(position)

    def locate(self, step: int, row: int, epoch: int | None = None) -> SampleLocation:
        """The item in row `row` of this rank's batch number `step`. Does not read data.

        epoch: by default, the epoch of the last delivered batch; before the first batch, or after loading a state, the
        epoch of the next batch.

        Raises `ConfigError` for a step or row that does not exist, and for steps before a resume that changed the
        number of rows per step.
        """
        if epoch is None:
            epoch = self.epoch if self._last is None else self._last.epoch
        request = self._plan.of_step(epoch, step, self._steps.counted_from(self._resumed, epoch))
        if not 0 <= row < len(request.rows):
            raise ConfigError(
                f"row {row:,} does not exist: step {step:,} has rows 0 to {len(request.rows) - 1:,} on this rank"
            )
        place = request.rows[row]
        return SampleLocation(request.items[row], epoch, place, self._order.group(epoch, place))

    def stats(self) -> SampleStats:
        """The statistics so far. Does not block."""
        return SampleStats(
            self._batches, self._samples, self._wall_s, self._wait_s, self.num_workers, str(self.device), self.rank
        )

    def preview(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] = "preview.png",
        *,
        epoch: int | None = None,
        rows: int = 8,
    ) -> list[SampleLocation]:
        """Draw this rank's batch number `step` as the trainer receives it, as a contact sheet with slices of volumes.

        step, epoch: by default, those of the next batch
        path:        file to write; its suffix sets the format: .png, .svg or .pdf
        rows:        maximum number of samples to draw

        Returns the samples that were drawn. Reads the batch in this process and does not change the position of the
        run. Raises `ConfigError` for a step that does not exist and for a batch without images or volumes, and
        `BackendError` if matplotlib is not installed.
        """
        self._check_open()
        epoch, step = self.epoch if epoch is None else epoch, self.step if step is None else step
        request = self._plan.of_step(epoch, step, self._steps.counted_from(self._resumed, epoch))
        batch = self._fetch.in_this_process()[request]
        if isinstance(batch, Failure):
            raise batch.as_error()
        stage = self._make_stage()
        try:
            ((_, batch),) = staged(iter([(request, batch)]), stage)
            drawn = [
                SampleLocation(item, epoch, row, self._order.group(epoch, row))
                for item, row in zip(request.items[:rows], request.rows[:rows], strict=True)
            ]
            captions = [f"item {place.item:,}, row {place.row:,}" for place in drawn]
            heading = f"{self._name}: epoch {epoch:,}, step {step:,}, rank {self.rank:,}"
            write_contact_sheet(batch, captions, Path(path), heading)
        finally:
            stage.close()
        return drawn

    def close(self) -> None:
        """Stop the workers and the graph; idempotent. Delivered batches stay valid."""
        self._closed = True
        self._run += 1
        if self._workers is not None:
            self._workers.close()
        if self._stage is not None:
            self._stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _batches_of(self, run: int) -> Iterator[Any]:
        """One `for`."""
        begun = handed_out = time.perf_counter()
        try:
            self._check_current(run)
            start = self._next()
            stage = self._ready_stage()
            for request, batch in staged(self._fetched(start), stage):
                now = time.perf_counter()
                self._wait_s += now - handed_out
                self._wall_s += now - begun
                begun = now
                self._batches, self._samples = self._batches + 1, self._samples + len(request.rows)
                self._position, self._last = Position(*request.after), request
                self._left, self._running = not request.ends_epoch, True
                held = [batch]
                del batch
                yield held.pop()  # held by the trainer alone
                self._check_current(run)
                handed_out = time.perf_counter()
                self._wall_s += handed_out - begun
                begun = handed_out
        except Exception:
            if run == self._run:
                self._left = False  # the trainer did not leave this epoch: its next `for` continues it
            raise
        finally:
            if run == self._run:
                self._running = False

    def _fetched(self, start: Position) -> Iterator[tuple[Request, Any]]:
        requests = self._plan.requests(start, repeat=self.repeat)
        if self._workers is None:
            fetched: Iterator[tuple[Request, Any]] = ((request, self._fetch[request]) for request in requests)
        else:
            fetched = self._workers.batches(requests)
        return map(_unless_failed, fetched)

    def _ready_stage(self) -> Stage:
        if self._stage is None:
            self._stage = self._make_stage()
        self._stage.reset()
        return self._stage

    def _next(self) -> Position:
        if self._left and not self._running:  # a `for` was left early: the next one is the next epoch
            return self._steps.next_epoch(self._position.epoch)
        return self._steps.normalize(self._position)

    def _start_at(self, position: Position) -> None:
        self._position = self._resumed = position
        self._running = False  # the newest iterator has handed out a batch and has not ended
        self._left = False  # the epoch of `_position` was begun by this object and is not complete
        self._last = None
        self._again = None

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosedError("this loader is closed; build a new one")

    def _check_current(self, run: int) -> None:
        if run != self._run:
            self._check_open()
            raise LoaderClosedError(
                "this iterator was superseded: the loader was iterated again, or a state was loaded; use the newest "
                "iterator"
            )

    def _check_ranks(self) -> None:
        """Raise `ConfigError` if a process group says that this is another rank: it would share another one's rows."""
        if not self._ranks_given:
            check_ranks(self.rank, self.world_size)

    def _check_length(self) -> None:
        """Raise `ConfigError` if the dataset has become longer or shorter: the order would not be that of its items."""
        now = len(self.dataset)
        if now != self._length:
            raise ConfigError(
                f"{self._name} has {counted(now, 'item')} now, but had {self._length:,} when the loader was built, and "
                "its order is that of these: build a new loader"
            )

    def _table(self) -> Table:
        if not hasattr(self, "_last"):
            return Table("SampleLoader", [("", "not built: invalid settings")])
        steps = counted(len(self), "step")
        rows = [
            ("dataset", f"{self._name}: {counted(self._length, 'item')}"),
            ("epoch", f"{steps} of {counted(self.world_size, 'rank')} x {self.batch_size:,}; order {self._order.name}"),
            ("next", f"epoch {self.epoch:,}, step {self.step:,}"),
            ("workers", f"{self.num_workers:,}"),
            ("device", str(self.device)),
        ]
        return Table("SampleLoader", rows)


def _unless_failed(fetched: tuple[Request, Any]) -> tuple[Request, Any]:
    if isinstance(fetched[1], Failure):
        raise fetched[1].as_error()
    return fetched
