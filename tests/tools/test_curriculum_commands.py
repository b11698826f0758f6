"""What the commands say of a run whose rows and optimizer steps grow, against what its loader hands out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_json, run_well

from dali_pipes import LoaderConfig, TokenLoader

FIRST_IDS = {"web": 0, "code": 30_000}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Ids are places in their source, plus its first id."""
    for name, first in FIRST_IDS.items():
        (np.arange(14_000) + first).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    path = tmp_path / "run.toml"
    path.write_text(
        'batch_size = 4\nseq_len = [[0, 8], ["6K", 32]]\nglobal_batch = [[0, 8], [10_000, 16]]\ntotal_tokens = 20_000\n'
        f'[mixture.web]\ncorpus = "{tmp_path / "web.bin"}"\nweight = 0.75\n'
        f'[mixture.code]\ncorpus = "{tmp_path / "code.bin"}"\nweight = 0.25\n'
    )
    return path


def open_loader(config: Path) -> TokenLoader:
    return TokenLoader(LoaderConfig.from_file(config, device="cpu", quiet=True))


def test_located_rows_have_the_length_of_their_step(config: Path, tmp_path: Path) -> None:
    states: dict[int, Any] = {}
    with open_loader(config) as loader:
        batches = []
        for step, batch in enumerate(loader):
            batches.append(batch["input_ids"])
            states[step + 1] = loader.state_dict()
    assert {batch.shape[1] for batch in batches} == {8, 32}
    for step in (0, 17, 190, 200, len(batches) - 1):
        width = batches[step].shape[1]
        located = run_json("locate", config, "--step", step, "--row", 2, "--json")
        row = located
        (piece,) = row["pieces"]
        first = FIRST_IDS[piece.get("source_name") or row["source_name"]] + piece["position"]
        assert (piece["length"], first) == (width, int(batches[step][2, 0]))
        shown = run_json("explain", config, "--step", step, "--json")
        assert shown["width"] == width
        assert shown["tokens"] == 4 * width
        preview = run_json("preview", config, "--step", step, "--json")
        assert preview["width"] == width
    state = tmp_path / "state.json"
    state.write_text(json.dumps(states[24]))
    text = run_well("preview", config, "--step", 30, "--state", state)
    assert str(int(batches[30][0, 0])) in text


def test_the_plan_of_a_mixture_shows_when_lengths_change(config: Path) -> None:
    with open_loader(config) as loader:
        begins: dict[tuple[int, int], int] = {}
        before = 0
        for batch in loader:
            begins.setdefault((batch["input_ids"].shape[1], loader.batches_per_step * 4), before)
            before = loader.tokens_seen
    plan = run_json("mixture", config, "--json")
    assert [(entry["seq_len"], entry["global_batch"]) for entry in plan["lengths"]] == list(begins)
    assert [entry["tokens"] for entry in plan["lengths"]] == list(begins.values())
    text = run_well("mixture", config)
    for (length, rows), tokens in begins.items():
        assert f"from token {tokens:,}: optimizer steps of {rows} rows x {length} tokens" in text
    assert len(run_json("mixture", config, "--at", 5_000, "--json")["lengths"]) == 1


def test_start_lines_say_when_lengths_change(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TokenLoader(LoaderConfig.from_file(config, device="cpu")):
        pass
    said = capsys.readouterr().err
    assert "(4, 8 to 32)" in said
    assert "steps of 8 rows x 8 tokens; 8 x 32 from token 6,144" in said
    assert all(len(line) <= 120 for line in said.splitlines())
