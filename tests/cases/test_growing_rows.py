"""Rows and optimizer steps that grow during a run, end to end: the batches of loaders, over ranks and restarts."""

import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import torch
from curriculum_oracle import walk_epoch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.state_change import MixtureChange
from dali_pipes.rows.windows import WindowRows, split_windows

ORDER_LEN = 32
TOKENS = {"web": 30_000, "code": 16_000}
FIRST_IDS = {"web": 0, "code": 35_000}
SEQ_LEN = [(0, 8), (5_000, 16), (9_000, 32), (20_000, 16)]
GLOBAL_BATCH = [(0, 24), (15_000, 48)]
END_ID = 60_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids tell their place: id = first id of the source + position. `ends.bin` has documents of 11 tokens."""
    folder = tmp_path_factory.mktemp("growing")
    for name, size in TOKENS.items():
        (np.arange(size) + FIRST_IDS[name]).astype(np.uint16).tofile(folder / f"{name}.bin")
    ids = np.arange(TOKENS["web"])
    ids[10::11] = END_ID
    ids.astype(np.uint16).tofile(folder / "ends.bin")
    return folder


def settings_of(folder: Path, kind: str) -> dict[str, Any]:
    common: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "quiet": True, "seed": 7}
    common["outputs"] = ("input_ids", "labels", "row_ids", "source_ids")
    if kind == "corpus":
        return {**common, "corpus": folder / "web.bin"}
    weights = {"web": 0.6, "code": 0.4}
    sources = {name: {"corpus": folder / f"{name}.bin", "weight": weight} for name, weight in weights.items()}
    return {**common, "mixture": sources, "total_tokens": 30_000}


Row = tuple[int, int, int]
"""Width, first id, and place in the epoch."""


def run(
    settings: dict[str, Any], ranks: int, batch_size: int, state: Any = None, *, epochs: int = 2, **cost: Any
) -> Iterator[tuple[list[Row], list[TokenLoader]]]:
    """The rows of all ranks in each step, in the order of the epoch; labels are checked."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(TokenLoader(**settings, **cost, batch_size=batch_size, rank=rank, world_size=ranks))
            for rank in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for _ in range(epochs):
            for batches in zip(*loaders, strict=True):
                rows: list[Any] = [None] * (ranks * batch_size)
                for rank, batch in enumerate(batches):
                    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
                    width, firsts = batch["input_ids"].shape[1], batch["input_ids"][:, 0].tolist()
                    for row, (first, place) in enumerate(zip(firsts, batch["row_ids"].tolist(), strict=True)):
                        rows[row * ranks + rank] = (width, first, place)
                assert len({row[0] for row in rows}) == 1, "rows of a step have one width on all ranks"
                states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
                assert len(states) == 1, "ranks save one state"
                yield rows, loaders


def all_rows(settings: dict[str, Any], ranks: int, batch_size: int, state: Any = None, **more: Any) -> list[Row]:
    return [row for rows, _ in run(settings, ranks, batch_size, state, **more) for row in rows]


