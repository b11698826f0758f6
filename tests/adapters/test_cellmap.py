"""`CellMapDataLoader` with the real package on a small OME-NGFF volume: same items, classes in balance, exact resume.

cellmap-data needs zarr < 3, so these tests run in another environment: `make test-cellmap`.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

if importlib.util.find_spec("cellmap_data") is None:
    pytest.skip("cellmap-data is not installed; `make test-cellmap`", allow_module_level=True)


def declare_missing_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its operators are linked to another build of torch; cellmap-data calls none.

    Its Python code asks for these two by name when it is imported.
    """
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]
        return library
    return None


OPERATORS = declare_missing_operators()  # they are gone with this object
import cellmap_data  # noqa: E402

from dali_pipes.adapters.cellmap import CellMapDataLoader  # noqa: E402

pytestmark = pytest.mark.cellmap
CLASSES = ["mito", "er", "nucleus"]
ANNOTATED = [["mito", "er"], ["mito"], ["mito"], ["nucleus"]]
"""Classes of each crop."""
PATCH = {"shape": (4, 4, 4), "scale": (8, 8, 8)}
SIDE = 9
AUGMENT = {"mirror": {"axes": {"x": 0.5, "y": 0.5, "z": 0.5}}, "transpose": True, "rotate": {"axes": {"z": 20}}}


def write_image(group: Path, voxels: npt.NDArray[np.uint8]) -> None:
    """A multiscale OME-NGFF image of one level, 8 nm a voxel: Zarr version 2, one chunk, not compressed."""
    level = group / "s0"
    level.mkdir(parents=True)
    (level / "0.0.0").write_bytes(voxels.tobytes())
    about = {"shape": voxels.shape, "chunks": voxels.shape, "dtype": "|u1", "order": "C", "fill_value": 0}
    (level / ".zarray").write_text(json.dumps({**about, "compressor": None, "filters": None, "zarr_format": 2}))
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    placed = [{"type": "scale", "scale": [8, 8, 8]}, {"type": "translation", "translation": [0, 0, 0]}]
    scales = {"version": "0.4", "axes": axes, "datasets": [{"path": "s0", "coordinateTransformations": placed}]}
    (group / ".zattrs").write_text(json.dumps({"multiscales": [scales]}))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)
    for crop, names in enumerate(ANNOTATED):
        write_image(folder / f"{crop}.zarr" / "raw", rng.integers(0, 256, (SIDE,) * 3, np.uint8))
        for name in names:
            write_image(folder / f"{crop}.zarr" / name, rng.integers(0, 2, (SIDE,) * 3, np.uint8))
    return folder


def dataset_of(volumes: Path, augment: dict[str, Any] | None = None) -> Any:
    arrays = {"input_arrays": {"raw": PATCH}, "target_arrays": {"output": PATCH}}
    crops = [
        cellmap_data.CellMapDataset(
            str(volumes / f"{crop}.zarr" / "raw"),
            str(volumes / f"{crop}.zarr" / f"[{','.join(names)}]"),
            CLASSES,
            spatial_transforms=augment,
            **arrays,
        )
        for crop, names in enumerate(ANNOTATED)
    ]
    return cellmap_data.CellMapMultiDataset(crops, CLASSES, **arrays)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys() == {"idx", "raw", "output"}
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        np.testing.assert_array_equal(tensor.numpy(), other[name].numpy())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_its_own_loader(volumes: Path, num_workers: int) -> None:
    dataset = dataset_of(volumes)
    theirs = cellmap_data.CellMapDataLoader(dataset, batch_size=64, is_train=False)
    ours = CellMapDataLoader(dataset, batch_size=64, is_train=False, num_workers=num_workers, device="cpu")
    assert ours.classes == theirs.classes == CLASSES
    assert len(ours) == len(theirs) > 5
    found = list(ours)
    for one, other in zip(found, theirs, strict=True):
        same(one, other)
    shuffled = CellMapDataLoader(dataset, batch_size=64, num_workers=num_workers, device="cpu")
    items = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in list(shuffled)
        for row in range(len(batch["idx"]))
    ]
    # Each crop counts its items from 0.
    indices = [shuffled.loader.locate(row // 64, row % 64, epoch=0).item for row in range(len(items))]
    assert sorted(indices) == list(range(len(dataset)))
    assert indices != sorted(indices)
    for item, index in zip(items, indices, strict=True):
        same(item, dataset[index])
    ours.loader.close()
    shuffled.loader.close()


def test_classes_are_in_balance_as_with_its_own_sampler(volumes: Path) -> None:
    dataset = dataset_of(volumes)
    matrix = dataset.get_crop_class_matrix()
    ends = np.array(dataset.cumulative_sizes)
    rows = 1000
    loader = CellMapDataLoader(dataset, batch_size=50, weighted_sampler=True, iterations_per_epoch=rows, device="cpu")
    assert len(loader) == rows // 50
    items = [loader.loader.locate(step, row).item for step in range(rows // 50) for row in range(50)]
    ours = np.bincount(np.searchsorted(ends, items, "right"), minlength=len(ends)) / rows
    sampler = cellmap_data.ClassBalancedSampler(dataset, rows)
    theirs = np.bincount(np.searchsorted(ends, list(sampler), "right"), minlength=len(ends)) / rows
    np.testing.assert_allclose(ours, theirs, atol=0.05)
    of_classes = ours @ matrix
    np.testing.assert_allclose(of_classes, of_classes.mean(), atol=0.01)
    with pytest.raises(ValueError, match=r"Subset does not have get_crop_class_matrix"):
        CellMapDataLoader(torch.utils.data.Subset(dataset, range(9)), weighted_sampler=True)


def parts_of(volumes: Path, state: dict[str, Any] | None, world_size: int, workers: int, steps: int) -> Any:
    """Rows of the next steps in the order of all ranks, and the state after them."""
    rank_batches, states = [], []
    for rank in range(world_size):
        loader = CellMapDataLoader(
            dataset_of(volumes, AUGMENT),
            batch_size=12 // world_size,
            num_workers=workers,
            weighted_sampler=True,
            iterations_per_epoch=12 * 14,
            rng=torch.Generator().manual_seed(7),
            device="cpu",
            rank=rank,
            world_size=world_size,
        )
        if state is not None:
            loader.load_state_dict(state)
        rank_batches.append([batch for _, batch in zip(range(steps), loader, strict=False)])
        states.append(loader.state_dict())
        loader.loader.close()
    rows = [
        {name: tensor[row] for name, tensor in rank_batches[rank][step].items()}
        for step in range(steps)
        for row in range(12 // world_size)
        for rank in range(world_size)
    ]
    assert all(other == states[0] for other in states)
    return rows, states[0]


def test_resume_on_other_ranks_and_workers_equals_the_unbroken_run(volumes: Path) -> None:
    unbroken, _ = parts_of(volumes, None, 1, 0, 14)
    assert len({row["raw"].numpy().tobytes() for row in unbroken}) > 100, "augmented differently"
    found, state = parts_of(volumes, None, 2, 2, 4)
    more, state = parts_of(volumes, json.loads(json.dumps(state)), 4, 1, 5)
    rest, _ = parts_of(volumes, state, 1, 2, 5)
    for one, other in zip([*found, *more, *rest], unbroken, strict=True):
        same(one, other)
