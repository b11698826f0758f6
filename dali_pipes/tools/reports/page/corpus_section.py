"""The section on the data: for each source its files, documents, ids and problems, as `inspect` finds them.

A corpus with damaged files is described without them, and the section says which are missing.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.engine.mixture import open_source
from dali_pipes.errors import CorpusError
from dali_pipes.runtime.messages import counted, printable
from dali_pipes.text.token_text import TokenText
from dali_pipes.tools.reports.corpus_check import open_what_can_be
from dali_pipes.tools.reports.corpus_report import CorpusReport, inspect_corpus
from dali_pipes.tools.reports.document_lengths import Bucket, buckets_of
from dali_pipes.tools.reports.page import charts
from dali_pipes.tools.reports.page.keyed_sample import RUN_IDS, RUNS, IdSample, sample_ids
from dali_pipes.tools.reports.page.section import Chart, Column, DataTable, Fact, Part, Section, Value, table_of
from dali_pipes.tools.reports.problem import Problem, Problems

_MOST_FILES = 12
_MOST_IDS = 12
_MOST_PROBLEMS = 20
_MOST_SOURCES = 12
"""Sources of a mixture that are described one by one; all of them are in the table."""

_OVERVIEW = (
    Column("name", "source", "text"),
    Column("format", "format", "text"),
    Column("num_files", "files"),
    Column("tokens", "tokens"),
    Column("documents", "documents"),
    Column("largest_id", "largest id"),
    Column("problems", "problems"),
)
_IDS = (Column("id", "id"), Column("text", "text", "text"), Column("count", "count"), Column("share", "share", "share"))
_FILES = (Column("path", "file", "text"), Column("tokens", "tokens"), Column("share", "share", "share"))


def corpus_section(config: LoaderConfig, tokenizer: TokenText | None) -> Section:
    """Blocks to open the corpora and to read a bounded sample of each; all of it only where the rows need documents.

    Raises `CorpusError` if no source can be described, and `ConfigError` as `TokenLoader`.
    """
    configs = {"": config} if config.mixture is None else config.sources
    parts: list[Part] = []
    overview: list[dict[str, Any]] = []
    missing: list[str] = []
    failed: CorpusError | None = None
    for name, own in configs.items():
        of_source = f"mixture.{name}: " if name else ""
        problems = Problems()
        try:
            corpus = _opened(own, problems)
        except CorpusError as error:
            missing.append(f"{of_source}{error}")
            failed = failed or error
            continue
        missing += [f"{of_source}{problem.message}" for problem in problems.listed]
        with closing(corpus):
            scan = own.uses_documents or corpus.num_tokens <= RUNS * RUN_IDS
            report = inspect_corpus(corpus, start_id=own.document_start_id, vocab_size=own.vocab_size, scan=scan)
            overview.append({"name": name, "num_files": len(report.files), "problems": _num_problems(report)})
            overview[-1] |= {key: getattr(report, key) for key in ("format", "tokens", "documents", "largest_id")}
            if len(parts) < _MOST_SOURCES:
                parts.append(_part(name, own, corpus, report, tokenizer))
    if failed is not None and not parts:
        raise failed
    if config.mixture is not None:
        table = table_of("sources", "Sources", _OVERVIEW, overview, most=len(overview))
        parts.insert(0, Part("", tables=(table,)))
    return Section("corpus", "Corpus", parts=tuple(parts), missing=tuple(missing))


def _opened(config: LoaderConfig, problems: Problems) -> Corpus:
    """The corpus, or what of it can be opened; then with problems."""
    try:
        return open_source(config)
    except CorpusError as error:
        if config.tokenizer is not None or config.corpus is None:
            raise
        settings = {name: getattr(config, name) for name in ("format", "dtype", "eos_id", "token_column", "vocab_size")}
        found = [path for path in config.corpus if _is_found(path, problems)]
        corpus, _ = open_what_can_be(found, settings, problems) if found else (None, [])
        if corpus is None:
            raise error
        return corpus


def _is_found(path: str, problems: Problems) -> bool:
    try:
        find_files([path])
    except CorpusError as error:
        problems.add(Problem("missing_file", str(error)))
        return False
    return True


def _part(name: str, config: LoaderConfig, corpus: Corpus, report: CorpusReport, tokenizer: TokenText | None) -> Part:
    sample = sample_ids(corpus)
    listed = report.problems[:_MOST_PROBLEMS]
    notes = [*report.notes]
    if sample.unreadable:
        notes.append(f"{counted(sample.unreadable, 'run')} of the id sample could not be read.")
    return Part(
        name,
        f"Source {name}" if name else "",
        tuple(_facts(config, corpus, report, sample)),
        tuple(_charts(config, corpus, report, sample)),
        (_frequent(sample, tokenizer), *_files(report)),
        tuple(notes),
        tuple((problem.kind, problem.message) for problem in listed),
        _num_problems(report) - len(listed),
    )


def _num_problems(report: CorpusReport) -> int:
    return sum(report.problem_counts.values())


def _facts(config: LoaderConfig, corpus: Corpus, report: CorpusReport, sample: IdSample) -> Iterator[Fact]:
    yield Fact("tokens", "tokens", Value(report.tokens))
    yield Fact("num_files", "files", Value(len(report.files)))
    yield Fact("bytes", "bytes", Value(report.bytes))
    yield Fact("format", "format", Value(f"{report.format}, {report.dtype}", "text"))
    yield from _document_facts(config, corpus, report, sample)
    yield Fact("largest_id", "largest id", Value(report.largest_id), not report.is_full)
    if config.vocab_size is not None:
        yield Fact("vocab_size", "vocab_size", Value(config.vocab_size))
    if report.loss_masks:
        yield Fact("loss_masks", "files with a loss mask", Value(report.loss_masks))
    yield Fact("ids_looked_at", "ids read for this section", Value(report.ids_looked_at))
    yield Fact("problems", "problems", Value(_num_problems(report)), not report.is_full)


def _document_facts(config: LoaderConfig, corpus: Corpus, report: CorpusReport, sample: IdSample) -> Iterator[Fact]:
    if report.lengths is not None:
        yield Fact("documents", "documents", Value(report.documents))
        for key in ("shortest", "median", "mean", "longest"):
            yield Fact(f"lengths.{key}", f"{key} document", Value(getattr(report.lengths, key)))
        yield Fact("lengths.empty", "empty documents", Value(report.lengths.empty))
        return
    mark = _delimiter(config, corpus)
    found = 0 if mark is None else sample.count(mark)
    if found:
        yield Fact(
            "documents_about", "documents (estimate)", Value(round(found / sample.num_ids * corpus.num_tokens)), True
        )
        yield Fact("mean_about", "tokens per document (estimate)", Value(sample.num_ids / found), True)


def _delimiter(config: LoaderConfig, corpus: Corpus) -> int | None:
    """The id that ends or begins documents, where no index says where they are."""
    return corpus.eos_id if config.document_start_id is None else config.document_start_id


def _charts(config: LoaderConfig, corpus: Corpus, report: CorpusReport, sample: IdSample) -> Iterator[Chart]:
    if report.lengths is not None:
        yield _histogram(report.lengths.buckets, is_sample=False)
    elif _delimiter(config, corpus) is not None:
        lengths = sample.lengths_of_documents(corpus.eos_id, config.document_start_id)
        if len(lengths):
            yield _histogram(buckets_of(lengths), is_sample=True)
    if len(report.files) > 1 and report.tokens:
        largest = sorted(report.files, key=lambda file: -file.tokens)[:_MOST_FILES]
        names = [printable(file.path.name) for file in largest]
        parts = [file.tokens / report.tokens for file in largest]
        if len(largest) < len(report.files):
            names.append(f"{len(report.files) - len(largest):,} others")
            parts.append(1 - sum(parts))
        yield Chart(
            "files",
            "Share of tokens by file",
            charts.shares(names, parts, xlabel="share of tokens"),
            f"The largest of {counted(len(report.files), 'file')} has {parts[0]:.1%} of the tokens.",
        )


def _histogram(buckets: Sequence[Bucket], *, is_sample: bool) -> Chart:
    most = max(buckets, key=lambda bucket: bucket.documents)
    labels = [f"{first:,}" if first < 10_000 else charts.short(first) for first, _, _ in buckets]
    values = [bucket.documents for bucket in buckets]
    whole = f" The sample contains only documents that fit in a run of {RUN_IDS:,} ids; longer ones are missing."
    return Chart(
        "lengths",
        "Document lengths",
        charts.bars(labels, values, xlabel="tokens per document (at least)", ylabel="documents", log=True),
        f"The most common length is {most.shortest:,} to {most.longest:,} tokens: {most.documents:,} documents. Both "
        f"axes are logarithmic.{whole * is_sample}",
        is_sample=is_sample,
    )


def _frequent(sample: IdSample, tokenizer: TokenText | None) -> DataTable:
    rows = [
        {
            "id": token,
            "text": None if tokenizer is None else tokenizer.decode([token]).translate(_VISIBLE),
            "count": count,
            "share": count / sample.num_ids,
        }
        for token, count in sample.most_frequent(_MOST_IDS)
    ]
    columns = _IDS if tokenizer is not None else tuple(column for column in _IDS if column.key != "text")
    return table_of("frequent", "Most frequent ids", columns, rows, is_sample=not sample.is_all, is_narrow=True)


_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", " ": "␣"})


def _files(report: CorpusReport) -> Iterator[DataTable]:
    rows = [
        {"path": str(file.path), "tokens": file.tokens, "share": file.tokens / max(1, report.tokens)}
        for file in report.files
    ]
    yield table_of("files", "Files", _FILES, rows, most=_MOST_FILES)
