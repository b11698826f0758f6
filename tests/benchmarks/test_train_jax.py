"""train_jax.py at a tiny size: the loss falls, and a run that is resumed has the losses of one that is not."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_tiny_run_learns_and_resumes(run_script: Callable[..., "CompletedProcess[str]"]) -> None:
    pytest.importorskip("jax", reason="jax is not installed: the extra `jax` brings it")
    result = run_script(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import train_jax

        for stop_after in (None, 7):
            train_jax.main(
                steps=12, devices=2, batch_size=16, seq_len=64, width=16, layers=1, learning_rate=0.01, seed=1,
                stop_after=stop_after,
            )
        """,
        BENCHMARKS,
    )
    assert result.returncode == 0, result.stderr
    whole, resumed = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert (whole["benchmark"], whole["devices"], len(whole["losses"])) == ("train_jax", 2, 12)
    assert whole["val_loss"] < whole["val_loss_before"]
    assert 0 <= whole["data_wait_pct"] <= 100
    assert resumed["losses"] == whole["losses"]
