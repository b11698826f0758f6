"""Pages of the manual (README.md, CONTRIBUTING.md, docs/**/*.md), and the blocks of code in them.

A block is a fence at the beginning of a line. What is to be done with it stands directly above it, in HTML comments
that a reader does not see; CONTRIBUTING.md ("Examples") says what each of them means.

    <!-- needs: tokenizers -->
    ```python title="train.py"
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARKS = ("needs", "not run", "output", "recipe", "setup", "slow")

_FENCE = re.compile(r"^(`{3,})(\w*)[ \t]*(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code between two fences, or in a hidden `setup`."""

    page: str
    """Path of the page, from the root of the repository."""
    line: int
    """Number of the line of the page above the first one of the code."""
    language: str
    code: str
    title: str | None = None
    marks: dict[str, str] = field(default_factory=dict)
    """What the comments above it say: `{"needs": "tokenizers", "slow": ""}`."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Paths of all pages, from the root of the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Blocks of a page, from top to bottom."""
    found: list[Block] = []
    lines = text_of(page).splitlines()
    number = prose_from = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        above = "\n".join(lines[prose_from:number])
        end = next((later for later in range(number + 1, len(lines)) if lines[later] == opened[1]), None)
        assert end is not None, f"{page}:{number + 1}: a block without an end"
        code = "\n".join(lines[number + 1 : end]) + "\n"
        found += _setups(page, above, prose_from)
        title = _TITLE.search(opened[3])
        found.append(Block(page, number + 1, opened[2], code, title and title[1], _marks(above, f"{page}:{number}")))
        number = prose_from = end + 1
    return found + _setups(page, "\n".join(lines[prose_from:]), prose_from)


def prose_of(page: str) -> str:
    """The text of a page without its blocks and comments; as many lines as the page has."""
    text = re.sub(
        r"^(`{3,}).*?^\1$", lambda match: "\n" * match[0].count("\n"), text_of(page), flags=re.MULTILINE | re.DOTALL
    )
    return _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)


def recipes() -> dict[str, Block]:
    """Blocks that a test of their own runs, by name."""
    named = [block for page in pages() for block in blocks_of(page) if "recipe" in block.marks]
    found = {block.marks["recipe"]: block for block in named}
    assert len(found) == len(named), f"two recipes of one name: {sorted(block.marks['recipe'] for block in named)}"
    return found


def recipe(name: str) -> str:
    """Code of a recipe."""
    found = recipes()
    assert name in found, f"the manual has no recipe {name!r}, only {', '.join(sorted(found))}"
    return found[name].code


def _setups(page: str, above: str, line: int) -> list[Block]:
    """Hidden code in the text between two blocks."""
    return [
        Block(
            page,
            line + above[: match.start(1)].count("\n"),
            "python",
            match[1].removeprefix("setup"),
            None,
            {"setup": ""},
        )
        for match in _COMMENT.finditer(above)
        if match[1].startswith("setup\n")
    ]


def _marks(above: str, place: str) -> dict[str, str]:
    """The marks directly above a block, with nothing but comments between."""
    marks: dict[str, str] = {}
    rest = above.rstrip()
    while (start := rest.rfind("<!--")) >= 0 and rest.endswith("-->"):
        name, _, value = rest[start + 4 : -3].strip().partition(":")
        if "\n" not in name:
            assert name in MARKS, f"{place}: {name!r} is not one of the marks {', '.join(MARKS)}"
            marks[name] = value.strip()
        rest = rest[:start].rstrip()
    return marks
