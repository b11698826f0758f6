"""Memory that threads borrow: large enough, in the hands of one at a time, and no more of it than was ever in use."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.placement.scratch import Scratch


@given(data=st.data())
def test_what_is_borrowed_is_apart_and_used_again(data: st.DataObject) -> None:
    scratch, most = Scratch(np.dtype(np.uint16)), 0
    held: list[npt.NDArray[Any]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()) and held:
            scratch.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        size = data.draw(st.sampled_from([1, 100, 100, 1_000]))
        array = scratch.borrow(size)
        assert array.dtype == np.uint16
        assert array.ndim == 1
        assert len(array) >= size
        assert not any(np.shares_memory(array, other) for other in held)
        held.append(array)
        most = max(most, len(held))
    assert len(scratch._free) + len(held) <= most
