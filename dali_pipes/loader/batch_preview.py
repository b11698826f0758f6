"""A batch as the trainer gets it: `preview_batch`. Seeks straight to the step; does not need a GPU or torch.

With `context_parallel` each rank gets a share of every row; here a row of eight for rank 0 of 2, zigzag:

    row, by position    9 2 6 6 5 | 1 4 4      the end of document 7, then document 8
    columns             9 2     | 4 4          columns 0 to 1 are positions 0 to 1, and 2 to 3 are 6 to 7
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.context_parallel import shared_ranges
from dali_pipes.config.outputs import OBJECTIVE_OUTPUTS, OUTPUTS, Axes
from dali_pipes.engine.block_stream import BlockStream
from dali_pipes.engine.build import BuiltSource
from dali_pipes.loader.batch_origin import (
    PieceOrigin,
    RowCutters,
    RowOrigin,
    batch_origin,
    built_on_cpu,
    counted_from,
    sentinels_of,
    source_configs,
)
from dali_pipes.loader.batch_view import BatchPreview, PreviewPiece, PreviewRow, Ranges, Run
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.schedule import Position

if TYPE_CHECKING:
    from dali_pipes.text.token_text import TokenText

Int64Array = npt.NDArray[np.int64]


def preview_batch(
    config: LoaderConfig,
    step: int,
    epoch: int = 0,
    *,
    rows: int,
    tokens: int,
    tokenizer: "TokenText | None" = None,
    state: Path | None = None,
) -> BatchPreview:
    """The first `rows` rows of a rank's batch number `step`, and the first `tokens` tokens of each.

    With `context_parallel` those of this rank's share of each row. Rank and world size must be in `config`; `state` is
    as for `locate_batch`. Blocks: reads this batch and a few after it. Raises as `TokenLoader`, including for ids of
    this batch that are out of range, and `ConfigError` for a step that does not exist.
    """
    config = shown_outputs(config)
    built = built_on_cpu(config)
    with closing(BatchPreviewer(built, config, tokenizer)) as previewer:
        base = counted_from(state, config, built, epoch)
        return previewer.batch(step, epoch, base, rows=rows, tokens=tokens)


class BatchPreviewer:
    """Previews of one rank's batches, in any order.

    built: for `config`, on the CPU and with one batch a block; `close` closes it. `config` comes from `shown_outputs`.
    """

    def __init__(self, built: BuiltSource, config: LoaderConfig, tokenizer: "TokenText | None" = None) -> None:
        self._built, self._config, self._tokenizer = built, config, tokenizer
        self._stream = BlockStream(built, config)
        try:
            self.cutters = RowCutters(built, config)
        except BaseException:  # documents that cannot be read
            self._stream.close()
            raise
        configs = source_configs(built, config)
        # The user's start id separates documents, if there is one.
        self._delimiters = [
            (own.eos_id if own.document_start_id is not None else built.corpora[name].eos_id, own.document_start_id)
            for name, own in configs.items()
        ]
        self._row_mode = ", ".join(dict.fromkeys(own.rows for own in configs.values()))
        self._sentinels = [list(sentinels_of(own)) for own in configs.values()]
        self._has_own_labels = [any(entry.has_own_labels for entry in own.objectives) for own in configs.values()]
        delimiters = {token for pair in self._delimiters for token in pair if token is not None}
        delimiters.update(*self._sentinels)
        self._special_ids = frozenset(delimiters) | (frozenset() if tokenizer is None else tokenizer.special_ids)

    def batch(self, step: int, epoch: int = 0, base: int = 0, *, rows: int, tokens: int) -> BatchPreview:
        """As `preview_batch`, with steps counted from row `base`."""
        built, config, schedule = self._built, self._config, self._built.schedule
        batch = batch_origin(built, self.cutters, step, epoch, base)
        before = (step - schedule.step_number(base)) * schedule.global_rows
        self._stream.seek(Position(epoch, base + before))
        ((block,),) = self._stream.take().groups
        (width,) = block.widths
        ranges: Ranges = ((0, width),)
        if config.context_parallel is not None:
            ranges = shared_ranges(width, *config.context_parallel, config.context_split)
        arrays = {name: block.arrays[name] for name in config.outputs}
        of_sources = self._delimiters, self._sentinels, self._has_own_labels
        writer = _RowWriter(*of_sources, arrays, ranges, tokens, self._tokenizer)
        shown = tuple(writer.row(row) for row in batch.rows[:rows])
        how = config.context_parallel, config.context_split
        return BatchPreview(
            batch,
            self._row_mode,
            shown,
            tokens,
            built.warning,
            width,
            *how,
            ranges,
            self._special_ids,
            config.objective_line,
        )

    def close(self) -> None:
        """Stop reading and close what was built; idempotent."""
        self._stream.close()


def shown_outputs(config: LoaderConfig) -> LoaderConfig:
    """The configuration with the most informative outputs, and the masks that the trainer gets for each position."""
    base = ("input_ids", "labels", *(("position_ids", "segment_ids") if config.uses_documents else ()))
    masks = tuple(name for name in ("attention_mask", "loss_mask") if name in config.outputs)
    own = config.sources.values() or (config,)
    kinds = {entry.kind for source in own for entry in source.objective}
    objectives = tuple(name for name in OBJECTIVE_OUTPUTS if OUTPUTS[name].needs_objective in kinds)
    return config.replace(outputs=base + masks + objectives)


def _in_share(piece: PieceOrigin, ranges: Ranges) -> Iterator[PieceOrigin]:
    """The parts of a piece that lie in `ranges` of its row, with columns counted in that share."""
    column = 0
    for first, end in ranges:
        begin, stop = max(first, piece.column), min(end, piece.column + piece.length)
        if begin < stop:
            yield _part(piece, begin - piece.column, stop - piece.column, column + begin - first)
        column += end - first


def _part(piece: PieceOrigin, begin: int, end: int, column: int) -> PieceOrigin:
    """Tokens begin ... end - 1 of a piece, moved to `column`."""
    inside = None if piece.document_offset is None else piece.document_offset + begin
    offset, position = piece.offset + begin, piece.position + begin
    return replace(piece, column=column, length=end - begin, offset=offset, position=position, document_offset=inside)


def _at_delimiters(
    piece: PieceOrigin, ids: Int64Array, end_id: int | None, start_id: int | None
) -> Iterator[PieceOrigin]:
    """The piece of a row of ids, cut at delimiter ids if its document is not known."""
    own = ids[piece.column : piece.column + piece.length]
    cuts: list[int] = []
    if piece.document is None and end_id is not None:
        cuts = (np.flatnonzero(own == end_id) + 1).tolist()
    elif piece.document is None and start_id is not None:
        cuts = np.flatnonzero(own == start_id).tolist()
    begin = 0
    for end in [*cuts, piece.length]:
        if end > begin:
            yield _part(piece, begin, end, piece.column + begin)
            begin = end


class _RowWriter:
    """Describes rows of a batch, whose outputs are in `arrays`, for whole rows.

    delimiters: of each source, the ids that end and that start a document
    sentinels: of each source, the ids that fill-in-the-middle inserts
    has_own_labels: of each source, whether labels are the ids at their own places
    """

    def __init__(
        self,
        delimiters: Sequence[tuple[int | None, int | None]],
        sentinels: Sequence[Sequence[int]],
        has_own_labels: Sequence[bool],
        arrays: dict[str, Int64Array],
        ranges: Ranges,
        tokens: int,
        tokenizer: "TokenText | None",
    ) -> None:
        self._delimiters, self._ranges, self._tokens, self._tokenizer = delimiters, ranges, tokens, tokenizer
        self._sentinels = sentinels
        self._has_own_labels = has_own_labels
        self._of_rows = {name: array for name, array in arrays.items() if OUTPUTS[name].axes is Axes.ROWS}
        self._arrays = {
            name: np.concatenate([array[:, first:end] for first, end in ranges], 1)
            if OUTPUTS[name].axes is Axes.POSITIONS
            else array
            for name, array in arrays.items()
            if name not in self._of_rows
        }

    def row(self, origin: RowOrigin) -> PreviewRow:
        arrays = {name: array[origin.row] for name, array in self._arrays.items()}
        labels = arrays["labels"]
        is_masked = (labels if labels.ndim == 1 else labels[:, 0]) == IGNORE_INDEX
        shared = sorted(
            (part for piece in origin.pieces for part in _in_share(piece, self._ranges)), key=lambda part: part.column
        )
        ids, delimiters = arrays["input_ids"], self._delimiters[origin.source or 0]
        pieces = [part for piece in shared for part in _at_delimiters(piece, ids, *delimiters)]
        used = sum(piece.length for piece in pieces)
        are_sentinels = np.isin(ids[:used], self._sentinels[origin.source or 0])
        return PreviewRow(
            replace(origin, pieces=tuple(shared)),
            tuple(self._piece(piece, arrays, is_masked, self._has_own_labels[origin.source or 0]) for piece in pieces),
            {name: array[: self._tokens].tolist() for name, array in arrays.items()},
            len(labels) - used,
            int(np.count_nonzero(is_masked)),
            {name: array[origin.row].item() for name, array in self._of_rows.items()},
            int(np.count_nonzero(are_sentinels)) - sum(piece.sentinel is not None for piece in pieces),
            tuple(self._corrupted(origin.row)) if "encoder_ids" in arrays else (),
        )

    def _corrupted(self, row: int) -> Iterator[tuple[str, Run]]:
        inputs = self._arrays["encoder_ids"][row, : self._of_rows["encoder_lengths"][row]]
        labels = self._arrays["decoder_labels"][row]
        for name, array in (("encoder_ids", inputs), ("decoder_labels", labels[labels != IGNORE_INDEX])):
            ids = array[: self._tokens].tolist()
            yield name, Run(False, ids, self._text(ids), None)

    def _piece(
        self,
        origin: PieceOrigin,
        arrays: dict[str, Int64Array],
        is_masked: npt.NDArray[np.bool_],
        has_own_labels: bool,
    ) -> PreviewPiece:
        first, last = origin.column, origin.column + origin.length - 1
        end = min(last + 1, self._tokens)
        positions, segments = arrays.get("position_ids"), arrays.get("segment_ids")
        ids = arrays.get("noisy_ids", arrays["input_ids"])[first:end].tolist()
        labels = arrays["labels"][first:end].tolist() if has_own_labels else None
        return PreviewPiece(
            origin,
            None if segments is None else int(segments[first]),
            None if positions is None else (int(positions[first]), int(positions[last])),
            tuple(self._runs(ids, is_masked[first:end], labels)),
            self._text(ids),
        )

    def _runs(self, ids: list[int], is_masked: npt.NDArray[np.bool_], labels: list[int] | None) -> Iterator[Run]:
        if not ids:
            return
        borders = [0, *(np.flatnonzero(np.diff(is_masked)) + 1).tolist(), len(ids)]
        for begin, end in pairwise(borders):
            own = ids[begin:end]
            each = None if self._tokenizer is None else self._tokenizer.each(own)
            run = Run(bool(is_masked[begin]), own, self._text(own), each)
            if labels is not None and not run.is_masked:
                run = run._replace(own_labels=labels[begin:end], own_text=self._text(labels[begin:end]))
            yield run

    def _text(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(ids)
