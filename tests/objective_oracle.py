"""The rules of objectives for one row, by plain loops over Python's integers: slow, and written apart from the code."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.operators import permute

WORD = 2**64
BASE = 0x9E3779B97F4A7C15


def splitmix64(seed: int, number: int) -> int:
    """Output `number`, counted from 1."""
    word = (seed + number * 0x9E3779B97F4A7C15) % WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def key_of(*words: object) -> int:
    text = " ".join(map(str, ("dali_pipes", *words)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def is_dropped(before: Sequence[int], k: int) -> bool:
    """Whether goldfish drops a token, by the tokens before it, the nearest last."""
    total = sum(splitmix64(token % WORD, 1) * pow(BASE, i, WORD) for i, token in enumerate(reversed(before), 1))
    return splitmix64(total % WORD, 1) >> 32 < 2**32 // k


class Row(NamedTuple):
    """A row without an objective, and where it is."""

    ids: list[int]
    labels: list[int]
    length: int
    """Tokens; the rest is padding."""
    start: int
    """Of its first token in its source."""
    place: int
    """In its epoch."""
    epoch: int
    number_of_pass: int
    seed: int = 0
    source: str | None = None

    @property
    def key(self) -> int:
        names = () if self.source is None else (json.dumps(self.source),)
        return splitmix64(key_of("objective", self.seed, *names, self.number_of_pass), self.start + 1)


def mlm(row: Row, entry: Mapping[str, Any], rate: int, vocab_size: int) -> dict[str, list[int]]:
    """rate: of 2**32."""
    inputs, labels = [*row.ids], [-100] * len(row.ids)
    special = {*entry.get("special_ids", ()), entry["mask_id"]}
    for t, token in enumerate(row.ids[: row.length]):
        first, word = t, splitmix64(row.key, 2 * t + 1)
        starts: list[int] | None = entry.get("starts")
        while starts and first and not (starts[row.ids[first]] or {row.ids[first], row.ids[first - 1]} & special):
            first -= 1
        if token in special or splitmix64(row.key, 2 * first + 1) >> 32 >= rate:
            continue
        labels[t] = token
        share = word % 2**32 * 10
        if share >= 2 * 2**32 // 10 * 10:
            inputs[t] = entry["mask_id"]
        elif word % 2**32 < 2**32 // 10:
            inputs[t] = (splitmix64(row.key, 2 * t + 2) >> 32) * vocab_size >> 32
    return {"input_ids": inputs, "labels": labels}


def diffusion(row: Row, entry: Mapping[str, Any]) -> dict[str, Any]:
    group, inside = divmod(row.place, 64)
    strata_key = splitmix64(key_of("objective strata", row.seed, row.epoch), group + 1)
    stratum = int(permute(np.array([inside]), 64, strata_key)[0])
    share = (stratum << 26) + (splitmix64(row.key, 2**62 + 1) >> 38)
    least = 2**32 // 1000
    rate = least + (share * (2**32 - least) >> 32)
    special = {*entry.get("special_ids", ()), entry["mask_id"]}
    masked = [
        int(t < row.length and token not in special and splitmix64(row.key, 2 * t + 1) >> 32 < rate)
        for t, token in enumerate(row.ids)
    ]
    noisy = [entry["mask_id"] if hidden else token for token, hidden in zip(row.ids, masked, strict=True)]
    labels = [token if hidden else -100 for token, hidden in zip(row.ids, masked, strict=True)]
    p_mask = float(np.float32(rate / 2**32))
    return {"input_ids": row.ids, "noisy_ids": noisy, "masked": masked, "labels": labels, "p_mask": p_mask}


def prefix(row: Row) -> dict[str, Any]:
    length = (splitmix64(row.key, 2**62 + 2) >> 32) * (row.length + 1) >> 32
    labels = [-100 if t + 1 < length else label for t, label in enumerate(row.labels)]
    return {"input_ids": row.ids, "labels": labels, "prefix_lengths": length}


def drop(row: Row, entry: Mapping[str, Any], rate: int) -> dict[str, list[int]]:
    inputs = [
        entry["drop_id"] if t < row.length and splitmix64(row.key, 2 * t + 1) >> 32 < rate else token
        for t, token in enumerate(row.ids)
    ]
    return {"input_ids": inputs, "labels": row.labels}


def by_kind(
    kind: str,
    row: Row,
    of_mlm: Mapping[str, Any],
    of_diffusion: Mapping[str, Any],
    of_drop: Mapping[str, Any],
    ids: int,
) -> dict[str, Any]:
    """What the rule of a kind makes of a row: `mlm` at a rate of 2/5, with a vocabulary of `ids`, and `drop` at 1/4."""
    expected: dict[str, dict[str, Any]] = {
        "mlm": mlm(row, of_mlm, 2 * 2**32 // 5, ids),
        "diffusion": diffusion(row, of_diffusion),
        "prefix": prefix(row),
        "drop": drop(row, of_drop, 2**30),
    }
    return expected[kind]


def spans(row: Row, entry: Mapping[str, Any], pad_id: int = 0) -> dict[str, list[int]]:
    """The fields without padding, by T5's functions: a mask of noise, and a sentinel for each run of it, or of others.

    entry: with all settings; rates and lengths are fractions, and mean_length None is one span at the end.
    """
    ids, draw = row.ids[: row.length], splitmix64(row.key, 2**62 + 3) >> 32
    total = sum(own["weight"] for own in entry["denoisers"])
    passed = list(itertools.accumulate(own["weight"] for own in entry["denoisers"]))
    own = entry["denoisers"][[draw < weight * 2**32 // total for weight in passed].index(True)]
    mask = noise_mask(len(ids), own["rate"], own["mean_length"], row.key)
    end = [] if entry["end_id"] is None else [entry["end_id"]]
    mode = [] if own["mode_token"] is None else [own["mode_token"]]
    inputs = mode + with_sentinels(ids, mask, entry)
    targets = with_sentinels(ids, [not noise for noise in mask], entry) + end
    if len(ids) == 1:  # whose span is empty
        inputs.append(entry["sentinels"])
    start = pad_id if entry["start_id"] is None else entry["start_id"]
    return {
        "encoder_ids": inputs + end,
        "decoder_input_ids": [start, *targets],
        "decoder_labels": targets,
        "causal_ids": inputs + targets,
        "causal_labels": [-100] * (len(inputs) - 1) + targets,  # of the next position
    }


def noise_mask(length: int, rate: Fraction, mean_length: Fraction | None, key: int) -> list[bool]:
    """T5's `random_spans_noise_mask`, with a keyed choice of the places of cuts."""
    if length == 1:
        return [False]
    noise = min(max(round(length * rate), 1), length - 1)
    count = 1 if mean_length is None else max(round(noise / mean_length), 1)
    count = min(count, noise, length - noise)

    def lengths(items: int, number: int) -> list[int]:
        own = splitmix64(key, 2**62 + 3 + number)
        cuts = [place + 1 for place in drawn_places(items - 1, count - 1, own)]
        return [end - begin for begin, end in itertools.pairwise([0, *cuts, items])]

    pairs = zip(lengths(length - noise, 1), lengths(noise, 2), strict=True)
    return [is_noise for pair in pairs for is_noise in (False, True) for _ in range(pair[is_noise])]


