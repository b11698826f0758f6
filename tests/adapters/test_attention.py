"""Documents in one row do not see each other: a small model gives each the logits and gradients it has alone."""

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, IGNORED, write_documents
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from dali_pipes import TokenLoader
from dali_pipes.attention import block_mask, varlen_args
from dali_pipes.errors import ConfigError

T, WIDTH, HEADS, VOCABULARY = 24, 16, 2, 10
TOLERANCE = 1e-10
OUTPUTS = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values (B, H, T, D) to what attention makes of them, of the same shape."""
Kernel = Callable[[dict[str, Any]], Attend]


class TinyModel(nn.Module):
    """Two layers, each with attention and one step token by token; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(T, WIDTH)
        self.inwards = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outwards = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.tokens(input_ids) + self.positions(position_ids)
        for inward, outward in zip(self.inwards, self.outwards, strict=True):
            heads = inward(hidden).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
            seen = attend(heads[0], heads[1], heads[2]).transpose(1, 2).flatten(2)
            hidden = hidden + torch.tanh(outward(seen))
        logits: Tensor = self.head(hidden)
        return logits


def masked(mask: Tensor) -> Attend:
    """Attention where `mask`, (T, T) or (B, 1, T, T), says so."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value

    return attend


def causal(size: int) -> Attend:
    return masked(torch.ones(size, size, dtype=torch.bool).tril())


def dense(segment_ids: Tensor) -> Tensor:
    """The mask (B, 1, T, T) by another formula: a lower triangle for each run of equal numbers, along the diagonal."""
    count, seq_len = segment_ids.shape
    mask = torch.zeros(count, 1, seq_len, seq_len, dtype=torch.bool)
    for row, numbers in enumerate(segment_ids.tolist()):
        begin = 0
        for _, run in itertools.groupby(numbers):
            end = begin + len(list(run))
            mask[row, 0, begin:end, begin:end] = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
            begin = end
    return mask


def from_segment_ids(batch: dict[str, Any]) -> Attend:
    ids = batch["segment_ids"]
    return masked((ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(T, T, dtype=torch.bool).tril())


def from_block_mask(batch: dict[str, Any]) -> Attend:
    mask = block_mask(batch, block_size=8)
    return lambda query, key, value: flex_attention(query, key, value, block_mask=mask)


def from_varlen_args(batch: dict[str, Any]) -> Attend:
    """What flash-attention's call means: each sequence of the flattened batch by itself."""
    arguments = varlen_args(batch)
    assert arguments["cu_seqlens_q"].dtype == arguments["cu_seqlens_k"].dtype == torch.int32
    bounds = arguments["cu_seqlens_q"].tolist()
    assert arguments["cu_seqlens_k"].tolist() == bounds
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert min(sizes) > 0
    assert max(sizes) == arguments["max_seqlen_q"] == arguments["max_seqlen_k"]
    assert (bounds[0], bounds[-1]) == (0, batch["input_ids"].numel())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # (B * T, H, D)
        parts = []
        for begin, end in itertools.pairwise(bounds):
            alone = [tensor[begin:end].transpose(0, 1) for tensor in flat]
            parts.append(causal(end - begin)(alone[0], alone[1], alone[2]).transpose(0, 1))
        return torch.cat(parts).reshape(len(query), T, HEADS, -1).transpose(1, 2)

    return attend


KERNELS: dict[str, Kernel] = {"mask": from_segment_ids, "flex": from_block_mask, "varlen": from_varlen_args}


def make_documents() -> list[list[int]]:
    """Documents that fit a row, of one token and of a whole row among them."""
    draw = random.Random(1)
    sizes = [draw.randint(0, 12) for _ in range(40)] + [0, 0, 0, T - 1, T - 1, T - 2]
    draw.shuffle(sizes)
    return [[draw.randint(0, 8) for _ in range(size)] + [END] for size in sizes]


DOCUMENTS = make_documents()


def load(folder: Path, rows: str) -> list[dict[str, Any]]:
    """All batches of an epoch, the partial one included."""
    write_documents(folder / "corpus", DOCUMENTS)
    settings: dict[str, Any] = {"eos_id": END, "rows": rows, "batch_size": 4, "seq_len": T, "drop_last": False}
    with TokenLoader(corpus=str(folder / "corpus"), device="cpu", outputs=OUTPUTS, **settings) as loader:
        return list(loader)


def gradients(model: TinyModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.fixture(scope="module")
def model() -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel()


@pytest.fixture(scope="module")
def alone(model: TinyModel) -> tuple[dict[tuple[int, ...], Tensor], list[Tensor]]:
    """Logits of each document run by itself, by its tokens; gradients of the loss over all of them."""
    logits, loss = {}, torch.zeros((), dtype=torch.float64)
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        out = model(ids, torch.arange(len(document))[None], causal(len(document)))
        loss = loss + cross_entropy(out[:, :-1], ids[:, 1:])
        logits[tuple(document)] = out[0].detach()
    return logits, gradients(model, loss)


def documents_in(batch: dict[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, slice]]]:
    """The documents that a batch shows and where, found by the id that ends each."""
    found = []
    for row, (ids, segments) in enumerate(zip(batch["input_ids"].tolist(), batch["segment_ids"].tolist(), strict=True)):
        begin = 0
        for place in range(T - segments.count(0)):
            if ids[place] == END:
                found.append((tuple(ids[begin : place + 1]), (row, slice(begin, place + 1))))
                begin = place + 1
    return found


