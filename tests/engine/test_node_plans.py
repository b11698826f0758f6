"""Plans of windows that the ranks of a node share: the same as those that each rank makes alone, whoever dies."""

import errno
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held import Held
from streams import take

from dali_pipes import TokenLoader
from dali_pipes.engine import node_plans
from dali_pipes.engine.node_plans import NodePlans, PlanShape, plan_shape
from dali_pipes.placement import node_memory
from dali_pipes.placement.node_memory import NodeMemory
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.packing import Packing, PackingCounts
from dali_pipes.runtime.locks import lock_number, unlock_number

SHAPE = PlanShape(windows_a_step=3, slot_bytes=4096, slots=13)
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def share_small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_plans, "_LEAST_PIECES", 1)


@pytest.fixture
def join() -> Iterator[Callable[..., NodePlans]]:
    """Makes what one more rank of a node has; closes them after the test."""
    key, opened = f"{os.getpid()} {next(_numbers)}", list[NodePlans]()

    def make(shape: PlanShape = SHAPE) -> NodePlans:
        opened.append(NodePlans(key, shape))
        return opened[-1]

    yield make
    for plans in opened:
        plans.close()


def packing(window: int, rows: int = 5) -> Packing:
    """One that the number tells from others, with arrays of both dtypes."""
    offsets = np.arange(rows + 1, dtype=np.int32) * 2
    of_pieces = np.arange(2 * rows) + 1000 * window
    counts = PackingCounts(window, 2**40, 3, 4)
    return Packing(offsets, of_pieces.astype(np.int32), of_pieces + 2**33, of_pieces.astype(np.int32), counts)


