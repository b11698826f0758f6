"""The saved state of a loader: arithmetic, JSON-able, small, and refused where it does not fit.

    {"version": 1, "order": "philox24-v1", "config": {...}, "corpus": {...}, "epoch": 3, "rows": 40960, "step_rows": 64}

`rows` counts the rows of the epoch that all ranks together have consumed, so a run may go on with another number of
ranks or another batch size. `step_rows` is the number of rows in a step: where it differs from that of the resuming
run, ranges of `skip_steps` that are given in steps are ambiguous.
However many files there are it is under 1 KB, but for digests of loss masks, a few hundred bytes at most, and for
`length_buckets`, which are all written out.
Rows made of documents add two entries:

    "window": [11, 40712], "check": "5d0c9a42"

the window of the plan with the rows before it, which no one could tell to be wrong without planning every window up to
there, and a hash of all that decides the place, which tells it at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dali_pipes.config import DOCUMENT_ORDER_FIELDS, LoaderConfig
from dali_pipes.config.skip_steps import SkippedRange, in_steps
from dali_pipes.corpus import Corpus
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.corpus_growth import growth_advice
from dali_pipes.loader.state_change import MAY_CHANGE, StateChange, changed_settings, is_count, nearest_position, short
from dali_pipes.operators.permute import ORDER_NAME
from dali_pipes.rows.window_counts import WindowMark
from dali_pipes.schedule import Position, Schedule

OnChange = Literal["refuse", "nearest"]
VERSION = 1
SEQUENTIAL = "sequential-v1"
_MAY_BE_MISSING = ("window", "check", "step_rows")  # entries of one kind of rows, and what older states did not have
_MOST_BYTES = 1 << 16
_LEFT_OUT = {"length_buckets": None, "documents_end_at_files": False}
"""What settings are whose entries are left out."""


class Saved(NamedTuple):
    """What a state says to the loader that reads it."""

    position: Position
    """The row at which it goes on, before any steps that are left out."""
    change: StateChange | None = None
    """What was changed so that the state fits."""
    step_rows: int | None = None
    """Rows of a step of the saving run; None where an older release left that out."""
    state: Mapping[str, Any] = MappingProxyType({})
    """A copy of what was read, and how: see `States.again`."""
    on_change: OnChange | None = None


class States:
    """The states of one loader: made, and read again. What is the same in all of them is worked out once."""

    def __init__(self, config: LoaderConfig, corpus: Corpus, schedule: Schedule) -> None:
        self._corpus, self._schedule, self._on_change = corpus, schedule, config.on_change
        self._skip_steps, self._seq_len = config.skip_steps, config.seq_len
        self._order = ORDER_NAME if schedule.shuffle else SEQUENTIAL
        self._settings = order_settings(config, corpus)
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
        """A fresh dict that shares nothing with the loader; some 10 microseconds."""
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

    def read(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> Saved:
        """What a state says; with "nearest" the nearest place, if that was of rows of another length; None: as the
        setting says. `check_steps` is to be asked, too, once the number of ranks is known for good.

        Raises `StateError` listing every difference that would change the data order.
        """
        on_change = self._on_change if on_change is None else on_change
        if on_change not in ("refuse", "nearest"):
            raise ConfigError(f'on_change = {on_change!r}: expected "refuse" or "nearest"')
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"this is not a loader state: expected a dict from state_dict(), found {short(state)}")
        state = plain(state)
        if state["version"] != VERSION:
            raise StateError(f"state version {short(state['version'])} is not known; this release reads {VERSION}")
        expected = self.at(Position(0, 0))
        missing = [name for name in expected if name not in state and name not in _MAY_BE_MISSING]
        if missing:
            raise StateError(f"the state is incomplete: {', '.join(missing)} missing")
        for name in ("config", "corpus"):
            if not isinstance(state[name], Mapping):
                raise StateError(f"the state is damaged: {name} is {short(state[name])}, expected a table")
        changed = self._refuse_differences(state, expected, on_change)
        epoch, rows, step_rows = state["epoch"], state["rows"], state.get("step_rows")
        most = self._schedule.windows.count
        within = rows <= most if is_count(rows) else False
        if not (is_count(epoch) and is_count(rows) and (within or changed or self._schedule.documents is not None)):
            raise StateError(f"epoch {short(epoch)}, rows {short(rows)}: expected whole numbers, rows at most {most}")
        if step_rows is not None and not (is_count(step_rows) and step_rows > 0):
            raise StateError(f"the state is damaged: step_rows is {short(step_rows)}, expected a whole number above 0")
        position = Position(epoch, rows)
        if self._schedule.documents is not None:
            self._read_window(state, position, {name: saved for name, (saved, _) in changed.items()})
        if not changed:
            return Saved(position, None, step_rows, state, on_change)
        change = nearest_position(position, state["config"], changed, self._schedule)
        return Saved(Position(epoch, change.rows), change, step_rows, state, on_change)

    def start(self) -> Saved:
        """Where a run begins without a state."""
        return Saved(Position(0, 0), step_rows=self._schedule.global_rows)

    def again(self, saved: Saved | None) -> Saved:
        """The same for this loader, where one with another number of ranks has read it."""
        return self.read(saved.state, saved.on_change) if saved is not None and saved.state else self.start()

    def check_steps(self, saved: Saved) -> None:
        """Refuse ranges of `skip_steps` that lie ahead and do not tell which rows of this run they mean.

        Of all that is refused this alone depends on the number of ranks.
        """
        now = self._schedule.global_rows
        if saved.step_rows != now or saved.change is not None:
            for steps in self._skip_steps:
                if steps.unit == "steps" and _may_be_ahead(steps, saved, now):
                    raise StateError(_ambiguous(steps, saved, now))
        try:
            in_steps(self._skip_steps, now, self._seq_len, saved.position)
        except ConfigError as error:
            if not saved.state:
                raise
            raise StateError(str(error)) from None

    def _refuse_differences(
        self, state: Mapping[str, Any], expected: Mapping[str, Any], on_change: OnChange
    ) -> dict[str, tuple[Any, Any]]:
        """The settings that differ and may, with `on_change`: what was saved, and what is set now."""
        differences = []
        if state["order"] != expected["order"]:
            differences.append(f"order: saved {short(state['order'])}, now {expected['order']!r}")
        saved, now = state["config"], expected["config"]
        if ("rows" in saved) != ("rows" in now):  # a stream's state leaves out what says how documents make rows
            saved, now = map(_without_documents, (saved, now))
        of_settings = _differences("", saved, now)
        differences += of_settings.values()
        if state["corpus"].get("fingerprint") != expected["corpus"]["fingerprint"]:
            differences += _corpus_differences(state["corpus"], expected["corpus"], self._corpus)
        if not differences:
            return {}
        others = len(differences) > len(of_settings.keys() & set(MAY_CHANGE))
        if others or on_change == "refuse":
            advice = "" if of_settings else growth_advice(state, self._corpus)
            advice = advice or "use the corpus and settings that the state was saved with, or start without the state"
            raise StateError(
                "the state does not fit this loader, going on would change the data order:\n  "
                + "\n  ".join(differences)
                + f"\n{advice}"
                + ("" if others else ', or go on at the nearest row to the same count of tokens, on_change = "nearest"')
            )
        return changed_settings(state["config"], expected["config"])

    def _read_window(self, state: Mapping[str, Any], position: Position, saved: Mapping[str, Any]) -> None:
        """Check the window of a state, and count rows on from there unless other settings were `saved` with it."""
        window = state.get("window")
        if not (isinstance(window, list | tuple) and len(window) == 2 and all(map(is_count, window))):
            raise StateError(f"window {short(window)}: expected two whole numbers")
        settings = {**self._settings, **saved}
        checked = _checked_part(self._order, settings, self._corpus.fingerprint)
        right = _check_value(checked, position, list(window))
        found = state.get("check", right)
        if found != right:
            raise StateError(
                f"epoch {position.epoch}, rows {position.rows} and window {list(window)} are not of one state with "
                f"these settings, as its check value {short(found)} says: it was damaged or changed by hand; use an "
                "unchanged copy"
            )
        documents = self._schedule.documents
        assert documents is not None
        if not saved and not documents.seek(*position, WindowMark(*window)):
            raise StateError(
                f"rows {position.rows} of epoch {position.epoch} are not in window {window[0]} after {window[1]} rows"
            )


def _may_be_ahead(steps: SkippedRange, saved: Saved, step_rows: int) -> bool:
    """Whether some of `steps` come after the saved position, if they are steps of this run or of the saving one."""
    if steps.epoch != saved.position.epoch:
        return steps.epoch > saved.position.epoch
    is_unknown = saved.step_rows is None or saved.change is not None
    return is_unknown or steps.end * max(step_rows, saved.step_rows or 0) > saved.position.rows


def _ambiguous(steps: SkippedRange, saved: Saved, step_rows: int) -> str:
    """What to write for `steps`, which may count those of this run or of the saving one."""

    def in_rows(size: int) -> SkippedRange:
        # A run that resumes within an epoch counts its steps from there.
        shift = -saved.position.rows % size if steps.epoch == saved.position.epoch else 0
        return SkippedRange(max(0, steps.first * size - shift), steps.end * size - shift, steps.epoch, "rows")

    here = f"{in_rows(step_rows)} for steps of this run"
    if saved.change is not None:
        return (
            f"skip_steps: {steps} is ambiguous, because rows have another length than in the saved run "
            f"({saved.change.differences()}). Remove it if the saved run has passed it, or give it in rows: {here}"
        )
    if saved.step_rows is None:
        return (
            f"skip_steps: {steps} is ambiguous, because the state is from an older release and does not record how many"
            f" rows a step had. Give it in rows: {here}; for steps of the saved run, multiply by its batch_size and "
            "its number of ranks"
        )
    return (
        f"skip_steps: {steps} is ambiguous, because the saved run had {saved.step_rows:,} rows in a step and this run "
        f"has {step_rows:,}. Give it in rows: {in_rows(saved.step_rows)} for steps of the saved run, or {here}"
    )


def order_settings(config: LoaderConfig, corpus: Corpus) -> dict[str, Any]:
    """The settings that decide the order; an end id that a manifest tells is there as if it had been set."""
    settings = config.order_settings()
    if "eos_id" in settings and corpus.eos_id_from is not None and config.document_start_id is None:
        settings["eos_id"] = corpus.eos_id
    return settings


def plain(value: Any, depth: int = 4) -> Any:
    """A fresh copy in Python's own types, of what a checkpoint library may have made NumPy's or torch's of."""
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {name: plain(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, depth - 1) for entry in value]
    if not hasattr(value, "tolist"):
        return value
    try:
        small = getattr(value, "nbytes", 0) <= _MOST_BYTES
        return plain(value.tolist(), depth - 1) if small else f"a {type(value).__name__} of {value.nbytes} bytes"
    except (RuntimeError, TypeError, ValueError):  # a tensor without data, or laid out in another way
        return f"a {type(value).__name__}"


