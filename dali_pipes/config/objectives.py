"""What is learned of a row: the setting `objective`, a list of tables by `kind`, for the run or a source of a mixture.

objective = [{kind = "mlm", rate = 0.15, mask_id = 103}]
objective = [{kind = "prefix"}, {kind = "goldfish", k = 4, h = 13}]
objective = [{kind = "my_module:shuffled_spans", options = {rate = 0.1}}]

Shares are exact, and may change with the tokens of the run: see `rates`. A new kind is a class here, in `KINDS`.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from dali_pipes.config.amounts import parse_fraction, plain_fraction
from dali_pipes.config.rates import (
    Rates,
    RateSteps,
    Share,
    WeightSteps,
    places_of_changes,
    plain_steps,
    threshold,
    value_at,
)
from dali_pipes.config.span_counts import SpanWidths, span_widths
from dali_pipes.config.validators import as_value_error, plain_words, shown
from dali_pipes.config.vocabulary import id_of, tokenizer_file, vocabulary_of
from dali_pipes.errors import ConfigError

_LARGEST_TERM = 2**31

FEWEST_FIM_POSITIONS = 8
"""Of a row: three sentinels, three tokens, and the ids that begin and end a document."""

_USERS_KIND = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_EXPECTED = 'expected a list of tables with kind, such as [{kind = "mlm", mask_id = 103}]'


Id = Annotated[int, Field(ge=0, lt=2**31)]


class Objective(BaseModel):
    """One entry of `objective`. A subclass for each kind has its own settings.

    changes_inputs: whether it replaces ids, so that it does not go with another that does
    has_own_labels: whether labels are the ids at their own positions, and not those of the next tokens
    """

    # Most runs have no objective, so what validates one is built with the first of its kind.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True)

    changes_inputs: ClassVar[bool] = False
    has_own_labels: ClassVar[bool] = False

    kind: str
    validation: bool = Field(False, description='Apply it with `split = "validation"`, too.')

    def plain(self) -> dict[str, Any]:
        """As a configuration spells it, without defaults: JSON-serializable."""
        given = self.model_dump(mode="json")
        defaults = {
            name: field.get_default() for name, field in type(self).model_fields.items() if not field.is_required()
        }
        return {
            name: value
            for name, value in given.items()
            if name == "kind" or name not in defaults or getattr(self, name) != defaults[name]
        }

    def identity(self) -> dict[str, Any]:
        """What a state says of it: all that decides what it does."""
        return {name: value for name, value in self.plain().items() if name != "validation"}

    @property
    def lists(self) -> tuple[RateSteps, ...]:
        """The settings that change with the tokens of the run."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(value for value in values if _is_list_of_rates(value))

    @property
    def inserted(self) -> dict[str, int]:
        """Ids that it writes into inputs, by setting."""
        return {}

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that are left as they are."""
        return ()

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.plain().items())


def _is_list_of_rates(value: Any) -> bool:
    """Whether a setting is a `RateSteps` of several entries."""
    return isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], tuple)


class _Masking(Objective):
    """Replaces ids with a mask id and learns the originals."""

    changes_inputs = has_own_labels = True

    mask_id: Id = Field(
        description="Id that replaces a masked token. Tokens that are already this id are never chosen."
    )
    special_ids: tuple[Id, ...] = Field((), description="Ids that are never chosen, such as start and end ids.")

    @property
    def inserted(self) -> dict[str, int]:
        return {"mask_id": self.mask_id}

    @property
    def special(self) -> tuple[int, ...]:
        return self.special_ids


class Mlm(_Masking):
    """Masked language modeling: Devlin et al., "BERT", 2018."""

    kind: Literal["mlm"]
    rate: Rates = Field(
        ((0, Fraction(3, 20)),),
        description="Fraction of the tokens to choose, or a list of [tokens of the run, fraction].",
    )
    random: Share = Field(Fraction(1, 10), description="Fraction of the chosen tokens that become a random id.")
    keep: Share = Field(Fraction(1, 10), description="Fraction of the chosen tokens that stay unchanged.")
    words: str | None = Field(
        None,
        description="File for choosing whole words: a `tokenizer.json`, or a `.npy` or `.json` list with 1 for each id "
        "that begins a word and 0 for all others. None: choose single tokens.",
    )

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if not any(share for _, share in self.rate):
            raise ValueError("rate = 0 chooses no tokens, so nothing would be learned; use a rate above 0")
        if self.random + self.keep > 1:
            raise ValueError(
                f"random = {plain_fraction(self.random)} and keep = {plain_fraction(self.keep)} add up to more than 1; "
                "lower one of them"
            )
        return self

    def identity(self) -> dict[str, Any]:
        if self.words is None:
            return super().identity()
        table = read_word_starts(self.words)
        return {**super().identity(), "words": hashlib.sha256(table.tobytes()).hexdigest()[:16]}


class Diffusion(_Masking):
    """Masked diffusion: Sahoo et al., "MDLM", 2024; Nie et al., "Large Language Diffusion Models", 2025."""

    kind: Literal["diffusion"]
    min_rate: Rates = Field(
        ((0, Fraction(1, 1000)),),
        description="Lowest masking rate of a row, or a list of [tokens of the run, rate]; the highest is 1.",
    )


class Drop(Objective):
    """Word dropout: Bowman et al., "Generating Sentences from a Continuous Space", 2016."""

    changes_inputs = True

    kind: Literal["drop"]
    rate: Rates = Field(description="Fraction of the inputs to replace, or a list of [tokens of the run, fraction].")
    drop_id: Id = Field(description="Id that replaces a dropped token, such as the unknown token.")
    special_ids: tuple[Id, ...] = Field((), description="Ids that are never dropped.")

    @property
    def inserted(self) -> dict[str, int]:
        return {"drop_id": self.drop_id}

    @property
    def special(self) -> tuple[int, ...]:
        return self.special_ids


class Prefix(Objective):
    """Prefix language modeling: Raffel et al., "T5", 2019."""

    kind: Literal["prefix"]
    shortest: Rates = Field(
        ((0, Fraction(0)),),
        description="Shortest prefix, as a fraction of the tokens in a row, or a list of [tokens of the run, "
        "fraction].",
    )
    longest: Rates = Field(((0, Fraction(1)),), description="Longest prefix, likewise a fraction or a list.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for at in places_of_changes((self.shortest, self.longest)):
            shortest, longest = value_at(self.shortest, at), value_at(self.longest, at)
            when = f" from {at:,} tokens on" if at else ""
            if shortest > longest:
                raise ValueError(
                    f"shortest = {plain_fraction(shortest)} is greater than longest = {plain_fraction(longest)}{when}; "
                    "swap them, or change one"
                )
            if shortest == 1:
                raise ValueError(f"shortest = 1{when}: no token of any row would be learned; use a number below 1")
        return self


class Goldfish(Objective):
    """Labels that are never learned, so that the model cannot recite text: Hans et al., "Goldfish Loss", 2024."""

    kind: Literal["goldfish"]
    k: int = Field(4, ge=2, lt=2**31, description="Ignore one label in k.")
    h: int = Field(
        13, ge=1, le=256, description="Number of ids before a label, in its document, that decide whether to ignore it."
    )


def _token(value: Any) -> int | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"expected an id, or a string in the vocabulary, found {shown(value)}")
    return value


Token = Annotated[int | str, PlainValidator(_token)]


def _table(value: Any) -> Any:
    if not isinstance(value, Mapping | BaseModel):
        raise ValueError(f"expected a table with prefix, middle and suffix, found {shown(value)}")
    return value


class FimTokens(BaseModel):
    """The sentinels of `Fim`: ids, or what the tokenizer calls them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True)

    prefix: Token
    middle: Token
    suffix: Token


