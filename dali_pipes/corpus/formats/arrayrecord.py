"""ArrayRecord files, read with the array_record package. The content of a record is up to its writer:

    ids of a type that is not stated        `dtype` gives it
    a tf.train.Example                      one of its int64 lists holds the ids; recognized automatically
    text                                    refused: it has to be tokenized (`text.arrayrecord` reads it)

A record is a document, or several where its features say so (`row_columns`). Records are decoded in groups, which the
corpus caches. The number of ids of a record is known only after reading it, so all are read once, and the numbers kept.

    record       0     1    2     3          ids of a group start in the same 2^20 bytes of the file's ids
    groups       [          ][         ]
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes import fields
from dali_pipes.corpus.columns.row_columns import (
    LEARNED,
    Cells,
    Place,
    check_numbering,
    find_kept,
    find_learned,
    read_rows,
)
from dali_pipes.corpus.columns.row_facts import RowFacts, facts_of_offsets, join_facts, used_columns, with_names
from dali_pipes.corpus.columns.token_columns import FOR_TEXT, NAMES, names_beside
from dali_pipes.corpus.data_file import DataFile, Int64Array, UsedColumns
from dali_pipes.corpus.formats.foreign import text_kind
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.tf_example import Feature, NotAnExample, list_kind, parse_example
from dali_pipes.errors import ConfigError, CorpusFormatError, CorpusReadError
from dali_pipes.runtime import offset_cache
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import ByteFile, file_size
from dali_pipes.storage.fingerprint import digest_content, digest_file, read_samples
from dali_pipes.uris import FilePath, Uri

Ids: TypeAlias = npt.NDArray[Any]

MAGIC = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"
"""Of Riegeli, the container of ArrayRecord."""
_GROUP_BYTES = 1 << 20
_SCAN_BYTES = 8 << 20
_FIRST_RECORDS = 16  # read to find out what records hold
_KEPT_FROM_BYTES = 64 << 20
_MOST_OPEN = 32
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # for random reads
_FAILURES = (ValueError, RuntimeError, IndexError, OSError)  # what the package raises


class Records:
    """The records of one file. Its reader is opened when first needed, and closed when many others are in use."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._reader: Any = None

    def __len__(self) -> int:
        return int(self._acquire().num_records())

    def read(self, first: int, last: int) -> list[bytes]:
        """Records `first` to `last - 1`. Blocks; safe for several threads. Raises CorpusReadError."""
        if first == last:
            return []
        try:
            records: list[bytes] = self._acquire().read(first, last)
        except _FAILURES as error:
            raise CorpusReadError(f"{self.path}: cannot read records {first:,} to {last - 1:,}: {error}") from error
        if len(records) != last - first:
            raise CorpusReadError(
                f"{self.path}: expected {last - first:,} records at record {first:,}, got {len(records):,}: it is "
                "damaged"
            )
        return records

    def _acquire(self) -> Any:
        reader = self._reader  # a reference that keeps it open while it is in use
        if reader is not None:
            return reader
        found = file_size(self.path)
        if found != self.size:
            now = "missing" if found is None else f"{found:,}"
            raise CorpusReadError(
                f"{self.path}: was replaced or modified after the corpus was opened ({self.size:,} bytes then, {now} "
                "now). Open the corpus again."
            )
        reader = _open_reader(self.path)
        with _open_lock:
            self._reader = reader
            _open.append(weakref.ref(self))
            while len(_open) > _MOST_OPEN:
                oldest = _open.popleft()()
                if oldest is not None:
                    oldest._reader = None
        return reader


_open_lock = threading.Lock()
_open: deque[weakref.ref[Records]] = deque()


