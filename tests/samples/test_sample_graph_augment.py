"""Augmentation by keyed numbers: a sample looks the same in any order, batch size and number of threads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graphs import NUM_DRAWS, jpeg, numbers_of, run

from dali_pipes.samples.gaussian_noise import keyed_noise
from dali_pipes.samples.graph import SampleGraph

fn = pytest.importorskip("nvidia.dali.fn")
types = pytest.importorskip("nvidia.dali.types")
math = pytest.importorskip("nvidia.dali.math")

ROWS = 10
IMAGES = [{"image": jpeg(row, (40 + 3 * row, 52 - 2 * row)), "label": row} for row in range(ROWS)]
VOLUMES = [
    {"volume": np.random.default_rng(row).integers(0, 255, (9, 10 + row, 11, 2), dtype=np.uint8)} for row in range(ROWS)
]
Graph = Callable[[Any, Any], Any]


def is_below(number: Any, share: float) -> Any:
    """For flips, which take int32."""
    return fn.cast(number < share, dtype=types.INT32)


def random_resized_crop(nodes: Any, u: Any) -> Any:
    """As torchvision's, but cut off where it would reach out: area from 8% on, ratio from 3/4 to 4/3, place."""
    shape = fn.cast(fn.peek_image_shape(nodes["image"]), dtype=types.FLOAT)
    area, ratio = shape[0] * shape[1] * (0.08 + 0.92 * u[0]), math.exp((u[1] * 2 - 1) * float(np.log(4 / 3)))
    height = math.floor(math.min(math.sqrt(area / ratio), shape[0]))
    width = math.floor(math.min(math.sqrt(area * ratio), shape[1]))
    first = fn.stack(math.floor(u[2] * (shape[0] - height)), math.floor(u[3] * (shape[1] - width)))
    crop = fn.decoders.image_slice(
        nodes["image"],
        fn.cast(first, dtype=types.INT32),
        fn.cast(fn.stack(height, width), dtype=types.INT32),
        axis_names="HW",
        device="cpu",
    )
    return fn.resize(crop, size=(32, 32))


def images(nodes: Any, u: Any) -> Any:
    image = random_resized_crop(nodes, u)
    image = fn.flip(image, horizontal=is_below(u[4], 0.5))
    image = fn.rotate(image, angle=(u[5] - 0.5) * 60, keep_size=True, fill_value=0)
    image = fn.color_twist(image, hue=u[6] * 30, saturation=0.5 + u[7], contrast=0.5 + u[8], brightness=0.5 + u[9])
    matrix = fn.transforms.shear(shear=fn.stack(u[10] * 0.3, u[11] * 0.3), center=(16, 16))
    image = fn.warp_affine(image, matrix, fill_value=0, inverse_map=False)
    noisy = fn.cast(image, dtype=types.FLOAT) + 5 * keyed_noise(u, (32, 32, 3))
    return {"image": image, "noisy": noisy, "label": nodes["label"]}


def volumes(nodes: Any, u: Any) -> Any:
    """Everything that works in 3D on a CPU. DHWC: `rotate` and `warp_affine` need the channels."""
    volume = fn.reshape(nodes["volume"], layout="DHWC")
    volume = fn.flip(
        volume, horizontal=is_below(u[0], 0.5), vertical=is_below(u[1], 0.5), depthwise=is_below(u[2], 0.5)
    )
    volume = fn.crop(volume, crop=(8, 9, 10), crop_pos_x=u[3], crop_pos_y=u[4], crop_pos_z=u[5])
    sliced = fn.slice(
        volume,
        fn.stack(u[0] * 2, u[1] * 2, u[2] * 2),
        (6.0, 6.0, 6.0),
        axes=[0, 1, 2],
        normalized_anchor=False,
        normalized_shape=False,
    )
    turned = fn.rotate(volume, angle=u[6] * 90, axis=(1, 0, 0), keep_size=True, fill_value=0)
    matrix = fn.transforms.rotation(angle=u[7] * 40, axis=(0, 0, 1), center=(5, 4.5, 4))
    warped = fn.warp_affine(turned, matrix, fill_value=0)
    small = fn.resize(warped, size=(5, 6, 7), interp_type=types.INTERP_LINEAR)
    smooth = fn.gaussian_blur(warped, sigma=0.5 + u[8], window_size=3)
    padded = fn.pad(smooth, axis_names="DHW", shape=[12, 12, 12], fill_value=7)
    floats = fn.normalize(fn.cast(padded, dtype=types.FLOAT), axis_names="DHW")
    return {"sliced": sliced, "small": small, "normalized": floats * (1 + u[9]) + keyed_noise(u, (12, 12, 12, 1))}


