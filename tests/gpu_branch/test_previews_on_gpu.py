"""A loader on a GPU previews its batches on the CPU, and goes on."""

from typing import Any

import gpu_stand_in
import pytest

from dali_pipes import TokenLoader


@pytest.mark.parametrize("placement", ["host", "device", "pinned"])
def test_a_preview_is_the_batch_of_the_gpu(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str
) -> None:
    with TokenLoader(**settings, device="cuda", placement=placement, quiet=True, batches_per_run=2) as loader:
        served = []
        for number, batch in enumerate(loader):
            served.append(batch["input_ids"].tolist())
            if number in (0, 3):
                for step in (0, number, 7):
                    shown = loader.preview(step, epoch=0, rows=9)
                    assert len(shown.rows) == 3
                    assert step >= len(served) or [row.outputs["input_ids"] for row in shown.rows] == served[step]
        assert len(served) == 8
        shown = loader.preview(7, epoch=0, rows=9)
        assert [row.outputs["input_ids"] for row in shown.rows] == served[7]
