"""A copy of a corpus is the corpus; what was interrupted goes on, and what changed or does not fit is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer

from dali_pipes.corpus import copying, open_corpus
from dali_pipes.corpus.copying import copy_corpus
from dali_pipes.errors import ConfigError, CorpusError, CorpusReadError
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.storage import object_file, stores

pytestmark = pytest.mark.needs("obstore")

CONTENT = np.random.default_rng(0).bytes(400_000)
OF_EVERY_FAMILY = [
    "nanogpt/train.bin",
    "megatron/gpt2_text_document.bin",
    "parquet/tokens_list_i32.parquet",
    "hf/tokens/state.json",
    "mds/tokens_u16/index.json",
    "litdata/gpt2_numpy_u16/index.json",
]


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_file, "_MOST_BYTES", 20_000)
    monkeypatch.setattr(copying, "_STEP_BYTES", 50_000)


@pytest.mark.parametrize("name", OF_EVERY_FAMILY)
def test_a_copy_from_the_web_is_the_corpus(samples: Path, tmp_path: Path, name: str) -> None:
    with RangeServer.of_folder(samples) as server:
        done = copy_corpus(f"{server.url}/{name}", tmp_path / "copy")
        again = copy_corpus(f"{server.url}/{name}", tmp_path / "copy")
    assert (again.found, again.copied_bytes) == (done.files, 0)
    with open_corpus(samples / name) as original, open_corpus(tmp_path / "copy" / Path(name).name) as copied:
        assert copied.fingerprint == original.fingerprint
        assert np.array_equal(copied.tokens(0, copied.num_tokens), original.tokens(0, original.num_tokens))
        assert copied.num_documents == original.num_documents


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("memory://x/d", ["a.bin", "a.bin.loss", "below/b.bin", "c.idx", "c.bin", "manifest.json", "readme.md"]),
        ("memory://x/d/*.bin", ["a.bin", "a.bin.loss", "c.bin", "c.idx", "manifest.json"]),
        ("memory://x/d/**/b.bin", ["b.bin"]),
        ("memory://x/d/c", ["c.bin", "c.idx", "manifest.json"]),
    ],
)
def test_names_stay(tmp_path: Path, entry: str, names: list[str]) -> None:
    store = stores.memory_store()
    content = {
        f"d/{name}": name.encode() for name in ["a.bin", "below/b.bin", "c.bin", "c.idx", "a.bin.loss", "readme.md"]
    }
    content["d/manifest.json"] = b"{}"
    for name, data in content.items():
        store.put(name, data)
    try:
        copy_corpus([entry], tmp_path)
    finally:
        for name in content:
            store.delete(name)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name: content[f"d/below/{name}" if name == "b.bin" else f"d/{name}"] for name in names}


def test_an_interrupted_copy_goes_on(tmp_path: Path) -> None:
    with RangeServer({"d/a.bin": CONTENT}) as server:
        server.fault = lambda request: "403" if (request.first or 0) >= 250_000 else None
        with pytest.raises(CorpusReadError, match="403"):
            copy_corpus(f"{server.url}/d/a.bin", tmp_path)
        (part,) = tmp_path.iterdir()
        assert part.name.endswith(".part")
        assert part.read_bytes() == CONTENT[:250_000]
        with pytest.raises(CorpusError, match="unfinished"):
            open_corpus(tmp_path)
        server.fault, before = (lambda request: None), len(server.requests)
        assert copy_corpus(f"{server.url}/d/a.bin", tmp_path).copied_bytes == len(CONTENT)
        ranges = [
            (request.first, request.last + 1)
            for request in server.requests[before:]
            if request.first is not None and request.last is not None
        ]
        assert any(first == 250_000 for first, _ in ranges)
        assert all(first >= 250_000 or end - first <= 4096 for first, end in ranges), "only samples of what is there"
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.bin", CONTENT)]


def test_another_version_starts_anew(tmp_path: Path) -> None:
    with RangeServer({"a.bin": CONTENT}) as server:
        server.fault = lambda request: "403" if (request.first or 0) >= 250_000 else None
        with pytest.raises(CorpusReadError):
            copy_corpus(f"{server.url}/a.bin", tmp_path)
        server.files["a.bin"] = other = CONTENT[::-1]
        server.fault = lambda request: None
        copy_corpus(f"{server.url}/a.bin", tmp_path)
        assert (tmp_path / "a.bin").read_bytes() == other
        server.files["a.bin"] = CONTENT  # of the same size
        assert copy_corpus(f"{server.url}/a.bin", tmp_path).found == 0
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_damaged_part_is_not_kept(tmp_path: Path) -> None:
    with RangeServer({"a.bin": CONTENT}) as server:
        server.fault = lambda request: "403" if (request.first or 0) >= 250_000 else None
        with pytest.raises(CorpusReadError):
            copy_corpus(f"{server.url}/a.bin", tmp_path)
        (part,) = tmp_path.iterdir()
        part.write_bytes(bytes(250_000))
        server.fault = lambda request: None
        with pytest.raises(CorpusReadError, match="differs"):
            copy_corpus(f"{server.url}/a.bin", tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    with RangeServer({"d/a.bin": CONTENT, "e/a.bin": CONTENT}) as server:
        bad: list[tuple[Any, type[Exception], str]] = [
            (str(tmp_path), ConfigError, "local path"),
            (f"{server.url}/nope.bin", CorpusReadError, "no such file"),
        ]
        for entry, kind, said in bad:
            with pytest.raises(kind, match=said):
                copy_corpus(entry, tmp_path / "copy")
        held, _ = lock(tmp_path / "copy" / ".copy.lock")
        assert held is not None
        with pytest.raises(CorpusError, match="another process"):
            copy_corpus(f"{server.url}/d/a.bin", tmp_path / "copy")
        unlock(held)
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(CorpusError, match="cannot be written"):
            copy_corpus(f"{server.url}/d/a.bin", tmp_path / "file")
        with pytest.raises(CorpusError, match="both"):
            copy_corpus([f"{server.url}/d/a.bin", f"{server.url}/e/a.bin"], tmp_path / "copy")
