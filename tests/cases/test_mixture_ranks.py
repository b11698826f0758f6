"""`set_weights` under a process group: ranks agree on the weights and the row, or all of them refuse."""

from collections.abc import Callable
from typing import Any

import pytest

from dali_pipes import TokenLoader

SETTINGS: dict[str, Any] = {
    "mixture": {name: {"corpus": "synthetic:20K", "weight": 1} for name in ("web", "code")},
    "total_rows": 800,
    "seq_len": 8,
    "device": "cpu",
    "outputs": ["input_ids", "row_ids", "source_ids"],
    "quiet": True,
    "batches_per_run": 3,
}
SCRIPT = """
import json, sys
import torch.distributed as dist
from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError

rank, world_size, store, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
loader = TokenLoader(**settings, batch_size=4)
batches, rows, refused = iter(loader), [], {}


def take(count):
    for batch in [next(batches) for _ in range(count)]:
        rows.extend(zip(*(batch[name].tolist() for name in ("row_ids", "source_ids", "input_ids"))))


def refuse(what, weights):
    try:
        loader.set_weights(weights)
    except ConfigError as error:
        refused[what] = str(error)
    refused[what + " report"] = [use.weight for use in loader.mixture_report().sources]


take(3)
begin = loader.set_weights({"web": 0.9, "code": 0.1})
take(2)
saved = loader.state_dict() if rank == 0 else None  # a collective in it would wait for the other rank
take(40)
refuse("weights", {"web": 0.5 + rank / 4, "code": 0.5})
take(2)
refuse("names", {"web": 1, "code": 1} if rank else {"web": 1, "cod": 1})
refuse("all names", {"web": 1, "cod": 1})
if rank:
    take(1)
refuse("row", {"web": 0.5, "code": 0.5})
if not rank:
    take(1)
dist.barrier()
state = loader.state_dict()
rows += [row for batch in batches for row in zip(*(batch[n].tolist() for n in ("row_ids", "source_ids", "input_ids")))]
print(json.dumps({"begin": begin, "saved": saved, "refused": refused, "rows": rows, "state": state}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(run_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    import json

    return run_ranks(SCRIPT, 2, tmp_path_factory.mktemp("store") / "store", json.dumps(SETTINGS))


def alone() -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The rows by their place, and the states at every step, of one process that changes its weights at that row."""
    rows, states = {}, []
    with TokenLoader(**SETTINGS, batch_size=8) as loader:
        for number, batch in enumerate(loader):
            names = ("row_ids", "source_ids", "input_ids")
            for place, *row in zip(*(batch[name].tolist() for name in names), strict=True):
                rows[place] = row
            if number == 2:
                assert loader.set_weights({"web": 0.9, "code": 0.1}) == 128
            states.append(loader.state_dict())
    return rows, states


def test_equal_calls_agree_and_others_change_nothing(reports: list[Any]) -> None:
    rows, states = alone()
    assert [report["begin"] for report in reports] == [128, 128]
    for rank, report in enumerate(reports):
        places = [place for place, *_ in report["rows"]]
        assert places == list(range(rank, 800, 2))
        assert [row for _, *row in report["rows"]] == [rows[place] for place in places]
    assert (reports[0]["saved"], reports[1]["saved"]) == (states[4], None)
    assert reports[0]["state"] == reports[1]["state"] == states[47]


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("weights", ["rank 1", "rank 0", "1/2", "3/4"]),
        ("names", ["rank 1", "rank 0", "'cod'"]),
        ("all names", ["'cod'", "'code'"]),
        ("row", ["rank 1", "rank 0", "376", "384"]),
    ],
)
def test_every_rank_refuses_and_keeps_the_old_weights(reports: list[Any], what: str, facts: list[str]) -> None:
    for report in reports:
        message = report["refused"][what]
        assert message.startswith("set_weights: ")
        assert [fact for fact in facts if fact not in message] == []
        assert report["refused"][f"{what} report"] == pytest.approx([0.9, 0.1])
