"""Sources of settings: files, presets and options of a command. Later sources override earlier ones; errors name them.

Source("base.toml", {"batch_size": 8, "seq_len": 1024})
Source("--set batch_size=0", {"batch_size": 0})       --set batch_size=0: batch_size: must be greater than 0, found 0
Source("", {"seed": 7})                               keyword arguments, which need no name
"""

import importlib.resources
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dali_pipes.config.aliases import drop_removed
from dali_pipes.errors import ConfigError

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml", ".json")
MISSING = "is missing"
"""The problem of a required setting that was not set."""


class Source(NamedTuple):
    """Settings and the name of the place where the user wrote them."""

    name: str
    settings: Mapping[str, Any]


def read_file(path: Path) -> Source:
    """The settings of a `.toml`, `.yaml`, `.yml` or `.json` file. ConfigError naming the file."""
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{path}: unknown suffix {path.suffix!r}; expected a configuration file ({', '.join(CONFIG_SUFFIXES)}). To "
            f"read this file as data, set corpus={str(path)!r}, batch_size and seq_len"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a configuration file: byte {error.start:,} is not UTF-8 text") from error
    try:
        if path.suffix == ".toml":
            settings: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            settings = json.loads(text)
        else:
            settings = yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a table of settings, found {type(settings).__name__}")
    return Source(str(path), drop_removed(settings))


def toml_value(value: Any) -> str:
    """A value of JSON's types, but None, as TOML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml_value(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written as in JSON


def presets() -> dict[str, str]:
    """Name and description of each preset in the package: the first line of its comment."""
    texts = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in importlib.resources.files("dali_pipes.configs").iterdir()
        if file.name.endswith(".toml")
    }
    return {name: texts[name].partition("\n")[0].removeprefix("#").strip() for name in sorted(texts)}


def read_preset(name: str) -> Source:
    """The settings of a preset. ConfigError listing the known names."""
    known = presets()
    if name not in known:
        raise ConfigError(f"unknown preset {name!r}; choose from {', '.join(known)}")
    file = importlib.resources.files("dali_pipes.configs").joinpath(f"{name}.toml")
    return Source(f"preset {name}", tomllib.loads(file.read_text(encoding="utf-8")))


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """All settings. Later sources override earlier ones."""
    return {name: value for source in sources for name, value in source.settings.items()}


def name_sources(
    error: ConfigError, sources: Sequence[Source], check: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]
) -> ConfigError:
    """The error of a configuration from `sources`, where each problem names its source.

    check: returns the problems of other settings, in the form of `error.problems`

    The source is the last one that sets the invalid setting; all of them if a setting is missing; and if settings
    contradict each other, those of the settings whose removal would solve the problem.
    """
    parts: dict[str, list[str]] = {}
    for setting, problem in error.problems:
        names = {setting.partition(".")[0]} if setting else _settings_to_blame(problem, sources, check)
        text = f"{setting}: {problem}" if setting else problem
        parts.setdefault(_source_names(names, sources), []).append(text)
    return ConfigError("; ".join(f"{place}: " * bool(place) + "; ".join(texts) for place, texts in parts.items()))


def _source_names(names: Collection[str], sources: Sequence[Source]) -> str:
    last = {name: number for number, source in enumerate(sources) for name in source.settings if name in names}
    found = sorted(set(last.values())) or range(len(sources))
    return ", ".join(dict.fromkeys(sources[number].name for number in found if sources[number].name))


def _settings_to_blame(
    problem: str, sources: Sequence[Source], check: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]
) -> list[str]:
    """The settings whose removal from the last source that sets them would solve the problem."""
    causes = []
    for name in merged(sources):
        at = max(number for number, source in enumerate(sources) if name in source.settings)
        less = {key: value for key, value in sources[at].settings.items() if key != name}
        left = check(merged([*sources[:at], sources[at]._replace(settings=less), *sources[at + 1 :]]))
        if ("", problem) not in left and all(other != MISSING for _, other in left):
            causes.append(name)
    return causes


def first_problem_of_each(problems: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The first problem of each setting: the entries of a list often have the same one."""
    first: dict[str, tuple[str, str]] = {}
    for place, problem in problems:
        first.setdefault(place.partition(".")[0], (place, problem))
    return tuple(first.values())
