"""Runs over moto's S3: several processes, uploads in parts, a process that is killed in one, and wrong buckets."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus_truth import CharacterEncoder, files_of, run, words_tokenizer, write_jsonl
from s3_server import SECRET, s3_client

from dali_pipes import open_corpus
from dali_pipes.errors import ConfigError, CorpusError, DaliPipesError
from dali_pipes.storage import stores
from dali_pipes.text import TokenizeConfig, tokenize_shard
from dali_pipes.uris import Uri

pytestmark = [pytest.mark.slow, pytest.mark.needs("obstore", "moto", "boto3", "tokenizers")]

COMMAND = [sys.executable, "-m", "dali_pipes", "tokenize"]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with s3_client("runs") as client:
        yield client


def objects(client: Any, prefix: str) -> dict[str, bytes]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=prefix)
    names = [one["Key"] for page in pages for one in page.get("Contents", [])]
    return {name.removeprefix(prefix): client.get_object(Bucket="runs", Key=name)["Body"].read() for name in names}


def test_processes_share_a_run(client: Any, tmp_path: Path) -> None:
    """From a bucket to a bucket, with patterns; credentials are in nothing that is written or said."""
    words_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, {"<|endoftext|>": 3})
    client.upload_file(str(tmp_path / "tokenizer.json"), "runs", "tokenizer.json")
    (tmp_path / "in").mkdir()
    for number in range(5):
        path = write_jsonl(tmp_path / "in" / f"x{number}.jsonl", ["a b", "", "b"] * (number + 1))
        client.upload_file(str(path), "runs", f"in/{path.name}")
    tokenize_shard(
        TokenizeConfig([str(tmp_path / "in")], str(tmp_path / "tokenizer.json"), str(tmp_path / "out"), shard_tokens=5)
    )
    where = ["--tokenizer", "s3://runs/tokenizer.json", "--out", "s3://runs/out", "--shard-tokens", "5"]
    processes = [
        subprocess.Popen(
            [*COMMAND, "s3://runs/in/*.jsonl", *where, "--shard", f"{part}/3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(3)
    ]
    said = "".join(process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0], said
    found, local = objects(client, "out/"), files_of(tmp_path / "out")
    manifest = found.pop("manifest.json").decode()
    del local["manifest.json"]
    assert found == local
    assert SECRET not in manifest + said
    with open_corpus("s3://runs/out") as corpus, open_corpus(tmp_path / "out") as copy:
        assert corpus.fingerprint == copy.fingerprint


def large_inputs(folder: Path) -> Path:
    """Two files, of 24 million ids each."""
    folder.mkdir()
    for number in range(2):
        write_jsonl(folder / f"x{number}.jsonl", ["abcdefgh" * 50_000] * 60)
    return folder


KILLED = """
    import sys
    sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
    from pathlib import Path
    from corpus_truth import run
    run(Path(sys.argv[2]), sys.argv[3], shard_tokens=1 << 28)
"""


def test_a_process_that_is_killed_in_an_upload(client: Any, tmp_path: Path) -> None:
    inputs = large_inputs(tmp_path / "in")
    run(inputs, tmp_path / "out", shard_tokens=1 << 28)
    script = "\n".join(line.strip() for line in KILLED.splitlines())
    arguments = [str(Path(__file__).parent), str(inputs), "s3://runs/killed"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as one:
        while not client.list_multipart_uploads(Bucket="runs").get("Uploads"):
            assert one.poll() is None, "it ended before an upload was seen"
            time.sleep(0.005)
        one.send_signal(signal.SIGKILL)
    assert set(objects(client, "killed/")) == {"_tokenize/plan.json"}, "no half shard"
    with pytest.raises(CorpusError):
        open_corpus("s3://runs/killed")
    run(inputs, "s3://runs/killed", shard_tokens=1 << 28)
    found, local = objects(client, "killed/"), files_of(tmp_path / "out")
    del found["manifest.json"], local["manifest.json"]
    assert found == local
    head = client.head_object(Bucket="runs", Key="killed/tokens-00000-0000.bin")
    assert "-" in head["ETag"], "an entity tag of parts"


def test_plans_meet(client: Any, tmp_path: Path) -> None:
    """The condition of a new object is honored, so a plan is never replaced."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        write_jsonl(tmp_path / "in" / f"x{number}.jsonl", ["abc"])
    run(tmp_path / "in", "s3://runs/plans", shard=(0, 2))
    with pytest.raises(ConfigError, match="shard_tokens: was 40, is 41"):
        run(tmp_path / "in", "s3://runs/plans", shard_tokens=41)
    with pytest.raises(FileExistsError):
        stores.put(Uri("s3://runs/plans/_tokenize/plan.json"), b"{}", new=True)
    run(tmp_path / "in", "s3://runs/plans")


def test_a_bucket_that_is_not_there(client: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", ["abc"])
    with pytest.raises(DaliPipesError, match="the bucket no-such-bucket does not exist") as raised:
        run(tmp_path / "x.jsonl", "s3://no-such-bucket/out", CharacterEncoder())
    assert SECRET not in str(raised.value)
