"""Ranks from a DeviceMesh, as four real processes: the data-parallel dimensions decide who gets which rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from streams import write_counting

SCRIPT = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from dali_pipes import TokenLoader

rank, world_size, corpus, store = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
)
settings = {"corpus": corpus, "dtype": "uint32", "batch_size": 2, "seq_len": 8, "device": "cpu"}
settings["outputs"] = ["input_ids", "row_ids"]


def rows(mesh, data_dims, **more):
    try:
        with TokenLoader(**settings, mesh=mesh, data_dims=data_dims, **more) as loader:
            return [[batch["row_ids"].tolist(), batch["input_ids"].tolist()] for batch in loader]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
alone = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
print(json.dumps({
    "tensor parallel": rows(flat, "dp"),
    "tensor parallel outside": rows(outer, "dp"),
    "hybrid": rows(hybrid, ("dp_replicate", "dp_shard")),
    "sharded alone": rows(hybrid, ["dp_shard"]),
    "context": rows(context, "dp", context_dim="cp"),
    "zigzag": rows(context, "dp", context_dim="cp", context_split="zigzag"),
    "tensor parallel alone": rows(alone, ()),
    "no such dimension": rows(flat, "data"),
    "no such default": rows(alone, None),
    "no such context": rows(flat, "dp", context_dim="cp"),
    "ranks beside": rows(flat, "dp", rank=0, world_size=2),
    "twice": rows(flat, "dp", context_dim="dp"),
    "twice among the data": rows(flat, ["tp", "dp", "tp"]),
    "without a mesh": rows(None, "dp"),
    "context without a mesh": rows(None, None, context_dim="cp"),
    "by default": rows(flat, None),
    "share beside": rows(context, "dp", context_dim="cp", context_parallel=[0, 2]),
}))
dist.barrier()
dist.destroy_process_group()
"""

NUMBER_OF_ROWS = 50


@pytest.fixture(scope="module")
def reports(run_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pattern, _ = write_counting(tmp_path_factory.mktemp("counting"), [301, 100])
    return run_ranks(SCRIPT, 4, pattern, tmp_path_factory.mktemp("store") / "store", forked=True)


def of_rank(rank: int, world_size: int) -> list[list[int]]:
    """Row ids of a rank, step by step."""
    steps = NUMBER_OF_ROWS // (2 * world_size)
    return [[2 * world_size * step + rank + world_size * row for row in range(2)] for step in range(steps)]


def row_ids(steps: Any) -> list[list[int]]:
    assert not isinstance(steps, str), steps
    return [ids for ids, _ in steps]


@pytest.mark.parametrize(
    ("name", "places", "world_size"),
    [
        ("tensor parallel", [0, 0, 1, 1], 2),
        ("by default", [0, 0, 1, 1], 2),
        ("tensor parallel outside", [0, 1, 0, 1], 2),
        ("hybrid", [0, 1, 2, 3], 4),
        ("sharded alone", [0, 1, 0, 1], 2),
        ("context", [0, 0, 1, 1], 2),
        ("zigzag", [0, 0, 1, 1], 2),
        ("tensor parallel alone", [0, 0, 0, 0], 1),
    ],
)
def test_who_gets_which_rows(reports: list[Any], name: str, places: list[int], world_size: int) -> None:
    assert [row_ids(report[name]) for report in reports] == [of_rank(place, world_size) for place in places]


def test_ranks_that_share_data_get_the_same_tokens(reports: list[Any]) -> None:
    for name in ("tensor parallel", "tensor parallel outside"):
        first, second = (0, 1) if name == "tensor parallel" else (0, 2)
        assert reports[first][name] == reports[second][name]


@pytest.mark.parametrize(
    ("name", "columns"),
    [("context", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])],
)
def test_ranks_of_a_context_get_their_share_of_the_same_rows(
    reports: list[Any], name: str, columns: list[list[int]]
) -> None:
    for rank, report in enumerate(reports):
        whole = reports[rank // 2 * 2]["tensor parallel"]
        for (_, part), (_, rows) in zip(report[name], whole, strict=True):
            assert np.array_equal(part, np.array(rows)[:, columns[rank % 2]])


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("no such dimension", ("data_dims='data'", "dp, tp")),
        ("no such default", ("data_dims='dp'", "tp", "()")),
        ("no such context", ("context_dim='cp'", "dp, tp")),
        ("ranks beside", ("rank, world_size", "context_parallel", "mesh")),
        ("twice", ("data_dims ", "context_dim ", "twice")),
        ("twice among the data", ("data_dims ", "twice")),
        ("without a mesh", ("data_dims", "mesh=")),
        ("context without a mesh", ("context_dim", "mesh=")),
        ("share beside", ("rank, world_size", "context_parallel", "mesh")),
    ],
)
def test_what_does_not_go_with_a_mesh_is_refused(reports: list[Any], name: str, facts: tuple[str, ...]) -> None:
    for report in reports:
        assert report[name].startswith("ConfigError: ")
        assert all(fact in report[name] for fact in facts), report[name]
