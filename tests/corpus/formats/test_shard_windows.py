"""A loader gives the same batches from every format as from one flat file of the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from shard_files import tf_example, write_datatrove, write_litdata, write_mds, write_tfrecord

from dali_pipes.errors import CorpusFormatError
from dali_pipes.loader.token_loader import TokenLoader


def write(folder: Path, kind: str, documents: list[list[Any]]) -> Path:
    """The documents of three shards in `folder`."""
    name, _, compression = kind.partition(" ")
    if name == "mds":
        samples = [[{"tokens": ids, "id": 1} for ids in shard] for shard in documents]
        return write_mds(folder, {"id": "int", "tokens": "ndarray:uint16"}, samples, compression=[compression or None])
    if name == "litdata":
        return write_litdata(folder, documents, compression=compression or None)
    for number, shard in enumerate(documents):
        if name == "datatrove":
            write_datatrove(folder / f"{number:05}_unshuffled.ds", shard)
        elif name == "tfrecord":
            folder.mkdir(exist_ok=True)
            examples = [tf_example({"targets": ids.tolist()}) for ids in shard]
            write_tfrecord(folder / f"a.tfrecord-{number:05}-of-00003", examples)
        else:
            folder.mkdir(exist_ok=True)
            writer = ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
            for ids in shard:
                writer.write(tf_example({"tokens": ids.tolist()}))
            writer.close()
    return folder


@pytest.mark.parametrize("kind", ["mds", "mds zstd", "litdata", "litdata zstd", "datatrove", "arrayrecord", "tfrecord"])
@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_batches_are_those_of_a_flat_file(tmp_path: Path, kind: str, rows: str) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [np.append(rng.integers(1, 60000, int(count)), 0).astype(np.uint16) for count in rng.integers(1, 90, 20)]
        for _ in range(3)
    ]
    np.concatenate([ids for shard in documents for ids in shard]).tofile(tmp_path / "flat.bin")
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 33, "device": "cpu", "rows": rows, "shuffle": True}
    if rows == "pack":
        settings["outputs"] = ("input_ids", "labels", "position_ids")
    found = []
    for corpus in (tmp_path / "flat.bin", write(tmp_path / "set", kind, documents)):
        settings["eos_id"] = 0 if rows == "pack" and corpus.is_file() else None
        with TokenLoader(corpus=str(corpus), **settings) as loader:
            found.append([{name: values.tolist() for name, values in batch.items()} for batch in loader])
    assert len(found[0]) > 10
    assert found[0] == found[1]


def test_checksums_are_verified_where_the_loader_is_told_to(tmp_path: Path) -> None:
    samples = [{"tokens": np.arange(100, dtype=np.uint16)}]
    write_mds(tmp_path, {"tokens": "ndarray:uint16"}, [samples], hashes=["sha1"])
    settings: dict[str, Any] = {"corpus": str(tmp_path), "batch_size": 2, "seq_len": 8, "device": "cpu"}
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with TokenLoader(**settings) as loader:
        assert len(list(loader)) == 6
    with pytest.raises(CorpusFormatError, match=r"shard\.00000\.mds: the sha1 of the file is"):
        TokenLoader(**settings, verify_checksums=True)
