"""The pieces of documents some of which are rearranged, each planned with its sentinels: see `objectives.fim`.

T = 16, a document of 30 tokens; the parts that are split off have room for the sentinels

units are pieces       13 | 13 | 4        each of them rearranged or not:    16 | 13 | 7
units are documents    30 + 3             cut where rows end:                16 | 16 | 1
"""

import numpy as np
import numpy.typing as npt

from dali_pipes.objectives.fim import SENTINELS, FillInMiddle
from dali_pipes.rows.packing import DocumentPieces, LongDocuments, narrow, rows_of_documents

Int64Array = npt.NDArray[np.int64]


def pieces_with_sentinels(
    fim: FillInMiddle,
    key: int,
    documents: Int64Array,
    lengths: Int64Array,
    seq_len: int,
    long_documents: LongDocuments,
) -> DocumentPieces:
    """As `rows_of_documents`, of documents (n,) with these numbers. Pieces begin where `FillInMiddle.pieces` says.

    A piece that is not rearranged may be three tokens shorter than a row, where it is a part of a longer document.
    """
    if not fim.by_piece:
        is_moved = fim.moved(key, documents, 0, lengths, seq_len)
        if long_documents == "drop":
            is_moved &= lengths <= seq_len
        return rows_of_documents(lengths + SENTINELS * is_moved, seq_len, long_documents)
    pieces = rows_of_documents(lengths, seq_len, long_documents, seq_len - SENTINELS)
    whose, begins = pieces.piece_documents, pieces.piece_begins.astype(np.int64)
    is_moved = fim.moved(key, documents[whose], begins, lengths[whose], seq_len)
    planned = np.minimum(pieces.piece_lengths + SENTINELS * is_moved.astype(np.int64), seq_len)
    return pieces._replace(piece_lengths=narrow(planned, seq_len))
