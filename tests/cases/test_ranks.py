"""Ranks as real processes share the data out between them, and take equally many steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, row_ids, write_counting

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError

T = 8
WORLD_SIZE = 4
NUMBER_OF_ROWS = 1000

SCRIPT = """
import json, os, random, sys
from datetime import timedelta
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
import nvidia.dali.fn, nvidia.dali.types

rank, world_size, thousand, uneven, store = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
random.seed(rank)
np.random.seed(rank)
torch.manual_seed(rank)
common = {"dtype": "uint32", "seq_len": 8, "device": "cpu", "outputs": ["input_ids", "labels", "row_ids"]}
one = {**common, "corpus": thousand, "batch_size": 7}
report = {"hash": hash("dali_pipes")}


def attempt(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def first_rows(loader):
    return next(iter(loader))["row_ids"].tolist()


def steps_of(loader):
    # A collective at each step: a rank with fewer steps than another makes this hang.
    rows, total = [], torch.zeros(1, dtype=torch.int64)
    for batch in loader:
        total[0] = 1
        dist.all_reduce(total)
        assert total.item() == world_size
        rows.append({name: tensor.tolist() for name, tensor in batch.items()})
    return rows


too_early, explicit = TokenLoader(**one), TokenLoader(**one, rank=rank, world_size=world_size)
read_early, begun_early = TokenLoader(**one), TokenLoader(**one)
iterator_early, mid_epoch = iter(begun_early), iter(TokenLoader(**one, batches_per_run=1))
next(mid_epoch)
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
launched = TokenLoader(**one)
os.environ.update(RANK=str((rank + 1) % world_size))
mislaunched = TokenLoader(**one)
del os.environ["RANK"], os.environ["WORLD_SIZE"]
report["before any group"] = [first_rows(loader) for loader in (read_early, explicit, launched)]
state_early = read_early.state_dict()

dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
)
report["too early"] = {
    "read": [attempt(lambda: first_rows(read_early)) for _ in range(2)],
    "built": [attempt(lambda: first_rows(too_early)) for _ in range(2)],
    "iterated": [attempt(lambda: first_rows(iterator_early))],
    "in mid-epoch": [attempt(lambda: first_rows(mid_epoch))],
    "asked": [attempt(use) for use in (lambda: len(too_early), lambda: too_early.step, lambda: too_early.locate(0, 0))],
    "resumed": [attempt(lambda: too_early.load_state_dict(state_early))],
}
report["contradicts the launcher"] = attempt(lambda: first_rows(mislaunched))
report["agrees"] = [attempt(lambda: first_rows(loader)) for loader in (explicit, launched)]


def pipeline_rows():
    pipe = build_pipeline(LoaderConfig(**one, batches_per_run=1))
    pipe.build()
    return pipe.run()[2].at(0).tolist()


report["pipeline"] = attempt(pipeline_rows)
with TokenLoader(**one) as loader:
    report["epochs"] = [steps_of(loader), steps_of(loader)]
    report["state"] = loader.state_dict()
    report["length"] = len(loader)
for drop_last in (True, False):
    for batch_size in (1, 5):
        with TokenLoader(**common, corpus=uneven, batch_size=batch_size, drop_last=drop_last) as loader:
            report[f"uneven {batch_size} {drop_last}"] = [len(loader), [steps_of(loader), steps_of(loader)]]
with TokenLoader(**one, split="validation", validation_fraction=0.3, drop_last=False) as loader:
    report["validation"] = [len(loader), steps_of(loader)]
