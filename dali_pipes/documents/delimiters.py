"""Whether documents begin or end with an id, by a sample: an index says where they are, but not that."""

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus

_LOOKED_AT = 64


def are_delimited(corpus: Corpus, offsets: npt.NDArray[np.int64], token_id: int | None, *, at_end: bool) -> bool:
    """Whether more than half of the documents have `token_id` as the last or the first token. None: no.

    Blocks: reads one token each of up to 64 documents, evenly spread, the same on every rank.
    """
    count = len(offsets) - 1
    if token_id is None or not count:
        return False
    looked_at = np.arange(min(count, _LOOKED_AT)) * count // min(count, _LOOKED_AT)
    looked_at = looked_at[offsets[looked_at] < offsets[looked_at + 1]]
    places = offsets[looked_at + 1] - 1 if at_end else offsets[looked_at]
    tokens = np.empty(len(places), corpus.dtype)
    corpus.read_pieces(places, np.ones_like(places), np.arange(len(places)), tokens)
    return 2 * int(np.count_nonzero(tokens == token_id)) > len(tokens)
