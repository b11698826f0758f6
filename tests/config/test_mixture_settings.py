"""The settings of a mixture: sources, weights, stages and totals; from keywords and files, and what is refused."""

import copy
import json
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dali_pipes.config import DOCUMENT_ORDER_FIELDS, ORDER_FIELDS, LoaderConfig
from dali_pipes.config.amounts import parse_fraction, plain_fraction
from dali_pipes.config.loader_config import MIXTURE_FIELDS
from dali_pipes.config.mixture import OVERRIDES, SourceSettings
from dali_pipes.config.objectives import parse_objectives
from dali_pipes.config.outputs import OUTPUTS, Axes
from dali_pipes.config.settings_files import Source
from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError

SHAPE: dict[str, Any] = {"batch_size": 4, "seq_len": 8}
WEB = {"corpus": "web.bin", "weight": 0.7}
CODE = {"corpus": ["code/a.bin", "code/b.bin"], "weight": 3, "max_epochs": 2.5, "eos_id": 1}


def mixed(web: dict[str, Any] | None = None, **settings: Any) -> LoaderConfig:
    """A mixture of two sources, with other settings for the first."""
    return LoaderConfig(**{**SHAPE, "mixture": {"web": {**WEB, **(web or {})}, "code": CODE}, **settings})


FULL: dict[str, Any] = {
    **SHAPE,
    "mixture": {
        "web": {**WEB, "share": 0.25, "dtype": "uint32", "loss_masks": []},
        'say "hi"': {"corpus": "synthetic:1M", "weight": 0.1, "rows": "pack", "eos_id": 5},
        "a.b c": {"corpus": "c.jsonl", "weight": 1e-7, "tokenizer": "t.json", "text_key": "t"},
        "日本": {**CODE, "long_documents": "drop", "window_documents": 9, "documents_end_at_files": True},
    },
    "total_tokens": "300B",
    "on_exhausted": "drop",
    "proxy": "1/16",
    "stages": [
        {"at": "1.5K", "weights": {"日本": 1, "web": 0.3, "a.b c": 0, 'say "hi"': 2}},
        {"at": 2_000, "weights": {"web": 1, 'say "hi"': 0, "a.b c": 0, "日本": 0}},
    ],
    "random_offset": True,
}


def test_toml_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    config = LoaderConfig(**FULL)
    plain = config.model_dump(mode="json", exclude_none=True)
    (tmp_path / "c.toml").write_text(config.to_toml(), encoding="utf-8")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    (tmp_path / "c.json").write_text(json.dumps(plain))
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(FULL, sort_keys=False))
    for name in ("c.toml", "c.yaml", "c.json", "given.yaml"):
        read = LoaderConfig.from_file(tmp_path / name)
        assert read == config
        assert list(read.mixture or ()) == list(FULL["mixture"])
        assert read.to_toml() == config.to_toml()


def test_copies_are_equal() -> None:
    config = LoaderConfig(**FULL)
    dumped = LoaderConfig(**config.model_dump())
    for same in (config.replace(), dumped, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert hash(same) == hash(config)
    assert config.replace(seed=1) != config


def test_the_order_of_sources_is_part_of_a_configuration() -> None:
    other = LoaderConfig(**SHAPE, mixture={"code": CODE, "web": WEB})
    assert other != mixed()
    assert list(other.sources) == ["code", "web"]


def test_numbers_are_written_as_they_came() -> None:
    text = LoaderConfig(**FULL).to_toml()
    for line in ("weight = 0.7", "weight = 1e-07", "weight = 3", "max_epochs = 2.5", "share = 0.25", 'proxy = "1/16"'):
        assert line in text.splitlines()
    assert "at = 1500" in text.splitlines()
    assert 'weights = {web = 0.3, "say \\"hi\\"" = 2, "a.b c" = 0, "日本" = 1}' in text.splitlines()


def test_it_shows_what_was_chosen() -> None:
    config = mixed(total_rows=9)
    assert repr(config) == (
        "LoaderConfig(mixture={'code': {'corpus': ('code/a.bin', 'code/b.bin'), 'eos_id': 1, 'max_epochs': 2.5, "
        "'weight': 3}, 'web': {'corpus': ('web.bin',), 'weight': 0.7}}, total_rows=9, batch_size=4, seq_len=8)"
    )
    many = mixed(mixture={f"s{number}": {"corpus": f"{number}.bin", "weight": 1} for number in range(1000)})
    assert len(repr(many)) < 600
    assert len(many.sources) == 1000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.1, Fraction(1, 10)),
        ("0.1", Fraction(1, 10)),
        (Decimal("0.1"), Fraction(1, 10)),
        (np.float32(0.1), Fraction(1, 10)),
        (np.float64(0.1), Fraction(1, 10)),
        (np.int64(7), Fraction(7)),
        (3, Fraction(3)),
        (3.0, Fraction(3)),
        (1e-6, Fraction(1, 10**6)),
        (Fraction(1, 3), Fraction(1, 3)),
        ("1/3", Fraction(1, 3)),
        (0, Fraction(0)),
        ("size", "size"),
    ],
)
def test_a_weight_is_the_decimal_that_was_written(given: Any, expected: Any) -> None:
    other = {"corpus": "b.bin", "weight": "size" if given == "size" else 1}
    config = LoaderConfig(**SHAPE, mixture={"a": {"corpus": "a.bin", "weight": given}, "b": other})
    assert config.weights["a"] == expected
    assert isinstance(config.weights["a"], type(expected))


