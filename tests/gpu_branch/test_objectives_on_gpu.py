"""Objectives on a GPU: every placement gives the batches of the CPU, bit for bit."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest
from oracle import same

from dali_pipes import TokenLoader
from dali_pipes.operators import keyed_draws
from dali_pipes.placement.selection import GPU_PLACEMENTS
from dali_pipes.rows import make

MLM: dict[str, Any] = {"kind": "mlm", "mask_id": 200, "rate": 0.4, "special_ids": [5, 8]}
DIFFUSION: dict[str, Any] = {"kind": "diffusion", "mask_id": 7}
GOLDFISH: dict[str, Any] = {"kind": "goldfish", "h": 3, "k": 3}
FIM: dict[str, Any] = {"kind": "fim", "rate": 0.7, "tokens": {"prefix": 490, "middle": 491, "suffix": 492}}
BASE = ("input_ids", "labels", "row_ids")
SPANS: dict[str, Any] = {"kind": "spans", "sentinels": 400, "num_sentinels": 5, "end_id": 1, "sentinel_step": 1}
SPANS |= {"denoisers": [{"mode_token": 410}, {"rate": 0.4, "mean_length": 1.5, "weight": 2}]}
OF_SPANS = ("encoder_ids", "encoder_lengths", "decoder_input_ids", "decoder_labels", "decoder_lengths", "row_ids")
KINDS: dict[str, dict[str, Any]] = {
    "mlm": {"objective": [MLM]},
    "mlm in pieces": {"objective": [MLM], "rows": "pack", "outputs": (*BASE, "loss_mask", "segment_ids")},
    "mlm in buckets": {"objective": [MLM], "rows": "pad", "length_buckets": (2, 4)},
    "diffusion": {"objective": [DIFFUSION], "outputs": (*BASE, "noisy_ids", "masked", "p_mask"), "mask_dtype": "bool"},
    "prefix": {"objective": [{"kind": "prefix"}], "outputs": (*BASE, "prefix_lengths"), "mtp": 2},
    "goldfish": {"objective": [GOLDFISH], "outputs": (*BASE, "loss_mask"), "stride": 5},
    "goldfish in documents": {"objective": [GOLDFISH], "rows": "pack", "mtp": 2},
    "spans": {"objective": [SPANS], "outputs": (*OF_SPANS, "causal_ids", "causal_labels")},
    "spans in pieces": {"objective": [SPANS], "outputs": OF_SPANS, "rows": "pack", "index_dtype": "int32"},
    "goldfish after fim": {"objective": [FIM, GOLDFISH], "rows": "pack"},
    "mlm in a budget": {"objective": [MLM], "rows": "pad", "batch_tokens": 20, "batch_size": 1},
    "diffusion in a budget": {
        "objective": [DIFFUSION],
        "rows": "pad",
        "batch_tokens": 20,
        "batch_size": 1,
        "outputs": (*BASE, "noisy_ids", "p_mask"),
    },
    "goldfish in a budget": {"objective": [GOLDFISH, {"kind": "prefix"}], "rows": "pad", "batch_tokens": 20}
    | {"batch_size": 1, "outputs": (*BASE, "prefix_lengths", "loss_mask")},
    "drop": {"objective": [{"kind": "drop", "rate": 0.3, "drop_id": 9}], "index_dtype": "int32"},
}


FEW = [
    ("mlm", "device"),
    ("spans", "device"),
    ("spans in pieces", "host"),
    ("diffusion", "host"),
    ("goldfish in documents", "host"),
    ("goldfish", "device"),
    ("mlm", "pool"),
    ("spans", "pool"),
    ("goldfish after fim", "device"),
    ("mlm in a budget", "host"),
]
CASES = [
    pytest.param(kind, placement, marks=() if (kind, placement) in FEW else pytest.mark.slow)
    for kind in KINDS
    for placement in GPU_PLACEMENTS
    if placement != "pool" or not ("goldfish" in kind or "rows" in KINDS[kind])
]


@pytest.mark.parametrize(("kind", "placement"), CASES)
def test_a_gpu_gives_the_batches_of_the_cpu(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    kind: str,
) -> None:
    corpus = counting(130, 271)
    common: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "eos_id": 5, "vocab_size": 500}
    common |= {"batch_size": 3, "seq_len": 8, "rank": 1, "world_size": 2, "drop_last": False, "outputs": BASE}
    common |= KINDS[kind]
    if placement == "pool":  # several windows, the last row of an epoch is padding
        monkeypatch.setattr(make, "BLOCK_TOKENS", 48)
        common |= {"order": "blocks", "shuffle_window": 3}
    with (
        TokenLoader(**common, device="cuda", placement=placement, batches_per_run=2) as loader,
        TokenLoader(**common, device="cpu", batches_per_run=3) as on_cpu,
    ):
        for _ in range(2):
            for batch, expected in itertools.zip_longest(loader, on_cpu):
                assert same(batch, {name: values.numpy() for name, values in expected.items()})


CALLS: list[tuple[Any, Any]] = []


def remember(batch: dict[str, Any], draws: Any) -> None:
    assert all(isinstance(array, sys.modules["cupy"].ndarray) for array in batch.values())
    CALLS.append((draws._keys.get(), draws.u32(3).get()))  # the stand-in has run what was queued


def test_a_function_of_the_users_gets_arrays_of_the_gpu(
    counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    CALLS.clear()
    settings: dict[str, Any] = {"dtype": "uint32", "batch_size": 3, "seq_len": 8, "batches_per_run": 2}
    with gpu_stand_in.installed("early"):
        kind = {"kind": f"{__name__}:remember"}
        with TokenLoader(counting(130).pattern, **settings, device="cuda", objective=kind) as loader:
            next(iter(loader))
    keys, draws = CALLS[0]
    assert len(set(keys.tolist())) == len(keys) == 6
    assert draws.tolist() == keyed_draws(keys, 8, 3).tolist()
