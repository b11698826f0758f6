"""Shuffled windows from several corpus formats: `TokenLoader`, the format's own loader, and a flat file.

    python benchmarks/formats.py --out runs/formats
    python benchmarks/formats.py --only arrow,parquet --tokens 20000000

The same documents are written in every format. Each alternative yields int64 `input_ids` and `labels` of the same
windows (seq_len + 1 ids, contiguous, across document ends), on the CPU, from files in the page cache. The ids are int32
in all formats, including the flat file. The first windows in order are compared with the documents before the timing.
The first opening of a table, which measures its rows, is timed separately, and so is the first batch, for which a
shuffled table is decoded. In every round each alternative runs once and the flat file twice: their difference is noise.
The last line is one JSON line.
"""

import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader, open_corpus

MEAN_TOKENS = 500  # of a document
VOCABULARY = 50257
_CHECKED_BATCHES = 3


@dataclass(frozen=True)
class Documents:
    """tokens: int32 (N,). offsets: int64 (D + 1,), where each document begins, and the end."""

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """The batches that are asked for."""

    batch_size: int
    seq_len: int
    seed: int = 0


Batches = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """write: the documents into a folder; returns what to open. theirs: batches by the format's own loader, or None.

    packages, their_packages: what our side and theirs need
    dtype: of a format that does not say it
    """

    write: Callable[[Path, Documents], Path]
    theirs: Callable[[Path, Work, bool], Batches] | None = None
    packages: tuple[str, ...] = ()
    their_packages: tuple[str, ...] = ()
    dtype: str | None = None


def write_flat(folder: Path, documents: Documents) -> Path:
    path = folder / "corpus.bin"
    documents.tokens.tofile(path)
    return path


def table_of(documents: Documents) -> Any:
    import pyarrow as pa

    lists = pa.LargeListArray.from_arrays(pa.array(documents.offsets), pa.array(documents.tokens))
    return pa.table({"input_ids": lists.cast(pa.list_(pa.int32()))})


def write_parquet(folder: Path, documents: Documents) -> Path:
    """zstd, row groups of 65,536 rows."""
    import pyarrow.parquet

    path = folder / "corpus.parquet"
    pyarrow.parquet.write_table(table_of(documents), path, compression="zstd", row_group_size=1 << 16)
    return path


def write_arrow(folder: Path, documents: Documents) -> Path:
    """As `save_to_disk` of datasets: a stream with batches of 1000 rows, listed in `state.json`."""
    import pyarrow.ipc

    table = table_of(documents)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text(
        json.dumps(
            {
                "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
                "_fingerprint": "0123456789abcdef",
                "_format_columns": None,
                "_format_kwargs": {},
                "_format_type": None,
                "_output_all_columns": False,
                "_split": None,
            }
        )
    )
    (folder / "dataset_info.json").write_text(
        '{"features": {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}}}'
    )
    return folder


class RowWindows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of a Hugging Face data set of documents: the rows that one needs, put together and cut."""

    def __init__(self, rows: Any, work: Work) -> None:
        lengths = [np.diff(part.offsets.to_numpy()) for part in rows.data.column("input_ids").chunks]
        self._ends = np.cumsum(np.concatenate(lengths))
        self._rows, self._seq_len = rows.with_format("numpy"), work.seq_len

    def __len__(self) -> int:
        return (int(self._ends[-1]) - 1 - self._seq_len) // self._seq_len + 1

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = number * self._seq_len
        first, last = np.searchsorted(self._ends, [start, start + self._seq_len], side="right")
        rows = self._rows[int(first) : int(last) + 1]["input_ids"]
        skipped = start - (int(self._ends[first - 1]) if first else 0)
        ids = torch.from_numpy(np.concatenate(list(rows))[skipped : skipped + self._seq_len + 1].astype(np.int64))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def huggingface_batches(path: Path, work: Work, shuffle: bool) -> Batches:
    import datasets

    if path.suffix == ".parquet":
        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache"))
    else:
        rows = datasets.load_from_disk(str(path))
    generator = torch.Generator().manual_seed(work.seed)
    loader = torch.utils.data.DataLoader(
        RowWindows(rows, work), work.batch_size, shuffle=shuffle, generator=generator, drop_last=True
    )
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def write_mds(compression: str | None, folder: Path, documents: Documents) -> Path:
    """A sample a document, shards of 64 MiB, as MDSWriter makes them."""
    from streaming import MDSWriter

    target = folder / "mds"
    with MDSWriter(out=str(target), columns={"tokens": "ndarray:int32"}, compression=compression) as writer:
        for begin, end in itertools.pairwise(documents.offsets.tolist()):
            if begin < end:  # it cannot write arrays without elements
                writer.write({"tokens": documents.tokens[begin:end]})
    np.save(folder / "lengths.npy", np.diff(documents.offsets)[np.diff(documents.offsets) > 0])
    return target


class SampleWindows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of a StreamingDataset of documents: the samples that one needs, put together and cut."""

    def __init__(self, samples: Any, lengths: npt.NDArray[np.int64], work: Work) -> None:
        self._samples, self._ends, self._seq_len = samples, np.cumsum(lengths), work.seq_len

    def __len__(self) -> int:
        return (int(self._ends[-1]) - 1 - self._seq_len) // self._seq_len + 1

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = number * self._seq_len
        first, last = np.searchsorted(self._ends, [start, start + self._seq_len], side="right").tolist()
        parts = [self._samples[sample]["tokens"] for sample in range(first, last + 1)]
        skipped = start - (int(self._ends[first - 1]) if first else 0)
        ids = torch.from_numpy(np.concatenate(parts)[skipped : skipped + self._seq_len + 1].astype(np.int64))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def mosaic_batches(path: Path, work: Work, shuffle: bool) -> Batches:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    gc.collect()  # a set that an earlier round opened would refuse a second one
    clean_stale_shared_memory()
    windows = SampleWindows(StreamingDataset(local=str(path)), np.load(path.parent / "lengths.npy"), work)
    generator = torch.Generator().manual_seed(work.seed)
    loader = torch.utils.data.DataLoader(windows, work.batch_size, shuffle=shuffle, generator=generator, drop_last=True)
    return itertools.chain.from_iterable(loader for _ in itertools.count())


