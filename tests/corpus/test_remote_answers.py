"""What servers, proxies and networks may answer instead of data: one sentence that says it, or the data after all."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from range_server import PAGE, RangeServer

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage import stores

pytestmark = pytest.mark.needs("obstore")

IDS = np.arange(9000, dtype=np.uint16).tobytes()
LISTING = "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """The bucket `data` of an S3 store, which is http://.../data, too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(stores, "_stores", {})
    with RangeServer({"data/a.bin": IDS, "data/b.bin": IDS[::-1]}) as server:
        for name, value in {
            "DALI_PIPES_CACHE": str(tmp_path),
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


def said(uri: str, kind: type[Exception] = CorpusReadError) -> str:
    with pytest.raises(kind) as raised:
        open_corpus(uri, read_retries=1)
    message = str(raised.value)
    assert uri.partition("*")[0].rstrip("/") in message
    assert message.count("\n") == 0
    assert "s3cr3t" not in message
    return message


ANSWERS = {
    "404 <Error><Code>NoSuchBucket</Code></Error>": "the bucket data does not exist",
    "403 <Error><Code>AccessDenied</Code></Error>": "access is denied (403",
    "400 <Error><Code>ExpiredToken</Code></Error>": "the credentials have expired (400",
    "403 <Error><Code>RequestTimeTooSkewed</Code></Error>": "clock",
    "400 <Error><Code>AuthorizationHeaderMalformed</Code>expecting 'eu-west-7'</Error>": "AWS_REGION=eu-west-7",
    "301 <Error><Code>PermanentRedirect</Code></Error>": "AWS_REGION",
    "400 <Error><Code>AuthorizationHeaderMalformed</Code></Error>": "AWS_REGION",
    "500": "500 Internal Server Error",
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("pattern", ["a.bin", "*.bin"])
def test_a_store_says_why(server: RangeServer, answer: str, pattern: str) -> None:
    server.fault = lambda request: answer
    assert ANSWERS[answer] in said(f"s3://data/{pattern}")


def test_a_bucket_without_such_objects(server: RangeServer) -> None:
    for prefix in ("no%2F", "no%2Fsuch%2F", "no%2Fsuch.idx%2F", "no%2Fsuch.bin%2F"):
        server.files[f"data?delimiter=%2F&list-type=2&prefix={prefix}"] = LISTING.encode()
    assert "no such object, folder" in said("s3://data/no/such")
    assert "no file matches" in said("s3://data/no/*.bin")


def test_an_endpoint_where_nobody_is(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot connect to {address}" in said(f"http://{address}/a.bin")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        assert f"cannot connect to {address}" in said("s3://data/a.bin")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")
    assert "no-such-host.invalid" in said("s3://data/a.bin")
    assert "no-such-host.invalid cannot be found" in said("http://no-such-host.invalid/a.bin")


@pytest.mark.parametrize("far", [False, True], ids=["same host", "another host"])
def test_an_address_that_leads_to_another_is_followed(server: RangeServer, far: bool) -> None:
    target = server.url.replace("127.0.0.1", "localhost") if far else server.url
    server.redirects = {"moved.bin": f"{target}/data/a.bin"}
    with open_corpus(f"{server.url.replace('//', '//me:hunter2@')}/moved.bin") as corpus:
        assert corpus.tokens(0, 9000).tolist() == list(range(9000))
    if far:
        asked = {request.authorization for request in server.requests if request.path == "data/a.bin"}
        assert asked == {None}, "credentials are for the host that was named"


def test_an_address_that_leads_astray(server: RangeServer) -> None:
    server.redirects = {"loop.bin": f"{server.url}/loop.bin", "login.bin": f"{server.url}/login"}
    assert "redirect" in said(f"{server.url}/loop.bin")
    server.files["login"] = PAGE
    assert "an HTML page" in said(f"{server.url}/login.bin", CorpusFormatError)


@pytest.mark.parametrize("honored", [True, False], ids=["If-Match", "compared"])
@pytest.mark.parametrize("tags", [True, False], ids=["tags", "times"])
def test_an_object_that_grows(server: RangeServer, honored: bool, tags: bool) -> None:
    server.if_match, server.tags = honored, tags
    with open_corpus(f"{server.url}/data/a.bin") as corpus:
        server.files["data/a.bin"] += IDS
        with pytest.raises(CorpusReadError, match=r"a\.bin: was replaced or modified.*18,000 bytes"):
            corpus.tokens(3000, 5000)


def test_a_page_in_place_of_a_listing(server: RangeServer) -> None:
    server.files["data?delimiter=%2F&list-type=2"] = PAGE
    assert "no file matches" in said("s3://data/*.bin")


def test_a_page_in_place_of_later_reads(server: RangeServer) -> None:
    """Once a session has ended."""
    with open_corpus(f"{server.url}/data/a.bin", read_retries=0) as corpus:
        server.fault = lambda request: "page"
        with pytest.raises(CorpusReadError, match="proxy"):
            corpus.tokens(3000, 5000)
