"""The numbers of the page are those of the commands, for many kinds of runs, also from a saved state."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from commands import run_json, run_well
from report_material import END, ParsedPage, assert_same, documents, equal
from table_files import list_array, table_of, write_parquet

from dali_pipes import LoaderConfig, TokenLoader

VOCABULARY = 100


class Kind(NamedTuple):
    settings: dict[str, Any]
    ranks: int = 1
    consumed: int = 0
    """Batches after which the state is saved that the page starts from; 0 for none."""


KINDS = {
    "stream in order": Kind({"shuffle": False, "mask_boundaries": False}),
    "stream from a state": Kind({"mask_boundaries": False}, 2, 5),
    "pack by blocks": Kind({"rows": "pack", "order": "blocks"}, 2),
    "pack Parquet from a state": Kind({"rows": "pack", "window_documents": 64}, 1, 3),
    "pad with buckets": Kind({"rows": "pad", "length_buckets": [8, 16, 32]}, 3),
    "pad balanced": Kind({"rows": "pad", "balance": "cost", "balance_cost": [1, 1]}, 2, 4),
    "batch_tokens": Kind({"rows": "pad", "batch_tokens": 96, "batch_size": None}, 2),
    "curriculum": Kind({"seq_len": [[0, 16], [4000, 32]], "global_batch": [[0, 8], [4000, 16]]}, 2, 6),
}
QUICK = ("pad balanced", "curriculum")
"""Those that `make test` runs, both from a state; each takes half a second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents as a flat file and as Parquet."""
    folder = tmp_path_factory.mktemp("numbers")
    rows = documents(600, 5)
    np.array([token for row in rows for token in row], np.uint16).tofile(folder / "data.bin")
    write_parquet(
        folder / "data.parquet", table_of([list_array(rows[:400]), list_array(rows[400:])]), row_group_size=90
    )
    return folder


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_page_has_the_numbers_of_the_commands(kind: str, folder: Path, tmp_path: Path) -> None:
    settings, ranks, consumed = KINDS[kind]
    data = folder / ("data.parquet" if "Parquet" in kind else "data.bin")
    chosen = {"corpus": str(data), "batch_size": 4, "seq_len": 32, "vocab_size": VOCABULARY, "seed": 3}
    chosen |= {"eos_id": END} if data.suffix == ".bin" else {}
    chosen |= settings
    chosen = {name: value for name, value in chosen.items() if value is not None}
    config, out, state = tmp_path / "run.json", tmp_path / "report.html", list[Any]()
    config.write_text(json.dumps(chosen))
    if consumed:
        loaded = LoaderConfig.from_file(config).replace(rank=0, world_size=ranks, device="cpu", quiet=True)
        with TokenLoader(loaded) as loader:
            for _ in zip(range(consumed), loader, strict=False):
                pass
            (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        state = ["--state", tmp_path / "state.json"]
    steps = (consumed, consumed + 2)
    of_ranks = [*state, "--world-size", ranks]
    run_well("report", config, *of_ranks, "--steps", ",".join(map(str, steps)), "--out", out)
    page = ParsedPage(out.read_text(encoding="utf-8"))

    told = run_json("inspect", data, "--vocab-size", VOCABULARY, *(["--eos", END] if data.suffix == ".bin" else []))
    in_part = {name.removeprefix("corpus."): value for name, value in page.values.items()}
    assert_same(in_part, told, "tokens bytes largest_id ids_looked_at documents")
    shuffled = run_json("shuffle", config, "--world-size", ranks)
    for shown, figures in zip(page.tables["order:orders"], shuffled["orders"], strict=True):
        assert_same(shown, figures, "distance_tokens distance from_one_block from_one_file correlation blocks")
    tokens = np.zeros(ranks, np.int64)
    for step, shown in zip(steps, page.tables["rows:steps"], strict=True):
        whole = run_json("explain", config, *of_ranks, "--step", step)
        assert_same(shown, whole, "step num_rows padding_rows width tokens padding documents num_files")
        for rank in range(ranks):
            tokens[rank] += run_json("explain", config, *of_ranks, "--step", step, "--rank", rank)["tokens"]
        expected = run_json("preview", config, *of_ranks, "--step", step, "--rank", 0)["rows"]
        in_page = [row for row in page.rows if row["step"] == step]
        assert [row["data-ids"] for row in in_page] == [ids_of(row, "input_ids") for row in expected]
        assert [row["data-labels"] for row in in_page] == [ids_of(row, "labels") for row in expected]
    assert [int(row["tokens"]) for row in page.tables["order:ranks"]] == tokens.tolist()
    if settings.get("rows") in ("pack", "pad"):
        loaded = LoaderConfig.from_file(config).replace(rank=0, world_size=ranks, device="cpu", quiet=True)
        with TokenLoader(loaded) as loader:
            plan = loader.plan_report()
        prefix = "rows.plan."
        in_plan = {name.removeprefix(prefix): page.values[name] for name in page.values if name.startswith(prefix)}
        assert [name for name, value in in_plan.items() if not equal(value, getattr(plan, name))] == []
        assert len(in_plan) >= 9


def ids_of(row: dict[str, Any], name: str) -> str:
    ids = row[name]
    return " ".join(map(str, ids[: len(ids) - row["padding"]]))
