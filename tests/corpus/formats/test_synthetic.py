"""Synthetic corpora: against the formula written out in Python's own integers, and through everything a corpus does."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader, open_corpus
from dali_pipes.corpus.formats.synthetic import MEAN_DOCUMENT, MOST_DOCUMENTS, MOST_TOKENS, SyntheticIds, parse_size
from dali_pipes.errors import ConfigError, CorpusError

WORD = 2**64
LARGEST = 10**15
VOCABULARIES = st.sampled_from([1, 2, 3, 256, 50_257, 65_536, 65_537, 128_256, 2**31]) | st.integers(1, 2**31)


def mixed(number: int) -> int:
    """splitmix64's output for a state of `number` steps more than one."""
    state = (number + 1) * 0x9E3779B97F4A7C15 % WORD
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB % WORD
    return state ^ state >> 31


def boundary(number: int) -> int:
    return number * 1024 + mixed(2**62 + number) % 1024


def ends_a_document(position: int, num_tokens: int) -> bool:
    behind = position + 1
    return behind == num_tokens or any(boundary(k) == behind for k in (behind // 1024, behind // 1024 - 1) if k > 0)


def id_at(position: int, num_tokens: int, vocab_size: int, eos_id: int | None = None) -> int:
    end = vocab_size - 1 if eos_id is None else eos_id
    if ends_a_document(position, num_tokens):
        return end
    others = max(1, vocab_size - 1)
    if vocab_size <= 2**16:
        word, place = divmod(position, 4)
        half, is_second = divmod(place, 2)
    else:
        word, half = divmod(position, 2)
        is_second = 0
    fraction = mixed(word) >> 32 * half & 0xFFFFFFFF
    if is_second:
        fraction = fraction * others % 2**32
    drawn = fraction * others >> 32
    return drawn + (drawn >= end) if end < vocab_size - 1 else drawn


@given(
    size=st.integers(1, LARGEST) | st.integers(1, 5000),
    vocab_size=VOCABULARIES,
    data=st.data(),
)
def test_ids_are_those_of_the_formula(size: int, vocab_size: int, data: st.DataObject) -> None:
    """Also where documents end, and at both ends of the corpus."""
    eos_id = data.draw(st.none() | st.integers(0, vocab_size - 1))
    near = st.integers(1, max(1, size // 1024)).map(lambda k: boundary(k) - 2)
    wanted = data.draw(st.lists(st.integers(0, size - 1) | near | st.integers(size - 9, size) | st.just(0), min_size=1))
    starts = [max(0, min(start, size)) for start in wanted]  # at the end is a piece of no id
    lengths = [min(size - start, data.draw(st.integers(0, 9))) for start in starts]
    corpus = open_corpus(f"synthetic:{size}", vocab_size=vocab_size, eos_id=eos_id)
    out = np.full(sum(lengths), 7, corpus.dtype)
    targets = np.cumsum([0, *lengths[:-1]])
    corpus.read_pieces(np.array(starts), np.array(lengths), targets, out)
    expected = [
        id_at(start + at, size, vocab_size, eos_id) for start, n in zip(starts, lengths, strict=True) for at in range(n)
    ]
    assert out.tolist() == expected
    assert all(0 <= token < vocab_size for token in expected)


@settings(max_examples=examples(10))
@given(
    first=st.integers(0, LARGEST - 400_000),
    cuts=st.lists(st.integers(0, 400_000), max_size=6),
    vocab_size=st.sampled_from([50_257, 128_256]),
    dtype=st.sampled_from([None, "int32", "int64"]),
)
def test_any_slicing_reads_the_same(first: int, cuts: list[int], vocab_size: int, dtype: str | None) -> None:
    """Long pieces, which are made in tiles, and their parts, one by one and together, in any order."""
    corpus = open_corpus("synthetic:1000T", vocab_size=vocab_size, dtype=dtype)
    whole = corpus.tokens(first, 400_000)
    borders = sorted({0, 400_000, *cuts})
    starts, ends = np.array(borders[:-1]), np.array(borders[1:])
    assert np.concatenate(list(map(corpus.tokens, first + starts, ends - starts))).tolist() == whole.tolist()
    order = np.random.default_rng(first).permutation(len(starts))
    out = np.zeros(400_000, corpus.dtype)
    corpus.read_pieces(first + starts[order], (ends - starts)[order], starts[order], out)
    assert (out == whole).all()


@pytest.mark.parametrize("vocab_size", [50_257, 100_000])
def test_ids_are_spread_evenly_and_do_not_tell_the_next(vocab_size: int) -> None:
    count = 1 << 21
    ids = open_corpus("synthetic:1T", vocab_size=vocab_size).tokens(987_654_321, count)
    ids = ids[ids != vocab_size - 1].astype(np.int64)
    bins = ids * 997 // (vocab_size - 1)
    expected = len(ids) / 997
    found = np.bincount(bins, minlength=997)
    # Chi-square of 996 degrees of freedom is 996 +- 45; bins differ in width by up to 2 %, which adds some.
    widths = np.bincount(np.arange(vocab_size - 1) * 997 // (vocab_size - 1), minlength=997) * 997 / (vocab_size - 1)
    assert ((found - expected * widths) ** 2 / (expected * widths)).sum() < 1300
    for lag in (1, 2, 3, 4):
        pairs = np.bincount(ids[:-lag] % 32 * 32 + ids[lag:] % 32, minlength=32 * 32).reshape(32, 32)
        marginal = np.bincount(ids % 32, minlength=32) / len(ids)
        wanted = marginal[:, None] * marginal * (len(ids) - lag)
        assert ((pairs - wanted) ** 2 / wanted).sum() < 1024 + 8 * math.sqrt(2 * 1024)


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2048, 5000, 300_000])
def test_documents_are_where_the_end_id_is(size: int) -> None:
    corpus = open_corpus(f"synthetic:{size}")
    ids, offsets = corpus.tokens(0, size), corpus.document_offsets
    assert offsets is not None
    assert offsets.tolist() == [0, *(np.flatnonzero(ids == 50_256) + 1).tolist()]
    assert corpus.num_documents == len(offsets) - 1
    lengths = np.diff(offsets)
    assert lengths.min() >= 1
    assert lengths.max() < 2 * MEAN_DOCUMENT
    if size == 300_000:
        assert len(set(lengths.tolist())) > 100


@given(st.integers(1, 3000) | st.integers(1, MOST_TOKENS))
def test_documents_are_counted_without_being_listed(size: int) -> None:
    count = SyntheticIds(size, 50_257).num_documents
    last = (size - 1) // 1024
    known = 1 + last - (last > 0 and boundary(last) >= size)
    assert count == (known if known <= MOST_DOCUMENTS else None)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("10B", 10**10),
        ("1.5M", 1_500_000),
        ("0.001K", 1),
        ("7", 7),
        ("1_000_000", 10**6),
        ("2t", 2 * 10**12),
        (" 3k", 3000),
        ("1000T", 10**15),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, tokens: int) -> None:
    assert parse_size(f"synthetic:{text}") == tokens


@pytest.mark.parametrize("text", ["", "B", "10G", "ten", "-1B", "1e9", "10 BB", "1..5B", "10B,", "٣B"])
def test_another_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"corpus 'synthetic:{text}'") + '.*such as "synthetic:10B"'):
        open_corpus(f"synthetic:{text}")


