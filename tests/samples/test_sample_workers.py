"""Worker processes: the batches of none, faults at the right batch, and no hang."""

import multiprocessing
import os
import signal
import struct
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_datasets import Augmented, Faulty, Unpicklable, flat, items_of
from torch.utils.data import Sampler, get_worker_info

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError, LoaderClosedError, SampleError
from dali_pipes.samples.workers import _DeadWorker, _whole_message


@pytest.fixture
def close_after() -> Iterator[list[SampleLoader]]:
    loaders: list[SampleLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def taken_until_error(loader: SampleLoader) -> tuple[list[list[int]], SampleError]:
    found: list[list[int]] = []
    with pytest.raises(SampleError) as caught:
        found += (batch["item"].tolist() for batch in loader)
    return found, caught.value


def taken(loader: SampleLoader) -> tuple[list[list[int]], list[SampleError]]:
    """Batches of an epoch, over all errors: after each, the next `for` goes on."""
    found: list[list[int]] = []
    errors: list[SampleError] = []
    while loader.epoch == 0:
        assert len(errors) < 10
        try:
            for batch in loader:
                found.append(batch["item"].tolist())
        except SampleError as error:
            errors.append(error)
    return found, errors


def pids(loader: SampleLoader) -> list[int]:
    assert loader._workers is not None
    return loader._workers.pids  # type: ignore[union-attr]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_same_batches_as_without_workers(context: str) -> None:
    dataset = Augmented(23)
    if context == "spawn":
        dataset.of_torch.clear()  # torch cannot send its generators to processes that are not forked
    loader = SampleLoader(dataset, 3, True)
    expected = [(batch["item"].tolist(), batch["draws"].tolist()) for _ in range(2) for batch in loader]
    torch.manual_seed(4)
    drawn = torch.rand(2)
    torch.manual_seed(4)
    num_workers = 1 if context == "spawn" else 2  # a start takes seconds
    with SampleLoader(dataset, 3, True, num_workers=num_workers, multiprocessing_context=context) as loader:
        found = [(b["item"].tolist(), b["draws"].tolist()) for _ in range(2) for b in loader]
    assert found == expected
    assert torch.equal(torch.rand(2), drawn), "the start of workers has changed the trainer's random state"


def test_workers_survive_epochs_breaks_and_resumes(close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(30, {}), 3, num_workers=2)
    close_after.append(loader)
    first = list(loader)
    started = set(pids(loader))
    assert {int(pid) for batch in first for pid in batch["pid"]} == started
    assert len(started) == 2
    for _ in loader:
        break
    state = loader.state_dict()
    loader.load_state_dict({**state, "rows": 21})
    assert items_of(list(loader)) == [[21, 22, 23], [24, 25, 26], [27, 28, 29]]
    assert set(pids(loader)) == started


def test_workers_that_are_not_persistent_end_with_the_epoch() -> None:
    loader = SampleLoader(Faulty(9, {}), 3, num_workers=1, persistent_workers=False)
    first, second = [items_of(list(loader)) for _ in range(2)]
    assert first == second == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert pids(loader) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_item_that_raises(num_workers: int, close_after: list[SampleLoader]) -> None:
    """At its batch, again and again, and with the original error."""
    loader = SampleLoader(Faulty(40, {17: "raise"}), 4, num_workers=num_workers)
    close_after.append(loader)
    for before in ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], []):
        found, error = taken_until_error(loader)
        assert found == before
        assert (error.item, error.epoch, error.row) == (17, 0, 17)
        assert "item 17 of Faulty (epoch 0, row 17) raised OSError: [Errno 5] no such slice" in str(error)
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno == 5
        assert loader.state_dict()["rows"] == 16


def test_an_error_that_cannot_be_pickled_is_told_in_words(close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(8, {5: "raise unpicklable"}), 2, num_workers=1)
    close_after.append(loader)
    found, error = taken_until_error(loader)
    assert found == [[0, 1], [2, 3]]
    assert error.__cause__ is None
    assert "raised Unpicklable: a" in str(error)
    assert "sample_datasets.py" in error.__notes__[0]
    here, error = taken_until_error(SampleLoader(Faulty(8, {5: "raise unpicklable"}), 2))
    assert here == found
    assert isinstance(error.__cause__, Unpicklable)


