"""The commands that take a configuration: `config` prints it, the others show what a loader with it serves."""

from pathlib import Path
from typing import Annotated

import typer

from dali_pipes.config import LoaderConfig
from dali_pipes.config.amounts import parse_count
from dali_pipes.config.settings_files import presets
from dali_pipes.errors import ConfigError
from dali_pipes.tools import reports, terminal
from dali_pipes.tools.cli.endings import errors_as_one_line
from dali_pipes.tools.cli.flags import Json
from dali_pipes.tools.cli.settings import (
    BatchSize,
    Given,
    SeqLen,
    Settings,
    check_output,
    of_one_rank,
    settings_given,
    with_tokenizer,
)

Step = Annotated[int, typer.Option(help="Batch number within its epoch, from 0.")]
Epoch = Annotated[int, typer.Option(help="Epoch, from 0.")]
Rank = Annotated[int | None, typer.Option(help="Rank that received the batch.")]
WorldSize = Annotated[int | None, typer.Option(help="Number of ranks.")]
Decoder = Annotated[
    Path | None,
    typer.Option(
        help="tokenizer.json to decode ids with; by default, the configuration's. Without one, ids are shown."
    ),
]
SavedState = Annotated[
    Path | None,
    typer.Option("--state", help="Saved state (JSON) that the run resumed from with a different global batch size."),
]


def config(
    given: Given = (),  # type: ignore[assignment]
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Check a configuration and print it in full, as TOML or JSON that loads again. Without arguments, list presets."""
    with errors_as_one_line():
        if not (given or assignments or batch_size or seq_len):
            if as_json:
                terminal.show_json({"presets": presets()})
            else:
                terminal.show_presets(presets())
            return
        shape = {"batch_size": batch_size, "seq_len": seq_len}
        checked = LoaderConfig.from_sources(*settings_given(given, assignments, shape, "config"))
        if as_json:
            terminal.show_json(checked.model_dump(mode="json", exclude_none=True))
        else:
            typer.echo(checked.to_toml(), nl=False)


def locate(
    given: Given,
    step: Step,
    row: Annotated[int, typer.Option(help="Row of the batch, from 0; `explain` shows all rows.")],
    epoch: Epoch = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show the files, offsets, and documents that one row comes from. Reads no tokens and uses no GPU."""
    with errors_as_one_line():
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": rank, "world_size": world_size}
        checked = of_one_rank(settings_given(given, assignments, options, "locate"))
        batch = reports.locate_batch(checked, step, epoch, state)
        found = reports.one_row(batch, row)
        terminal.show(found, terminal.show_row, as_json=as_json)


def explain(
    given: Given,
    step: Step,
    epoch: Epoch = 0,
    rank: Annotated[int | None, typer.Option(help="Show only this rank; by default, all ranks of the step.")] = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=0, help="Maximum number of rows, and of file names, to show.")] = 64,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show what a step contains: rows, tokens, padding, documents, files, and the source of each piece of each row."""
    with errors_as_one_line():
        given_rank = 0 if rank is None and world_size is not None else rank  # the report covers all ranks
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": given_rank, "world_size": world_size}
        checked = of_one_rank(settings_given(given, assignments, options, "explain"))
        report = reports.explain_step(checked, step, epoch, all_ranks=rank is None, most=rows, state=state)
        terminal.show(report, terminal.show_step, as_json=as_json)


def mixture(
    given: Given,
    at: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens of the run, such as 250B; by default, an epoch.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of shares and passes over the run, such as mixture.png.")
    ] = None,
    world_size: WorldSize = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show what a run uses of each source of a mixture: share, tokens, passes, rows left, and stages. No GPU."""
    with errors_as_one_line():
        shape = {"batch_size": batch_size, "seq_len": seq_len, "world_size": world_size}
        checked = _for_all_ranks(given, assignments, "mixture", plot, **shape)
        try:
            tokens = None if at is None else int(parse_count(at))
            if tokens is not None and tokens < 0:
                raise ValueError("expected 0 or more tokens")
        except ValueError as error:
            raise ConfigError(f"--at {at}: {error}") from None
        plan = reports.plan_mixture(checked, tokens, with_course=plot is not None)
        if plot is not None:
            reports.plot_mixture(plan, plot)
        terminal.show(plan, terminal.show_mixture, as_json=as_json)


