"""`open_corpus` and the loader on text: the same tokens as `tokenize`, made once, kept, never beside the data."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_truth import Truth, files_of, joined, write_jsonl

from dali_pipes import Corpus, LoaderConfig, TokenLoader, open_corpus
from dali_pipes.errors import BackendError, ConfigError, CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.runtime import locks
from dali_pipes.text import cache, find_text_files
from dali_pipes.text.encoder import TextEncoder

EOS = 50256


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all batches that are encoded in this process."""
    sizes: list[int] = []
    encode = TextEncoder.encode

    def counted(self: TextEncoder, documents: list) -> list:  # type: ignore[type-arg]
        sizes.append(len(documents))
        return encode(self, documents)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    return sizes


def documents(corpus: Corpus) -> list[list[int]]:
    offsets = corpus.document_offsets
    assert offsets is not None
    return [part.tolist() for part in np.split(corpus.tokens(0, corpus.num_tokens), offsets[1:-1])]


def write_all_kinds(folder: Path, texts: list[str]) -> dict[str, Path]:
    """The same documents in every kind of file, in halves."""
    half = len(texts) // 2
    found = {}
    for kind in ("jsonl", "gz", "zst", "parquet"):
        target = found[kind] = folder / kind
        target.mkdir(parents=True)
        for at, part in enumerate((texts[:half], texts[half:])):
            lines = write_jsonl(folder / "lines", part, "content").read_bytes()
            if kind == "jsonl":
                (target / f"{at}.jsonl").write_bytes(lines)
            elif kind == "gz":
                (target / f"{at}.jsonl.gz").write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))
            elif kind == "zst":
                (target / f"{at}.jsonl.zst").write_bytes(zstandard.compress(lines))
            elif kind == "parquet":
                pq.write_table(pa.table({"content": part}), target / f"{at}.parquet", row_group_size=50)
    return found


def test_every_kind_gives_the_true_tokens(kept: Path, tmp_path: Path, gpt2: Path, truth: Truth) -> None:
    kinds = write_all_kinds(tmp_path / "data", truth.texts[:100])
    before = files_of(tmp_path / "data")
    for folder in kinds.values():
        with open_corpus(folder, tokenizer=gpt2, text_key="content", eos_id=EOS) as corpus:
            assert documents(corpus) == truth.with_eos(EOS, count=100)
            assert corpus.dtype == np.uint16
    assert files_of(tmp_path / "data") == before


@pytest.mark.parametrize(("name", "count"), [("text.parquet", 200), ("text_stream.arrow", 200), ("webdataset", 70)])
def test_the_samples(kept: Path, text_samples: Path, gpt2: Path, truth: Truth, name: str, count: int) -> None:
    with open_corpus(text_samples / name, tokenizer=gpt2) as corpus:
        assert documents(corpus) == truth.with_eos(EOS, count=count)
        assert corpus.eos_id == EOS  # the tokenizer's, which has one end-of-text token


def test_a_text_file_is_a_document(kept: Path, tmp_path: Path, gpt2: Path, truth: Truth) -> None:
    for at in range(12):
        (tmp_path / f"{at}.txt").write_bytes(truth.texts[at].encode())
    (tmp_path / "README.txt").write_text("no data")
    with open_corpus(tmp_path, tokenizer=gpt2) as corpus:
        # Document 7 is empty: a file of its own, and so no shard.
        assert documents(corpus) == [ids for ids in truth.with_eos(EOS, count=12) if ids]


