"""Templates of this package, by Jinja with automatic escaping.

Text of the data reaches a page through a template only, so a document that contains `<script>` shows as text. What is
not printable, such as a mark that reverses the direction of text, shows as an escape.
"""

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from dali_pipes.runtime.messages import printable
from dali_pipes.runtime.optional import optional_package

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = "templates"


def rendered(template: str, **values: Any) -> str:
    """The text of a template. Raises `BackendError` without Jinja."""
    return _environment().get_template(template).render(values)


def source_of(name: str) -> str:
    """A file beside the templates, as it is: the style sheet or the script."""
    return (resources.files(__package__) / _FOLDER / name).read_text(encoding="utf-8")


def number(value: float | int | None) -> str:
    """`1,203,874`, `0.0123`, `12.5`; a dash for None."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        return f"{value:,}"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """`12.3%`, with more digits below 1%."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:.2%}" if 0 < abs(value) < 0.01 else f"{value:.1%}"


@cache
def _environment() -> "Environment":
    with optional_package("jinja2", "report", purpose="to write HTML"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader("dali_pipes.markup", _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "printable": printable,
        "lines": lambda text: "\n".join(map(printable, text.split("\n"))),
        "filename": lambda path: path.rpartition("/")[2],
    }
    return environment
