import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.config import ORDER_FIELDS, LoaderConfig
from dali_pipes.errors import ConfigError
from dali_pipes.other_loaders import FOREIGN_NAMES, NO_SETTING, NOT_NEEDED, unknown_setting

SETTINGS = {"corpus": ["a.bin", "b.bin"], "batch_size": 4, "seq_len": 8, "dtype": "uint32", "seed": 3}


def test_toml_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    expected = LoaderConfig(**SETTINGS)
    (tmp_path / "c.toml").write_text(expected.to_toml())
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "c.yml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "c.json").write_text(json.dumps(SETTINGS))
    for name in ("c.toml", "c.yaml", "c.yml", "c.json"):
        assert LoaderConfig.from_file(tmp_path / name) == expected


def test_keywords_replace_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(SETTINGS))
    config = LoaderConfig.from_file(tmp_path / "c.json", batch_size=16, seed=9)
    assert (config.batch_size, config.seed, config.seq_len) == (16, 9, 8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.toml", "batch_size = ", "not valid TOML"),
        ("c.json", "{", "not valid JSON"),
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.yaml", "- 1", "expected a table"),
        ("c.ini", "a=1", "unknown suffix '.ini'"),
        ("c.toml", "batch_sise = 3", "did you mean 'batch_size'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        LoaderConfig.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read"):
        LoaderConfig.from_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sze": 1}, "unknown setting 'batch_sze'; did you mean 'batch_size'"),
        ({"xyzzy": 1}, "known settings: corpus, format"),
        ({"num_workers": 1}, "did you mean 'num_threads'"),
        ({"prefetch_factor": 1}, "did you mean 'prefetch_queue_depth'"),
        ({"pin_memory": True}, "not needed"),
        ({"bos_id": 1}, r"did you mean 'document_start_id'\? \(the id, a number, that begins a document"),
        ({"shuffle_seed": 1}, "did you mean 'seed'"),
        ({"max-length": 1}, "unknown setting 'max-length'; did you mean 'seq_len'"),
        ({"packing": True}, r"did you mean 'rows'\? \(rows = \"pack\" lays"),
        ({"global_batch_size": 512}, "'global_batch_size': batch_size counts rows of one rank in one step: divide"),
        ({"tokens_per_batch": 512}, "batch_size counts rows .* and a number of tokens by seq_len"),
        ({"blend": "a"}, "'blend': only paths can be named, each once: mixtures"),
        ({"val_data_path": "a"}, "a loader of its own, with shuffle = false and drop_last = false"),
        ({"seq_len": 0}, "seq_len: .*found 0"),
        ({"batch_size": "many"}, "batch_size: .*found 'many'"),
        ({"corpus": []}, "corpus"),
        ({"corpus": [0.7, "a.bin"]}, r"corpus: 0\.7 is no path: only paths .* mixtures of sources by weight are not"),
        ({"corpus": [["a.bin", 1]]}, r"corpus: \['a\.bin', 1\] is no path: only paths .* mixtures of sources"),
        ({"corpus": {"a.bin": 0.7}}, r"corpus: \('a\.bin', 0\.7\) is no path: only paths .* mixtures of sources"),
        ({"loss_masks": [1, "a.loss"]}, "loss_masks: 1 is no path"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not below world_size 2"),
        ({"split": "validation"}, r"needs a validation_fraction.* val\.bin, .* shuffle = False and drop_last = False"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"outputs": []}, "outputs"),
        ({"outputs": ["input_ids", "input_ids"]}, "different names"),
        ({"outputs": ["token_type_ids"]}, "'token_type_ids' is not made by this version"),
        ({"rows": "pack", "stride": 4}, "have no stride"),
        ({"rows": "pack", "label_shift": False}, "need shifted labels"),
        ({"mtp": 2, "label_shift": False}, "need shifted labels"),
        ({"rows": "packed"}, "rows"),
        ({"long_documents": "cut"}, "long_documents"),
        ({"device": "tpu"}, "device"),
        ({"device": "cpu", "placement": "device"}, "needs device"),
        ({"py_num_workers": 2}, "leave it at 0"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(**{**SETTINGS, **change})


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="batch_size: is missing; seq_len: is missing"):
        LoaderConfig(corpus="a")


def test_names_of_other_loaders_lead_to_real_settings() -> None:
    assert set(FOREIGN_NAMES.values()) <= set(LoaderConfig.model_fields)
    names = [*FOREIGN_NAMES, *NOT_NEEDED, *NO_SETTING]
    assert len(set(names)) == len(names), "a name has two answers"
    assert not set(names) & set(LoaderConfig.model_fields)
    for name, ours in FOREIGN_NAMES.items():
        assert f"did you mean {ours!r}?" in unknown_setting(name, LoaderConfig.model_fields)


@given(data=st.data())
def test_one_slip_of_the_finger_is_understood(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in LoaderConfig.model_fields if len(name) > 5]))
    at, letter = data.draw(st.integers(0, len(name) - 2)), data.draw(st.sampled_from("aekx_"))
    slips = (
        name[:at] + name[at + 1 :],
        name[:at] + letter + name[at:],
        name[:at] + letter + name[at + 1 :],
        name[:at] + name[at + 1] + name[at] + name[at + 2 :],
    )
    for slip in set(slips) - {*LoaderConfig.model_fields, *FOREIGN_NAMES, *NOT_NEEDED, *NO_SETTING}:
        assert f"did you mean {name!r}?" in unknown_setting(slip, LoaderConfig.model_fields)


@pytest.mark.parametrize(
    "name",
    [
        "xyzzy",
        "length",
        "batch",
        "size",
        "steps",
        "data_length",
        "eos_string",
        "shuffled_steps",
        "num_batches",
        "step_len",
        "prefix",
        "row_size",
    ],
)
def test_what_is_not_close_to_any_setting_is_not_taken_for_one(name: str) -> None:
    assert f"unknown setting {name!r}; known settings: corpus, " in unknown_setting(name, LoaderConfig.model_fields)


def test_paths_and_dtypes_may_be_objects(tmp_path: Path) -> None:
    for dtype in (np.uint32, np.dtype("uint32"), "uint32"):
        config = LoaderConfig(corpus=tmp_path / "a.bin", batch_size=1, seq_len=1, dtype=dtype)
        assert (config.corpus, config.dtype) == ((str(tmp_path / "a.bin"),), "uint32")


def test_order_settings_resolve_the_default_stride() -> None:
    config = LoaderConfig(**SETTINGS)
    assert config.order_settings() == config.replace(stride=8).order_settings()
    assert set(config.order_settings()) == set(ORDER_FIELDS)


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        LoaderConfig(**SETTINGS).replace(batch_size=-1)


@pytest.mark.parametrize("rows", ["pack", "pad"])
def test_padding_is_an_id_that_the_model_knows(rows: str) -> None:
    settings = {"corpus": "a.bin", "batch_size": 1, "seq_len": 8, "eos_id": 0, "vocab_size": 100, "rows": rows}
    LoaderConfig(**settings, pad_id=99)
    with pytest.raises(ConfigError, match="pad_id = 100 is not below vocab_size = 100"):
        LoaderConfig(**settings, pad_id=100)
