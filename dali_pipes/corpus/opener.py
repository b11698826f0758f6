"""Open files as one corpus: find and recognize them, check each against its header or index, then all together."""

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.kept_tables import KeptTables
from dali_pipes.corpus.columns.scans import LARGE_TABLE_BYTES, ColumnScans
from dali_pipes.corpus.corpus import Corpus
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.discovery.duplicates import refuse_repeats
from dali_pipes.corpus.discovery.find_files import entries_of, named_files
from dali_pipes.corpus.discovery.manifests import Manifests
from dali_pipes.corpus.eager_decoding import decoded_bytes
from dali_pipes.corpus.formats import huggingface, registry, synthetic
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.id_types import Reads
from dali_pipes.corpus.keep import Keep, read_keep
from dali_pipes.corpus.loss_mask import open_loss_mask
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError
from dali_pipes.storage.byte_file import open_file
from dali_pipes.storage.decoded_cache import DEFAULT_CACHE_BYTES
from dali_pipes.storage.kept_answers import answers_kept
from dali_pipes.storage.kept_listings import listings_kept
from dali_pipes.storage.retries import DEFAULT_REQUESTS, DEFAULT_RETRIES, ReadRetries
from dali_pipes.uris import FilePath, Uri, is_uri


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
    read_requests: int = DEFAULT_REQUESTS,
    reads: Reads = "calls",
    vocab_size: int | None = None,
    notes: Sequence[str] = (),
    keep: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Open token files as one stream of ids, read-only. Blocks for a few reads a file, and to read Megatron indexes.

    Files that do not state the lengths of their rows (compressed Arrow, many MDS sets, ArrayRecord, TFRecord, Parquet
    whose footers do not count the ids: see `formats.parquet`) are read whole when they are first opened, and the
    lengths are kept in the user's cache folder. If that takes longer than a second, a terminal shows a progress bar.

    paths:  a file, a folder, a glob, a URI such as `s3://bucket/prefix/*.bin`, or a list of these; or "synthetic:10B"
            for ids by formula, without files: see `dali_pipes.corpus.formats.synthetic`. Folders and globs are in
            natural order (s_1, s_2, s_03, s_10) and skip side files; a list keeps its own order: see
            `dali_pipes.corpus.discovery.find_files`.
    format: "auto" recognizes each file by its content. "flat" (ids alone), "llmc" (also modded-nanogpt), "npy",
            "megatron" (also fairseq; prefix, `.bin` or `.idx`), "parquet", "arrow" (file or stream; also a folder
            that Hugging Face datasets saved), "mds" and "litdata" (their `index.json`, or its folder), "datatrove"
            (`.ds`), "arrayrecord" or "tfrecord" selects that format.
    dtype:  integer type of the ids of flat files, uint16 by default; ">u2" and the like for big-endian ids. Required
            for ids in a bytes column of an MDS set, or in records of an ArrayRecord or TFRecord file. For formats that
            state the type, it must match.
    eos_id: kept as `Corpus.eos_id`; the ids are not scanned for it here. For flat files that `dali-pipes tokenize`
            wrote, their manifest.json has it.
    loss_masks: files, folders or globs with a mask for each data file, in the same order; an empty list: no masks. By
            default the mask of a data file NAME is the file NAME.loss next to it, else the columns next to the ids of a
            table; a mask that the folder's manifest.json lists must exist.
    token_column: column of Parquet, Arrow or MDS files, or feature of Examples in ArrayRecord and TFRecord files, that
                  holds the ids; None: `input_ids`, `tokens`, or the only one
    cache_bytes:  bytes of decoded ids that are kept, for formats that have to be decoded
    eager:        decode the whole corpus now and keep it; blocks, and prints its size on standard error
    verify:       compare the files with the checksums that the format records (MDS, TFRecord), which reads all of them
    read_retries: number of retries after a transient read failure, now and later; see `dali_pipes.storage.retries`
    read_requests: requests to object stores in flight, in the whole process
    reads:        "calls": ids are read with system calls, which can fail with an error; "mapped": copied from a map of
                  each file, which costs less for files in the page cache of a local disk, but ends the process with
                  SIGBUS if a file shrinks or the disk fails. Formats that have to be decoded always use calls.
    vocab_size:   of a synthetic corpus, 50257 by default. Ids of files are not compared with it here.
    notes:        first notes of `Corpus.notes`, about the inputs of these files
    keep:         file with the number of times that rows of documents read each one: see `dali_pipes.corpus.keep`

    uint64 ids are read only from formats that state the type, and served as int64 after a check that they fit. A flat
    file of 0 bytes holds 0 tokens. A corpus without any tokens is an error.

    Raises ConfigError for invalid arguments, CorpusReadError for missing or unreadable files, CorpusFormatError for
    files that are damaged, unsupported, or of different formats. Their id types may differ.
    """
    if synthetic.is_synthetic(paths, format):
        return _open_synthetic(paths, vocab_size, dtype, eos_id, loss_masks, token_column, keep, verify)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ReadRetries(read_retries, read_requests).in_use())
        entries = entries_of(paths)
        stack.enter_context(listings_kept([Uri(entry) for entry in entries if is_uri(entry)]))
        return _open_corpus(
            entries,
            format,
            dtype,
            eos_id,
            loss_masks,
            token_column,
            cache_bytes,
            [*notes],
            eager=eager,
            verify=verify,
            reads=reads,
            keep=None if keep is None else read_keep(keep),
        )


def _open_corpus(
    entries: Sequence[str],
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
    reads: Reads,
    keep: Keep | None,
) -> Corpus:
    registry.check_name(format)
    id_type = None if dtype is None else _id_type(dtype, format)
    listed = named_files(entries, use_indexes=registry.uses_index(format), notes=notes)
    named = [(entry, shard) for entry, path in listed for shard in huggingface.list_shards(path, format)]
    refuse_repeats(named)
    found = [shard for _, shard in named]
    remote = [path for path in found if isinstance(path, Uri)]
    with ColumnScans("reading row lengths") as scans, answers_kept(remote):
        use_masks = loss_masks is None
        tables = KeptTables(found, (token_column, use_masks))
        options = OpenOptions(scans, tables, id_type, token_column, verify, use_masks)
        inspect = partial(_inspect, format=format, options=options)
        is_slow = len(found) > 1 and (bool(remote) or _is_large_table(found[0], format))
        opened = scans.for_files(inspect, found, waits=bool(remote)) if is_slow else map(inspect, found)
        files = [file for some in opened for file in some]
    tables.store()
    manifests = Manifests()
    manifests.refuse_lost_files(files, masks=loss_masks is None, indexes=format == "auto")
    for file in files[1:]:
        _check_alike(files[0], file)
    if not any(file.num_tokens for file in files):
        raise CorpusError(
            f"the corpus is empty: 0 tokens in {len(files):,} file{'s' * (len(files) > 1)} (the first is "
            f"{files[0].path}); check that the files were written completely"
        )
    if token_column is not None and not registry.format_named(files[0].format).has_columns:
        raise ConfigError(
            f"token_column = {token_column!r} does not apply to files of format {files[0].format} such as "
            f"{files[0].path}. Leave it out."
        )
    mask = open_loss_mask(files, loss_masks)
    recorded = manifests.end_id(files, eos_id) if files[0].format == "flat" else None
    end_id, manifest = recorded if recorded is not None and eos_id is None else (eos_id, None)
    cache_bytes = max(cache_bytes, decoded_bytes(files)) if eager else cache_bytes
    corpus = Corpus(
        files,
        end_id,
        mask,
        cache_bytes=cache_bytes,
        reads=reads,
        eos_id_from=manifest,
        tokenizers=manifests.tokenizers(files),
        notes=notes,
        keep=keep,
    )
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
    keep: str | os.PathLike[str] | None,
    verify: bool,
) -> Corpus:
    of_files = {"loss_masks": loss_masks or None, "token_column": token_column, "verify_checksums": verify or None}
    for name, value in of_files.items():
        if value is not None:
            raise ConfigError(f"{name} = {value!r} applies to files, not to a synthetic corpus. Leave it out.")
    id_type = None if dtype is None else _id_type(dtype, synthetic.FORMAT)
    file, end_id = synthetic.open_synthetic(paths, vocab_size, id_type, eos_id)
    return Corpus([file], end_id, keep=None if keep is None else read_keep(keep))


def _id_type(dtype: str | np.dtype[Any], format: str) -> np.dtype[Any]:
    try:
        id_type = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype = {dtype!r} is not a type: {error}. Set an integer type such as 'uint16'.") from error
    if id_type.kind not in "iu" or id_type.itemsize not in (1, 2, 4, 8):
        raise ConfigError(
            f"dtype = {dtype!r}: expected an integer type of 1, 2, 4 or 8 bytes, such as 'uint16' or 'uint32'"
        )
    return id_type


def _is_large_table(path: FilePath, format: str) -> bool:
    """Whether to open such files in parallel."""
    with open_file(path) as file:
        return file.size >= LARGE_TABLE_BYTES and registry.is_table(file, format)


def _inspect(path: FilePath, format: str, options: OpenOptions) -> list[DataFile]:
    """Check the file at `path`, or the set that it lists. format: as the user gave it."""
    with open_file(path) as file:
        found = registry.find_format(file, format, None if options.id_type is None else options.id_type.itemsize)
        if options.verify and not found.has_checksums:
            raise ConfigError(
                f"{path}: format {found.name} does not record checksums, so they cannot be verified. Set "
                "verify_checksums = False."
            )
        return found.inspect(file, options)


def _check_alike(one: DataFile, other: DataFile) -> None:
    if one.format == other.format:
        return
    empty = next((file for file in (one, other) if file.size == 0), None)
    hint = f" {empty.path} is empty (0 bytes): remove it, or copy or recreate it." if empty else ""
    raise CorpusFormatError(
        f"all files of a corpus must have the same format, but {one.path} is {one.format} {one.stored.str} and "
        f"{other.path} is {other.format} {other.stored.str}.{hint} Name only files of one format, or read them with "
        "separate loaders."
    )
