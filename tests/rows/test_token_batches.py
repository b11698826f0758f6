"""`batch_tokens`: batches of at most so many padded tokens, cut from the order of rows whatever the number of ranks."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, Row, batch_outputs, problem, write_documents
from streams import loader_stream, take
from test_batches import DEVICES, rows_of
from test_loss_masks import on
from test_named_rows import document_rows

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import ConfigError, StateError, TokenRangeError
from dali_pipes.rows.packing import Packing, rows_of_documents
from dali_pipes.rows.token_batches import TOKEN_BATCHES_NAME, TokenBatches
from dali_pipes.tools.reports import explain_step, locate_batch, preview_batch

SEQ_LEN = 16


def draw_shapes(tokens: int, seq_len: int, widths: set[int]) -> list[list[int]]:
    """As many rows of each width as fit."""
    return [[tokens // width, width] for width in sorted({*(w for w in widths if w < seq_len), seq_len})]


@st.composite
def budgets(draw: st.DrawFn, seq_len: int = SEQ_LEN) -> tuple[int, list[list[int]]]:
    """Tokens of a batch, and its shapes; [] for any."""
    tokens = draw(st.integers(seq_len, 5 * seq_len))
    widths = draw(st.none() | st.sets(st.integers(1, seq_len), max_size=3))
    return tokens, [] if widths is None else draw_shapes(tokens, seq_len, widths)


def room(tokens: int, shapes: Sequence[Sequence[int]], width: int) -> int:
    for rows, wide in shapes:
        if wide >= width:
            return rows
    return tokens // width


def lengths_of(batches: Packing) -> list[list[int]]:
    sizes, bounds = batches.piece_lengths.tolist(), batches.row_offsets.tolist()
    return [sizes[low:high] for low, high in itertools.pairwise(bounds)]


@settings(max_examples=examples(80))
@given(st.lists(st.integers(1, SEQ_LEN), max_size=60), budgets(), st.none() | st.integers(0, 2**64 - 1))
def test_the_cut_of_a_window(lengths: list[int], budget: tuple[int, list[list[int]]], key: int | None) -> None:
    """Each row in one batch, none too large, none that could take the next row; by falling length if shuffled."""
    tokens, shapes = budget
    pieces = rows_of_documents(np.array(lengths, np.int64), SEQ_LEN, "split")
    packing = Packing(np.arange(len(lengths) + 1, dtype=np.int32), *pieces)
    batches = TokenBatches(tokens, SEQ_LEN, tuple((rows, width) for rows, width in shapes))
    cut = batches.cut(packing, key)
    assert sorted(cut.piece_documents.tolist()) == list(range(len(lengths)))
    assert [lengths[document] for document in cut.piece_documents] == cut.piece_lengths.tolist()
    order = cut.piece_lengths.tolist()
    assert order == (lengths if key is None else sorted(lengths, reverse=True))
    expected: list[list[int]] = []
    for length in order:
        if expected and len(expected[-1]) < room(tokens, shapes, max(*expected[-1], length)):
            expected[-1].append(length)
        else:
            expected.append([length])
    assert lengths_of(cut) == expected
    counts = np.array([len(batch) for batch in expected], np.int64)
    longest = np.array([max(batch) for batch in expected], np.int64)
    sizes, widths = batches.shapes_of(counts, longest)
    assert (sizes * widths <= tokens).all()
    assert batches.padded_tokens(cut) == int((sizes * widths).sum())
    if shapes:
        assert {*zip(sizes.tolist(), widths.tolist(), strict=True)} <= {(rows, width) for rows, width in shapes}
    else:
        assert (sizes.tolist(), widths.tolist()) == (counts.tolist(), longest.tolist())


def test_rows_of_equal_length_are_shuffled_and_so_are_batches() -> None:
    lengths = [4, 8] * 200
    options: dict[str, Any] = {"mode": "pad", "window_documents": 400, "token_batches": TokenBatches(32, 8)}
    rows = document_rows(lengths, **options)
    orders = []
    for epoch in (0, 1):
        pieces = rows.plan(epoch, np.arange(rows.count(epoch))).pieces
        assert pieces is not None
        widths = pieces.lengths[pieces.row_offsets[:-1]]
        assert rows.count(epoch) == 50 + 25
        assert 10 < np.count_nonzero(np.diff(widths)) < 60
        orders.append(pieces.starts.tolist())
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_windows_without_rows_are_passed_over() -> None:
    options: dict[str, Any] = {"mode": "pad", "long_documents": "drop", "window_documents": 1}
    rows = document_rows([3, 9, 0, 5, 12, 1], **options, token_batches=TokenBatches(16, 8))
    pieces = rows.plan(0, np.arange(rows.count(0))).pieces
    assert pieces is not None
    assert (sorted(pieces.lengths.tolist()), rows.report(0).padding_tokens) == ([1, 3, 5], 0)


def common(corpus: Path | str, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"corpus": str(corpus), "dtype": "uint16", "eos_id": END, "rows": "pad"}
    settings |= {"seq_len": SEQ_LEN, "batch_tokens": 40, "window_documents": 17, "device": "cpu", "quiet": True}
    return settings | {"drop_last": False, "outputs": OUTPUT_NAMES} | changes


def draw_documents(count: int = 60, seed: int = 4) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(1, 8) for _ in range(draw.choice([0, 1, 2, 4, 7, 12, 25]))] + [END] for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_documents(tmp_path / "corpus", draw_documents())
    return str(tmp_path / "corpus")


def expected_rows(loader: TokenLoader, epoch: int, place: int, shapes: list[list[int]]) -> tuple[list[Row], int]:
    """The rows of a batch, [] for one without tokens, and their width; place -1: a batch without any."""
    if place < 0:
        rows, width = shapes[0] if shapes else (1, SEQ_LEN)
        return [[] for _ in range(rows)], width
    (batch,) = rows_of(loader, epoch, [place])
    longest = max(length for _, length, _ in batch)
    rows, width = next(([r, w] for r, w in shapes if w >= longest), [len(batch), longest])
    return [[piece] for piece in batch] + [[] for _ in range(rows - len(batch))], width


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_batch_equals_the_oracle(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    documents = draw(st.lists(st.lists(st.integers(1, 8), max_size=20).map(lambda ids: [*ids, END]), min_size=2))
    folder = tmp_path_factory.mktemp("documents") / "corpus"
    tokens = write_documents(folder, documents)
    learn = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    if learn is not None:
        (folder / "tokens.bin.loss").write_bytes(bytes(learn))
    budget, shapes = draw(budgets())
    world_size, mtp = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 2]))
    place, long_documents = draw(st.sampled_from(sorted(DEVICES))), draw(st.sampled_from(["split", "truncate", "drop"]))
    options = common(folder, batch_tokens=budget, batch_shapes=shapes or None, vocab_size=10, mtp=mtp)
    options |= {"window_documents": draw(st.integers(1, 30)), "shuffle": draw(st.booleans()), **DEVICES[place]}
    options |= {"batches_per_run": draw(st.integers(1, 4)), "long_documents": long_documents}
    options |= {"drop_last": draw(st.booleans())}
    with on(place):
        try:
            ranks = [TokenLoader(**options, world_size=world_size, rank=rank) for rank in range(world_size)]
        except ConfigError as error:
            assert "fewer than one step" in str(error) or "is empty" in str(error)  # noqa: PT017
            return
        for epoch in range(2):
            served: Counter[int] = Counter()
            count = ranks[0]._schedule.rows_known(epoch)
            for step, batches in enumerate(itertools.zip_longest(*ranks)):
                assert all(batch is not None for batch in batches), "ranks end together"
                for rank, (loader, batch) in enumerate(zip(ranks, batches, strict=True)):
                    at = step * world_size + rank
                    rows, width = expected_rows(loader, epoch, at if at < count else -1, shapes)
                    assert len(rows) * width <= budget
                    assert problem(batch, batch_outputs(tokens, rows, width, mtp=mtp, learn=learn)) == "", (epoch, step)
                    assert len(batch["cu_seqlens"]) == len(rows) * width + 1
                    assert batch["row_ids"].tolist() == [at if row else -1 for row in rows]
                    assert all(value.is_contiguous() for value in batch.values() if not isinstance(value, int))
                    served.update(start for row in rows for start, _, _ in row)
            pieces = Counter(start for batch in rows_of(ranks[0], epoch, list(range(count))) for start, _, _ in batch)
            assert max(pieces.values()) == 1
            assert not served - pieces
            assert served == pieces or (options["drop_last"] and count % world_size)
        for loader in ranks:
            loader.close()


@pytest.mark.parametrize("place", ["dali", "host", "device", "pinned"])
@pytest.mark.parametrize("shapes", [None, [[8, 5], [2, 16]]], ids=["any", "fixed"])
def test_all_engines_and_placements_deliver_the_same(corpus: str, place: str, shapes: Any) -> None:
    """And the memory that they report is at least what the allocator gave."""
    settings = common(corpus, batch_shapes=shapes, batches_per_run=5, prefetch_queue_depth=1)
    with TokenLoader(**settings) as loader:
        expected = [shown(batch) for batch in loader]
    how = {"engine": "dali"} if place == "dali" else DEVICES[place]
    with on("cpu" if place == "dali" else place) as gpu:
        before = 0 if gpu is None else gpu.allocated
        with TokenLoader(**settings | how) as loader:
            found = []
            for batch in loader:
                memory = loader.stats().memory
                assert gpu is None or memory.device_bytes + memory.dali_bytes >= gpu.allocated - before
                found.append(shown(batch))
    assert found == expected


def test_a_batch_written_out(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1, 2, END], [3, END], [4, 5, 6, 7, END], [8, END]])
    settings = common(tmp_path / "corpus", shuffle=False, seq_len=8, batch_tokens=10, outputs=("input_ids", "labels"))
    x = -100
    with TokenLoader(**settings) as loader:
        batches = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]
        assert loader.stats().tokens == 2 * 3 + 2 * 5
        assert loader.tokens_seen == 2 * 10
    assert batches == [
        {"input_ids": [[1, 2, END], [3, END, 0]], "labels": [[2, END, x], [END, x, x]]},
        {"input_ids": [[4, 5, 6, 7, END], [8, END, 0, 0, 0]], "labels": [[5, 6, 7, END, x], [END, x, x, x, x]]},
    ]
    with TokenLoader(**settings, batch_shapes=[[3, 3], [1, 8]]) as loader:
        batches = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]
    assert [batch["input_ids"] for batch in batches] == [
        [[1, 2, END], [3, END, 0], [0, 0, 0]],
        [[4, 5, 6, 7, END, 0, 0, 0]],
        [[8, END, 0], [0, 0, 0], [0, 0, 0]],
    ]
    assert batches[0]["labels"] == [[2, END, x], [END, x, x], [x, x, x]]


def shown(batch: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else value.tolist() for name, value in batch.items()}


def test_a_resume_at_every_step_on_other_ranks(corpus: str) -> None:
    """Batch i of the epoch goes to rank i % world_size, whatever the number of ranks."""
    with TokenLoader(**common(corpus)) as loader:
        stream = loader_stream(loader)
        epochs = [[shown(batch) for batch in take(stream, len(loader))] for _ in range(2)]
    state, epoch, done = None, 0, 0
    for world_size in itertools.islice(itertools.cycle((1, 2, 3, 4)), 12):
        ranks = [TokenLoader(**common(corpus, rank=rank, world_size=world_size)) for rank in range(world_size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
                assert (rank.epoch, rank.state_dict()["rows"]) == (epoch, done)
        batches = [shown(next(iter(rank))) for rank in ranks]
        expected = epochs[epoch][done : done + world_size]
        assert batches[: len(expected)] == expected
        assert all(set(batch["row_ids"]) == {-1} for batch in batches[len(expected) :])
        done += len(expected)
        if done == len(epochs[epoch]):
            epoch, done = epoch + 1, 0
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
        for rank in ranks:
            rank.close()
    assert epoch == 1


def test_steps_that_are_skipped_are_batches(corpus: str) -> None:
    with TokenLoader(**common(corpus)) as loader:
        expected = [shown(batch) for batch in loader]
    ranges = [[2, 4], {"rows": [7, 8]}]
    with TokenLoader(**common(corpus, skip_steps=ranges)) as loader:
        assert len(loader) == len(expected) - 3
        assert [shown(batch) for batch in loader] == [
            batch for step, batch in enumerate(expected) if step not in (2, 3, 7)
        ]
    for rank in (0, 1):
        settings = common(corpus, skip_steps=[[1, 3]], rank=rank, world_size=2)
        with TokenLoader(**settings) as loader:
            served = [batch["row_ids"].tolist()[0] for batch in loader]
        wanted = [at if at < len(expected) else -1 for at in range(rank, len(expected) + 1, 2)]
        assert served == [at for step, at in enumerate(wanted[: -(-len(expected) // 2)]) if step not in (1, 2)]


@pytest.mark.parametrize("rank", [None, 0])
def test_tools_know_the_rows_of_a_batch(corpus: str, rank: int | None) -> None:
    config = LoaderConfig(**common(corpus, rank=rank or 0, world_size=2, batch_shapes=[[8, 5], [2, 16]]))
    with TokenLoader(config) as loader:
        for step, batch in enumerate(itertools.islice(loader, 4)):
            origin = locate_batch(config, step)
            assert [row.row_id for row in origin.rows] == batch["row_ids"].tolist()
            preview = preview_batch(config, step, rows=3, tokens=4)
            assert preview.batch == origin
            ids = batch["input_ids"].tolist()
            for row, found in enumerate(origin.rows):
                if found.is_padding:
                    with pytest.raises(ConfigError, match="padding"):
                        loader.locate(step, row)
                    continue
                (piece,) = found.pieces
                place = loader.locate(step, row)
                assert (place.position, place.row_id) == (piece.position, 2 * step)
                corpus_ids = loader.corpus.tokens(piece.position, piece.length).tolist()
                assert ids[row][: piece.length] == corpus_ids
            report = explain_step(config, step, all_ranks=rank is None, most=100)
            sizes = Counter(number for number, _ in report.rows)
            assert report.num_rows + report.padding_rows == sum(sizes.values())
            assert sizes[0] == len(ids)
            own = tuple(row for number, row in report.rows if number == 0)
            assert own == origin.rows
            if rank is not None:
                assert report.tokens + report.padding == batch["input_ids"].numel()


def test_the_report_counts_padding_exactly(corpus: str) -> None:
    for shapes in (None, [[8, 5], [2, 16]]):
        with TokenLoader(**common(corpus, batch_shapes=shapes)) as loader:
            report = loader.plan_report()
            batches = list(loader)
            assert report.rows == len(batches)
            positions = sum(batch["input_ids"].numel() for batch in batches)
            tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
            assert (report.tokens, report.padding_tokens) == (tokens, positions - tokens)
        with TokenLoader(**common(corpus, batch_shapes=shapes)) as again:
            assert again.length_is_known, "the report was kept, and is trusted"
            assert len(again) == report.rows


def test_a_state_says_how_batches_are_cut(corpus: str) -> None:
    with TokenLoader(**common(corpus)) as loader:
        state = loader.state_dict()
    assert TOKEN_BATCHES_NAME in state["order"]
    assert len(json.dumps(state)) < 1024
    others: list[dict[str, Any]] = [{"batch_tokens": 41}, {"batch_shapes": [[2, 16]]}]
    others.append({"batch_tokens": None, "batch_size": 2})
    for changes in others:
        with TokenLoader(**common(corpus, **changes)) as loader, pytest.raises(StateError, match=next(iter(changes))):
            loader.load_state_dict(state)


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_a_bad_id_is_found_where_it_is(tmp_path: Path, place: str) -> None:
    documents = draw_documents(40)
    tokens = [token for document in documents for token in document]
    tokens[60] = 77
    (tmp_path / "corpus").mkdir()
    np.array(tokens, np.uint16).tofile(tmp_path / "corpus" / "tokens.bin")
    changes = {"shuffle": False, "vocab_size": 10, "batches_per_run": 64, "window_documents": 100, **DEVICES[place]}
    with TokenLoader(**common(tmp_path / "corpus", shuffle=False, window_documents=100)) as loader:
        step = next(
            number
            for number in range(len(loader))
            for start, length, _ in rows_of(loader, 0, [number])[0]
            if start <= 60 < start + length
        )
    with (
        on(place),
        TokenLoader(**common(tmp_path / "corpus", **changes)) as loader,
        pytest.raises(TokenRangeError, match=rf"token 60 \(corpus position 60\) is 77.* step {step} of epoch 0"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"batch_size": 2}, ["batch_size = 2"]),
        ({"rows": "pack"}, ['rows = "pack"', 'rows = "pad"']),
        ({"rows": "stream"}, ['rows = "stream"']),
        ({"length_buckets": [4]}, ["length_buckets"]),
        ({"balance": "cost", "balance_cost": [1, 1]}, ["balance"]),
        ({"global_batch": 8, "drop_last": True}, ["global_batch"]),
        ({"context_parallel": [0, 2]}, ["context_parallel"]),
        ({"static_buffers": True}, ["static_buffers"]),
        ({"on_change": "nearest"}, ["nearest"]),
        ({"skip_steps": [{"tokens": [0, 40]}]}, ["skip_steps in tokens"]),
        ({"batch_tokens": 15}, ["batch_tokens = 15", "seq_len = 16"]),
        ({"batch_shapes": []}, ["batch_shapes = []"]),
        ({"batch_shapes": [[3, 16]]}, ["[[3, 16]]", "40 tokens"]),
        ({"batch_shapes": [[4, 8]]}, ["[[4, 8]]", "seq_len = 16"]),
        ({"batch_shapes": [[2, 16], [4, 8]]}, ["increasing"]),
        ({"batch_shapes": [[0, 8], [2, 16]]}, ["[[0, 8], [2, 16]]"]),
        ({"batch_tokens": None, "batch_size": 2, "batch_shapes": [[2, 16]]}, ["batch_shapes = [[2, 16]]"]),
        ({"batch_tokens": None}, ["batch_size"]),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        LoaderConfig(**common("x", **changes))
    assert all(part in str(raised.value) for part in parts), raised.value


def test_others_refuse_it(corpus: str) -> None:
    with pytest.raises(ConfigError, match="batch_tokens"):
        build_pipeline(**common(corpus, outputs=("input_ids", "labels")))
    settings = common("x")
    mixture = {"web": {"corpus": settings.pop("corpus"), "weight": 1}}
    with pytest.raises(ConfigError, match=r"batch_tokens = 40 .*mixture"):
        LoaderConfig(**settings, mixture=mixture)


def test_a_configuration_is_written_and_read(tmp_path: Path) -> None:
    config = LoaderConfig(**common("x", batch_shapes=[[8, 5], [2, 16]]))
    (tmp_path / "run.toml").write_text(config.to_toml())
    assert LoaderConfig.from_file(tmp_path / "run.toml") == config
    assert config.replace(batch_tokens=48).batch_tokens == 48


def test_a_rank_that_comes_out_short_learns_nothing(corpus: str) -> None:
    with TokenLoader(**common(corpus)) as loader:
        count = len(loader)
    world_size = next(size for size in (2, 3, 4, 5, 7) if count % size)
    lasts, lengths = [], set()
    for drop_last in (False, True):
        for rank in range(world_size):
            with TokenLoader(**common(corpus, rank=rank, world_size=world_size, drop_last=drop_last)) as loader:
                batches = list(loader)
                lengths.add((drop_last, len(loader.config.outputs), len(batches)))
            if not drop_last:
                lasts.append(batches[-1])
    assert {(drop_last, number) for drop_last, _, number in lengths} == {
        (False, -(-count // world_size)),
        (True, count // world_size),
    }
    for rank, batch in enumerate(lasts):
        is_short = rank >= count % world_size
        assert (batch["row_ids"].tolist() == [-1]) == is_short
        assert bool((batch["labels"] != -100).any()) or is_short
        assert not is_short or not (batch["labels"] != -100).any()
