"""Cached document offsets: what they depend on, and whether they are plausible."""

import numpy as np
import numpy.typing as npt

from dali_pipes.runtime import offset_cache

Int64Array = npt.NDArray[np.int64]

_FORMAT_VERSION = 1


def kept_about(content_key: str, kind: str, token_id: int) -> bytes:
    """Everything that the offsets depend on: the corpus's `content_key`, and the kind and value of the id."""
    return f"dali_pipes documents {_FORMAT_VERSION} {content_key} {kind} {token_id}".encode()


def is_plausible(offsets: Int64Array, num_tokens: int) -> bool:
    """Whether offsets may be those of a scan of `num_tokens` tokens, which rise strictly."""
    return bool(offsets[-1] == num_tokens) and offset_cache.may_be_offsets(offsets, strictly=True)
