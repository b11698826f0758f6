"""`inspect` against the true tokens of every sample, a plain oracle of lengths, and corpora with faults."""

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run, run_json, run_well
from corpus_files import write_megatron
from counting import CountingCorpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from sample_corpora import NAMES, load_sample

from dali_pipes.corpus import open_corpus
from dali_pipes.documents import Documents
from dali_pipes.tools.reports.document_lengths import measure_lengths
from dali_pipes.tools.reports.id_scan import SAMPLE_IDS, SAMPLE_PLACES

Counting = Callable[..., CountingCorpus]
END = 9


def length_facts(lengths: Sequence[int], empty: int) -> dict[str, Any]:
    """The report of document lengths, made document by document."""
    counts = Counter(length.bit_length() for length in lengths)
    bits = range(min(counts), max(counts) + 1)
    return {
        "documents": len(lengths),
        "empty": empty,
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": pytest.approx(statistics.fmean(lengths)),
        "median": statistics.median(lengths),
        "buckets": [
            {"shortest": 2 ** (bit - 1) if bit else 0, "longest": 2**bit - 1, "documents": counts[bit]} for bit in bits
        ],
    }


def kinds(report: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = report["problem_counts"]
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_told_as_it_is(samples: Path, name: str) -> None:
    sample = load_sample(samples, name)
    report = run_json("inspect", *sample.paths, *sample.options, *sample.delimiter)
    with open_corpus(sample.paths, dtype=sample.dtype) as corpus:
        files = corpus.files
        assert report["fingerprint"] == corpus.fingerprint
    assert (report["format"], report["dtype"]) == (sample.format, sample.dtype)
    assert [file["path"] for file in report["files"]] == [str(file) for file in files]
    assert [file["size"] for file in report["files"]] == [os.path.getsize(file) for file in files]
    assert report["bytes"] == sum(map(os.path.getsize, files))
    assert report["tokens"] == len(sample.tokens) == sum(file["tokens"] for file in report["files"])
    assert report["documents"] == len(sample.lengths)
    by_id = f"{'start' if '--start-id' in sample.delimiter else 'end'} id {sample.eos}"
    assert report["documents_from"] == ("index" if sample.has_index else by_id)
    assert report["lengths"] == length_facts(sample.lengths, sample.empty)
    assert (report["largest_id"], report["ids_looked_at"]) == (max(sample.tokens), len(sample.tokens))
    assert report["is_full"]
    assert kinds(report) == ({"no_end_id": 1} if name == "matrix" else {})


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_shown(samples: Path, name: str) -> None:
    """The same figures as in JSON, for a reader."""
    sample = load_sample(samples, name)
    shown = run_well("inspect", *sample.paths, *sample.options, *sample.delimiter)
    assert re.search(rf"│ tokens +│ {len(sample.tokens):,} ", shown)
    assert re.search(rf"│ documents +│ {len(sample.lengths):,} ", shown)
    assert f"max {max(sample.lengths):,}, empty {sample.empty:,}" in shown
    bars = re.findall(r"^ *\d+(?: to \d+)? [█ ]{30} (\d+)$", shown.replace(",", ""), re.MULTILINE)
    assert sum(map(int, bars)) == len(sample.lengths)


def test_documents_are_left_out_where_nothing_tells_of_them(counting: Counting) -> None:
    report = run_json("inspect", counting(50, dtype="uint16").pattern)
    assert report["documents"] is report["documents_from"] is report["lengths"] is None


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=40), data=st.data())
def test_lengths_are_those_of_a_plain_count(counting: Counting, lengths: list[int], data: st.DataObject) -> None:
    """By an index, and by an id, which every document has at one end."""
    kind = data.draw(st.sampled_from(["index", "end id 9", "start id 9"]))
    if kind != "index":
        lengths = [length + 1 for length in lengths]
    tokens = np.zeros(sum(lengths), np.uint16)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    if kind == "end id 9":
        tokens[offsets[1:] - 1] = END
    elif kind == "start id 9":
        tokens[offsets[:-1]] = END
    empty = sum(length == (0 if kind == "index" else 1) for length in lengths)
    if len(tokens) and data.draw(st.booleans()):  # the outer document lacks its id
        tokens[-1 if kind.startswith("end") else 0] = 1
        outer = lengths[-1 if kind.startswith("end") else 0]
        empty -= kind != "index" and outer == 1
    if not len(tokens):
        tokens = np.zeros(1, np.uint16)  # a corpus has a token; the documents are told of separately
    folder = counting(1).folder
    tokens.tofile(folder / "lengths.bin")
    with open_corpus(folder / "lengths.bin", format="flat", dtype="uint16") as corpus:
        found = measure_lengths(corpus, Documents(offsets, kind))
    assert found is not None
    facts = length_facts(lengths, empty)
    assert {name: getattr(found, name) for name in facts if name != "buckets"} == {
        name: value for name, value in facts.items() if name != "buckets"
    }
    assert [bucket._asdict() for bucket in found.buckets] == facts["buckets"]


