"""A `tokenizer.json` of the Rust library tokenizers, set up to encode documents as ordinary text.

Ordinary: `<|endoftext|>` inside a document is thirteen characters, not the special id; tokens are not added before or
after the text, and it is not stripped, truncated or padded.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import open_file
from dali_pipes.text.lost_characters import can_lose_characters
from dali_pipes.uris import FilePath, Uri, check_uri, is_uri

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<EOT>")

_HUB_NAME = re.compile(r"[\w.-]*\w(/[\w.-]*\w)?(?<!\.json)")


@dataclass(frozen=True, eq=False)
class LoadedTokenizer:
    """library: the `tokenizers.Tokenizer`. sha256: of the file. largest_id: of the vocabulary and all added tokens.
    can_lose_characters: whether there may be text that it cannot encode.
    """

    library: Any
    path: FilePath
    sha256: str
    largest_id: int
    can_lose_characters: bool

    @property
    def vocabulary(self) -> str:
        """SHA-256 of the texts and ids of the model, without added tokens: the same for copies of a file that differ
        in other settings, and for the tokenizers of a base model and of its chat model.
        """
        entries = sorted(self.library.get_vocab(with_added_tokens=False).items())
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def load_tokenizer(path: str | os.PathLike[str]) -> LoadedTokenizer:
    """Load a `tokenizer.json`, or the one in a folder.

    Raises BackendError without tokenizers, ConfigError for a file that is missing or cannot be loaded.
    """
    with optional_package("tokenizers", "text", purpose="to tokenize text"):
        from tokenizers import Tokenizer
    file, data = read_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(
            f"tokenizer: {file} is not a tokenizer.json that the installed tokenizers can load: {error}"
        ) from error
    settings = json.loads(data)
    for token in settings["added_tokens"]:
        # The library renumbers added tokens that are not in its model, if their ids leave a gap.
        if tokenizer.token_to_id(token["content"]) != token["id"]:
            raise ConfigError(
                f"tokenizer: {file} gives {token['content']!r} the id {token['id']}, but the library loads it as "
                f"{tokenizer.token_to_id(token['content'])}; add it to the vocabulary of the model, too"
            )
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError(f"tokenizer: the vocabulary of {file} is empty")
    digest = hashlib.sha256(data).hexdigest()
    return LoadedTokenizer(tokenizer, file, digest, max(vocabulary.values()), can_lose_characters(settings))


def read_tokenizer(path: str | os.PathLike[str]) -> tuple[FilePath, bytes]:
    """The absolute path and the content of a `tokenizer.json`, or of the one in a folder. Raises ConfigError."""
    given = os.fspath(path)
    check_uri(given, "tokenizer")
    if is_uri(given):
        return _read_object(Uri(given))
    if not given:
        raise ConfigError(
            "tokenizer: the path is empty; expected a tokenizer.json or its folder ('.' is the current one)"
        )
    file = Path(os.path.abspath(os.path.expanduser(given)))
    if file.is_dir():
        file /= "tokenizer.json"
    try:
        return file, file.read_bytes()
    except FileNotFoundError as error:
        model = given if _HUB_NAME.fullmatch(given) and not os.path.exists(given) else "MODEL"
        raise ConfigError(
            f"tokenizer: {file} does not exist (given as {given!r}); expected the path of a tokenizer.json or of its "
            f"folder, not a name on the Hugging Face Hub. To get the file of a model, run `hf download {model} "
            "tokenizer.json --local-dir .`"
        ) from error
    except OSError as error:
        raise ConfigError(f"tokenizer: {file} cannot be read: {error.strerror or error}") from error


def _read_object(uri: Uri) -> tuple[Uri, bytes]:
    uri = uri if uri.suffix == ".json" else uri / "tokenizer.json"
    try:
        with open_file(uri) as file:
            return uri, file.read(0, file.size)
    except CorpusReadError as error:
        raise ConfigError(f"tokenizer: {error}") from error


def end_of_text(tokenizer: LoadedTokenizer) -> tuple[str, int]:
    """Name and id of the token that ends a document, if exactly one of the usual ones is among the special tokens.

    Raises ConfigError if there are none or several.
    """
    special = {token.content: id for id, token in tokenizer.library.get_added_tokens_decoder().items() if token.special}
    found = [(name, special[name]) for name in END_OF_TEXT_NAMES if name in special]
    if len(found) == 1:
        return found[0]
    what = "contains several end-of-text tokens" if found else "does not contain a known end-of-text token"
    listed = "candidates" if found else "special tokens"
    known = ", ".join(f"{name} = {id}" for name, id in found or list(special.items())[:10]) or "none"
    raise ConfigError(
        f"tokenizer: {tokenizer.path} {what} ({listed}: {known}). Set eos_id (--eos ID) to the id that ends a "
        "document, or pass --no-eos to `dali-pipes tokenize`"
    )
