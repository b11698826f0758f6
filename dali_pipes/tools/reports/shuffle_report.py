"""How well an order shuffles: `judge_shuffle`, for the configured order and the others beside it. Reads no tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.corpus.joined import JoinedCorpora
from dali_pipes.engine.build import make_schedule, with_curriculum
from dali_pipes.engine.mixture import mix, open_corpora
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.make import make_rows
from dali_pipes.rows.windows import WindowRows
from dali_pipes.runtime.optional import optional_package
from dali_pipes.schedule import PADDING, Schedule
from dali_pipes.schedule.interleave import of_one_source
from dali_pipes.schedule.plans import plan_step
from dali_pipes.tools.reports.shuffle_figures import OrderFigures, OrderName, SourcePlaces

Int64Array = npt.NDArray[np.int64]

_POINTS = 4096
"""Rows of a plot."""


@dataclass(frozen=True)
class ShuffleReport:
    """Figures of steps 0 to `steps` - 1 of epoch 0, over all ranks, in each order."""

    steps: int
    step_rows: int
    corpus_blocks: int
    """Blocks of all sources."""
    shuffle_window: int
    largest_file: float
    """Share of the largest file in all tokens."""
    orders: tuple[OrderFigures, ...]
    courses: tuple[tuple[OrderName, Int64Array, npt.NDArray[np.float64]], ...]
    """For each order: places of the epoch, and the position of their rows as a fraction of all tokens."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without the courses."""
        return {
            "steps": self.steps,
            "step_rows": self.step_rows,
            "corpus_blocks": self.corpus_blocks,
            "shuffle_window": self.shuffle_window,
            "largest_file": self.largest_file,
            "orders": [asdict(figures) for figures in self.orders],
        }


def judge_shuffle(config: LoaderConfig, steps: int) -> ShuffleReport:
    """Figures of up to `steps` first steps, in the configured order, and with the others in its place.

    Rank and world size must be in `config`. Blocks to open the corpora, and to plan rows of documents. Raises as
    `TokenLoader`, and `ConfigError` for a validation split, which is never shuffled.
    """
    if config.split == "validation":
        raise ConfigError(
            'shuffle: split = "validation" is always read in the order of the corpus; use the settings of training'
        )
    with _opened(config) as corpora:
        return shuffle_of(config, corpora, steps)


def shuffle_of(config: LoaderConfig, corpora: Mapping[str, Corpus], steps: int) -> ShuffleReport:
    """As `judge_shuffle`, of opened corpora."""
    plain = {"order": "rows", "shuffle_window": LoaderConfig.model_fields["shuffle_window"].default}
    unbalanced = dict.fromkeys(("balance", "balance_cost", "hidden_size", "num_layers"))  # which needs a shuffle
    in_blocks = {"order": "blocks", "shuffle_window": config.shuffle_window}
    variants: dict[OrderName, LoaderConfig] = {
        "rows": config.replace(shuffle=True, **plain),
        "blocks": config.replace(shuffle=True, **in_blocks),
        "sequential": config.replace(shuffle=False, **plain, **unbalanced),
    }
    configured = config.order if config.shuffle else "sequential"
    places = SourcePlaces(list(corpora.values()), config.stride or config.row_len)
    made = {name: _schedule(variant, corpora) for name, variant in variants.items()}
    own, _ = made[configured]
    steps = min(steps, own.steps(most=steps))
    orders = []
    for name, (schedule, windows) in made.items():
        positions = [_positions(schedule, step) for step in range(steps)]
        orders.append(places.figures(name, name == configured, windows, positions))
    return ShuffleReport(
        steps,
        own.global_rows,
        sum(places.num_blocks),
        config.shuffle_window,
        places.largest_file,
        tuple(orders),
        tuple((name, *_course(schedule, places.num_tokens)) for name, (schedule, _) in made.items()),
    )


@contextmanager
def _opened(config: LoaderConfig) -> Iterator[dict[str, Corpus]]:
    corpora = open_corpora(config)
    try:
        yield corpora
    finally:
        for corpus in corpora.values():
            corpus.close()


def _schedule(config: LoaderConfig, corpora: Mapping[str, Corpus]) -> tuple[Schedule, int | None]:
    """The steps of all ranks as those of one; and, of an order by blocks, the windows of the source with most."""
    config = config.replace(skip_steps=())
    sources: tuple[RowSource, ...]
    if config.mixture is None:
        rows, _ = make_rows(config, corpora[""])
        interleave, sources = of_one_source(rows), (rows,)
    else:
        mixture, _ = mix(config, corpora, JoinedCorpora(corpora).bases)
        interleave, sources = mixture, mixture.sources
    orders = [rows.order.blocks for rows in sources if isinstance(rows, WindowRows | DocumentRows)]
    schedule = make_schedule(config, with_curriculum(config, interleave))
    return (
        replace(schedule, rank=0, world_size=1, batch_size=schedule.global_rows),
        max((order.num_windows for order in orders if order is not None), default=None),
    )


def _positions(schedule: Schedule, step: int) -> Int64Array:
    """Of the first token of each row of a step, in the joined corpora."""
    plan = plan_step(schedule, 0, step)
    positions: Int64Array = plan.starts[plan.row_ids != PADDING]
    return positions


def _course(schedule: Schedule, num_tokens: int) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """Rows spread over the epoch; where those of the end cannot be told without planning all before, the first."""
    interleave = schedule.interleave
    is_arithmetic = interleave.most_planned is None and schedule.curriculum is None
    count = interleave.count(0, None if is_arithmetic else _POINTS)
    places = np.arange(_POINTS) * count // _POINTS if is_arithmetic else np.arange(count)
    places = np.unique(places[:_POINTS])
    if schedule.curriculum is None:
        positions = interleave.plan(0, places).starts
    else:
        steps = range(min(schedule.steps(most=-(-_POINTS // schedule.global_rows)), len(places)))
        positions = np.concatenate([_positions(schedule, step) for step in steps])[:_POINTS]
        places = np.arange(len(positions))
    return places, positions / num_tokens


def plot_shuffle(report: ShuffleReport, path: Path) -> None:
    """Write a figure with a panel for each order: where in the corpus the rows of the epoch come from.

    The suffix of `path` is the format. Raises `BackendError` without matplotlib, and `ConfigError` for a format that it
    does not write.
    """
    with optional_package("matplotlib", "demo", purpose="to plot orders"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(report.courses), sharey=True)
    for panel, (name, places, positions), figures in zip(panels, report.courses, report.orders, strict=True):
        panel.plot(places, positions, ".", markersize=1.5)
        panel.set(title=f"{name}{' (configured)' if figures.is_configured else ''}", xlabel="row of the epoch")
        panel.ticklabel_format(axis="x", style="plain" if places[-1] < 1e5 else "sci", scilimits=(0, 0))
    panels[0].set(ylabel="position in the corpus", ylim=(0, 1))
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: expected a name that ends in .png, .svg, or .pdf")
    figure.savefig(path)
