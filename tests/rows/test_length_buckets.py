"""Length buckets: every batch as wide as its longest row needs, on all ranks alike; the tokens are those without."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, batch_outputs, problem, write_documents
from streams import loader_stream, take
from test_batches import DEVICES, rows_of
from test_loss_masks import on

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import ConfigError, StateError, TokenRangeError
from dali_pipes.rows import length_buckets
from dali_pipes.rows.length_buckets import LengthBuckets

Lengths = st.lists(st.integers(1, 16), max_size=80)


def draw_documents(count: int = 60, seed: int = 4) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(1, 8) for _ in range(draw.choice([0, 1, 2, 4, 7, 12, 25]))] + [END] for _ in range(count)]


def common(corpus: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"corpus": str(corpus), "dtype": "uint16", "eos_id": END, "rows": "pad", "seq_len": 16}
    settings |= {"batch_size": 2, "window_documents": 17, "length_buckets": (3, 8), "device": "cpu"}
    return settings | {"drop_last": False, "outputs": OUTPUT_NAMES} | changes


def key(seed: int, what: object) -> int:
    return random.Random(f"{seed} {what}").getrandbits(64)


def equal(batch: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return batch.keys() == wanted.keys() and all(
        batch[name] == value if isinstance(value, int) else batch[name].equal(value) for name, value in wanted.items()
    )


@given(Lengths, st.integers(1, 9), st.integers(0, 5))
def test_the_order_of_a_window(lengths: list[int], run_rows: int, seed: int) -> None:
    """Each row once; runs of one bucket; another order with other keys, and within a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_buckets, "RUN_ROWS", run_rows)
        buckets = LengthBuckets(np.array([3, 8, 16]))
        order = buckets.order(np.array(lengths, np.int64), partial(key, seed))
    assert sorted(order.tolist()) == list(range(len(lengths)))
    widths = buckets.widths(np.array(lengths, np.int64))
    assert widths.tolist() == [3 if n <= 3 else 8 if n <= 8 else 16 for n in lengths]
    changes = np.count_nonzero(np.diff(widths[order]))
    most_runs = sum(-(-count // run_rows) for count in Counter(widths.tolist()).values())
    assert changes < max(1, most_runs)


def test_rows_and_runs_are_shuffled() -> None:
    lengths = np.array([2, 5] * 5000)
    orders = [LengthBuckets(np.array([3, 8])).order(lengths, partial(key, n)) for n in (0, 1)]
    assert orders[0].tolist() != orders[1].tolist()
    for order in orders:
        kinds = lengths[order]
        assert (np.diff(order[kinds == 2]) < 0).sum() > 2000
        borders = np.flatnonzero(np.diff(kinds))
        assert 2 <= len(borders) <= 10
        assert np.diff([-1, *borders, len(kinds) - 1]).max() <= 10 * length_buckets.RUN_ROWS


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_batch_equals_the_oracle_at_its_own_width(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    documents = draw(st.lists(st.lists(st.integers(1, 8), max_size=20).map(lambda ids: [*ids, END]), min_size=2))
    folder = tmp_path_factory.mktemp("documents") / "corpus"
    tokens = write_documents(folder, documents)
    learn = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    if learn is not None:
        (folder / "tokens.bin.loss").write_bytes(bytes(learn))
    seq_len = draw(st.sampled_from([4, 9, 16]))
    bounds = sorted(draw(st.sets(st.integers(1, seq_len), min_size=1, max_size=4)))
    world_size, mtp = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 2]))
    place, shuffle = draw(st.sampled_from(sorted(DEVICES))), draw(st.booleans())
    long_documents = draw(st.sampled_from(["split", "truncate", "drop"]))
    plain = common(folder, seq_len=seq_len, shuffle=shuffle, long_documents=long_documents, vocab_size=10, mtp=mtp)
    plain |= {"window_documents": draw(st.integers(1, 30)), "batch_size": draw(st.integers(1, 3)), **DEVICES[place]}
    plain |= {"batches_per_run": draw(st.integers(1, 4)), "length_buckets": None, "world_size": world_size}
    plain |= {"static_buffers": draw(st.booleans()), "drop_last": draw(st.booleans())}
    with on(place):
        try:
            ranks = [TokenLoader(**(plain | {"length_buckets": bounds}), rank=rank) for rank in range(world_size)]
        except ConfigError as error:
            assert "fewer than one step" in str(error) or "is empty" in str(error)  # noqa: PT017
            return
        widths = [*bounds, seq_len]
        for epoch in range(2):
            served: Counter[int] = Counter()
            for step, batches in enumerate(itertools.zip_longest(*ranks)):
                assert all(batch is not None for batch in batches), "ranks end together"
                row_ids = [batch["row_ids"].tolist() for batch in batches]
                plans = [rows_of(loader, epoch, ids) for loader, ids in zip(ranks, row_ids, strict=True)]
                longest = max(length for plan in plans for row in plan for _, length, _ in row)
                width = next(bound for bound in widths if bound >= longest)
                for plan, batch in zip(plans, batches, strict=True):
                    expected = batch_outputs(tokens, plan, width, mtp=mtp, learn=learn)
                    assert problem(batch, expected) == "", (epoch, step)
                    assert len(batch["cu_seqlens"]) == plain["batch_size"] * width + 1
                    assert all(value.is_contiguous() for value in batch.values() if not isinstance(value, int))
                    served.update(start for row in plan for start, _, _ in row)
            without = TokenLoader(**(plain | {"batch_size": 1, "world_size": 1, "drop_last": False}), rank=0)
            pieces = Counter(
                start
                for ids in [range(without._schedule.rows_known(epoch))]
                for row in rows_of(without, epoch, list(ids))
                for start, _, _ in row
            )
            assert not served - pieces
            assert plain["drop_last"] or served == pieces
            without.close()
        for loader in ranks:
            loader.close()


