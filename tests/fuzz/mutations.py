"""Damage and malice: what may be done to a file before it is parsed."""

import json
import math
import struct
from random import Random
from typing import Any

NUMBERS = [
    0,
    1,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
NAMES = [
    "../outside",
    "a/../../outside",
    "/{}/outside",
    "",
    ".",
    "..",
    "a\0b",
    "..\\outside",
    "x" * 5000,
    "\ud800",
    "/",
]
ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1.5,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    10**40,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    [],
    {},
    [[]],
    [None],
    {"": None},
    "mds",
    "ndarray",
    "ndarray:uint16:3,99999999999",
    *NAMES,
]
MOST_BYTES = 1 << 16


def mutate(random: Random, data: bytes, others: list[bytes], folder: str, only_json: bool = False) -> bytes:
    """`data` with one to four changes. others: what pieces may come from. folder: absolute, without the first `/`."""
    if only_json or random.random() < 0.6:
        changed = _mutate_json(random, data, folder, only_json)
        if changed is not None:
            return changed
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        _mutate_bytes(random, out, others)
    return bytes(out[:MOST_BYTES])


def _mutate_bytes(random: Random, out: bytearray, others: list[bytes]) -> None:
    # Headers are at the start and footers at the end: most changes go there.
    where = random.random()
    size = len(out)
    near = min(size, 200)
    at = random.randrange(near + 1) if where < 0.4 else size - random.randrange(near + 1)
    at = random.randrange(size + 1) if where > 0.7 else at
    kind = random.randrange(8)
    if kind == 0 and size:
        out[min(at, size - 1)] ^= 1 << random.randrange(8)
    elif kind == 1 and size:
        out[min(at, size - 1)] = random.randrange(256)
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        del out[at : at + random.randint(1, 64)]
    elif kind == 4:
        out[at:at] = random.randbytes(random.choice([1, 2, 4, 8, 100]))
    elif kind == 5:
        width = random.choice([2, 4, 8])
        packed = struct.pack(random.choice("<>") + "Q", random.choice(NUMBERS))
        out[at : at + width] = packed[:width] if random.random() < 0.5 else packed[-width:]
    elif kind == 6 and size > 4:  # a number that is a little off
        at = min(at, size - 4)
        value = struct.unpack_from("<i", out, at)[0] + random.choice([-2, -1, 1, 2, 1 << 16])
        struct.pack_into("<I", out, at, value % 2**32)
    else:
        other = random.choice(others)
        start = random.randrange(len(other) + 1)
        out[at : at + random.choice([0, 16, 256])] = other[start : start + random.randint(1, 256)]


def _mutate_json(random: Random, data: bytes, folder: str, is_whole: bool) -> bytes | None:
    """None for what is no JSON."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if random.random() < 0.02:
        depth = random.choice([100, 900])
        return b'{"shards": ' + b"[" * depth + b"]" * (depth if is_whole else random.choice([0, depth])) + b"}"
    for _ in range(random.randint(1, 3)):
        content = _change(random, content, folder)
    return json.dumps(content).encode()


def _change(random: Random, content: Any, folder: str) -> Any:
    """A copy with a change somewhere in it."""
    if not isinstance(content, dict | list) or not content or random.random() < 0.05:
        return _odd(random, content, folder)
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = random.choice(keys)
    out = content.copy()
    kind = random.randrange(20)
    if kind == 0:
        del out[key]
    elif kind == 1 and isinstance(out, list):
        out.insert(key, out[random.choice(keys)])
    elif kind == 2:
        other = random.choice(keys)
        out[key], out[other] = content[other], content[key]
    elif kind == 3 and isinstance(out, dict):
        out[random.choice(["", "hashes", "zip_data", "compression", "a"])] = out[key]
    else:
        out[key] = _change(random, content[key], folder)
    return out


def _odd(random: Random, value: Any, folder: str) -> Any:
    if type(value) is int and random.random() < 0.5:
        return value + random.choice([-1, 1, 2**16, 2**32, 2**64])
    if isinstance(value, str) and value and random.random() < 0.5:
        at = random.randrange(len(value))
        near = [
            value[:at],
            value[at:],
            value[:at] + random.choice("0:,/\\\0é") + value[at:],
            "../" + value,
            value + "/",
        ]
        return random.choice([*near, random.choice(NAMES).replace("{}", folder)])
    odd = random.choice(ODD)
    return odd.replace("{}", folder) if isinstance(odd, str) else odd
