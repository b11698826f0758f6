"""The saved state of a loader: arithmetic, JSON-able, under 1 KB, and refused where it does not fit.

    {"version": 1, "order": "philox24-v1", "config": {...}, "corpus": {...}, "epoch": 3, "rows": 40960, "step_rows": 64}

`rows` counts the rows of the epoch that all ranks together have consumed, so a run may go on with another number of
ranks or another batch size. `step_rows`, the rows of a step, tells a run with `skip_steps` which steps those count.
Rows made of documents add two entries:

    "window": [11, 40712], "check": "5d0c9a42"

the window of the plan with the rows before it, which no one could tell to be wrong without planning every window up to
there, and a hash of all that decides the place, which tells it at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.operators.permute import ORDER_NAME
from dali_pipes.schedule import Position, Schedule, WindowMark
from dali_pipes.state_change import MAY_CHANGE, StateChange, changed_settings, nearest_position

OnChange = Literal["refuse", "nearest"]
VERSION = 1
SEQUENTIAL = "sequential-v1"
_MAY_BE_MISSING = ("window", "check", "step_rows")  # entries of one kind of rows, and what older states did not have


class States:
    """The states of one loader: made, and read again. What is the same in all of them is worked out once."""

    def __init__(self, config: LoaderConfig, corpus: Corpus, schedule: Schedule) -> None:
        self._corpus, self._schedule, self._on_change = corpus, schedule, config.on_change
        self._counted_rows = config.skip_step_rows
        self._order = ORDER_NAME if schedule.shuffle else SEQUENTIAL
        self._settings = config.order_settings()
        self._about_corpus: dict[str, Any] = {
            "fingerprint": corpus.fingerprint,
            "format": corpus.format,
            "dtype": corpus.dtype.name,
            "tokens": corpus.num_tokens,
            "files": len(corpus.files),
            "digests": " ".join(corpus.file_digests),
            **({"loss_masks": " ".join(corpus.mask_digests)} if corpus.loss_mask is not None else {}),
        }
        self._checked = _checked_part(self._order, self._settings, corpus.fingerprint)

    def at(self, position: Position) -> dict[str, Any]:
        """A fresh dict that shares nothing with the loader, under 1 KB; some 10 microseconds."""
        settings = {name: [*value] if isinstance(value, list) else value for name, value in self._settings.items()}
        state: dict[str, Any] = {
            "version": VERSION,
            "order": self._order,
            "config": settings,
            "corpus": self._about_corpus.copy(),
            "epoch": position.epoch,
            "rows": position.rows,
            "step_rows": self._schedule.global_rows,
        }
        if self._schedule.documents is not None:
            state["window"] = list(self._schedule.documents.mark(position.epoch, position.rows))
            state["check"] = _check_value(self._checked, position, state["window"])
        return state

    def read(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> tuple[Position, StateChange | None]:
        """The position in a state, and with "nearest" what was changed so that it fits; None: as the setting says.

        Raises `StateError` listing every difference that would change the data order.
        """
        on_change = self._on_change if on_change is None else on_change
        if on_change not in ("refuse", "nearest"):
            raise ConfigError(f'on_change = {on_change!r}: expected "refuse" or "nearest"')
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"this is not a loader state: expected a dict from state_dict(), found {_short(state)}")
        if state["version"] != VERSION:
            raise StateError(f"state version {state['version']!r} is not known; this release reads version {VERSION}")
        expected = self.at(Position(0, 0))
        missing = [name for name in expected if name not in state and name not in _MAY_BE_MISSING]
        if missing:
            raise StateError(f"the state is incomplete: {', '.join(missing)} missing")
        for name in ("config", "corpus"):
            if not isinstance(state[name], Mapping):
                raise StateError(f"the state is damaged: {name} is {_short(state[name])}, expected a table")
        changed = self._refuse_differences(state, expected, on_change)
        epoch, rows = state["epoch"], state["rows"]
        most = self._schedule.windows.count
        within = rows <= most if _is_count(rows) else False
        if not (_is_count(epoch) and _is_count(rows) and (within or changed or self._schedule.documents is not None)):
            raise StateError(f"epoch {epoch!r}, rows {rows!r}: expected whole numbers, rows at most {most}")
        position = Position(epoch, rows)
        if self._schedule.documents is not None:
            self._read_window(state, position, {name: saved for name, (saved, _) in changed.items()})
        self._refuse_other_steps(state.get("step_rows"), position)
        if not changed:
            return position, None
        change = nearest_position(position, state["config"], changed, self._schedule)
        return Position(epoch, change.rows), change

    def _refuse_differences(
        self, state: Mapping[str, Any], expected: Mapping[str, Any], on_change: OnChange
    ) -> dict[str, tuple[Any, Any]]:
        """The settings that differ and may, with `on_change`: what was saved, and what is set now."""
        differences = []
        if state["order"] != expected["order"]:
            differences.append(f"order: saved {state['order']!r}, now {expected['order']!r}")
        of_settings = _differences("", state["config"], expected["config"])
        differences += of_settings.values()
        if state["corpus"].get("fingerprint") != expected["corpus"]["fingerprint"]:
            differences += _corpus_differences(state["corpus"], expected["corpus"], self._corpus)
        if not differences:
            return {}
        others = len(differences) > len(of_settings.keys() & set(MAY_CHANGE))
        if others or on_change == "refuse":
            raise StateError(
                "the state does not fit this loader, going on would change the data order:\n  "
                + "\n  ".join(differences)
                + "\nuse the corpus and settings that the state was saved with, or start without the state"
                + ("" if others else ', or go on at the nearest row to the same count of tokens, on_change = "nearest"')
            )
        return changed_settings(state["config"], expected["config"])

    def _refuse_other_steps(self, saved: Any, position: Position) -> None:
        """Where steps that are left out lie ahead, and may be counted in other rows than this run's."""
        now, counted = self._schedule.global_rows, self._counted_rows
        if counted is None and saved not in (None, now):
            most = max(now, saved) if _is_count(saved) else now  # whichever they count, none of them may be ahead
            if all((epoch, end * most) <= position for _, end, epoch in self._schedule.skip_steps):
                return
            raise StateError(
                f"skip_steps leave steps out, of {now} rows each in this run, but of {_short(saved)} in the run that "
                f"saved the state: say which they count, skip_step_rows = {_short(saved)} or skip_step_rows = {now}, "
                "the latter as this run counts them (`dali-pipes explain --state` shows which has which rows)"
            )
        is_ahead = any(e == position.epoch and end * now > position.rows for _, end, e in self._schedule.skip_steps)
        if counted in (None, now) or not is_ahead:
            return
        if position.rows % now:
            raise StateError(
                f"this run goes on at row {position.rows} with steps of {now} rows, so none begins where those of "
                f"{counted} rows that skip_steps count do; count them in this run's, skip_step_rows = {now} "
                "(`dali-pipes explain --state` shows which step has which rows)"
            )
        if saved == counted and position.rows % counted:
            raise StateError(
                f"the run that saved the state had steps of {counted} rows that do not begin at multiples of that: "
                f"at row {position.rows}, for one, since it had itself gone on within the epoch. skip_steps count them "
                "from the epoch's first row: say the rows themselves, as ranges of steps of one row, skip_step_rows = 1"
            )

    def _read_window(self, state: Mapping[str, Any], position: Position, saved: Mapping[str, Any]) -> None:
        """Check the window of a state, and count rows on from there unless other settings were `saved` with it."""
        window = state.get("window")
        if not (isinstance(window, list | tuple) and len(window) == 2 and all(map(_is_count, window))):
            raise StateError(f"window {_short(window)}: expected two whole numbers")
        settings = {**self._settings, **saved}
        checked = _checked_part(self._order, settings, self._corpus.fingerprint)
        right = _check_value(checked, position, list(window))
        found = state.get("check", right)
        if found != right:
            raise StateError(
                f"epoch {position.epoch}, rows {position.rows} and window {list(window)} are not of one state with "
                f"these settings, as its check value {_short(found)} says: it was damaged or changed by hand; use an "
                "unchanged copy"
            )
        documents = self._schedule.documents
        assert documents is not None
        if not saved and not documents.seek(*position, WindowMark(*window)):
            raise StateError(
                f"rows {position.rows} of epoch {position.epoch} are not in window {window[0]} after {window[1]} rows"
            )