class Fim(Objective):
    """Fill in the middle: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022."""

    kind: Literal["fim"]
    rate: Rates = Field(
        ((0, Fraction(1, 2)),),
        description="Fraction of the documents to rearrange, or a list of [tokens of the run, fraction].",
    )
    spm: Rates = Field(
        ((0, Fraction(1, 2)),),
        description="Fraction of these with the suffix before the prefix (SPM) instead of after it (PSM), or a list.",
    )
    tokens: Annotated[FimTokens, BeforeValidator(_table)] = Field(
        description="Sentinels: a table with `prefix`, `middle` and `suffix`, each an id or a string."
    )
    level: Literal["piece", "document"] = Field(
        "piece",
        description="What to rearrange if a document is split. `piece`: each piece separately; `document`: the whole "
        "document, before it is split.",
    )
    tokenizer: str | None = Field(
        None,
        description="A `tokenizer.json`, or its folder, with the strings in `tokens`. None: the loader's `tokenizer`.",
    )

    def ids(self, tokenizer: str | None) -> tuple[int, int, int]:
        """Ids of the sentinels before prefix, middle and suffix. Reads the tokenizer, this one if none is set here.

        ValueError for a string that is not in its vocabulary, and for ids that are not distinct.
        """
        given = self.tokens.prefix, self.tokens.middle, self.tokens.suffix
        path = self.tokenizer or tokenizer
        prefix, middle, suffix = (token if isinstance(token, int) else id_of(token, path) for token in given)
        if len({prefix, middle, suffix}) < 3:
            raise ValueError(
                f"tokens: prefix, middle and suffix have ids {prefix}, {middle} and {suffix}; all must differ"
            )
        return prefix, middle, suffix

    def identity(self) -> dict[str, Any]:
        about = super().identity()
        if about.pop("tokenizer", None) is not None:
            about["tokens"] = dict(zip(("prefix", "middle", "suffix"), self.ids(None), strict=True))
        return about


