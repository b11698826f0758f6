"""`dali-pipes shuffle` against plain loops over the batches that loaders hand out."""

import itertools
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run_json, run_well

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.rows import make
from dali_pipes.tools.reports import judge_shuffle, shuffle_figures

T, BATCH, STEPS = 4, 6, 20
BLOCK = 80
SIZES = {"web": [500, 300, 1204], "code": [900]}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 80 tokens, here and in the figures."""
    for module in (make, shuffle_figures):
        monkeypatch.setattr(module, "BLOCK_TOKENS", BLOCK)


def test_where_a_figure_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "orders.png"):
        message = one_line_error("shuffle", "synthetic:1M", "--batch-size", 8, "--seq-len", 64, "--plot", path)
        assert "--plot" in message
        assert str(path) in message


def write_config(folder: Path, *, mixture: bool, **settings: Any) -> Path:
    """Sources in which each token is its place among all of them; documents of 9 tokens are not marked."""
    first = 0
    for name, sizes in SIZES.items():
        (folder / name).mkdir()
        for number, size in enumerate(sizes):
            np.arange(first, first + size, dtype=np.uint16).tofile(folder / name / f"{number}.bin")
            first += size
    lines = [f"batch_size = {BATCH}", f"seq_len = {T}", 'dtype = "uint16"']
    lines += [f"{name} = {value}" for name, value in settings.items()]
    if mixture:
        lines += ["total_rows = 400"]
        for name, weight in (("web", 0.7), ("code", 0.3)):
            lines += [f"[mixture.{name}]", f'corpus = "{folder / name}"', f"weight = {weight}"]
    else:
        lines += [f'corpus = "{folder / "web"}"']
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def steps_of(path: Path, order: str, window: int) -> list[list[int]]:
    """First tokens of the rows of the first steps, as a loader over all ranks hands them out."""
    changes: dict[str, Any] = {"order": "rows", "shuffle_window": 512, "shuffle": order != "sequential"}
    if order == "blocks":
        changes |= {"order": order, "shuffle_window": window}
    config = LoaderConfig.from_file(path, device="cpu", quiet=True, rank=0, world_size=1, **changes)
    with TokenLoader(config) as loader:
        return [batch["input_ids"][:, 0].tolist() for batch in itertools.islice(loader, STEPS)]


def figures_of(steps: list[list[int]], sources: list[str]) -> dict[str, Any]:
    """One token and one pair after another."""
    firsts = [sum(sum(SIZES[name]) for name in sources[:number]) for number in range(len(sources))]
    sizes = [sum(SIZES[name]) for name in sources]
    file_of = [(name, number) for name in sources for number, size in enumerate(SIZES[name]) for _ in range(size)]

    def source_of(token: int) -> int:
        return max(number for number, first in enumerate(firsts) if token >= first)

    def block_of(token: int) -> tuple[int, int]:
        source = source_of(token)
        return source, (token - firsts[source]) // BLOCK

    tokens = [token for step in steps for token in step]
    pairs, centered = [], []
    for source, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        own = [token - first for token in tokens if source_of(token) == source]
        pairs += [(a, b, size) for a, b in itertools.pairwise(own)]
        before, after = statistics.mean(own[:-1]), statistics.mean(own[1:])
        centered += [((a - before) / size, (b - after) / size) for a, b in itertools.pairwise(own)]
    return {
        "distance_tokens": statistics.median(abs(a - b) for a, b, _ in pairs),
        "distance": statistics.median(abs(a - b) / size for a, b, size in pairs),
        "from_one_block": statistics.mean(max(Counter(map(block_of, step)).values()) / len(step) for step in steps),
        "from_one_file": statistics.mean(
            max(Counter(file_of[token] for token in step).values()) / len(step) for step in steps
        ),
        "correlation": statistics.correlation(*zip(*centered, strict=True)),
        "blocks": len(set(map(block_of, tokens))),
    }


@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("configured", ["rows", "blocks", "sequential"])
def test_figures_are_those_of_what_loaders_hand_out(tmp_path: Path, is_mixture: bool, configured: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "rows": {},
        "blocks": {"order": '"blocks"', "shuffle_window": 3},
        "sequential": {"shuffle": "false"},
    }
    path = write_config(tmp_path, mixture=is_mixture, **settings[configured])
    window = 3 if configured == "blocks" else 512
    found = run_json("shuffle", path, "--steps", STEPS, "--world-size", 1)
    sources = ["web", "code"] if is_mixture else ["web"]
    assert found["steps"] == STEPS
    assert found["step_rows"] == BATCH
    assert found["shuffle_window"] == window
    assert found["corpus_blocks"] == (26 + 12 if is_mixture else 26)
    assert found["largest_file"] == pytest.approx(1204 / (2904 if is_mixture else 2004))
    assert [order["order"] for order in found["orders"]] == ["rows", "blocks", "sequential"]
    assert [order["order"] for order in found["orders"] if order["is_configured"]] == [configured]
    assert [order["windows"] for order in found["orders"]] == [None, 9 if window == 3 else 1, None]
    for order in found["orders"]:
        expected = figures_of(steps_of(path, order["order"], window), sources)
        assert {name: order[name] for name in expected} == pytest.approx(expected), order["order"]


def test_the_figures_of_all_ranks_are_those_of_one(tmp_path: Path) -> None:
    path = write_config(tmp_path, mixture=False, order='"blocks"', shuffle_window=2)
    of_one = run_json("shuffle", path, "--world-size", 1, "--steps", 8)
    of_three = run_json("shuffle", path, "--world-size", 3, "--batch-size", BATCH // 3, "--steps", 8)
    assert of_one == of_three


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": '"pack"', "eos_id": 7},
        {"rows": '"pad"', "eos_id": 7},
        {"seq_len": "[[0, 2], [100, 4]]", "global_batch": BATCH},
        {"random_offset": "true"},
        {"skip_steps": "[[0, 2]]"},
    ],
)
def test_rows_of_all_kinds(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Documents that a corpus does not end are one; a list of lengths has more rows."""
    path = write_config(tmp_path, mixture=False, order='"blocks"', shuffle_window=2)
    text = path.read_text().replace(f"seq_len = {T}\n", "" if "seq_len" in settings else f"seq_len = {T}\n")
    path.write_text("\n".join([*(f"{name} = {value}" for name, value in settings.items()), text]))
    found = run_json("shuffle", path, "--steps", 5, "--plot", tmp_path / "orders.svg")
    assert found["steps"] == 5
    assert all(0 < order["from_one_block"] <= 1 for order in found["orders"])
    assert (tmp_path / "orders.svg").stat().st_size > 1000


