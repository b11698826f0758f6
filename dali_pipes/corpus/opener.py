"""Open files as one corpus: find and recognise them, check each against its header or index, then all together."""

import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.corpus import Corpus
from dali_pipes.corpus.data_file import FORMATS, DataFile, Layout, one_extent
from dali_pipes.corpus.discovery.duplicates import refuse_repeats
from dali_pipes.corpus.discovery.find_files import named_files
from dali_pipes.corpus.discovery.manifests import Manifests
from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.corpus.eager_decoding import decoded_bytes
from dali_pipes.corpus.formats import (
    arrow_messages,
    datatrove,
    flat,
    huggingface,
    litdata,
    llmc,
    mds,
    megatron,
    npy,
    parquet,
    synthetic,
)
from dali_pipes.corpus.formats.arrayrecord import inspect_arrayrecord
from dali_pipes.corpus.formats.arrow import open_arrow
from dali_pipes.corpus.formats.recognize import recognise, refuse_known_header
from dali_pipes.corpus.loss_mask import open_loss_mask
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError
from dali_pipes.storage.decoded_cache import DEFAULT_CACHE_BYTES
from dali_pipes.storage.fingerprint import PIECE_BYTES, digest_file, read_samples
from dali_pipes.storage.local import OpenFile, modified_ns
from dali_pipes.storage.retries import DEFAULT_RETRIES, ReadRetries

_IN_SETS = ("auto", "arrow", "litdata", "mds")
_WITH_COLUMNS = ("arrayrecord", "arrow", "mds", "parquet")
_TEXT_SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
_LARGE_TABLE_BYTES = 1 << 20
_TABLES = {"arrow": open_arrow, "parquet": parquet.open_parquet}


def open_corpus(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str = "auto",
    dtype: str | np.dtype[Any] | None = None,
    eos_id: int | None = None,
    loss_masks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    token_column: str | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    eager: bool = False,
    verify: bool = False,
    read_retries: int = DEFAULT_RETRIES,
    vocab_size: int | None = None,
    notes: Sequence[str] = (),
) -> Corpus:
    """Open token files as one stream of ids, read-only. Blocks for a few reads a file, and to read Megatron indexes.

    Where nothing else says how long the rows are (Parquet, compressed Arrow, many MDS sets, ArrayRecord), they are read
    whole at the first opening, and the lengths are kept in the user's cache folder; with a progress bar on a terminal
    where that takes longer than a second.

    paths:  a file, a folder, a glob, or a list of these; or "synthetic:10B" for ids by formula, without files, which
            see `dali_pipes.corpus.formats.synthetic`. Folders and globs are in natural order (s_1, s_2, s_03, s_10)
            and leave out side files; a list keeps its own order: see `dali_pipes.corpus.discovery.find_files`.
    format: "auto" recognises each file by its content. "flat" (ids alone), "llmc" (also modded-nanogpt), "npy" or
            "megatron" (also fairseq; prefix, `.bin` or `.idx`), "parquet", "arrow" (file or stream; also a folder
            that Hugging Face datasets saved), "mds" and "litdata" (their `index.json`, or its folder), "datatrove"
            (`.ds`) or "arrayrecord" says so and skips that.
    dtype:  integer type of the ids of flat files, uint16 if not given; ">u2" and the like for big-endian ones. Needed
            for ids that are bytes of an MDS column, or records of an ArrayRecord file. Other formats state it
            themselves, and it is compared.
    eos_id: kept as `Corpus.eos_id`; nothing is scanned for it here. Of flat files that `dali-pipes tokenize` wrote it
            is known from their manifest.json.
    loss_masks: files, folders or globs with a mask for each data file, in the same order; an empty list: no masks. By
            default a mask is the file named like the data file with .loss behind it, if there is one, else what the
            columns beside the ids of a table say; one that the folder's manifest.json lists has to be there.
    token_column: column of Parquet, Arrow or MDS files, or feature of Examples in ArrayRecord files, that lists the
                  ids; None: `input_ids`, `tokens`, or the only one
    cache_bytes:  bytes of decoded ids that are kept, for formats that have to be decoded
    eager:        decode all of the corpus now and keep it; blocks, and says on standard error how many bytes that takes
    verify:       compare the checksums that the format records (MDS) with the files, which reads all of them
    read_retries: how often a read that fails for a reason that may pass is tried again, now and later; see
                  `dali_pipes.storage.retries`
    vocab_size:   of a synthetic corpus, 50257 if not given. Ids of files are not compared with it here.
    notes:        sentences that `Corpus.notes` starts with, about the files from which these were made

    uint64 ids are read only where the format itself says so, and served as int64 after a check that they fit.
    A flat file of 0 bytes holds 0 tokens. A corpus of no tokens at all is an error.

    Raises ConfigError for arguments that cannot be, CorpusReadError for what is missing or unreadable,
    CorpusFormatError for files that are damaged, unsupported, or not all of one format. Their id types may differ.
    """
    if synthetic.is_synthetic(paths, format):
        return _open_synthetic(paths, vocab_size, dtype, eos_id, loss_masks, token_column, verify)
    with ReadRetries(read_retries).in_use():
        return _open_corpus(
            paths, format, dtype, eos_id, loss_masks, token_column, cache_bytes, [*notes], eager=eager, verify=verify
        )


