"""The page of `dali-pipes report`: one HTML file with all that is needed to look at the data of a run.

It needs no network: style, script and charts are in it, and a policy in its head keeps everything else from running.
"""

import base64
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dali_pipes import __version__
from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError, CorpusError
from dali_pipes.markup import rendered, source_of
from dali_pipes.runtime.messages import counted
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.text.token_text import TokenText
from dali_pipes.tools.reports.page.corpus_section import corpus_section
from dali_pipes.tools.reports.page.mixture_section import mixture_section
from dali_pipes.tools.reports.page.opened_run import OpenedRun, opened_run
from dali_pipes.tools.reports.page.order_section import order_section
from dali_pipes.tools.reports.page.rows_section import rows_section
from dali_pipes.tools.reports.page.run_log import read_log
from dali_pipes.tools.reports.page.run_section import run_section
from dali_pipes.tools.reports.page.section import Section

MOST_STEPS = 64
_MOST_TOKENS = 1 << 15
"""Tokens of all batches together; with more rows or steps, fewer of each row are shown, and then fewer rows."""
_FEWEST_TOKENS = 32
_MOST_BYTES = 4_000_000
"""Of all batches; where documents are short, fewer tokens take as much."""


@dataclass(frozen=True)
class DataPage:
    """The page as text, and what is in it."""

    html: str
    title: str
    sections: tuple[Section, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What could not be shown, and why."""
        return tuple(f"{section.title}: {text}" for section in self.sections for text in section.missing)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the facts of each section by name, and what is missing; without the charts and batches."""
        sections = {section.key: section.facts() for section in self.sections}
        return {"title": self.title, "sections": sections, "missing": list(self.missing)}


def make_page(
    config: LoaderConfig,
    title: str,
    *,
    steps: tuple[int, ...],
    epoch: int = 0,
    rows: int = 4,
    tokens: int = 1024,
    tokenizer: TokenText | None = None,
    state: Path | None = None,
    log: Path | None = None,
) -> DataPage:
    """The page for one rank of a configuration, with the first `rows` rows of each of `steps` as text.

    Rank and world size must be in `config`. `state` is as for `locate_batch`. Blocks: reads a bounded sample of the
    corpus and the batches of these steps; all of it only where the configuration finds documents by an id and has not
    kept where they are. Damaged data is left out, and the section says so.

    Raises `ConfigError` for settings, steps, a tokenizer or a log that are wrong, `StateError` for a state that does
    not fit, `BackendError` without matplotlib or Jinja, and `CorpusError` if no data can be opened.
    """
    if not 1 <= len(steps) <= MOST_STEPS:
        raise ConfigError(f"--steps: found {counted(len(steps), 'step')}; expected 1 to {MOST_STEPS} steps")
    read = None if log is None else read_log(log)
    made: list[tuple[str, str, Callable[[OpenedRun], Section]]] = [
        ("order", "Order", order_section),
        ("rows", "Rows", rows_section),
        *([("mixture", "Mixture", mixture_section)] if config.mixture is not None else []),
        ("batches", "Batches", partial(_batches_section, rows=rows, tokens=tokens)),
    ]
    with ExitStack() as stack:
        advance = stack.enter_context(progress_bar("making the page", 1 + len(made)))
        sections = [corpus_section(config, tokenizer)]
        advance(1)
        try:
            run = stack.enter_context(opened_run(config, epoch, steps, state, tokenizer))
        except CorpusError as error:
            sections += [Section(key, name, missing=(str(error),)) for key, name, _ in made]
        else:
            for key, name, make in made:
                sections.append(_made(key, name, make, run))
                advance(1)
    if read is not None:
        sections.append(run_section(read))
    return DataPage(_html(config, title, epoch, sections), title, tuple(sections))


def _made(key: str, title: str, make: Callable[[OpenedRun], Section], run: OpenedRun) -> Section:
    """A section; without content, where its data cannot be read."""
    try:
        return make(run)
    except CorpusError as error:
        return Section(key, title, missing=(str(error),))


def _batches_section(run: OpenedRun, *, rows: int, tokens: int) -> Section:
    """The steps asked for, as text. A batch that cannot be read is missing; the others are shown."""
    of_step = _MOST_TOKENS // len(run.steps)
    of_batch = rows if run.config.batch_tokens is not None else run.config.batch_size
    rows = max(1, min(rows, of_batch, of_step // _FEWEST_TOKENS))
    shown = min(tokens, of_step // rows)
    batches, missing = _as_html(run, rows, shown)
    while (size := sum(map(len, batches))) > _MOST_BYTES and shown > 1:
        shown = max(1, shown * _MOST_BYTES // size * 3 // 4)
        batches, missing = _as_html(run, rows, shown)
    cut = f" The page shows at most {shown:,} tokens per row." * (shown < run.config.row_len)
    about = f"Rows as the trainer of rank {run.config.rank} gets them.{cut}"
    return Section("batches", "Batches", about, missing=tuple(missing), batches=tuple(batches))


def _as_html(run: OpenedRun, rows: int, tokens: int) -> tuple[list[str], list[str]]:
    """Each step as HTML, and what is missing."""
    batches, missing = [], []
    for step in run.steps:
        try:
            preview = run.previewer.batch(step, run.epoch, run.base, rows=rows, tokens=tokens)
        except CorpusError as error:
            missing.append(f"step {step:,}: {error}")
        else:
            batches.append(preview.as_html())
    return batches, missing


def _html(config: LoaderConfig, title: str, epoch: int, sections: list[Section]) -> str:
    ranks = "" if config.world_size in (None, 1) else f", rank {config.rank} of {config.world_size:,}"
    shape = f"{config.batch_size:,} rows of {config.row_len:,} tokens per batch"
    if config.batch_tokens is not None:
        shape = f"at most {config.batch_tokens:,} tokens per batch"
    script = source_of("page.js")
    return rendered(
        "page.html",
        title=title,
        about=f"{shape}{ranks}, epoch {epoch:,}.",
        sections=sections,
        style=source_of("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        settings=config.to_toml(),
        made_by=f"dali_pipes {__version__}",
    )
