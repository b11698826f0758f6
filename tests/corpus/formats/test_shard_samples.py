"""Sets written by the formats' own tools give back the true tokens (see tests/data/corpus/README.md)."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError

END_OF_TEXT = {"gpt2": 50256, "cl100k": 100257}
Documents = list[list[int]]


@pytest.fixture(scope="module")
def truth(samples: Path) -> dict[str, Documents]:
    """Documents without an end-of-text id, by vocabulary."""
    with np.load(samples / "shard_truth.npz") as arrays:
        return {
            name: [
                arrays[f"{name}_tokens"][begin:end].tolist()
                for begin, end in zip(arrays[f"{name}_offsets"], arrays[f"{name}_offsets"][1:], strict=False)
            ]
            for name in END_OF_TEXT
        }


def ended(documents: Documents, vocabulary: str) -> Documents:
    return [[*document, END_OF_TEXT[vocabulary]] for document in documents]


def check(corpus: Corpus, format: str, dtype: str, documents: Documents) -> None:
    assert (corpus.format, corpus.dtype) == (format, np.dtype(dtype))
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for document in documents for token in document]
    assert corpus.document_offsets is not None
    assert np.diff(corpus.document_offsets).tolist() == [len(document) for document in documents]


def test_mds(samples: Path, truth: dict[str, Documents]) -> None:
    with open_corpus(samples / "mds" / "tokens_u16") as corpus:
        check(corpus, "mds", "uint16", [document for document in truth["gpt2"] if document])
        assert corpus.cache_stats() is None, "is read as it lies"
    stream = [token for document in ended(truth["gpt2"], "gpt2") for token in document]
    windows = [stream[256 * number : 256 * number + 256] for number in range(160)]
    with open_corpus(samples / "mds" / "concat_bytes_i64", dtype="int64", verify=True) as corpus:
        check(corpus, "mds", "int64", windows)
    for method in ("br", "snappy"):
        with open_corpus(samples / "mds" / f"tokens_{method}", verify=True) as corpus:
            check(corpus, "mds", "uint16", [document for document in truth["gpt2"][:60] if document])
    with pytest.raises(ConfigError, match=r"text \(str\).*tokenizer"):
        open_corpus(samples / "mds" / "text")
    with pytest.raises(CorpusFormatError, match=r"column 'text' has encoding 'str' .*tok"):
        open_corpus(samples / "mds" / "text", token_column="text")
    with pytest.raises(CorpusFormatError, match=r"index\.json.*shard\.00000\.mds"):
        open_corpus(samples / "mds" / "tokens_u16", verify=True)


def test_datatrove(samples: Path, truth: dict[str, Documents]) -> None:
    with open_corpus(samples / "datatrove" / "gpt2") as corpus:
        check(corpus, "datatrove", "uint16", ended(truth["gpt2"], "gpt2"))
    with open_corpus(samples / "datatrove" / "cl100k") as corpus:  # shuffled
        offsets = corpus.document_offsets
        assert offsets is not None
        ids = corpus.tokens(0, corpus.num_tokens).tolist()
        documents = [ids[begin:end] for begin, end in itertools.pairwise(offsets)]
        assert corpus.dtype == np.uint32
        assert sorted(documents) == sorted(ended(truth["cl100k"], "cl100k"))


def test_litdata(samples: Path, truth: dict[str, Documents]) -> None:
    with open_corpus(samples / "litdata" / "gpt2_numpy_u16") as corpus:
        check(corpus, "litdata", "uint16", ended(truth["gpt2"], "gpt2"))
    with open_corpus(samples / "litdata" / "gpt2_torch_i32") as corpus:
        check(corpus, "litdata", "int32", ended(truth["gpt2"][:120], "gpt2"))


def test_arrayrecord(samples: Path, truth: dict[str, Documents]) -> None:
    with open_corpus(samples / "arrayrecord" / "gpt2_u16.arrayrecord", dtype="uint16") as corpus:
        check(corpus, "arrayrecord", "uint16", truth["gpt2"][:200])
    with open_corpus(samples / "arrayrecord" / "cl100k_tfexample.arrayrecord") as corpus:
        check(corpus, "arrayrecord", "int64", truth["cl100k"][:120])
    with pytest.raises(CorpusFormatError, match="its records are text"):
        open_corpus(samples / "arrayrecord" / "text.arrayrecord")
    with pytest.raises(CorpusFormatError, match="set dtype"):
        open_corpus(samples / "arrayrecord" / "gpt2_u16.arrayrecord")


def test_tfrecord(samples: Path, truth: dict[str, Documents]) -> None:
    with open_corpus(samples / "tfrecord" / "gpt2.tfrecord") as corpus:
        check(corpus, "tfrecord", "int64", truth["gpt2"][:60])
    with pytest.raises(ConfigError, match=r"text \(bytes\).*tokenizer"):
        open_corpus(samples / "tfrecord" / "text.tfrecord")
