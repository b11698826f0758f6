"""The page of data that is broken in many ways: made as far as it goes, it names each file and what is wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from commands import one_line_error, run
from report_material import ParsedPage
from table_files import write_parquet

COUNT = 4000
GOOD = np.arange(COUNT) % 50
ROWS = ["--batch-size", 2, "--seq-len", 16]


def flat(path: Path, ids: Any = GOOD) -> Path:
    np.asarray(ids, np.uint16).tofile(path)
    return path


def floats(path: Path) -> Path:
    np.save(path, np.ones(9))
    return path


def parquet(path: Path, rows: Any = ([1, 2, 3, 4, 5],) * 400) -> Path:
    return write_parquet(path, pa.table({"input_ids": list(rows)}), row_group_size=50)


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def with_noise(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[100:300] = bytes(range(200))
    path.write_bytes(content)
    return path


def by_config(folder: Path, *names: str) -> Path:
    """A configuration that lists these files, which are looked for only when they are read."""
    path = folder / "run.toml"
    path.write_text(f"corpus = {[str(folder / name) for name in names]!r}\nformat = 'auto'\n")
    return path


class Broken(NamedTuple):
    given: Callable[[Path], list[Any]]
    named: str
    """In the message."""
    tokens: int
    """That the section on the corpus has."""
    missing: set[str]
    """Sections of which something is missing."""
    problems: int = 0


ALL = {"Corpus", "Order", "Rows", "Batches"}
BROKEN = {
    "a Parquet file that is cut off": Broken(
        lambda at: [parquet(at / "good.parquet"), cut(parquet(at / "bad.parquet"), 700)], "bad.parquet", 2000, ALL
    ),
    "a Parquet file with damaged pages": Broken(
        lambda at: [parquet(at / "good.parquet"), with_noise(parquet(at / "bad.parquet"))],
        "bad.parquet",
        4000,  # its footer counts them
        ALL - {"Corpus"},
        3,
    ),
    "a Parquet file with nulls": Broken(
        lambda at: [parquet(at / "good.parquet"), parquet(at / "bad.parquet", [[None, 1]])], "bad.parquet", 2000, ALL
    ),
    "a file that is missing": Broken(
        lambda at: [by_config(flat(at / "good.bin").parent, "good.bin", "gone.bin")], "gone.bin", COUNT, ALL
    ),
    "half an id": Broken(
        lambda at: [flat(at / "good.bin"), cut(flat(at / "bad.bin"), 3), "--set", "dtype=uint16"], "bad.bin", COUNT, ALL
    ),
    "floats": Broken(lambda at: [flat(at / "good.bin"), floats(at / "bad.npy")], "bad.npy", COUNT, ALL),
    "ids beyond the vocabulary": Broken(
        lambda at: [flat(at / "bad.bin"), "--set", "vocab_size=40"], "vocab_size = 40", COUNT, {"Batches"}, COUNT // 5
    ),
    "ids of another width": Broken(
        lambda at: [flat(at / "bad.bin"), "--set", "vocab_size=50", "--set", "dtype=uint32"],
        "read as uint32",
        COUNT // 2,
        {"Batches"},
        COUNT // 2,
    ),
    "documents without tokens": Broken(
        lambda at: [flat(at / "bad.bin", [0] * COUNT), "--set", "eos_id=0", "--set", "rows=pack"],
        f"{COUNT:,} of {COUNT:,} documents are empty",
        COUNT,
        set(),
        2,
    ),
    "a file without tokens": Broken(
        lambda at: [flat(at / "good.bin"), flat(at / "bad.bin", [])], "bad.bin", COUNT, set(), 1
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_page_shows_what_is_left_and_names_what_is_not(kind: str, tmp_path: Path) -> None:
    broken, out = BROKEN[kind], tmp_path / "report.html"
    ended = run("report", *broken.given(tmp_path), *ROWS, "--out", out)
    assert ended.exit_code == 0, ended.output
    lines = ended.stderr.splitlines()
    assert {re.match(r"missing: (\w+):", line)[1] for line in lines} == broken.missing  # type: ignore[index]
    assert all(broken.named in line for line in lines)
    page = ParsedPage(out.read_text())
    shown = [element.text for element in page.elements]
    assert any(broken.named in text for text in shown)
    assert page.values["corpus.tokens"] == str(broken.tokens)
    assert page.values["corpus.problems"] == str(broken.problems)
    assert bool(page.rows) == ("Batches" not in broken.missing)


def test_data_of_which_nothing_can_be_opened_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert "gone.bin" in one_line_error("report", by_config(tmp_path, "gone.bin"), *ROWS, "--out", out)
    assert "bad.parquet" in one_line_error("report", cut(parquet(tmp_path / "bad.parquet"), 700), *ROWS, "--out", out)
    assert not out.exists()
