"""The rows of a curriculum by plain loops, one row of the order after another: slow, and apart from the code."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dali_pipes.operators import permute

Steps = Sequence[tuple[int, int]]


class Piece(NamedTuple):
    """A row: part `part`, of `seq_len` tokens, of a row of the order."""

    place: int
    part: int
    seq_len: int


class Walked(NamedTuple):
    rows: list[Piece]
    step_ends: list[int]
    """Numbers of rows after which an optimizer step is complete."""


def value_at(steps: Steps, tokens: int) -> int:
    return [value for at, value in steps if at <= tokens][-1]


def walk_epoch(
    num_places: int, order_len: int, seq_len: Steps, global_batch: Steps, *, epoch: int, seed: int, shuffle: bool = True
) -> Walked:
    """An epoch of `num_places` rows of the order, of a run whose epochs are all as long."""
    before = epoch * num_places

    def wanted(place: int) -> tuple[int, int]:
        tokens = (before + place) * order_len
        return value_at(seq_len, tokens), value_at(global_batch, tokens)

    rows: list[Piece] = []
    ends: list[int] = []
    length, size = wanted(0)
    in_step, since = 0, 0
    group: list[Piece] = []
    for place in range(num_places):
        at_step_end = in_step == 0 or (not ends and not rows)
        if not group and since and in_step % size == 0 and at_step_end and wanted(place) != (length, size):
            length, size = wanted(place)
            since, in_step = 0, 0
        group += [Piece(place, part, length) for part in range(order_len // length)]
        since += 1
        if since % 64 and place + 1 < num_places:
            continue
        if shuffle and length < order_len:
            group = shuffled(group, first=place + 1 - ((since - 1) % 64 + 1), epoch=epoch, seed=seed)
        for piece in group:
            rows.append(piece)
            in_step = (in_step + 1) % size
            if in_step == 0:
                ends.append(len(rows))
        group = []
    whole = ends[-1] if ends else 0
    return Walked(rows[:whole], ends)


def shuffled(group: list[Piece], *, first: int, epoch: int, seed: int) -> list[Piece]:
    """The pieces of the 64 places from `first` on."""
    assert first % 64 == 0
    digest = hashlib.sha256(f"dali_pipes parts {seed} {epoch}".encode()).digest()
    z = (int.from_bytes(digest[:8], "little") + (first // 64 + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % 2**64
    return [group[int(permute(np.array([row]), len(group), z ^ z // 2**31)[0])] for row in range(len(group))]
