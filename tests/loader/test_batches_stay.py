"""On the CPU, a batch stays what it was for as long as it is held, and writing to it reaches nothing else."""

import gc
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kinds import KINDS, settings_of
from oracle import epoch_batches
from streams import all_same, loader_stream, oracle_stream, take

from dali_pipes import TokenLoader

T = 16
Load = Callable[..., TokenLoader]

# A width that is widened on the way out, and one that might be handed through as it is.
WIDTHS = ["uint16", "int64"]


@pytest.fixture(
    params=[("dali", 1, 1, 1), ("dali", 3, 4, 2), ("dali", None, 2, 2), ("direct", 3, 2, 2)],
    ids=lambda p: f"{p[0]},K={p[1]},depth={p[2]}",
)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings that must not matter, on a machine with or without DALI."""
    engine, *values = request.param
    if engine == "direct":
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    return dict(zip(("batches_per_run", "prefetch_queue_depth", "num_threads"), values, strict=True))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_twenty_batches_are_kept(counting: Callable[..., Any], load: Load, dtype: str, how: dict[str, Any]) -> None:
    """Compared when all of them have been handed out, again after two more epochs, and after the loader is gone."""
    corpus = counting(300, 342, dtype=dtype, vocab_size=200)  # 40 rows, 13 batches
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T, "drop_last": False}
    loader = load(corpus, **how, **order)
    kept = take(loader_stream(loader), 20)
    expected = take(oracle_stream(corpus.tokens, **order), 20)
    assert all_same(kept, expected)
    take(loader_stream(loader), 26)
    assert all_same(kept, expected)
    loader.load_state_dict({**loader.state_dict(), "epoch": 9, "rows": 6})
    take(loader, 3)
    assert all_same(kept, expected)
    loader.close()
    assert all_same(kept, expected)
    del loader
    gc.collect()
    _overwrite_free_memory()
    assert all_same(kept, expected)


HOLDS: dict[str, Any] = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "a column": lambda tensor: tensor[:, 5:6],
    "a flat view": lambda tensor: tensor.view(-1),
    "a transposed view": lambda tensor: tensor.t(),
    "a detached tensor": lambda tensor: tensor.detach(),
    "another type": lambda tensor: tensor.view(torch.int32),
    "a strided view": lambda tensor: tensor.as_strided((2, 3), (T, 2)),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a NumPy array": lambda tensor: tensor.numpy(),
    "a slice of a NumPy array": lambda tensor: tensor.numpy()[1:][:1, 3:],
    "a view of a view of a NumPy array": lambda tensor: tensor.numpy().reshape(-1)[4:].view("uint8")[8:],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "a DLPack copy of the handle": lambda tensor: torch.utils.dlpack.from_dlpack(tensor)[1:],
    "a NumPy array by DLPack": lambda tensor: np.from_dlpack(tensor)[1:],
    "what autograd keeps": lambda tensor: _graph_over(tensor),
}


def _graph_over(tensor: torch.Tensor) -> Any:
    """An embedding's backward pass needs the ids that went in."""
    weight = torch.ones(200, 1, requires_grad=True)
    return torch.nn.functional.embedding(tensor, weight), weight


def _content(held: Any) -> Any:
    if isinstance(held, tuple):
        embedded, weight = held
        (gradient,) = torch.autograd.grad(embedded.sum(), weight, retain_graph=True)
        return gradient.flatten().tolist()
    if isinstance(held, torch.UntypedStorage):
        return bytes(held)
    return np.asarray(held).tolist()


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize(("engine", "dtype"), [("dali", "int64"), ("direct", "uint16")], indirect=["engine"])
def test_a_batch_may_be_held_in_any_form(
    counting: Callable[..., Any], load: Load, engine: str, dtype: str, hold: str
) -> None:
    """Memory is used again once no one refers to it, so every way to refer to it must count."""
    corpus = counting(642, dtype=dtype, vocab_size=200)  # 40 rows, 13 batches
    for per_run in (1, 4):
        loader = load(corpus, batch_size=3, seq_len=T, batches_per_run=per_run)
        held, before = [], []
        for number, batch in enumerate(take_lazily(loader, 14)):
            if number % 3 == 0:
                held.append(HOLDS[hold](batch["labels"]))
                before.append(_content(held[-1]))
            del batch
        for _ in range(2):
            for batch in loader:
                batch["labels"].fill_(1)
                batch["input_ids"].fill_(2)
        assert [_content(value) for value in held] == before
        loader.close()
        del loader, batch
        _overwrite_free_memory()
        assert [_content(value) for value in held] == before


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_batches_let_go_by_another_thread(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """A trainer that hands batches on: each is checked, then dropped, in a thread that lags behind."""
    corpus = counting(4001, dtype="uint16", vocab_size=200)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T}
    loader = load(corpus, batches_per_run=2, **order)
    waiting: queue.Queue[Any] = queue.Queue(maxsize=7)
    checked = []

    def consume() -> None:
        expected = oracle_stream(corpus.tokens, **order)
        while (batch := waiting.get()) is not None:
            checked.append(all_same([batch], [next(expected)]))
            batch["labels"].fill_(-1)

    thread = threading.Thread(target=consume)
    thread.start()
    for batch in take_lazily(loader, 3 * len(loader)):
        waiting.put(batch)
    waiting.put(None)
    thread.join()
    assert checked == [True] * 3 * len(loader)


