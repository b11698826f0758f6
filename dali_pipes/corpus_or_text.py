"""Open any corpus: token files, or text files with a tokenizer.

What reads text is imported only where there is a tokenizer.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes import __version__
from dali_pipes import corpus as token_files
from dali_pipes.corpus import Corpus
from dali_pipes.corpus.discovery.file_names import is_side_file
from dali_pipes.corpus.id_types import Reads
from dali_pipes.errors import ConfigError, CorpusError
from dali_pipes.storage.decoded_cache import DEFAULT_CACHE_BYTES
from dali_pipes.storage.retries import DEFAULT_REQUESTS, DEFAULT_RETRIES


def open_corpus(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str = "auto",
    dtype: str | np.dtype[Any] | None = None,
    eos_id: int | None = None,
    loss_masks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    text_key: str | None = None,
    token_column: str | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    eager: bool = False,
    verify: bool = False,
    read_retries: int = DEFAULT_RETRIES,
    read_requests: int = DEFAULT_REQUESTS,
    reads: Reads = "calls",
    vocab_size: int | None = None,
    keep: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Open token files, or text files with a `tokenizer`, as one stream of ids, read-only.

    tokenizer: `tokenizer.json` for text files: .txt (one document each), .jsonl, .csv, .tsv (also .gz, .zst), Parquet,
               Arrow and MosaicML MDS with a text column, `save_to_disk` folders, WebDataset tars, ArrayRecord,
               TFRecord. They are tokenized when they are first opened, which blocks, into the cache folder
               (`DALI_PIPES_CACHE`), and read from there later. If several processes open them, one tokenizes and the
               others wait. Not used for token files.
    text_key:  key or column of the text, by default "text". A table or set that also has a column of token ids counts
               as text only with this setting. ArrayRecord and TFRecord files with records of an unknown kind count as
               text unless `dtype` is set.
    eos_id:    for text, the id added after each document that is not empty; by default the tokenizer's end-of-text
               token.

    The rest is as for `dali_pipes.corpus.open_corpus`. Raises what that raises, ConfigError for a tokenizer that cannot
    be loaded, several candidates for eos_id, or a cache folder that cannot be written, BackendError for a missing
    package.
    """
    has_tokens = format != "auto" or (token_column is not None and text_key is None)
    if tokenizer is None or has_tokens or not _are_text(paths, text_key, dtype is not None):
        corpus = token_files.open_corpus(
            paths,
            format,
            dtype,
            eos_id,
            loss_masks,
            token_column=token_column,
            cache_bytes=cache_bytes,
            eager=eager,
            verify=verify,
            read_retries=read_retries,
            read_requests=read_requests,
            reads=reads,
            vocab_size=vocab_size,
            keep=keep,
        )
        if tokenizer is not None and corpus.is_synthetic:
            raise ConfigError(
                f"tokenizer = {os.fspath(tokenizer)!r} applies to text, not to a synthetic corpus; omit it"
            )
        if text_key is not None:  # checked after opening, whose errors say more
            corpus.close()
            advice = "set tokenizer to tokenize the text" if tokenizer is None else "name text files"
            raise ConfigError(
                f"text_key = {text_key!r}: {corpus.files[0]} is read as token ids, not as text; omit text_key, or "
                f"{advice}"
            )
        return corpus
    only_tokens = {
        "dtype": dtype,
        "loss_masks": loss_masks or None,
        "token_column": token_column,
        "verify": verify or None,
    }
    for name, value in only_tokens.items():
        if value is not None:
            raise ConfigError(f"{name} = {value!r} applies to token files, not to text; omit it")
    from dali_pipes.text import cached_tokens, find_text_files

    made_by = f"dali_pipes {__version__}"
    notes: list[str] = []
    folder, end = cached_tokens(find_text_files(paths, notes), tokenizer, eos_id, text_key or "text", made_by)
    return token_files.open_corpus(folder, eos_id=end, read_retries=read_retries, reads=reads, notes=notes, keep=keep)


def _are_text(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], text_key: str | None, has_dtype: bool
) -> bool:
    from dali_pipes.text.inputs import list_files

    try:
        files = list_files(paths)
    except CorpusError:  # such as a Megatron prefix: opening it as token files works, or explains the problem
        return False
    files = [path for path in files if path.stat().st_size] or files  # an empty shard tells nothing
    text = [path for path in files if _is_text(path, text_key, has_dtype)]
    others = [path for path in files if path not in set(text)]
    if text and others and not all(is_side_file(path.name) for path in text):
        raise CorpusError(f"{text[0]} is text, but {others[0]} is not; list files of one kind only")
    return not others


def _is_text(path: Path, text_key: str | None, has_dtype: bool) -> bool:
    from dali_pipes.text.formats.registry import TEXT_FORMATS, recognize

    found = recognize(path)
    if found is None:
        return False
    kind, compression = found
    return text_key is not None or not TEXT_FORMATS[kind].holds_tokens(path, compression, has_dtype)