def assert_same(one: Packing, other: Packing) -> None:
    for mine, theirs in zip(one[:4], other[:4], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert one.counts == other.counts


def never(window: int) -> Packing:
    raise AssertionError(f"window {window} is planned again")


def test_what_one_rank_plans_others_copy(join: Callable[..., NodePlans]) -> None:
    first, second = join(), join()
    for number, epoch, window in itertools.product(range(2), range(2), range(5)):
        made = first.plan(number, epoch, window, partial(packing, rows=1 + epoch + 2 * number), 99)
        copied = second.plan(number, epoch, window, never, 99)
        assert_same(copied, made)
        assert copied.piece_begins.flags.aligned
    assert (first.made, first.copied, second.made, second.copied) == (20, 0, 0, 20)


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_ranks_that_plan_at_the_same_time_divide_the_windows(join: Callable[..., NodePlans], mode: Any) -> None:
    lengths = np.random.default_rng(5).integers(0, 60, 1_000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))

    def rows() -> DocumentRows:
        options: dict[str, Any] = {"long_documents": "split", "window_documents": 100, "shuffle": True, "seed": 7}
        return DocumentRows(offsets, 32, mode=mode, **options)

    ranks, alone, wrong = [rows() for _ in range(4)], rows(), list[str]()
    plans = [join(plan_shape(ranks, global_rows=1_000)) for _ in ranks]
    together = threading.Barrier(len(ranks), timeout=60)

    def run(rank: int) -> None:
        ranks[rank].share(partial(plans[rank].plan, 0))
        for epoch in range(2):
            together.wait()
            found = ranks[rank].plan(epoch, np.arange(ranks[rank].count(epoch)))
            expected = alone.plan(epoch, np.arange(alone.count(epoch)))
            for mine, other in zip(found.pieces[:3], expected.pieces[:3], strict=True):  # type: ignore[index]
                if not np.array_equal(mine, other):
                    wrong.append(f"rank {rank}, epoch {epoch}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # Each rank needs 20 windows, some more than once, and keeps those of a step.
    assert sum(rank.made for rank in plans) < 60 < sum(rank.made + rank.copied for rank in plans)


def test_a_plan_that_is_too_large_is_made_by_every_rank(join: Callable[..., NodePlans]) -> None:
    first, second = join(), join()
    for plans in (first, second, first):
        assert_same(plans.plan(0, 0, 3, partial(packing, rows=500), 9), packing(3, rows=500))
    assert (first.made, second.made) == (2, 1)
    slots = SHAPE.slots  # the next window of this slot fits
    assert_same(first.plan(0, 0, 3 + slots, packing, 99), packing(3 + slots))
    assert_same(second.plan(0, 0, 3 + slots, never, 99), packing(3 + slots))


def test_a_rank_that_is_killed_while_it_plans_holds_nobody_up(join: Callable[..., NodePlans]) -> None:
    plans = join()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:

        def make(window: int) -> Packing:
            os.write(writes, b"making")
            signal.pause()
            raise AssertionError

        try:
            plans.plan(0, 0, 5, make, 9)
        finally:
            os._exit(1)
    assert os.read(reads, 6) == b"making"
    with pytest.raises(BlockingIOError):
        lock_of(plans, 5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert_same(plans.plan(0, 0, 5, packing, 9), packing(5))
    assert plans.made == 1
    os.close(reads)
    os.close(writes)


def test_a_rank_that_was_killed_while_it_stored_a_plan_leaves_none(
    join: Callable[..., NodePlans], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join(), join()
    first.plan(0, 0, 5, packing, 99)
    with monkeypatch.context() as patch:
        stored: list[object] = []

        def stop(column: Any) -> Any:
            stored.append(column)
            if len(stored) == 3:
                raise KeyboardInterrupt
            return column

        patch.setattr(np, "ascontiguousarray", stop)
        with pytest.raises(KeyboardInterrupt):
            first.plan(0, 0, 5 + SHAPE.slots, packing, 99)
    assert_same(second.plan(0, 0, 5, packing, 99), packing(5))
    assert second.made == 1, "half of another plan was in its place"


def test_nobody_waits_long_for_a_rank_that_was_stopped(
    join: Callable[..., NodePlans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_plans, "_WAIT_S", 0.05)
    first, second = join(), join()
    held = lock_of(first, 5)
    made: list[int] = []

    def make(window: int) -> Packing:
        made.append(window)
        return packing(window)

    assert_same(second.plan(0, 0, 5, make, 7), packing(5))
    assert made == [6, 5], "the next window is planned meanwhile, and this one at last"
    assert_same(first.plan(0, 0, 6, never, 7), packing(6))
    monkeypatch.setattr(node_plans, "_WAIT_S", 1000.0)
    assert_same(second.plan(0, 0, 5, packing, 7), packing(5))  # does not wait: it shares nothing any more
    unlock_number(held)


def test_closing_ends_the_wait(join: Callable[..., NodePlans], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_plans, "_WAIT_S", 1000.0)
    plans = join()
    held = lock_of(plans, 5)
    found: list[Packing] = []
    thread = threading.Thread(target=lambda: found.append(plans.plan(0, 0, 5, packing, 6)))
    thread.start()
    plans.close()
    thread.join()
    unlock_number(held)
    assert_same(found[0], packing(5))
    assert_same(plans.plan(0, 0, 5, packing, 6), packing(5))


def test_without_locks_each_rank_plans_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_plans, "lock_number", lambda *_, **__: None)
    with pytest.raises(OSError, match="locks"):
        NodePlans(f"no locks {os.getpid()}", SHAPE)


def test_without_descriptors_for_locks_nobody_waits(
    join: Callable[..., NodePlans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_plans, "_WAIT_S", 1000.0)
    plans = join()

    def none_left(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(node_plans, "lock_number", none_left)
        assert_same(plans.plan(0, 0, 5, packing, 9), packing(5))
    assert_same(plans.plan(0, 0, 6, packing, 9), packing(6))
    assert plans._closed.is_set()


def test_a_forked_child_closes_while_a_thread_of_its_parent_copies(join: Callable[..., NodePlans]) -> None:
    plans, other = join(), join()
    with plans._use:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                assert_same(plans.plan(0, 0, 5, packing, 9), packing(5))
                plans.close()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(plans.plan(0, 0, 5, never, 9), packing(5))
    assert_same(other.plan(0, 0, 5, never, 9), packing(5))
    assert_same(join().plan(0, 0, 5, never, 9), packing(5))  # the child has not ended the service


def lock_of(plans: NodePlans, window: int) -> int:
    held = lock_number(plans._memory.path, plans._slot((0, 0), window))
    assert held is not None
    return held


KINDS: dict[str, dict[str, Any]] = {
    "packed": {"rows": "pack", "outputs": ("input_ids", "labels", "row_ids", "cu_seqlens", "position_ids")},
    "padded, in order": {"rows": "pad", "shuffle": False},
    "buckets": {"rows": "pad", "length_buckets": (4, 8, 16)},
    "balanced": {"rows": "pack", "balance": "cost", "balance_cost": (1, 1)},
    "batches of tokens": {"rows": "pad", "batch_tokens": 64, "batch_size": None},
    "fim": {
        "rows": "pack",
        "objective": [{"kind": "fim", "tokens": {"prefix": 13, "middle": 14, "suffix": 15}, "rate": 0.5}],
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_of_two_ranks_give_the_same_batches_and_states(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_plans, "_SPARE_SLOTS", 100)  # one rank after the other: none is replaced
    ids = np.random.default_rng(1).integers(0, 12, 1_500).astype(np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 16}
    settings |= {"batch_size": 2, "device": "cpu", "world_size": 2, "window_documents": 3, "quiet": True}
    settings |= KINDS[kind]
    settings = {name: value for name, value in settings.items() if value is not None}

    def run(rank: int) -> tuple[list[Any], list[Any], NodePlans | None, Any]:
        loader = TokenLoader(**settings, rank=rank)
        batches, states = list[Any](), list[Any]()
        for batch in take(loader, 30):
            batches.append({name: np.asarray(value) for name, value in batch.items()})
            states.append(loader.state_dict())
        return batches, states, loader._built._node_plans, loader

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = [run(rank) for rank in range(2)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    together = [run(rank) for rank in range(2)]
    for mine, other in zip(together, alone, strict=True):
        assert len(mine[0]) == len(other[0]) > 1
        for one, two in zip(mine[0], other[0], strict=True):
            assert one.keys() == two.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], two[name])
        assert mine[1] == other[1]
        assert other[2] is None
    first, second = together[0][2], together[1][2]
    assert first is not None
    assert second is not None
    assert first.made > 0
    assert second.copied > second.made, "it only makes what the first one did not read ahead"
    for *_, loader in (*alone, *together):
        loader.close()


def test_another_choice_of_documents_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same file, with the same sums: the settings of both loaders are equal."""
    np.tile(np.array([1, 2, 3, 0, 5, 0], np.uint16), 20).tofile(tmp_path / "ids.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 8}
    settings |= {"rows": "pack", "batch_size": 2, "device": "cpu", "quiet": True, "keep": str(tmp_path / "keep.npy")}
    settings["window_documents"] = 2
    loaders, found = [], []
    for kept in (range(20), range(20, 40)):
        np.save(tmp_path / "keep.npy", np.isin(np.arange(40), kept))
        loaders.append(TokenLoader(**settings))
        assert loaders[-1]._built._node_plans is not None
        found.append(sorted({loaders[-1].locate(step, row).position for step in range(4) for row in range(2)}))
    assert max(found[0]) < 60 <= min(found[1])
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("fault", ["no sockets", "no connection", "no memfd", "no /proc"])
def test_where_nothing_can_be_shared_each_rank_plans_for_itself(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.tile(np.array([1, 2, 3, 0, 5, 0], np.uint16), 20).tofile(tmp_path / "ids.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 8}
    settings |= {"rows": "pack", "batch_size": 4, "device": "cpu", "quiet": True, "window_documents": 2}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def fail(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EPERM, "not permitted")

    def nowhere(self: NodeMemory) -> Path:
        return tmp_path / "not there" / "0"

    if fault == "no sockets":
        monkeypatch.setattr(node_memory, "_listen", fail)
    elif fault == "no connection":
        monkeypatch.setattr(node_memory, "_listen", lambda name: None)
        monkeypatch.setattr(node_plans, "_ANSWER_S", 0.2)
    elif fault == "no memfd":
        monkeypatch.setattr(node_memory, "_create_memfd", fail)
    else:
        monkeypatch.setattr(NodeMemory, "path", property(nowhere))
    with TokenLoader(**settings) as loader:
        assert loader._built._node_plans is None
        assert len(take(loader, 3)) == 3


@pytest.mark.parametrize(("batch_size", "least", "shares"), [(1, 1, False), (4, 4, True), (4, 4096, False)])
def test_only_plans_of_steps_of_several_large_windows_are_shared(
    batch_size: int, least: int, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.tile(np.array([1, 2, 3, 0, 5, 0], np.uint16), 20).tofile(tmp_path / "ids.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 6}
    settings |= {"rows": "pack", "device": "cpu", "quiet": True, "window_documents": 4, "world_size": 2, "rank": 0}
    monkeypatch.setattr(node_plans, "_LEAST_PIECES", least)
    with TokenLoader(**settings, batch_size=batch_size) as loader:
        assert (loader._built._node_plans is not None) is shares


def test_jobs_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may run other code of the same version."""
    np.tile(np.array([1, 2, 3, 0, 5, 0], np.uint16), 20).tofile(tmp_path / "ids.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 6}
    settings |= {"rows": "pack", "device": "cpu", "quiet": True, "window_documents": 2, "batch_size": 4}
    loaders = []
    for port in (1, 2, 1):
        monkeypatch.setenv("MASTER_PORT", str(port))
        loaders.append(TokenLoader(**settings))
    memories = []
    for loader in loaders:
        plans = loader._built._node_plans
        assert plans is not None
        memories.append(plans._memory.path.stat().st_ino)
        loader.close()
    assert memories[0] == memories[2] != memories[1]


def test_loaders_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.tile(np.array([1, 2, 3, 0, 5, 0], np.uint16), 20).tofile(tmp_path / "ids.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "ids.bin"), "dtype": "uint16", "eos_id": 0, "seq_len": 6}
    settings |= {"rows": "pack", "device": "cpu", "quiet": True, "window_documents": 2, "batch_size": 4}
    before, loaders = Held.now(), []
    for number in range(4):
        loader = TokenLoader(**settings)
        assert loader._built._node_plans is not None
        take(loader, 1)
        if number % 2:
            loader.close()
            loaders.append(loader)
    del loader
    gc.collect()
    for loader in loaders:  # closed ones leave nothing even while they are referred to
        assert loader._built._node_plans is not None
    assert not before.left()
