"""The saved state of a loader: arithmetic, JSON-able, under 1 KB, and refused where it does not fit.

    {"version": 1, "order": "philox24-v1", "config": {...}, "corpus": {...}, "epoch": 3, "rows": 40960}

`rows` counts the rows of the epoch that all ranks together have consumed, so a run may go on with another number of
ranks or another batch size. Rows made of documents add two entries:

    "window": [11, 40712], "check": "5d0c9a42"

the window of the plan with the rows before it, which no one could tell to be wrong without planning every window up to
there, and a hash of all that decides the place, which tells it at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.errors import StateError
from dali_pipes.operators.permute import ORDER_NAME
from dali_pipes.schedule import Position, Schedule, WindowMark

VERSION = 1
SEQUENTIAL = "sequential-v1"
_OF_DOCUMENTS = ("window", "check")  # entries of one kind of rows; states of the first release with it had no check


def make_state(config: LoaderConfig, corpus: Corpus, schedule: Schedule, position: Position) -> dict[str, Any]:
    """A fresh dict that shares nothing with the loader."""
    state: dict[str, Any] = {
        "version": VERSION,
        "order": ORDER_NAME if schedule.shuffle else SEQUENTIAL,
        "config": config.order_settings(),
        "corpus": {
            "fingerprint": corpus.fingerprint,
            "format": corpus.format,
            "dtype": corpus.dtype.name,
            "tokens": corpus.num_tokens,
            "files": len(corpus.files),
            "digests": " ".join(corpus.file_digests),
            **({"loss_masks": " ".join(corpus.mask_digests)} if corpus.loss_mask is not None else {}),
        },
        "epoch": position.epoch,
        "rows": position.rows,
    }
    if schedule.documents is not None:
        state["window"] = list(schedule.documents.mark(position.epoch, position.rows))
        state["check"] = _check_value(state, position, state["window"])
    return state


def _check_value(about: Mapping[str, Any], position: Position, window: list[int]) -> str:
    """8 hex digits: a place, and the corpus and settings of `about` that it is a place in."""
    # A setting that is None may be missing from the state of a release that did not know it, and means the same.
    settings = {name: value for name, value in about["config"].items() if value is not None}
    parts = [about["order"], settings, about["corpus"]["fingerprint"], *position, *window]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def read_state(state: Mapping[str, Any], config: LoaderConfig, corpus: Corpus, schedule: Schedule) -> Position:
    """The position in a state. Raises `StateError` listing every difference that would change the data order."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is not a loader state: expected a dict from state_dict(), found {_short(state)}")
    if state["version"] != VERSION:
        raise StateError(f"state version {state['version']!r} is not known; this release reads version {VERSION}")
    expected = make_state(config, corpus, schedule, Position(0, 0))
    missing = [name for name in expected if name not in state and name not in _OF_DOCUMENTS]
    if missing:
        raise StateError(f"the state is incomplete: {', '.join(missing)} missing")
    for name in ("config", "corpus"):
        if not isinstance(state[name], Mapping):
            raise StateError(f"the state is damaged: {name} is {_short(state[name])}, expected a table")
    differences = []
    if state["order"] != expected["order"]:
        differences.append(f"order: saved {state['order']!r}, now {expected['order']!r}")
    differences += _differences("", state["config"], expected["config"])
    if state["corpus"].get("fingerprint") != expected["corpus"]["fingerprint"]:
        differences += _corpus_differences(state["corpus"], expected["corpus"], corpus)
    if differences:
        raise StateError(
            "the state does not fit this loader, going on would change the data order:\n  "
            + "\n  ".join(differences)
            + "\nuse the corpus and settings that the state was saved with, or start without the state"
        )
    epoch, rows = state["epoch"], state["rows"]
    most = schedule.windows.count
    if not (_is_count(epoch) and _is_count(rows) and (rows <= most or schedule.documents is not None)):
        raise StateError(f"epoch {epoch!r}, rows {rows!r}: expected whole numbers, rows at most {most}")
    if schedule.documents is not None:
        window = state.get("window")
        if not (isinstance(window, list | tuple) and len(window) == 2 and all(map(_is_count, window))):
            raise StateError(f"window {_short(window)}: expected two whole numbers")
        right = _check_value(expected, Position(epoch, rows), list(window))
        found = state.get("check", right)
        if found != right:
            raise StateError(
                f"epoch {epoch}, rows {rows} and window {list(window)} are not of one state with these settings, as "
                f"its check value {_short(found)} says: it was damaged or changed by hand; use an unchanged copy"
            )
        if not schedule.documents.seek(epoch, rows, WindowMark(*window)):
            raise StateError(f"rows {rows} of epoch {epoch} are not in window {window[0]} after {window[1]} rows")
    return Position(epoch, rows)


def _differences(prefix: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{prefix}{name}: saved {saved.get(name, 'nothing')!r}, now {now.get(name, 'nothing')!r}"
        for name in dict.fromkeys([*now, *saved])
        if saved.get(name) != now.get(name)
    ]


def _corpus_differences(saved: Mapping[str, Any], now: Mapping[str, Any], corpus: Corpus) -> list[str]:
    plain = ("format", "dtype", "tokens", "files")
    lines = _differences("corpus ", {n: saved.get(n) for n in plain}, {n: now[n] for n in plain})
    old, new = str(saved.get("digests", "")).split(), corpus.file_digests
    names = [path.name for path in corpus.files]
    if len(old) == saved.get("files") and len(new) == len(names):  # a digest a file
        added = [name for name, digest in zip(names, new, strict=True) if digest not in old]
        gone = sum(digest not in new for digest in old)
        lines += [f"corpus file {name}: new, renamed or changed since" for name in added]
        lines += [f"corpus files of the saving run that are gone, renamed or changed: {gone}"] if gone else []
    elif len(old) == len(new):
        run = -(-len(names) // len(new))  # files a digest stands for
        lines += [
            f"corpus files {number * run} to {min((number + 1) * run, len(names)) - 1} ({names[number * run]} ...): "
            "one or more added, renamed or changed"
            for number in range(len(new))
            if old[number] != new[number]
        ]
    if tuple(old) == new:
        lines += _mask_differences(saved.get("loss_masks"), now.get("loss_masks"), names)
    return lines or ["corpus: the same files in another order"]


def _mask_differences(saved: str | None, now: str | None, names: Sequence[str]) -> list[str]:
    """How the loss masks of the same data files differ."""
    if saved is None or now is None:
        return (
            []
            if saved == now
            else [f"loss masks: saved with{'out' * (saved is None)}, now with{'out' * (now is None)}"]
        )
    old, new = saved.split(), now.split()
    run = -(-len(names) // len(new))  # files a digest stands for
    return [
        f"loss mask of corpus file {names[number * run]}{' or one of the files behind it' * (run > 1)}: "
        "new, gone, renamed or changed since"
        for number in range(min(len(old), len(new)))
        if old[number] != new[number]
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
