"""What the manual says of the repository is so: pages, links, paths, make targets, settings, public names."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml
from manual import DOCS, ROOT, blocks_of, pages, prose_of, text_of

from dali_pipes import LoaderConfig
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.corpus import FORMATS

PUBLIC = (
    *("dali_pipes", "dali_pipes.adapters.jax", "dali_pipes.attention", "dali_pipes.errors", "dali_pipes.huggingface"),
    *("dali_pipes.operators", "dali_pipes.tokenizing"),
)
PAGES = pages()
PATH_SUFFIXES = (".cu", ".cuh", ".md", ".py", ".toml")
README_LINES = 150
WELL_KNOWN_NAMES = (
    "num_workers prefetch_factor pin_memory persistent_workers collate_fn sampler block_size max_length "
    "micro_batch_size num_replicas"
)
"""Settings of other loaders that most users have typed once."""


def spans_of(page: str) -> list[str]:
    """Code between backticks in the text."""
    return re.findall(r"`([^`\n]+)`", prose_of(page))


def links_of(page: str) -> list[str]:
    return re.findall(r"(?<!`)\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", prose_of(page)))


def anchors_of(page: str) -> set[str]:
    """Those of headings, as Markdown's table of contents and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def references() -> list[str]:
    """Names that the pages of the reference document."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    return names or [name for name, value in vars(module).items() if inspect.isclass(value)]


def navigation() -> Iterator[str]:
    """Pages of the navigation, from docs/."""

    def pages_in(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else pages_in(value)

    return pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a page, a heading of it, a picture, or a name of the reference; never out of the repository by a path."""
    for link in links_of(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file(), f"{page}: {link}"
        assert target.is_relative_to(DOCS) or page == "README.md", f"{page}: {link} is not part of the site"
        if anchor:
            assert anchor in anchors_of(target.relative_to(ROOT).as_posix()), f"{page}: {link}"
    known = references()
    for name in re.findall(r"\]\[(dali_pipes[\w.]*)\]", text_of(page)):
        owner, _, member = name.rpartition(".")
        assert name in known or (owner in known and hasattr(resolved(owner), member)), f"{page}: {name}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    """Those of the repository that stand in the text between backticks."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "site", "build"}
    words = {word.strip("\"'(),:;") for span in spans_of(page) for word in span.split()}
    paths = {word for word in words if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)+/?", word) and word.split("/")[0] in folders}
    paths |= {word for word in words if re.fullmatch(r"[\w-]+/", word) and word.rstrip("/") in folders}
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = [*spans_of(page), *(block.code for block in blocks_of(page) if block.language == "bash")]
    assert {name for piece in code for name in re.findall(r"^make ([a-z][a-z-]*)", piece, re.MULTILINE)} <= targets


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    """What is written like a setting of a file, `batch_size = 8`, is one."""
    for span in spans_of(page):
        if found := re.fullmatch(r"([a-z_]+) = \S.*", span):
            assert found[1] in LoaderConfig.model_fields, f"{page}: `{span}`"


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= README_LINES


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(module: str) -> None:
    """In the reference, by a docstring of their own; so are their public methods and attributes."""
    found = importlib.import_module(module)
    names = public_names(found)
    assert names
    assert [name for name in names if f"{module}.{name}" not in references()] == []
    assert [problem for name in names for problem in undocumented(f"{module}.{name}", getattr(found, name))] == []


def test_the_reference_documents_public_names_alone() -> None:
    known = {f"{module}.{name}" for module in PUBLIC for name in public_names(importlib.import_module(module))}
    assert [name for name in references() if name not in known] == []
    assert len(references()) == len(set(references()))


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in LoaderConfig.model_fields.items() if not field.description] == []


def test_every_output_and_format_is_explained() -> None:
    guide = text_of("docs/packing-and-attention.md")
    assert [name for name in OUTPUT_NAMES if f"`{name}`" not in guide] == []
    assert [name for name in FORMATS if name not in text_of("docs/corpora.md").lower().replace(".", "")] == []


def test_the_repeated_parts_are_those_of_the_code() -> None:
    ended = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_names_that_everyone_knows_are_answered() -> None:
    table = text_of("docs/configuration.md").partition("<!-- generated: aliases -->")[2]
    assert [name for name in WELL_KNOWN_NAMES.split() if f"`{name}`" not in table] == []


def resolved(name: str) -> Any:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


def undocumented(name: str, value: Any) -> Iterator[str]:
    """Names without a docstring: of a constant, the string after its assignment."""
    if not callable(value):
        if not assignment_is_explained(name):
            yield name
        return
    if not value.__doc__:
        yield name
    if inspect.isclass(value):
        for member, attribute in vars(value).items():
            is_code = inspect.isroutine(attribute) or isinstance(attribute, property | classmethod | staticmethod)
            if is_code and not member.startswith(("_", "model_")) and not inspect.getdoc(attribute):
                yield f"{name}.{member}"


def assignment_is_explained(name: str) -> bool:
    module, _, member = name.rpartition(".")
    source = inspect.getsource(importlib.import_module(module))
    imported = re.search(rf"from ([\w.]+) import .*\b{member}\b", source)
    tree = ast.parse(inspect.getsource(importlib.import_module(imported[1])) if imported else source)
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and member in map(ast.unparse, statement.targets):
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False
