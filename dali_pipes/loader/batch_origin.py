"""Where each row of a batch comes from, piece by piece: `locate_batch`. Reads no tokens.

a row          9 2 6 6 5 | 1 4 4          the end of document 7, then all of document 8, which is in another file
pieces         columns 0 to 4: a.bin, token 4091, document 7 from its token 120 on
               columns 5 to 7: b.bin, token 0, document 8 from its first
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.objectives import Fim
from dali_pipes.corpus import Corpus
from dali_pipes.documents import find_documents, pieces_of_windows
from dali_pipes.engine.build import BuiltSource
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.state import States
from dali_pipes.placement.base import Batches
from dali_pipes.rows.outputs import Outputs
from dali_pipes.schedule import PADDING
from dali_pipes.schedule.plans import Plan, plan_step
from dali_pipes.uris import FilePath

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PieceOrigin:
    """Consecutive tokens of one file and, where documents are known, of one document; or a sentinel, which is of none.

    A document that fill-in-the-middle rearranged is several of these.
    """

    column: int
    """Of the first token, in the row."""
    length: int
    file: FilePath | None
    """None for a sentinel, whose `offset` and `position` mean nothing."""
    offset: int
    """Of the first token, in tokens from the start of the file's data."""
    position: int
    """Of the first token, in the corpus of its source as one stream."""
    document: int | None = None
    document_offset: int | None = None
    """Of the first token, in its document."""
    document_length: int | None = None
    sentinel: str | None = None
    """"prefix", "middle" or "suffix"."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `sentinel` only of one."""
        if self.file is None:
            return {"column": self.column, "length": self.length, "sentinel": self.sentinel}
        about = {**asdict(self), "file": str(self.file)}
        del about["sentinel"]
        return about


