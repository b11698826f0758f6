"""The part of a state that says where a mixture stands, and how a run goes on from it.

    "mixture": {"place": 1280000, "given": [[0, {"web": "7/10", ...}]], "stages": [...], "marks": {"web": [896000]}}

place:  rows of the whole run, over all epochs and ranks
given:  the stages of the configuration that began before it: first place, and weights in rows
stages: those that were in force, with what `set_weights` and exhausted sources changed
marks:  rows used of each source, and for rows of documents where their plan stands

Weights are kept in rows. The mean tokens of a row, by which weights in tokens are divided, are not kept: they are those
of the first packing window of pass 0, which depends on the corpus, the seed, the name of the source and the settings of
its rows alone. A state with others of these is refused, so a resumed run finds the same means; and stages that have
begun go on with their saved weights in rows, whatever it finds.
"""

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dali_pipes.errors import StateError
from dali_pipes.loader.state_form import is_count, short
from dali_pipes.runtime.messages import counted

if TYPE_CHECKING:
    from dali_pipes.loader.state_change import MixtureChange
    from dali_pipes.schedule.mixed_rows import MixedRows
    from dali_pipes.schedule.mixture import MixtureOrder

Stages = list[tuple[int, dict[str, Fraction]]]

_NEARLY = Fraction(2, 10**9)
"""Weights that a temperature gives are rounded to 9 decimals; machines may differ by one in the last."""


def mixture_entry(mixture: "MixedRows", epoch: int, places: int) -> dict[str, Any]:
    """The entry of a state after the first places of an epoch. Does not block for rows that have been planned."""
    place = mixture.place(epoch, places)
    begun = mixture.next_stratum(place)  # weights that `set_weights` changed may begin there
    return {
        "place": place,
        "given": _written((first, weights) for first, weights in mixture.given if first <= place),
        "stages": _written((first, weights) for first, weights in mixture.order.stages if first <= begun),
        "marks": mixture.marks(place),
    }


def changed_weights(mixture: "MixedRows", entry: Mapping[str, Any]) -> list[str]:
    """A line for each source whose configured weight, up to the saved place, is not what it was."""
    saved, now = _read(entry["given"]), [stage for stage in mixture.given if stage[0] <= entry["place"]]
    if [first for first, _ in saved] != [first for first, _ in now]:
        return [f"stages: saved with {len(saved) - 1} before row {entry['place']:,}, now {len(now) - 1}"]
    lines = []
    for (first, before), (_, after) in zip(saved, now, strict=True):
        for name in mixture.names:
            old, new = before.get(name, Fraction(0)), after[name]
            if name in before and abs(old - new) > _NEARLY:
                since = f" from row {first:,}" * bool(first)
                lines.append(f"mixture.{name}: weight{since}: saved {float(old):.6g}, now {float(new):.6g} of the rows")
    return lines


def resume_mixture(
    mixture: "MixedRows",
    entry: Mapping[str, Any],
    epoch: int,
    places: int,
    places_done: int,
    other_sources: Collection[str] | None,
) -> "MixtureChange | None":
    """Let a mixture go on where a state says, with the weights that were in force. May plan windows of documents.

    places: of the epoch, that the saved run had begun.
    places_done: of the epoch, that the saved run had handed out whole.
    other_sources: the sources of the saved run, if they or their weights differ: those of the configuration then begin
                   at the next stratum, and what that changes is returned; None: they are the same.

    Raises `StateError` for an entry that cannot be right.
    """
    place, marks = entry["place"], entry["marks"]
    if places > mixture.total:
        raise StateError(
            f"the state was saved after {places:,} rows of an epoch, but with the current total an epoch has only "
            f"{mixture.total:,}; set a larger total"
        )
    saved = _read(entry["stages"])
    former = [name for _, weights in saved for name in weights if name not in mixture.names]
    names = (*mixture.names, *dict.fromkeys(former))
    stages, change = [*saved], None
    if other_sources is not None:
        begin = mixture.next_stratum(place)
        weights = [weights for first, weights in mixture.given if first <= place][-1]
        was, now = _shares(saved[-1][1], other_sources), _shares(weights, mixture.names)
        shares = {name: (was.get(name), now.get(name)) for name in (*mixture.names, *other_sources)}
        settings = {f"mixture.{name}": pair for name, pair in shares.items() if pair[0] != pair[1]}
        tokens = places * mixture.stride
        from dali_pipes.loader.state_change import MixtureChange  # with the first change

        change = MixtureChange(settings, epoch, places, places, tokens, tokens, True, begin)
        stages = [stage for stage in stages if stage[0] < begin] + [(begin, dict(weights))]
    stages += [(first, dict(weights)) for first, weights in mixture.given if first > max(place, stages[-1][0])]
    everywhere = [(first, {name: weights.get(name, Fraction(0)) for name in names}) for first, weights in stages]
    order = mixture.order.resumed(names, everywhere, mixture.next_stratum(place))
    counts = dict(zip(order.names, order.counts_before(place).tolist(), strict=True))
    for name, count in counts.items():
        found = marks.get(name, [0])[0]
        if found != count:
            raise StateError(
                f"the state is damaged: source {name!r} gave {short(found)} rows before row {place:,}, expected "
                f"{count:,}; use an unchanged copy"
            )
    _refuse_missing(former, order, place - places + places_done, mixture.next_stratum(place))
    wrong = mixture.seek_marks(marks)
    if wrong is not None:
        raise StateError(
            f"the state is damaged: the mark of source {wrong!r}, {short(marks[wrong])}, does not fit its rows; use an "
            "unchanged copy"
        )
    mixture.set_order(order)
    mixture.begin_at(epoch, place - places)
    return change


def _refuse_missing(former: Collection[str], order: "MixtureOrder", begin: int, end: int) -> None:
    """Raise `StateError` if sources that are not configured any more give some of the next rows."""
    rows = dict(zip(order.names, (order.counts_before(end) - order.counts_before(begin)).tolist(), strict=True))
    missing = next((name for name in former if rows[name]), None)
    if missing is not None:
        raise StateError(
            f"mixture.{missing}: this source is not configured, but gives {counted(rows[missing], 'row')} "
            f"before row {end:,}, where other sources begin; give it weight = 0, and remove it after that row"
        )


def _shares(weights: Mapping[str, Fraction], names: Collection[str]) -> dict[str, float]:
    """Of the rows, for each name."""
    total = sum(weights.values()) or Fraction(1)
    return {name: float(weights.get(name, Fraction(0)) / total) for name in names}


def check_entry(entry: Any) -> None:
    """Raise `StateError` unless an entry has the form of `mixture_entry`."""
    try:
        is_right = (
            is_count(entry["place"])
            and all(is_count(number) for mark in entry["marks"].values() for number in mark)
            and all(entry["marks"].values())
        )
        for key in ("given", "stages"):
            stages = _read(entry[key])
            is_right = is_right and bool(stages) and stages[0][0] == 0 and all(is_count(first) for first, _ in stages)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError):
        is_right = False
    if not is_right:
        raise StateError(f"the state is damaged: mixture is {short(entry)}; use an unchanged copy")


def _written(stages: Any) -> list[list[Any]]:
    return [[first, {name: str(weight) for name, weight in weights.items() if weight}] for first, weights in stages]


def _read(stages: Sequence[Any]) -> Stages:
    return [(first, {name: Fraction(weight) for name, weight in weights.items()}) for first, weights in stages]