def _part_of_row(value: Any) -> Fraction:
    number: Fraction = _small_fraction(value)
    if not 0 < number < 1:
        raise ValueError(f"must be above 0 and below 1, found {shown(value)}")
    return number


def _mean_length(value: Any) -> Fraction | Literal["end"]:
    if value == "end":
        return "end"
    number: Fraction = _small_fraction(value)
    if number < 1:
        raise ValueError(f'must be at least 1, or "end", found {shown(value)}')
    return number


def _small_fraction(value: Any) -> Fraction:
    """One whose products with lengths of rows have 63 bits."""
    number: Fraction = parse_fraction(value)
    if number.numerator >= _LARGEST_TERM or number.denominator >= _LARGEST_TERM:
        raise ValueError(f"must have at most 9 decimals, found {shown(value)}")
    return number


class Denoiser(BaseModel):
    """One way of `Spans`: how much is taken out of a row, in spans of which length."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True)

    rate: Annotated[Fraction, PlainValidator(_part_of_row), PlainSerializer(plain_fraction)] = Fraction(3, 20)
    mean_length: Annotated[
        Fraction | Literal["end"],
        PlainValidator(_mean_length),
        PlainSerializer(lambda length: length if length == "end" else plain_fraction(length), return_type=Any),
    ] = Fraction(3)
    mode_token: Id | None = None
    weight: WeightSteps = ((0, Fraction(1)),)

    @property
    def mean(self) -> Fraction | None:
        """None: one span, at the end of the row."""
        return None if isinstance(self.mean_length, str) else self.mean_length

    def plain(self) -> dict[str, Any]:
        """As a configuration spells it; rate and mean length always."""
        given = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in given.items() if name != "weight" or value != 1}


def _denoisers(value: Any) -> Any:
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected a list of tables such as [{{rate = 0.15, mean_length = 3}}], found {shown(value)}")
    return value


class Spans(Objective):
    """Span corruption: Raffel et al., "T5", 2019; with several denoisers: Tay et al., "UL2", 2022."""

    kind: Literal["spans"]
    validation: Literal[True] = Field(True, description="Rows for validation are corrupted, too.")
    sentinels: Id = Field(description="Id of the sentinel of the first span of a row, such as 32099 for T5.")
    sentinel_step: Literal[-1, 1] = Field(
        -1, description="Step from each sentinel to the next: -1 counts down, as in T5; 1 counts up."
    )
    num_sentinels: int = Field(100, ge=1, lt=2**31, description="Sentinels in the vocabulary.")
    denoisers: Annotated[
        tuple[Denoiser, ...],
        BeforeValidator(_denoisers),
        PlainSerializer(lambda own: [one.plain() for one in own], return_type=Any),
    ] = Field(
        (Denoiser.model_construct(),),  # without a validator, which would be built at import
        description="Tables, one of which is drawn for each row: `rate`, the fraction of tokens to remove; "
        '`mean_length` of a span, or "end" for one span at the end of the row; `mode_token`, an id before the inputs; '
        "and `weight`, the relative frequency, or a list of [tokens of the run, weight].",
    )
    start_id: Id | None = Field(None, description="First id of `decoder_input_ids`. None: `pad_id`, as for T5.")
    end_id: Id | None = Field(
        None, description="Id after the inputs of the encoder and after the targets, such as 1 for T5. None: no id."
    )

    def widths(self, seq_len: int, *, is_full: bool) -> SpanWidths:
        """Room for a row of seq_len tokens, if it `is_full`; else of 1 to seq_len."""
        lengths = np.arange(seq_len if is_full else 1, seq_len + 1, dtype=np.int64)
        ways = [(own.rate, own.mean, own.mode_token is not None) for own in self.denoisers]
        return span_widths(lengths, ways, has_end=self.end_id is not None)

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        for at in self.changes:
            if not any(value_at(own.weight, at) for own in self.denoisers):
                raise ValueError(
                    f"the weight of every denoiser is 0 from {at:,} tokens on; set one of them above 0 there"
                )
        return self

    @property
    def lists(self) -> tuple[RateSteps, ...]:
        return tuple(own.weight for own in self.denoisers if len(own.weight) > 1)

    @property
    def changes(self) -> list[int]:
        """The tokens of the run from which denoisers have other weights, the first of them 0."""
        return places_of_changes(own.weight for own in self.denoisers)

    def thresholds(self, at: int) -> list[int]:
        """After `at` tokens of the run, a draw of 32 bits chooses the first denoiser whose threshold it is below."""
        weights = [value_at(own.weight, at) for own in self.denoisers]
        shares = [total / sum(weights) for total in itertools.accumulate(weights)]
        return list(map(threshold, shares))

    def sentinel_range(self, count: int) -> tuple[int, int]:
        """Lowest and highest id of the first `count` sentinels."""
        last = self.sentinels + self.sentinel_step * (count - 1)
        return min(self.sentinels, last), max(self.sentinels, last)

    @property
    def inserted(self) -> dict[str, int]:
        own = {"start_id": self.start_id, "end_id": self.end_id}
        own |= {f"denoisers[{number}].mode_token": way.mode_token for number, way in enumerate(self.denoisers)}
        return {
            "sentinels": self.sentinel_range(self.num_sentinels)[1],
            **{name: number for name, number in own.items() if number is not None},
        }


class Users(Objective):
    """A function of the user's."""

    kind: str = Field(pattern=_USERS_KIND)
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    def __hash__(self) -> int:
        return hash((self.kind, self.validation, json.dumps(self.options, sort_keys=True, default=str)))