def next_rows(settings: dict[str, Any], ranks: int, batch_size: int, state: Any, count: int) -> list[Row]:
    steps: Any = run(settings, ranks, batch_size, state)
    rows = [row for step, _ in itertools.islice(steps, count // (ranks * batch_size)) for row in step]
    steps.close()
    return rows


def test_rows_are_those_of_the_oracle(folder: Path) -> None:
    num_places = (TOKENS["web"] - 1) // ORDER_LEN
    windows = WindowRows(split_windows(TOKENS["web"], ORDER_LEN), seed=7)
    expected: list[Row] = []
    for epoch in range(2):
        walked = walk_epoch(num_places, ORDER_LEN, SEQ_LEN, GLOBAL_BATCH, epoch=epoch, seed=7)
        starts = windows.plan(epoch, np.arange(num_places)).starts.tolist()
        for number, (place, part, width) in enumerate(walked.rows):
            expected.append((width, starts[place] + part * width, number))
    assert all_rows(settings_of(folder, "corpus"), 1, 6) == expected
    assert {width for width, *_ in expected} == {8, 16, 32}


@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_ranks_batches_blocks_and_threads_change_nothing(folder: Path, kind: str) -> None:
    settings = settings_of(folder, kind)
    rows, one_epoch = all_rows(settings, 1, 6), all_rows(settings, 1, 6, epochs=1)
    assert rows[: len(one_epoch)] == one_epoch
    assert all_rows(settings, 2, 6, batches_per_run=1) == rows
    for ranks, batch_size, cost in (
        (3, 4, {"batches_per_run": 7, "num_threads": 3}),
        (1, 24, {"prefetch_queue_depth": 4}),
        (8, 3, {}),
    ):
        assert all_rows(settings, ranks, batch_size, epochs=1, **cost) == one_epoch


@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_optimizer_steps_have_their_size_and_a_run_resumes_after_each_on_other_ranks(folder: Path, kind: str) -> None:
    settings = settings_of(folder, kind)
    rows = all_rows(settings, 1, 6, epochs=3)
    sizes, done, in_step, seen = [], 0, 0, 0
    for _, loaders in run(settings, 1, 6):
        done, in_step, loader = done + 6, in_step + 6, loaders[0]
        assert loader.tokens_seen > seen
        seen, state = loader.tokens_seen, loader.state_dict()
        if not loader.step_end:
            if done % 300 == 0:  # in the middle of a step, the same number of ranks goes on
                assert next_rows(settings, 1, 6, state, 30) == rows[done : done + 30]
            continue
        assert in_step == loader.batches_per_step * 6
        sizes.append(in_step)
        in_step = 0
        ranks, batch_size = [(1, 8), (2, 12), (4, 3), (3, 2)][len(sizes) % 4]
        if len(sizes) % 9 == 0 or sizes[-1:] != sizes[-2:-1]:
            assert next_rows(settings, ranks, batch_size, state, 96) == rows[done : done + 96]
    assert in_step == 0
    assert sorted(set(sizes)) == [24, 48]
    assert sizes == sorted(sizes)


def test_lengths_and_steps_begin_when_their_tokens_are_seen(folder: Path) -> None:
    """Rounded up to whole groups of 64 rows of the order, 2,048 tokens, that are whole optimizer steps.

    Three groups of rows of 8 have 768 rows, 32 steps of 24; so it is with rows of 16 and 32.
    """
    changes: dict[tuple[int, int], int] = {}
    before = 0
    for rows, loaders in run(settings_of(folder, "corpus"), 1, 6, epochs=1):
        changes.setdefault((rows[0][0], loaders[0].batches_per_step * 6), before)
        before = loaders[0].tokens_seen
    assert changes == {(8, 24): 0, (16, 24): 6_144, (32, 24): 12_288, (32, 48): 18_432, (16, 48): 24_576}


@pytest.mark.parametrize(
    "outputs",
    [
        ("input_ids", "labels", "loss_mask", "position_ids", "segment_ids"),
        ("input_ids", "labels", "cu_seqlens", "max_seqlen"),
    ],
)
def test_rows_of_pieces_are_cut_as_windows_of_their_length(folder: Path, outputs: tuple[str, ...]) -> None:
    """A row of T tokens at some position has the fields that a loader of seq_len = T gives it there."""
    given = {**settings_of(folder, "corpus"), "corpus": folder / "ends.bin", "eos_id": END_ID, "mask_boundaries": True}
    given["outputs"] = outputs
    plain: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for width in (8, 16, 32):
        with TokenLoader(
            given["corpus"],
            batch_size=1,
            seq_len=width,
            shuffle=False,
            eos_id=END_ID,
            mask_boundaries=True,
            outputs=outputs,
            quiet=True,
        ) as loader:
            for number, batch in enumerate(loader):
                plain[width, number * width] = batch
    with TokenLoader(**given, batch_size=1) as loader:
        for step, batch in enumerate(loader):
            width, start = batch["input_ids"].shape[1], loader.locate(step, 0).offset
            expected = plain[width, start]
            for name in outputs:
                found = batch[name]
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected[name])), (name, step)