@given(st.integers(0, 2**64) | st.floats(0, 2**64, exclude_max=True) | st.fractions(0, 2**64, max_denominator=10**9))
@example(Fraction(2**64 + 1, 2))
@example(math.nextafter(2.0**64, 0))
def test_any_number_comes_back(number: int | float | Fraction) -> None:
    try:
        exact = parse_fraction(number)
    except ValueError:
        assert isinstance(number, float), "only a float may be too small"
        assert 0 < number < 1e-99
        return
    assert exact == Fraction(repr(number) if isinstance(number, float) else number)
    written = plain_fraction(exact)
    assert parse_fraction(json.loads(json.dumps(written))) == exact
    if isinstance(number, float) and not number.is_integer():
        assert written == number


def problem_of(**settings: Any) -> str:
    """What is said to the settings of a mixture; any other error than ConfigError ends the test."""
    with pytest.raises(ConfigError) as error:
        LoaderConfig(**{**SHAPE, "mixture": {"web": WEB, "code": CODE}, **settings})
    assert len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize(
    "weight",
    [
        *(-1, -0.1, "-1", float("nan"), float("inf"), "nan", "many", "", None, True, [1], "1e999", "1/0", "9" * 10**5),
        pytest.param(10**5000, id="too long"),
    ],
    ids=shown,
)
@pytest.mark.parametrize("key", ["weight", "max_epochs", "share"])
def test_numbers_that_are_none_are_refused(weight: Any, key: str) -> None:
    if weight is None and key != "weight":
        return
    assert problem_of(mixture={"web": {**WEB, key: weight}, "code": CODE}).startswith(f"mixture.web.{key}: ")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ({"wieght": 1}, ["mixture.web.wieght: ", "'weight'"]),
        ({"max_epoch": 1}, ["mixture.web.max_epoch: ", "'max_epochs'"]),
        ({"proportion": 1}, ["mixture.web.proportion: ", "'weight'"]),
        ({"repeat": 2}, ["mixture.web.repeat: ", "'max_epochs'"]),
        ({"path": "a"}, ["mixture.web.path: ", "'corpus'"]),
        ({"eod": 2}, ["mixture.web.eod: ", "'eos_id'"]),
        ({"seed": 2}, ["mixture.web.seed: ", "outside"]),
        ({"x" * 10**4: 2}, ["mixture.web.xxx"]),
        ({"max_epochs": 0}, ["mixture.web.max_epochs: ", "above 0", "found 0"]),
        ({"share": 0}, ["mixture.web.share: ", "above 0", "at most 1"]),
        ({"share": 1.25}, ["mixture.web.share: ", "at most 1", "1.25"]),
        ({"rows": "packed"}, ["mixture.web.rows: ", "'packed'"]),
        ({"eos_id": -1}, ["mixture.web.eos_id: ", "-1"]),
        ({"eos_id": 10**5000}, ["mixture.web.eos_id: "]),
        ({"window_documents": 0}, ["mixture.web.window_documents: "]),
        ({"corpus": []}, ["mixture.web.corpus: "]),
        ({"corpus": 5}, ["mixture.web.corpus: ", "5"]),
        ({"corpus": ["a.bin", 0.5]}, ["mixture.web.corpus: ", "0.5"]),
        ({"corpus": np.arange(3)}, ["mixture.web.corpus: ", "np.save"]),
        ({"corpus": "code/../code/a.bin"}, ["mixture: ", "'web'", "'code'", "code/a.bin"]),
        ({"corpus": str(Path.cwd() / "code/a.bin")}, ["mixture: ", "'web'", "'code'"]),
        ({"weight": "size"}, ["mixture: ", "'web'", '"size"', "'code'"]),
    ],
)
def test_a_bad_source_is_named(source: dict[str, Any], names: list[str]) -> None:
    said = problem_of(mixture={"web": {**WEB, **source}, "code": CODE})
    assert said.startswith(names[0])
    assert all(name in said for name in names)


