"""Columns next to the ids: which ids are padding, where documents end, which ids are learned.

    input_ids         5  6  7  8  9  0            attention_mask    1  1  1  2  2  0
    labels         -100  6  7  8 -100 -100
    documents        [5  6  7][8  9]              learned              6  7  8

Padding is removed. `fields` has the meaning of each column. If several columns say which ids are learned, an id is
learned if all of them say so, as in TRL's collator; if several say where documents end, they have to agree. Arrays here
cover all rows of a part of a file, one row after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from dali_pipes import fields
from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.errors import CorpusFormatError
from dali_pipes.uris import FilePath

Bools = npt.NDArray[np.bool_]

NOT_LEARNED = -100
"""The label of an id that is not learned."""
PADDING = (fields.ATTENTION, *fields.SEGMENTS)
"""Columns that may mark padding."""
LEARNED = (*fields.MASKS, fields.LABELS)
"""Columns that say which ids are learned."""
DOCUMENTS = (fields.LENGTHS, fields.ENDS, fields.POSITIONS, *fields.SEGMENTS, fields.ATTENTION)
"""Columns that may say where documents end."""


class Cells(NamedTuple):
    """One column of some rows: values of each row, int64 (R,), and all of them, (N,), integers or booleans."""

    lengths: Int64Array
    values: npt.NDArray[Any]


class Rows(NamedTuple):
    """The meaning of the columns for some rows.

    lengths:   ids of each row, without padding, int64 (R,)
    documents: those of each document, int64 (D,)
    kept:      for each id whether it is not padding; None: all are kept
    learned:   for each id that is kept whether it is learned; None: all are
    numbering: by column, which rows number their documents from 0 and which from 1
    """

    lengths: Int64Array
    documents: Int64Array
    kept: Bools | None
    learned: Bools | None
    numbering: Mapping[str, "Numbering"]


class Numbering(NamedTuple):
    """Where 0 is a document and where it is padding, in a column of document numbers.

    from_one:  first row that starts with 1 or more; None: no row does
    from_zero: last row with ids of a document 0; None: no row has one
    """

    from_one: int | None = None
    from_zero: int | None = None

    def join(self, other: "Numbering") -> "Numbering":
        """That of the rows of both."""
        ones = [row for row in (self.from_one, other.from_one) if row is not None]
        zeros = [row for row in (self.from_zero, other.from_zero) if row is not None]
        return Numbering(min(ones, default=None), max(zeros, default=None))


@dataclass(frozen=True)
class Place:
    """Where the rows are, for messages: file, number of the first row, and what a row and a column are called."""

    path: FilePath
    first_row: int
    tokens: str
    row: str = "row"
    column: str = "column"

    def refuse(self, row: int, text: str) -> NoReturn:
        """Raise CorpusFormatError for row number `row` of these."""
        raise CorpusFormatError(f"{self.path}: {self.row} {self.first_row + row:,}: {text}")


def read_rows(ids: Cells, beside: Mapping[str, Cells], place: Place) -> Rows:
    """Check the columns `beside` the ids and find their meaning. Raises CorpusFormatError naming row and token."""
    for name, cells in beside.items():
        if name not in (fields.LENGTHS, fields.ENDS):
            _check_lengths(name, ids.lengths, cells.lengths, place)
    kept = find_kept(beside, place)
    learned = find_learned(beside, kept, place)
    if fields.LABELS in beside:
        _check_labels(ids, beside[fields.LABELS].values, kept, place)
    lengths = ids.lengths if kept is None else _counts(ids.lengths, kept)
    if learned is not None and sum(name in beside for name in LEARNED) > 1:
        _check_overlap(beside, lengths, kept, learned, place)
    numbering = _numbering(beside, kept, place)
    return Rows(lengths, _documents(lengths, beside, kept, place), kept, learned, numbering)


def check_numbering(numbering: Mapping[str, Numbering], place: Place) -> None:
    """Refuse rows of zeros after rows that start with 1. Raises CorpusFormatError.

    They may be padding, and would be learned as a document. Numbers that count through all rows never return to 0.
    place: of the rows of a file, with 0 as the first.
    """
    for name, (one, zero) in numbering.items():
        if one is not None and zero is not None and zero > one:
            place.refuse(
                zero,
                f"{place.column} {name} starts with 0, but with 1 or more in {place.row} {one:,}, so 0 could mean "
                f"padding or the first document. Add a {place.column} {fields.ATTENTION} that is 0 for padding, or "
                f"number documents from 1 and remove {place.row}s that are all padding.",
            )


def find_kept(beside: Mapping[str, Cells], place: Place) -> Bools | None:
    """For each id whether it is kept, not padding; None where all are.

    Raises CorpusFormatError for padding between ids.
    """
    kept: Bools | None = None
    for name in PADDING:
        if name not in beside:
            continue
        lengths, numbers = _numbers(name, beside[name])
        if numbers.min(initial=0) < 0:
            wrong = int(np.argmax(numbers < 0))
            row, at = _row_of(lengths, wrong)
            place.refuse(
                row,
                f"{place.column} {name} holds {beside[name].values[wrong]} at token {at:,}; expected 0 or more. "
                f"Correct it, or remove the {place.column}.",
            )
        is_there = numbers != 0
        if is_there.all():
            continue
        before = np.cumsum(is_there) - np.repeat(_counts_before(lengths, is_there), lengths)
        inside = np.flatnonzero(~is_there & (before > 0) & (before < np.repeat(_counts(lengths, is_there), lengths)))
        if len(inside):
            row, at = _row_of(lengths, int(inside[0]))
            value = int(beside[name].values[inside[0]])
            place.refuse(
                row,
                f"{place.column} {name} holds {value} at token {at:,}, with tokens on both sides; padding must be at "
                f"the ends of a {place.row}. Correct it, or remove the {place.column}.",
            )
        kept = is_there if kept is None else kept & is_there
    return kept


def find_learned(beside: Mapping[str, Cells], kept: Bools | None, place: Place) -> Bools | None:
    """For each id that is kept whether all columns let it be learned; None without such a column."""
    learned: Bools | None = None
    for name in LEARNED:
        if name in beside:
            one = _learned_by(name, beside[name], place)
            learned = one if learned is None else learned & one
    return learned if kept is None or learned is None else learned[kept]


def _learned_by(name: str, cells: Cells, place: Place) -> Bools:
    values = cells.values
    if name == fields.LABELS:
        return np.asarray(values != NOT_LEARNED)
    if values.dtype == np.bool_:
        return values
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row, at = _row_of(cells.lengths, int(wrong[0]))
        place.refuse(
            row,
            f"{place.column} {name} holds {values[wrong[0]]} at token {at:,}; expected 0 (not learned) or 1 (learned)",
        )
    return np.asarray(values != 0)


def _check_lengths(name: str, wanted: Int64Array, found: Int64Array, place: Place) -> None:
    wrong = np.flatnonzero(found != wanted)
    if not len(wrong):
        return
    row = int(wrong[0])
    advice = (
        f" Labels that differ from the ids, such as those of a seq2seq model, are not supported: remove the "
        f"{place.column}, or set loss_masks = [] to learn every token."
        if name == fields.LABELS
        else ""
    )
    place.refuse(
        row,
        f"{place.column} {name} has {found[row]:,} values for {wanted[row]:,} ids; expected one for each id.{advice}",
    )


def _check_labels(ids: Cells, labels: npt.NDArray[Any], kept: Bools | None, place: Place) -> None:
    """Labels are the ids themselves, or -100."""
    differs = (labels != NOT_LEARNED) & (labels != ids.values)
    wrong = np.flatnonzero(differs if kept is None else differs & kept)
    if not len(wrong):
        return
    row, at = _row_of(ids.lengths, int(wrong[0]))
    begin = int(wrong[0]) - at
    own, given = (part[begin : begin + int(ids.lengths[row])] for part in (ids.values, labels))
    is_shifted = len(own) > 1 and bool(((given[:-1] == own[1:]) | (given[:-1] == NOT_LEARNED)).all())
    why = (
        "these labels are already shifted by one: each is the next token. Save them unshifted (the loader shifts "
        "labels)"
        if is_shifted
        else f"a label must be the token at its own position, or {NOT_LEARNED} where it is not learned. Correct it"
    )
    place.refuse(
        row,
        f"{place.column} {fields.LABELS} holds {given[at]} at token {at:,}, but {place.tokens} holds {own[at]}; {why}, "
        f"or set loss_masks = [] to learn every token.",
    )


def _check_overlap(
    beside: Mapping[str, Cells], lengths: Int64Array, kept: Bools | None, learned: Bools, place: Place
) -> None:
    """Refuse columns that each mark tokens of a row to learn, but none in common."""
    names = [name for name in LEARNED if name in beside]
    parts = [_learned_by(name, beside[name], place) for name in names]
    counts = [_counts(lengths, part if kept is None else part[kept]) for part in parts]
    wrong = np.flatnonzero((np.min(counts, axis=0) > 0) & (_counts(lengths, learned) == 0))
    if len(wrong):
        place.refuse(
            int(wrong[0]),
            f"{place.column}s {' and '.join(names)} contradict each other: each marks tokens to learn, but no token "
            "is marked by all of them. Remove the one that is wrong, or set loss_masks = [] to learn every token.",
        )


def _documents(lengths: Int64Array, beside: Mapping[str, Cells], kept: Bools | None, place: Place) -> Int64Array:
    """Length of each document. `lengths`: of the rows, without padding."""
    found: list[tuple[str, Int64Array, Bools | None]] = []
    for name in DOCUMENTS:
        if name in beside:
            cuts, speaks = _cuts(name, beside[name], lengths, kept, place)
            found.append((name, cuts, speaks))
    if not found:
        return lengths
    name, cuts, speaks = found[0]
    for other, others, other_speaks in found[1:]:
        mine = cuts if other_speaks is None else cuts[other_speaks[_rows_of(lengths, cuts)]]
        differs = np.setxor1d(mine, others)
        if len(differs):
            row, at = _row_of(lengths, int(differs[0]))
            one, two = (name, other) if differs[0] in cuts else (other, name)
            place.refuse(
                row,
                f"{place.column}s {name} and {other} contradict each other: a document starts at token "
                f"{_at_in_full(at, row, beside, kept)} according to {one}, but not according to {two}. Remove the one "
                "that is wrong.",
            )
    total = int(lengths.sum())
    begins = np.sort(np.concatenate([np.cumsum(lengths) - lengths, cuts]))
    return np.diff(begins, append=total)


def _cuts(
    name: str, cells: Cells, lengths: Int64Array, kept: Bools | None, place: Place
) -> tuple[Int64Array, Bools | None]:
    """Ids that start a document inside a row, counted over all kept ids, and the rows that the column describes; None:
    all."""
    if name in (fields.LENGTHS, fields.ENDS):
        return _cuts_by_lengths(name, cells, lengths, place), None
    if name == fields.ATTENTION and cells.values.max(initial=0) <= 1:
        return np.zeros(0, np.int64), np.zeros(len(lengths), np.bool_)
    values = cells.values if name == fields.POSITIONS else _numbers(name, cells).values
    values = (values if kept is None else values[kept]).astype(np.int64, copy=False)
    is_first = np.zeros(len(values), np.bool_)
    heads = (np.cumsum(lengths) - lengths)[lengths > 0]
    is_first[heads] = True
    before = np.concatenate([values[:1], values[:-1]])
    if name == fields.POSITIONS:
        # Positions may count the padding before a row.
        left = np.zeros(len(lengths), np.int64) if kept is None else _padding_before(cells.lengths, kept)
        is_good = (values == 0) | (~is_first & (values == before + 1))
        is_good[heads] |= values[heads] == left[lengths > 0]
        rule = "positions must start at 0 and rise by 1, and restart at 0 with each new document"
        cut = (values == 0) & ~is_first
    else:
        is_good = is_first | (values >= before)
        rule = f"document numbers must not decrease within a {place.row}"
        cut = (values != before) & ~is_first
    wrong = np.flatnonzero(~is_good)
    if len(wrong):
        row, at = _row_of(lengths, int(wrong[0]))
        at = at if kept is None else at + int(_padding_before(cells.lengths, kept)[row])
        value = cells.values[int(cells.lengths[:row].sum()) + at]
        place.refuse(
            row,
            f"{place.column} {name} holds {value} at token {at:,}; {rule}. Correct it, or remove the {place.column} if "
            f"each {place.row} is one document.",
        )
    cuts = np.flatnonzero(cut)
    if name != fields.ATTENTION:
        return cuts, None
    speaks = np.zeros(len(lengths), np.bool_)  # ones alone do not mark documents
    speaks[_rows_of(lengths, np.flatnonzero(values > 1))] = True
    return cuts, speaks


def _cuts_by_lengths(name: str, cells: Cells, lengths: Int64Array, place: Place) -> Int64Array:
    """As `_cuts`, of columns that have a value for each document."""
    values, counts = cells.values.astype(np.int64, copy=False), cells.lengths
    heads = np.cumsum(counts) - counts
    if name == fields.ENDS:
        first = np.zeros(len(values), np.bool_)
        first[heads[counts > 0]] = True
        values = np.diff(values, prepend=0) * ~first + values * first
        wrong = np.flatnonzero(first & (values != 0))
        what = "it must start with 0"
    else:
        wrong, what = np.zeros(0, np.int64), ""
    if not len(wrong):
        wrong, what = np.flatnonzero(values < 0), "the length of a document cannot be negative"
    if len(wrong):
        row, at = _row_of(counts, int(wrong[0]))
        place.refuse(row, f"{place.column} {name} holds {cells.values[wrong[0]]} as entry {at:,}: {what}. Correct it.")
    sums = np.concatenate([[0], np.cumsum(values)])
    found = sums[heads + counts] - sums[heads]
    differs = np.flatnonzero(found != lengths)
    if len(differs):
        row = int(differs[0])
        place.refuse(
            row,
            f"the documents in {place.column} {name} have {found[row]:,} tokens in total, but the {place.row} has "
            f"{lengths[row]:,}. Correct it, or remove the {place.column} if each {place.row} is one document.",
        )
    ends = sums[1:]  # over all rows: the sum of each is its length
    return np.setdiff1d(ends, np.concatenate([[0], np.cumsum(lengths)]))


def _numbering(beside: Mapping[str, Cells], kept: Bools | None, place: Place) -> dict[str, Numbering]:
    found = {}
    for name in names_in(fields.SEGMENTS, tuple(beside)):
        lengths, values = beside[name]
        heads = (np.cumsum(lengths) - lengths)[lengths > 0]
        ones = np.flatnonzero(lengths)[values[heads] > 0]
        zeros = np.flatnonzero(_counts(lengths, (values == 0) if kept is None else (values == 0) & kept))
        one = place.first_row + int(ones[0]) if len(ones) else None
        found[name] = Numbering(one, place.first_row + int(zeros[-1]) if len(zeros) else None)
    return found


def _numbers(name: str, cells: Cells) -> Cells:
    """Documents numbered from 1; 0 for padding."""
    if name == fields.ATTENTION:
        return cells
    values = cells.values.astype(np.int64, copy=False)
    heads = (np.cumsum(cells.lengths) - cells.lengths)[cells.lengths > 0]
    from_zero = np.zeros(len(cells.lengths), np.int64)
    from_zero[cells.lengths > 0] = values[heads] == 0
    return Cells(cells.lengths, values + np.repeat(from_zero, cells.lengths))


def _counts(lengths: Int64Array, flags: Bools) -> Int64Array:
    """Number of flags set in each row."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(lengths)
    return np.asarray(sums[ends] - sums[ends - lengths])