def _open_corpus(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str,
    dtype: str | np.dtype[Any] | None,
    eos_id: int | None,
    loss_masks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    token_column: str | None,
    cache_bytes: int,
    notes: list[str],
    *,
    eager: bool,
    verify: bool,
) -> Corpus:
    if format != "auto" and format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; choose auto, {', '.join(FORMATS)}")
    id_type = None if dtype is None else _id_type(dtype, format)
    listed = named_files(paths, use_indexes=format in _IN_SETS, notes=notes)
    named = [(entry, shard) for entry, path in listed for shard in huggingface.list_shards(path, format)]
    refuse_repeats(named)
    found = [shard for _, shard in named]
    with ColumnScans("reading the lengths of rows") as scans:
        inspect = partial(
            _inspect,
            format=format,
            id_type=id_type,
            token_column=token_column,
            scans=scans,
            verify=verify,
            use_masks=loss_masks is None,
        )
        is_slow = len(found) > 1 and _is_large_table(found[0], format)
        files = [
            file for some in (scans.for_files(inspect, found) if is_slow else map(inspect, found)) for file in some
        ]
    files = [replace(file, modified_ns=modified_ns(file.path)) for file in files]
    manifests = Manifests()
    manifests.refuse_lost_files(files, masks=loss_masks is None, indexes=format == "auto")
    for file in files[1:]:
        _check_alike(files[0], file)
    if not any(file.num_tokens for file in files):
        raise CorpusError(f"the corpus is empty: {len(files)} files without a token, the first is {files[0].path}")
    if token_column is not None and files[0].format not in _WITH_COLUMNS:
        raise ConfigError(f"token_column = {token_column!r}: files of format {files[0].format} have no columns")
    mask = open_loss_mask(files, loss_masks)
    recorded = manifests.end_id(files, eos_id) if files[0].format == "flat" else None
    end_id, manifest = recorded if recorded is not None and eos_id is None else (eos_id, None)
    cache_bytes = max(cache_bytes, decoded_bytes(files)) if eager else cache_bytes
    corpus = Corpus(files, end_id, mask, cache_bytes=cache_bytes, eos_id_from=manifest, notes=notes)
    if eager:
        corpus.decode_all()
    return corpus


def _open_synthetic(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    vocab_size: int | None,
    dtype: str | np.dtype[Any] | None,
    eos_id: int | None,
    loss_masks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    token_column: str | None,
    verify: bool,
) -> Corpus:
    of_files = {"loss_masks": loss_masks or None, "token_column": token_column, "verify_checksums": verify or None}
    for name, value in of_files.items():
        if value is not None:
            raise ConfigError(f"{name} = {value!r} applies to files, not to a synthetic corpus; leave it out")
    id_type = None if dtype is None else _id_type(dtype, synthetic.FORMAT)
    file, end_id = synthetic.open_synthetic(paths, vocab_size, id_type, eos_id)
    return Corpus([file], end_id)


