"""Small valid files of every kind that is parsed, and what reading each of them means."""

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from corpus_files import npy_bytes, write_llmc, write_megatron
from shard_files import tf_example, write_array_record, write_datatrove, write_litdata, write_mds, write_tfrecord
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes.corpus import open_corpus
from dali_pipes.documents import find_documents
from dali_pipes.errors import CorpusWriteError
from dali_pipes.runtime import offset_cache
from dali_pipes.text import TextFile, find_text_files
from dali_pipes.text.reading import read_batches
from dali_pipes.text.run_folder import RunFolder
from dali_pipes.text.run_plan import Receipt

if TYPE_CHECKING:
    from dali_pipes import TokenLoader

PARTS = [np.arange(10 * number, 10 * number + number % 7, dtype=np.uint16) for number in range(24)]
IDS = np.concatenate(PARTS)
E = 22
TOKENS = np.array([7, 8, E, 6, E, E, 5] * 30, np.uint16)


class Kind(NamedTuple):
    """A kind of files. `write` puts them into an empty folder; `read` gives what is in them, or an error of ours.

    damage:   the beginning of the names of files that may be damaged
    is_exact: whether damage must not change what `read` returns, because it is known otherwise
    only_json: whether what is damaged stays JSON
    expands:  how many bytes may come of one, by decompression
    """

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    damage: str = ""
    is_exact: bool = False
    only_json: bool = False
    expands: int = 1


def read_corpus(folder: Path, **options: Any) -> Any:
    """All ids, by rows and at once, and the documents."""
    with open_corpus(folder, **options) as corpus:
        ids = corpus.tokens(0, corpus.num_tokens)
        offsets = corpus.document_offsets
        if offsets is not None:
            assert len(offsets) == corpus.num_documents + 1  # type: ignore[operator]
            assert (offsets[0], offsets[-1]) == (0, len(ids)), "documents are all of the corpus"
            assert (np.diff(offsets) >= 0).all(), "documents rise"
        starts = np.linspace(0, len(ids) - 1, 20).astype(np.int64)
        rows = np.empty((20, 1), corpus.dtype)
        corpus.read_rows(starts, rows)
        assert np.array_equal(rows[:, 0], ids[starts]), "rows are the ids that lie there"
        assert corpus.locate(len(ids) - 1).file in corpus.files
        mask = None
        if corpus.loss_mask is not None:
            out, whole = np.zeros(len(ids), np.uint8), (np.array([0]), np.array([len(ids)]), np.array([0]))
            corpus.loss_mask.read_pieces(*whole, out)
            mask = out.tolist()
        return ids.astype(np.int64).tolist(), None if offsets is None else offsets.tolist(), mask


def _cached(folder: Path) -> contextlib.AbstractContextManager[None]:
    """The user's cache is in the folder `cache` there."""
    return _environment("DALI_PIPES_CACHE", str(folder / "cache"))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _flat(folder: Path) -> None:
    IDS.tofile(folder / "a.bin")


def _table(kind: str) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        rows = [part.tolist() for part in PARTS]
        encoding = "values" * (kind == "stream")
        table = table_of([list_array(rows[:15], encoding=encoding), list_array(rows[15:], encoding=encoding)])
        if kind == "parquet":
            return write_parquet(folder / "a.parquet", table, row_group_size=15, write_page_checksum=True)
        return write_arrow(folder / "a.arrow", table, "zstd" if kind == "zstd" else None, kind == "stream")

    return write


def _saved(folder: Path) -> None:
    """As `save_to_disk` leaves it, in a folder of splits."""
    split = folder / "train"
    split.mkdir()
    names = []
    for number, part in enumerate((PARTS[:15], PARTS[15:])):
        names.append(f"data-{number:05}-of-00002.arrow")
        write_arrow(split / names[-1], table_of([list_array([ids.tolist() for ids in part])]), stream=True)
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (split / "state.json").write_text(json.dumps(state))


def _mds(compression: str | None) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        columns = {"tokens": "ndarray:uint16", "text": "str", "loss_mask": "ndarray:uint8"}
        samples = [{"tokens": ids, "text": "a", "loss_mask": (ids % 2).astype(np.uint8)} for ids in PARTS]
        shards = [samples[:15], samples[15:]]
        return write_mds(folder, columns, shards, compression=[compression], hashes=["sha1"], dim_bytes=2)

    return write


