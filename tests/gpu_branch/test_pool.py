"""The placement "pool": the batches of the CPU, bit for bit, whatever the windows are and wherever a run goes on."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from profiles import examples
from streams import loader_stream, take

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.errors import BackendError, ConfigError, CorpusReadError, TokenRangeError
from dali_pipes.placement import pool_windows
from dali_pipes.rows import make

Settings = dict[str, Any]
OUTPUTS = ("input_ids", "labels", "row_ids")
PIECES = (*OUTPUTS, "position_ids", "segment_ids", "cu_seqlens", "max_seqlen", "loss_mask", "source_ids")


def on_cpu(settings: Settings, epochs: int) -> list[dict[str, Any]]:
    with TokenLoader(**settings, device="cpu") as loader:
        return [arrays(batch) for _ in range(epochs) for batch in loader]


def arrays(batch: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else value.numpy().copy() for name, value in batch.items()}


def same(batch: Any, expected: dict[str, Any]) -> bool:
    found = arrays(batch)
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


@hypothesis_settings(max_examples=examples(14), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