@dataclass(frozen=True)
class RowOrigin:
    """One row of a batch. Columns without a piece are padding; a padding row has no pieces."""

    row: int
    row_id: int
    """Place in the epoch's order; -1 for a padding row."""
    pieces: tuple[PieceOrigin, ...]
    source: int | None = 0
    """Number of the source, in the order of `mixture`; 0 for the only one, None for a padding row."""
    source_name: str | None = None
    """None without a mixture."""

    @property
    def is_padding(self) -> bool:
        """Whether it only fills up the batch."""
        return self.row_id == PADDING

    @property
    def first(self) -> PieceOrigin | None:
        """The first piece that is from a file; None for a padding row."""
        return next((piece for piece in self.pieces if piece.file is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able. `file`, `offset` and `position` are those of the first token, None for a padding row.

        `source_name` only with a mixture.
        """
        first = self.first
        is_mixture = self.source_name is not None or self.source is None
        return {
            "row": self.row,
            "row_id": self.row_id,
            "is_padding": self.is_padding,
            "file": None if first is None else str(first.file),
            "offset": None if first is None else first.offset,
            "source": self.source,
            **({"source_name": self.source_name} if is_mixture else {}),
            "position": None if first is None else first.position,
            "pieces": [piece.as_dict() for piece in self.pieces],
        }


@dataclass(frozen=True)
class BatchOrigin:
    """One step of one rank."""

    epoch: int
    step: int
    rank: int
    world_size: int
    seq_len: int
    rows: tuple[RowOrigin, ...]


def _as_arrays(block: Batches, outputs: Outputs, device: int | None) -> list[Batches]:
    """A block of one batch, as arrays with the axes of a batch."""
    part = [(block.sizes[0], block.widths[0])]
    arrays = {name: outputs.unfolded(name, array.reshape(-1), part)[0] for name, array in block.arrays.items()}
    return [block._replace(arrays=arrays)]


def built_on_cpu(config: LoaderConfig) -> BuiltSource:
    """What a loader with these settings is built on, but on the CPU and one batch at a time, which does not change
    which token is where. Skipped steps are included. Raises as `TokenLoader`.
    """
    return BuiltSource(_on_cpu(config).replace(skip_steps=()), endless=True, cut=_as_arrays)


def beside_on_cpu(built: BuiltSource, config: LoaderConfig) -> BuiltSource:
    """The same for what a loader has been built on, with the order that it has now; `config` may have other outputs."""
    return built.on_cpu(_on_cpu(config), _as_arrays)


def _on_cpu(config: LoaderConfig) -> LoaderConfig:
    on_cpu = {"device": "cpu", "placement": "host", "engine": "direct", "batches_per_run": 1, "num_threads": 1}
    return config.replace(**on_cpu, prefetch_queue_depth=1)


def locate_batch(config: LoaderConfig, step: int, epoch: int = 0, state: Path | None = None) -> BatchOrigin:
    """Where the rows of this rank's batch number `step` come from. Rank and world size must be in `config`.

    `state`: JSON file of the state that the run resumed from, if it was saved with another global batch size; steps of
    its epoch are then counted as in that run. Blocks to read the documents, if they are used, and to plan rows of
    documents. Raises as `TokenLoader`, and `ConfigError` for a step that does not exist.
    """
    with closing(built_on_cpu(config)) as built:
        return batch_origin(built, RowCutters(built, config), step, epoch, counted_from(state, config, built, epoch))


def batch_origin(built: BuiltSource, cutters: "RowCutters", step: int, epoch: int, base: int) -> BatchOrigin:
    """As `locate_batch`, of what has been built, with steps counted from row `base`."""
    plan = plan_step(built.schedule, epoch, step, base)
    rows = tuple(cutters.origin(plan, row, row) for row in range(len(plan.row_ids)))
    return BatchOrigin(epoch, step, built.schedule.rank, built.schedule.world_size, plan.width(cutters.seq_len), rows)


def source_configs(built: BuiltSource, config: LoaderConfig) -> Mapping[str, LoaderConfig]:
    """The configuration of each source by name, in the order of the built corpora."""
    return {"": config} if built.mixture is None else config.sources


def known_offsets(corpus: Corpus, config: LoaderConfig) -> Int64Array | None:
    """Where documents begin, and the end, (D + 1,): from the format, or found where the configuration needs them."""
    if corpus.document_offsets is None and config.uses_documents:
        return find_documents(
            corpus, start_id=config.document_start_id, end_at_files=config.documents_end_at_files
        ).offsets
    return corpus.document_offsets


def counted_from(state: Path | None, config: LoaderConfig, built: BuiltSource, epoch: int) -> int:
    """The row that steps of an epoch are counted from: the first, or where a run went on from a state, a JSON file."""
    if state is None:
        return 0
    try:
        saved = json.loads(state.read_bytes())
    except OSError as error:
        raise StateError(f"{state}: cannot read the saved state: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{state}: not valid JSON ({error}); save the result of state_dict() with json.dump"
        ) from error
    found = States(config, built.corpora, built.schedule, built.mixture).read(saved)
    return built.schedule.counted_from(found.position, epoch)


def one_row(origin: BatchOrigin, row: int) -> RowOrigin:
    """One row of the batch. Raises `ConfigError` for a row that does not exist or is padding."""
    if not 0 <= row < len(origin.rows):
        raise ConfigError(f"row {row}: step {origin.step} has rows 0 to {len(origin.rows) - 1} on this rank")
    if origin.rows[row].is_padding:
        raise ConfigError(
            f"row {row} of step {origin.step} is padding: it does not come from a file, and its labels are ignored"
        )
    return origin.rows[row]


def sentinels_of(config: LoaderConfig) -> dict[int, str]:
    """What the sentinels are called, by id; empty without fill-in-the-middle."""
    entry = next((entry for entry in config.objectives if isinstance(entry, Fim)), None)
    names = ("prefix", "middle", "suffix")
    return {} if entry is None else dict(zip(entry.ids(config.tokenizer), names, strict=True))


class RowCutters:
    """The origins of the rows of plans: each row is cut in the corpus of its source.

    offsets: where documents begin in each source's corpus; None where they are not known
    """

    def __init__(self, built: BuiltSource, config: LoaderConfig) -> None:
        configs = source_configs(built, config)
        self.names = list(configs)
        self.corpora = [built.corpora[name] for name in self.names]
        self.bases = [0] if built.mixture is None else built.mixture.bases.tolist()
        self.offsets = [known_offsets(built.corpora[name], own) for name, own in configs.items()]
        self.sentinels = list(map(sentinels_of, configs.values()))
        self._cutters = list(map(RowCutter, self.corpora, self.offsets, self.sentinels))
        self.seq_len, self._is_mixture = config.row_len, built.mixture is not None

    def origin(self, plan: Plan, number: int, row: int) -> RowOrigin:
        """Where row `number` of a plan comes from, row `row` of its batch. Rows after the plan's are padding."""
        if number >= len(plan.row_ids) or plan.row_ids[number] == PADDING:
            return RowOrigin(row, PADDING, (), source=None if self._is_mixture else 0)
        source = 0 if plan.rows.sources is None else int(plan.rows.sources[number])
        pieces = tuple(self._cutters[source].row(plan, number, plan.width(self.seq_len), self.bases[source]))
        return RowOrigin(row, int(plan.row_ids[number]), pieces, source, self.names[source] or None)


class RowCutter:
    """Cuts a row into pieces at the ends of documents and files."""

    def __init__(self, corpus: Corpus, offsets: Int64Array | None, sentinels: Mapping[int, str]) -> None:
        self._corpus, self._offsets, self._sentinels = corpus, offsets, sentinels
        self._extents, _ = corpus.extents

    def row(self, plan: Plan, row: int, seq_len: int, base: int) -> Iterator[PieceOrigin]:
        """The pieces of one row of a plan, in which the first token of this corpus is at position `base`."""
        spans = [(int(plan.starts[row]), seq_len)]
        if plan.pieces is not None:
            starts, lengths = plan.runs_of_row(row)
            spans = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        column = 0
        for start, length in spans:
            if start < 0:
                yield PieceOrigin(column, length, None, -1, -1, sentinel=self._sentinels[-1 - start])
            else:
                for piece in self._in_documents(start - base, length):
                    yield replace(piece, column=column + piece.column)
            column += length

    def _in_documents(self, start: int, length: int) -> Iterator[PieceOrigin]:
        """The pieces of a span, with columns from 0."""
        if self._offsets is None:
            yield from self._in_files(start, length, 0)
            return
        cut = pieces_of_windows(self._offsets, [start], length)
        for begin, count in zip(cut.starts.tolist(), cut.lengths.tolist(), strict=True):
            document = int(np.searchsorted(self._offsets, begin, side="right")) - 1
            first, end = self._offsets[document : document + 2].tolist()
            for piece in self._in_files(begin, count, begin - start):
                known = {
                    "document": document,
                    "document_offset": piece.position - first,
                    "document_length": end - first,
                }
                yield replace(piece, **known)

    def _in_files(self, start: int, length: int, column: int) -> list[PieceOrigin]:
        first, last = np.searchsorted(self._extents, [start, start + length - 1], side="right")
        borders = [start, *self._extents[first:last].tolist(), start + length]
        pieces: list[PieceOrigin] = []
        for begin, end in pairwise(borders):
            place = self._corpus.locate(begin)
            before = pieces[-1] if pieces else None
            if before is not None and (before.file, before.offset + before.length) == place:
                pieces[-1] = replace(before, length=before.length + end - begin)
            else:
                pieces.append(PieceOrigin(column + begin - start, end - begin, place.file, place.offset, begin))
        return pieces
