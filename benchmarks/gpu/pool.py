"""What the placement "pool" does on a card: batches of the CPU's, memory of two windows, and its rate beside "host"."""

import itertools
import time
from typing import Any
from unittest.mock import patch

from dali_pipes import TokenLoader
from dali_pipes.rows import make
from dali_pipes.rows.block_order import BLOCK_TOKENS
from gpu.batches import ALL_OUTPUTS, difference
from gpu.parity import run, two_epochs
from gpu.session import Session

_POOL: dict[str, Any] = {"device": "cuda", "placement": "pool"}
_HOST: dict[str, Any] = {"device": "cuda", "placement": "host"}


def _settings(session: Session, tokens: int, shape: tuple[int, int], **more: Any) -> dict[str, Any]:
    batch_size, seq_len = shape
    settings = {"corpus": session.corpus("pool", tokens, files=2), "batch_size": batch_size, "seq_len": seq_len}
    settings |= {"seed": 3, "order": "blocks", "shuffle_window": 4, "outputs": ALL_OUTPUTS, "quiet": True}
    return settings | {"rank": 0, "world_size": 1} | more


def pool_batches(session: Session) -> None:
    """Windows of 3 and 4 blocks, which change in the middle of blocks of batches; and a run that moves about."""
    shape = session.pick((8, 512), (2, 16))
    rows = shape[0] * 12
    settings = _settings(session, rows * shape[1] * 22 + 100, shape, batches_per_run=3)
    pieces = {"outputs": (*ALL_OUTPUTS, "position_ids", "cu_seqlens"), "eos_id": 7, "mtp": 2}
    padded = {"drop_last": False, "rank": 1, "world_size": 2}
    drop = padded | {"objective": [{"kind": "drop", "rate": 0.3, "drop_id": 9}]}
    variants: tuple[dict[str, Any], ...] = ({}, {"stride": 11}, {"random_offset": True}, pieces, padded, drop)
    for variant in variants:
        with patch.object(make, "BLOCK_TOKENS", rows * variant.get("stride", shape[1])):
            expected = two_epochs(settings | variant | {"device": "cpu"})
            problem = difference(two_epochs(settings | variant | _POOL), expected)
            session.verify(f"pool, {' '.join(map(str, variant)) or 'plain windows'}", problem)
    with patch.object(make, "BLOCK_TOKENS", rows * shape[1]):
        whole = run(settings | {"device": "cpu", "repeat": True}, None, 60)[0]
        got, state = [], None
        for place, count in ((_POOL, 13), ({"device": "cpu"}, 9), (_HOST, 8), (_POOL, 30)):
            part, state = run(settings | place | {"repeat": True}, state, count)
            got += part
        session.verify("pool, a run resumed in the middle of windows", difference(got, whole))


def pool_memory_and_rate(session: Session) -> None:
    """Blocks as large as they are: two windows of memory and no more; an epoch at full speed, beside "host"."""
    block_tokens = session.pick(BLOCK_TOKENS, 1 << 12)
    shape = session.pick((16, 1024), (2, 16))
    settings = _settings(session, 4 * 4 * block_tokens + 1, shape, outputs=("input_ids", "labels"))
    seconds: dict[str, float] = {}
    held: dict[str, int] = {}
    with patch.object(make, "BLOCK_TOKENS", block_tokens):
        for place in (
            _HOST,
            _POOL,
            _HOST,
            _POOL,
        ):  # the better of two, each second one with all files in the page cache
            name = str(place["placement"])
            with TokenLoader(**settings, **place) as loader:
                batches = iter(loader)
                next(batches)  # of the pool, after its first window
                begin = time.perf_counter()
                count = sum(1 for _ in batches)
                session.machine.synchronize()
                seconds[name] = min(seconds.get(name, float("inf")), (time.perf_counter() - begin) / count)
                before = loader.stats().memory.device_bytes
                for _ in itertools.islice(loader, 20):
                    pass
                held[name] = loader.stats().memory.device_bytes
                grown = held[name] - before
                session.verify(f"device memory of {name} does not grow", f"by {grown:,} bytes" if grown else "")
    windows = 2 * 4 * (block_tokens + 1) * 2
    extra = held["pool"] - windows
    problem = "" if 0 <= extra < held["host"] else f"{held['pool']:,} bytes, of which two windows are {windows:,}"
    session.verify("the pool takes two windows beside the arrays of a block", problem)
    tokens = shape[0] * shape[1]
    for name, of_name in seconds.items():
        session.figure(f"order by blocks, {name}: rate of an epoch", tokens / of_name / 1e6, "Mtok/s")
    session.figure("order by blocks: rate of pool against host", seconds["host"] / seconds["pool"], "x")
