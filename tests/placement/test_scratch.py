"""Memory that threads borrow: large enough, in the hands of one at a time, and no more of it than was ever in use."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.placement.scratch import Scratch


@given(data=st.data())
def test_what_is_borrowed_is_apart_and_used_again(data: st.DataObject) -> None:
    scratch, held, most = Scratch(np.dtype(np.uint16)), [], 0
    known: dict[int, np.ndarray] = {}  # held here, so that no other array gets its address
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            scratch.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        size = data.draw(st.sampled_from([1, 100, 100, 1_000]))
        array = scratch.borrow(size)
        assert (array.dtype, array.ndim) == (np.uint16, 1)
        assert len(array) >= size
        assert not any(np.shares_memory(array, other) for other in held)
        held.append(array)
        known[array.ctypes.data] = array
        most = max(most, len(held))
    assert len(scratch._free) + len(held) <= most
