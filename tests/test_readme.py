"""What the README (and CONTRIBUTING) say, against the code.

`python tests/test_readme.py` prints the settings table to paste between its markers.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from counting import CountingCorpus

from dali_pipes.config import LoaderConfig
from dali_pipes.config.aliases import ALIASES, NOT_NEEDED

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]
PLACEHOLDER_CORPUS = "data/*.bin"
"""Stands for the reader's own files in the examples."""

NAMES_EVERYONE_KNOWS = {
    "n_workers",
    "num_workers",
    "prefetch_size",
    "prefetch_batches",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "worker_count",
    "worker_buffer_size",
}
PATH_SUFFIXES = (".cu", ".md", ".py", ".toml")
OTHER_PLACES = ("data/", "http:", "https:", "my/", "runs/")
"""Beginnings of what looks like a path but is the reader's own file, an output, or an address."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def section(name: str) -> str:
    """What the README has between the markers `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text_of("README.md"), re.DOTALL)
    assert found, f"README.md has no section between <!-- {name} --> and <!-- /{name} -->"
    return found[1].strip()


def settings_table() -> str:
    """Every setting with its default and meaning, in the order of `LoaderConfig`."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in LoaderConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{_as_code(field.default)}`"
        lines.append(f"| `{name}` | {default} | {field.description or ''} |")
    return "\n".join(lines)


def _as_code(value: object) -> str:
    """As in Python, with the double quotes that TOML needs too."""
    return repr(list(value) if isinstance(value, tuple) else value).replace("'", '"')


def code_of(document: str) -> list[str]:
    """Code blocks, and code spans of the text between them."""
    pieces = re.split(r"^```[^\n]*\n(.*?)^```$", text_of(document), flags=re.MULTILINE | re.DOTALL)
    blocks, prose = pieces[1::2], pieces[::2]
    return blocks + [span for piece in prose for span in re.findall(r"`([^`\n]+)`", piece)]


def paths_in(document: str) -> set[str]:
    """Words of code that look like a path of this repository, and targets of links."""
    words = {word.strip("\"'(),:;") for piece in code_of(document) for word in piece.split()}
    links = set(re.findall(r"\]\(([^)#\s]+)", text_of(document)))
    looks_like_a_path = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
    return {
        word
        for word in words | links
        if looks_like_a_path.fullmatch(word)
        and (word in links or word.endswith(PATH_SUFFIXES) or "/" in word)
        and not word.startswith(OTHER_PLACES)
        and word not in PATH_SUFFIXES
    }


def test_every_setting_has_a_meaning() -> None:
    assert [name for name, field in LoaderConfig.model_fields.items() if not field.description] == []


def test_the_settings_table_is_that_of_the_code() -> None:
    assert section("settings") == settings_table()


def test_the_migration_table_says_what_the_errors_say() -> None:
    """One row a setting of ours: some names elsewhere, ours (or "not needed"), and what is different."""
    table: dict[str, str] = {}
    for line in section("migration").splitlines()[2:]:
        theirs, ours, note = (cell.strip() for cell in line.strip("|").split(" | "))
        names = re.findall(r"`(\w+)`", theirs)
        assert names
        for name in names:
            assert name not in table, f"{name} is there twice"
            table[name] = ours.strip("`")
            if ours == NOT_NEEDED:
                assert any(name in alias.names and alias.note in note for alias in ALIASES)
    assert table.items() <= {name: alias.here for alias in ALIASES for name in alias.names}.items()
    assert set(table) >= NAMES_EVERYONE_KNOWS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document: str) -> None:
    found = paths_in(document)
    assert found, "no path was found: does this test still read the document as it is written?"
    assert [path for path in sorted(found) if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE))
    named = {name for piece in code_of(document) for name in re.findall(r"\bmake ([a-z][a-z-]*)", piece)}
    assert {"test"} <= named <= targets


def test_the_first_example_runs(
    counting: Callable[..., CountingCorpus], run_script: Callable[..., "CompletedProcess[str]"]
) -> None:
    """As it is printed, apart from the corpus: enough tokens for three batches."""
    example = re.search(r"^```python\n(.*?)^```$", text_of("README.md"), re.MULTILINE | re.DOTALL)
    assert example, "README.md has no python block"
    assert PLACEHOLDER_CORPUS in example[1]
    sizes = {name: int(value) for name, value in re.findall(r"\b(batch_size|seq_len)=(\d+)", example[1])}
    corpus = counting(3 * sizes["batch_size"] * sizes["seq_len"] + 1, dtype="uint16", vocab_size=256)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    source = example[1].replace(PLACEHOLDER_CORPUS, corpus.pattern)
    result = run_script(source, environment=environment)
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    print(settings_table())
