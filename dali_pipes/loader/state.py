"""The saved state of a loader: arithmetic, JSON-able, small, and refused if it does not fit.

    {"version": 1, "order": "philox24-v1", "config": {...}, "corpus": {...}, "epoch": 3, "rows": 40960, "step_rows": 64}

`rows` counts the rows of the epoch that all ranks together have consumed (batches, with `batch_tokens`), so a run may
resume with another number of ranks or another batch size. `step_rows` is the number of rows in a step: where it differs
from that of the resuming run, ranges of `skip_steps` that are given in steps are ambiguous.
A state is under 1 KB for any number of files, apart from digests of loss masks (a few hundred bytes at most),
`length_buckets` and `batch_shapes`, which are written out. Rows made from documents add two entries:

    "window": [11, 40712], "check": "5d0c9a42"

the window of the plan with the rows before it, and a hash of everything that decides the place: without it a wrong
window could not be told without planning every window up to there.

The state of a mixture has the same data of each corpus in `corpus["sources"]`, by name, with the settings that make its
rows; and `mixture`, see `mixture_state`, with a `check` over all of it. With `global_batch` there is `curriculum`, see
`curriculum_state`.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dali_pipes.config import DOCUMENT_ORDER_FIELDS, LoaderConfig
from dali_pipes.config.skip_steps import SkippedRange, in_steps
from dali_pipes.corpus import Corpus
from dali_pipes.engine.mixture import share_of
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.corpus_growth import growth_advice
from dali_pipes.loader.curriculum_state import SavedCurriculum, curriculum_entry, read_curriculum
from dali_pipes.loader.mixture_state import changed_weights, check_entry, mixture_entry, resume_mixture
from dali_pipes.loader.state_form import MAY_CHANGE, changed_settings, check_entries, is_count, short, state_of
from dali_pipes.runtime.messages import counted
from dali_pipes.schedule import Position, Schedule
from dali_pipes.schedule.curriculum import PARTS_ORDER_NAME, Curriculum

if TYPE_CHECKING:
    from dali_pipes.loader.state_change import StateChange
    from dali_pipes.rows.window_counts import WindowMark
    from dali_pipes.schedule.mixed_rows import MixedRows

OnChange = Literal["refuse", "nearest", "mixture"]
VERSION = 1
_VERSION = re.compile(r"-v\d+")
"""In the name of an order."""
_MAY_BE_MISSING = (
    "window",
    "check",
    "step_rows",
    "mixture",
    "curriculum",
)  # entries of one kind of rows, and those older states lack
_OF_A_SOURCE = ("rows", *DOCUMENT_ORDER_FIELDS, "objective")
"""Settings that each source of a mixture has for itself, of those that a state records."""
_LEFT_OUT: dict[str, Any] = {
    "length_buckets": None,
    "documents_end_at_files": False,
    "order": "rows",
    "batch_shapes": [],
}
"""Values of settings whose entries are missing from a state."""


class Saved(NamedTuple):
    """What a state says to the loader that reads it."""

    position: Position
    """The row at which the run resumes, before any steps that are skipped."""
    change: "StateChange | None" = None
    """What was changed so that the state fits."""
    step_rows: int | None = None
    """Rows of a step of the saving run; None if an older release left that out."""


class States:
    """The states of one loader: made, and read. What is the same in all of them is computed once."""

    def __init__(
        self,
        config: LoaderConfig,
        corpora: Mapping[str, Corpus],
        schedule: Schedule,
        mixture: "MixedRows | None" = None,
    ) -> None:
        self._corpora, self._schedule, self._mixture, self._on_change = corpora, schedule, mixture, config.on_change
        self._changes_length = config.changes_length or config.batch_tokens is not None
        self._skip_steps, self._seq_len = config.skip_steps, config.place_tokens
        self._order = schedule.interleave.order_name
        if mixture is None:
            corpus = corpora[""]
            self._settings, self._about_corpus = order_settings(config, corpus), about_corpus(corpus)
        else:
            self._settings = config.order_settings()
            self._about_corpus = about_sources(config, corpora)
        self._checked = _checked_part(self._order, self._settings, self._about_corpus["fingerprint"])

    def at(self, position: Position) -> dict[str, Any]:
        """A fresh dict that shares nothing with the loader. Takes about 10 microseconds."""
        settings = {name: [*value] if isinstance(value, list) else value for name, value in self._settings.items()}
        about = self._about_corpus.copy() if self._mixture is None else copy.deepcopy(self._about_corpus)
        state: dict[str, Any] = {
            "version": VERSION,
            "order": self._order,
            "config": settings,
            "corpus": about,
            "epoch": position.epoch,
            "rows": position.rows,
            "step_rows": self._schedule.global_rows,
        }
        mark = self._schedule.interleave.mark(position.epoch, position.rows)
        if mark is not None:
            state["window"] = list(mark)
            state["check"] = _check_value(self._checked, position, state["window"])
        if self._schedule.curriculum is not None:
            state["curriculum"] = curriculum_entry(self._schedule.curriculum, position)
        if self._mixture is not None:
            state["mixture"] = mixture_entry(self._mixture, position.epoch, self._schedule.places(position))
            state["check"] = _mixture_check(state)
        return state

    def load(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> Saved:
        """Let the order go on as a state says, see `read`. After an error it is as it was."""
        held: list[MixedRows | Curriculum] = [
            each for each in (self._mixture, self._schedule.curriculum) if each is not None
        ]
        before: list[Any] = [each.run for each in held]
        try:
            saved = self.read(state, on_change)
            self._check_steps(saved)
        except BaseException:
            for each, run in zip(held, before, strict=True):
                each.run = run
            raise
        return saved

    def read(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> Saved:
        """What a state says; `_check_steps` checks the rest.

        on_change: with "nearest", the nearest place if rows had another length; None: the setting's value. Raises
        `StateError` listing every difference that would change the data order.
        """
        on_change = self._on_change if on_change is None else on_change
        if on_change not in ("refuse", "nearest", "mixture"):
            raise ConfigError(f'on_change = {on_change!r}: expected "refuse", "nearest" or "mixture"')
        state = state_of(state, VERSION)
        # Where a run went on with another total or other lists, the places of earlier epochs are not known.
        mixture, curriculum = self._mixture, self._schedule.curriculum
        known = max(0 if mixture is None else mixture.known_epoch, 0 if curriculum is None else curriculum.since)
        expected = self.at(Position(known, 0))
        check_entries(state, [name for name in expected if name not in _MAY_BE_MISSING], dicts=("config", "corpus"))
        if self._mixture is not None and state["order"] == expected["order"]:
            return self._read_mixture(self._mixture, state, expected, on_change)
        changed = self._refuse_differences(state, expected, on_change)
        epoch, rows, step_rows = state["epoch"], state["rows"], state.get("step_rows")
        interleave = self._schedule.interleave
        is_within = not interleave.is_uniform or (is_count(rows) and rows <= interleave.count(0))
        if not (is_count(epoch) and is_count(rows) and (is_within or changed)):
            most = interleave.count(0) if interleave.is_uniform else 2**63 - 1
            raise StateError(
                f"the state is damaged: epoch {short(epoch)}, rows {short(rows)}; expected integers, rows "
                f"at most {most}"
            )
        _check_step_rows(step_rows)
        position = Position(epoch, rows)
        saved_curriculum = None if changed else self._read_curriculum(state, position)
        if "window" in expected:
            of_settings = {name: saved for name, (saved, _) in changed.items()}
            self._read_window(state, position, of_settings, saved_curriculum)
        if not changed:
            self._resume_curriculum(saved_curriculum, position)
            return Saved(position, None, step_rows)
        from dali_pipes.loader.state_change import nearest_position  # with the first change

        change = nearest_position(position, state["config"], changed, self._schedule)
        position = Position(epoch, change.rows)
        self._resume_curriculum(self._read_curriculum({}, position), position)
        return Saved(position, change, step_rows)

    def _read_mixture(
        self, mixture: "MixedRows", state: Mapping[str, Any], expected: Mapping[str, Any], on_change: OnChange
    ) -> Saved:
        """What the state of a mixture says. Sources and weights may differ with `on_change = "mixture"`."""
        entry, epoch, rows, step_rows = state.get("mixture"), state["epoch"], state["rows"], state.get("step_rows")
        check_entry(entry)
        assert isinstance(entry, Mapping)
        if not (is_count(epoch) and is_count(rows)):
            raise StateError(f"the state is damaged: epoch {short(epoch)}, rows {short(rows)}; expected integers")
        _check_step_rows(step_rows)
        if state.get("check") != _mixture_check(state):
            raise StateError(
                f"the state was damaged or edited: its check value {short(state.get('check'))} does not match its "
                "other entries; use an unchanged copy"
            )
        differences = [*self._setting_differences(state["config"], expected["config"]).values()]
        saved, now = state["corpus"].get("sources"), expected["corpus"]["sources"]
        if not isinstance(saved, Mapping) or not all(isinstance(about, Mapping) for about in saved.values()):
            raise StateError(f"the state is damaged: the sources are {short(saved)}, expected a dict of dicts")
        for name in now:
            if name in saved and saved[name] != now[name]:
                differences += _source_differences(name, saved[name], now[name], self._corpora[name])
        of_mixture = [f"mixture.{name}: not in the saved run" for name in now if name not in saved]
        of_mixture += [f"mixture.{name}: in the saved run only" for name in saved if name not in now]
        of_mixture += changed_weights(mixture, entry)
        if differences or (of_mixture and on_change != "mixture"):
            allowed = (
                ""
                if differences
                else (
                    ', or set on_change = "mixture" to continue with these sources and weights from the next '
                    "multiple of 128 rows on"
                )
            )
            raise StateError(
                "the state does not fit this loader; resuming would change the data order:\n  "
                + "\n  ".join([*differences, *of_mixture])
                + "\nUse the corpora and settings that the state was saved with, or start without the state"
                + allowed
            )
        position, curriculum = Position(epoch, rows), self._schedule.curriculum
        saved_curriculum, places, places_done = self._read_curriculum(state, position), rows, rows
        if curriculum is not None and saved_curriculum is not None and curriculum.cuts:
            places = curriculum.places_begun(rows, saved_curriculum.segments, state["curriculum"]["end"])
            places_done = min(places, curriculum.places_done(rows, saved_curriculum.segments))
        if places > entry["place"]:
            raise StateError(
                f"the state is damaged: epoch {epoch:,}, rows {rows:,}; expected rows up to place {entry['place']:,}"
            )
        change = resume_mixture(mixture, entry, epoch, places, places_done, set(saved) if of_mixture else None)
        self._resume_curriculum(saved_curriculum, position)
        if change is not None and curriculum is not None and curriculum.cuts:  # its rows are shorter than places
            tokens = curriculum.tokens_before(epoch, rows) - curriculum.tokens_before(epoch, 0)
            change = replace(change, rows_before=rows, rows=rows, tokens_before=tokens, tokens=tokens)
        return Saved(position, change, step_rows)

    def _read_curriculum(self, state: Mapping[str, Any], position: Position) -> SavedCurriculum | None:
        curriculum = self._schedule.curriculum
        if curriculum is None:
            return None
        return read_curriculum(state.get("curriculum"), curriculum, position, self._schedule.global_rows)

    def _resume_lengths(self, saved: SavedCurriculum | None, position: Position, mark: "WindowMark") -> None:
        """Where packing windows have their own lengths, let those that were begun keep them."""
        curriculum = self._schedule.curriculum
        if curriculum is None or curriculum.growing is None or curriculum.lengths is None:
            return
        assert saved is not None
        begun = mark.window + (position.rows > mark.rows_before)
        curriculum.growing.set_lengths(curriculum.lengths.resumed(position.epoch, begun, list(saved.lengths or ())))

    def _resume_curriculum(self, saved: SavedCurriculum | None, position: Position) -> None:
        curriculum = self._schedule.curriculum
        if curriculum is not None and saved is not None:
            curriculum.go_on(position, saved.before, saved.segments, saved.since)

    def _check_steps(self, saved: Saved) -> None:
        """Refuse ranges of `skip_steps` that lie ahead and do not tell which rows of this run they mean.

        Of all that is refused this alone depends on the number of ranks.
        """
        now = self._schedule.global_rows
        if saved.change is not None:
            from dali_pipes.loader.state_change import MixtureChange  # with the first change

            if isinstance(saved.change, MixtureChange):  # rows have the same length
                saved = saved._replace(change=None)
        if saved.step_rows != now or saved.change is not None:
            for steps in self._skip_steps:
                if steps.unit == "steps" and _may_be_ahead(steps, saved, now):
                    raise StateError(_ambiguous(steps, saved, now))
        try:
            self.check_ranges(saved.position)
        except ConfigError as error:
            raise StateError(str(error)) from None

    def check_ranges(self, position: Position) -> None:
        """Raise `ConfigError` for ranges of `skip_steps` that do not fall on steps of a run from `position` on."""
        schedule, curriculum = self._schedule, self._schedule.curriculum
        in_steps(self._skip_steps, schedule.global_rows, self._seq_len, position)
        if curriculum is None:
            return
        for first, end, epoch in schedule.skip_steps:
            base = schedule.counted_from(position, epoch)
            for step in (first, end):
                row = base + (step - schedule.step_number(base)) * schedule.global_rows
                if (epoch, row) > position and not curriculum.is_step_end(epoch, row):
                    size = curriculum.segment(epoch, row).global_batch // schedule.global_rows
                    raise ConfigError(
                        f"skip_steps: steps {first:,} to {end - 1:,} of epoch {epoch:,} are not whole optimizer steps: "
                        f"with global_batch, an optimizer step there has {counted(size, 'step')}; skip multiples of it"
                    )

    def _refuse_differences(
        self, state: Mapping[str, Any], expected: Mapping[str, Any], on_change: OnChange
    ) -> dict[str, tuple[Any, Any]]:
        """The settings that differ, if `on_change` allows that: what was saved, and what is set now."""
        differences = []
        saved, now = state["config"], expected["config"]
        if state["order"] != self._order and saved.get("order") == now.get("order"):  # else its setting has a line
            differences.append(self._order_difference(state["order"], saved, now))
        if ("rows" in saved) != ("rows" in now):  # the state of a stream leaves out how documents make rows
            saved, now = map(_without_documents, (saved, now))
        of_settings = self._setting_differences(saved, now)
        differences += of_settings.values()
        if state["corpus"].get("fingerprint") != expected["corpus"]["fingerprint"]:
            differences += self._data_differences(state["corpus"], expected["corpus"])
        if not differences:
            return {}
        others = self._changes_length or len(differences) > len(of_settings.keys() & set(MAY_CHANGE))
        if others or on_change == "refuse":
            advice = "" if of_settings or self._mixture is not None else growth_advice(state, self._corpora[""])
            advice = advice or "Use the corpus and settings that the state was saved with, or start without the state"
            if _is_of_another_release(state["order"], self._order):
                advice = (
                    "Another release of dali-pipes saved the state, and orders the rows in another way: resume with "
                    "that release, or start without the state"
                )
            nearest = ', or set on_change = "nearest" to resume at the row nearest to the same number of tokens'
            raise StateError(
                "the state does not fit this loader; resuming would change the data order:\n  "
                + "\n  ".join(differences)
                + f"\n{advice}{'' if others else nearest}"
            )
        return changed_settings(state["config"], expected["config"])

    def _order_difference(self, order: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        """A line for another order; of rows that are cut from others in one of the two, as the setting that does so."""
        cut = f", {PARTS_ORDER_NAME}"
        if order == f"{self._order}{cut}":
            return f"order_len: saved {_shown('seq_len', saved)}, now nothing"
        if order == self._order.removesuffix(cut):
            return f"order_len: saved nothing, now {_shown('seq_len', now)}"
        return f"order: saved {short(order)}, now {self._order!r}"

    def _setting_differences(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
        """A line for each setting that differs, by its name in a state, where seq_len is that of rows of the order."""
        lines = _differences("", saved, now)
        if "order" in lines:
            lines.pop("shuffle_window", None)
        if self._schedule.curriculum is not None and self._schedule.curriculum.cuts and "seq_len" in lines:
            lines["seq_len"] = f"order_len: saved {_shown('seq_len', saved)}, now {_shown('seq_len', now)}"
            lines.pop("stride", None)
        return lines

    def _data_differences(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        if self._mixture is not None or "sources" in saved:
            return [f"corpus: saved {'with' if 'sources' in saved else 'without'} a mixture"]
        return _corpus_differences(saved, now, self._corpora[""])

    def _read_window(
        self,
        state: Mapping[str, Any],
        position: Position,
        saved: Mapping[str, Any],
        saved_curriculum: SavedCurriculum | None,
    ) -> None:
        """Check the window of a state, and count rows from there unless other settings were `saved` with it."""
        window = state.get("window")
        if not (isinstance(window, list | tuple) and len(window) == 2 and all(map(is_count, window))):
            raise StateError(f"the state is damaged: window is {short(window)}, expected two integers")
        settings = {**self._settings, **saved}
        checked = _checked_part(self._order, settings, self._about_corpus["fingerprint"])
        right = _check_value(checked, position, list(window))
        found = state.get("check", right)
        if found != right:
            raise StateError(
                f"the state was damaged or edited: its check value {short(found)} does not match epoch "
                f"{position.epoch}, rows {position.rows}, window {list(window)} and these settings; use an unchanged "
                "copy"
            )
        if saved:
            return
        from dali_pipes.rows.window_counts import WindowMark  # with the first rows of documents

        self._resume_lengths(saved_curriculum, position, WindowMark(*window))
        if not self._schedule.interleave.seek(*position, WindowMark(*window)):
            raise StateError(
                f"the state is damaged: row {position.rows} of epoch {position.epoch} is not in window {window[0]}, "
                f"which begins after {window[1]} rows; use an unchanged copy"
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
            f"skip_steps: {steps} is ambiguous, because rows have a different length than in the saved run "
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


def about_corpus(corpus: Corpus) -> dict[str, Any]:
    """What a state says of a corpus."""
    return {
        "fingerprint": corpus.fingerprint,
        "format": corpus.format,
        "dtype": corpus.dtype.name,
        "tokens": corpus.num_tokens,
        "files": len(corpus.files),
        "digests": " ".join(corpus.file_digests),
        **({"loss_masks": " ".join(corpus.mask_digests)} if corpus.loss_mask is not None else {}),
        **({"keep": corpus.keep.digest.hex()[:8]} if corpus.keep is not None else {}),
    }


def about_sources(config: LoaderConfig, corpora: Mapping[str, Corpus]) -> dict[str, Any]:
    """What a state says of the corpora of a mixture, and of what makes their rows."""
    assert config.mixture is not None
    sources: dict[str, Any] = {}
    for name, own in config.sources.items():
        share = share_of(config, name)
        of_rows = {key: value for key, value in order_settings(own, corpora[name]).items() if key in _OF_A_SOURCE}
        sources[name] = {
            **about_corpus(corpora[name]),
            "rows": of_rows,
            **({} if share is None else {"share": str(share)}),
        }
    text = json.dumps(sources, sort_keys=True)
    return {
        "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
        "tokens": sum(corpus.num_tokens for corpus in corpora.values()),
        "sources": sources,
    }


def _source_differences(name: str, saved: Mapping[str, Any], now: Mapping[str, Any], corpus: Corpus) -> list[str]:
    """A line for each thing that differs in one source of a mixture."""
    lines = [*_differences("", _flat(saved), _flat(now)).values()]
    if saved.get("fingerprint") != now.get("fingerprint"):
        lines += _corpus_differences(saved, now, corpus)
    return [f"mixture.{name}: {line}" for line in lines]


def _flat(source: Mapping[str, Any]) -> dict[str, Any]:
    rows = source.get("rows")
    return {**(rows if isinstance(rows, Mapping) else {}), "share": source.get("share")}


def _mixture_check(state: Mapping[str, Any]) -> str:
    """8 hex digits of the hash of all that a mixture's state says, but its version and this value."""
    said = {name: value for name, value in state.items() if name not in ("version", "check", "step_rows")}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _check_step_rows(step_rows: object) -> None:
    if step_rows is not None and not (isinstance(step_rows, int) and is_count(step_rows) and step_rows > 0):
        raise StateError(f"the state is damaged: step_rows is {short(step_rows)}, expected a positive integer")


