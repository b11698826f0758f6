"""Batches of a block on their way to the trainer: each is handed out once, or stays counted as not handed out."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.loader.handout import Handout
from dali_pipes.schedule import StepRange


def batches(count: int) -> list[dict[str, Any]]:
    return [{"row_ids": number} for number in range(count)]


def fill(handout: Handout, count: int, at_once: int = 3, made: list[int] | None = None) -> Any:
    """A block whose batches are made a few at a time. made: gets the number of each group when it is made."""

    def groups() -> Iterator[list[dict[str, Any]]]:
        for first in range(0, count, at_once):
            if made is not None:
                made.append(first // at_once)
            yield batches(count)[first : first + at_once]

    return handout.fill(groups(), StepRange(0, 0, 5, count), [10 + number for number in range(count)])


@given(count=st.integers(1, 40), data=st.data())
def test_what_was_taken_is_counted(count: int, data: st.DataObject) -> None:
    """Also after it was stopped, however often, and after the next block has begun."""
    handout = Handout()
    assert handout.taken()[1:] == (0, 0)
    for _ in range(3):
        taken = data.draw(st.integers(0, count))
        at_once, made = data.draw(st.integers(1, 9)), list[int]()
        iterator = fill(handout, count, at_once, made)
        assert [next(iterator)["row_ids"] for _ in range(taken)] == list(range(taken))
        assert made == list(range(-(-taken // at_once))), "a group is made when its first batch is asked for"
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
            assert len(made) <= taken // at_once + 1, "nothing more is made"


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
    iterator = handout.fill(iter([list[Any](made)]), StepRange(0, 0, 0, 3), [1, 1, 1])
    del made
    next(iterator)
    gc.collect()
    assert [reference() is None for reference in references] == [True, False, False]
    handout.stop()
    gc.collect()
    assert all(reference() is None for reference in references)
