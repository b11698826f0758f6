"""Text files of many kinds, tokenised into token files that `open_corpus` and other tools read."""

from dali_pipes.text.cache import kept_tokens
from dali_pipes.text.documents import Document
from dali_pipes.text.encoder import Encoded, Encoder, TextEncoder
from dali_pipes.text.inputs import TextFile, find_text_files
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
    "find_text_files",
    "kept_tokens",
    "load_tokenizer",
    "tokenize_files",
]
