"""Which rows a process needs: the shards of the data axes of a mesh, and the ranks of a loader that deliver them.

    mesh (data: 4, model: 2), data_axes = ("data",)        process 0            process 1
                                                        ┌─────────────┐      ┌─────────────┐
    device                                               0 1   2 3            4 5   6 7
    data shard = rank of a loader with world_size 4       0     1              2     3

The numbers come from the sharding's map of devices, not from the process index: processes that differ only along other
axes find the same shards, and get the same rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError


class Feed(NamedTuple):
    """A loader that this process needs, and the data shards that its rows go to.

    Its row i goes to shard `shards[i % len(shards)]`.
    """

    rank: int
    world_size: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class DataShards:
    """The data shards of a mesh, as this process sees them."""

    sharding: Any
    """`NamedSharding` of a batch: rows over the data axes."""
    count: int
    """Data shards of the mesh."""
    of_device: dict[Any, int]
    """The shard of each device of this process."""
    described: str
    """The mesh and the data axes, for messages."""

    @classmethod
    def of(cls, mesh: Any, data_axes: str | Sequence[str]) -> "DataShards":
        """Raises `ConfigError` for what is not a `jax.sharding.Mesh`, and for unknown or repeated axes."""
        import jax

        if not isinstance(mesh, jax.sharding.Mesh):
            raise ConfigError(
                f"mesh is a {type(mesh).__module__}.{type(mesh).__qualname__}, expected a jax.sharding.Mesh, such as "
                'jax.make_mesh((jax.device_count(),), ("data",))'
            )
        axes = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
        sizes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown or len(set(axes)) < len(axes):
            problem = f"{unknown[0]!r} is not an axis" if unknown else "an axis is listed twice"
            raise ConfigError(
                f"data_axes = {shown(list(axes))}: expected distinct axes of the mesh ({sizes}), but {problem}; list "
                "the axes along which devices get different rows"
            )
        described = f"the mesh ({sizes}) with data_axes = {shown(list(axes))}"
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes or None))
        count = math.prod(mesh.shape[axis] for axis in axes)
        places = sharding.addressable_devices_indices_map((count,))
        if not places:
            raise ConfigError(
                f"process {jax.process_index()} of {jax.process_count()} does not have a device in {described}; call "
                "jax_batches only in processes with devices in the mesh"
            )
        return cls(sharding, count, {device: index[0].start or 0 for device, index in places.items()}, described)

    @property
    def local(self) -> tuple[int, ...]:
        """The shards of this process, in order."""
        return tuple(sorted(set(self.of_device.values())))

    def feeds(self, *, may_be_one: bool) -> tuple[Feed, ...]:
        """The loaders that deliver the shards of this process: one, if its shards are evenly spaced, else one each.

        A loader of rank r of W / n with n times the batch size delivers the rows of the ranks r, r + W / n, ... of W,
        in turn: row i of an epoch belongs to rank i % W. In a program of one process, these are all shards.

        may_be_one: False: one loader for each shard in any case
        """
        local = self.local
        spacing = self.count // len(local)
        if may_be_one and spacing * len(local) == self.count and local == tuple(range(local[0], self.count, spacing)):
            return (Feed(local[0], spacing, local),)
        return tuple(Feed(shard, self.count, (shard,)) for shard in local)
