"""Sources of settings: files, presets and options of a command. Later sources override earlier ones; errors name them.

Source("base.toml", {"batch_size": 8, "seq_len": 1024})
Source("--set batch_size=0", {"batch_size": 0})       --set batch_size=0: batch_size: must be greater than 0, found 0
Source("", {"seed": 7})                               keyword arguments, which need no name
"""

import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.config.aliases import drop_removed
from dali_pipes.errors import ConfigError

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml", ".json")
MISSING = "is missing"
"""The problem of a required setting that was not set."""


_BARE = re.compile(r"[A-Za-z0-9_-]+")


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
        settings = _parsed(text, path.suffix)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a table of settings, found {type(settings).__name__}")
    return Source(str(path), drop_removed(settings))


def _parsed_toml(text: str) -> dict[str, Any]:
    import tomllib  # a loader with settings in code does not need its patterns

    return tomllib.loads(text)


def _parsed(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return _parsed_toml(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml  # takes longer to import than to read a file with it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def toml_text(settings: Mapping[str, Any]) -> str:
    """Settings of JSON's types, but None, as TOML: tables last, because values after them would belong to them."""
    lines, tables = [], []
    for name, value in settings.items():
        if isinstance(value, dict):
            tables += [(f"[{name}.{toml_key(key)}]", table) for key, table in value.items()]
        elif name == "stages" and value:
            tables += [(f"[[{name}]]", table) for table in value]
        else:
            lines.append(f"{name} = {toml_value(value)}\n")
    for header, table in tables:
        lines += [f"\n{header}\n", *(f"{name} = {toml_value(value)}\n" for name, value in table.items())]
    return "".join(lines)


def toml_key(name: str) -> str:
    """A name, in quotes where TOML needs them."""
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def toml_value(value: Any) -> str:
    """A value of JSON's types, but None, as TOML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(name)} = {toml_value(entry)}' for name, entry in value.items())}}}"
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
    return Source(f"preset {name}", _parsed_toml(file.read_text(encoding="utf-8")))


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """All settings. Later sources override earlier ones; the tables of `mixture` are merged, name by name."""
    settings: dict[str, Any] = {}
    for source in sources:
        tables = settings.get("mixture")
        settings |= source.settings
        if isinstance(tables, Mapping) and isinstance(settings["mixture"], Mapping):
            settings["mixture"] = _merged_tables(tables, settings["mixture"])
    return settings


def _merged_tables(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    tables = dict(earlier)
    for name, table in later.items():
        before = tables.get(name)
        tables[name] = {**before, **table} if isinstance(before, Mapping) and isinstance(table, Mapping) else table
    return tables


def name_sources(
    error: ConfigError, sources: Sequence[Source], check: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]
) -> ConfigError:
    """The error of a configuration from `sources`, where each problem names its source.

    check: returns the problems of other settings, in the form of `error.problems`

    The source is the last one that sets the invalid setting; all of them if a setting is missing, or all that set the
    table in which it is missing; and if settings contradict each other, those of the settings whose removal would solve
    the problem.
    """
    parts: dict[str, list[str]] = {}
    for setting, problem in error.problems:
        if setting:
            found = _sources_of(setting, sources, every=problem == MISSING)
            text = f"{setting}: {problem}"
        else:
            names = _settings_to_blame(problem, sources, check)
            found = sorted({number for name in names for number in _sources_of(name, sources)})
            text = problem
        place = ", ".join(dict.fromkeys(sources[number].name for number in found if sources[number].name))
        parts.setdefault(place, []).append(text)
    return ConfigError("; ".join(f"{place}: " * bool(place) + "; ".join(texts) for place, texts in parts.items()))


def _sources_of(place: str, sources: Sequence[Source], *, every: bool = False) -> list[int]:
    """Numbers of the sources that set what a place such as `mixture.web.weight` names, or the table around it.

    The last one, or every one; and all sources if none of them sets it.
    """
    depths = [_depth(place, source.settings) for source in sources]
    found = [number for number, depth in enumerate(depths) if depth == max(depths)]
    return found if every or not max(depths) else found[-1:]


def _depth(place: str, settings: Mapping[Any, Any]) -> int:
    """How many names of a place settings have, from its beginning."""
    for name, value in settings.items():
        if place == name or place.startswith(f"{name}."):
            return 1 + (_depth(place[len(name) + 1 :], value) if isinstance(value, Mapping) else 0)
    return 0


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
