"""s3:// over moto's server: listings, ranges and If-Match of a store, and what it says of a wrong bucket or key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import s3_client
from test_remote_corpora import SAMPLES

from dali_pipes import TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.copying import copy_corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import stores

pytestmark = [pytest.mark.slow, pytest.mark.needs("obstore", "moto", "boto3")]


@pytest.fixture(scope="module")
def bucket(samples: Path) -> Iterator[Any]:
    """A client, after all samples were uploaded to the bucket `data`."""
    with s3_client("data") as client:
        for path in samples.rglob("*"):
            if path.is_file():
                client.put_object(Bucket="data", Key=f"corpora/{path.relative_to(samples)}", Body=path.read_bytes())
        yield client


@pytest.mark.parametrize(("names", "dtype"), SAMPLES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_every_format_reads_as_its_copy(bucket: Any, samples: Path, names: list[str], dtype: str | None) -> None:
    with (
        open_corpus([samples / name for name in names], dtype=dtype) as local,
        open_corpus([f"s3://data/corpora/{name}" for name in names], dtype=dtype) as remote,
    ):
        assert (remote.fingerprint, remote.num_documents) == (local.fingerprint, local.num_documents)
        assert np.array_equal(remote.tokens(0, remote.num_tokens), local.tokens(0, local.num_tokens))


@pytest.mark.parametrize("pattern", ["llmc/gpt2_train*.bin", "**/gpt2_train_*.bin", "datatrove/gpt2", "mds/tokens_u16"])
def test_listings(bucket: Any, samples: Path, pattern: str) -> None:
    with open_corpus(str(samples / pattern)) as local, open_corpus(f"s3://data/corpora/{pattern}") as remote:
        assert [file.name for file in remote.files] == [file.name for file in local.files]
        assert remote.fingerprint == local.fingerprint


def test_a_run_and_a_replaced_object(bucket: Any, samples: Path) -> None:
    settings: Any = {"batch_size": 8, "seq_len": 128, "device": "cpu"}
    with TokenLoader("s3://data/corpora/nanogpt/train.bin", **settings, batches_per_run=1) as remote:
        with TokenLoader(str(samples / "nanogpt/train.bin"), **settings) as local:
            for one, other in zip(remote, local, strict=True):
                assert one["input_ids"].equal(other["input_ids"])
        state = remote.state_dict()
        assert "s3" not in str(state)
        batches = iter(remote)
        next(batches)
        content = (samples / "nanogpt/train.bin").read_bytes()
        bucket.put_object(Bucket="data", Key="corpora/nanogpt/train.bin", Body=content[:-2] + b"xx")
        with pytest.raises(CorpusReadError, match="was replaced or modified"):
            list(batches)
        bucket.put_object(Bucket="data", Key="corpora/nanogpt/train.bin", Body=content)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://no-such-bucket/a.bin", "the bucket no-such-bucket does not exist"),
        ("s3://no-such-bucket/*.bin", "the bucket no-such-bucket does not exist"),
        ("s3://data/no/such/prefix", "no such object, folder"),
        ("s3://data/no/*.bin", "no file matches"),
    ],
)
def test_what_is_not_there(bucket: Any, uri: str, said: str) -> None:
    with pytest.raises(CorpusReadError, match=said):
        open_corpus(uri)


def test_copy(bucket: Any, samples: Path, tmp_path: Path) -> None:
    copy_corpus("s3://data/corpora/mds", tmp_path)
    copied = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == {
        p.relative_to(samples / "mds"): p.read_bytes() for p in (samples / "mds").rglob("*") if p.is_file()
    }


def test_a_second_start_lists_and_reads_nothing(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        bucket.put_object(Bucket="data", Key=f"many/s_{number}.bin", Body=bytes(range(100)) * (900 + number))
    asked: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(stores, name)

        def asks(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            return call(*arguments, **options)

        return asks

    for name in ("get", "look_up", "list_below"):
        monkeypatch.setattr(stores, name, noted(name))
    with open_corpus("s3://data/many/*.bin") as first:
        assert asked.count("get") > 100
        ids = first.tokens(100_000, 10).tolist()
    asked.clear()
    with open_corpus("s3://data/many/*.bin") as second:
        assert asked == ["list_below"]
        assert second.fingerprint == first.fingerprint
        assert second.tokens(100_000, 10).tolist() == ids
