import copy
import itertools
import json
import pickle
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dali_pipes import TokenLoader, build_pipeline
from dali_pipes.config import ORDER_FIELDS, LoaderConfig
from dali_pipes.config.aliases import (
    ALIASES,
    ELSEWHERE,
    NOT_NEEDED,
    NOT_SUPPORTED,
    REMOVED,
    alias_rows,
    unknown_setting,
)
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.ranks import ranks_on_mesh


class Endless:
    """Items without end, as a map-style data set that counts on its length being asked for has them."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        assert index < 10**5, "it is iterated"
        return index


SETTINGS: dict[str, Any] = {"corpus": ["a.bin", "b.bin"], "batch_size": 4, "seq_len": 8, "dtype": "uint32", "seed": 3}


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
    ("name", "most"), [("num_threads", 256), ("prefetch_queue_depth", 64), ("batches_per_run", 2**60)]
)
def test_a_number_or_auto(tmp_path: Path, name: str, most: int) -> None:
    """Also from files and, for numbers, as text; None stands for "auto"."""
    shape = {"corpus": "x", "batch_size": 2, "seq_len": 8}
    default = LoaderConfig(**shape)
    assert getattr(default, name) == "auto"
    assert LoaderConfig(**shape, **{name: None}) == LoaderConfig(**shape, **{name: "auto"}) == default
    assert "auto" not in repr(default)
    for asked, value in ((1, 1), (most, most), ("7", 7), ("auto", "auto"), (None, "auto")):
        config = LoaderConfig(**shape, **{name: asked})
        assert getattr(config, name) == value
        (tmp_path / "all.toml").write_text(config.to_toml())
        assert LoaderConfig.from_file(tmp_path / "all.toml") == config.replace() == config
        assert hash(config) == hash(config.replace(seed=0))
    for wrong in (0, -1, "0", "fast", "AUTO", "", 2.5, [1], 2**64):
        with pytest.raises(ConfigError, match=rf"^{name}: ") as error:
            LoaderConfig(**shape, **{name: wrong})
        assert len(str(error.value)) < 120
        assert '"auto"' in str(error.value) or not isinstance(wrong, str) or wrong == "0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sze": 1}, "unknown setting 'batch_sze'; did you mean 'batch_size'"),
        ({"xyzzy": 1}, "unknown setting 'xyzzy'; see \"Configuration\" in the manual"),
        ({"num_workers": 1}, "did you mean 'num_threads'"),
        ({"prefetch_factor": 1}, "did you mean 'prefetch_queue_depth'"),
        ({"pin_memory": True}, "not needed"),
        ({"bos_id": 1}, r"did you mean 'document_start_id'\? \(.* a number"),
        ({"shuffle_seed": 1}, "did you mean 'seed'"),
        ({"max-length": 1}, "unknown setting 'max-length'; did you mean 'seq_len'"),
        ({"packing": True}, r"did you mean 'rows'\? \(.*\"pack\""),
        ({"global_batch_size": 512}, "'global_batch_size': .*batch_size.* divide"),
        ({"tokens_per_batch": 512}, "batch_size.* divide .* by seq_len"),
        ({"blend": "a"}, "'blend'; did you mean 'mixture'"),
        ({"weights": "a"}, "'weights'; did you mean 'mixture'"),
        ({"probabilities": [0.7, 0.3]}, "'probabilities'; did you mean 'mixture'"),
        ({"streams": []}, "'streams'; did you mean 'mixture'"),
        ({"data_path": [0.7, "a.bin"]}, "'data_path'; did you mean 'corpus'.* with weights, use mixture"),
        ({"stopping_strategy": "all_exhausted"}, "did you mean 'on_exhausted'"),
        ({"train_samples": 1}, "did you mean 'total_rows'"),
        ({"curriculum": "a"}, "did you mean 'stages'"),
        ({"random_crop": True}, "did you mean 'random_offset'"),
        ({"corpus": {"web": {"corpus": "a.bin", "weight": 1}}}, "corpus: .* mixture = "),
        ({"val_data_path": "a"}, "'val_data_path': .* shuffle = false and drop_last = false"),
        ({"seq_len": 0}, "seq_len: .*found 0"),
        ({"batch_size": "many"}, "batch_size: .*found 'many'"),
        ({"corpus": []}, "corpus"),
        (
            {"corpus": [0.7, "a.bin"]},
            r"corpus: 0\.7 is not a path: .* mixture = ",
        ),
        ({"corpus": [["a.bin", 1]]}, r"corpus: \['a\.bin', 1\] is not a path: .* mixture = "),
        (
            {"corpus": {"a.bin": 0.7}},
            r"corpus: \('a\.bin', 0\.7\) is not a path: .* mixture = ",
        ),
        ({"loss_masks": [1, "a.loss"]}, "loss_masks: 1 is not a path"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed: expected a number of at most 64 bits, found 18446744073709551616"),
        ({"corpus": 2**64}, "^corpus: expected a number of at most 64 bits, found 18446744073709551616$"),
        ({"rank": 1}, "rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank = 2 must be below world_size = 2"),
        ({"split": "validation"}, r"validation_fraction .* val\.bin, .* shuffle = False and drop_last = False"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"outputs": []}, "outputs"),
        ({"outputs": ["input_ids", "input_ids"]}, r"outputs = \['input_ids', 'input_ids'\]"),
        ({"outputs": ["token_type_ids"]}, "'token_type_ids' is not one of them"),
        ({"rows": "pack", "stride": 4}, 'stride = 4 .* rows = "pack"'),
        ({"rows": "pack", "label_shift": False}, "label_shift = True"),
        ({"mtp": 2, "label_shift": False}, "label_shift = True"),
        ({"rows": "packed"}, "rows"),
        ({"long_documents": "cut"}, "long_documents"),
        (
            {"device": "tpu"},
            "device: 'tpu' is a TPU, .* CPU .* NVIDIA",
        ),
        ({"device": "mps:0"}, r"'mps:0' is an Apple GPU, .* device = \"cpu\""),
        ({"device": "xpu"}, "an Intel GPU"),
        ({"device": torch.device("mps")}, "an Apple GPU"),
        ({"device": 1}, 'device: 1 .* device = "cuda:1"'),
        ({"device": 2**64}, "device: 18446744073709551616 is not a device name"),
        ({"mixture": 2**64}, "mixture: expected a table of sources"),
        ({"device": "gpu"}, '"auto", "cpu", "cuda" .* "cuda:1"; found \'gpu\''),
        ({"device": "cuda:-1"}, "found 'cuda:-1'"),
        ({"device": None}, "found None"),
        (
            {"mtp": 8},
            "mtp = 8 .* seq_len = 8 tokens",
        ),
        ({"mtp": 9}, "mtp = 9"),
        ({"outputs": itertools.repeat("input_ids")}, "outputs: expected a list, found a repeat"),
        ({"length_buckets": Endless(), "rows": "pad"}, "length_buckets: expected a list, found a Endless"),
        ({"device": "cpu", "placement": "device"}, 'device = "cuda"'),
        ({"py_num_workers": 0}, "py_num_workers was removed: .* delete it"),
        ({"skip_steps": 2**64}, "skip_steps: expected a list of ranges"),
        ({"skip_steps": [3, 6]}, r"skip_steps: .* write \[\[3, 6\]\]"),
        ({"sequence_lenght": 8}, r"unknown setting 'sequence_lenght'; did you mean 'seq_len'"),
        ({"skip_step_rows": 8}, r"skip_step_rows was removed: .* skip_steps = \[\{rows = \[32, 48\]\}\]"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(**{**SETTINGS, **change})


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="batch_size: is missing; seq_len: is missing"):
        LoaderConfig(corpus="a")


NAMES = [name for alias in ALIASES for name in alias.names]


def test_names_of_other_loaders_lead_to_real_settings() -> None:
    settings = {alias.here for alias in ALIASES} - {ELSEWHERE, NOT_NEEDED, NOT_SUPPORTED, REMOVED}
    assert settings <= set(LoaderConfig.model_fields)
    assert len(set(NAMES)) == len(NAMES), "a name has two answers"
    assert not set(NAMES) & set(LoaderConfig.model_fields)
    for alias in ALIASES:
        for name in alias.names:
            answer = unknown_setting(name, LoaderConfig.model_fields)
            assert alias.note in answer
            assert (f"did you mean {alias.here!r}?" in answer) == (alias.here in settings)


def test_the_table_of_the_manual_has_the_names_of_other_loaders() -> None:
    rows = alias_rows()
    assert ("`infinite`, `loop`", "`repeat`", "Iterates over epochs endlessly, each in a new order") in rows
    listed = {name for names, _, _ in rows for name in names.replace("`", "").split(", ")}
    assert listed == {name for alias in ALIASES for name in alias.names if alias.here != REMOVED}
    assert not any("|" in cell or "\n" in cell for row in rows for cell in row)


def test_a_configuration_that_an_earlier_release_saved_loads(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(LoaderConfig(**SETTINGS).to_toml() + "py_num_workers = 0\n")
    assert LoaderConfig.from_file(tmp_path / "c.toml") == LoaderConfig(**SETTINGS)
    (tmp_path / "c.toml").write_text(LoaderConfig(**SETTINGS).to_toml() + "py_num_workers = 2\n")
    with pytest.raises(ConfigError, match=r"c\.toml: py_num_workers was removed"):
        LoaderConfig.from_file(tmp_path / "c.toml")


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
    for slip in set(slips) - {*LoaderConfig.model_fields, *NAMES}:
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
    assert unknown_setting(name, LoaderConfig.model_fields).startswith(f"unknown setting {name!r}; see")


MEANT = {
    "transform": "change batches in the training loop",
    "augment": "change batches in the training loop",
    "replacement": "repeat = true",
    "sampler": "use shuffle, seed, drop_last and load_state_dict",
    "collate_fn": "listed in outputs",
    "worker_init_fn": "there are no worker processes",
    "max_epochs": "in a source of mixture",
    "num_epochs": "each `for` over the loader is one epoch",
    "mesh": "TokenLoader(config, mesh=...)",
}


@pytest.mark.parametrize("name", MEANT)
def test_what_does_not_exist_but_has_a_meaning(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(**{**SETTINGS, name: 1})
    assert MEANT[name] in str(error.value)
    assert "did you mean" not in str(error.value)


def steps_between(one: str, other: str) -> int:
    """Letters to put in, take out or replace, by the plain recursion, row by row."""
    before = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        now = [number]
        for at, also in enumerate(other, 1):
            now.append(min(before[at] + 1, now[-1] + 1, before[at - 1] + (letter != also)))
        before = now
    return before[-1]


LETTERS = st.text("abcdefghijklmnopqrstuvwxyz_", max_size=30)
KNOWN = st.sampled_from([*LoaderConfig.model_fields, *NAMES])


@given(st.text() | LETTERS | st.builds("{}{}".format, KNOWN, LETTERS) | st.builds(str.__add__, LETTERS, KNOWN))
@example("x" * 100_000)
@example("batch_size" * 1000)
@example("")
def test_any_other_name_gets_a_short_answer_and_a_suggestion_only_if_close(name: str) -> None:
    answer = unknown_setting(name, LoaderConfig.model_fields)
    assert len(answer) < 360
    assert "known settings" not in answer
    usual = name.lower().replace("-", "_")
    near = re.search(r"did you mean '(\w+)'\?$", answer)
    if near is None:
        return
    assert near[1] in LoaderConfig.model_fields
    assert steps_between(usual, near[1]) <= 0.18 * (len(usual) + len(near[1]))


@pytest.mark.parametrize("name", [1, None, 2.5, ("a", "b")])
def test_a_name_in_a_file_need_not_be_text(name: object) -> None:
    assert unknown_setting(name, LoaderConfig.model_fields).startswith(f"unknown setting {name!r}; ")


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
    with pytest.raises(ConfigError, match=r"pad_id = 100 .* vocab_size = 100"):
        LoaderConfig(**settings, pad_id=100)


class Saves(Endless):
    def save_to_disk(self, path: str) -> None:
        raise AssertionError


def named(module: str, **attributes: object) -> Any:
    """Something of a library that is not imported for it."""
    return type("Table", (), {"__module__": module, **attributes})()


def mapped(folder: Path) -> Any:
    np.arange(9, dtype=np.uint16).tofile(folder / "train.bin")
    return np.memmap(folder / "train.bin", np.uint16)


IN_MEMORY: dict[str, tuple[Any, str]] = {
    "map-style data set": (Endless(), r"\(Endless\)"),
    "torch data set": (torch.utils.data.TensorDataset(torch.arange(3)), r"\(TensorDataset\)"),
    "data set of Hugging Face": (Saves(), r'data\.save_to_disk\("tokens"\), and pass that file: corpus = "tokens"$'),
    "array": (np.arange(5), r'np\.save\("tokens\.npy", data\), and pass that file: corpus = "tokens\.npy"$'),
    "tensor": (torch.arange(5), r'np\.save\("tokens\.npy", data\.cpu\(\)\.numpy\(\)\)'),
    "list of arrays": ([np.arange(5), np.arange(6)], r"write_table\(pyarrow\.table\(\{\"input_ids\": documents\}\)"),
    "list of lists": ([[1, 2], [3]], r"\{\"input_ids\": documents\}"),
    "list of ids": ([1, 2, 3], r'np\.save\("tokens\.npy", ids\)'),
    "list of NumPy's ids": (list(np.arange(3)), r'np\.save\("tokens\.npy", ids\)'),
    "list of records": ([{"input_ids": [1]}], r"from_pylist\(records\)"),
    "dict of columns": ({"input_ids": [[1, 2]]}, r"pyarrow\.table\(data\)"),
    "pandas": (named("pandas.core", to_parquet=print), r"data\.to_parquet\(\"tokens\.parquet\"\)"),
    "polars": (named("polars.frame", write_parquet=print), r"data\.write_parquet"),
    "pyarrow": (named("pyarrow.lib"), r"write_table\(data, "),
    "bytes": (b"abc", r"write_bytes\(data\)"),
    "generator": ((path for path in ["a.bin"]), "a generator can be read only once: pass a list"),
    "endless": (itertools.repeat("a.bin"), "a repeat can be read only once: pass a list"),
    "glob": (Path().glob("*"), "can be read only once: pass a list, "),
    "set": ({"a.bin"}, "a set .* sorted"),
    "deque": (deque(["a.bin"]), "expected a list of paths, found a deque: pass list"),
    "array of paths": (np.array(["a.bin"]), "expected a list of paths, found a ndarray: pass list"),
    "dict of paths": ({"train": "a.bin"}, r"a dict of splits.* corpus = \.\.\.\['train'\]"),
    "number": (5, "expected a path or a list of paths, found 5"),
    "nothing": (None, "expected a path or a list of paths$"),
    "a path of bytes among others": (["a.bin", b"b.bin"], r"b'b\.bin' is not a path"),
}


@pytest.mark.parametrize("kind", IN_MEMORY)
@pytest.mark.parametrize("place", ["first", "corpus"])
def test_data_in_memory_is_refused_with_what_to_do(kind: str, place: str) -> None:
    """At once: nothing of it is looked at, so one without end does no harm."""
    value, message = IN_MEMORY[kind]
    if place == "first" and value is None:
        message = "corpus: is missing"
    given: dict[str, Any] = {"config" if place == "first" else "corpus": value}
    with pytest.raises(ConfigError, match=message) as error:
        TokenLoader(**given, **SHAPE)
    assert len(str(error.value)) < 300
    assert str(error.value).startswith("corpus: ")


def test_the_file_of_a_mapped_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'this array is a memory map of .*train\.bin: pass the file instead, .*, dtype = "uint16"'
    ):
        LoaderConfig(corpus=mapped(tmp_path), **SHAPE)


@pytest.mark.parametrize("advice", ["npy", "parquet", "bin"])
def test_the_advice_gives_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: str) -> None:
    """The code in the messages is run."""
    import pathlib

    import pyarrow
    import pyarrow.parquet

    documents = [np.arange(20), np.arange(20, 37)]
    data: Any = {"npy": np.concatenate(documents), "parquet": documents, "bin": np.concatenate(documents)}[advice]
    if advice == "bin":
        data = data.astype(np.uint16).tobytes()
    with pytest.raises(ConfigError) as error:
        TokenLoader(data, **SHAPE)
    found = re.search(r"with (.*), and pass that file: corpus = \"(.*)\"$", str(error.value))
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(found[1], {"np": np, "pyarrow": pyarrow, "pathlib": pathlib, "data": data, "documents": data})
    with TokenLoader(found[2], **SHAPE, shuffle=False, quiet=True) as loader:
        assert next(iter(loader))["input_ids"].flatten().tolist() == list(range(32))


SHAPE: dict[str, Any] = {"batch_size": 4, "seq_len": 8}


@pytest.mark.parametrize("kind", ["text", "Path", "list", "tuple", "config", "config and keywords", "keywords alone"])
def test_what_may_come_first(tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / "b.bin", tmp_path / "a.bin"]
    for number, path in enumerate(paths):
        np.arange(100 * number, 100 * number + 50, dtype=np.uint16).tofile(path)
    first: Any = {
        "text": str(paths[0]),
        "Path": paths[0],
        "list": paths,
        "tuple": (str(paths[0]), paths[1]),
        "config": LoaderConfig(corpus=paths, **SHAPE),
        "config and keywords": LoaderConfig(corpus=paths, batch_size=9, seq_len=8),
        "keywords alone": None,
    }[kind]
    settings = {} if kind == "config" else {"batch_size": 4} if kind == "config and keywords" else dict(SHAPE)
    if kind == "keywords alone":
        settings["corpus"] = paths
    expected = LoaderConfig(corpus=paths[:1] if kind in ("text", "Path") else paths, **SHAPE)
    assert expected.corpus is not None
    assert LoaderConfig.of(first, settings) == expected
    with TokenLoader(*[] if first is None else [first], **settings, quiet=True) as loader:
        assert loader.config == expected.replace(quiet=True, rank=0, world_size=1)
        assert loader.corpus.files == tuple(Path(path) for path in expected.corpus or ())
    pipe = build_pipeline(*[] if first is None else [first], **settings)
    assert pipe._block_source.rows.corpus.files == tuple(Path(path) for path in expected.corpus or ())


@pytest.mark.parametrize("make", [TokenLoader, build_pipeline])
def test_what_may_not_come_first(make: Any) -> None:
    for wrong, message in (
        (
            {"first": "a.bin", "corpus": "b.bin"},
            "twice: .* as corpus=",
        ),
        ({"first": {"corpus": "a.bin", "batch_size": 1}}, r"pass settings as keywords: TokenLoader\(\*\*settings\)"),
        ({"first": Path("run.toml")}, r"run\.toml .*LoaderConfig\.from_file\('run\.toml'\)"),
        ({"first": "a.bin", "batch_sise": 1}, "did you mean 'batch_size'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(wrong["first"], **{**SHAPE, **{name: value for name, value in wrong.items() if name != "first"}})


def test_a_configuration_does_not_change() -> None:
    config = LoaderConfig(**SETTINGS)
    with pytest.raises(ConfigError, match=r"create a new one with config\.replace\(batch_size=32\)"):
        config.batch_size = 32  # type: ignore[misc]
    with pytest.raises(ConfigError, match="unknown setting 'batch_sise'; did you mean 'batch_size'"):
        config.batch_sise = 32
    assert config == LoaderConfig(**SETTINGS)
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.replace()):
        assert same == config
        assert hash(same) == hash(config)


def test_a_configuration_shows_what_was_chosen() -> None:
    config = LoaderConfig(corpus=Path("data/*.bin"), batch_size=4, seq_len=8, seed=3)
    assert repr(config) == str(config) == "LoaderConfig(corpus='data/*.bin', batch_size=4, seq_len=8, seed=3)"
    assert eval(repr(config)) == config
    many = config.replace(corpus=[f"{number}.bin" for number in range(100_000)], skip_steps=[[1, 2]] * 1000)
    assert len(repr(many)) < 300


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", torch.device("cpu"), torch.device("cuda", 2)])
def test_a_device_may_be_torchs(device: Any) -> None:
    assert LoaderConfig(**SETTINGS, device=device).device == str(device)


JAX_MESH = named("jax._src.mesh", axis_names=("data",), devices=np.arange(4))


@pytest.mark.parametrize("mesh", [JAX_MESH, "dp", (2, 4), 8, SimpleNamespace(mesh_dim_names=("dp",))])
def test_other_meshes_are_refused(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="DeviceMesh") as error:
        TokenLoader("a.bin", **SHAPE, mesh=mesh)
    assert ("dali_pipes.adapters.jax.jax_batches" in str(error.value)) == (mesh is JAX_MESH)
    with pytest.raises(ConfigError, match="data_dims = 0: expected the name of a mesh dimension"):
        ranks_on_mesh(LoaderConfig(**SETTINGS), Mesh(), 0, None)  # type: ignore[arg-type]


class Mesh:
    mesh_dim_names = ("dp",)
    get_local_rank = size = __getitem__ = None


class Fails:
    """Raises on being looked at: as a path, in its attributes, as text."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __fspath__(self) -> str:
        raise OSError("gone")


