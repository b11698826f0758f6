import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import ConfigError
from dali_pipes.rows.windows import split_windows


def test_hand_written_case() -> None:
    windows = split_windows(12, seq_len=4)
    assert (windows.first, windows.count, windows.stride, windows.unused_tokens) == (0, 2, 4, 3)


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "stride", "count"),
    [(5, 4, None, 1), (8, 4, None, 1), (9, 4, None, 2), (9, 4, 1, 5), (9, 4, 100, 1), (2, 1, 1, 1), (10, 1, 1, 9)],
)
def test_count_at_the_edges(num_tokens: int, seq_len: int, stride: int | None, count: int) -> None:
    assert split_windows(num_tokens, seq_len, stride).count == count


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_windows_against_enumeration(num_tokens: int, seq_len: int, stride: int) -> None:
    starts = [s for s in range(0, num_tokens, stride) if s + seq_len + 1 <= num_tokens]
    if not starts:
        with pytest.raises(ConfigError, match=f"has {num_tokens} tokens"):
            split_windows(num_tokens, seq_len, stride)
        return
    windows = split_windows(num_tokens, seq_len, stride)
    read = {t for s in starts for t in range(s, s + seq_len + 1)}
    assert windows.count == len(starts)
    assert windows.unused_tokens == num_tokens - len(read)


@given(st.integers(40, 10_000), st.floats(0.01, 0.9), st.integers(1, 8))
def test_splits_are_disjoint_and_share_no_token(num_tokens: int, fraction: float, seq_len: int) -> None:
    held_out = int(num_tokens * fraction)
    for split, first, end in (("train", 0, num_tokens - held_out), ("validation", num_tokens - held_out, num_tokens)):
        if end - first < seq_len + 1:
            with pytest.raises(ConfigError, match=split):
                split_windows(num_tokens, seq_len, None, split, fraction)  # type: ignore[arg-type]
            continue
        windows = split_windows(num_tokens, seq_len, None, split, fraction)  # type: ignore[arg-type]
        assert windows.first == first
        assert windows.first + (windows.count - 1) * windows.stride + seq_len + 1 <= end
