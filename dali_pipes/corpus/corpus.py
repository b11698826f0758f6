"""A corpus: token files read as one stream of ids, in the order in which they were found.

    files      a.bin, 5 ids      b.bin, 0 ids     c.bin, 4 ids
    stream     0 1 2 3 4                          5 6 7 8
    extents    [0, 5) of a.bin                    [5, 9) of c.bin

An extent is a run of consecutive ids in one file: usually one a file, more by a Megatron index. Rows may cross extents,
so no tail of a file is lost. Files may differ in id type: ids are served in the narrowest type that holds them all, and
narrower ones are widened when they are read.
"""

import itertools
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.discovery.manifests import StatedTokenizer
from dali_pipes.corpus.document_offsets import join_offsets
from dali_pipes.corpus.eager_decoding import decode_all, decoded_bytes
from dali_pipes.corpus.id_types import Reads, StoredType, stored_types
from dali_pipes.corpus.keep import Keep
from dali_pipes.corpus.notes import notes_on
from dali_pipes.corpus.spans import cut_at, read_through
from dali_pipes.errors import CorpusError, CorpusReadError, TokenRangeError
from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.monitoring.stats import CacheStats
from dali_pipes.runtime.messages import counted, printable
from dali_pipes.storage.batched_reads import RawReads
from dali_pipes.storage.cache_entries import Content, Made, entry_of
from dali_pipes.storage.decoded_cache import DEFAULT_CACHE_BYTES, ChunkCache
from dali_pipes.storage.file_pool import FilePool
from dali_pipes.storage.fingerprint import MOST_MASK_DIGESTS, digest_content, digest_corpus, short_digests
from dali_pipes.storage.linux_aio import runs_of_equal
from dali_pipes.storage.mapped_reads import MappedReads
from dali_pipes.storage.retries import current_retries
from dali_pipes.uris import FilePath

if TYPE_CHECKING:
    from dali_pipes.corpus.block_reads import BlockReads
    from dali_pipes.storage.node_cache import NodeCache

_GOLDEN = (5**0.5 - 1) / 2
_NO_ROWS: Final = np.zeros(0, np.int64)


class TokenLocation(NamedTuple):
    """Where a token is stored: `offset` in tokens from the first token of the file's data."""

    file: FilePath
    offset: int


class TokenMask(Protocol):
    """Which ids of a corpus are learned, by position: see `loss_mask.LossMask`."""

    dtype: np.dtype[np.uint8]
    digests: tuple[bytes, ...]
    num_files: int
    covers_all: bool

    @property
    def stored(self) -> "Corpus":
        """The masks themselves: at the positions of their ids, if they cover all."""

    def read_pieces(
        self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[np.uint8]
    ) -> None:
        """As `Corpus.read_pieces`: 1 for each id that is learned, 0 for the others."""

    def close(self) -> None:
        """Close the files."""