def test_a_batch_written_out(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1, 2, END], [3, END], [4, 5, 6, 7, END], [8, END]])
    with TokenLoader(**common(tmp_path / "corpus", shuffle=False, outputs=("input_ids", "labels"))) as loader:
        batches = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]
        assert loader.stats().tokens == 2 * 3 + 2 * 8
    x = -100
    assert batches == [
        {"input_ids": [[1, 2, END], [3, END, 0]], "labels": [[2, END, x], [END, x, x]]},
        {
            "input_ids": [[4, 5, 6, 7, END, 0, 0, 0], [8, END, 0, 0, 0, 0, 0, 0]],
            "labels": [[5, 6, 7, END, x, x, x, x], [END, x, x, x, x, x, x, x]],
        },
    ]


def test_a_resume_at_every_step_on_every_device(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", draw_documents())
    per_run = (("cpu", 3), ("host", 2), ("device", 1), ("pinned", 2))
    places: list[dict[str, Any]] = [{**DEVICES[place], "batches_per_run": count} for place, count in per_run]
    with on("host"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_buckets, "RUN_ROWS", 3)
        for rank in (0, 1):
            settings = common(tmp_path / "corpus", rank=rank, world_size=2)
            with TokenLoader(**(settings | places[0])) as loader:
                expected = take(loader_stream(loader), 2 * len(loader) + 5)
            assert len({batch["input_ids"].shape[1] for batch in expected}) == 3
            state = None
            for step, wanted in enumerate(expected):
                with TokenLoader(**(settings | places[step % 3])) as loader:
                    if state is not None:
                        loader.load_state_dict(json.loads(json.dumps(state)))
                    assert equal(next(iter(loader)), wanted), (rank, step)
                    state = loader.state_dict()


def steps_of(loaders: Sequence[TokenLoader], count: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Width, and row numbers with their tokens in the order of the epoch, of the next steps of all ranks together."""
    steps = []
    streams = [loader_stream(loader) for loader in loaders]
    for _ in range(count):
        batches = [next(stream) for stream in streams]
        (width,) = {batch["input_ids"].shape[1] for batch in batches}
        rows = [
            (int(number), *ids[: int(mask.sum())].tolist())
            for batch in batches
            for number, ids, mask in zip(batch["row_ids"], batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        steps.append((width, sorted(rows)))
    return steps


def test_other_ranks_and_batch_sizes_go_on_in_the_same_order(tmp_path: Path) -> None:
    """1, 2 and 4 ranks with 8 rows a step: the same steps, as wide. With 6 rows a step: the same rows in order."""
    write_documents(tmp_path / "corpus", draw_documents(90))

    def loaders(world_size: int, batch_size: int, state: Any) -> list[TokenLoader]:
        made = [
            TokenLoader(**common(tmp_path / "corpus", rank=rank, world_size=world_size, batch_size=batch_size))
            for rank in range(world_size)
        ]
        for loader in made:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        return made

    (whole,) = loaders(1, 8, None)
    unbroken = steps_of([whole], 24)
    whole.close()
    state, done = None, 0
    for world_size, count in ((1, 3), (2, 4), (4, 9), (1, 2), (2, 6)):
        ranks = loaders(world_size, 8 // world_size, state)
        assert steps_of(ranks, count) == unbroken[done : done + count]
        done += count
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        for loader in ranks:
            loader.close()
    ranks = loaders(3, 2, None)
    rows = [row for _, step in steps_of(ranks, 8) for row in step]
    assert rows == [row for _, step in unbroken[:6] for row in step]
    for loader in ranks:
        loader.close()


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_static_buffers_have_an_address_for_each_width(tmp_path: Path, place: str) -> None:
    write_documents(tmp_path / "corpus", draw_documents())
    addresses: dict[tuple[str, int], set[int]] = {}
    with on(place), TokenLoader(**common(tmp_path / "corpus", **DEVICES[place], static_buffers=True)) as loader:
        for _ in range(3):
            for batch in loader:
                for name in ("input_ids", "labels", "cu_seqlens"):
                    assert batch[name].is_contiguous()
                    addresses.setdefault((name, batch["input_ids"].shape[1]), set()).add(batch[name].data_ptr())
    assert len(addresses) == 9
    assert all(len(found) == 1 for found in addresses.values())


@pytest.mark.parametrize("place", sorted(DEVICES))
@pytest.mark.parametrize("at", [0, 17, 60, 111])
def test_a_bad_id_is_found_where_it_is(tmp_path: Path, place: str, at: int) -> None:
    """Rows of one block have different widths, so its place is not to be had by dividing by one of them."""
    documents = draw_documents(40)
    tokens = [token for document in documents for token in document]
    assert tokens[at] != END
    tokens[at] = 77
    (tmp_path / "corpus").mkdir()
    np.array(tokens, np.uint16).tofile(tmp_path / "corpus" / "tokens.bin")
    changes = {"shuffle": False, "vocab_size": 10, "batches_per_run": 64, "window_documents": 100, **DEVICES[place]}
    with (
        on(place),
        TokenLoader(**common(tmp_path / "corpus", **changes)) as loader,
        pytest.raises(TokenRangeError, match=rf"token {at} \(corpus position {at}\) is 77"),
    ):
        list(loader)


def test_memory_of_a_block_is_what_the_allocator_gave(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", draw_documents())
    settings = common(tmp_path / "corpus", **DEVICES["device"], batches_per_run=3, prefetch_queue_depth=1)
    with gpu_stand_in.installed("late") as gpu:
        before = gpu.allocated
        with TokenLoader(**settings) as loader:
            for batch in loader:
                memory = loader.stats().memory
                assert memory.device_bytes + memory.dali_bytes >= gpu.allocated - before
                del batch


def test_the_report_counts_rows_at_their_own_width(tmp_path: Path) -> None:
    documents = draw_documents()
    write_documents(tmp_path / "corpus", documents)
    sizes = [size for document in documents for size in [16] * (len(document) // 16) + [len(document) % 16] if size]
    places = sum(3 if size <= 3 else 8 if size <= 8 else 16 for size in sizes)
    with TokenLoader(**common(tmp_path / "corpus")) as loader:
        report = loader.plan_report()
        shown = sum(batch["input_ids"].numel() for batch in loader)
    assert (report.rows, report.tokens) == (len(sizes), sum(sizes))
    assert report.padding_tokens == places - sum(sizes)
    assert report.fill == sum(sizes) / places
    assert places <= shown < 16 * len(sizes)
    with TokenLoader(**common(tmp_path / "corpus")) as again:
        assert again.length_is_known, "the report was kept, and is trusted"
        assert again.plan_report() == report


def test_a_batch_wastes_little(tmp_path: Path) -> None:
    """Log-normal lengths, and runs of sixteen batches."""
    lengths = np.random.default_rng(1).lognormal(np.log(60), 1.0, 8000).astype(int).clip(1, 511)
    (tmp_path / "corpus").mkdir()
    tokens = np.ones(int((lengths + 1).sum()), np.uint16)
    tokens[np.cumsum(lengths + 1) - 1] = END
    tokens.tofile(tmp_path / "corpus" / "tokens.bin")

    def shown(buckets: tuple[int, ...] | None) -> int:
        changes = {"seq_len": 512, "batch_size": 64, "length_buckets": buckets, "window_documents": 65536}
        with TokenLoader(**common(tmp_path / "corpus", **changes, outputs=("input_ids",))) as loader:
            return sum(batch["input_ids"].numel() for batch in loader)

    assert len(tokens) / shown(None) < 0.22
    assert len(tokens) / shown((32, 64, 96, 128, 192, 256, 384)) > 0.65


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "pack"}, 'length_buckets .*rows = "pad"'),
        ({"rows": "stream"}, 'length_buckets .*rows = "pad"'),
        ({"length_buckets": ()}, r"length_buckets.* \[\].*seq_len = 16"),
        ({"length_buckets": (4, 4)}, r"\[4, 4\].*seq_len = 16"),
        ({"length_buckets": (8, 4)}, r"\[8, 4\].*seq_len = 16"),
        ({"length_buckets": (0, 4)}, r"\[0, 4\].*seq_len = 16"),
        ({"length_buckets": (4, 17)}, r"\[4, 17\].*seq_len = 16"),
    ],
)
def test_widths_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(**common(tmp_path, **changes))


def test_a_changed_order_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", draw_documents())
    with TokenLoader(**common(tmp_path / "corpus")) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1000
    with TokenLoader(**common(tmp_path / "corpus", length_buckets=[3, 8, 16])) as same:
        same.load_state_dict(state)  # the last width is seq_len, said or not
    for other, now in (((3, 9), r"\[3, 9, 16\]"), (None, "None")):
        with (
            TokenLoader(**common(tmp_path / "corpus", length_buckets=other)) as loader,
            pytest.raises(StateError, match=rf"length_buckets: saved \[3, 8, 16\], now {now}"),
        ):
            loader.load_state_dict(state)


def test_a_dali_graph_has_no_place_for_them(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", draw_documents())
    settings = common(tmp_path / "corpus", outputs=("input_ids", "labels"))
    with pytest.raises(ConfigError, match=r"length_buckets .* DALI"):
        build_pipeline(LoaderConfig(**settings))
    with pytest.raises(ConfigError, match=r"length_buckets .* DALI"):
        TokenLoader(**settings, graph=lambda nodes: nodes)
