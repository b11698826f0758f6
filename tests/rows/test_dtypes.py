"""`index_dtype` and `mask_dtype` change how values are stored, never the values, their order, or a state."""

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import torch
from kinds import KINDS, settings_of

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.config.outputs import OUTPUT_NAMES, OUTPUTS, Axes, on_host
from dali_pipes.errors import ConfigError, TokenRangeError

MASKS = {"attention_mask", "loss_mask"}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "cuda", "placement": "host"},
    "device": {"device": "cuda", "placement": "device"},
}
CHOICES: list[dict[str, Any]] = [{"index_dtype": "int32"}, {"mask_dtype": "bool"}]
CHOICES.append({**CHOICES[0], **CHOICES[1]})
NOT_THERE = {(False, False, "direct"), (True, False, "direct"), (True, False, "dali"), (True, True, "direct")}
IN_PIECES = tuple(name for name in OUTPUT_NAMES if name != "source_ids")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 40 ids that end in 0, in two files."""
    folder = tmp_path_factory.mktemp("documents")
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(1, 41, 60))
    tokens = generator.integers(1, 2**16, int(ends[-1]), np.uint16)
    tokens[ends - 1] = 0
    for number, part in enumerate(np.split(tokens, [500])):
        part.tofile(folder / f"{number}.bin")
    return str(folder)


def place_of(place: str) -> Any:
    return contextlib.nullcontext() if place == "cpu" else gpu_stand_in.installed("late")


def expected_dtype(name: str, choice: dict[str, Any]) -> torch.dtype:
    """Slow to read, but independent of what the code looks at."""
    if name in ("row_ids", "source_ids"):
        return torch.int64
    if name == "cu_seqlens":
        return torch.int32
    if name in MASKS and choice.get("mask_dtype"):
        return torch.bool
    return getattr(torch, choice.get("index_dtype", "int64"))  # type: ignore[no-any-return]


def check(batch: dict[str, Any], wanted: dict[str, Any], choice: dict[str, Any]) -> None:
    assert list(batch) == list(wanted)
    for name, value in wanted.items():
        if on_host(name):
            assert batch[name] == value
            continue
        assert batch[name].dtype == expected_dtype(name, choice), name
        assert torch.equal(batch[name].long(), value.long()), name


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        *(("direct", kind) for kind in KINDS),
        # DALI hands on arrays of any type: the kinds that the direct queue has, too, are looked at in longer runs.
        *(pytest.param("dali", kind, marks=[] if "graph" in KINDS[kind] else pytest.mark.slow) for kind in KINDS),
    ],
    indirect=["engine"],
)
@pytest.mark.parametrize("place", PLACES)
def test_the_same_values_in_other_types(corpus: str, engine: str, kind: str, place: str) -> None:
    """Two epochs; a state of one goes on as the other."""
    common = {**settings_of(kind), "batches_per_run": 2, **PLACES[place]}
    if ("graph" in common, place == "cpu", engine) in NOT_THERE:
        pytest.skip("DALI runs the queue on a GPU, and graphs, which the stand-in for a GPU does not")
    if "outputs" in common:
        common["outputs"] = IN_PIECES
    with place_of(place), contextlib.ExitStack() as open_loaders:
        wide, *others = [
            open_loaders.enter_context(TokenLoader(corpus, **common, **choice)) for choice in ({}, *CHOICES)
        ]
        for _ in range(2):
            iterators = [iter(loader) for loader in others]
            for number, wanted in enumerate(wide):
                for batches, loader, choice in zip(iterators, others, CHOICES, strict=True):
                    check(next(batches), wanted, choice)
                    assert loader.state_dict() == wide.state_dict()
                if number == 1:
                    state = wide.state_dict()
            assert all(next(batches, None) is None for batches in iterators)
        wide.load_state_dict(state)
        for loader in others:
            loader.load_state_dict(state)
        for wanted, *resumed in itertools.islice(zip(iter(wide), *map(iter, others), strict=True), 2):
            for batch, choice in zip(resumed, CHOICES, strict=True):
                check(batch, wanted, choice)


def test_static_buffers_keep_their_addresses(corpus: str) -> None:
    settings = {**settings_of("static buffers"), "outputs": IN_PIECES, "device": "cpu"}
    with TokenLoader(corpus, **settings, index_dtype="int32", mask_dtype="bool") as loader:
        seen = {
            tuple((name, value.dtype, value.data_ptr()) for name, value in batch.items() if not on_host(name))
            for batch in loader
        }
    assert len(seen) == 1


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_pipeline_hands_out_the_same_types(corpus: str, choice: dict[str, Any], in_pieces: bool) -> None:
    pytest.importorskip("nvidia.dali")
    names = tuple(name for name in IN_PIECES if not on_host(name)) if in_pieces else ("input_ids", "labels", "row_ids")
    settings = {**settings_of("windows"), "outputs": names, "batches_per_run": 1, "device": "cpu"}
    pipe = build_pipeline(corpus, **settings, **choice)
    pipe.build()
    with TokenLoader(corpus, **settings) as loader:
        for wanted in loader:
            outputs = pipe.run()
            batch = {
                name: torch.utils.dlpack.from_dlpack(output[0]).clone().reshape(wanted[name].shape)
                for name, output in zip(names, outputs, strict=True)
            }
            check(batch, {name: wanted[name] for name in names}, choice)


@pytest.mark.parametrize("rows", ["stream", "pack"])
@pytest.mark.parametrize("place", PLACES)
def test_an_id_that_does_not_fit_is_refused(tmp_path: Path, place: str, rows: str) -> None:
    tokens = np.arange(1, 400, dtype=np.uint32)
    tokens[9::10] = 0
    tokens[[77, 123]] = 2**31 - 1, 2**31
    tokens.tofile(tmp_path / "a.bin")
    common: dict[str, Any] = {"corpus": str(tmp_path / "a.bin"), "dtype": "uint32", "eos_id": 0, "rows": rows}
    common |= {"batch_size": 1, "seq_len": 8, "shuffle": False, "window_documents": 4, **PLACES[place]}
    with place_of(place):
        with TokenLoader(**common) as loader:
            assert max(int(batch["input_ids"].max()) for batch in loader) == 2**31
        message = rf"a\.bin.* token 123 .*\b{2**31}\b.*2\*\*31.* index_dtype"
        with TokenLoader(**common, index_dtype="int32") as loader, pytest.raises(TokenRangeError, match=message):
            list(loader)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 2**31 + 1), ("pad_id", 2**31)])
def test_settings_that_do_not_fit_are_refused(name: str, value: int) -> None:
    common: dict[str, Any] = {"corpus": "a.bin", "batch_size": 1, "seq_len": 4}
    with pytest.raises(ConfigError, match=rf'{name} = {value} .*index_dtype = "int32"'):
        LoaderConfig(**common, index_dtype="int32", **{name: value})
    assert LoaderConfig(**common, index_dtype="int32", **{name: value - 1}).id_limit == 2**31
    assert LoaderConfig(**common, **{name: value}).index_dtype == "int64"


@pytest.mark.parametrize("wrong", [{"index_dtype": "int16"}, {"index_dtype": "uint32"}, {"mask_dtype": "uint8"}])
def test_other_types_are_refused(wrong: dict[str, str]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=rf"{name}.*{re.escape(value)}"):
        LoaderConfig(corpus="a.bin", batch_size=1, seq_len=4, **wrong)


def test_every_field_has_a_type() -> None:
    """One that follows the settings has a value for each position; numbers on the host have none."""
    with_positions = Axes.POSITIONS, Axes.ENCODER, Axes.DECODER, Axes.CAUSAL
    for name, spec in OUTPUTS.items():
        assert (spec.dtype is None) == (spec.axes in (*with_positions, Axes.NUMBER)), name
        assert spec.is_mask == (name in {*MASKS, "masked"}), name