WRONG_NAMES: list[Any] = ["", " ", 1, None, "a\nb", "a\0", "\ud800", "x" * 201]
NUMBERED: dict[Any, Any] = {**WEB, 1: 2}
WRONG_TABLES: list[Any] = [
    *("web.bin", 0.7, None, []),
    *({"corpus": "a.bin"}, {"weight": 1}, NUMBERED, {**WEB, "weight": 0}),
]
NOT_SOURCES: list[Any] = [
    *([], [0.7, "a.bin"], "web.bin", 5),
    {},
    *({"web": table} for table in WRONG_TABLES),
    *({name: WEB} for name in WRONG_NAMES),
]


@pytest.mark.parametrize("mixture", NOT_SOURCES)
def test_what_is_not_a_table_of_sources_is_refused(mixture: Any) -> None:
    assert problem_of(mixture=mixture).startswith("mixture")


def test_weights_of_zero() -> None:
    assert "'web'" in problem_of(mixture={"web": {**WEB, "weight": 0}, "code": {**CODE, "weight": 0.0}})
    assert mixed({"weight": 0}).weights == {"web": 0, "code": 3}


def test_one_synthetic_corpus_may_be_several_sources() -> None:
    sources = {name: {"corpus": "synthetic:1M", "weight": 1} for name in "ab"}
    assert list(LoaderConfig(**SHAPE, mixture=sources).sources) == ["a", "b"]


