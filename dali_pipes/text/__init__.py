"""Text files of many formats, tokenized into token files that `open_corpus` and other tools read."""

from dali_pipes.text.cache import cached_tokens
from dali_pipes.text.documents import Document
from dali_pipes.text.encoder import Encoded, Encoder, TextEncoder
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.inputs import find_text_files
from dali_pipes.text.shard_task import TokenizeConfig, publish_shards, tokenize_shard
from dali_pipes.text.tokenize import Job, Summary, tokenize_files
from dali_pipes.text.tokenizer import load_tokenizer

__all__ = [
    "Document",
    "Encoded",
    "Encoder",
    "Job",
    "Summary",
    "TextEncoder",
    "TextFile",
    "TokenizeConfig",
    "cached_tokens",
    "find_text_files",
    "load_tokenizer",
    "publish_shards",
    "tokenize_files",
    "tokenize_shard",
]
