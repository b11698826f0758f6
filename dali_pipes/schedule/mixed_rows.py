"""The interleave of a mixture: rows of several sources, each in its own order, by `MixtureOrder`.

    place of the run     0     1     2     3     4   ...      place of an epoch + the places of the epochs before it
    source, count      web 0 code 0 web 1  web 2 code 1       `MixtureOrder`
    pass, place          0,7   0,2   0,1   0,9   0,0          the source's own order (`RowSource.at`, `plan`)
    position             7168  ...                            in the corpora joined end to end (`corpus.joined`)

An epoch is one `for`: `total` places, whatever the ranks are, and the next one goes on where it ended.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import Pieces, chosen_rows, numbers_of
from dali_pipes.errors import ConfigError
from dali_pipes.objectives.fim import FimPieces, as_they_are
from dali_pipes.rows.base import PADDING, KeyedRange, Parts, Reads, Rows, RowSource
from dali_pipes.rows.grouping import divided, in_groups
from dali_pipes.rows.item_order import numbers_each
from dali_pipes.rows.packing import LeftOut
from dali_pipes.rows.token_batches import TokenBatches
from dali_pipes.rows.window_counts import WindowMark
from dali_pipes.schedule.mixture import MIXTURE_ORDER_NAME, STRATUM, MixtureOrder

Int64Array = npt.NDArray[np.int64]

_MOST_PASSES_NAMED = 4
"""Passes of a source in one epoch up to which an error names every step that reads a token."""


class MixedRows:
    """An `Interleave` of several sources, whose rows lie in the positions of the joined corpora. Thread-safe.

    names, sources: in the order of the configuration. The order may know more names: of sources that earlier parts of a
                    resumed run used, and that are not configured any more
    bases:          (S + 1,), position of each source's first token in the joined corpora
    total:          places of an epoch
    caps:           rows that each source may give in the run
    given:          the stages of the configuration: first place, and weights in rows
    keeps_caps:     whether an epoch that needs more rows than the caps allow is an error; else the order ends before
    """

    token_batches: TokenBatches | None = None

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[RowSource],
        bases: Int64Array,
        order: MixtureOrder,
        total: int,
        caps: Mapping[str, int],
        given: Sequence[tuple[int, Mapping[str, Fraction]]],
        *,
        keeps_caps: bool = False,
    ) -> None:
        self.names, self.sources, self.bases = tuple(names), tuple(sources), bases
        self.order, self.total, self.caps, self.given = order, total, dict(caps), tuple(given)
        first = self.sources[0]
        self.seq_len = self.stride = first.seq_len
        self.row_tokens = max(source.row_tokens for source in self.sources)
        self.lookback = max(source.lookback for source in self.sources)
        self.num_tokens = sum(source.num_tokens for source in self.sources)
        self.first_token, self.span = 0, int(bases[-1])
        self.in_pieces = first.in_pieces
        self.rearranges = any(source.rearranges for source in self.sources)
        assert all(source.in_pieces == self.in_pieces for source in self.sources), "rows of pieces beside others"
        self.order_name = f"{MIXTURE_ORDER_NAME}, {first.order_name}"
        planned = [source.most_planned for source in self.sources if source.most_planned is not None]
        self.most_planned = min(planned, default=None)
        self._by_formula = not self.in_pieces and first.formula(0) is not None
        assert self.in_pieces or all((source.formula(0) is not None) == self._by_formula for source in self.sources)
        self._pass_rows = np.array([source.count(0) if self._by_formula else 0 for source in sources])
        """(S,): rows of a pass of each source whose passes are formulas."""
        self._formula = lru_cache(4 * len(sources))(partial(_formula, self.sources))
        self._epoch, self._first = 0, 0  # an epoch and its first place: later ones follow it
        self._keeps_caps = keeps_caps
        self._checked: tuple[int, MixtureOrder] | None = None  # up to where, in which order

    @property
    def is_uniform(self) -> bool:
        return self.order.end is None

    def first_place(self, epoch: int) -> int:
        """The place of the run at which an epoch begins: for epochs after the end of the order, that end."""
        first = self._first + (epoch - self._epoch) * self.total
        if epoch < self._epoch and self._first != self._epoch * self.total:
            raise ConfigError(
                f"epoch {epoch:,} cannot be located: its length differs from that of epochs from {self._epoch:,} on"
            )
        return first if self.order.end is None else min(first, self.order.end)

    @property
    def known_epoch(self) -> int:
        """The epoch in which the run went on, 0 in a new one: that one and later ones can be located."""
        return self._epoch

    def begin_at(self, epoch: int, first_place: int) -> None:
        """Let an epoch begin at a place: where a run goes on whose earlier epochs had another length."""
        self._epoch, self._first = epoch, first_place

    @property
    def run(self) -> tuple[MixtureOrder, int, int]:
        """Where the run stands: the order, an epoch, and the first place of it."""
        return self.order, self._epoch, self._first

    @run.setter
    def run(self, run: tuple[MixtureOrder, int, int]) -> None:
        self.order, self._epoch, self._first = run

    def count(self, epoch: int, at_least: int | None = None) -> int:
        """Rows of an epoch: the total, or fewer where the order ends within it, because sources are exhausted.

        Epochs after the end have the total, so that their first row raises what `plan` says.
        """
        if self.order.end is None:
            return self.total
        left = self.order.end - self.first_place(epoch)
        return min(self.total, left) if left else self.total

    def count_by_now(self, epoch: int) -> tuple[int, bool]:
        return self.count(epoch), True

    def is_counted(self, epoch: int) -> bool:
        return True

    def estimate(self, epoch: int) -> int:
        return self.count(epoch)

    def left_out(self) -> LeftOut | None:
        """The sum over the sources."""
        parts = [part for source in self.sources if (part := source.left_out()) is not None]
        tokens = sum(part.tokens for part in parts)
        if not tokens:
            return None
        share = tokens / self.num_tokens
        return LeftOut(sum(part.documents for part in parts), tokens, share, all(part.is_exact for part in parts))

    def plan(self, epoch: int, places: Int64Array, parts: Parts | None = None) -> Rows:
        """A padding row shows the first tokens of the joined corpora, without pieces where rows are cut into those."""
        self._check_epoch(epoch)
        num_real = int(np.count_nonzero(places != PADDING))
        places_of_run = places[:num_real] + self.first_place(epoch)
        if self.order.end is not None and num_real and int(places_of_run.max()) >= self.order.end:
            names = ", ".join(sorted(repr(source.name) for source in self.order.exhausted))
            raise ConfigError(
                f"mixture: the run ends after {self.order.end:,} rows, in or before epoch {epoch:,}, because {names} "
                "reached max_epochs; raise max_epochs, or stop training"
            )
        numbers, counts = self.order.rows(places_of_run)
        self._source(int(numbers.max(initial=0)))
        sources = np.full(len(places), PADDING)
        sources[:num_real] = numbers
        passes = np.zeros(len(places), np.int64)
        if not self._by_formula:
            starts, pieces, fim = self._planned(len(places), numbers, counts, parts, passes)
            return Rows(starts, pieces, sources, passes, fim)
        passes[:num_real] = counts // self._pass_rows[numbers]
        starts = np.zeros(len(places), np.int64)
        if num_real:
            starts[:num_real] = self._starts_by_formula(numbers, counts)
            if parts is not None:
                starts[:num_real] += parts.numbers[:num_real] * parts.seq_len
        return Rows(starts, None, sources, passes)

    def _planned(
        self, num_rows: int, numbers: Int64Array, counts: Int64Array, parts: Parts | None, all_passes: Int64Array
    ) -> tuple[Int64Array, Pieces | None, FimPieces | None]:
        """First tokens and pieces of rows of sources whose passes have to be planned, and of padding after them.

        all_passes: (num_rows,), is filled with the pass of each row
        """
        starts = np.full(num_rows, -1 if self.in_pieces else 0)
        pieces_of: list[tuple[Int64Array, Pieces, FimPieces | None]] = []
        for number, whose in _groups(numbers):
            rows, base = self._source(number), int(self.bases[number])
            passes, own_places = rows.at(counts[whose])
            all_passes[whose] = passes
            for pass_number, same in _groups(passes):
                rising = same[np.argsort(own_places[same], kind="stable")]
                at = whose[rising]
                of_rows = None if parts is None else parts._replace(numbers=parts.numbers[at])
                planned = rows.plan(pass_number, own_places[rising], of_rows)
                starts[at], pieces = planned.starts + base, planned.pieces
                if pieces is not None:
                    fim = None if planned.fim is None else planned.fim.moved_by(base)
                    pieces_of.append((at, _moved(pieces, base), fim))
        return starts, *(_merged(num_rows, pieces_of, self.lookback > 0) if self.in_pieces else (None, None))

    def _starts_by_formula(self, sources: Int64Array, counts: Int64Array) -> Int64Array:
        """First tokens of rows, at least one, of sources whose passes are formulas. All are permuted together."""
        order, firsts, sizes = in_groups(sources)
        groups, own = sources[order[firsts]], counts[order]
        rows_of_pass = self._pass_rows[groups]
        passes = np.minimum.reduceat(own, firsts) // rows_of_pass
        places = own - (passes * rows_of_pass).repeat(sizes)
        if (np.maximum.reduceat(places, firsts) >= rows_of_pass).any():
            later, places = np.divmod(places, rows_of_pass.repeat(sizes))
            later += passes.repeat(sizes)
            again, whose, sizes = divided(sizes, later)
            assert again is not None, "several passes of a source"
            order, places, groups = order[again], places[again], groups[whose]
            passes = later[again[np.cumsum(sizes) - sizes]]
        formulas = list(map(self._formula, groups.tolist(), passes.tolist()))
        numbers = numbers_each(
            [formula.order for formula in formulas], [formula.key for formula in formulas], sizes, places
        )
        strides = np.array([formula.stride for formula in formulas], np.int64)
        begins = np.array([formula.first for formula in formulas], np.int64) + self.bases[groups]
        starts = np.empty_like(counts)
        starts[order] = numbers * strides.repeat(sizes) + begins.repeat(sizes)
        return starts

    def plan_next(self, epoch: int, place: int) -> None:
        """Plan what each source needs after the rows of the next places, so that later calls do not wait. May block."""
        if self.most_planned is None:
            return
        # No further than the epoch: of a small source, as many rows would be hundreds of passes.
        ahead = self.first_place(epoch) + min(place + self.most_planned, self.count(epoch))
        for number, count in enumerate(self.order.counts_before(ahead).tolist()):
            source = self.sources[number] if number < len(self.sources) else None
            if source is not None and source.most_planned is not None and count:
                passes, own_places = source.at(np.array([count - 1]))
                source.plan_next(int(passes[0]), int(own_places[0]))

    def formula(self, epoch: int) -> KeyedRange | None:
        """None: a mixture is not one keyed range."""
        return None

    def widths(self, epoch: int, first: int, end: int, step_rows: int) -> Int64Array | None:
        return None

    def places_of(self, epoch: int, position: int) -> list[int] | None:
        """Places of an epoch whose rows read a position of the joined corpora; None: too many to be named."""
        number = int(np.searchsorted(self.bases, position, side="right")) - 1
        source, first = self._source(number), self.first_place(epoch)
        begin, end = (int(self.order.counts_before(at)[number]) for at in (first, first + self.count(epoch)))
        if begin == end:
            return []
        passes, _ = source.at(np.array([begin, end - 1]))
        if not source.is_uniform or int(passes[1] - passes[0]) >= _MOST_PASSES_NAMED:
            return [] if int(passes[0]) == int(passes[1]) else None
        places = []
        for pass_number in range(int(passes[0]), int(passes[1]) + 1):
            of_pass = source.places_of(pass_number, position - int(self.bases[number]))
            if of_pass is None:
                return None
            for own_place in of_pass:
                count = pass_number * source.count(pass_number) + own_place
                place = self.order.place_of(number, count) if begin <= count < end else None
                if place is not None:
                    places.append(place - first)
        return places

    def reads(self, rows: Rows, begins: Int64Array, sizes: Int64Array) -> Reads:
        """What each source reads for its rows, by targets rising."""
        if not self.in_pieces:
            return Reads(rows.starts, sizes, begins)
        assert rows.pieces is not None
        assert rows.sources is not None
        parts = []
        for number, whose in _groups(rows.sources):
            if number == PADDING:
                continue
            base = int(self.bases[number])
            fim = rows.fim
            if fim is not None:
                fim = fim.chosen(numbers_of(rows.pieces.row_offsets, whose)[1]).moved_by(-base)
            own = Rows(rows.starts[whose] - base, _moved(chosen_rows(rows.pieces, whose), -base), fim=fim)
            starts, lengths, targets = self._source(number).reads(own, begins[whose], sizes[whose])
            parts.append((starts + base * (starts >= 0), lengths, targets))
        empty = np.zeros(0, np.int64)
        starts, lengths, targets = (
            [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [empty, empty, empty]
        )
        rising = np.argsort(targets, kind="stable")
        return Reads(starts[rising], lengths[rising], targets[rising])

    def mark(self, epoch: int, place: int) -> WindowMark | None:
        """None: `marks` says where each source stands."""
        return None

    def seek(self, epoch: int, place: int, mark: WindowMark) -> bool:
        return False

    def place(self, epoch: int, rows: int) -> int:
        """The place of the run after the first `rows` rows of an epoch."""
        return self.first_place(epoch) + rows

    def marks(self, place: int) -> dict[str, list[int]]:
        """For each source the rows used before a place, and its own mark of the next one."""
        counts = self.order.counts_before(place).tolist()
        marks = {name: [count] for name, count in zip(self.order.names, counts, strict=True)}
        for name, source in zip(self.names, self.sources, strict=True):
            marks[name] += source.mark_count(marks[name][0])
        return marks

    def seek_marks(self, marks: Mapping[str, Sequence[int]]) -> str | None:
        """Let every source go on from its mark. The name of the first whose mark cannot be right, else None."""
        for name, source in zip(self.names, self.sources, strict=True):
            if name in marks and not source.seek_count(marks[name][0], marks[name][1:]):
                return name
        return None

    def check_caps(self, end: int, order: MixtureOrder | None = None) -> None:
        """Raise `ConfigError` if a source gives more rows than its cap before the place `end`, unless they may end.

        order: another one to be tried. The message says which passes, total or weight would fit.
        """
        if not self._keeps_caps:
            return
        order = self.order if order is None else order
        counts = order.counts_before(end).tolist()
        for number, name in enumerate(self.names):
            cap = self.caps.get(name)
            if cap is None or counts[number] <= cap:
                continue
            source = self.sources[number]
            about = "" if source.is_uniform else "about "
            over = order.places_for(number, cap + 1)
            assert over is not None, "a source that exceeds its cap reaches it"
            fits = over - 1
            needed = Fraction(counts[number], source.rows_of_pass())
            weight = order.weights_at(fits)[name]
            shorter = f"total_tokens = {fits * self.seq_len} or less" if end == self.total else "fewer epochs"
            raise ConfigError(
                f"mixture.{name}: max_epochs = {float(cap / source.rows_of_pass()):g} ({about}{cap:,} rows) is used up "
                f"after {fits * self.seq_len:,} of {end * self.seq_len:,} tokens, at {float(weight):.2%} of the rows. "
                f"Set max_epochs = {math.ceil(100 * needed) / 100:g} or more, {shorter}, a smaller weight (about "
                f'{float(weight * cap / counts[number]):.2%} of the rows), or on_exhausted = "drop" or "stop"'
            )

    def _check_epoch(self, epoch: int) -> None:
        """Before the first batch of an epoch, also after other weights came: `check_caps` up to its end."""
        end = self.first_place(epoch) + self.total
        order = self.order
        if self._checked != (end, order):
            self.check_caps(end, order)
            self._checked = end, order

    def set_order(self, order: MixtureOrder) -> None:
        """Take rows from another order from now on; plans made before have to be dropped."""
        self.order = order

    def next_stratum(self, place: int) -> int:
        """The first place, at or after `place`, from which weights can change."""
        return -(-place // STRATUM) * STRATUM

    def _source(self, number: int) -> RowSource:
        if number >= len(self.sources):
            raise ConfigError(
                f"source {self.order.names[number]!r} gave rows to an earlier part of this run, but is no longer in "
                "the mixture; add it with weight 0 to locate those rows"
            )
        return self.sources[number]


def _formula(sources: Sequence[RowSource], number: int, pass_number: int) -> KeyedRange:
    formula = sources[number].formula(pass_number)
    assert formula is not None, "a pass that is not a formula"
    return formula


def _groups(values: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """Each distinct value, and where it stands."""
    if not len(values):  # rows of padding alone
        return
    order, firsts, sizes = in_groups(values - values.min())
    for first, size in zip(firsts.tolist(), sizes.tolist(), strict=True):
        yield int(values[order[first]]), order[first : first + size]


def _moved(pieces: Pieces, base: int) -> Pieces:
    return pieces._replace(starts=pieces.starts + base, document_ends=pieces.document_ends + base)


def _merged(
    num_rows: int, parts: Sequence[tuple[Int64Array, Pieces, FimPieces | None]], looks_back: bool
) -> tuple[Pieces, FimPieces | None]:
    """The pieces of rows that were planned in parts: for each part, which rows it has, and their pieces."""
    counts = np.zeros(num_rows, np.int64)
    for at, pieces, _ in parts:
        counts[at] = np.diff(pieces.row_offsets)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    columns = [np.empty(int(offsets[-1]), np.int64) for _ in range(3)]
    lookback = np.empty((len(columns[0]), 3), np.int64) if looks_back else None
    merged = as_they_are(*columns[:2]) if any(fim is not None for _, _, fim in parts) else None
    for at, pieces, fim in parts:
        sizes = np.diff(pieces.row_offsets)
        targets = np.repeat(offsets[at] - pieces.row_offsets[:-1], sizes) + np.arange(len(pieces.starts))
        for column, values in zip(columns, pieces[1:4], strict=True):
            column[targets] = values
        if lookback is not None:
            assert pieces.lookback is not None, "sources that look back beside others"
            lookback[targets] = pieces.lookback
        if merged is not None:
            fim = as_they_are(pieces.starts, pieces.lengths) if fim is None else fim
            for whole, part in zip(merged, fim, strict=True):
                whole[targets] = part
    return Pieces(offsets, *columns)._replace(lookback=lookback), merged