KINDS: dict[str, type[Objective]] = {
    "mlm": Mlm,
    "diffusion": Diffusion,
    "drop": Drop,
    "prefix": Prefix,
    "goldfish": Goldfish,
    "fim": Fim,
    "spans": Spans,
}
"""By the value of `kind`; others are functions, "module:function"."""

Objectives = Annotated[
    tuple[SerializeAsAny[Objective], ...],
    PlainValidator(lambda value: parse_objectives(value)),
    PlainSerializer(lambda entries: [entry.plain() for entry in entries], return_type=list[dict[str, Any]]),
]
"""The setting `objective`."""


@as_value_error
def parse_objectives(value: Any) -> tuple[Objective, ...]:
    """The entries of `objective`. ValueError for a wrong kind or setting, and for kinds that do not go together."""
    if isinstance(value, Mapping | Objective):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{_EXPECTED}; found {shown(value)}")
    entries = tuple(map(_parsed, value))
    for number, entry in enumerate(entries):
        if any(entry.kind == other.kind for other in entries[:number]):
            raise ValueError(f'kind = "{entry.kind}" is listed twice; list each kind once')
    if len(entries) > 1 and any(isinstance(entry, Spans) for entry in entries):
        other = next(entry for entry in entries if not isinstance(entry, Spans))
        raise ValueError(f'kind = "spans" cannot be combined with kind = "{other.kind}"; remove one of the two')
    alone = next((entry for entry in entries if entry.has_own_labels), None)
    changing = [entry for entry in entries if entry.changes_inputs]
    labels = [entry for entry in entries if isinstance(entry, Prefix | Goldfish)]
    conflict = next((entry for entry in (*changing, *labels) if entry is not alone), None)
    if alone is not None and conflict is not None:
        raise ValueError(
            f'kind = "{alone.kind}" sets the labels of a row, so it cannot be combined with kind = "{conflict.kind}"; '
            "remove one of the two"
        )
    return entries


def _parsed(entry: Any) -> Objective:
    if isinstance(entry, Objective):
        return entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise ValueError(f"{_EXPECTED}; found {shown(entry)}")
    kind = entry["kind"]
    model = KINDS.get(kind, Users if _USERS_KIND.fullmatch(kind) else None)
    if model is None:
        raise ValueError(
            f"unknown kind = {shown(kind)}; expected one of {', '.join(KINDS)}, or your own function as "
            '"module:function"'
        )
    try:
        return model(**entry)
    except ValidationError as error:
        # An unknown name first: one that is missing may be misspelled.
        found = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        name = ".".join(map(str, found["loc"]))
        if found["type"] == "extra_forbidden":
            table = model if len(found["loc"]) == 1 else (Denoiser if model is Spans else FimTokens)
            known = ", ".join(name for name in table.model_fields if name != "kind")
            raise ValueError(f'unknown setting {shown(name)} of kind = "{kind}"; known settings: {known}') from None
        text = plain_words(str(found["msg"]).removeprefix("Value error, "))
        if found["type"] == "missing":
            raise ValueError(f'kind = "{kind}" requires {name}; set it') from None
        where = f'kind = "{kind}"' + f": {name}" * bool(name)
        is_ours = found["type"] == "value_error"
        raise ValueError(f"{where}: {text}" + f", found {shown(found['input'])}" * (not is_ours)) from None


