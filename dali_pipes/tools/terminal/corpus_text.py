"""What `inspect` and `check` show."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dali_pipes.runtime.messages import printable
from dali_pipes.tools.reports import CheckReport, CorpusReport, LengthReport, Problem
from dali_pipes.tools.terminal.console import output

_BAR_WIDTH = 30


def show_corpus(report: CorpusReport) -> None:
    """Facts, document lengths, notes, and problems."""
    console = output()
    _show_facts(console, _facts(report))
    if report.lengths is not None:
        _show_lengths(console, report.lengths)
    _show_findings(console, report.problems, report.problem_counts, report.notes)


def show_check(report: CheckReport) -> None:
    """What was checked, notes, and problems."""
    console = output()
    facts = [("files", f"{report.files:,}"), ("tokens", f"{report.tokens:,} ({report.ids_looked_at:,} checked)")]
    if report.largest_id is not None:
        facts.append(("largest id", str(report.largest_id)))
    if report.documents is not None:
        facts.append(("documents", f"{report.documents:,} ({report.empty_documents or 0:,} empty)"))
    facts.append(("checksums", f"{report.checksums:,} compared" if report.checksums else "none (no manifest found)"))
    _show_facts(console, facts)
    _show_findings(console, report.problems, report.problem_counts, report.notes)
    if report.is_clean:
        console.print(Text("no problems found", style="green"))


def _facts(report: CorpusReport) -> Iterator[tuple[str, str]]:
    first, last = (printable(report.files[at].path.name) for at in (0, -1))
    yield "format", report.format
    yield "files", f"1 ({first})" if len(report.files) == 1 else f"{len(report.files):,} ({first} to {last})"
    yield "tokens", f"{report.tokens:,}"
    yield "bytes", f"{report.bytes:,}"
    yield "documents", _documents(report)
    yield "dtype", report.dtype
    if report.loss_masks:
        yield "loss masks", f"{report.loss_masks:,} of {len(report.files):,} files"
    hint = "" if report.format == "synthetic" else "; use --full to read all"
    sample = "all ids read" if report.is_full else f"sample of {report.ids_looked_at:,} ids{hint}"
    yield "largest id", "unknown (none readable)" if report.largest_id is None else f"{report.largest_id} ({sample})"
    yield "fingerprint", report.fingerprint


def _documents(report: CorpusReport) -> str:
    if report.documents is None:
        return (
            "unknown (unreadable)" if "unreadable" in report.problem_counts else "unknown (not stored by this format)"
        )
    origin = "" if report.documents_from == "index" else f" (by {report.documents_from})"
    return f"{report.documents:,}{origin}"


def _show_facts(console: Console, facts: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> None:
    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, Text(value, overflow="fold"))
    console.print(table)


def _show_lengths(console: Console, lengths: LengthReport) -> None:
    console.print(
        f"document lengths: min {lengths.shortest:,}, median {lengths.median:,.1f}, mean {lengths.mean:,.1f}, "
        f"max {lengths.longest:,}, empty {lengths.empty:,}"
    )
    most = max(bucket.documents for bucket in lengths.buckets)
    mark = "#" if console.options.ascii_only else "█"
    ranges = [
        f"{b.shortest:,}" if b.shortest == b.longest else f"{b.shortest:,} to {b.longest:,}" for b in lengths.buckets
    ]
    width = max(map(len, ranges))
    for bucket, tokens in zip(lengths.buckets, ranges, strict=True):
        bar = mark * -(-bucket.documents * _BAR_WIDTH // most)
        console.print(
            Text(f"{tokens:>{width}} ").append(f"{bar:<{_BAR_WIDTH}}", style="cyan").append(f" {bucket.documents:,}")
        )


def _show_findings(console: Console, problems: Sequence[Problem], counts: dict[str, int], notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(f"note: {printable(note)}", overflow="fold"), soft_wrap=True)
    if not counts:
        return
    console.print(Text(f"problems found: {sum(counts.values()):,}", style="bold red"))
    for problem in problems:
        line = Text(f"{problem.kind}: ", style="red").append(printable(problem.message), style="default")
        console.print(line, soft_wrap=True)
    for kind, count in counts.items():
        listed = sum(problem.kind == kind for problem in problems)
        if count > listed:
            console.print(f"{kind}: {count - listed:,} more", soft_wrap=True)
