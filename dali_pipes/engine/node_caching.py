"""The cache of the node for a loader: which of its corpora use it, telling other processes when they need what, and
fetching the blocks of a window before it begins.

steps of a block  ─▶  places of each source  ─▶  when they have moved on a little:  `next_use.published`
                                                                                    `next_use.needed_next`
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.next_use import NextUseFormula, Standing, needed_next, published
from dali_pipes.runtime.ranks import environment_number
from dali_pipes.schedule import Position, Schedule, StepRange
from dali_pipes.storage.eviction import Order

if TYPE_CHECKING:
    from dali_pipes.schedule.mixed_rows import MixedRows
    from dali_pipes.storage.node_cache import NodeCache

SHARED_MEMORY = Path("/dev/shm")
_UPDATES = 16
"""Times in a window of blocks that others are told how far a run is."""
_BLOCKS_BACK = 8
"""Blocks of batches, planned ahead by several threads, of which the first says how far a run is."""
_LEAST_WEIGHT = 1e-9
"""For a source that is not used for now."""


class NodeCaching:
    """The cache of one loader. Safe for several threads.

    Made before the rows, so that decoded chunks are shared from the start; `begin` has the rows.
    """

    def __init__(self, config: LoaderConfig, corpora: Mapping[str, Corpus]) -> None:
        self._config, self._corpora = config, corpora
        self._formula = NextUseFormula()
        self.cache = _open(config, any(corpus.needs_decoding for corpus in corpora.values()), self._formula)
        self._keeps_blocks = config.cache_dir is not None and config.order == "blocks"
        self._repeats = config.repeat or config.mixture is not None
        self._sharers = environment_number("LOCAL_WORLD_SIZE") or config.world_size or 1
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        for corpus in corpora.values():
            if self.cache is not None and corpus.needs_decoding:
                corpus.share_decoded(self.cache)

    @property
    def unused(self) -> str | None:
        """Says that `cache = "node"` keeps nothing in this run; None if it does, or is not set."""
        if self.cache is not None or self._config.cache != "node":
            return None
        blocks = self._config.order == "blocks"
        return (
            'cache = "node" shares decoded tokens, but the files of this corpus need no decoding: remove it'
            + ", or set cache_dir to keep blocks of the files on this machine" * blocks
        )

    @property
    def reads_together(self) -> bool:
        """Whether corpora that need no decoding are read without this cache."""
        return not self._keeps_blocks

    def begin(self, schedule: Schedule, rows: "RowSource | MixedRows") -> None:
        """Read blocks through the cache from now on, and tell others of the order. Blocks for small writes."""
        if self.cache is None:
            return
        from dali_pipes.schedule.mixed_rows import MixedRows  # with the first cache, which alone needs it

        self._schedule = schedule
        self._mixture = rows if isinstance(rows, MixedRows) else None
        weights: Mapping[str, Fraction] = {}
        sources: Mapping[str, RowSource] = {}
        if isinstance(rows, MixedRows):
            weights, sources = rows.given[0][1], dict(zip(rows.names, rows.sources, strict=True))  # those at the start
        else:
            sources = {"": rows}
        for name, source in sources.items():
            corpus, grid = self._corpora[name], source.block_grid()
            if corpus.is_synthetic:
                continue
            if grid is not None and self._keeps_blocks and not corpus.needs_decoding:
                corpus.read_by_blocks(self.cache, grid, self._sharers)
            if corpus.needs_decoding or self._keeps_blocks:
                weight = weights.get(name, Fraction(1))
                self._sources[name] = _Source(self._formula, corpus, source, grid, weight, repeats=self._repeats)
        # When they are needed is not known yet.
        self.cache.set_orders([{"corpus": key} for one in self._sources.values() for key, _ in one.corpus.node_keys()])

    def note(self, steps: StepRange) -> None:
        """A thread plans these steps now. Blocks to write a small file now and then; may plan documents."""
        if self.cache is not None and self.cache.can_store:
            self._tell(Position(steps.epoch, steps.base + steps.first_step * self._schedule.global_rows))

    def end(self) -> None:
        """Reads do not wait for others any more. Idempotent."""
        if self.cache is not None:
            self.cache.end()

    def close(self) -> None:
        """Leave the cache, after all reads. Idempotent."""
        if self.cache is not None:
            self.cache.close()

    def _tell(self, position: Position) -> None:
        assert self.cache is not None, "there is someone to tell"
        epoch, place = position.epoch, self._schedule.places(position)
        places = dict.fromkeys(self._sources, (epoch, place))
        if self._mixture is not None:
            order = self._mixture.order
            given = order.counts_before(self._mixture.first_place(epoch) + place)
            counts = dict(zip(order.names, given.tolist(), strict=True))
            places = {name: source.place_of(counts[name]) for name, source in self._sources.items()}
        with self._lock:
            moved = [source for name, source in self._sources.items() if source.has_moved_to(*places[name])]
            orders = [order for source in moved for order in source.orders()]
        if orders:
            self.cache.set_orders(orders)
        for source in moved:
            source.fetch_ahead()


class _Source:
    """One corpus, and what was said of it last."""

    def __init__(
        self,
        formula: NextUseFormula,
        corpus: Corpus,
        rows: RowSource,
        grid: BlockGrid | None,
        weight: Fraction,
        *,
        repeats: bool,
    ) -> None:
        self.corpus, self._rows, self._grid, self._repeats = corpus, rows, grid, repeats
        self._grid_key = ""
        self._last: deque[tuple[int, int]] = deque(maxlen=_BLOCKS_BACK)
        self._told: tuple[int, int] | None = None
        if grid is None:
            return
        if grid.bounds is not None:
            self._grid_key = hashlib.sha256(grid.bounds.tobytes()).hexdigest()[:16]
            formula.grids[self._grid_key] = grid
        self._item_tokens = rows.num_tokens / max(1, rows.order.num_items) / max(float(weight), _LEAST_WEIGHT)
        assert rows.order.blocks is not None, "a grid is of blocks"
        blocks = rows.order.blocks
        self._distance = max(1, blocks.block_rows * min(blocks.window_blocks, blocks.num_blocks) // _UPDATES)

    def place_of(self, count: int) -> tuple[int, int]:
        """Pass and place of the row numbered `count`."""
        passes, places = self._rows.at(np.array([count]))
        return int(passes[0]), int(places[0])

    def has_moved_to(self, pass_number: int, place: int) -> bool:
        """Whether there is something new to say, and to fetch."""
        if self._grid is None:
            return False
        self._last.append((pass_number, self._rows.item_at(pass_number, place)))
        pass_number, item = min(self._last)
        if self._told is not None and self._told[0] == pass_number and abs(item - self._told[1]) < self._distance:
            return False
        self._told = pass_number, item
        keys = self._rows.key(pass_number), self._rows.key(pass_number + 1)
        self._now = Standing(item, keys, self._item_tokens)
        return True

    def orders(self) -> Iterator[Order]:
        """What to say now."""
        assert self._grid is not None, "only blocks have places"
        for key, has_positions in self.corpus.node_keys():
            if has_positions:
                yield published(key, self._rows.order, self._grid, self._grid_key, self._now)

    def fetch_ahead(self) -> None:
        """Let the blocks come that are needed next. Does not wait for them."""
        assert self._told is not None, "a run stands somewhere"
        # Nothing tells that another `for` follows the first one, but who has begun a second one goes on.
        goes_on = self._repeats or self._told[0] > 0
        self.corpus.fetch_ahead(needed_next(self._rows.order, self._now, goes_on=goes_on).tolist(), self)


def check_cache_folder(config: LoaderConfig) -> None:
    """Raise `ConfigError` for a `cache_dir` that is a file. A folder that cannot be written only costs the cache."""
    folder = None if config.cache_dir is None else Path(config.cache_dir).absolute()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache_dir: {folder} is a file; expected a folder, which need not exist yet")


def _open(config: LoaderConfig, needs_decoding: bool, formula: NextUseFormula) -> "NodeCache | None":
    if config.cache_dir is None and not (config.cache == "node" and needs_decoding):
        return None
    from dali_pipes.storage.node_cache import NodeCache  # with the first cache: most runs do not have one

    if config.cache_dir is not None:
        return NodeCache(Path(config.cache_dir).absolute(), config.cache_bytes, "cache_bytes", formula)
    folder = SHARED_MEMORY / f"dali_pipes-{os.getuid()}"
    return NodeCache(folder, config.decoded_cache_bytes, "decoded_cache_bytes", formula, in_memory=True)
