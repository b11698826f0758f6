"""`explain` of all ranks of a step: its figures against its rows, and both against the ranks' own batches."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run_json, run_well

from dali_pipes import LoaderConfig, TokenLoader

END = 9
WORLD_SIZE = 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Three files, one of them empty, of about 40 documents of 0 to 19 tokens; rows of 12, in steps of 12."""
    folder = tmp_path / "data"
    folder.mkdir()
    ids = [token for n in range(40) for token in [*range(100 + 20 * n, 100 + 20 * n + n * 7 % 20), END]]
    for number, (begin, end) in enumerate([(0, 150), (150, 150), (150, len(ids))]):
        np.array(ids[begin:end], np.uint16).tofile(folder / f"{number}.bin")
    path = tmp_path / "config.toml"
    path.write_text(f'corpus = "{folder}"\nbatch_size = 4\nseq_len = 12\neos_id = {END}\ndrop_last = false\n')
    return path


def settings(**given: Any) -> list[str]:
    return [part for name, value in given.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def open_rank(config: Path, **given: Any) -> TokenLoader:
    return TokenLoader(LoaderConfig.from_file(config, device="cpu", outputs=["input_ids", "row_ids"], **given))


@pytest.mark.parametrize(
    "mode",
    [
        {"rows": "stream"},
        {"rows": "stream", "mask_boundaries": True, "stride": 5},
        {"rows": "pack"},
        {"rows": "pad", "length_buckets": [4, 8]},
    ],
    ids=str,
)
def test_figures_and_rows_are_those_of_all_ranks(config: Path, mode: dict[str, Any]) -> None:
    with open_rank(config, **mode, rank=0, world_size=WORLD_SIZE) as loader:
        widths = [batch["input_ids"].shape[1] for batch in loader]
    for step in {0, len(widths) - 1}:
        arguments = [config, "--step", step, "--world-size", WORLD_SIZE, *settings(**mode)]
        whole = run_json("explain", *arguments)
        ranks = [run_json("explain", *arguments, "--rank", rank) for rank in range(WORLD_SIZE)]
        assert (whole["rank"], [part["rank"] for part in ranks]) == (None, [0, 1, 2])
        rows = sorted((row for part in ranks for row in part["rows"]), key=lambda row: (row["row"], row["rank"]))
        assert whole["rows"] == rows
        for part in (whole, *ranks):
            pieces = [piece for row in part["rows"] for piece in row["pieces"]]
            ids = [row["row_id"] for row in part["rows"] if not row["is_padding"]]
            assert part["num_rows"] == len(ids)
            assert part["padding_rows"] == len(part["rows"]) - len(ids)
            assert part["row_ids"] == ([min(ids), max(ids)] if ids else [-1, -1])
            assert part["tokens"] == sum(piece["length"] for piece in pieces)
            assert part["width"] == widths[step]
            assert part["tokens"] + part["padding"] == len(part["rows"]) * widths[step]
            documents = {piece["document"] for piece in pieces}
            assert part["documents"] == (None if mode == {"rows": "stream"} else len(documents))
            assert part["files"] == sorted({piece["file"] for piece in pieces})
            assert part["num_files"] == len(part["files"])
    assert whole["padding_rows"] or mode["rows"] != "stream" or "stride" in mode


def test_what_is_shown_is_bounded(config: Path) -> None:
    shown = run_json("explain", config, "--step", 0, "--world-size", WORLD_SIZE, "--rows", 1)
    assert (len(shown["rows"]), shown["rows_left_out"], shown["num_rows"]) == (1, 11, 12)
    assert (shown["num_files"], len(shown["files"])) == (2, 1)
    lines = run_well("explain", config, "--step", 0, "--world-size", WORLD_SIZE, "--rows", 1).splitlines()
    assert [re.findall(r"\d+", line) for line in lines[:4]] == [
        ["0", "0", "3"],
        ["12", "12"],
        ["0", "11"],
        ["144", "0"],
    ]
    assert [line.split()[0] for line in lines[:6]] == ["step", "rows", "row", "tokens", "documents", "files"]
    assert lines[5] == f"files     2: {config.parent / 'data' / '0.bin'}, ..."
    assert lines[6] == "rank 0, row 0, row id 0"
    assert lines[-1].startswith("... 11 more rows")
    assert "--rows" in lines[-1]


def test_a_step_of_very_many_ranks(tmp_path: Path) -> None:
    """16,384 ranks: planned as one."""
    with (tmp_path / "holes.bin").open("wb") as file:
        file.truncate(2 * 10**10)
    (tmp_path / "c.toml").write_text(
        f'corpus = "{tmp_path}/holes.bin"\nbatch_size = 4\nseq_len = 8\ndtype = "uint16"\n'
    )
    shown = run_json("explain", tmp_path / "c.toml", "--step", 10_000, "--world-size", 16_384)
    assert (shown["num_rows"], len(shown["rows"]), shown["rows_left_out"]) == (65_536, 64, 65_472)
    assert shown["row_ids"] == [65_536 * 10_000, 65_536 * 10_001 - 1]


def test_a_step_that_is_left_out_is_told_as_it_would_have_been(config: Path) -> None:
    arguments = [config, "--step", 2, *settings(skip_steps=[[1, 3]])]
    plain = run_json("explain", config, "--step", 2)
    assert run_json("explain", *arguments) == {**plain, "is_skipped": True}
    assert not plain["is_skipped"]
    assert "skip_steps" in run_well("explain", *arguments).splitlines()[1]
    assert run_json("preview", *arguments) == run_json("preview", config, "--step", 2)
    assert run_json("locate", *arguments, "--row", 1) == run_json("locate", config, "--step", 2, "--row", 1)


@pytest.mark.parametrize("mode", ["stream", "pack"])
def test_steps_are_those_of_a_run_that_went_on_from_a_state(config: Path, tmp_path: Path, mode: str) -> None:
    """From three steps of 4 rows to steps of 5, which then begin at row 12; other epochs are counted as ever."""
    with open_rank(config, rows=mode) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    arguments = ["--state", tmp_path / "state.json", *settings(rows=mode, batch_size=5)]
    with open_rank(config, rows=mode, batch_size=5) as loader:
        loader.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
        while loader.epoch < 2:
            step, epoch = loader.step, loader.epoch
            for batch in loader:
                rows = run_json("explain", config, "--step", step, "--epoch", epoch, *arguments)["rows"]
                assert [row["row_id"] for row in rows] == batch["row_ids"].tolist()
                if epoch == 0 or step == 1:  # `locate` and `preview` count as `explain` does
                    where = [config, "--step", step, "--epoch", epoch, *arguments]
                    shown = run_json("preview", *where, "--rows", 5)["rows"]
                    assert [row["input_ids"] for row in shown] == batch["input_ids"].tolist()
                    assert [row["row_id"] for row in shown] == batch["row_ids"].tolist()
                    assert run_json("locate", *where, "--row", 1)["row_id"] == batch["row_ids"][1]
                step = loader.step
    assert re.search(r"step 2 .*\b3\b", one_line_error("explain", config, "--step", 2, *arguments))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\x80\x04K\x01.", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"{}", ""),
    ],
    ids=["missing", "pickle", "deep", "no state"],
)
def test_what_is_no_state_is_one_line(config: Path, tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "state").write_bytes(content)
    error = one_line_error("explain", config, "--step", 0, "--state", tmp_path / "state")
    assert message in error
    assert content == b"{}" or str(tmp_path / "state") in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 99], "step 99"),
        (["--step", 0, "--rank", 1], "--rank 1: "),
        (["--step", 0, "--rank", 3, "--world-size", 3], "world_size = 3"),
    ],
)
def test_a_step_that_does_not_exist_is_one_line(config: Path, arguments: list[object], message: str) -> None:
    assert message in one_line_error("explain", config, *arguments)
