"""Names of files that are not UTF-8, and locales that are not: the same ids and manifests, or an error in words."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_text_tables import make_tar

from dali_pipes import LoaderConfig, TokenLoader, open_corpus
from dali_pipes.corpus.discovery.manifests import MANIFEST
from dali_pipes.text import find_text_files

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN, CHINESE = b"caf\xe9", "\u65e5\u672c".encode()


def write_arrow_file(path: Path, text: str) -> None:
    with path.open("wb") as file, pa.ipc.new_file(file, pa.schema([("text", pa.string())])) as out:
        out.write_table(pa.table({"text": [text]}))


def write_parquet_file(path: Path, text: str) -> None:
    with path.open("wb") as file:
        pq.write_table(pa.table({"text": [text]}), file)


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "txt": lambda path, text: path.write_text(text),
    "jsonl": lambda path, text: path.write_text(json.dumps({"text": text})),
    "csv": lambda path, text: path.write_text(f"text\n{text}\n"),
    "parquet": write_parquet_file,
    "arrow": write_arrow_file,
    "tar": lambda path, text: make_tar(path, [("a.txt", text.encode())]),
}


def named(folder: Path, stem: bytes, suffix: str) -> Path:
    return Path(os.fsdecode(os.fsencode(folder) + b"/" + stem + b"." + suffix.encode()))


def run_tokenize(
    source: Path, out: Path, small: Path, environment: dict[str, str], *options: bytes
) -> subprocess.CompletedProcess[bytes]:
    command = [
        sys.executable,
        "-m",
        "dali_pipes",
        "tokenize",
        str(source),
        "--tokenizer",
        str(small),
        "--out",
        str(out),
    ]
    typed = [*map(os.fsencode, command), *options]
    return subprocess.run(typed, capture_output=True, env={**os.environ, **environment}, check=False)


def manifest_of(source: Path, out: Path, small: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = run_tokenize(source, out, small, environment)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return json.loads((out / MANIFEST).read_bytes().decode("utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("stem", [LATIN, CHINESE])
def test_every_kind_of_text_is_read_by_any_name(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stem: bytes
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "kept"))
    WRITERS[kind](named(tmp_path, stem, kind), "one two")
    WRITERS[kind](tmp_path / f"plain.{kind}", "one two")
    with open_corpus(named(tmp_path, stem, kind), tokenizer=small) as corpus:
        found = corpus.tokens(0, corpus.num_tokens).tolist()
    with open_corpus(tmp_path / f"plain.{kind}", tokenizer=small) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == found


@pytest.mark.parametrize("stem", [LATIN, CHINESE])
def test_a_run_of_another_locale_is_the_same_run(tmp_path: Path, small: Path, stem: bytes) -> None:
    """The manifest has the name as text where it is UTF-8, and an escape for each byte where it is not."""
    source = named(tmp_path, stem, "jsonl")
    source.write_text('{"text": "one"}\n')
    first = manifest_of(source, named(tmp_path, b"out" + stem, "d"), small, ASCII)
    assert manifest_of(source, named(tmp_path, b"out" + stem, "d"), small, {}) == first
    assert first["inputs"][0]["name"] == (stem + b".jsonl").decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("option", ["--separator", "--text-key"])
def test_what_is_typed_is_utf8_in_any_locale_or_refused(tmp_path: Path, small: Path, option: str) -> None:
    (tmp_path / "a.txt").write_text("one\u65e5two", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"\u65e5": "one"}', encoding="utf-8")
    source = tmp_path / ("a.txt" if option == "--separator" else "a.jsonl")
    for value, code in (("\u65e5".encode(), 0), (b"\xe9", 2)):
        done = run_tokenize(source, tmp_path / f"out{code}", small, ASCII, option.encode(), value)
        assert done.returncode == code, done.stderr
        assert (b"UTF-8" in done.stderr) == bool(code)


def test_the_order_of_a_folder_is_that_of_any_locale(tmp_path: Path) -> None:
    for stem in (LATIN, CHINESE, "\uff21".encode(), "\U0001f642".encode(), b"z10", b"z9", b"caf"):
        named(tmp_path, stem, "txt").write_text("one")
    here = [os.fsencode(file.path) for file in find_text_files(tmp_path)]
    script = (
        "import os, sys; from dali_pipes.text import find_text_files; "
        "sys.stdout.buffer.write(b'|'.join(os.fsencode(file.path) for file in find_text_files(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, env={**os.environ, **ASCII}, check=True
    )
    assert done.stdout.split(b"|") == here


def test_a_loader_takes_any_name_and_its_configuration_is_text(tmp_path: Path) -> None:
    path = named(tmp_path, LATIN, "bin")
    path.write_bytes(bytes(range(200)))
    config = LoaderConfig(corpus=str(path), batch_size=1, seq_len=8, device="cpu", dtype="uint8", quiet=True)
    config.to_toml()
    with TokenLoader(config) as loader:
        assert len(list(loader)) == len(loader)
        json.dumps(loader.state_dict()).encode("utf-8")
