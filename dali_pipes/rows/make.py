"""From a configuration and a corpus to a row source."""

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.curriculum import steps_of
from dali_pipes.config.rates import places_of_changes, threshold, value_at
from dali_pipes.corpus import Corpus
from dali_pipes.documents import Documents, are_delimited, find_documents
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.block_order import BLOCK_TOKENS
from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.windows import WindowCuts, WindowRows, split_windows
from dali_pipes.runtime.messages import counted

if TYPE_CHECKING:
    from dali_pipes.corpus.keep import Copies, Keep
    from dali_pipes.objectives.fim import FillInMiddle
    from dali_pipes.rows.document_rows import DocumentRows

Int64Array = npt.NDArray[np.int64]


class Named(NamedTuple):
    """What rows of a source of a mixture need beside its configuration."""

    name: str
    share: Fraction | None
    """Of its rows or documents; None: all."""
    in_pieces: bool
    """Whether rows of any source are put together from pieces: then those of all are."""
    looks_back: bool = False
    """Whether rows of any source read tokens before their own."""


def make_rows(config: LoaderConfig, corpus: Corpus, source: Named | None = None) -> tuple[RowSource, str | None]:
    """The rows of a corpus, and what the user should know about its documents or order. Blocks to find documents.

    source: in a mixture, which one this is. Raises `ConfigError` for settings that do not go with the corpus, and what
            `find_documents` raises.
    """
    if corpus.loss_mask is not None and not config.label_shift:
        raise ConfigError(
            "label_shift = False copies the inputs, but the corpus has a loss mask, which needs shifted labels; use "
            "label_shift = True, or loss_masks = [] to learn every token"
        )
    if corpus.is_synthetic and config.document_start_id is not None:
        raise ConfigError(
            f"document_start_id = {config.document_start_id} applies to files: documents of a synthetic corpus end "
            "with eos_id; leave it out"
        )
    _check_cache(config, corpus, None if source is None else source.share)
    found, warning = None, None
    if config.uses_documents:
        found = find_documents(corpus, start_id=config.document_start_id, end_at_files=config.documents_end_at_files)
        warning = found.warning
    warning = "\n".join(filter(None, (warning, _too_wide(config, corpus)))) or None
    if config.rows == "stream":
        return _window_rows(config, corpus, None if found is None else found.offsets, source), warning
    assert found is not None
    rows = _document_rows(config, corpus, found.offsets, source, _fim(config, corpus, found))
    return rows, "\n".join(filter(None, (warning, _too_few_rows(config, rows)))) or None


def _window_rows(
    config: LoaderConfig, corpus: Corpus, offsets: npt.NDArray[np.int64] | None, source: Named | None
) -> RowSource:
    windows = split_windows(corpus.num_tokens, config.row_len, config.stride, config.split, config.validation_fraction)
    cuts = None
    if config.uses_pieces or corpus.loss_mask is not None or (source is not None and source.in_pieces):
        limit = windows.first + windows.num_tokens
        lookback = _lookback(config, source)
        cuts = WindowCuts(offsets, max(1, config.mtp), limit, config.masks_boundaries, lookback, windows.first)
    return WindowRows(
        windows,
        shuffle=_shuffles(config),
        seed=config.seed,
        label_shift=config.label_shift,
        cuts=cuts,
        name=None if source is None else source.name,
        share=None if source is None else source.share,
        random_offset=config.random_offset,
        blocks=_blocks(config),
    )


def _document_rows(
    config: LoaderConfig, corpus: Corpus, offsets: Int64Array, source: Named | None, fim: "FillInMiddle | None"
) -> "DocumentRows":
    from dali_pipes.rows.cost_balance import CostBalance
    from dali_pipes.rows.document_rows import DocumentRows, split_documents
    from dali_pipes.rows.length_buckets import LengthBuckets
    from dali_pipes.rows.token_batches import TokenBatches

    assert config.rows != "stream"
    part = split_documents(offsets, config.split, config.validation_fraction)
    return DocumentRows(
        part,
        config.row_len,
        mode=config.rows,
        long_documents=config.long_documents,
        window_documents=config.window_documents,
        shuffle=_shuffles(config),
        seed=config.seed,
        lengths=steps_of(config.seq_len) if config.grows_by_window else (),
        buckets=None if config.bucket_widths is None else LengthBuckets(np.array(config.bucket_widths, np.int64)),
        name=None if source is None else source.name,
        share=None if source is None else source.share,
        blocks=_blocks(config),
        balance=None if config.cost_weights is None else CostBalance(*config.cost_weights),
        token_batches=None
        if config.batch_tokens is None
        else TokenBatches(config.batch_tokens, config.row_len, config.batch_shapes or ()),
        copies=None if corpus.keep is None else _copies(config, corpus.keep, offsets, part),
        lookback=_lookback(config, source),
        fim=fim,
    )


