"""Patterns name what `glob.glob` names, except that a folder that cannot be listed is never passed over."""

import errno
import glob
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dali_pipes import open_corpus
from dali_pipes.corpus.discovery.globs import matches_of
from dali_pipes.errors import CorpusReadError

NAMES = ["a", "b.bin", "c1.bin", ".hidden", "c[1]"]
PARTS = ["*", "**", "?", "a", "*.bin", "c[0-9].bin", ".*", "b.bin", "[!a]*", "c[[]1]"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three levels of every name as a folder, and a file beside each."""
    top = tmp_path_factory.mktemp("tree")

    def fill(folder: Path, levels: int) -> None:
        for name in NAMES:
            (folder / f"f_{name}").write_bytes(b"")
            if levels:
                (folder / name).mkdir()
                fill(folder / name, levels - 1)
            else:
                (folder / name).write_bytes(b"")

    fill(top, 2)
    (top / "broken").symlink_to(top / "nowhere")
    return top


@given(parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=4))
@example(parts=["*", "*", "a", "**"])
def test_the_same_as_glob(tree: Path, parts: list[str]) -> None:
    pattern = tree.joinpath(*parts)
    named = glob.glob(str(pattern), recursive=True)
    # Python 3.11 takes a file `a` for a folder in `a/**` and names it `a/`; later ones do not, nor does a shell.
    expected = {os.path.normpath(path) for path in named if not path.endswith(os.sep) or os.path.isdir(path)}
    found = [str(path) for path in matches_of(pattern)]
    assert set(found) == expected
    assert len(found) == len(set(found))


def test_links_to_folders(tmp_path: Path) -> None:
    """Followed, but not back to where they lie in: the same file would be there many times."""
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("data/x.bin", "data/a/y.bin", "elsewhere/z.bin"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data")
    found = sorted(str(path.relative_to(tmp_path / "data")) for path in matches_of(tmp_path / "data" / "**" / "*.bin"))
    assert found == ["a/y.bin", "linked/z.bin", "x.bin"]


@pytest.mark.parametrize("pattern", ["*/*.bin", "**/*.bin", "**"])
@pytest.mark.parametrize("times", [1, 99])
def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, times: int
) -> None:
    """Tried again where that may help; an error where it does not, and never half of the data."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        np.arange(50, dtype=np.uint16).tofile(tmp_path / name / "x.bin")
    real, left = os.scandir, [times]

    def failing(path: Any) -> Any:
        if Path(path).name == "two" and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    monkeypatch.setattr(os, "scandir", failing)
    if times == 1:
        with open_corpus(str(tmp_path / pattern), read_retries=1) as corpus:
            assert (corpus.num_tokens, corpus.read_retries) == (100, 1)
    else:
        with pytest.raises(CorpusReadError, match=r"two: cannot list this folder: Stale"):
            open_corpus(str(tmp_path / pattern), read_retries=1)


def test_a_look_up_that_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "x.bin")
    real, left = os.stat, [1]

    def failing(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).endswith("x.bin") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "stat", failing)
    with open_corpus(str(tmp_path / "x.bin"), read_retries=1) as corpus:
        assert (corpus.num_tokens, corpus.read_retries) == (50, 1)
