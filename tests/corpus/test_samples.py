"""Files written by the formats' own tools give back the true tokens (see tests/data/corpus/README.md)."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError

END_OF_TEXT = {"gpt2": 50256, "cl100k": 100257}
EMPTY_DOCUMENT = 7
SHARDS = {
    "arrayrecord",
    "datatrove/cl100k",
    "datatrove/gpt2",
    "litdata/gpt2_numpy_u16",
    "litdata/gpt2_torch_i32",
    "mds/concat_bytes_i64",
    "mds/text",
    "mds/tokens_u16",
    "mds/tokens_br",
    "mds/tokens_snappy",
    "shard_truth",
    "tfrecord",
}
LLMC_GPT2 = [
    "llmc/gpt2_val_000000.bin",
    "llmc/gpt2_train_000001.bin",
    "llmc/gpt2_train_000002.bin",
    "llmc/gpt2_train_000003.bin",
]

# files, format, dtype, dtype to say, vocabulary, first document, end document, where the end-of-text id is
CASES = [
    (["nanogpt/train.bin"], "flat", "uint16", None, "gpt2", 0, 342, "append"),
    (["nanogpt/val.bin"], "flat", "uint16", None, "gpt2", 342, 380, "append"),
    (["nanogpt/cl100k_u32.bin"], "flat", "uint32", "uint32", "cl100k", 0, 120, "append"),
    (LLMC_GPT2, "llmc", "uint16", None, "gpt2", 0, 380, "prepend"),
    (["llmc/cl100k_val_000000.bin"], "llmc", "uint32", None, "cl100k", 0, 120, "prepend"),
    (["npy/gpt2_u16.npy"], "npy", "uint16", None, "gpt2", 0, 150, "append"),
    (["npy/cl100k_u32.npy"], "npy", "uint32", None, "cl100k", 0, 150, "append"),
    (["megatron/gpt2_text_document"], "megatron", "uint16", None, "gpt2", 0, 380, "append, but not to nothing"),
    (["megatron/gpt2_text_sentence.idx"], "megatron", "uint16", None, "gpt2", 0, 120, "append, but not to nothing"),
    (["megatron/cl100k_text_document.bin"], "megatron", "int32", None, "cl100k", 0, 120, "append, but not to nothing"),
    (["parquet/tokens_list_i32.parquet"], "parquet", "int32", None, "gpt2", 0, 380, "none"),
    (["parquet/tokens_list_i64.parquet"], "parquet", "int64", None, "gpt2", 0, 200, "none"),
    (["hf/to_parquet.parquet"], "parquet", "int32", None, "gpt2", 0, 200, "none"),
    (["arrow/tokens_file.arrow"], "arrow", "int32", None, "gpt2", 0, 380, "none"),
    (["hf/tokens"], "arrow", "int32", None, "gpt2", 0, 200, "none"),
]


@pytest.fixture(scope="module")
def truth(samples: Path) -> dict[str, npt.NDArray[np.int64]]:
    with np.load(io.BytesIO((samples / "truth.npz").read_bytes())) as arrays:
        return {name: arrays[name].astype(np.int64) for name in arrays.files}


def documents_of(
    truth: dict[str, npt.NDArray[np.int64]], vocabulary: str, numbers: Sequence[int], policy: str
) -> list[list[int]]:
    offsets, tokens = truth[f"{vocabulary}_offsets"], truth[f"{vocabulary}_tokens"]
    end = [END_OF_TEXT[vocabulary]]
    documents = []
    for number in numbers:
        ids = tokens[offsets[number] : offsets[number + 1]].tolist()
        if policy == "append" or (policy == "append, but not to nothing" and ids):
            ids = ids + end
        elif policy == "prepend":
            ids = end + ids
        documents.append(ids)
    return documents


@pytest.mark.parametrize(("names", "format", "dtype", "said", "vocabulary", "first", "end", "policy"), CASES)
def test_sample_equals_the_true_tokens(
    samples: Path,
    truth: dict[str, npt.NDArray[np.int64]],
    names: list[str],
    format: str,
    dtype: str,
    said: str | None,
    vocabulary: str,
    first: int,
    end: int,
    policy: str,
) -> None:
    documents = documents_of(truth, vocabulary, range(first, end), policy)
    expected = [token for document in documents for token in document]
    with open_corpus([samples / name for name in names], dtype=said) as corpus:
        assert (corpus.format, corpus.dtype) == (format, np.dtype(dtype))
        assert corpus.tokens(0, corpus.num_tokens).tolist() == expected
        if format in ("arrow", "megatron", "parquet"):
            assert corpus.num_documents == end - first
            assert corpus.document_offsets is not None
            assert np.diff(corpus.document_offsets).tolist() == [len(document) for document in documents]
            assert corpus.document_offsets[EMPTY_DOCUMENT] == corpus.document_offsets[EMPTY_DOCUMENT + 1]
        else:
            assert corpus.num_documents is None
            assert corpus.document_offsets is None


def test_folder_of_headerless_npy_equals_the_true_tokens(
    samples: Path, truth: dict[str, npt.NDArray[np.int64]]
) -> None:
    """Files of the Dolma toolkit: shuffled documents, no header, `.csv.gz` side files."""
    documents = documents_of(truth, "gpt2", truth["dolma_order"].tolist(), "append")
    with open_corpus(samples / "dolma" / "gpt2_u16") as corpus:
        assert corpus.format == "flat"
        assert [path.name for path in corpus.files] == [f"part-0-0000{number}.npy" for number in range(3)]
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for document in documents for token in document]


def test_rows_of_a_two_dimensional_npy_follow_one_another(
    samples: Path, truth: dict[str, npt.NDArray[np.int64]]
) -> None:
    documents = documents_of(truth, "gpt2", range(380), "append")
    expected = [token for document in documents for token in document][: 40 * 512]
    with open_corpus(samples / "npy" / "gpt2_i32_2d.npy") as corpus:
        assert corpus.dtype == np.int32
        assert corpus.tokens(0, corpus.num_tokens).tolist() == expected


def test_every_sample_file_is_in_a_test(samples: Path) -> None:
    tested = {name for case in CASES for name in case[0]} | {"npy/gpt2_i32_2d", "dolma/gpt2_u16", "truth"}
    tested |= SHARDS  # in test_shard_samples
    tested = {name if (samples / name).is_dir() else name.split(".")[0] for name in tested}
    files = {path.relative_to(samples) for path in samples.rglob("*") if path.is_file()}
    assert {str(file) for file in files if not tested & {str(file).split(".")[0], str(file.parent)}} == set()


def test_uint32_sample_is_not_taken_for_uint16(samples: Path) -> None:
    with pytest.raises(CorpusFormatError, match="uint32 or int32"):
        open_corpus(samples / "nanogpt" / "cl100k_u32.bin")