def _array_record(folder: Path) -> None:
    records = [tf_example({"tokens": ids.tolist(), "length": [len(ids)]}) for ids in PARTS]
    write_array_record(folder / "a.array_record", records, "group_size:4")


def _record_texts(folder: Path) -> None:
    records = [tf_example({"text": [f"text {number} " * number], "length": [number]}) for number in range(20)]
    write_array_record(folder / "a.array_record", records, "group_size:4")


def _tfrecord(folder: Path) -> None:
    for number, parts in enumerate((PARTS[:15], PARTS[15:])):
        records = [tf_example({"tokens": ids.tolist(), "length": [len(ids)]}) for ids in parts]
        write_tfrecord(folder / f"a.tfrecord-{number:05}-of-00002", records)


def _tfrecord_texts(folder: Path) -> None:
    records = [tf_example({"text": [f"text {number} " * number], "length": [number]}) for number in range(20)]
    write_tfrecord(folder / "a.tfrecord", records)
    (folder / "b.tfrecord.gz").write_bytes(gzip.compress((folder / "a.tfrecord").read_bytes()))


def _mds_texts(compression: str | None) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        samples = [{"id": n, "text": f"text {n} " * n, "more": {"n": [n]}} for n in range(20)]
        columns = {"id": "int", "text": "str", "more": "json"}
        return write_mds(folder, columns, [samples[:12], samples[12:]], compression=[compression])

    return write


def _read_texts(key: str | None) -> Callable[[Path], object]:
    def read(folder: Path) -> Any:
        batches = read_batches(find_text_files(folder), key, None, 0, 1000)
        texts = [document.content for batch in batches for document in batch.documents]
        assert all(isinstance(text, dict if key is None else str) for text in texts)
        return texts

    return read


