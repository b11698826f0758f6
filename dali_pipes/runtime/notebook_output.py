"""What rich draws, in the output of a notebook's cell.

rich's own live displays need ipywidgets there, in the kernel and in the server. A display with an id can be replaced in
any frontend of Jupyter, VS Code and Colab, and needs only IPython, which every kernel has.
"""

import io
import sys
import time
from typing import Any

from rich.console import Console, RenderableType

_WIDTH = 100
_DRAWN_EVERY_S = 0.1
_HTML = (
    "<pre style=\"margin:0;white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',"
    'consolas,monospace">{code}</pre>'
)


def in_notebook() -> bool:
    """Whether a cell of a notebook runs in this process."""
    return "IPython" in sys.modules and Console().is_jupyter


class NotebookOutput:
    """A place below the cell that runs now. Not thread-safe; any thread may use it, one at a time."""

    def __init__(self) -> None:
        self._display: Any = None
        self._drawn = 0.0

    def draw(self, content: RenderableType) -> None:
        """Show `content` in place of what was shown; at most ten times a second, more often does nothing."""
        now = time.monotonic()
        if self._display is None or now - self._drawn >= _DRAWN_EVERY_S:
            self._drawn = now
            self._replace(*_rendered(content))

    def remove(self) -> None:
        """Leave the place empty; idempotent."""
        if self._display is not None:
            self._replace("", "")
            self._display = None

    def _replace(self, text: str, html: str) -> None:
        bundle = {"text/plain": text, "text/html": html}
        if self._display is None:
            from IPython.display import display

            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def _rendered(content: RenderableType) -> tuple[str, str]:
    """As plain text, and as HTML without scripts."""
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        record=True,
        force_jupyter=False,
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(content)
    return console.export_text(clear=False), console.export_html(inline_styles=True, code_format=_HTML)
