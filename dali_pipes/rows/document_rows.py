"""Rows built from whole documents: which pieces of the corpus are in row i of an epoch.

    order of the epoch    d7 d2 d9 d4 | d1 d8 d3 d6 | d0 d5           windows of 4 documents, each planned separately
    rows of a window      [d9 d2] [d7] [d4]                           best fit, then shuffled
    rows of the epoch     0 1 2 | 3 4 | 5                             numbered on from window to window

A window's rows depend on the seed, the epoch and its number alone, so every rank plans the same ones, and a run that
goes on plans the windows it needs and no others. How many rows a window makes is known when it has been planned; a
state therefore says in which window it is and how many rows came before it.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.corpus.keep import Copies
from dali_pipes.documents import Pieces, staged
from dali_pipes.errors import ConfigError
from dali_pipes.objectives.fim import AS_IT_IS, ORDER_NAME, FillInMiddle, FimPieces, first_tokens, joined
from dali_pipes.operators import permute
from dali_pipes.rows.base import KeyedRange, Parts, Reads, Rows, kept, key_names, order_key
from dali_pipes.rows.cost_balance import BALANCE_NAME, CostBalance, rows_at
from dali_pipes.rows.fim_pieces import pieces_with_sentinels
from dali_pipes.rows.item_order import BlockShape, ItemOrder
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.rows.packing import (
    IntArray,
    LeftOut,
    LongDocuments,
    Packing,
    PackingCounts,
    left_out,
    narrow,
    pack,
    pack_pieces,
    rows_of_documents,
)
from dali_pipes.rows.pass_begins import PassBegin, PassBegins
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.step_costs import BalanceReport
from dali_pipes.rows.token_batches import TOKEN_BATCHES_NAME, TokenBatches
from dali_pipes.rows.window_counts import WindowCount, WindowCounts, WindowMark
from dali_pipes.rows.window_lengths import Lengths, WindowLengths, tokens_before

Int64Array = npt.NDArray[np.int64]
RowMode = Literal["pack", "pad"]

_MOST_LENGTHS, _RUNS = 1 << 21, 64
"""The lengths of at most 2,097,152 documents, sampled in 64 runs, estimate what long documents lose."""
_MOST_KEPT_LENGTHS = 1 << 16
"""The same for a share of the documents: they are anywhere in the corpus, in random order, and slower to look up."""

SharedPlan = Callable[[int, int, Callable[[int], Packing], int], Packing]

LENGTHS_NAME = "window-lengths-v1"
"""Added to the name of the order where rows grow."""

_MOST_BATCHES_PLANNED = 1 << 12
"""`DocumentRows.most_planned` where a place is a batch of several documents."""

_FEWEST_WINDOWS_KEPT = 6
"""Plans of windows kept, and more where a step spans more: each is needed to count its rows, and again to find them."""


def split_documents(offsets: Int64Array, split: str, validation_fraction: float) -> Int64Array:
    """The documents of one split: validation has those that begin in the last part of the tokens, train the others."""
    border = int(offsets[-1]) - int((offsets[-1] - offsets[0]) * validation_fraction)
    first = int(np.searchsorted(offsets[:-1], border)) if validation_fraction else len(offsets) - 1
    part = offsets[first:] if split == "validation" else offsets[: first + 1]
    if len(part) < 2 or part[-1] == part[0]:
        raise ConfigError(
            f"every document of the {split} split is empty (validation_fraction = {validation_fraction}, "
            f"{len(offsets) - 1:,} documents in the corpus); use a longer corpus or another validation_fraction"
        )
    return part


class DocumentRows:
    """The rows of one split. Safe for several threads; a method that meets an unplanned window plans it, and blocks.

    Known results are returned immediately, even while another thread plans: saving a state never waits for a plan.

    offsets: int64 (D + 1,), documents of the split: tokens offsets[d] : offsets[d + 1]. Empty ones are in no row.
    lengths: (tokens of the run, tokens of a row), rising, the first at 0, where rows grow; `seq_len` is the longest.
    name: makes the orders of this source its own; None: those of a corpus without a name.
    share: keeps floor(share * D) documents, at least one, which depend on the name alone. Without a shuffle they come
    in a fixed order, the same in every pass, but not in that of the corpus.
    copies: uint8 (D,), how often a pass reads each document; None: once. A share is then one of the documents that are
            read at all.
    balance: puts rows of about equal cost next to one another; not with buckets or lengths, nor without a shuffle.
    token_batches: makes each place a batch of several rows, which `plan` then returns as a row of several pieces; with
            mode "pad", and without buckets, lengths or balance.
    num_documents: those that are kept, every copy counted.
    blocks: makes orders, and a share, of blocks of documents; None: of single documents.
    fim: rearranges documents, whose pieces are then planned with their sentinels; None: no document.
    lookback: tokens of its document before a piece that are read with it, if the piece has as many; see `WindowCuts`.
    """

    in_pieces = True
    is_uniform = False
    most_planned: int | None = 1 << 16
    """Rows of all ranks that are planned in one go, but at least a block of steps: every rank plans the windows of
    whole steps, and with 1,024 ranks the first batch waited seconds for the plans of 128 steps."""

    def __init__(
        self,
        offsets: Int64Array,
        seq_len: int,
        *,
        mode: RowMode,
        long_documents: LongDocuments,
        window_documents: int,
        shuffle: bool,
        seed: int,
        buckets: LengthBuckets | None = None,
        lengths: Sequence[tuple[int, int]] = (),
        name: str | None = None,
        share: Fraction | None = None,
        blocks: BlockShape | None = None,
        copies: Copies | None = None,
        balance: CostBalance | None = None,
        token_batches: TokenBatches | None = None,
        fim: FillInMiddle | None = None,
        lookback: int | None = None,
    ) -> None:
        assert balance is None or (shuffle and buckets is None and not lengths), "one of them decides the order"
        self._lookback, self.lookback = lookback, seq_len if lookback else 0
        self.offsets, self.seq_len, self.buckets = offsets, seq_len, buckets
        assert token_batches is None or (mode == "pad" and balance is None and buckets is None and not lengths), mode
        self.balance, self.token_batches = balance, token_batches
        if token_batches is not None:
            self.most_planned = _MOST_BATCHES_PLANNED
        self.row_tokens = self.stride = seq_len
        self.first_token, self.span = int(offsets[0]), int(offsets[-1] - offsets[0])
        self.num_tokens = self.span
        self._mode, self._long_documents, self._window_documents = mode, long_documents, window_documents
        self._shuffle, self._seed, self._names = shuffle, seed, key_names(name)
        self._repeated: IntArray | None = None
        self.removed_documents = self.extra_copies = 0
        if copies is None:
            self.order = self._item_order(len(offsets) - 1, share, blocks)
        else:
            self.num_tokens = int((np.diff(offsets) * copies).sum())
            self._repeated = self._repeat(copies, share, blocks)
            self.order = self._item_order(len(self._repeated), None, blocks)
        self.num_documents = self.order.count
        self.keeps_all = share is None or share == 1
        self.order_name = self.order.name(shuffle)
        if lengths:
            self.order_name += f", {LENGTHS_NAME}"
        if self.balance is not None:
            self.order_name += f", {BALANCE_NAME}"
        if token_batches is not None:
            self.order_name += f", {TOKEN_BATCHES_NAME}"
        self.num_windows = -(-self.num_documents // window_documents)
        self.lengths = WindowLengths(lengths, self.num_tokens, self.num_windows) if lengths else None
        self._fim, self.rearranges = fim, fim is not None
        if fim is not None:
            self.order_name += f", {ORDER_NAME}"
        self._counts = WindowCounts()
        self._from_pass_0 = self._from_mark = PassBegins(PassBegin(0, 0))
        self._plans: OrderedDict[tuple[int, int], Packing] = OrderedDict()
        self._windows_kept = _FEWEST_WINDOWS_KEPT
        self._next_is_planned = (-1, 0, 0)
        """An epoch, and rows of it after whose window the next one has been planned."""
        self._shared: SharedPlan | None = None
        self._lock = threading.Lock()  # of the counts and plans; never held while a window is planned
        self._planning = threading.Lock()  # so that no two threads plan the same window; taken before `_lock`

    def share(self, plan: SharedPlan) -> None:
        """Take the plans of windows from where other processes with the same rows have theirs, too.

        plan: called with an epoch, a window, what makes the plan of any window of this epoch, and their number
        """
        self._shared = plan

    def window_sizes(self) -> tuple[int, int]:
        """About how many pieces and rows the documents of a window make; the rows are at least one."""
        documents = min(self._window_documents, self.num_documents)
        tokens = self.num_tokens * documents // self.num_documents
        full = tokens // self.seq_len
        rows = max(1, full if self._mode == "pack" else documents)
        if self.token_batches is not None:
            rows = max(1, tokens // self.token_batches.tokens)
        return documents + full, rows

    def _item_order(self, count: int, share: Fraction | None, blocks: BlockShape | None) -> ItemOrder:
        num_kept = kept(share, count)
        kept_key = None if num_kept is None else order_key("share", *self._names)
        block_items, window_blocks = (
            (None, 1) if blocks is None else (blocks.items(count, self.num_tokens), blocks.window_blocks)
        )
        return ItemOrder(count, count if num_kept is None else num_kept, kept_key, block_items, window_blocks)

    def _repeat(self, copies: Copies, share: Fraction | None, blocks: BlockShape | None) -> IntArray:
        """The document of each place that the order permutes. Copies of a document follow one another."""
        read = np.flatnonzero(copies)
        order = self._item_order(len(read), share, blocks)
        documents = read[order.numbers(np.arange(order.count), None)]
        repeated = np.repeat(documents, copies[documents])
        self.removed_documents, self.extra_copies = len(copies) - len(read), len(repeated) - len(documents)
        return narrow(repeated, len(copies))

    def _documents(self, places: Int64Array, key: int | None) -> Int64Array:
        """Documents of the split at places of the order of a key; of None, that without a shuffle."""
        numbers = self.order.numbers(places, key)
        return numbers if self._repeated is None else self._repeated[numbers].astype(np.int64)

    def count(self, epoch: int, at_least: int | None = None) -> int:
        """Rows of an epoch that are known, at least `at_least` if it has that many; None: all of them."""
        while True:
            with self._lock:
                counted = self._counts.furthest(self._numbered(epoch))
                if self._complete(counted) or (at_least is not None and counted.known >= at_least):
                    return counted.known
                window = counted.next_window
            self._plan(epoch, window)

    def is_counted(self, epoch: int) -> bool:
        """Whether all rows of an epoch have been counted. Plans nothing, and takes no lock."""
        counted = self._counts.by_now(self._numbered(epoch))
        return counted is not None and self._complete(counted)

    def mark(self, epoch: int, row: int) -> WindowMark:
        """The window that `row` is in, or the one after the first with which the rows before it are complete.

        The same whatever else has been planned. Plans nothing while the epoch is one of the last ones used, wherever in
        it rows have been asked for meanwhile.
        """
        if row == 0:
            return WindowMark(0, 0)
        counted = self._counts.known(self._numbered(epoch), row) or self._counted_to(epoch, row)
        if row == counted.first.rows_before:
            return counted.first
        number = bisect_left(counted.ends, row)
        return counted.mark(number + (counted.ends[number] == row))

    def seek(self, epoch: int, row: int, mark: WindowMark) -> bool:
        """Count an epoch's rows from a saved mark on. False if `row` cannot be where the mark says it is."""
        if not (0 <= mark.window <= self.num_windows and 0 <= mark.rows_before <= row):
            return False
        if mark.window == 0 and mark.rows_before:
            return False
        if row > mark.rows_before and (
            mark.window == self.num_windows or row > mark.rows_before + self._plan(epoch, mark.window).num_rows
        ):
            return False
        with self._lock:
            self._counts.begin(self._numbered(epoch), mark, row)
        return True

    def at(self, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Passes are counted one after another, from that of the last saved mark on where the rows come after it."""
        passes, places = np.empty_like(counts), np.empty_like(counts)
        begins = self._from_mark
        after = counts >= begins.first.rows_before
        for known, which in ((begins, after), (self._from_pass_0, ~after)):
            if which.any():
                rows = counts[which]
                self._pass_of(known, int(rows.max()))
                passes[which], places[which] = known.split(rows)
        return passes, places

    def mark_count(self, count: int) -> tuple[int, ...]:
        """The pass of the row before, the rows before that pass, and its `mark`.

        The same whatever else has been planned; the row after may belong to a pass that has not been planned.
        """
        if count == 0:
            return (0, 0, 0, 0)
        begins = self._from_mark if count > self._from_mark.first.rows_before else self._from_pass_0
        begin = self._pass_of(begins, count - 1)
        return (*begin, *self.mark(begin.number, count - begin.rows_before))

    def seek_count(self, count: int, mark: Sequence[int]) -> bool:
        if len(mark) != 4 or not all(isinstance(number, int) and 0 <= number <= count for number in mark[1::2]):
            return False
        begin, window = PassBegin(*mark[:2]), WindowMark(*mark[2:])
        # Every pass has a row at least.
        if not isinstance(begin.number, int) or not 0 <= begin.number <= begin.rows_before:
            return False
        if (begin.number == 0 and begin.rows_before) or self._from_pass_0.begins_with(begin) is False:
            return False
        if not isinstance(window.window, int) or not self.seek(begin.number, count - begin.rows_before, window):
            return False
        with self._lock:
            if not self._from_mark.begins_with(begin):
                self._from_mark = PassBegins(begin)
        return True

    def rows_of_pass(self) -> int:
        """The rows of window 0 of pass 0, scaled to all documents and rounded down; at least one.

        If the documents of that window do not make a row, those of the next windows are added.
        """
        documents, rows, _ = self._first_rows()
        return max(1, rows * self.num_documents // documents)

    def mean_tokens(self) -> Fraction:
        _, rows, tokens = self._first_rows()
        return Fraction(tokens, rows)

    def plan(self, epoch: int, row_ids: Int64Array, parts: Parts | None = None) -> Rows:
        """Rows (rising; -1, at the end, is a row without pieces) of an epoch. Plans their windows, which blocks."""
        assert parts is None, "rows of documents are not cut into parts"
        real = row_ids[row_ids >= 0]
        planned: list[tuple[Int64Array, Int64Array, Int64Array, Int64Array]] = []
        rearranged: list[FimPieces] = []
        counts: list[Int64Array] = []
        if len(real):
            self._keep(epoch, int(real[0]), int(real[-1]))
        done = 0
        while done < len(real):
            mark = self._window_of(epoch, int(real[done]))
            packing = self._plan(epoch, mark.window)
            num_rows = packing.num_rows
            here = real[done : np.searchsorted(real, mark.rows_before + num_rows)] - mark.rows_before
            if not len(here):  # another thread's epochs have pushed this one's count out: it is planned and counted now
                continue
            done += len(here)
            rows = self._rows_at(here, num_rows, epoch, mark)
            first = packing.row_offsets[rows].astype(np.int64)
            size = packing.row_offsets[rows + 1] - first
            at = np.repeat(first - np.cumsum(size) + size, size) + np.arange(size.sum())
            begins = packing.piece_begins[at].astype(np.int64)
            lengths = packing.piece_lengths[at].astype(np.int64)
            if self._fim is None:
                starts = self.offsets[packing.piece_documents[at]] + begins
            else:
                rearranged.append(self._rearranged(self._fim, packing, at, epoch, mark.window))
                starts = rearranged[-1].borders[:, 0]
            planned.append((starts, lengths, starts + lengths, begins))
            counts.append(size)
        counts.append(np.zeros(len(row_ids) - len(real), np.int64))
        row_offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        empty = np.zeros(0, np.int64)
        columns = [np.concatenate(column) for column in zip(*planned, strict=True)] if planned else [empty] * 4
        pieces = Pieces(row_offsets, *columns[:3])
        if self._lookback is not None:
            begins = columns[3]
            if rearranged:  # the ids before are those that the model sees, in the row
                begins = begins * (joined(rearranged).orders == AS_IT_IS)
            pieces = pieces._replace(lookback=self._lookback_of(pieces.lengths, begins))
        starts = np.full(len(row_ids), -1)
        firsts = row_offsets[: len(real)]
        if self._fim is None:
            starts[: len(real)] = pieces.starts[firsts]
            return Rows(starts, pieces)
        fim = joined(rearranged)
        starts[: len(real)] = first_tokens(fim.chosen(firsts), pieces.lengths[firsts])
        return Rows(starts, pieces, fim=fim)

    def _lookback_of(self, lengths: Int64Array, begins: Int64Array) -> Int64Array:
        """(P, 3), see `Pieces.lookback`. begins: tokens of its document before each piece."""
        if not self._lookback:
            return np.stack((np.zeros_like(lengths), np.zeros_like(lengths), lengths), 1)
        before = np.minimum(begins, self._lookback)
        before[before > lengths] = 0  # so that what is read is at most twice the row
        return np.stack((before, lengths, lengths), 1)

    def reads(self, rows: Rows, begins: Int64Array, sizes: Int64Array) -> Reads:
        """Each piece, or run of a rearranged one, is read separately; the pieces of a row follow one another."""
        pieces, runs = rows.pieces, rows.runs()
        assert pieces is not None
        starts, lengths, targets = pieces.starts, pieces.lengths, staged(pieces, begins).starts
        if runs is None and pieces.lookback is None:
            return Reads(starts, lengths, targets)
        before = pieces.tokens_before
        if runs is not None:
            starts, lengths, targets = runs.starts, runs.lengths, targets[runs.pieces] + runs.begins
            before = before[runs.pieces] * (runs.begins == 0)
        return Reads(starts - before, lengths + before, targets - before)

    def key(self, epoch: int) -> int | None:
        return self._key("order", epoch) if self._shuffle else None

    def block_grid(self) -> BlockGrid | None:
        if self.order.blocks is None or (self._repeated is not None and not self.keeps_all):
            return None  # copies of a share of the documents are not runs of the corpus
        # A block has all from its first document to that of the next one, dropped documents too. One whose copies are
        # in two blocks is in the second.
        rows = self.order.blocks.block_rows
        firsts = np.arange(0, len(self.offsets) - 1, rows) if self._repeated is None else self._repeated[::rows]
        bounds = np.append(self.offsets[firsts], self.offsets[-1])
        return BlockGrid(self.first_token, 0, len(bounds) - 1, 0, int(self.offsets[-1]), bounds)

    def item_at(self, epoch: int, place: int) -> int:
        return self.mark(epoch, place).window * self._window_documents

    def formula(self, epoch: int) -> KeyedRange | None:
        """None: rows depend on the documents."""
        return None

    def places_of(self, epoch: int, position: int) -> list[int] | None:
        """None but the row at hand: a token is in one row."""
        return []

    def widths(self, epoch: int, first: int, end: int, step_rows: int) -> Int64Array | None:
        """For each step the bucket of the longest row that any rank has in it; None without buckets.

        Where rows grow, a step with rows of two windows is as wide as the longer ones.
        """
        if self.lengths is not None:
            return self._widths_of_windows(epoch, first, end, step_rows)
        return None if self.buckets is None else self.buckets.widths(self.longest_rows(epoch, first, end, step_rows))

    def _widths_of_windows(self, epoch: int, first: int, end: int, step_rows: int) -> Int64Array:
        assert self.lengths is not None
        widths = np.zeros(-(-(end - first) // step_rows), np.int64)
        for mark, _, row, until in self._windows_of(epoch, first, end):
            steps = slice((row - first) // step_rows, -(-(until - first) // step_rows))
            widths[steps] = np.maximum(widths[steps], self.lengths.of(epoch, mark.window))
        return widths

    def windows_begun(self, epoch: int, row: int) -> int:
        """Windows of an epoch that have rows before `row`."""
        mark = self.mark(epoch, row)
        return mark.window + (row > mark.rows_before)

    def tokens_before(self, epoch: int, row: int) -> int:
        """Tokens of the run before a row: by windows, and within one in proportion to its rows."""
        mark = self.mark(epoch, row)
        begin = self._tokens_before(epoch, mark.window)
        if row == mark.rows_before:
            return begin
        tokens = self._tokens_before(epoch, mark.window + 1) - begin
        return begin + tokens * (row - mark.rows_before) // self._plan(epoch, mark.window).num_rows

    def _tokens_before(self, epoch: int, window: int) -> int:
        """Tokens of all passes before a window."""
        kept = self.num_tokens * self.order.count // self.order.num_items
        return tokens_before(epoch, window, num_tokens=max(kept, 1), num_windows=self.num_windows)

    def set_lengths(self, run: Mapping[int, Lengths]) -> None:
        """Let some epochs have other lengths than the stages say: see `WindowLengths.run`. Waits for a running plan."""
        assert self.lengths is not None
        if self.lengths.run == run:
            return
        with self._planning, self._lock:
            self.lengths.run = dict(run)
            self._counts, self._next_is_planned = WindowCounts(), (-1, 0, 0)
            self._plans.clear()

    def longest_rows(self, epoch: int, first: int, end: int, step_rows: int) -> Int64Array:
        """Tokens of the longest of each `step_rows` rows from `first` to `end` - 1; the last may be fewer.

        For rows of one piece, with buckets. Looks at rows where the plan has them: takes no memory for them.
        """
        assert self.buckets is not None
        self.count(epoch, end)
        longest = np.zeros(-(-(end - first) // step_rows), np.int64)
        for mark, packing, row, until in self._windows_of(epoch, first, end):
            steps = np.arange((row - first) // step_rows, (until - 1 - first) // step_rows + 1)
            lengths = packing.piece_lengths[row - mark.rows_before : until - mark.rows_before]
            begins = np.maximum(first + steps * step_rows - row, 0)
            longest[steps] = np.maximum(longest[steps], np.maximum.reduceat(lengths, begins))
        return longest

    def _windows_of(self, epoch: int, first: int, end: int) -> Iterator[tuple[WindowMark, Packing, int, int]]:
        """The windows of rows `first` to `end` - 1, with their plans and the part of these rows that each has."""
        if first < end:
            self._keep(epoch, first, end - 1)
        row = first
        while row < end:
            mark = self._window_of(epoch, row)
            packing = self._plan(epoch, mark.window)
            until = min(end, mark.rows_before + packing.num_rows)
            if until > row:  # else it has no rows, or had to be counted again, as in `plan`
                yield mark, packing, row, until
            row = until

    def plan_next(self, epoch: int, row: int) -> None:
        """Plan the window after that of `row`, so that later calls do not wait for it. Blocks."""
        known_epoch, first, end = self._next_is_planned
        if epoch == known_epoch and first <= row < end:  # as after nearly every block
            return
        mark = self._window_of(epoch, row)
        if mark.window + 1 < self.num_windows:
            self._plan(epoch, mark.window + 1)
        else:
            self._counted_to(epoch + 1, 1)
        self._next_is_planned = epoch, row, mark.rows_before + self._plan(epoch, mark.window).num_rows

    def estimate(self, epoch: int) -> int:
        """Rows of an epoch: exact once they have been counted, else by the windows planned so far, at least one."""
        with self._lock:
            before = self._counts.furthest(self._numbered(epoch)).first.rows_before
        self.count(epoch, before + 1)
        return self.count_by_now(epoch)[0]

    def count_by_now(self, epoch: int) -> tuple[int, bool]:
        """Rows of an epoch by the windows counted so far, 0 where none has been, and whether that is exact.

        Takes no lock, so it never waits, not even in a process that was forked while one was held.
        """
        counted = self._counts.by_now(self._numbered(epoch))
        if counted is None:
            return 0, False
        ends = list(counted.ends)
        known = ends[-1] if ends else counted.first.rows_before
        left = self.num_windows - counted.first.window - len(ends)
        if left <= 0 or not ends:
            return known, left <= 0
        return known + (known - counted.first.rows_before) * left // len(ends), False

    def left_out(self) -> LeftOut:
        """What long documents lose, by all their lengths; of more than two million, by those of 64 runs of them.

        Takes milliseconds.
        """
        count, most, runs = self.num_documents, _MOST_LENGTHS, _RUNS
        if not self.keeps_all:
            most, runs = _MOST_KEPT_LENGTHS, 1
        run = count if count <= most else most // runs
        firsts = [number * (count - run) // max(1, runs - 1) for number in range(1 if run == count else runs)]
        documents = tokens = looked_at = 0
        for first in firsts:
            if self.keeps_all and self._repeated is None:
                lengths = np.diff(self.offsets[first : first + run + 1])
            else:
                lengths = self._lengths(self._documents(np.arange(first, first + run), None))
            more, lost = left_out(lengths, self.seq_len, self._long_documents)
            documents, tokens, looked_at = documents + more, tokens + lost, looked_at + int(lengths.sum())
        share = tokens / looked_at if looked_at else 0.0
        if run == count:
            # A document that is truncated and rearranged loses three tokens more, in some passes.
            is_exact = self._fim is None or self._long_documents != "truncate"
            return LeftOut(documents, tokens, share, is_exact)
        total = looked_at * count // run if not self.keeps_all else self.num_tokens
        return LeftOut(documents * count // (runs * run), round(share * total), share, False)

    def plan_bytes(self) -> int:
        """Bytes of the plans that are kept: of six windows, or of more where a step spans more."""
        with self._lock:
            return sum(packing.nbytes for packing in self._plans.values())

    def report(
        self, epoch: int, advance: Callable[[int], None] | None = None, step_shape: tuple[int, int] | None = None
    ) -> PlanReport:
        """Plan a whole epoch and sum it up. Blocks only this thread; `advance(1)` is called after each window.

        step_shape: ranks, and rows of each in a step, where rows are balanced
        """
        rows = places = pieces_tokens = 0
        steps = None if step_shape is None or self.balance is None else BalanceReport(self.balance, *step_shape)
        counts = PackingCounts(0, 0, 0, 0)
        for window in range(self.num_windows):
            packing = self._kept_plan(self._numbered(epoch), window) or self._make_plan(epoch, window)
            with self._lock:
                self._counts.note(self._numbered(epoch), window, packing.num_rows)
            if steps is not None and packing.num_rows:
                random = permute(np.arange(packing.num_rows), packing.num_rows, self._key("window", epoch, window))
                steps.add(
                    packing,
                    self._rows_at(np.arange(packing.num_rows), packing.num_rows, epoch, WindowMark(window, rows)),
                    random,
                )
            rows += packing.num_rows
            places += self._places(packing, epoch, window)
            pieces_tokens += int(packing.piece_lengths.sum())
            counts = PackingCounts(*(a + b for a, b in zip(counts, packing.counts, strict=True)))
            if advance is not None:
                advance(1)
        return PlanReport(
            epoch=epoch,
            documents=self.num_documents,
            tokens=pieces_tokens + counts.dropped_tokens,
            rows=rows,
            padding_tokens=places - pieces_tokens,
            fill=pieces_tokens / places if places else 0.0,
            removed_documents=self.removed_documents,
            extra_copies=self.extra_copies,
            **({} if steps is None else steps.figures()),
            **counts._asdict(),
        )

    def _complete(self, counted: WindowCount) -> bool:
        return counted.next_window >= self.num_windows

    def _numbered(self, epoch: int) -> int:
        """The number that an epoch's plan is known by: without a shuffle all are one, unless rows grow or change."""
        draws_anew = self._fim is not None and not self._fim.repeats
        return epoch if self._shuffle or self.lengths is not None or draws_anew else 0

    def _pass_of(self, begins: PassBegins, row: int) -> PassBegin:
        """The pass that holds the source's row `row`, not before the first of `begins`. Counts passes up to it."""
        while True:
            begin, is_settled = begins.of(row)
            place = row - begin.rows_before
            if is_settled or self._counts.known(self._numbered(begin.number), place + 1) is not None:
                return begin
            rows = self.count(begin.number, place + 1)
            if place < rows:
                return begin
            if rows == 0:
                raise self._no_rows()
            with self._lock:
                begins.note(PassBegin(begin.number + 1, begin.rows_before + rows))

    def _first_rows(self) -> tuple[int, int, int]:
        """Documents, rows and tokens in rows of the first windows of pass 0 that have rows; mostly of window 0."""
        for window in range(self.num_windows):
            packing = self._plan(0, window)
            if packing.num_rows:
                documents = min((window + 1) * self._window_documents, self.num_documents)
                return documents, packing.num_rows, int(packing.piece_lengths.sum())
        raise self._no_rows()

    def _no_rows(self) -> ConfigError:
        return ConfigError(
            f"none of the {self.num_documents:,} documents makes a row of seq_len = {self.seq_len} "
            f'(long_documents = "{self._long_documents}"): they are empty or dropped; use more documents, '
            'a longer seq_len or long_documents = "split"'
        )

    def _counted_to(self, epoch: int, row: int) -> WindowCount:
        """A count of an epoch in which the rows before `row` have been counted, as far as it has that many."""
        while True:
            with self._lock:
                counted = self._counts.furthest(self._numbered(epoch), row)
                if row <= counted.known or self._complete(counted):
                    return counted
                window = counted.next_window
            self._plan(epoch, window)

    def _window_of(self, epoch: int, row: int) -> WindowMark:
        """The window that holds `row`, if it has been counted and is still kept; else the window to plan next."""
        counted = self._counted_to(epoch, row)
        return counted.mark(bisect_right(counted.ends, row))

    def _plan(self, epoch: int, window: int) -> Packing:
        """The rows that the documents of a window make; `piece_documents` are documents of the split."""
        epoch = self._numbered(epoch)
        counts = self._counts  # what is planned here counts there, also if `set_lengths` begins others meanwhile
        packing = self._kept_plan(epoch, window)
        if packing is None:
            with self._planning:
                packing = self._kept_plan(epoch, window)
                if packing is None:
                    if self._shared is None:
                        packing = self._make_plan(epoch, window)
                    else:
                        packing = self._shared(epoch, window, partial(self._make_plan, epoch), self.num_windows)
                    with self._lock:
                        self._plans[epoch, window] = packing
                        while len(self._plans) > self._windows_kept:
                            self._plans.popitem(last=False)
        with self._lock:
            counts.note(epoch, window, packing.num_rows)
        return packing

    def _keep(self, epoch: int, first: int, last: int) -> None:
        """Keep the plans of as many windows as these rows span: else all would be planned again for the next ones."""
        windows = self._window_of(epoch, last).window - self._window_of(epoch, first).window + 1
        self._windows_kept = max(self._windows_kept, windows + 2)  # other ranks may have rows in one more

    def _kept_plan(self, epoch: int, window: int) -> Packing | None:
        with self._lock:
            packing = self._plans.get((epoch, window))
            if packing is not None:
                self._plans.move_to_end((epoch, window))
            return packing

    def _make_plan(self, epoch: int, window: int) -> Packing:
        begin = window * self._window_documents
        documents = np.arange(begin, min(begin + self._window_documents, self.num_documents))
        documents = self._documents(documents, self.key(epoch))
        packing = self._ordered(self._pack(documents, epoch, window), epoch, window)
        whose = narrow(documents, len(self.offsets) - 1)[packing.piece_documents]
        return packing._replace(piece_documents=whose)

    def _lengths(self, documents: Int64Array) -> Int64Array:
        return self.offsets[documents + 1] - self.offsets[documents]

    def _row_len(self, epoch: int, window: int) -> int:
        return self.seq_len if self.lengths is None else self.lengths.of(epoch, window)

    def _pack(self, documents: Int64Array, epoch: int, window: int) -> Packing:
        lengths, seq_len = self._lengths(documents), self._row_len(epoch, window)
        if self._fim is not None:
            fim, key = self._fim_of(self._fim, epoch, window)
            pieces = pieces_with_sentinels(fim, key, documents, lengths, seq_len, self._long_documents)
            if self._mode == "pack":
                return pack_pieces(pieces, seq_len)
        elif self._mode == "pack":
            return pack(lengths, seq_len, self._long_documents)
        else:
            pieces = rows_of_documents(lengths, seq_len, self._long_documents)
        rows = len(pieces.piece_documents)
        return Packing(narrow(np.arange(rows + 1), rows), *pieces)

    def _rearranged(self, fim: FillInMiddle, packing: Packing, at: Int64Array, epoch: int, window: int) -> FimPieces:
        """How some pieces of a window come about."""
        documents = packing.piece_documents[at].astype(np.int64)
        begins, lengths = packing.piece_begins[at].astype(np.int64), packing.piece_lengths[at].astype(np.int64)
        offsets = self.offsets[documents], self.offsets[documents + 1]
        fim, key = self._fim_of(fim, epoch, window)
        return fim.pieces(key, documents, begins, lengths, offsets, self._row_len(epoch, window))

    def _fim_of(self, fim: FillInMiddle, epoch: int, window: int) -> tuple[FillInMiddle, int]:
        """What is rearranged in a window, and the key of its draws."""
        return fim.at(self._tokens_before(epoch, window)), self._key("fim", 0 if fim.repeats else epoch)

    def _rows_at(self, places: Int64Array, num_rows: int, epoch: int, mark: WindowMark) -> Int64Array:
        """The rows of the plan of a window at places of it."""
        if self.balance is not None:
            return rows_at(places, num_rows, mark.rows_before, self._key("balance", epoch, mark.window, "runs"))
        is_ordered = self.buckets is not None or not self._shuffle
        return places if is_ordered else permute(places, num_rows, self._key("window", epoch, mark.window))

    def _ordered(self, packing: Packing, epoch: int, window: int) -> Packing:
        """With buckets, the rows in the order of the epoch; else `_rows_at` puts them in that."""
        if self.balance is not None:
            return self.balance.by_cost(packing, partial(self._key, "balance", epoch, window))
        if self.token_batches is not None:
            return self.token_batches.cut(packing, self._key("batches", epoch, window) if self._shuffle else None)
        if self.buckets is None or not self._shuffle:
            return packing
        order = self.buckets.order(packing.piece_lengths, partial(self._key, "bucket", epoch, window))
        return packing.chosen(packing.row_offsets, order)

    def _places(self, packing: Packing, epoch: int, window: int) -> int:
        """Positions in the rows of a window, each as wide as it has to be."""
        if self.lengths is not None:
            return packing.num_rows * self.lengths.of(epoch, window)
        if self.token_batches is not None:
            return self.token_batches.padded_tokens(packing)
        if self.buckets is None:
            return packing.num_rows * self.seq_len
        return int(self.buckets.widths(packing.piece_lengths).sum())

    def _key(self, *what: object) -> int:
        return order_key(self._seed, *self._names, *what)