def test_a_misspelled_source_is_named_with_the_one_that_was_meant() -> None:
    mixture = {"web": {"corpus": "synthetic:1M", "weight": 1}, "wbe": {"weight": 0.5}}
    with pytest.raises(ConfigError, match=r"mixture: 'wbe' .*'web'"):
        LoaderConfig(**SHAPE, mixture=mixture)
    with pytest.raises(ConfigError, match=r"mixture\.other\.corpus: is missing"):
        LoaderConfig(**SHAPE, mixture={"web": mixture["web"], "other": {"weight": 0.5}})


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        ([{"at": 9, "weights": {"web": 1, "cod": 1}}], ["stage 0", "'cod'", "'code'"]),
        ([{"at": 9, "weights": {"web": 1, "code": 1, "zzz": 1}}], ["stage 0", "'zzz'", "'web', 'code'"]),
        ([{"at": 9, "weights": {"web": 1}}], ["stage 0", "['code']"]),
        ([{"at": 9, "weights": {}}], ["stage 0", "['web', 'code']"]),
        ([{"at": 9, "weights": {"web": 0, "code": 0}}], ["stage 0", "0"]),
        ([{"at": 9, "weights": {"web": -1, "code": 0}}], ["stages.0.weights.web: ", "-1"]),
        ([{"at": 9, "weights": {"web": float("nan"), "code": 0}}], ["stages.0.weights.web: ", "nan"]),
        ([{"at": 9, "weights": {"web": "size", "code": 0}}], ["stages.0.weights.web: ", "'size'"]),
        ([{"at": 9, "weights": {"web": 1, "code": 1}}] * 2, ["stage 1 (at = 9)"]),
        ([{"at": at, "weights": {"web": 1, "code": 1}} for at in ("2B", "1B")], ["stage 1 (at = 1,000,000,000)"]),
        ([{"at": 0, "weights": {"web": 1, "code": 1}}], ["stages.0.at: ", "0"]),
        ([{"at": -5, "weights": {"web": 1, "code": 1}}], ["stages.0.at: ", "-5"]),
        ([{"at": "soon", "weights": {"web": 1, "code": 1}}], ["stages.0.at: ", "'soon'"]),
        ([{"at": 2**63, "weights": {"web": 1, "code": 1}}], ["stages.0.at: "]),
        ([{"weights": {"web": 1, "code": 1}}], ["stages.0.at: "]),
        ([{"at": 9, "weights": 3}], ["stages.0.weights: ", "3"]),
        ([{"at": 9, "weight": {"web": 1}, "weights": {"web": 1, "code": 1}}], ["stages.0.weight: ", "weights"]),
        ({"at": 9, "weights": {"web": 1, "code": 1}}, ["stages: ", "list"]),
        ([9], ["stages.0: ", "9"]),
    ],
)
def test_a_bad_stage_is_named(stages: Any, names: list[str]) -> None:
    said = problem_of(stages=stages)
    assert said.startswith("stages")
    assert all(name in said for name in names)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"corpus": "a.bin"}, ["corpus", "a.bin", "mixture"]),
        ({"total_tokens": "300B", "total_rows": 5}, ["total_tokens = 300,000,000,000", "total_rows = 5"]),
        ({"total_rows": 6, "total_steps": 5}, ["total_rows = 6", "total_steps = 5"]),
        ({"total_tokens": 7}, ["total_tokens = 7", "seq_len = 8"]),
        ({"total_tokens": 0}, ["total_tokens: ", "0"]),
        ({"total_tokens": "1.5"}, ["total_tokens: ", "'1.5'"]),
        ({"total_rows": "9" * 10**5}, ["total_rows: "]),
        ({"total_steps": 1.5}, ["total_steps: "]),
        ({"temperature": 2}, ["temperature = 2", '"size"']),
        ({"temperature": 0}, ["temperature: ", "0"]),
        ({"proxy": "3/2"}, ["proxy: ", "'3/2'"]),
        ({"proxy": 0}, ["proxy: ", "0"]),
        ({"proxy": "a"}, ["proxy: ", "'a'"]),
        ({"on_exhausted": "repeat"}, ["on_exhausted: ", "'repeat'", "'drop'"]),
        ({"split": "validation", "validation_fraction": 0.1}, ["validation_loaders()", "mixture"]),
        ({"rows": "pad", "length_buckets": [4]}, ["length_buckets", "mixture"]),
        ({"loss_masks": ["a.loss"]}, ["loss_masks", "a.loss", "mixture"]),
        ({"rows": "pack", "stride": 4}, ["stride = 4", '"pack"']),
        ({"rows": "pad", "random_offset": True}, ["random_offset", '"pad"']),
        ({"rows": "pack", "vocab_size": 5, "pad_id": 5}, ["pad_id = 5", "vocab_size = 5"]),
        ({"rows": "pack", "label_shift": False}, ["label_shift = True"]),
        ({"mtp": 8}, ["mtp = 8"]),
    ],
)
def test_settings_that_do_not_go_with_a_mixture(settings: dict[str, Any], names: list[str]) -> None:
    said = problem_of(**settings)
    assert all(name in said for name in names)


@pytest.mark.parametrize(
    "settings",
    [
        {"total_tokens": "300B"},
        {"total_rows": 5},
        {"total_steps": 5},
        {"temperature": 2},
        {"on_exhausted": "stop"},
        {"proxy": "1/16"},
        {"stages": [{"at": 9, "weights": {"web": 1}}]},
    ],
)
def test_what_needs_a_mixture(settings: dict[str, Any]) -> None:
    assert settings.keys() <= set(MIXTURE_FIELDS)
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} = .* mixture"):
        LoaderConfig(**SHAPE, corpus="a.bin", **settings)


