"""Token files of any supported format, opened read-only as one stream of ids."""

from dali_pipes.corpus.corpus import Corpus, TokenLocation
from dali_pipes.corpus.datafile import FORMATS
from dali_pipes.corpus.opening import open_corpus

__all__ = ["FORMATS", "Corpus", "TokenLocation", "open_corpus"]
