"""The rank and world size of this process, and its part of every row. The first of these that says it:

given               rank, world_size (and context_parallel) of the configuration
a device mesh       its data-parallel dimensions number the ranks; processes that differ only in other dimensions, such
                    as tensor or pipeline parallel ones, are the same rank here and get the same batches
torch.distributed   if it is initialized
the launcher        RANK and WORLD_SIZE in the environment
otherwise           rank 0 of 1
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError


def resolve_ranks(config: LoaderConfig) -> LoaderConfig:
    """Fill in rank and world size if the configuration leaves them out.

    From torch.distributed if it is initialized, else from RANK and WORLD_SIZE, else rank 0 of 1. Raises `ConfigError`
    if the environment has only one of the two.
    """
    if config.rank is not None:
        return config
    found = found_ranks()
    if config.context_parallel is not None and found[1] > 1:
        raise ConfigError(
            f"context_parallel = {list(config.context_parallel)} needs rank and world_size: some of the {found[1]} "
            "processes share their rows, so the process rank is not the data-parallel rank; pass the data-parallel "
            "rank and world_size, or a device mesh"
        )
    return config.replace(rank=found[0], world_size=found[1])


def found_ranks() -> tuple[int, int]:
    """Rank and world size of this process by what surrounds it, see `resolve_ranks`."""
    return process_group() or _launched() or (0, 1)


def ranks_on_mesh(
    config: LoaderConfig, mesh: Any, data_dims: str | Sequence[str] | None, context_dim: str | None
) -> LoaderConfig:
    """The configuration with rank, world size and `context_parallel` from a `torch.distributed.device_mesh.DeviceMesh`.

    `data_dims` None is "dp"; several are counted row-major, the last one fastest; with (), all processes are one rank.
    Without a mesh (None) the configuration is unchanged. Raises `ConfigError` for a dimension that the mesh does not
    have or that is named twice, for dimensions without a mesh, and if the configuration sets ranks too.
    """
    if mesh is None:
        if data_dims is not None or context_dim is not None:
            raise ConfigError("data_dims and context_dim name dimensions of a device mesh; pass the mesh too, mesh=...")
        return config
    refuse_other_meshes(mesh)
    data_dims = "dp" if data_dims is None else data_dims
    if not isinstance(data_dims, str | list | tuple):
        raise ConfigError(f"data_dims = {shown(data_dims)}: expected the name of a mesh dimension, or a list of names")
    data_dims = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
    named = data_dims if context_dim is None else (*data_dims, context_dim)
    if len(set(named)) < len(named):
        raise ConfigError(
            f"data_dims {list(data_dims)} and context_dim {context_dim!r} name a dimension twice: ranks along a "
            "dimension either get different rows or share rows; name each dimension once"
        )
    if config.rank is not None or (context_dim is not None and config.context_parallel is not None):
        raise ConfigError(
            "the ranks come from the device mesh; remove rank, world_size and context_parallel, or do not pass mesh"
        )
    rank, world_size = rank_on_mesh(mesh, data_dims)
    context = {} if context_dim is None else {"context_parallel": _place(mesh, context_dim, "context_dim=")}
    return config.replace(rank=rank, world_size=world_size, **context)


def rank_on_mesh(mesh: Any, data_dims: Sequence[str]) -> tuple[int, int]:
    """Rank and world size along dimensions of a mesh, row-major. Raises `ConfigError` for an unknown dimension."""
    rank, world_size = 0, 1
    for name in data_dims:
        index, size = _place(mesh, name, "data_dims=")
        rank, world_size = rank * size + index, world_size * size
    return rank, world_size


def refuse_other_meshes(mesh: Any) -> None:
    """Raise `ConfigError` for a mesh that is not a torch `DeviceMesh` and does not know the ranks of processes."""
    if all(hasattr(mesh, name) for name in ("mesh_dim_names", "get_local_rank", "size")):
        return
    of_jax = type(mesh).__module__.partition(".")[0] in ("jax", "jaxlib") or hasattr(mesh, "axis_names")
    advice = (
        "pass a LoaderConfig and the mesh to dali_pipes.adapters.jax.jax_batches"
        if of_jax
        else "pass the data-parallel rank and world size instead, rank=..., world_size=..."
    )
    raise ConfigError(
        f"mesh is a {type(mesh).__module__}.{type(mesh).__qualname__}, expected a torch DeviceMesh, which knows the "
        f"rank of each process; {advice}"
    )


_NAMED_BY = {
    "data_dims=": 'set it to the dimensions whose ranks get different rows ("dp" by default), or to () if none do',
    "context_dim=": "set it to the dimension whose ranks share each row",
}


def _place(mesh: Any, name: str, argument: str) -> tuple[int, int]:
    """This process's place in a dimension of a mesh, which an argument named, and the size of the dimension."""
    try:
        line = mesh[name]
    except (KeyError, RuntimeError) as error:  # the second for a mesh without names
        names = ", ".join(mesh.mesh_dim_names or ()) or "unnamed dimensions"
        raise ConfigError(
            f"{argument}{name!r} is not a dimension of the device mesh, which has {names}; {_NAMED_BY[argument]}"
        ) from error
    return line.get_local_rank(), line.size()


def check_ranks(rank: int | None, world_size: int | None) -> bool:
    """Whether torch.distributed is initialized with the rank and world size that a loader was built for.

    Raises `ConfigError` if it has others: the process would get the rows of another rank.
    """
    group = process_group()
    if group is not None and group != (rank, world_size):
        raise ConfigError(
            f"this loader was built as rank {rank} of {world_size}, but this process is now rank "
            f"{group[0]} of {group[1]} in torch.distributed; build the loader after init_process_group, or pass rank "
            "and world_size"
        )
    return group is not None


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, None if there is none. Imports nothing."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # not there in a build without it
    if is_initialized is None or not is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _launched() -> tuple[int, int] | None:
    rank, world_size = environment_number("RANK"), environment_number("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        found, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ConfigError(
            f"the environment sets {found}, but {missing} is not set or not an integer; build the loader after "
            "init_process_group (with Lightning, in train_dataloader), or pass rank and world_size"
        )
    return rank, world_size


def environment_number(name: str) -> int | None:
    """An integer from the environment, None if it is not set or not an integer."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
