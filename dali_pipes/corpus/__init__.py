"""Token files of any supported format, opened read-only as one stream of ids."""

from dali_pipes.corpus.corpus import Corpus, TokenLocation
from dali_pipes.corpus.datafile import FORMATS
from dali_pipes.corpus.loss_mask import LossMask
from dali_pipes.corpus.opening import open_corpus

__all__ = ["FORMATS", "Corpus", "LossMask", "TokenLocation", "open_corpus"]
