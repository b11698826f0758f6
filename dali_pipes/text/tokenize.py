"""Tokenize files into shards: read ahead in one thread, encode on all cores, write in the order of the documents.

    input files ──▶ items, one file each (several if there are very many files) ──▶ shards tokens-ITEM-PART

Items are independent of each other, so any process can do any of them, and an interrupted run continues with the first
unfinished shard.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dali_pipes.errors import ConfigError, CorpusError, CorpusWriteError
from dali_pipes.runtime.messages import counted
from dali_pipes.text.encoder import Encoded, Encoder
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.text.reading import Batch, read_batches
from dali_pipes.text.run_folder import RunFolder
from dali_pipes.text.run_in_store import RunInStore
from dali_pipes.text.run_plan import COUNTS, Receipt, Run, is_done, notes_of, shard_name, total_counts
from dali_pipes.text.shard_writer import Format, ShardWriter, id_type
from dali_pipes.uris import Uri, check_uri, is_uri

SHARD_TOKENS = 1 << 28
MOST_ITEMS = 4096
_MOST_NAMES = 3
_FORMAT_VERSION = 2
_CHARACTERS_PER_CORE = 256 << 10
_FEWEST_CHARACTERS, _MOST_CHARACTERS = 1 << 20, 16 << 20  # an encoded token takes 150 bytes until it is written
_ENCODED_AHEAD = 3  # two are being encoded, so that cores stay busy while one is written; one waits

Advance = Callable[[int, int], None]
"""Takes the bytes of the inputs and the tokens done since the last call."""


@dataclass(frozen=True)
class Job:
    """What to tokenize and how. shard_tokens: a shard is closed once it has this many tokens."""

    inputs: Sequence[TextFile]
    encoder: Encoder
    format: Format
    separator: str | None = None
    shard_tokens: int = SHARD_TOKENS

    @property
    def settings(self) -> dict[str, Any]:
        """What the output depends on besides the inputs, as JSON values."""
        return {
            "version": _FORMAT_VERSION,
            "format": self.format,
            "id_type": id_type(self.format, self.encoder.largest_id).name,
            "separator": self.separator,
            "shard_tokens": self.shard_tokens,
            **self.encoder.settings,
        }

    @property
    def items(self) -> list[Sequence[TextFile]]:
        """The inputs in groups of consecutive files: one each, more if there are more than MOST_ITEMS files."""
        size = max(1, math.ceil(len(self.inputs) / MOST_ITEMS))
        return [self.inputs[at : at + size] for at in range(0, len(self.inputs), size)]


@dataclass(frozen=True)
class Summary:
    """The state of the output folder after a run. Counts cover all finished inputs.

    documents: all documents read, including empty and dropped documents. missing: inputs left to other processes.
    notes: of the documents, from `Notes.as_json`.
    """

    documents: int
    tokens: int
    empty: int
    dropped: int
    shards: int
    missing: int
    notes: Mapping[str, Any] = field(default_factory=dict)


def tokenize_files(
    job: Job,
    out: str | os.PathLike[str],
    made_by: str,
    shard: tuple[int, int] = (0, 1),
    advance: Advance | None = None,
    *,
    publish: bool = True,
) -> Summary:
    """Tokenize into the folder `out`, local or a URI, or continue an interrupted run. Blocks; uses all cores.

    shard:   (i, n): do the items i, i + n, i + 2n ...; the process that finishes the last one publishes the corpus.
    advance: called as inputs are done, also for those of an earlier run (with 0 tokens).
    publish: False: leave that to `publish_files`; the counts are then of this shard alone

    Raises ConfigError for an `out` that contains something else or is being written by another process, what the
    readers and the encoder raise, and CorpusWriteError. After any interruption, even SIGKILL, the run can be continued.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"shard {index}/{count}: expected i/n with i from 0 to n - 1, such as 0/4 ... 3/4")
    items = job.items
    report = advance or (lambda done, tokens: None)
    run = open_run(job, out, made_by)
    try:
        manifest = run.begin()
        for number in range(index, len(items), count) if manifest is None else ():
            with run.item(number):
                _do_item(job, run, number, items[number], report)
        if publish and manifest is None:
            manifest = run.publish(len(items))
    except FileNotFoundError:
        manifest = _published_meanwhile(run)
    if manifest is None and not publish:
        return _counted([run.receipts(number) for number in range(index, len(items), count)], items[index::count])
    return _summary(job, run, manifest)


