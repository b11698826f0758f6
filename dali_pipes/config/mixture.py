"""The settings of a mixture: its sources, each with the corpus and the weight, and its stages.

    [mixture.web]
    corpus = "web/*.bin"
    weight = 0.7

    [[stages]]
    at = "250B"
    weights = {web = 0.4, code = 0.6}

Weights are exact: 0.1 is 1/10, as it is written, and not the float nearest to it.
"""

import difflib
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from dali_pipes.config.exact_numbers import Count, NotNegative, Part, Positive, Weight, exact_number
from dali_pipes.config.objectives import Objectives
from dali_pipes.config.validators import (
    PathText,
    as_value_error,
    parse_dtype,
    parse_path,
    parse_paths,
    refuse_huge_number,
    shown,
)
from dali_pipes.errors import ConfigError
from dali_pipes.uris import is_uri

_LONGEST_NAME = 200
_EXPECTED = 'expected a table of sources, such as {web = {corpus = "web/*.bin", weight = 0.7}}'
_SYNTHETIC = "synthetic:"


class SourceSettings(BaseModel):
    """One source of a mixture.

    Settings of the loader that are given here are those of this source; None means as for the whole loader.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    corpus: tuple[PathText, ...] = Field(description="As `corpus` of a loader: the data of this source alone.")
    weight: Weight = Field(
        description="Share of the tokens, relative to the weights of the other sources; at least 0. `size`: the number "
        "of tokens of the source."
    )
    max_epochs: Positive | None = Field(
        None,
        description="Most passes over the source, such as 4 or 2.5. None: no limit if a total is set, otherwise 1.",
    )
    share: Part | None = Field(
        None, description="Part of the source that is used, such as 0.25, the same for every seed and pass. None: all."
    )

    format: str | None = None
    dtype: str | None = None
    token_column: str | None = None
    eos_id: int | None = Field(None, ge=0)
    document_start_id: int | None = Field(None, ge=0)
    documents_end_at_files: bool | None = None
    tokenizer: str | None = None
    text_key: str | None = None
    loss_masks: tuple[PathText, ...] | None = None
    keep: PathText | None = None
    rows: Literal["stream", "pack", "pad"] | None = None
    long_documents: Literal["split", "truncate", "drop"] | None = None
    window_documents: int | None = Field(None, gt=0)
    objective: Objectives | None = None

    _in_range = field_validator("*", mode="before")(refuse_huge_number)
    _dtype_as_name = field_validator("dtype", mode="before")(parse_dtype)

    @field_validator("corpus", mode="before")
    @classmethod
    def _corpus_as_tuple(cls, value: Any) -> Any:
        return parse_paths(value, "corpus")

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_as_path(cls, value: Any) -> Any:
        return None if value is None else parse_path(value, "keep")

    @field_validator("loss_masks", mode="before")
    @classmethod
    def _masks_as_tuple(cls, value: Any) -> Any:
        return None if value is None else parse_paths(value, "loss_masks")

    def overrides(self) -> dict[str, Any]:
        """The settings of the loader that this source gives."""
        return {name: value for name in OVERRIDES if (value := getattr(self, name)) is not None}

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self.model_dump(exclude_none=True).items())


OVERRIDES = tuple(
    name for name in SourceSettings.model_fields if name not in ("corpus", "weight", "max_epochs", "share")
)
"""Settings of a loader, other than the corpus, that a source may have to itself."""


class Stage(BaseModel):
    """Other weights from a number of tokens on. Every source of the mixture has one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    at: Count = Field(description="Tokens of the run after which the stage begins, such as `250B`.")
    weights: dict[str, NotNegative] = Field(description="The weight of every source, 0 for one that pauses.")

    def __hash__(self) -> int:
        return hash((self.at, frozenset(self.weights.items())))


_SOURCES = TypeAdapter(dict[str, SourceSettings])
_STAGES = TypeAdapter(tuple[Stage, ...])


def parse_sources(value: Any) -> dict[str, SourceSettings]:
    """The setting `mixture`. ValueError, also for sources that do not go together; pydantic's names the source."""
    sources = _SOURCES.validate_python(_tables(value))
    check_sources(sources)
    return sources


