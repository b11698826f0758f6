"""Token files of any supported format, opened read-only as one stream of ids."""

from dali_pipes.corpus.corpus import Corpus, TokenLocation, TokenMask
from dali_pipes.corpus.formats.registry import FORMATS
from dali_pipes.corpus.loss_mask import LossMask
from dali_pipes.corpus.opener import open_corpus

__all__ = ["FORMATS", "Corpus", "LossMask", "TokenLocation", "TokenMask", "open_corpus"]
