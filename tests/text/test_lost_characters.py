"""Characters that a tokenizer cannot encode are counted, exactly, and said; most tokenizers can encode all."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from corpus_truth import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from typer.testing import CliRunner

from dali_pipes import open_corpus
from dali_pipes.errors import CorpusFormatError
from dali_pipes.text import Document, TextEncoder, load_tokenizer
from dali_pipes.text.lost_characters import LostCharacters, can_lose_characters
from dali_pipes.text.notes import Notes
from dali_pipes.tools.cli import app

LETTERS = {letter: id for id, letter in enumerate("ab ")}
BYTES = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def made(model: Any, *, normalizer: Any = None, pre: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def bpe(more: dict[str, int], **options: Any) -> models.BPE:
    return models.BPE(vocab={**LETTERS, "ab": 3, **more}, merges=[("a", "b")], **options)


PIECES = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), (" ", -1.5), ("ab", -1.0)]
OF_CHARACTERS = {
    "BPE without unknown token": made(bpe({})),
    "BPE": made(bpe({"<unk>": 4}, unk_token="<unk>")),
    "BPE that joins unknown tokens": made(bpe({"<unk>": 4}, unk_token="<unk>", fuse_unk=True)),
    "BPE of bytes, some": made(bpe({"<0x00>": 4}, byte_fallback=True)),
    "BPE after a normalizer": made(bpe({}), normalizer=normalizers.Lowercase()),
    "Unigram": made(models.Unigram(PIECES, unk_id=0)),
}
"""Models that lose single characters."""
WORDS = {"[UNK]": 0, "a": 1, "ab": 2, "##b": 3, "b": 4}
OF_WORDS = {
    "WordPiece": made(models.WordPiece(WORDS, unk_token="[UNK]"), pre=pre_tokenizers.WhitespaceSplit()),
    "WordLevel": made(models.WordLevel(WORDS, unk_token="[UNK]"), pre=pre_tokenizers.WhitespaceSplit()),
}
KEEP_ALL = {
    "BPE of bytes": made(models.BPE(vocab=BYTES, merges=[]), pre=pre_tokenizers.ByteLevel()),
    "BPE of bytes after a split": made(
        models.BPE(vocab=BYTES, merges=[]),
        pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
    ),
    "BPE of normalized bytes": made(models.BPE(vocab=BYTES, merges=[]), normalizer=normalizers.ByteLevel()),
    "BPE that falls back to bytes": made(models.BPE(vocab=FALLBACK, merges=[], byte_fallback=True)),
    "Unigram that falls back to bytes": made(
        models.Unigram([("<unk>", 0.0), *((name, -9.0) for name in FALLBACK)], unk_id=0, byte_fallback=True)
    ),
}
TEXTS = st.lists(st.text("abAé日 \n<unk>[UNK]", max_size=12), min_size=1, max_size=4)


def can_lose(tokenizer: Tokenizer) -> bool:
    return can_lose_characters(json.loads(tokenizer.to_str()))


def counted(tokenizer: Tokenizer, texts: list[str]) -> list[Counter[str]]:
    """By the pieces that are lost; with and without the ids at hand."""
    lost = LostCharacters(tokenizer, special_is_text=True)
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = True
    found = lost.find(texts)
    assert found == lost.find(texts, [copy.encode(text).ids for text in texts])
    for one in found:
        assert one is None or one.characters == sum(len(piece) * number for piece, number in one.pieces.items()) > 0
    return [Counter() if one is None else one.pieces for one in found]


@pytest.mark.parametrize("name", OF_CHARACTERS)
@settings(max_examples=examples(18), deadline=None)
@given(texts=TEXTS)
def test_characters_that_the_vocabulary_lacks_are_counted(name: str, texts: list[str]) -> None:
    assert can_lose(OF_CHARACTERS[name])
    known = set(LETTERS) | ({"A"} if "normalizer" in name else set())
    wanted = [Counter(letter for letter in text if letter not in known) for text in texts]
    if name == "Unigram":  # whose vocabulary has the unknown token as a word
        wanted = [Counter(c for c in text.replace("<unk>", "") if c not in known) for text in texts]
    assert counted(OF_CHARACTERS[name], texts) == wanted


def is_word(name: str, word: str) -> bool:
    if name == "WordLevel" or word in WORDS:
        return word in WORDS
    heads = [head for head in WORDS if word.startswith(head)]
    rest = word.removeprefix(max(heads, key=len)) if heads else "?"
    return set(rest) <= {"b"}


@pytest.mark.parametrize("name", OF_WORDS)
@settings(max_examples=examples(18), deadline=None)
@given(texts=TEXTS)
def test_words_that_a_model_of_words_lacks_are_counted(name: str, texts: list[str]) -> None:
    """White space, which is left out on purpose, is not."""
    assert can_lose(OF_WORDS[name])
    wanted = [Counter(word for word in text.split() if not is_word(name, word)) for text in texts]
    assert counted(OF_WORDS[name], texts) == wanted


@pytest.mark.parametrize("name", KEEP_ALL)
@settings(max_examples=examples(10), deadline=None)
@given(text=st.text(max_size=8))
def test_models_of_bytes_lose_nothing_and_are_not_looked_at(name: str, text: str) -> None:
    assert not can_lose(KEEP_ALL[name])
    assert LostCharacters(KEEP_ALL[name], special_is_text=True).find([text]) == [None]


@pytest.mark.parametrize("missing", ["Ā", "a", "ÿ"])
def test_a_model_of_bytes_that_lacks_one_can_lose_characters(missing: str) -> None:
    letters = {letter: id for letter, id in BYTES.items() if letter != missing}
    tokenizer = made(models.BPE(vocab=letters, merges=[]), pre=pre_tokenizers.ByteLevel(add_prefix_space=False))
    assert can_lose(tokenizer)
    byte = {"Ā": "\0", "a": "a", "ÿ": "\xff"}[missing]
    text = f"{byte}x{byte}" if byte != "\xff" else "xx"
    assert counted(tokenizer, [text]) == [Counter({byte: 2}) if byte != "\xff" else Counter()]


@pytest.mark.parametrize("model", [models.Unigram([("a", -1.0)]), models.WordLevel({"a": 0}, unk_token="?")])
def test_a_model_that_needs_an_unknown_token_and_lacks_it_is_refused_by_place(tmp_path: Path, model: Any) -> None:
    made(model).save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(load_tokenizer(tmp_path), None, ends_empty=False)
    documents = [Document(text, Path("in.jsonl"), "line", number) for number, text in enumerate("ab", 1)]
    with pytest.raises(CorpusFormatError, match=r"^in\.jsonl: line 2: 'b' "):
        encoder.encode(documents)


SAID = r"4 of 11 characters \(36\.364%\) .*\('é' 3 times, '日' 1 time\)"


@pytest.mark.parametrize("name", ["BPE without unknown token", "BPE"])
def test_a_run_says_what_was_lost_of_all_of_it(tmp_path: Path, name: str) -> None:
    """Also where several processes did it, each a part, and of a run that is finished."""
    OF_CHARACTERS[name].save(str(tmp_path / "tokenizer.json"))
    for number, texts in enumerate((["abé", "ab"], ["é日", "ab a"])):
        write_jsonl(tmp_path / f"in-{number}.jsonl", texts[:1] + (["é"] if number else []) + texts[1:][: 1 - number])
    write_jsonl(tmp_path / "in-2.jsonl", ["ab "])
    arguments = ["tokenize", f"{tmp_path}/in-*.jsonl", "--tokenizer", f"{tmp_path}", "--out", f"{tmp_path}/out"]
    results = [CliRunner().invoke(app, [*arguments, *more]) for more in (["--shard", "1/2"], ["--shard", "0/2"], [])]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert "warning: 3 of 3 characters (100.000%)" in results[0].stderr
    for result in results[1:]:
        assert re.search(f"warning: {SAID}", result.stderr)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["notes"]["lost"] == 4


def test_opening_text_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    OF_CHARACTERS["BPE"].save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "in.jsonl", ["abééab", "a日é b"])
    for said in (1, 0):
        open_corpus(tmp_path / "in.jsonl", tokenizer=tmp_path / "tokenizer.json").close()
        assert len(re.findall(f"dali_pipes: {SAID}", capsys.readouterr().err)) == said


def test_that_all_was_lost_is_said_in_the_error(tmp_path: Path) -> None:
    OF_CHARACTERS["BPE without unknown token"].save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "in.jsonl", ["é"])
    arguments = ["--tokenizer", str(tmp_path), "--out", str(tmp_path / "out"), "--no-eos"]
    result = CliRunner().invoke(app, ["tokenize", str(path), *arguments])
    assert result.exit_code == 2
    assert re.search(r"in\.jsonl: .*1 of 1 characters \(100\.000%\)", result.stderr)


def test_conversations_are_looked_through_as_they_are_rendered(tmp_path: Path) -> None:
    letters = {letter: id for id, letter in enumerate("abcdefghijklmnopqrstuvwxyz_\n")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": "aé"}, {"role": "assistant", "content": "日b<|im_end|>"}]
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in ({"messages": messages}, {"messages": messages[:1]}))
    )
    for number, more in enumerate((["--chat-template", "chatml"], ["--chat-template", "none", "--no-eos"])):
        if number:
            path.write_text(json.dumps({"prompt": "aé", "completion": "日b"}))
        arguments = ["--chat", "--tokenizer", str(tmp_path), "--out", str(tmp_path / f"out{number}"), *more]
        result = CliRunner().invoke(app, ["tokenize", str(path), *arguments])
        assert result.exit_code == 0, result.stderr
        assert ("warning: 2 of 4 characters" in result.stderr) == bool(number)
        assert "'é' 1 time" in result.stderr


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3), st.integers(1, 9)), max_size=5))
def test_notes_come_back(entries: list[tuple[str, str, int]]) -> None:
    notes = Notes()
    for kind, name, count in entries:
        notes.unused.add(kind, [name], "f: line 1", count)
    again = Notes.from_json(json.loads(json.dumps(notes.as_json())))
    assert again == notes
    assert again.as_json() == notes.as_json()


@pytest.mark.parametrize(
    "bad",
    [
        *([], None, 3, {"unused": 3}, {"unused": [1]}, {"unused": [["a", "b", "c", "d"]]}, {"pieces": []}),
        *({"lost": -1}, {"characters": 1.5}, {"pieces": {"a": "b"}}),
    ],
)
def test_damaged_notes_are_a_value_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="notes"):
        Notes.from_json(bad)
