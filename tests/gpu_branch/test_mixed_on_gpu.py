"""Mixtures on a GPU: the batches of the CPU, bit for bit, with other weights in mid-run and after resumes."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest

from dali_pipes import TokenLoader
from dali_pipes.placement.selection import GPU_PLACEMENTS

END = 9
SIZES = {"web": (1500, "uint16"), "code": (700, "uint32"), "math": (430, "int32")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    random = np.random.default_rng(3)
    for name, (size, dtype) in SIZES.items():
        ids = random.integers(10, 60_000, size)
        ids[np.cumsum(random.integers(1, 12, size // 8))] = END
        ids[-1] = END
        ids.astype(dtype).tofile(folder / f"{name}.bin")
    (np.arange(SIZES["code"][0]) % 5 != 0).astype(np.uint8).tofile(folder / "code.loss")
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "windows": {},
    "pack": {"web": {"rows": "pack", "window_documents": 70}, "math": {"rows": "pad", "window_documents": 40}},
    "masks": {"code": {"loss_masks": ["code.loss"]}, "math": {"rows": "pack"}},
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "windows": ("input_ids", "labels", "row_ids", "source_ids"),
    "pack": ("input_ids", "labels", "row_ids", "source_ids", "position_ids"),
    "masks": ("input_ids", "labels", "row_ids", "source_ids", "position_ids"),
}


def loader(folder: Path, kind: str, **settings: Any) -> TokenLoader:
    sources = {
        name: {"corpus": folder / f"{name}.bin", "dtype": dtype, "weight": weight, **KINDS[kind].get(name, {})}
        for (name, (_, dtype)), weight in zip(SIZES.items(), (0.5, 0.3, 0.2), strict=True)
    }
    for source in sources.values():
        if "loss_masks" in source:
            source["loss_masks"] = [folder / path for path in source["loss_masks"]]
    common: dict[str, Any] = {
        "mixture": sources,
        "total_rows": 186,
        "batch_size": 3,
        "seq_len": 8,
        "eos_id": END,
        "vocab_size": 60_000,
        "drop_last": False,
        "outputs": OUTPUTS[kind],
        "quiet": True,
    }
    return TokenLoader(**{**common, **settings})


def both(batches: Any, expected: Any, most: int | None = None) -> int:
    """Compare two streams of batches; how many there were."""
    count = 0
    for batch, on_cpu in itertools.islice(itertools.zip_longest(batches, expected), most):
        assert batch is not None
        assert on_cpu is not None
        assert plain(batch) == plain(on_cpu), count
        count += 1
    return count


def plain(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}


@pytest.mark.parametrize("placement", [name for name in GPU_PLACEMENTS if name != "pool"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_cpu(
    late_gpu: gpu_stand_in.StandInGpu, folder: Path, placement: str, kind: str
) -> None:
    """Other weights from row 128 on, a state in mid-run, a resume from it, on another number of ranks; two epochs."""
    there = {"device": "cuda", "placement": placement, "batches_per_run": 4}
    weights = {"web": 0.1, "code": 0.8, "math": 0.1}
    with loader(folder, kind, **there) as on_gpu, loader(folder, kind, device="cpu") as on_cpu:
        assert on_gpu.stats().placement == placement
        streams = iter(on_gpu), iter(on_cpu)
        assert both(*streams, most=17) == 17
        assert on_gpu.set_weights(weights) == on_cpu.set_weights(weights) == 128
        assert both(*streams, most=33) == 33
        state = json.loads(json.dumps(on_gpu.state_dict()))
        assert state == on_cpu.state_dict()
        assert both(*streams) == 62 - 50
        assert on_gpu.mixture_report() == on_cpu.mixture_report()
        assert both(on_gpu, on_cpu, most=3) == 3
    order = {"rank": 1, "world_size": 2, "batch_size": 2}
    with loader(folder, kind, **there, **order) as on_gpu, loader(folder, kind, device="cpu", **order) as on_cpu:
        on_gpu.load_state_dict(state)
        on_cpu.load_state_dict(state)
        assert both(on_gpu, on_cpu) == -(-(186 - 50 * 3) // 4)