def order_settings(config: LoaderConfig, corpus: Corpus) -> dict[str, Any]:
    """The settings that decide the order; an eos_id that a manifest gives counts as if it had been set."""
    settings = config.order_settings()
    if "eos_id" in settings and corpus.eos_id_from is not None and config.document_start_id is None:
        settings["eos_id"] = corpus.eos_id
    return settings


def _checked_part(order: str, settings: Mapping[str, Any], fingerprint: str) -> str:
    """What a place refers to, the corpus and the settings, as the beginning of a list in JSON."""
    # A setting that is None is missing from the state of a release that did not know it, and means the same.
    given = {name: value for name, value in settings.items() if value is not None}
    return json.dumps([order, given, fingerprint], sort_keys=True).removesuffix("]")


def _check_value(checked: str, position: Position, window: list[int]) -> str:
    """8 hex digits of the hash of a place and of what it refers to, as one list in JSON."""
    text = ", ".join([checked, *map(str, position), *map(str, window)])
    return hashlib.sha256(f"{text}]".encode()).hexdigest()[:8]


def _without_documents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say how documents make rows; `rows` says whether they do."""
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
        lines += [f"corpus file {name}: added, renamed or changed" for name in added]
        lines += (
            [f"{gone:,} corpus file{'s' * (gone > 1)} of the saving run: removed, renamed or changed"] if gone else []
        )
    elif len(old) == len(new):
        run = -(-len(names) // len(new))  # files that one digest covers
        lines += [
            f"corpus files {number * run} to {min((number + 1) * run, len(names)) - 1} ({names[number * run]} ...): "
            "one or more added, renamed or changed"
            for number in range(len(new))
            if old[number] != new[number]
        ]
    if saved.get("keep") != now.get("keep"):
        file = "" if corpus.keep is None else f" ({corpus.keep.path})"
        lines.append(f"corpus keep{file}: saved {_shown('keep', saved)}, now {_shown('keep', now)}")
    if tuple(old) == new:
        lines += _mask_differences(saved.get("loss_masks"), now.get("loss_masks"), names)
    return lines or ["corpus: the same files in a different order"]


def _mask_differences(saved: Any, now: str | None, names: Sequence[str]) -> list[str]:
    """How the loss masks of the same data files differ."""
    if not isinstance(saved, str | None):
        return [f"loss masks: saved {short(saved)}, expected digests"]
    if saved is None or now is None:
        return (
            []
            if saved == now
            else [f"loss masks: saved with{'out' * (saved is None)}, now with{'out' * (now is None)}"]
        )
    old, new = saved.split(), now.split()
    run = -(-len(names) // len(new))  # files that one digest covers
    return [
        f"loss mask of corpus file {names[number * run]}{f' or of one of the next {run - 1}' * (run > 1)}: "
        "added, removed, renamed or changed"
        for number in range(min(len(old), len(new)))
        if old[number] != new[number]
    ]


def _is_of_another_release(saved: Any, now: str) -> bool:
    """Whether two names of orders differ in nothing but their versions."""
    return saved != now and isinstance(saved, str) and _VERSION.sub("", saved) == _VERSION.sub("", now)