def test_context_parallel_ranks_share_rows_of_every_length(folder: Path) -> None:
    settings = settings_of(folder, "mixture")
    with ExitStack() as stack:
        whole = stack.enter_context(TokenLoader(**settings, batch_size=6))
        parts = [
            stack.enter_context(
                TokenLoader(**settings, batch_size=6, context_parallel=(rank, 2), context_split="zigzag")
            )
            for rank in range(2)
        ]
        widths = set()
        for batch, *shared in zip(whole, *parts, strict=True):
            width = batch["input_ids"].shape[1]
            widths.add(width)
            positions = torch.cat([part.row_positions(width) for part in parts])
            tokens = torch.cat([part["input_ids"] for part in shared], 1)
            assert torch.equal(tokens, batch["input_ids"][:, positions])
        assert len(widths) > 1


# Of each kind, cut, and placement, in `make test`.
USUAL = [
    ("corpus", False, "device"),
    ("corpus", True, "host"),
    ("mixture", True, "device"),
    ("mixture", False, "pinned"),
]


@pytest.mark.skipif(gpu_stand_in.why_not() is not None, reason="no compiler for the stand-in")
@pytest.mark.parametrize(
    ("kind", "in_pieces", "placement"),
    [
        pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow])
        for case in itertools.product(["corpus", "mixture"], [False, True], ["host", "device", "pinned"])
    ],
)
def test_a_gpu_has_the_same_batches(folder: Path, placement: str, in_pieces: bool, kind: str) -> None:
    settings = settings_of(folder, kind)
    if in_pieces:
        settings |= {
            "outputs": ("input_ids", "labels", "loss_mask", "row_ids", "source_ids"),
            "mtp": 2,
            "mask_boundaries": False,
        }
    with gpu_stand_in.installed("random", seed=3), ExitStack() as stack:
        on_gpu = stack.enter_context(
            TokenLoader(**settings, batch_size=6, device="cuda", placement=placement, batches_per_run=3)
        )
        on_cpu = stack.enter_context(TokenLoader(**settings, batch_size=6, device="cpu"))
        for _ in range(2):
            for ours, expected in zip(on_gpu, on_cpu, strict=True):
                for name, values in expected.items():
                    assert torch.equal(torch.as_tensor(np.asarray(ours[name])), values), name


