"""The command `dali-pipes`: build and inspect a corpus, check a configuration, and see what a loader serves.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes inspect data/*.bin
    dali-pipes check data --vocab-size 50257
    dali-pipes copy s3://bucket/data data
    dali-pipes config gpt2_124m h100 --set batch_size=32
    dali-pipes locate run.toml --step 1200 --row 3
    dali-pipes explain run.toml --step 1200 --world-size 8
    dali-pipes mixture run.toml --at 250B
    dali-pipes shuffle run.toml --plot orders.png
    dali-pipes plan run.toml --world-size 64 --plot plan.png
    dali-pipes preview data/*.bin --batch-size 8 --seq-len 1024 --tokenizer tokenizer.json
    dali-pipes report run.toml --steps 0,100,1200
    dali-pipes watch runs/stats.jsonl

Results go to standard output, with --json as one object. A mistake of the user is one line on standard error.
"""

from typing import Annotated

import typer

from dali_pipes import __version__
from dali_pipes.tools.cli.corpus_commands import check, copy, inspect
from dali_pipes.tools.cli.endings import EXIT_STATUS
from dali_pipes.tools.cli.flags import FLAG, Command, Group
from dali_pipes.tools.cli.loader_commands import config, explain, locate, mixture, plan, preview, shuffle
from dali_pipes.tools.cli.report_command import report
from dali_pipes.tools.cli.tokenize_command import tokenize
from dali_pipes.tools.cli.watch_command import watch

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
    help="Build and inspect token corpora, and see which tokens a loader serves at any step.",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", metavar=FLAG, help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"dali-pipes {__version__}")
        raise typer.Exit


for command in (
    tokenize,
    inspect,
    check,
    copy,
    config,
    locate,
    explain,
    mixture,
    shuffle,
    plan,
    preview,
    report,
    watch,
):
    app.command(cls=Command, epilog=EXIT_STATUS)(command)
