"""A curriculum: rows and optimizer steps that grow during a run, at places that no number of ranks decides.

Rows of every length are cut from the same ones, those of the order, which have `order_len` tokens. 64 of them are a
group, whose parts are permuted among themselves, so that neighbors do not meet in one batch:

    place of the order    0        1        2        3     ...   63        64 ...
    rows of order_len     0        1        2        3           63        64
    rows of half of it    17 92    3 120    41 8     66 25       0 81      128 + ...

So the tokens of an epoch are the same for every schedule. A change waits for the next place, counted from the one
before, that is both the end of a group and the end of an optimizer step. An epoch has whole optimizer steps.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.operators.permute import permute_each, preimage, splitmix64
from dali_pipes.rows.base import PADDING, KeyedRange, Parts, Rows, order_key
from dali_pipes.rows.item_order import SEQUENTIAL
from dali_pipes.rows.window_lengths import Lengths, WindowLengths
from dali_pipes.runtime.messages import counted
from dali_pipes.schedule.interleave import Interleave

if TYPE_CHECKING:
    from dali_pipes.rows.document_rows import DocumentRows
    from dali_pipes.rows.packing import LeftOut
    from dali_pipes.rows.token_batches import TokenBatches
    from dali_pipes.rows.window_counts import WindowMark

Int64Array = npt.NDArray[np.int64]

GROUP = 64
"""Rows of the order whose parts are permuted among themselves."""
PARTS_ORDER_NAME = f"group{GROUP}-v1"


class Segment(NamedTuple):
    """What holds from a row of an epoch on."""

    row: int
    place: int
    """Of the order: rows of it that all earlier segments have used."""
    seq_len: int
    global_batch: int


class Curriculum:
    """An `Interleave` whose rows are parts of those of another one, in whole optimizer steps. Thread-safe.

    places:      the order that rows are cut from, or, unless `cuts`, the rows themselves
    stages:      (tokens of the run, tokens of a row, rows of an optimizer step), rising, the first at 0
    cuts:        whether rows may be shorter than those of the order
    growing:     `places`, where the lengths of rows are its own
    first_place: the place of the run at which an epoch begins, where `places` has its own count of that
    """

    is_uniform = False
    token_batches: "TokenBatches | None" = None

    def __init__(
        self,
        places: Interleave,
        stages: Sequence[tuple[int, int, int]],
        *,
        cuts: bool,
        seed: int = 0,
        growing: "DocumentRows | None" = None,
        first_place: Callable[[int], int] | None = None,
    ) -> None:
        self._places, self._seed, self._first_place = places, seed, first_place
        self.growing = growing
        self.cuts, self.seq_len, self.stride, self.num_tokens = cuts, places.seq_len, places.stride, places.num_tokens
        self.most_planned, self.row_tokens = places.most_planned, places.row_tokens
        self._lookahead = self.row_tokens - self.seq_len
        self.order_name = f"{places.order_name}, {PARTS_ORDER_NAME}" if cuts else places.order_name
        self._shuffles = SEQUENTIAL not in places.order_name
        self._begins = [-(-tokens // self.seq_len) for tokens, _, _ in stages]  # places of the run
        self._values = [(seq_len, global_batch) for _, seq_len, global_batch in stages]
        self._largest_step = max(global_batch for _, _, global_batch in stages)
        self._segments: dict[int, list[Segment]] = {}
        self._befores = {0: 0}
        self.since = 0
        """The first epoch that this run knows: those before it may have had other lists."""
        of_windows = () if self.lengths is None else self.lengths.stages
        stated = json.dumps([self.order_name, self.seq_len, [list(stage) for stage in stages], of_windows])
        self.lists = hashlib.sha256(stated.encode()).hexdigest()[:8]
        """A hash of the lists."""

    @property
    def lengths(self) -> WindowLengths | None:
        """The lengths of rows by packing window, where rows grow that way."""
        return None if self.growing is None else self.growing.lengths

    def places_before(self, epoch: int) -> int:
        """Places of the run before an epoch. Counts rows of documents in all epochs before it, which may block."""
        if self._first_place is not None:
            return self._first_place(epoch)
        known = max((number for number in self._befores if number <= epoch), default=0)
        before = self._befores.get(known, 0)
        if self._places.is_uniform:
            return before + (epoch - known) * self._places.count(epoch)
        for number in range(known, epoch):
            before += self._places.count(number)
            self._befores[number + 1] = before
        return before

    def segments(self, epoch: int) -> list[Segment]:
        """What holds in an epoch, as if it did not end. May block, as `places_before`."""
        if epoch < self.since:
            raise ConfigError(
                f"epoch {epoch:,} cannot be located: the run was resumed in epoch {self.since:,} with other lists as "
                "seq_len or global_batch; use the settings of the earlier run, without the state"
            )
        if epoch not in self._segments:
            begin = Segment(0, 0, *self._wanted(self._before(epoch)))
            self._segments[epoch] = self._continued(self._before(epoch), [begin], 0)
        return self._segments[epoch]

    def check_steps(self) -> None:
        """Raise `ConfigError` for an optimizer step that is longer than the first epoch: it would never be complete."""
        for seq_len, global_batch in self._values:
            parts = self.seq_len // seq_len if self.cuts else 1
            rows = self._places.count(0, -(-global_batch // parts)) * parts
            if rows < global_batch:
                raise ConfigError(
                    f"global_batch = {global_batch:,} is more than the {counted(rows, 'row')} of an epoch; use more "
                    "data or a smaller global_batch"
                )

    def epochs_of_stages(self, total: int) -> list[int]:
        """The epochs, of `total` places each, in which stages begin or take effect."""
        return sorted({begin // total + late for begin in self._begins for late in (0, 1)})

    def segment(self, epoch: int, row: int) -> Segment:
        """What holds at a row."""
        return _at_row(self.segments(epoch), row)

    def switches(self, epoch: int) -> list[int]:
        """The rows of an epoch, rising, from which rows have another length."""
        return [segment.row for segment in self._lengths(epoch)[1:]]

    def is_step_end(self, epoch: int, rows: int) -> bool:
        """Whether the first `rows` rows of an epoch are whole optimizer steps."""
        begun = self.segment(epoch, max(rows - 1, 0))
        return (rows - begun.row) % begun.global_batch == 0

    def tokens_before(self, epoch: int, rows: int) -> int:
        """Tokens of the run, `order_len` a place, before a row. May block, as `places_before`."""
        if self.growing is not None:
            return self.growing.tokens_before(epoch, rows)
        segment = self.segment(epoch, rows)
        places = self.places_before(epoch) + segment.place
        return places * self.seq_len + (rows - segment.row) * segment.seq_len

    def places_begun(self, rows: int, segments: Sequence[Segment], end: int) -> int:
        """Places of an epoch, in whole groups, that its first `rows` rows take parts of.

        segments, end: what holds in the epoch, and its places.
        """
        segment = _at_row(segments, max(rows - 1, 0))
        groups = -(-(rows - segment.row) // self._group_rows(segment))
        places = segment.place + groups * (GROUP if self._permutes(segment) else 1)
        return min(places, end) if self._permutes(segment) else places

    def places_done(self, rows: int, segments: Sequence[Segment]) -> int:
        """Places of an epoch, in whole groups, no parts of which come after its first `rows` rows."""
        segment = _at_row(segments, max(rows - 1, 0))
        groups = (rows - segment.row) // self._group_rows(segment)
        return segment.place + groups * (GROUP if self._permutes(segment) else 1)

    def num_places(self, epoch: int) -> int:
        """Places of an epoch. May plan documents."""
        return self._places.count(epoch)

    def is_within_last_group(self, rows: int, segments: Sequence[Segment], end: int) -> bool:
        """Whether rows end inside a group that an epoch of `end` places would cut short."""
        segment = _at_row(segments, max(rows - 1, 0))
        groups, within = divmod(rows - segment.row, self._group_rows(segment))
        return within > 0 and groups == (end - segment.place) // GROUP

    def may_follow(self, segments: Sequence[Segment]) -> bool:
        """Whether segments can be those of an epoch: lengths that are cut from `order_len`, and switches in place."""
        for segment in segments:
            if not (segment.seq_len and segment.global_batch) or self.seq_len % segment.seq_len:
                return False
            if not self.cuts and segment.seq_len != self.seq_len:
                return False
        return all(
            before.place < now.place
            and (now.place - before.place) % self._places_a_switch(before) == 0
            and now.row - before.row == (now.place - before.place) * self._parts(before)
            for before, now in pairwise(segments)
        )

    @property
    def run(self) -> tuple[dict[int, list[Segment]], dict[int, int], int, dict[int, Lengths]]:
        """Where the run stands: what `go_on` and `set_lengths` of `growing` set."""
        return self._segments, self._befores, self.since, {} if self.lengths is None else self.lengths.run

    @run.setter
    def run(self, run: tuple[dict[int, list[Segment]], dict[int, int], int, dict[int, Lengths]]) -> None:
        self._segments, self._befores, self.since, lengths = run
        if self.growing is not None:
            self.growing.set_lengths(lengths)

    def go_on(self, position: tuple[int, int], before: int, segments: Sequence[Segment], since: int) -> None:
        """Continue a run that had `segments` up to a position.

        before: places of the run before the epoch. since: the first epoch that had the lists of this run.
        """
        epoch, rows = position
        self._segments = {epoch: self.continued(rows, before, segments)}
        self._befores = {epoch: before}
        self.since = since

    def continued(self, rows: int, before: int, segments: Sequence[Segment]) -> list[Segment]:
        """`segments` up to a row, as in `go_on`, and then what the stages want now, which begins as soon as it may."""
        kept = [segment for segment in segments if segment.row < rows or not segment.row]
        return self._continued(before, kept, self._place_of(kept[-1], rows))

    def count(self, epoch: int, at_least: int | None = None) -> int:
        least = None if at_least is None else at_least + self._largest_step
        return self._whole(epoch, self._places.count(epoch, least))

    def count_by_now(self, epoch: int) -> tuple[int, bool]:
        count, is_exact = self._places.count_by_now(epoch)
        return self._whole(epoch, count), is_exact

    def is_counted(self, epoch: int) -> bool:
        return self._places.is_counted(epoch)

    def estimate(self, epoch: int) -> int:
        return self._whole(epoch, self._places.estimate(epoch))

    def left_out(self) -> "LeftOut | None":
        return self._places.left_out()

    def plan(self, epoch: int, places: Int64Array, parts: Parts | None = None) -> Rows:
        """Rows of one length: blocks do not cross `switches`."""
        assert parts is None, "rows are cut once"
        if not self.cuts:
            return self._places.plan(epoch, places)
        assert PADDING not in places, "an epoch has whole steps"
        first, lengths = int(places[0]) if len(places) else 0, self._lengths(epoch)
        segment = _at_row(lengths, first)
        numbers, of_number = np.divmod(self._in_order(epoch, segment, places - segment.row), self._parts(segment))
        return self._places.plan(epoch, segment.place + numbers, Parts(of_number, segment.seq_len))

    def plan_next(self, epoch: int, place: int) -> None:
        self._places.plan_next(epoch, self._place_of(self.segment(epoch, place), place))

    def formula(self, epoch: int) -> KeyedRange | None:
        return None if self.cuts else self._places.formula(epoch)

    def widths(self, epoch: int, first: int, end: int, step_rows: int) -> Int64Array | None:
        if not self.cuts:
            return self._places.widths(epoch, first, end, step_rows)
        return np.full(-(-(end - first) // step_rows), self.segment(epoch, first).seq_len)

    def places_of(self, epoch: int, position: int) -> list[int] | None:
        places = self._places.places_of(epoch, position)
        if not self.cuts or places is None:
            return places
        rows, lengths = [], self._lengths(epoch)
        for place in places:
            segment = lengths[bisect_right(lengths, place, key=lambda segment: segment.place) - 1]
            start = int(self._places.plan(epoch, np.array([place])).starts[0])
            first = (place - segment.place) * self._parts(segment)
            for part in self._parts_reading(segment, position - start):
                rows.append(segment.row + self._in_epoch(epoch, segment, first + part))
        return [row for row in rows if row < self.count(epoch)]

    def mark(self, epoch: int, place: int) -> "WindowMark | None":
        return self._places.mark(epoch, place)

    def seek(self, epoch: int, place: int, mark: "WindowMark") -> bool:
        return self._places.seek(epoch, place, mark)

    def _lengths(self, epoch: int) -> list[Segment]:
        """The segments from which rows have another length, and the first."""
        segments = self.segments(epoch)
        return segments[:1] + [now for before, now in pairwise(segments) if before.seq_len != now.seq_len]

    def _before(self, epoch: int) -> int:
        """`places_before`, where stages depend on it."""
        return self.places_before(epoch) if len(self._begins) > 1 else 0

    def _wanted(self, place: int) -> tuple[int, int]:
        """Row length and optimizer step that the stages want at a place of the run."""
        return self._values[bisect_right(self._begins, place) - 1]

    def _continued(self, before: int, segments: list[Segment], place: int) -> list[Segment]:
        """`segments`, and those that come after a place of the epoch, which begins after `before` places of the run."""
        last = segments[-1]
        places = [place, *(begin - before for begin in self._begins if begin - before > place)]
        for wanted_at in places:
            if self._wanted(before + wanted_at) == last[2:] or wanted_at < last.place:
                continue
            step = self._places_a_switch(last)
            switch = last.place + -(-(wanted_at - last.place) // step) * step
            wanted = self._wanted(before + switch)
            if wanted != last[2:]:
                if switch == last.place:
                    segments.pop()
                last = Segment(last.row + (switch - last.place) * self._parts(last), switch, *wanted)
                segments.append(last)
        return segments

    def _places_a_switch(self, segment: Segment) -> int:
        """Places between two that are the end of an optimizer step, and of a group where rows are cut."""
        step, parts = segment.global_batch, self._parts(segment)
        return math.lcm(GROUP if self.cuts else 1, step // math.gcd(step, parts))

    def _parts(self, segment: Segment) -> int:
        return self.seq_len // segment.seq_len if self.cuts else 1

    def _permutes(self, segment: Segment) -> bool:
        return self._parts(segment) > 1

    def _group_rows(self, segment: Segment) -> int:
        return GROUP * self._parts(segment) if self._permutes(segment) else 1

    def _place_of(self, segment: Segment, row: int) -> int:
        """The first place with parts, in the order of the corpus, from a row on."""
        return segment.place + -(-(row - segment.row) // self._parts(segment))

    def _whole(self, epoch: int, places: int) -> int:
        """Rows of the whole optimizer steps that the first places of an epoch make."""
        segments = self.segments(epoch)
        segment = segments[bisect_right(segments, places, key=lambda segment: segment.place) - 1]
        rows = (places - segment.place) * self._parts(segment)
        return segment.row + rows // segment.global_batch * segment.global_batch

    def _in_order(self, epoch: int, segment: Segment, rows: Int64Array) -> Int64Array:
        """Parts of a segment, numbered in the order that they are cut in, of rows counted from its first."""
        if not (self._permutes(segment) and self._shuffles and len(rows)):
            return rows
        size = self._group_rows(segment)
        groups, within = np.divmod(rows, size)
        numbers = np.arange(int(groups.min()), int(groups.max()) + 1)
        sizes = np.minimum(size, self._parts_until_end(epoch, segment) - numbers * size)
        keys = self._keys(epoch, segment, numbers)
        return groups * size + permute_each(within, np.bincount(groups - numbers[0]), sizes, keys)

    def _in_epoch(self, epoch: int, segment: Segment, part: int) -> int:
        """The inverse of `_in_order`."""
        if not (self._permutes(segment) and self._shuffles):
            return part
        size = self._group_rows(segment)
        group, within = divmod(part, size)
        in_group = min(size, self._parts_until_end(epoch, segment) - group * size)
        return group * size + preimage(within, in_group, int(self._keys(epoch, segment, np.array([group]))[0]))

    def _parts_until_end(self, epoch: int, segment: Segment) -> int:
        """Parts from a segment to rows of another length, or to the end of the epoch."""
        later = [other.place for other in self._lengths(epoch) if other.place > segment.place]
        return (min([self.num_places(epoch), *later]) - segment.place) * self._parts(segment)

    def _keys(self, epoch: int, segment: Segment, groups: Int64Array) -> npt.NDArray[np.uint64]:
        """Of the orders of groups, which are numbered from a segment on."""
        numbers = (segment.place // GROUP + groups + 1).astype(np.uint64)
        return splitmix64(np.array(order_key("parts", self._seed, epoch), np.uint64), numbers)

    def _parts_reading(self, segment: Segment, offset: int) -> range:
        """Parts of a row of the order that read the token `offset` tokens after its first, labels included."""
        first = -(-(offset - segment.seq_len - self._lookahead + 1) // segment.seq_len)
        return range(max(0, first), min(self._parts(segment) - 1, offset // segment.seq_len) + 1)


def _at_row(segments: Sequence[Segment], row: int) -> Segment:
    return segments[bisect_right(segments, row, key=lambda segment: segment.row) - 1]
