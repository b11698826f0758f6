"""A source: one corpus, or the joined ones of a mixture, with its rows. The only way from planned rows to tokens."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus, TokenLocation
from dali_pipes.corpus.joined import JoinedCorpora
from dali_pipes.rows.base import ReadableRows, Reads, Rows


class Source:
    """A corpus and the rows made from it. Safe for several threads.

    dtype: of the ids, as they are read. has_loss_mask: whether some ids are not learned.
    """

    def __init__(self, corpus: Corpus | JoinedCorpora, rows: ReadableRows) -> None:
        self.corpus, self.rows = corpus, rows
        self.dtype: np.dtype[Any] = corpus.dtype
        self.has_loss_mask = corpus.loss_mask is not None

    @property
    def token_bytes(self) -> int:
        """Bytes of an id, and of its entry in the loss mask."""
        return self.dtype.itemsize + self.has_loss_mask

    @property
    def content_key(self) -> str:
        """Stands for the files and their content, as `Corpus.content_key`."""
        corpora = self.corpus.corpora if isinstance(self.corpus, JoinedCorpora) else (self.corpus,)
        return " ".join(corpus.content_key for corpus in corpora)

    def read(
        self,
        rows: Rows,
        row_begins: npt.NDArray[np.int64],
        tokens: npt.NDArray[Any],
        loss_mask: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Read rows into `tokens` (N,), row r from row_begins[r] on, and their loss mask into `loss_mask` (N,). Blocks.

        Places that no token belongs in become 0. Raises what `Corpus.read_pieces` does.
        """
        row_tokens = self.rows.row_tokens
        if rows.pieces is None and len(rows.starts) * row_tokens == len(tokens) and loss_mask is None:
            self.corpus.read_rows(rows.starts, tokens.reshape(-1, row_tokens))
            return
        reads = self.rows.reads(rows, row_begins[:-1], row_begins[1:] - row_begins[:-1])
        if rows.pieces is not None:  # all places: to find those between the pieces takes longer
            tokens.fill(0)
            if loss_mask is not None:
                loss_mask.fill(0)
        if rows.fim is not None:
            reads = _without_sentinels(reads, tokens, loss_mask)
        for reader, array in ((self.corpus, tokens), (self.corpus.loss_mask, loss_mask)):
            if reader is not None and array is not None:
                reader.read_pieces(*reads, array)

    def read_rows(self, starts: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Read rows that are runs of tokens into `rows` (R, row_tokens). Blocks; raises as `read`."""
        self.corpus.read_rows(starts, rows)

    def gathered(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[Any] | None:
        """Rows that are runs of tokens, in a new array (R, row_tokens), where one step copies all of them.

        None where they have to be read. Blocks; raises what `Corpus.read_rows` does.
        """
        if not isinstance(self.corpus, Corpus):
            return None
        return self.corpus.gathered_rows(starts, self.rows.row_tokens)

    def read_span(self, begin: int, tokens: npt.NDArray[Any], *, of_loss_mask: bool = False) -> None:
        """Fill `tokens` (N,) with the ids, or entries of the loss mask, from position `begin` on. Blocks."""
        reader = self.corpus.loss_mask if of_loss_mask else self.corpus
        assert reader is not None, "this corpus does not have a loss mask"
        reader.read_pieces(np.array([begin]), np.array([len(tokens)]), np.zeros(1, np.int64), tokens)

    def token(self, position: int) -> int:
        """One id. Blocks."""
        return int(self.corpus.tokens(position, 1)[0])

    def locate(self, position: int) -> TokenLocation:
        """File and offset of a token. Reads no data."""
        return self.corpus.locate(position)

    def origin(self, position: int) -> tuple[int, str | None, int]:
        """Number and name of the source of a token, 0 and None for the only one, and its position in that corpus."""
        if not isinstance(self.corpus, JoinedCorpora):
            return 0, None, position
        number = self.corpus.source_of(position)
        return number, self.corpus.names[number], position - int(self.corpus.bases[number])

    def end_retries(self) -> None:
        """Let reads that fail from now on fail immediately. Idempotent."""
        self.corpus.end_retries()

    def close(self) -> None:
        """Let the files go. Idempotent."""
        self.corpus.close()


def _without_sentinels(reads: Reads, tokens: npt.NDArray[Any], loss_mask: npt.NDArray[np.uint8] | None) -> Reads:
    """What the corpus has of some reads; the other ids are put into their places, and are learned."""
    is_sentinel = reads.starts < 0
    places = reads.targets[is_sentinel]
    tokens[places] = -1 - reads.starts[is_sentinel]
    if loss_mask is not None:
        loss_mask[places] = 1
    return Reads(*(column[~is_sentinel] for column in reads))
