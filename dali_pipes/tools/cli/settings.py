"""What the arguments and options of a command say about a loader: configuration files, presets, data, single settings.

dali-pipes preview base.toml h100 --set seed=7         a file, a preset, a setting over both
dali-pipes preview data/*.bin --batch-size 8 --seq-len 1024
dali-pipes preview gpt2_124m data/*.bin                data in place of the preset's
"""

import glob
import os
import shlex
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

Given = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG|DATA",
        help="Configuration files (TOML, YAML, JSON) and preset names, where later ones override earlier ones; or "
        "data: files, folders, glob patterns, synthetic:10B.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated."),
]
BatchSize = Annotated[int | None, typer.Option(help="Rows per batch on each rank.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per row.")]


def settings_given(
    arguments: Sequence[str], assignments: Sequence[str] | None, options: Mapping[str, Any], command: str
) -> list[Source]:
    """Where settings come from, in the order in which later ones replace earlier ones.

    options: settings with an option of their own, named `--like-this`; None is not given

    Raises ConfigError for an argument that is none of a file, a preset and data, and for data without the shape of a
    batch.
    """
    sources, data = [], []
    for argument in arguments:
        source = _source(argument)
        if source is None:
            data.append(argument)
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
    # A misspelled name is an error that says more, when the configuration is made.
    if data and given <= LoaderConfig.model_fields.keys() and not {"batch_size", "seq_len"} <= given:
        raise ConfigError(
            f"{data[0]}: this is a corpus, not a configuration ({', '.join(CONFIG_SUFFIXES)}, or a preset); use "
            f"`dali-pipes {command} {data[0]} --batch-size 8 --seq-len 1024`"
        )
    return sources


def of_one_rank(sources: Sequence[Source]) -> LoaderConfig:
    """The configuration of one rank, which is in it, without a GPU."""
    # Neither changes which token is where, and a GPU may be out of reach or busy.
    return resolve_ranks(LoaderConfig.from_sources(*sources, Source("", {"device": "cpu", "placement": "host"})))


def _source(argument: str) -> Source | None:
    """The configuration that an argument names; None if it names data."""
    path = Path(argument)
    if path.suffix in CONFIG_SUFFIXES and (path.suffix != ".json" or kind_of_index(path) is None):
        return read_file(path)
    is_data = argument.startswith("synthetic:") or glob.has_magic(argument)
    if is_data or any(map(os.path.lexists, (os.path.expanduser(argument), f"{argument}.idx"))):
        return None
    if argument in presets():
        return read_preset(argument)
    if argument.partition("=")[0] in LoaderConfig.model_fields:
        raise ConfigError(f"{argument}: a setting goes with --set: use --set {shlex.quote(argument)}")
    raise ConfigError(f"{argument}: no such file, folder or preset; the presets are {', '.join(presets())}")


def _assigned(item: str) -> Source:
    """`key=value` as a setting: the value is TOML, or plain text where it is not; `none` is None."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"--set {item}: expected key=value, such as batch_size=32")
    return Source(f"--set {item}", {name.strip(): _value(text.strip())})


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
