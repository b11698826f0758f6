"""The server of ranges on loopback that stands for an object store: its options, its process and its counts."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

LatencyMs: TypeAlias = Annotated[float, typer.Option(min=0, help="of each answer of the store")]
BandwidthMb: TypeAlias = Annotated[float, typer.Option(min=0.1, help="megabytes a second of all answers together")]
Rate: TypeAlias = Annotated[float, typer.Option(min=0.001, help="pace of the consumer in million tokens per second")]

SETTLES_S = 1.0
"""After which a consumer at a pace must not wait any more."""
_SERVER = Path(__file__).resolve().parents[2] / "tests" / "storage" / "range_server.py"


@contextlib.contextmanager
def serving(folder: Path, latency_s: float, bandwidth: float) -> Iterator[str]:
    """The address of a server in another process."""
    command = [sys.executable, str(_SERVER), str(folder), str(latency_s), str(bandwidth)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def counted(url: str) -> dict[str, int]:
    """What the server has answered since the last call."""
    with urllib.request.urlopen(f"{url}/.counts") as answer:
        found: dict[str, int] = json.load(answer)
        return found
