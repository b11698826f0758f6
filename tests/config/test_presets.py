"""The presets in configs/: each loads, combines, and gives a reason for every line."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import CountingCorpus
from oracle import epoch_batches, same

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.settings_files import presets
from dali_pipes.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ["cpu_test", "gpt2_124m", "llama3_8b"]
MIXTURES = ["mixture_web_code_math"]
MACHINES = [
    "a100",
    "dual_socket_server",
    "h100",
    "laptop_cpu",
    "memory_constrained",
    "two_24gb_gpus",
    "workstation",
]
ALL = MODELS + MIXTURES + MACHINES
MACHINE_SETTINGS = {
    "device",
    "placement",
    "num_threads",
    "prefetch_queue_depth",
    "batches_per_run",
    "max_block_bytes",
}
SHORTEST_REASON = 20


def preset(name: str) -> Path:
    return CONFIGS / f"{name}.toml"


def settings_of(name: str) -> dict[str, Any]:
    return tomllib.loads(preset(name).read_text(encoding="utf-8"))


def test_every_preset_is_tested() -> None:
    assert sorted(path.name for path in CONFIGS.glob("*.toml")) == sorted(f"{name}.toml" for name in ALL)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_preset_loads_by_itself(model: str) -> None:
    config = LoaderConfig.from_file(preset(model))
    assert {name: getattr(config, name) for name in settings_of(model) if name != "corpus"} == {
        name: value for name, value in settings_of(model).items() if name != "corpus"
    }
    assert config.vocab_size is not None
    assert config.dtype is not None
    assert config.vocab_size - 1 <= np.iinfo(config.dtype).max, "the largest id must fit the file's type"
    assert config.eos_id is None or config.eos_id < config.vocab_size


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_machine_preset_goes_on_top_of_a_mixture(mixture: str, machine: str) -> None:
    given = settings_of(mixture)
    config = LoaderConfig.from_file(preset(mixture), preset(machine), mixture={"web": {"corpus": "elsewhere/*.bin"}})
    assert config.mixture is not None
    assert config.mixture["web"].corpus == ("elsewhere/*.bin",)
    assert {name: float(weight) for name, weight in config.weights.items()} == {
        name: table["weight"] for name, table in given["mixture"].items()
    }
    assert [set(stage.weights) for stage in config.stages] == [set(given["mixture"])] * len(given["stages"])
    assert config.vocab_size is not None
    assert config.dtype is not None
    assert config.vocab_size - 1 <= np.iinfo(config.dtype).max, "the largest id must fit the file's type"
    assert {name: getattr(config, name) for name in settings_of(machine)} == settings_of(machine)


def test_a_loader_runs_from_the_mixture_preset() -> None:
    """At a thousandth of its length: by the end, each source has had its share of both parts of the run."""
    config = LoaderConfig.from_preset(
        "mixture_web_code_math",
        mixture={
            "web": {"corpus": "synthetic:7M"},
            "code": {"corpus": "synthetic:2M"},
            "math": {"corpus": "synthetic:1M"},
        },
        total_tokens=10_000_000,
        stages=[{"at": 8_000_000, "weights": {"web": 0.4, "code": 0.3, "math": 0.3}}],
        device="cpu",
    )
    with TokenLoader(config) as loader:
        uses = {use.name: use for use in loader.mixture_report(len(loader)).sources}
        assert next(iter(loader))["input_ids"].shape == (16, 1024)
        rows = len(loader) * 16
    late = rows * 0.2
    expected = {"web": 0.7 * rows - 0.3 * late, "code": 0.2 * rows + 0.1 * late, "math": 0.1 * rows + 0.2 * late}
    assert {name: use.rows for name, use in uses.items()} == pytest.approx(expected, abs=64)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_machine_preset_goes_on_top_of_a_model(model: str, machine: str) -> None:
    config = LoaderConfig.from_file(preset(model), preset(machine), corpus="elsewhere/*.bin", batch_size=3)
    expected = {**settings_of(model), **settings_of(machine), "corpus": ("elsewhere/*.bin",), "batch_size": 3}
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_preset_changes_cost_and_never_the_batches(machine: str) -> None:
    """So one saved state fits every machine, and the choice of a preset needs no thought about the data."""
    assert set(settings_of(machine)) <= MACHINE_SETTINGS
    model = LoaderConfig.from_file(preset("gpt2_124m"))
    assert LoaderConfig.from_file(preset("gpt2_124m"), preset(machine)).order_settings() == model.order_settings()


@pytest.mark.parametrize("name", ALL)
def test_every_setting_has_its_reason(name: str) -> None:
    """On the line, or in a comment right above it."""
    above = ""
    seen = 0
    for number, line in enumerate(preset(name).read_text(encoding="utf-8").splitlines(), start=1):
        assert len(line) <= 120
        if line.startswith("#"):
            above += line.lstrip("# ")
            continue
        if line.strip():
            seen += 1
            _, _, beside = line.partition("  # ")
            assert len(above + beside) >= SHORTEST_REASON, f"{name}.toml:{number} gives no reason: {line}"
        above = ""
    settings = settings_of(name)
    tables = [*settings.pop("mixture", {}).values(), *settings.pop("stages", [])]
    assert seen == len(settings) + sum(1 + len(table) for table in tables)


def test_a_loader_runs_from_the_test_preset(counting: Callable[..., CountingCorpus]) -> None:
    corpus = counting(700, 500, dtype="uint16", vocab_size=256)
    with TokenLoader(LoaderConfig.from_file(preset("cpu_test"), corpus=corpus.pattern)) as loader:
        batches = list(loader)
        assert str(loader.device) == "cpu"
    expected = list(epoch_batches(corpus.tokens, batch_size=4, seq_len=24))
    assert len(batches) == len(expected) == 12
    assert all(same(batch, truth) for batch, truth in zip(batches, expected, strict=True))


@pytest.mark.parametrize("machine", ["memory_constrained", "laptop_cpu"])
def test_a_loader_runs_from_the_machine_presets_that_need_no_gpu(
    machine: str, counting: Callable[..., CountingCorpus]
) -> None:
    corpus = counting(40_000, dtype="uint16", vocab_size=50_257)
    config = LoaderConfig.from_file(preset("gpt2_124m"), preset(machine), corpus=corpus.pattern, device="cpu")
    with TokenLoader(config) as loader:
        batches = list(loader)
    expected = list(epoch_batches(corpus.tokens, batch_size=16, seq_len=1024))
    assert len(batches) == len(expected) == 2
    assert all(same(batch, truth) for batch, truth in zip(batches, expected, strict=True))


@pytest.mark.parametrize("machine", MACHINES)
def test_presets_are_found_by_name(machine: str) -> None:
    corpus = ["a.bin", "b.bin"]
    by_name = LoaderConfig.from_preset("gpt2_124m", machine, corpus=corpus, seed=5)
    assert by_name == LoaderConfig.from_file(preset("gpt2_124m"), preset(machine), corpus=corpus, seed=5)


def test_every_preset_is_listed_with_what_it_is_for() -> None:
    listed = presets()
    assert list(listed) == sorted(ALL)
    assert all(len(about) >= SHORTEST_REASON and "#" not in about for about in listed.values())


def test_a_preset_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt2'; choose from a100, .*, workstation$"):
        LoaderConfig.from_preset("h100", "gpt2")
    with pytest.raises(ConfigError, match=r"^preset h100: corpus: is missing"):
        LoaderConfig.from_preset("h100")
    with pytest.raises(ConfigError, match=r"^batch_size: .* 0"):
        LoaderConfig.from_preset("gpt2_124m", batch_size=0)
