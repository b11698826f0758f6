"""Kinds of batches: rows, outputs and ways to make them that must not matter to what a trainer does with a batch."""

from typing import Any

T = 16
KINDS: dict[str, dict[str, Any]] = {
    "windows": {},
    "labels that equal the inputs": {"label_shift": False},
    "windows in pieces": {"outputs": ("input_ids", "labels", "row_ids", "position_ids", "cu_seqlens")},
    "windows with padding rows": {"world_size": 3, "rank": 2},
    "several labels": {"mtp": 3},
    "packed": {"rows": "pack", "outputs": ("input_ids", "labels", "row_ids", "segment_ids", "loss_mask")},
    "packed, with bounds": {"rows": "pack", "outputs": ("input_ids", "row_ids", "cu_seqlens", "max_seqlen")},
    "padded": {"rows": "pad", "outputs": ("input_ids", "labels", "row_ids", "position_ids", "attention_mask")},
    "buckets": {"rows": "pad", "length_buckets": (4, 8, T)},
    "shared rows": {"context_parallel": (1, 2), "outputs": ("input_ids", "labels", "row_ids", "position_ids")},
    "static buffers": {"static_buffers": True, "rows": "pack"},
    "static windows": {"static_buffers": True},
    "a graph": {"graph": dict},
    "a graph of packed rows": {"graph": dict, "rows": "pack", "outputs": ("input_ids", "row_ids", "cu_seqlens")},
}
"""Settings by name, for a corpus of documents that end in 0."""


def settings_of(kind: str) -> dict[str, Any]:
    """All settings but the corpus and how many batches a block has."""
    return {"eos_id": 0, "batch_size": 3, "seq_len": T, "drop_last": False, **KINDS[kind]}
