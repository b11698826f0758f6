"""What a loader on a GPU holds: counted, bounded before anything is allocated, and not growing."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from held import wait_for
from oracle import epoch_batches, same
from streams import all_same, loader_stream

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.outputs import on_host
from dali_pipes.corpus import Corpus
from dali_pipes.engine import dali
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.errors import BackendError, CorpusReadError
from dali_pipes.placement import device as device_placement
from dali_pipes.placement import loans
from dali_pipes.runtime.ranks import resolve_ranks

PLACEMENTS = ("host", "device", "pinned")
late = pytest.mark.parametrize("gpu", ["late"], indirect=True)
"""Memory is held longest where operations run as late as CUDA allows."""


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_is_allocated_and_no_event_made_in_the_steady_state(
    gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str
) -> None:
    with TokenLoader(**settings, device="cuda", placement=placement, batches_per_run=2, num_threads=2) as loader:
        batches = loader_stream(loader)
        for _ in range(60):
            next(batches)
        before = loader.stats().memory
        for _ in range(1000):
            next(batches)
            assert loader.stats().memory.dali_bytes <= 4 * 2 * 3 * 4 * 8 * 2, "two in the queue, one held, one passing"
        after = loader.stats().memory
    assert gpu.events_made < 30, "500 blocks were made; events and what is found in a block are used again"
    assert (after.device_bytes, after.pinned_bytes) == (before.device_bytes, before.pinned_bytes)


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_memory_is_what_the_allocator_gave(
    gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str
) -> None:
    gc.collect()
    before = gpu.allocated
    with TokenLoader(**settings, device="cuda", placement=placement, batches_per_run=2) as loader:
        assert loader.stats().memory.device_bytes == gpu.allocated - before
        for batch in loader:
            del batch
        memory = loader.stats().memory
        assert memory.device_bytes + memory.dali_bytes == gpu.allocated - before
        assert memory.pinned_bytes > 0
    gc.collect()
    assert loader.stats().memory.device_bytes == loader.stats().memory.pinned_bytes == 0
    gpu.stream(0).run()


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "of_rows",
    [
        {"rows": "stream", "mtp": 2},
        {"rows": "pack"},
        {"rows": "pad", "length_buckets": [2, 4]},
        {"rows": "pad", "batch_size": 1, "long_documents": "truncate"},
    ],
    ids=lambda of_rows: " ".join(map(str, of_rows.values())),
)
def test_rows_of_pieces_allocate_nothing_once_the_loader_is_built(
    gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str, of_rows: dict[str, Any]
) -> None:
    """Blocks of more and more pieces, up to one at every position: by then the model may have taken the whole card."""

    def tensors(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if not on_host(name)}

    tokens = np.arange(1200, dtype=np.uint16) % 29 + 1
    for share, begin in ((20, 0), (7, 300), (3, 600), (1, 900)):
        tokens[begin : begin + 300 : share] = 0
    tokens.tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"dtype": "uint16", "eos_id": 0, "batch_size": 3, "seq_len": 4, "shuffle": False}
    settings |= {"outputs": ("input_ids", "labels", "position_ids", "cu_seqlens"), "batches_per_run": 2} | of_rows
    path = str(tmp_path / "a.bin")
    with TokenLoader(corpus=path, **settings, device="cpu") as loader:
        expected = [tensors(batch) for batch in loader]
    with TokenLoader(corpus=path, **settings, device="cuda", placement=placement) as loader:
        made, held = gpu.arrays_made, loader.stats().memory.device_bytes
        assert all_same(map(tensors, loader), expected)
        assert (gpu.arrays_made, loader.stats().memory.device_bytes) == (made, held)


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_block_of_many_more_pieces_than_the_first_pins_no_more_memory(
    gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str
) -> None:
    """Page-locking in the middle of a run may stop the whole device: such a block is sent from pageable memory."""
    tokens = np.arange(24_000, dtype=np.uint16) % 29 + 1
    tokens[12_000::2] = 0
    tokens.tofile(tmp_path / "a.bin")
    settings: dict[str, Any] = {"dtype": "uint16", "eos_id": 0, "batch_size": 4, "seq_len": 100, "shuffle": False}
    settings |= {"outputs": ("input_ids", "labels", "position_ids"), "batches_per_run": 5, "rows": "stream"}
    path = str(tmp_path / "a.bin")
    with TokenLoader(corpus=path, **settings, device="cpu") as loader:
        expected = list(loader)
    with TokenLoader(corpus=path, **settings, device="cuda", placement=placement, num_threads=1) as loader:
        batches, got, pinned = iter(loader), [], []
        for batch in batches:
            got.append(batch)
            pinned.append(loader.stats().memory.pinned_bytes)
    assert all_same(got, [{name: values.numpy() for name, values in batch.items()} for batch in expected])
    assert gpu.pageable_copies > 0
    assert pinned[25] == pinned[-1], "the blocks with many pieces begin later"


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_loader_that_is_dropped_gives_its_memory_back(
    gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str
) -> None:
    """To everybody: CuPy keeps what was freed for the stream that it was taken for, which is gone."""
    loader = TokenLoader(**settings, device="cuda", placement=placement)
    next(iter(loader))
    stream, freed = loader._built.gpu.stream, len(gpu.freed_arenas)  # type: ignore[union-attr]
    del loader

    def is_back() -> bool:
        gc.collect()
        return stream in gpu.freed_arenas[freed:]

    wait_for(is_back)  # a thread may be reading for it
    assert is_back()


@late
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_block_costs_one_launch(gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str) -> None:
    with TokenLoader(**settings, device="cuda", placement=placement, batches_per_run=4) as loader:
        count = len(list(loader))
        assert loader.stats().block_times.plan_s > 0 if placement == "host" else True
        delivered = loader._source.delivered
    assert gpu.kernels == ["rows" if placement == "host" else "shuffled_rows"] * delivered
    assert count == 8


@pytest.mark.parametrize("chunk_bytes", [2, 6, 64, 10**6])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
def test_a_corpus_is_loaded_in_chunks(
    gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    dtype: str,
) -> None:
    monkeypatch.setattr(device_placement, "LOAD_CHUNK_BYTES", max(chunk_bytes, np.dtype(dtype).itemsize))
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    corpus = counting(30, 1, 71, dtype=dtype)
    with TokenLoader(
        corpus=corpus.pattern, dtype=dtype, batch_size=3, seq_len=4, device="cuda", placement="device"
    ) as loader:
        assert all_same(loader, epoch_batches(corpus.tokens, batch_size=3, seq_len=4))


def test_a_file_that_fails_while_loading(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_placement, "LOAD_CHUNK_BYTES", 64)
    corpus = counting(30, 71, dtype="uint16")
    settings = {"corpus": corpus.pattern, "dtype": "uint16", "batch_size": 3, "seq_len": 4}
    real = device_placement.load_tokens

    def truncate_then_load(*arguments: Any) -> None:
        with corpus.files[1].open("r+b") as file:
            file.truncate(40)
        real(*arguments)

    monkeypatch.setattr(device_placement, "load_tokens", truncate_then_load)
    with pytest.raises(CorpusReadError, match=r"shard_001\.bin"):
        TokenLoader(**settings, device="cuda", placement="device")
    gc.collect()
    assert gpu.allocated == 0


def test_too_little_memory_is_refused_with_the_numbers_before_anything_is_allocated(
    settings: dict[str, Any], counting: Callable[..., Any]
) -> None:
    with gpu_stand_in.installed(capacity=150) as gpu:
        with pytest.raises(BackendError, match=r"202 bytes.*1\.4e-07 GiB free on cuda:0.*placement = \"host\""):
            TokenLoader(**settings, device="cuda", placement="device")
        assert not gpu.everything
    with gpu_stand_in.installed() as gpu:
        with pytest.raises(BackendError, match=r"202 bytes.*max_device_bytes = 201"):
            TokenLoader(**settings, device="cuda", placement="device", max_device_bytes=201)
        assert not gpu.everything
        TokenLoader(**settings, device="cuda", placement="device", max_device_bytes=202).close()


def test_no_room_for_a_block_is_an_error_with_the_numbers(settings: dict[str, Any]) -> None:
    with gpu_stand_in.installed(capacity=1000) as gpu:
        with pytest.raises(BackendError, match=r"cuda:0 .*768 bytes .* 232 bytes .*batches_per_run"):
            TokenLoader(**settings, device="cuda", placement="host", batches_per_run=8)
        gc.collect()
        assert gpu.allocated == 0
        with TokenLoader(**settings, device="cuda", placement="host", batches_per_run=1) as loader:
            assert next(iter(loader))


def test_auto_follows_the_free_memory_and_says_why(settings: dict[str, Any]) -> None:
    def chosen(capacity: int, **more: Any) -> tuple[str, str]:
        with gpu_stand_in.installed(capacity=capacity), TokenLoader(**settings, device="cuda", **more) as loader:
            stats = loader.stats()
            return stats.placement, stats.placement_reason

    assert chosen(10**6) == ("device", "the corpus of 1.88e-07 GiB fits in 10% of 0.000931 GiB free on cuda:0")
    assert chosen(2019, batches_per_run=1)[0] == "host"
    assert chosen(2020, batches_per_run=1)[0] == "device"
    assert chosen(10**6, max_device_bytes=201) == (
        "host",
        "the corpus of 1.88e-07 GiB is more than max_device_bytes = 201",
    )
    assert chosen(10**6, max_device_bytes=202)[0] == "device"
    assert chosen(10**6, max_device_bytes=202, placement="host") == ("host", 'placement = "host"')
    assert chosen(2019, batches_per_run=1, max_device_bytes=10**9)[0] == "host"  # more than there is bounds nothing


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_loaders_side_by_side(gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str) -> None:
    corpus = counting(400)
    common: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "device": "cuda", "placement": placement}
    with (
        TokenLoader(**common, batch_size=3, seq_len=4) as first,
        TokenLoader(**common, batch_size=2, seq_len=7, seed=5) as second,
    ):
        pairs = zip(
            first,
            epoch_batches(corpus.tokens, batch_size=3, seq_len=4),
            second,
            epoch_batches(corpus.tokens, batch_size=2, seq_len=7, seed=5),
            strict=False,
        )
        for batch, wanted, other, other_wanted in pairs:
            assert same(batch, wanted)
            assert same(other, other_wanted)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("end", ["close", "del"])
def test_nothing_stays_of_a_loader_whose_batches_were_dropped(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str, end: str
) -> None:
    """Work on dropped blocks is waited for, and DALI's pool gives its memory back, though no further block comes."""
    gc.collect()
    before = late_gpu.allocated
    loader = TokenLoader(**settings, device="cuda", placement=placement, batches_per_run=2)
    late_gpu.consumer, late_gpu.eager = 7, False
    for batch in loader:
        late_gpu.stream(7).enqueue(lambda: None)
        del batch
    if end == "close":
        loader.close()
    else:
        del loader
        wait_for(lambda: late_gpu.allocated == before)
    gc.collect()
    assert (late_gpu.allocated, late_gpu.pooled_bytes) == (before, 0)
    late_gpu.stream(0).run()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_batch_held_past_close_gives_its_block_back_when_it_is_dropped(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(600)
    gc.collect()
    before = late_gpu.allocated
    with TokenLoader(
        corpus=corpus.pattern, dtype="uint32", batch_size=3, seq_len=4, device="cuda", placement=placement
    ) as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(2)]
        del batches
    expected = epoch_batches(corpus.tokens, batch_size=3, seq_len=4)
    assert all_same(held, [next(expected), next(expected)])
    assert late_gpu.allocated > before
    late_gpu.stream(late_gpu.consumer).enqueue(lambda: None)
    held.clear()
    assert (late_gpu.allocated, late_gpu.pooled_bytes) == (before, 0)


