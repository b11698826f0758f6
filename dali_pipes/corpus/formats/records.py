"""Files of records as files of ids, whatever their format.

A record is a document, or several where its features say so (`row_columns`). Records are decoded in groups, which the
corpus caches. The number of ids of a record is known only after reading it, so all are read once, and the numbers kept.

    record       0     1    2     3          ids of a group start in the same 2^20 bytes of the file's ids
    groups       [          ][         ]
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.row_columns import Cells, Place, check_numbering, find_kept, find_learned, read_rows
from dali_pipes.corpus.columns.row_facts import RowFacts, facts_of_offsets, join_facts, used_columns, with_names
from dali_pipes.corpus.data_file import DataFile, Int64Array, UsedColumns
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.record_content import Ids, RecordContent, Records, find_content
from dali_pipes.runtime import offset_cache
from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.storage.fingerprint import digest_content, digest_file, read_samples

_KEPT_FROM_BYTES = 64 << 20
_GROUP_BYTES = 1 << 20
_SCAN_BYTES = 8 << 20


def is_kept(size: int) -> bool:
    """Whether what a scan finds in a file of that size is kept in the cache."""
    return size >= _KEPT_FROM_BYTES


def inspect_records(file: ByteFile, records: Records, format: str, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`, for a file of these `records`.

    Blocks: reads all of it once, in threads, and keeps the lengths for the next time.

    `options.id_type` is the type of raw ids; Examples have int64. Without `token_column`, the ids are in the feature
    `input_ids` or `tokens`, else in `inputs` or `targets` if only one of them exists, else in the only integer list.
    """
    path, size, identity, scans = file.path, file.size, file.identity, options.scans
    samples = read_samples(file)
    count = len(records)
    content = find_content(records, options)
    digest = digest_file(path, size, content.stored, f"{count} {content.column}".encode(), samples)

    def scan() -> Int64Array:
        step = max(1, count * _SCAN_BYTES // max(size, 1))
        firsts = range(0, count, step)

        def measure(at: int) -> RowFacts:
            first, last = firsts[at], min(firsts[at] + step, count)
            ids, *beside = _cells(records, content, (content.column, *content.beside), first, last)
            place = Place(path, first, str(content.column), "record", "feature")
            rows = read_rows(ids, dict(zip(content.beside, beside, strict=True)), place)
            return RowFacts.of(rows)._replace(counts=rows.lengths)

        facts = join_facts(scans.for_chunks(measure, [size // len(firsts)] * len(firsts)) if firsts else [])
        check_numbering(facts.numbering, Place(path, 0, str(content.column), "record", "feature"))
        return facts.pack() if content.beside else facts.offsets

    def is_plausible(kept: Int64Array) -> bool:
        if content.beside:
            return RowFacts.may_be_packed(kept, count)
        return len(kept) == count + 1 and offset_cache.may_be_offsets(kept, strictly=False)

    if not is_kept(size):
        packed = scan()
    else:  # without a cache this only takes time at the next start
        names = "".join(f" {name}" for name in content.beside)
        key = digest_content(digest, [identity])
        about = f"dali_pipes {format} 1 {key} {content.id_type.str}{names}".encode()
        packed, _ = offset_cache.find_or_make([path], format, about, is_plausible, scan)
    # A chunk of the facts is a record here, so the number of ids of each record is known.
    facts = RowFacts.unpack(packed, count) if content.beside else facts_of_offsets(packed, np.arange(count + 1))
    used = used_columns(content.beside, facts.totals, count, content.unused)
    if not facts.unlearned:
        used = replace(used, masks=())
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(facts.counts)])
    groups = offsets[:-1] * content.stored.itemsize // _GROUP_BYTES
    heads = np.flatnonzero(np.diff(groups, prepend=-1))
    borders = np.append(heads, count)
    sizes = np.diff(offsets[borders])
    filled = np.flatnonzero(sizes)
    digest = with_names(digest, (*used.padding, *used.packing))
    found = DataFile(
        path=path,
        format=format,
        size=size,
        identity=identity,
        stored=content.stored,
        data_offset=None,
        extents=np.stack([filled, sizes[filled]], axis=1).astype(np.int64),
        digest=digest,
        num_documents=len(facts.offsets) - 1,
        read_document_offsets=lambda: facts.offsets,
        decode=partial(_decode, records, content, used.padding, borders),
        columns=used,
    )
    if not used.masks:
        return [found]
    mask = replace(
        found,
        stored=np.dtype(np.uint8),
        digest=with_names(digest, used.masks),
        decode=partial(_decode_mask, records, content, used, borders),
    )
    return [replace(found, loss_mask=mask)]


def _decode(records: Records, content: RecordContent, padding: tuple[str, ...], borders: Int64Array, group: int) -> Ids:
    first, last = int(borders[group]), int(borders[group + 1])
    ids, *cells = _cells(records, content, (content.column, *padding), first, last)
    kept = find_kept(dict(zip(padding, cells, strict=True)), Place(records.path, first, str(content.column), "record"))
    return ids.values if kept is None else ids.values[kept]


def _decode_mask(
    records: Records, content: RecordContent, used: UsedColumns, borders: Int64Array, group: int
) -> npt.NDArray[np.uint8]:
    first, last = int(borders[group]), int(borders[group + 1])
    names = (*used.padding, *used.masks)
    cells = dict(zip(names, _cells(records, content, names, first, last), strict=True))
    place = Place(records.path, first, str(content.column), "record", "feature")
    kept = find_kept({name: cells[name] for name in used.padding}, place)
    learned = find_learned({name: cells[name] for name in used.masks}, kept, place)
    assert learned is not None
    return learned.view(np.uint8)


def _cells(records: Records, content: RecordContent, names: Sequence[str | None], first: int, last: int) -> list[Cells]:
    """These features of records `first` to `last - 1`, each as a column."""
    rows = [
        content.values(records.place(number), record, names)
        for number, record in enumerate(records.read(first, last), first)
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    found = []
    for name, parts in zip(names, columns, strict=True):
        none = np.zeros(0, content.stored if name == content.column else np.int64)
        found.append(Cells(np.array([len(part) for part in parts], np.int64), np.concatenate([none, *parts])))
    return found