def publish_files(job: Job, out: str | os.PathLike[str], made_by: str) -> Summary:
    """Publish a run, all of whose shards are done; if some are missing, the summary says how many inputs. Blocks.

    Raises as `tokenize_files`.
    """
    run = open_run(job, out, made_by)
    try:
        manifest = run.begin() or run.publish(len(job.items))
    except FileNotFoundError:
        manifest = _published_meanwhile(run)
    return _summary(job, run, manifest)


def open_run(job: Job, out: str | os.PathLike[str], made_by: str) -> Run:
    """The run in the folder `out`, which is neither read nor written yet. Raises ConfigError for a wrong URI."""
    text = os.fspath(out)
    check_uri(text, "out")
    if is_uri(text):
        return RunInStore(Uri(text), job.settings, job.inputs, made_by)
    return RunFolder(Path(text), job.settings, job.inputs, made_by)


def _published_meanwhile(run: Run) -> dict[str, Any]:
    """The manifest, after another process did the rest, published it, and removed the files of the run."""
    manifest = run.manifest()
    if manifest is None:
        raise CorpusWriteError(
            f"{run.out}: files of this run were removed while it was running; start it again"
        ) from None
    return manifest


def _summary(job: Job, run: Run, manifest: dict[str, Any] | None) -> Summary:
    if manifest is None:
        return _counted(run.all_receipts(len(job.items)), job.items)
    check_has_tokens(manifest, job.inputs)
    shards = sum(1 for shard in manifest["shards"] if shard["files"])
    return Summary(
        **{name: manifest[name] for name in COUNTS}, shards=shards, missing=0, notes=manifest.get("notes", {})
    )


def check_has_tokens(manifest: Mapping[str, Any], inputs: Sequence[TextFile]) -> None:
    """Raise CorpusError, naming the inputs, if the finished run produced no tokens."""
    if not manifest["tokens"]:
        names = ", ".join(str(file.path) for file in inputs[:_MOST_NAMES])
        more = f" and {len(inputs) - _MOST_NAMES:,} more" if len(inputs) > _MOST_NAMES else ""
        raise CorpusError(
            f"{names}{more}: the inputs do not contain any tokens: {counted(manifest['documents'], 'document')}, "
            f"{manifest['empty']:,} of them empty, {manifest['dropped']:,} dropped{_drop_reason(manifest)}"
            + "".join(f". {line}" for line in Notes.from_json(manifest.get("notes", {})).lines())
        )


def _drop_reason(manifest: Mapping[str, Any]) -> str:
    learn = manifest["settings"].get("learn")
    if not manifest["dropped"] or learn is None:
        return ""
    what = {"assistant": "an assistant turn", "last": "a last assistant turn"}.get(learn, "a message")
    return (
        f" because they do not contain {what} to learn (it is missing, empty, or excluded by its weight or train flag)"
    )


def _counted(found: Sequence[Sequence[Receipt]], items: Sequence[Sequence[TextFile]]) -> Summary:
    """The counts of these receipts, of one item each."""
    receipts = [receipt for item in found for receipt in item]
    missing = [files for files, done in zip(items, found, strict=True) if not is_done(done)]
    return Summary(
        **total_counts(receipts),
        shards=sum(1 for receipt in receipts if receipt.files),
        missing=sum(map(len, missing)),
        notes=notes_of(receipts).as_json(),
    )


