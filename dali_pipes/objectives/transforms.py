"""The kernels of a block's objectives: ids and labels of its rows in, the same changed out, on any device.

    ids of the rows ─▶ noised_rows, once a rule ─▶ input_ids, labels, noisy_ids, masked ─▶ functions of the user's
                    ─▶ corrupted_spans          ─▶ encoder_ids, decoder_labels, ...

Sources with the same settings share a rule. Labels have been shifted before: what is learned of them is decided by the
place of each label's token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dali_pipes.config.objectives import (
    Diffusion,
    Drop,
    Mlm,
    Objective,
    Prefix,
    Spans,
    Users,
    word_starts,
)
from dali_pipes.config.rates import threshold
from dali_pipes.objectives.row_draws import SourceObjectives
from dali_pipes.objectives.users import call, load_function
from dali_pipes.operators import corrupted_spans, noised_rows
from dali_pipes.operators.corrupted_spans import OUTPUTS as OF_SPANS
from dali_pipes.operators.corrupted_spans import SpanRule
from dali_pipes.operators.noised_rows import SPECIAL, STARTS_WORD, NoiseRule

Array = Any  # NumPy's or CuPy's
Flags = npt.NDArray[np.uint8]

_NO_ROWS = -2
"""The number of a rule for prefixes alone."""


class _Pass(NamedTuple):
    """A rule, its table of ids, and whether it writes `noisy_ids` instead of `input_ids`."""

    rule: NoiseRule
    flags: Flags | None
    is_diffusion: bool


class Transforms:
    """What is done to the rows of a block.

    numbers:   of each source, the rule of its rows; -1: none
    reads_ids: whether ids have to be kept beside `input_ids`, because those are changed
    reads_learn: whether it matters which ids are labels at their own positions
    """

    def __init__(
        self, passes: Sequence[_Pass], numbers: Sequence[int], users: Sequence[Users], spans: SpanRule | None
    ) -> None:
        self._passes, self.numbers, self._spans = tuple(passes), tuple(numbers), spans
        self._users: tuple[tuple[Callable[..., object], Users], ...] = tuple(
            (load_function(entry), entry) for entry in users
        )
        self.reads_ids = any(one.rule.number != _NO_ROWS and not one.is_diffusion for one in passes)
        self.reads_learn = spans is not None or any(
            one.rule.own_labels and one.rule.number != _NO_ROWS for one in passes
        )

    @classmethod
    def of(
        cls, sources: Sequence[SourceObjectives], users: Sequence[Users], vocab_size: int | None, pad_id: int
    ) -> Self | None:
        """Those of all sources; None if nothing is done to rows."""
        passes: list[_Pass] = []
        numbers = []
        known: dict[tuple[object, ...], int] = {}
        for source in sources:
            entry = next((entry for entry in source.entries if entry.changes_inputs), None)
            if entry is None:
                numbers.append(-1)
                continue
            rule = _rule(entry, vocab_size)
            words = entry.words if isinstance(entry, Mlm) else None
            key = (rule, isinstance(entry, Diffusion), getattr(entry, "special_ids", ()), words)
            if key not in known:
                known[key] = len(passes)
                rule = rule._replace(number=len(passes))
                passes.append(_Pass(rule, _flags(entry, vocab_size), isinstance(entry, Diffusion)))
            numbers.append(known[key] if entry in source.active else -1)
        has_prefix = any(isinstance(entry, Prefix) for source in sources for entry in source.entries)
        if has_prefix and not passes:
            passes.append(_Pass(NoiseRule(_NO_ROWS, own_labels=False), None, False))
        entry = next((entry for source in sources for entry in source.entries if isinstance(entry, Spans)), None)
        spans = None if entry is None else _span_rule(entry, pad_id)
        if not passes and not users and spans is None:
            return None
        passes.sort(key=lambda one: one.is_diffusion)  # which reads what the others have written
        return cls(passes, numbers, users, spans)

    @property
    def tables(self) -> list[Flags | None]:
        """The table of ids of each pass, for a copy on a device."""
        return [one.flags for one in self._passes]

    def apply(
        self,
        ids: Array,
        rows: Array,
        out: Mapping[str, Array],
        *,
        label_shift: bool,
        learn: Array = None,
        tables: Sequence[Array] | None = None,
        span_table: Array = None,
    ) -> None:
        """Change the arrays of R rows. On a GPU this queues one launch for each rule, and what functions do.

        ids:   (R, T), of the tokens; `out["input_ids"]` itself where it is not changed (`reads_ids`)
        rows:  as `Drawn.rows`
        out:   arrays by field; `input_ids` is written if it is not `ids`, `labels` have been
        learn: (R, T): 0 for ids that are not labels
        tables: `tables` on the device
        span_table: as `DrawnSpans.table`, if rows are corrupted by spans
        """
        copied: set[bool] = set()
        for one, flags in zip(self._passes, self.tables if tables is None else tables, strict=True):
            changes_ids = one.rule.number != _NO_ROWS
            source, target = ids, out["input_ids"]
            if one.is_diffusion:
                source, target = out["input_ids"], out["noisy_ids"]
            noised_rows(
                source,
                rows,
                one.rule,
                out=target if changes_ids else None,
                labels=out["labels"],
                copies=one.is_diffusion not in copied,
                label_shift=int(label_shift),
                id_flags=flags,
                learn=learn if one.rule.own_labels and changes_ids else None,
                masked=out.get("masked") if one.is_diffusion else None,
                loss_mask=out.get("loss_mask"),
            )
            copied.add(one.is_diffusion)
        own = {name: out[name] for name in OF_SPANS if name in out}
        if self._spans is not None and own:  # a batch may have nothing but the numbers of inputs and targets
            corrupted_spans(ids, span_table, self._spans, own, label_shift=int(label_shift), learn=learn)
        for function, entry in self._users:
            call(function, entry, out, rows, ids.shape[1])


def _rule(entry: Objective, vocab_size: int | None) -> NoiseRule:
    """The rule of an entry that changes ids, without its number."""
    if isinstance(entry, Drop):
        return NoiseRule(-1, entry.drop_id, own_labels=False)
    if isinstance(entry, Mlm):
        random, kept = threshold(entry.random), threshold(entry.random + entry.keep)
        return NoiseRule(-1, entry.mask_id, random, kept, vocab_size or 1, entry.words is not None)
    assert isinstance(entry, Diffusion)
    return NoiseRule(-1, entry.mask_id)


def _span_rule(entry: Spans, pad_id: int) -> SpanRule:
    start_id = pad_id if entry.start_id is None else entry.start_id
    end_id = -1 if entry.end_id is None else entry.end_id
    return SpanRule(entry.sentinels, entry.sentinel_step, start_id, end_id, pad_id)


def _flags(entry: Objective, vocab_size: int | None) -> Flags | None:
    """The bits of each id that matter to an entry."""
    special = [*entry.special]
    if isinstance(entry, Mlm | Diffusion):
        special.append(entry.mask_id)
    starts: Flags = np.zeros(0, np.uint8)
    if isinstance(entry, Mlm) and entry.words is not None:
        assert vocab_size is not None, "a table of words is compared with it"
        starts = word_starts(entry.words, vocab_size)
    if not special and not len(starts):
        return None
    flags = np.zeros(max(len(starts), max(special, default=0) + 1), np.uint8)
    flags[: len(starts)] = starts * STARTS_WORD
    flags[special] |= SPECIAL
    return flags
