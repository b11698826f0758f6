"""Flags in the help: `--full  --no-full`, without the type that typer would print after them."""

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

FLAG = ""
"""The metavar of a flag."""

Json = Annotated[
    bool, typer.Option("--json/--no-json", metavar=FLAG, show_default=False, help="Print a single JSON object.")
]


_RAY_ADDRESS = re.compile(r"local|auto|(ray://)?[\w.-]+:\d+")


class Command(TyperCommand):
    """A command whose `--help` is shown as a flag, and whose `--ray` may be without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for at, argument in enumerate(args[:end]):
            follows = args[at + 1] if at + 1 < end else ""
            if argument == "--ray" and not _RAY_ADDRESS.fullmatch(follows):
                args[at] = "--ray="
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


class Group(TyperGroup):
    """The group of all commands, whose `--help` is shown as a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = FLAG
    return option
