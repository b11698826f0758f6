"""The validation split: the same rows in the same order for everyone, and no token shared with training."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import epoch_batches
from profiles import examples
from streams import all_same, row_ids

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError
from dali_pipes.rows.windows import split_windows

T = 8
Load = Callable[..., TokenLoader]


def test_the_order_is_the_same_for_every_seed_and_epoch(counting: Callable[..., Any], load: Load, engine: str) -> None:
    corpus = counting(500, 501)
    common: dict[str, Any] = {
        "split": "validation",
        "validation_fraction": 0.3,
        "batch_size": 4,
        "seq_len": T,
        "drop_last": False,
    }
    expected = list(epoch_batches(corpus.tokens[701:], batch_size=4, seq_len=T, shuffle=False, drop_last=False))
    assert row_ids(expected) == list(range(37))
    for settings_ in ({"seed": 0}, {"seed": 1}, {"seed": 2**64 - 1, "batches_per_run": 3}, {"shuffle": False}):
        loader = load(corpus, **common, **settings_)
        for _ in range(3):
            assert all_same(loader, expected)


def test_ranks_cut_the_same_validation_rows_up(counting: Callable[..., Any], load: Load) -> None:
    corpus = counting(500, 501)
    common: dict[str, Any] = {"split": "validation", "validation_fraction": 0.3, "seq_len": T, "drop_last": False}
    for world_size, batch_size in ((1, 1), (2, 3), (3, 4), (5, 2)):
        ranks = [
            load(corpus, **common, batch_size=batch_size, rank=r, world_size=world_size) for r in range(world_size)
        ]
        rows = [
            (row, int(inputs[0]))
            for loader in ranks
            for batch in loader
            for row, inputs in zip(batch["row_ids"].tolist(), batch["input_ids"], strict=True)
            if row >= 0
        ]
        assert sorted(rows) == [(row, 701 + T * row) for row in range(37)]


@pytest.mark.parametrize("stride", [None, 3, 11])
def test_no_token_is_in_both_splits(counting: Callable[..., Any], load: Load, stride: int | None) -> None:
    """Inputs and labels of either split, the label behind the last input included."""
    corpus = counting(300, 400)
    seen = {}
    for split in ("train", "validation"):
        loader = load(
            corpus,
            split=split,
            validation_fraction=0.25,
            batch_size=1,
            seq_len=T,
            stride=stride,
        )
        seen[split] = {
            int(token) for batch in loader for name in ("input_ids", "labels") for token in batch[name].flatten()
        }
    assert max(seen["train"]) < 525 <= min(seen["validation"])
    assert max(seen["validation"]) >= 700 - max(stride or T, T)


def test_a_validation_loader_resumes(counting: Callable[..., Any], load: Load) -> None:
    corpus = counting(1001)
    common: dict[str, Any] = {"split": "validation", "validation_fraction": 0.3, "batch_size": 4, "seq_len": T}
    loader, resumed = load(corpus, **common), load(corpus, **common, batches_per_run=1)
    for number, _ in enumerate(loader, 1):
        resumed.load_state_dict(loader.state_dict())
        assert row_ids(resumed) == list(range(4 * number if number < 9 else 0, 36))


@settings(max_examples=examples(45))
@given(
    num_tokens=st.integers(2, 10**13),
    seq_len=st.integers(1, 10**4),
    stride=st.none() | st.integers(1, 10**4),
    fraction=st.floats(0.0, 1.0, exclude_max=True),
)
def test_windows_of_the_splits_never_meet(num_tokens: int, seq_len: int, stride: int | None, fraction: float) -> None:
    ends = {}
    for split in ("train", "validation"):
        try:
            windows = split_windows(num_tokens, seq_len, stride, split, fraction)
        except ConfigError:
            continue
        end = windows.first + (windows.count - 1) * windows.stride + seq_len + 1
        assert windows.count >= 1
        assert 0 <= windows.first < end <= num_tokens
        limit = num_tokens if split == "validation" else num_tokens - int(num_tokens * fraction)
        assert end <= limit < end + windows.stride  # another window would not fit
        ends[split] = (windows.first, end)
    if len(ends) == 2:
        assert ends["train"][1] <= ends["validation"][0]


@pytest.mark.parametrize(("fraction", "split"), [(0.99, "train"), (0.01, "validation"), (0.0, "validation")])
def test_a_split_without_a_row_is_refused(counting: Callable[..., Any], fraction: float, split: str) -> None:
    corpus = counting(101)
    with pytest.raises(ConfigError, match=split):
        TokenLoader(
            corpus=corpus.pattern,
            dtype="uint32",
            device="cpu",
            batch_size=1,
            seq_len=T,
            validation_fraction=fraction,
            split=split,
        )
