"""Reports of whole plans, kept in the user's cache folder: a later start knows an epoch's rows without planning it.

    plan-0123...cdef.json     {"about": "...", "report": {"epoch": 0, "rows": 1713, ...}, "sha256": "..."}

`about` is what the plan depends on: corpus, times of its files, settings of the order, epoch. A file is used
only if it is, byte for byte, the one that its figures make, and if these agree with each other and with what is known
of the epoch. They are told, never planned with: no row comes from a kept report.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dali_pipes.corpus import Corpus
from dali_pipes.operators.permute import ORDER_NAME
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.source import Source
from dali_pipes.runtime.messages import say_once
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.runtime.user_cache import cache_folder, kept_name, load_or_make, write_whole

_FORMAT_VERSION = 1
"""Changes with the file, and with the rows that a window's documents make."""

_MOST_BYTES = 1 << 16


def reports_of(
    source: Source, settings: Mapping[str, Any], step_shape: tuple[int, int] | None = None
) -> "PlanReports | None":
    """The reports of a source whose rows are planned; None where rows are a formula. The rest: see `PlanReports`."""
    rows, corpus = source.rows, source.corpus
    if not (isinstance(rows, DocumentRows) and isinstance(corpus, Corpus)):
        return None
    return PlanReports(rows, corpus, settings, step_shape)


class PlanReports:
    """The reports of one split, by epoch. `settings`: all that decides the order, as in a state.

    step_shape: ranks, and rows of each in a step, which balanced rows are reported for
    """

    def __init__(
        self,
        documents: DocumentRows,
        corpus: Corpus,
        settings: Mapping[str, Any],
        step_shape: tuple[int, int] | None = None,
    ) -> None:
        self._documents, self._files, self._step_shape = documents, corpus.files, step_shape
        of_steps = {} if documents.balance is None else {"step_shape": step_shape}
        given = json.dumps({**settings, **of_steps}, sort_keys=True)
        of_keep = "" if corpus.keep is None else f" keep {corpus.keep.digest.hex()}"
        self._about = f"dali_pipes plan {_FORMAT_VERSION} {ORDER_NAME} {corpus.content_key} {given}{of_keep}"
        self._known: dict[int, PlanReport | None] = {}

    @property
    def num_documents(self) -> int:
        """Documents of an epoch."""
        return self._documents.num_documents

    def known(self, epoch: int) -> PlanReport | None:
        """The report of an epoch if this or an earlier process has planned it. Does not plan or wait.

        Looks for the file once an epoch.
        """
        if self._documents.lengths is not None:
            return None
        if epoch not in self._known:
            folder, _ = cache_folder(self._files)
            self._known[epoch] = None if folder is None else self._load(epoch, folder / self._name(epoch))
        report = self._known[epoch]
        return report if report is not None and self._agrees(report, epoch) else None

    def knows_rows(self, epoch: int) -> bool:
        """Whether `rows` has nothing to plan. Plans nothing."""
        return self._documents.is_counted(epoch) or self.known(epoch) is not None

    def rows(self, epoch: int) -> int:
        """Rows of an epoch. Blocks as `report` does, unless they have been counted already."""
        return self._documents.count(epoch) if self._documents.is_counted(epoch) else self.report(epoch).rows

    def report(self, epoch: int) -> PlanReport:
        """The report of an epoch. Prints the reason once if it cannot be cached.

        Plans the whole epoch unless that has been done before. Blocks, also while another process plans it.
        """
        known = self.known(epoch)
        if known is not None:
            return known
        make = partial(self._make, epoch)
        if self._documents.lengths is not None:  # a resumed run may have had others in this epoch
            return make()
        folder, reason = cache_folder(self._files)
        if folder is None:
            report = make()
        else:
            path, load, store = folder / self._name(epoch), partial(self._load, epoch), partial(self._store, epoch)
            report, reason = load_or_make(path, load, make, store)
        self._known[epoch] = report
        if reason is not None:
            say_once(f"the plan report cannot be cached: {reason}; the next start will plan the epoch again")
        return report

    def _make(self, epoch: int) -> PlanReport:
        with progress_bar(f"planning epoch {epoch}", self._documents.num_windows) as advance:
            return self._documents.report(epoch, advance, self._step_shape)

    def _name(self, epoch: int) -> str:
        return kept_name("plan", self._about_epoch(epoch).encode(), ".json")

    def _about_epoch(self, epoch: int) -> str:
        return f"{self._about} epoch {epoch}"

    def _load(self, epoch: int, path: Path) -> PlanReport | None:
        """The report kept at `path`, or None if it is missing or cannot be trusted."""
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_BYTES)
            figures: dict[str, Any] = dict(json.loads(content)["report"])
            figures |= {name: tuple(figure) for name, figure in figures.items() if isinstance(figure, list)}
            report = PlanReport(**figures)
            can_be_trusted = self._content(epoch, report) == content and self._agrees(report, epoch)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None  # not there, not readable, not JSON, not a report
        return report if can_be_trusted else None

    def _store(self, epoch: int, path: Path, report: PlanReport) -> None:
        write_whole(path, self._content(epoch, report))

    def _content(self, epoch: int, report: PlanReport) -> bytes:
        figures = {"about": self._about_epoch(epoch), "report": report.as_dict()}
        digest = hashlib.sha256(json.dumps(figures).encode()).hexdigest()
        return (json.dumps({**figures, "sha256": digest}) + "\n").encode()

    def _agrees(self, report: PlanReport, epoch: int) -> bool:
        """Whether a report may be that of an epoch, by all that is known without planning it."""
        documents = self._documents
        if documents.is_counted(epoch) and documents.count(epoch) != report.rows:
            return False
        in_rows = report.tokens - report.dropped_tokens
        batches = documents.token_batches
        most_padding = report.rows * (documents.seq_len if batches is None else batches.tokens) - in_rows
        return (
            report.epoch == epoch
            and report.documents == documents.num_documents
            and report.removed_documents == documents.removed_documents
            and report.extra_copies == documents.extra_copies
            and (report.tokens == documents.num_tokens or not documents.keeps_all or documents.rearranges)
            and report.rows <= in_rows <= report.tokens
            and 0 <= report.padding_tokens <= most_padding
            and (report.padding_tokens == most_padding or not (documents.buckets is None and batches is None))
        )
