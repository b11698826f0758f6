"""Batches on a mesh of eight CPU devices. `test_jax.py` runs this file in a process with `XLA_FLAGS` set for them.

The oracle is `TokenLoader` itself: data shard k has the rows of rank k of as many ranks as there are shards.
"""

import json
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.adapters.jax import JaxBatches, jax_batches
from dali_pipes.adapters.jax.arrays import DevicePlacement
from dali_pipes.adapters.jax.data_shards import DataShards
from dali_pipes.adapters.jax.fields import Fields
from dali_pipes.errors import ConfigError, CorpusReadError, LoaderClosedError, StateError

MESHES = {
    "(8,)": ((8,), ("data",), "data"),
    "(4, 2)": ((4, 2), ("data", "model"), ("data",)),
    "(2, 2, 2)": ((2, 2, 2), ("replica", "fsdp", "model"), ("replica", "fsdp")),
    "(2, 2, 2), other order": ((2, 2, 2), ("model", "fsdp", "replica"), ("replica", "fsdp")),
    "no data axis": ((2, 4), ("data", "model"), ()),
}
DOCUMENTS: dict[str, Any] = {
    "eos_id": END,
    "outputs": ["input_ids", "labels", "position_ids", "segment_ids", "loss_mask", "row_ids"],
}
MODES: dict[str, dict[str, Any]] = {
    "stream": {},
    "stream of documents": {**DOCUMENTS, "mask_dtype": "bool", "mask_boundaries": True},
    "overlapping": {"stride": 5, "outputs": ["row_ids", "input_ids"], "skip_steps": [[1, 3]]},
    "packed": {"rows": "pack", **DOCUMENTS},
    "padded": {"rows": "pad", "length_buckets": [4, 8, 16], **DOCUMENTS},
    "last step kept": {"drop_last": False, "shuffle": False, "outputs": ["input_ids", "labels", "row_ids"]},
    "two tokens ahead": {"mtp": 2, "eos_id": END},
    "longer rows": {"seq_len": [[0, 8], [2048, 16]], "global_batch": 16},
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 tokens in documents of 1 to 19."""
    ids = np.random.default_rng(3).integers(10, 60_000, 4000).astype("<u2")
    ids[np.cumsum(np.random.default_rng(4).integers(1, 20, 380))] = END
    path = tmp_path_factory.mktemp("corpus") / "tokens.bin"
    ids.tofile(path)
    return path


@pytest.fixture
def config(corpus: Path) -> LoaderConfig:
    return LoaderConfig(corpus=corpus, batch_size=2, seq_len=16, seed=5, quiet=True)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def mesh_of(name: str) -> tuple[Any, Any]:
    shape, axes, data_axes = MESHES[name]
    return jax.make_mesh(shape, axes), data_axes


def on_ranks(config: LoaderConfig, count: int) -> Iterator[tuple[dict[str, Any], ...]]:
    """The batches of all ranks, step by step, for one epoch."""
    loaders = [TokenLoader(config, rank=rank, world_size=count, index_dtype="int32") for rank in range(count)]
    try:
        yield from zip(*loaders, strict=True)
    finally:
        for loader in loaders:
            loader.close()


def in_order(array: Any, shards: int) -> np.ndarray[Any, Any]:
    """The rows of a global array in the order of the epoch."""
    rows = np.asarray(array)
    return np.swapaxes(rows.reshape(shards, -1, *rows.shape[1:]), 0, 1).reshape(rows.shape)


def assert_step(batch: dict[str, Any], of_ranks: tuple[dict[str, Any], ...], sharding: Any) -> None:
    """Every device has the rows of the rank of its data shard."""
    count = len(of_ranks)
    assert list(batch) == list(of_ranks[0])
    for name, array in batch.items():
        assert isinstance(array, jax.Array)
        assert array.dtype == (np.bool_ if of_ranks[0][name].dtype == torch.bool else np.int32), name
        rows = len(of_ranks[0][name])
        assert array.shape == (rows * count, *of_ranks[0][name].shape[1:])
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            rank = (shard.index[0].start or 0) // rows
            np.testing.assert_array_equal(shard.data, of_ranks[rank][name].numpy(), f"{name} of shard {rank}")


def assert_batches_of_ranks(config: LoaderConfig, mesh: Any, data_axes: Any) -> int:
    with jax_batches(config, mesh, data_axes) as batches:
        count = int(np.prod([mesh.shape[axis] for axis in np.atleast_1d(np.array(data_axes, dtype=object))]))
        steps, expected = 0, len(batches)
        for batch, of_ranks in zip(batches, on_ranks(config, count), strict=True):
            assert_step(batch, of_ranks, batches.sharding)
            steps += 1
        assert batches.epoch == 1
        assert batches.step == 0
        assert steps == expected
    return steps


def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


@pytest.mark.parametrize("mesh", MESHES)
def test_shards_have_the_rows_of_the_ranks(mesh: str, config: LoaderConfig) -> None:
    assert assert_batches_of_ranks(config.replace(outputs=["input_ids", "labels", "row_ids"]), *mesh_of(mesh)) > 10


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_rows(mode: str, config: LoaderConfig) -> None:
    assert assert_batches_of_ranks(config.replace(**MODES[mode]), *mesh_of("(4, 2)")) > 3


def test_a_mixture(corpus: Path) -> None:
    sources = {"a": {"corpus": str(corpus), "weight": 0.7}, "b": {"corpus": "synthetic:5000", "weight": 0.3}}
    outputs = ["input_ids", "source_ids"]
    config = LoaderConfig(mixture=sources, total_rows=256, batch_size=4, seq_len=16, outputs=outputs, quiet=True)
    assert assert_batches_of_ranks(config, *mesh_of("(8,)")) == 8


@settings(max_examples=examples(6))
@given(
    shape=st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]),
    axes=st.permutations("abc"),
    chosen=st.sets(st.integers(0, 2)),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 3),
    mode=st.sampled_from(["stream", "packed", "last step kept"]),
    order=st.permutations(range(8)),
)
def test_any_mesh(
    corpus: Path,
    shape: tuple[int, ...],
    axes: list[str],
    chosen: set[int],
    seed: int,
    batch_size: int,
    mode: str,
    order: list[int],
) -> None:
    """Also with devices in any order, and data axes in another order than those of the mesh."""
    names = axes[: len(shape)]
    devices = np.array(jax.devices())[order].reshape(shape)
    data_axes = [name for number, name in enumerate(sorted(names)) if number in chosen]
    settings = {"batch_size": batch_size, "seq_len": 16, "seed": seed, **MODES[mode]}
    config = LoaderConfig(corpus=corpus, quiet=True, **settings)
    assert assert_batches_of_ranks(config, jax.sharding.Mesh(devices, names), data_axes)


def test_one_loader_for_all_shards_of_a_process(config: LoaderConfig) -> None:
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        (loader,) = batches.loaders
        assert (loader.config.rank, loader.config.world_size, loader.config.batch_size) == (0, 1, 16)
        assert (loader.config.index_dtype, loader.device.type) == ("int32", "cpu")
    with jax_batches(config.replace(drop_last=False), *mesh_of("(2, 2, 2)")) as batches:
        assert [loader.config.rank for loader in batches.loaders] == [0, 1, 2, 3]
        next(batches)
        assert batches.stats().tokens == 4 * 2 * 16
        assert batches.stats().batches == 1


def test_a_loader_instead_of_a_configuration(config: LoaderConfig) -> None:
    """Its batch is the global batch; shards get its rows in turn."""
    loader = TokenLoader(config, batch_size=16, index_dtype="int32")
    with jax_batches(loader, *mesh_of("(8,)")) as batches, jax_batches(config, *mesh_of("(8,)")) as others:
        assert batches.loaders == (loader,)
        for batch, other in zip(batches, others, strict=True):
            np.testing.assert_array_equal(batch["input_ids"], other["input_ids"])
    with pytest.raises(LoaderClosedError):
        iter(loader)


def test_a_loader_with_operators_of_dali(config: LoaderConfig) -> None:
    """Its batches are in memory of DALI, which stays theirs."""
    reason = "DALI is not installed: the extra `cpu` brings it"
    fn, types = (pytest.importorskip(f"nvidia.dali.{name}", reason=reason) for name in ("fn", "types"))
    settings: dict[str, Any] = {"index_dtype": "int32", "batch_size": 8, "batches_per_run": 2}
    loader = TokenLoader(config, **settings, graph=lambda nodes: nodes | {"labels": nodes["labels"] + 0})
    with jax_batches(loader, *mesh_of("(8,)")) as batches, jax_batches(config, *mesh_of("(4, 2)")) as others:
        found, expected = list(batches), list(others)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in other:
            np.testing.assert_array_equal(in_order(one[name], 8), in_order(other[name], 4))
    loader = TokenLoader(
        config, **settings, graph=lambda nodes: nodes | {"input_ids": fn.cast(nodes["input_ids"], dtype=types.INT64)}
    )
    with jax_batches(loader, *mesh_of("(8,)")) as batches, pytest.raises(ConfigError, match=r"input_ids.*int64"):
        next(batches)


@pytest.mark.parametrize(
    "lost",
    [lost if lost in (0, 1, 8, 14, 15, 17) else pytest.param(lost, marks=pytest.mark.slow) for lost in range(18)],
)
def test_resume_at_every_step(lost: int, config: LoaderConfig) -> None:
    """On other meshes, within an epoch and over its end."""
    config = config.replace(batch_size=4, outputs=["input_ids", "row_ids"])
    with jax_batches(config.replace(repeat=True), *mesh_of("(4, 2)")) as batches:
        assert len(batches) == 15
        rows = [in_order(next(batches)["input_ids"], 4) for _ in range(lost)]
        state = batches.state_dict()
        rows += [in_order(next(batches)["input_ids"], 4) for _ in range(20 - lost)]
    saved = json.dumps(state)
    for mesh, shards, batch_size in (("(8,)", 8, 2), ("(2, 2, 2)", 4, 4), ("no data axis", 1, 16)):
        with jax_batches(config.replace(batch_size=batch_size), *mesh_of(mesh)) as batches:
            batches.load_state_dict(json.loads(saved))
            assert (batches.epoch, batches.step) == divmod(lost, 15)
            rest = [in_order(batch["input_ids"], shards) for batch in batches]
            assert len(rest) == 15 - lost % 15
            for number, found in enumerate(rest[: 20 - lost]):
                np.testing.assert_array_equal(found, rows[lost + number])


def test_state_round_trip_as_grains_handlers_do_it(config: LoaderConfig, tmp_path: Path) -> None:
    """`get_state` gives bytes that are text; `set_state` takes them, then `start_prefetch` is called."""
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        next(batches), next(batches)
        state = batches.get_state()
        (tmp_path / "process_0-of-1.json").write_text(state.decode())
        expected = next(batches)["input_ids"]
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        batches.set_state((tmp_path / "process_0-of-1.json").read_text().encode())
        batches.start_prefetch()
        assert batches.get_state() == state
        np.testing.assert_array_equal(next(batches)["input_ids"], expected)
        batches.set_state(json.loads(state))
        np.testing.assert_array_equal(next(batches)["input_ids"], expected)
        with pytest.raises(StateError, match="seed"):
            batches.set_state(json.dumps(json.loads(state) | {"config": {"seed": 6}}))
        for damaged in (state[:40], b"", b"\xff", "[]"):
            with pytest.raises(StateError, match="not a loader state"):
                batches.set_state(damaged)


def test_grains_own_handler(config: LoaderConfig, tmp_path: Path) -> None:
    grain = pytest.importorskip("grain", reason="grain is not installed: the extra `bench` brings it")
    epath = pytest.importorskip("etils.epath")
    handler, folder = grain.checkpoint.CheckpointHandler(), epath.Path(tmp_path)
    with jax_batches(config, *mesh_of("(8,)")) as batches, jax_batches(config, *mesh_of("(8,)")) as others:
        next(batches)
        handler.save(folder, batches)
        expected = next(batches)["input_ids"]
        np.testing.assert_array_equal(next(handler.restore(folder, others))["input_ids"], expected)


def test_it_is_true_without_counting_its_batches(config: LoaderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting packed rows plans the epoch."""
    monkeypatch.setattr(JaxBatches, "__len__", lambda self: pytest.fail("its batches were counted"))
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        assert batches


def test_it_is_an_iterator(config: LoaderConfig) -> None:
    """Leaving a `for` goes on with the next batch; the end of a `for` is the end of an epoch."""
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        assert iter(batches) is batches
        rows: list[Any] = []
        for batch in batches:
            rows.append(np.asarray(batch["input_ids"]))
            if len(rows) == 3:
                break
        assert (batches.epoch, batches.step) == (0, 3)
        rows += [np.asarray(batch["input_ids"]) for batch in batches]
        assert len(rows) == len(batches)
        assert (batches.epoch, batches.step) == (1, 0)
        rows += [np.asarray(batch["input_ids"]) for batch in batches]
        assert batches.epoch == 2
    epochs = [config.replace(repeat=True)]
    with jax_batches(epochs[0], *mesh_of("(8,)")) as batches:
        for found in rows:
            np.testing.assert_array_equal(next(batches)["input_ids"], found)


def test_weights_instead_of_ignored_labels(config: LoaderConfig) -> None:
    config = config.replace(**MODES["packed"])
    mesh = mesh_of("(4, 2)")
    with jax_batches(config, *mesh) as ignoring, jax_batches(config, *mesh, labels="weights") as weighting:
        for plain, weighted in zip(ignoring, weighting, strict=True):
            labels = np.asarray(plain["labels"])
            assert (labels == -100).any()
            assert list(weighted) == [*plain, "loss_weights"]
            assert weighted["loss_weights"].dtype == np.float32
            assert weighted["loss_weights"].sharding == plain["labels"].sharding
            np.testing.assert_array_equal(weighted["loss_weights"], (labels != -100) * 1.0)
            np.testing.assert_array_equal(weighted["labels"], np.where(labels == -100, 0, labels))
            np.testing.assert_array_equal(weighted["input_ids"], plain["input_ids"])


@pytest.mark.parametrize("rows", ["pack", "pad", "stream"])
def test_maxtext_names(rows: str, config: LoaderConfig) -> None:
    """Segments count from 1 and are 0 on padding; `targets_segmentation` is also 0 where a label is ignored."""
    config = config.replace(rows=rows, eos_id=END, outputs=["row_ids"])
    ours = config.replace(outputs=[*DOCUMENTS["outputs"], "attention_mask"])
    mesh = mesh_of("(4, 2)")
    with jax_batches(config, *mesh, names="maxtext") as named, jax_batches(ours, *mesh) as plain:
        for batch, expected in zip(named, plain, strict=True):
            columns = ("inputs", "targets", "inputs_position", "targets_position")
            assert list(batch) == [*columns, "inputs_segmentation", "targets_segmentation", "row_ids"]
            assert {(array.dtype, array.shape) for name, array in batch.items() if name != "row_ids"} == {
                (np.dtype(np.int32), (8, 16))
            }
            host = {name: np.asarray(array) for name, array in expected.items()}
            counts = host["labels"] != -100
            np.testing.assert_array_equal(batch["inputs"], host["input_ids"])
            np.testing.assert_array_equal(batch["targets"], np.where(counts, host["labels"], 0))
            for name in ("inputs_position", "targets_position"):
                np.testing.assert_array_equal(batch[name], host["position_ids"])
            segments = np.asarray(batch["inputs_segmentation"])
            np.testing.assert_array_equal(segments != 0, host["attention_mask"] == 1)
            assert (segments[:, 0] == 1).all()
            for row, inputs in zip(segments, np.asarray(batch["inputs"]), strict=True):  # from the end ids alone
                number = 1 + np.concatenate([[0], np.cumsum(inputs == END)[:-1]])
                np.testing.assert_array_equal(row[row != 0], number[row != 0])
            np.testing.assert_array_equal(batch["targets_segmentation"], segments * counts)
    with jax_batches(config, *mesh, names="maxtext", labels="weights") as batches:
        batch = next(batches)
        np.testing.assert_array_equal(batch["loss_weights"], np.asarray(batch["targets_segmentation"]) != 0)


def test_arguments_of_variable_length_attention_on_one_shard(config: LoaderConfig) -> None:
    config = config.replace(rows="pack", eos_id=END, outputs=["input_ids", "cu_seqlens", "max_seqlen"])
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    with jax_batches(config, mesh) as batches:
        for batch, (expected,) in zip(batches, on_ranks(config, 1), strict=True):
            assert batch["cu_seqlens"].sharding.is_fully_replicated
            np.testing.assert_array_equal(batch["cu_seqlens"], expected["cu_seqlens"])
            assert type(batch["max_seqlen"]) is type(batch["num_segments"]) is int
            assert (batch["max_seqlen"], batch["num_segments"]) == (expected["max_seqlen"], expected["num_segments"])
    for name in ("cu_seqlens", "max_seqlen"):
        with pytest.raises(ConfigError, match=rf"'{name}'.*4 data shards.*data: 4, model: 2.*segment_ids"):
            jax_batches(config.replace(outputs=["input_ids", name]), *mesh_of("(4, 2)"))


@pytest.mark.parametrize("mesh", ["(8,)", "no data axis"])
def test_old_batches_stay_as_they_were(mesh: str, config: LoaderConfig) -> None:
    """On a CPU, JAX uses the memory of a batch as it is. Also if a function may write to every other array."""
    overwrite = jax.jit(lambda array: array + 1, donate_argnums=0)
    config = config.replace(repeat=True, seq_len=64, batch_size=4)
    kept: list[dict[str, Any]] = []
    with jax_batches(config, *mesh_of(mesh)) as batches:
        for number in range(200):
            batch = next(batches)
            if number % 2:
                batch["input_ids"] = overwrite(batch["input_ids"])
            kept.append(batch)  # not looked at: JAX keeps the values that it has shown once
    with jax_batches(config, *mesh_of(mesh)) as batches:
        for number, batch in enumerate(kept):
            expected = next(batches)
            np.testing.assert_array_equal(batch["input_ids"], np.asarray(expected["input_ids"]) + number % 2)
            np.testing.assert_array_equal(batch["labels"], expected["labels"])


def test_memory_is_used_as_it_is_and_released() -> None:
    """What the test above is about does happen; and what nobody holds is freed."""
    settings: dict[str, Any] = {"batch_size": 8, "seq_len": 2048, "repeat": True, "batches_per_run": 1, "quiet": True}
    loader = TokenLoader("synthetic:10M", **settings, index_dtype="int32")
    addresses = []
    with jax_batches(loader, jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])) as batches:
        placement: Any = batches._placement
        arrays = placement.arrays

        def watched(given: list[dict[str, Any]], fields: Fields) -> Any:
            addresses.append(given[0]["input_ids"].data_ptr())
            return arrays(given, fields)

        placement.arrays = watched
        batch = next(batches)
        assert batch["input_ids"].addressable_data(0).unsafe_buffer_pointer() == addresses[0]
        before = resident_bytes()
        for _ in range(600):  # 131,072 bytes each
            batch = next(batches)
        assert resident_bytes() - before < 30e6


