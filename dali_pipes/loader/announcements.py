"""What a loader says on standard error: its start lines, and, once, that the trainer waits for data. No torch here.

    dali_pipes: data/train_000.bin and 102 more files: llmc, 10,300,000,000 tokens, fingerprint 1a2b3c4d
      epoch: 10,058,593 rows, 78,582 steps of 8 ranks x (16, 1024); order philox24-v1
      cuda:0, placement device: the corpus of 19.2 GiB is more than 10% of 70.1 GiB free on cuda:0

If `long_documents` drops or truncates documents, another line says how many tokens are lost:

      long_documents = "truncate" drops 1,203,874 tokens (1.2 %) of 3,456 documents

If the corpus has loss masks, the second line says for how many files, "loss masks of 102 of 103 files", so that a
missing one is seen. The corpus's own notes follow: what columns of tables do, and which are not used. Nothing goes to
standard output, and a standard error that is closed or full never ends a run.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.monitoring.stats import LoaderStats
from dali_pipes.runtime.messages import counted, say_once
from dali_pipes.runtime.ranks import process_group
from dali_pipes.schedule import Position, Schedule

if TYPE_CHECKING:
    from dali_pipes.loader.state_change import StateChange
    from dali_pipes.schedule.mixed_rows import MixedRows

COLUMNS = 120
_MOST_SOURCES = 12
"""Sources of a mixture that get a line at the start."""
WINDOW_S = 10.0
"""Seconds of iteration over which waiting is measured, at least."""
WINDOW_BATCHES = 50
"""Batches of a window, at least: one slow block is not yet a slow run."""
WARM_UP_BATCHES = 20
"""First batches of a loader, which do not count: files are cold, kernels and models are compiled."""


def speaks_for_all(config: LoaderConfig) -> bool:
    """Whether this process is the one, of all ranks, that prints what is the same for all of them."""
    group = process_group()
    if group is not None:  # several processes have data rank 0 if some share their rows
        return group[0] == 0
    return not config.rank and (config.context_parallel is None or config.context_parallel[0] == 0)


def say_start(config: LoaderConfig, summary: Callable[[], str], warning: str | None) -> None:
    """Print the start lines, unless the loader is quiet, and a warning about the documents."""
    if speaks_for_all(config):
        if not config.quiet:
            say_once(summary())
        if warning is not None:
            say_once(warning)


def start_text(
    config: LoaderConfig,
    corpora: Mapping[str, Corpus],
    schedule: Schedule,
    state: Mapping[str, Any],
    where: str,
    mixture: "MixedRows | None" = None,
) -> str:
    """Lines of at most `COLUMNS` columns: the data, its order, what long documents lose (if anything), and where
    batches come from; then the notes on the corpus, a line each. Reads no data.

    `where`: the device and the placement, and why. `state`: what the loader would save now, whose order, fingerprint
    and epoch are shown. Rows made from documents are counted as they are planned, so their number is an estimate,
    "about", until then.
    """
    epoch = int(state["epoch"])
    if mixture is None:
        corpus = corpora[""]
        fingerprint = f", fingerprint {corpus.fingerprint[:8]}"
        data = [corpus_text(corpus, COLUMNS - len("dali_pipes: ") - len(fingerprint)) + fingerprint]
    else:
        data = mixture_lines(corpora, mixture, epoch)
    schedule.interleave.estimate(epoch)  # plans a window of documents, if none has been
    split = " of validation" if config.split == "validation" else ""
    masked = [corpus for corpus in corpora.values() if corpus.loss_mask is not None]
    masks = ""
    if masked:
        files = sum(corpus.loss_mask.num_files for corpus in masked if corpus.loss_mask is not None)
        masks = f"; loss masks of {files:,} of {sum(len(corpus.files) for corpus in corpora.values()):,} files"
    order = f"epoch{split}: {steps_text(config, schedule, epoch)}{masks}; order {state['order']}"
    about = [text for text in (curriculum_text(schedule, epoch), lost_text(config, schedule)) if text]
    lines = [_shown(f"  {line}", COLUMNS) for line in (order, *about, where)]
    notes = [f"{f'{name}: ' if name else ''}{note}" for name, corpus in corpora.items() for note in corpus.notes]
    return "\n".join((*data, *lines, *(f"  {_shown(note, len(note))}" for note in notes)))


def mixture_lines(corpora: Mapping[str, Corpus], mixture: "MixedRows", epoch: int) -> list[str]:
    """A line for the mixture, and one for each of its first sources: share of the epoch's tokens, passes, and data."""
    from dali_pipes.schedule.mixture_report import mixture_report  # with the first mixture

    first = mixture.first_place(epoch)
    before, after = (mixture_report(mixture, place) for place in (first, first + mixture.count(epoch)))
    tokens = after.tokens - before.tokens
    lines = [f"mixture of {len(corpora):,} sources: {tokens:,} tokens in epoch {epoch:,}"]
    for begin, end in list(zip(before.sources, after.sources, strict=True))[:_MOST_SOURCES]:
        about = "" if end.is_exact else "about "
        share = (end.tokens - begin.tokens) / tokens if tokens else 0.0
        passes = f"{about}{begin.passes:.3g} to {end.passes:.3g}" if begin.passes else f"{about}{end.passes:.3g}"
        text = f"  {end.name}: {share:.2%} of the tokens, {passes} passes; "
        lines.append(text + corpus_text(corpora[end.name], max(40, COLUMNS - len(text))))
    if len(corpora) > _MOST_SOURCES:
        lines.append(f"  and {len(corpora) - _MOST_SOURCES:,} more: see loader.mixture_report()")
    return lines


