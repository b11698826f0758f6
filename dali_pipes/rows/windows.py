"""Windows: how a stream of tokens is cut into rows.

A window of T = `seq_len` reads T + 1 tokens, since the label of the last input is the token after it. With T = 4 and
stride 4, a stream of 12 tokens has two windows; the tokens after the last window are in no row:

    tokens    0 1 2 3 4 5 6 7 8 9 10 11
    window 0  0 1 2 3|4
    window 1          4 5 6 7|8                 (8 is a label only; 9, 10 and 11 are unused)
"""

from dataclasses import dataclass
from typing import Literal

from dali_pipes.errors import ConfigError


@dataclass(frozen=True)
class Windows:
    """`count` windows of T = `seq_len` tokens (plus one for the last label); the first starts at token `first`."""

    first: int
    count: int
    seq_len: int
    stride: int
    num_tokens: int
    """Tokens of the split that the windows are cut from."""

    @property
    def span(self) -> int:
        """Tokens from `first` to the last one that a window reads."""
        return (self.count - 1) * self.stride + self.seq_len + 1

    @property
    def unused_tokens(self) -> int:
        """Tokens of the split that no window reads, neither as an input nor as a label."""
        gap = max(0, self.stride - self.seq_len - 1) * (self.count - 1)
        return self.num_tokens - self.span + gap


def split_windows(
    num_tokens: int,
    seq_len: int,
    stride: int | None = None,
    split: Literal["train", "validation"] = "train",
    validation_fraction: float = 0.0,
) -> Windows:
    """Windows of one split. The last `floor(num_tokens * validation_fraction)` tokens are the validation split.

    The split depends on the corpus and the fraction alone, never on seed, rank or batch size; no window crosses it.
    Raises `ConfigError` when the split is shorter than one window.
    """
    stride = seq_len if stride is None else stride
    held_out = int(num_tokens * validation_fraction)
    first, available = (num_tokens - held_out, held_out) if split == "validation" else (0, num_tokens - held_out)
    if available < seq_len + 1:
        raise ConfigError(
            f"the {split} split has {available} tokens (corpus {num_tokens}, validation_fraction "
            f"{validation_fraction}), but one row of seq_len {seq_len} reads {seq_len + 1}; use a longer corpus, "
            "a shorter seq_len or another validation_fraction"
        )
    return Windows(first, (available - 1 - seq_len) // stride + 1, seq_len, stride, available)
