"""Ordinary text, the width of ids, and the end-of-text id."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_truth import Special, Truth, read_documents, words_tokenizer, write_jsonl

from dali_pipes import open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError, TokenRangeError
from dali_pipes.text import Document, Job, TextEncoder, find_text_files, load_tokenizer, tokenize_files
from dali_pipes.text.shard_writer import Format, id_type
from dali_pipes.text.tokenizer import end_of_text


def encode(tokenizer: Path, *texts: str, eos_id: int | None = None) -> list[list[int]]:
    encoder = TextEncoder(load_tokenizer(tokenizer), eos_id, ends_empty=False)
    documents = [Document(text, Path("x"), "line", at) for at, text in enumerate(texts, 1)]
    return [document.ids.tolist() for document in encoder.encode(documents) if document is not None]


def test_odd_strings_are_encoded_as_ordinary_text(text_samples: Path, gpt2: Path) -> None:
    lines = (text_samples / "cases.jsonl").read_text(encoding="utf-8").split("\n")
    cases = [json.loads(line) for line in lines if line]
    assert sum(case["gpt2_ordinary"] != case["gpt2_special"] for case in cases) >= 3, "no case tells the two apart"
    assert encode(gpt2, *(case["text"] for case in cases)) == [case["gpt2_ordinary"] for case in cases]


def test_what_the_file_says_of_cuts_pads_and_ends_is_not_done(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}},
    }
    more: dict[str, Any] = {
        "post_processor": template,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "?"},
    }
    path = words_tokenizer(tmp_path / "t.json", {"?": 0, "a": 1, "b": 2}, {"<s>": 9}, **more)
    assert encode(path, "a b a b", "", "a") == [[1, 2, 1, 2], [], [1]]


def test_half_of_a_surrogate_pair_is_refused_by_place(gpt2: Path) -> None:
    with pytest.raises(CorpusFormatError, match=r"^x: line 2: character 1 \('\\ud800', after 'a'\)"):
        encode(gpt2, "fine", "a\ud800b", "fine")


@pytest.mark.parametrize(
    ("words", "special", "flat", "megatron"),
    [
        ({"?": 0, "b": 65_535}, {}, "uint16", "uint16"),  # a vocabulary of 65536
        ({"?": 0, "b": 65_536}, {}, "uint32", "int32"),  # and of 65537
        ({"?": 0, "b": 64_999}, {"<a>": 65_700}, "uint32", "int32"),  # 65000, and added ids above
        ({"?": 0, "b": 64_999}, {"<a>": 65_535}, "uint16", "uint16"),
        ({f"w{id}": id for id in range(65_000)}, {f"<{id}>": id for id in range(65_000, 65_700)}, "uint32", "int32"),
        ({"?": 0, "b": 9, "c": 119_546}, {}, "uint32", "int32"),  # ids with gaps: more than the vocabulary has entries
    ],
)
def test_the_width_holds_the_largest_id_there_is(
    tmp_path: Path, words: dict[str, int], special: Special, flat: str, megatron: str
) -> None:
    loaded = load_tokenizer(words_tokenizer(tmp_path / "t.json", words, special, has_special=len(words) < 65_000))
    assert loaded.largest_id == max([*words.values(), *special.values()])
    assert id_type("flat", loaded.largest_id) == flat
    assert id_type("megatron", loaded.largest_id) == megatron


@pytest.mark.parametrize("format", ["flat", "megatron"])
def test_wide_ids_come_back(tmp_path: Path, format: Format) -> None:
    words = {"a": 0, "b": 65_535, "c": 65_536, "d": 70_000, "e": 119_546}
    loaded = load_tokenizer(words_tokenizer(tmp_path / "t.json", words))
    inputs = find_text_files(write_jsonl(tmp_path / "in.jsonl", ["a b c d e", "e d"]))
    tokenize_files(Job(inputs, TextEncoder(loaded, None, ends_empty=False), format), tmp_path / "out", "test")
    dtype = "uint32" if format == "flat" else None  # as the command says
    with open_corpus(tmp_path / "out", dtype=dtype) as corpus:
        assert corpus.tokens(0, 7).tolist() == [0, 65_535, 65_536, 70_000, 119_546, 119_546, 70_000]


def test_added_tokens_that_the_library_numbers_anew_are_refused(tmp_path: Path) -> None:
    path = words_tokenizer(tmp_path / "t.json", {"?": 0, "a": 1}, {"</s>": 700}, has_special=False)
    with pytest.raises(ConfigError, match=r"t\.json .*'</s>' .*700.* 2;"):
        load_tokenizer(path)


class Liar:
    """An encoder whose ids go beyond what it stated."""

    record_key, has_mask, largest_id = "text", False, 9
    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, id: int) -> None:
        self._id = id

    def encode(self, documents: Any) -> Any:
        from dali_pipes.text import Encoded

        return [Encoded(np.array([1, self._id])) for _ in documents]


@pytest.mark.parametrize("id", [65_536, -1, 2**40])
def test_ids_that_do_not_fit_are_refused_never_changed(tmp_path: Path, id: int) -> None:
    inputs = find_text_files(write_jsonl(tmp_path / "in.jsonl", ["a"]))
    with pytest.raises(TokenRangeError, match=f"id {id} does not fit uint16"):
        tokenize_files(Job(inputs, Liar(id), "flat"), tmp_path / "out", "test")


@pytest.mark.parametrize(
    ("special", "found"),
    [
        ({"<|endoftext|>": 5}, ("<|endoftext|>", 5)),
        ({"<s>": 4, "</s>": 5, "<pad>": 6}, ("</s>", 5)),
        ({"<|endoftext|>": 5, "</s>": 6}, None),
        ({"<pad>": 6}, None),
        ({}, None),
    ],
)
def test_the_end_of_text_is_found_where_there_is_one_alone(
    tmp_path: Path, special: Special, found: tuple[str, int] | None
) -> None:
    loaded = load_tokenizer(words_tokenizer(tmp_path / "t.json", {"?": 0, "eos": 1}, special))
    if found is not None:
        assert end_of_text(loaded) == found
    else:
        with pytest.raises(ConfigError, match=r"t\.json .*--eos ID.*--no-eos"):
            end_of_text(loaded)


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.json "):
            load_tokenizer(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("given", "file", "model"),
    [
        ("gpt2", "gpt2", "gpt2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gone.json", "gone.json", "MODEL"),
        ("/gone/a/tokenizer.json", "/gone/a/tokenizer.json", "MODEL"),
        ("folder", "folder/tokenizer.json", "MODEL"),
    ],
)
def test_a_missing_tokenizer_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, file: str, model: str
) -> None:
    """Names on the Hub are what people try first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(given)
    for text in (str(tmp_path / file), repr(given), "tokenizer.json", f"hf download {model} tokenizer.json "):
        assert text in str(refused.value)


