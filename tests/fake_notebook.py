"""A cell of a notebook in this process, as far as rich and the progress bars look: what it displays is kept."""

import builtins
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dali_pipes.runtime import notebook_output, progress


class Cell:
    """The displays of a cell in order, each with all that it showed so far, as HTML."""

    def __init__(self) -> None:
        self.displays: list[list[str]] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        """As IPython's, which returns a handle to a display that can be replaced."""
        assert (raw, display_id) == (True, True)
        shown: list[str] = []
        self.displays.append(shown)

        def update(bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            assert bundle.keys() == {"text/plain", "text/html"}
            shown.append(bundle["text/html"])

        update(bundle, raw=raw)
        return SimpleNamespace(update=update)


class ZMQInteractiveShell:
    """By its name, rich knows a notebook."""


def run_cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """From now on, a cell runs; its bars are shown from the start, and with every step."""
    cell = Cell()
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0)
    monkeypatch.setattr(notebook_output, "_DRAWN_EVERY_S", 0)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=(9, 0)))  # matplotlib asks for it
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    return cell