def _checked_part(order: str, settings: Mapping[str, Any], fingerprint: str) -> str:
    """The corpus and the settings that a place is a place in, as the beginning of a list in JSON."""
    # A setting that is None may be missing from the state of a release that did not know it, and means the same.
    given = {name: value for name, value in settings.items() if value is not None}
    return json.dumps([order, given, fingerprint], sort_keys=True).removesuffix("]")


def _check_value(checked: str, position: Position, window: list[int]) -> str:
    """8 hex digits of a place and all that it is a place in, as one list in JSON."""
    text = ", ".join([checked, *map(str, position), *map(str, window)])
    return hashlib.sha256(f"{text}]".encode()).hexdigest()[:8]


def _differences(prefix: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """A line for each entry that differs, by its name."""
    return {
        name: f"{prefix}{name}: saved {_short(saved.get(name, 'nothing'))}, now {_short(now.get(name, 'nothing'))}"
        for name in dict.fromkeys([*now, *saved])
        if saved.get(name) != now.get(name)
    }


def _corpus_differences(saved: Mapping[str, Any], now: Mapping[str, Any], corpus: Corpus) -> list[str]:
    plain = ("format", "dtype", "tokens", "files")
    lines = [*_differences("corpus ", {n: saved.get(n) for n in plain}, {n: now[n] for n in plain}).values()]
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
