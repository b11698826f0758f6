"""Documents without tokens, in every format that can tell of documents, through the whole loader."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import Tokens, write_llmc, write_megatron

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import CorpusError

LENGTHS = [0, 5, 0, 0, 3, 1, 0]
ID = 99
"""That ends or begins documents."""
T = 4
Contents = list[list[int]]


def contents(lengths: list[int]) -> Contents:
    numbers = itertools.count(1)
    return [list(itertools.islice(numbers, length)) for length in lengths]


def ended(documents: Contents) -> Contents:
    """Where an id ends documents, one without tokens is that id alone."""
    return [[*document, ID] for document in documents]


def begun(documents: Contents) -> Contents:
    return [[ID, *document] for document in documents]


def joined(documents: Contents, dtype: str) -> Tokens:
    return np.array([token for document in documents for token in document], dtype)


def write_index(folder: Path, documents: Contents) -> None:
    write_megatron(folder / "tokens", [np.array(document, np.uint16) for document in documents])


def write_sequences(folder: Path, documents: Contents) -> None:
    """Documents of no, one and three sequences, some of these without tokens as well."""
    sequences: list[Tokens] = []
    begins = [0]
    for number, document in enumerate(documents):
        tokens = np.array(document, np.int32)
        one_or_none = [tokens] if document or number % 2 == 0 else []
        sequences += [tokens[:0], tokens[:2], tokens[2:]] if len(tokens) > 2 else one_or_none
        begins.append(len(sequences))
    write_megatron(folder / "tokens", sequences, begins)


def write_files(folder: Path, documents: Contents) -> None:
    """Three files, of which the first and the last have documents but no token."""
    for name, part in (("a", documents[:1]), ("b", documents[1:-1]), ("c", documents[-1:])):
        write_megatron(folder / name, [np.array(document, np.uint16) for document in part])


def write_flat(folder: Path, documents: Contents) -> None:
    joined(documents, "uint16").tofile(folder / "tokens.bin")


def write_npy(folder: Path, documents: Contents) -> None:
    np.save(folder / "tokens.npy", joined(documents, "int64"))


def write_header(folder: Path, documents: Contents) -> None:
    write_llmc(folder / "tokens.bin", joined(documents, "uint32"))


@dataclass
class Format:
    write: Callable[[Path, Contents], None]
    delimit: Callable[[Contents], Contents] = list
    settings: dict[str, Any] = field(default_factory=dict)


FORMATS = {
    "megatron": Format(write_index),
    "megatron, sequences": Format(write_sequences),
    "megatron, files": Format(write_files),
    "flat, end id": Format(write_flat, ended, {"eos_id": ID, "dtype": "uint16"}),
    "flat, start id": Format(write_flat, begun, {"document_start_id": ID, "dtype": "uint16"}),
    "npy, end id": Format(write_npy, ended, {"eos_id": ID}),
    "npy, start id": Format(write_npy, begun, {"document_start_id": ID}),
    "llmc, end id": Format(write_header, ended, {"eos_id": ID}),
    "llmc, start id": Format(write_header, begun, {"document_start_id": ID}),
}


def load(folder: Path, found: Format, **changes: Any) -> TokenLoader:
    common: dict[str, Any] = {"device": "cpu", "seq_len": T, "batch_size": 1, "outputs": OUTPUT_NAMES}
    common |= {"mask_boundaries": True, "drop_last": False, "window_documents": 2, "shuffle": False}
    return TokenLoader(corpus=str(folder), **{**common, **found.settings, **changes})


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else value.tolist() for name, value in batch.items()}


def segments_of(batch: dict[str, Any]) -> list[list[int]]:
    """The tokens of each segment of a batch, checked against all that tells where segments are."""
    bounds = batch["cu_seqlens"][: batch["num_segments"] + 1]
    assert bounds[0] == 0
    assert bounds[-1] == batch["cu_seqlens"][-1] == sum(map(len, batch["input_ids"]))
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert min(sizes) > 0
    assert max(sizes) == batch["max_seqlen"]
    names = ("input_ids", "position_ids", "segment_ids", "attention_mask")
    flat: dict[str, list[int]] = {name: list(itertools.chain.from_iterable(batch[name])) for name in names}
    found = []
    for begin, end in itertools.pairwise(bounds):
        part = {name: values[begin:end] for name, values in flat.items()}
        is_real = part["attention_mask"][0]
        assert part["attention_mask"] == [is_real] * (end - begin)
        assert part["position_ids"] == (list(range(end - begin)) if is_real else [0] * (end - begin))
        assert len(set(part["segment_ids"])) == 1
        assert (part["segment_ids"][0] > 0) == bool(is_real)
        if is_real:
            found.append(part["input_ids"])
    return found


@pytest.fixture(params=FORMATS)
def found(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def folder(tmp_path: Path, found: Format) -> Path:
    (tmp_path / "corpus").mkdir()
    found.write(tmp_path / "corpus", found.delimit(contents(LENGTHS)))
    return tmp_path / "corpus"


def pieces_of(documents: Contents) -> Contents:
    return [document[at : at + T] for document in documents for at in range(0, len(document), T)]


@pytest.mark.parametrize("rows", ["pack", "pad"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_token_is_served_once(folder: Path, found: Format, rows: str, shuffle: bool) -> None:
    documents = found.delimit(contents(LENGTHS))
    with load(folder, found, rows=rows, shuffle=shuffle) as loader:
        for _ in range(2):
            report = loader.plan_report()
            batches = [plain(batch) for batch in loader]
            segments = [segment for batch in batches for segment in segments_of(batch)]
            assert sorted(segments) == sorted(pieces_of(documents))
            labels = [label for batch in batches for row in batch["labels"] for label in row if label != -100]
            assert sorted(labels) == sorted(token for piece in pieces_of(documents) for token in piece[1:])
            assert (report.documents, report.tokens) == (7, sum(map(len, documents)))
            assert report.dropped_tokens == 0
            assert report.rows == len(batches)


def test_windows_of_the_stream_are_cut_where_documents_are(folder: Path, found: Format) -> None:
    documents = found.delimit(contents(LENGTHS))
    with load(folder, found, rows="stream") as loader:
        batches = [plain(batch) for batch in loader]
    tokens = [token for document in documents for token in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    assert len(batches) == (len(tokens) - 1) // T
    for number, batch in enumerate(batches):
        here = slice(number * T, (number + 1) * T)
        pairs = itertools.groupby(zip(owners[here], tokens[here], strict=True), key=lambda pair: pair[0])
        assert segments_of(batch) == [[token for _, token in group] for _, group in pairs]
        ahead = zip(owners[here], owners[here.start + 1 :], tokens[here.start + 1 :], strict=False)
        assert batch["labels"] == [[token if owner == next_owner else -100 for owner, next_owner, token in ahead]]


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_resume_at_every_step(folder: Path, found: Format, rows: str) -> None:
    """Also from between two documents without tokens, in windows that make no row."""
    with load(folder, found, rows=rows) as loader:
        batches, states = [], [loader.state_dict()]
        for _ in range(2):
            for batch in loader:
                batches.append(plain(batch))
                states.append(json.loads(json.dumps(loader.state_dict())))
    with load(folder, found, rows=rows) as loader:
        for step, state in enumerate(states):
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [plain(batch) for _ in range(2) for batch in loader]
            assert rest[: len(batches) - step] == batches[step:]


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_nothing_but_empty_documents_is_one_clear_error(tmp_path: Path, found: Format, rows: str) -> None:
    found.write(tmp_path, contents([0, 0, 0]))
    with pytest.raises(CorpusError, match=r"the corpus is empty: 0 tokens in \d files?"):
        load(tmp_path, found, rows=rows)


def test_an_index_counts_them(tmp_path: Path) -> None:
    write_index(tmp_path, contents(LENGTHS))
    with open_corpus(tmp_path) as corpus:
        assert (corpus.num_documents, corpus.num_tokens) == (7, 9)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_empty_documents_at_the_border_of_a_split(tmp_path: Path, split: str) -> None:
    """Nine tokens, the last two of five documents of which three have none; both splits serve what they have."""
    write_index(tmp_path, contents([7, 0, 0, 2, 0]))
    with load(tmp_path, Format(write_index), rows="pad", split=split, validation_fraction=0.25) as loader:
        served = [segment for batch in loader for segment in segments_of(plain(batch))]
    assert served == ([[1, 2, 3, 4], [5, 6, 7]] if split == "train" else [[8, 9]])