@dataclass(frozen=True)
class _Content:
    """What records hold: ids of `id_type`, or Examples with the ids in feature `column`.

    beside: features that describe the ids
    unused: features that may, but are unknown
    known:  the ids, and all features whose meaning is known, including those that are not used
    """

    id_type: np.dtype[Any]
    column: str | None
    beside: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def stored(self) -> np.dtype[Any]:
        """Type of the decoded ids."""
        return self.id_type.newbyteorder("=")

    def values(self, path: Path, number: int, record: bytes, names: Sequence[str | None]) -> list[Ids]:
        """The values of those features in a record; None: its ids, for records that are not Examples."""
        if self.column is None:
            if len(record) % self.id_type.itemsize:
                raise CorpusFormatError(
                    f"{path}: record {number:,} has {len(record):,} bytes, not a multiple of {self.id_type.itemsize}, "
                    f"the width of {self.id_type.name}. Set dtype to the type of the ids."
                )
            return [np.frombuffer(record, self.id_type).astype(self.stored, copy=False)]
        try:
            features = parse_example(record)
        except NotAnExample as error:
            raise CorpusFormatError(
                f"{path}: record {number:,} is not a tf.train.Example ({error}), but the first records are"
            ) from error
        late = [name for name in fields.BESIDE_IDS if name in features and name not in self.known]
        if late:
            raise CorpusFormatError(
                f"{path}: record {number:,} has a feature {late[0]!r}, but the first records do not. Write it to all "
                "records or to none."
            )
        found = []
        for name in names:
            values = features.get(str(name), None if name == self.column and features else np.zeros(0, np.int64))
            if not isinstance(values, np.ndarray):
                what = (
                    f"is missing (found {', '.join(features)})" if values is None else f"is a {list_kind(values)} list"
                )
                raise CorpusFormatError(f"{path}: record {number:,}: feature {name!r} {what}, expected an int64 list")
            found.append(values)
        return found


