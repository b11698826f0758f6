"""The GPT-2 tokenizer as a `tokenizer.json` of the tokenizers library, built from the table of its pieces.

    python benchmarks/gpt2_tokenizer.py tokenizer.json

The order of the ids is the order in which byte-pair encoding learned them, so each piece reveals its merge: split it
with the earlier merges, and two parts remain.

    ids  0 ... 255 bytes,  256 "Ġt",  257 "Ġa",  258 "he",  259 "in"  ...  262 "the" = "t" + "he"
"""

import json
import sys
from functools import cache
from pathlib import Path

from decode import GPT2_END_OF_TEXT, byte_of_character, load_pieces

_NUM_BYTES = 256


@cache
def tokenizer_json() -> str:
    """The file's text. Takes about a second."""
    pieces = load_pieces()[:GPT2_END_OF_TEXT]
    character_of = {byte: character for character, byte in byte_of_character().items()}
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    written = ["".join(character_of[byte] for byte in piece) for piece in pieces]
    merges = []
    for rank in range(_NUM_BYTES, len(pieces)):
        left, right = _last_merge(pieces[rank], rank, ranks)
        merges.append([written[ranks[left]], written[ranks[right]]])
    end = {"id": GPT2_END_OF_TEXT, "content": "<|endoftext|>", "special": True}
    as_is = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | as_is],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {text: rank for rank, text in enumerate(written)} | {"<|endoftext|>": GPT2_END_OF_TEXT},
                "merges": merges,
            },
        },
        ensure_ascii=False,
    )


def _last_merge(piece: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that the merge number `rank` joins to `piece`."""
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(parts[at] + parts[at + 1], rank) for at in range(len(parts) - 1)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(tokenizer_json(), encoding="utf-8")