@pytest.mark.parametrize("text", ["0", "0.5", "1.0001K", "1001T"])
def test_a_number_of_tokens_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an integer from 1 to 1,000,000,000,000,000"):
        open_corpus(f"synthetic:{text}")


@pytest.mark.parametrize(
    ("paths", "options", "message"),
    [
        (["synthetic:1K", "a.bin"], {}, "'synthetic:1K' cannot be combined with other data, but 2 entries are listed"),
        (["synthetic:1K", "synthetic:1K"], {}, "cannot be combined"),
        ("a.bin", {"format": "synthetic"}, "needs a corpus such as \"synthetic:10B\", found 'a.bin'"),
        ("synthetic:1K", {"loss_masks": ["a.loss"]}, "loss_masks = .* not to a synthetic corpus"),
        ("synthetic:1K", {"token_column": "ids"}, "token_column = 'ids' applies to files"),
        ("synthetic:1K", {"verify": True}, "verify_checksums = True applies to files"),
        ("synthetic:1K", {"dtype": "uint8"}, "ids of synthetic:1K go up to 50,256"),
        ("synthetic:1K", {"dtype": "uint64"}, "int32 or int64"),
        ("synthetic:1K", {"dtype": "float32"}, "an integer type"),
        ("synthetic:1K", {"vocab_size": 100, "eos_id": 100}, "eos_id = 100: .* below vocab_size = 100"),
        ("synthetic:1K", {"vocab_size": 2**40}, "vocab_size = 1099511627776"),
    ],
)
def test_what_does_not_go_with_it_is_refused(paths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_corpus(paths, **options)


def test_a_file_of_that_name_is_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(9, dtype=np.uint16).tofile("synthetic:1K")
    assert open_corpus("synthetic:1K").num_tokens == 9
    assert open_corpus("synthetic:1K", format="synthetic").num_tokens == 1000


def test_the_fingerprint_tells_size_vocabulary_end_and_type_apart_and_nothing_else() -> None:
    def fingerprint(text: str, **options: Any) -> str:
        return open_corpus(text, **options).fingerprint

    same = {fingerprint("synthetic:10B"), fingerprint("synthetic:10000M", vocab_size=50_257, eos_id=50_256)}
    assert len(same) == 1
    others = [
        fingerprint("synthetic:10001M"),
        fingerprint("synthetic:10B", vocab_size=50_258),
        fingerprint("synthetic:10B", eos_id=0),
        fingerprint("synthetic:10B", dtype="uint32"),
    ]
    assert len({*same, *others}) == 5


def test_ids_and_fingerprint_stay_what_they_are() -> None:
    """Saved states hold the fingerprint: a changed formula needs another version in it."""
    corpus = open_corpus("synthetic:10B")
    assert corpus.fingerprint == "a525bb885bc2d128"
    assert corpus.tokens(0, 8).tolist() == [24169, 14682, 44391, 33569, 31748, 24341, 21686, 43773]
    assert corpus.tokens(10**10 - 2, 2).tolist() == [id_at(10**10 - 2, 10**10, 50_257), 50_256]


def test_what_lies_outside_is_an_error() -> None:
    corpus = open_corpus("synthetic:1K")
    with pytest.raises(CorpusError, match="the corpus has 1,000 tokens"):
        corpus.tokens(998, 3)
    assert corpus.tokens(1000, 0).tolist() == []
    out = np.full(2, 7, np.uint16)
    corpus.read_pieces(np.array([5, 1000]), np.array([1, 0]), np.array([1, 1]), out)
    assert out.tolist() == [7, id_at(5, 1000, 50_257)]
    assert (str(corpus.locate(999).file), corpus.locate(999).offset) == ("synthetic:1K", 999)
    assert corpus.cache_stats() is None


Batches = list[dict[str, list[Any]]]


def served(loader: TokenLoader) -> Batches:
    return [{name: value.tolist() for name, value in batch.items() if hasattr(value, "tolist")} for batch in loader]


@pytest.fixture
def as_file(tmp_path: Any) -> Callable[..., str]:
    """The same ids in a file."""

    def write(size: int) -> str:
        open_corpus(f"synthetic:{size}").tokens(0, size).tofile(tmp_path / "same.bin")
        return str(tmp_path / "same.bin")

    return write


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "drop_last": False},
        {"stride": 50, "mtp": 2},
        {"rows": "pack", "outputs": ("input_ids", "labels", "segment_ids", "position_ids", "cu_seqlens")},
        {"rows": "pack", "long_documents": "truncate", "seq_len": 700},
        {"rows": "pad", "seq_len": 2048, "length_buckets": (512, 1024)},
        {"mask_boundaries": True},
        {"split": "validation", "validation_fraction": 0.3},
        {"validation_fraction": 0.3, "rank": 1, "world_size": 2},
        {"context_parallel": (1, 2)},
        {"num_threads": 5, "batches_per_run": 3},
    ],
    ids=str,
)
def test_a_loader_serves_what_it_serves_from_a_file_of_the_same_ids(
    options: dict[str, Any], as_file: Callable[..., str]
) -> None:
    common: dict[str, Any] = {
        "batch_size": 3,
        "seq_len": 128,
        "eos_id": 50_256,
        "vocab_size": 50_257,
        "device": "cpu",
        "quiet": True,
    }
    with TokenLoader(corpus="synthetic:40K", **(common | options)) as loader:
        batches = served(loader)
        places = [(place.position, place.row_id) for place in (loader.locate(1, row) for row in range(3))]
    with TokenLoader(corpus=as_file(40_000), **(common | options)) as loader:
        assert served(loader) == batches
        assert [(place.position, place.row_id) for place in (loader.locate(1, row) for row in range(3))] == places
    assert len(batches) > 2


