"""Independent readers of what the text package writes, and a made-up encoder."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.text import Document, Encoded, Encoder, Job, Summary, find_text_files, tokenize_files

Special = dict[str, int]


class Truth(NamedTuple):
    """Documents: their texts, and their GPT-2 ids without an end-of-text id."""

    texts: list[str]
    ids: list[list[int]]

    def with_eos(self, eos_id: int, *, count: int | None = None) -> list[list[int]]:
        """The first documents as Megatron stores them: nothing for an empty one."""
        return [[*ids, eos_id] if ids else [] for ids in self.ids[:count]]


def read_megatron(prefix: Path) -> list[list[int]]:
    """The documents of a Megatron pair, entry by entry, as the format's description says."""
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    assert len(index) == 34 + 12 * sequences + 8 * entries
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    firsts = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    assert firsts[0] == 0
    assert firsts[-1] == sequences
    assert sum(lengths) * width == len(data)
    found = [list(struct.unpack_from(f"<{n}{letter}", data, at)) for n, at in zip(lengths, pointers, strict=True)]
    return [joined(found[first:end]) for first, end in pairwise(firsts)]


def joined(documents: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(documents))


def read_documents(folder: Path) -> list[list[int]]:
    """The documents of all Megatron pairs of a folder."""
    return [document for path in sorted(folder.glob("*.idx")) for document in read_megatron(path)]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the manifest's paths, which depend on where the inputs are."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if "manifest.json" in found:
        manifest = json.loads(found["manifest.json"])
        del manifest["paths"]
        found["manifest.json"] = json.dumps(manifest).encode()
    return found


def write_jsonl(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def words_tokenizer(
    path: Path, words: dict[str, int], special: Special | None = None, *, has_special: bool = True, **more: Any
) -> Path:
    """A tokenizer of whole words between spaces. special: names of special tokens. has_special: its model has them."""
    added = [
        {"id": id, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for name, id in (special or {}).items()
    ]
    vocabulary = words | (special or {}) if has_special else words
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": next(iter(words))}
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
    }
    described |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    path.write_text(json.dumps(described | more))
    return path


class CharacterEncoder:
    """Ids are code points, at most 2^16 - 1, and 0 after each document. "!" is not learned; "drop" is dropped."""

    record_key: str | None = "text"
    largest_id = 0xFFFF
    settings: Mapping[str, Any] = {"characters": 1}

    def __init__(self, *, has_mask: bool = False) -> None:
        self.has_mask = has_mask

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        return [None if document.content == "drop" else self._encoded(document.content) for document in documents]

    def _encoded(self, text: str) -> Encoded:
        ids = np.array([*map(ord, text), *([0] if text else [])], np.int64)
        return Encoded(ids, (ids != ord("!")).astype(np.uint8) if self.has_mask else None, is_empty=not text)


def run(
    inputs: Path, out: Path | str, encoder: Encoder | None = None, shard: tuple[int, int] = (0, 1), **job: Any
) -> Summary:
    settings = {"format": "megatron", "shard_tokens": 40, **job}
    return tokenize_files(
        Job(find_text_files(inputs), encoder or CharacterEncoder(), **settings), out, "dali_pipes test", shard
    )