def test_corpus_or_mixture_is_needed() -> None:
    for settings in ({}, {"mixture": None}):
        with pytest.raises(ConfigError, match=r"^corpus: is missing$") as error:
            LoaderConfig(**SHAPE, **settings)
        assert error.value.problems == (("corpus", "is missing"),)
    with pytest.raises(ConfigError, match=r"^corpus: is missing; seq_len: is missing$"):
        LoaderConfig(batch_size=1)
    assert mixed().corpus is None
    assert mixed().replace(mixture=None, corpus="a.bin") == LoaderConfig(**SHAPE, corpus="a.bin")


def test_a_first_argument_is_a_corpus_still() -> None:
    assert LoaderConfig.of(None, {**SHAPE, "mixture": {"web": WEB, "code": CODE}}) == mixed()
    assert LoaderConfig.of(mixed(), {"seed": 5}) == mixed(seed=5)
    with pytest.raises(ConfigError, match=r"corpus .*a\.bin.* mixture"):
        LoaderConfig.of("a.bin", {**SHAPE, "mixture": {"web": WEB}})


def test_amounts_of_tokens() -> None:
    assert mixed(total_tokens="300B").total_tokens == 300 * 10**9
    assert mixed(total_rows="1_000").total_rows == 1000
    assert mixed(total_steps=5.0).total_steps == 5
    sizes = {name: {"corpus": f"{name}.bin", "weight": "size"} for name in "ab"}
    assert LoaderConfig(**SHAPE, mixture=sizes, temperature=3.3).temperature == Fraction(33, 10)
    assert LoaderConfig(**SHAPE, mixture=sizes, proxy=0.1).proxy == Fraction(1, 10)


def test_later_files_and_keywords_change_one_setting_of_one_source(tmp_path: Path) -> None:
    base, more = tmp_path / "base.toml", tmp_path / "more.yaml"
    base.write_text(mixed().to_toml())
    more.write_text(yaml.safe_dump({"mixture": {"code": {"weight": 0.5}, "books": {"corpus": "b.bin", "weight": 1}}}))
    config = LoaderConfig.from_file(base, more, mixture={"web": {"weight": 0.2, "share": 0.5}})
    assert config.weights == {"web": Fraction(1, 5), "code": Fraction(1, 2), "books": 1}
    assert config.mixture is not None
    assert config.mixture["web"].corpus == ("web.bin",)
    assert config.mixture["code"].max_epochs == Fraction(5, 2)
    assert list(config.mixture) == ["web", "code", "books"]
    assert LoaderConfig.from_file(base, mixture=None, corpus="a.bin").mixture is None


@pytest.mark.parametrize(
    ("later", "file"),
    [
        ({"mixture": {"web": {"weight": -1}}}, "more"),
        ({"mixture": {"web": {"wieght": 1}}}, "more"),
        ({"mixture": {"new": {"weight": 1}}}, "more"),
        ({"mixture": {"code": {"seed": 1}}}, "more"),
        ({"stages": [{"at": 5, "weights": {"web": 1}}]}, "more"),
        ({"corpus": "a.bin"}, "base, more"),
        ({"total_rows": 2}, "base, more"),
    ],
)
def test_an_error_names_the_file_with_the_mistake(later: dict[str, Any], file: str) -> None:
    base = {**SHAPE, "mixture": {"web": WEB, "code": CODE}, "total_tokens": "1B"}
    with pytest.raises(ConfigError) as error:
        LoaderConfig.from_sources(Source("base", base), Source("more", later))
    assert str(error.value).startswith(f"{file}: ")


def test_an_error_in_an_earlier_file_names_that_file() -> None:
    base = {**SHAPE, "mixture": {"web": {**WEB, "share": 5}, "code": CODE}}
    with pytest.raises(ConfigError, match=r"^base: mixture\.web\.share: "):
        LoaderConfig.from_sources(Source("base", base), Source("more", {"mixture": {"web": {"weight": 1}}}))


OVERRIDING: dict[str, Any] = {
    "format": "flat",
    "dtype": "uint32",
    "token_column": "ids",
    "eos_id": 3,
    "document_start_id": 4,
    "documents_end_at_files": True,
    "tokenizer": "t.json",
    "text_key": "t",
    "loss_masks": ("m.loss",),
    "keep": "keep.npy",
    "rows": "pack",
    "long_documents": "drop",
    "window_documents": 7,
    "objective": parse_objectives([{"kind": "prefix"}]),
}


