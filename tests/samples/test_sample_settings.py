"""Settings that are refused, ranks, devices, statistics, and what goes on between workers and the trainer."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sample_datasets import Numbers, items_of
from torch.utils.data import DataLoader, IterableDataset

from dali_pipes import SampleLoader
from dali_pipes.errors import BackendError, ConfigError
from dali_pipes.runtime.messages import say_once
from dali_pipes.samples.device import chosen_device, on_tensors, staged
from dali_pipes.samples.fetch import Request


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": None}, "collate_fn"),
        ({"batch_size": 1.5}, "batch_size = 1.5"),
        ({"num_workers": -1}, "num_workers = -1"),
        ({"prefetch_factor": 0}, "prefetch_factor = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**63}, r"below 2\*\*63"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"num_draws": 0}, "num_draws = 0"),
        ({"timeout": -1}, "timeout = -1"),
        ({"pin_memory": "yes"}, "pin_memory = 'yes'"),
        ({"batch_sampler": [[1]]}, "batch_sampler"),
        ({"generator": torch.Generator()}, "seed"),
        ({"in_order": False}, "in_order"),
        ({"graph": print, "collate_fn": list}, "collate_fn"),
        ({"rank": 1}, "world_size"),
        ({"rank": 2, "world_size": 2}, "rank = 2"),
        ({"rank": -1, "world_size": 2}, "rank = -1"),
        ({"data_dims": "dp"}, "mesh"),
        ({"mesh": object()}, "DeviceMesh"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "meta"}, "meta"),
        ({"weights": [1] * 3, "num_samples": 2**31 + 1}, "num_samples"),
        ({"drop_last": True, "batch_size": 4}, "drop_last"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleLoader(Numbers(3), **settings)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "Stream is an IterableDataset"),
        ([], "list is empty"),
        ("data/train", "data/train"),
        ({1: 2}, "map-style"),
        (iter([1]), "map-style"),
        (5, "5"),
    ],
)
def test_datasets_that_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleLoader(dataset)


def test_unknown_settings_name_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'num_worker'.*num_workers"):
        SampleLoader(Numbers(3), num_worker=2)


def test_what_torch_takes_is_taken() -> None:
    """All arguments of `DataLoader`, with its defaults."""
    defaults: dict[str, Any] = {"batch_size": 2, "shuffle": None, "sampler": None, "batch_sampler": None}
    defaults |= {"num_workers": 0, "collate_fn": None, "pin_memory": False, "drop_last": False, "timeout": 0}
    defaults |= {"worker_init_fn": None, "multiprocessing_context": None, "generator": None, "prefetch_factor": None}
    defaults |= {"persistent_workers": False, "pin_memory_device": "", "in_order": True}
    found = items_of(list(SampleLoader(Numbers(5), **defaults)))
    assert found == items_of(list(DataLoader(Numbers(5), **defaults)))


def test_integers_of_numpy_are_integers() -> None:
    settings = {"batch_size": 3, "num_workers": 1, "seed": 4, "num_samples": 11, "rank": 1, "world_size": 2}
    given: dict[str, Any] = {name: np.int32(value) for name, value in settings.items()}
    with SampleLoader(Numbers(7), shuffle=True, **given) as loader:
        found = items_of(list(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    expected = SampleLoader(Numbers(7), shuffle=True, **{**settings, "num_workers": 0})  # type: ignore[arg-type]
    assert found == items_of(list(expected))
    assert state == expected.state_dict()


def test_a_dataset_that_becomes_longer_or_shorter_is_noticed() -> None:
    items = [*range(6)]
    loader = SampleLoader(items, 2)
    assert len(list(loader)) == 3
    items.append(6)
    with pytest.raises(ConfigError, match=r"list has 7 items now, but had 6"):
        iter(loader)
    del items[5:]
    with pytest.raises(ConfigError, match=r"5 items now"):
        iter(loader)
    items.append(5)
    assert len(list(loader)) == 3


class Mesh:
    """A device mesh of 2 x 3 processes, seen by the one at (1, 2)."""

    mesh_dim_names = ("dp", "tp")

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def __getitem__(self, name: str) -> "Mesh":
        if name not in self.mesh_dim_names:
            raise KeyError(name)
        return Mesh(name)

    def get_local_rank(self) -> int:
        return {"dp": 1, "tp": 2}[self.name or ""]

    def size(self) -> int:
        return {"dp": 2, "tp": 3}[self.name or ""]


def test_ranks_of_a_mesh() -> None:
    for dims, expected in ((None, (1, 2)), ("tp", (2, 3)), (["dp", "tp"], (5, 6)), ((), (0, 1))):
        loader = SampleLoader(Numbers(30), mesh=Mesh(), data_dims=dims)
        assert (loader.rank, loader.world_size) == expected
    with pytest.raises(ConfigError, match="'pp'"):
        SampleLoader(Numbers(30), mesh=Mesh(), data_dims="pp")
    with pytest.raises(ConfigError, match="rank"):
        SampleLoader(Numbers(30), mesh=Mesh(), rank=0, world_size=2)


def test_ranks_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = SampleLoader(Numbers(9))
    assert items_of(list(loader)) == [[1], [4], [7]]
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="RANK"):
        SampleLoader(Numbers(9))


def test_a_group_with_other_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, given = SampleLoader(Numbers(9)), SampleLoader(Numbers(9), rank=0, world_size=1)
    monkeypatch.setattr("dali_pipes.runtime.ranks.process_group", lambda: (1, 2))
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        iter(loader)
    assert len(list(given)) == 9


def test_repeated_rows_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()  # other tests may have had the same
    SampleLoader(Numbers(5), 2, rank=0, world_size=4)
    assert capsys.readouterr().err == ""
    SampleLoader(Numbers(10), 2, rank=1, world_size=4)
    assert capsys.readouterr().err == ""
    loader = SampleLoader(Numbers(10), 2, rank=0, world_size=4)
    assert "2 rows for 4 ranks" in capsys.readouterr().err
    assert len(loader) == 2
    SampleLoader(Numbers(10), 2, rank=0, world_size=4, drop_last=True)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_devices_without_a_gpu() -> None:
    assert chosen_device("auto") == chosen_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(BackendError, match="does not see a GPU"):
            SampleLoader(Numbers(3), device=name)
    batch = next(iter(SampleLoader(Numbers(3), 2, pin_memory=True)))
    assert not batch["item"].is_pinned()


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert chosen_device("auto") == torch.device("cuda", 0)
    assert chosen_device("cuda:3") == torch.device("cuda", 3)
    with pytest.raises(BackendError, match="cuda:4"):
        chosen_device("cuda:4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert chosen_device("cuda") == torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert chosen_device("cuda") == torch.device("cuda", 3)


class Delayed:
    """A stage that is two batches ahead, and says what it did."""

    depth = 2

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, request: Request, batch: Any) -> Any:
        self.log.append(f"begin {batch}")
        return batch

    def finish(self, begun: Any) -> Any:
        self.log.append(f"finish {begun}")
        return begun * 10

    def reset(self) -> None: ...

    def close(self) -> None: ...


def test_stages_work_ahead_and_in_order() -> None:
    def fetched(fails_at: int | None) -> Iterator[tuple[Request, Any]]:
        for number in range(5):
            if number == fails_at:
                raise ValueError("late")
            yield Request(0, [number], [number], (0, number + 1)), number

    stage = Delayed()
    assert [batch for _, batch in staged(fetched(None), stage)] == [0, 10, 20, 30, 40]
    assert stage.log[:5] == ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1"]
    found: list[int] = []
    failing = staged(fetched(3), Delayed())
    with pytest.raises(ValueError, match="late"):
        found += (batch for _, batch in failing)
    assert found == [0, 10, 20], "good batches before an error were not handed out"


class Scan(NamedTuple):
    image: torch.Tensor
    name: str


def test_tensors_of_nested_batches() -> None:
    one = torch.ones(2)
    changed = on_tensors({"scan": Scan(one, "a"), "others": [one, (one, 3)]}, lambda tensor: tensor * 2)
    assert isinstance(changed["scan"], Scan)
    assert changed["scan"].name == "a"
    assert changed["others"][1][1] == 3
    for tensor in (changed["scan"].image, changed["others"][0], changed["others"][1][0]):
        assert tensor.tolist() == [2, 2]


def test_statistics_and_the_table() -> None:
    loader = SampleLoader(Numbers(10), 3, True, seed=2)
    for batch in loader:
        assert loader.stats().samples <= 10
        del batch
    stats = loader.stats()
    assert (stats.batches, stats.samples, stats.num_workers, stats.device, stats.rank) == (4, 10, 0, "cpu", 0)
    assert 0 <= stats.data_wait_s <= stats.wall_s
    assert stats.metrics()["samples"] == 10
    assert stats.data_wait_pct == pytest.approx(100 * stats.data_wait_ratio)
    for text in (repr(loader), repr(stats)):
        assert "10" in text
    assert "Numbers" in repr(loader)
