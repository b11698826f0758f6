"""Batches of a block on their way to the trainer: each is handed out once, or stays counted as not handed out."""

import gc
import threading
import weakref
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.loader.handout import Handout
from dali_pipes.schedule import StepRange


def batches(count: int) -> list[dict[str, Any]]:
    return [{"row_ids": number} for number in range(count)]


def fill(handout: Handout, count: int) -> Any:
    return handout.fill(batches(count), StepRange(0, 0, 5, count), [10 + number for number in range(count)])


@given(count=st.integers(1, 40), data=st.data())
def test_what_was_taken_is_counted(count: int, data: st.DataObject) -> None:
    """Also after it was stopped, however often, and after the next block has begun."""
    handout = Handout()
    assert handout.taken()[1:] == (0, 0)
    for _ in range(3):
        taken = data.draw(st.integers(0, count))
        iterator = fill(handout, count)
        assert [next(iterator)["row_ids"] for _ in range(taken)] == list(range(taken))
        if taken == count and data.draw(st.booleans()):
            assert next(iterator, None) is None
        for _ in range(data.draw(st.integers(0, 12))):
            handout.stop()
        assert handout.taken()[1:] == (taken, sum(range(10, 10 + taken)))
        if data.draw(st.booleans()):
            handout.stop()
            assert next(iterator, None) is None
            assert list(iterator) == []
            assert handout.taken().batches == taken


def test_threads_that_stop_it_while_another_one_takes() -> None:
    """Nothing is lost, nothing is counted twice, and the iterator ends instead of failing."""
    for _ in range(300):
        handout, count, received = Handout(), 200, []
        iterator = fill(handout, count)
        start = threading.Barrier(4)

        def stop(handout: Handout = handout, start: threading.Barrier = start) -> None:
            start.wait()
            handout.stop()

        threads = [threading.Thread(target=stop) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        received = [batch["row_ids"] for batch in iterator]
        for thread in threads:
            thread.join()
        assert received == list(range(len(received)))
        assert handout.taken().batches == len(received)


def test_a_batch_is_forgotten_when_it_is_handed_out() -> None:
    class Batch(dict[str, Any]):
        pass

    made = [Batch() for _ in range(3)]
    references = [weakref.ref(batch) for batch in made]
    handout = Handout()
    iterator = handout.fill(made, StepRange(0, 0, 0, 3), [1, 1, 1])  # type: ignore[arg-type]
    del made
    next(iterator)
    gc.collect()
    assert [reference() is None for reference in references] == [True, False, False]
    handout.stop()
    gc.collect()
    assert all(reference() is None for reference in references)