def furthest(batch: dict[str, Any], logits: Tensor, expected: dict[tuple[int, ...], Tensor]) -> float:
    """By how much the logits of a batch's documents differ from what they should be."""
    return max((logits[place] - expected[tokens]).abs().max().item() for tokens, place in documents_in(batch))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("rows", ["pack", "pad"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_and_gradients_are_those_of_the_documents_alone(
    tmp_path: Path, model: TinyModel, alone: Any, rows: str, kernel: str
) -> None:
    expected, expected_gradients = alone
    has_backward = kernel != "flex"  # torch has none for it on the CPU
    loss = torch.zeros((), dtype=torch.float64)
    served: list[tuple[int, ...]] = []
    batches = load(tmp_path, rows)
    with torch.set_grad_enabled(has_backward):
        for batch in batches:
            logits = model(batch["input_ids"], batch["position_ids"], KERNELS[kernel](batch))
            assert logits.isfinite().all()
            assert furthest(batch, logits, expected) < TOLERANCE
            loss = loss + cross_entropy(logits, batch["labels"])
            served += [tokens for tokens, _ in documents_in(batch)]
    assert sorted(served) == sorted(map(tuple, DOCUMENTS))
    assert rows == "pad" or max(batch["segment_ids"].max() for batch in batches) > 3
    if has_backward:
        for got, want in zip(gradients(model, loss), expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("ignored", ["positions", "mask", "labels"])
def test_the_proof_can_fail(tmp_path: Path, model: TinyModel, alone: Any, ignored: str) -> None:
    """A model that leaves out what keeps documents apart is found out."""
    expected, expected_gradients = alone
    loss = torch.zeros((), dtype=torch.float64)
    differences = []
    for batch in load(tmp_path, "pack"):
        positions = torch.arange(T).expand(len(batch["input_ids"]), T)
        positions = positions if ignored == "positions" else batch["position_ids"]
        attend = causal(T) if ignored == "mask" else from_segment_ids(batch)
        labels = batch["labels"]
        if ignored == "labels":  # those that cross into the next document
            labels = torch.cat([batch["input_ids"][:, 1:], torch.full((len(labels), 1), IGNORED)], 1)
        logits = model(batch["input_ids"], positions, attend)
        differences.append(furthest(batch, logits, expected))
        loss = loss + cross_entropy(logits, labels)
    assert (max(differences) > 1e-3) == (ignored != "labels")
    pairs = zip(gradients(model, loss), expected_gradients, strict=True)
    assert max((got - want).abs().max().item() for got, want in pairs) > 1e-3


rows_of_segments = st.integers(1, 70).flatmap(
    lambda seq_len: st.lists(
        st.lists(st.integers(1, 30), max_size=8).map(
            lambda sizes: ([n for n, size in enumerate(sizes, 1) for _ in range(size)] + [0] * seq_len)[:seq_len]
        ),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=examples(35))
@given(rows=rows_of_segments, block_size=st.sampled_from([1, 4, 16, 128, (4, 8), (8, 2), (3, 5)]))
def test_the_block_mask_is_the_one_torch_makes(rows: list[list[int]], block_size: int | tuple[int, int]) -> None:
    ids = torch.tensor(rows)
    mask, count, seq_len = dense(ids), *ids.shape

    def expected_at(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[row, 0, query, key]

    size: Any = block_size
    expected = create_block_mask(expected_at, count, 1, seq_len, seq_len, device="cpu", BLOCK_SIZE=size)
    got = block_mask({"segment_ids": ids}, block_size=block_size)
    assert (got.shape, got.seq_lengths, got.BLOCK_SIZE) == (expected.shape, expected.seq_lengths, expected.BLOCK_SIZE)
    for full, axis, what in itertools.product(("", "full_"), ("kv", "q"), ("num_blocks", "indices")):
        name = f"{full}{axis}_{what}"
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0, msg=name)
    row, query, key = torch.meshgrid(torch.arange(count), torch.arange(seq_len), torch.arange(seq_len), indexing="ij")
    assert torch.equal(got.mask_mod(row, torch.tensor(0), query, key), mask[:, 0])


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, made.numel() if isinstance(made, Tensor) else 0)
        return out


def test_no_mask_of_all_pairs_is_made() -> None:
    ids = torch.arange(1 << 16)[None] // 1000 + 1
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        mask = block_mask({"segment_ids": ids})
    assert mask.kv_num_blocks.shape == (1, 1, 512)
    assert 512 * 512 <= largest.elements <= 513 * 513


def test_nothing_waits_for_the_device() -> None:
    """A tensor without data stands for one on a device: to read a value from it is an error."""
    batch = {
        "segment_ids": torch.empty(2, 64, dtype=torch.int64, device="meta"),
        "cu_seqlens": torch.empty(129, dtype=torch.int32, device="meta"),
        "max_seqlen": 40,
        "num_segments": 5,
    }
    assert block_mask(batch, block_size=16).kv_indices.shape == (2, 1, 4, 4)
    arguments = varlen_args(batch)
    assert arguments["cu_seqlens_q"].shape == arguments["cu_seqlens_k"].shape == (6,)
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (40, 40)


@pytest.mark.parametrize(
    ("function", "missing"),
    [(block_mask, "segment_ids"), (varlen_args, "cu_seqlens"), (varlen_args, "max_seqlen")],
)
def test_a_missing_output_is_named(tmp_path: Path, function: Callable[..., Any], missing: str) -> None:
    write_documents(tmp_path / "corpus", DOCUMENTS)
    outputs = tuple(name for name in OUTPUTS if name != missing)
    settings: dict[str, Any] = {"eos_id": END, "rows": "pack", "batch_size": 1, "seq_len": T, "outputs": outputs}
    with (
        TokenLoader(corpus=str(tmp_path / "corpus"), device="cpu", **settings) as loader,
        pytest.raises(ConfigError, match=f"'{missing}'.*'{missing}'.*outputs"),
    ):
        function(next(iter(loader)))
