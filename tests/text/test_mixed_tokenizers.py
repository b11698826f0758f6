"""Sources of a mixture that manifests state to be of different vocabularies are refused; those of the same are not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_truth import words_tokenizer, write_jsonl
from typer.testing import CliRunner

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.errors import ConfigError
from dali_pipes.tools.cli import app

WORDS = {"?": 0, "a": 1, "b": 2, "c": 3}
END = {"<|endoftext|>": 4}
TEXTS = ["a b c a", "b b", "c a b a c"] * 9


def tokenizer(folder: Path, name: str, words: Mapping[str, int] = WORDS, **more: Any) -> Path:
    special = more.pop("special", END)
    return words_tokenizer(folder / f"{name}.json", dict(words), special, has_special=False, **more)


def tokenized(folder: Path, name: str, with_tokenizer: Path, format: str = "megatron") -> Path:
    """A finished folder of `dali-pipes tokenize`."""
    source, out = folder / f"{name}.jsonl", folder / name
    if not source.exists():
        write_jsonl(source, TEXTS)
    said = ["tokenize", source, "--tokenizer", with_tokenizer, "--out", out, "--format", format]
    result = CliRunner().invoke(app, [str(word) for word in said])
    assert result.exit_code == 0, result.output
    return out


def state_only(folder: Path, sha256: str) -> None:
    """Make a manifest that of an earlier release, which states the file of the tokenizer alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["tokenizer"] = sha256
    manifest["settings"].pop("vocabulary", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rows(sources: Mapping[str, Any]) -> int:
    tables = {name: {"weight": 1, **source} for name, source in sources.items()}
    with TokenLoader(mixture=tables, total_rows=8, batch_size=4, seq_len=8, quiet=True, device="cpu") as loader:
        return sum(len(batch["input_ids"]) for batch in loader)


def refused(sources: Mapping[str, Any], *facts: object) -> None:
    with pytest.raises(ConfigError) as error:
        rows(sources)
    assert str(error.value).startswith("mixture: ")
    assert [fact for fact in map(str, facts) if fact not in str(error.value)] == []


def test_other_vocabularies_are_refused_and_copies_are_not(tmp_path: Path) -> None:
    first = tokenizer(tmp_path, "first")
    other = tokenizer(tmp_path, "other", {"?": 0, "b": 1, "a": 2, "c": 3})
    copy = tokenizer(tmp_path, "copy", truncation={"max_length": 9, "strategy": "LongestFirst", "stride": 0})
    chat = tokenizer(tmp_path, "chat", special={**END, "<|user|>": 5})
    web, code = tokenized(tmp_path, "web", first), tokenized(tmp_path, "code", other)
    for same in (tokenized(tmp_path, "copied", copy, "flat"), tokenized(tmp_path, "chatted", chat)):
        assert rows({"web": {"corpus": web}, "more": {"corpus": same}}) == 8
    with open_corpus(web) as of_web, open_corpus(code) as of_code:
        digests = [corpus.tokenizers[0].sha256[:12] for corpus in (of_web, of_code)]
    assert digests[0] != digests[1]
    both = {"web": {"corpus": web}, "code": {"corpus": code}}
    refused(both, "'web'", "'code'", *digests, web / "manifest.json", code / "manifest.json")
    refused({"all": {"corpus": [web, code]}}, "'all'", *digests)
    text = {"corpus": write_jsonl(tmp_path / "text.jsonl", TEXTS), "tokenizer": str(other)}
    assert rows({"code": {"corpus": code}, "text": text}) == 8
    refused({"web": {"corpus": web}, "text": text}, "'web'", "'text'", *digests)


def test_what_is_not_stated_is_not_compared(tmp_path: Path) -> None:
    """Files that no manifest lists, or that changed since; of earlier releases the file of the tokenizer alone."""
    used = tokenizer(tmp_path, "used")
    web, code = tokenized(tmp_path, "web", used), tokenized(tmp_path, "code", used)
    both = {"web": {"corpus": web}, "code": {"corpus": code}}
    state_only(code, "1" * 64)
    refused(both, "'web'", "'code'", "111111111111")
    with open_corpus(web) as corpus:
        state_only(code, corpus.tokenizers[0].sha256)
    assert rows(both) == 8
    state_only(web, "2" * 64)
    refused(both, "222222222222")
    plain = tmp_path / "plain.bin"
    np.ones(200, np.uint16).tofile(plain)
    assert rows({"web": {"corpus": web}, "plain": {"corpus": plain}, "made": {"corpus": "synthetic:1K"}}) == 8
    flat = tokenized(tmp_path, "flat", used, "flat")
    state_only(flat, "3" * 64)
    refused({"web": {"corpus": web}, "flat": {"corpus": flat}}, "'web'", "'flat'")
    with next(flat.glob("*.bin")).open("ab") as file:
        file.write(bytes(2))
    assert rows({"web": {"corpus": web}, "flat": {"corpus": flat}}) == 8


def test_a_folder_of_an_earlier_release_is_finished_still(tmp_path: Path) -> None:
    used = tokenizer(tmp_path, "used")
    folder = tokenized(tmp_path, "web", used)
    with open_corpus(folder) as corpus:
        state_only(folder, corpus.tokenizers[0].sha256)
    before = (folder / "manifest.json").read_bytes()
    assert tokenized(tmp_path, "web", used) == folder
    assert (folder / "manifest.json").read_bytes() == before
