"""The command `dali-pipes report`: one HTML page on the data of a run.

dali-pipes report run.toml --steps 0,100,1200
dali-pipes report data/*.bin --batch-size 8 --seq-len 1024 --tokenizer tokenizer.json --out report.html
"""

from pathlib import Path
from typing import Annotated

import typer

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import printable
from dali_pipes.runtime.user_cache import write_whole
from dali_pipes.tools import reports, terminal
from dali_pipes.tools.cli.endings import errors_as_one_line
from dali_pipes.tools.cli.flags import Json
from dali_pipes.tools.cli.loader_commands import Decoder, Epoch, SavedState, WorldSize
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
from dali_pipes.uris import without_secrets


def report(
    given: Given,
    out: Annotated[Path, typer.Option(help="HTML file to write; replaces an existing file.")] = Path("report.html"),
    steps: Annotated[str, typer.Option(metavar="STEPS", help="Steps to show as text, such as 0,100,1200.")] = "0",
    epoch: Epoch = 0,
    rank: Annotated[int | None, typer.Option(help="Rank whose batches are shown; by default, 0.")] = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of rows of each step to show.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per row to show.")] = 1024,
    tokenizer: Decoder = None,
    state: SavedState = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Log of the run: one JSON object per line, such as the result of stats().metrics()."),
    ] = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about the data of a run: corpus, order, rows, mixture, batches as text, and log.

    Reads the batches of the steps shown and a bounded sample of the corpus. Uses no GPU and no network.
    """
    with errors_as_one_line():
        check_output("--out", out)
        rank = 0 if rank is None and world_size is not None else rank
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": rank, "world_size": world_size}
        sources, tokenizer = with_tokenizer(settings_given(given, assignments, options, "report"), tokenizer)
        config = of_one_rank(sources)
        page = reports.make_page(
            config,
            _title(given),
            steps=_steps(steps),
            epoch=epoch,
            rows=rows,
            tokens=tokens,
            tokenizer=None if tokenizer is None else reports.TokenText(tokenizer),
            state=state,
            log=log,
        )
        content = page.html.encode("utf-8", "backslashreplace")
        write_whole(out, content)
        if as_json:
            terminal.show_json({"path": str(out), "bytes": len(content), **page.as_dict()})
            return
        for missing in page.missing:
            typer.echo(f"missing: {printable(missing)}", err=True)
        print(f"wrote {printable(str(out))}, {len(content):,} bytes")


def _title(given: list[str]) -> str:
    """What was given, by its last names."""
    names = [Path(without_secrets(argument)).name or argument for argument in given]
    return ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)


def _steps(text: str) -> tuple[int, ...]:
    """The numbers of a list, without repetitions. Raises `ConfigError`."""
    try:
        steps = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--steps {text}: expected step numbers separated by commas, such as 0,100,1200") from None
    return steps
