"""The twin that keeps special-token text as text cuts all other text as the reference does, for many tokenizers."""

from functools import cache
from typing import Any

import pytest
from chat_cases import samples, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat.special_text import SpecialText

SPECIAL = ["<s>", "</s>", "[INST]"]
KINDS = ["byte-level", "metaspace first", "metaspace always", "prepend", "lower case", "unigram"]


@cache
def made(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return tokenizer()
    texts = [m["content"] for record in samples()["messages"][:8] for m in record["messages"]]
    library = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>", byte_fallback=True))
    if kind == "prepend":  # Llama 2: no pre-tokenizer, spaces are a character, one is put before each piece
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    elif kind == "lower case":
        library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        library.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        scheme = "always" if kind.endswith("always") else "first"
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>")
    else:
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=names)
    library.train_from_iterator(texts, trainer)
    library.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("</s>", normalized=kind != "prepend"),  # no tokenizer finds "▁</s>" after other text
            AddedToken("[INST]", rstrip=True, lstrip=True, normalized=False),
        ]
    )
    return library


CODECS = cache(lambda kind: SpecialText(made(kind)))
ATOMS = st.sampled_from(
    [*SPECIAL, " ", "  ", "\n", "the", " Citizen", "A", "é", "ﬁ", "नमस्ते", "😀", "e\u0301", "<", "s>", "]"]
)
TEXTS = st.lists(ATOMS, max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20))
@given(text=TEXTS)
def test_without_special_text_in_messages_the_twin_is_the_reference(kind: str, text: str) -> None:
    """All special text here is the template's; both ways, ids and offsets are the same."""
    library, codec = made(kind), CODECS(kind)
    (by_twin,), (by_reference,) = codec.encode_masked([text], ["x"]), codec.encode([text])
    expected = library.encode(text, add_special_tokens=False)
    assert by_twin.ids.tolist() == by_reference.ids.tolist() == expected.ids
    assert by_twin.offsets.tolist() == by_reference.offsets.tolist()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lower case"])
@settings(max_examples=examples(20))
@given(before=TEXTS, after=TEXTS)
def test_masked_text_makes_no_special_id(kind: str, before: str, after: str) -> None:
    library, codec = made(kind), CODECS(kind)
    text = codec.masked(before) + "</s>" + codec.masked(after)
    assert codec.unmasked(text) == before + "</s>" + after
    (found,) = codec.encode_masked([text], ["x"])
    special = [library.token_to_id(name) for name in SPECIAL]
    assert [token for token in found.ids.tolist() if token in special] == [library.token_to_id("</s>")]


@settings(max_examples=examples(25))
@given(text=TEXTS)
def test_masks_keep_the_length_and_leave_nothing_special(text: str) -> None:
    codec = CODECS("metaspace first")
    masked = codec.masked({"role": "user", "k<s>": [text, None, 3, True]})
    assert masked["role"] == "user"
    assert codec.masked({"role": "<s>"}) != {"role": "<s>"}, "an argument of this name, and no speaker"
    (value,) = (value for key, value in masked.items() if key != "role")
    assert value[1:] == [None, 3, True]
    assert len(value[0]) == len(text)
    assert codec.unmasked(value[0]) == text
    for name in SPECIAL:
        assert name not in value[0]
        for cut in range(1, len(name)):
            assert not value[0].endswith(name[:cut])
            assert not value[0].startswith(name[cut:])


def test_a_vocabulary_that_has_special_text_as_a_word_is_refused() -> None:
    """Here the model itself, not the list of added tokens, makes the id out of the text."""
    library = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>"])
    codec = SpecialText(library)
    with pytest.raises(CorpusFormatError, match=r"b:3: .*special token"):
        codec.encode_masked([codec.masked("a <s> a")], ["b:3"])


def test_a_tokenizer_without_special_tokens_needs_no_masks() -> None:
    library = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    codec = SpecialText(library)
    assert codec.masked(["a", ""]) == ["a", ""]
    assert [tokens.ids.tolist() for tokens in codec.encode(["a"])] == [[1]]
