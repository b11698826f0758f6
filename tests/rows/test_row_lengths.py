"""The rows that documents need change smoothly with the length of a row, around powers of two as elsewhere."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from corpus_files import write_megatron

from dali_pipes import TokenLoader

LENGTHS = np.random.default_rng(16).normal(4096, 512, 3000).clip(100, 8192).astype(np.int64)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """An index of documents whose tokens are zeros that take no room on the disk."""
    ends = 2 * np.cumsum(LENGTHS)
    nothing = [np.zeros(0, np.uint16)] * len(LENGTHS)
    starts = [0, *ends.tolist()[:-1]]
    tokens = write_megatron(tmp_path / "tokens", nothing, lengths=LENGTHS.tolist(), pointers=starts)
    os.truncate(tokens, int(ends[-1]))
    return str(tmp_path)


def test_rows_and_fill(corpus: str) -> None:
    rows = {}
    for seq_len in (8191, 8192, 8193, 12000, 16384, 16385):
        with TokenLoader(corpus=corpus, rows="pack", seq_len=seq_len, batch_size=1, device="cpu") as loader:
            report = loader.plan_report()
            assert len(loader) == report.rows
        rows[seq_len] = report.rows
        long = int(np.count_nonzero(seq_len < LENGTHS))
        assert (report.documents, report.dropped_documents, report.split_documents) == (3000, 0, long)
        assert report.tokens == LENGTHS.sum()
        assert report.fill == pytest.approx(LENGTHS.sum() / (report.rows * seq_len), rel=1e-12)
        assert seq_len < 12000 or report.fill > 0.9
    assert list(rows.values()) == sorted(rows.values(), reverse=True)
    for near, other in ((8191, 8192), (8192, 8193), (16384, 16385)):
        assert abs(rows[near] - rows[other]) <= 0.02 * rows[near]


@pytest.mark.parametrize("seq_len", [8193, 16385])
def test_every_document_is_whole_in_one_row(corpus: str, seq_len: int) -> None:
    outputs = ("cu_seqlens", "attention_mask")
    found = []
    with TokenLoader(
        corpus=corpus, rows="pack", seq_len=seq_len, batch_size=1, device="cpu", outputs=outputs
    ) as loader:
        for batch in loader:
            bounds = batch["cu_seqlens"][: batch["num_segments"] + 1].tolist()
            used = int(batch["attention_mask"].sum())
            found += [end - begin for begin, end in itertools.pairwise(bounds) if begin < used]
            assert used in bounds
    assert sorted(found) == sorted(LENGTHS.tolist())
