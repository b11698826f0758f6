"""Sample files that the formats' own tools wrote, of several formats and types of ids in one mixture."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_samples import CASES, END_OF_TEXT, documents_of

from dali_pipes import TokenLoader

SEQ_LEN = 32
END = END_OF_TEXT["gpt2"]
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "books": ("megatron/gpt2_text_document", {"weight": 0.4, "rows": "pack"}),
    "web": ("parquet/tokens_list_i64.parquet", {"weight": 0.3}),
    "code": ("nanogpt/train.bin", {"weight": 0.2, "eos_id": END, "rows": "pad"}),
    "chat": ("arrow/tokens_file.arrow", {"weight": 0.1}),
}


def truth_of(samples: Path, path: str) -> tuple[list[int], set[int]]:
    """The true ids of a sample, and where its documents begin."""
    with np.load(io.BytesIO((samples / "truth.npz").read_bytes())) as arrays:
        truth = {name: arrays[name].astype(np.int64) for name in arrays.files}
    [(*_, vocabulary, first, end, policy)] = [case for case in CASES if case[0] == [path]]
    assert vocabulary == "gpt2"
    documents = documents_of(truth, vocabulary, range(first, end), policy)
    return [token for document in documents for token in document], {0, *np.cumsum(list(map(len, documents))).tolist()}


def test_rows_of_four_formats_hold_the_true_ids(samples: Path) -> None:
    truths = {name: truth_of(samples, path) for name, (path, _) in SOURCES.items()}
    truth, starts = {name: ids for name, (ids, _) in truths.items()}, {name: of for name, (_, of) in truths.items()}
    mixture = {name: {"corpus": samples / path, **settings} for name, (path, settings) in SOURCES.items()}
    outputs = ("input_ids", "labels", "attention_mask", "source_ids")
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": SEQ_LEN, "total_rows": 512, "outputs": outputs}
    used: Counter[str] = Counter()
    with TokenLoader(mixture=mixture, **settings, device="cpu", quiet=True) as loader:
        formats = {name: (corpus.format, corpus.dtype.name) for name, corpus in loader.corpora.items()}
        for step, batch in enumerate(loader):
            for row in range(4):
                place = loader.locate(step, row)
                ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
                name = str(place.source_name)
                assert int(batch["source_ids"][row]) == list(SOURCES).index(name)
                if "rows" in SOURCES[name][1]:  # up to the end of the first document
                    ids = ids[: ids.tolist().index(END) + 1] if END in ids else ids
                else:
                    assert len(ids) == SEQ_LEN
                    after = range(place.position + 1, place.position + SEQ_LEN + 1)
                    expected = [-100 if position in starts[name] else truth[name][position] for position in after]
                    assert batch["labels"][row].tolist() == expected
                assert ids.tolist() == truth[name][place.position : place.position + len(ids)]
                used[name] += int(torch.sum(batch["attention_mask"][row]))
    assert formats == {
        "books": ("megatron", "uint16"),
        "web": ("parquet", "int64"),
        "code": ("flat", "uint16"),
        "chat": ("arrow", "int32"),
    }
    shares = {name: tokens / used.total() for name, tokens in used.items()}
    assert max(abs(shares[name] - SOURCES[name][1]["weight"]) for name in SOURCES) < 0.03
