"""A synthetic corpus on a GPU: made on the host or kept on the device, the batches are those of the CPU."""

from typing import Any

import gpu_stand_in
import pytest

from dali_pipes import TokenLoader
from dali_pipes.errors import BackendError


@pytest.mark.parametrize("placement", ["host", "device", "pinned", "auto"])
@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_the_batches_are_those_of_the_cpu(late_gpu: gpu_stand_in.StandInGpu, placement: str, rows: str) -> None:
    common: dict[str, Any] = {"corpus": "synthetic:40K", "vocab_size": 50_257, "rows": rows, "quiet": True}
    common |= {"batch_size": 3, "seq_len": 700, "split": "train", "validation_fraction": 0.2}
    with TokenLoader(device="cpu", **common) as loader:
        expected = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
    with TokenLoader(device="cuda", placement=placement, **common) as loader:
        assert [{name: value.tolist() for name, value in batch.items()} for batch in loader] == expected
    assert len(expected) > 8


def test_one_that_does_not_fit_stays_on_the_host(late_gpu: gpu_stand_in.StandInGpu) -> None:
    common: dict[str, Any] = {"corpus": "synthetic:1000T", "batch_size": 2, "seq_len": 8, "device": "cuda"}
    common["batches_per_run"] = 4  # of batches this small a block would have a hundred thousand
    with pytest.raises(BackendError, match=r'placement = "device": the corpus takes .* use placement = "host"'):
        TokenLoader(placement="device", **common)
    with pytest.raises(BackendError, match=r"the corpus takes .* bytes\) are available .* use placement = \"host\""):
        TokenLoader(placement="pinned", **common)
    with TokenLoader(**common) as loader, TokenLoader(**{**common, "device": "cpu"}) as on_cpu:
        assert loader.stats().placement == "host"
        assert next(iter(loader))["input_ids"].tolist() == next(iter(on_cpu))["input_ids"].tolist()
