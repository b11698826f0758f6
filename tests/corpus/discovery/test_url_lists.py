"""Files that list URIs: they stand for their lines, wherever they are, and say which line is wrong."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from range_server import PAGE, RangeServer

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.copying import copy_corpus
from dali_pipes.corpus.discovery.find_files import entries_of
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError, DaliPipesError

pytestmark = pytest.mark.needs("obstore")

NAMES = ["s_10.bin", "s_2.bin", "b c.bin"]


@pytest.fixture
def server() -> Iterator[RangeServer]:
    ids = {name: np.arange(1000 * n, 1000 * n + 900, dtype=np.uint16).tobytes() for n, name in enumerate(NAMES)}
    with RangeServer({f"d/{name}": content for name, content in ids.items()}) as server:
        server.files["d/all.urls"] = "\n".join(["# in this order", *NAMES]).encode()
        yield server


def test_a_list_stands_for_its_lines(server: RangeServer, tmp_path: Path) -> None:
    """On the web, next to its files; or here, with the addresses in full."""
    urls = [f"{server.url}/d/{name.replace(' ', '%20')}" for name in NAMES]
    (tmp_path / "here.urls").write_text("\n".join(urls))
    with open_corpus(urls) as named:
        for entry in (f"{server.url}/d/all.urls", f"{server.url}/d/all.urls?v=2", str(tmp_path / "here.urls")):
            with open_corpus(entry) as listed:
                assert listed.fingerprint == named.fingerprint
                assert [file.name for file in listed.files] == [file.name for file in named.files]
                assert np.array_equal(listed.tokens(0, 2700), named.tokens(0, 2700))
    copy_corpus(f"{server.url}/d/all.urls", tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        name: server.files[f"d/{name}"] for name in NAMES
    }
    (tmp_path / "copy" / "near.urls").write_text("\n".join(NAMES))
    with open_corpus(tmp_path / "copy" / "near.urls") as listed, open_corpus(tmp_path / "copy") as folder:
        assert listed.fingerprint == named.fingerprint
        assert len(folder.files) == 3, "the list itself is not data"


def test_the_signatures_in_a_list_are_in_no_output(server: RangeServer, tmp_path: Path) -> None:
    signed = [f"{server.url}/d/{name}?X-Amz-Signature=5f2c9a" for name in NAMES[:2]]
    (tmp_path / "a.urls").write_text("\n".join(signed))
    config = LoaderConfig(corpus=str(tmp_path / "a.urls"), batch_size=4, seq_len=32, device="cpu")
    with TokenLoader(config) as loader:
        next(iter(loader))
        shown = [config.to_toml(), repr(loader), loader.state_dict(), loader.locate(0, 0)]
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert LoaderConfig.from_file(tmp_path / "c.toml") == config, "the list is named, not what it says"
    (tmp_path / "a.urls").write_text("\n".join([signed[0], signed[0]]))
    with pytest.raises(CorpusError) as raised:
        open_corpus(tmp_path / "a.urls")
    assert "5f2c9a" not in "\n".join(map(str, [*shown, raised.value]))


LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "  ", "# comment", "#https://x/y"]),
        st.integers(0, 99).map(lambda number: f"https://h/{number}.bin"),
    ),
    max_size=12,
)


@settings(max_examples=examples(30), deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, mark: bool, last: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.urls"
    text = end.join(lines) + (end if last else "")
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    expected = [line for line in lines if line.startswith("https")]
    if expected:
        assert entries_of([str(path), "x.bin"]) == [*expected, "x.bin"]
    else:
        with pytest.raises(CorpusError, match=r"lines\.urls"):
            entries_of(str(path))


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b"# a\n\nhtps://h/a.bin\n", CorpusFormatError, ["line 3", "https"]),
        (b"s3:/b/a.bin", CorpusFormatError, ["line 1", "'s3://b/a.bin'"]),
        (b"https://h/a.bin\nhttps://h/b.urls", CorpusFormatError, ["line 2", "another list"]),
        (b"https://h/\xff.bin", CorpusFormatError, ["byte 10", "UTF-8"]),
        (b"\n" + PAGE, CorpusFormatError, ["HTML"]),
        (b"", CorpusError, ["does not name any files"]),
    ],
)
def test_a_list_that_is_none(
    server: RangeServer, tmp_path: Path, content: bytes, kind: type[DaliPipesError], said: list[str]
) -> None:
    (tmp_path / "a.urls").write_bytes(content)
    server.files["a.urls"] = content
    for entry in (str(tmp_path / "a.urls"), f"{server.url}/a.urls"):
        with pytest.raises(kind) as raised:
            open_corpus(entry)
        message = str(raised.value)
        assert all(part in message for part in (entry, *said)), message
        assert message.count("\n") == 0


def test_where_nothing_can_be_listed_the_error_says_what_to_write(server: RangeServer) -> None:
    for entry in ("d/*.bin", "d"):
        with pytest.raises(CorpusReadError, match=r"\.urls"):
            open_corpus(f"{server.url}/{entry}")
    for entry in (f"{server.url}/nope.urls", "~nobody-of-this-name/nope.urls"):
        with pytest.raises(CorpusReadError, match=r"nope\.urls"):
            open_corpus(entry)