def test_a_sample_of_the_ids_says_so_and_a_full_look_sees_all(tmp_path: Path) -> None:
    """The largest id lies between the places of the sample, those of the first and last ids are in it."""
    ids = np.ones(2 * SAMPLE_PLACES * SAMPLE_IDS, np.uint16)
    ids[[0, -1]] = 77, 78
    ids[SAMPLE_IDS + 1] = 50_000
    ids.tofile(tmp_path / "large.bin")
    sampled = run_json("inspect", tmp_path / "large.bin", "--vocab-size", 1000)
    assert (sampled["largest_id"], sampled["ids_looked_at"]) == (78, SAMPLE_PLACES * SAMPLE_IDS)
    assert (sampled["is_full"], kinds(sampled)) == (False, {})
    shown = run_well("inspect", tmp_path / "large.bin")
    assert re.search(rf"│ largest id +│ 78 .*\b{SAMPLE_PLACES * SAMPLE_IDS:,} ids.*--full", shown)
    full = run_json("inspect", tmp_path / "large.bin", "--vocab-size", 1000, "--full")
    assert (full["largest_id"], full["ids_looked_at"], full["is_full"]) == (50_000, len(ids), True)
    (problem,) = full["problems"]
    assert (problem["kind"], problem["position"], problem["offset"]) == ("id_range", SAMPLE_IDS + 1, SAMPLE_IDS + 1)


def test_empty_files_and_a_tail_without_its_end_are_found(tmp_path: Path) -> None:
    for number, ids in enumerate([[1, 2, END], [], [3, END, 4], [5, END, 6, 7]]):
        np.array(ids, np.uint16).tofile(tmp_path / f"{number}.bin")
    report = run_json("inspect", tmp_path, "--eos", END)
    assert kinds(report) == {"empty_file": 1, "no_end_id": 1}
    found = {problem["kind"]: problem for problem in report["problems"]}
    assert found["empty_file"]["file"] == str(tmp_path / "1.bin")
    tail = found["no_end_id"]
    assert (tail["file"], tail["offset"], tail["position"]) == (str(tmp_path / "3.bin"), 2, 8)
    assert tail["document"] == 3
    assert re.search(r"\b2 tokens .*\b9\b", tail["message"])
    assert str(tmp_path / "3.bin") in tail["message"]
    (note,) = report["notes"]
    assert note.startswith("1 of 4 files ")
    assert "id 9" in note
    assert str(tmp_path / "2.bin") in note


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_documents_that_go_on_in_the_next_file_are_noted_with_what_to_do(tmp_path: Path, command: str) -> None:
    """By an id that ends documents, or one that begins them; no note where every file has its id."""
    for number, ids in enumerate([[END, 1, 2, END], [], [END, 3], [4, 5, END]]):
        np.array(ids, np.uint16).tofile(tmp_path / f"{number}.bin")
    named = [str(tmp_path / name) for name in ("2.bin", "3.bin")]
    for option, what, path in (("--eos", "do not end", named[0]), ("--start-id", "do not start", named[1])):
        report = json.loads(run(command, tmp_path, option, END, "--json").stdout)
        (note,) = report["notes"]
        assert note.startswith(f"1 of 4 files {what} with id 9 ({path})")
        assert "documents_end_at_files = true" in note
    (tmp_path / "2.bin").unlink()
    (tmp_path / "3.bin").unlink()
    assert json.loads(run(command, tmp_path, "--eos", END, "--json").stdout)["notes"] == []


