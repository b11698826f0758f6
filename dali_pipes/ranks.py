"""Which rank of how many this process is: of torch.distributed, else of the launcher's environment."""

import os
import sys

from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError


def resolve_ranks(config: LoaderConfig) -> LoaderConfig:
    """Fill in rank and world size where the configuration leaves them out.

    From an initialised torch.distributed, else from the launcher's RANK and WORLD_SIZE, else one rank alone. Raises
    `ConfigError` when the launcher's variables are incomplete.
    """
    if config.rank is not None:
        return config
    group = process_group()
    if group is not None:
        return config.replace(rank=group[0], world_size=group[1])
    rank, world_size = environment_number("RANK"), environment_number("WORLD_SIZE")
    if rank is None and world_size is None:
        return config.replace(rank=0, world_size=1)
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ConfigError(
            f"the environment has only one of RANK and WORLD_SIZE: {missing} is missing or no whole number; set both, "
            "or pass rank and world_size"
        )
    return config.replace(rank=rank, world_size=world_size)


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, None without one. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def environment_number(name: str) -> int | None:
    """A whole number from the environment, None where there is none."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
