"""What a step contains, on all ranks or one, in totals and row by row: `explain_step`. Reads no tokens.

All ranks together are planned as one rank that gets all rows, so the cost does not depend on the number of ranks:
row i of the step is row i // world_size of rank i % world_size.
"""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.skip_steps import in_steps
from dali_pipes.engine.build import BuiltSource
from dali_pipes.loader.batch_origin import RowCutters, RowOrigin, built_on_cpu, counted_from
from dali_pipes.schedule import PADDING, Schedule
from dali_pipes.schedule.plans import Plan, plan_step
from dali_pipes.uris import FilePath

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepReport:
    """One step, of all ranks or of one."""

    epoch: int
    step: int
    rank: int | None
    """None: all of them."""
    world_size: int
    is_skipped: bool
    """Whether it is listed in `skip_steps`, so a run with this configuration does not deliver it."""
    num_rows: int
    """Rows with tokens."""
    padding_rows: int
    """Rows that only fill up the batch, so that all ranks get equally many."""
    width: int
    """Positions per row; with `batch_tokens`, of the widest."""
    tokens: int
    """Sentinels of fill-in-the-middle among them."""
    padding: int
    """Positions without a token, including those of padding rows."""
    row_ids: tuple[int, int]
    """First and last, as places in the epoch's order; one rank of several gets only some of those in between."""
    documents: int | None
    """Documents with a token in the step; None if those of a source in it are not known."""
    num_files: int
    files: tuple[FilePath, ...]
    """The first files with a token in the step."""
    rows: tuple[tuple[int, RowOrigin], ...]
    """The first rows, each with its rank."""
    objective: str | None = None
    """What is learned of them; None: the next token."""

    @property
    def rows_left_out(self) -> int:
        """Rows of the step after `rows`."""
        return self.num_rows + self.padding_rows - len(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **vars(self),
            "files": [str(file) for file in self.files],
            "rows": [{"rank": rank, **row.as_dict()} for rank, row in self.rows],
            "rows_left_out": self.rows_left_out,
        }


def explain_step(
    config: LoaderConfig, step: int, epoch: int = 0, *, all_ranks: bool, most: int, state: Path | None = None
) -> StepReport:
    """What step `step` of an epoch contains, with its first `most` rows and the first `most` of its files.

    For all ranks, or for the rank in `config`, which must have a world size too. `state`: JSON file of the state that
    the run resumed from, if it was saved with another global batch size; steps of its epoch are then counted as in that
    run. Blocks to read the documents, if they are used, and to plan rows of documents.
    Raises as `TokenLoader`, and `ConfigError` for a step that does not exist.
    """
    with closing(built_on_cpu(config)) as built:
        base, cutters = counted_from(state, config, built, epoch), RowCutters(built, config)
        return step_report(built, config, cutters, step, epoch, base, all_ranks=all_ranks, most=most)


def step_report(
    built: BuiltSource,
    config: LoaderConfig,
    cutters: RowCutters,
    step: int,
    epoch: int,
    base: int,
    *,
    all_ranks: bool,
    most: int,
) -> StepReport:
    """As `explain_step`, of what has been built, with steps counted from row `base`."""
    own = built.schedule
    schedule = of_all_ranks(own) if all_ranks else own
    plan = plan_step(schedule, epoch, step, base)
    real = plan.row_ids[plan.row_ids != PADDING]
    rows = -(-len(real) // own.world_size) * own.world_size if all_ranks else len(plan.row_ids)
    width = plan.width(config.row_len)
    positions = rows * width
    if plan.sizes is not None and plan.widths is not None:  # batches of different shapes
        rows, width, positions = len(plan.row_ids), int(plan.widths.max()), int(plan.widths.sum())
    starts, lengths = spans_of(plan, width)
    files, documents = _files_and_documents(cutters, starts, lengths)
    ranks = ranks_of(plan, own.world_size, rows) if all_ranks else np.full(rows, own.rank)
    shown = []
    for number, rank in enumerate(ranks[:most].tolist()):
        row = int(np.count_nonzero(ranks[:number] == rank))
        shown.append((rank, cutters.origin(plan, number, row)))
    tokens = int((lengths if plan.pieces is None else plan.pieces.lengths).sum())
    left_out = in_steps(config.skip_steps, own.global_rows, config.row_len, start=(epoch, base))
    return StepReport(
        epoch,
        step,
        None if all_ranks else own.rank,
        own.world_size,
        is_skipped=any(first <= step < end for first, end, number in left_out if number == epoch),
        num_rows=len(real),
        padding_rows=rows - len(real),
        width=width,
        tokens=tokens,
        padding=positions - tokens,
        row_ids=(int(real[0]), int(real[-1])) if len(real) else (PADDING, PADDING),
        documents=documents,
        num_files=len(files),
        files=tuple(files[:most]),
        rows=tuple(shown),
        objective=config.objective_line,
    )


def of_all_ranks(schedule: Schedule) -> Schedule:
    """The schedule of one rank that gets the rows of all."""
    return replace(schedule, rank=0, world_size=1, batch_size=schedule.global_rows)


def ranks_of(plan: Plan, world_size: int, rows: int) -> Int64Array:
    """(rows,): the rank of each row of a plan for all ranks. They take turns; with `batch_tokens`, each has a batch."""
    return np.arange(rows) % world_size if plan.sizes is None else np.repeat(np.arange(len(plan.sizes)), plan.sizes)


def spans_of(plan: Plan, seq_len: int) -> tuple[Int64Array, Int64Array]:
    """First token and number of tokens of each span that the rows of a plan contain."""
    if plan.pieces is not None:
        runs = plan.rows.runs()
        if runs is None:
            return plan.pieces.starts, plan.pieces.lengths
        return runs.starts[runs.starts >= 0], runs.lengths[runs.starts >= 0]
    starts = plan.starts[plan.row_ids != PADDING]
    return starts, np.full(len(starts), seq_len)


def _files_and_documents(
    cutters: RowCutters, starts: Int64Array, lengths: Int64Array
) -> tuple[list[FilePath], int | None]:
    """The files with a token in a span, source by source, and the number of documents; None if some are not known."""
    files: list[FilePath] = []
    documents: int | None = 0
    whose = np.searchsorted(cutters.bases[: len(cutters.corpora)], starts, side="right") - 1
    for number, corpus in enumerate(cutters.corpora):
        own_starts, own_lengths = starts[whose == number] - cutters.bases[number], lengths[whose == number]
        if not len(own_starts):
            continue
        extents, file_numbers = corpus.extents
        files += [corpus.files[file] for file in np.unique(file_numbers[_met(extents, own_starts, own_lengths)])]
        offsets = cutters.offsets[number]
        if offsets is None or documents is None:
            documents = None
        else:
            documents += len(_met(offsets, own_starts, own_lengths))
    return files, documents


def _met(bounds: Int64Array, starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Which parts bounds[i] ... bounds[i + 1] - 1 have a token in one of the spans, in rising order."""
    firsts = np.searchsorted(bounds, starts, side="right") - 1
    counts = np.searchsorted(bounds, starts + lengths, side="left") - firsts
    parts: Int64Array = np.unique(np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts))
    has_tokens: npt.NDArray[np.bool_] = bounds[parts] < bounds[parts + 1]
    return parts[has_tokens]