print(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ten shards of 1000 rows together, and a shard of 116 tokens before others."""
    thousand = write_counting(tmp_path_factory.mktemp("thousand"), [801] + [800] * 9)
    uneven = write_counting(tmp_path_factory.mktemp("uneven"), [116, 60, 51])  # 28 rows
    return {"thousand": thousand, "uneven": uneven}


@pytest.fixture(scope="module", params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def reports(
    request: pytest.FixtureRequest,
    corpora: dict[str, Any],
    run_ranks: Callable[..., list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    store = tmp_path_factory.mktemp("store") / "store"
    files = corpora["thousand"][0], corpora["uneven"][0]
    return run_ranks(SCRIPT, WORLD_SIZE, *files, store, forked=request.param == "forked")


def as_batches(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import torch

    return [{name: torch.tensor(values) for name, values in step.items()} for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("reports", ["started"], indirect=True)
def test_the_processes_differ_in_every_global_seed(reports: list[Any]) -> None:
    assert len({report["hash"] for report in reports}) == WORLD_SIZE


def test_ranks_are_disjoint_and_together_everything(reports: list[Any]) -> None:
    """1000 rows on 4 ranks in batches of 7: 35 steps; the rows dropped are the 20 of the partial step."""
    for epoch in range(2):
        firsts = [{row[0] for step in report["epochs"][epoch] for row in step["input_ids"]} for report in reports]
        assert [len(rows) for rows in firsts] == [35 * 7] * WORLD_SIZE
        union = set().union(*firsts)
        assert len(union) == 35 * 7 * WORLD_SIZE
        assert union <= {row * T for row in range(NUMBER_OF_ROWS)}
        rows = sorted(row for report in reports for step in report["epochs"][epoch] for row in step["row_ids"])
        assert rows == list(range(NUMBER_OF_ROWS - 20))
    assert all(report["length"] == 35 for report in reports)


def test_every_rank_equals_the_oracle(reports: list[Any], corpora: dict[str, Any]) -> None:
    tokens = corpora["thousand"][1]
    for rank, report in enumerate(reports):
        for epoch in range(2):
            order: dict[str, Any] = {
                "batch_size": 7,
                "seq_len": T,
                "rank": rank,
                "world_size": WORLD_SIZE,
                "epoch": epoch,
            }
            assert all_same(as_batches(report["epochs"][epoch]), epoch_batches(tokens, **order))


def test_the_state_is_the_same_on_every_rank(reports: list[Any]) -> None:
    assert all(report["state"] == reports[0]["state"] for report in reports)
    assert (reports[0]["state"]["epoch"], reports[0]["state"]["rows"]) == (2, 0)


def test_a_loader_built_before_the_group_says_so(reports: list[Any]) -> None:
    """Whatever is done with it first: also on rank 0, whose number happens to be right, and every time."""
    for rank, report in enumerate(reports):
        alone, explicit, launched = report["before any group"]
        assert alone == list(range(7))
        assert explicit == launched == list(range(rank, rank + 7 * WORLD_SIZE, WORLD_SIZE))
        for use, messages in report["too early"].items():
            for message in messages:
                assert str(message).startswith("ConfigError: "), use
                for fact in ("rank 0 of 1", f"rank {rank} of {WORLD_SIZE}", "init_process_group", "world_size"):
                    assert fact in message, use


def test_a_launcher_that_contradicts_the_group_is_refused(reports: list[Any]) -> None:
    for rank, report in enumerate(reports):
        assert report["contradicts the launcher"].startswith("ConfigError: ")
        assert f"rank {(rank + 1) % WORLD_SIZE} of {WORLD_SIZE}" in report["contradicts the launcher"]
        assert f"rank {rank} of {WORLD_SIZE}" in report["contradicts the launcher"]


def test_a_rank_that_agrees_with_the_group_is_kept(reports: list[Any]) -> None:
    for rank, report in enumerate(reports):
        for rows in report["agrees"]:
            assert len(rows) == 7
            assert {row % WORLD_SIZE for row in rows} == {rank}


def test_the_pipeline_alone_does_not_ignore_the_group(reports: list[Any]) -> None:
    """`rank = None` is documented to come from torch.distributed; else all four would read the rows of rank 0."""
    for rank, report in enumerate(reports):
        rows = report["pipeline"]
        refused = isinstance(rows, str) and rows.startswith("ConfigError: ")
        assert refused or rows == list(range(rank, rank + 7 * WORLD_SIZE, WORLD_SIZE)), (rank, rows)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_all_ranks_take_the_announced_steps(
    reports: list[Any], corpora: dict[str, Any], batch_size: int, drop_last: bool
) -> None:
    """With batches of one, ranks 0 and 1 would still fit into the first shard at step 3, 2 and 3 would not."""
    tokens = corpora["uneven"][1]
    for rank, report in enumerate(reports):
        length, epochs = report[f"uneven {batch_size} {drop_last}"]
        size = batch_size * WORLD_SIZE
        assert length == (28 // size if drop_last else -(-28 // size))
        for epoch, steps in enumerate(epochs):
            assert len(steps) == length
            order: dict[str, Any] = {"rank": rank, "world_size": WORLD_SIZE, "epoch": epoch, "drop_last": drop_last}
            assert all_same(as_batches(steps), epoch_batches(tokens, batch_size=batch_size, seq_len=T, **order))


def test_evaluation_counts_each_row_once(reports: list[Any]) -> None:
    """299 validation rows on 4 ranks: padding rows fill the last step up, and are marked."""
    length = -(-299 // 28)
    rows, counted = [], 0
    for report in reports:
        announced, steps = report["validation"]
        assert announced == len(steps) == length
        for step in steps:
            rows += [row for row in step["row_ids"] if row >= 0]
            for row, labels in zip(step["row_ids"], step["labels"], strict=True):
                assert (row < 0) == (labels == [-100] * T)
                counted += sum(label != -100 for label in labels)
    assert sorted(rows) == list(range(299))
    assert counted == 299 * T


def test_five_samples_on_eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same clear error on every rank; without drop_last one step, in which three get marked padding."""
    pattern, tokens = write_counting(tmp_path_factory.mktemp("five"), [5 * T + 1])
    common: dict[str, Any] = {
        "corpus": pattern,
        "dtype": "uint32",
        "seq_len": T,
        "batch_size": 1,
        "device": "cpu",
        "world_size": 8,
    }
    messages = set()
    for rank in range(8):
        with pytest.raises(ConfigError) as caught:
            TokenLoader(**common, rank=rank)
        messages.add(str(caught.value))
    (message,) = messages
    assert "5 rows" in message
    assert "8 ranks" in message
    assert "drop_last" in message
    rows = []
    for rank in range(8):
        outputs = ("input_ids", "labels", "row_ids")
        with TokenLoader(**common, rank=rank, drop_last=False, outputs=outputs) as loader:
            assert len(loader) == 1
            for epoch in range(2):
                (batch,) = loader
                (expected,) = epoch_batches(
                    tokens, batch_size=1, seq_len=T, rank=rank, world_size=8, drop_last=False, epoch=epoch
                )
                assert all_same([batch], [expected])
                assert batch["input_ids"].shape == (1, T)
                assert (batch["labels"] == -100).all().item() == (rank >= 5)
            rows += row_ids([batch])
    assert rows == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("last_rows", [1, 2, 3, 4, 5, 6, 7])
def test_padding_of_the_last_step_in_every_width(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, last_rows: int
) -> None:
    """A label of -100 needs a signed type, whatever the file holds; only the ranks that come out short are padded."""
    rows = 8 + last_rows
    tokens = np.arange(rows * T + 1, dtype=np.int64) % 120 + 130
    path = tmp_path_factory.mktemp("widths") / "a.bin"
    tokens.astype(dtype).tofile(path)
    for rank in range(4):
        order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "rank": rank, "world_size": 4, "drop_last": False}
        outputs = ("input_ids", "labels", "row_ids")
        with TokenLoader(corpus=str(path), dtype=dtype, device="cpu", outputs=outputs, **order) as loader:
            assert all_same(loader, epoch_batches(tokens, **order))


def test_a_half_given_rank_is_never_ignored(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rank or world size at build time is an error, from keywords as from the launcher."""
    pattern, _ = write_counting(tmp_path_factory.mktemp("half"), [100])
    common: dict[str, Any] = {"corpus": pattern, "dtype": "uint32", "seq_len": T, "batch_size": 1, "device": "cpu"}
    wrongs: list[dict[str, Any]] = [{"rank": 0}, {"world_size": 2}]
    wrongs += [{"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            TokenLoader(**common, **wrong)
    ignored = []
    for environment in ({"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": "4", "WORLD_SIZE": "4"}):
        with monkeypatch.context() as patch:
            patch.delenv("RANK", raising=False)
            patch.delenv("WORLD_SIZE", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                TokenLoader(**common).close()
            except ConfigError:
                continue
            ignored.append(environment)
    assert not ignored
