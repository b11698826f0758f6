"""A configuration that has been opened for the page: what all its sections look at, built only once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import BuiltSource
from dali_pipes.loader.batch_origin import RowCutters, built_on_cpu, counted_from
from dali_pipes.loader.batch_preview import BatchPreviewer, shown_outputs
from dali_pipes.schedule.plans import Plan, plan_step
from dali_pipes.text.token_text import TokenText
from dali_pipes.tools.reports.step_report import of_all_ranks


@dataclass(frozen=True)
class OpenedRun:
    """config: with the outputs that a preview shows. steps: those that were asked for, of `epoch`. base: the row that
    steps are counted from.
    """

    config: LoaderConfig
    built: BuiltSource
    previewer: BatchPreviewer
    epoch: int
    base: int
    steps: tuple[int, ...]

    @property
    def cutters(self) -> RowCutters:
        """Those of the previewer."""
        return self.previewer.cutters

    def plan(self, step: int) -> Plan:
        """The rows of a step on all ranks. Raises `ConfigError` for one that does not exist."""
        return plan_step(of_all_ranks(self.built.schedule), self.epoch, step, self.base)


@contextmanager
def opened_run(
    config: LoaderConfig, epoch: int, steps: tuple[int, ...], state: Path | None, tokenizer: TokenText | None
) -> Iterator[OpenedRun]:
    """Blocks to open the corpora and to read the documents, if they are used. Raises as `TokenLoader`, and for a step
    that does not exist, or a state that does not fit.
    """
    config = shown_outputs(config)
    built = built_on_cpu(config)
    previewer = BatchPreviewer(built, config, tokenizer)
    try:
        base = counted_from(state, config, built, epoch)
        run = OpenedRun(config, built, previewer, epoch, base, steps)
        for step in steps:
            run.plan(step)
        yield run
    finally:
        previewer.close()
