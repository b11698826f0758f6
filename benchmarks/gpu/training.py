"""Part 6: the 124M model in training, fed by one batch again and again (the ceiling), by us, and by torch's DataLoader.

One process, one compiled model. Rounds are interleaved: each runs every feed for some steps, after a few that are not
measured, and begins with another one. A ratio is that of two rates of the same round.

Data wait is the time inside `next()`, over the wall time of the steps. Blocks have `_BLOCK` batches, fewer than by
default, so that each round holds several block switches, which cost more than the batches within a block.

The time of the device is told by events before and after the work of each step: what lies between one step's end and
the next one's start is GPU idle; gaps within a step, where the host launches too slowly, are the same for all feeds and
not in it.
"""

import collections
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from comparison.process import CpuMeter
from gpt import GPT, ModelShape, parameter_groups

from gpu.batches import ON_GPU
from gpu.cost import loader_device_s, training_settings
from gpu.pace import Batch, Feed, fixed_feed, our_feed, torch_feed
from gpu.session import Session

FIXED = "fixed batch"
DATA_WAIT_PCT, RATE_SHARE, DEVICE_PCT = 0.1, 0.995, 0.1
_AHEAD = 2
_BLOCK, _DRY_BLOCK = 16, 1
_LEFT_FOR_THE_END_S = 6.0


class TrainingStep:
    """Model, optimizer and one step of them. Compiled where that works; `compiled` says so, or why not."""

    def __init__(self, session: Session, first: Batch) -> None:
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        seq_len = first["input_ids"].shape[1]
        shape = session.pick(ModelShape(12, 12, 768, 50304, seq_len), ModelShape(1, 2, 16, 50304, seq_len))
        self._device = session.machine.device
        self._model = GPT(shape).to(self._device)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        groups = parameter_groups(self._model, 0.1)
        self._optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
        self._loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._model
        self.compiled = "no: dry run"
        if not session.dry:
            self._loss = torch.compile(self._model)
            self.compiled = "yes"
        try:
            self(first)
        except Exception as error:
            if session.dry:
                raise
            self._loss = self._model
            self.compiled = f"no: {type(error).__name__}: {error}"[:500]
            self(first)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Queue one step; returns its loss, which is not waited for."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            loss, _ = self._loss(batch["input_ids"], batch["labels"])
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def training_run(session: Session) -> None:
    machine = session.machine
    settings, tokens = training_settings(session)
    settings |= {"batches_per_run": session.pick(_BLOCK, _DRY_BLOCK)}
    workers = session.pick(8, 2)
    loader_s = loader_device_s(session)
    with contextlib.ExitStack() as stack:
        # First, so that its workers are forked before the other feeds have threads.
        from_torch = stack.enter_context(torch_feed(session, settings, tokens, workers))
        next(from_torch)
        feeds: dict[str, Feed] = {FIXED: stack.enter_context(fixed_feed(settings | ON_GPU[0]))}
        for on_gpu in ON_GPU:
            feeds[f"ours {on_gpu['placement']}"] = stack.enter_context(our_feed(settings | on_gpu))[1]
        feeds[f"torch DataLoader, {workers} workers"] = from_torch
        started = time.perf_counter()
        step = TrainingStep(session, next(feeds[FIXED]))
        machine.synchronize()
        session.note("parameters", step.parameters)
        session.note("compiled", step.compiled)
        session.figure("model, compilation and first step", time.perf_counter() - started, "s")
        rounds = _rounds(session, step, feeds)
    _report(session, rounds)
    step_s = statistics.median(figures[FIXED]["device_s"] for figures in rounds)
    for placement, seconds in loader_s.items():
        share = 100 * seconds / step_s
        session.figure(f"ours {placement}: time of the device, of a step", share, "%", at_most=DEVICE_PCT)


def _rounds(session: Session, step: TrainingStep, feeds: dict[str, Feed]) -> list[dict[str, dict[str, float]]]:
    """As many interleaved rounds as fit, at least two and at most ten."""
    names = list(feeds)
    rounds: list[dict[str, dict[str, float]]] = []
    longest_s = 0.0
    while len(rounds) < session.pick(10, 2):
        if len(rounds) >= 2 and session.left_s < 1.2 * longest_s + _LEFT_FOR_THE_END_S:
            break
        began = time.perf_counter()
        turn = len(rounds) % len(names)
        figures = {name: _measure(session, step, feeds[name]) for name in names[turn:] + names[:turn]}
        longest_s = max(longest_s, time.perf_counter() - began)
        rounds.append(figures)
        rates = ", ".join(f"{name} {figures[name]['steps_per_s']:.3f}" for name in names)
        session.note(f"round {len(rounds)}, steps/s", rates)
    return rounds


def _measure(session: Session, step: TrainingStep, feed: Feed) -> dict[str, float]:
    machine = session.machine
    for _ in range(session.pick(8, 1)):
        step(next(feed))
    machine.synchronize()
    steps = session.pick(3 * _BLOCK, 3 * _DRY_BLOCK)
    marks = []
    ends: collections.deque[Any] = collections.deque()
    waits = []
    meter, started = CpuMeter(), time.perf_counter()
    for _ in range(steps):
        if len(ends) == _AHEAD:
            ends.popleft().synchronize()
        asked = time.perf_counter()
        batch = next(feed)
        waits.append(time.perf_counter() - asked)
        start, end = machine.event(), machine.event()
        start.record()
        step(batch)
        end.record()
        marks.append((start, end))
        ends.append(end)
    machine.synchronize()
    wall_s, cpu_s = time.perf_counter() - started, meter.elapsed_s()
    device_s = sum(start.elapsed_time(end) for start, end in marks) / 1e3
    span_s = marks[0][0].elapsed_time(marks[-1][1]) / 1e3
    return {
        "steps_per_s": steps / wall_s,
        "data_wait_pct": 100 * sum(waits) / wall_s,
        "longest_wait_s": max(waits),
        "idle_pct": 100 * (1 - device_s / span_s),
        "cpu_s_per_step": cpu_s / steps,
        "device_s": device_s / steps,
    }


def _report(session: Session, rounds: list[dict[str, dict[str, float]]]) -> None:
    session.note("rounds", len(rounds))
    for name in rounds[0]:
        ours = name.startswith("ours")
        ratios = [figures[name]["steps_per_s"] / figures[FIXED]["steps_per_s"] for figures in rounds]

        def middle(key: str, name: str = name) -> float:
            return statistics.median(figures[name][key] for figures in rounds)

        session.figure(f"{name}: rate", middle("steps_per_s"), "steps/s")
        if name != FIXED:
            wanted = RATE_SHARE if ours else None
            session.figure(f"{name}: rate against the fixed batch", statistics.median(ratios), "x", at_least=wanted)
            session.note(f"{name}: lowest and highest ratio of a round", f"{min(ratios):.4f} to {max(ratios):.4f}")
            limit = DATA_WAIT_PCT if ours else None
            session.figure(f"{name}: data wait, 3 block switches a round", middle("data_wait_pct"), "%", at_most=limit)
            session.figure(f"{name}: longest next() of a round", 1e6 * middle("longest_wait_s"), "us")
        session.figure(f"{name}: GPU idle", middle("idle_pct"), "%")
        session.figure(f"{name}: CPU of the process tree a step", middle("cpu_s_per_step"), "s")


CHECKS = (training_run,)
