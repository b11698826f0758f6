"""A batch of a `SampleLoader` that a script or package makes, named `module:attribute` on the command line."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_pipes.errors import ConfigError

if TYPE_CHECKING:
    from dali_pipes.samples.order import SampleLocation
    from dali_pipes.samples.sample_loader import SampleLoader

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class SamplesPreview:
    """The picture of a batch, and the samples in it."""

    path: Path
    dataset: str
    epoch: int
    step: int
    samples: tuple["SampleLocation", ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "dataset": self.dataset,
            "epoch": self.epoch,
            "step": self.step,
            "samples": [sample._asdict() for sample in self.samples],
        }


def names_loader(argument: str) -> bool:
    """Whether an argument is `module:attribute` rather than a file or data."""
    return _NAME.fullmatch(argument) is not None and not Path(argument).exists()


def preview_samples(name: str, step: int, epoch: int, rows: int, path: Path) -> SamplesPreview:
    """Write a contact sheet of a batch. Imports the module, which may be in the current folder.

    name: `module:attribute`; a `SampleLoader`, a function without arguments that returns one, or an object with a
          `SampleLoader` as its `loader`, such as a `CellMapDataLoader`

    Raises `ConfigError` for other names, and like `SampleLoader.preview`.
    """
    loader = _loader(name)
    try:
        samples = loader.preview(step, path, epoch=epoch, rows=rows)
    finally:
        loader.close()
    return SamplesPreview(path, type(loader.dataset).__name__, epoch, step, tuple(samples))


def _loader(name: str) -> "SampleLoader":
    from dali_pipes.samples.sample_loader import SampleLoader

    module_name, _, attributes = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of a package that the module needs
        raise ConfigError(
            f"{name}: module {error.name!r} was not found; run the command in its folder, or install its package"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(
                f"{name}: module {module_name!r} does not define {attributes!r}; name a SampleLoader, or a function "
                "without arguments that returns one"
            )
        found = getattr(found, attribute)
    if callable(found) and not isinstance(found, SampleLoader):
        found = found()
    found = found if isinstance(found, SampleLoader) else getattr(found, "loader", found)
    if not isinstance(found, SampleLoader):
        raise ConfigError(
            f"{name}: found an object of type {type(found).__name__}, expected a SampleLoader, or a function without "
            "arguments that returns one"
        )
    return found
