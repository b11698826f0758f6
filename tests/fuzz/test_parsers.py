"""Whatever is done to the files of any kind: an error of ours or data that agree, within the memory of the files."""

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import NAMES
from seeds import KINDS
from trial import damaged, read, seeds

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError

EXAMPLES = 12


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, bytes], Any]]:
    """Of each kind a folder for cases, the valid files, and what is in them."""
    found: dict[str, tuple[Path, dict[str, bytes], Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nvidia.dali", None)
        for kind in KINDS:
            folder = tmp_path_factory.mktemp(kind.replace(" ", "_")) / "case"
            files = seeds(kind, folder)
            found[kind] = folder, files, read(kind, folder, files)
            assert found[kind][2] is not None, kind
    return found


def check_many(
    kind: str, valid: dict[str, tuple[Path, dict[str, bytes], Any]], monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # the same batches, sooner
    folder, files, truth = valid[kind]
    refused = 0

    @settings(max_examples=examples, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal refused
        found = read(kind, folder, damaged(Random(seed), kind, files, folder))
        refused += found is None
        if KINDS[kind].is_exact:
            assert found == truth

    check()
    assert refused or KINDS[kind].is_exact or kind == "kept offsets", "damage is noticed"


@pytest.mark.parametrize("kind", KINDS)
def test_any_damage(
    kind: str, valid: dict[str, tuple[Path, dict[str, bytes], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many(kind, valid, monkeypatch, EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_damage(
    kind: str, valid: dict[str, tuple[Path, dict[str, bytes], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many(kind, valid, monkeypatch, 40 * EXAMPLES)


PLACES = {
    "saved": [("dataset_dict.json", "train"), ("train/state.json", "data-00000-of-00002.arrow")],
    "mds": [("index.json", "shard.00000.mds")],
    "mds zstd": [("index.json", "shard.00000.mds.zstd")],
    "litdata": [("index.json", "chunk-0-0.bin")],
    "litdata zstd": [("index.json", "chunk-0-0.zstd.bin")],
    "unfinished run": [("out/_tokenize/tokens-00000-0000.json", "tokens-00000-0000.bin")],
}


@pytest.mark.parametrize("kind", PLACES)
def test_names_lead_nowhere_else(kind: str, valid: dict[str, tuple[Path, dict[str, bytes], Any]]) -> None:
    """An error, and nothing outside is opened, moved or changed. Links are the user's own."""
    folder, files, _ = valid[kind]
    for index, name in PLACES[kind]:
        others = [*NAMES, f"../{folder.name}/{name}", f"./../{folder.name}/{name}", "../case", "~", "*", name + "\0"]
        for other in others:
            escaped = '"' + other.replace("{}", str(folder.parent)[1:]).replace("\\", "\\\\") + '"'
            escaped = escaped.replace("\0", "\\u0000").replace("\ud800", "\\ud800")
            content = files[index].replace(f'"{name}"'.encode(), escaped.encode())
            assert content != files[index]
            assert read(kind, folder, {**files, index: content}) is None, other
            assert sorted(os.listdir(folder.parent)) == ["case", "outside"], other


RECEIPT = "out/_tokenize/tokens-00000-0000.json"
COUNTS = b'"documents": 0, "tokens": 0, "empty": 0, "dropped": 0'
REGRESSIONS = [
    ("saved", "dataset_dict.json", b'{"splits": ["a\\u0000b"]}'),
    ("saved", "dataset_dict.json", b'{"splits": ["%s"]}' % (b"x" * 300)),
    ("saved", "train/state.json", b'{"_data_files": [{"filename": "a\\ud800"}]}'),
    ("saved", "train/state.json", b'{"_data_files": [{"filename": "a\\\\b"}]}'),
    ("unfinished run", "out/_tokenize/plan.json", b"[" * 100_000),
    ("unfinished run", "out/_tokenize/plan.json", b'{"settings": [], "inputs": {}}'),
    ("unfinished run", RECEIPT, b""),
    ("unfinished run", RECEIPT, b"[]"),
    ("unfinished run", RECEIPT, b'{"files": {}}'),
    ("unfinished run", RECEIPT, b'{"files": {}, %s, "end": 0, "last": 1}' % COUNTS),
    ("unfinished run", RECEIPT, b'{"files": {"plan.json": {}}, %s, "end": 0, "last": true}' % COUNTS),
    ("unfinished run", RECEIPT, b'{"files": {"tokens-00000-0000./../a": {}}, %s, "end": 0, "last": true}' % COUNTS),
    ("finished run", "out/manifest.json", b'{"settings": {}, "inputs": [{}]}'),
    ("finished run", "out/manifest.json", b'{"settings": {}, "inputs": 5}'),
    ("finished run", "out/manifest.json", b'{"settings": {}, "inputs": [], %s, "shards": [[]]}' % COUNTS),
    ("finished run", "out/manifest.json", b'{"settings": {}, "inputs": [], %s, "shards": NaN}' % COUNTS),
]


@pytest.mark.parametrize(("kind", "name", "content"), REGRESSIONS)
def test_what_was_found_before(
    kind: str, name: str, content: bytes, valid: dict[str, tuple[Path, dict[str, bytes], Any]]
) -> None:
    folder, files, _ = valid[kind]
    assert name in files
    assert read(kind, folder, {**files, name: content}) is None


def test_compressed_buffers_may_not_claim_more_than_they_can_hold(
    valid: dict[str, tuple[Path, dict[str, bytes], Any]],
) -> None:
    """Memory would be taken for it. Each begins with the bytes that come of it, before a frame of Zstandard."""
    folder, files, _ = valid["arrow zstd"]
    data = files["a.arrow"]
    frames = [at for at in range(8, len(data)) if data[at : at + 4] == b"\x28\xb5\x2f\xfd"]
    assert frames
    for at in frames:
        for claim in (2**28, 2**40, 2**62):
            changed = data[: at - 8] + claim.to_bytes(8, "little") + data[at:]
            assert read("arrow zstd", folder, {"a.arrow": changed}) is None
    (folder / "a.arrow").write_bytes(changed)
    with pytest.raises(CorpusFormatError, match=r"claim 4,611,686,018,4[0-9,]+ bytes"):
        open_corpus(folder)