def test_every_override_is_that_of_the_source_alone() -> None:
    assert OVERRIDING.keys() == {*OVERRIDES}
    assert {*SourceSettings.model_fields} - {*OVERRIDES} == {"corpus", "weight", "max_epochs", "share"}
    for name, value in OVERRIDING.items():
        sources = mixed({name: value, **({"rows": "pad"} if name == "keep" else {})}).sources
        assert getattr(sources["web"], name) == value
        if name != "eos_id":
            assert getattr(sources["code"], name) == LoaderConfig.model_fields[name].default


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
@pytest.mark.parametrize("other", ["stream", "pack", "pad"])
@pytest.mark.parametrize("settings", [{}, {"mtp": 2}, {"mask_boundaries": True}, {"mask_boundaries": False}])
def test_a_source_is_a_loader_of_its_own(rows: str, other: str, settings: dict[str, Any]) -> None:
    shared = {"seed": 5, "shuffle": False, "vocab_size": 9, "outputs": ["input_ids", "source_ids"], **settings}
    whole = mixed({"rows": rows}, **shared, rows=other, total_rows=9, skip_steps=[[1, 2]], proxy="1/2")
    alone = {
        "web": LoaderConfig(**SHAPE, **shared, corpus="web.bin", rows=rows),
        "code": LoaderConfig(**SHAPE, **shared, corpus=CODE["corpus"], eos_id=1, rows=other),
    }
    masked = any(config.masks_boundaries for config in alone.values())
    assert whole.masks_boundaries == masked
    assert whole.sources == {name: config.replace(mask_boundaries=masked) for name, config in alone.items()}
    assert whole.uses_documents == any(config.uses_documents for config in alone.values())
    assert whole.uses_pieces == any(config.uses_pieces for config in alone.values())
    assert whole.batch_names == alone["web"].batch_names


def test_stride_and_offset_are_those_of_stream_sources() -> None:
    sources = mixed({"rows": "pack"}, stride=4, random_offset=True).sources
    assert (sources["web"].stride, sources["web"].random_offset) == (None, False)
    assert (sources["code"].stride, sources["code"].random_offset) == (4, True)


def test_sources_with_the_same_settings_keep_their_data() -> None:
    table = {name: {"corpus": f"{name}.bin", "weight": 1, "loss_masks": [f"{name}.loss"]} for name in "abc"}
    sources = LoaderConfig(**SHAPE, mixture=table).sources
    assert {name: (source.corpus, source.loss_masks) for name, source in sources.items()} == {
        name: ((f"{name}.bin",), (f"{name}.loss",)) for name in "abc"
    }
    assert mixed(loss_masks=[]).sources["web"].loss_masks == ()


def test_order_settings_are_those_of_all_sources() -> None:
    plain = LoaderConfig(**SHAPE, corpus="a.bin")
    assert mixed({"rows": "pack"}, total_rows=5).order_settings() == plain.order_settings()
    assert not {*mixed(rows="pack").order_settings()} & {*DOCUMENT_ORDER_FIELDS}
    assert mixed().sources["code"].order_settings() == plain.order_settings()
    assert {*plain.order_settings()} == {*ORDER_FIELDS}


def test_random_offset_is_in_the_order_only_where_it_is_set() -> None:
    config = LoaderConfig(**SHAPE, corpus="a.bin", random_offset=True)
    assert config.order_settings() == {**config.replace(random_offset=False).order_settings(), "random_offset": True}
    for settings in ({"rows": "pack"}, {"split": "validation", "validation_fraction": 0.1}):
        with pytest.raises(ConfigError, match="random_offset"):
            config.replace(**settings)


def test_source_ids_are_an_output_with_and_without_a_mixture() -> None:
    assert OUTPUTS["source_ids"].axes is Axes.ROWS
    assert mixed(outputs=["input_ids", "source_ids"]).outputs == ("input_ids", "source_ids")
    assert not LoaderConfig(**SHAPE, corpus="a.bin", outputs=["source_ids"]).uses_pieces


def test_a_configuration_may_be_resumed_with_another_mixture() -> None:
    assert mixed(on_change="mixture").on_change == "mixture"
