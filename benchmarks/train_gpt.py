"""Train a small GPT on real text, fed by `dali_pipes`: `python benchmarks/train_gpt.py --help`.

By default the data is a mixture of plays and Python code, and losses are shown by source. The run's folder gets
`checkpoint.pt`, `metrics.jsonl` (one line per step) and `training.png`. The last line of the output is a line of JSON.
"""

import json
import os
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

# Torch's threads spin while they wait for each other, which takes the core from the one that is waited for as soon as
# something else runs beside the training. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from checkpoint import NAME, load_checkpoint, save_checkpoint
from decode import GPT2_END_OF_TEXT, decode, load_pieces
from model_flops import Peak, find_peak
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from trainer import Trainer
from training_job import GPT2_VOCABULARY, Job, Model, make_job
from training_report import SMOOTHING_STEPS, save_chart, save_metrics

from dali_pipes.errors import DaliPipesError

SAMPLE_TOKENS = 160
_BY_MODEL = "by model"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class StopRequest:
    """While entered, the first SIGINT or SIGTERM asks for an end after the step in progress; a second acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()


@app.command()
def main(
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Token file, folder, or glob; can be repeated.",
            show_default="plays and code, GPT-2 ids",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML, YAML, or JSON file with settings of the loader.")
    ] = None,
    model: Annotated[Model | None, typer.Option(help="Model size.", show_default="small")] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of steps of the whole run.", show_default=_BY_MODEL)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Rows per batch.", show_default=_BY_MODEL)] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens per row.", show_default=_BY_MODEL)] = None,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="Peak learning rate.", show_default=_BY_MODEL)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the initial weights and the data order.", show_default="1")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto uses a GPU if there is one.")] = Device.AUTO,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.", show_default="on a GPU")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the results.", show_default="runs/demo, or that of --resume"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Resume from this checkpoint, or from the one in this folder.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop early, after this many steps.")
    ] = None,
    val_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps between validations.", show_default="50")
    ] = None,
    val_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Maximum number of batches per validation of a source.", show_default="50"
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(metavar="N", min=1, help="Steps between checkpoints.")] = 100,
    peak_flops: Annotated[
        float | None,
        typer.Option(
            metavar="FLOPS",
            min=1,
            help="Dense peak of the device in FLOP/s, such as 989e12, for MFU.",
            show_default="of known NVIDIA cards",
        ),
    ] = None,
) -> None:
    """Train a GPT on token files, fed by dali_pipes; by default a small one on a mixture of plays and code.

    Shows loss, tokens per second, MFU, and data wait while it runs, then a sample, tables, and one line of JSON. Ctrl-C
    stops after the current step and writes a checkpoint. --resume continues exactly: options that are not given are
    those of the saved run.
    """
    console = Console()
    try:
        saved = load_checkpoint(resume) if resume else None
        plan = {"steps": steps, "learning_rate": learning_rate, "val_every": val_every, "val_batches": val_batches}
        loader = {"corpus": corpus, "batch_size": batch_size, "seq_len": seq_len, "seed": seed, "device": str(device)}
        job = make_job(model, plan, loader, config, saved["job"] if saved else None)
        folder = out or Path("runs/demo") if not resume else out or (resume if resume.is_dir() else resume.parent)
        folder.mkdir(parents=True, exist_ok=True)
        with Trainer(job.plan, job.loader, job.shape(), compiled=compiled) as trainer:
            if saved:
                trainer.restore(saved)
            elif (folder / NAME).exists():
                os.replace(folder / NAME, folder / f"previous_{NAME}")
            peak = find_peak(trainer.device, peak_flops)
            stopped_by = train(trainer, job, folder, stop_after or job.plan.steps, checkpoint_every, peak, console)
            report(trainer, job, folder, peak, console, with_sample=stopped_by is None)
    except DaliPipesError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


def train(
    trainer: Trainer, job: Job, folder: Path, stop_after: int, checkpoint_every: int, peak: Peak, console: Console
) -> int | None:
    """Train and write checkpoints; returns the signal that ended it early, or None."""
    plan, sizes = job.plan, {name: corpus.num_tokens for name, corpus in trainer.loader.corpora.items()}
    if job.loader.mixture is None:
        data = f"corpus of {sizes['']:,} tokens"
    else:
        data = "mixture of " + ", ".join(f"{name} ({size:,} tokens)" for name, size in sizes.items())
    console.print(
        f"{job.model} model of {trainer.parameters:,} parameters on {trainer.device}; {data}; "
        f"{plan.steps} steps of {job.loader.batch_size} x {job.loader.row_len} tokens"
        + (f", resuming after step {trainer.step}" if trainer.step else ""),
        highlight=False,
        soft_wrap=True,
    )
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
    shown, shown_by_source = len(trainer.history.validation), len(trainer.history.by_source)
    with StopRequest() as stop, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=plan.steps, completed=trainer.step)

        def save() -> None:
            save_checkpoint(folder / NAME, {"job": job.to_dict(), **trainer.state()})
            save_metrics(trainer.history, folder / "metrics.jsonl", peak.flops)

        def after_step() -> bool:
            nonlocal shown, shown_by_source
            line = _progress_line(trainer, peak)
            progress.update(task, completed=trainer.step, description=line)
            validation = dict(trainer.history.validation[shown:])
            by_source = {done: losses for done, *losses in trainer.history.by_source[shown_by_source:]}
            for done in sorted(validation.keys() | by_source.keys()):
                parts = [f"step {done:>6}"]
                if done in validation:
                    parts.append(f"validation loss {validation[done]:.3f}")
                if done == trainer.step:  # the first is from before the first step
                    parts.append(line)
                console.print("  ".join(parts), highlight=False, soft_wrap=True)
                for source in _source_lines(*by_source.get(done, ({}, {}))):
                    console.print(source, highlight=False, soft_wrap=True)
            shown, shown_by_source = len(trainer.history.validation), len(trainer.history.by_source)
            if trainer.step % checkpoint_every == 0:
                save()
            return stop.signal is None

        trainer.run(min(stop_after, plan.steps), after_step)
        save()
    return stop.signal


def report(trainer: Trainer, job: Job, folder: Path, peak: Peak, console: Console, *, with_sample: bool) -> None:
    """Write the chart; print the sample, the tables and the line of JSON."""
    history, stats = trainer.history, trainer.loader.stats()
    title = f"{job.model} GPT, {trainer.step} steps of {job.loader.batch_size} x {job.loader.row_len} tokens"
    save_chart(history, f"{title}\n{stats.rating_line()}", folder / "training.png", peak.flops)
    if with_sample:
        console.print(Panel(Text(_sample_text(trainer, job)), title="sample of the trained model"))
    rate = trainer.tokens_done / trainer.train_s if trainer.train_s else 0.0
    achieved = trainer.flops_done / trainer.train_s if trainer.train_s else 0.0
    tokens = trainer.step * job.loader.batch_size * job.loader.row_len
    rows = {
        "steps": f"{trainer.step} of {job.plan.steps}",
        "tokens": f"{tokens:,}",
        "train loss": f"{history.train_loss:.3f} (initially {history.losses[0]:.3f})" if history.losses else "none",
        "validation loss": "none" if history.val_loss is None else f"{history.val_loss:.3f}",
        "tokens/s": f"{rate:,.0f}",
        "MFU": _mfu_text(trainer, achieved, peak),
        "data wait": f"{stats.data_wait_s:.3f} s, {stats.data_wait_pct:.2f}%",
        "loader": stats.rating_line(),
        "files": f"{folder}/: {NAME}, metrics.jsonl, training.png",
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False)
    sources = _use_of_sources(trainer)
    if sources:
        console.print(_source_table(sources), highlight=False)
    finished = trainer.step >= job.plan.steps
    if not finished:
        console.print(f"stopped after step {trainer.step}; continue with --resume {folder}", highlight=False)
    summary = {
        "model": str(job.model),
        "device": str(trainer.device),
        "steps": trainer.step,
        "finished": finished,
        "tokens": tokens,
        "train_loss": history.train_loss,
        "val_loss": history.val_loss,
        "tokens_per_s": rate,
        "model_flops_per_s": achieved,
        "peak_flops": peak.flops,
        "mfu": achieved / peak.flops if peak.flops else None,
        "data_wait_s": stats.data_wait_s,
        "data_wait_pct": stats.data_wait_pct,
        "rating": stats.rating,
        "sources": sources,
        "checkpoint": str(folder / NAME),
        "chart": str(folder / "training.png"),
    }
    typer.echo(json.dumps(summary))


def _progress_line(trainer: Trainer, peak: Peak) -> str:
    losses = trainer.history.losses
    rate = trainer.tokens_done / trainer.train_s
    loss = f"{losses[-1]:.3f}" if losses else "-"
    recent = trainer.history.flops_per_s(SMOOTHING_STEPS)
    share = f"MFU {recent / peak.flops:.1%}" if peak.flops else f"{recent / 1e12:.3g} model TFLOP/s"
    return f"loss {loss}  {rate:,.0f} tokens/s  {share}  data wait {trainer.loader.stats().data_wait_pct:.2f}%"


def _mfu_text(trainer: Trainer, achieved: float, peak: Peak) -> str:
    """MFU, and what it would be without data wait: if that is much more, the data is the cause."""
    if not peak.flops:
        return f"{peak.about} ({achieved / 1e12:.3g} model TFLOP/s)"
    recent = trainer.history.flops_per_s(SMOOTHING_STEPS)
    computing_s = trainer.train_s - trainer.loader.stats().data_wait_s
    without_wait = trainer.flops_done / computing_s if computing_s > 0 else achieved
    return (
        f"{achieved / peak.flops:.1%} of {peak.flops / 1e12:,.4g} TFLOP/s ({peak.about}), "
        f"{recent / peak.flops:.1%} in the last {SMOOTHING_STEPS} steps; without data wait "
        f"{without_wait / peak.flops:.1%}"
    )


def _source_lines(training: dict[str, float], validation: dict[str, float]) -> Iterator[str]:
    """A line for each source that has a loss; training losses are of the steps since the lines before."""
    for name in validation | training:
        losses = {"validation": validation.get(name), "training": training.get(name)}
        shown = "  ".join(f"{kind} {loss:.3f}" for kind, loss in losses.items() if loss is not None)
        yield f"{name:>13}  {shown}"


def _use_of_sources(trainer: Trainer) -> dict[str, dict[str, float | None]]:
    """What a mixture has used of each source, and the newest losses; empty without a mixture."""
    if trainer.loader.config.mixture is None:
        return {}
    training, validation = trainer.history.newest_by_source()
    return {
        use.name: {
            "train_loss": training.get(use.name),
            "val_loss": validation.get(use.name),
            "asked_share": use.weight,
            "share": use.share,
            "tokens": use.tokens,
            "passes": use.passes,
        }
        for use in trainer.loader.mixture_report().sources
    }


def _source_table(sources: dict[str, dict[str, float | None]]) -> Table:
    columns = {
        "train_loss": ("training loss", "{:.3f}"),
        "val_loss": ("validation", "{:.3f}"),
        "asked_share": ("asked", "{:.2%}"),
        "share": ("achieved", "{:.2%}"),
        "tokens": ("tokens", "{:,}"),
        "passes": ("passes", "{:.3f}"),
    }
    table = Table("source", *(Column(title, justify="right") for title, _ in columns.values()))
    for source, values in sources.items():
        shown = [(form, values[name]) for name, (_, form) in columns.items()]
        table.add_row(source, *("-" if value is None else form.format(value) for form, value in shown))
    return table


def _sample_text(trainer: Trainer, job: Job) -> str:
    """A sample that begins where a document begins; as ids where the vocabulary is not GPT-2's."""
    if job.loader.vocab_size != GPT2_VOCABULARY:
        ids = trainer.sample([job.loader.eos_id or 0], SAMPLE_TOKENS, job.loader.seed)
        return " ".join(map(str, ids))
    pieces = load_pieces()
    pieces[GPT2_END_OF_TEXT] = b"\n\n"
    return decode(trainer.sample([GPT2_END_OF_TEXT], SAMPLE_TOKENS, job.loader.seed), pieces).strip()


if __name__ == "__main__":
    app()
