"""`CellMapDataLoader`: the arguments of cellmap-data's loader, with an order that all ranks share and that resumes.

from dali_pipes.adapters.cellmap import CellMapDataLoader      # instead of: from cellmap_data import CellMapDataLoader

Weighted sampling visits crops as often as cellmap-data's `ClassBalancedSampler` does in the long run. It takes the
class that was seen least, then one of the crops that annotate it, which counts for all classes of that crop:

    crop       a      b      c            class "mito" is in a and b, "er" in c alone
    classes    mito   mito   er           so c is visited as often as a and b together: weights 1, 1, 2
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from dali_pipes.errors import ConfigError
from dali_pipes.samples.sample_loader import SampleLoader

_STEPS_PER_CLASS = 1000
_PART = 1_000_000


class CellMapDataLoader:
    """Loads a `CellMapDataset`, a `CellMapMultiDataset` or a similar dataset with a `SampleLoader`, its `loader`.

    weighted_sampler:     with `is_train`, balance classes by crop; the dataset must define `get_crop_class_matrix()`
    sampler:              a torch sampler to use instead; see `SampleLoader`
    is_train:             False keeps the order of the dataset
    rng:                  its initial seed is the seed of order and augmentation, the same on all ranks; None: `seed` in
                          `kwargs`, by default 0
    device:               device of the batches; None: the GPU if torch sees one. cellmap-data returns them on the CPU
    iterations_per_epoch: samples per epoch over all ranks, with or without weights; None: the length of the dataset
    kwargs:               other settings of `SampleLoader`, such as `drop_last`, `seed`, `rank`

    Raises `ConfigError` like `SampleLoader`, and if `weighted_sampler` is set and the classes of the crops are unknown.
    """

    def __init__(
        self,
        dataset: Any,
        classes: Sequence[str] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        weighted_sampler: bool = False,
        sampler: Any = None,
        is_train: bool = True,
        rng: torch.Generator | None = None,
        device: str | torch.device | None = None,
        iterations_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.dataset, self.batch_size, self.num_workers, self.is_train = dataset, batch_size, num_workers, is_train
        self.classes = list(getattr(dataset, "classes", []) if classes is None else classes)
        settings = {"num_workers": num_workers, "collate_fn": self.collate_fn, **kwargs}
        if rng is not None:
            settings["seed"] = rng.initial_seed() % 2**63
        if sampler is not None:
            settings["sampler"] = sampler
        elif is_train:
            settings |= class_weights(dataset) if weighted_sampler else {}
            settings.setdefault("shuffle", True)
            if iterations_per_epoch is not None:
                settings["num_samples"] = iterations_per_epoch
        self._settings = settings
        self.loader = SampleLoader(dataset, batch_size, device="auto" if device is None else device, **settings)

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.loader.device

    @staticmethod
    def collate_fn(batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack tensors; collect other values in lists."""
        found: dict[str, Any] = {}
        for name in batch[0]:
            values = [item[name] for item in batch]
            found[name] = torch.stack(values) if all(isinstance(value, torch.Tensor) for value in values) else values
        return found

    def to(self, device: str | torch.device) -> Self:
        """Deliver the next batches on another device. Ends an iteration in progress; keeps the position."""
        if hasattr(self.dataset, "to"):
            self.dataset.to(device)
        state = self.state_dict()
        self.loader.close()
        self.loader = SampleLoader(self.dataset, self.batch_size, device=device, **self._settings)
        self.load_state_dict(state)
        return self

    def state_dict(self) -> dict[str, Any]:
        """See `SampleLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `SampleLoader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def class_weights(dataset: Any) -> dict[str, Any]:
    """`groups` and `weights` of a `SampleLoader` that visits all classes equally often, as far as crops allow it.

    A crop is a part of a `ConcatDataset`, or else an equal share of the items, as cellmap-data has it.
    """
    if not hasattr(dataset, "get_crop_class_matrix"):
        raise ConfigError(
            f"weighted_sampler = True: {type(dataset).__name__} does not have get_crop_class_matrix(), so the classes "
            "of its crops are unknown; pass weighted_sampler=False, or for a Subset the original dataset"
        )
    matrix = np.asarray(dataset.get_crop_class_matrix(), bool)
    ends = getattr(dataset, "cumulative_sizes", None)
    if ends is None:
        shares = [len(part) for part in np.array_split(np.empty(len(dataset), np.uint8), len(matrix))]
        ends = np.cumsum(shares).tolist()
    starts = [0, *ends[:-1]]
    filled = [crop for crop, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
    weights = _visits(matrix[filled])
    if not weights.any():
        raise ConfigError("weighted_sampler = True: none of the crops has annotations; pass weighted_sampler=False")
    names = [f"crop {crop}" for crop in filled]
    return {
        "groups": {name: range(starts[crop], ends[crop]) for name, crop in zip(names, filled, strict=True)},
        "weights": dict(zip(names, weights.tolist(), strict=True)),
    }


def _visits(matrix: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How often each crop (row) is visited, in proportion. A class visits all its crops in part: nothing is random."""
    crops = matrix.sum(axis=0)
    active = np.flatnonzero(crops)
    part = _PART // np.maximum(crops, 1)  # of a visit that each crop of a class gets
    shared = matrix.astype(np.int64).T @ matrix
    seen = np.zeros(len(crops), np.int64)
    times = np.zeros(len(crops), np.int64)
    for _ in range(_STEPS_PER_CLASS * len(active)):
        chosen = active[np.argmin(seen[active])]
        times[chosen] += 1
        seen += shared[chosen] * part[chosen]
    visits: npt.NDArray[np.int64] = matrix @ (times * part)
    return visits
