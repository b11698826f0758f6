"""Sample texts with their true ids, and the GPT-2 tokenizer."""

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from corpus_truth import Truth

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

ARCHIVE = Path(__file__).parents[1] / "data" / "text" / "samples.tar.xz"


@pytest.fixture(scope="session")
def text_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample texts, unpacked; tests leave them as they are."""
    folder = tmp_path_factory.mktemp("text_samples")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GPT-2 tokenizer.json."""
    from gpt2_tokenizer import tokenizer_json

    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    path.write_text(tokenizer_json(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first ids of GPT-2 and <|endoftext|>, where any tokenizer will do: it is read in a fiftieth of the time."""
    from chat_cases import small_json
    from tokenizers import Tokenizer

    path = tmp_path_factory.mktemp("small") / "tokenizer.json"
    made = Tokenizer.from_str(small_json())
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def truth(samples: Path) -> Truth:
    """The documents of the samples: texts and ids."""
    from decode import decode, load_pieces

    with np.load(samples / "truth.npz") as arrays:
        tokens, offsets = arrays["gpt2_tokens"], arrays["gpt2_offsets"]
    ids = [part.tolist() for part in np.split(tokens, offsets[1:-1])]
    pieces = load_pieces()
    return Truth([decode(part, pieces) for part in ids], ids)
