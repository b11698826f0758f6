"""What a mixture uses of its sources by some place of the run, before the run: `plan_mixture`. Reads no tokens."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError
from dali_pipes.loader.batch_origin import built_on_cpu
from dali_pipes.runtime.optional import optional_package
from dali_pipes.schedule.curriculum import Curriculum
from dali_pipes.schedule.mixed_rows import MixedRows
from dali_pipes.schedule.mixture import MOST_PLACES, Exhausted
from dali_pipes.schedule.mixture_report import MixtureReport, mixture_report

_POINTS = 128
"""Places of a plot."""


@dataclass(frozen=True)
class WeightsFrom:
    """Weights that hold from a place on: shares of the tokens, 0 to 1, with those that left at 0."""

    place: int
    tokens: int
    """Positions of the rows before it, padding included: `at` of a stage, up to the next stratum."""
    weights: dict[str, float]


@dataclass(frozen=True)
class LengthsFrom:
    """Lengths that hold from a place on."""

    place: int
    tokens: int
    """As `seq_len` and `global_batch` count them: up to 64 rows and an optimizer step after the asked number."""
    seq_len: int
    global_batch: int
    """Rows of an optimizer step over all ranks."""


@dataclass(frozen=True)
class MixturePlan:
    """The use of each source before a place of the run, counted over all ranks, and the weights on the way."""

    report: MixtureReport
    seq_len: int
    stages: tuple[WeightsFrom, ...]
    exhausted: tuple[Exhausted, ...]
    """Sources that left before the place because they reached max_epochs."""
    lengths: tuple[LengthsFrom, ...]
    """How rows and optimizer steps grow up to this place; empty without global_batch."""
    course: tuple[MixtureReport, ...]
    """Reports at places up to this one; empty unless asked for."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.report.as_dict(),
            "seq_len": self.seq_len,
            "stages": [vars(stage) for stage in self.stages],
            "lengths": [vars(lengths) for lengths in self.lengths],
            "exhausted": [{**source._asdict(), "tokens": source.place * self.seq_len} for source in self.exhausted],
        }


def plan_mixture(config: LoaderConfig, at: int | None = None, *, with_course: bool = False) -> MixturePlan:
    """The plan up to the first place at or after `at` tokens of the run; None: up to the end of the first epoch.

    Rank and world size must be in `config`. Blocks to open the corpora, and to plan rows of documents. Raises as
    `TokenLoader`, and `ConfigError` without a mixture and for an `at` that the run cannot reach.
    """
    if config.mixture is None:
        raise ConfigError("mixture: this configuration reads one corpus; list sources in the setting mixture")
    with closing(built_on_cpu(config)) as built:
        assert built.mixture is not None
        return plan_of_mixture(built.mixture, built.schedule.curriculum, config.row_len, at, with_course=with_course)


def plan_of_mixture(
    mixture: MixedRows, curriculum: Curriculum | None, row_len: int, at: int | None = None, *, with_course: bool
) -> MixturePlan:
    """As `plan_mixture`, of a mixture that has been built."""
    place = mixture.count(0) if at is None else -(-at // row_len)
    end = MOST_PLACES if mixture.order.end is None else mixture.order.end
    if place > end:
        raise ConfigError(
            f"--at {at:,}: the mixture ends after {end * row_len:,} tokens, when its sources reach max_epochs; choose "
            "fewer tokens"
        )
    mixture.check_caps(place)
    return MixturePlan(
        mixture_report(mixture, place),
        row_len,
        tuple(
            WeightsFrom(
                first,
                first * row_len,
                {use.name: use.weight for use in mixture_report(mixture, first).sources},
            )
            for first, _ in mixture.order.stages
            if first <= place
        ),
        tuple(source for source in mixture.order.exhausted if source.place <= place),
        _lengths(curriculum, mixture, place),
        _course(mixture, place) if with_course else (),
    )


def _lengths(curriculum: Curriculum | None, mixture: MixedRows, place: int) -> tuple[LengthsFrom, ...]:
    if curriculum is None:
        return ()
    found: list[LengthsFrom] = []
    for epoch in curriculum.epochs_of_stages(mixture.total):
        first = mixture.first_place(epoch)
        for segment in curriculum.segments(epoch):
            at, end = first + segment.place, min(place, first + mixture.total)
            if at < end and (not found or (found[-1].seq_len, found[-1].global_batch) != segment[2:]):
                found.append(LengthsFrom(at, at * mixture.seq_len, segment.seq_len, segment.global_batch))
    return tuple(found)


def _course(mixture: MixedRows, place: int) -> tuple[MixtureReport, ...]:
    """Reports at evenly spaced places, and where stages begin; without place 0, where no source has a share."""
    places = {place * point // _POINTS for point in range(1, _POINTS + 1)}
    places |= {first for first, _ in mixture.order.stages if first < place}
    return tuple(mixture_report(mixture, each) for each in sorted(places - {0}))


def plot_mixture(plan: MixturePlan, path: Path) -> None:
    """Write a figure of the course of a plan: the share of each source so far, stacked, and its passes.

    The suffix of `path` is the format. Raises `BackendError` without matplotlib, and `ConfigError` for a format that it
    does not write.
    """
    with optional_package("matplotlib", "demo", purpose="to plot a mixture"):
        from matplotlib.figure import Figure
    if not plan.course:
        raise ConfigError("--plot: there is nothing to plot before the first row; choose a larger --at")
    names = [use.name for use in plan.report.sources]
    # A name that begins with "_" would be left out of the legend, and "$" begins a formula.
    labels = ["\N{ZERO WIDTH SPACE}" + name.replace("$", r"\$") for name in names]
    tokens = [report.place * plan.seq_len for report in plan.course]
    figure = Figure(figsize=(9, 7), layout="constrained")
    shares, passes = figure.subplots(2, sharex=True)
    shares.stackplot(tokens, _columns(plan.course, "share"), labels=labels)
    shares.set(ylabel="share of tokens so far", ylim=(0, 1))
    for label, values in zip(labels, _columns(plan.course, "passes"), strict=True):
        passes.plot(tokens, values, label=label)
    passes.set(xlabel="tokens of the run", ylabel="passes")
    for stage in plan.stages[1:]:
        for axes in (shares, passes):
            axes.axvline(stage.tokens, color="black", linestyle=":", linewidth=1)
    shares.legend(loc="upper left")
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: expected a name that ends in .png, .svg, or .pdf")
    figure.savefig(path)


def _columns(course: Sequence[MixtureReport], name: str) -> list[list[float]]:
    """One figure of each source over a course."""
    return [[getattr(use, name) for use in uses] for uses in zip(*(report.sources for report in course), strict=True)]
