"""Blocks of millions of tokens, as real training has them: delivered in parts, planned in parts, the data the same."""

from typing import Any

import numpy as np
import pytest
from oracle import IntArray
from streams import row_ids, take

from dali_pipes import TokenLoader
from dali_pipes.operators import permute
from dali_pipes.rows.windows import WindowRows, Windows

T = 1024
ROWS = 1501
OUTPUTS = ("input_ids", "labels", "row_ids")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, IntArray]:
    """Three files of random uint16, 3 MB together: 1501 rows."""
    folder = tmp_path_factory.mktemp("large")
    tokens = np.random.default_rng(7).integers(0, 2**16, ROWS * T + 1)
    for number, part in enumerate(np.split(tokens, [500_001, 500_900])):
        part.astype(np.uint16).tofile(folder / f"{number}.bin")
    return str(folder / "*.bin"), tokens


def expected_rows(tokens: IntArray, rows: list[int], epoch: int, seed: int) -> IntArray:
    """T + 1 tokens of each row of an epoch, all at once; the slow oracle would take minutes here."""
    windows = Windows(first=0, count=ROWS, seq_len=T, stride=T, num_tokens=len(tokens))
    key = WindowRows(windows, seed=seed).key(epoch)
    assert key is not None
    starts = permute(np.array(rows, np.int64), ROWS, key) * T
    return tokens[starts[:, None] + np.arange(T + 1)]


def check(batches: list[Any], tokens: IntArray, epoch: int, seed: int = 0) -> None:
    for batch in batches:
        rows = batch["row_ids"].tolist()
        real = [row for row in rows if row >= 0]
        expected = expected_rows(tokens, real, epoch, seed)
        assert np.array_equal(batch["input_ids"].numpy()[: len(real)], expected[:, :-1])
        assert np.array_equal(batch["labels"].numpy()[: len(real)], expected[:, 1:])
        assert (batch["labels"].numpy()[len(real) :] == -100).all()


@pytest.mark.parametrize("batch_size", [1, 7, 64, 300, 1501])
@pytest.mark.parametrize(
    ("engine", "per_run", "extra"),
    [
        ("direct", None, {}),
        ("direct", 9, {}),
        ("direct", None, {"world_size": 2}),
        ("dali", None, {"graph": dict}),
    ],
    indirect=["engine"],
)
def test_batches_of_real_sizes(
    corpus: tuple[str, IntArray], engine: str, batch_size: int, per_run: int | None, extra: dict[str, Any]
) -> None:
    """Every second batch is held to the end of the next epoch; the others are written to and let go."""
    pattern, tokens = corpus
    rank: dict[str, Any] = {"rank": 1} if extra.get("world_size") else {}
    with TokenLoader(
        corpus=pattern,
        batch_size=batch_size,
        seq_len=T,
        device="cpu",
        drop_last=False,
        batches_per_run=per_run,
        outputs=OUTPUTS,
        **rank,
        **extra,
    ) as loader:
        held = []
        rows: list[int] = []
        for number, batch in enumerate(loader):
            rows += row_ids([batch])
            check([batch], tokens, 0)
            if number % 2:
                batch["labels"].fill_(-7)
                batch["input_ids"].zero_()
            elif number % 8 == 0:
                held.append(batch)
        ranks = extra.get("world_size", 1)
        assert [row for row in rows if row >= 0] == list(range(ranks - 1, ROWS, ranks))
        for batch in loader:
            batch["labels"].fill_(-9)
        check(held, tokens, 0)


@pytest.mark.parametrize(("batch_size", "per_run"), [(16, None), (64, 20), (300, 4)])
def test_states_and_breaks_inside_a_block(
    corpus: tuple[str, IntArray], engine: str, batch_size: int, per_run: int | None
) -> None:
    """A block is handed out in parts; a state between two of them, or leaving there, is like anywhere else."""
    pattern, tokens = corpus
    common: dict[str, Any] = {"corpus": pattern, "seq_len": T, "device": "cpu", "outputs": OUTPUTS, "seed": 5}
    with (
        TokenLoader(**common, batch_size=batch_size, batches_per_run=per_run) as loader,
        TokenLoader(**common, batch_size=13) as other,
    ):
        epoch = 0
        for count in (1, 2, 3, len(loader) // 2, len(loader) - 1):
            batches = take(loader, count)
            check(batches, tokens, epoch, seed=5)
            assert row_ids(batches) == list(range(count * batch_size))
            state = loader.state_dict()
            assert (state["epoch"], state["rows"]) == (epoch, count * batch_size)
            other.load_state_dict(state)
            if other.epoch == epoch:
                follow = take(other, 2)
                check(follow, tokens, epoch, seed=5)
                assert row_ids(follow)[:13] == list(range(count * batch_size, count * batch_size + 13))
            epoch += 1
        iterator = iter(loader)
        early = take(iterator, 2)
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "rows": 0})
        late = take(loader, 3)
        check(early, tokens, epoch, seed=5)
        check(late, tokens, 0, seed=5)


def test_the_cap_on_blocks_changes_no_data(corpus: tuple[str, IntArray]) -> None:
    """`max_block_bytes` caps what one run delivers, however large the target."""
    pattern, tokens = corpus
    outputs: list[Any] = []
    for cap in (1, 1 << 20, 8 << 20, 64 << 20):
        with TokenLoader(
            corpus=pattern, batch_size=16, seq_len=T, device="cpu", outputs=OUTPUTS, max_block_bytes=cap
        ) as loader:
            batches = take(loader, 30)
            check(batches, tokens, 0)
            outputs.append(row_ids(batches))
    assert all(rows == outputs[0] for rows in outputs)