def corpus_text(corpus: Corpus, columns: int) -> str:
    """The files of a corpus, their format and tokens, in at most `columns` columns."""
    more = len(corpus.files) - 1
    files = f" and {more:,} more file{'s' * (more > 1)}" if more else ""
    about = f"{files}: {corpus.format}, {counted(corpus.num_tokens, 'token')}"
    return _shown(str(corpus.files[0]), columns - len(about), keep_end=True) + about


def steps_text(config: LoaderConfig, schedule: Schedule, epoch: int) -> str:
    """Rows and steps of an epoch, as far as they are known without planning more, and the shape of a step."""
    rows, is_exact = schedule.interleave.count_by_now(epoch)
    all_steps = schedule.steps_of(rows)
    steps = schedule.left_of(all_steps, epoch)
    left_out = f" ({all_steps - steps:,} skipped)" if schedule.skip_steps else ""
    ranks = counted(schedule.world_size, "rank")
    share = "" if config.context_parallel is None else f" / {config.context_parallel[1]}"
    widths = config.widths if config.changes_length else (config.row_len,)
    length = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    shape = f"{ranks} x ({config.batch_size}, {length}{share})"
    places = counted(rows, "row")
    if config.batch_tokens is not None:
        places = f"{rows:,} batch{'' if rows == 1 else 'es'}"
        shape = f"{ranks} x up to {counted(config.batch_tokens, 'token')}"
    if not rows:
        return "not planned yet"
    about = "about " * (not is_exact)
    return f"{about}{places}, {counted(steps if is_exact else max(1, steps), 'step')}{left_out} of {shape}"


def curriculum_text(schedule: Schedule, epoch: int) -> str:
    """How rows and optimizer steps grow in an epoch; "" without `global_batch`."""
    curriculum = schedule.curriculum
    if curriculum is None:
        return ""
    rows, _ = curriculum.count_by_now(epoch)
    parts: list[str] = []
    lengths = curriculum.lengths
    if lengths is not None:
        for window, seq_len in lengths.in_epoch(epoch):
            begin = f" from token {lengths.tokens_before(epoch, window):,}" if window or epoch else ""
            length = f"{seq_len:,}" if parts else f"rows of {counted(seq_len, 'token')}"
            parts.append(f"{length}{begin}")
        return "; ".join((*parts, f"optimizer steps of {counted(curriculum.segment(epoch, 0).global_batch, 'row')}"))
    for segment in curriculum.segments(epoch):
        if segment.row and segment.row >= rows:
            continue
        begin = f" from token {curriculum.tokens_before(epoch, segment.row):,}" if segment.row or epoch else ""
        step = f"{segment.global_batch:,}" if parts else f"optimizer steps of {counted(segment.global_batch, 'row')}"
        tokens = f" x {segment.seq_len:,}{'' if parts else ' tokens'}" if curriculum.cuts else ""
        parts.append(f"{step}{tokens}{begin}")
    return "; ".join(parts)


