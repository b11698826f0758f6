"""`check` finds each fault that was planted, at its place, and nothing in files that are well."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import one_line_error, run_json, run_well
from corpus_files import write_llmc, write_megatron, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from sample_corpora import NAMES, load_sample

from dali_pipes.corpus import open_corpus
from dali_pipes.tools.reports import id_scan
from dali_pipes.tools.reports.id_scan import all_spans, scan_ids
from dali_pipes.tools.reports.problem import MOST_LISTED

WriteFiles = Callable[[Path], Path]
KEYS = {
    "files", "checksums", "problems", "problem_counts", "notes", "tokens", "ids_looked_at", "largest_id", "documents",
    "empty_documents", "is_clean",
}  # fmt: skip
PROBLEM_KEYS = {"kind", "message", "file", "offset", "position", "document"}


def only_problem(report: dict[str, Any]) -> dict[str, Any]:
    (problem,) = report["problems"]
    assert report["problem_counts"] == {problem["kind"]: 1}
    assert not report["is_clean"]
    found: dict[str, Any] = problem
    return found


def write_manifest(folder: Path, form: str, **wrong: str) -> None:
    """Checksums of all files in a folder, but for those that are said."""
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())} | wrong
    if form == "shards":
        content: dict[str, Any] = {"shards": [{"files": {name: {"sha256": value}}} for name, value in sums.items()]}
    else:
        content = {"files": [{"name": name, "sha256": value} for name, value in sums.items()]}
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "matrix"])
def test_every_sample_is_clean(samples: Path, name: str) -> None:
    sample = load_sample(samples, name)
    vocab_size = max(sample.tokens) + 1
    arguments = [*sample.paths, *sample.options, *sample.delimiter, "--vocab-size", vocab_size]
    report = run_json("check", *arguments)
    assert set(report) == KEYS
    assert report["is_clean"]
    assert report["tokens"] == report["ids_looked_at"] == len(sample.tokens)
    assert report["documents"] == len(sample.lengths)
    assert report["empty_documents"] == sample.empty
    assert report["largest_id"] == max(sample.tokens)
    assert "no problems" in run_well("check", *arguments)
    arguments[-1] = vocab_size - 1
    report = run_json("check", *arguments, status=1)
    assert report["problem_counts"] == {"id_range": sample.tokens.count(vocab_size - 1)}
    places = [position for position, token in enumerate(sample.tokens) if token == vocab_size - 1]
    assert [problem["position"] for problem in report["problems"]] == places[:MOST_LISTED]


@pytest.mark.parametrize("format", ["flat", "llmc", "npy", "megatron"])
def test_a_bad_id_is_found_where_it_is(tmp_path: Path, format: str) -> None:
    ids = np.arange(1, 101, dtype=np.uint16)
    ids[70] = 5000
    first, second = (write_shard(tmp_path / f"{n}.bin", part, format) for n, part in enumerate([ids[:40], ids[40:]]))
    problem = only_problem(run_json("check", first, second, "--format", format, "--vocab-size", 101, status=1))
    assert set(problem) == PROBLEM_KEYS
    assert (problem["kind"], problem["file"]) == ("id_range", str(second))
    assert (problem["offset"], problem["position"]) == (30, 70)
    assert "5000, expected 0 <= id < vocab_size = 101" in problem["message"]
    shown = run_well("check", first, second, "--format", format, "--vocab-size", 101, status=1)
    assert problem["message"] in shown
    assert "no problem" not in shown


def test_a_negative_id_is_bad_without_a_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([3, 4, -100, 5], np.int32))
    problem = only_problem(run_json("check", tmp_path / "ids.npy", status=1))
    assert (problem["kind"], problem["position"]) == ("id_range", 2)
    assert "is -100, expected 0 <= id" in problem["message"]


def test_an_id_that_int64_cannot_hold_is_found_where_it_is(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint64)
    ids[[613, 700]] = 2**63 + 1, 2**64 - 1
    np.save(tmp_path / "ids.npy", ids)
    report = run_json("check", tmp_path / "ids.npy", status=1)
    problem = only_problem(report)
    assert (problem["kind"], problem["position"]) == ("id_range", 613)
    assert re.search(r"\b387 ids.*\b613\b", problem["message"])
    assert report["ids_looked_at"] == 613


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_scan_finds_what_a_plain_loop_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Whatever the chunks, over file borders, also for ids that an index says are at given places."""
    dtype = np.dtype(data.draw(st.sampled_from(["uint8", "int16", "uint16", "int64"])))
    lowest = -3 if dtype.kind == "i" else 0
    files = data.draw(st.lists(st.lists(st.integers(lowest, 12), max_size=60), min_size=1, max_size=4))
    tokens = [token for file in files for token in file]
    if not tokens:
        return
    paths = [tmp_path / f"{number}.bin" for number in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        np.array(file, dtype).tofile(path)
    vocab_size = data.draw(st.one_of(st.none(), st.integers(1, 13)))
    places = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1))))
    monkeypatch.setattr(id_scan, "CHUNK_BYTES", data.draw(st.sampled_from([8, 24, 1 << 20])))
    done: list[int] = []
    with open_corpus(paths, format="flat", dtype=dtype) as corpus:
        scan = scan_ids(
            corpus,
            all_spans(corpus),
            vocab_size=vocab_size,
            expected=id_scan.Expected(np.array(places, np.int64), 9),
            advance=done.append,
        )
    limit = vocab_size if vocab_size is not None else 99
    bad = [(place, token) for place, token in enumerate(tokens) if not 0 <= token < limit]
    unexpected = [(place, tokens[place]) for place in places if tokens[place] != 9]
    for found, wanted in ((scan.out_of_range, bad), (scan.unexpected, unexpected)):
        assert [fault[:2] for fault in found.first] == wanted[:MOST_LISTED]
        assert found.count == len(wanted)
    assert (scan.smallest, scan.largest) == (min(tokens), max(tokens))
    assert scan.largest_position is not None
    assert tokens[scan.largest_position] == scan.largest
    assert scan.looked_at == sum(done) == len(tokens)
    assert scan.unreadable.count == 0


