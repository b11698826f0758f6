"""The sample corpora, and what is true of each, from `truth.npz` and the tools that wrote them."""

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from test_samples import CASES, END_OF_TEXT, documents_of

ROWS_OF_THE_MATRIX = 40 * 512


class Sample(NamedTuple):
    """`options` say what the files do not; `lengths` are of documents with their end-of-text id."""

    paths: list[Path]
    format: str
    dtype: str
    options: list[str]
    tokens: list[int]
    lengths: list[int]
    has_index: bool
    has_delimiters: bool

    @property
    def eos(self) -> int:
        return END_OF_TEXT["gpt2" if max(self.tokens) < 60000 else "cl100k"]

    @property
    def empty(self) -> int:
        """Documents with no token but the end-of-text id."""
        return self.lengths.count(0 if self.has_index else 1)

    @property
    def delimiter(self) -> list[str]:
        """The options that name the id between documents, if they have one."""
        if not self.has_delimiters:
            return []
        return ["--start-id" if self.tokens[0] == self.eos else "--eos", str(self.eos)]


SAMPLES = {case[0][0]: case for case in CASES}
NAMES = [*SAMPLES, "dolma", "matrix"]


def load_sample(folder: Path, name: str) -> Sample:
    with np.load(io.BytesIO((folder / "truth.npz").read_bytes())) as arrays:
        truth: dict[str, Any] = {key: arrays[key].astype(np.int64) for key in arrays.files}
    if name in SAMPLES:
        names, format, dtype, said, vocabulary, first, end, policy = SAMPLES[name]
        documents = documents_of(truth, vocabulary, range(first, end), policy)
        paths = [folder / path for path in names]
    elif name == "dolma":
        format, dtype, said, policy = "flat", "uint16", None, "append"
        documents = documents_of(truth, "gpt2", truth["dolma_order"].tolist(), "append")
        paths = [folder / "dolma" / "gpt2_u16"]
    else:
        format, dtype, said, policy = "npy", "int32", None, "append"
        documents = documents_of(truth, "gpt2", range(380), "append")
        paths = [folder / "npy" / "gpt2_i32_2d.npy"]
    tokens = [token for document in documents for token in document]
    lengths = [len(document) for document in documents]
    if name == "matrix":  # cut within a document
        tokens = tokens[:ROWS_OF_THE_MATRIX]
        ends = [end for end in np.cumsum(lengths).tolist() if end < len(tokens)]
        lengths = np.diff([0, *ends, len(tokens)]).tolist()
    options = [] if said is None else ["--dtype", said]
    has_index = format in {"arrow", "megatron", "parquet"}
    return Sample(paths, format, dtype, options, tokens, lengths, has_index, policy != "none")