def parse_stages(value: Any) -> tuple[Stage, ...]:
    """The setting `stages`, which `check_stages` compares with the sources. ValueError as `parse_sources`."""
    return _STAGES.validate_python(value)


@as_value_error
def _tables(value: Any) -> dict[str, Any]:
    """The tables of `mixture` by name, in plain dicts. ValueError for anything else, and for bad names."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{_EXPECTED}; found {shown(value)}")
    sources = dict(value.items())
    if not sources:
        raise ValueError(f"{_EXPECTED}; found an empty one")
    for name, table in sources.items():
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.strip():
            raise ValueError(f"expected names of 1 to {_LONGEST_NAME} characters, found {shown(name)}")
        if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name):
            raise ValueError(f"the name {shown(name)} contains a control character; use printable text")
        if isinstance(table, Mapping) and "corpus" not in table:
            complete = [other for other, its in sources.items() if isinstance(its, Mapping) and "corpus" in its]
            if near := difflib.get_close_matches(name, complete, n=1):
                raise ValueError(f"{shown(name)} does not have a corpus: set one, or did you mean {shown(near[0])}?")
    return {name: dict(table.items()) if isinstance(table, Mapping) else table for name, table in sources.items()}


def check_sources(sources: Mapping[str, SourceSettings]) -> None:
    """ValueError for weights that do not go together, and for a path that two sources name."""
    by_size = [name for name, source in sources.items() if source.weight == "size"]
    by_number = [name for name, source in sources.items() if source.weight != "size"]
    if by_size and by_number:
        raise ValueError(
            f'{shown(by_size[0])} has weight = "size" and {shown(by_number[0])} a number: use "size" for all sources '
            "or for none"
        )
    if not by_size:
        check_sum({name: source.weight for name, source in sources.items()})
    names: dict[str, str] = {}
    for name, source in sources.items():
        for path in dict.fromkeys(source.corpus):
            if path.startswith(_SYNTHETIC):
                continue
            other = names.setdefault(path if is_uri(path) else os.path.abspath(os.path.expanduser(path)), name)
            if other != name:
                raise ValueError(
                    f"{shown(other)} and {shown(name)} both have the corpus {shown(path)}: each file belongs to one "
                    "source; add up the weights, or name different files"
                )


def check_stages(stages: tuple[Stage, ...], names: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The stages with weights in the order of `names`. ValueError for wrong names, weights or places."""
    at = 0
    for number, stage in enumerate(stages):
        place = f"stage {number} (at = {stage.at:,})"
        if stage.at <= at:
            raise ValueError(
                f"{place} comes after a stage with at = {at:,}: list stages by increasing at, each number once"
            )
        at = stage.at
        for name in stage.weights:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                meant = f"did you mean {shown(near[0])}?" if near else f"the sources are {shown(list(names))}"
                raise ValueError(f"{place} names {shown(name)}, which is not in mixture; {meant}")
        if missing := [name for name in names if name not in stage.weights]:
            raise ValueError(
                f"{place} does not have a weight for {shown(missing)}: set one for every source, 0 to pause it"
            )
        try:
            check_sum(stage.weights)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return tuple(
        stage.model_copy(update={"weights": {name: stage.weights[name] for name in names}}) for stage in stages
    )


def check_sum(weights: Mapping[str, Any]) -> None:
    """ValueError if all weights are 0."""
    if not any(weights.values()):
        raise ValueError(f"all weights are 0 ({shown(list(weights))}): at least one source needs a weight above 0")


def parse_weights(weights: Mapping[str, Any], names: Sequence[str]) -> dict[str, Fraction]:
    """New weights for all sources, in the order of `names`. Raises `ConfigError` for wrong names or values."""
    try:
        if not isinstance(weights, Mapping):
            raise ValueError(f"expected a dict of weights by source name, found {shown(weights)}")
        given = {}
        for name, weight in weights.items():
            try:
                given[name] = exact_number(weight, zero=True)
            except ValueError as error:
                raise ValueError(f"{shown(name)}: {error}") from None
        (stage,) = check_stages((Stage.model_construct(at=1, weights=given),), dict.fromkeys(names))
    except ValueError as error:
        raise ConfigError(
            f"set_weights: {str(error).removeprefix('stage 0 (at = 1) ').removeprefix('stage 0 (at = 1): ')}"
        ) from None
    return stage.weights