def test_weights_change_after_the_groups_that_were_begun(folder: Path) -> None:
    """No row of the order is taken apart: parts of it that were read and those to come are of one source."""
    settings = settings_of(folder, "mixture")
    with TokenLoader(**settings, batch_size=6) as loader:
        plain = [row for batch in loader for row in batch["input_ids"][:, 0].tolist()]
    with TokenLoader(**settings, batch_size=6) as loader:
        rows, state = [], {}
        for step, batch in enumerate(loader):
            rows += batch["input_ids"][:, 0].tolist()
            if step == 21:
                begin = loader.set_weights({"web": 0, "code": 1})
                assert begin % 128 == 0
                assert begin >= 64 * -(-(22 * 6) // (64 * 4))
            if step == 40:
                state = loader.state_dict()
    same = [a == b for a, b in zip(rows, plain, strict=False)]
    first = same.index(False)
    assert all(same[:first])
    assert first >= 128 * 4
    assert all(token >= FIRST_IDS["code"] for token in rows[-40:])
    with TokenLoader(**settings, batch_size=6) as loader:
        loader.load_state_dict(state)
        assert [row for batch in loader for row in batch["input_ids"][:, 0].tolist()] == rows[41 * 6 :]


def test_later_stages_may_change_at_a_resume(folder: Path) -> None:
    settings = settings_of(folder, "corpus")
    rows, states = [], []
    for step, loaders in run(settings, 1, 6, epochs=1):
        rows += step
        states.append(loaders[0].state_dict())
    number = next(at for at, state in enumerate(states) if state["rows"] == 240)
    changed = {**settings, "seq_len": [[0, 8], [8_000, 32]], "global_batch": [[0, 24], [2_100, 96]]}
    after = all_rows(changed, 1, 6, states[number], epochs=1)
    seen = {(8, first) for _, first, _ in rows[:240]}
    assert {row[0] for row in after} == {8, 32}
    assert after[:528] == rows[240:768]  # up to the first change that was planned before
    tokens = [first + at for width, first, _ in [*rows[:240], *after] for at in range(width)]
    assert len(set(tokens)) == len(tokens)
    assert len(seen) == 240


def test_a_run_without_a_global_batch_gets_one_at_a_resume_and_loses_it_again(folder: Path) -> None:
    common: dict[str, Any] = {"corpus": folder / "web.bin", "seq_len": 8, "batch_size": 6, "quiet": True}
    with TokenLoader(**common) as loader:
        batches = [batch["input_ids"] for batch in loader]
    with TokenLoader(**common) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
        state = loader.state_dict()
    assert "curriculum" not in state
    with TokenLoader(**common, global_batch=[[0, 12], [8 * 6 * 20, 24]]) as loader:
        loader.load_state_dict(state)
        assert loader.tokens_seen == 8 * 6 * 5
        ends = []
        for step, batch in enumerate(loader, 5):
            assert torch.equal(batch["input_ids"], batches[step])
            if loader.step_end:
                ends.append(step - 4)
        # Steps of 2 batches until 20 batches have been seen, counted from batch 5, then of 4.
        assert ends[:10] == [2, 4, 6, 8, 10, 12, 14, 16, 20, 24]
        state = loader.state_dict()
    with TokenLoader(**common) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 1


def test_documents_have_whole_optimizer_steps_in_every_epoch(folder: Path) -> None:
    settings: dict[str, Any] = {"corpus": folder / "ends.bin", "eos_id": END_ID, "rows": "pack", "seq_len": 32}
    settings |= {"quiet": True, "global_batch": [[0, 8], [5_000, 16], [20_000, 32]], "window_documents": 50}
    states, sizes, in_step = [], [], 0
    with TokenLoader(**settings, batch_size=4) as loader:
        for _ in range(3):
            for batch in loader:
                in_step += 4
                states.append((loader.state_dict(), loader.tokens_seen, loader.step_end, batch["input_ids"].clone()))
                if loader.step_end:
                    sizes.append(in_step)
                    in_step = 0
            assert in_step == 0
    assert sorted(set(sizes)) == [8, 16, 32]
    assert sizes == sorted(sizes)
    for number in range(0, len(states), 311):
        state, seen, ends, _ = states[number]
        with TokenLoader(**settings, batch_size=4) as loader:
            loader.load_state_dict(state)
            assert (loader.tokens_seen, loader.step_end) == (seen, ends)
            for batch, expected in zip(loader, states[number + 1 : number + 9], strict=False):
                assert torch.equal(batch["input_ids"], expected[3])
                assert (loader.state_dict(), loader.tokens_seen, loader.step_end) == expected[:3]


def test_steps_that_are_skipped_are_whole_optimizer_steps(folder: Path) -> None:
    settings = settings_of(folder, "corpus")
    rows = all_rows(settings, 1, 6, epochs=1)
    left = all_rows({**settings, "skip_steps": [[8, 16]]}, 1, 6, epochs=1)
    assert left == rows[:48] + rows[96:]
    for steps in ([[8, 15]], [[7, 16]], [{"rows": [0, 30]}]):
        with (
            pytest.raises(ConfigError, match="4 steps"),
            TokenLoader(**settings, batch_size=6, skip_steps=steps) as loader,
        ):
            next(iter(loader))
    with pytest.raises(ConfigError, match="skip_steps"):
        LoaderConfig(**settings, batch_size=6, skip_steps=[{"tokens": [0, 960]}])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": [[0, 8], [99, 12]]}, ["8", "order_len = 12"]),
        ({"seq_len": [[0, 8]], "order_len": 12}, ["8", "order_len = 12"]),
        ({"global_batch": None}, ["global_batch", "8"]),
        ({"seq_len": [[5, 8]]}, ["[0, 8]"]),
        ({"seq_len": [[0, 8], [0, 16]]}, ["[0, 16]"]),
        ({"seq_len": [[0, 8], ["2K", 16], [1_000, 32]]}, ["[1000, 32]", "2,000"]),
        ({"seq_len": [[0, 8], ["many", 16]]}, ["many"]),
        ({"seq_len": [[0, 0]]}, ["seq_len", "0"]),
        ({"seq_len": [[0, 8, 1]]}, ["[0, 8, 1]"]),
        ({"seq_len": []}, ["seq_len"]),
        ({"global_batch": [[0, 24], [-1, 48]]}, ["global_batch", "-1"]),
        ({"global_batch": 0}, ["global_batch", "0"]),
        ({"global_batch": 20}, ["20", "6"]),
        ({"global_batch": 24, "world_size": 3, "rank": 0}, ["24", "18", "3 ranks"]),
        ({"rows": "pack", "eos_id": END_ID}, ["pack"]),
        ({"stride": 4}, ["stride = 4"]),
        ({"drop_last": False}, ["drop_last", "global_batch"]),
        ({"split": "validation", "validation_fraction": 0.1}, ["validation"]),
        ({"mtp": 8}, ["mtp = 8", "8"]),
        ({"context_parallel": (0, 16)}, ["16", "8"]),
        ({"global_batch": [[0, 24], ["1B", 48]], "total_tokens": 31_000}, ["1,000,000,000", "30,976"]),
    ],
)
def test_bad_schedules(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    kind = "mixture" if "total_tokens" in changes else "corpus"
    with pytest.raises(ConfigError) as error:
        TokenLoader(**{**settings_of(folder, kind), "batch_size": 6, **changes})
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 400


def test_pipelines_without_a_loader_have_one_width(folder: Path) -> None:
    with pytest.raises(ConfigError, match="seq_len"):
        TokenLoader(**settings_of(folder, "corpus"), batch_size=6, graph=lambda nodes: nodes)


@hypothesis_settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_states_are_refused(folder: Path, data: st.DataObject) -> None:
    settings = settings_of(folder, "corpus")
    with TokenLoader(**settings, batch_size=6) as loader:
        for _ in zip(range(140), loader, strict=False):
            pass
        state = copy.deepcopy(loader.state_dict())
        assert len(state["curriculum"]["segments"]) == 2
        damage = data.draw(st.sampled_from(["before", "segments", "end", "row", "place", "length", "step", "order"]))
        entry = state["curriculum"]
        wrong: Any = data.draw(st.sampled_from([None, -1, "3", 2**70, 1.5, [], {}]))
        if damage in ("before", "segments", "end"):
            entry[damage] = wrong
        elif damage == "order":
            entry["segments"] = entry["segments"][::-1]
        else:
            column = ["row", "place", "length", "step"].index(damage)
            segment = entry["segments"][-1]
            segment[column] = data.draw(st.sampled_from([wrong, segment[column] + 1, 0]))
        with pytest.raises(StateError, match="curriculum"):
            loader.load_state_dict(state)


def test_steps_of_a_saved_run_that_other_ranks_cannot_make_are_refused(folder: Path) -> None:
    """Steps of 24 rows go on until the end of the 64 rows of the order, in which 16 rows of all ranks make none."""
    settings: dict[str, Any] = {"corpus": folder / "web.bin", "seq_len": 16, "order_len": 32, "quiet": True}
    with TokenLoader(**settings, global_batch=24, batch_size=8) as loader:
        for _, _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
        for _, _ in zip(range(48), loader, strict=False):
            if loader.state_dict()["rows"] == 384:
                break
        at_switch = loader.state_dict()
    with TokenLoader(**settings, global_batch=32, batch_size=16) as loader:
        with pytest.raises(StateError, match=r"24 rows.*384.*16 rows"):
            loader.load_state_dict(state)
        loader.load_state_dict(at_switch)
        assert loader.batches_per_step == 2
    with TokenLoader(**settings, global_batch=32, batch_size=4) as loader:
        loader.load_state_dict(state)
        sizes = [loader.batches_per_step for _, _ in zip(range(100), loader, strict=False)]
        assert sizes == [6] * 90 + [8] * 10


def test_batches_per_step_is_that_of_the_last_batch_where_steps_after_it_are_skipped(folder: Path) -> None:
    settings: dict[str, Any] = {
        "corpus": folder / "web.bin",
        "seq_len": 32,
        "global_batch": [(0, 8), (3_200, 16)],
        "batch_size": 4,
    }
    with TokenLoader(**settings, skip_steps=[{"rows": [96, 120]}], quiet=True, outputs=("row_ids",)) as loader:
        for batch in loader:
            row = int(batch["row_ids"][0])
            assert loader.batches_per_step == (2 if row < 104 else 4)
            if row > 200:
                break


@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_a_state_of_other_rows_names_order_len(folder: Path, kind: str) -> None:
    settings = settings_of(folder, kind)
    others: list[tuple[dict[str, Any], str]] = [
        ({"seq_len": 32, "global_batch": 24}, "nothing"),
        ({"order_len": 64}, "64"),
        ({"seq_len": [(0, 8)]}, "8"),
    ]
    states = {}
    for more, name in [({}, "32"), *others]:
        with TokenLoader(**{**settings, **more}, batch_size=6) as loader:
            states[name] = loader.state_dict()
    for more, name in others:
        with TokenLoader(**{**settings, **more}, batch_size=6) as loader:
            with pytest.raises(StateError, match=f"order_len: saved 32, now {name}\n") as refused:
                loader.load_state_dict(states["32"])
            assert "stride" not in str(refused.value)
    with TokenLoader(**settings, batch_size=6) as loader:
        for _, name in others:
            with pytest.raises(StateError, match=f"order_len: saved {name}, now 32\n"):
                loader.load_state_dict(states[name])
        with pytest.raises(StateError, match="order: saved"):
            loader.load_state_dict({**states["32"], "order": "other"})


def test_a_refused_state_changes_nothing(folder: Path) -> None:
    """`skip_steps` in steps is refused last, when the order of the saved run has been taken over."""
    settings = {**settings_of(folder, "mixture"), "skip_steps": [(96, 104)]}
    with TokenLoader(**settings, batch_size=3) as loader:
        rows = [batch["row_ids"].tolist() + batch["input_ids"][:, 0].tolist() for batch in loader]
    other = {**settings, "global_batch": 48, "skip_steps": ()}
    with TokenLoader(**other, batch_size=6) as loader:
        for number, _ in enumerate(loader):
            if number == 7:
                loader.set_weights({"web": 1, "code": 9})
            if number == 63:
                break
        state = loader.state_dict()
    with TokenLoader(**settings, batch_size=3) as loader:
        with pytest.raises(StateError, match="skip_steps"):
            loader.load_state_dict(state)
        assert [batch["row_ids"].tolist() + batch["input_ids"][:, 0].tolist() for batch in loader] == rows


def test_states_that_cannot_be_continued(folder: Path) -> None:
    settings = settings_of(folder, "mixture")
    with TokenLoader(**settings, batch_size=6) as loader:
        for _, _ in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
        for _, _ in zip(range(1_000), loader, strict=False):
            if loader.state_dict()["rows"] >= loader._schedule.rows_known(0) - 48:
                break
        near_end = loader.state_dict()
    with TokenLoader(**settings, batch_size=8) as loader, pytest.raises(StateError, match=r"12 rows.*24 rows.*8 rows"):
        loader.load_state_dict(state)
    with TokenLoader(**{**settings, "total_tokens": 32_000}, batch_size=6) as loader:
        with pytest.raises(StateError, match=r"937.*1,000"):
            loader.load_state_dict(near_end)
        loader.load_state_dict(state)
    with (
        TokenLoader(**{**settings, "seq_len": 32}, batch_size=6) as loader,
        pytest.raises(StateError, match="order_len: saved 32, now nothing") as caught,
    ):
        loader.load_state_dict(state)
    assert "group64" not in str(caught.value)
    longer = TokenLoader(**settings, order_len=64, batch_size=6)
    with longer, pytest.raises(StateError, match="order_len: saved 32, now 64") as caught:
        longer.load_state_dict(state)
    assert "seq_len: " not in str(caught.value)


def test_a_change_of_the_mixture_counts_rows_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 8 tokens, a quarter of a row of the order."""
    settings = settings_of(folder, "mixture")
    with TokenLoader(**settings, batch_size=6) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        state = loader.state_dict()
    settings["mixture"]["web"]["weight"] = 0.4
    with TokenLoader(**{**settings, "quiet": False}, batch_size=6, on_change="mixture") as loader:
        capsys.readouterr()
        loader.load_state_dict(state)
        change = loader.state_change
        assert isinstance(change, MixtureChange)
        assert (change.rows_before, change.rows, change.tokens_before, change.tokens) == (48, 48, 48 * 8, 48 * 8)
        assert change.begin == 128
        assert "the next row" not in capsys.readouterr().err


PACKED: dict[str, Any] = {"rows": "pack", "eos_id": END_ID, "window_documents": 120, "global_batch": 12, "quiet": True}
PACKED |= {"seq_len": [[0, 16], [10_000, 32], [25_000, 64], [40_000, 24]]}
PACKED |= {"outputs": ("input_ids", "labels", "attention_mask", "position_ids")}
PackedRow = tuple[int, ...]


def packed_steps(folder: Path, ranks: int, batch_size: int, state: Any = None, **more: Any) -> Iterator[Any]:
    """Of each step the rows of all ranks, in the order of the epoch, without padding; the width; and a loader."""
    settings = {**PACKED, "corpus": folder / "ends.bin", **more}
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(TokenLoader(**settings, batch_size=batch_size, rank=rank, world_size=ranks))
            for rank in range(ranks)
        ]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(state)
        for _ in range(2):
            for batches in zip(*loaders, strict=True):
                rows: list[PackedRow] = []
                for row in range(batch_size):
                    for batch in batches:
                        size = int(batch["attention_mask"][row].sum())
                        ids, labels = batch["input_ids"][row], batch["labels"][row]
                        follows = (ids[1:] == ids[:-1] + 1) & (batch["attention_mask"][row][1:] == 1)
                        assert torch.equal(labels[:-1][follows], ids[1:][follows])
                        assert (labels[size:] == -100).all()
                        rows.append(tuple(ids[:size].tolist()))
                (width,) = {batch["input_ids"].shape[1] for batch in batches}
                assert max(map(len, rows)) <= width
                yield rows, width, loaders[0]


def test_packed_rows_grow_and_keep_every_token(folder: Path) -> None:
    steps = [(rows, width, loader.tokens_seen, loader.epoch) for rows, width, loader in packed_steps(folder, 1, 4)]
    assert {width for _, width, *_ in steps} == {16, 24, 32, 64}
    seen = [tokens for *_, tokens, _ in steps]
    assert seen == sorted(seen)
    for length, at in ((32, 10_000), (64, 25_000), (24, 40_000)):
        first = next(number for number, (_, width, *_) in enumerate(steps) if width == length)
        assert at - 500 < seen[first - 1] < at + 120 * 11  # at the end of a window
    for epoch in range(2):
        of_epoch = [rows for number, (rows, *_) in enumerate(steps) if (steps[number - 1][3] if number else 0) == epoch]
        tokens = [token for rows in of_epoch for row in rows for token in row if token != END_ID]
        assert len(tokens) == len(set(tokens)) > 0.98 * TOKENS["web"] * 10 / 11  # the last incomplete step is left out
    for ranks, batch_size in ((3, 4), (2, 6), (1, 12)):
        rows = [row for step, *_ in packed_steps(folder, ranks, batch_size) for row in step]
        assert rows == [row for step, *_ in steps for row in step]


def test_packed_rows_that_grow_resume_anywhere(folder: Path) -> None:
    rows: list[PackedRow] = []
    states: list[tuple[int, bool, Any, int]] = []
    for step, _, loader in packed_steps(folder, 1, 4):
        rows += step
        states.append((len(rows), loader.step_end, loader.state_dict(), loader.tokens_seen))
    for done, ends, state, seen in [*states[::113], states[len(states) // 2 - 1], states[-1]]:
        after: list[PackedRow] = []
        for step, _, loader in itertools.islice(packed_steps(folder, 3 if ends else 1, 4, state), 12):
            if not after:
                assert loader.tokens_seen > seen
            after += step
        expected = rows[done : done + len(after)]
        assert after[: len(expected)] == expected


def test_packed_lengths_may_change_at_a_resume(folder: Path) -> None:
    """The window that has begun keeps its length, also where new stages want another one before it."""
    rows: list[PackedRow] = []
    for step, _, loader in itertools.islice(packed_steps(folder, 1, 4), 100):
        rows += step
        state = loader.state_dict()
    changed = {"seq_len": [[0, 64], [20_000, 48]]}
    after = [(step, width) for step, width, _ in packed_steps(folder, 1, 4, state, **changed)]
    assert after[0][1] == 16
    assert [width for _, width in after][:200].count(64) > 20
    epoch = rows + [row for step, _ in after for row in step]
    tokens = [token for row in epoch for token in row if token != END_ID]
    counts = np.bincount(tokens)
    assert counts.max() == 2  # two epochs
    first = epoch[: len(epoch) * 2 // 5]
    assert len(set(first)) == len(first)
    with pytest.raises(StateError, match="order"):
        list(itertools.islice(packed_steps(folder, 1, 4, state, seq_len=64), 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"long_documents": "truncate"}, ["split", "truncate"]),
        ({"order_len": 64}, ["order_len", "64"]),
        ({"global_batch": [[0, 12], [99, 24]]}, ["global_batch", "one number"]),
        ({"rows": "pad"}, ["pad"]),
        ({"global_batch": None}, ["global_batch"]),
        ({"skip_steps": [{"tokens": [0, 960]}]}, ["tokens"]),
    ],
)
def test_bad_schedules_of_packed_rows(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(**{**PACKED, "corpus": "ends.bin", "batch_size": 4, **changes})
    for word in words:
        assert word in str(error.value)


@pytest.mark.skipif(gpu_stand_in.why_not() is not None, reason="no compiler for the stand-in")
@pytest.mark.parametrize("placement", ["host", "device", "pinned"])
def test_a_gpu_has_the_same_packed_batches(folder: Path, placement: str) -> None:
    settings = {**PACKED, "corpus": folder / "ends.bin", "batch_size": 4}
    with gpu_stand_in.installed("random", seed=3), ExitStack() as stack:
        on_gpu = stack.enter_context(TokenLoader(**settings, device="cuda", placement=placement, batches_per_run=3))
        on_cpu = stack.enter_context(TokenLoader(**settings, device="cpu"))
        for ours, expected in zip(on_gpu, on_cpu, strict=True):
            for name, values in expected.items():
                assert torch.equal(torch.as_tensor(np.asarray(ours[name])), values), name


@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_steps_of_earlier_epochs_are_located_if_their_lists_are_known(folder: Path, kind: str) -> None:
    settings = settings_of(folder, kind)
    with TokenLoader(**settings, batch_size=6) as loader:
        for _ in loader:
            pass
        for _ in zip(range(4), loader, strict=False):
            pass
        state, places = loader.state_dict(), [loader.locate(step, 2, epoch=0) for step in range(0, 300, 50)]
    with TokenLoader(**settings, batch_size=6) as loader:
        loader.load_state_dict(state)
        assert [loader.locate(step, 2, epoch=0) for step in range(0, 300, 50)] == places
        state = loader.state_dict()
    changed = {**settings, "seq_len": [(0, 32)], "order_len": 32}
    with TokenLoader(**changed, batch_size=6) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        for number in (0, 1):
            loader.load_state_dict(loader.state_dict() if number else state)
            assert loader.locate(loader.step + 100, 0).row_id
            with pytest.raises(ConfigError, match=r"epoch 0 .* epoch 1 "):
                loader.locate(0, 0, epoch=0)
