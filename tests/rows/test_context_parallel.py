"""Context parallelism: the shares of all ranks laid together are the rows, each position once, in every output."""

import contextlib
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, some_documents, write_documents

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.config.context_parallel import shared_ranges
from dali_pipes.errors import ConfigError

IN_ROWS = ("input_ids", "labels", "position_ids", "segment_ids", "loss_mask", "attention_mask")
OF_ROWS = ("cu_seqlens", "max_seqlen", "row_ids")


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_shares_written_out(split: str, shares: list[list[int]]) -> None:
    for rank, share in enumerate(shares):
        assert [n for first, end in shared_ranges(8, rank, 2, split) for n in range(first, end)] == share


@given(
    size=st.integers(1, 40), chunk=st.integers(1, 20), split=st.sampled_from(["contiguous", "zigzag"]), more=st.data()
)
def test_shares_are_equal_disjoint_and_complete(size: int, chunk: int, split: str, more: st.DataObject) -> None:
    chunks = size if split == "contiguous" else 2 * size
    shares = [
        [n for first, end in shared_ranges(chunk * chunks, rank, size, split) for n in range(first, end)]
        for rank in range(size)
    ]
    assert sorted(n for share in shares for n in share) == list(range(chunk * chunks))
    assert {len(share) for share in shares} == {chunk * chunks // size}
    assert all(share == sorted(share) for share in shares)
    if split == "zigzag":  # the pairs that causal attention looks at are equally many
        assert len({sum(share) for share in shares}) == 1
    extra = more.draw(st.integers(1, chunks)) % chunks
    if extra:
        with pytest.raises(ConfigError, match=f"multiple of {chunks}"):
            shared_ranges(chunk * chunks + extra, 0, size, split)


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), documents=some_documents(2))
def test_the_shares_together_are_the_batch(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, documents: list[list[int]]
) -> None:
    """Two epochs of every row mode, on the CPU and in both GPU placements, with a resume from another size."""
    draw = data.draw
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder, [*documents, [*[1] * 23, END]])  # enough for a row, however little there is before
    size = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["stream", "pack", "pad"]))
    common: dict[str, Any] = {
        "corpus": str(folder),
        "eos_id": END,
        "batch_size": draw(st.integers(1, 3)),
        "seq_len": 2 * size * draw(st.integers(1, 2)),
        "rows": mode,
        "seed": draw(st.integers(0, 99)),
        "drop_last": False,
        "outputs": IN_ROWS + OF_ROWS,
        "batches_per_run": draw(st.integers(1, 3)),
        "rank": 1,
        "world_size": 2,
    }
    common["mtp"] = draw(st.sampled_from([0, min(3, common["seq_len"] - 1)]))
    if mode == "pad" and common["seq_len"] > 2 * size:
        common["length_buckets"] = [2 * size]
    place = draw(st.sampled_from(["cpu", "host", "device", "pinned"]))
    where: dict[str, Any] = {"device": "cpu"} if place == "cpu" else {"device": "cuda", "placement": place}
    split = draw(st.sampled_from(["contiguous", "zigzag"]))
    with contextlib.ExitStack() as stack:
        if place != "cpu":
            stack.enter_context(gpu_stand_in.installed("late"))
        whole = stack.enter_context(TokenLoader(**common, **where))
        ranks = [
            stack.enter_context(
                TokenLoader(
                    **common,
                    **where,
                    context_parallel=(rank, size),
                    context_split=split,
                    static_buffers=draw(st.booleans()),
                )
            )
            for rank in range(size)
        ]
        stop = draw(st.integers(0, 4))
        served = 0
        for epoch in range(2):
            if epoch == 0:
                steps = iter(zip(whole, *ranks, strict=True))
                for _, _ in zip(range(stop), steps, strict=False):
                    served += 1
                state = whole.state_dict()
                for loader in (whole, *ranks):  # of a run without context parallelism, and the other way round
                    assert loader.state_dict() == state
                    loader.load_state_dict(ranks[-1].state_dict() if loader is whole else state)
            for batch, *shares in zip(whole, *ranks, strict=True):
                served += 1
                width = batch["input_ids"].shape[1]
                places = torch.cat([loader.row_positions(width) for loader in ranks])
                for name in IN_ROWS:
                    assert all(share[name].is_contiguous() for share in shares)
                    together = torch.cat([share[name] for share in shares], 1)
                    assert torch.equal(together, batch[name][:, places]), name
                for share in shares:
                    assert torch.equal(share["row_ids"], batch["row_ids"])
                    assert torch.equal(share["cu_seqlens"], batch["cu_seqlens"])
                    assert share["max_seqlen"] == batch["max_seqlen"]
        assert served > 0
        assert sum(loader.stats().tokens for loader in ranks) == whole.stats().tokens


def test_a_share_outlives_its_block_and_is_the_users_own(tmp_path: Path) -> None:
    write_documents(tmp_path, [[1, 2, 3, END]] * 64)
    common: dict[str, Any] = {"corpus": str(tmp_path), "batch_size": 2, "seq_len": 8, "device": "cpu"}
    with TokenLoader(**common, context_parallel=(0, 2)) as loader, TokenLoader(**common) as whole:
        held = []
        for batch in loader:
            held.append(batch["input_ids"].clone())
            batch["input_ids"].fill_(-1)
        assert all(torch.equal(kept, rows["input_ids"][:, :4]) for kept, rows in zip(held, whole, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_parallel": (2, 2)}, "0 <= rank < size"),
        ({"context_parallel": (-1, 2)}, "0 <= rank < size"),
        ({"context_parallel": (0, 3)}, "multiple of 3"),
        ({"context_parallel": (0, 4), "context_split": "zigzag", "seq_len": 12}, "multiple of 8"),
        ({"context_parallel": (0, 4), "rows": "pad", "eos_id": 0, "length_buckets": [4, 6]}, "row of 6 positions"),
    ],
)
def test_what_cannot_be_shared_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(**{"corpus": "data.bin", "batch_size": 1, "seq_len": 8, **settings})


def test_ranks_that_share_rows_must_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's ranks count processes; taken for data-parallel ones, the shares would be of different rows."""
    write_documents(tmp_path, [[1, 2, 3, END]] * 64)
    settings: dict[str, Any] = {"corpus": str(tmp_path), "batch_size": 2, "seq_len": 8, "context_parallel": (0, 2)}
    with TokenLoader(**settings, device="cpu") as alone:
        assert (alone.config.rank, alone.config.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="context_parallel"):
        TokenLoader(**settings, device="cpu")
    with TokenLoader(**settings, device="cpu", rank=0, world_size=2) as told:
        assert len(next(iter(told))["input_ids"][0]) == 4


def test_a_pipeline_alone_makes_whole_rows(tmp_path: Path) -> None:
    write_documents(tmp_path, [[1, 2, 3, END]] * 64)
    with pytest.raises(ConfigError, match="TokenLoader"):
        build_pipeline(LoaderConfig(corpus=str(tmp_path), batch_size=2, seq_len=8, context_parallel=(0, 2)))
