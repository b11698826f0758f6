"""The settings of a loader from the arguments and options of a command: files, presets, data, and single settings.

dali-pipes preview base.toml h100 --set seed=7         a file, a preset, and one setting that overrides both
dali-pipes preview base.toml --set mixture.web.weight=0.5
dali-pipes preview data/*.bin --batch-size 8 --seq-len 1024
dali-pipes preview gpt2_124m data/*.bin                data instead of the preset's
"""

import glob
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dali_pipes.config import LoaderConfig
from dali_pipes.config.settings_files import CONFIG_SUFFIXES, Source, merged, presets, read_file, read_preset
from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.ranks import resolve_ranks
from dali_pipes.uris import is_uri, without_secrets

Given = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG|DATA",
        help="Configuration files (TOML, YAML, JSON) and presets; later ones override earlier ones. Or data: files, "
        "folders, glob patterns, URIs, synthetic:10B.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one setting, such as mixture.web.weight=0.5; can be repeated."
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Rows per batch on each rank.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per row.")]


def settings_given(
    arguments: Sequence[str], assignments: Sequence[str] | None, options: Mapping[str, Any], command: str
) -> list[Source]:
    """The sources of the settings, in order: later ones override earlier ones.

    options: settings that have a dedicated option, named `--like-this`; None means not given

    Raises ConfigError for an argument that is not a file, a preset, or data, and for data without seq_len, or without
    batch_size or batch_tokens.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an objective's function may be in a module there
    sources, data = [], []
    for argument in arguments:
        source = _source(argument)
        if source is None:
            data.append(without_secrets(argument))
        else:
            sources.append(source)
    if data:
        sources.append(Source(", ".join(data), {"corpus": data}))
    sources += map(_assigned, assignments or ())
    sources += [
        Source(f"--{name.replace('_', '-')} {value}", {name: value})
        for name, value in options.items()
        if value is not None
    ]
    given = merged(sources).keys()
    # A misspelled name gets a more specific error when the configuration is built.
    has_shape = "seq_len" in given and not given.isdisjoint(("batch_size", "batch_tokens"))
    if data and given <= LoaderConfig.model_fields.keys() and not has_shape:
        raise ConfigError(
            f"{data[0]}: this is data, not a configuration ({', '.join(CONFIG_SUFFIXES)}, or a preset), and data needs "
            f"batch_size and seq_len; try `dali-pipes {command} {data[0]} --batch-size 8 --seq-len 1024`"
        )
    return sources


def with_tokenizer(sources: Sequence[Source], tokenizer: Path | None) -> tuple[list[Source], Path | None]:
    """The sources of the settings, with the tokenizer of an option also for data that is text, unless the configuration
    names another; and the one to decode ids with, if there is one.
    """
    if tokenizer is not None:
        return [Source(f"--tokenizer {tokenizer}", {"tokenizer": str(tokenizer)}), *sources], tokenizer
    named = merged(sources).get("tokenizer")
    return list(sources), Path(named) if isinstance(named, str) else None


def of_one_rank(sources: Sequence[Source]) -> LoaderConfig:
    """The configuration of one rank, with its rank and world size, on the CPU."""
    # The device does not change which token is where, and a GPU may be missing or busy.
    return resolve_ranks(LoaderConfig.from_sources(*sources, Source("", {"device": "cpu", "placement": "host"})))


def _source(argument: str) -> Source | None:
    """The configuration that an argument names; None if it names data."""
    if is_uri(argument):
        return None
    path = Path(argument)
    if path.suffix in CONFIG_SUFFIXES and (path.suffix != ".json" or kind_of_index(path) is None):
        return read_file(path)
    is_data = argument.startswith("synthetic:") or glob.has_magic(argument)
    if is_data or any(map(os.path.lexists, (os.path.expanduser(argument), f"{argument}.idx"))):
        return None
    if argument in presets():
        return read_preset(argument)
    if argument.partition("=")[0] in LoaderConfig.model_fields:
        raise ConfigError(f"{argument}: settings are passed with --set; use --set {shlex.quote(argument)}")
    raise ConfigError(f"{argument}: no such file, folder, or preset; the presets are {', '.join(presets())}")


def _assigned(item: str) -> Source:
    """`key=value` as a setting. The value is TOML, or plain text if it is not valid TOML; `none` means None."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"--set {item}: expected key=value, such as batch_size=32")
    value = _value(text.strip())
    for key in reversed(_keys(name.strip())):
        value = {key: value}
    return Source(f"--set {name}={without_secrets(text.strip())}", value)


def _keys(name: str) -> list[str]:
    """The keys of a name: of `mixture."my web".weight` three, as in TOML. Only mixture has tables in tables."""
    if not name.startswith("mixture."):
        return [name]
    try:
        table: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return name.split(".")
    keys = []
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return keys


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def check_output(option: str, path: Path) -> None:
    """Raise `ConfigError` if a file cannot be written at `path`, so that a command finds out before its work."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; create it, or choose another")