class ClosedTable(dict[str, str]):
    def items(self) -> Any:
        raise RuntimeError("the file is closed")


class Long:
    def __repr__(self) -> str:
        return "long " * 10**5


ODD_VALUES: list[Any] = [
    *(10**5000, -(2**3000), 2**64, float("nan"), "a" * 10**5, b"\xff" * 10**4, "a\nb" * 10**4, "\ud800", "\0"),
    *(np.uint16, np.array(["a"]), np.array([object()]), np.float32(3), torch.zeros(2), torch.int32, int, print, ...),
    *([["a" * 10**4] * 100] * 100, [Long()] * 10**3, Long(), Endless(), [Endless()], {"a": Endless()}, range(10**12)),
    *(Fails(), [Fails()], {"a": Fails()}, ClosedTable(a="b"), itertools.count(), iter("ab"), {}.keys(), object()),
]


@pytest.mark.parametrize(
    "name", [*LoaderConfig.model_fields, "n_workers", "no_such_setting", "x" * 10**4, "a\nb", "\ud800"]
)
def test_any_value_of_any_setting_is_taken_or_refused_in_a_few_words(name: str) -> None:
    for value in ODD_VALUES:
        for settings in ({**SETTINGS, name: value}, {"corpus": value}):
            assert len(refusal(**settings)) < 1000


def refusal(**settings: Any) -> str:
    """What is said to settings, empty where they are taken; any other error ends the test."""
    try:
        LoaderConfig(**settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_entries_of_a_list_that_are_wrong_alike_are_said_once() -> None:
    with pytest.raises(ConfigError, match=r"^length_buckets\.1: [^;]*$"):
        LoaderConfig(**SETTINGS, length_buckets=[2, "a", "b", *"c" * 100])