@pytest.mark.parametrize("cut_at", [0, 1, 499, 999])
def test_what_became_unreadable_is_found_where_it_begins(tmp_path: Path, cut_at: int) -> None:
    for number in range(3):
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    with open_corpus(tmp_path) as corpus:
        corpus.tokens(0, 3000)  # a file that is not open yet would be refused whole
        os.truncate(tmp_path / "1.bin", 2 * cut_at)
        scan = scan_ids(corpus, all_spans(corpus), vocab_size=1000)
    (fault,) = scan.unreadable.first
    assert fault.position == 1000 + cut_at
    assert "1.bin" in fault.reason
    assert scan.looked_at == 2000 + cut_at
    assert fault.value == 1000 - cut_at


def test_every_damaged_row_group_is_listed_and_the_others_are_read(tmp_path: Path) -> None:
    rows = pa.array([[7, 8, 9]] * 8, pa.list_(pa.int32()))
    for number in range(3):
        path = tmp_path / f"{number}.parquet"
        options = {"row_group_size": 2, "write_page_checksum": True, "use_dictionary": False}
        pa.parquet.write_table(pa.table({"input_ids": rows}), path, **options)
        content = bytearray(path.read_bytes())
        for group in (1, 2) if number != 1 else ():
            column = pa.parquet.ParquetFile(path).metadata.row_group(group).column(0)
            content[column.data_page_offset + column.total_compressed_size - 2] ^= 1
        path.write_bytes(content)
    report = run_json("check", str(tmp_path), status=1)
    unread = [problem["message"] for problem in report["problems"] if "documents" not in problem["message"]]
    assert [re.findall(r"(\d)\.parquet.* group (\d).* position (\d+)", message) for message in unread] == [
        [("0", "1", "6")], [("0", "2", "12")], [("2", "1", "54")], [("2", "2", "60")]
    ]  # fmt: skip
    assert report["ids_looked_at"] == 72 - 4 * 6
    assert "unreadable" in next(line for line in run_well("inspect", str(tmp_path)).splitlines() if "documents" in line)


def damage_sizes(folder: Path) -> Path:
    path = write_megatron(folder / "b", [np.arange(9, dtype=np.uint16)])
    path.write_bytes(path.read_bytes()[:-4])
    return path


def damage_documents(folder: Path) -> Path:
    return write_megatron(folder / "b", [np.arange(9, dtype=np.uint16)] * 3, documents=[0, 2, 1, 3])


def damage_header(folder: Path) -> Path:
    return write_llmc(folder / "b.bin", np.arange(9, dtype=np.uint16), count=12)


def damage_magic(folder: Path) -> Path:
    return write_megatron(folder / "b", [np.arange(9, dtype=np.uint16)], version=7)


@pytest.mark.parametrize("damage", [damage_sizes, damage_documents, damage_header, damage_magic])
def test_an_index_that_disagrees_is_a_problem_and_the_others_are_checked(tmp_path: Path, damage: WriteFiles) -> None:
    bad = damage(tmp_path)
    format = "llmc" if damage is damage_header else "megatron"
    good = [write_shard(tmp_path / f"{name}.bin", np.array([1, 2, 900], np.uint16), format) for name in "ac"]
    report = run_json("check", tmp_path, "--vocab-size", 900, status=1)
    assert report["problem_counts"] == {"format": 1, "id_range": 2}
    assert (report["files"], report["tokens"]) == (3, 6)
    assert [problem["file"] for problem in report["problems"][1:]] == [str(path) for path in good]
    named = Path(report["problems"][0]["file"])
    assert named in (bad, bad.with_suffix(".idx"))
    assert report["problems"][0]["message"].startswith(f"{named}: ")


