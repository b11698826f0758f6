"""Numbers with their nouns."""

from pathlib import Path

import numpy as np
import pytest

from dali_pipes import open_corpus
from dali_pipes.runtime.messages import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1000, "1,000 rows"), (10**9, "1,000,000,000 rows")],
)
def test_only_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "row") == text


def test_a_corpus_of_one_token(tmp_path: Path) -> None:
    np.array([7], np.uint16).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path) as corpus:
        assert repr(corpus) == f"<Corpus flat uint16: 1 token, 1 file, fingerprint {corpus.fingerprint}>"
