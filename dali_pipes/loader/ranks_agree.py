"""A check that all ranks were told the same, before it takes effect."""

from typing import Any

import torch

from dali_pipes.errors import ConfigError


def refuse_differing_ranks(told: Any) -> None:
    """Raise `ConfigError` on every rank if `told` is not the same on all of them. Blocks until all have called.

    Without a process group nothing is compared.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, told)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise ConfigError(
                f"set_weights: rank {rank} differs from rank 0: {answer} and {answers[0]} (row, weights); call it on "
                "every rank after the same step, with the same weights"
            )
