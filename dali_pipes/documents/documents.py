"""Find the documents of a corpus: from its index, or from the id that ends or begins each of them.

    tokens           7 8 E 9 E E 5           end id E            S 7 8 S S 9       start id S
    offsets          0     3   5 6 7                             0     3 4   6
    documents        [7 8 E] [9 E] [E] [5]                       [S 7 8] [S] [S 9]

The id belongs to the document that it ends or begins. What follows the last end id is a last document, and what comes
before the first start id is a first one. Only an index can tell of documents without tokens: there they stay, as equal
neighbours in `offsets`.
"""

import operator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.documents.cache import is_plausible, kept_about
from dali_pipes.documents.scan import Delimiter, scan_offsets
from dali_pipes.errors import ConfigError
from dali_pipes.runtime import offset_cache

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of one corpus, in its order."""

    offsets: Int64Array
    """(D + 1,), read-only, from 0 to the number of tokens, non-decreasing: document d is tokens offsets[d] to
    offsets[d + 1] - 1. May be mapped from a file, which other processes share."""

    source: str
    """How they were found: "index", "end id 50256", "start id 1"."""

    warning: str | None = None
    """What the user should know: an id that never occurs, offsets that could not be kept for the next start."""

    @property
    def num_documents(self) -> int:
        """D, empty documents included."""
        return len(self.offsets) - 1


def find_documents(
    corpus: Corpus, *, start_id: int | None = None, end_at_files: bool = False, cache_dir: Path | None = None
) -> Documents:
    """The documents of `corpus`. Blocks: reads its index, or all of its tokens at the first call for an id.

    start_id:  the id that begins a document; `corpus.eos_id` is the one that ends a document. Neither is looked at
               where the format has an index.
    end_at_files: end a document where its file ends, too. Where not all do so by their id, this takes memory for all
               offsets.
    cache_dir: where the offsets found in a scan are kept, by default `DALI_PIPES_CACHE`, else `dali_pipes` in
               `XDG_CACHE_HOME`, else in `~/.cache`. Of several processes that look for them at the same time, one scans
               and the others wait. A folder that cannot be written, or one that holds the data, is a warning in the
               result. Kept offsets are known by the corpus's fingerprint, which samples its files, and by their times
               of last change.

    Raises ConfigError where an id is needed and none is given, or both are, and what `Corpus.read_rows` raises.
    """
    offsets = corpus.document_offsets
    if offsets is not None:
        return Documents(offsets, "index")
    if corpus.is_synthetic:
        raise ConfigError(
            f"{corpus.files[0]}: has too many documents to index. Use a smaller corpus, such as "
            '"synthetic:50B", or rows = "stream" without outputs that depend on documents'
        )
    delimiter = _delimiter(corpus, start_id)
    source = f"{delimiter.kind} id {delimiter.token_id}"
    limits = np.iinfo(corpus.dtype)
    if not limits.min <= delimiter.token_id <= limits.max:
        whole: Int64Array = np.array([0, corpus.num_tokens])
        whole.flags.writeable = False
        return Documents(_cut(whole, corpus, end_at_files), source, _never_occurs(corpus, delimiter))
    offsets, why_not_kept = _kept_or_scanned(corpus, delimiter, cache_dir)
    warnings = [_never_occurs(corpus, delimiter)] if _is_absent(corpus, delimiter, offsets) else []
    if why_not_kept is not None:
        warnings.append(
            f"document offsets cannot be cached: {why_not_kept}; the next start will scan the corpus again. "
            "Set DALI_PIPES_CACHE to a writable folder."
        )
    return Documents(_cut(offsets, corpus, end_at_files), source, " ".join(warnings) or None)


def _delimiter(corpus: Corpus, start_id: int | None) -> Delimiter:
    end_id = corpus.eos_id if start_id is None or corpus.eos_id_from is None else None  # what the user says goes first
    if start_id is not None and end_id is not None:
        raise ConfigError(
            f"eos_id = {end_id} and document_start_id = {start_id} are both set, but only one of them can "
            f"separate documents: keep eos_id if it ends every document, document_start_id if it begins every document"
        )
    if end_id is not None:
        return Delimiter("end", operator.index(end_id))
    if start_id is not None:
        return Delimiter("start", operator.index(start_id))
    raise ConfigError(
        f"{corpus.files[0]}: files of format {corpus.format} do not store where documents end; set eos_id to the id "
        f"that ends every document, or document_start_id to the id that begins every document"
    )


def _kept_or_scanned(corpus: Corpus, delimiter: Delimiter, cache_dir: Path | None) -> tuple[Int64Array, str | None]:
    """The offsets, and why they could not be kept."""
    scan = partial(scan_offsets, corpus, delimiter)
    about = kept_about(corpus.content_key, delimiter.kind, delimiter.token_id)
    may_be = partial(is_plausible, num_tokens=corpus.num_tokens)
    return offset_cache.find_or_make(corpus.files, "documents", about, may_be, scan, cache_dir)


def _cut(offsets: Int64Array, corpus: Corpus, end_at_files: bool) -> Int64Array:
    """The offsets, and the ends of files among them if asked for."""
    if not end_at_files:
        return offsets
    starts, files = corpus.extents
    ends = starts[1:][np.diff(files, append=-1) != 0]
    at = np.searchsorted(offsets, ends)
    is_missing = offsets[at] != ends  # the end of the corpus is always there
    if not is_missing.any():
        return offsets
    cut = np.insert(offsets, at[is_missing], ends[is_missing])
    cut.flags.writeable = False
    return cut


def _is_absent(corpus: Corpus, delimiter: Delimiter, offsets: Int64Array) -> bool:
    """Whether the id does not occur. A single document may also contain it, at its outer end."""
    if len(offsets) > 2:
        return False
    position = corpus.num_tokens - 1 if delimiter.kind == "end" else 0
    return int(corpus.tokens(position, 1)[0]) != delimiter.token_id


def _never_occurs(corpus: Corpus, delimiter: Delimiter) -> str:
    setting = "eos_id" if delimiter.kind == "end" else "document_start_id"
    return (
        f"{setting} = {delimiter.token_id} does not occur in the corpus ({corpus.num_tokens:,} tokens of "
        f"{corpus.dtype.name}, first file {corpus.files[0]}), so the whole corpus is one document; check that it is an "
        f"id of the tokenizer that the corpus was tokenized with"
    )