def test_an_empty_tokenizer_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpt2: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(".").path == tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match="tokenizer: "):
        load_tokenizer("")


def test_an_eos_that_the_tokenizer_does_not_have_is_refused(gpt2: Path) -> None:
    with pytest.raises(ConfigError, match=r"eos_id = 50257 .*tokenizer\.json.* 50,256"):
        encode(gpt2, "a", eos_id=50257)


def test_the_samples_as_megatron_and_nanogpt_have_them(tmp_path: Path, samples: Path, gpt2: Path, truth: Truth) -> None:
    """Byte for byte what megatron-core wrote for the same texts (nothing for the empty one), and nanoGPT's layout."""
    inputs = find_text_files(write_jsonl(tmp_path / "in.jsonl", truth.texts))
    loaded = load_tokenizer(gpt2.parent)
    job = Job(inputs, TextEncoder(loaded, 50256, ends_empty=False), "megatron")
    summary = tokenize_files(job, tmp_path / "out", "test")
    assert (summary.documents, summary.empty, summary.tokens) == (380, 1, 128_162)
    for suffix in ("bin", "idx"):
        written = (tmp_path / "out" / f"tokens-00000-0000.{suffix}").read_bytes()
        assert written == (samples / "megatron" / f"gpt2_text_document.{suffix}").read_bytes()
    assert read_documents(tmp_path / "out") == truth.with_eos(50256)
    job = Job(inputs, TextEncoder(loaded, 50256, ends_empty=True), "flat")
    assert tokenize_files(job, tmp_path / "flat", "test").tokens == 128_163
    nanogpt = b"".join((samples / "nanogpt" / name).read_bytes() for name in ("train.bin", "val.bin"))
    assert (tmp_path / "flat" / "tokens-00000-0000.bin").read_bytes() == nanogpt
