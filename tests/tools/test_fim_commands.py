"""`locate`, `explain` and `preview` of rows with fill in the middle: every id at its place, sentinels at none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_json, run_well
from fim_oracle import MIDDLE, PREFIX, SUFFIX, TOKENS
from test_batch_commands import END, documents, loader_batches, read_piece

IDS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}
SHARES: list[dict[str, Any]] = [{}, {"context_parallel": [1, 2], "context_split": "zigzag"}]


def write(tmp_path: Path, given: list[list[int]], **fim: Any) -> Path:
    np.array([token for document in given for token in document], np.uint16).tofile(tmp_path / "tokens.bin")
    settings = {"corpus": str(tmp_path / "tokens.bin"), "dtype": "uint16", "eos_id": END, "rows": "pack"}
    settings |= {"batch_size": 3, "seq_len": 16, "drop_last": False, "device": "cpu", "quiet": True}
    settings |= {"objective": [{"kind": "fim", "tokens": TOKENS, "rate": 0.7, **fim}]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("share", SHARES, ids=["whole", "share"])
@pytest.mark.parametrize("level", ["piece", "document"])
def test_every_id_is_told(tmp_path: Path, level: str, share: dict[str, Any]) -> None:
    given = documents(60)
    path = write(tmp_path, given, level=level, rate=1)
    starts = np.cumsum([0, *map(len, given)])
    arguments = [part for name, value in share.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    names = ("input_ids", "labels", "row_ids")
    batches = loader_batches(path, outputs=names, rank=1, world_size=2, **share)
    sentinels = 0
    for step in (0, len(batches) - 1):
        asked = ("--step", step, "--rank", 1, "--world-size", 2)
        shown = run_json("preview", path, *arguments, *asked)
        for row, ids, labels in zip(shown["rows"], batches[step]["input_ids"], batches[step]["labels"], strict=True):
            assert (row["input_ids"], row["labels"]) == (ids, labels)
            column = 0
            for piece in row["pieces"]:
                assert piece["column"] == column
                part = ids[column : column + piece["length"]]
                column += piece["length"]
                if "sentinel" in piece:
                    assert part == [IDS[piece["sentinel"]]]
                    sentinels += 1
                    continue
                assert part == read_piece(piece)
                inside = starts[piece["document"]] + piece["document_offset"]
                assert inside == piece["position"] == piece["offset"]
            assert "sentinels_in_data" not in row
        if share:
            continue
        told = run_json("explain", path, *asked, "--rows", 3)
        rows = [{key: row[key] for key in ("row_id", "pieces", "position")} for row in told["rows"]]
        bare = [{**row, "pieces": [_bare(piece) for piece in row["pieces"]]} for row in shown["rows"]]
        assert [row["row_id"] for row in rows] == [row["row_id"] for row in bare]
        assert [list(map(_bare, row["pieces"])) for row in rows] == [row["pieces"] for row in bare]
        real = [row for row in shown["rows"] if not row["is_padding"]]
        assert told["tokens"] == sum(piece["length"] for row in real for piece in row["pieces"])
        assert told["documents"] == len({p["document"] for row in real for p in row["pieces"] if "sentinel" not in p})
        for number, row in enumerate(real):
            found = run_json("locate", path, *asked, "--row", number)
            assert found["position"] == row["position"] == next(p for p in row["pieces"] if "file" in p)["position"]
            assert list(map(_bare, found["pieces"])) == list(map(_bare, row["pieces"]))
    assert sentinels >= (1 if share else 3)


def _bare(piece: dict[str, Any]) -> dict[str, Any]:
    return {key: piece[key] for key in ("column", "length", "sentinel", "position") if key in piece}


def test_the_text_names_sentinels(tmp_path: Path) -> None:
    """And those of the data are counted."""
    path = write(tmp_path, [[20, PREFIX, 22, MIDDLE, 24, END], [30, 31, 32, 33, END]], rate=1)
    text = run_well("preview", path, "--step", 0)
    assert text.count("sentinel before the prefix") == 2
    assert text.count("sentinel before the middle") == 2
    assert "2 sentinels" in text
    assert sum(row.get("sentinels_in_data", 0) for row in run_json("preview", path, "--step", 0)["rows"]) == 2
    assert "sentinel before the suffix" in run_well("locate", path, "--step", 0, "--row", 0)
    assert "sentinel before the suffix" in run_well("explain", path, "--step", 0)
