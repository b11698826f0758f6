"""Tests of everything that runs with device = "cuda", down to the last line before the driver, on a CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import gpu_stand_in
import pytest


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    reason = gpu_stand_in.why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=["late", "early", "random"])
def gpu(request: pytest.FixtureRequest) -> Iterator[gpu_stand_in.StandInGpu]:
    """The stand-in, with its operations run as late as allowed, at once, and in between."""
    with gpu_stand_in.installed(request.param) as stand_in:
        yield stand_in
        assert stand_in.default_stream_work == 0


@pytest.fixture
def late_gpu() -> Iterator[gpu_stand_in.StandInGpu]:
    """The stand-in whose operations run as late as CUDA allows."""
    with gpu_stand_in.installed("late") as stand_in:
        yield stand_in
        assert stand_in.default_stream_work == 0


@pytest.fixture
def settings(counting: Callable[..., Any]) -> dict[str, Any]:
    """A corpus of two files, 25 windows of 4 tokens, in batches of 3."""
    return {"corpus": counting(30, 71, dtype="uint16").pattern, "dtype": "uint16", "batch_size": 3, "seq_len": 4}
