"""Datasets of samples, as a user writes them: JPEGs and crops of a volume with random augmentation, and small arrays.

Each sample ends with its item number, so that a batch can be checked against the order that its loader reports.
"""

import io
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from dali_pipes.samples.encoded_files import EncodedFiles

IMAGE_SIZE, CROPPED_SIZE = 256, 224
FILES = 256
"""JPEGs on the disk; longer datasets repeat them."""
VOLUME_SIZE, CROP_SIZE = 256, 64
BATCH_SIZES = {"jpeg": 32, "volume": 4, "arrays": 64}


class Jpegs(Dataset[tuple[torch.Tensor, int]]):
    """Decoded by PIL, random resized crop to 224 x 224 as torchvision's, and flipped: uint8 (224, 224, 3)."""

    def __init__(self, folder: Path, items: int) -> None:
        self.paths = jpeg_paths(folder, items)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[item]).convert("RGB")
        box = _random_box(*image.size)
        resized = image.resize((CROPPED_SIZE, CROPPED_SIZE), Image.Resampling.BILINEAR, box)
        if random.random() < 0.5:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(resized)), item


class Crops(Dataset[tuple[torch.Tensor, int]]):
    """Random crops of 64^3 of a zarr volume, flipped along random axes: uint8 (64, 64, 64)."""

    def __init__(self, folder: Path, items: int) -> None:
        self.path, self.items = str(folder / "volume.zarr"), items
        self.volume: Any = None

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        if self.volume is None:  # each worker opens its own
            import zarr

            self.volume = zarr.open_array(self.path, mode="r")
        at = [random.randint(0, size - CROP_SIZE) for size in self.volume.shape]
        crop = self.volume[tuple(slice(begin, begin + CROP_SIZE) for begin in at)]
        flips = tuple(axis for axis in range(3) if random.random() < 0.5)
        return torch.from_numpy(np.ascontiguousarray(np.flip(crop, flips))), item


class Arrays(Dataset[tuple[torch.Tensor, int]]):
    """Rows of 256 floats that are in memory: what a loader itself costs."""

    def __init__(self, folder: Path, items: int) -> None:
        self.rows = torch.zeros(items, 256)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        return self.rows[item], item


DATASETS = {"jpeg": Jpegs, "volume": Crops, "arrays": Arrays}


def encoded_jpegs(folder: Path, items: int) -> EncodedFiles:
    """The files of `Jpegs`, for `decode_and_crop`."""
    return EncodedFiles(jpeg_paths(folder, items), range(items))


def decode_and_crop(nodes: Any, u: Any) -> Any:
    """What `Jpegs` does to an image, by DALI and with keyed numbers. The crop is cut off where it would reach out."""
    from nvidia.dali import fn, math, types

    shape = fn.cast(fn.peek_image_shape(nodes["image"]), dtype=types.FLOAT)
    area, ratio = shape[0] * shape[1] * (0.08 + 0.92 * u[0]), math.exp((2 * u[1] - 1) * float(np.log(4 / 3)))
    height = math.floor(math.min(math.sqrt(area / ratio), shape[0]))
    width = math.floor(math.min(math.sqrt(area * ratio), shape[1]))
    first = fn.stack(math.floor(u[2] * (shape[0] - height)), math.floor(u[3] * (shape[1] - width)))
    image = fn.decoders.image_slice(
        nodes["image"],
        fn.cast(first, dtype=types.INT32),
        fn.cast(fn.stack(height, width), dtype=types.INT32),
        axis_names="HW",
        device="cpu",
    )
    image = fn.resize(image, size=(CROPPED_SIZE, CROPPED_SIZE))
    return fn.flip(image, horizontal=fn.cast(u[4] < 0.5, dtype=types.INT32)), nodes["label"]


def jpeg_paths(folder: Path, items: int) -> list[str]:
    """As many as items, repeating the files."""
    files = sorted(str(path) for path in (folder / "jpegs").iterdir())
    return (files * -(-items // len(files)))[:items]


def make_data(folder: Path) -> str | None:
    """Write the JPEGs and the volume. Returns why there is no volume, if zarr is not installed."""
    (folder / "jpegs").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(FILES):
        spots = Image.fromarray(generator.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        pixels = np.asarray(spots.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC), np.int16)
        noisy = (pixels + generator.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
        encoded = io.BytesIO()
        Image.fromarray(noisy).save(encoded, "JPEG", quality=90)
        (folder / "jpegs" / f"{number:04d}.jpg").write_bytes(encoded.getvalue())
    try:
        import zarr
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    volume = zarr.create_array(
        str(folder / "volume.zarr"), shape=(VOLUME_SIZE,) * 3, chunks=(CROP_SIZE,) * 3, dtype="uint8"
    )
    volume[:] = _smooth_volume(generator)
    return None


def _smooth_volume(generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Blocks with some noise, which compress as micrographs do, to about a half."""
    small = generator.integers(0, 240, (VOLUME_SIZE // 8,) * 3, dtype=np.uint8)
    volume = small.repeat(8, 0).repeat(8, 1).repeat(8, 2)
    return volume + generator.integers(0, 16, volume.shape, dtype=np.uint8)


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """As torchvision's `RandomResizedCrop.get_params`, with `random` in place of torch's generator."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height
