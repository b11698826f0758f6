"""The results of a training run: its history as lines of JSON, and a chart. Needs matplotlib (extra `demo`)."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import write_atomically
from matplotlib.figure import Figure

SMOOTHING_STEPS = 20


@dataclass
class History:
    """Figures of a run from its first step on, also over resumes."""

    losses: list[float] = field(default_factory=list)
    """Training loss of step 1, 2, ... in nats a token, before that step's update."""
    data_wait_s: list[float] = field(default_factory=list)
    """Seconds that each step waited for its batch."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step, with the wait. On a GPU a step is queued, so only sums over many steps mean something."""
    step_flops: list[int] = field(default_factory=list)
    """Model FLOPs of each step. Both are missing for the first steps of a run that was saved before there were any."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, validation loss): the mean over the labels of all sources."""
    by_source: list[tuple[int, dict[str, float], dict[str, float]]] = field(default_factory=list)
    """Of a mixture: (steps done, training loss of each source since the entry before or a resume, validation loss of
    each); one without a loss is left out."""
    loader: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(steps done, metrics of the loader), after each validation; counters begin anew after a resume."""

    @property
    def train_loss(self) -> float:
        """Mean over the last steps, since the loss of one batch is noisy; NaN before the first."""
        return statistics.fmean(self.losses[-SMOOTHING_STEPS:]) if self.losses else float("nan")

    @property
    def val_loss(self) -> float | None:
        """The newest validation loss; None where there has been none."""
        return self.validation[-1][1] if self.validation else None

    def flops_per_s(self, last_steps: int | None = None) -> float:
        """Model FLOP/s over these steps, all by default; 0 before the first."""
        start = 0 if last_steps is None else -last_steps
        seconds = sum(self.step_s[start:])
        return sum(self.step_flops[start:]) / seconds if seconds else 0.0

    def smooth_flops_per_s(self) -> list[float]:
        """Model FLOP/s after each step that has a time, over the last 20 steps: a single one means little on a GPU."""
        windows = (slice(max(0, end - SMOOTHING_STEPS), end) for end in range(1, len(self.step_s) + 1))
        return [sum(self.step_flops[steps]) / sum(self.step_s[steps]) for steps in windows]

    def newest_by_source(self) -> tuple[dict[str, float], dict[str, float]]:
        """The newest training and validation losses of each source; empty without a mixture."""
        return self.by_source[-1][1:] if self.by_source else ({}, {})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: `History(**saved)` is the inverse."""
        return asdict(self)


def save_metrics(history: History, path: Path, peak_flops: float | None = None) -> None:
    """Write one JSON object a line: the steps in order, each followed by the validation after it if there was one.

    The losses of a mixture's sources, in training and validation, are a line more, and so are the loader's metrics.
    `dali-pipes report --log` and `dali-pipes watch` read the file.

    peak_flops: of the device that the run is on now, also for steps before a resume; without it, steps have model
                FLOP/s and no MFU
    """
    lines: list[tuple[int, int, dict[str, Any]]] = [
        (step, 0, {"step": step, "loss": loss, "data_wait_s": wait})
        for step, (loss, wait) in enumerate(zip(history.losses, history.data_wait_s, strict=True), start=1)
    ]
    rates = history.smooth_flops_per_s()
    for (_, _, line), rate in zip(lines[len(lines) - len(rates) :], rates, strict=True):
        line |= {"model_flops_per_s": rate} | ({"mfu": rate / peak_flops} if peak_flops else {})
    lines += [(step, 1, {"step": step, "val_loss": loss}) for step, loss in history.validation]
    lines += [
        (step, 2, {"step": step, "loss_by_source": training, "val_loss_by_source": validation})
        for step, training, validation in history.by_source
    ]
    lines += [
        (step, 3, {"step": step, **{f"data/{name}": value for name, value in metrics.items()}})
        for step, metrics in history.loader
    ]
    lines.sort(key=lambda line: line[:2])
    text = "".join(json.dumps(values) + "\n" for _, _, values in lines)
    write_atomically(path, lambda file: file.write(text.encode()))


def save_chart(history: History, title: str, path: Path, peak_flops: float | None = None) -> None:
    """Write a PNG: training and validation loss, also of sources; MFU; how long each step waited for data.

    peak_flops: of the device; without it, model FLOP/s take the place of MFU
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    loss_axes, flops_axes, wait_axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    steps = range(1, len(history.losses) + 1)
    smooth = [statistics.fmean(history.losses[max(0, step - SMOOTHING_STEPS) : step]) for step in steps]
    loss_axes.plot(steps, history.losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="train, a step")
    loss_axes.plot(steps, smooth, color="tab:blue", label=f"train, mean of {SMOOTHING_STEPS} steps")
    if history.validation:
        loss_axes.plot(*zip(*history.validation, strict=True), color="tab:orange", marker="o", label="validation")
    for number, name in enumerate(history.newest_by_source()[1], 2):  # 0 and 1 are the colors of the lines above
        points = [(step, losses[name]) for step, _, losses in history.by_source]
        loss_axes.plot(
            *zip(*points, strict=True), color=f"C{number}", linestyle="--", marker=".", label=f"validation, {name}"
        )
    loss_axes.set(title=title, ylabel="loss (nats per token)")
    loss_axes.legend()
    timed = range(len(history.losses) - len(history.step_s) + 1, len(history.losses) + 1)
    unit, name = (peak_flops / 100, "MFU (%)") if peak_flops else (1e12, "model TFLOP/s")
    flops_axes.plot(timed, [rate / unit for rate in history.smooth_flops_per_s()], color="tab:green")
    flops_axes.set(ylabel=name, ylim=(0, None))
    wait_axes.vlines(steps, 0, [wait * 1e3 for wait in history.data_wait_s], color="tab:red", linewidth=0.8)
    wait_axes.set(xlabel="step", ylabel="data wait (ms)", ylim=(0, None))
    for axes in (loss_axes, flops_axes, wait_axes):
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