def _do_item(job: Job, run: Run, number: int, files: Sequence[TextFile], report: Advance) -> None:
    receipts = run.receipts(number)
    if is_done(receipts):
        report(sum(file.size for file in files), 0)
        return
    with contextlib.closing(_Shards(job, run, number, receipts)) as shards:
        done = 0
        with contextlib.closing(_encoded(job, files, shards.end)) as batches:
            for batch, encoded in batches:
                before = shards.tokens
                for document in encoded:
                    shards.add(document)
                shards.flush()
                report(batch.read_bytes - done, shards.tokens - before)
                done = batch.read_bytes
        shards.finish()


class _Shards:
    """Writes the documents of one item into consecutive shards."""

    def __init__(self, job: Job, run: Run, item: int, receipts: Sequence[Receipt]) -> None:
        self.end = receipts[-1].end if receipts else 0
        self.tokens = 0
        self._job, self._run, self._item = job, run, item
        self._stored = id_type(job.format, job.encoder.largest_id)
        self._waiting: list[Encoded] = []
        self._part = len(receipts)
        self._size = self._documents = self._empty = self._dropped = 0
        self._notes = Notes()
        self._writer = self._new_writer()

    def add(self, document: Encoded | None) -> None:
        """Add the next document, None for one that was dropped."""
        if self._size >= self._job.shard_tokens:
            self._close(last=False)
            self._part += 1
            self._size = self._documents = self._empty = self._dropped = 0
            self._notes = Notes()
            self._writer = self._new_writer()
        self.end += 1
        self._documents += 1
        if document is None:
            self._dropped += 1
            return
        self._empty += document.is_empty
        if document.notes is not None:
            self._notes.add(document.notes)
        self._size += len(document.ids)
        self.tokens += len(document.ids)
        self._waiting.append(document)

    def flush(self) -> None:
        """Write the added documents."""
        self._writer.add(self._waiting)
        self._waiting = []

    def finish(self) -> None:
        """Finish the last shard of the item."""
        self._close(last=True)

    def close(self) -> None:
        """Discard an unfinished shard."""
        self._writer.discard()

    def _new_writer(self) -> ShardWriter:
        name, job = shard_name(self._item, self._part), self._job
        return ShardWriter(self._run.work, name, self._stored, job.format, has_mask=job.encoder.has_mask)

    def _close(self, *, last: bool) -> None:
        self.flush()
        files = self._writer.finish()
        counts = self._documents, self._size, self._empty, self._dropped
        receipt = Receipt(files, *counts, self.end, last, self._notes.as_json())
        self._run.keep(self._item, self._part, receipt)


def _encoded(job: Job, files: Sequence[TextFile], skip: int) -> Generator[tuple[Batch, list[Encoded | None]]]:
    """Batches with their ids, in order; the next ones are read and encoded in the background."""
    threads = os.environ.get("RAYON_NUM_THREADS", "")  # of the tokenizer
    cores = int(threads) if threads.isdecimal() and int(threads) else os.cpu_count() or 1
    characters = min(max(cores * _CHARACTERS_PER_CORE, _FEWEST_CHARACTERS), _MOST_CHARACTERS)
    batches = read_batches(files, job.encoder.record_key, job.separator, skip, characters)
    with contextlib.closing(batches), ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(2) as encoders:
        coming: deque[tuple[Batch, Future[list[Encoded | None]]]] = deque()
        ahead: Future[Batch | None] | None = reader.submit(next, batches, None)
        try:
            while ahead is not None or coming:
                while ahead is not None and len(coming) < _ENCODED_AHEAD:
                    batch = ahead.result()
                    ahead = None if batch is None else reader.submit(next, batches, None)
                    if batch is not None:
                        coming.append((batch, encoders.submit(job.encoder.encode, batch.documents)))
                if coming:
                    batch, encoding = coming.popleft()
                    yield batch, encoding.result()
        finally:
            for _, encoding in coming:
                encoding.cancel()
