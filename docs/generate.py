"""Write what the manual repeats of the code: `python docs/generate.py`, or with `--check` only compare.

The text between `<!-- generated: NAME -->` and `<!-- /generated -->` is replaced, in each page of `PAGES`: the settings
and the names of other loaders in configuration.md, the commands in cli.md.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from dali_pipes import LoaderConfig
from dali_pipes.config.aliases import alias_rows
from dali_pipes.config.mixture import OVERRIDES, SourceSettings, Stage
from dali_pipes.config.objectives import KINDS, plain_default
from dali_pipes.tools.cli import app

HERE = Path(__file__).parent
SETTINGS = {
    "corpus": "corpus format dtype token_column vocab_size loss_masks tokenizer text_key split validation_fraction",
    "mixture": "mixture total_tokens total_rows total_steps temperature on_exhausted proxy stages",
    "documents": "eos_id document_start_id documents_end_at_files keep",
    "rows": (
        "batch_size batch_tokens batch_shapes seq_len order_len global_batch stride random_offset rows long_documents "
        "length_buckets window_documents balance balance_cost hidden_size num_layers"
    ),
    "order": "shuffle order shuffle_window seed drop_last repeat skip_steps on_change",
    "outputs": "outputs index_dtype mask_dtype label_shift mask_boundaries pad_id mtp objective",
    "ranks": "rank world_size context_parallel context_split",
    "device": "device placement max_device_bytes static_buffers",
    "reading": (
        "engine num_threads prefetch_queue_depth batches_per_run max_block_bytes reads decoded_cache_bytes eager "
        "cache cache_dir cache_bytes read_retries read_requests verify_checksums"
    ),
    "messages": "quiet nvtx",
}
"""Settings by table of configuration.md; a setting that is missing here fails the test of the manual."""


def settings_table(names: Iterable[str], table: type[BaseModel]) -> str:
    """Settings with their defaults and meanings."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name in names:
        field = table.model_fields[name]
        default = "required" if field.is_required() else f"`{_as_code(field.default)}`"
        lines.append(f"| `{name}` | {default} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def kind_table(kind: str) -> str:
    """The settings of one kind of `objective`."""
    model = KINDS[kind]
    lines = [f"| setting of `{kind}` | default | meaning |", "| --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name in ("kind", "validation"):
            continue
        default = "required" if field.is_required() else f"`{_as_code(plain_default(model, name))}`"
        lines.append(f"| `{name}` | {default} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def overrides_list() -> str:
    """The settings of a loader that a source of a mixture may have to itself."""
    return ", ".join(f"`{name}`" for name in OVERRIDES)


def aliases_table() -> str:
    """Names in other loaders, and what to use instead."""
    lines = ["| elsewhere | here | what is different |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {_cell(' | '.join(row), separators=True)} |" for row in alias_rows()])


def commands() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    return "\n\n".join(_command(name, group.get_command(context, name)) for name in group.list_commands(context))


def exit_status() -> str:
    """What a command's exit status means, as its help says it."""
    return str(typer.main.get_command(app).epilog)


def _command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(["dali-pipes", name, *(_argument(argument) for argument in arguments), "[OPTIONS]"])
    lines = [f"## {name}", "", command.help, "", "```text", usage, "```", ""]
    lines += ["| argument or option | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{_cell(_argument(argument))}` | | {_cell(argument.help or '')} |" for argument in arguments]
    lines += [f"| {_flags(option)} | {_default(option)} | {_cell(option.help or '')} |" for option in options]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    many = "..." if argument.nargs == -1 else ""
    if argument.required:
        return f"{{{name}}}{many}" if "|" in name else f"{name}{many}"
    return f"[{name}]{many}"


def _flags(option: Any) -> str:
    return ", ".join(f"`{flag}`" for flag in option.opts)


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.default in (None, False, (), []) else f"`{getattr(option.default, 'value', option.default)}`"


def _as_code(value: object) -> str:
    """As in Python, with the double quotes that TOML needs too."""
    return repr(list(value) if isinstance(value, tuple) else value).replace("'", '"')


def _cell(text: str, *, separators: bool = False) -> str:
    """Text that may stand in a table."""
    lines = " ".join(text.split()).replace("<", "&lt;")
    return lines if separators else lines.replace("|", r"\|")


SOURCE_SETTINGS = tuple(name for name in SourceSettings.model_fields if name not in OVERRIDES)
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {
        **{
            f"settings: {group}": partial(settings_table, names.split(), LoaderConfig)
            for group, names in SETTINGS.items()
        },
        "settings of a source": partial(settings_table, SOURCE_SETTINGS, SourceSettings),
        "settings of the loader in a source": overrides_list,
        "settings of a stage": partial(settings_table, tuple(Stage.model_fields), Stage),
        "aliases": aliases_table,
    },
    "objectives.md": {f"settings of {kind}": partial(kind_table, kind) for kind in KINDS},
    "cli.md": {"commands": commands, "exit status": exit_status},
}


def generated(page: str) -> str:
    """The page as it is to be."""
    text = (HERE / page).read_text(encoding="utf-8")
    for name, write in PAGES[page].items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- /generated -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise SystemExit(f"docs/{page}: expected {begin.strip()} and, after it, {end}")
        text = f"{before}{begin}{write()}\n{end}{after}"
    return text


def outdated() -> Iterator[str]:
    """Pages that are not as they are to be, and settings that are in no table, or in two."""
    listed = " ".join(SETTINGS.values()).split()
    if wrong := set(listed) ^ set(LoaderConfig.model_fields):
        raise SystemExit(f"SETTINGS of docs/generate.py does not match LoaderConfig: {', '.join(sorted(wrong))}")
    if len(listed) != len(set(listed)):
        raise SystemExit("SETTINGS of docs/generate.py lists a setting twice")
    for page in PAGES:
        if (HERE / page).read_text(encoding="utf-8") != generated(page):
            yield page


if __name__ == "__main__":
    pages = list(outdated())
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"out of date: {', '.join(pages)}; run `python docs/generate.py`" if pages else 0)
    for page in pages:
        (HERE / page).write_text(generated(page), encoding="utf-8")
        print(f"wrote docs/{page}")
