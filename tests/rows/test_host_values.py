"""The numbers of batches on the host, against a walk over the rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.documents import Pieces
from dali_pipes.rows.outputs import Outputs


@st.composite
def a_batch(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A width, and the lengths of the pieces of each row."""
    width = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        pieces, left = [], draw(st.sampled_from([0, width, draw(st.integers(0, width))]))
        while left:
            pieces.append(draw(st.integers(1, left)))
            left -= pieces[-1]
        rows.append(pieces)
    return width, rows


@given(batches=st.lists(a_batch(), min_size=1, max_size=5))
def test_longest_segment_and_number_of_segments(batches: list[tuple[int, list[list[int]]]]) -> None:
    rows = [row for _, batch in batches for row in batch]
    lengths = np.array([length for row in rows for length in row], np.int64)
    pieces = Pieces(np.cumsum([0, *map(len, rows)]), np.zeros_like(lengths), lengths, lengths)
    expected = []
    for width, batch in batches:
        segments = [length for row in batch for length in [*row, width - sum(row)] if length]
        expected.append({"max_seqlen": max(segments), "num_segments": len(segments)})
    sizes, widths = [len(batch) for _, batch in batches], [width for width, _ in batches]
    outputs = Outputs(("max_seqlen",), 3, 9, in_pieces=True)
    assert outputs.host_values(pieces, sizes, widths) == expected
    assert Outputs(("input_ids",), 3, 9, in_pieces=True).host_values(pieces, sizes, widths) == [{}] * len(sizes)
