"""Runs that write to an object store: the bytes of a local run, after a stop at every step; and what is refused."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus_truth import CharacterEncoder, files_of, run, words_tokenizer, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from typer.testing import CliRunner

from dali_pipes import open_corpus
from dali_pipes.corpus.copying import copy_corpus
from dali_pipes.errors import BackendError, ConfigError, CorpusError, CorpusWriteError
from dali_pipes.storage import stores
from dali_pipes.storage.retries import StoreError
from dali_pipes.text import TokenizeConfig, publish_shards, tokenize_shard
from dali_pipes.text.run_in_store import RunInStore
from dali_pipes.tools.cli import app
from dali_pipes.uris import Uri

pytestmark = pytest.mark.needs("obstore")

OUT = "memory://bucket/a/tokens"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """The store of `memory://`, emptied after the test."""
    yield stores.memory_store()
    empty()


def empty() -> None:
    for name in contents():
        stores.memory_store().delete(name)


def contents(prefix: str = "") -> dict[str, bytes]:
    """Every object below a prefix, by its name after it."""
    store = stores.memory_store()
    names = [str(one["path"]) for some in store.list() for one in some]
    return {name.removeprefix(prefix): bytes(store.get(name).bytes()) for name in names if name.startswith(prefix)}


def result() -> dict[str, bytes]:
    """The output as `files_of` gives it for a folder."""
    found = contents("a/tokens/")
    if "manifest.json" in found:
        manifest = json.loads(found["manifest.json"])
        del manifest["paths"]
        found["manifest.json"] = json.dumps(manifest).encode()
    return found


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    draw = random.Random(7)
    (tmp_path / "in").mkdir()
    for number in range(4):
        texts = ["".join(draw.choices("abc !é\n", k=draw.choice([0, 1, 5, 30]))) for _ in range(8)]
        write_jsonl(tmp_path / "in" / f"in-{number}.jsonl", [] if number == 2 else [*texts, "drop"])
    return tmp_path / "in"


@pytest.mark.parametrize("format", ["flat", "megatron"])
def test_the_bytes_are_those_of_a_folder(inputs: Path, tmp_path: Path, format: str) -> None:
    encoder = CharacterEncoder(has_mask=True)
    local = run(inputs, tmp_path / "out", encoder, format=format)
    assert run(inputs, OUT, encoder, format=format) == local
    assert result() == files_of(tmp_path / "out")
    assert run(inputs, OUT, encoder, format=format) == local, "finished, so nothing is done"
    with open_corpus(tmp_path / "out") as one, open_corpus(OUT) as other:
        assert other.tokens(0, other.num_tokens).tolist() == one.tokens(0, one.num_tokens).tolist()
        assert other.fingerprint == one.fingerprint
        assert other.mask_digests == one.mask_digests != ()


LETTERS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(LETTERS, max_size=8), min_size=1, max_size=4), limit=st.integers(1, 30), data=st.data())
def test_any_texts_in_any_parts(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], limit: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "in").mkdir()
    for number, texts in enumerate([*files, ["a"]]):
        write_jsonl(folder / "in" / f"in-{number}.jsonl", texts)
    run(folder / "in", folder / "out", shard_tokens=limit)
    count = data.draw(st.integers(1, 4))
    empty()
    for part in data.draw(st.permutations(range(count))):
        summary = run(folder / "in", OUT, shard=(part, count), shard_tokens=limit)
    assert summary.missing == 0
    assert result() == files_of(folder / "out")


class Stopped(BaseException):
    """A process that dies."""


def stop_at(patch: pytest.MonkeyPatch, event: int) -> Callable[[], bool]:
    """Before the `event`-th change of the store the process dies. The function says whether it has."""
    events = 0

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            nonlocal events
            events += 1
            if events == event:
                raise Stopped
            change(*arguments, **options)

        return call

    for name in ("put", "delete"):
        patch.setattr(stores, name, counted(getattr(stores, name)))
    return lambda: events >= event


def test_a_run_that_dies_before_any_change_continues(inputs: Path, tmp_path: Path) -> None:
    """Until its end, no reader takes it for a corpus, and whatever is there is as it will be at the end."""
    encoder = CharacterEncoder(has_mask=True)
    run(inputs, tmp_path / "out", encoder, shard_tokens=150)
    whole, event, has_died = files_of(tmp_path / "out"), 0, True
    while has_died:
        event += 1
        empty()
        with pytest.MonkeyPatch.context() as patch:
            died = stop_at(patch, event)
            try:
                run(inputs, OUT, encoder, shard_tokens=150)
            except Stopped:
                assert died()
            has_died = died()
        found = result()
        assert all(whole[name] == data for name, data in found.items() if not name.startswith("_tokenize/"))
        if "manifest.json" not in found:
            for paths in (OUT, f"{OUT}/*.bin") if any(name.endswith(".bin") for name in found) else (OUT,):
                with pytest.raises(CorpusError):
                    open_corpus(paths)
        run(inputs, OUT, encoder, shard_tokens=150)
        assert result() == whole
        open_corpus(OUT).close()
    assert event > 15


def test_an_unfinished_local_run_is_named(inputs: Path, tmp_path: Path) -> None:
    run(inputs, tmp_path / "out", shard=(0, 2))
    with pytest.raises(CorpusError, match=r"out: .*dali-pipes tokenize.*--shard"):
        open_corpus(tmp_path / "out")


def test_an_unfinished_run_is_named(inputs: Path, tmp_path: Path) -> None:
    """And so is its copy."""
    run(inputs, OUT, shard=(0, 2))
    copy_corpus(OUT, tmp_path / "copy")
    for path in (tmp_path / "copy", str(tmp_path / "copy" / "*.bin")):
        with pytest.raises(CorpusError, match=r"copy: .*dali-pipes tokenize.*not finished"):
            open_corpus(path)
    for paths in (OUT, f"{OUT}/*.bin", "memory://bucket/**/*.bin"):
        with pytest.raises(CorpusError, match=rf"{OUT}: .*dali-pipes tokenize.*not finished"):
            open_corpus(paths)


def test_two_processes_with_the_same_part(inputs: Path, tmp_path: Path) -> None:
    """Without locks both do it: one in the middle of the other."""
    nested: list[int] = []

    class Twice(CharacterEncoder):
        def encode(self, documents: Any) -> Any:
            if not nested:
                nested.append(1)
                run(inputs, OUT)
            return super().encode(documents)

    run(inputs, OUT, Twice())
    run(inputs, tmp_path / "out")
    assert result() == files_of(tmp_path / "out")


def test_a_run_that_is_published_while_another_process_begins(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet(self: RunInStore) -> None:
        monkeypatch.undo()
        run(inputs, OUT)

    monkeypatch.setattr(RunInStore, "manifest", not_yet)
    assert run(inputs, OUT) == run(inputs, tmp_path / "out")
    assert result() == files_of(tmp_path / "out")


def test_other_settings_and_other_files_are_refused(inputs: Path, memory: Any) -> None:
    run(inputs, OUT, shard=(0, 2))
    with pytest.raises(ConfigError, match=rf"{OUT}: .*unfinished.*shard_tokens: was 40, is 41"):
        run(inputs, OUT, shard_tokens=41)
    run(inputs, OUT)
    with pytest.raises(ConfigError, match=rf"{OUT}: .*finished.*shard_tokens: was 40, is 41"):
        run(inputs, OUT, shard_tokens=41)
    memory.put("b/something.bin", b"1234")
    with pytest.raises(ConfigError, match=r"memory://bucket/b: .*something\.bin"):
        run(inputs, "memory://bucket/b")


@pytest.mark.parametrize("change", ["gone", "short"])
def test_what_was_uploaded_is_looked_at(inputs: Path, memory: Any, change: str) -> None:
    run(inputs, OUT, shard=(0, 2))
    if change == "gone":
        memory.delete("a/tokens/tokens-00000-0000.bin")
    else:
        memory.put("a/tokens/tokens-00000-0000.bin", b"1")
    with pytest.raises(CorpusWriteError, match=r"tokens-00000-0000\.bin"):
        run(inputs, OUT, shard=(1, 2))
    assert "a/tokens/manifest.json" not in contents()


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("https://someone:s3cr3t@host/tokens", r"https://\*\*\*@host/tokens: https://"),
        ("hf://datasets/me/tokens", "hf://datasets/me/tokens: hf://"),
        ("memory://bucket", "memory://bucket: .*bucket"),
        ("s4://bucket/tokens", "s4"),
        ("s3:/bucket/tokens", "s3://bucket/tokens"),
    ],
)
def test_where_nothing_can_be_written(inputs: Path, out: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        run(inputs, out)
    assert "s3cr3t" not in str(raised.value)


def test_a_store_that_refuses(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: Uri, content: object, *, new: bool = False) -> None:
        raise StoreError(13, "access is denied (403 Forbidden)")

    monkeypatch.setattr(stores, "put", refuse)
    with pytest.raises(CorpusWriteError, match=rf"{OUT}/_tokenize/plan\.json: cannot be written: .*403"):
        run(inputs, OUT)


def test_passing_failures_are_tried_again(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, chance = stores.put, random.Random(3)

    def fails(uri: Uri, content: Any, *, new: bool = False) -> None:
        if chance.random() < 0.3:
            if chance.random() < 0.5:
                put(uri, content, new=new)  # and the answer is lost
            raise StoreError(5, "503 Service Unavailable", busy=True)
        put(uri, content, new=new)

    monkeypatch.setattr(stores, "put", fails)
    run(inputs, OUT)
    monkeypatch.undo()
    run(inputs, tmp_path / "out")
    assert result() == files_of(tmp_path / "out")


def test_shards_as_library_calls(tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs, tokenizer and output by URI; published by the last shard, or by a call of its own."""
    words_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, {"<|endoftext|>": 3})
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", ["a b"] * (number + 1))
        memory.put(f"in/{number}.jsonl", (tmp_path / f"{number}.jsonl").read_bytes())
    memory.put("t/tokenizer.json", (tmp_path / "tokenizer.json").read_bytes())
    names = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    summary = tokenize_shard(TokenizeConfig(names, str(tmp_path / "tokenizer.json"), str(tmp_path / "out")))
    config = TokenizeConfig(["memory://bucket/in/*.jsonl"], "memory://bucket/t", OUT)
    parts = [tokenize_shard(config, part, 2, publish=False) for part in range(2)]
    assert [(part.documents, part.missing) for part in parts] == [(4, 0), (2, 0)]
    assert "a/tokens/manifest.json" not in contents()
    assert publish_shards(config) == summary
    local = files_of(tmp_path / "out")
    assert {name: data for name, data in result().items() if name.endswith((".bin", ".idx"))} == {
        name: data for name, data in local.items() if name != "manifest.json"
    }
    arguments = ["tokenize", *config.inputs, "--tokenizer", config.tokenizer, "--out", "memory://bucket/b/tokens"]
    printed = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert printed.exit_code == 0, printed.stderr
    assert contents("b/tokens/") == contents("a/tokens/")
    assert publish_shards(TokenizeConfig(config.inputs, config.tokenizer, "memory://bucket/c/x")).missing == 3


def test_the_missing_package_is_named(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(BackendError, match=r'pip install "dali-pipes\[remote\]"'):
        run(inputs, OUT)
