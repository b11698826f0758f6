"""What the manifest beside the data lists has to be there: a lost mask, or index, changes what is learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import write_megatron, write_shard

from dali_pipes.corpus import manifests, open_corpus
from dali_pipes.corpus.reader import OpenFile
from dali_pipes.errors import CorpusFormatError
from dali_pipes.reports import check_corpus

IDS = np.arange(1, 40, dtype=np.uint16)


def make(folder: Path, format: str = "megatron", count: int = 3) -> Path:
    """Shards with masks, and a manifest of all files, as `tokenize --chat` leaves them."""
    folder.mkdir()
    for number in range(count):
        path = write_shard(folder / f"tokens-{number:05d}-0000.bin", IDS, format)
        path.with_name(f"{path.name}.loss").write_bytes(bytes([1] * len(IDS)))
    shards = [
        {"files": {path.name: {"bytes": path.stat().st_size, "sha256": "0" * 64}}} for path in sorted(folder.iterdir())
    ]
    (folder / "manifest.json").write_text(json.dumps({"made_by": "a test", "shards": shards}))
    return folder


@pytest.mark.parametrize("format", ["megatron", "flat"])
@pytest.mark.parametrize("lost", [[1], [0, 1, 2]])
@pytest.mark.parametrize("way", ["folder", "pattern", "file"])
def test_a_mask_that_is_lost_is_named(tmp_path: Path, format: str, lost: list[int], way: str) -> None:
    folder = make(tmp_path / "data", format)
    for number in lost:
        (folder / f"tokens-{number:05d}-0000.bin.loss").unlink()
    data = folder / f"tokens-{lost[0]:05d}-0000.bin"
    named: Any = {"folder": folder, "pattern": str(folder / "*.bin"), "file": data}[way]
    with pytest.raises(CorpusFormatError) as caught:
        open_corpus(named)
    assert str(caught.value).startswith(f"{data}.loss: is listed by {folder / 'manifest.json'}, but is not there")
    with open_corpus(named, loss_masks=[]) as corpus:
        assert corpus.loss_mask is None
    if len(lost) == 1:
        with open_corpus(folder / "tokens-00000-0000.bin") as corpus:  # a file that has its own
            assert corpus.loss_mask is not None


def test_masks_that_are_named_are_not_looked_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "data")
    (tmp_path / "masks").mkdir()
    for path in folder.glob("*.loss"):
        path.rename(tmp_path / "masks" / path.name)
    with open_corpus(folder, loss_masks=tmp_path / "masks") as corpus:
        assert corpus.loss_mask is not None


def test_an_index_that_is_lost_is_named(tmp_path: Path) -> None:
    """All of them: where some are left, the files are of two formats. uint16 ids alone look like any others."""
    folder = make(tmp_path / "data")
    for path in folder.glob("*.idx"):
        path.unlink()
    with pytest.raises(CorpusFormatError, match=r"00000-0000\.idx: is listed by .*manifest\.json, but is not there"):
        open_corpus(folder)
    with open_corpus(folder, format="flat") as corpus:
        assert corpus.num_documents is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"shards": 3}', '{"shards": [{"files": ["a.bin.loss"]}]}', "\xff"])
def test_what_is_no_manifest_lists_nothing(tmp_path: Path, content: str) -> None:
    write_megatron(tmp_path / "a", [IDS])
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    with open_corpus(tmp_path) as corpus:
        assert corpus.loss_mask is None


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "data", "flat")
    read: list[Path] = []

    class Watched(OpenFile):
        def __init__(self, path: Path) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(manifests, "OpenFile", Watched)
    open_corpus(folder).close()
    assert read == [folder / "manifest.json"]


def test_check_lists_it_once_and_checks_the_others(tmp_path: Path) -> None:
    folder = make(tmp_path / "data")
    lost = folder / "tokens-00001-0000.bin.loss"
    lost.unlink()
    report = check_corpus([str(folder)])
    assert [problem.message for problem in report.problems if str(lost) in problem.message] == [
        report.problems[0].message
    ]
    assert report.tokens == 2 * len(IDS)
