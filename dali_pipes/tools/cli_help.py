"""How help shows flags: `--full  --no-full`, without a type that typer would put beside them."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

FLAG = ""
"""The metavar of a flag."""


class Command(TyperCommand):
    """A command whose `--help` is shown as a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


class Group(TyperGroup):
    """The commands, whose `--help` is shown as a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = FLAG
    return option
