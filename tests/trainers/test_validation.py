"""The manual's validation recipe: one loss on any number of ranks, that of every token of the split counted once."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counting import CountingCorpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import IntArray
from profiles import examples
from recipes import Run, recipe

from dali_pipes import TokenLoader

T = 8
VOCAB = 50
END = 49
"""Id that ends a document."""
FRACTION = 0.4


class Noting:
    """A loader that notes the ids of the rows it hands out."""

    def __init__(self, loader: TokenLoader, rows: list[int]) -> None:
        self._loader, self._rows, self.device = loader, rows, loader.device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._rows += batch["row_ids"].tolist()
            yield batch


class Recipe:
    """`validation_loss` of the manual, for ranks that are played one after another."""

    def __init__(self, folder: Path, corpus: CountingCorpus) -> None:
        self._variables = Run(folder, corpus.pattern).start(recipe("validation"))
        self._variables["validation"].close()

    def sums(self, model: torch.nn.Module, **loader_settings: Any) -> tuple[torch.Tensor, list[int]]:
        """Summed loss and number of labels of one rank, as it would reduce them; row ids of the pass."""
        reduced: list[torch.Tensor] = []
        self._variables["dist"] = SimpleNamespace(is_initialized=lambda: True, all_reduce=reduced.append)
        rows: list[int] = []
        with TokenLoader(**loader_settings) as loader:
            self._variables["validation"] = Noting(loader, rows)
            self._variables["validation_loss"](model)
        (total,) = reduced
        return total, rows


@pytest.fixture(scope="module")
def validation(corpus: CountingCorpus, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return Recipe(tmp_path_factory.mktemp("recipe"), corpus)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, 4), torch.nn.Linear(4, VOCAB)).double()


def loss_of_pairs(model: torch.nn.Module, pairs: Sequence[tuple[int, int]]) -> float:
    """Mean loss of (input, label) pairs, in NumPy: the model looks at one token at a time."""
    logits = model(torch.arange(VOCAB)).detach().numpy()
    losses = np.log(np.exp(logits).sum(1))[:, None] - logits
    return float(np.mean([losses[pair] for pair in pairs]))


def pairs_of_stream(tokens: IntArray) -> list[tuple[int, int]]:
    split = tokens[len(tokens) - int(len(tokens) * FRACTION) :].tolist()
    rows = (len(split) - 1) // T
    return list(itertools.pairwise(split[: rows * T + 1]))


def pairs_of_documents(tokens: IntArray) -> list[tuple[int, int]]:
    """Of the documents that begin in the split, cut into pieces of a row; no label is in another piece."""
    border = len(tokens) - int(len(tokens) * FRACTION)
    ends = [place + 1 for place, token in enumerate(tokens) if token == END or place + 1 == len(tokens)]
    pairs: list[tuple[int, int]] = []
    for begin, end in itertools.pairwise([0, *ends]):
        for start in range(begin, end, T) if begin >= border else ():
            pairs += itertools.pairwise(tokens[start : min(start + T, end)].tolist())
    return pairs


@settings(
    max_examples=examples(1),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(2, 3 * T), min_size=6, max_size=20),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_the_loss_is_that_of_the_split_on_any_number_of_ranks(
    validation: Recipe,
    model: torch.nn.Module,
    tmp_path_factory: pytest.TempPathFactory,
    rows: str,
    lengths: list[int],
    batch_size: int,
    seed: int,
) -> None:
    """Also with more ranks than rows in the last step, whose batches are padding only."""
    random = np.random.default_rng(seed)
    documents = [np.append(random.integers(0, END, length - 1), END) for length in [*lengths, 3 * T, 2]]
    tokens = np.concatenate(documents)
    path = tmp_path_factory.mktemp("split") / "tokens.bin"
    tokens.astype(np.uint16).tofile(path)
    pairs = pairs_of_stream(tokens) if rows == "stream" else pairs_of_documents(tokens)
    common: dict[str, Any] = {
        "corpus": str(path),
        "seq_len": T,
        "batch_size": batch_size,
        "rows": rows,
        "device": "cpu",
    }
    common |= {"eos_id": END, "split": "validation", "validation_fraction": FRACTION, "drop_last": False}
    common["outputs"] = ("input_ids", "labels", "row_ids")
    for world_size in (1, 2, 3, 4):
        parts = [validation.sums(model, **common, rank=rank, world_size=world_size) for rank in range(world_size)]
        handed_out = sorted(row for _, rank_rows in parts for row in rank_rows if row >= 0)
        assert handed_out == list(range(len(handed_out)))
        assert len({len(rank_rows) for _, rank_rows in parts}) == 1
        loss, labels = torch.stack([total for total, _ in parts]).sum(0)
        assert labels == len(pairs)
        assert float(loss / labels) == pytest.approx(loss_of_pairs(model, pairs), rel=1e-12)


def test_a_batch_of_padding_alone_has_no_mean_and_counts_nothing(
    validation: Recipe, model: torch.nn.Module, tmp_path: Path
) -> None:
    """One row on four ranks."""
    path = tmp_path / "tokens.bin"
    (np.arange(T + 1) % VOCAB).astype(np.uint16).tofile(path)
    common: dict[str, Any] = {"corpus": str(path), "seq_len": T, "batch_size": 2, "drop_last": False, "device": "cpu"}
    common["outputs"] = ("input_ids", "labels", "row_ids")
    for rank in range(4):
        (loss, labels), rows = validation.sums(model, **common, rank=rank, world_size=4)
        assert rows == [0 if rank == 0 else -1]
        assert (float(loss) > 0, int(labels)) == ((True, T) if rank == 0 else (False, 0))
        with TokenLoader(**common, rank=rank, world_size=4) as loader:
            (batch,) = loader
            mean = torch.nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            assert mean.isnan().item() == (rank > 0)