def plain_default(model: type[Objective], name: str) -> Any:
    """The default of a setting, as a configuration spells it."""
    default = model.model_fields[name].default
    if isinstance(default, Fraction):
        return plain_fraction(default)
    if isinstance(default, tuple) and default and isinstance(default[0], Denoiser):
        return [own.plain() for own in default]
    is_rates = isinstance(default, tuple) and default and isinstance(default[0], tuple)
    return plain_steps(default) if is_rates else default


def objective_line(of_sources: Mapping[str, Sequence[Objective]]) -> str | None:
    """What is learned, for a report: of each source by name, or of the only one, "". None: the next token in all."""
    texts = {name: ", ".join(map(_entry_text, entries)) for name, entries in of_sources.items()}
    if not any(texts.values()):
        return None
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text or 'next token'}" for name, text in texts.items())


def _entry_text(entry: Objective) -> str:
    settings = {name: value for name, value in entry.plain().items() if name not in ("kind", "validation")}
    return entry.kind + (f" ({_settings_text(settings)})" if settings else "")


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_value_text(value)}" for name, value in settings.items())


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{_settings_text(value)}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)


def read_word_starts(path: str) -> npt.NDArray[np.uint8]:
    """uint8 (V,): 1 for each id that begins a word. Blocks; `ConfigError` for a file that does not say so.

    path: an array in `.npy`, a list in `.json`, or a `tokenizer.json`, whose pieces of a word begin with "##"
          (WordPiece), or whose words begin with "Ġ" or "▁" (byte-level BPE, SentencePiece).
    """
    file = tokenizer_file(path)
    try:
        about = file.stat()
        return _word_starts(file, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise ConfigError(f"objective: words = {path!r}: cannot read {file}: {error.strerror}") from error


def word_starts(path: str, vocab_size: int) -> npt.NDArray[np.uint8]:
    """The same for at least `vocab_size` ids. Those that a tokenizer does not have begin a word, as added tokens do.

    `ConfigError` for a list that is shorter: an id that it leaves out would be part of the word before.
    """
    starts = read_word_starts(path)
    missing = vocab_size - len(starts)
    if missing <= 0:
        return starts
    if _is_list(tokenizer_file(path)):
        raise ConfigError(
            f"objective: words = {path!r} has {len(starts):,} entries, but vocab_size = {vocab_size:,}; expected an "
            "entry for each id: add the missing ones, or correct vocab_size"
        )
    return np.append(starts, np.ones(missing, np.uint8))


def _is_list(file: Path) -> bool:
    """Whether a file has an entry for each id, and is not a `tokenizer.json`."""
    return file.suffix == ".npy" or not isinstance(json.loads(file.read_bytes()), dict)


@functools.lru_cache(8)
def _word_starts(file: Path, changed_ns: int, size: int) -> npt.NDArray[np.uint8]:
    try:
        table = np.load(file) if file.suffix == ".npy" else json.loads(file.read_bytes())
    except ValueError as error:
        form = "a NumPy array" if file.suffix == ".npy" else "JSON"
        raise ConfigError(
            f"objective: words = {str(file)!r}: expected a tokenizer.json, or a .npy or .json file with 0 or 1 for "
            f"each id; the file is not {form}: {error}"
        ) from error
    if isinstance(table, dict):
        table = _starts_of_vocabulary(file, table)
    array = np.asarray(table)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "bui" or not np.isin(array, (0, 1)).all():
        raise ConfigError(
            f"objective: words = {str(file)!r}: expected a list of 0 and 1, one for each id of the vocabulary"
        )
    starts = array.astype(np.uint8)
    starts.flags.writeable = False
    return starts


def _starts_of_vocabulary(file: Path, tokenizer: Mapping[str, Any]) -> list[int]:
    try:
        ids, added = vocabulary_of(tokenizer)
    except ValueError as error:
        raise ConfigError(f"objective: words = {str(file)!r}: not a tokenizer.json: {error}") from error
    starts = [1] * (max((*ids.values(), *added.values())) + 1)
    marks = tuple(mark for mark in ("Ġ", "▁") if any(text.startswith(mark) for text in ids))
    for text, number in ids.items():
        if text not in added:
            starts[number] = int(text.startswith(marks) if marks else not text.startswith("##"))
    return starts
