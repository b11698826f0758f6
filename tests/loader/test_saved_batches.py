"""A batch that is saved, copied or sent takes its own bytes along, not those of its block."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kinds import KINDS, settings_of

from dali_pipes import TokenLoader

Load = Callable[..., TokenLoader]
K = 5
ENVELOPE_BYTES = 2500
"""The most that a file of `torch.save` has for one tensor beside its bytes: names, a directory, alignment."""


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def batches(counting: Callable[..., Any], load: Load, kind: str) -> Any:
    corpus = counting(3000, dtype="uint16", vocab_size=11)  # documents of 11 tokens
    return load(corpus, **settings_of(kind), batches_per_run=K)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_a_storage_as_large_as_itself(batches: TokenLoader) -> None:
    """Of every batch: the first, the last and those in the middle of a block; none is over the memory of another."""
    assert len(batches) > 2 * K
    for batch in batches:
        for name, tensor in tensors(batch).items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
            assert tensor.is_contiguous()
            assert tensor.storage_offset() == 0
        pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors(batch).values()}
        assert len(pointers) == len(tensors(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_the_batch(batches: TokenLoader) -> None:
    for batch in batches:
        own = sum(tensor.nbytes for tensor in tensors(batch).values())
        file = saved(batch)
        assert len(file) < own + ENVELOPE_BYTES * len(batch)
        assert same(torch.load(io.BytesIO(file)), batch)
        assert len(pickle.dumps(batch)) < own + ENVELOPE_BYTES * len(batch)
        assert same(pickle.loads(pickle.dumps(batch)), batch)
        copied = copy.deepcopy(batch)
        assert same(copied, batch)
        for name, tensor in tensors(copied).items():
            assert len(saved(batch[name])) < tensor.nbytes + ENVELOPE_BYTES
            tensor.fill_(-5)
            assert not np.array_equal(batch[name], tensor), "a copy is other memory"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_moves_leaves_the_others_where_they_were(batches: TokenLoader) -> None:
    """torch's queues move a whole storage into shared memory."""
    start = batches.state_dict()
    expected = [copy.deepcopy(batch) for batch in batches]
    batches.load_state_dict(start)
    held = []
    for number, batch in enumerate(batches):
        if number % 2:
            shared: list[Any] = list(tensors(batch).values())
            for tensor in shared:
                tensor.share_memory_()  # what sending it does
                assert tensor.is_shared()
        assert same(batch, expected[number])
        held.append(copy.deepcopy(batch) if batches.config.static_buffers else batch)
    assert len(held) == len(expected) > 2 * K
    assert all(map(same, held, expected))


def test_batches_arrive_whole_in_another_process(counting: Callable[..., Any], load: Load) -> None:
    corpus = counting(3000, dtype="uint16", vocab_size=200)
    loader = load(corpus, batch_size=3, seq_len=16, batches_per_run=K)
    context = torch.multiprocessing.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_add_up, args=(there, back))
    process.start()
    expected = []
    for batch in loader:
        there.put(batch)
        expected.append([int(tensor.sum()) for tensor in batch.values()])
    there.put(None)
    found = back.get()
    process.join()
    assert found == expected
    assert len(found) == len(loader)


def _add_up(there: Any, back: Any) -> None:
    sums = []
    while (batch := there.get()) is not None:
        sums.append([int(tensor.sum()) for tensor in batch.values()])
        for tensor in batch.values():
            tensor.fill_(-1)  # reaches the sender's tensors, and no other batch of their block
    back.put(sums)
