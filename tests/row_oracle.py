"""Slow, plain outputs of rows made of documents: Python lists, one token at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dali_pipes.documents import Pieces
from dali_pipes.rows.document_rows import DocumentRows

IGNORED = -100
END = 9
"""Id that ends a document in the corpora of these tests."""

Row = list[tuple[int, int, int]]
"""Pieces: first token of the corpus, tokens, and the place from which on tokens are no label."""


def some_documents(least: int) -> st.SearchStrategy[list[list[int]]]:
    """`least` to 25 documents of 1 to 13 ids, the end id included."""
    document = st.lists(st.integers(1, 8), max_size=12).map(lambda ids: [*ids, END])
    return st.lists(document, min_size=least, max_size=25)


def write_documents(folder: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> list[int]:
    """One flat file of the documents, each with what it is made of (its end id included); returns all tokens."""
    folder.mkdir(exist_ok=True)
    tokens = [token for document in documents for token in document]
    np.array(tokens, dtype).tofile(folder / "tokens.bin")
    return tokens


def row_outputs(
    tokens: Sequence[int],
    row: Row,
    seq_len: int,
    *,
    pad_id: int = 0,
    mtp: int = 0,
    mask_boundaries: bool = True,
    learn: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Every output of one row, as lists of `seq_len` entries. `learn`: 0 for a token of the corpus that is no label."""
    flat: list[tuple[int, int, int, int]] = []  # place in the corpus, place in the piece, number of the piece, its end
    for number, (start, length, end) in enumerate(row, start=1):
        flat += [(start + t, t, number, end) for t in range(length)]
    flat = flat[:seq_len]

    def label(t: int, ahead: int) -> int:
        if t >= len(flat):
            return IGNORED
        at = t if mask_boundaries else min(t + ahead, len(flat) - 1)  # from there on along the document
        place, _, _, end = flat[at]
        target = place + t + ahead - at
        if target >= end:
            return IGNORED
        return tokens[target] if learn is None or learn[target] else IGNORED

    padding = seq_len - len(flat)
    labels: list[Any] = [label(t, 1) for t in range(seq_len)]
    if mtp:
        labels = [[label(t, ahead) for ahead in range(1, mtp + 1)] for t in range(seq_len)]
    first_labels = [label(t, 1) for t in range(seq_len)]
    return {
        "input_ids": [tokens[place] for place, *_ in flat] + [pad_id] * padding,
        "labels": labels,
        "position_ids": [within for _, within, *_ in flat] + [0] * padding,
        "segment_ids": [number for _, _, number, _ in flat] + [0] * padding,
        "attention_mask": [1] * len(flat) + [0] * padding,
        "loss_mask": [int(value != IGNORED) for value in first_labels],
    }


def batch_outputs(tokens: Sequence[int], rows: Sequence[Row], seq_len: int, **options: Any) -> dict[str, Any]:
    """Every output of a batch; `cu_seqlens` up to its last real entry."""
    outputs = [row_outputs(tokens, row, seq_len, **options) for row in rows]
    batch: dict[str, Any] = {name: [row[name] for row in outputs] for name in outputs[0]}
    bounds: list[int] = [0]
    longest = 0
    for number, row in enumerate(rows):
        sizes = [length for _, length, _ in row]
        padding = seq_len - sum(sizes)
        for size in [*sizes, padding] if padding else sizes:
            bounds.append(bounds[-1] + size)
            longest = max(longest, size)
        assert bounds[-1] == (number + 1) * seq_len
    return batch | {"cu_seqlens": bounds, "max_seqlen": longest, "num_segments": len(bounds) - 1}


def problem(batch: Any, expected: dict[str, Any]) -> str:
    """The first output of a batch that is not as expected, empty if all are."""
    for name, value in batch.items():
        if name in ("row_ids", "source_ids"):
            continue
        got: Any = value if isinstance(value, int) else value.tolist()
        if name == "cu_seqlens":
            count = len(expected[name])
            if got[:count] != expected[name] or set(got[count:]) - {expected[name][-1]}:
                return f"{name}: {got}, expected {expected[name]} and its last entry repeated"
        elif got != expected[name]:
            return f"{name}: {got}, expected {expected[name]}"
    return ""


def pieces_of(rows: DocumentRows, epoch: int, places: Any) -> Pieces:
    """The pieces of rows of documents."""
    pieces = rows.plan(epoch, places).pieces
    assert pieces is not None
    return pieces