def drawn_places(places: int, wanted: int, key: int) -> list[int]:
    """Rising. Of equally likely draws, by Lemire's rejection, the first that differ; or what those leave over."""
    draws = (half for number in itertools.count(1) for half in divmod(splitmix64(key, number), 2**32))
    needed, found = min(wanted, places - wanted), set[int]()
    while len(found) < needed:
        place, rest = divmod(next(draws) * places, 2**32)
        if rest >= 2**32 % places:
            found.add(place)
    return sorted(found if needed == wanted else set(range(places)) - found)


def with_sentinels(ids: Sequence[int], mask: Sequence[bool], entry: Mapping[str, Any]) -> list[int]:
    """T5's `noise_span_to_unique_sentinel`."""
    found: list[int] = []
    sentinel = entry["sentinels"] - entry["sentinel_step"]
    for t, (token, is_noise) in enumerate(zip(ids, mask, strict=True)):
        if not is_noise:
            found.append(token)
        elif not t or not mask[t - 1]:
            sentinel += entry["sentinel_step"]
            found.append(sentinel)
    return found


def uncorrupted(inputs: Sequence[int], targets: Sequence[int], sentinels: Sequence[int]) -> list[int]:
    """The row: each sentinel in the inputs replaced by what follows it in the targets."""
    taken: dict[int, list[int]] = {}
    last = -1
    for token in targets:
        if token in sentinels:
            last = token
            taken[last] = []
        else:
            taken[last].append(token)
    return [token for one in inputs for token in (taken.pop(one) if one in taken else [one])]