@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_a_run_goes_on_where_it_stopped(rows: str) -> None:
    config = LoaderConfig(
        corpus="synthetic:60K", batch_size=2, seq_len=256, rows=rows, device="cpu", quiet=True, vocab_size=1000
    )
    with TokenLoader(config) as loader:
        whole = served(loader)
    with TokenLoader(config) as loader:
        first = [batch for _, batch in zip(range(5), served_lazily(loader), strict=False)]
        state = loader.state_dict()
    with TokenLoader(config.replace(batch_size=1, rank=0, world_size=2, num_threads=1)) as loader:
        loader.load_state_dict(state)
        rest = served(loader)
    assert first == whole[:5]
    assert [batch["input_ids"][0] for batch in rest] == [batch["input_ids"][0] for batch in whole[5:]]


def served_lazily(loader: TokenLoader) -> Any:
    for batch in loader:
        yield {name: value.tolist() for name, value in batch.items()}


def test_any_size_starts_at_once_and_reaches_any_step() -> None:
    with TokenLoader(corpus="synthetic:1000T", batch_size=2, seq_len=1024, device="cpu") as loader:
        assert len(loader) == (LARGEST - 1) // 1024 // 2
        assert "synthetic" in loader.summary()
        batch = next(iter(loader))
        place = loader.locate(0, 1)
        expected = [id_at(place.position + at, LARGEST, 50_257) for at in range(1025)]
        assert batch["input_ids"][1].tolist() == expected[:-1]
        assert batch["labels"][1].tolist() == expected[1:]
        assert loader.locate(len(loader) - 1, 0).file.name == "synthetic:1000T"


def test_a_corpus_of_too_many_documents_says_so() -> None:
    common: dict[str, Any] = {"batch_size": 2, "seq_len": 1024, "device": "cpu", "eos_id": 50_256}
    with pytest.raises(ConfigError, match=r'synthetic:100B: has too many documents .* such as "synthetic:50B"'):
        TokenLoader(corpus="synthetic:100B", rows="pack", **common)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "pack", "document_start_id": 3}, "document_start_id = 3 applies to files"),
        ({"tokenizer": "tokenizer.json"}, r"tokenizer = 'tokenizer\.json' applies to text"),
        ({"text_key": "body"}, "text_key = 'body'"),
    ],
)
def test_settings_of_files_are_refused_by_a_loader(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenLoader("synthetic:50K", batch_size=2, seq_len=8, device="cpu", quiet=True, **options)