def _overwrite_free_memory() -> None:
    """If the memory of a batch were free by now, something would be written over it."""
    for size in (3 * T, 9 * T, 39 * T, 120 * T):
        blocks = [torch.full((size,), -7, dtype=torch.int64) for _ in range(50)]
        del blocks


@pytest.mark.parametrize("dtype", [*WIDTHS, "int32"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("depth", [1, 4])
def test_outputs_of_a_graph_are_kept(
    counting: Callable[..., Any], load: Load, dtype: str, world_size: int, depth: int
) -> None:
    """With operators of the user, batches are views of DALI's own memory; int64 is what its cast may hand through."""
    corpus = counting(642, dtype=dtype, vocab_size=200)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T, "drop_last": False, "world_size": world_size, "rank": 0}
    for per_run in (1, 4):
        loader = load(corpus, graph=dict, batches_per_run=per_run, prefetch_queue_depth=depth, **order)
        kept, expected = [], take(oracle_stream(corpus.tokens, **order), 40)
        for number, batch in enumerate(take_lazily(loader, 40)):
            assert all_same([batch], [expected[number]])
            if number % 3 == 0:
                kept.append((batch, expected[number]))
            else:
                for tensor in batch.values():
                    tensor.fill_(-3)
        loader.close()
        assert all(all_same([batch], [want]) for batch, want in kept)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_one_batch_of_a_block_is_kept(
    counting: Callable[..., Any], load: Load, dtype: str, how: dict[str, Any]
) -> None:
    """The other batches of its block, and the loader, are let go at once."""
    corpus = counting(642, dtype=dtype, vocab_size=200)
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T}
    kept = []
    for _ in range(6):
        loader = load(corpus, **how, **order)
        kept.append(next(iter(loader))["labels"][1])
        loader.close()
    gc.collect()
    _overwrite_free_memory()
    (first,) = take(epoch_batches(corpus.tokens, **order), 1)
    assert all(row.tolist() == first["labels"][1].tolist() for row in kept)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_writing_to_a_batch_reaches_nothing_else(
    counting: Callable[..., Any], load: Load, dtype: str, world_size: int, how: dict[str, Any]
) -> None:
    """-1 into every output of batch k before k + 1 is asked for: nothing else changes, now or later."""
    corpus = counting(642, dtype=dtype, vocab_size=200)
    order: dict[str, Any] = {
        "batch_size": 3,
        "seq_len": T,
        "drop_last": False,
        "world_size": world_size,
        "rank": world_size - 1,
    }
    loader = load(corpus, **how, **order)
    held: list[Any] = []
    for number, (batch, expected) in enumerate(
        zip(take_lazily(loader, 40), take(oracle_stream(corpus.tokens, **order), 40), strict=True)
    ):
        for name in ("input_ids", "labels", "row_ids"):
            assert all_same([{name: batch[name]}], [expected])
            batch[name].fill_(-1)
        held.append(batch)
        if number % 3 == 0:
            del held[:-2]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "rows": 0})
    assert all_same(loader, epoch_batches(corpus.tokens, **order))
    assert all(bool((tensor == -1).all()) for batch in held for tensor in batch.values())
    assert all_same(load(corpus, **order), epoch_batches(corpus.tokens, **order))


@pytest.mark.parametrize("per_run", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_out_of_reach(counting: Callable[..., Any], load: Load, kind: str, per_run: int) -> None:
    """Every output of every batch is written to, and later epochs are what they were: plans are kept over epochs."""
    corpus = counting(642, dtype="uint16", vocab_size=11)  # documents of 11 tokens
    loader = load(corpus, **settings_of(kind), batches_per_run=per_run)
    start = loader.state_dict()
    expected = [_values(batch) for batch in loader]
    assert len(expected) > 3
    for _ in range(2):
        loader.load_state_dict(start)
        for number, batch in enumerate(loader):
            assert _values(batch) == expected[number], number
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
    assert loader.locate(1, 0, epoch=0).row_id == expected[1]["row_ids"][0]


def _values(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def take_lazily(loader: Any, count: int) -> Any:
    """Like `take`, but each batch is asked for only when it is wanted."""
    stream = loader_stream(loader)
    return (next(stream) for _ in range(count))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_in_place_work_of_a_trainer(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """Outputs share no memory with each other, may be written, resized views or not, and passed between threads."""
    corpus = counting(642, dtype="uint16")
    loader = load(corpus, batch_size=3, seq_len=T, batches_per_run=4)
    for batch, expected in zip(loader, epoch_batches(corpus.tokens, batch_size=3, seq_len=T), strict=True):
        batch["labels"][:, ::2] = -100
        batch["input_ids"].add_(1)
        assert batch["labels"][:, 1::2].tolist() == expected["labels"][:, 1::2].tolist()
        assert batch["input_ids"].tolist() == (expected["input_ids"] + 1).tolist()
        pointers = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
        assert len(pointers) == 3
        assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in batch.values())


def test_batches_are_freed_when_let_go(counting: Callable[..., Any], load: Load) -> None:
    """Holding two batches holds two blocks, not all that have been: the addresses of the others come back."""
    corpus = counting(200_001, dtype="uint16", vocab_size=200)
    loader = load(corpus, batch_size=100, seq_len=100, batches_per_run=1)
    addresses = set()
    for _ in range(10):
        for batch in loader:
            addresses.add(batch["input_ids"].data_ptr())
    assert len(loader) == 20
    assert len(addresses) < 100
