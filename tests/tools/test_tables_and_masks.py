"""The commands on formats that are decoded and have documents of their own, and on corpora with loss masks."""

import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run_json, run_well

END = 9
DOCUMENTS: list[list[int]] = [
    [*range(100 * number, 100 * number + 7 * number % 23), END] if number % 10 else [] for number in range(1, 40)
]
TOKENS = [token for document in DOCUMENTS for token in document]
OFFSETS = list(accumulate((len(document) for document in DOCUMENTS), initial=0))


@pytest.fixture(params=["parquet", "arrow"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two files, in groups of five documents."""
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "table"
    folder.mkdir()
    for number, part in enumerate([DOCUMENTS[:17], DOCUMENTS[17:]]):
        column = arrow.table({"input_ids": arrow.array(part, arrow.list_(arrow.int32()))})
        path = folder / f"{number}.{request.param}"
        if request.param == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(column, path, row_group_size=5)
        else:
            with arrow.ipc.new_file(str(path), column.schema) as writer:
                writer.write_table(column, max_chunksize=5)
    return folder


def test_a_table_is_told_as_it_is(table: Path) -> None:
    report = run_json("inspect", table)
    assert report["format"] == table.joinpath("0.parquet").exists() * "parquet" or "arrow"
    assert [file["tokens"] for file in report["files"]] == [OFFSETS[17], OFFSETS[-1] - OFFSETS[17]]
    assert (report["tokens"], report["documents"]) == (len(TOKENS), len(DOCUMENTS))
    assert (report["documents_from"], report["lengths"]["empty"]) == ("index", DOCUMENTS.count([]))
    assert report["largest_id"] == max(TOKENS)
    report = run_json("check", table, "--eos", END, "--token-column", "input_ids", status=1)
    assert report["problem_counts"] == {"empty_documents": 1}  # 3 of 39
    assert report["ids_looked_at"] == len(TOKENS)
    assert "column" in one_line_error("inspect", table, "--token-column", "text")


def test_a_bad_id_of_a_table_is_found_where_it_is(table: Path) -> None:
    largest = max(TOKENS)
    report = run_json("check", table, "--vocab-size", largest, status=1)
    (problem,) = (problem for problem in report["problems"] if problem["kind"] == "id_range")
    position = TOKENS.index(largest)
    assert problem["position"] == position
    assert problem["offset"] == position - OFFSETS[17]
    assert Path(problem["file"]).stem == "1"


def test_a_damaged_table_is_a_problem(table: Path) -> None:
    bad = sorted(table.iterdir())[1]
    os.truncate(bad, bad.stat().st_size - 30)
    report = run_json("check", table, status=1)
    assert report["problem_counts"]["format"] == 1
    assert report["problems"][0]["file"] == str(bad)
    assert (report["files"], report["tokens"]) == (2, OFFSETS[17])


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_rows_of_a_table_are_told_by_file_and_document(table: Path, tmp_path: Path, rows: str) -> None:
    (tmp_path / "a.toml").write_text(f'corpus = "{table}"\nbatch_size = 3\nseq_len = 16\nrows = "{rows}"\n')
    for step in range(3):
        for row in run_json("preview", tmp_path / "a.toml", "--step", step)["rows"]:
            assert row["pieces"]
            for piece in row["pieces"]:
                own = row["input_ids"][piece["column"] : piece["column"] + piece["length"]]
                assert own == DOCUMENTS[piece["document"]][piece["document_offset"] :][: piece["length"]]
                assert piece["position"] == OFFSETS[piece["document"]] + piece["document_offset"]
                is_second = piece["document"] >= 17
                assert Path(piece["file"]).stem == str(int(is_second))
                assert piece["offset"] == piece["position"] - is_second * OFFSETS[17]


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    folder = tmp_path / "masked"
    folder.mkdir()
    for number, (ids, mask) in enumerate([([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]), ([7, 8, 1, 2], None)]):
        np.array(ids, np.uint16).tofile(folder / f"{number}.bin")
        if mask is not None:
            np.array(mask, np.uint8).tofile(folder / f"{number}.bin.loss")
    return folder


def test_ids_that_a_loss_mask_leaves_out_show_as_masked(masked: Path, tmp_path: Path) -> None:
    """A label belongs to the id behind it: of 1 to 6, the ids 1, 2 and 5 are not learned."""
    (tmp_path / "a.toml").write_text(f'corpus = "{masked}"\nbatch_size = 1\nseq_len = 9\n')
    (row,) = run_json("preview", tmp_path / "a.toml")["rows"]
    assert row["labels"] == [-100, 3, 4, -100, 6, 7, 8, 1, 2]
    assert row["masked"] == 2
    shown = run_well("preview", tmp_path / "a.toml").splitlines()
    assert "⟦1⟧ 2 3 ⟦4⟧ 5 6" in shown
    assert "7 8 1" in shown


def test_loss_masks_are_counted_and_their_length_is_checked(masked: Path) -> None:
    assert run_json("inspect", masked)["loss_masks"] == 1
    assert "1 of 2 files" in run_well("inspect", masked)
    assert run_json("check", masked)["is_clean"]
    (masked / "0.bin.loss").write_bytes(b"\1" * 5)
    report: dict[str, Any] = run_json("check", masked, status=1)
    (problem,) = report["problems"]
    assert problem["kind"] == "format"
    assert problem["file"] == str(masked / "0.bin.loss")
    assert re.search(r"\b5 .*\b6\b", problem["message"])
    assert report["tokens"] == 4