def test_the_course_is_the_order_of_the_epoch(tmp_path: Path) -> None:
    path = write_config(tmp_path, mixture=False, order='"blocks"', shuffle_window=3)
    config = LoaderConfig.from_file(path, device="cpu", quiet=True, rank=0, world_size=1)
    report = judge_shuffle(config, 3)
    for name, places, positions in report.courses:
        steps = steps_of(path, name, 3)
        assert places.tolist() == list(range(500))
        expected = [token / 2004 for step in steps for token in step]
        assert positions[: len(expected)].tolist() == pytest.approx(expected)


def test_few_rows_leave_figures_unknown(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "two.bin")
    data = (tmp_path / "two.bin", "--batch-size", 1, "--seq-len", T)
    found = run_json("shuffle", *data)
    assert found["steps"] == 2
    assert [order["correlation"] for order in found["orders"]] == [None] * 3
    assert [order["distance_tokens"] for order in found["orders"]] == [T] * 3
    found = run_json("shuffle", *data, "--steps", 1)
    assert [order["distance"] for order in found["orders"]] == [None] * 3
    assert run_well("shuffle", *data, "--steps", 1).count("unknown") == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["full shuffle", "blocks"]),
        ({"shuffle": "false"}, ["not shuffled", "shuffle = False"]),
        ({"order": '"blocks"'}, ["one window", "shuffle_window"]),
        ({"order": '"blocks"', "shuffle_window": 2}, ["Raise shuffle_window above 2", "6"]),
        ({"order": '"blocks"', "shuffle_window": 20}, ["good shuffle"]),
    ],
)
def test_each_figure_has_a_line_and_the_order_has_advice(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    path = write_config(tmp_path, mixture=False, **settings)
    lines = run_well("shuffle", path, "--steps", STEPS).splitlines()
    assert sum("(configured)" in line for line in lines) == 1
    for name in ("distance", "one block", "one file", "correlation", "blocks read", "advice"):
        assert sum(line.startswith(f"{name}:") for line in lines) == 1
    assert all(word in lines[-1] for word in words), lines[-1]


def test_bad_input(tmp_path: Path) -> None:
    path = write_config(tmp_path, mixture=False)
    validation = ("--set", "split=validation", "--set", "validation_fraction=0.3")
    assert "validation" in one_line_error("shuffle", path, *validation)
    assert "--plot" in one_line_error("shuffle", path, "--plot", tmp_path / "orders.xyz")
    assert "nowhere" in one_line_error("shuffle", tmp_path / "nowhere.bin", "--batch-size", 1, "--seq-len", 4)
    assert "shuffle_window" in one_line_error("shuffle", path, "--set", "shuffle_window=0")


def test_orders_beside_balanced_rows(tmp_path: Path) -> None:
    """That of the corpus, which is read in order, is not balanced."""
    path = write_config(tmp_path, mixture=False, rows='"pack"', eos_id=0, balance='"cost"', balance_cost=[0, 1])
    assert run_well("shuffle", path, "--steps", STEPS).count("sequential")
