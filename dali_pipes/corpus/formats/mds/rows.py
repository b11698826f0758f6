"""The columns next to the ids of an MDS shard: padding, masks, and documents within a sample (see `row_columns`)."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes import fields
from dali_pipes.corpus.columns.row_columns import (
    LEARNED,
    Cells,
    Place,
    check_numbering,
    find_kept,
    find_learned,
    read_rows,
)
from dali_pipes.corpus.columns.row_facts import RowFacts
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.columns.token_columns import NAMES, names_beside
from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.corpus.formats.mds.columns import encodings_of
from dali_pipes.corpus.formats.mds.samples import Content
from dali_pipes.corpus.formats.mds.shards import Shard, as_type, find_shard, read_cells, read_content
from dali_pipes.corpus.formats.shard_index import Entry
from dali_pipes.uris import FilePath

_OF_A_SAMPLE = ("int", "str")  # encodings with one value for a sample, not for its ids
_MASK_TYPE = np.dtype(np.uint8)


def columns_beside(entry: Entry, tokens: str, *, use_masks: bool) -> tuple[str, ...]:
    """The columns of a shard that describe its ids, in the order of `fields`."""
    encodings = encodings_of(entry)
    return tuple(
        name
        for name in names_beside(tokens, encodings)[0]
        if (use_masks or name not in LEARNED)
        and not (encodings[name] in _OF_A_SAMPLE and name in (fields.LABELS, fields.LENGTHS, fields.ENDS))
    )


def unused_columns(entry: Entry, tokens: str) -> tuple[str, ...]:
    """The columns of arrays whose meaning is unknown."""
    arrays = [name for name, encoding in encodings_of(entry).items() if str(encoding).split(":")[0] == "ndarray"]
    return (*fields.unused_columns(arrays, (tokens, *NAMES)), *names_beside(tokens, arrays)[1])


@dataclass(frozen=True)
class ShardRows:
    """The samples of one shard with the columns next to their ids, each as a `Shard`."""

    tokens: Shard
    beside: Mapping[str, Shard]

    @classmethod
    def find(
        cls, entry: Entry, folder: FilePath, tokens: Shard, names: Sequence[str], id_type: np.dtype[Any] | None
    ) -> "ShardRows":
        """Columns of `bytes` are masks of a byte each, or of the type of the ids. Raises as `find_shard`."""
        types = {name: _MASK_TYPE if name in fields.MASKS else id_type for name in names}
        return cls(tokens, {name: find_shard(entry, folder, name, types[name]) for name in names})

    def measure(self) -> RowFacts:
        """The facts of the samples, after all checks. Reads all of the shard; blocks."""
        content = read_content(self.tokens)
        ids = read_cells(self.tokens, content)
        rows = read_rows(ids, self._cells(content, tuple(self.beside)), self._place())
        check_numbering(rows.numbering, self._place())
        return RowFacts.of(rows)

    def decode(self, padding: Sequence[str], stored: np.dtype[Any], chunk: int) -> npt.NDArray[Any]:
        """All ids that are not padding, (n,) of `stored`. Blocks."""
        assert chunk == 0
        content = read_content(self.tokens)
        kept = find_kept(self._cells(content, padding), self._place())
        ids = as_type(read_cells(self.tokens, content).values, stored)
        return ids if kept is None else ids[kept]

    def decode_mask(self, masks: Sequence[str], padding: Sequence[str], chunk: int) -> npt.NDArray[np.uint8]:
        """For each of these ids 1 if it is learned, else 0. Blocks."""
        assert chunk == 0
        content = read_content(self.tokens)
        kept = find_kept(self._cells(content, padding), self._place())
        learned = find_learned(self._cells(content, masks), kept, self._place())
        assert learned is not None
        return learned.view(np.uint8)

    def _cells(self, content: Content, names: Sequence[str]) -> dict[str, Cells]:
        return {name: read_cells(self.beside[name], content) for name in names}

    def _place(self) -> Place:
        return Place(self.tokens.path, 0, self.tokens.column.name, "sample")


def find_facts(
    rows: Sequence[ShardRows], scans: ColumnScans, keep: Callable[[Callable[[Int64Array], bool], Any], Int64Array]
) -> list[RowFacts]:
    """The facts of each shard, kept or measured. Blocks. keep: as `offset_cache.find_or_make`."""

    def scan() -> Int64Array:
        facts = scans.for_chunks(lambda at: rows[at].measure(), [one.tokens.raw_bytes for one in rows])
        parts = [one.pack() for one in facts]
        return np.concatenate([np.array([len(part) for part in parts], np.int64), *parts])

    return _unpack(keep(lambda kept: _are_facts(kept, len(rows)), scan), len(rows))


def _unpack(packed: Int64Array, count: int) -> list[RowFacts]:
    borders = np.cumsum([count, *packed[:count].tolist()]).tolist()
    return [RowFacts.unpack(packed[begin:end], 1) for begin, end in itertools.pairwise(borders)]


def _are_facts(packed: Int64Array, count: int) -> bool:
    if len(packed) < count or packed[:count].min(initial=4) < 4 or packed[:count].sum() + count != len(packed):
        return False
    borders = np.cumsum([count, *packed[:count].tolist()]).tolist()
    return all(RowFacts.may_be_packed(packed[begin:end], 1) for begin, end in itertools.pairwise(borders))
