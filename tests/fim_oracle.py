"""Fill in the middle, slow and plain: Megatron-LM's rule on ids, one document at a time, and back."""

import hashlib
import json
from collections.abc import Sequence

PREFIX, MIDDLE, SUFFIX = 1001, 1002, 1003
TOKENS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}
_STEP, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix64(seed: int, number: int) -> int:
    word = (seed + number * _STEP) & _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


def draws(document: int, begin: int, *, seed: int, pass_number: int, name: str | None = None) -> list[int]:
    """Four numbers of 32 bits: for the rate, for the order of the parts, and for the two cuts."""
    names = [] if name is None else [json.dumps(name)]
    text = " ".join(map(str, ["dali_pipes", seed, *names, "fim", pass_number]))
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    words = [splitmix64(splitmix64(key, document + 1), 2 * begin + number) for number in (1, 2)]
    return [half for word in words for half in (word >> 32, word % 2**32)]


def megatron(ids: Sequence[int], boundaries: Sequence[int], *, spm: bool) -> list[int]:
    """What `GPTFIMDataset._permute` makes of a document, with its boundaries and its choice drawn before."""
    low, high = sorted(boundaries)
    prefix, middle, suffix = ids[:low], ids[low:high], ids[high:]
    if spm:
        return [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle]
    return [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle]


def unit(
    ids: Sequence[int], drawn: Sequence[int], rate: float, spm: float, *, head: int, tail: int, fits: bool
) -> list[int] | None:
    """A document, or a piece of one, rearranged; None if it is left as it is."""
    body = ids[head : len(ids) - tail]
    if drawn[0] >= int(rate * 2**32) or not fits or len(body) < 3:
        return None
    boundaries = [number * (len(body) + 1) // 2**32 for number in drawn[2:]]
    rearranged = megatron(body, boundaries, spm=drawn[1] < int(spm * 2**32))
    return [*ids[:head], *rearranged, *ids[len(ids) - tail :]]


def pieces_of(
    documents: Sequence[Sequence[int]],
    seq_len: int,
    *,
    level: str,
    long_documents: str,
    rate: float,
    spm: float,
    seed: int,
    pass_number: int = 0,
    name: str | None = None,
    starts: bool = False,
    ends: bool = True,
) -> list[tuple[int, ...]]:
    """The pieces that all documents make, in document order; starts, ends: whether an id begins and ends each."""
    found: list[tuple[int, ...]] = []
    how = {"seed": seed, "pass_number": pass_number, "name": name}
    for number, document in enumerate(documents):
        size = len(document)
        if not size or (long_documents == "drop" and size > seq_len):
            continue
        if level == "document":
            drawn = draws(number, 0, **how)  # type: ignore[arg-type]
            fits = size > seq_len or size + 3 <= seq_len
            out = unit(document, drawn, rate, spm, head=int(starts), tail=int(ends), fits=fits) or list(document)
            parts = [out[begin : begin + seq_len] for begin in range(0, len(out), seq_len)]
            found += map(tuple, parts[:1] if long_documents == "truncate" else parts)
            continue
        step = size if size <= seq_len else seq_len - 3
        for begin in range(0, size, step):
            ids = document[begin : begin + step]
            drawn = draws(number, begin, **how)  # type: ignore[arg-type]
            head, tail = int(starts and begin == 0), int(ends and begin + len(ids) == size)
            out = unit(ids, drawn, rate, spm, head=head, tail=tail, fits=len(ids) + 3 <= seq_len) or list(ids)
            if long_documents == "truncate" and size > seq_len:
                found.append(tuple(out if len(out) > len(ids) else document[:seq_len]))
                break
            found.append(tuple(out))
    return found


def undone(piece: Sequence[int], end_id: int | None) -> list[int]:
    """The ids of a whole piece as they were."""
    ids = list(piece)
    if PREFIX not in ids:
        return ids
    tail = [ids.pop()] if ids[-1] == end_id else []
    begin, middle, suffix = ids.index(PREFIX), ids.index(MIDDLE), ids.index(SUFFIX)
    first, after, last = ids[begin + 1 : suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
    return [*ids[:begin], *first, *last, *after, *tail]
