"""How fast this card and its link copy at all: what kernels, placements and corpus loads are held against."""

import torch

from gpu.machine import Machine
from gpu.session import Session

_CALLS = 5
DEVICE_COPY, PINNED_COPY, PAGEABLE_COPY = "device copy, read + write", "copy from pinned", "copy from pageable"


def ceilings(session: Session) -> dict[str, float]:
    """Bytes a second of large copies: on the device, and to it from both kinds of host memory. Measured once a run."""
    return session.kept("ceilings", lambda: _measure(session))


def device_copy_rate(machine: Machine, moved_bytes: int) -> float:
    """Bytes read and written a second by a device copy that moves `moved_bytes` in all."""
    source = torch.zeros(moved_bytes // 2, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / machine.timed(lambda: target.copy_(source), calls=20)


def _measure(session: Session) -> dict[str, float]:
    machine, size = session.machine, session.pick(2**28, 2**16)
    target = torch.empty(size, dtype=torch.uint8, device=machine.device)
    pinned, pageable = machine.pinned(size).zero_(), torch.zeros(size, dtype=torch.uint8)
    return {
        DEVICE_COPY: device_copy_rate(machine, 2 * size),
        PINNED_COPY: size / machine.timed(lambda: target.copy_(pinned, non_blocking=True), calls=_CALLS),
        PAGEABLE_COPY: size / machine.timed(lambda: target.copy_(pageable), calls=_CALLS),
    }
