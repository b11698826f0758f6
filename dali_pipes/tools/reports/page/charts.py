"""Charts of the page: drawn by matplotlib, written as SVG that follows the colors of the page.

matplotlib needs no network and no browser, and writes text as text. Colors that stand for themselves in the drawing
become variables of the style sheet, so one chart serves light and dark screens and paper:

    style="fill: #a0b0c1"   →   style="fill: var(--series-1)"
"""

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dali_pipes.runtime.optional import optional_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = 8
"""Colors of series in the style sheet; a chart draws no more sources than that."""

_WIDTH, _HEIGHT, _FONT = 400, 230, 12
"""In pixels of a wide screen; on a phone, letters are still 9 pixels high."""
_INK, _LINE = "#a0b0d0", "#a0b0d1"
_COLORS = {f"#a0b0c{number}": f"var(--series-{number})" for number in range(SERIES)} | {
    _INK: "var(--muted)",
    _LINE: "var(--line)",
}
_MOST_LETTERS = 26
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.labelsize": _FONT,
    "axes.linewidth": 1,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": _FONT,
    "grid.color": _LINE,
    "grid.linewidth": 1,
    "svg.fonttype": "none",
    "text.parse_math": False,  # "$" in the name of a file is a letter
    "xtick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.color": _LINE,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0,
}


def series(number: int) -> str:
    """The color of a series."""
    return f"#a0b0c{number % SERIES}"


def bars(labels: Sequence[str], values: Sequence[float], *, xlabel: str, ylabel: str, log: bool = False) -> str:
    """Vertical bars, for a histogram."""

    def draw(axes: "Axes") -> None:
        axes.bar(range(len(values)), values, color=series(0), width=0.85)
        every = -(-len(labels) // 6)
        axes.set_xticks(range(0, len(labels), every), labels[::every])
        axes.grid(visible=False, axis="x")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(bottom=0.5)
            axes.minorticks_off()
        axes.yaxis.set_major_formatter(short)

    return _drawn(draw)


def shares(labels: Sequence[str], values: Sequence[float], *, xlabel: str) -> str:
    """Horizontal bars with a name each, the first on top."""

    def draw(axes: "Axes") -> None:
        axes.barh(range(len(values)), values, color=series(0), height=0.7)
        axes.set_yticks(range(len(labels)), [_shortened(label) for label in labels])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=xlabel, xlim=(0, None))
        axes.xaxis.set_major_formatter(_percent)
        axes.xaxis.set_major_locator(_few_ticks())

    return _drawn(draw, height=max(120, 60 + 22 * len(labels)))


def points(x: Sequence[float], y: Sequence[float], *, xlabel: str, ylabel: str) -> str:
    """A scatter of points; y is a fraction."""

    def draw(axes: "Axes") -> None:
        axes.plot(x, y, ".", color=series(0), markersize=3, markeredgewidth=0)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1))
        axes.yaxis.set_major_formatter(_percent)
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_major_locator(_few_ticks())

    return _drawn(draw)


def lines(
    courses: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    steps: bool = False,
    from_zero: bool = True,
    asked: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    as_shares: bool = False,
) -> str:
    """Lines by name, in the order of the colors; `asked` are dashed lines in the same colors."""

    def draw(axes: "Axes") -> None:
        for number, (x, y) in enumerate(courses.values()):
            shape: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {}
            marker = "o" if len(x) == 1 else None
            axes.plot(x, y, color=series(number), linewidth=1.6, marker=marker, markersize=4, **shape)
        for number, (x, y) in enumerate((asked or {}).values()):
            axes.plot(x, y, color=series(number), linewidth=1, linestyle=(0, (3, 3)), drawstyle="steps-post")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_percent if as_shares else short)
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_major_locator(_few_ticks())

    return _drawn(draw)


def short(value: float, _position: object = None) -> str:
    """`12`, `1.5k`, `2M`, `10B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _percent(value: float, _position: object = None) -> str:
    return f"{100 * value:.3g}%"


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6)


def _shortened(name: str) -> str:
    """The end of a name that is too long: files differ there."""
    return name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}"


def _drawn(draw: Callable[["Axes"], None], height: int = _HEIGHT) -> str:
    with optional_package("matplotlib", "report", purpose="to draw the charts of a report"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has fonts with it
        figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        draw(figure.subplots())
        with io.StringIO() as file:
            about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", metadata=about)
            text = file.getvalue()
    return _for_page(text[text.index("<svg") :])


def _for_page(svg: str) -> str:
    """Without what is of the file, with names that no other chart uses, and the colors of the page.

    Names and colors are in tags; text between them stays as it is.
    """
    mark = hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r"<style.*?</style>|<metadata.*?</metadata>|<!--.*?-->|\s+(?=<)", "", svg, flags=re.DOTALL)

    def changed(tag: re.Match[str]) -> str:
        text = re.sub(
            r' id="(?:figure|axes|patch|matplotlib|[xy]tick|line2d|text|PolyCollection|FillBetween)[^"]*"', "", tag[0]
        )
        text = re.sub(r"(?<= id=\")|(?<=url\(#)|(?<=xlink:href=\"#)", f"c{mark}", text)
        text = re.sub(r"font-family: [^;\"]*;?\s*", "", text)
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)
        text = text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ')
        return re.sub("#a0b0[0-9a-f]{2}", lambda color: _COLORS.get(color[0], color[0]), text)

    return re.sub(r"<[^>]*>", changed, svg)
