"""Token ids back to text, from a table of the bytes of every id, without a tokenizer library.

    [15496, 995]  ──▶  b"Hello" + b" world"  ──▶  "Hello world"

A table file is gzip over: the number of ids (uint32, little-endian), one length byte an id, then all bytes in the order
of the ids. `data/gpt2_pieces.gz` holds the 50,257 ids of GPT-2. Another one is made from the `tokenizer.json` of a
byte-level BPE tokenizer:

    python benchmarks/decode.py tokenizer.json my_pieces.gz
"""

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from dali_pipes.errors import CorpusFormatError

GPT2_PIECES = Path(__file__).resolve().parent / "data" / "gpt2_pieces.gz"
GPT2_END_OF_TEXT = 50256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def decode(ids: Iterable[int], pieces: Sequence[bytes]) -> str:
    """The text of `ids`. Bytes are joined before they are decoded, since one character may be spread over several ids.

    Broken UTF-8, and ids that the table does not have, become U+FFFD: a model may predict either.
    """
    joined = b"".join(pieces[token] if 0 <= token < len(pieces) else _UNKNOWN for token in ids)
    return joined.decode("utf-8", errors="replace")


def load_pieces(path: Path = GPT2_PIECES) -> list[bytes]:
    """The bytes of every id, by id. Raises `CorpusFormatError` for a file that is damaged or no table."""
    try:
        table = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusFormatError(
            f"{path}: not a table of pieces: {error}; restore the file from the repository"
        ) from error
    count = int.from_bytes(table[:4], "little")
    lengths, joined = table[4 : 4 + count], table[4 + count :]
    if len(table) < 4 + count or sum(lengths) != len(joined):
        raise CorpusFormatError(
            f"{path}: not a table of pieces: expected {count} lengths that add up to the bytes after them, "
            f"found {len(lengths)} that add up to {sum(lengths)} for {len(joined)} bytes"
        )
    return [joined[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def save_pieces(pieces: Sequence[bytes], path: Path) -> None:
    """Write a table file; equal pieces give equal bytes. A piece has at most 255 bytes."""
    table = len(pieces).to_bytes(4, "little") + bytes(map(len, pieces)) + b"".join(pieces)
    path.write_bytes(gzip.compress(table, compresslevel=9, mtime=0))


def pieces_of_tokenizer(path: Path) -> list[bytes]:
    """The bytes of every id of a byte-level BPE `tokenizer.json`; ids that no token has are empty."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    byte_of = byte_of_character()
    # A character outside the alphabet is in no learned piece, so a token that has one is written as it reads.
    piece_of = {
        token_id: bytes(byte_of[character] for character in token) if set(token) <= byte_of.keys() else token.encode()
        for token, token_id in tokenizer["model"]["vocab"].items()
    }
    piece_of |= {added["id"]: added["content"].encode() for added in tokenizer["added_tokens"]}
    return [piece_of.get(token_id, b"") for token_id in range(max(piece_of) + 1)]


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    save_pieces(pieces_of_tokenizer(Path(sys.argv[1])), Path(sys.argv[2]))
