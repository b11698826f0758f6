"""`keep`: documents are dropped and repeated as a file says; the rest is as of a corpus in which that has been done."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents
from streams import check_resumes_on_other_ranks
from test_named_rows import document_rows, tokens_of
from typer.testing import CliRunner

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus.keep import MOST_COPIES, read_keep
from dali_pipes.errors import ConfigError, CorpusFormatError, CorpusReadError, StateError
from dali_pipes.rows.document_rows import split_documents
from dali_pipes.rows.item_order import BlockShape
from dali_pipes.tools.cli import app

COPIES = st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any)


@settings(max_examples=examples(60))
@given(
    st.data(), COPIES, st.sampled_from(["pack", "pad"]), st.sampled_from(["split", "truncate", "drop"]), st.booleans()
)
def test_rows_are_those_of_a_corpus_that_was_rewritten(
    data: st.DataObject, copies: list[int], mode: str, long_documents: str, shuffle: bool
) -> None:
    """The same rows, in the same order, as without `keep` from a corpus in which each copy is a document."""
    lengths = data.draw(st.lists(st.integers(0, 19), min_size=len(copies), max_size=len(copies)))
    blocks = data.draw(st.sampled_from([None, BlockShape(2, 16)]))
    options: dict[str, Any] = {"mode": mode, "long_documents": long_documents, "shuffle": shuffle, "blocks": blocks}
    rows = document_rows(lengths, **options, copies=np.array(copies, np.uint8))
    whose = [document for document, count in enumerate(copies) for _ in range(count)]
    rewritten = document_rows([lengths[document] for document in whose], **options)
    # Token t of the rewritten corpus is this one of the corpus.
    begins = np.cumsum([0, *lengths]).tolist()
    origin = [begins[document] + t for document in whose for t in range(lengths[document])]
    for pass_number in (0, 1):
        expected = [tuple(origin[t] for t in row) for row in tokens_of(rewritten, pass_number)]
        assert tokens_of(rows, pass_number) == expected
    report, wanted = rows.report(0), rewritten.report(0)
    assert (report.documents, report.tokens, report.rows) == (len(whose), wanted.tokens, wanted.rows)
    assert report.removed_documents == copies.count(0)
    assert report.extra_copies == sum(count - 1 for count in copies if count)
    assert (rows.num_documents, rows.num_tokens, rows.left_out()[:2]) == (
        rewritten.num_documents,
        rewritten.num_tokens,
        rewritten.left_out()[:2],
    )


@settings(max_examples=examples(30))
@given(COPIES, st.integers(1, 7), st.integers(0, 99), st.booleans())
def test_a_share_is_one_of_the_documents_and_keeps_their_copies(
    copies: list[int], below: int, seed: int, shuffle: bool
) -> None:
    share = Fraction(1, below)
    options: dict[str, Any] = {"mode": "pad", "name": "web", "share": share, "seed": seed, "shuffle": shuffle}
    rows = document_rows([3] * len(copies), **options, copies=np.array(copies, np.uint8))
    read = Counter(row[0] // 3 for row in tokens_of(rows, 1))
    assert len(read) == max(1, sum(map(bool, copies)) * share.numerator // share.denominator)
    assert all(count == copies[document] for document, count in read.items())
    others = document_rows([3] * len(copies), **{**options, "seed": seed + 1}, copies=np.array(copies, np.uint8))
    assert Counter(row[0] // 3 for row in tokens_of(others, 0)) == read, "the share does not depend on seed or pass"


DOCUMENTS = [[number % 8 + 1] * (number * 7 % 11) + [END] for number in range(40)]
NUMBERS = [(0, 1, 2, 1, 0, 3)[number % 6] for number in range(len(DOCUMENTS))]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_documents(tmp_path / "corpus", DOCUMENTS)
    np.save(tmp_path / "keep.npy", np.array(NUMBERS))
    return str(tmp_path / "corpus")


def settings_of(corpus: str, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "eos_id": END, "rows": "pad", "seq_len": 6}
    common |= {"batch_size": 2, "window_documents": 9, "device": "cpu", "quiet": True, "drop_last": False}
    common |= {"outputs": ("input_ids", "labels", "row_ids"), "keep": str(Path(corpus).parent / "keep.npy")}
    return common | changes


@pytest.mark.parametrize("rows", ["pack", pytest.param("pad", marks=pytest.mark.slow)])
def test_a_resume_at_every_step_on_other_ranks(corpus: str, rows: str) -> None:
    check_resumes_on_other_ranks(lambda **changes: TokenLoader(**settings_of(corpus, rows=rows, **changes)))


def test_no_document_is_on_both_sides(corpus: str) -> None:
    """The split is that of all documents, and each side has the copies of its own."""
    offsets = np.cumsum([0, *map(len, DOCUMENTS)])
    sides = {}
    for split in ("train", "validation"):
        part = split_documents(offsets, split, 0.3)
        first = int(np.searchsorted(offsets, part[0]))
        expected: Counter[tuple[int, ...]] = Counter()
        for document in range(first, first + len(part) - 1):
            expected[tuple(DOCUMENTS[document][:6])] += NUMBERS[document]
        changes = {"split": split, "validation_fraction": 0.3, "long_documents": "truncate", "batch_size": 1}
        with TokenLoader(**settings_of(corpus, **changes)) as loader:
            sides[split] = Counter(
                tuple(token for token in batch["input_ids"][0].tolist() if token) for batch in loader
            )
            report = loader.plan_report()
        numbers = NUMBERS[first : first + len(part) - 1]
        assert sides[split] == +expected
        assert (report.documents, report.removed_documents) == (sum(numbers), numbers.count(0))
        assert report.extra_copies == sum(n - 1 for n in numbers if n)


def test_files_of_any_type_say_the_same(corpus: str, tmp_path: Path) -> None:
    digests = set()
    for number, dtype in enumerate(("u1", "<i2", ">i4", "<u8", "int64")):
        np.save(tmp_path / f"{number}.npy", np.array(NUMBERS, dtype))
        digests.add(read_keep(tmp_path / f"{number}.npy").digest)
    for number, end in enumerate(("", "\n", "\r\n")):
        (tmp_path / f"{number}.txt").write_bytes((end or "\n").join(map(str, NUMBERS)).encode() + end.encode())
        digests.add(read_keep(str(tmp_path / f"{number}.txt")).digest)
    assert len(digests) == 1
    np.save(tmp_path / "bool.npy", np.array(NUMBERS, bool))
    keep = read_keep(tmp_path / "bool.npy")
    assert (keep.kept, keep.dropped, keep.extra_copies) == (len(NUMBERS) - NUMBERS.count(0), NUMBERS.count(0), 0)
    with TokenLoader(**settings_of(corpus, keep=tmp_path / "0.txt")) as loader:
        state = loader.state_dict()
    with TokenLoader(**settings_of(corpus)) as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("write", "error", "parts"),
    [
        (lambda path: np.save(path, np.ones(39, int)), CorpusFormatError, ["39 numbers", "40 documents"]),
        (lambda path: np.save(path, np.array([1, -2])), CorpusFormatError, ["entry 1", "-2", str(MOST_COPIES)]),
        (lambda path: np.save(path, np.array([300])), CorpusFormatError, ["entry 0", "300"]),
        (lambda path: np.save(path, np.array([2**63], np.uint64)), CorpusFormatError, ["entry 0", f"{2**63:,}"]),
        (lambda path: np.save(path, np.array([0.5])), CorpusFormatError, ["<f8"]),
        (lambda path: np.save(path, np.array([{}])), CorpusFormatError, ["O"]),
        (lambda path: path.write_text("1\n\n2\n"), CorpusFormatError, ["line 2", "''"]),
        (lambda path: path.write_text("1\n0.5\n"), CorpusFormatError, ["line 2", "'0.5'"]),
        (lambda path: path.write_text("1\n-1\n"), CorpusFormatError, ["line 2", "-1"]),
        (lambda path: path.write_bytes(b""), CorpusFormatError, ["0 numbers", "40 documents"]),
        (lambda path: np.save(path, np.zeros(40, int)), ConfigError, ["train", "40 documents"]),
        (lambda path: None, CorpusReadError, []),
    ],
    ids=[
        *("length", "negative", "many", "huge", "floats", "objects", "blank line", "fraction", "negative line"),
        *("empty", "none kept", "missing"),
    ],
)
def test_bad_files_are_refused(corpus: str, tmp_path: Path, write: Any, error: Any, parts: list[str]) -> None:
    path = tmp_path / "bad.npy"
    write(path)
    with pytest.raises(error) as raised:
        TokenLoader(**settings_of(corpus, keep=path))
    assert all(part in str(raised.value) for part in [str(path), *parts])


def test_a_changed_file_is_another_corpus(corpus: str, tmp_path: Path) -> None:
    with TokenLoader(**settings_of(corpus)) as loader:
        state = loader.state_dict()
        assert len(json.dumps(state)) < 1024
    changed = [*NUMBERS]
    changed[7] += 1
    np.save(tmp_path / "changed.npy", np.array(changed))
    for keep in (str(tmp_path / "changed.npy"), None):
        with TokenLoader(**settings_of(corpus, keep=keep)) as loader:
            with pytest.raises(StateError) as raised:
                loader.load_state_dict(state)
            assert all(part in str(raised.value) for part in ["keep", state["corpus"]["keep"], keep or "nothing"])
            without = loader.state_dict()
    with TokenLoader(**settings_of(corpus)) as loader, pytest.raises(StateError, match="keep"):
        loader.load_state_dict(without)


def test_documents_found_in_a_scan_are_those_with_any_file(corpus: str, tmp_path: Path) -> None:
    """A new file of the same length does not read the corpus again to find its documents, but plans again."""
    with TokenLoader(**settings_of(corpus)) as loader:
        key, report = loader.corpus.content_key, loader.plan_report()
    np.save(tmp_path / "other.npy", np.ones(len(DOCUMENTS), int))
    with TokenLoader(**settings_of(corpus, keep=tmp_path / "other.npy")) as loader:
        assert loader.corpus.content_key == key
        assert loader.plan_report().documents == len(DOCUMENTS) != report.documents


def test_what_it_does_not_go_with(corpus: str) -> None:
    with pytest.raises(ConfigError, match=r'keep = .*rows = "stream"'):
        LoaderConfig(**settings_of(corpus, rows="stream"))
    with pytest.raises(ConfigError, match="keep: expected one path, found 2"):
        LoaderConfig(**settings_of(corpus, keep=["a", "b"]))
    for numbers, kind in ((NUMBERS, "list"), (np.array(NUMBERS), "ndarray")):
        with pytest.raises(ConfigError, match=rf"keep: .*{kind}.*keep\.npy"):
            LoaderConfig(**settings_of(corpus, keep=numbers))
    plain = settings_of(corpus)
    keep, path = plain.pop("keep"), plain.pop("corpus")
    source = {"corpus": path, "weight": 1}
    with pytest.raises(ConfigError, match=r"keep = .*sources of mixture"):
        LoaderConfig(**plain, mixture={"web": source}, keep=keep)
    with pytest.raises(ConfigError, match=r'mixture.web: .*keep = .*rows = "stream"'):
        LoaderConfig(**plain, mixture={"web": source | {"keep": keep, "rows": "stream"}})


def test_a_cache_of_blocks_does_not_hold_copies_of_a_share(corpus: str, tmp_path: Path) -> None:
    plain = settings_of(corpus, order="blocks", cache_dir=str(tmp_path / "cache"), total_rows=9)
    source = {"corpus": plain.pop("corpus"), "weight": 1, "keep": plain.pop("keep")}
    with TokenLoader(**plain, mixture={"web": source}) as loader:
        assert sum(1 for _ in loader) == 5
    with pytest.raises(ConfigError, match=r"cache_dir = .*keep = .*share"):
        TokenLoader(**plain, mixture={"web": {**source, "share": 0.5}})


def test_each_source_of_a_mixture_has_its_own(corpus: str, tmp_path: Path) -> None:
    write_documents(tmp_path / "code", [[5] * 3 + [END]] * 30)
    plain = settings_of(corpus, long_documents="truncate", total_rows=400)
    keep, path = plain.pop("keep"), plain.pop("corpus")
    mixture = {
        "web": {"corpus": path, "weight": 1, "keep": keep},
        "code": {"corpus": str(tmp_path / "code"), "weight": 1},
    }
    with TokenLoader(**plain, mixture=mixture) as loader:
        served = Counter(
            tuple(token for token in row if token) for batch in loader for row in batch["input_ids"].tolist()
        )
        state = loader.state_dict()
        report = loader.plan_report("web")
    assert report.removed_documents == NUMBERS.count(0)
    dropped = {tuple(d[:6]) for d, n in zip(DOCUMENTS, NUMBERS, strict=True) if not n}
    read = Counter({tuple(d[:6]): 0 for d in DOCUMENTS})
    for document, count in zip(DOCUMENTS, NUMBERS, strict=True):
        read[tuple(document[:6])] += count
    assert not (dropped - set(+read)) & set(served)
    assert served[(5, 5, 5, END)] >= 100
    np.save(tmp_path / "changed.npy", np.array(NUMBERS[::-1]))
    mixture["web"]["keep"] = str(tmp_path / "changed.npy")
    with TokenLoader(**plain, mixture=mixture) as loader, pytest.raises(StateError, match=r"mixture\.web: .*keep"):
        loader.load_state_dict(state)


def test_inspect_counts_what_it_keeps(corpus: str, tmp_path: Path) -> None:
    run = ["inspect", corpus, "--dtype", "uint16", "--eos", str(END), "--json", "--keep"]
    result = CliRunner().invoke(app, [*run, str(tmp_path / "keep.npy")])
    report = json.loads(result.stdout)
    extra = sum(n - 1 for n in NUMBERS if n)
    assert report["keep"] == {"kept": 40 - NUMBERS.count(0), "dropped": NUMBERS.count(0), "extra_copies": extra}
    np.save(tmp_path / "short.npy", np.ones(3, int))
    failed = CliRunner().invoke(app, [*run, str(tmp_path / "short.npy")])
    assert failed.exit_code != 0
    bare = CliRunner().invoke(
        app, ["inspect", corpus, "--dtype", "uint16", "--json", "--keep", str(tmp_path / "short.npy")]
    )
    (note,) = (note for note in json.loads(bare.stdout)["notes"] if "--eos" in note)
    assert "keep" in note