def _fim(config: LoaderConfig, corpus: Corpus, documents: Documents) -> "FillInMiddle | None":
    """What is rearranged, if anything is. Blocks to look at the ids that begin and end some documents."""
    entry = next((entry for entry in config.objectives if entry.kind == "fim"), None)
    if entry is None:
        return None
    from dali_pipes.config.objectives import Fim
    from dali_pipes.objectives.fim import FillInMiddle

    assert isinstance(entry, Fim)
    ids = entry.ids(config.tokenizer)
    most = np.iinfo(corpus.dtype).max
    if max(ids) > most:
        raise ConfigError(
            f'objective: kind = "fim" inserts id {max(ids):,}, but {corpus.files[0]} stores ids as {corpus.dtype}, at '
            f"most {most:,}; use smaller ids, or tokenize to uint32"
        )
    changes = places_of_changes((entry.rate, entry.spm))
    values = [(at, threshold(value_at(entry.rate, at)), threshold(value_at(entry.spm, at))) for at in changes]
    repeats = config.split == "validation"
    first = values[-1 if repeats else 0]
    return FillInMiddle(
        *first[1:],
        *ids,
        by_piece=entry.level == "piece",
        keeps_first=int(are_delimited(corpus, documents.offsets, config.document_start_id, at_end=False)),
        keeps_last=int(are_delimited(corpus, documents.offsets, corpus.eos_id, at_end=True)),
        repeats=repeats,
        stages=() if repeats else tuple(values[1:]),
    )


def _lookback(config: LoaderConfig, source: Named | None) -> int | None:
    """Tokens before a row that are read with it; None where that is nothing for any source."""
    if config.goldfish is not None:
        return config.goldfish.h
    return 0 if source is not None and source.looks_back else None


def _copies(config: LoaderConfig, keep: "Keep", offsets: Int64Array, part: Int64Array) -> "Copies":
    """How often each document of the split is read."""
    keep.check_length(len(offsets) - 1)
    first = 0 if config.split == "train" else len(offsets) - len(part)
    copies = keep.copies[first : first + len(part) - 1]
    if not (np.diff(part) * copies).any():
        raise ConfigError(
            f"keep: {keep.path} drops every document of the {config.split} split that has tokens "
            f"({len(copies):,} documents); keep at least one of them"
        )
    return copies


def _blocks(config: LoaderConfig) -> BlockShape | None:
    return BlockShape(config.shuffle_window, BLOCK_TOKENS) if config.order == "blocks" else None


def _check_cache(config: LoaderConfig, corpus: Corpus, share: Fraction | None) -> None:
    """Raise `ConfigError` for single rows that a folder is to keep: they are all over the corpus, and read once."""
    if config.cache_dir is None or corpus.needs_decoding or corpus.is_synthetic:
        return
    if corpus.keep is not None and share not in (None, 1):
        raise ConfigError(
            f'cache_dir = "{config.cache_dir}" keeps whole blocks of the corpus, but keep = "{corpus.keep.path}" and a '
            "share of the source (or proxy) together read documents from anywhere in it: remove keep, share or "
            "cache_dir, or copy the corpus to this machine with dali-pipes copy"
        )
    if config.order == "blocks":
        return
    raise ConfigError(
        f'cache_dir = "{config.cache_dir}" keeps whole blocks, but order = "rows" reads single rows of the '
        f'{corpus.format} files from anywhere in the corpus: set order = "blocks", or copy the corpus to '
        "this machine with dali-pipes copy and remove cache_dir"
    )


def _too_wide(config: LoaderConfig, corpus: Corpus) -> str | None:
    """A warning for windows of blocks that a cache cannot hold: each row could fetch or decode a part again."""
    if config.order != "blocks" or not _shuffles(config):
        return None
    block_bytes = BLOCK_TOKENS * corpus.dtype.itemsize
    if corpus.needs_decoding:
        cache = corpus.cache_stats()
        assert cache is not None, "decoded chunks are kept"
        all_bytes, most_bytes, setting = cache.all_bytes, cache.most_bytes, cache.setting
        decoded, effect = " when decoded", "decoded many times"
    elif config.cache_dir is not None and not corpus.is_synthetic:
        all_bytes, most_bytes, setting = corpus.num_tokens * corpus.dtype.itemsize, config.cache_bytes, "cache_bytes"
        decoded, effect = "", "read row by row, and not kept"
    else:
        return None
    needed = min(config.shuffle_window * block_bytes, all_bytes)
    if needed <= most_bytes:
        return None
    fits = most_bytes // block_bytes
    narrower = f"set shuffle_window = {fits:,} or less, or " if fits else "set "
    return (
        f"shuffle_window = {config.shuffle_window:,} blocks take {needed:,} bytes{decoded}, more than {setting} = "
        f"{most_bytes:,}, so parts of the corpus are {effect}; {narrower}{setting} = {needed:,} or more"
    )


def _too_few_rows(config: LoaderConfig, rows: "DocumentRows") -> str | None:
    """A warning for windows whose balanced rows are so few that the ranks of a step get rows of different cost."""
    from dali_pipes.rows.cost_balance import FEWEST_ROWS_OF_A_RANK

    ranks, window = config.world_size or 1, config.window_documents
    all_rows = rows.num_documents if config.rows == "pad" else rows.num_tokens // rows.seq_len
    in_window = all_rows * window // rows.num_documents
    if rows.balance is None or rows.num_windows < 2 or in_window >= FEWEST_ROWS_OF_A_RANK * ranks:
        return None
    while window < rows.num_documents and all_rows * window // rows.num_documents < 2 * FEWEST_ROWS_OF_A_RANK * ranks:
        window *= 2
    return (
        f"window_documents = {config.window_documents:,} makes windows of about {counted(in_window, 'row')} for "
        f"{counted(ranks, 'rank')}, too few for balance to find rows of equal cost for each step; set "
        f"window_documents = {window:,} (plan_report() shows the effect)"
    )


def _shuffles(config: LoaderConfig) -> bool:
    return config.shuffle and config.split == "train"