def test_an_id_that_is_nowhere_is_noted(counting: Counting) -> None:
    report = run_json("inspect", counting(50, dtype="uint16").pattern, "--eos", 4000)
    assert "eos_id = 4000 does not occur in the corpus" in report["notes"][0]
    assert kinds(report) == {"no_end_id": 1}


@pytest.mark.parametrize(("stored", "read_as"), [("uint32", "uint16"), ("uint16", "uint32"), ("uint16", "int64")])
def test_a_type_that_is_not_that_of_the_ids_is_suspected(tmp_path: Path, stored: str, read_as: str) -> None:
    ids = np.random.default_rng(0).integers(1, 50_000, 4096).astype(stored)
    ids.tofile(tmp_path / "ids.bin")
    report = run_json("inspect", tmp_path / "ids.bin", "--dtype", read_as)
    assert kinds(report)["dtype"] == 1
    assert kinds(run_json("inspect", tmp_path / "ids.bin", "--dtype", stored)) == {}


@pytest.mark.parametrize(("empty", "has_problem"), [(1, False), (3, True)])
def test_many_empty_documents_are_a_problem_and_few_are_not(tmp_path: Path, empty: int, has_problem: bool) -> None:
    sequences = [np.arange(3 if number >= empty else 0, dtype=np.uint16) for number in range(100)]
    report = run_json("inspect", write_megatron(tmp_path / "data", sequences))
    assert report["lengths"]["empty"] == empty
    assert kinds(report) == ({"empty_documents": 1} if has_problem else {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing/here.bin"], "nothing/here.bin"),
        ([__file__], "is text, not token ids"),
        ([__file__, "--format", "flat", "--dtype", "float32"], "float32"),
        ([__file__, "--format", "flat", "--dtype", "uint8", "--eos", 1, "--start-id", 2], "are both set"),
    ],
)
def test_a_mistake_is_one_line_and_no_json(arguments: list[object], message: str) -> None:
    assert message in one_line_error("inspect", *arguments, "--json")


@settings(max_examples=examples(12))
@given(st.integers(1, 60_000), st.integers(0, 60_000), st.booleans(), st.sampled_from(["uint16", "uint32"]))
def test_files_that_were_not_filled_to_their_end_are_found(
    tmp_path_factory: pytest.TempPathFactory, filled: int, zeros: int, has_header: bool, dtype: str
) -> None:
    """As an interrupted writer leaves a map made at its full size. The file after it begins with a 0 and is whole."""
    folder = tmp_path_factory.mktemp("zeros")
    ids = np.zeros(filled + zeros, dtype)
    ids[:filled] = 7
    if has_header:
        np.save(folder / "1.npy", ids)
        np.save(folder / "2.npy", np.array([0, 0, 5], dtype))
    else:
        ids.tofile(folder / "1.bin")
        np.array([0, 0, 5], dtype).tofile(folder / "2.bin")
    arguments = [folder] if has_header else [folder, "--dtype", dtype]
    is_seen = zeros * ids.itemsize >= 4096
    checked = run_json("check", *arguments, status=int(is_seen))
    for report in (run_json("inspect", *arguments), checked):
        found = [problem for problem in report["problems"] if problem["kind"] == "zeros"]
        assert [(problem["position"], Path(problem["file"]).stem) for problem in found] == [(filled, "1")] * is_seen
        assert [f"{folder}/1." in note for note in report["notes"]] == [True] * is_seen