def recognize(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as these do."""
    return head.startswith(MAGIC)


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. Blocks: reads all of the file once, in threads, and keeps the lengths for the next time.

    The type that the user gave is that of ids that are records; Examples have int64. Without a token column given, it
    is the feature `tokens`, `input_ids`, or the only list of integers.
    """
    path, size, identity, scans = file.path, file.size, file.identity, options.scans
    if isinstance(path, Uri):
        raise CorpusFormatError(
            f"{path}: the array_record package reads local files only. Copy the data with `dali-pipes copy`, or "
            "convert it to another format."
        )
    samples = read_samples(file)
    records = Records(path, size)
    count = len(records)
    content = _find_content(records, count, options)
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

    if size < _KEPT_FROM_BYTES:
        packed = scan()
    else:  # without a cache this only takes time at the next start
        names = "".join(f" {name}" for name in content.beside)
        key = digest_content(digest, [identity])
        about = f"dali_pipes arrayrecord 1 {key} {content.id_type.str}{names}".encode()
        packed, _ = offset_cache.find_or_make([path], "arrayrecord", about, is_plausible, scan)
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
        format="arrayrecord",
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


def _decode(records: Records, content: _Content, padding: tuple[str, ...], borders: Int64Array, group: int) -> Ids:
    first, last = int(borders[group]), int(borders[group + 1])
    ids, *cells = _cells(records, content, (content.column, *padding), first, last)
    kept = find_kept(dict(zip(padding, cells, strict=True)), Place(records.path, first, str(content.column), "record"))
    return ids.values if kept is None else ids.values[kept]


def _decode_mask(
    records: Records, content: _Content, used: UsedColumns, borders: Int64Array, group: int
) -> npt.NDArray[np.uint8]:
    first, last = int(borders[group]), int(borders[group + 1])
    names = (*used.padding, *used.masks)
    cells = dict(zip(names, _cells(records, content, names, first, last), strict=True))
    place = Place(records.path, first, str(content.column), "record", "feature")
    kept = find_kept({name: cells[name] for name in used.padding}, place)
    learned = find_learned({name: cells[name] for name in used.masks}, kept, place)
    assert learned is not None
    return learned.view(np.uint8)


def _cells(records: Records, content: _Content, names: Sequence[str | None], first: int, last: int) -> list[Cells]:
    """These features of records `first` to `last - 1`, each as a column."""
    rows = [
        content.values(records.path, number, record, names)
        for number, record in enumerate(records.read(first, last), first)
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    found = []
    for name, parts in zip(names, columns, strict=True):
        none = np.zeros(0, content.stored if name == content.column else np.int64)
        found.append(Cells(np.array([len(part) for part in parts], np.int64), np.concatenate([none, *parts])))
    return found


def _find_content(records: Records, count: int, options: OpenOptions) -> _Content:
    path, id_type = records.path, options.id_type
    first = records.read(0, min(count, _FIRST_RECORDS))
    for start in range(_FIRST_RECORDS, count, _FIRST_RECORDS):  # empty ones say nothing
        if any(first):
            break
        first = records.read(start, min(count, start + _FIRST_RECORDS))
    filled = [record for record in first if record]
    try:
        examples = [parse_example(record) for record in filled]
    except NotAnExample:
        examples = []
    if any(examples):
        if id_type is not None and id_type.newbyteorder("=") != np.int64:
            raise CorpusFormatError(
                f"{path}: its records are tf.train.Example, whose ids are int64, but dtype = {id_type.name!r} was "
                "given. Leave dtype out."
            )
        column = choose_feature(path, examples, options.token_column)
        there = list(dict.fromkeys(name for example in examples for name in example))
        known, foreign = names_beside(column, there)
        beside = tuple(name for name in known if options.use_masks or name not in LEARNED)
        unused = (*_unused_features(examples, column), *foreign)
        return _Content(np.dtype(np.int64), column, beside, unused, (column, *known, *foreign))
    if id_type is None or id_type.itemsize > 1:
        kind = next((kind for record in filled if (kind := text_kind(record)) is not None), None)
        if kind is not None:
            raise CorpusFormatError(f"{path}: its records are {kind}, not token ids; {FOR_TEXT}")
    if id_type is None:
        if not filled:
            return _Content(np.dtype(np.int64), None)
        raise CorpusFormatError(
            f"{path}: its records are not tf.train.Example. If each holds the ids of a document, set dtype to "
            "'uint16', 'uint32' or 'int32'; the file does not store it."
        )
    return _Content(id_type, None)


def _unused_features(examples: list[dict[str, Feature]], column: str) -> tuple[str, ...]:
    """Features of unknown meaning that have a number for each id, or floating-point numbers."""
    found: dict[str, None] = {}
    for example in examples:
        ids = example.get(column)
        for name, feature in example.items():
            if isinstance(feature, np.ndarray):
                is_as_long = isinstance(ids, np.ndarray) and len(feature) == len(ids) > 1
            else:
                is_as_long = isinstance(feature, str)  # "float"
            if is_as_long:
                found[name] = None
    return fields.unused_columns(found, (column, *NAMES))


def choose_feature(path: FilePath, examples: list[dict[str, Feature]], wanted: str | None) -> str:
    """The feature that holds the ids: `wanted`, the usual names, or the only list of integers. Raises ConfigError."""
    kinds = {name: list_kind(feature) for example in examples for name, feature in example.items()}
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if wanted is not None:
        if wanted not in kinds:
            raise ConfigError(f"{path}: does not have the feature token_column = {wanted!r}; its features are {listed}")
        return wanted
    integers = [name for name, kind in kinds.items() if kind == "int64" and name not in fields.NOT_IDS]
    found = next((name for name in NAMES if name in integers), integers[0] if len(integers) == 1 else None)
    if found is None:
        raise ConfigError(f"{path}: cannot tell which feature holds the token ids; set token_column to one of {listed}")
    return found


def _open_reader(path: Path) -> Any:
    with optional_package("array-record", "arrayrecord", purpose=f"to read {path}"):
        from array_record.python import array_record_module
    try:
        reader = array_record_module.ArrayRecordReader(os.fsencode(path), _OPTIONS)  # names may be other than UTF-8
        is_good = reader.ok()
    except _FAILURES as error:
        raise CorpusFormatError(f"{path}: cannot be opened as an ArrayRecord file: {error}") from error
    if not is_good:
        raise CorpusFormatError(
            f"{path}: the index at the end of this ArrayRecord file cannot be read: it is truncated, damaged or "
            "another kind of Riegeli file. Copy or recreate it."
        )
    return reader
