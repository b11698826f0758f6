"""moto's S3 server in this process, and the variables of the environment that lead to it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

SECRET = "s3cr3t"


@contextlib.contextmanager
def s3_client(bucket: str) -> Iterator[Any]:
    """A client of boto3, after it has made the bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=bucket)
        yield client
    server.stop()
