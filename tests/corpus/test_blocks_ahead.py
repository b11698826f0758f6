"""Blocks are fetched ahead once each, in order, until there is no room, an error, or nobody who wants them."""

import threading
from collections.abc import Iterator

import pytest
from held import wait_for

from dali_pipes.corpus.blocks_ahead import BlocksAhead
from dali_pipes.storage.node_cache import Ahead


class Store:
    """Makes blocks one at a time, as many as it is told to, and remembers them in order."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.answers: dict[int, Ahead | Exception] = {}
        self._turns = threading.Semaphore(0)

    def let(self, count: int) -> None:
        self._turns.release(count)

    def make(self, block: int) -> Ahead:
        self.asked.append(block)
        assert self._turns.acquire(timeout=30)
        answer = self.answers.get(block, Ahead.THERE)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ahead(store: Store) -> Iterator[BlocksAhead]:
    found = BlocksAhead(store.make)
    yield found
    store.let(1000)
    found.close()


def on_the_way(ahead: BlocksAhead) -> list[int]:
    return [block for block in range(20) if ahead.is_on_the_way(block)]


def test_two_at_a_time_in_order(store: Store, ahead: BlocksAhead) -> None:
    ahead.want([7, 2, 9, 0], store)
    wait_for(lambda: len(store.asked) == 2)
    assert sorted(store.asked) == [2, 7]
    assert on_the_way(ahead) == [0, 2, 7, 9]
    store.let(1)
    wait_for(lambda: len(store.asked) == 3)
    assert store.asked[2] == 9
    assert len(on_the_way(ahead)) == 3
    store.let(10)
    wait_for(lambda: not on_the_way(ahead))
    assert sorted(store.asked) == [0, 2, 7, 9]


def test_what_is_wanted_now_replaces_what_was_wanted(store: Store, ahead: BlocksAhead) -> None:
    ahead.want([1, 2, 3, 4], store)
    wait_for(lambda: len(store.asked) == 2)
    ahead.want([8, 9], store)
    assert on_the_way(ahead) == [8, 9]
    store.let(10)
    wait_for(lambda: not on_the_way(ahead))
    assert sorted(store.asked) == [1, 2, 8, 9]
    ahead.want([5], store)
    wait_for(lambda: 5 in store.asked)


def test_a_block_that_is_made_elsewhere_stays_on_the_way(store: Store, ahead: BlocksAhead) -> None:
    store.answers[2] = Ahead.ELSEWHERE
    store.let(10)
    ahead.want([1, 2, 3], store)
    wait_for(lambda: on_the_way(ahead) == [2])


@pytest.mark.parametrize("answer", [Ahead.NO_ROOM, OSError("the store is down")], ids=["no room", "an error"])
def test_without_room_or_after_an_error_nothing_more_is_fetched(
    store: Store, ahead: BlocksAhead, answer: Ahead | Exception
) -> None:
    store.answers |= {1: answer, 2: answer}
    ahead.want([1, 2, 3, 4], store)
    wait_for(lambda: len(store.asked) == 2)
    store.let(2)
    wait_for(lambda: not on_the_way(ahead))
    store.let(10)
    ahead.want([6], store)
    wait_for(lambda: 6 in store.asked and not on_the_way(ahead))
    assert sorted(store.asked) == [1, 2, 6]


def test_close_ends_the_threads_after_the_fetches_under_way(store: Store) -> None:
    ahead = BlocksAhead(store.make)
    ahead.want(range(20), store)
    wait_for(lambda: len(store.asked) == 2)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    wait_for(lambda: not ahead._queue)
    store.let(2)
    closing.join(30)
    assert not closing.is_alive()
    ahead.want([5], store)
    ahead.close()
    assert sorted(store.asked) == [0, 1]


def test_who_drops_it_need_not_close_it(store: Store, ahead: BlocksAhead) -> None:
    class Owner:
        """Of nothing."""

    owner = Owner()
    ahead.want(range(20), owner)
    wait_for(lambda: len(store.asked) == 2)
    del owner
    store.let(10)
    wait_for(lambda: ahead._running == 0)
    assert sorted(store.asked) == [0, 1]