@pytest.mark.parametrize(("graph", "samples"), [(images, IMAGES), (volumes, VOLUMES)], ids=["images", "volumes"])
def test_samples_depend_on_their_numbers_alone(graph: Graph, samples: list[Any]) -> None:
    numbers = numbers_of(range(ROWS))
    whole = run(graph, samples, numbers, num_threads=1)
    assert all(torch.isfinite(output.float()).all() for output in whole.values())
    assert len(torch.unique(whole[next(iter(whole))].flatten(1), dim=0)) == ROWS
    order = np.random.default_rng(0).permutation(ROWS)
    for batch_size, num_threads in ((1, 1), (3, 2), (ROWS, 4)):
        one = SampleGraph(graph, num_draws=NUM_DRAWS, device_id=None, num_threads=num_threads, depth=3)
        parts = [order[first : first + batch_size] for first in range(0, ROWS, batch_size)]
        for part in parts:
            one.submit([samples[row] for row in part], numbers[part])
        for part in parts:
            for name, found in one.result().items():
                assert torch.equal(found, whole[name][part.tolist()]), name
        one.close()


@pytest.mark.parametrize(("graph", "samples"), [(images, IMAGES), (volumes, VOLUMES)], ids=["images", "volumes"])
def test_other_numbers_make_other_samples(graph: Graph, samples: list[Any]) -> None:
    """The test above could not fail if the numbers were not used."""
    first = run(graph, samples[:4], numbers_of(range(4)))
    other = run(graph, samples[:4], numbers_of(range(4, 8)))
    for name in set(first) - {"label"}:
        assert not any(torch.equal(*pair) for pair in zip(first[name], other[name], strict=True)), name


def test_draws_do_what_they_say() -> None:
    """Flip and crop against NumPy, on a volume."""

    def graph(nodes: Any, u: Any) -> Any:
        volume = fn.reshape(nodes, layout="DHWC")
        volume = fn.crop(volume, crop=(4, 5, 6), crop_pos_z=u[0], crop_pos_y=u[1], crop_pos_x=u[2])
        return fn.flip(volume, horizontal=is_below(u[3], 0.5), depthwise=is_below(u[4], 0.5))

    samples = [np.random.default_rng(row).integers(0, 60_000, (7, 9, 11, 1), dtype=np.uint16) for row in range(20)]
    numbers = numbers_of(range(20))
    found = run(graph, samples, numbers).numpy()
    assert {bool(draw) for draw in (numbers[:, 3:5] < 0.5).ravel()} == {False, True}
    for sample, own, result in zip(samples, numbers, found, strict=True):
        first = [
            int(np.rint(draw * np.float32(size - crop)))
            for draw, size, crop in zip(own, sample.shape, (4, 5, 6), strict=False)
        ]
        expected = sample[tuple(slice(at, at + size) for at, size in zip(first, (4, 5, 6), strict=True))]
        expected = expected[:, :, ::-1] if own[3] < 0.5 else expected
        assert np.array_equal(result, expected[::-1] if own[4] < 0.5 else expected)


def test_image_and_mask_move_together() -> None:
    """A mask of the bright pixels stays one: all operators take the same numbers and nearest neighbors."""

    def moved(image: Any, u: Any) -> Any:
        image = fn.flip(image, horizontal=is_below(u[0], 0.5))
        image = fn.crop(image, crop=(24, 24), crop_pos_x=u[1], crop_pos_y=u[2])
        image = fn.rotate(image, angle=u[3] * 360, keep_size=True, fill_value=0, interp_type=types.INTERP_NN)
        matrix = fn.transforms.scale(scale=fn.stack(0.7 + u[4], 0.7 + u[5]), center=(12, 12))
        return fn.warp_affine(image, matrix, fill_value=0, interp_type=types.INTERP_NN)

    def graph(nodes: Any, u: Any) -> Any:
        return {name: moved(fn.reshape(node, layout="HWC"), u) for name, node in nodes.items()}

    samples = []
    for row in range(8):
        image = np.random.default_rng(row).integers(0, 256, (32, 36, 1), dtype=np.uint8)
        samples.append({"image": image, "mask": (image > 127).astype(np.uint8)})
    batch = run(graph, samples)
    assert torch.equal(batch["mask"], (batch["image"] > 127).to(torch.uint8))
    assert 0.1 < batch["mask"].float().mean() < 0.6
