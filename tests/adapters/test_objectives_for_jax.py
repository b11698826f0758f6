"""What JAX gets of an objective: shares stay floats, and labels that are not shifted do not become targets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dali_pipes import LoaderConfig
from dali_pipes.adapters.jax.fields import Fields
from dali_pipes.errors import ConfigError

SHARDS: Any = SimpleNamespace(count=1, described="one device")


def test_shares_are_not_cut_to_integers() -> None:
    fields = Fields(("p_mask", "row_ids"), "ignore", None)
    batch = {"p_mask": np.array([0.25, 0.75], np.float32), "row_ids": np.array([3, 4])}
    arrays = fields.of_batch(batch, np)
    assert arrays["p_mask"].tolist() == [0.25, 0.75]
    assert arrays["row_ids"].dtype == np.int32


def test_labels_at_their_own_positions_are_not_targets() -> None:
    settings: dict[str, Any] = {"corpus": "a.bin", "batch_size": 2, "seq_len": 8, "vocab_size": 9}
    settings["outputs"] = ("input_ids", "labels", "position_ids", "segment_ids")
    config = LoaderConfig(**settings, objective={"kind": "mlm", "mask_id": 3})
    with pytest.raises(ConfigError, match="mlm"):
        Fields.of(config, SHARDS, "ignore", "maxtext", may_add=False)
    plain = LoaderConfig(**settings, objective={"kind": "prefix"})
    assert Fields.of(plain, SHARDS, "ignore", "maxtext", may_add=False).names == "maxtext"
