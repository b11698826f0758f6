"""Ids become the text that they stand for, also where a character is spread over several ids."""

import ast
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from decode import GPT2_END_OF_TEXT, GPT2_PIECES, decode, load_pieces, pieces_of_tokenizer, save_pieces
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import CorpusFormatError

DATA = GPT2_PIECES.parent
PIECES = load_pieces()


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([15496, 995], "Hello world"),
        ([198], "\n"),
        ([188, 189], "\x00\x01"),
        ([2616, 38776, 40304], "naïve café"),
        ([33768, 98, 17312, 105, 45739, 252, 5641, 24336, 43302], "日本語のテスト"),
        ([8582, 25081, 41840, 102, 447, 235, 8582, 240, 119], "🙂👩\u200d💻"),
        ([1849, 447, 225, 87], "\u00a0\u2003x"),
        ([64, GPT2_END_OF_TEXT, 65], "a<|endoftext|>b"),
        ([8582, 64], "\N{REPLACEMENT CHARACTER}a"),  # the first bytes of an emoji, and no more
        ([64, 50257, -1, 65], "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"),
    ],
)
def test_known_ids_of_gpt2(ids: list[int], text: str) -> None:
    assert decode(ids, PIECES) == text


def test_the_vocabulary_is_whole() -> None:
    assert len(PIECES) == 50257 == len(set(PIECES))
    assert {piece for piece in PIECES if len(piece) == 1} == {bytes([byte]) for byte in range(256)}
    assert PIECES[GPT2_END_OF_TEXT] == b"<|endoftext|>"


def test_the_shipped_corpus_is_the_play() -> None:
    train, val = (np.fromfile(DATA / "tinyshakespeare" / name, "<u2").tolist() for name in ("train.bin", "val.bin"))
    text = decode([*train, *val], PIECES)
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.")
    assert decode(val[:9], PIECES).startswith("NORTHUMBERLAND:\nWhat was")
    documents = text.split("<|endoftext|>")
    assert len(documents) == 380 + 1
    assert documents[-1] == ""
    assert (documents[7], documents[8], documents[200][:10]) == ("", "O", "Café naïve")
    assert "\N{REPLACEMENT CHARACTER}" not in text


def test_the_shipped_code_is_python() -> None:
    *documents, end = decode(np.fromfile(DATA / "python_code.bin", "<u2").tolist(), PIECES).split("<|endoftext|>")
    assert (len(documents), end) == (44, "")
    assert all(
        isinstance(ast.parse(document), ast.Module) and ast.get_docstring(ast.parse(document)) for document in documents
    )


def test_the_readme_of_the_data_tells_the_sizes() -> None:
    rows = re.findall(r"^\| `(.+?)` \| ([\d,]+)[^|]* \| ([\d,]+) \|", (DATA / "README.md").read_text(), re.MULTILINE)
    assert {name: (int(count.replace(",", "")), int(size.replace(",", ""))) for name, count, size in rows} == {
        "tinyshakespeare/train.bin": ((DATA / "tinyshakespeare/train.bin").stat().st_size // 2, 220222),
        "tinyshakespeare/val.bin": ((DATA / "tinyshakespeare/val.bin").stat().st_size // 2, 36104),
        "python_code.bin": ((DATA / "python_code.bin").stat().st_size // 2, 247928),
        "gpt2_pieces.gz": (len(PIECES), GPT2_PIECES.stat().st_size),
    }
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 1_000_000


@given(st.lists(st.binary(max_size=255), max_size=40))
def test_a_table_reads_back_as_written(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("table") / "pieces.gz"
    save_pieces(pieces, path)
    assert load_pieces(path) == pieces
    first = path.read_bytes()
    save_pieces(pieces, path)
    assert path.read_bytes() == first


@given(st.text())
def test_any_text_comes_back_from_its_bytes(text: str) -> None:
    id_of_byte = {piece[0]: token for token, piece in enumerate(PIECES) if len(piece) == 1}
    encoded = text.encode("utf-8", errors="replace")
    assert decode([id_of_byte[byte] for byte in encoded], PIECES) == encoded.decode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        GPT2_PIECES.read_bytes()[:1000],
        gzip.compress(b"\x02\x00\x00\x00\x01", mtime=0),  # two pieces, one length
        gzip.compress(b"\x02\x00\x00\x00\x01\x02ab", mtime=0),  # lengths of three bytes, two bytes
        gzip.compress(b"\x01\x00\x00\x00\x01ab", mtime=0),
    ],
)
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pieces.gz"
    path.write_bytes(content)
    with pytest.raises(CorpusFormatError, match=r"pieces\.gz"):
        load_pieces(path)


def test_a_tokenizer_file_gives_its_pieces(tmp_path: Path) -> None:
    # Ġ is how byte-level BPE writes a space, Ċ a line feed, Ã© the two bytes of é, Ń (U+0143) the byte 0xAD.
    tokenizer = {
        "model": {"vocab": {"a": 0, "Ġa": 1, "Ċ": 2, "Ã©": 3, "<end of text>": 4, "Ń": 6}},
        "added_tokens": [{"id": 7, "content": "<ünd>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = [b"a", b" a", b"\n", "é".encode(), b"<end of text>", b"", b"\xad", "<ünd>".encode()]
    assert pieces_of_tokenizer(tmp_path / "tokenizer.json") == expected
