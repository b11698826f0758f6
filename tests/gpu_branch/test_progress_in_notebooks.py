"""Page-locking, which takes a second for some gigabytes, shows its bar in a notebook."""

from typing import Any

import gpu_stand_in
import pytest
from fake_notebook import run_cell

from dali_pipes import TokenLoader


def test_page_locking_shows_its_bar(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = run_cell(monkeypatch)
    with TokenLoader(**settings, device="cuda", placement="pinned"):
        pass
    (shown,) = [shown for shown in cell.displays if "page-locking" in shown[0]]
    assert ("100%" in shown[-2], shown[-1]) == (True, "")
