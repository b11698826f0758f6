"""The mask of a prefix equals what `create_block_mask` makes of the rule, block by block."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dali_pipes.attention import block_mask


def blocks_of(counts: Tensor | None, numbers: Tensor | None) -> list[list[list[int]]]:
    assert counts is not None
    assert numbers is not None
    return [
        [sorted(row[:count]) for row, count in zip(rows, of_rows, strict=True)]
        for rows, of_rows in zip(numbers[:, 0].tolist(), counts[:, 0].tolist(), strict=True)
    ]


@settings(max_examples=examples(25))
@given(data=st.data())
def test_queries_see_the_prefix_and_what_came_before(data: st.DataObject) -> None:
    draw = data.draw
    seq_len, batch_size = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    rows = []
    for _ in range(batch_size):
        lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
        numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)][:seq_len]
        rows.append(numbers + [0] * (seq_len - len(numbers)))
    segments, has_segments = torch.tensor(rows), draw(st.booleans())
    prefixes = torch.tensor([draw(st.integers(0, seq_len)) for _ in rows])
    batch = {"prefix_lengths": prefixes, "segment_ids" if has_segments else "input_ids": segments}
    sizes = draw(st.sampled_from([(4, 4), (8, 8), (4, 8), (8, 4)]))

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = segments[row, query] == segments[row, key] if has_segments else torch.tensor(True)
        return same & ((key <= query) | (key < prefixes[row]))

    found = block_mask(batch, block_size=sizes)
    expected: BlockMask = create_block_mask(rule, batch_size, None, seq_len, seq_len, device="cpu", BLOCK_SIZE=sizes)
    assert blocks_of(found.kv_num_blocks, found.kv_indices) == blocks_of(expected.kv_num_blocks, expected.kv_indices)
    assert blocks_of(found.full_kv_num_blocks, found.full_kv_indices) == blocks_of(
        expected.full_kv_num_blocks, expected.full_kv_indices
    )
    places = torch.arange(seq_len)
    for row in range(batch_size):
        seen = found.mask_mod(torch.tensor(row), torch.tensor(0), places[:, None], places[None])
        assert torch.equal(seen, rule(torch.tensor(row), torch.tensor(0), places[:, None], places[None]))
