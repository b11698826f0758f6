"""The placement "pool": the batches of the CPU, bit for bit, whatever the windows are and wherever a run goes on."""

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from held import wait_for
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from profiles import examples
from streams import loader_stream, take

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.errors import BackendError, ConfigError, CorpusReadError, LoaderClosedError, TokenRangeError
from dali_pipes.placement import pool_windows
from dali_pipes.placement.pool import PoolPlacement
from dali_pipes.rows import make
from dali_pipes.runtime.ranks import resolve_ranks
from dali_pipes.storage import stores

Settings = dict[str, Any]
OUTPUTS = ("input_ids", "labels", "row_ids")
PIECES = (*OUTPUTS, "position_ids", "segment_ids", "cu_seqlens", "max_seqlen", "loss_mask", "source_ids")


def on_cpu(settings: Settings, epochs: int) -> list[dict[str, Any]]:
    with TokenLoader(**settings, device="cpu") as loader:
        return [arrays(batch) for _ in range(epochs) for batch in loader]


def arrays(batch: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else value.numpy().copy() for name, value in batch.items()}


def equal(found: dict[str, Any] | None, expected: dict[str, Any] | None) -> bool:
    assert found is not None, "fewer batches"
    assert expected is not None, "more batches"
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def same(batch: Any, expected: dict[str, Any]) -> bool:
    return equal(arrays(batch), expected)


