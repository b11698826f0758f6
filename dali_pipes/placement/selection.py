"""Which device a loader works for, and where it keeps the corpus: the placements by name, decisions, their reasons."""

from collections.abc import Callable

from dali_pipes.errors import BackendError
from dali_pipes.placement import cuda
from dali_pipes.placement.device import DevicePlacement
from dali_pipes.placement.gpu import GpuPlacement
from dali_pipes.placement.host import HostPlacement
from dali_pipes.placement.pinned import PinnedPlacement
from dali_pipes.placement.pool import PoolPlacement
from dali_pipes.placement.pool_order import HALVES, PoolOrder

GPU_PLACEMENTS: dict[str, type[GpuPlacement]] = {
    "host": HostPlacement,
    "device": DevicePlacement,
    "pinned": PinnedPlacement,
    "pool": PoolPlacement,
}
"""Those on a GPU; a new one needs a line here and its name in the setting.

"auto" chooses between the first two: "pinned" takes seconds to minutes to start, "pool" the time of a window, and no
card has shown their gain yet.
"""

DEVICE_SHARE = 0.1
"""Share of the free GPU memory that placement "auto" gives to the corpus when `max_device_bytes` is not set."""


def choose_device(
    requested: str, local_rank: int | None, gpu_problem: Callable[[], str | None] = lambda: None
) -> tuple[int | None, str]:
    """The CUDA device number, or None for the CPU, and the reason for the choice.

    "cuda" is the device that the process has made current, else the one of the launcher's local rank, else the first
    (also where a launcher shows each process one device alone). Only "auto" may fall back to the CPU. Raises
    `BackendError` when a requested GPU cannot be used.

    gpu_problem: returns why the consumer of the batches cannot use a GPU, None if it can; called if there is a GPU.
    """
    if requested == "cpu":
        return None, 'device = "cpu"'
    if requested == "auto":
        if not cuda.cuda_driver_present():
            return None, "no CUDA driver on this machine"
        try:
            count, number = cuda.visible_devices()
        except BackendError as error:
            return None, str(error)
    else:
        count, number = cuda.visible_devices()
    problem = gpu_problem()
    if problem is not None:
        if requested == "auto":
            return None, problem
        raise BackendError(f'device = "{requested}" cannot be used: {problem}; use device = "cpu"')
    if ":" in requested:
        number = int(requested.split(":")[1])
    elif number == 0 and local_rank is not None and count > 1:
        number = local_rank
    if number >= count:
        raise BackendError(
            f"device cuda:{number} does not exist: {count} device{'s are' if count != 1 else ' is'} visible, "
            "numbered from cuda:0; use one of them"
        )
    return number, f"device = {requested!r}"


def choose_placement(
    requested: str, device: int, corpus_bytes: int, max_device_bytes: int | None = None
) -> tuple[str, str]:
    """The name of the placement on a GPU, and the reason, for a split whose rows read `corpus_bytes`.

    Raises `BackendError` with the numbers where one that keeps the corpus on the GPU was asked for and does not fit;
    nothing is allocated.
    """
    reason = f'placement = "{requested}"'
    if requested != "auto" and not GPU_PLACEMENTS[requested].keeps_corpus:
        return requested, reason
    free = cuda.free_bytes(device)
    most = None if max_device_bytes is None else f"max_device_bytes = {max_device_bytes:,}"
    size, there = f"{corpus_bytes / 2**30:.3g} GiB", f"{free / 2**30:.3g} GiB free on cuda:{device}"
    if requested != "auto":
        for limit, text in ((max_device_bytes, most), (free, there)):
            if limit is not None and corpus_bytes > limit:
                raise BackendError(
                    f"{reason}: the corpus takes {size} ({corpus_bytes:,} bytes), more than {text}; use "
                    'placement = "host"'
                )
        return requested, reason
    budget, text = int(DEVICE_SHARE * free), f"{DEVICE_SHARE:.0%} of {there}"
    if max_device_bytes is not None and max_device_bytes <= free:
        budget, text = max_device_bytes, str(most)
    if corpus_bytes <= budget:
        return "device", f"the corpus of {size} fits in {text}"
    return "host", f"the corpus of {size} is more than {text}"


def require_pool(order: PoolOrder, token_bytes: int, device: int, max_device_bytes: int | None = None) -> None:
    """Raise `BackendError` with the numbers where two windows do not fit on the GPU; nothing is allocated."""
    slot_bytes = HALVES * order.slot_tokens * token_bytes
    free = cuda.free_bytes(device)
    limits = [(free, f"{free / 2**30:.3g} GiB free on cuda:{device}")]
    if max_device_bytes is not None:
        limits.insert(0, (max_device_bytes, f"max_device_bytes = {max_device_bytes:,}"))
    for limit, text in limits:
        if order.num_slots * slot_bytes > limit:
            fits = limit // slot_bytes
            smaller = f"shuffle_window = {fits:,} or less (which changes the order), or " if fits else ""
            size = order.num_slots * slot_bytes
            raise BackendError(
                f'placement = "pool": two windows of {order.num_slots:,} blocks take {size / 2**30:.3g} GiB '
                f'({size:,} bytes), more than {text}; use {smaller}placement = "host"'
            )