def test_an_error_loses_nothing(config: LoaderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if a loader fails after another one has handed out its part, nor in the step to the mesh."""
    config = config.replace(drop_last=False, batch_size=1)
    mesh = mesh_of("(8,)")
    with jax_batches(config, *mesh) as unbroken:
        expected = [np.asarray(batch["input_ids"]) for batch in unbroken]
    with jax_batches(config, *mesh) as batches:
        found = [np.asarray(next(batches)["input_ids"])]
        for failing in (3, 7):
            assert batches._iterators is not None
            batches._iterators[failing] = iter(_Failing())
            with pytest.raises(OSError, match="a disk"):
                next(batches)
            found.append(np.asarray(next(batches)["input_ids"]))
        for error in (KeyboardInterrupt, RuntimeError):
            with monkeypatch.context() as patch:
                patch.setattr(jax, "make_array_from_callback", _Failing(error))
                with pytest.raises(error):
                    next(batches)
            assert batches.step == len(found)
            found.append(np.asarray(next(batches)["input_ids"]))
        found += [np.asarray(batch["input_ids"]) for batch in batches]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class _Failing:
    def __init__(self, error: type[BaseException] = OSError) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise OSError("a disk")

    def __call__(self, *arguments: object) -> Any:
        raise self._error("a device")


def test_a_file_that_shrinks(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(corpus.read_bytes())
    config = LoaderConfig(corpus=path, batch_size=1, seq_len=16, shuffle=False, quiet=True, batches_per_run=1)
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        before = np.asarray(next(batches)["input_ids"])
        path.write_bytes(corpus.read_bytes()[:600])
        with pytest.raises(CorpusReadError, match=r"tokens\.bin"):
            for _ in batches:
                pass
        step = batches.step
        path.write_bytes(corpus.read_bytes())
    assert step >= 1
    assert before.shape == (8, 16)


def test_closing(config: LoaderConfig) -> None:
    batches = jax_batches(config, *mesh_of("(8,)"))
    batch = next(batches)
    batches.close()
    batches.close()
    assert batch["input_ids"].shape == (16, 16)
    with pytest.raises(LoaderClosedError):
        next(batches)


def test_row_numbers_beyond_int32_are_refused() -> None:
    """Instead of being wrapped to other numbers."""
    outputs = ["input_ids", "row_ids"]
    config = LoaderConfig(corpus="synthetic:10T", batch_size=1, seq_len=16, outputs=outputs, shuffle=False, quiet=True)
    with jax_batches(config, *mesh_of("(8,)")) as batches:
        state = batches.state_dict()
        batches.load_state_dict(state | {"rows": 2**31 - 8})
        np.testing.assert_array_equal(next(batches)["row_ids"], np.arange(2**31 - 8, 2**31))
        with pytest.raises(ConfigError, match=r"'row_ids'.*2,147,483,655"):
            next(batches)


# On GPUs each device has a loader of its own, whose batches are in its memory. The same code on CPU devices:


def on_devices(config: LoaderConfig, mesh: Any, data_axes: Any, **how: Any) -> JaxBatches:
    shards = DataShards.of(mesh, data_axes)
    placement = DevicePlacement(shards)
    fields = Fields.of(config, shards, how.get("labels", "ignore"), how.get("names"), may_add=True)
    loaders = placement.open_loaders(config.replace(outputs=fields.outputs))
    return JaxBatches(loaders, placement, fields, shards.sharding)


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("(8,)", {"labels": "weights"}),
        ("(4, 2)", {"names": "maxtext"}),
        ("(2, 2, 2), other order", {}),
        pytest.param("no data axis", {"names": "maxtext", "labels": "weights"}, marks=pytest.mark.slow),
    ],
)
def test_one_loader_for_each_device(mesh: str, how: dict[str, Any], config: LoaderConfig) -> None:
    config = config.replace(batch_size=4, **MODES["packed"])
    with on_devices(config, *mesh_of(mesh), **how) as batches, jax_batches(config, *mesh_of(mesh), **how) as others:
        assert len(batches.loaders) == 8
        for batch, other in zip(batches, others, strict=True):
            assert list(batch) == list(other)
            for name, array in batch.items():
                assert array.dtype == other[name].dtype, name
                assert array.sharding.is_equivalent_to(other[name].sharding, array.ndim)
                for shard, expected in zip(array.addressable_shards, other[name].addressable_shards, strict=True):
                    assert (shard.device, shard.index) == (expected.device, expected.index)
                    np.testing.assert_array_equal(shard.data, expected.data, name)
        assert len(batches.loaders) == 8


@pytest.mark.parametrize("lost", [0, 15, *(pytest.param(lost, marks=pytest.mark.slow) for lost in (6, 14, 17))])
def test_resume_of_many_loaders(lost: int, config: LoaderConfig) -> None:
    """And from many loaders to one."""
    config = config.replace(batch_size=4, outputs=["input_ids"])
    with jax_batches(config.replace(repeat=True), *mesh_of("(4, 2)")) as batches:
        rows = [np.asarray(next(batches)["input_ids"]) for _ in range(20)]
    with on_devices(config.replace(repeat=True), *mesh_of("(4, 2)")) as batches:
        found = [np.asarray(next(batches)["input_ids"]) for _ in range(lost)]
        state = batches.get_state()
    with on_devices(config.replace(repeat=True), *mesh_of("(4, 2)")) as batches:
        batches.set_state(state)
        found += [np.asarray(next(batches)["input_ids"]) for _ in range(18 - lost)]
        state = batches.get_state()
    with jax_batches(config.replace(repeat=True), *mesh_of("(4, 2)")) as batches:
        batches.set_state(state)
        found += [np.asarray(next(batches)["input_ids"]) for _ in range(2)]
    for one, other in zip(found, rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_of_devices_are_copies(config: LoaderConfig) -> None:
    """The loader writes to its memory again when the tensor is gone, whatever JAX still does with it."""
    with on_devices(config, *mesh_of("(8,)")) as batches:
        batch = next(batches)
        placement: Any = batches._placement
        last, sources = placement._in_use[0]
        jax.block_until_ready((batch, last))
        expected = [tensor.clone() for tensor in sources]
        for tensor in sources:
            tensor.fill_(-1)
        names = iter(expected)
        for device in range(8):
            for array in batch.values():
                np.testing.assert_array_equal(array.addressable_data(device), next(names).numpy())


def test_arrays_of_devices_may_be_donated(config: LoaderConfig) -> None:
    overwrite = jax.jit(lambda array: array + 1, donate_argnums=0)
    with on_devices(config, *mesh_of("(8,)")) as batches, jax_batches(config, *mesh_of("(8,)")) as others:
        for batch, other in zip(batches, others, strict=True):
            changed = overwrite(batch["input_ids"])
            np.testing.assert_array_equal(changed, np.asarray(other["input_ids"]) + 1)
        assert len(batches._placement._in_use) <= 2  # type: ignore[attr-defined]


def test_a_tensor_is_held_until_it_has_been_copied(config: LoaderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []

    def slow_copy(array: Any, device: Any, **_: Any) -> Any:
        copies.append(SimpleNamespace(shape=array.shape, is_ready=lambda: False))
        return copies[-1]

    shards = DataShards.of(*mesh_of("(8,)"))
    placement = DevicePlacement(shards)
    fields = Fields(("input_ids",), "ignore", None)
    monkeypatch.setattr(jax, "device_put", slow_copy)
    monkeypatch.setattr(placement, "_array", lambda values: values)
    tensors = [[torch.zeros(2, 3, dtype=torch.int32) for _ in range(8)] for _ in range(3)]
    alive = [weakref.ref(step[0]) for step in tensors]
    for _ in range(2):
        placement.arrays([{"input_ids": tensor} for tensor in tensors.pop(0)], fields)
    assert [reference() is not None for reference in alive] == [True, True, True]
    for copy in copies[:16]:  # of the tensor, and the one that nobody else has
        copy.is_ready = lambda: True
    placement.arrays([{"input_ids": tensor} for tensor in tensors.pop(0)], fields)
    assert [reference() is not None for reference in alive] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "arguments", "parts"),
    [
        ({}, {"data_axes": ("data", "seq")}, ["'seq'", "data: 4, model: 2"]),
        ({}, {"data_axes": ("data", "data")}, ["twice", "data: 4, model: 2"]),
        ({}, {"mesh": "dp"}, ["str", "jax.sharding.Mesh"]),
        ({}, {"labels": "none"}, ["'none'", "'ignore'", "'weights'"]),
        ({}, {"names": "flax"}, ["'flax'", "'maxtext'"]),
        ({"outputs": ["input_ids"]}, {"labels": "weights"}, ["labels", "['input_ids']"]),
        ({"eos_id": 9, "mtp": 2}, {"names": "maxtext"}, ["mtp = 2"]),
        ({"label_shift": False}, {"names": "maxtext"}, ["label_shift = False"]),
        ({"rank": 1, "world_size": 4}, {}, ["rank = 1", "world_size = 4", "data: 4, model: 2"]),
        ({"context_parallel": [0, 2]}, {}, ["context_parallel"]),
        ({"static_buffers": True}, {}, ["static_buffers"]),
        ({"batch_size": 1, "rows": "pad", "eos_id": 9, "batch_tokens": 2**20}, {}, ["batch_tokens", "batch_size"]),
        ({"device": "cuda"}, {}, ['device = "cuda"', "cpu", '"auto"']),
        ({"vocab_size": 2**31 + 1}, {}, ["vocab_size", "int32"]),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], arguments: dict[str, Any], parts: list[str], config: LoaderConfig
) -> None:
    mesh, data_axes = mesh_of("(4, 2)")
    with pytest.raises(ConfigError) as error:
        jax_batches(config.replace(**settings), **{"mesh": mesh, "data_axes": data_axes, **arguments})
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"index_dtype": "int64"}, ['index_dtype = "int64"', '"int32"']),
        ({"rank": 1, "world_size": 4}, ["rank 1 of 4", "[0, 1, 2, 3]", "rank = 0", "world_size = 1"]),
        ({"batch_size": 6}, ["batch_size = 6", "4 data shards", "data: 4, model: 2"]),
        ({"drop_last": False}, ["[0, 1, 2, 3]", "4 loaders", "LoaderConfig", "drop_last = True"]),
    ],
)
def test_loaders_that_do_not_fit_are_refused(settings: dict[str, Any], parts: list[str], config: LoaderConfig) -> None:
    with TokenLoader(config, **{"batch_size": 8, "index_dtype": "int32", **settings}) as loader:
        with pytest.raises(ConfigError) as error:
            jax_batches(loader, *mesh_of("(4, 2)"))
        assert [part for part in parts if part not in str(error.value)] == []
        with pytest.raises(ConfigError, match='names = "maxtext" needs position_ids, segment_ids'):
            jax_batches(loader, *mesh_of("(4, 2)"), names="maxtext")


def test_neither_configuration_nor_loader(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"LoaderConfig.*PosixPath"):
        jax_batches(corpus, *mesh_of("(8,)"))  # type: ignore[arg-type]
