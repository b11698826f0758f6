"""The offsets that a scan for an id found, kept under a name that says what they depend on."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes import kept_files

Int64Array = npt.NDArray[np.int64]

_FORMAT_VERSION = 1


def kept_name(fingerprint: str, kind: str, token_id: int) -> str:
    """Name of the file that keeps the offsets found in the corpus of this fingerprint by an id of this kind."""
    about = f"dali_pipes documents {_FORMAT_VERSION} {fingerprint} {kind} {token_id}"
    return f"documents-{hashlib.sha256(about.encode()).hexdigest()[:32]}.npy"


def is_plausible(offsets: Int64Array, num_tokens: int) -> bool:
    """Whether offsets may be those of a scan of `num_tokens` tokens, which rise strictly."""
    return bool(offsets[-1] == num_tokens) and kept_files.may_be_offsets(offsets, strictly=True)


def load_or_make(path: Path, num_tokens: int, make: Callable[[], Int64Array]) -> tuple[Int64Array, str | None]:
    """As `kept_files.load_or_make`, for offsets that end with `num_tokens`."""
    return kept_files.load_or_make(path, lambda kept: is_plausible(kept, num_tokens), make)