FORMATS = {
    "flat": Format(write_flat, dtype="int32"),
    "parquet": Format(write_parquet, huggingface_batches, ("pyarrow",), ("datasets",)),
    "arrow": Format(write_arrow, huggingface_batches, ("pyarrow",), ("datasets",)),
    "mds": Format(functools.partial(write_mds, None), mosaic_batches, ("streaming",), ("streaming",)),
    "mds_zstd": Format(functools.partial(write_mds, "zstd"), mosaic_batches, ("streaming",), ("streaming",)),
}


def our_batches(path: Path, dtype: str | None, work: Work, shuffle: bool, stack: contextlib.ExitStack) -> Batches:
    loader = TokenLoader(
        corpus=str(path),
        dtype=dtype,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        shuffle=shuffle,
        seed=work.seed,
        device="cpu",
        repeat=True,
    )
    return iter(stack.enter_context(loader))


def _their_batches(
    batches: Callable[[Path, Work, bool], Batches], path: Path, work: Work, shuffle: bool, _: contextlib.ExitStack
) -> Batches:
    return batches(path, work, shuffle)


def main(
    only: Annotated[str | None, typer.Option(help=f"formats, separated by commas; known: {', '.join(FORMATS)}")] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="tokens of the corpus")] = 100_000_000,
    batch_size: Annotated[int, typer.Option(min=1, help="rows per batch")] = 8,
    seq_len: Annotated[int, typer.Option(min=2, help="tokens per row")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per alternative")] = 5,
    seconds: Annotated[float, typer.Option(help="timed part of each measurement")] = 2.0,
    data_dir: Annotated[Path | None, typer.Option(help="folder for the corpora, which are removed at the end")] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/formats"),
) -> None:
    """Check, measure, print a table, write a JSON; the last line is one JSON line."""
    console, work = wide_console(), Work(batch_size, seq_len)
    names = [name for name in FORMATS if only is None or name in {"flat", *only.split(",")}]
    documents = make_documents(tokens)
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        os.environ["DALI_PIPES_CACHE"] = f"{folder}/cache"  # the first opening is the first, whenever this runs
        makers: dict[tuple[str, str], Callable[[bool, contextlib.ExitStack], Batches]] = {}
        entries: list[dict[str, Any]] = []
        for name in names:
            one = FORMATS[name]
            if _missing(one.packages):
                console.print(f"{name} skipped: {_missing(one.packages)} is not installed")
                continue
            place = Path(folder) / name
            place.mkdir()
            path = one.write(place, documents)
            begin = time.perf_counter()
            open_corpus(path, dtype=one.dtype).close()
            entries.append({"format": name, "first_open_s": time.perf_counter() - begin})
            makers[name, "dali_pipes"] = functools.partial(our_batches, path, one.dtype, work)
            if name == "flat":
                makers[name, "again"] = makers[name, "dali_pipes"]
            if one.theirs is not None and not _missing(one.their_packages):
                makers[name, one.their_packages[0]] = functools.partial(_their_batches, one.theirs, path, work)
            elif one.theirs is not None:
                console.print(f"{name}: {_missing(one.their_packages)} is not installed; only dali_pipes is measured")
        results = _measure(makers, documents, work, rounds, seconds)
    for entry in entries:
        name = entry["format"]
        entry["alternatives"] = {by: result for (of, by), result in results.items() if of == name}
        entry |= _ratios(entry["alternatives"], results["flat", "dali_pipes"])
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    console.print(_table(entries, f"{tokens:,} tokens, batches of {batch_size} x {seq_len}"))
    setting = {"tokens": tokens, "batch_size": batch_size, "seq_len": seq_len, "rounds": rounds, "seconds": seconds}
    report = {"benchmark": "formats", "machine": about, "setting": setting, "entries": entries}
    out.mkdir(parents=True, exist_ok=True)
    (out / "formats.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def make_documents(tokens: int) -> Documents:
    """Documents of geometric length with ids that are frequent as words are, so that they compress as text does."""
    random = np.random.default_rng(0)
    ends = np.cumsum(random.geometric(1 / MEAN_TOKENS, tokens // MEAN_TOKENS))
    offsets = np.concatenate([[0], ends[ends < tokens], [tokens]])
    ids = np.exp(random.random(tokens, np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32) - 1
    return Documents(np.clip(ids, 0, VOCABULARY - 1), offsets)


def _missing(packages: tuple[str, ...]) -> str | None:
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def _measure(
    makers: dict[tuple[str, str], Callable[[bool, contextlib.ExitStack], Batches]],
    documents: Documents,
    work: Work,
    rounds: int,
    seconds: float,
) -> dict[tuple[str, str], dict[str, Any]]:
    for (name, by), make in makers.items():
        with contextlib.ExitStack() as stack:
            _check(f"{by} on {name}", make(False, stack), documents, work)
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in makers}
    for _ in range(rounds):
        for key, make in makers.items():
            with contextlib.ExitStack() as stack:
                begin = time.perf_counter()
                batches = make(True, stack)
                next(batches)
                first = time.perf_counter() - begin
                count, begin = 0, time.perf_counter()
                while (taken := time.perf_counter() - begin) < seconds:
                    for batch in itertools.islice(batches, 16):
                        count += batch["input_ids"].numel()
                figures[key].append((first, count / taken))
                del batch, batches
    return {
        key: {"first_batch_s": _spread([first for first, _ in own]), "tokens_per_s": _spread([rate for _, rate in own])}
        for key, own in figures.items()
    }


def _check(name: str, batches: Batches, documents: Documents, work: Work) -> None:
    for number, batch in enumerate(itertools.islice(batches, _CHECKED_BATCHES)):
        starts = (number * work.batch_size + np.arange(work.batch_size)) * work.seq_len
        for key, shift in (("input_ids", 0), ("labels", 1)):
            expected = documents.tokens[starts[:, None] + np.arange(work.seq_len) + shift]
            if batch[key].dtype != torch.int64 or not np.array_equal(batch[key].numpy(), expected):
                raise SystemExit(f"{name}: {key} of batch {number} are not those of the documents")


def _ratios(alternatives: dict[str, Any], flat: dict[str, Any]) -> dict[str, float]:
    def rate(result: dict[str, Any]) -> float:
        return float(result["tokens_per_s"]["median"])

    ours = rate(alternatives["dali_pipes"])
    found = {f"ratio_to_{by}": ours / rate(one) for by, one in alternatives.items() if by != "dali_pipes"}
    return found | {"ratio_to_flat": ours / rate(flat)}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _table(entries: list[dict[str, Any]], title: str) -> Table:
    grid = Table(title=f"{title}: median (low to high)")
    for heading in ("format", "loader", "Mtok/s", "first batch ms", "first opening ms", "ours / theirs", "to flat"):
        grid.add_column(heading, justify="left" if heading in ("format", "loader") else "right", no_wrap=True)
    for entry in entries:
        for by, result in entry["alternatives"].items():
            cells = [
                "{median:.1f} ({low:.1f} to {high:.1f})".format(**{k: v * factor for k, v in result[key].items()})
                for key, factor in (("tokens_per_s", 1e-6), ("first_batch_s", 1e3))
            ]
            is_ours = by == "dali_pipes"
            opening = f"{1e3 * entry['first_open_s']:.0f}" if is_ours else ""
            ratio = "" if is_ours else f"{entry[f'ratio_to_{by}']:.2f}"
            grid.add_row(
                entry["format"], by, *cells, opening, ratio, f"{entry['ratio_to_flat']:.2f}" if is_ours else ""
            )
    return grid


if __name__ == "__main__":
    typer.run(main)