@hypothesis_settings(max_examples=examples(9), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_three_epochs_are_those_of_the_cpu(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    folder = tmp_path_factory.mktemp("corpus")
    dtype = draw(st.sampled_from(["uint16", "int32", "int64"]))
    world_size = draw(st.integers(1, 3))
    seq_len = draw(st.sampled_from([1, 3, 4, 8]))
    in_pieces = draw(st.booleans())
    settings: Settings = {
        "batch_size": draw(st.integers(1, 3)),
        "seq_len": seq_len,
        "stride": draw(st.sampled_from([None, 1, 3, 11])),
        "random_offset": draw(st.booleans()),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "seed": draw(st.integers(0, 99)),
        "order": "blocks",
        "shuffle_window": draw(st.integers(1, 5)),
        "drop_last": draw(st.booleans()),
        "outputs": PIECES if in_pieces else draw(st.sampled_from([OUTPUTS, ("labels",), (*OUTPUTS, "source_ids")])),
        "label_shift": in_pieces or draw(st.booleans()),
        "dtype": dtype,
        "eos_id": 5,
        "quiet": True,
    }
    if in_pieces:
        settings |= {"mtp": min(draw(st.integers(0, 2)), seq_len - 1), "mask_boundaries": draw(st.booleans())}
    block_tokens = (settings["stride"] or seq_len) * draw(st.integers(1, 12)) * settings["batch_size"] * world_size
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 30, block_tokens * 3 + draw(st.integers(60, 400))
    )
    for number, part in enumerate(np.split(tokens, [draw(st.integers(1, 59))])):
        part.astype(dtype).tofile(folder / f"{number}.bin")
    settings["corpus"] = str(folder)
    cost: Settings = {
        "batches_per_run": draw(st.integers(1, 5)),
        "prefetch_queue_depth": draw(st.integers(1, 3)),
        "num_threads": draw(st.integers(1, 3)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "BLOCK_TOKENS", block_tokens)
        patch.setattr(pool_windows, "LOAD_CHUNK_BYTES", draw(st.sampled_from([64, 4 << 20])))
        expected = on_cpu(settings, 3)
        order = draw(st.sampled_from(["late", "early", "random"]))
        with gpu_stand_in.installed(order, seed=draw(st.integers(0, 99))) as gpu:
            try:
                loader = TokenLoader(**settings, **cost, device="cuda", placement="pool")
            except ConfigError as error:  # the smallest window has fewer rows than a step
                assume("shuffle_window" not in str(error))
                raise
            with loader:
                assert loader.stats().placement == "pool"
                got = (batch for _ in range(3) for batch in loader)
                for number, (batch, wanted) in enumerate(itertools.zip_longest(got, expected)):
                    assert batch is not None, number
                    assert wanted is not None, number
                    assert same(batch, wanted), number
            assert gpu.default_stream_work == 0


@pytest.fixture
def pooled(counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """100 windows of tokens in 17 blocks of 6, the last one short, and windows of 3 or 2 blocks; 25 steps of 4 rows."""
    monkeypatch.setattr(make, "BLOCK_TOKENS", 24)
    corpus = counting(130, 271)
    return {
        "corpus": corpus.pattern,
        "dtype": "uint32",
        "batch_size": 2,
        "seq_len": 4,
        "rank": 1,
        "world_size": 2,
        "outputs": OUTPUTS,
        "order": "blocks",
        "shuffle_window": 3,
        "batches_per_run": 2,
        "quiet": True,
    }


POOL: Settings = {"device": "cuda", "placement": "pool"}


@pytest.mark.parametrize("outputs", [OUTPUTS, PIECES])
def test_every_step_of_a_resume_on_either_device(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, outputs: tuple[str, ...]
) -> None:
    """In the middle of a window and of a block of batches, in the same loader and in a new one."""
    pooled |= {"outputs": outputs, "eos_id": 5}
    expected = on_cpu(pooled, 2)
    with TokenLoader(**pooled, device="cpu") as loader:
        states, batches = [loader.state_dict()], loader_stream(loader)
        for _ in expected[:-1]:
            next(batches)
            states.append(loader.state_dict())
    with TokenLoader(**pooled, **POOL) as loader:
        for number in np.random.default_rng(1).permutation(len(states)).tolist():
            loader.load_state_dict(states[number])
            assert all(map(same, take(loader_stream(loader), 2), expected[number : number + 2])), number
    for number in range(0, len(states), 5):
        with TokenLoader(**pooled, **POOL) as loader:
            loader.load_state_dict(states[number])
            assert all(map(same, take(loader_stream(loader), 3), expected[number : number + 3])), number
            state = loader.state_dict()
        with TokenLoader(**pooled, device="cpu") as loader:
            loader.load_state_dict(state)
            assert all(map(same, take(loader_stream(loader), 1), expected[number + 3 : number + 4])), number


class Reads:
    """The spans that are read of the corpus; may be held up, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        """A position of the corpus whose read fails, once."""
        self.gate = threading.Event()
        self.gate.set()
        self.held: threading.Event | None = None
        """What the next read waits for, alone."""
        self.is_holding = False
        real = Corpus.read_pieces

        def read(corpus: Any, starts: Any, lengths: Any, targets: Any, out: Any) -> None:
            self.gate.wait()
            held, self.held = self.held, None
            if held is not None:
                self.is_holding = True
                held.wait()
            begin, count = int(starts[0]), int(lengths[0])
            self.spans.append((begin, count))
            if self.fail_at is not None and begin <= self.fail_at < begin + count:
                self.fail_at = None
                raise CorpusReadError("the disk is gone")
            real(corpus, starts, lengths, targets, out)

        monkeypatch.setattr(Corpus, "read_pieces", read)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_an_epoch_reads_each_block_once_and_whole(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, reads: Reads
) -> None:
    """With the token after its last row. The rank's own rows are half of it."""
    with TokenLoader(**pooled, **POOL) as loader:
        list(loader)
        loader._built.source.placement._windows.close()  # type: ignore[attr-defined]
    blocks = {(6 * 4 * block, 6 * 4 + 1) for block in range(16)} | {(16 * 24, 4 * 4 + 1)}
    assert set(reads.spans[:17]) == blocks
    assert set(reads.spans[17:]) <= blocks, "the first window of the next epoch"


@pytest.mark.parametrize("outputs", [OUTPUTS, PIECES])
def test_a_reader_error_comes_with_the_first_batch_of_its_window(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, reads: Reads, outputs: tuple[str, ...]
) -> None:
    """And the same loader goes on there."""
    pooled |= {"outputs": outputs, "eos_id": 5, "world_size": 1, "rank": 0, "batches_per_run": 1}
    expected = on_cpu(pooled, 1)
    blocks = [set((batch["input_ids"][:, 0] // 24).tolist()) for batch in expected]
    third = next(number for number in range(len(blocks)) if len(set().union(*blocks[: number + 1])) > 6)
    reads.fail_at = 24 * next(iter(blocks[third] - set().union(*blocks[:third]))) + 3
    with TokenLoader(**pooled, **POOL) as loader:
        got: list[Any] = []
        with pytest.raises(CorpusReadError, match="the disk is gone"):
            got.extend(arrays(batch) for batch in loader)
        assert len(got) == third
        loader.load_state_dict(loader.state_dict())
        got.extend(arrays(batch) for batch in loader)
    assert all(itertools.starmap(equal, itertools.zip_longest(got, expected)))


def test_close_in_the_middle_of_a_load_ends_it(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the window; the reads under way end, and no other begins."""
    monkeypatch.setattr(pool_windows, "LOAD_CHUNK_BYTES", 16)
    loader = TokenLoader(**pooled, **POOL)
    reads.gate.clear()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            next(iter(loader))
        except LoaderClosedError as error:
            errors.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    placement = loader._built.source.placement
    assert isinstance(placement, PoolPlacement)
    wait_for(lambda: placement._pool._readers is not None)
    closer = threading.Thread(target=loader.close)
    closer.start()
    wait_for(lambda: placement._pool._is_ended)
    reads.gate.set()
    for thread in (closer, trainer):
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 1
    assert len(reads.spans) <= pool_windows.LOAD_THREADS
    assert late_gpu.allocated == 0


def test_a_load_that_is_replaced_writes_nothing_later(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, reads: Reads
) -> None:
    """A run goes on elsewhere while a window is on its way, and one of its reads takes longer than the new window."""
    with TokenLoader(**pooled, **POOL) as loader:
        placement = loader._built.source.placement
        assert isinstance(placement, PoolPlacement)
        pool, order = placement._pool, placement._order
        old, new = order._window(0, 0), order._window(0, 2)
        assert order.half(old) == order.half(new)
        held_up = reads.held = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(pool.wait, [old])
            try:
                wait_for(lambda: reads.is_holding)
                pool.restart()
                entered = threads.submit(pool.enter, [new])
                with contextlib.suppress(TimeoutError):
                    entered.result(0.3)
            finally:
                held_up.set()
            waiting.result(60)
            entered.result(60)
        held = late_gpu.asnumpy(pool.tokens)
        for slot, (position, count) in enumerate(order.blocks(new)):
            begin = order.half(new) * order.half_tokens + slot * order.slot_tokens
            assert held[begin : begin + count].tolist() == list(range(position, position + count))


@pytest.mark.parametrize("outputs", [OUTPUTS, PIECES])
def test_steps_that_are_left_out_and_a_global_batch(
    gpu: gpu_stand_in.StandInGpu, pooled: Settings, outputs: tuple[str, ...]
) -> None:
    pooled |= {"outputs": outputs, "eos_id": 5}
    for more in (
        {"skip_steps": [[1, 4], [6, 13]]},  # into the next window, and over windows
        {"skip_steps": [[4, 5, 0], [0, 7, 1]], "num_threads": 1},
        {"global_batch": [[0, 4], [120, 12]]},
    ):
        expected = on_cpu({**pooled, **more}, 2)
        with TokenLoader(**pooled, **more, **POOL) as loader:
            got = [arrays(batch) for _ in range(2) for batch in loader]
        assert all(itertools.starmap(equal, itertools.zip_longest(got, expected)))


def test_a_decoded_corpus(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    lists = [list(range(first, first + 20)) for first in range(0, 1000, 20)]
    table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    del pooled["dtype"]
    pooled |= {"corpus": str(tmp_path / "a.parquet"), "decoded_cache_bytes": 10_000}
    expected = on_cpu(pooled, 1)
    with TokenLoader(**pooled, **POOL) as loader:
        got = [arrays(batch) for batch in loader]
    assert all(itertools.starmap(equal, itertools.zip_longest(got, expected)))


def test_a_remote_corpus(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings) -> None:
    pytest.importorskip("obstore")
    expected, store = on_cpu(pooled, 1), stores.memory_store()
    paths = sorted(Path(pooled["corpus"]).parent.glob("*.bin"))
    for path in paths:
        store.put(f"pool/{path.name}", path.read_bytes())
    try:
        with TokenLoader(**{**pooled, "corpus": "memory://x/pool/*.bin"}, **POOL) as loader:
            got = [arrays(batch) for batch in loader]
    finally:
        for path in paths:
            store.delete(f"pool/{path.name}")
    assert all(itertools.starmap(equal, itertools.zip_longest(got, expected)))


def test_a_bad_id_is_the_cpu_s_error(gpu: gpu_stand_in.StandInGpu, pooled: Settings) -> None:
    def until_error(**more: Any) -> tuple[list[Any], str]:
        batches: list[Any] = []
        with TokenLoader(**pooled, **more) as loader:
            try:
                batches.extend(arrays(batch) for batch in loader)
            except TokenRangeError as error:
                return batches, str(error)
        return batches, ""

    for rank, bad in itertools.product(range(2), (1, 150, 301, 399, 400)):
        pooled |= {"vocab_size": bad, "rank": rank, "drop_last": False, "batches_per_run": 1 + bad % 3}
        (expected, words), (got, found) = until_error(device="cpu"), until_error(**POOL)
        assert found == words
        assert all(itertools.starmap(equal, itertools.zip_longest(got, expected)))


@pytest.mark.parametrize("outputs", [OUTPUTS, PIECES])
def test_memory_is_two_windows_and_does_not_grow(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, outputs: tuple[str, ...]
) -> None:
    pooled |= {"outputs": outputs, "eos_id": 5, "num_threads": 1}
    with TokenLoader(**{**pooled, "device": "cuda", "placement": "host"}) as loader:
        take(loader, 1)
        on_host = loader.stats().memory
    with TokenLoader(**pooled, **POOL) as loader:
        batches = loader_stream(loader)
        for _ in range(30):
            next(batches)
        made, before = late_gpu.events_made, loader.stats().memory
        for _ in range(75):
            next(batches)
        assert late_gpu.events_made == made
        after = loader.stats().memory
    assert (after.device_bytes, after.pinned_bytes) == (before.device_bytes, before.pinned_bytes)
    windows = 2 * 3 * (6 * 4 + 1) * 4
    staging = 2 * 2 * 2 * 5 * 4  # of "host": two buffers for a block of batches
    first_row = 5 * 4  # for padding
    assert after.device_bytes == on_host.device_bytes - staging + windows + first_row
    del batches
    assert late_gpu.allocated == 0


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(pooled: Settings) -> None:
    needed = 2 * 3 * 25 * 4
    with gpu_stand_in.installed(capacity=needed - 1) as gpu:
        with pytest.raises(BackendError) as raised:
            TokenLoader(**pooled, **POOL)
        words = str(raised.value)
        assert all(word in words for word in (f"{needed:,} bytes", "3 blocks", "cuda:0", "shuffle_window = 2 "))
        assert not gpu.everything
    with gpu_stand_in.installed() as gpu:
        with pytest.raises(BackendError, match="max_device_bytes = 100") as raised:
            TokenLoader(**pooled, **POOL, max_device_bytes=100)
        assert "shuffle_window" not in str(raised.value), "not even a block fits"
        assert not gpu.everything
        TokenLoader(**pooled, **POOL, max_device_bytes=needed).close()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"order": "rows", "shuffle_window": 512}, "order"),
        ({"shuffle": False}, "shuffle"),
        ({"rows": "pack", "eos_id": 5}, "pack"),
        ({"rows": "pad", "eos_id": 5}, "pad"),
        ({"seq_len": [[0, 2], [120, 4]], "global_batch": 12}, "seq_len"),
        ({"batch_size": 16}, "32 rows"),
        ({"batch_size": 3, "shuffle_window": 1}, "shuffle_window"),  # the short block has 4 rows, and a step 6
    ],
)
def test_what_a_pool_does_not_hold(
    late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, changes: Settings, word: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        TokenLoader(**{**pooled, **changes}, **POOL)
    assert word in str(raised.value)
    assert 'placement = "host"' in str(raised.value)
    gc.collect()
    assert late_gpu.allocated == 0


def test_a_mixture_is_refused(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings) -> None:
    sources = {"web": {"corpus": pooled.pop("corpus"), "weight": 1}}
    with pytest.raises(ConfigError, match="mixture"):
        TokenLoader(mixture=sources, total_rows=60, **pooled, **POOL)


def test_validation_goes_through_the_host(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings) -> None:
    """The settings of training may be used as they are."""
    pooled |= {"split": "validation", "validation_fraction": 0.3}
    expected = on_cpu(pooled, 1)
    with TokenLoader(**pooled, **POOL) as loader:
        assert loader.stats().placement == "host"
        assert "validation" in loader.stats().placement_reason
        assert all(itertools.starmap(equal, itertools.zip_longest(map(arrays, loader), expected)))


@pytest.mark.parametrize("end", ["close", "del"])
def test_nothing_stays_of_a_loader(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings, end: str) -> None:
    loader = TokenLoader(**pooled, **POOL)
    take(loader, 5)
    if end == "close":
        loader.close()
    else:
        del loader
    wait_for(lambda: late_gpu.allocated == 0)


def test_a_pipeline_without_a_loader(late_gpu: gpu_stand_in.StandInGpu, pooled: Settings) -> None:
    """Epochs that end, and one that is left in the middle."""
    expected = on_cpu(pooled, 2)
    config = resolve_ranks(LoaderConfig(**{**pooled, **POOL, "outputs": ("row_ids", "labels")}))
    blocks = BuiltSource(config, endless=False).source
    for epoch, count in ((0, 5), (1, 12)):
        for number in range(count):
            rows, labels = (late_gpu.asnumpy(out._array)[0] for out in blocks(BlockInfo(number, epoch)))
            both = expected[25 * epoch + 2 * number : 25 * epoch + 2 * number + 2]
            assert np.array_equal(rows, np.concatenate([batch["row_ids"] for batch in both]))
            assert np.array_equal(labels, np.concatenate([batch["labels"] for batch in both]))
    blocks.close()
    blocks.rows.close()
