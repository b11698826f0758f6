"""A summary of a corpus, with problems that a quick look finds: `inspect_corpus`.

Reads headers, indexes, and a sample of the ids; all ids only with `full` or to find documents by an id.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dali_pipes.corpus import Corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.byte_file import file_size
from dali_pipes.tools.reports.document_lengths import LengthReport, measure_lengths
from dali_pipes.tools.reports.findings import (
    FORMULA_NOTE,
    add_document_problems,
    add_file_problems,
    add_id_problems,
    add_type_problems,
    add_zero_problems,
    documents_of,
    expected_ids,
    tokens_in_files,
)
from dali_pipes.tools.reports.id_scan import all_spans, sample_spans, scan_ids
from dali_pipes.tools.reports.problem import Problem, Problems
from dali_pipes.uris import FilePath

_KEEP_UNCHECKED = (
    "keep: not compared with the corpus, whose files do not say where documents end; set --eos or --start-id to do so"
)


class FileReport(NamedTuple):
    """One data file: `size` in bytes, None if it no longer exists."""

    path: FilePath
    tokens: int
    size: int | None


@dataclass(frozen=True)
class CorpusReport:
    """A summary of a corpus. `as_dict` has the same fields."""

    format: str
    files: tuple[FileReport, ...]
    tokens: int
    bytes: int
    """Of all data files, without index files."""
    dtype: str
    fingerprint: str
    documents: int | None
    documents_from: str | None
    """"index", "end id 50256" or "start id 1"; None if document boundaries are unknown."""
    lengths: LengthReport | None
    keep: dict[str, int] | None
    """Documents that a `keep` file keeps and drops, and copies that it adds; None without one."""
    loss_masks: int
    """Data files with a loss mask; in the others every token counts."""
    largest_id: int | None
    ids_looked_at: int
    is_full: bool
    """Whether all ids were read."""
    problems: tuple[Problem, ...]
    problem_counts: dict[str, int]
    """By kind, including problems that are not listed."""
    notes: tuple[str, ...]
    """Remarks that are not problems."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        files = [{**file._asdict(), "path": str(file.path)} for file in self.files]
        lengths = None if self.lengths is None else asdict(self.lengths)
        if lengths is not None and self.lengths is not None:
            lengths["buckets"] = [bucket._asdict() for bucket in self.lengths.buckets]
        problems = [problem.as_dict() for problem in self.problems]
        return {**vars(self), "files": files, "lengths": lengths, "problems": problems, "notes": list(self.notes)}


def inspect_corpus(
    corpus: Corpus,
    *,
    start_id: int | None = None,
    vocab_size: int | None = None,
    full: bool = False,
    scan: bool = True,
    advance: Callable[[int], None] = lambda done: None,
) -> CorpusReport:
    """Summarize a corpus. Blocks: reads its index and a sample of its ids, or all ids with `full`.

    Documents come from the index, or from the id that ends (`corpus.eos_id`) or begins (`start_id`) each of them, which
    reads all ids the first time, unless `scan` is false. `advance(ids)` is called as ids are read. Raises as
    `find_documents`.
    """
    problems = Problems()
    notes = [*corpus.notes]
    documents = documents_of(corpus, start_id, problems, notes, scan=scan)
    if corpus.is_synthetic:
        notes.append(FORMULA_NOTE)
    spans = all_spans(corpus) if full and not corpus.is_synthetic else sample_spans(corpus.num_tokens)
    expected = expected_ids(corpus, documents, start_id)
    found = scan_ids(corpus, spans, vocab_size=vocab_size, expected=expected, advance=advance)
    lengths = None if documents is None else measure_lengths(corpus, documents)
    add_id_problems(problems, corpus, found, vocab_size, documents)
    add_type_problems(problems, corpus, found)
    add_zero_problems(problems, corpus)
    add_file_problems(problems, corpus)
    if corpus.keep is not None and documents is None:
        notes.append(_KEEP_UNCHECKED)
    if documents is not None:
        if corpus.keep is not None:
            corpus.keep.check_length(documents.num_documents)
        add_document_problems(problems, notes, corpus, documents, lengths)
    files = tuple(map(FileReport, corpus.files, tokens_in_files(corpus).tolist(), map(_size, corpus.files)))
    return CorpusReport(
        format=corpus.format,
        files=files,
        tokens=corpus.num_tokens,
        bytes=sum(file.size or 0 for file in files),
        dtype=corpus.dtype.name,
        fingerprint=corpus.fingerprint,
        documents=None if documents is None else documents.num_documents,
        documents_from=None if documents is None else documents.source,
        lengths=lengths,
        keep=None if corpus.keep is None else corpus.keep.as_dict(),
        loss_masks=0 if corpus.loss_mask is None else corpus.loss_mask.num_files,
        largest_id=found.largest,
        ids_looked_at=found.looked_at,
        is_full=found.looked_at == corpus.num_tokens,
        problems=tuple(problems.listed),
        problem_counts=dict(problems.counts),
        notes=tuple(notes),
    )


def _size(path: FilePath) -> int | None:
    try:
        return file_size(path)
    except CorpusReadError:
        return None