def _masked(kind: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _flat(folder)
        mask = (IDS % 3 == 0).astype(np.uint8)
        data = mask.tobytes() if kind == "raw" else npy_bytes("'|b1'", f"({len(mask)},)", mask.tobytes())
        (folder / "a.bin.loss").write_bytes(data)

    return write


def _with_cache(folder: Path) -> None:
    """A corpus, with what was found in it kept in `cache`."""
    (folder / "data").mkdir()
    TOKENS.tofile(folder / "data" / "a.bin")
    _read_documents(folder)
    _read_plan(folder)


def _read_documents(folder: Path) -> Any:
    with _cached(folder), open_corpus(folder / "data", format="flat", eos_id=E) as corpus:
        return find_documents(corpus).offsets.tolist()


def _read_kept(folder: Path) -> Any:
    return _read_documents(folder), _read_plan(folder)


def _loader(folder: Path, **settings: Any) -> "TokenLoader":
    from dali_pipes import TokenLoader  # takes a second

    common: dict[str, Any] = {"batch_size": 2, "seq_len": 4, "device": "cpu", "format": "flat"}
    return TokenLoader(corpus=str(folder / "data"), **common, **settings)


def _read_plan(folder: Path) -> Any:
    with _cached(folder), _loader(folder, rows="pack", eos_id=E) as loader:
        length = len(loader)
        report = loader.plan_report()
        return length, len(loader), repr(report)


def _offsets(folder: Path) -> None:
    offset_cache.store(folder / "a.npy", np.array([0, *range(3, 40, 3)]))


def _read_offsets(folder: Path) -> Any:
    return (
        offset_cache.load(folder / "a.npy", lambda offsets: offset_cache.may_be_offsets(offsets, strictly=True)) is None
    )


_RUN_SETTINGS = {"format": "megatron", "eos_id": 3, "text_key": "text"}


def _run(folder: Path) -> RunFolder:
    source = TextFile(folder / "in.jsonl", "jsonl", "", 10, "00ff", "5")
    return RunFolder(folder / "out", _RUN_SETTINGS, [source, source], "dali_pipes test")


def _begin_run(folder: Path) -> None:
    run = _run(folder)
    run.begin()
    for part in range(2):
        files = {f"tokens-00000-000{part}.bin": {"bytes": 4, "sha256": "00"}}
        run.keep(0, part, Receipt(files, 2, 4, 0, 0, 2 * part + 2, last=part == 1))
        (folder / "out" / "_tokenize" / f"tokens-00000-000{part}.bin").write_bytes(b"1234")


def _finish_run(folder: Path) -> None:
    _begin_run(folder)
    run = _run(folder)
    run.keep(1, 0, Receipt({}, 0, 0, 0, 0, 0, last=True))
    run.publish(2)


def _read_run(folder: Path) -> Any:
    """Go on with a run, to its end."""
    run = _run(folder)
    manifest = run.begin()
    if manifest is None:
        with run.item(0):
            found = run.receipts(0)
        run.keep(1, 0, Receipt({}, 0, 0, 0, 0, 0, last=True))
        try:
            manifest = run.publish(2)
        except FileNotFoundError as error:  # as `tokenize_files` turns it
            raise CorpusWriteError("files of this run were removed") from error
        return [vars(receipt) for receipt in found], manifest
    return manifest


def _state(folder: Path) -> None:
    _with_cache(folder)
    shutil.rmtree(folder / "cache")
    (folder / "state").mkdir()
    for rows in ("stream", "pack"):
        with _loader(folder, rows=rows, eos_id=E) as loader:
            iterator = iter(loader)
            next(iterator), next(iterator)
            (folder / "state" / f"{rows}.json").write_text(json.dumps(loader.state_dict()))


def _read_state(folder: Path) -> Any:
    """What comes next after each state."""
    found: list[Any] = []
    for rows in ("stream", "pack"):
        with _cached(folder / "none"), _loader(folder, rows=rows, eos_id=E) as loader:
            loader.load_state_dict(json.loads((folder / "state" / f"{rows}.json").read_text()))
            found.append((loader.epoch, loader.step))
            assert loader.state_dict()["version"] == 1
            found.append([batch["input_ids"].tolist() for batch, _ in zip(loader, range(2), strict=False)])
    return found


DOCUMENTS = [0, 2, 2, 8, 24]
KINDS = {
    "flat": Kind(_flat, read_corpus),
    "llmc": Kind(lambda folder: write_llmc(folder / "a.bin", IDS), read_corpus),
    "npy": Kind(
        lambda folder: (folder / "a.npy").write_bytes(npy_bytes("'<u2'", f"({len(IDS)},)", IDS.tobytes())), read_corpus
    ),
    "megatron": Kind(lambda folder: write_megatron(folder / "a", PARTS, DOCUMENTS, modes=True), read_corpus),
    "fairseq": Kind(lambda folder: write_megatron(folder / "a", PARTS, fairseq=True), read_corpus),
    "parquet": Kind(_table("parquet"), read_corpus),
    "arrow": Kind(_table("file"), read_corpus),
    "arrow stream": Kind(_table("stream"), read_corpus),
    "arrow zstd": Kind(_table("zstd"), read_corpus, expands=1 << 15),
    "saved": Kind(_saved, read_corpus),
    "datatrove": Kind(lambda folder: write_datatrove(folder / "0_a.ds", PARTS), read_corpus),
    "mds": Kind(_mds(None), read_corpus),
    "mds zstd": Kind(_mds("zstd"), read_corpus),
    "mds verified": Kind(_mds("gz"), lambda folder: read_corpus(folder, verify=True)),
    "litdata": Kind(lambda folder: write_litdata(folder, [PARTS[:15], PARTS[15:]]), read_corpus),
    "litdata zstd": Kind(
        lambda folder: write_litdata(folder, [PARTS[:15], PARTS[15:]], compression="zstd"), read_corpus
    ),
    "arrayrecord": Kind(_array_record, read_corpus),
    "tfrecord": Kind(_tfrecord, read_corpus),
    "mds text": Kind(_mds_texts(None), _read_texts("text")),
    "mds text gz": Kind(_mds_texts("gz"), _read_texts(None), expands=1 << 10),
    "arrayrecord text": Kind(_record_texts, _read_texts("text")),
    "tfrecord text": Kind(_tfrecord_texts, _read_texts("text"), expands=1 << 10),
    "loss mask": Kind(_masked("raw"), read_corpus),
    "loss mask npy": Kind(_masked("npy"), read_corpus),
    "kept offsets": Kind(_offsets, _read_offsets),
    "kept documents and plans": Kind(_with_cache, _read_kept, damage="cache/", is_exact=True),
    "unfinished run": Kind(_begin_run, _read_run),
    "finished run": Kind(_finish_run, _read_run),
    "state": Kind(_state, _read_state, damage="state/", only_json=True),
}
