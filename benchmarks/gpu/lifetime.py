"""Part 4: a batch is right when it is handed out and stays so for as long as it is held, whatever runs meanwhile.

Every check compares with what the CPU placement delivers. Most copy what a batch holds into `seen` by work that is
queued behind a long kernel, and drop the batch immediately: if its memory were given away too early, `seen` would show
what came after it.
"""

import collections
import contextlib
import itertools
from collections.abc import Generator
from typing import Any

import torch

from dali_pipes import TokenLoader
from gpu.batches import ON_GPU, Arrays, arrays, difference, from_cpu, stacked
from gpu.session import Session

_POISON = -7
_LONG_S, _SHORT_S = 5e-3, 2e-4
_OUTPUTS = ("input_ids", "labels")


def _settings(session: Session, **changes: Any) -> dict[str, Any]:
    batch_size, seq_len = changes.pop("shape", session.pick((8, 1024), (2, 16)))
    tokens = batch_size * seq_len * session.pick(150, 12) + 1
    corpus = session.corpus("lifetime", tokens)
    settings = {"corpus": corpus, "batch_size": batch_size, "seq_len": seq_len, "seed": 5, "repeat": True}
    return settings | {"batches_per_run": 4} | changes


class _Seen:
    """Copies of many batches, made on the device."""

    def __init__(self, session: Session, settings: dict[str, Any], steps: int) -> None:
        shape = (steps, settings["batch_size"], settings["seq_len"])
        self._machine = session.machine
        self._copies = {name: torch.zeros(shape, dtype=torch.int64, device=self._machine.device) for name in _OUTPUTS}
        self._expected = from_cpu(settings, steps)
        self._machine.synchronize()  # the zeros are there, whichever stream writes next

    def queue(self, step: int, batch: dict[str, torch.Tensor]) -> None:
        for name, copies in self._copies.items():
            copies[step].copy_(batch[name], non_blocking=True)

    def problem(self) -> str:
        """Waits for the device, then says how many steps were read wrongly."""
        self._machine.synchronize()
        for name, copies in self._copies.items():
            right = copies.cpu() == stacked(self._expected, name)
            wrong = torch.nonzero(~right.flatten(1).all(1)).flatten().tolist()
            if wrong:
                return f"{name}: {len(wrong)} of {len(right)} steps read wrongly, the first is step {wrong[0]}"
        return ""


def batches_held(session: Session) -> None:
    """Twenty batches in a row, compared only after many more have come."""
    machine = session.machine
    kept = 20
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        expected = from_cpu(settings, kept)
        with TokenLoader(**settings) as loader:
            batches = iter(loader)
            held = [next(batches) for _ in range(kept)]
            where = (loader.stats().placement, held[0]["input_ids"].device.type)
            wanted = (on_gpu["placement"], machine.device.type)
            session.verify(f"batches come from {wanted}", "" if where == wanted else f"they come from {where}")
            for _ in range(session.pick(200, 30)):
                next(batches)
            machine.synchronize()
            problem = difference([arrays(batch) for batch in held], expected)
            session.verify(f"{kept} batches held, {on_gpu['placement']}", problem)
        machine.synchronize()
        problem = difference([arrays(batch) for batch in held], expected)
        session.verify(f"{kept} batches held past close(), {on_gpu['placement']}", problem)


def slow_consumer_on_a_side_stream(session: Session) -> None:
    """The work on every batch waits behind a long kernel, and the batch is dropped right after queueing it."""
    machine, steps = session.machine, session.pick(500, 30)
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        seen = _Seen(session, settings, steps)
        with TokenLoader(**settings) as loader, machine.on(machine.stream()):
            for step, batch in zip(range(steps), loader, strict=False):
                machine.busy(_LONG_S if step % 25 == 0 else _SHORT_S)
                seen.queue(step, batch)
                del batch
        session.verify(f"{steps} steps behind long kernels on a side stream, {on_gpu['placement']}", seen.problem())


def streams_that_change(session: Session) -> None:
    """The current stream is another one at every step, and some of them are late."""
    machine, steps = session.machine, session.pick(300, 30)
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        seen = _Seen(session, settings, steps)
        streams = [machine.stream() for _ in range(3)]
        with TokenLoader(**settings) as loader:
            batches = iter(loader)
            for step in range(steps):
                with machine.on(streams[step % 3]):
                    if step % 7 == 0:
                        machine.busy(_LONG_S)
                    batch = next(batches)
                    seen.queue(step, batch)
                    del batch
        session.verify(f"current stream changes at every step, {on_gpu['placement']}", seen.problem())


def work_on_another_stream(session: Session) -> None:
    """The streams wait for each other before the drop, as the manual says; `record_stream` does nothing."""
    machine, steps = session.machine, session.pick(200, 20)
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        seen = _Seen(session, settings, steps)
        other = machine.stream()
        with TokenLoader(**settings) as loader:
            for step, batch in zip(range(steps), loader, strict=False):
                machine.wait(other, None)
                with machine.on(other):
                    machine.busy(_LONG_S if step % 25 == 0 else _SHORT_S)
                    seen.queue(step, batch)
                    for tensor in batch.values():
                        machine.record_stream(tensor, other)
                machine.wait(None, other)
                del batch, tensor
        session.verify(f"{steps} steps on another stream that is waited for, {on_gpu['placement']}", seen.problem())


def user_writes(session: Session) -> None:
    """-1 is written into every batch before the next is asked for; the second epoch shows the corpus is whole."""
    machine, steps = session.machine, session.pick(320, 30)
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        seen = _Seen(session, settings, steps)
        with TokenLoader(**settings) as loader:
            for step, batch in zip(range(steps), loader, strict=False):
                seen.queue(step, batch)
                machine.busy(_SHORT_S)
                for name in _OUTPUTS:
                    batch[name].fill_(-1)
        session.verify(f"-1 written into every batch, {on_gpu['placement']}", seen.problem())


