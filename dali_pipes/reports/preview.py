"""What a step holds, as a trainer gets it: `preview_batch`. Goes to the step at once, needs neither GPU nor torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.reports.batch_origin import (
    BatchOrigin,
    PieceOrigin,
    RowOrigin,
    batch_origin,
    built_on_cpu,
    counted_from,
)
from dali_pipes.reports.token_text import TokenText
from dali_pipes.schedule import Position
from dali_pipes.source import BlockInfo

Int64Array = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Tokens of one piece that follow one another, all of them with or without a label."""

    is_masked: bool
    """Whether their labels, of the tokens behind them, are ignored."""
    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class PreviewPiece:
    """A piece of a row, and those of its tokens that are shown. `positions`: its first and last position id."""

    origin: PieceOrigin
    segment: int | None
    positions: tuple[int, int] | None
    runs: tuple[Run, ...]
    text: str | None
    """Of all tokens that are shown, decoded together."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**self.origin.as_dict(), "segment": self.segment, "positions": self.positions, "text": self.text}


@dataclass(frozen=True)
class PreviewRow:
    """A row; `outputs` are its fields by name, (T,) ((T, k) for labels with mtp), cut to what is shown."""

    origin: RowOrigin
    pieces: tuple[PreviewPiece, ...]
    outputs: dict[str, Any]
    padding: int
    """Places at the row's end that hold no token; all of them in a padding row."""
    masked: int
    """Places of the whole row whose label is ignored, padding included."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        own = {"padding": self.padding, "masked": self.masked, **self.outputs}
        return {**self.origin.as_dict(), **own, "pieces": [piece.as_dict() for piece in self.pieces]}


@dataclass(frozen=True)
class BatchPreview:
    """Some rows of a batch, up to a number of tokens."""

    batch: BatchOrigin
    row_mode: str
    rows: tuple[PreviewRow, ...]
    tokens: int
    """Most tokens of a row that are shown."""
    warning: str | None
    """About the documents, as a loader prints it."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        about = {name: value for name, value in vars(self.batch).items() if name != "rows"}
        about |= {"row_mode": self.row_mode, "batch_rows": len(self.batch.rows), "tokens": self.tokens}
        return {**about, "warning": self.warning, "rows": [row.as_dict() for row in self.rows]}


def preview_batch(
    config: LoaderConfig,
    step: int,
    epoch: int = 0,
    *,
    rows: int,
    tokens: int,
    tokenizer: TokenText | None = None,
    state: Path | None = None,
) -> BatchPreview:
    """The first `rows` rows of a rank's batch number `step`, and the first `tokens` tokens of each.

    Rank and world size must be in `config`; `state` is as for `locate_batch`. Blocks: reads this batch and a few behind
    it. Raises as `TokenLoader`, also
    for ids of this batch that are out of range, and `ConfigError` for a step that does not exist.
    """
    outputs = ("input_ids", "labels", *(("position_ids", "segment_ids") if config.uses_documents else ()))
    config = config.replace(outputs=outputs)
    built = built_on_cpu(config, reads=True)
    try:
        base, schedule = counted_from(state, config, built, epoch), built.schedule
        batch = batch_origin(built, config, step, epoch, base)
        before = (step - schedule.step_number(base)) * schedule.global_rows
        built.source.restart(Position(epoch, base + before))
        arrays = dict(zip(outputs, built.source(BlockInfo(0, 0)), strict=True))
        whole = {name: np.array(array[0, : len(batch.rows)], np.int64) for name, array in arrays.items()}
        writer = _RowWriter(config, whole, tokens, tokenizer)
        shown = tuple(writer.row(row) for row in batch.rows[:rows])
        return BatchPreview(batch, config.rows, shown, tokens, built.warning)
    finally:
        built.source.close()
        built.source.corpus.close()


class _RowWriter:
    def __init__(
        self, config: LoaderConfig, arrays: dict[str, Int64Array], tokens: int, tokenizer: TokenText | None
    ) -> None:
        self._config, self._arrays, self._tokens, self._tokenizer = config, arrays, tokens, tokenizer

    def row(self, origin: RowOrigin) -> PreviewRow:
        arrays = {name: array[origin.row] for name, array in self._arrays.items()}
        labels = arrays["labels"]
        is_masked = (labels if labels.ndim == 1 else labels[:, 0]) == IGNORE_INDEX
        pieces = [part for piece in origin.pieces for part in self._at_delimiters(piece, arrays["input_ids"])]
        return PreviewRow(
            origin,
            tuple(self._piece(piece, arrays, is_masked) for piece in pieces),
            {name: array[: self._tokens].tolist() for name, array in arrays.items()},
            self._config.seq_len - sum(piece.length for piece in pieces),
            int(np.count_nonzero(is_masked)),
        )

    def _at_delimiters(self, piece: PieceOrigin, ids: Int64Array) -> Iterator[PieceOrigin]:
        """The piece itself, or cut where an id says that documents end or begin, if nothing else was asked for it."""
        end_id, start_id = self._config.eos_id, self._config.document_start_id
        own = ids[piece.column : piece.column + piece.length]
        cuts: list[int] = []
        if piece.document is None and end_id is not None:
            cuts = (np.flatnonzero(own == end_id) + 1).tolist()
        elif piece.document is None and start_id is not None:
            cuts = np.flatnonzero(own == start_id).tolist()
        begin = 0
        for end in [*cuts, piece.length]:
            if end > begin:
                column, offset, position = (at + begin for at in (piece.column, piece.offset, piece.position))
                yield replace(piece, column=column, offset=offset, position=position, length=end - begin)
                begin = end

    def _piece(
        self, origin: PieceOrigin, arrays: dict[str, Int64Array], is_masked: npt.NDArray[np.bool_]
    ) -> PreviewPiece:
        first, last = origin.column, origin.column + origin.length - 1
        end = min(last + 1, self._tokens)
        positions, segments = arrays.get("position_ids"), arrays.get("segment_ids")
        ids = arrays["input_ids"][first:end].tolist()
        return PreviewPiece(
            origin,
            None if segments is None else int(segments[first]),
            None if positions is None else (int(positions[first]), int(positions[last])),
            tuple(self._runs(ids, is_masked[first:end])),
            self._text(ids),
        )

    def _runs(self, ids: list[int], is_masked: npt.NDArray[np.bool_]) -> Iterator[Run]:
        if not ids:
            return
        borders = [0, *(np.flatnonzero(np.diff(is_masked)) + 1).tolist(), len(ids)]
        for begin, end in pairwise(borders):
            yield Run(bool(is_masked[begin]), ids[begin:end], self._text(ids[begin:end]))

    def _text(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(ids)
