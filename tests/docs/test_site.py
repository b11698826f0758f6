"""The manual builds as a site, strictly, and that site asks nothing of the network."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from manual import ROOT

LOADED_LATER = re.compile(r"""(?:src|href)=["']?https?://[^"' >]+\.(?:js|css|woff2?)""")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The site, built as `make docs` builds it, into another folder."""
    pytest.importorskip("zensical", reason="zensical is not installed: the extra `docs` brings it")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("CONTRIBUTING.md", "dali_pipes", "operators"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False), folder / "site"


def test_it_builds_strictly(built: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, site = built
    assert ended.returncode == 0, ended.stdout + ended.stderr
    navigation = re.findall(r": (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(navigation) == len(list((ROOT / "docs").rglob("*.md")))
    for page in navigation:
        assert (site / ("" if page == "index" else page) / "index.html").is_file(), page


def test_it_asks_nothing_of_the_network(built: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, site = built
    found = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert found
    assert [asked for text in found for asked in LOADED_LATER.findall(text)] == []
    assert not any('class="mermaid"' in text for text in found), "mermaid is loaded from the network; draw as SVG"


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe", reason="griffe is not installed: the extra `docs` brings it")
    functions = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))
    docstring = (
        "rows: a summary, 2**63.\n\nbad, out: what\n    `2**3` and 2**4\nseq_len: T\n\nNote: prose\n\n    code: 2**5"
    )
    expected = (
        r"rows: a summary, 2\*\*63.|- **bad, out**: what `2**3` and 2\*\*4|- **seq_len**: T|Note: prose|    code: 2**5"
    )
    assert re.sub("\n+", "|", functions["with_lists"](docstring)) == expected


def test_public_names_are_on_the_site(built: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, site = built
    text = (site / "reference/loader/index.html").read_text(encoding="utf-8")
    for name in ("TokenLoader", "TokenLoader.state_dict", "TokenLoader.locate", "RowLocation"):
        assert f'id="dali_pipes.{name}"' in text, name
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["theme"]["font"] is False