def _checked_part(order: str, settings: Mapping[str, Any], fingerprint: str) -> str:
    """The corpus and the settings that a place is a place in, as the beginning of a list in JSON."""
    # A setting that is None may be missing from the state of a release that did not know it, and means the same.
    given = {name: value for name, value in settings.items() if value is not None}
    return json.dumps([order, given, fingerprint], sort_keys=True).removesuffix("]")


def _check_value(checked: str, position: Position, window: list[int]) -> str:
    """8 hex digits of a place and all that it is a place in, as one list in JSON."""
    text = ", ".join([checked, *map(str, position), *map(str, window)])
    return hashlib.sha256(f"{text}]".encode()).hexdigest()[:8]


def _without_documents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say how documents make rows, but whether they do."""
    others = {name: value for name, value in settings.items() if name not in DOCUMENT_ORDER_FIELDS}
    return {**others, "rows": settings.get("rows", "stream")}


def _differences(prefix: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """A line for each entry that differs, by its name."""
    return {
        name: f"{prefix}{name}: saved {_shown(name, saved)}, now {_shown(name, now)}"
        for name in dict.fromkeys([*now, *saved])
        if saved.get(name) != now.get(name)
    }


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    return short(settings.get(name, _LEFT_OUT.get(name, "nothing")))


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


def _mask_differences(saved: Any, now: str | None, names: Sequence[str]) -> list[str]:
    """How the loss masks of the same data files differ."""
    if not isinstance(saved, str | None):
        return [f"loss masks: saved {short(saved)}, which are no digests"]
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
