"""The messages of an Arrow IPC file or stream: where each is, found by reading only their heads.

    stream     schema  dictionaries ...  batch 0  batch 1  ...  end
    file       ARROW1  (the same messages)  footer  i32 footer length  ARROW1
    message    FF FF FF FF  i32 length  metadata | body          the footer lists dictionaries and batches of a file

Metadata are FlatBuffers tables: a table starts with the distance back to its vtable, which says where each field is.
(Format: https://arrow.apache.org/docs/format/Columnar.html and the `.fbs` files it names)
"""

import struct
import zlib
from typing import Any, NamedTuple

from dali_pipes.corpus.formats.marks import ARROW_CONTINUATION, ARROW_MAGIC
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.uris import FilePath

END_OF_STREAM = ARROW_CONTINUATION + b"\0\0\0\0"

_HEAD_GUESS = 1024  # bytes: most heads fit, and so cost one read
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MOST_RATIOS = {0: 256, 1: 1 << 15}
"""By codec, LZ4 frames and Zstandard: upper bounds of compression ratios."""
_BUFFER = struct.Struct("<qq")  # offset in the body, length
_BLOCK = struct.Struct("<qi4xq")  # offset, length of the head, length of the body


class Message(NamedTuple):
    """One message, `head_size` bytes and a body. `rows`: of a batch. `dictionary`, `is_delta`: of a dictionary."""

    start: int
    head_size: int
    body_size: int
    crc: int
    kind: int
    is_compressed: bool = False
    rows: int = 0
    dictionary: int = 0
    is_delta: bool = False


class Messages(NamedTuple):
    """What an Arrow file holds.

    schema:       the head of the schema's message
    dictionaries: those that apply to each batch, in the order in which they have to be read
    """

    schema: bytes
    is_little_endian: bool
    batches: list[Message]
    dictionaries: list[list[Message]]


def read_messages(file: ByteFile) -> Messages:
    """Find the messages of a file or stream. Blocks for a read a message. Raises CorpusFormatError if it is damaged."""
    is_file = file.read(0, min(6, file.size)) == ARROW_MAGIC
    try:
        first, schema = _read_head(file, 8 if is_file else 0)
        if first.kind != _SCHEMA:
            raise CorpusFormatError(f"{file.path}: its first Arrow message is not a schema: it is damaged")
        is_little = _root(schema).table(2).number(0, "<h") == 0
        found = _from_footer(file) if is_file else _from_stream(file, first.head_size + first.body_size)
    except (struct.error, OverflowError) as error:
        raise CorpusFormatError(
            f"{file.path}: its Arrow metadata is damaged ({error}). Copy or recreate it."
        ) from error
    messages = Messages(schema, is_little, [], [])
    known: list[Message] = []
    for message in found:
        if message.kind == _BATCH:
            messages.batches.append(message)
            messages.dictionaries.append(known)
        elif message.kind == _DICTIONARY:
            replaced = () if message.is_delta else (message.dictionary,)
            known = [one for one in known if one.dictionary not in replaced] + [message]
        else:
            raise CorpusFormatError(
                f"{file.path}: the Arrow message at byte {message.start:,} is neither a batch nor a dictionary"
            )
    return messages


def check_claims(path: FilePath, message: Message, data: bytes | memoryview) -> None:
    """Raise CorpusFormatError if buffers of a message claim to be larger, decompressed, than they can be.

    pyarrow allocates memory for that claim before it decompresses. data: all of the message.
    """
    head, body = bytes(data[: message.head_size]), data[message.head_size :]
    try:
        header = _root(head).table(2)
        batch = header.table(1) if message.kind == _DICTIONARY else header
        if not batch.has(3):
            return
        most = len(body) * _MOST_RATIOS.get(batch.table(3).number(0, "<b"), 1)
        first, count = batch.vector(2, _BUFFER.size)
        places = [_BUFFER.unpack_from(head, at) for at in range(first, first + count * _BUFFER.size, _BUFFER.size)]
        claimed = sum(max(0, struct.unpack_from("<q", body, start)[0]) for start, size in places if size)
    except struct.error as error:
        raise CorpusFormatError(f"{path}: its Arrow metadata is damaged ({error}). Copy or recreate it.") from error
    if claimed > most:
        raise CorpusFormatError(
            f"{path}: the buffers of the Arrow message at byte {message.start:,} claim {claimed:,} bytes, but its "
            f"{len(body):,} bytes decompress to at most {most:,}: it is damaged. Copy or recreate it."
        )


def message_crc(head: bytes | memoryview) -> int:
    """What identifies the head of a message."""
    return zlib.crc32(head)


def _from_stream(file: ByteFile, at: int) -> list[Message]:
    found: list[Message] = []
    while at < file.size:
        if file.read(at, min(8, file.size - at)) == END_OF_STREAM:
            at += 8
            break
        message, _ = _read_head(file, at)
        found.append(message)
        at += message.head_size + message.body_size
    if at != file.size:
        raise CorpusFormatError(
            f"{file.path}: its Arrow stream ends at byte {at:,}, but the file has {file.size:,} bytes. If it holds "
            "several streams, write them as one."
        )
    return found


