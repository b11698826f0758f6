"""`jax_batches`: which rows a process takes, several processes, missing packages. Eight devices: `jax_on_mesh.py`."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.adapters.jax.data_shards import DataShards

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: the extra `jax` brings it"
)


@needs_jax
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(tmp_path: Path, which: str) -> None:
    """In a process of its own, since JAX reads how many devices a CPU has when it is first used."""
    path = Path(__file__).with_name("jax_on_mesh.py")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    options = ["-q", "-m", which, "-p", "no:cacheprovider", f"--basetemp={tmp_path}/mesh"]
    command = [sys.executable, "-m", "pytest", str(path), *options]
    ended = subprocess.run(command, env=environment, cwd=path.parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout


@given(st.data())
def test_every_shard_gets_its_rank(data: st.DataObject) -> None:
    """However shards are spread over processes. Row i of an epoch belongs to rank i % world_size, step after step."""
    count = data.draw(st.integers(1, 16), "shards")
    process_of = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count), "process of each shard")
    batch_size, may_be_one = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    steps = np.arange(3 * count * batch_size).reshape(3, -1)  # rows of three global batches
    for process in set(process_of):
        local = [shard for shard in range(count) if process_of[shard] == process]
        shards = DataShards(None, count, {f"device {shard}": shard for shard in local[::-1]}, "")
        feeds = shards.feeds(may_be_one=may_be_one)
        assert sorted(shard for feed in feeds for shard in feed.shards) == local
        assert len(feeds) in (1, len(local))
        for feed in feeds:
            for rows in steps:
                own = rows[rows % feed.world_size == feed.rank]  # of a loader with that rank
                assert len(own) == batch_size * len(feed.shards)
                for number, shard in enumerate(feed.shards):
                    assert (own[number :: len(feed.shards)] == rows[rows % count == shard]).all()


@pytest.mark.parametrize(
    ("count", "local", "loaders"),
    [
        (8, range(8), [(0, 1)]),
        (8, [1, 5], [(1, 4)]),
        (8, [2], [(2, 8)]),
        (4, [0, 1], [(0, 4), (1, 4)]),
        (1, [0], [(0, 1)]),
    ],
)
def test_loaders_of_a_process(count: int, local: Any, loaders: list[tuple[int, int]]) -> None:
    shards = DataShards(None, count, {shard: shard for shard in local}, "")
    assert [(feed.rank, feed.world_size) for feed in shards.feeds(may_be_one=True)] == loaders
    assert [feed.shards for feed in shards.feeds(may_be_one=False)] == [(shard,) for shard in local]


TWO_PROCESSES = """
import json, os, sys
told = os.dup(1)
os.dup2(2, 1)  # Gloo writes to standard output
rank, world_size, corpus, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.adapters.jax import jax_batches

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world_size, rank)
assert (jax.device_count(), jax.local_device_count(), jax.process_index()) == (4, 2, rank)
config = LoaderConfig(corpus=corpus, batch_size=2, seq_len=16, outputs=["input_ids", "row_ids"], quiet=True)
total = jax.jit(lambda ids: ids.sum())
devices = {(device.process_index, device.id): device for device in jax.devices()}
a, b, c, d = (devices[key] for key in sorted(devices))
meshes = {  # name: devices, data axes, (rank, world size) of the loaders of each process
    "neighbours": ([a, b, c, d], "xy", [[(0, 4), (1, 4)], [(2, 4), (3, 4)]]),
    "in turn": ([a, c, b, d], "xy", [[(0, 2)], [(1, 2)]]),
    "model inside a process": ([a, b, c, d], "x", [[(0, 2)], [(1, 2)]]),
    "model over processes": ([a, c, b, d], "x", [[(0, 1)], [(0, 1)]]),
    "no data axis": ([a, b, c, d], "", [[(0, 1)], [(0, 1)]]),
}
states = {}
for name, (order, axes, of_processes) in meshes.items():
    mesh = Mesh(np.array(order).reshape(2, 2), ("x", "y"))
    count = 2 ** len(axes)
    settings = config.replace(batch_size=8 // count)
    with jax_batches(settings, mesh, tuple(axes)) as batches:
        assert [(one.config.rank, one.config.world_size) for one in batches.loaders] == of_processes[rank], name
        ranks = [TokenLoader(settings, rank=k, world_size=count, index_dtype="int32") for k in range(count)]
        for step, (batch, expected) in enumerate(zip(batches, zip(*ranks))):
            ids = batch["input_ids"]
            assert ids.shape == (8, 16) and len(ids.addressable_shards) == 2, name
            assert ids.sharding.spec == PartitionSpec(tuple(axes) or None)
            for shard in ids.addressable_shards:
                number = (shard.index[0].start or 0) // settings.batch_size
                np.testing.assert_array_equal(shard.data, expected[number]["input_ids"].numpy(), name)
            assert int(total(ids)) == sum(int(one["input_ids"].sum()) for one in expected), name
            if step == 4:
                break
        states[name] = batches.state_dict()
        for one in ranks:
            one.close()
assert len({json.dumps(state) for state in states.values()}) == 1
os.write(told, json.dumps([states["in turn"], len(batches)]).encode())
"""


@needs_jax
@pytest.mark.slow
def test_two_processes(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Over loopback. Model-parallel peers in two processes get the same rows; states are the same in all processes."""
    ids = np.random.default_rng(3).integers(0, 60_000, 4000).astype("<u2")
    ids.tofile(tmp_path / "tokens.bin")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = run_ranks(TWO_PROCESSES, 2, tmp_path / "tokens.bin", port)
    assert first == second
    assert (first[0]["rows"], first[1]) == (40, 31)


@pytest.mark.parametrize(
    ("package", "install"), [("jax", 'pip install "dali-pipes[jax]"'), ("torch", "pip install torch")]
)
def test_a_missing_package_is_named(package: str, install: str, run_script: Runner) -> None:
    result = run_script(
        """
        import importlib.util, sys
        from dali_pipes import LoaderConfig
        from dali_pipes.adapters.jax import JaxBatches, jax_batches

        assert not {"jax", "torch"} & set(sys.modules)
        find, missing = importlib.util.find_spec, sys.argv[1]
        importlib.util.find_spec = lambda name: None if name == missing else find(name) or True
        try:
            jax_batches(LoaderConfig(corpus="a.bin", batch_size=1, seq_len=1), None)
        except ModuleNotFoundError as error:
            print(error.name, error)
        """,
        package,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{package} ")
    assert install in result.stdout


@pytest.mark.slow
@needs_jax
def test_a_program_may_end_without_closing(run_script: Runner, tmp_path: Path) -> None:
    """JAX keeps modules until the end of the process, when `os` is gone."""
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    result = run_script(
        """
        import sys
        import jax
        from dali_pipes import LoaderConfig
        from dali_pipes.adapters.jax import jax_batches

        config = LoaderConfig(corpus=sys.argv[1], batch_size=2, seq_len=16, quiet=True)
        batches = jax_batches(config, jax.make_mesh((1,), ("data",)))
        batch = next(batches)
        """,
        tmp_path / "tokens.bin",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
