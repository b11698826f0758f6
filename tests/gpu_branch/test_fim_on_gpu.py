"""Fill in the middle on a GPU, for which a stand-in is: the batches of the CPU, wherever the corpus is."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from fim_oracle import PREFIX, TOKENS
from oracle import same

from dali_pipes import TokenLoader
from dali_pipes.placement.selection import GPU_PLACEMENTS

END = 9


def write(folder: Path, seed: int) -> str:
    """Documents of 0 to 39 tokens and an end, with a loss mask."""
    generator = np.random.default_rng(seed)
    documents = [[*generator.integers(10, 900, generator.integers(0, 40)), END] for _ in range(60)]
    tokens = np.array(list(itertools.chain(*documents)), np.uint16)
    folder.mkdir()
    tokens.tofile(folder / "tokens.bin")
    (folder / "tokens.bin.loss").write_bytes((tokens % 3 > 0).astype(np.uint8).tobytes())
    return str(folder)


@pytest.mark.parametrize("placement", [name for name in GPU_PLACEMENTS if name != "pool"])
@pytest.mark.parametrize(
    "how", [{"rows": "pack", "mtp": 2}, {"rows": "pad", "length_buckets": (8, 16)}], ids=["pack", "pad"]
)
def test_batches_are_those_of_the_cpu(
    late_gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str, how: dict[str, Any]
) -> None:
    level = "piece" if how["rows"] == "pack" else "document"
    objective = [{"kind": "fim", "tokens": TOKENS, "rate": 0.8, "level": level}]
    common: dict[str, Any] = {"corpus": write(tmp_path / "corpus", 1), "dtype": "uint16", "eos_id": END, "quiet": True}
    common |= {"batch_size": 3, "seq_len": 24, "drop_last": False, "rank": 1, "world_size": 2, "batches_per_run": 2}
    common |= {"outputs": ("input_ids", "labels", "position_ids", "row_ids"), "vocab_size": 1004, **how}
    with (
        TokenLoader(**common, objective=objective, device="cuda", placement=placement) as loader,
        TokenLoader(**common, objective=objective, device="cpu") as on_cpu,
    ):
        found = 0
        for _ in range(2):
            for batch, expected in itertools.zip_longest(loader, on_cpu):
                assert same(batch, {name: values.numpy() for name, values in expected.items()})
                found += int((expected["input_ids"] == PREFIX).sum())
        assert found > 20


@pytest.mark.parametrize("placement", [name for name in GPU_PLACEMENTS if name != "pool"])
def test_a_mixture_with_a_stream(late_gpu: gpu_stand_in.StandInGpu, tmp_path: Path, placement: str) -> None:
    """Blocks with rearranged rows and without, and rows that read tokens after their last position."""
    mixture: dict[str, Any] = {name: {"corpus": write(tmp_path / name, ord(name)), "weight": 1} for name in "abc"}
    mixture["a"]["objective"] = [{"kind": "fim", "tokens": TOKENS, "rate": 1}]
    mixture["a"]["weight"] = 0.2
    mixture["c"]["rows"] = "stream"
    common: dict[str, Any] = {"mixture": mixture, "dtype": "uint16", "eos_id": END, "rows": "pack", "quiet": True}
    common |= {"batch_size": 1, "seq_len": 24, "total_rows": 60, "batches_per_run": 2, "mtp": 3}
    common |= {"outputs": ("input_ids", "labels", "position_ids", "row_ids", "source_ids")}
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(TokenLoader(**common, device="cuda", placement=placement))
        on_cpu = stack.enter_context(TokenLoader(**common, device="cpu"))
        for batch, expected in itertools.zip_longest(loader, on_cpu):
            assert same(batch, {name: values.numpy() for name, values in expected.items()})