def _from_footer(file: ByteFile) -> list[Message]:
    tail = file.read(max(0, file.size - 10), min(10, file.size))
    length = struct.unpack_from("<i", tail)[0] if len(tail) == 10 else 0
    if tail[4:] != ARROW_MAGIC or not 0 < length <= file.size - 18:
        raise CorpusFormatError(
            f"{file.path}: does not end with the footer of an Arrow file (last bytes {tail!r} of {file.size:,}): it is "
            "truncated or damaged. Copy or recreate it."
        )
    footer = file.read(file.size - 10 - length, length)
    root = _Table(footer, _indirect(footer, 0))
    found: list[Message] = []
    for field in (2, 3):  # dictionaries, then batches
        first, count = root.vector(field, _BLOCK.size)
        for at in range(first, first + count * _BLOCK.size, _BLOCK.size):
            start, head_size, body_size = _BLOCK.unpack_from(footer, at)
            message, _ = _read_head(file, start)
            if (message.head_size, message.body_size) != (head_size, body_size):
                raise CorpusFormatError(
                    f"{file.path}: the Arrow message at byte {start:,} has {message.head_size:,} + "
                    f"{message.body_size:,} bytes, but the footer records {head_size:,} + {body_size:,}: it is "
                    "damaged. Copy or recreate it."
                )
            found.append(message)
    return found


def _read_head(file: ByteFile, start: int) -> tuple[Message, bytes]:
    if not 0 <= start <= file.size - 8:
        raise CorpusFormatError(
            f"{file.path}: expected an Arrow message at byte {start:,}, but the file has {file.size:,} bytes: it is "
            "truncated or damaged. Copy or recreate it."
        )
    head = file.read(start, min(_HEAD_GUESS, file.size - start))
    length = struct.unpack_from("<i", head, 4)[0]
    if head[:4] != ARROW_CONTINUATION or not 0 < length <= file.size - start - 8:
        raise CorpusFormatError(
            f"{file.path}: expected an Arrow message at byte {start:,} of {file.size:,}, found {head[:8]!r}: the file "
            "is truncated, damaged or older than Arrow 0.15. Copy or recreate it."
        )
    size = 8 + length
    head = head[:size] if size <= len(head) else file.read(start, size)
    root = _root(head)
    kind, body_size = root.number(1, "<B"), root.number(3, "<q")
    if not 0 <= body_size <= file.size - start - size:
        raise CorpusFormatError(
            f"{file.path}: the Arrow message at byte {start:,} needs {size:,} + {body_size:,} bytes, but the file has "
            f"{file.size:,}: it is truncated or damaged. Copy or recreate it."
        )
    message = Message(start, size, body_size, message_crc(head), kind)
    if kind == _DICTIONARY:
        header = root.table(2)
        message = message._replace(dictionary=header.number(0, "<q"), is_delta=header.number(2, "<B") != 0)
    elif kind == _BATCH:
        header = root.table(2)
        message = message._replace(rows=header.number(0, "<q"), is_compressed=header.has(3))
        if message.rows < 0:
            raise CorpusFormatError(
                f"{file.path}: the Arrow batch at byte {start:,} has {message.rows:,} rows: it is damaged"
            )
    return message, head


def _root(head: bytes) -> "_Table":
    return _Table(head, 8 + _indirect(head[8:], 0))


def _indirect(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


class _Table:
    """A FlatBuffers table. Reading outside of the data raises struct.error."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        if self._vtable < 0:  # which Python would count from the end
            raise struct.error("a table is outside its message")
        self._vtable_size = struct.unpack_from("<H", data, self._vtable)[0]

    def has(self, field: int) -> bool:
        return self._place(field) != 0

    def number(self, field: int, code: str) -> int:
        """A number or enumeration, 0 if the field is absent."""
        place = self._place(field)
        return int(struct.unpack_from(code, self._data, place)[0]) if place else 0

    def table(self, field: int) -> "_Table":
        return _Table(self._data, _indirect(self._data, self._needed(field)))

    def vector(self, field: int, item_size: int) -> tuple[int, int]:
        """First byte and number of the items of a vector; (0, 0) if the field is absent."""
        if not self.has(field):
            return 0, 0
        at = _indirect(self._data, self._place(field))
        count: int = struct.unpack_from("<I", self._data, at)[0]
        if count * item_size > len(self._data) - at - 4:
            raise struct.error(f"a list of {count:,} entries is outside its message")
        return at + 4, count

    def _place(self, field: int) -> int:
        entry = 4 + 2 * field
        if entry + 2 > self._vtable_size:
            return 0
        offset: Any = struct.unpack_from("<H", self._data, self._vtable + entry)[0]
        return self._at + int(offset) if offset else 0

    def _needed(self, field: int) -> int:
        place = self._place(field)
        if not place:
            raise struct.error(f"field {field} of a table is missing")
        return place