def _id_type(dtype: str | np.dtype[Any], format: str) -> np.dtype[Any]:
    try:
        id_type = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype {dtype!r} is not a type: {error}") from error
    if id_type.kind not in "iu" or id_type.itemsize not in (1, 2, 4, 8):
        raise ConfigError(
            f"dtype {dtype!r}: token ids are integers of 1, 2, 4 or 8 bytes, such as 'uint16' or 'uint32'"
        )
    return id_type


def _is_large_table(path: Path, format: str) -> bool:
    """Whether to open such files side by side: with small ones, threads mostly wait for the interpreter lock."""
    with OpenFile(path) as file:
        if file.size < _LARGE_TABLE_BYTES:
            return False
        head = file.read(0, 6)
    if format != "auto":
        return format in _TABLES
    return head.startswith((parquet.MAGIC, arrow_messages.FILE_MAGIC, arrow_messages.CONTINUATION))


def _inspect(
    path: Path,
    format: str,
    id_type: np.dtype[Any] | None,
    token_column: str | None,
    scans: ColumnScans,
    verify: bool,
    use_masks: bool,
) -> list[DataFile]:
    """Find out what the file at `path`, or the set that it lists, holds and check it.

    `format`, `id_type`, `token_column` and `verify` are what the user said. use_masks: whether columns of masks count.
    """
    kind = kind_of_index(path) if format in _IN_SETS else None
    if kind == "mds" and format in ("auto", kind):
        return mds.inspect_mds(path, scans, id_type, token_column, verify, use_masks)
    if verify:
        raise ConfigError(f"{path}: checksums are verified where the format records them, which is MDS")
    if kind == "litdata" and format in ("auto", kind):
        return litdata.inspect_litdata(path, id_type)
    if kind is not None or format in ("mds", "litdata"):
        what = "is no index.json that lists shards" if kind is None else f"lists the shards of a set of format {kind}"
        raise CorpusFormatError(
            f"{path}: {what}; with format={format!r} name the folder of a set of that format, or leave format out"
        )
    if format == "megatron":
        return [_inspect_pair(path, id_type)]
    if format == "datatrove" or (format == "auto" and datatrove.is_datatrove(path)):
        return [datatrove.inspect_datatrove(path, id_type)]
    with OpenFile(path) as file:
        if format == "auto":
            format = recognise(file, None if id_type is None else id_type.itemsize)
            # A file without a mark beside an index is not flat, even if the index cannot be read: better an error that
            # names the index than junk ids.
            index_beside = path.suffix == ".bin" and path.with_suffix(".idx").exists()
            if format == "megatron" or path.suffix == ".idx" or (format == "flat" and index_beside):
                return [_inspect_pair(path, id_type)]
            if format == "flat":
                _refuse_part_of_a_set(path)
                _refuse_other_names(path)
        if format == "arrayrecord":
            return [inspect_arrayrecord(path, scans, id_type, token_column, use_masks)]
        if format in _TABLES:
            table = _TABLES[format](path, token_column, scans, use_masks=use_masks)
            _check_id_type(path, format, table.stored, id_type)
            return [table]
        if format == "flat":
            refuse_known_header(file)
        samples = read_samples(file)
        layout = _layout(file, format, id_type)
        if format == "flat" and id_type is None:
            flat.refuse_wider_ids(file, samples)
        header = file.read(0, layout.data_offset)
    return [
        DataFile(
            path=path,
            format=format,
            size=file.size,
            stored=layout.stored,
            data_offset=layout.data_offset,
            extents=one_extent(layout),
            digest=digest_file(path, file.size, layout.stored, header, samples),
            zeros_last=_ends_in_zeros(file, layout, samples),
        )
    ]


