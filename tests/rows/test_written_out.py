"""Tiny corpora with all that a trainer is given, written out by hand: every output, every row mode, no oracle.

Nothing is shuffled, so the rows are those that the rules of packing, padding and cutting give, and can be followed with
a pencil. 9 ends a document where nothing else is said; `rank_batches` has the batches of each rank.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import torch
from corpus_files import write_megatron

from dali_pipes import TokenLoader
from dali_pipes.config import OUTPUT_NAMES as ALL_OUTPUTS

OUTPUT_NAMES = tuple(name for name in ALL_OUTPUTS if name != "source_ids")  # 0 without a mixture
X = -100
DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "cuda", "placement": "host"},
    "device": {"device": "cuda", "placement": "device"},
    "pinned": {"device": "cuda", "placement": "pinned"},
}


@dataclass
class Case:
    tokens: list[int]
    settings: dict[str, Any]
    rank_batches: list[list[dict[str, Any]]]
    index: list[int] | None = None
    """Tokens of each document, where the corpus has an index."""


# [1 2 9] [3 9] [4 5 6 9] [9]: 4 tokens open row 0, 3 open row 1, 2 fill row 1, and 1 fills row 0.
FOUR = [1, 2, 9, 3, 9, 4, 5, 6, 9, 9]
FOUR_PACKED: dict[str, Any] = {
    "input_ids": [[4, 5, 6, 9, 9], [1, 2, 9, 3, 9]],
    "labels": [[5, 6, 9, X, X], [2, 9, X, 9, X]],
    "position_ids": [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]],
    "segment_ids": [[1, 1, 1, 1, 2], [1, 1, 1, 2, 2]],
    "loss_mask": [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0]],
    "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "cu_seqlens": [0, 4, 5, 8, 10, 10, 10, 10, 10, 10, 10],
    "num_segments": 4,
    "max_seqlen": 4,
    "row_ids": [0, 1],
}

# [1 2 3 4 5 9] [6 9] [7 9] in rows of 4: the first document is longer than a row.
LONG = [1, 2, 3, 4, 5, 9, 6, 9, 7, 9]

# [1 2 9] [3 9] [4 5 6 9] seen as one stream: windows 1 2 9 3|9 and 9 4 5 6|9.
STREAM = [1, 2, 9, 3, 9, 4, 5, 6, 9]
STREAM_CUT: dict[str, Any] = {
    "input_ids": [[1, 2, 9, 3], [9, 4, 5, 6]],
    "labels": [[2, 9, X, 9], [X, 5, 6, 9]],
    "position_ids": [[0, 1, 2, 0], [0, 0, 1, 2]],
    "segment_ids": [[1, 1, 1, 2], [1, 2, 2, 2]],
    "loss_mask": [[1, 1, 0, 1], [0, 1, 1, 1]],
    "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "cu_seqlens": [0, 3, 4, 5, 8, 8, 8, 8, 8],
    "num_segments": 4,
    "max_seqlen": 3,
    "row_ids": [0, 1],
}

CASES = {
    "pack": Case(FOUR, {"rows": "pack", "seq_len": 5, "batch_size": 2}, [[FOUR_PACKED]]),
    "pack, labels cross boundaries": Case(
        FOUR,
        {"rows": "pack", "seq_len": 5, "batch_size": 2, "mask_boundaries": False},
        [
            [
                {
                    **FOUR_PACKED,
                    "labels": [[5, 6, 9, 9, X], [2, 9, 3, 9, X]],
                    "loss_mask": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]],
                }
            ]
        ],
    ),
    # The long one is 4 + 2; of the pieces of 2, in document order, two share row 1 and one begins row 2.
    "pack, split": Case(
        LONG,
        {"rows": "pack", "seq_len": 4, "batch_size": 3, "pad_id": 8},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 4], [5, 9, 6, 9], [7, 9, 8, 8]],
                    "labels": [[2, 3, 4, X], [9, X, 9, X], [9, X, X, X]],
                    "position_ids": [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 0]],
                    "segment_ids": [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 0, 0]],
                    "loss_mask": [[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]],
                    "cu_seqlens": [0, 4, 6, 8, 10, 12, 12, 12, 12, 12, 12, 12, 12],
                    "num_segments": 5,
                    "max_seqlen": 4,
                    "row_ids": [0, 1, 2],
                }
            ]
        ],
    ),
    "pack, truncate": Case(
        LONG,
        {"rows": "pack", "seq_len": 4, "batch_size": 2, "long_documents": "truncate"},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 4], [6, 9, 7, 9]],
                    "labels": [[2, 3, 4, X], [9, X, 9, X]],
                    "position_ids": [[0, 1, 2, 3], [0, 1, 0, 1]],
                    "segment_ids": [[1, 1, 1, 1], [1, 1, 2, 2]],
                    "loss_mask": [[1, 1, 1, 0], [1, 0, 1, 0]],
                    "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1]],
                    "cu_seqlens": [0, 4, 6, 8, 8, 8, 8, 8, 8],
                    "num_segments": 3,
                    "max_seqlen": 4,
                    "row_ids": [0, 1],
                }
            ]
        ],
    ),
    "pack, drop": Case(
        LONG,
        {"rows": "pack", "seq_len": 4, "batch_size": 1, "long_documents": "drop"},
        [
            [
                {
                    "input_ids": [[6, 9, 7, 9]],
                    "labels": [[9, X, 9, X]],
                    "position_ids": [[0, 1, 0, 1]],
                    "segment_ids": [[1, 1, 2, 2]],
                    "loss_mask": [[1, 0, 1, 0]],
                    "attention_mask": [[1, 1, 1, 1]],
                    "cu_seqlens": [0, 2, 4, 4, 4],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [0],
                }
            ]
        ],
    ),
    # [1 2 3 9] [4 9]: three labels a position, none from another document.
    "pack, labels of three tokens": Case(
        [1, 2, 3, 9, 4, 9],
        {"rows": "pack", "seq_len": 7, "batch_size": 1, "mtp": 3},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 9, 4, 9, 0]],
                    "labels": [[[2, 3, 9], [3, 9, X], [9, X, X], [X, X, X], [9, X, X], [X, X, X], [X, X, X]]],
                    "position_ids": [[0, 1, 2, 3, 0, 1, 0]],
                    "segment_ids": [[1, 1, 1, 1, 2, 2, 0]],
                    "loss_mask": [[1, 1, 1, 0, 1, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1, 1, 1, 0]],
                    "cu_seqlens": [0, 4, 6, 7, 7, 7, 7, 7],
                    "num_segments": 3,
                    "max_seqlen": 4,
                    "row_ids": [0],
                }
            ]
        ],
    ),
    # The same along the row, over the boundary; the padding is no label.
    "pack, labels of three tokens cross boundaries": Case(
        [1, 2, 3, 9, 4, 9],
        {"rows": "pack", "seq_len": 7, "batch_size": 1, "mtp": 3, "mask_boundaries": False},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 9, 4, 9, 0]],
                    "labels": [[[2, 3, 9], [3, 9, 4], [9, 4, 9], [4, 9, X], [9, X, X], [X, X, X], [X, X, X]]],
                    "position_ids": [[0, 1, 2, 3, 0, 1, 0]],
                    "segment_ids": [[1, 1, 1, 1, 2, 2, 0]],
                    "loss_mask": [[1, 1, 1, 1, 1, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1, 1, 1, 0]],
                    "cu_seqlens": [0, 4, 6, 7, 7, 7, 7, 7],
                    "num_segments": 3,
                    "max_seqlen": 4,
                    "row_ids": [0],
                }
            ]
        ],
    ),
    # [5 6 0] [7 0], where 0 is the end id and the padding. The true end ids are labels.
    "pack, padding of the end id": Case(
        [5, 6, 0, 7, 0],
        {"rows": "pack", "seq_len": 8, "batch_size": 1, "eos_id": 0, "pad_id": 0},
        [
            [
                {
                    "input_ids": [[5, 6, 0, 7, 0, 0, 0, 0]],
                    "labels": [[6, 0, X, 0, X, X, X, X]],
                    "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0]],
                    "segment_ids": [[1, 1, 1, 2, 2, 0, 0, 0]],
                    "loss_mask": [[1, 1, 0, 1, 0, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1, 1, 0, 0, 0]],
                    "cu_seqlens": [0, 3, 5, 8, 8, 8, 8, 8, 8],
                    "num_segments": 3,
                    "max_seqlen": 3,
                    "row_ids": [0],
                }
            ]
        ],
    ),
    # Documents of one token each, then one that fills a row; the full row is the first.
    "pack, documents of one token": Case(
        [9, 9, 9, 9, 1, 2, 3, 9],
        {"rows": "pack", "seq_len": 4, "batch_size": 1},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 9]],
                    "labels": [[2, 3, 9, X]],
                    "position_ids": [[0, 1, 2, 3]],
                    "segment_ids": [[1, 1, 1, 1]],
                    "loss_mask": [[1, 1, 1, 0]],
                    "attention_mask": [[1, 1, 1, 1]],
                    "cu_seqlens": [0, 4, 4, 4, 4],
                    "num_segments": 1,
                    "max_seqlen": 4,
                    "row_ids": [0],
                },
                {
                    "input_ids": [[9, 9, 9, 9]],
                    "labels": [[X, X, X, X]],
                    "position_ids": [[0, 0, 0, 0]],
                    "segment_ids": [[1, 2, 3, 4]],
                    "loss_mask": [[0, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1]],
                    "cu_seqlens": [0, 1, 2, 3, 4],
                    "num_segments": 4,
                    "max_seqlen": 1,
                    "row_ids": [1],
                },
            ]
        ],
    ),
    # Documents of 3, 1, 1 and 2 tokens, by their index; the longest first, then in document order.
    "pack, documents of one token and padding": Case(
        [1, 2, 3, 4, 5, 6, 7],
        {"rows": "pack", "seq_len": 10, "batch_size": 1},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 6, 7, 4, 5, 0, 0, 0]],
                    "labels": [[2, 3, X, 7, X, X, X, X, X, X]],
                    "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0, 0, 0]],
                    "segment_ids": [[1, 1, 1, 2, 2, 3, 4, 0, 0, 0]],
                    "loss_mask": [[1, 1, 0, 1, 0, 0, 0, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0]],
                    "cu_seqlens": [0, 3, 5, 6, 7, 10, 10, 10, 10, 10, 10],
                    "num_segments": 5,
                    "max_seqlen": 3,
                    "row_ids": [0],
                }
            ]
        ],
        index=[3, 1, 1, 2],
    ),
    # [1 9] [2 9] [3 9] | [4 9]: windows of three documents, so the last one finds no row to fill up.
    "pack, two windows": Case(
        [1, 9, 2, 9, 3, 9, 4, 9],
        {"rows": "pack", "seq_len": 4, "batch_size": 3, "window_documents": 3},
        [
            [
                {
                    "input_ids": [[1, 9, 2, 9], [3, 9, 0, 0], [4, 9, 0, 0]],
                    "labels": [[9, X, 9, X], [9, X, X, X], [9, X, X, X]],
                    "position_ids": [[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0]],
                    "segment_ids": [[1, 1, 2, 2], [1, 1, 0, 0], [1, 1, 0, 0]],
                    "loss_mask": [[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]],
                    "cu_seqlens": [0, 2, 4, 6, 8, 10, 12, 12, 12, 12, 12, 12, 12],
                    "num_segments": 6,
                    "max_seqlen": 2,
                    "row_ids": [0, 1, 2],
                }
            ]
        ],
    ),
    # Documents of 0, 2, 0, 1 and 0 tokens; those without any have no segment.
    "pack, empty documents": Case(
        [1, 2, 3],
        {"rows": "pack", "seq_len": 4, "batch_size": 1},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 0]],
                    "labels": [[2, X, X, X]],
                    "position_ids": [[0, 1, 0, 0]],
                    "segment_ids": [[1, 1, 2, 0]],
                    "loss_mask": [[1, 0, 0, 0]],
                    "attention_mask": [[1, 1, 1, 0]],
                    "cu_seqlens": [0, 2, 3, 4, 4],
                    "num_segments": 3,
                    "max_seqlen": 2,
                    "row_ids": [0],
                }
            ]
        ],
        index=[0, 2, 0, 1, 0],
    ),
    # 7 begins a document: [1 2] came before the first of them, then [7 3 4] [7] [7 5].
    "pad, start ids": Case(
        [1, 2, 7, 3, 4, 7, 7, 5],
        {"rows": "pad", "seq_len": 4, "batch_size": 2, "eos_id": None, "document_start_id": 7},
        [
            [
                {
                    "input_ids": [[1, 2, 0, 0], [7, 3, 4, 0]],
                    "labels": [[2, X, X, X], [3, 4, X, X]],
                    "position_ids": [[0, 1, 0, 0], [0, 1, 2, 0]],
                    "segment_ids": [[1, 1, 0, 0], [1, 1, 1, 0]],
                    "loss_mask": [[1, 0, 0, 0], [1, 1, 0, 0]],
                    "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
                    "cu_seqlens": [0, 2, 4, 7, 8, 8, 8, 8, 8],
                    "num_segments": 4,
                    "max_seqlen": 3,
                    "row_ids": [0, 1],
                },
                {
                    "input_ids": [[7, 0, 0, 0], [7, 5, 0, 0]],
                    "labels": [[X, X, X, X], [5, X, X, X]],
                    "position_ids": [[0, 0, 0, 0], [0, 1, 0, 0]],
                    "segment_ids": [[1, 0, 0, 0], [1, 1, 0, 0]],
                    "loss_mask": [[0, 0, 0, 0], [1, 0, 0, 0]],
                    "attention_mask": [[1, 0, 0, 0], [1, 1, 0, 0]],
                    "cu_seqlens": [0, 1, 4, 6, 8, 8, 8, 8, 8],
                    "num_segments": 4,
                    "max_seqlen": 3,
                    "row_ids": [2, 3],
                },
            ]
        ],
    ),
    # [1 2 3|9] [4 9] [9] [5 9]: five rows of 3, so that the second of two ranks ends with a row of padding.
    "pad, split, two ranks": Case(
        [1, 2, 3, 9, 4, 9, 9, 5, 9],
        {"rows": "pad", "seq_len": 3, "batch_size": 1, "pad_id": 6},
        [
            [
                {
                    "input_ids": [[1, 2, 3]],
                    "labels": [[2, 3, X]],
                    "position_ids": [[0, 1, 2]],
                    "segment_ids": [[1, 1, 1]],
                    "loss_mask": [[1, 1, 0]],
                    "attention_mask": [[1, 1, 1]],
                    "cu_seqlens": [0, 3, 3, 3],
                    "num_segments": 1,
                    "max_seqlen": 3,
                    "row_ids": [0],
                },
                {
                    "input_ids": [[4, 9, 6]],
                    "labels": [[9, X, X]],
                    "position_ids": [[0, 1, 0]],
                    "segment_ids": [[1, 1, 0]],
                    "loss_mask": [[1, 0, 0]],
                    "attention_mask": [[1, 1, 0]],
                    "cu_seqlens": [0, 2, 3, 3],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [2],
                },
                {
                    "input_ids": [[5, 9, 6]],
                    "labels": [[9, X, X]],
                    "position_ids": [[0, 1, 0]],
                    "segment_ids": [[1, 1, 0]],
                    "loss_mask": [[1, 0, 0]],
                    "attention_mask": [[1, 1, 0]],
                    "cu_seqlens": [0, 2, 3, 3],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [4],
                },
            ],
            [
                {
                    "input_ids": [[9, 6, 6]],
                    "labels": [[X, X, X]],
                    "position_ids": [[0, 0, 0]],
                    "segment_ids": [[1, 0, 0]],
                    "loss_mask": [[0, 0, 0]],
                    "attention_mask": [[1, 0, 0]],
                    "cu_seqlens": [0, 1, 3, 3],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [1],
                },
                {
                    "input_ids": [[9, 6, 6]],
                    "labels": [[X, X, X]],
                    "position_ids": [[0, 0, 0]],
                    "segment_ids": [[1, 0, 0]],
                    "loss_mask": [[0, 0, 0]],
                    "attention_mask": [[1, 0, 0]],
                    "cu_seqlens": [0, 1, 3, 3],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [3],
                },
                {
                    "input_ids": [[6, 6, 6]],
                    "labels": [[X, X, X]],
                    "position_ids": [[0, 0, 0]],
                    "segment_ids": [[0, 0, 0]],
                    "loss_mask": [[0, 0, 0]],
                    "attention_mask": [[0, 0, 0]],
                    "cu_seqlens": [0, 3, 3, 3],
                    "num_segments": 1,
                    "max_seqlen": 3,
                    "row_ids": [-1],
                },
            ],
        ],
    ),
    # [1 9] [2 3 9] [9]: one rank's last batch is short; cu_seqlens keeps its room and ends with the batch's tokens.
    "pad, a last batch of one row": Case(
        [1, 9, 2, 3, 9, 9],
        {"rows": "pad", "seq_len": 3, "batch_size": 2},
        [
            [
                {
                    "input_ids": [[1, 9, 0], [2, 3, 9]],
                    "labels": [[9, X, X], [3, 9, X]],
                    "position_ids": [[0, 1, 0], [0, 1, 2]],
                    "segment_ids": [[1, 1, 0], [1, 1, 1]],
                    "loss_mask": [[1, 0, 0], [1, 1, 0]],
                    "attention_mask": [[1, 1, 0], [1, 1, 1]],
                    "cu_seqlens": [0, 2, 3, 6, 6, 6, 6],
                    "num_segments": 3,
                    "max_seqlen": 3,
                    "row_ids": [0, 1],
                },
                {
                    "input_ids": [[9, 0, 0]],
                    "labels": [[X, X, X]],
                    "position_ids": [[0, 0, 0]],
                    "segment_ids": [[1, 0, 0]],
                    "loss_mask": [[0, 0, 0]],
                    "attention_mask": [[1, 0, 0]],
                    "cu_seqlens": [0, 1, 3, 3, 3, 3, 3],
                    "num_segments": 2,
                    "max_seqlen": 2,
                    "row_ids": [2],
                },
            ]
        ],
    ),
    "pad, truncate": Case(
        [1, 2, 3, 9, 9],
        {"rows": "pad", "seq_len": 2, "batch_size": 2, "long_documents": "truncate", "mtp": 1},
        [
            [
                {
                    "input_ids": [[1, 2], [9, 0]],
                    "labels": [[[2], [X]], [[X], [X]]],
                    "position_ids": [[0, 1], [0, 0]],
                    "segment_ids": [[1, 1], [1, 0]],
                    "loss_mask": [[1, 0], [0, 0]],
                    "attention_mask": [[1, 1], [1, 0]],
                    "cu_seqlens": [0, 2, 3, 4, 4],
                    "num_segments": 3,
                    "max_seqlen": 2,
                    "row_ids": [0, 1],
                }
            ]
        ],
    ),
    "pad, drop": Case(
        [1, 2, 3, 9, 9],
        {"rows": "pad", "seq_len": 2, "batch_size": 2, "long_documents": "drop"},
        [
            [
                {
                    "input_ids": [[9, 0]],
                    "labels": [[X, X]],
                    "position_ids": [[0, 0]],
                    "segment_ids": [[1, 0]],
                    "loss_mask": [[0, 0]],
                    "attention_mask": [[1, 0]],
                    "cu_seqlens": [0, 1, 2, 2, 2],
                    "num_segments": 2,
                    "max_seqlen": 1,
                    "row_ids": [0],
                }
            ]
        ],
    ),
    "stream, masked": Case(
        STREAM, {"rows": "stream", "seq_len": 4, "batch_size": 2, "mask_boundaries": True}, [[STREAM_CUT]]
    ),
    "stream, labels cross boundaries": Case(
        STREAM,
        {"rows": "stream", "seq_len": 4, "batch_size": 2},
        [
            [
                {
                    **STREAM_CUT,
                    "labels": [[2, 9, 3, 9], [4, 5, 6, 9]],
                    "loss_mask": [[1, 1, 1, 1], [1, 1, 1, 1]],
                }
            ]
        ],
    ),
    "stream, labels of two tokens": Case(
        STREAM,
        {"rows": "stream", "seq_len": 4, "batch_size": 2, "mtp": 2},
        [
            [
                {
                    **STREAM_CUT,
                    "labels": [
                        [[2, 9], [9, X], [X, X], [9, X]],
                        [[X, X], [5, 6], [6, 9], [9, X]],
                    ],
                }
            ]
        ],
    ),
    "stream, labels of two tokens cross boundaries": Case(
        STREAM,
        {"rows": "stream", "seq_len": 4, "batch_size": 2, "mtp": 2, "mask_boundaries": False},
        [
            [
                {
                    **STREAM_CUT,
                    "labels": [
                        [[2, 9], [9, 3], [3, 9], [9, 4]],
                        [[4, 5], [5, 6], [6, 9], [9, X]],
                    ],
                    "loss_mask": [[1, 1, 1, 1], [1, 1, 1, 1]],
                }
            ]
        ],
    ),
    # Documents of 3, 1, 1 and 2 tokens in a row of 7, by their index; the 8 is a label only.
    "stream, documents of one token": Case(
        [1, 2, 3, 4, 5, 6, 7, 8],
        {"rows": "stream", "seq_len": 7, "batch_size": 1, "mask_boundaries": True},
        [
            [
                {
                    "input_ids": [[1, 2, 3, 4, 5, 6, 7]],
                    "labels": [[2, 3, X, X, X, 7, X]],
                    "position_ids": [[0, 1, 2, 0, 0, 0, 1]],
                    "segment_ids": [[1, 1, 1, 2, 3, 4, 4]],
                    "loss_mask": [[1, 1, 0, 0, 0, 1, 0]],
                    "attention_mask": [[1, 1, 1, 1, 1, 1, 1]],
                    "cu_seqlens": [0, 3, 4, 5, 7, 7, 7, 7],
                    "num_segments": 4,
                    "max_seqlen": 3,
                    "row_ids": [0],
                }
            ]
        ],
        index=[3, 1, 1, 2, 1],
    ),
    # [1 9] [2 3 9] [4 9]: windows 1 9|2, 2 3|9 and 9 4|9; the second of two ranks ends with a row of padding.
    "stream, two ranks": Case(
        [1, 9, 2, 3, 9, 4, 9],
        {"rows": "stream", "seq_len": 2, "batch_size": 1, "mask_boundaries": True, "pad_id": 5},
        [
            [
                {
                    "input_ids": [[1, 9]],
                    "labels": [[9, X]],
                    "position_ids": [[0, 1]],
                    "segment_ids": [[1, 1]],
                    "loss_mask": [[1, 0]],
                    "attention_mask": [[1, 1]],
                    "cu_seqlens": [0, 2, 2],
                    "num_segments": 1,
                    "max_seqlen": 2,
                    "row_ids": [0],
                },
                {
                    "input_ids": [[9, 4]],
                    "labels": [[X, 9]],
                    "position_ids": [[0, 0]],
                    "segment_ids": [[1, 2]],
                    "loss_mask": [[0, 1]],
                    "attention_mask": [[1, 1]],
                    "cu_seqlens": [0, 1, 2],
                    "num_segments": 2,
                    "max_seqlen": 1,
                    "row_ids": [2],
                },
            ],
            [
                {
                    "input_ids": [[2, 3]],
                    "labels": [[3, 9]],
                    "position_ids": [[0, 1]],
                    "segment_ids": [[1, 1]],
                    "loss_mask": [[1, 1]],
                    "attention_mask": [[1, 1]],
                    "cu_seqlens": [0, 2, 2],
                    "num_segments": 1,
                    "max_seqlen": 2,
                    "row_ids": [1],
                },
                {
                    "input_ids": [[5, 5]],
                    "labels": [[X, X]],
                    "position_ids": [[0, 0]],
                    "segment_ids": [[0, 0]],
                    "loss_mask": [[0, 0]],
                    "attention_mask": [[0, 0]],
                    "cu_seqlens": [0, 2, 2],
                    "num_segments": 1,
                    "max_seqlen": 2,
                    "row_ids": [-1],
                },
            ],
        ],
    ),
    # Windows 1 2|3, 3 4|5 and 5 6|7 where documents play no part: the padding row shows the first row, without labels.
    "plain stream, two ranks": Case(
        [1, 2, 3, 4, 5, 6, 7],
        {
            "rows": "stream",
            "seq_len": 2,
            "batch_size": 1,
            "eos_id": None,
            "outputs": ("input_ids", "labels", "row_ids"),
        },
        [
            [
                {"input_ids": [[1, 2]], "labels": [[2, 3]], "row_ids": [0]},
                {"input_ids": [[5, 6]], "labels": [[6, 7]], "row_ids": [2]},
            ],
            [
                {"input_ids": [[3, 4]], "labels": [[4, 5]], "row_ids": [1]},
                {"input_ids": [[1, 2]], "labels": [[X, X]], "row_ids": [-1]},
            ],
        ],
    ),
}


def write(folder: Path, case: Case) -> str:
    tokens = np.array(case.tokens, np.uint16)
    folder.mkdir()
    if case.index is None:
        tokens.tofile(folder / "tokens.bin")
    else:
        write_megatron(folder / "tokens", np.split(tokens, np.cumsum(case.index)[:-1]))
    return str(folder)


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_all_that_a_trainer_is_given(tmp_path: Path, name: str, place: str) -> None:
    case = CASES[name]
    corpus = write(tmp_path / "corpus", case)
    common: dict[str, Any] = {"shuffle": False, "drop_last": False, "outputs": OUTPUT_NAMES, **DEVICES[place]}
    if case.index is None:
        common |= {"eos_id": 9, "dtype": "uint16"}
    world_size = len(case.rank_batches)
    with gpu_stand_in.installed("late") if place != "cpu" else contextlib.nullcontext():
        for rank, expected in enumerate(case.rank_batches):
            settings = {**common, **case.settings, "rank": rank, "world_size": world_size}
            with TokenLoader(corpus=corpus, **settings) as loader:
                for _ in range(2):  # an epoch is like the one before
                    batches = list(loader)
                    assert len(batches) == len(loader) == len(expected)
                    for batch, right in zip(batches, expected, strict=True):
                        tensors = {n: value for n, value in batch.items() if not isinstance(value, int)}
                        found = {**batch, **{n: tensor.tolist() for n, tensor in tensors.items()}}
                        assert found == right
                        types = {n: tensor.dtype for n, tensor in tensors.items() if n != "cu_seqlens"}
                        assert set(types.values()) == {torch.int64}
                        assert "cu_seqlens" not in tensors or tensors["cu_seqlens"].dtype == torch.int32


def test_every_output_and_setting_is_written_out() -> None:
    """The table would say little if, say, every case of one row mode had the same treatment of long documents."""
    for name in (*OUTPUT_NAMES, "num_segments"):
        assert sum(name in case.rank_batches[0][0] for case in CASES.values()) >= 12
    seen = {(case.settings["rows"], case.settings.get("long_documents", "split")) for case in CASES.values()}
    assert seen >= {(rows, long) for rows in ("pack", "pad") for long in ("split", "truncate", "drop")}
    for rows in ("stream", "pack", "pad"):
        cases = [case for case in CASES.values() if case.settings["rows"] == rows]
        assert any(case.settings.get("mtp") for case in cases)
        assert all(len(case.tokens) <= 12 for case in cases)
    assert {len(case.rank_batches) for case in CASES.values()} == {1, 2}