@pytest.mark.parametrize(("fault", "words"), [("kill", "SIGKILL"), ("exit", "code 3")])
def test_a_worker_that_dies_at_an_item(fault: str, words: str, tmp_path: Path, close_after: list[SampleLoader]) -> None:
    """Good batches before it are handed out; the next `for` goes on there with fresh workers."""
    loader = SampleLoader(Faulty(40, {18: fault}, str(tmp_path / "once")), 4, num_workers=2)
    close_after.append(loader)
    found, errors = taken(loader)
    assert found == [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert len(errors) == 1
    assert (errors[0].item, errors[0].row) == (18, 18)
    assert all(word in str(errors[0]) for word in ("item 18 of Faulty", "epoch 0", "row 18", words))


def test_workers_killed_between_batches(close_after: list[SampleLoader]) -> None:
    """Not in the trainer's code, where torch's own handler would raise, but at the next batch that is not there."""
    loader = SampleLoader(Faulty(80, {}), 2, num_workers=2, prefetch_factor=1)
    close_after.append(loader)
    found: list[list[int]] = []
    errors: list[str] = []
    while len(found) < 40:
        try:
            for batch in loader:
                found.append(batch["item"].tolist())
                if len(found) in (5, 20):
                    victim = pids(loader)[0]
                    waiting = os.pidfd_open(victim)
                    os.kill(victim, signal.SIGKILL)
                    connection.wait([waiting])
                    os.close(waiting)
                    sum(range(1_000))  # a signal's handler would run here
        except SampleError as error:
            errors.append(str(error))
    assert found == [[first, first + 1] for first in range(0, 80, 2)]
    assert len(errors) == 2
    assert all("SIGKILL" in error for error in errors)


def test_a_message_that_a_killed_worker_left_unfinished() -> None:
    """`recv_bytes` of multiprocessing would wait for its end forever."""
    reading, writing = os.pipe()
    sentinel, end = os.pipe()
    sender = connection.Connection(os.dup(writing), readable=False)
    for message in (b"", b"short", bytes(range(256)) * 40):
        sender.send_bytes(message)
        assert _whole_message(reading, [sentinel]) == message
    os.write(writing, struct.pack("!i", 1_000) + bytes(999))
    os.close(end)  # as a process that has ended
    with pytest.raises(_DeadWorker):
        _whole_message(reading, [sentinel])
    os.write(writing, struct.pack("!iQ", -1, 3) + b"abc")  # the form of those of 2 GiB and more
    assert _whole_message(reading, [sentinel]) == b"abc"
    sender.close()
    for descriptor in (reading, writing, sentinel):
        os.close(descriptor)


def test_in_a_thread_that_is_not_the_main_one(close_after: list[SampleLoader], tmp_path: Path) -> None:
    loader = SampleLoader(Faulty(40, {18: "kill"}, str(tmp_path / "once")), 4, num_workers=2)
    close_after.append(loader)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(taken(loader)))
    thread.start()
    thread.join()
    assert found[0][0] == [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert [error.item for error in found[0][1]] == [18]


def test_workers_killed_between_epochs_are_replaced(close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(12, {}), 2, num_workers=2)
    close_after.append(loader)
    whole = items_of(list(loader))
    for victim in pids(loader):
        os.kill(victim, signal.SIGKILL)
    while pids(loader):
        pass
    assert items_of(list(loader)) == whole


def test_a_forked_process_has_workers_of_its_own(close_after: list[SampleLoader]) -> None:
    """It does not take the messages of the other's workers, which that one would wait for, and does not end them."""
    loader = SampleLoader(Faulty(24, {}), 2, num_workers=1)
    close_after.append(loader)
    run = iter(loader)
    found = [next(run)["item"].tolist()]
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def forked() -> None:
        message = ""
        try:
            next(run)
        except LoaderClosedError as error:
            message = str(error)
        sender.send((message, items_of(list(loader))))
        loader.close()

    process = multiprocessing.get_context("fork").Process(target=forked)
    process.start()
    sender.close()
    message, rest = receiver.recv()
    process.join()
    assert process.exitcode == 0
    assert f"process {os.getpid()}" in message
    assert rest == [[first, first + 1] for first in range(2, 24, 2)]
    found += items_of(list(run))
    assert found == [[first, first + 1] for first in range(0, 24, 2)]
    assert pids(loader)


def test_timeout_ends_a_worker_that_does_not_answer(tmp_path: Path, close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(16, {9: "sleep"}, str(tmp_path / "once")), 4, num_workers=1, timeout=1.5)
    close_after.append(loader)
    found, errors = taken(loader)
    assert found == [list(range(first, first + 4)) for first in range(0, 16, 4)]
    assert [error.item for error in errors] == [9]
    assert "timeout = 1.5 s" in str(errors[0])


def test_a_batch_that_cannot_be_sent(close_after: list[SampleLoader]) -> None:
    """torch's own workers print a traceback then, and the trainer waits forever."""
    loader = SampleLoader(Faulty(8, {5: "lambda"}), 2, num_workers=1, collate_fn=list)
    close_after.append(loader)
    found: list[list[int]] = []
    with pytest.raises(SampleError, match=r"items 4, 5 of Faulty .* cannot be sent"):
        found += ([sample["item"] for sample in batch] for batch in loader)
    assert found == [[0, 1], [2, 3]]


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_dataset_that_cannot_be_sent() -> None:
    loader = SampleLoader([lambda: 1], num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match=r"list .* cannot be sent to worker processes"):
        next(iter(loader))


def test_a_loader_in_a_worker_of_another_one() -> None:
    class Nested(Faulty):
        def __getitem__(self, item: int) -> Any:
            return flat(items_of(list(SampleLoader(Faulty(4, {}), 2))))

    with SampleLoader(Nested(2, {}), num_workers=1, collate_fn=list) as loader:
        assert list(loader) == [[[0, 1, 2, 3]]] * 2


def test_worker_init_fn_sees_the_dataset(close_after: list[SampleLoader]) -> None:
    def mark(worker_id: int) -> None:
        dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
        assert isinstance(dataset, Faulty)
        dataset.length = 100 + worker_id

    class Lengths(Faulty):
        def __getitem__(self, item: int) -> Any:
            return self.length

    loader = SampleLoader(Lengths(8, {}), 2, num_workers=2, worker_init_fn=mark)
    close_after.append(loader)
    assert torch.stack(list(loader)).tolist() == [[100, 100], [101, 101], [100, 100], [101, 101]]


def test_an_interrupt_in_next(close_after: list[SampleLoader], tmp_path: Path) -> None:
    """Nothing is lost, and no answer of before is taken for another one."""
    loader = SampleLoader(Faulty(16, {4: "sleep"}, str(tmp_path / "once")), 2, num_workers=1)
    close_after.append(loader)
    iterator = iter(loader)
    found = [next(iterator)["item"].tolist(), next(iterator)["item"].tolist()]
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()
    state = loader.state_dict()
    assert (found, state["rows"]) == ([[0, 1], [2, 3]], 4)
    loader.load_state_dict(state)
    assert items_of(list(loader)) == [[first, first + 1] for first in range(4, 16, 2)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_held_by_the_trainer_alone(num_workers: int, close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(8, {}), 2, num_workers=num_workers)
    close_after.append(loader)
    iterator = iter(loader)
    alive = weakref.ref(next(iterator)["item"])
    assert alive() is None


def test_a_sampler_that_fails_ends_the_run_at_its_epoch(close_after: list[SampleLoader]) -> None:
    class Once(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            assert self.epoch == 0, "no such epoch"
            return iter([2, 0, 1])

    loader = SampleLoader(Faulty(3, {}), 2, sampler=Once(), num_workers=1, repeat=True)
    close_after.append(loader)
    found: list[list[int]] = []
    with pytest.raises(AssertionError, match="no such epoch"):
        found += (batch["item"].tolist() for batch in loader)
    assert found == [[2, 0], [1]]


def test_closing_ends_the_processes() -> None:
    loader = SampleLoader(Faulty(40, {}), 2, num_workers=2)
    iterator = iter(loader)
    batch = next(iterator)
    running = pids(loader)
    loader.close()
    loader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
    assert batch["item"].tolist() == [0, 1]
    for use in (lambda: next(iterator), lambda: iter(loader), lambda: loader.load_state_dict(loader.state_dict())):
        with pytest.raises(LoaderClosedError):
            use()


def test_a_loader_that_is_forgotten_ends_its_processes() -> None:
    loader = SampleLoader(Faulty(40, {}), 2, num_workers=1)
    next(iter(loader))
    running = pids(loader)
    del loader  # nothing waits for the garbage collector
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)


def test_an_older_iterator_is_superseded(close_after: list[SampleLoader]) -> None:
    loader = SampleLoader(Faulty(12, {}), 2, num_workers=1)
    close_after.append(loader)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert next(newer)["item"].tolist() == [0, 1]  # of the next epoch
    with pytest.raises(LoaderClosedError, match="superseded"):
        next(older)
    assert next(newer)["item"].tolist() == [2, 3]
    assert loader.epoch == 1


@pytest.mark.parametrize("settings", [{"timeout": 1}, {"multiprocessing_context": "spawn"}])
def test_settings_that_need_workers(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        SampleLoader(Faulty(3, {}), **settings)
