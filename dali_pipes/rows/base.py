"""A row source: the rows of one corpus, pass by pass. Integers only; whose tokens these are, `Source` knows.

    pass 0      row source.plan(0, places)  ─▶  where in the corpus the tokens of each row are

A pass is one full run through the corpus, in its own order; a place is the number of a row in that order. The
other modules use only the methods here, never the kind of a source.
"""

import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.rows.item_order import ItemOrder

if TYPE_CHECKING:
    from dali_pipes.corpus.block_grid import BlockGrid
    from dali_pipes.documents import Pieces
    from dali_pipes.objectives.fim import FimPieces, Runs
    from dali_pipes.rows.packing import LeftOut
    from dali_pipes.rows.token_batches import TokenBatches
    from dali_pipes.rows.window_counts import WindowMark

Int64Array = npt.NDArray[np.int64]

PADDING = -1
"""The place of a row that only fills a batch."""


def order_key(*what: object) -> int:
    """A 64-bit key, drawn with SHA-256 from what it is for."""
    text = " ".join(map(str, ("dali_pipes", *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def key_names(name: str | None) -> tuple[str, ...]:
    """What the name of a source adds to its keys. Quoted: all other parts are words and numbers without quotes."""
    return () if name is None else (json.dumps(name),)


def kept(share: Fraction | None, count: int) -> int | None:
    """How many of `count` windows or documents a share keeps, at least one; None: all, in their own order."""
    if share is None or share == 1:
        return None
    assert 0 < share < 1, share
    return max(1, count * share.numerator // share.denominator)


class Rows(NamedTuple):
    """R planned rows."""

    starts: Int64Array
    """(R,): position of each row's first token in the corpus; -1 for a row without tokens, which has no pieces. Without
    pieces every row has tokens: those of padding rows are read, too, and their labels ignored."""
    pieces: "Pieces | None"
    """The pieces that rows are put together from; None where each row is one run of tokens."""
    sources: Int64Array | None = None
    """(R,): number of the source of each row, -1 for padding; None: all are of the only one."""
    passes: Int64Array | None = None
    """(R,): the pass that each row is of; None: that of the epoch."""
    fim: "FimPieces | None" = None
    """How the pieces are rearranged: they hold sentinels, too, and start where their units do; None: every piece is one
    run of tokens."""

    def runs(self) -> "Runs | None":
        """What the pieces consist of, where some are rearranged."""
        if self.fim is None or self.pieces is None:
            return None
        from dali_pipes.objectives.fim import runs_of  # with the first objective of this kind

        return runs_of(self.fim, self.pieces.lengths)


class Parts(NamedTuple):
    """Which part of each planned row is meant: R of them, of equal length."""

    numbers: Int64Array
    """(R,), from 0."""
    seq_len: int
    """Positions of a part, which divides those of a row."""


class Reads(NamedTuple):
    """Runs of tokens to be read, (P,) each: where they are in the corpus, how many, and where they go in a buffer.

    A start below 0 is an id that the corpus does not have there, -1 - id, for one place of the buffer.
    """

    starts: Int64Array
    lengths: Int64Array
    targets: Int64Array


class KeyedRange(NamedTuple):
    """A pass as a formula: the row at a place begins at token `first + stride * order.numbers(place, key)`."""

    order: ItemOrder
    key: int | None
    """None: the order without a shuffle."""
    first: int
    stride: int

    @property
    def is_one_permutation(self) -> bool:
        """Whether the number is permute(place, order.count, key), or the place where the key is None."""
        return self.order.kept_key is None and (self.key is None or self.order.blocks is None)


class ReadableRows(Protocol):
    """Planned rows, of one corpus or of a mixture, for those who read their tokens; members as of `RowSource`."""

    seq_len: int
    row_tokens: int
    lookback: int
    first_token: int
    span: int
    rearranges: bool

    def reads(self, rows: Rows, begins: Int64Array, sizes: Int64Array, /) -> Reads:
        """What to read for planned rows."""


class RowSource(Protocol):
    """Rows of one corpus. Safe for several threads; methods that plan documents say so, and block.

    seq_len:      positions of a row (T)
    row_tokens:   tokens that a row takes in a buffer: its own, and those that are labels alone
    lookback:     and the most tokens before its pieces that it takes, too, where an objective reads those
    stride:       tokens of the corpus from a row to the next, on average where rows hold documents
    num_tokens:   tokens of the split
    first_token, span: the tokens that rows and their labels read are first_token ... first_token + span - 1
    in_pieces:    whether rows are put together from pieces
    is_uniform:   whether every pass has the same number of rows, known without planning
    order_name:   name of the order of rows, kept in states: another order needs another name
    rearranges:   whether pieces may be rearranged, so that rows have a `fim`
    most_planned: rows, over all ranks, that may be planned together; None: any number, as planning is arithmetic
    order:        of the items, windows or documents, that rows are made of
    """

    seq_len: int
    row_tokens: int
    lookback: int
    stride: int
    num_tokens: int
    first_token: int
    span: int
    in_pieces: bool
    is_uniform: bool
    order_name: str
    rearranges: bool
    most_planned: int | None
    order: ItemOrder

    def key(self, pass_number: int, /) -> int | None:
        """Of the order of a pass; None without a shuffle."""

    def block_grid(self) -> "BlockGrid | None":
        """Where the blocks of an order by blocks are in the corpus; None for another order."""

    def item_at(self, pass_number: int, place: int, /) -> int:
        """The first place in the order of the items that a row may be made of. Does not block for planned rows."""

    @property
    def token_batches(self) -> "TokenBatches | None":
        """None: a place is a row. Else places are batches, whose rows `plan` returns as pieces of one row."""

    def count(self, pass_number: int, at_least: int | None = None, /) -> int:
        """Rows known of a pass: all, or at least `at_least` of them if it has that many. May plan documents."""

    def count_by_now(self, pass_number: int, /) -> tuple[int, bool]:
        """Rows of a pass by what has been counted, 0 before, and whether that is exact. Does not wait."""

    def is_counted(self, pass_number: int, /) -> bool:
        """Whether all rows of a pass have been counted. Plans nothing."""

    def estimate(self, pass_number: int, /) -> int:
        """Rows of a pass, as far as that can be said without planning all of it."""

    def left_out(self) -> "LeftOut | None":
        """What is in no row of any pass because documents are longer than a row; None where rows lose none that way."""

    def plan(self, pass_number: int, places: Int64Array, parts: Parts | None = None, /) -> Rows:
        """Rows by their places, rising; `PADDING` only at the end. May plan documents.

        parts: of windows, plans these parts of them, which may be in any order.
        """

    def plan_next(self, pass_number: int, place: int, /) -> None:
        """Plan what comes after the part of the plan that holds a row, so that later calls do not wait. May block."""

    def formula(self, pass_number: int, /) -> KeyedRange | None:
        """Where the rows of a pass begin, as a formula that a kernel may compute; None: rows have to be planned.

        Rows `in_pieces` are cut at the ends of documents, too, which only the plan knows.
        """

    def widths(self, pass_number: int, first: int, end: int, step_rows: int, /) -> Int64Array | None:
        """Positions of a row in each step of `step_rows` rows from `first` to `end` - 1; None: `seq_len` in all."""

    def places_of(self, pass_number: int, position: int, /) -> list[int] | None:
        """Places of rows, other than the current one, that read a token of the corpus; None: too many to be named."""

    def reads(self, rows: Rows, begins: Int64Array, sizes: Int64Array, /) -> Reads:
        """What to read for planned rows, row r of them into the sizes[r] places of a buffer from begins[r] on."""

    def mark(self, pass_number: int, place: int, /) -> "WindowMark | None":
        """Where in the plan a run stands that has had the rows before `place`; None where a place says it all.

        Does not block for rows that have been planned.
        """

    def seek(self, pass_number: int, place: int, mark: "WindowMark", /) -> bool:
        """Count on from a saved mark. False if `place` cannot be there. May plan documents."""

    def at(self, counts: Int64Array, /) -> tuple[Int64Array, Int64Array]:
        """Passes and places of the rows numbered `counts` (C,), where a source numbers its rows on from pass to pass.

        Any order, repeats allowed. May plan documents, at most up to the highest of these rows.
        """

    def mark_count(self, count: int, /) -> tuple[int, ...]:
        """Where in its plans a source stands that has handed out `count` rows over all passes; integers for a state.

        Does not block for rows that have been planned.
        """

    def seek_count(self, count: int, mark: Sequence[int], /) -> bool:
        """Go on from what `mark_count` returned: later rows do not need the plans of earlier passes.

        Earlier rows stay available, counted from pass 0. False if the mark cannot be that of `count`. May plan
        documents.
        """

    def rows_of_pass(self) -> int:
        """Rows of a pass, for arithmetic on passes: exact if `is_uniform`, else an estimate from the start of pass 0.

        The same on every rank and after every resume. May plan documents.
        """

    def mean_tokens(self) -> Fraction:
        """Tokens of the corpus in a row, on average over the rows that `rows_of_pass` looks at. May plan documents."""
