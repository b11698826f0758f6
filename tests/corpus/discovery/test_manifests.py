"""What the manifest beside the data lists has to be there: a lost mask, or index, changes what is learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import write_megatron, write_shard

from dali_pipes import TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.discovery import manifests
from dali_pipes.documents import find_documents
from dali_pipes.errors import ConfigError, CorpusFormatError, StateError
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.tools.reports import check_corpus

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
    assert str(caught.value).startswith(f"{data}.loss: is missing, but {folder / 'manifest.json'}")
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
    with pytest.raises(CorpusFormatError, match=r"00000-0000\.idx: is missing.*manifest\.json"):
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

    def watched(path: Path) -> ByteFile:
        read.append(path)
        return open_file(path)

    monkeypatch.setattr(manifests, "open_file", watched)
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


def write_flat(folder: Path, end_id: object = 9, **parts: list[int]) -> Path:
    """Flat files and the manifest that tokenize leaves beside them."""
    folder.mkdir()
    for name, ids in parts.items():
        np.array(ids, np.uint16).tofile(folder / f"{name}.bin")
    files = {f"{name}.bin": {"bytes": 2 * len(ids), "sha256": "0"} for name, ids in parts.items()}
    content = {"settings": {"format": "flat", "eos_id": end_id}, "shards": [{"files": files}]}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_the_manifest_of_flat_files_tells_what_ends_documents(tmp_path: Path) -> None:
    folder = write_flat(tmp_path / "out", a=[1, 2, 9, 3, 9], b=[4, 9])
    for named in (folder, folder / "*.bin", [folder / "b.bin"], f"{folder}/a.bin"):
        with open_corpus(named) as corpus:
            assert (corpus.eos_id, corpus.eos_id_from) == (9, folder / "manifest.json")
            with open_corpus(named, eos_id=9) as explicit:
                assert (explicit.eos_id, explicit.eos_id_from) == (9, None)
                assert explicit.fingerprint == corpus.fingerprint
    with open_corpus(folder) as corpus:
        assert find_documents(corpus).offsets.tolist() == [0, 3, 5, 7]
        assert find_documents(corpus, start_id=4).offsets.tolist() == [0, 5, 7]  # what the user says goes first
    with pytest.raises(
        ConfigError,
        match=rf"eos_id = 4: documents of {folder}/a\.bin end with id 9 according to {folder}/manifest\.json",
    ):
        open_corpus(folder, eos_id=4)


def test_a_manifest_tells_nothing_of_other_files(tmp_path: Path) -> None:
    """Of files beside those that it lists or changed since, or where it does not know what ends documents."""
    folder = write_flat(tmp_path / "out", a=[1, 2, 9])
    np.array([1, 2, 3, 4], np.uint16).tofile(folder / "more.bin")
    same, other = write_flat(tmp_path / "same", c=[7, 9]), write_flat(tmp_path / "other", 8, d=[7, 8])
    nothing = write_flat(tmp_path / "nothing", None, e=[7, 8])
    expected: list[tuple[Any, int | None]] = [
        (folder, None),
        (folder / "a.bin", 9),
        ([folder / "a.bin", same], 9),
        ([folder / "a.bin", other], None),
        ([folder / "a.bin", nothing], None),
        (nothing, None),
    ]
    for named, end_id in expected:
        with open_corpus(named) as corpus:
            assert corpus.eos_id == end_id
    with pytest.raises(ConfigError, match=r"d\.bin end with id 8"):
        open_corpus([folder / "a.bin", other], eos_id=9)
    np.array([1, 2, 3, 4], np.uint16).tofile(folder / "a.bin")
    with open_corpus(folder / "a.bin", eos_id=4) as corpus:
        assert corpus.eos_id == 4


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"settings": 3}', '{"settings": {"format": "flat", "eos_id": true}}', '{"shards": 3}']
)
def test_a_manifest_of_another_kind_tells_nothing(tmp_path: Path, content: str) -> None:
    folder = write_flat(tmp_path / "out", a=[1, 2, 9])
    (folder / "manifest.json").write_text(content)
    with open_corpus(folder) as corpus:
        assert corpus.eos_id is None


@pytest.mark.parametrize("rows", ["pack", "pad"])
def test_rows_of_documents_need_no_end_id_where_a_manifest_has_it(tmp_path: Path, rows: str) -> None:
    """States and rows are the same as with the id set, and fit both ways."""
    ids = [token for length in (3, 8, 1, 12, 5, 7, 2) for token in [*range(10, 10 + length), 9]]
    folder = write_flat(tmp_path / "out", a=ids)
    common: dict[str, Any] = {"corpus": folder, "rows": rows, "batch_size": 1, "seq_len": 8, "device": "cpu"}
    loaders = [TokenLoader(**common), TokenLoader(eos_id=9, **common)]
    whole = [[batch["input_ids"].tolist() for batch in loader] for loader in loaders]
    assert whole[0] == whole[1]
    for one, other in (loaders, reversed(loaders)):
        batches = iter(one)
        next(batches)
        state = one.state_dict()
        assert state["config"]["eos_id"] == 9
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert next(iter(other))["input_ids"].tolist() == next(batches)["input_ids"].tolist()
    with pytest.raises(StateError, match="eos_id"), TokenLoader(document_start_id=10, **common) as by_start:
        by_start.load_state_dict(state)
    for loader in loaders:
        loader.close()