def test_files_that_do_not_go_together_are_a_problem(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "b.bin")
    problem = only_problem(run_json("check", tmp_path, status=1))
    assert problem["kind"] == "format"
    assert "b.bin" in problem["message"]


def test_an_index_of_other_documents_is_found_by_the_id_that_ends_them(tmp_path: Path) -> None:
    """Each document but the second ends where the index says."""
    sequences = [[1, 2, 9], [4, 9, 5], [6, 9], [], [9]]
    path = write_megatron(tmp_path / "data", [np.array(ids, np.uint16) for ids in sequences])
    report = run_json("check", path, "--eos", 9, status=1)
    problem = only_problem(report)
    assert (problem["kind"], problem["document"]) == ("document_end", 1)
    assert (problem["offset"], problem["position"]) == (5, 5)
    assert (report["documents"], report["empty_documents"]) == (5, 1)
    path = write_megatron(tmp_path / "start", [np.array(ids, np.uint16) for ids in [[9, 1], [3, 9], [9]]])
    problem = only_problem(run_json("check", path, "--start-id", 9, status=1))
    assert (problem["document"], problem["position"]) == (1, 2)


@pytest.mark.parametrize("form", ["shards", "files"])
def test_a_file_that_is_not_what_the_manifest_says_is_found(tmp_path: Path, form: str) -> None:
    for name in ("a", "b", "c"):
        write_megatron(tmp_path / name, [np.arange(9, dtype=np.uint16)])
    write_manifest(tmp_path, form)
    assert run_json("check", tmp_path)["checksums"] == 6
    assert run_json("check", tmp_path / "b.bin")["checksums"] == 2
    with (tmp_path / "b.bin").open("r+b") as file:
        file.seek(4)
        file.write(b"\1")
    problem = only_problem(run_json("check", tmp_path, status=1))
    assert (problem["kind"], problem["file"]) == ("checksum", str(tmp_path / "b.bin"))
    assert run_json("check", tmp_path / "a.bin", tmp_path / "c")["is_clean"]
    (tmp_path / "c.bin").unlink()
    (tmp_path / "c.idx").unlink()
    report = run_json("check", tmp_path, status=1)
    assert report["problem_counts"] == {"checksum": 1, "missing_file": 2}
    assert {problem["file"] for problem in report["problems"]} == {
        str(tmp_path / n) for n in ("b.bin", "c.bin", "c.idx")
    }


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"files": 3}', '{"shards": [1], "files": [{"name": "a.bin"}]}', "\xff"]
)
def test_what_is_no_manifest_is_none(tmp_path: Path, content: str) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    report = run_json("check", tmp_path)
    assert (report["checksums"], report["is_clean"]) == (0, True)


def test_checksums_are_compared_where_no_file_opens(tmp_path: Path) -> None:
    bad = damage_sizes(tmp_path)
    write_manifest(tmp_path, "files", **{bad.name: "0" * 64})
    report = run_json("check", tmp_path, status=1)
    assert report["problem_counts"] == {"format": 1, "checksum": 1}
    assert (report["tokens"], report["largest_id"]) == (0, None)


def test_problems_of_a_kind_are_listed_up_to_a_number_and_all_are_counted(tmp_path: Path) -> None:
    np.full(5000, 7, np.uint16).tofile(tmp_path / "a.bin")
    report = run_json("check", tmp_path, "--vocab-size", 7, status=1)
    assert report["problem_counts"] == {"id_range": 5000}
    assert len(report["problems"]) == MOST_LISTED
    shown = run_well("check", tmp_path, "--vocab-size", 7, status=1)
    assert "5,000" in shown
    assert f"id_range: {5000 - MOST_LISTED:,} more" in shown


@pytest.mark.parametrize(
    "arguments", [["none.bin"], [__file__, "--format", "nonesuch"], [Path(__file__).parent / "no*"]]
)
def test_a_mistake_is_not_a_problem_of_the_data(arguments: list[object]) -> None:
    one_line_error("check", *arguments, "--json")


def test_a_mask_that_is_not_one_of_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(1, 301, dtype=np.uint16), "flat")
    (tmp_path / "a.bin.loss").write_bytes(bytes(299) + b"0")
    problem = only_problem(run_json("check", tmp_path, status=1))
    assert problem["kind"] == "loss_mask"
    assert re.search(r"a\.bin\.loss: .*\b299\b.*\b48\b", problem["message"])
    assert problem["file"] == str(tmp_path / "a.bin.loss")


def test_an_index_that_leaves_ids_out(tmp_path: Path) -> None:
    """A sequence said to be shorter than the way to the next one."""
    write_megatron(tmp_path / "a", [np.arange(1, 5, dtype=np.uint16), np.arange(5, 8, dtype=np.uint16)])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    assert index[34] == 4
    index[34] = 2
    (tmp_path / "a.idx").write_bytes(index)
    problem = only_problem(run_json("check", tmp_path / "a", status=1))
    assert problem["kind"] == "index"
    assert "2 of 7 ids" in problem["message"]
