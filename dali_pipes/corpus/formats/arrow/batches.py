"""Open an Arrow file, and decode its batches with pyarrow."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.row_chunks import PlainIds, RowReader, damage_named, make_data_file
from dali_pipes.corpus.columns.token_columns import TokenColumns, choose_columns, import_pyarrow
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.arrow.layout import can_be_plain, extents_of, row_lengths
from dali_pipes.corpus.formats.arrow.messages import (
    END_OF_STREAM,
    Message,
    Messages,
    check_claims,
    message_crc,
    read_messages,
)
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.token_run import check_stated_type
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.uris import FilePath


class BatchChunks:
    """The batches of an Arrow file; a `RowChunks`. Holds no descriptor."""

    def __init__(self, file: ByteFile, messages: Messages) -> None:
        self.path = file.path
        self.rows = [batch.rows for batch in messages.batches]
        self.sizes = [batch.body_size for batch in messages.batches]
        self._file_size, self._identity, self._messages = file.size, file.identity, messages

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """As `RowChunks.batches`: the batch, read as a separate stream, with the dictionaries that apply to it."""
        import pyarrow

        messages = [*self._messages.dictionaries[chunk], self._messages.batches[chunk]]
        with open_file(self.path, known=(self._file_size, self._identity)) as file:
            if file.size != self._file_size:
                raise self._changed(f"{self._file_size:,} bytes then, {file.size:,} now")
            data = self._read(file, messages, names)
        with damage_named(self.path, f"batch {chunk}"):
            schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(self._messages.schema))
            wanted = sorted(schema.get_field_index(name) for name in names)
            options = pyarrow.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
            with pyarrow.ipc.open_stream(pyarrow.py_buffer(data), options=options) as stream:
                for batch in stream:
                    batch.validate(full=True)  # pyarrow trusts what it reads; offsets may lead anywhere
                    yield [batch.column(name) for name in names]

    def _read(self, file: ByteFile, messages: Sequence[Message], names: Sequence[str]) -> memoryview:
        """The messages, as a stream; if the ids are plain, the buffers of other columns are zeros."""
        schema = self._messages.schema
        size = sum(one.head_size + one.body_size for one in messages)
        data = memoryview(np.zeros(len(schema) + size + len(END_OF_STREAM), np.uint8).data)
        data[: len(schema)] = schema
        at = len(schema)
        for one in messages:
            part = data[at : at + one.head_size + one.body_size]
            file.read_ranges([(one.start, one.head_size, 0)], part)
            if message_crc(part[: one.head_size]) != one.crc:
                raise self._changed(f"another message at byte {one.start:,} now")
            places = self._needed(part, one, names) if len(messages) == 1 else [(one.head_size, len(part))]
            file.read_ranges([(one.start + first, last - first, first) for first, last in places], part)
            check_claims(self.path, one, part)
            at += len(part)
        data[at:] = END_OF_STREAM
        return data

    def _needed(self, part: memoryview, message: Message, names: Sequence[str]) -> list[tuple[int, int]]:
        """First byte and end of the buffers of those columns in a batch, of which `part` has the head."""
        if message.is_compressed or not self._messages.is_little_endian:
            return [(message.head_size, len(part))]
        import pyarrow

        with damage_named(self.path, f"batch at byte {message.start}"):
            buffer = pyarrow.py_buffer(part)
            schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(self._messages.schema))
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(buffer), schema)
            # Where the arrays' buffers would be in memory is where they are in the message.
            buffers = [one for name in names for one in batch.column(name).buffers() if one is not None and one.size]
            places = [(one.address - buffer.address, one.size) for one in buffers]
            if any(not message.head_size <= start <= len(part) - size for start, size in places):
                raise ValueError("a buffer is outside its batch")
        return [(start, start + size) for start, size in places]

    def _changed(self, how: str) -> CorpusReadError:
        return CorpusReadError(f"{self.path}: changed after the corpus was opened ({how}). Open the corpus again.")


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. Blocks for some reads a batch; reads a compressed column whole, once."""
    path = file.path
    pyarrow = import_pyarrow(path)
    messages = read_messages(file)
    with damage_named(path, "schema"):
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(messages.schema))
        columns = choose_columns(path, schema, options.token_column, use_masks=options.use_masks)
    check_stated_type(path, "arrow", columns.stored, options.id_type)
    heads = np.array([(one.start, one.head_size, one.body_size, one.crc) for one in messages.batches], np.int64)
    header = messages.schema + heads.tobytes() + columns.header
    digest = digest_file(path, file.size, columns.stored, header, read_samples(file))
    plain: PlainIds | None = None
    if can_be_plain(messages, schema.field(columns.tokens).type):
        extents = extents_of(file, messages, schema, columns.tokens, columns.stored.itemsize)
        plain = PlainIds(extents, partial(_read_row_offsets, path, file.size, columns, int(extents[:, 1].sum())))
    reader = RowReader(BatchChunks(file, messages), columns, digest, file.identity)
    return [make_data_file(reader, "arrow", file.size, options.scans, plain)]


def _read_row_offsets(path: FilePath, size: int, columns: TokenColumns, num_tokens: int) -> Int64Array:
    """Ids before each row of a file whose ids are plain, and all of them: int64 (rows + 1,). Blocks."""
    import pyarrow

    with open_file(path) as file:
        messages = read_messages(file)
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(messages.schema))
        lengths = row_lengths(file, messages, schema, columns.tokens, columns.stored.itemsize)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if file.size != size or offsets[-1] != num_tokens:
        raise CorpusReadError(
            f"{path}: changed after the corpus was opened ({num_tokens:,} ids in {size:,} bytes then, {offsets[-1]:,} "
            f"in {file.size:,} now). Open the corpus again."
        )
    return offsets
