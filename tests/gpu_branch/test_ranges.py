"""Ranges for a profiler: which there are, in which order, that each ends, and that there are none without one."""

import itertools
import sys
import threading
from collections import defaultdict
from typing import Any

import gpu_stand_in
import pytest

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.engine import profiling
from dali_pipes.errors import CorpusReadError, DaliPipesError

MAIN = threading.main_thread().name


def walk(gpu: gpu_stand_in.StandInGpu, only: str | None = None) -> dict[str, list[str]]:
    """The ranges of each thread, or of one, as paths, in the order in which they began. All have ended."""
    open_ranges, paths = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for thread, name in list(gpu.ranges):
        if only not in (None, thread):
            continue
        if name is None:
            open_ranges[thread].pop()
        else:
            assert name.startswith("dali_pipes: ")
            open_ranges[thread].append(name.removeprefix("dali_pipes: "))
            paths[thread].append(" > ".join(open_ranges[thread]))
    assert not any(open_ranges.values()), open_ranges
    return dict(paths)


@pytest.mark.parametrize("placement", ["host", "device", "pinned"])
def test_names_and_order_on_a_gpu(late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str) -> None:
    with TokenLoader(
        **settings, device="cuda", placement=placement, nvtx=True, batches_per_run=2, num_threads=1
    ) as loader:
        for _ in loader:
            walk(late_gpu, MAIN)  # the trainer's own code is in no range
    paths = walk(late_gpu)
    assert paths[MAIN].count("next") == 8 + 1  # the last one finds the end
    assert set(paths[MAIN]) == {"next", "next > deliver", "next > batches"}
    (readers,) = [paths[thread] for thread in paths if "reader" in thread]
    assert {name for thread in paths if "batches" in thread for name in paths[thread]} <= {"batches"}
    if placement == "host":
        assert readers[:4] == ["plan", "read", "plan", "read"]
    else:
        assert set(readers) == {"read"}


def test_names_and_order_on_the_cpu(late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any]) -> None:
    with TokenLoader(**settings, device="cpu", nvtx=True, batches_per_run=4, num_threads=1) as loader:
        for _ in loader:
            walk(late_gpu, MAIN)
    paths = walk(late_gpu)
    assert paths[MAIN].count("next") == 8 + 1
    assert set(paths[MAIN]) == {"next", "next > batches"}
    assert paths[MAIN][0] == "next"
    (readers,) = [paths[thread] for thread in paths if thread != MAIN]
    assert set(readers) == {"plan", "read"}


def test_names_of_rows_of_documents_on_the_cpu(late_gpu: gpu_stand_in.StandInGpu, counting: Any) -> None:
    """Reader threads make their batches, and plan the documents after them."""
    corpus = counting(600, vocab_size=11).pattern
    shape: dict[str, Any] = {"batch_size": 2, "seq_len": 8, "rows": "pack", "eos_id": 10, "num_threads": 1}
    with TokenLoader(corpus, **shape, dtype="uint16", device="cpu", nvtx=True, batches_per_run=4) as loader:
        for _ in loader:
            walk(late_gpu, MAIN)
    paths = walk(late_gpu)
    assert set(paths[MAIN]) == {"next"}
    (readers,) = [paths[thread] for thread in paths if thread != MAIN]
    assert readers[:4] == ["plan", "read", "batches", "plan"]


def test_every_range_ends_however_the_loop_does(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {**settings, "device": "cpu", "nvtx": True, "batches_per_run": 2}
    loader = TokenLoader(**ours)
    for _ in loader:
        break
    iterator = iter(loader)
    next(iterator)
    del iterator
    superseded = iter(loader)
    next(superseded), next(iter(loader))
    with pytest.raises(DaliPipesError, match="superseded"):
        next(superseded)
    loader.close()
    walk(late_gpu)
    reads = itertools.count()

    def fail_from_the_third_on(*arguments: Any, read_rows: Any = Corpus.read_rows) -> None:
        if next(reads) >= 2:
            raise CorpusReadError("the disk is gone")
        read_rows(*arguments)

    monkeypatch.setattr(Corpus, "read_rows", fail_from_the_third_on)
    with TokenLoader(**ours) as failing:
        for _ in range(2):
            with pytest.raises(CorpusReadError):
                list(failing)
    paths = walk(late_gpu)
    assert paths[MAIN].count("next") >= 7


def test_the_epoch_left_early_is_over_with_ranges_too(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any]
) -> None:
    with TokenLoader(**settings, device="cpu", nvtx=True) as loader:
        for _ in loader:
            break
        assert loader.epoch == 1


@pytest.mark.parametrize(
    ("library", "nvtx", "expected"),
    [
        (None, None, False),
        ("", None, False),
        ("/opt/nvidia/nsight-systems/2026.1/target-linux-x64/libToolsInjection64.so", None, True),
        ("/opt/nvidia/nsight-systems/2026.1/target-linux-x64/libToolsInjection64.so", False, False),
        ("/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13", None, False),  # some images set it for every process
        ("/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13", True, True),
        (None, True, True),
    ],
)
def test_there_are_ranges_where_a_profiler_is(
    late_gpu: gpu_stand_in.StandInGpu,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    library: str | None,
    nvtx: bool | None,
    expected: bool,
) -> None:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    if library is not None:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", library)
    with TokenLoader(**settings, device="cuda", nvtx=nvtx) as loader:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "" if expected else "/lib/libToolsInjection64.so")
        assert len(list(loader)) == 8
    assert bool(late_gpu.ranges) == expected


def test_without_cupy_they_are_in_torchs_profile(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setitem(sys.modules, "cupy", None)
    with (
        TokenLoader(**settings, device="cpu", nvtx=True, batches_per_run=4) as loader,
        torch.profiler.profile() as profile,
    ):
        assert len(list(loader)) == 8
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["dali_pipes: next"] == 9
    assert counts["dali_pipes: batches"] >= 2


def test_without_a_profiler_nothing_is_made_for_a_batch() -> None:
    ranges, items = profiling.Ranges(), iter([1])
    assert ranges.each("next", items) is items
    assert ranges.around("read") is ranges.around("plan")