def _counts_before(lengths: Int64Array, flags: Bools) -> Int64Array:
    """Number of flags set in all rows before each row."""
    counts = _counts(lengths, flags)
    return np.cumsum(counts) - counts


def _padding_before(lengths: Int64Array, kept: Bools) -> Int64Array:
    """Number of ids in each row before the first that is kept; 0 for a row without any."""
    heads = np.cumsum(lengths) - lengths
    firsts, counts = np.flatnonzero(kept), _counts(lengths, kept)
    at = (np.cumsum(counts) - counts)[counts > 0]
    found = np.zeros(len(lengths), np.int64)
    found[counts > 0] = firsts[at] - heads[counts > 0]
    return found


def _at_in_full(at: int, row: int, beside: Mapping[str, Cells], kept: Bools | None) -> int:
    """The place in the full row of its kept id number `at`."""
    if kept is None:
        return at
    lengths = next(beside[name].lengths for name in PADDING if name in beside)
    return at + int(_padding_before(lengths, kept)[row])


def _rows_of(lengths: Int64Array, places: Int64Array) -> Int64Array:
    return np.searchsorted(np.cumsum(lengths), places, side="right")


def _row_of(lengths: Int64Array, place: int) -> tuple[int, int]:
    """The row that value number `place` is in, and its place there."""
    row = int(_rows_of(lengths, np.array([place]))[0])
    return row, place - int(lengths[:row].sum())


def names_in(names: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` that are among the columns `beside`."""
    return tuple(name for name in names if name in beside)
