"""Which rank of how many this process is, and which part of every row it gets.

given             rank, world_size (and context_parallel) of the configuration
a device mesh     its data-parallel dimensions number the ranks; ranks that differ elsewhere only, such as in tensor or
                  pipeline parallel dimensions, are the same rank here and get the same batches
torch.distributed, else RANK and WORLD_SIZE of the launcher's environment, else one rank alone
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError


def resolve_ranks(config: LoaderConfig) -> LoaderConfig:
    """Fill in rank and world size where the configuration leaves them out.

    From an initialised torch.distributed, else from the launcher's RANK and WORLD_SIZE, else one rank alone. Raises
    `ConfigError` when the launcher's variables are incomplete.
    """
    if config.rank is not None:
        return config
    found = process_group() or _launched() or (0, 1)
    if config.context_parallel is not None and found[1] > 1:
        raise ConfigError(
            f"context_parallel = {list(config.context_parallel)} without rank and world_size: of the {found[1]} "
            "processes some share their rows, so their own ranks say nothing; pass the data-parallel rank and "
            "world_size, or a device mesh"
        )
    return config.replace(rank=found[0], world_size=found[1])


def ranks_on_mesh(
    config: LoaderConfig, mesh: Any, data_dims: str | Sequence[str] | None, context_dim: str | None
) -> LoaderConfig:
    """The configuration with rank, world size and `context_parallel` from a `torch.distributed.device_mesh.DeviceMesh`.

    `data_dims` None is "dp"; several are counted row-major, the last one fastest; with none of them, (), all processes
    are one rank. Without a mesh (None) it stays as it is. Raises `ConfigError` for a dimension that the mesh does not
    have, or that is named twice, for dimensions without a mesh, and where the configuration names ranks too.
    """
    if mesh is None:
        if data_dims is not None or context_dim is not None:
            raise ConfigError("data_dims and context_dim name dimensions of a device mesh: pass it as mesh")
        return config
    _refuse_other_meshes(mesh)
    data_dims = "dp" if data_dims is None else data_dims
    if not isinstance(data_dims, str | list | tuple):
        raise ConfigError(f"data_dims = {shown(data_dims)}: expected the name of a mesh dimension, or a list of names")
    data_dims = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
    named = data_dims if context_dim is None else (*data_dims, context_dim)
    if len(set(named)) < len(named):
        raise ConfigError(
            f"data_dims {list(data_dims)} and context_dim {context_dim!r} name a dimension twice: ranks along it either"
            " get rows of their own or share them"
        )
    if config.rank is not None or (context_dim is not None and config.context_parallel is not None):
        raise ConfigError("a device mesh says the ranks; leave rank, world_size and context_parallel out")
    rank, world_size = 0, 1
    for name in data_dims:
        index, size = _place(mesh, name, "data_dims=")
        rank, world_size = rank * size + index, world_size * size
    context = {} if context_dim is None else {"context_parallel": _place(mesh, context_dim, "context_dim=")}
    return config.replace(rank=rank, world_size=world_size, **context)


def _refuse_other_meshes(mesh: Any) -> None:
    """Raise `ConfigError` for a mesh that does not know the ranks of processes, as a torch `DeviceMesh` does."""
    if all(hasattr(mesh, name) for name in ("mesh_dim_names", "get_local_rank", "size")):
        return
    of_jax = type(mesh).__module__.partition(".")[0] in ("jax", "jaxlib") or hasattr(mesh, "axis_names")
    example = "jax.process_index(), world_size=jax.process_count()" if of_jax else "..., world_size=..."
    raise ConfigError(
        f"mesh is a {type(mesh).__module__}.{type(mesh).__qualname__}, but only a torch DeviceMesh tells which rank a "
        f"process is: leave mesh out and pass the data-parallel rank and world size, rank={example}"
    )


_NAMED_BY = {
    "data_dims=": 'names those that number the ranks ("dp" where it is left out), () where all ranks get the same rows',
    "context_dim=": "names the one whose ranks share each row",
}


def _place(mesh: Any, name: str, argument: str) -> tuple[int, int]:
    """This process's place in a dimension of a mesh, which an argument named, and how long that is."""
    try:
        line = mesh[name]
    except (KeyError, RuntimeError) as error:  # the second for a mesh without any names
        names = ", ".join(mesh.mesh_dim_names or ()) or "none with a name"
        raise ConfigError(
            f"the device mesh has no dimension {name!r}; it has {names}: {argument} {_NAMED_BY[argument]}"
        ) from error
    return line.get_local_rank(), line.size()


class RankWatch:
    """Asks torch.distributed for a loader whether it still is the rank that it was built as. Safe for several threads.

    `given`: its ranks are those that it was told, and nobody is asked.
    """

    def __init__(self, *, given: bool) -> None:
        self.given = given
        self.settled = given
        """Whether a process group has agreed, so that it need not be asked at every batch."""
        self._lock = threading.RLock()

    def follow(
        self, config: Callable[[], LoaderConfig], become: Callable[[], None], *, handed_out: bool, again: bool
    ) -> None:
        """Call `become` if a process group came after `config` was resolved without any, which it then says.

        again: also ask where a group has agreed before, since another may have taken its place. Raises `ConfigError`
        where batches have been handed out since, and where that group or the launcher's variables had said something
        else.
        """
        if self.given or (self.settled and not again):
            return
        with self._lock:
            now, built = process_group(), config()
            if now is None:
                return
            if now != (built.rank, built.world_size):
                were_ranks = (
                    f"this loader was built as rank {built.rank} of {built.world_size}, but torch.distributed now "
                    f"says rank {now[0]} of {now[1]}"
                )
                if handed_out:
                    raise ConfigError(
                        f"{were_ranks}, and batches have been handed out; build the loader, or first iterate it, after "
                        "init_process_group, or pass rank and world_size"
                    )
                if self.settled or (built.rank, built.world_size) != (0, 1):
                    raise ConfigError(
                        f"{were_ranks}; build the loader after init_process_group, or pass rank and world_size"
                    )
                become()
            self.settled = True


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, None without one. Imports nothing."""
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
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ConfigError(
            f"the environment has only one of RANK and WORLD_SIZE: {missing} is missing or no whole number; set both, "
            "or pass rank and world_size"
        )
    return rank, world_size


def environment_number(name: str) -> int | None:
    """A whole number from the environment, None where there is none."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
