"""The settings that are tables: `objective`, `mixture` and `stages`.

Building the models that check them takes as long as that of all other settings, and most runs set none of them. So the
models are imported with the first table.
"""

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator

if TYPE_CHECKING:
    from dali_pipes.config.mixture import SourceSettings, Stage
    from dali_pipes.config.objectives import Objective


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _objectives(value: Any) -> "tuple[Objective, ...]":
    if _is_empty(value):
        return ()
    from dali_pipes.config.objectives import parse_objectives  # with the first table: see above

    parsed: tuple[Objective, ...] = parse_objectives(value)
    return parsed


def _sources(value: Any) -> "dict[str, SourceSettings]":
    from dali_pipes.config.mixture import parse_sources  # with the first table: see above

    return parse_sources(value)


def _stages(value: Any) -> "tuple[Stage, ...]":
    if _is_empty(value):
        return ()
    from dali_pipes.config.mixture import parse_stages  # with the first table: see above

    return parse_stages(value)


if TYPE_CHECKING:
    Objectives: TypeAlias = tuple[Objective, ...]
    Sources: TypeAlias = dict[str, SourceSettings]
    Stages: TypeAlias = tuple[Stage, ...]
else:  # for pydantic, which saves values of any type by what they are
    Objectives = Annotated[
        Any,
        PlainValidator(_objectives),
        PlainSerializer(lambda entries: [entry.plain() for entry in entries], return_type=list[dict[str, Any]]),
    ]
    Sources = Annotated[Any, PlainValidator(_sources)]
    Stages = Annotated[Any, PlainValidator(_stages)]
