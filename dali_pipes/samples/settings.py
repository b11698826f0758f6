"""Settings of a `SampleLoader`: checked, and turned into ranks and an order."""

import difflib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.utils.data import DistributedSampler, WeightedRandomSampler

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.ranks import found_ranks, rank_on_mesh, refuse_other_meshes
from dali_pipes.samples.grouped import GroupedItems, read_group_weights, read_groups
from dali_pipes.samples.order import ItemOrder, Passes
from dali_pipes.samples.sampled import SampledItems
from dali_pipes.samples.weighted import WeightedItems

_OF_TORCH = {
    "batch_sampler": "the batches of a batch_sampler cannot be split across ranks or resumed; use batch_size, shuffle, "
    "sampler, weights or drop_last instead",
    "generator": "the order depends on seed; pass seed instead",
    "pin_memory_device": "pass device instead",
    "in_order": "batches are always delivered in order; remove in_order",
}
_HARMLESS = {"batch_sampler": None, "generator": None, "pin_memory_device": "", "in_order": True}


def refuse_torch_settings(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `ConfigError` for settings of `DataLoader` that do not apply, and TypeError for unknown ones."""
    for name, value in given.items():
        if name not in _OF_TORCH:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"SampleLoader got an unexpected keyword argument {name!r}{hint}")
        if value != _HARMLESS[name]:
            raise ConfigError(f"{name} = {shown(value)}: {_OF_TORCH[name]}")


def check_settings(
    *,
    batch_size: object,
    num_workers: object,
    timeout: Any,
    multiprocessing_context: object,
    prefetch_factor: object,
    seed: object,
    num_samples: object,
    num_draws: object,
    pin_memory: object,
    collates: bool,
) -> None:
    """Raise `ConfigError` for a value that is not valid."""
    if batch_size is None:
        raise ConfigError(
            "batch_size = None is not supported. For samples without a batch axis, use batch_size=1 and "
            "collate_fn=lambda samples: samples[0]"
        )
    _whole("batch_size", batch_size, 1)
    _whole("num_workers", num_workers, 0)
    _whole("prefetch_factor", prefetch_factor, 1)
    _whole("num_draws", num_draws, 1)
    _whole("seed", seed, 0)
    if num_samples is not None:
        _whole("num_samples", num_samples, 1)
    if not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
        raise ConfigError(f"timeout = {shown(timeout)}: expected seconds, 0 or more")
    for name, value in (("timeout", timeout), ("multiprocessing_context", multiprocessing_context)):
        if value and not num_workers:
            raise ConfigError(f"{name} = {shown(value)} needs worker processes: set num_workers, or remove {name}")
    if pin_memory not in ("auto", True, False):
        raise ConfigError(f'pin_memory = {shown(pin_memory)}: expected True, False or "auto"')
    if not collates:
        raise ConfigError("collate_fn and graph cannot be combined, because the graph makes the batches; remove one")


def chosen_ranks(
    rank: int | None, world_size: int | None, mesh: Any, data_dims: str | Sequence[str] | None
) -> tuple[int, int]:
    """The rank and world size as given, of the mesh, or detected. Raises `ConfigError` if they do not fit."""
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise ConfigError(
                f"rank = {rank} and world_size = {world_size} are set, but mesh determines the ranks; remove either"
            )
        refuse_other_meshes(mesh)
        dims = "dp" if data_dims is None else data_dims
        return rank_on_mesh(mesh, (dims,) if isinstance(dims, str) else tuple(dims))
    if data_dims is not None:
        raise ConfigError(
            f"data_dims = {shown(data_dims)} names dimensions of a device mesh, but mesh is not set; pass mesh=..."
        )
    if rank is None and world_size is None:
        return found_ranks()
    if rank is None or world_size is None:
        raise ConfigError(f"rank = {rank} and world_size = {world_size}: pass both, or neither")
    _whole("world_size", world_size, 1)
    _whole("rank", rank, 0)
    if rank >= world_size:
        raise ConfigError(f"rank = {rank:,}: expected 0 to {world_size - 1:,}, below world_size = {world_size:,}")
    return operator.index(rank), operator.index(world_size)


def chosen_order(
    length: int,
    *,
    shuffle: bool | None,
    sampler: Any,
    weights: Any,
    groups: Any,
    num_samples: int | None,
    seed: int,
) -> ItemOrder:
    """The order of a dataset of `length` items. Raises `ConfigError` for settings that contradict each other."""
    if sampler is not None:
        others = {"shuffle": shuffle or None, "weights": weights, "groups": groups, "num_samples": num_samples}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"sampler determines the order and cannot be combined with {', '.join(given)}; remove one of them"
            )
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "sampler = DistributedSampler: the loader already splits the rows across ranks, so the data would be "
                "split twice; remove the sampler and set shuffle=True"
            )
        if not isinstance(sampler, WeightedRandomSampler) or not sampler.replacement:
            return SampledItems(sampler, length, seed)
        weights, num_samples = sampler.weights, sampler.num_samples
    if groups is not None:
        read = read_groups(groups, length)
        return GroupedItems(read, read_group_weights(weights, list(read)), num_samples, seed)
    num_rows = length if num_samples is None else int(num_samples)
    if weights is not None:
        if isinstance(weights, Mapping):
            raise ConfigError(
                f"weights = {shown(weights)} is a dict of weights by group, but groups is not set; pass groups, or a "
                "list of one number per item"
            )
        return WeightedItems(weights, length, num_rows, seed)
    return Passes(length, num_rows, seed, shuffle=bool(shuffle))


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or not least <= operator.index(value) < 2**63:
        raise ConfigError(f"{name} = {shown(value)}: expected an integer, {least} or more and below 2**63")
