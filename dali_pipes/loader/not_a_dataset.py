"""What is done with data sets elsewhere, and with a loader would be wrong or go wrong: refused in words."""

import sys
from inspect import getattr_static
from typing import NoReturn

import torch

from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError


class _Setting:
    """A setting looked for on the loader itself. What is set there would have no effect, so it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: type) -> NoReturn:
        raise AttributeError(f"a TokenLoader keeps its settings in loader.config: read loader.config.{self._name}")

    def __set__(self, loader: object, value: object) -> NoReturn:
        raise AttributeError(
            f"the settings of a TokenLoader do not change: build another one, TokenLoader(loader.config, "
            f"{self._name}=...), and load the state of this one"
        )


class NotADataSet:
    """Is not indexed, copied or sent to other processes, and has no settings that could be set."""

    def __init_subclass__(cls) -> None:
        # Descriptors, not __setattr__, which would cost something for whatever a loader sets at each batch.
        for name in LoaderConfig.model_fields.keys() - set(dir(cls)):
            setattr(cls, name, _Setting(name))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(getattr_static(type(self), name, None), _Setting)]

    def __getitem__(self, index: object) -> NoReturn:
        """What a DataLoader, or a trainer that makes one, asks of a data set. Raises TypeError."""
        raise TypeError(
            "a TokenLoader is iterated, not indexed: it takes the place of a DataLoader, so hand it to the trainer "
            "as it is (transformers' Trainer: dali_pipes.huggingface.loader_trainer)"
        )

    @property
    def dataset(self) -> NoReturn:
        """What a DataLoader has: others look whether there is one, and go on without (AttributeError).

        Raises TypeError for Accelerate, which takes a DataLoader apart to share its batches out or to skip some.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate."):
            raise TypeError(
                "a TokenLoader already delivers the batches of this rank: iterate over it directly "
                "(accelerator.prepare returns it unchanged). To resume within an epoch, save loader.state_dict() and "
                "use load_state_dict(); to skip batches, set skip_steps"
            )
        raise AttributeError(
            "a TokenLoader does not wrap a data set: it replaces a DataLoader, so iterate over it directly"
        )

    def __reduce__(self) -> NoReturn:
        """What copies and pickles ask for. Raises TypeError."""
        raise TypeError(
            "a TokenLoader has threads and cannot be copied or pickled: build one from loader.config where it is "
            "needed, and load the state of this one"
        )


def refuse_workers(*, ranks_given: bool) -> None:
    """Raise `ConfigError` in one of several workers of a torch `DataLoader`, unless ranks tell them apart."""
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1 and not ranks_given:
        raise ConfigError(
            f"this loader is built in worker {worker.id} of {worker.num_workers} of a DataLoader, each of which would "
            "hand out the same rows; iterate it in the trainer's process, or pass rank and world_size"
        )
