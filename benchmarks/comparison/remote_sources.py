"""Loaders over one server, each in its format and by the protocol that it has, for `remote_loaders.py`.

dali_pipes            s3://bench/flat.bin             ranges of rows, 64 in flight
dali_pipes_mds        s3://bench/mds                  the same, of the shards of MosaicML Streaming
streaming, litdata    s3://bench/mds, litdata         whole shards, to a folder
datasets              http://.../bench/parquet/...    ranges of Parquet files, a buffer of rows to shuffle
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from comparison.work import Work

BUCKET = "bench"
_PARQUET_FILES = 4
_PARQUET_GROUP_ROWS = 256
_SHUFFLE_BUFFER_ROWS = 1000


class Opened(NamedTuple):
    """batches: of one epoch; each gives its first row of T ids, to compare. state: after the batches so far."""

    batches: Iterator[Any]
    state: Callable[[], Any]


class Source(NamedTuple):
    """prepare: writes the data of `work` in its format, and returns the folder or file and its name in the bucket."""

    packages: tuple[str, ...]
    prepare: Callable[[Work], tuple[Path, str]]
    open: Callable[[Work, str, Path, Any], Opened]
    """Of the work, the address of the server, an empty folder, and a state or None. Blocks."""


def use_server(url: str) -> None:
    """Let S3 of all libraries be the server."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "S3_ENDPOINT_URL": url,
    }


def _ours(path: str) -> Callable[[Work, str, Path, Any], Opened]:
    def open_ours(work: Work, url: str, cache: Path, state: Any) -> Opened:
        from dali_pipes import TokenLoader

        os.environ["DALI_PIPES_CACHE"] = str(cache)
        loader = TokenLoader(
            f"s3://{BUCKET}/{path}",
            batch_size=work.batch_size,
            seq_len=work.seq_len,
            seed=work.seed,
            device="cpu",
            quiet=True,
        )
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch["input_ids"][0] for batch in loader), loader.state_dict)

    return open_ours


def _flat(work: Work) -> tuple[Path, str]:
    return Path(work.corpus), "flat.bin"


def _mds(work: Work) -> tuple[Path, str]:
    from comparison.mosaic_loader import Mosaic

    Mosaic().prepare(work)
    return work.prepared("mds"), "mds"


def _open_mosaic(work: Work, url: str, cache: Path, state: Any) -> Opened:
    from streaming import StreamingDataLoader, StreamingDataset

    from comparison.mosaic_loader import _collate

    dataset = StreamingDataset(
        remote=f"s3://{BUCKET}/mds",
        local=str(cache / "mds"),
        shuffle=True,
        shuffle_seed=work.seed,
        batch_size=work.batch_size,
    )
    loader = StreamingDataLoader(
        dataset, batch_size=work.batch_size, num_workers=0, drop_last=True, collate_fn=_collate
    )
    if state is not None:
        loader.load_state_dict(state)
    return Opened((pair[0][0] for pair in loader), loader.state_dict)


def _litdata(work: Work) -> tuple[Path, str]:
    from comparison.litdata_loader import LitData

    LitData().prepare(work)
    return work.prepared("litdata"), "litdata"


def _open_litdata(work: Work, url: str, cache: Path, state: Any) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_AVAILABLE = False  # so that it uses boto3: it takes no address without TLS for obstore
    dataset = StreamingDataset(
        f"s3://{BUCKET}/litdata",
        cache_dir=str(cache / "litdata"),
        item_loader=TokensLoader(block_size=work.seq_len + 1),
        shuffle=True,
        drop_last=True,
        seed=work.seed,
        storage_options={"endpoint_url": url},
    )
    loader = StreamingDataLoader(dataset, batch_size=work.batch_size, num_workers=0, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    return Opened((rows[0, :-1].long() for rows in loader), loader.state_dict)


def _parquet(work: Work) -> tuple[Path, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = work.prepared("parquet")
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        for number, rows in enumerate(np.array_split(work.window_view(), _PARQUET_FILES)):
            ids = pa.array(np.ascontiguousarray(rows).reshape(-1))
            table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(ids, work.seq_len + 1)})
            pq.write_table(table, unfinished / f"{number}.parquet", row_group_size=_PARQUET_GROUP_ROWS)
        unfinished.rename(target)
    return target, "parquet"


def _open_datasets(work: Work, url: str, cache: Path, state: Any) -> Opened:
    import torch
    from datasets import load_dataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = [f"{url}/{BUCKET}/parquet/{number}.parquet" for number in range(_PARQUET_FILES)]
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(cache))
    dataset = dataset.shuffle(seed=work.seed, buffer_size=_SHUFFLE_BUFFER_ROWS).with_format("numpy")

    def collate(rows: list[dict[str, Any]]) -> Any:
        return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))

    loader = StatefulDataLoader(
        dataset, batch_size=work.batch_size, num_workers=1, drop_last=True, collate_fn=collate, prefetch_factor=4
    )
    if state is not None:
        loader.load_state_dict(state)
    return Opened((rows[0, :-1] for rows in loader), loader.state_dict)


SOURCES = {
    "dali_pipes": Source(("obstore",), _flat, _ours("flat.bin")),
    "dali_pipes_mds": Source(("obstore", "streaming"), _mds, _ours("mds/index.json")),
    "streaming": Source(("streaming",), _mds, _open_mosaic),
    "litdata": Source(("litdata",), _litdata, _open_litdata),
    "datasets": Source(("datasets", "torchdata"), _parquet, _open_datasets),
}