def shuffle(
    given: Given,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="First steps of epoch 0 to look at.")] = 64,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of where rows come from in each order, such as orders.png.")
    ] = None,
    world_size: WorldSize = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Compare how well the orders shuffle: distance of neighbors, rows of a step from one block or file. No GPU."""
    with errors_as_one_line():
        shape = {"batch_size": batch_size, "seq_len": seq_len, "world_size": world_size}
        checked = _for_all_ranks(given, assignments, "shuffle", plot, **shape)
        report = reports.judge_shuffle(checked, steps)
        if plot is not None:
            reports.plot_shuffle(report, plot)
        terminal.show(report, terminal.show_shuffle, as_json=as_json)


def plan(
    given: Given,
    epoch: Epoch = 0,
    source: Annotated[
        str | None, typer.Option(help="In a mixture, the source to plan; --epoch then counts its passes.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of the balance of steps across ranks, such as plan.png.")
    ] = None,
    world_size: WorldSize = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Plan an epoch of document rows: fill, padding, dropped and cut documents, balance across ranks. No GPU."""
    with errors_as_one_line():
        shape = {"batch_size": batch_size, "seq_len": seq_len, "world_size": world_size}
        checked = _for_all_ranks(given, assignments, "plan", plot, **shape)
        if plot is not None:
            reports.check_plot(checked)
        report = reports.plan_epoch(checked, epoch, source)
        if plot is not None:
            reports.plot_plan(report, plot)
        terminal.show(report, terminal.show_plan, as_json=as_json)


def preview(
    given: Given,
    step: Step = 0,
    epoch: Epoch = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of rows to show.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per row to show.")] = 256,
    tokenizer: Decoder = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the picture of MODULE:LOADER; by default, preview.png.")
    ] = None,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show a batch: tokens, document boundaries, ignored labels, padding, and the source of each piece.

    For images and volumes, pass MODULE:LOADER, a SampleLoader or a function that returns one, to write a picture.
    """
    with errors_as_one_line():
        if len(given) == 1 and reports.names_loader(given[0]):
            of_tokens: dict[str, object] = {
                "rank": rank,
                "world-size": world_size,
                "tokenizer": tokenizer,
                "state": state,
            }
            of_tokens |= {"batch-size": batch_size, "seq-len": seq_len, "set": assignments or None}
            for name, value in of_tokens.items():
                if value is not None:
                    raise ConfigError(f"--{name} applies only to tokens; remove it, or change {given[0]} itself")
            sheet = reports.preview_samples(given[0], step, epoch, rows, out or Path("preview.png"))
            terminal.show(sheet, terminal.show_samples, as_json=as_json)
            return
        if out is not None:
            raise ConfigError(f"--out {out} applies only to MODULE:LOADER; remove it")
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": rank, "world_size": world_size}
        sources, tokenizer = with_tokenizer(settings_given(given, assignments, options, "preview"), tokenizer)
        checked = of_one_rank(sources)
        text = None if tokenizer is None else reports.TokenText(tokenizer)
        batch = reports.preview_batch(checked, step, epoch, rows=rows, tokens=tokens, tokenizer=text, state=state)
        terminal.show(batch, terminal.show_preview, as_json=as_json)


def _for_all_ranks(
    given: list[str], assignments: list[str] | None, command: str, plot: Path | None, **shape: int | None
) -> LoaderConfig:
    """The configuration of one rank, for a report that covers all of them, once its figure can be written.

    shape: batch_size, seq_len and world_size
    """
    if plot is not None:
        check_output("--plot", plot)
    options = {**shape, "rank": None if shape["world_size"] is None else 0}
    return of_one_rank(settings_given(given, assignments, options, command))
