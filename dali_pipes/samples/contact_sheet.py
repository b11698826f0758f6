"""A contact sheet: a picture of a batch, with one row of panels per sample. Needs matplotlib.

    item 77, row 3     [image]  [label map]  [z = 8] [z = 16] [z = 24]
    label 2

How the array of a sample is drawn depends on its axes. A first or last axis of size 1, 3 or 4 is the channels:

    (H, W), (C, H, W), (H, W, C)     an image, gray or in color; other numbers of channels look like a volume
    (D, H, W)                        slices of a volume, at a quarter, half and three quarters of its depth
    (C, D, H, W), (D, H, W, C)       the same for one channel; else the middle slice of each of the first channels
    (), text                         written next to the row
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.optional import optional_package

Array = npt.NDArray[Any]

_CHANNELS = (1, 3, 4)
_MOST_CHANNELS = 4
_MOST_LABELS = 20
_MOST_CHARACTERS = 30
_PANEL_INCHES = 2.0


class Panel(NamedTuple):
    """A column of the sheet: one picture of each sample, (H, W), or (H, W, 3 or 4) in color. low, high: of all of them.

    are_labels: whether equal numbers get equal colors, and neighbors different ones
    """

    title: str
    pictures: Sequence[Array]
    low: float
    high: float
    are_labels: bool


def write_contact_sheet(batch: Any, captions: Sequence[str], path: Path, heading: str = "") -> None:
    """Draw the first `len(captions)` samples of a batch. The suffix of `path` sets the format.

    batch: tensors or arrays whose first axis is the sample, lists of them, texts and numbers, nested in mappings and
           sequences

    Blocks. Raises `ConfigError` for a batch without images or volumes and for an unknown format, and `BackendError` if
    matplotlib is not installed.
    """
    with optional_package("matplotlib", "demo", purpose="to draw a batch"):
        from matplotlib.figure import Figure
    count = len(captions)
    fields = dict(_fields(batch, count))
    panels = [panel for name, values in fields.items() for panel in _panels(name, values)]
    if not panels:
        shapes = ", ".join(f"{name or 'the batch'} {values[0].shape}" for name, values in fields.items()) or "none"
        raise ConfigError(
            f"the batch does not contain images or volumes to draw; expected arrays of 2 to 4 axes, found: {shapes}"
        )
    notes = {name: values for name, values in fields.items() if not values[0].ndim}
    figure = Figure(figsize=(_PANEL_INCHES * (len(panels) + 0.6), _PANEL_INCHES * count + 0.7), layout="constrained")
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"{path}: expected a file name that ends in .png, .svg or .pdf")
    if heading:
        figure.suptitle(heading, parse_math=False)
    axes = figure.subplots(count, len(panels), squeeze=False)
    for row, caption in enumerate(captions):
        lines = [caption, *(f"{name} {_short(values[row])}" for name, values in notes.items())]
        axes[row, 0].set_ylabel("\n".join(lines), rotation=0, ha="right", va="center", parse_math=False)
        for panel, place in zip(panels, axes[row], strict=True):
            _draw(place, panel, panel.pictures[row])
    for panel, place in zip(panels, axes[0], strict=True):
        place.set_title(panel.title, fontsize="x-small", parse_math=False)
    figure.savefig(path)


def _fields(batch: Any, count: int, name: str = "") -> Iterator[tuple[str, list[Array]]]:
    """Name and values of each field, one array a sample: texts and numbers are arrays without axes."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        array = batch.detach().cpu() if isinstance(batch, torch.Tensor) else batch
        if isinstance(array, torch.Tensor):
            array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
        if array.ndim and len(array) >= count:
            yield name, list(array[:count])
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _fields(value, count, f"{name}.{key}".lstrip("."))
    elif isinstance(batch, list | tuple):
        if batch and len(batch) >= count and all(isinstance(value, str | int | float | bool) for value in batch):
            yield name, [np.array(value) for value in batch[:count]]
        elif isinstance(batch, list) and len(batch) >= count and _are_alike(batch):
            yield (
                name,
                [np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value) for value in batch[:count]],
            )
        elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
            yield from _fields(dict(zip(batch._fields, batch, strict=True)), count, name)
        else:
            for number, value in enumerate(batch):
                yield from _fields(value, count, f"{name}.{number}".lstrip("."))


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether they are samples of one field, of any size, rather than fields."""
    first = values[0]
    return isinstance(first, torch.Tensor | np.ndarray) and all(
        isinstance(value, type(first)) and value.ndim == first.ndim < 4 for value in values
    )


def _panels(name: str, values: Sequence[Array]) -> Iterator[Panel]:
    """What to show of one field."""
    if values[0].dtype.kind not in "biuf" or not 2 <= values[0].ndim <= 4 or not all(value.size for value in values):
        return
    low, high = _range(values)
    are_labels = values[0].dtype.kind in "iu" and high < _MOST_LABELS and low >= 0
    about = f"{values[0].dtype} {values[0].shape}\n{low:,.3g} to {high:,.3g}"
    for part, pictures in _parts([np.asarray(value) for value in values]).items():
        yield Panel(f"{name} {part}".strip() + f"\n{about}", pictures, low, high, are_labels and pictures[0].ndim == 2)


def _parts(values: list[Array]) -> dict[str, list[Array]]:
    """Pictures by what they are of the array."""
    shape = values[0].shape
    if len(shape) == 2:
        return {"": values}
    if shape[0] in _CHANNELS:
        values = [np.moveaxis(value, 0, -1) for value in values]  # channels last
    elif shape[-1] not in _CHANNELS:
        if len(shape) == 3:
            return _slices(values)
        values = [np.moveaxis(value, 0, -1) for value in values]
    channels = values[0].shape[-1]
    if channels == 1:
        plain = [value[..., 0] for value in values]
        return {"": plain} if len(shape) == 3 else _slices(plain)
    if len(shape) == 3:
        return {"": values}
    depths = [value.shape[0] // 2 for value in values]
    return {
        f"channel {channel}, z = {depths[0]}": [
            value[depth, ..., channel] for value, depth in zip(values, depths, strict=True)
        ]
        for channel in range(min(channels, _MOST_CHANNELS))
    }


def _slices(volumes: list[Array]) -> dict[str, list[Array]]:
    depth = volumes[0].shape[0]
    places = dict.fromkeys(depth * quarter // 4 for quarter in (1, 2, 3))
    return {f"z = {place}": [volume[min(place, len(volume) - 1)] for volume in volumes] for place in places}


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """The least and largest finite number."""
    finite = [value[np.isfinite(value)] if value.dtype.kind == "f" else value for value in values]
    filled = [value for value in finite if value.size]
    if not filled:
        return 0.0, 0.0
    return float(min(value.min() for value in filled)), float(max(value.max() for value in filled))


def _draw(place: Any, panel: Panel, picture: Array) -> None:
    place.set(xticks=[], yticks=[])
    if picture.ndim == 3:
        if picture.dtype != np.uint8:
            low, high = (0.0, 1.0) if panel.low >= 0 and panel.high <= 1 else (panel.low, panel.high)
            picture = np.nan_to_num((picture.astype(np.float64) - low) / ((high - low) or 1.0)).clip(0, 1)
        place.imshow(picture)
    elif panel.are_labels and panel.high > 1:
        place.set_facecolor("black")  # of label 0
        place.imshow(
            np.ma.masked_equal(picture, 0), cmap="tab20", vmin=0, vmax=_MOST_LABELS - 1, interpolation="nearest"
        )
    else:
        high = panel.high if panel.high > panel.low else panel.low + 1
        place.imshow(picture.astype(np.float32), cmap="gray", vmin=panel.low, vmax=high, interpolation="nearest")


def _short(value: Array) -> str:
    text = f"{value.item():.4g}" if value.dtype.kind == "f" else str(value.item())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
