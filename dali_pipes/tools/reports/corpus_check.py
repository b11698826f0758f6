"""A full check of a corpus: opens every file, reads every id, and compares every recorded checksum."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.errors import CorpusError, CorpusFormatError
from dali_pipes.runtime import offset_cache
from dali_pipes.tools.reports.checksums import recorded_files, wrong_files
from dali_pipes.tools.reports.document_lengths import measure_lengths
from dali_pipes.tools.reports.findings import (
    FORMULA_NOTE,
    add_document_problems,
    add_file_problems,
    add_id_problems,
    add_mask_problems,
    add_type_problems,
    add_zero_problems,
    documents_of,
    expected_ids,
)
from dali_pipes.tools.reports.id_scan import all_spans, sample_spans, scan_ids
from dali_pipes.tools.reports.problem import Problem, Problems
from dali_pipes.uris import FilePath, Uri, is_uri

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows progress: takes a title and the total bytes; gives a function that any thread may call with bytes just done."""


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. `as_dict` has the same fields, plus `is_clean`."""

    files: int
    """Data files that were checked, including those that did not open."""
    checksums: int
    """Files with a checksum in a manifest next to the data."""
    problems: tuple[Problem, ...]
    problem_counts: dict[str, int]
    notes: tuple[str, ...]
    tokens: int = 0
    ids_looked_at: int = 0
    largest_id: int | None = None
    documents: int | None = None
    empty_documents: int | None = None

    @property
    def is_clean(self) -> bool:
        return not self.problem_counts

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        problems = [problem.as_dict() for problem in self.problems]
        return {**vars(self), "problems": problems, "notes": list(self.notes), "is_clean": self.is_clean}


@offset_cache.made_anew()
def check_corpus(
    paths: Sequence[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    eos_id: int | None = None,
    start_id: int | None = None,
    vocab_size: int | None = None,
    token_column: str | None = None,
    progress: Progress = lambda title, total_bytes: nullcontext(lambda done: None),
) -> CheckReport:
    """Check files that are read as one corpus. Blocks: reads all of them, and twice if there are checksums or if
    documents are found by an id. Caches of earlier runs are rebuilt, not used.

    Files with a damaged or unknown format are problems; the other files are checked without them. Raises as
    `open_corpus` for invalid arguments, for missing or unreadable files, and for a corpus without tokens.
    """
    problems = Problems()
    settings = {"format": format, "dtype": dtype, "eos_id": eos_id, "token_column": token_column}
    settings["vocab_size"] = vocab_size  # of a synthetic corpus
    corpus, found = open_what_can_be(paths, settings, problems)
    with corpus or nullcontext():
        recorded = recorded_files(found)
        with progress("comparing checksums", sum(file.size for file in recorded)) as advance:
            named = {problem.message.partition(": ")[0] for problem in problems.listed}
            for problem in wrong_files(recorded, advance):
                if problem.kind != "missing_file" or str(problem.file) not in named:
                    problems.add(problem)
        notes = [] if corpus is None else [*corpus.notes]
        facts = {} if corpus is None else _check_opened(corpus, start_id, vocab_size, problems, notes, progress)
        return CheckReport(
            files=len(found),
            checksums=len(recorded),
            problems=tuple(problems.listed),
            problem_counts=dict(problems.counts),
            notes=tuple(notes),
            **facts,
        )


def _check_opened(
    corpus: Corpus,
    start_id: int | None,
    vocab_size: int | None,
    problems: Problems,
    notes: list[str],
    progress: Progress,
) -> dict[str, Any]:
    """Add the problems with ids and documents; returns the counts."""
    documents = documents_of(corpus, start_id, problems, notes)
    expected = expected_ids(corpus, documents, start_id)
    width = corpus.dtype.itemsize
    if corpus.is_synthetic:
        notes.append(FORMULA_NOTE)
    spans = sample_spans(corpus.num_tokens) if corpus.is_synthetic else all_spans(corpus)
    with progress("reading ids", min(corpus.num_tokens, len(spans.firsts) * spans.length) * width) as advance:
        scan = scan_ids(
            corpus,
            spans,
            vocab_size=vocab_size,
            expected=expected,
            advance=lambda ids: advance(ids * width),
        )
    lengths = None if documents is None else measure_lengths(corpus, documents)
    add_id_problems(problems, corpus, scan, vocab_size, documents)
    add_type_problems(problems, corpus, scan)
    add_zero_problems(problems, corpus)
    add_file_problems(problems, corpus)
    add_mask_problems(problems, corpus)
    if documents is not None:
        add_document_problems(problems, notes, corpus, documents, lengths)
    return {
        "tokens": corpus.num_tokens,
        "ids_looked_at": scan.looked_at,
        "largest_id": scan.largest,
        "documents": None if documents is None else documents.num_documents,
        "empty_documents": None if lengths is None else lengths.empty,
    }


def open_what_can_be(
    paths: Sequence[str], settings: dict[str, Any], problems: Problems
) -> tuple[Corpus | None, list[FilePath]]:
    """The corpus of all files that open one by one, None if there are none; and the list of all files."""
    try:
        corpus = open_corpus(paths, **settings)
    except CorpusFormatError as error:
        together = error
    else:
        return corpus, [] if corpus.is_synthetic else list(corpus.files)
    found, good = find_files(paths, use_indexes=settings["format"] != "flat"), []
    for path in found:
        try:
            open_corpus(path, **settings).close()
        except CorpusFormatError as error:
            problems.add(_format_problem(error))
        except CorpusError:  # an empty file is fine in a corpus that has tokens
            good.append(path)
        else:
            good.append(path)
    if len(good) == len(found):  # each one opens, but not together
        problems.add(_format_problem(together))
        return None, found
    try:
        return open_corpus(good, **settings) if good else None, found
    except CorpusFormatError as error:
        problems.add(_format_problem(error))
    except CorpusError:
        pass  # all other files are empty
    return None, found


def _format_problem(error: CorpusFormatError) -> Problem:
    """Messages of this error begin with the file."""
    name = str(error).partition(": ")[0]
    return Problem("format", str(error), _path_named(name))


def _path_named(name: str) -> FilePath | None:
    if is_uri(name):
        return Uri(name)
    return Path(name) if os.path.lexists(name) else None