def test_close_does_not_wait_forever_for_work_that_never_ends(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a collective whose other ranks are gone: `close` returns, and a later one gives the memory back."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with monkeypatch.context() as patch:
        patch.setattr(loans, "sleep", sleep)
        patch.setattr(loans, "monotonic", lambda: now[0])
        late_gpu.consumer, late_gpu.eager = 7, False
        before = late_gpu.allocated
        with TokenLoader(**settings, device="cuda", batches_per_run=2) as loader:
            for batch in loader:
                del batch
        gc.collect()
        assert late_gpu.allocated > before
        assert 1 < now[0] < 60
    with TokenLoader(**settings, device="cuda", batches_per_run=2) as loader:
        next(iter(loader))
    gc.collect()
    late_gpu.stream(0).run()
    assert late_gpu.allocated == before


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_bare_pipeline_s_pinned_memory_outlives_its_copies_at_exit(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str
) -> None:
    """Nobody closes the source of a pipeline that is still there when the interpreter ends."""
    config = resolve_ranks(LoaderConfig(**settings, device="cuda", placement=placement, outputs=("labels", "row_ids")))
    built = BuiltSource(config, endless=False)
    dali._end_before_cuda(built.source)
    assert built.gpu is not None
    built.source(BlockInfo(0, 0))
    stream = late_gpu.stream(built.gpu.stream)
    queued = stream.queued
    assert stream.ran < queued, "copies are queued"
    dali._close_sources()
    assert stream.ran >= queued
    assert (built.gpu.pinned_bytes, late_gpu.allocated) == (0, 0)
    built.close()


@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_a_block_is_one_read(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    """All rows of a block, whatever files they are in, are asked for in one call."""
    how, reads = "read_rows" if rows == "stream" else "read_pieces", []
    real = getattr(Corpus, how)

    def read(self: Any, starts: Any, *arguments: Any) -> None:
        reads.append(len(starts))
        real(self, starts, *arguments)

    settings = settings | {"rows": rows, "eos_id": 7, "batches_per_run": 4, "num_threads": 1}
    with TokenLoader(**settings, device="cuda", placement="host") as loader:
        monkeypatch.setattr(Corpus, how, read)
        batches = len(list(loader))
    assert batches > 1
    assert len(reads) == loader.stats().block_times.blocks  # the threads have ended, and counted what they read
    assert max(reads) > 4


def test_a_loader_collected_in_the_middle_of_another_s_call_does_not_block(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run while the ledger of the device is locked by the same thread."""
    dropped = [TokenLoader(**settings, device="cuda", batches_per_run=2)]
    next(iter(dropped[0]))
    real = loans.Loans._settle

    def settle(self: Any, streams: set[int]) -> None:
        dropped.clear()
        real(self, streams)

    monkeypatch.setattr(loans.Loans, "_settle", settle)
    with TokenLoader(**settings, device="cuda", batches_per_run=2) as loader:
        assert len(list(loader)) == len(loader)
