"""From the batches of loaders to arrays on a mesh, in one of two ways:

host     batches in host memory, which JAX copies to its devices (CPU, TPU, GPU); one loader for several data shards
device   one loader for each GPU; JAX copies each batch on its GPU

On a CPU, JAX may share the memory of a batch, which the loader does not reuse as long as an array refers to it. On a
GPU, JAX copies the batch, because the loader cannot know when JAX has finished using its memory.
"""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dali_pipes.adapters.jax.data_shards import DataShards, Feed
from dali_pipes.adapters.jax.fields import Fields
from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError

if TYPE_CHECKING:
    from dali_pipes.loader.token_loader import TokenLoader

Batch = Mapping[str, Any]


class Placement(Protocol):
    """A way from loaders to arrays."""

    feeds: tuple[Feed, ...]
    """The loaders that this process needs."""

    def open_loaders(self, config: LoaderConfig) -> "list[TokenLoader]":
        """A loader for each feed, whose `batch_size` is that of `config` for each data shard."""

    def arrays(self, batches: Sequence[Batch], fields: Fields) -> dict[str, Any]:
        """The global arrays of a step, from the batch of each loader. Does not wait for copies to devices."""

    def close(self) -> None:
        """Wait for copies in progress."""


class HostPlacement:
    """Rows in host memory, as NumPy arrays."""

    def __init__(self, shards: DataShards, *, may_be_one: bool) -> None:
        self._shards = shards
        self.feeds = shards.feeds(may_be_one=may_be_one)

    def open_loaders(self, config: LoaderConfig) -> "list[TokenLoader]":
        return opened(config, self.feeds, ["cpu"] * len(self.feeds))

    def arrays(self, batches: Sequence[Batch], fields: Fields) -> dict[str, Any]:
        named = [fields.of_batch({name: _on_host(values) for name, values in one.items()}, np) for one in batches]
        return {name: self._array([batch[name] for batch in named]) for name in named[0]}

    def _array(self, values: list[Any]) -> Any:
        """One array of all data shards: the callback is asked for the rows of each device of this process."""
        import jax

        if isinstance(values[0], int):
            return values[0]
        rows = len(values[0]) // len(self.feeds[0].shards)
        of_shard = {
            shard: part[number :: len(feed.shards)]
            for feed, part in zip(self.feeds, values, strict=True)
            for number, shard in enumerate(feed.shards)
        }
        shape = (rows * self._shards.count, *values[0].shape[1:])
        return jax.make_array_from_callback(
            shape, self._shards.sharding, lambda index: of_shard[(index[0].start or 0) // rows]
        )

    def close(self) -> None:
        pass


def _on_host(values: Any) -> Any:
    return values if isinstance(values, int) else np.asarray(values)


class DevicePlacement:
    """A loader for each device of this process, with its batches already on the device."""

    def __init__(self, shards: DataShards) -> None:
        self._shards = shards
        self.feeds = tuple(Feed(shard, shards.count, (shard,)) for shard in shards.of_device.values())
        self._in_use: deque[tuple[list[Any], list[Any]]] = deque()
        """The tensors of a step that JAX may still be copying, and what is ready when it has copied them."""

    def open_loaders(self, config: LoaderConfig) -> "list[TokenLoader]":
        devices = [
            f"cuda:{device.local_hardware_id}" if device.platform == "gpu" else "cpu" for device in self._devices
        ]
        return opened(config, self.feeds, devices)

    def arrays(self, batches: Sequence[Batch], fields: Fields) -> dict[str, Any]:
        import torch

        while self._in_use and all(copy.is_ready() for copy in self._in_use[0][0]):
            self._in_use.popleft()
        last: list[Any] = []
        sources: list[Any] = []
        self._in_use.append((last, sources))
        named: list[dict[str, Any]] = []
        for batch, device in zip(batches, self._devices, strict=True):
            arrays = fields.of_batch(batch, torch)
            for name, values in arrays.items():
                if isinstance(values, torch.Tensor):
                    sources.append(values)
                    arrays[name] = _copy(values, device)
            # The trainer may donate the arrays, which cannot be asked for anything then; so nobody else gets this one.
            last.append(_copy(sources[-1], device))
            named.append(arrays)
        return {name: self._array([arrays[name] for arrays in named]) for name in named[0]}

    def _array(self, values: list[Any]) -> Any:
        import jax

        if isinstance(values[0], int):
            return values[0]
        shape = (len(values[0]) * self._shards.count, *values[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._shards.sharding, values)

    def close(self) -> None:
        import jax

        while self._in_use:
            jax.block_until_ready(self._in_use.popleft()[0])

    @property
    def _devices(self) -> list[Any]:
        return list(self._shards.of_device)


def _copy(tensor: Any, device: Any) -> Any:
    """A copy of a tensor as an array of JAX, whose stream waits for what torch has queued on the tensor's device."""
    import jax
    import torch

    # `from_dlpack` waits for the current stream of the current device.
    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        return jax.device_put(jax.dlpack.from_dlpack(tensor), device, may_alias=False)


def opened(config: LoaderConfig, feeds: Sequence[Feed], devices: Sequence[str]) -> "list[TokenLoader]":
    """A loader for each feed; if one cannot be opened, none stays open."""
    from dali_pipes.loader.token_loader import TokenLoader

    loaders: list[TokenLoader] = []
    try:
        for number, (feed, device) in enumerate(zip(feeds, devices, strict=True)):
            own = config.replace(
                rank=feed.rank,
                world_size=feed.world_size,
                batch_size=config.batch_size * len(feed.shards),
                index_dtype="int32",
                device=device,
                quiet=config.quiet or number > 0,
            )
            loaders.append(TokenLoader(own))
    except BaseException:
        for loader in loaders:
            loader.close()
        raise
    return loaders


def placement_for(shards: DataShards, config: LoaderConfig, loader: "TokenLoader | None") -> Placement:
    """The placement for a configuration, or for a loader that was built from it. Raises `ConfigError`."""
    import torch

    for name in ("context_parallel", "static_buffers", "batch_tokens"):
        if getattr(config, name):
            reason = {
                "context_parallel": "rows are delivered whole; shard their positions with jax.device_put or jax.jit",
                "static_buffers": "JAX arrays must not change when the next batch arrives",
                "batch_tokens": "its batches may differ between the shards of a step; set batch_size",
            }[name]
            raise ConfigError(f"{name} = {getattr(config, name)} is not supported by jax_batches, remove it: {reason}")
    on_gpu = all(device.platform == "gpu" for device in shards.of_device)
    if loader is not None:
        placement = DevicePlacement(shards) if loader.device.type == "cuda" else _host(shards, config)
        _refuse_other_loaders(shards, placement, loader, on_gpu=on_gpu)
        return placement
    if config.rank is not None:
        raise ConfigError(
            f"rank = {config.rank} and world_size = {config.world_size} are set, but jax_batches takes them from "
            f"{shards.described}; remove both settings"
        )
    direct = on_gpu and config.device in ("auto", "cuda") and torch.cuda.is_available()
    if config.device not in ("auto", "cpu") and not direct:
        found = "torch does not see a GPU" if on_gpu else f"the mesh is on {next(iter(shards.of_device)).platform}"
        if on_gpu and config.device != "cuda":
            found = "jax_batches opens a loader for each GPU of the mesh"
        raise ConfigError(f'device = "{config.device}", but {found}; set device = "auto"')
    return DevicePlacement(shards) if direct else _host(shards, config)


def _host(shards: DataShards, config: LoaderConfig) -> HostPlacement:
    # Without drop_last, the last batch of a loader need not be a multiple of its shards.
    return HostPlacement(shards, may_be_one=config.drop_last)


def _refuse_other_loaders(shards: DataShards, placement: Placement, loader: "TokenLoader", *, on_gpu: bool) -> None:
    """Raise `ConfigError` for a loader that does not deliver the rows of this process, or not as JAX needs them."""
    config, feed = loader.config, placement.feeds[0]
    if config.index_dtype != "int32":
        raise ConfigError(
            f'the loader has index_dtype = "{config.index_dtype}", but JAX arrays are int32; build it with '
            'index_dtype = "int32"'
        )
    if loader.device.type == "cuda" and not on_gpu:
        raise ConfigError(
            f"the loader is on {loader.device}, but the mesh is on {next(iter(shards.of_device)).platform}; build the "
            'loader with device = "cpu"'
        )
    if len(placement.feeds) > 1:
        keep = "" if config.drop_last or loader.device.type == "cuda" else ", or set drop_last = True"
        raise ConfigError(
            f"this process has the data shards {list(shards.local)} of {shards.count} on {shards.described}, and needs "
            f"{len(placement.feeds)} loaders; pass a LoaderConfig with batch_size set to the rows of one shard{keep}"
        )
    if (config.rank, config.world_size) != (feed.rank, feed.world_size):
        raise ConfigError(
            f"the loader is rank {config.rank} of {config.world_size}, but this process has the data shards "
            f"{list(feed.shards)} of {shards.count} on {shards.described}; pass a LoaderConfig, or build the loader "
            f"with rank = {feed.rank} and world_size = {feed.world_size}"
        )
    if config.batch_size % len(feed.shards):
        raise ConfigError(
            f"batch_size = {config.batch_size} of the loader does not divide evenly over the {len(feed.shards)} data "
            f"shards of this process, on {shards.described}; use a multiple of {len(feed.shards)}"
        )