def test_a_second_start_reads_and_makes_nothing(
    kept: Path, tmp_path: Path, gpt2: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one", "two"] * 5000)
    with open_corpus(path, tokenizer=gpt2) as first:
        fingerprint = first.fingerprint
    assert sum(encoded) == 10_000
    before = {file: file.stat().st_mtime_ns for file in kept.rglob("*")}
    monkeypatch.setattr(cache, "load_tokenizer", None)  # not even that
    with open_corpus(str(path), tokenizer=str(gpt2)) as again:
        assert again.fingerprint == fingerprint
    assert sum(encoded) == 10_000
    assert {file: file.stat().st_mtime_ns for file in kept.rglob("*")} == before


def test_other_inputs_settings_and_tokenizers_are_made_anew(
    kept: Path, tmp_path: Path, gpt2: Path, encoded: list[int]
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one", "two"])
    other = tmp_path / "other.json"
    other.write_bytes(gpt2.read_bytes() + b" ")

    def starts(tokenizer: Path = gpt2, eos_id: int | None = None) -> int:
        before = len(encoded)
        with open_corpus(path, tokenizer=tokenizer, eos_id=eos_id) as corpus:
            assert corpus.num_documents == 2
        return len(encoded) - before

    assert [starts(), starts(eos_id=7), starts(other), starts(), starts(other)] == [1, 1, 1, 0, 0]
    path.rename(tmp_path / "aside")
    shutil.copy2(tmp_path / "aside", path)  # keeps the time of the last change
    assert starts() == 0
    os.utime(path, (1, 1))
    assert [starts(), starts()] == [1, 0]
    write_jsonl(path, ["one", "six"])
    assert starts() == 1


def test_an_edit_that_no_sample_sees_is_made_anew(kept: Path, tmp_path: Path, small: Path) -> None:
    """Of the same size and name, far from the few pieces of the file that are looked at."""
    texts = ["one two three"] * 20_000
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    digests = {find_text_files(path)[0].digest}

    def third_of(number: int) -> int:
        with open_corpus(path, tokenizer=small) as corpus:
            assert corpus.num_documents == len(texts)
            return int(corpus.tokens(number * 4 + 2, 1)[0])

    seen = third_of(4321)
    data = path.read_bytes()
    at = data.index(b"three", len(data) // len(texts) * 4321)
    path.write_bytes(data[:at] + b"seven" + data[at + 5 :])
    digests.add(find_text_files(path)[0].digest)
    assert len(digests) == 1, "a sample saw the edit: this tests nothing"
    assert third_of(4321) != seen
    assert third_of(4320) == seen


def test_a_start_that_was_broken_off_goes_on(
    kept: Path, tmp_path: Path, gpt2: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(3):
        write_jsonl(tmp_path / f"in-{at}.jsonl", [f"file {at}"])
    counted = TextEncoder.encode

    def broken(self: TextEncoder, documents: list) -> list:  # type: ignore[type-arg]
        if documents[0].content == "file 2":
            raise KeyboardInterrupt
        return counted(self, documents)

    monkeypatch.setattr(TextEncoder, "encode", broken)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(tmp_path / "in-*.jsonl", tokenizer=gpt2)
    monkeypatch.setattr(TextEncoder, "encode", counted)
    with open_corpus(tmp_path / "in-*.jsonl", tokenizer=gpt2) as corpus:
        assert corpus.num_documents == 3
    assert len(encoded) == 3


def test_several_starts_at_once_make_it_once(kept: Path, tmp_path: Path, small: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [f"document {at} " * 20 for at in range(500)])
    script = tmp_path / "start.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from dali_pipes import open_corpus
            from dali_pipes.text.encoder import TextEncoder
            count, encode = [0], TextEncoder.encode
            def counted(self, documents):
                count[0] += len(documents)
                return encode(self, documents)
            TextEncoder.encode = counted
            corpus = open_corpus(sys.argv[1], tokenizer=sys.argv[2])
            print(count[0], corpus.fingerprint)
            """
        )
    )
    command = [sys.executable, str(script), str(path), str(small)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [start.communicate()[0].split() for start in starts]
    assert sorted(int(count) for count, _ in answers) == [0, 0, 500]
    assert len({fingerprint for _, fingerprint in answers}) == 1


def test_without_locks_each_process_makes_its_own(
    kept: Path, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first to be done wins; nothing is left of the other."""
    path = write_jsonl(tmp_path / "in.jsonl", ["one", "two"])
    nested: list[int] = []

    def no_lock(path: Path, *, wait: bool = True) -> tuple[None, bool]:
        return None, False

    encode = TextEncoder.encode

    def meanwhile(self: TextEncoder, documents: list) -> list:  # type: ignore[type-arg]
        if not nested:
            nested.append(1)
            open_corpus(path, tokenizer=small).close()
        return encode(self, documents)

    for module in (locks, sys.modules["dali_pipes.text.run_folder"]):
        monkeypatch.setattr(module, "lock", no_lock)
    monkeypatch.setattr(TextEncoder, "encode", meanwhile)
    with open_corpus(path, tokenizer=small) as corpus:
        assert corpus.num_documents == 2
    assert len(list(kept.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(
    kept: Path, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one"])
    kept.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"kept: .*File exists.*DALI_PIPES_CACHE"):
        open_corpus(path, tokenizer=small)
    kept.unlink()
    with pytest.MonkeyPatch.context() as patch:  # as on a file system that is mounted read-only
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ConfigError, match=r"kept: .*Permission denied.*DALI_PIPES_CACHE"):
            open_corpus(path, tokenizer=small)
    for error in (
        FileNotFoundError(2, "gone"),
        OSError(28, "No space left on device"),
        OSError(5, "Input/output error"),
    ):
        with pytest.MonkeyPatch.context() as patch:

            def fails(*arguments: object, error: OSError = error, **options: object) -> None:
                raise error

            patch.setattr(Path, "mkdir", fails)
            with pytest.raises(ConfigError, match=rf"kept: .*{error.strerror}.*DALI_PIPES_CACHE"):
                open_corpus(path, tokenizer=small)
            patch.undo()
            patch.setattr(Path, "rename", fails)
            with pytest.raises(ConfigError, match=r"kept: .*DALI_PIPES_CACHE"):
                open_corpus(path, tokenizer=small)
            assert not list(kept.rglob("*.tmp")), "an error leaves no unfinished files"
    monkeypatch.setenv("DALI_PIPES_CACHE", "/proc/x")
    with pytest.raises(ConfigError, match=r"/proc/x: .*DALI_PIPES_CACHE"):
        open_corpus(path, tokenizer=small)
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*DALI_PIPES_CACHE"):
        open_corpus(path, tokenizer=small)


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.parquet", "in.jsonl.gz", "many"])
def test_text_without_a_token_is_the_same_error_at_every_start(
    kept: Path, tmp_path: Path, small: Path, name: str
) -> None:
    path = tmp_path / name
    named = f"{path}: .* documents?, "
    if name == "many":
        path.mkdir()
        for number in range(5):
            write_jsonl(path / f"{number}.jsonl", [""] * number)
        named = f"{path}/0.jsonl, {path}/1.jsonl, {path}/2.jsonl and 2 more: .* 10 documents, 10 of them empty"
    elif name == "in.parquet":
        pq.write_table(pa.table({"text": [""]}), path)
    else:
        path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    errors = set()
    for _ in range(3):
        with pytest.raises(CorpusError) as caught:
            open_corpus(path, tokenizer=small)
        assert not isinstance(caught.value, CorpusFormatError)
        errors.add(str(caught.value))
    assert len(errors) == 1
    assert re.match(named, errors.pop())


def test_an_input_that_is_lost_meanwhile_is_no_fault_of_the_cache(
    kept: Path, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one"])
    files = find_text_files(path)
    path.unlink()
    with pytest.raises(CorpusReadError, match=r"in\.jsonl: "):
        cache.cached_tokens(files, small, None, "text", "test")


def test_text_from_a_folder_that_is_read_only(kept: Path, tmp_path: Path, small: Path) -> None:
    """No call that would write there; modes do not bind root."""
    data = tmp_path / "data"
    data.mkdir()
    path = write_jsonl(data / "in.jsonl", ["one", "two"])
    path.chmod(0o444)
    data.chmod(0o555)
    before = (data.stat().st_mtime_ns, path.stat().st_mtime_ns)
    flags = []

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(data)):
            flags.append(arguments[2])

    sys.addaudithook(audit)
    with open_corpus(data, tokenizer=small) as corpus:
        assert corpus.num_documents == 2
    data.chmod(0o755)
    assert flags
    assert not any(int(str(flag)) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flag in flags)
    assert (data.stat().st_mtime_ns, path.stat().st_mtime_ns) == before


def test_tokens_are_opened_as_they_are_with_a_tokenizer_too(kept: Path, samples: Path, tmp_path: Path) -> None:
    """The tokenizer may be there for showing text; it need not even exist."""
    folder = samples / "megatron"
    with open_corpus(folder / "gpt2_text_document", tokenizer="gone.json") as corpus:
        assert corpus.num_documents == 380
    shutil.copy(samples / "nanogpt" / "val.bin", tmp_path)
    (tmp_path / "notes.txt").write_text("a side file of token corpora")
    with open_corpus(tmp_path, tokenizer="gone.json") as corpus:
        assert corpus.format == "flat"
    assert not kept.exists()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_of_both_is_text_where_the_text_is_named(kept: Path, tmp_path: Path, gpt2: Path, kind: str) -> None:
    table = pa.table({"text": ["Hello world", "a"], "input_ids": [[1], [2, 3]], "labels": [[1], [2, 3]]})
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with open_corpus(path, tokenizer="gone.json") as corpus:
        assert documents(corpus) == [[1], [2, 3]]
    with open_corpus(path, tokenizer=gpt2, text_key="text") as corpus:
        assert documents(corpus) == [[15496, 995, EOS], [64, EOS]]


def test_text_and_tokens_together_are_refused(samples: Path, tmp_path: Path, small: Path) -> None:
    lines = write_jsonl(tmp_path / "in.jsonl", ["one"])
    with pytest.raises(CorpusError, match=r"in\.jsonl .*val\.bin"):
        open_corpus([lines, samples / "nanogpt" / "val.bin"], tokenizer=small)


def test_text_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["some text that is long enough to be seen as such"] * 3)
    with pytest.raises(CorpusFormatError, match=r"in\.jsonl: .*tokenizer"):
        open_corpus(path)
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "in.parquet")
    with pytest.raises(CorpusFormatError, match=r"text: string.*tokenizer = "):
        open_corpus(tmp_path / "in.parquet")


def test_arguments_that_text_has_no_use_for(tmp_path: Path, small: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one"])
    with pytest.raises(ConfigError, match="dtype = 'uint16'"):
        open_corpus(path, tokenizer=small, dtype="uint16")


@pytest.mark.parametrize(("package", "extra"), [("tokenizers", "text"), ("zstandard", "text"), ("pyarrow", "parquet")])
def test_a_missing_library_is_named_with_its_extra(
    kept: Path, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    lines = write_jsonl(tmp_path / "in.jsonl", ["one"]).read_bytes()
    (tmp_path / "in.jsonl.zst").write_bytes(zstandard.compress(lines))
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "in.parquet")
    name = {"tokenizers": "in.jsonl", "zstandard": "in.jsonl.zst", "pyarrow": "in.parquet"}[package]
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendError, match=rf'{package}.*: pip install "dali-pipes\[{extra}\]"'):
        open_corpus(tmp_path / name, tokenizer=small)


def test_the_loader_serves_text(kept: Path, tmp_path: Path, gpt2: Path, truth: Truth) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", truth.texts[:40])
    stream = joined(truth.with_eos(EOS, count=40))
    config = LoaderConfig(corpus=str(path), tokenizer=str(gpt2), batch_size=2, seq_len=32, shuffle=False, device="cpu")
    with TokenLoader(config) as loader:
        first = next(iter(loader))
        state = loader.state_dict()
    assert first["input_ids"].flatten().tolist() == stream[:64]
    assert first["labels"].flatten().tolist() == stream[1:65]
    with TokenLoader(config) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert next(iter(loader))["input_ids"].flatten().tolist() == stream[64:128]


def test_documents_of_text_are_known_without_a_scan(kept: Path, tmp_path: Path, gpt2: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["one two three", "", "four"])
    with TokenLoader(
        corpus=str(path), tokenizer=str(gpt2), rows="pad", batch_size=1, seq_len=8, shuffle=False, device="cpu"
    ) as loader:
        lengths = [int((batch["labels"] != -100).sum()) for batch in loader]
    assert lengths == [3, 1]


def test_the_key_of_a_text_that_is_not_read_is_refused(kept: Path, tmp_path: Path, gpt2: Path) -> None:
    """Whoever names the column of the text does not expect the ids beside it, or ids at all."""
    cases: list[tuple[Path, dict[str, Any], str]]
    both, flat, text = tmp_path / "both.parquet", tmp_path / "flat.bin", tmp_path / "text.jsonl"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]], "text": ["a b"]}), both)
    np.arange(9, dtype=np.uint16).tofile(flat)
    text.write_text('{"text": "The quick brown fox jumps over the lazy dog"}\n' * 9)
    cases = [
        (both, {}, "set tokenizer"),
        (flat, {}, "set tokenizer"),
        (flat, {"tokenizer": gpt2}, "text files"),
        (both, {"tokenizer": gpt2, "format": "parquet"}, "text files"),
    ]
    for paths, settings, advice in cases:
        with pytest.raises(ConfigError, match=f"text_key = 'text': .*{paths.name} .*{advice}"):
            open_corpus(paths, text_key="text", **settings)
        open_corpus(paths, **settings).close()
    for paths in (both, text):
        with open_corpus(paths, text_key="text", tokenizer=gpt2) as corpus:
            assert corpus.format == "megatron"
    with pytest.raises(CorpusFormatError, match=r"text\.jsonl: "):  # what is wrong with the files comes first
        open_corpus(text, text_key="text")
    with pytest.raises(CorpusReadError, match=r"absent\.parquet"):
        open_corpus(tmp_path / "absent.parquet", text_key="text", tokenizer=gpt2)
