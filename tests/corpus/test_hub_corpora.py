"""hf:// over a stand-in for the Hub: its API lists files, and reading them leads to another host."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from range_server import RangeServer

from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.storage.hub import list_entries
from dali_pipes.storage.retries import StoreError
from dali_pipes.uris import Uri

pytestmark = pytest.mark.needs("obstore")

NAMES = ["s_1.bin", "s_2.bin", "s_10.bin", "README.md", "below/s_3.bin"]
API, FILES = "api/datasets/org/name/tree/main", "datasets/org/name/resolve/main"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RangeServer, RangeServer]]:
    """The Hub, and the host of the content; the same files are in `tmp_path`."""
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.arange(number, 30_000, 7, dtype=np.uint16).tofile(tmp_path / name)
    entries = [{"type": "directory", "oid": "t", "size": 0, "path": "d/below"}]
    entries += [
        {"type": "file", "oid": str(number), "size": (tmp_path / name).stat().st_size, "path": f"d/{name}"}
        for number, name in enumerate(NAMES)
    ]
    flat = [entry for entry in entries if str(entry["path"]).count("/") == 1]
    with RangeServer.of_folder(tmp_path) as content, RangeServer({}) as server:
        server.files[f"{API}/d"] = json.dumps(flat).encode()
        server.files[f"{API}/d?recursive=true"] = json.dumps(entries).encode()
        elsewhere = content.url.replace("127.0.0.1", "localhost")
        server.redirects = {f"{FILES}/d/{name}": f"{elsewhere}/{name}" for name in NAMES}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "s3cr3t")
        yield server, content


@pytest.mark.parametrize("pattern", ["", "/*.bin", "/s_2.bin", "/**/s_*.bin"])
def test_files_folders_and_patterns(hub: tuple[RangeServer, RangeServer], tmp_path: Path, pattern: str) -> None:
    with open_corpus(f"{tmp_path}{pattern}") as local, open_corpus(f"hf://datasets/org/name/d{pattern}") as remote:
        assert [file.name for file in remote.files] == [file.name for file in local.files]
        assert remote.fingerprint == local.fingerprint
        assert np.array_equal(remote.tokens(0, remote.num_tokens), local.tokens(0, local.num_tokens))


def test_the_token_goes_to_the_hub_alone(hub: tuple[RangeServer, RangeServer]) -> None:
    server, content = hub
    with open_corpus("hf://datasets/org/name/d") as corpus:
        corpus.tokens(0, 100)
        assert "s3cr3t" not in repr([corpus, corpus.files, corpus.notes])
    assert {request.authorization for request in server.requests} == {"Bearer s3cr3t"}
    assert content.requests
    assert {request.authorization for request in content.requests} == {None}


def test_a_revision_and_what_is_not_there(hub: tuple[RangeServer, RangeServer]) -> None:
    server, _ = hub
    server.redirects = {name.replace("/main/", "/v2/"): to for name, to in server.redirects.items()}
    assert [file.name for file in find_files("hf://datasets/org/name@v2/d/s_1.bin")] == ["s_1.bin"]
    with pytest.raises(CorpusReadError, match="no such object"):
        find_files("hf://datasets/org/name/d/s_1.bin")
    with pytest.raises(CorpusReadError, match="no file matches"):
        find_files("hf://datasets/org/other/*.bin")
    with pytest.raises(ConfigError, match="datasets/ORGANIZATION/NAME"):
        find_files("hf://org/name")
    server.fault = lambda request: "403" if request.path.startswith("api") else None
    with pytest.raises(CorpusReadError, match=r"403.*HF_TOKEN"):
        find_files("hf://datasets/org/name/d/*.bin")


@pytest.mark.parametrize("status", ["429", "503"])
def test_the_pause_that_the_hub_asks_for_is_known(hub: tuple[RangeServer, RangeServer], status: str) -> None:
    server, _ = hub
    server.fault = lambda request: status
    with pytest.raises(StoreError) as raised:
        list(list_entries(Uri("hf://datasets/org/name/d"), deep=False))
    assert (raised.value.busy, raised.value.after_s) == (True, 1 if status == "429" else 0)