def _ends_in_zeros(file: OpenFile, layout: Layout, samples: Sequence[bytes]) -> bool:
    if file.size - layout.data_offset < PIECE_BYTES:
        return False
    return not any(samples[-1][-PIECE_BYTES:])


def _layout(file: OpenFile, format: str, id_type: np.dtype[Any] | None) -> Layout:
    if format == "flat":
        if id_type is not None and id_type.name == "uint64":
            raise CorpusFormatError(
                f"{file.path}: uint64 ids of a file without a header; say dtype='int64', the same bytes for every id "
                f"below 2^63"
            )
        return flat.parse_flat(file, id_type)
    layout = llmc.parse_llmc(file) if format == "llmc" else npy.parse_npy(file)
    _check_id_type(file.path, format, layout.stored, id_type)
    return layout


def _inspect_pair(path: Path, id_type: np.dtype[Any] | None) -> DataFile:
    """As `_inspect`, for the Megatron pair that the `.bin` or `.idx` at `path` belongs to."""
    if path.suffix not in (".bin", ".idx"):
        raise CorpusFormatError(f"{path}: Megatron data is a pair of files that end in .bin and .idx")
    bin_path = path.with_suffix(".bin")
    with OpenFile(path.with_suffix(".idx")) as index_file:
        header = megatron.parse_header(index_file)
        _check_id_type(index_file.path, "megatron", header.stored, id_type)
        with OpenFile(bin_path) as bin_file:
            index = megatron.read_index(index_file, header, bin_file)
            samples = read_samples(bin_file)
    about_index = struct.pack("<Q3I", index.size, *index.checksums)
    return DataFile(
        path=bin_path,
        format="megatron",
        size=bin_file.size,
        stored=header.stored,
        data_offset=0,
        extents=index.extents,
        digest=digest_file(bin_path, bin_file.size, header.stored, about_index, samples),
        num_documents=header.num_documents,
        read_document_offsets=None if header.num_documents is None else partial(megatron.read_document_offsets, index),
    )


def _check_id_type(path: Path, format: str, stored: np.dtype[Any], id_type: np.dtype[Any] | None) -> None:
    if id_type is not None and id_type.newbyteorder("=") != stored.newbyteorder("="):
        raise CorpusFormatError(f"{path}: its {format} header says {stored.name}, but dtype={id_type.name!r} was given")


def _refuse_part_of_a_set(path: Path) -> None:
    """Refuse a file that has no mark of its own but lies beside an index, even if that is not an index of it."""
    index = path.with_name("index.json")
    kind = kind_of_index(index)
    if kind is not None:
        raise CorpusFormatError(
            f"{path}: looks like a shard of format {kind}, because of {index.name} beside it. Name the folder; if the "
            f"file does hold ids alone, say format='flat' and a dtype."
        )


def _refuse_other_names(path: Path) -> None:
    """Refuse a file that is named as a table or as text but does not begin so, which would be read as junk ids."""
    if path.suffix.lower() in (".arrow", ".feather", ".parquet"):
        raise CorpusFormatError(
            f"{path}: is named as a table, but does not begin as a Parquet or Arrow file does: it is truncated or "
            f"damaged, or of an old version. If it does hold ids alone, say format='flat' and a dtype."
        )
    if path.suffix.lower() in _TEXT_SUFFIXES:  # its content tells only from some length on
        raise CorpusFormatError(
            f"{path}: is named as text; that is not read as it is. Text is opened with tokenizer='tokenizer.json', or "
            f"made into tokens with `dali-pipes tokenize`. If it does hold ids alone, say format='flat' and a dtype."
        )


def _check_alike(one: DataFile, other: DataFile) -> None:
    if one.format == other.format:
        return
    empty = next((file for file in (one, other) if file.size == 0), None)
    hint = f" {empty.path} is empty, 0 bytes: remove it, or make or copy it again." if empty else ""
    raise CorpusFormatError(
        f"all files of a corpus must have the same format, but {one.path} is {one.format} {one.stored.str} and "
        f"{other.path} is {other.format} {other.stored.str}.{hint} Open them separately, or "
        "name only files of one format."
    )