class Corpus(ShownAsTable):
    """Token files as one stream. Made by `open_corpus`; immutable and thread-safe.

    num_tokens:    ids in all files
    num_documents: documents by the format's own index, None for a format without one
    dtype:         native integer type in which ids are served: that of the files (int64 for uint64), or the narrowest
                   that holds the ids of all files
    format:        one of `FORMATS`
    eos_id:        as given to `open_corpus`; else the id that ends documents of a synthetic corpus, or the one in the
                   manifest of flat files
    eos_id_from:   that manifest; None if the id has another origin
    tokenizers:    what the ids were made with, where manifests state that
    files:         data files in reading order, absolute paths or URIs; of a synthetic corpus its name
    file_types:    integer type of the ids of each file as stored
    ending_in_zeros: numbers of the files whose last ids are all 0
    extents:       position of each extent's first id, then the end, (E + 1,), and the file of each, (E,); int64
    fingerprint:   16 hex digits of format, id type, and the files' names, sizes, headers and sampled bytes; the same
                   wherever the folder is and whenever the files were touched
    content_key:   16 hex digits of the fingerprint and the data files' identities: the key of what was found by reading
                   the ids
    file_digests:  8 hex digits per file; for more than 24 files, a run of ceil(files / 24) consecutive ones
    loss_mask:     which ids are learned, None if all are; enters the fingerprint
    mask_digests:  as file_digests, of the files' masks, at most 12; empty without masks
    keep:          how often each document is read, None: once; enters the fingerprint, not the content_key
    notes:         notes for the user: files that a folder or pattern skipped, columns that are used or ignored

    A context manager. Files are opened when they are needed and read with positioned reads, and memory-mapped only
    with `reads = "mapped"`.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        eos_id: int | None = None,
        loss_mask: TokenMask | None = None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        reads: Reads = "calls",
        eos_id_from: FilePath | None = None,
        tokenizers: Sequence[StatedTokenizer] = (),
        notes: Sequence[str] = (),
        keep: Keep | None = None,
    ) -> None:
        # There may be as many extents as documents: 28 bytes for each, and no copies in the files.
        counts = [len(file.extents) for file in files]
        extents = np.concatenate([file.extents for file in files])
        ends = np.cumsum(counts).tolist()
        self._data_files = tuple(
            file if count < 2 else replace(file, extents=extents[end - count : end])
            for file, count, end in zip(files, counts, ends, strict=True)
        )
        # Token position of each extent's start, then the end of the last: int64 (E + 1,).
        self._starts: Int64Array = np.zeros(len(extents) + 1, np.int64)
        np.cumsum(extents[:, 1], out=self._starts[1:])
        self._first_bytes: Int64Array = extents[:, 0]
        self._file_numbers: npt.NDArray[np.int32] = np.repeat(np.arange(len(files), dtype=np.int32), counts)
        self._retries = current_retries()
        self._pool = FilePool(
            [file.path for file in files],
            [file.size for file in files],
            identities=[file.identity for file in files],
            retries=self._retries,
        )
        self._reads = reads
        self._types, self._type_numbers = stored_types([file.stored for file in files], self._pool, reads)
        decoded = np.array([file.decode is not None for file in files])
        self._is_decoded = decoded[self._file_numbers] if decoded.any() else None  # extent by extent
        self._generate = files[0].generate  # ids by formula: no file is read
        one = self._types[0]
        needs_work = self._generate is not None or len(self._types) > 1 or one.is_swapped or one.served != one.native
        self._as_stored = None if needs_work or self._is_decoded is not None else one  # what all files hold, as it is
        self._turns = itertools.count()
        self._chunks = ChunkCache(cache_bytes, decoded_bytes(files))
        self._node: NodeCache | None = None
        self._blocks: BlockReads | None = None
        self._documents_lock = threading.Lock()
        self._document_offsets: Int64Array | None = None

        self.num_tokens: Final = int(self._starts[-1])
        known = [file.num_documents for file in files if file.num_documents is not None]
        self.num_documents: Final = sum(known) if len(known) == len(files) else None
        self.dtype: Final[np.dtype[Any]] = np.result_type(*(one.served for one in self._types))
        self.format: Final = files[0].format
        self.eos_id: Final = eos_id
        self.eos_id_from: Final = eos_id_from
        self.tokenizers: Final = tuple(tokenizers)
        self.files: Final = tuple(file.path for file in files)
        self.file_types: Final = tuple(file.stored for file in files)
        self.extents: Final = (self._starts, self._file_numbers)
        self.loss_mask: Final = loss_mask
        self.ending_in_zeros: Final = tuple(number for number, file in enumerate(files) if file.zeros_last)
        self.keep: Final = keep
        of_keep = () if keep is None else (keep.note,)
        self.notes: Final = (*notes, *notes_on(files, self.dtype), *of_keep)
        digests = [file.digest for file in files]
        id_type = self._types[0].native if len(self._types) == 1 else self.dtype
        of_masks = () if loss_mask is None else loss_mask.digests
        of_data = digest_corpus(self.format, id_type, [*digests, *of_masks])
        self.fingerprint: Final = (
            of_data if keep is None else digest_corpus(self.format, id_type, [*digests, *of_masks, keep.digest])
        )
        self.content_key: Final = digest_content(of_data.encode(), [file.identity for file in files])
        self._digests = digests
        self.file_digests: Final = short_digests(digests)
        self.mask_digests: Final = short_digests(of_masks, MOST_MASK_DIGESTS)

    def digests_of(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """`file_digests` of a corpus of only the files with these numbers."""
        return short_digests([self._digests[number] for number in numbers])

    @property
    def is_synthetic(self) -> bool:
        """Whether the ids come from a formula instead of files."""
        return self._generate is not None

    @property
    def is_in_place(self) -> bool:
        """Whether the ids of each file are one run of bytes in it, which reads need not decode."""
        return self._generate is None and self._is_decoded is None and len(self._first_bytes) == len(self.files)

    @property
    def needs_decoding(self) -> bool:
        """Whether ids of some files have to be decoded."""
        return self._is_decoded is not None

    def share_decoded(self, cache: "NodeCache") -> None:
        """Keep decoded chunks in the cache of the node from now on, instead of in this process. Does not block."""
        self._node = cache
        if self.loss_mask is not None:
            self.loss_mask.stored.share_decoded(cache)

    def read_by_blocks(self, cache: "NodeCache", grid: BlockGrid, sharers: int = 1) -> None:
        """Read rows and pieces from now on through the cache of the node, block by block. Does not block.

        sharers: processes of the node that do so
        """
        assert self._generate is None, "a formula is not worth keeping"
        assert self._is_decoded is None, "decoded chunks are kept instead"
        from dali_pipes.corpus.block_reads import BlockReads  # with the first cache: most runs do not have one

        self._blocks = BlockReads(cache, grid, self.content_key, self.dtype, self._read_files, sharers)
        mask = self.loss_mask
        if mask is not None and mask.covers_all and not mask.stored.needs_decoding:
            mask.stored.read_by_blocks(cache, grid, sharers)

    def fetch_ahead(self, blocks: Sequence[int], owner: object) -> None:
        """Put blocks of that grid into the cache, in this order, as far as there is room, while `owner` exists.

        Does not wait for them.
        """
        if self._blocks is not None:
            self._blocks.fetch_ahead(blocks, owner)
        if self.loss_mask is not None:
            self.loss_mask.stored.fetch_ahead(blocks, owner)

    def node_keys(self) -> Iterator[tuple[str, bool]]:
        """The content keys of what is in the cache of the node, and whether its positions are those of the ids."""
        if self._blocks is not None or (self._node is not None and self.needs_decoding):
            yield self.content_key, True
        if self.loss_mask is not None:
            yield from ((key, self.loss_mask.covers_all) for key, _ in self.loss_mask.stored.node_keys())

    @classmethod
    def joined(cls, corpora: Sequence["Corpus"]) -> "Corpus":
        """The files of several corpora as one, which keeps no more of them open than one corpus does. For reads alone.

        It has the read retries of the first, reads as that one does, and is closed separately.
        """
        with corpora[0]._retries.in_use():
            return cls([file for corpus in corpora for file in corpus._data_files], reads=corpora[0]._reads)

    @property
    def document_offsets(self) -> Int64Array | None:
        """Token position of each document's start, and the end: int64 (num_documents + 1,), read-only, increasing.

        Equal neighbors are an empty document. Read from the indexes at the first use, which blocks, then kept. None for
        a format without documents.
        """
        if self.num_documents is None:
            return None
        with self._documents_lock, self._retries.in_use():
            if self._document_offsets is None:
                self._document_offsets = join_offsets(self._data_files, self.content_key)
            return self._document_offsets

    def tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        """Ids `start` ... `start + count - 1` in a fresh array (count,) of the corpus's dtype. Blocks.

        Raises CorpusError for a range outside the corpus, CorpusReadError if a file cannot be read.
        """
        start, count = operator.index(start), operator.index(count)
        self._check_range(start, start, count)
        out = np.empty(count, self.dtype)
        if count:  # not through a cache, which would fetch a whole block
            self._read_files(np.array([start]), np.array([count]), np.zeros(1, np.int64), out)
        return out

    def read_rows(self, starts: Sequence[int] | npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Fill row r of `out` with the ids from position starts[r]. Blocks, and releases the GIL while it reads.

        starts: R positions
        out:    (R, L), C-contiguous, writeable, of the corpus's dtype

        Raises CorpusError for rows outside the corpus, CorpusReadError if a file ended early or cannot be read,
        TokenRangeError for a uint64 id that int64 cannot hold. Rows may be partly filled then.
        """
        self._check_out(out, 2)
        positions, length = _integers("starts", starts, len(out)), out.shape[1]
        rest = None
        if self._as_stored is not None and self._blocks is None and positions.size and length:
            self._check_range(int(np.minimum.reduce(positions)), int(np.maximum.reduce(positions)), length)
            rest = self._read_whole_rows(self._as_stored.raw, positions, out)
            if not len(rest):
                return
            positions = positions[rest]
        lengths = np.full(len(positions), length)
        targets = lengths.cumsum() - lengths if rest is None else rest * length
        self._read(positions, lengths, targets, out.reshape(-1))

    def gathered_rows(self, starts: Int64Array, length: int) -> npt.NDArray[Any] | None:
        """The rows that `read_rows` reads, in a new array (R, length), where one step copies all of them from a map.

        None where they have to be read. Blocks; raises as `read_rows`.
        """
        raw = None if self._as_stored is None or self._blocks is not None else self._as_stored.raw
        if not isinstance(raw, MappedReads) or len(self._first_bytes) > 1 or not len(starts):
            return None
        self._check_range(int(np.minimum.reduce(starts)), int(np.maximum.reduce(starts)), length)
        width = self.dtype.itemsize
        offsets = starts * width
        offsets += int(self._first_bytes[0])
        rows = raw.gathered(int(self._file_numbers[0]), offsets, length * width)
        return None if rows is None else rows.view(self.dtype)

    def read_pieces(self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        """Put the `lengths[p]` ids from position starts[p] at out[targets[p]]. Otherwise as `read_rows`.

        starts, lengths, targets: (P,); pieces do not overlap in `out`, and the places between them stay as they are
        out: (N,), C-contiguous, writeable, of the corpus's dtype
        """
        self._check_out(out, 1)
        positions, counts = _integers("starts", starts, len(starts)), _integers("lengths", lengths, len(starts))
        places = _integers("targets", targets, len(starts))
        if len(places) and (
            np.minimum.reduce(counts) < 0
            or np.minimum.reduce(places) < 0
            or np.maximum.reduce(places + counts) > len(out)
        ):
            raise ValueError(f"pieces do not fit into out, which has {len(out):,} elements")
        self._read(positions, counts, places, out)

    def locate(self, position: int) -> TokenLocation:
        """The file of the token at `position`, and its offset there in tokens. Does not read data."""
        position = operator.index(position)
        self._check_range(position, position, 1)
        extent = int(np.searchsorted(self._starts, position, side="right")) - 1
        number = int(self._file_numbers[extent])
        file = self._data_files[number]
        if file.decode is not None or file.data_offset is None:
            first = int(np.searchsorted(self._file_numbers, np.int32(number)))
            return TokenLocation(file.path, position - int(self._starts[first]))
        width = file.stored.itemsize
        byte = int(self._first_bytes[extent]) + (position - int(self._starts[extent])) * width
        return TokenLocation(file.path, (byte - file.data_offset) // width)

    def cache_stats(self) -> CacheStats | None:
        """Statistics of the cache of decoded chunks, or of blocks; None without one. Does not block for long."""
        own: CacheStats | None = None
        if self._blocks is not None:
            own = self._blocks.stats()
        elif self._is_decoded is not None:
            own = self._chunks.stats()
            if self._node is not None and self._node.can_store:
                own = self._node.stats(self.content_key, own.all_bytes)
        if own is None or not own.folder or self.loss_mask is None:
            return own
        return CacheStats.sum([own, self.loss_mask.stored.cache_stats()])

    def decode_all(self) -> None:
        """Decode every chunk now and keep as many as `cache_bytes` allows; see `eager_decoding`. Blocks."""
        with self._retries.in_use():
            decode_all(self._data_files, self._chunks)

    @property
    def read_retries(self) -> int:
        """Number of retries after transient read failures so far. Does not block."""
        return self._retries.count

    def end_retries(self) -> None:
        """Stop retrying: failing reads, and those that wait for a retry, raise immediately. Idempotent."""
        self._retries.end()

    def close(self) -> None:
        """Close the files; reads in progress finish. Idempotent. Attributes stay usable."""
        self.end_retries()
        self._pool.close()
        self._chunks.clear()
        if self._blocks is not None:
            self._blocks.close()
        if self.loss_mask is not None:
            self.loss_mask.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        documents = "" if self.num_documents is None else f", {counted(self.num_documents, 'document')}"
        return (
            f"<Corpus {self.format} {self.dtype.name}: {counted(self.num_tokens, 'token')}{documents}, "
            f"{counted(len(self.files), 'file')}, fingerprint {self.fingerprint}>"
        )

    def _table(self) -> Table:
        """For a notebook; a line of text is enough elsewhere."""
        first, more = printable(str(self.files[0])), len(self.files) - 1
        documents = "not stored by this format" if self.num_documents is None else f"{self.num_documents:,}"
        rows = [
            ("files", first if not more else f"{first} and {more:,} more"),
            ("format", f"{self.format}, {self.dtype.name}"),
            ("tokens", f"{self.num_tokens:,}"),
            ("documents", documents),
            ("fingerprint", self.fingerprint),
        ]
        return Table("Corpus", rows)

    def _check_range(self, lowest: int, highest: int, count: int) -> None:
        if count < 0 or lowest < 0 or highest + count > self.num_tokens:
            start = lowest if lowest < 0 else highest
            raise CorpusError(
                f"cannot read {count:,} tokens at position {start:,}: the corpus has {self.num_tokens:,} tokens"
            )

    def _check_out(self, out: npt.NDArray[Any], axes: int) -> None:
        flags = out.flags
        if out.ndim != axes or out.dtype != self.dtype or not flags.c_contiguous or not flags.writeable:
            raise ValueError(
                f"out: shape {out.shape}, {out.dtype}, C-contiguous {out.flags.c_contiguous}, writeable "
                f"{out.flags.writeable}; expected ({'rows, ' if axes == 2 else ''}tokens), {self.dtype}, C-contiguous, "
                "writeable"
            )

    def _read(self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        if not positions.size or not np.count_nonzero(lengths):
            self._check_range(int(positions.min(initial=0)), int(positions.max(initial=0)), 0)
            return
        lowest, furthest = int(np.minimum.reduce(positions)), int((positions + lengths).argmax())
        self._check_range(lowest, int(positions[furthest]), int(lengths[furthest]))
        if self._blocks is not None:
            self._blocks.read(positions, lengths, targets, out)
        else:
            self._read_files(positions, lengths, targets, out)

    def _read_files(
        self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]
    ) -> None:
        """Read pieces, none of them empty, without a cache of blocks."""
        if self._generate is not None:
            self._generate(positions, lengths, targets, out)
            return
        if len(self._types) == 1:
            self._read_type(self._types[0], positions, lengths, targets, out)
        else:
            self._read_types(positions, lengths, targets, out)

    def _read_whole_rows(self, raw: RawReads | MappedReads, positions: Int64Array, out: npt.NDArray[Any]) -> Int64Array:
        """Read the rows of `out` that are in one extent each; the numbers of the others."""
        places: Int64Array | slice = slice(None)
        width, crossing = out.itemsize, _NO_ROWS
        if len(self._first_bytes) == 1:
            raw.read_rows(out, places, int(self._file_numbers[0]), int(self._first_bytes[0]) + positions * width)
            return crossing
        extents = np.searchsorted(self._starts, positions, side="right") - 1
        is_whole = positions + out.shape[1] <= self._starts[extents + 1]
        if not is_whole.all():
            places, crossing = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
            positions, extents = positions[places], extents[places]
        if len(positions):
            offsets = self._first_bytes[extents] + (positions - self._starts[extents]) * width
            raw.read_rows(out, places, self._file_numbers[extents], offsets)
        return crossing

    def _read_types(
        self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]
    ) -> None:
        """Read pieces of files of several types: type by type, through memory of that type."""
        positions, lengths, targets, extents = cut_at(self._starts, positions, lengths, targets)
        numbers = self._type_numbers[self._file_numbers[extents]]
        for number in np.unique(numbers).tolist():
            stored, here = self._types[number], numbers == number
            starts, sizes, ends = positions[here], lengths[here], targets[here]
            if stored.served == self.dtype:
                self._read_type(stored, starts, sizes, ends, out)
                continue
            read_through(partial(self._read_type, stored), stored.served, starts, sizes, ends, out)

    def _read_type(
        self,
        stored: StoredType,
        positions: Int64Array,
        lengths: Int64Array,
        targets: Int64Array,
        out: npt.NDArray[Any],
    ) -> None:
        """Read pieces of files of one type."""
        width, is_uint64 = stored.native.itemsize, stored.native == np.uint64
        view = out.data.cast("B")
        if len(self._first_bytes) == 1 and self._is_decoded is None:
            offsets = positions * width
            offsets += int(self._first_bytes[0])
            stored.raw.read(view, targets, lengths, int(self._file_numbers[0]), offsets)
        else:
            self._read_from_extents(stored, positions, lengths, targets, view)
        if not (stored.is_swapped or is_uint64):
            return
        for position, target, length in zip(positions.tolist(), targets.tolist(), lengths.tolist(), strict=True):
            piece = out[target : target + length]
            if stored.is_swapped:
                piece.byteswap(inplace=True)
            if is_uint64 and piece.min(initial=0) < 0:
                self._refuse_large_id(position, piece)

    def _read_from_extents(
        self, stored: StoredType, positions: Int64Array, lengths: Int64Array, targets: Int64Array, view: memoryview
    ) -> None:
        width = stored.native.itemsize
        positions, lengths, targets, extents = cut_at(self._starts, positions, lengths, targets)
        if self._is_decoded is not None:
            decoded = self._is_decoded[extents]
            self._copy_decoded(width, positions[decoded], lengths[decoded], targets[decoded], extents[decoded], view)
            positions, lengths, targets, extents = (
                column[~decoded] for column in (positions, lengths, targets, extents)
            )
        if len(positions):
            offsets = self._first_bytes[extents] + (positions - self._starts[extents]) * width
            stored.raw.read(view, targets, lengths, self._file_numbers[extents].astype(np.int64), offsets)

    def _copy_decoded(
        self,
        width: int,
        positions: Int64Array,
        lengths: Int64Array,
        targets: Int64Array,
        extents: Int64Array,
        view: memoryview,
    ) -> None:
        """Copy pieces that are in one decoded chunk each, chunk by chunk, so that each takes one look at the cache."""
        if not len(extents):
            return
        # Every call starts with another chunk: threads that need the same ones decode them in parallel.
        firsts, _ = runs_of_equal(extents)
        first = firsts[int(next(self._turns) * _GOLDEN * len(firsts)) % len(firsts)]
        columns = (np.roll(column, -first).tolist() for column in (positions, lengths, targets, extents))
        chunk: Content = Made(memoryview(b""))
        current = -1
        try:
            for position, length, target, extent in zip(*columns, strict=True):
                if extent != current:
                    chunk.close()
                    current, chunk = extent, self._decoded(extent)
                begin = (position - int(self._starts[extent])) * width
                out = view[target * width : (target + length) * width]
                if not chunk.read(begin, out):
                    chunk.close()
                    chunk = Made(self._decode(extent))
                    chunk.read(begin, out)
        finally:
            chunk.close()

    def _decoded(self, extent: int) -> Content:
        """A decoded chunk: of the cache of the node, of that of this process, or decoded now."""
        number, number_there = int(self._file_numbers[extent]), int(self._first_bytes[extent])
        if self._node is not None:
            begin, end = int(self._starts[extent]), int(self._starts[extent + 1])
            size = (end - begin) * self._data_files[number].stored.itemsize
            entry = entry_of("d", self.content_key, begin, end, size)
            found = self._node.find(entry) or self._node.find_or_make(entry, lambda: self._decode(extent))
            if found is not None:
                return found
            if self._node.can_store:  # else the cache of this process has to do
                return Made(self._decode(extent))
        with self._retries.in_use():
            ids = self._chunks.get(number, number_there, self._data_files[number].decode_unchanged)
        return Made(self._checked(extent, ids))

    def _decode(self, extent: int) -> memoryview:
        """The bytes of a chunk, without a cache."""
        with self._retries.in_use():
            number, chunk = int(self._file_numbers[extent]), int(self._first_bytes[extent])
            return self._checked(extent, self._data_files[number].decode_unchanged(chunk))

    def _checked(self, extent: int, ids: npt.NDArray[Any]) -> memoryview:
        """The bytes of a chunk that was decoded, if it is as long as when the corpus was opened."""
        file, chunk = self._data_files[int(self._file_numbers[extent])], int(self._first_bytes[extent])
        expected = int(self._starts[extent + 1] - self._starts[extent])
        if ids.shape != (expected,) or ids.dtype != file.stored:
            raise CorpusReadError(
                f"{file.path}: chunk {chunk} holds {ids.size:,} {ids.dtype} ids, expected {expected:,} {file.stored} "
                "ids as when the corpus was opened: the file was replaced. Open the corpus again."
            )
        return ids.data.cast("B")

    def _refuse_large_id(self, position: int, piece: npt.NDArray[Any]) -> None:
        column = int(np.argmax(piece < 0))
        place = self.locate(position + column)
        raise TokenRangeError(
            f"{place.file}: token {place.offset:,} is {int(piece[column]) % 2**64}, expected an id below 2^63, since "
            "ids of uint64 files are served as int64"
        )


def _integers(name: str, values: Sequence[int] | npt.NDArray[Any], count: int) -> Int64Array:
    if type(values) is np.ndarray and values.dtype == np.int64 and values.shape == (count,):
        return values
    array = np.asarray(values)
    if array.shape != (count,) or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: shape {array.shape}, {array.dtype}; expected ({count},), integers")
    return array.astype(np.int64, copy=False)
