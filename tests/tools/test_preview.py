"""`preview` of batches that are not plain rows of seq_len: length buckets, and the shares of context-parallel ranks."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_json, run_well
from test_batch_commands import assert_tells_the_row, documents, write_config

from dali_pipes import LoaderConfig, TokenLoader

END = 9
MODES: list[dict[str, Any]] = [
    {"rows": "stream"},
    {"rows": "stream", "label_shift": False},
    {"rows": "stream", "stride": 5, "mtp": 2, "outputs": ["input_ids", "labels", "loss_mask"]},
    {"rows": "pack", "outputs": ["input_ids", "cu_seqlens", "max_seqlen", "attention_mask"]},
    {"rows": "pack", "mtp": 2, "mask_boundaries": False},
    {"rows": "pad"},
    {"rows": "pad", "length_buckets": [4, 8]},
    {"rows": "pad", "length_buckets": [12], "outputs": ["labels", "loss_mask", "attention_mask", "row_ids"]},
]
SHARES: list[dict[str, Any]] = [
    {},
    {"context_parallel": [1, 2]},
    {"context_parallel": [0, 2], "context_split": "zigzag"},
    {"context_parallel": [1, 2], "context_split": "zigzag"},
]


def named(settings: dict[str, Any]) -> str:
    return json.dumps(settings)


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Files that end within documents."""
    folder = tmp_path / "flat"
    folder.mkdir()
    ids = np.array([token for document in documents(60) for token in document], np.uint16)
    for number, (begin, end) in enumerate(pairwise([0, 333, 700, len(ids)])):
        ids[begin:end].tofile(folder / f"{number}.bin")
    return folder


@pytest.mark.parametrize("share", SHARES, ids=named)
@pytest.mark.parametrize("mode", MODES, ids=named)
def test_a_batch_is_shown_as_the_trainer_gets_it(
    tmp_path: Path, flat: Path, mode: dict[str, Any], share: dict[str, Any]
) -> None:
    """The first, the last and the narrowest step: every output with a value for each position, and their origin."""
    path = write_config(tmp_path, flat, eos_id=END)
    given = {"seq_len": 16, "drop_last": False, **mode, **share}
    arguments = [part for name, value in given.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    offsets = np.cumsum([0, *map(len, documents(60))]).tolist()
    wanted = ["input_ids", "labels", *(name for name in mode.get("outputs", []) if name.endswith("mask"))]
    config = LoaderConfig.from_file(path, **given)
    if config.uses_documents:
        wanted += ["position_ids", "segment_ids"]
    serving = config.replace(device="cpu", quiet=True, rank=1, world_size=2, outputs=(*wanted, "row_ids"))
    with TokenLoader(serving) as loader, TokenLoader(serving.replace(context_parallel=None)) as whole:
        batches, widths = list(loader), [batch["input_ids"].shape[1] for batch in whole]
        assert len(set(widths)) > 1 or "length_buckets" not in mode
        for step in {0, len(batches) - 1, int(np.argmin(widths))}:
            shown = run_json("preview", path, *arguments, "--step", step, "--rank", 1, "--world-size", 2)
            columns = batches[step]["input_ids"].shape[1]
            assert (shown["width"], shown["columns"]) == (widths[step], columns)
            assert shown["context_parallel"] == share.get("context_parallel")
            assert shown["row_positions"] == (loader.row_positions(widths[step]).tolist() if share else None)
            assert shown["context_split"] == (config.context_split if share else None)
            assert [row["row_id"] for row in shown["rows"]] == batches[step]["row_ids"].tolist()
            for number, row in enumerate(shown["rows"]):
                found = {name: row[name] for name in wanted}
                assert found == {name: batches[step][name][number].tolist() for name in wanted}
                assert_tells_the_row(row, row["input_ids"], offsets if config.uses_documents else None)
                first_labels = [label[0] if isinstance(label, list) else label for label in row["labels"]]
                assert row["masked"] == first_labels.count(-100)
                assert row["padding"] == columns - sum(piece["length"] for piece in row["pieces"])


def test_the_text_says_which_share_it_is(tmp_path: Path) -> None:
    """A document that both parts of a share have a piece of, and a share that is padding in a row that is not."""
    np.array([1, 2, 3, 4, 5, END, 6, END], np.uint16).tofile(tmp_path / "a.bin")
    path = write_config(tmp_path, tmp_path / "a.bin", eos_id=END, rows="pad", seq_len=8, batch_size=2, shuffle="false")
    origin = f"{tmp_path / 'a.bin'} token"

    def lines(rank: int, size: int, split: str) -> list[str]:
        share = ["--set", f"context_parallel=[{rank},{size}]", "--set", f"context_split={split}"]
        return run_well("preview", path, *share).splitlines()

    whole, share, _, *shown = lines(0, 2, "zigzag")
    assert re.findall(r"\d+", whole) == ["0", "0", "0", "1", "2", "2"]  # step, epoch, rank, ranks, shown, rows
    assert re.findall(r"\d+", share) == ["0", "2", "0", "3", "0", "1", "6", "7", "8"]
    assert shown == [
        "",
        "row 0, row id 0: 2 of 4 labels ignored",
        f"-- columns 0 to 1: document 0 from token 0 of 6, {origin} 0, segment 1, positions 0 to 1",
        "1 2",
        "-- padding, 2 positions",
        "",
        "row 1, row id 1: 3 of 4 labels ignored",
        f"-- columns 0 to 1: document 1 from token 0 of 2, {origin} 6, segment 1, positions 0 to 1",
        "6 ⟦9⟧",
        "-- padding, 2 positions",
    ]
    shown = lines(1, 4, "zigzag")
    assert re.findall(r"\d+", shown[1]) == ["1", "4", "0", "1", "1", "6", "8"]
    shown = lines(1, 2, "contiguous")
    assert re.findall(r"\d+", shown[1]) == ["1", "2", "0", "3", "4", "7", "8"]
    assert "contiguous" in shown[1]
    assert shown[-2:] == ["row 1, row id 1: 4 of 4 labels ignored", "-- padding, 4 positions"]


def test_pieces_of_a_share_that_no_column_lies_between(tmp_path: Path) -> None:
    """One document over the whole row: two pieces, whose places in the file lie apart."""
    np.arange(100, 117, dtype=np.uint16).tofile(tmp_path / "a.bin")
    path = write_config(tmp_path, tmp_path / "a.bin", seq_len=8, batch_size=1, shuffle="false")
    arguments = ["--set", "context_parallel=[0,2]", "--set", "context_split=zigzag", "--tokens", 3, "--step", 1]
    shown = run_json("preview", path, *arguments)
    (row,) = shown["rows"]
    assert (row["offset"], row["input_ids"], row["labels"]) == (8, [108, 109, 114], [109, 110, 115])
    assert (shown["columns"], shown["row_positions"]) == (4, [0, 1, 6])
    assert [(piece["column"], piece["length"], piece["offset"]) for piece in row["pieces"]] == [(0, 2, 8), (2, 2, 14)]
    assert "114 ... 1 more token" in run_well("preview", path, *arguments)
