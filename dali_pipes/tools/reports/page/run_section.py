"""The section on a run, from its log: rate, data wait, queue, MFU and losses over the steps.

A figure is found under its name in `stats().metrics()`, also after a prefix: `tokens_per_second`, or
`data/tokens_per_second`. The loss of a source is `loss/NAME`, `loss_by_source/NAME`, or `loss_NAME`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports.log_lines import is_named
from dali_pipes.tools.reports.page import charts
from dali_pipes.tools.reports.page.run_log import RunLog
from dali_pipes.tools.reports.page.section import Chart, Fact, Legend, Part, Section, Value

Course = tuple[list[float], list[float]]

_POINTS = 400


class _Shown(NamedTuple):
    key: str
    title: str
    last: str
    ylabel: str
    names: tuple[str, ...]
    """In order: the first that the log has is shown."""
    as_share: bool = False
    from_zero: bool = True


_SHOWN = (
    _Shown("tokens_per_second", "Tokens per second", "tokens per second", "tokens/s", ("tokens_per_second",)),
    _Shown("data_wait_ratio", "Data wait", "data wait", "share of time", ("data_wait_ratio",), as_share=True),
    _Shown("data_wait_s", "Data wait per step", "data wait per step, seconds", "seconds", ("data_wait_s",)),
    _Shown("ready_blocks", "Queue depth", "queue depth", "blocks ready", ("ready_blocks", "queue_depth")),
    _Shown("mfu", "MFU", "MFU", "MFU", ("mfu", "MFU"), as_share=True),
    _Shown("model_flops_per_s", "Model FLOP/s", "model FLOP/s", "FLOP/s", ("model_flops_per_s",)),
    _Shown("loss", "Loss", "loss", "loss", ("loss", "train_loss"), from_zero=False),
    _Shown(
        "val_loss",
        "Validation loss",
        "validation loss",
        "loss",
        ("val_loss", "eval_loss", "validation_loss"),
        from_zero=False,
    ),
)
_OF_SOURCES = {
    "loss_by_source": ("Loss by source", ("loss_by_source/", "loss/")),
    "val_loss_by_source": ("Validation loss by source", ("val_loss_by_source/", "val_loss/")),
}


def run_section(log: RunLog) -> Section:
    """Charts of what the log has, averaged to 400 points."""
    courses = _with_rates(log.courses)
    drawn: list[Chart] = []
    facts = [Fact("last_step", "last step", Value(int(log.last_step))), Fact("lines", "lines", Value(log.lines))]
    notes = []
    for shown in _SHOWN:
        course = _found(courses, shown.names)
        if shown.key == "model_flops_per_s" and course is not None:
            if "mfu" in {fact.key for fact in facts}:
                continue  # the same course
            notes.append("The log does not contain the MFU, because the peak FLOP/s of the device are not known.")
        if course is not None:
            drawn.append(_chart(shown, course))
            facts.append(Fact(shown.key, f"last {shown.last}", _value(shown, course[1][-1])))
    for key, (title, prefixes) in _OF_SOURCES.items():
        of_sources = dict(_by_source(courses, prefixes))
        if of_sources:
            drawn.append(_chart_of_sources(key, title, of_sources))
    if log.lines_read < log.lines:
        notes.append(f"{log.lines_read:,} of {counted(log.lines, 'line')} were read.")
    if log.lines_wrong:
        notes.append(f"{counted(log.lines_wrong, 'line')} could not be parsed as a JSON object.")
    if not drawn:
        names = ", ".join(sorted(log.courses)[:12])
        notes.append(f"The log does not contain any figure that this section shows. It contains {names}.")
    part = Part("", facts=tuple(facts), charts=tuple(drawn), notes=tuple(notes))
    return Section("run", "Run", f"From {log.path.name}.", (part,))


def _with_rates(courses: Mapping[str, Course]) -> dict[str, Course]:
    """The courses; rate and wait between two lines in place of those since the start, where counters allow it."""
    found = dict(courses)
    for name, (above, below) in {
        "tokens_per_second": ("tokens", "wall_seconds"),
        "data_wait_ratio": ("data_wait_seconds", "wall_seconds"),
    }.items():
        for whole in courses:
            if whole.rpartition("/")[2] != name:
                continue
            prefix = whole.removesuffix(name)
            amounts, seconds = courses.get(prefix + above), courses.get(prefix + below)
            if amounts is not None and seconds is not None and amounts[0] == seconds[0] and len(amounts[0]) > 1:
                found[whole] = _rate(amounts, seconds) or found[whole]
    return found


def _rate(amounts: Course, seconds: Course) -> Course | None:
    """What was added, by second, between two lines; a counter that falls began anew. None without any time."""
    steps, values = [], []
    points = zip(amounts[0], amounts[1], seconds[1], strict=True)
    for (_, amount_before, second_before), (step, amount, second) in pairwise(points):
        if second < second_before:
            amount_before, second_before = 0.0, 0.0
        if second > second_before:
            steps.append(step)
            values.append((amount - amount_before) / (second - second_before))
    return (steps, values) if steps else None


def _found(courses: Mapping[str, Course], names: Sequence[str]) -> Course | None:
    for name in names:
        for whole, course in courses.items():
            if is_named(whole, name):
                return course
    return None


def _by_source(courses: Mapping[str, Course], prefixes: Sequence[str]) -> Iterator[tuple[str, Course]]:
    for prefix in prefixes:
        own = [(whole, course) for whole, course in courses.items() if whole.startswith(prefix)]
        if own:
            yield from ((whole.removeprefix(prefix), course) for whole, course in own)
            return


def _value(shown: _Shown, value: float) -> Value:
    return Value(value, "share" if shown.as_share else "number")


def _chart(shown: _Shown, course: Course) -> Chart:
    steps, values = _averaged(course)
    return Chart(
        shown.key,
        shown.title,
        charts.lines(
            {shown.key: (steps, values)},
            xlabel="step",
            ylabel=shown.ylabel,
            as_shares=shown.as_share,
            from_zero=shown.from_zero,
        ),
        f"{_value(shown, values[0]).text} at the start, {_value(shown, values[-1]).text} at the end, over "
        f"{counted(len(course[0]), 'line')}.",
    )


def _chart_of_sources(key: str, title: str, courses: Mapping[str, Course]) -> Chart:
    shown = dict(list(courses.items())[: charts.SERIES])
    left_out = len(courses) - len(shown)
    return Chart(
        key,
        title,
        charts.lines(
            {name: _averaged(course) for name, course in shown.items()}, xlabel="step", ylabel="loss", from_zero=False
        ),
        ", ".join(f"{name} ends at {course[1][-1]:.4g}" for name, course in shown.items())
        + (f"; {counted(left_out, 'more source')} not drawn." if left_out else "."),
        tuple(Legend(name, number) for number, name in enumerate(shown)),
    )


def _averaged(course: Course) -> Course:
    """At most 400 points, each the mean of its neighbors."""
    steps, values = course
    every = -(-len(steps) // _POINTS)
    groups = range(0, len(steps), every)
    return (
        [sum(steps[at : at + every]) / len(steps[at : at + every]) for at in groups],
        [sum(values[at : at + every]) / len(values[at : at + every]) for at in groups],
    )
