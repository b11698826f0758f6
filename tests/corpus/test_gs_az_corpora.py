"""gs:// and az:// over a stand-in: listings in the XML of these stores, reads with conditions, and what they say."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from range_server import RangeServer, Request

from dali_pipes import TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import stores

pytestmark = pytest.mark.needs("obstore")

NAMES = ["s_10.bin", "s_2.bin", "below/s_3.bin"]
WHEN = "2026-11-28T10:00:00.000Z"
VARIABLES = {
    "GOOGLE_SKIP_SIGNATURE": "true",
    "GOOGLE_ALLOW_HTTP": "true",
    "AZURE_SKIP_SIGNATURE": "true",
    "AZURE_ALLOW_HTTP": "true",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """The bucket `data` of both, with files below `d`, which are in `tmp_path / "d"` too."""
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate(NAMES):
        path = tmp_path / "d" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        np.arange(number, 9000 + number, dtype=np.uint16).tofile(path)
    with RangeServer({}) as server:
        for name, value in {
            **VARIABLES,
            "GOOGLE_BASE_URL": server.url,
            "AZURE_ENDPOINT": f"{server.url}/account",
        }.items():
            monkeypatch.setenv(name, value)
        for name in NAMES:
            for bucket in ("data", "account/data"):
                server.files[f"{bucket}/d/{name}"] = (tmp_path / "d" / name).read_bytes()
        listings = {
            "prefix=d%2F": NAMES,
            "prefix=d%2F&delimiter=%2F": NAMES[:2],
            "delimiter=%2F&prefix=d%2F": NAMES[:2],
        }
        for query, names in listings.items():
            below = [] if len(names) == 3 else ["d/below/"]
            server.files[f"data?list-type=2&{query}"] = of_google(server, names, below)
            server.files[f"account/data?restype=container&comp=list&{query}"] = of_azure(server, names, below)
        yield server


def of_google(server: RangeServer, names: list[str], below: list[str]) -> bytes:
    found = "".join(
        f"<Contents><Key>d/{name}</Key><LastModified>{WHEN}</LastModified><ETag>{server.etag(f'data/d/{name}')}</ETag>"
        f"<Size>{len(server.files[f'data/d/{name}'])}</Size></Contents>"
        for name in names
    )
    folders = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in below)
    return f"<ListBucketResult>{found}{folders}</ListBucketResult>".encode()


def of_azure(server: RangeServer, names: list[str], below: list[str]) -> bytes:
    found = "".join(
        f"<Blob><Name>d/{name}</Name><Properties><Last-Modified>Sat, 28 Nov 2026 10:00:00 GMT</Last-Modified>"
        f"<Content-Length>{len(server.files[f'data/d/{name}'])}</Content-Length><Content-Type>b</Content-Type>"
        f"<Etag>{server.etag(f'data/d/{name}')}</Etag></Properties></Blob>"
        for name in names
    )
    folders = "".join(f"<BlobPrefix><Name>{name}</Name></BlobPrefix>" for name in below)
    return f"<EnumerationResults><Blobs>{found}{folders}</Blobs></EnumerationResults>".encode()


@pytest.mark.parametrize("scheme", ["gs", "gcs", "az", "azure"])
@pytest.mark.parametrize("pattern", ["", "/s_*.bin", "/**/*.bin", "/s_2.bin"])
def test_a_bucket_reads_as_its_copy(server: RangeServer, tmp_path: Path, scheme: str, pattern: str) -> None:
    with open_corpus(f"{tmp_path}/d{pattern}") as local, open_corpus(f"{scheme}://data/d{pattern}") as remote:
        assert [file.name for file in remote.files] == [file.name for file in local.files]
        assert remote.fingerprint == local.fingerprint
        assert np.array_equal(remote.tokens(0, remote.num_tokens), local.tokens(0, local.num_tokens))


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_run_and_a_replaced_object(server: RangeServer, scheme: str) -> None:
    with TokenLoader(f"{scheme}://data/d/s_2.bin", batch_size=4, seq_len=64, device="cpu", batches_per_run=1) as loader:
        batches = iter(loader)
        next(batches)
        for bucket in ("data", "account/data"):
            server.files[f"{bucket}/d/s_2.bin"] = server.files[f"{bucket}/d/s_2.bin"][:-2] + b"xx"
        with pytest.raises(CorpusReadError, match="was replaced or modified"):
            list(batches)


@pytest.mark.parametrize(
    ("scheme", "fault", "said"),
    [
        ("gs", "404 <Error><Code>NoSuchBucket</Code></Error>", "the bucket data does not exist"),
        ("az", "404 <Error><Code>ContainerNotFound</Code></Error>", "the bucket data does not exist"),
        ("gs", "403 <Error><Code>AccessDenied</Code></Error>", "denied (403"),
        ("az", "403 <Error><Code>AuthorizationFailure</Code></Error>", "denied (403"),
        ("gs", "401", "denied (401"),
        ("az", "401 <Error><Code>ExpiredAuthenticationToken</Code></Error>", "credentials have expired"),
    ],
)
def test_what_a_store_says(server: RangeServer, scheme: str, fault: str, said: str) -> None:
    def answer(request: Request) -> str | None:
        return fault if request.method == "GET" else None

    server.fault = answer
    for pattern in ("*.bin", "s_2.bin"):
        with pytest.raises(CorpusReadError) as raised:
            open_corpus(f"{scheme}://data/d/{pattern}")
        assert said in str(raised.value), str(raised.value)
        assert str(raised.value).count("\n") == 0