def lost_text(config: LoaderConfig, schedule: Schedule) -> str:
    """What is lost of documents that are longer than a row; "" if nothing is."""
    left_out = None if config.long_documents == "split" else schedule.interleave.left_out()
    if left_out is None or not left_out.tokens:
        return ""
    documents, tokens, share, is_exact = left_out
    per_cent = f"{100 * share:.1f}%" if share >= 0.0005 else "less than 0.1%"
    return (
        f'long_documents = "{config.long_documents}" drops {"about " * (not is_exact)}{counted(tokens, "token")} '
        f"({per_cent}) of {counted(documents, 'document')}"
    )


def resumed_text(schedule: Schedule, place: Position, saved_rows: object, change: "StateChange | None") -> str:
    """What is printed when a run resumes with other row lengths or another mixture, or, within an epoch, another global
    batch; else "".
    """
    changed, has_other_rows = [], False
    if change is not None:
        from dali_pipes.loader.state_change import MixtureChange  # with the first change

        has_other_rows = not isinstance(change, MixtureChange)
        is_elsewhere = place != (change.epoch, change.rows)  # steps are skipped, or nothing is left of the epoch
        changed = [change.line() + f"; the next row is row {place.rows:,} of epoch {place.epoch}" * is_elsewhere]
    if has_other_rows or not place.rows or saved_rows in (None, schedule.global_rows):
        return "".join(changed)
    other_batch = (
        f"resuming epoch {place.epoch} at row {place.rows:,} with a global batch of "
        f"{counted(schedule.global_rows, 'row')} (saved with {saved_rows}): the next step is step "
        f"{schedule.step_number(place.rows):,} of the epoch, which differs from a step count kept by the trainer"
    )
    return "\n".join([*changed, other_batch])


def say_resumed(
    config: LoaderConfig, schedule: Schedule, place: Position, saved_rows: object, change: "StateChange | None"
) -> None:
    """Print `resumed_text`; a quiet loader prints only a change of the lengths of rows."""
    text = resumed_text(schedule, place, saved_rows, change)
    if text and speaks_for_all(config) and not (config.quiet and change is None):
        say_once(text)


def _shown(text: str, columns: int, *, keep_end: bool = False) -> str:
    """At most `columns` columns of a text, as one line."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) <= columns:
        return text
    kept = max(columns - 3, 0)
    return "..." + text[len(text) - kept :] if keep_end else text[:kept] + "..."


class WaitWatch:
    """Checks, every few seconds of iteration, whether the trainer waits for data, and says so once.

    Each check covers the time since the last one, so neither a slow start nor good hours hide the present.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self.next_s = math.inf if config.quiet else 0.0
        """Seconds of iteration (`LoaderStats.wall_s`) at which the next check is due."""
        self._who = f"rank {config.rank}: " if (config.world_size or 1) > 1 else ""
        self._before: LoaderStats | None = None

    def look(self, batches: int, stats: Callable[[], LoaderStats]) -> None:
        """Check; to be called when `next_s` has passed, with the number of batches handed out so far."""
        before = self._before
        if batches < (WARM_UP_BATCHES if before is None else before.batches + WINDOW_BATCHES):
            return
        now = stats()
        recent = None if before is None else now.since(before)
        if recent is not None and recent.advice:
            self.next_s = math.inf
            say_once(
                f"{self._who}the trainer waited for data {recent.data_wait_pct:.0f}% of the last "
                f"{recent.wall_s:.1f} s ({recent.batches:,} batches): {recent.advice} (shown once; quiet = true hides "
                "it)"
            )
            return
        self._before, self.next_s = now, now.wall_s + WINDOW_S
