"""JSONL and plain text: hostile lines, any cut into chunks, compression in pieces."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.text.formats.json_lines import read_json_lines
from dali_pipes.text.formats.lines import split_lines
from dali_pipes.text.formats.plain_text import read_plain_text
from dali_pipes.text.streams import ByteMeter, Compression, read_chunks

PATH = Path("in.jsonl")


def chunked(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """`data` in chunks, none empty, cut at the places that lie inside."""
    places = sorted({cut for cut in cuts if 0 < cut < len(data)})
    return (data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b)


def texts(data: bytes, key: str = "text") -> list[str]:
    return [document.content for document in read_json_lines(PATH, iter([data]), key)]


@given(st.lists(st.sampled_from([b"\n", b"a", b"\r", b"bc", b"\0"])).map(b"".join), st.lists(st.integers(0, 30)))
def test_lines_are_those_between_newlines_however_chunks_are_cut(data: bytes, cuts: list[int]) -> None:
    expected = data.split(b"\n")
    assert list(split_lines(chunked(data, cuts))) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.text(max_size=20)), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]), st.booleans(), st.data())
def test_texts_come_back_as_they_were(
    wanted: list[str], is_ascii: bool, end: str, has_last: bool, data: st.DataObject
) -> None:
    """Through escapes or plain UTF-8, whatever the line ends, with a byte order mark, without a last newline."""
    lines = [json.dumps({"n": at, "text": text}, ensure_ascii=is_ascii) for at, text in enumerate(wanted)]
    text = "\ufeff" + end.join(lines) + (end if has_last else "")
    raw = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw))))
    assert [document.content for document in read_json_lines(PATH, chunked(raw, cuts), "text")] == wanted


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a\xe2\x80\xa8b\xc2\x85c"}', "a\u2028b\x85c"),
        (b'{"text": "\\u0000\\ud83d\\ude42"}', "\0\U0001f642"),
        (b' \t{"id": {"text": 1}, "text": "x", "z": [null]} \r', "x"),
        (b'{"text": null}', ""),
        (b'{"text": ""}', ""),
        (b'{"text": "a\\r\\nb"}', "a\r\nb"),
    ],
)
def test_what_is_accepted(line: bytes, text: str) -> None:
    assert texts(b"\n \n\t\r\n" + line + b"\n\n") == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a', r"Unterminated string .* at character 10"),
        (b'{"text": "a\tb"}', r"Invalid control character"),
        (b'{"text": "a"} {"text": "b"}', r"Extra data at character 15"),
        (b"hello", r"Expecting value at character 1, near 'hello'"),
        (b'{"text": "a\xffb"}', r"byte 11 \(0xff\)"),
        (b'{"text": "\xed\xa0\x80"}', r"byte 10 \(0xed\)"),
        (b'"text"', r"found 'text';"),
        (b'["text"]', r"found \['text'\] \(list\);"),
        (b'{"text": 5}', r"'text' is 5 \(int\);"),
        (b'{"text": ["a"]}', r"'text' is \['a'\] \(list\);"),
        (b'{"id": 1, "body": "a"}', r"'text' .*'id', 'body'.*text_key"),
        (b"{}", r"'text' .*\(none\)"),
        (b'{"id": 1, "messages": []}', r"'text' .*'id', 'messages'.*`dali-pipes tokenize --chat`"),
        (b'{"conversations": []}', r"'text' .*'conversations'.*`dali-pipes tokenize --chat`"),
        (b'{"prompt": "", "completion": ""}', r"'text' .*`dali-pipes tokenize --chat`"),
        (b'{"prompt": ""}', r"'text' .*'prompt'\. .*text_key"),
        (b"[" * 100_000, r"JSON"),
        (b'{"n": ' + b"1" * 5000 + b', "text": ""}', r"JSON"),
        (b"{\0}", r"character 2"),
    ],
)
def test_a_bad_line_is_named(line: bytes, message: str) -> None:
    with pytest.raises(CorpusFormatError, match=rf"^in\.jsonl: line 3: .*{message}"):
        texts(b'{"text": "fine"}\n\n' + line + b"\n")


def test_whole_records_are_handed_out_if_no_key_is_named() -> None:
    (document,) = read_json_lines(PATH, iter([b'{"a": [1], "b": null}']), None)
    assert document.content == {"a": [1], "b": None}
    assert document.place == "in.jsonl: line 1"


PIECES = st.lists(st.sampled_from(["a", "b", "ab", "aa", "é", "\n", "\U0001f642"])).map("".join)


@given(PIECES, st.sampled_from(["a", "ab", "aa", "aba", "\n\n", "é"]), st.lists(st.integers(0, 60)))
def test_a_separator_cuts_as_on_the_whole_text(text: str, separator: str, cuts: list[int]) -> None:
    expected = text.split(separator)
    found = [document.content for document in read_plain_text(PATH, chunked(text.encode(), cuts), separator)]
    assert found == (expected if expected[-1] else expected[:-1])


@given(st.text(), st.lists(st.integers(0, 60)))
def test_a_plain_file_is_one_document_as_it_is(text: str, cuts: list[int]) -> None:
    (document,) = read_plain_text(PATH, chunked(b"\xef\xbb\xbf" + text.encode(), cuts), None)
    assert document.content == text


@pytest.mark.parametrize("cuts", [[], [4], [3, 4, 5]])
def test_a_plain_file_that_is_not_utf8_is_refused(cuts: list[int]) -> None:
    with pytest.raises(CorpusFormatError, match=r"in\.jsonl: byte 4 "):
        list(read_plain_text(PATH, chunked(b"abc\n\xffd", cuts), None))
    with pytest.raises(CorpusFormatError, match=r"in\.jsonl: byte 3 "):
        list(read_plain_text(PATH, chunked(b"abc\xe2\x82", cuts), "x"))  # ends within a character


def plain(path: Path, compression: Compression) -> bytes:
    meter = ByteMeter()
    data = b"".join(read_chunks(path, compression, meter))
    assert meter.done == path.stat().st_size
    return data


def skippable(data: bytes) -> bytes:
    return b"\x50\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


PARTS = [b"first\n" * 1000, b"", b"x", bytes(range(256)) * 5000]


def zstd_frame(part: bytes, *, sized: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=sized, write_checksum=True).compress(part)


def test_all_members_and_frames_are_read(tmp_path: Path) -> None:
    members = tmp_path / "members.gz"
    members.write_bytes(b"".join(map(gzip.compress, PARTS)) + bytes(700))  # and padding
    assert plain(members, "gzip") == b"".join(PARTS)
    frames = tmp_path / "frames.zst"
    packed = [zstd_frame(part, sized=at % 2 == 0) for at, part in enumerate(PARTS)]
    frames.write_bytes(skippable(b"about") + skippable(b"").join(packed) + skippable(b"end"))
    assert plain(frames, "zstd") == b"".join(PARTS)


def test_much_from_little_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    sizes = [len(chunk) for chunk in read_chunks(path, "gzip", ByteMeter())]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 4 << 20


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_cut_is_an_error_wherever_it_is(tmp_path: Path, compression: Compression) -> None:
    """Not an end: the documents after it would be missing silently."""
    parts = [b"0123456789" * 20, b"x" * 50]
    packed = [gzip.compress(p) if compression == "gzip" else zstd_frame(p, sized=True) for p in parts]
    whole, ends = b"".join(packed), {len(packed[0]), len(packed[0]) + len(packed[1])}
    path = tmp_path / "cut"
    for size in range(1, len(whole) + 1):
        path.write_bytes(whole[:size])
        if size in ends:
            assert plain(path, compression) in (parts[0], b"".join(parts))
        else:
            with pytest.raises(CorpusFormatError, match=r"cut: .*(gzip member|zstd frame) [12]"):
                plain(path, compression)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_damage_is_an_error(tmp_path: Path, compression: Compression) -> None:
    data = b"0123456789" * 2000
    packed = bytearray(gzip.compress(data) if compression == "gzip" else zstd_frame(data, sized=True))
    path = tmp_path / "damaged"
    path.write_bytes(bytes(packed) + b"junk after the end")
    with pytest.raises(CorpusFormatError, match=r"damaged: .*(gzip member|zstd frame) 2 "):
        plain(path, compression)
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(CorpusFormatError, match=r"damaged: .*(gzip member|zstd frame) 1"):
        plain(path, compression)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusReadError, match=r"gone: .*No such file"):
        list(read_chunks(tmp_path / "gone", "", ByteMeter()))
