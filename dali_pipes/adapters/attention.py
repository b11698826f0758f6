"""Attention masks and arguments that keep the documents of a batch apart, built from its outputs.

    segment_ids   1 1 1 2 2 0     token q sees token k     # . . . . .     the padding of a row is one more segment:
                                  if k <= q and both are   # # . . . .     every token sees at least itself, so that
                                  in one segment           # # # . . .     no softmax is empty
                                                           . . . # . .
                                                           . . . # # .
                                                           . . . . . #

With `prefix_lengths`, from an objective of kind `prefix`, every token also sees the prefix of its row, as far as it is
in the same segment. Positions are separate: pass `position_ids` to the model, or it counts a document's tokens from the
start of the row.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dali_pipes.adapters.batch_fields import field_of


class VarlenArguments(TypedDict):
    """Arguments of flash-attention's `flash_attn_varlen_func`, by name."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def block_mask(batch: Mapping[str, Any], *, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """The mask for `flex_attention` of queries and keys (B, H, T, D), on the device of the batch.

    From `segment_ids` (B, T), from `prefix_lengths` (B,), or both. Without `segment_ids` a row is one segment; without
    `prefix_lengths`, attention is causal. The result equals that of `create_block_mask`, which first builds a mask of
    all T x T pairs; here the largest tensor has one entry per pair of blocks. `block_size`, in tokens, is for queries
    and keys, or (queries, keys).

    Does not block. The mask reads the fields when it is used, so with `static_buffers` it is valid only as long as the
    batch. Raises `ConfigError` if the batch contains neither of the two.
    """
    prefixes: Tensor | None = batch.get("prefix_lengths")
    if prefixes is not None and "segment_ids" not in batch:
        segment_ids = torch.ones_like(field_of(batch, "input_ids"))
    else:
        segment_ids = field_of(batch, "segment_ids")
    query_size, key_size = (block_size, block_size) if isinstance(block_size, int) else block_size
    seq_len = segment_ids.shape[1]

    def same_segment(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = query >= key if prefixes is None else (query >= key) | (key < prefixes[row])
        return is_seen & (segment_ids[row, query] == segment_ids[row, key])

    first_query, query_end = _blocks(seq_len, query_size, segment_ids.device)
    first_key, key_end = _blocks(seq_len, key_size, segment_ids.device)
    first_query, query_end = first_query[:, None], query_end[:, None]
    first_key, key_end = first_key[None], key_end[None]

    # A segment is contiguous, so every token between two tokens of a segment belongs to it too.
    last_key = torch.minimum(query_end, key_end) - 1  # that a query of the block may see
    nearest_query = torch.maximum(first_query, last_key)
    some = (last_key >= first_key) & (segment_ids[:, nearest_query] == segment_ids[:, last_key])
    is_full = (query_end - first_query == query_size) & (key_end - first_key == key_size)
    whole = is_full & (key_end - 1 <= first_query)
    every = whole & (segment_ids[:, first_key] == segment_ids[:, query_end - 1])
    if prefixes is not None:
        of_rows = prefixes[:, None, None]
        numbers = torch.where(segment_ids == 0, seq_len + 1, segment_ids)  # rising along a row
        last_in_prefix = torch.minimum(key_end.expand_as(some), of_rows) - 1
        rows = torch.arange(len(numbers), device=numbers.device)[:, None, None]
        last_number = numbers[rows, last_in_prefix.clamp(min=0)]
        meets = (numbers[:, first_key] <= numbers[:, query_end - 1]) & (last_number >= numbers[:, first_query])
        some |= (last_in_prefix >= first_key) & meets
        first, last = torch.minimum(first_query, first_key), torch.maximum(query_end, key_end) - 1
        every |= is_full & (key_end <= of_rows) & (numbers[:, first] == numbers[:, last])

    mask: BlockMask = BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=(query_size, key_size),
        mask_mod=same_segment,
        seq_lengths=(seq_len, seq_len),
    )
    return mask


def varlen_args(batch: Mapping[str, Any]) -> VarlenArguments:
    """The arguments for `flash_attn_varlen_func` of queries and keys (B * T, H, D), next to `causal=True`.

    The padding of a row is a separate sequence, so every token is in one. Does not block. Raises `ConfigError` if the
    batch does not contain `cu_seqlens` and `max_seqlen`.
    """
    bounds: Tensor = field_of(batch, "cu_seqlens")
    longest: int = field_of(batch, "max_seqlen")
    bounds = bounds[: batch["num_segments"] + 1]
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _blocks(seq_len: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First token and end of each block; the last block may be shorter."""
    first = torch.arange(0, seq_len, size, device=device)
    return first, (first + size).clamp(max=seq_len)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of (B, Q, K): how many blocks are set, and their numbers first, in the layout of `BlockMask`."""
    numbers = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]
