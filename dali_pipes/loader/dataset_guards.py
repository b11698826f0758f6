"""Guards against using a loader as a data set: indexing, wrapping, copying, pickling, setting settings."""

import sys
from inspect import getattr_static
from typing import NoReturn

import torch

from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError


class _Setting:
    """A setting that is read from or set on the loader itself, where it would have no effect."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: type) -> NoReturn:
        raise AttributeError(f"settings of a TokenLoader are in loader.config: read loader.config.{self._name}")

    def __set__(self, loader: object, value: object) -> NoReturn:
        raise AttributeError(
            f"settings of a TokenLoader cannot be changed: build another loader, TokenLoader(loader.config, "
            f"{self._name}=...), and load the state of this one"
        )


class DatasetGuards:
    """For a class that is not indexed, copied, pickled or wrapped, and whose settings cannot be set."""

    def __init_subclass__(cls) -> None:
        # Descriptors, not __setattr__, which would slow down whatever a loader sets at each batch.
        for name in LoaderConfig.model_fields.keys() - set(dir(cls)):
            setattr(cls, name, _Setting(name))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(getattr_static(type(self), name, None), _Setting)]

    def __getitem__(self, index: object) -> NoReturn:
        """Called by a DataLoader, or a trainer that makes one, on its data set. Raises TypeError."""
        raise TypeError(
            "a TokenLoader cannot be indexed: it replaces a DataLoader, so pass it to the trainer directly "
            "(transformers' Trainer: dali_pipes.huggingface.loader_trainer)"
        )

    @property
    def dataset(self) -> NoReturn:
        """An attribute of DataLoaders: libraries check for it, and do without (AttributeError).

        Raises TypeError for Accelerate, which takes a DataLoader apart to shard its batches or to skip some.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate."):
            raise TypeError(
                "a TokenLoader already delivers the batches of this rank: iterate over it directly "
                "(accelerator.prepare returns it unchanged). To resume within an epoch, save loader.state_dict() and "
                "call load_state_dict(); to skip batches, set skip_steps"
            )
        raise AttributeError(
            "a TokenLoader does not have a dataset: it replaces a DataLoader, so iterate over it directly"
        )

    def __reduce__(self) -> NoReturn:
        """Called to copy or pickle. Raises TypeError."""
        raise TypeError(
            "a TokenLoader cannot be copied or pickled: build another one from loader.config where it is needed, and "
            "load the state of this one"
        )


def refuse_workers(*, ranks_given: bool) -> None:
    """Raise `ConfigError` in one of several workers of a torch `DataLoader`, unless each has its own rank."""
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1 and not ranks_given:
        raise ConfigError(
            f"this loader was built in worker {worker.id} of {worker.num_workers} of a DataLoader, and each worker "
            "would deliver the same rows; iterate over it in the trainer's process, or pass rank and world_size"
        )