def shapes_change(session: Session) -> None:
    """Loaders of different shapes side by side, on one device, then others in their place."""
    machine, steps = session.machine, session.pick(40, 8)
    shapes = session.pick([(8, 1024), (3, 100), (32, 256), (1, 4096)], [(2, 16), (3, 5), (1, 32)])
    for on_gpu in ON_GPU:
        problems = ""
        for first, second in itertools.pairwise(shapes):
            both = [_settings(session, shape=shape, drop_last=False) | on_gpu for shape in (first, second)]
            seen = [_Seen(session, settings, steps) for settings in both]
            with TokenLoader(**both[0]) as one, TokenLoader(**both[1]) as two:
                for step, *batches in zip(range(steps), one, two, strict=False):
                    machine.busy(_SHORT_S)
                    for one_seen, batch in zip(seen, batches, strict=True):
                        one_seen.queue(step, batch)
            problems += "; ".join(filter(None, (one_seen.problem() for one_seen in seen)))
        session.verify(f"shapes change between loaders, {on_gpu['placement']}", problems)


def _poisoner(session: Session, settings: dict[str, Any]) -> Generator[None, None, None]:
    """At every step, torch, CuPy and another loader fill memory that was free a moment ago with other values."""
    import cupy
    import numpy as np

    machine = session.machine
    size = settings["batch_size"] * settings["seq_len"] * settings["batches_per_run"]
    values = np.full(size, _POISON, np.int64)
    other = settings | {"seed": 99, "batches_per_run": 1}
    with TokenLoader(**other) as loader:
        for _batch in loader:
            torch.full((size,), _POISON, dtype=torch.int64, device=machine.device)
            cupy.asarray(values)
            yield


def poisoned_buffers(session: Session) -> None:
    """Shallow and deep queues while everything that is free gets overwritten; a few batches are held for a while."""
    steps = session.pick(150, 15)
    for on_gpu in ON_GPU:
        problems = ""
        for depth, blocks in ((1, 1), (2, 4), (8, 2)):
            settings = _settings(session, prefetch_queue_depth=depth, batches_per_run=blocks) | on_gpu
            seen = _Seen(session, settings, steps)
            held: collections.deque[tuple[int, dict[str, torch.Tensor]]] = collections.deque()
            poison = _poisoner(session, settings)
            with TokenLoader(**settings) as loader:
                for step, batch in zip(range(steps), loader, strict=False):
                    held.append((step, batch))
                    del batch
                    next(poison)
                    if len(held) > 3:  # read late, in the order in which they came
                        seen.queue(*held.popleft())
                while held:
                    seen.queue(*held.popleft())
            poison.close()
            problem = seen.problem()
            problems += f"depth {depth}, batches_per_run {blocks}: {problem}; " if problem else ""
        session.verify(f"freed memory poisoned at every step, {on_gpu['placement']}", problems)


def graph_over_static_buffers(session: Session) -> None:
    """A CUDA graph captured once over the fixed addresses and replayed for every batch; also on a side stream."""
    machine, steps = session.machine, session.pick(200, 20)
    for on_gpu, on_side in itertools.product(ON_GPU, (False, True)):
        settings = _settings(session, static_buffers=True) | on_gpu
        expected = [_row_sums(batch) for batch in from_cpu(settings, steps)]
        sums = torch.zeros(steps, settings["batch_size"], dtype=torch.int64, device=machine.device)
        result = torch.zeros_like(sums[0])
        machine.synchronize()
        where_to = machine.on(machine.stream()) if on_side else contextlib.nullcontext()
        addresses: dict[str, set[int]] = {name: set() for name in _OUTPUTS}
        weights = torch.arange(1, settings["seq_len"] + 1, device=machine.device)
        with TokenLoader(**settings) as loader, where_to:
            batches = iter(loader)
            batch = next(batches)

            def work(static: Any = batch, result: torch.Tensor = result, weights: torch.Tensor = weights) -> None:
                result.copy_(((3 * static["input_ids"] + static["labels"]) * weights).sum(1))

            replay = machine.capture(work)
            for step in range(steps):
                if step > 0:
                    batch = next(batches)
                for name in _OUTPUTS:
                    addresses[name].add(batch[name].data_ptr())
                machine.busy(_SHORT_S)
                replay()
                sums[step].copy_(result)
            machine.synchronize()
        where = f"{on_gpu['placement']}, {'side' if on_side else 'default'} stream"
        wrong = [step for step in range(steps) if not torch.equal(sums[step].cpu(), expected[step])]
        problem = f"{len(wrong)} of {steps} replays wrong, the first is {wrong[0]}" if wrong else ""
        session.verify(f"graph replayed {steps} times, {where}", problem)
        moved = {name: len(found) for name, found in addresses.items() if len(found) > 1}
        session.verify(f"static addresses, {where}", f"addresses seen: {moved}" if moved else "")


def _row_sums(batch: Arrays) -> torch.Tensor:
    """What the captured work makes of a batch; integers, so it is exact."""
    inputs, labels = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"])
    return ((3 * inputs + labels) * torch.arange(1, inputs.shape[1] + 1)).sum(1)


CHECKS = (
    batches_held,
    slow_consumer_on_a_side_stream,
    streams_that_change,
    work_on_another_stream,
    user_writes,
    shapes_change,
    poisoned_buffers,
    graph_over_static_buffers,
)
