"""Fields of rows whose pieces were placed with the plan: the same as those of tables that are checked at each call."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.documents import Pieces
from dali_pipes.rows.outputs import Outputs

NAMES = ("input_ids", "labels", "position_ids", "segment_ids", "attention_mask", "loss_mask", "cu_seqlens")


@given(
    rows=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=7),
    spare=st.integers(0, 2),
    extra=st.integers(0, 2),
    ahead=st.integers(0, 2),
    batch_size=st.none() | st.integers(1, 4),
    mtp=st.sampled_from([0, 0, 2]),
    mask_boundaries=st.booleans(),
    has_loss_mask=st.booleans(),
    index_dtype=st.sampled_from(["int64", "int32"]),
    first=st.integers(0, 5),
)
def test_places_change_no_field(
    rows: list[list[int]],
    spare: int,
    extra: int,
    ahead: int,
    batch_size: int | None,
    mtp: int,
    mask_boundaries: bool,
    has_loss_mask: bool,
    index_dtype: str,
    first: int,
) -> None:
    """extra: tokens of a row in the buffer beyond its positions. ahead: of a document after its piece."""
    seq_len = max(1, *map(sum, rows)) + spare
    step = seq_len + extra
    tokens = np.random.default_rng(0).integers(1, 99, first + len(rows) * step).astype(np.uint16)
    loss_mask = (tokens % 3 > 0).astype(np.uint8) if has_loss_mask else None
    table = [
        (begin := first + number * step + sum(row[:at]), length, min(len(tokens), begin + length + ahead))
        for number, row in enumerate(rows)
        for at, length in enumerate(row)
    ]
    columns = np.array(table, np.int64).reshape(-1, 3).T
    pieces = Pieces(np.cumsum([0, *map(len, rows)]), *map(np.ascontiguousarray, columns))
    outputs = Outputs(
        NAMES,
        batch_size,
        seq_len,
        in_pieces=True,
        pad_id=7,
        mtp=mtp,
        mask_boundaries=mask_boundaries,
        index_dtype=np.dtype(index_dtype),
        mask_dtype=np.dtype(np.bool_),
    )

    def filled(given: Pieces, **how: Any) -> dict[str, Any]:
        out = {name: np.full(outputs.shape(name, len(rows)), 111).astype(outputs.dtype(name)) for name in NAMES}
        outputs.fill(tokens, given, out, loss_mask=loss_mask, **how)
        return {name: array.tolist() for name, array in out.items()}

    expected = filled(pieces)
    assert filled(pieces.with_rows(seq_len)) == expected
    assert filled(pieces.with_rows(seq_len), even_rows=(first, step)) == expected
