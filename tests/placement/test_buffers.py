"""Memory for blocks on the CPU: never two blocks in the same, never one that somebody still holds."""

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from at_lines import AtLine, lines_of
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.placement.buffers import Buffers, layout_of

SHAPES: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
    "input_ids": ((10, 100), np.dtype(np.int64)),
    "cu_seqlens": ((33,), np.dtype(np.int32)),
    "odd": ((7,), np.dtype(np.int8)),
}
LAYOUT = layout_of(SHAPES)


def addresses(arrays: dict[str, Any]) -> set[int]:
    return {array.ctypes.data for array in arrays.values()}


def test_arrays_are_apart_aligned_and_of_their_types() -> None:
    arrays = Buffers().take(LAYOUT)
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        assert (arrays[name].shape, arrays[name].dtype) == (shape, dtype)
        assert arrays[name].ctypes.data % 64 == 0
        arrays[name][:] = number
    assert [set(array.reshape(-1).tolist()) for array in arrays.values()] == [{0}, {1}, {2}]


@given(data=st.data())
def test_memory_is_used_again_when_nobody_holds_it(data: st.DataObject) -> None:
    """What holds it may be the array, a part, a view of another shape, or a tensor over any of these."""
    buffers = Buffers()
    held: list[tuple[Any, int]] = []
    for number in range(data.draw(st.integers(1, 30))):
        dropped = data.draw(st.sets(st.integers(0, 3)))
        held = [one for place, one in enumerate(held) if place not in dropped]
        arrays = buffers.take(LAYOUT)
        for array in arrays.values():
            array[:] = number
        ids = arrays["input_ids"]
        ways = [ids, ids[3:5], ids[2:4].T, torch.from_numpy(ids[1:2]), arrays["odd"][2:]]
        kept = ways[data.draw(st.integers(0, 4))]  # a number, since what is drawn is held until the end
        del arrays, ids, ways
        held.append((kept, number))
        for one, expected in held:
            assert set(np.asarray(one).reshape(-1).tolist()) == {expected}
    del kept, one
    held.clear()
    known = [buffers.take(LAYOUT) for _ in range(3)]
    places = [addresses(arrays) for arrays in known]
    del known
    again = [buffers.take(LAYOUT) for _ in range(3)]
    assert sorted(map(min, places)) == sorted(min(addresses(arrays)) for arrays in again)


def test_more_than_some_free_pieces_go_back_to_the_system() -> None:
    buffers = Buffers()
    held = [buffers.take(LAYOUT) for _ in range(Buffers.MOST_FREE + 5)]
    del held
    buffers.take(LAYOUT)
    assert len(buffers._free) < Buffers.MOST_FREE + 1


@given(held=st.integers(1, 5), more=st.integers(0, 8))
def test_pieces_that_nobody_needs_for_a_while_go_back(held: int, more: int) -> None:
    """As after a time in which a consumer, or more reader threads, held `more` of them."""
    buffers = Buffers()
    first = [buffers.take(LAYOUT) for _ in range(held + more)]
    places = [min(addresses(arrays)) for arrays in first]
    del first
    used: set[int] = set()
    for turn in range(3 * Buffers.WINDOW):
        arrays = [buffers.take(LAYOUT) for _ in range(held)]
        if turn >= Buffers.WINDOW:
            used |= {min(addresses(one)) for one in arrays}
        del arrays
    buffers.take(LAYOUT)
    assert len(buffers._free) + len(buffers._used) == held
    assert len(used) == held
    assert used <= set(places)


def test_a_larger_group_gets_memory_of_its_size() -> None:
    buffers = Buffers()
    buffers.take(layout_of({"a": ((10,), np.dtype(np.int64))}))
    large = buffers.take(layout_of({"a": ((100_000,), np.dtype(np.int64))}))["a"]
    large[:] = 3
    assert large.sum() == 300_000


def test_several_threads() -> None:
    buffers, faults = Buffers(), []

    def work(number: int) -> None:
        held: list[dict[str, Any]] = []
        for turn in range(500):
            arrays = buffers.take(LAYOUT)
            for array in arrays.values():
                array[:] = number
            held.append(arrays)
            if len(held) > turn % 4:
                first = held.pop(0)
                if any((array != number).any() for array in first.values()):
                    faults.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_an_interrupt_at_any_line() -> None:
    """Costs at most the piece of memory, also while its traceback is kept."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def used() -> Buffers:
        buffers = Buffers()
        buffers.take(layout)
        return buffers

    layout = layout_of({"a": ((3,), np.dtype(np.int64))})
    for line in lines_of(partial(used().take, layout)):
        buffers = used()
        with pytest.raises(KeyboardInterrupt) as caught, AtLine(line, interrupt):
            buffers.take(layout)
        del caught
        gc.collect()
        for _ in range(3):
            buffers.take(layout)["a"][:] = 1
