"""A server of byte ranges on loopback, with the faults of real ones.

with RangeServer({"a.bin": data}, fault=lambda request: "503" if request.number % 3 == 0 else None) as server:
    open_corpus(f"{server.url}/a.bin")

    python range_server.py FOLDER LATENCY_S BANDWIDTH      prints its address, serves until its standard input ends

Faults: "503" and any other status, also with a text ("404 NoSuchBucket"), "429" (with Retry-After), "stall" (no
answer), "short" (fewer bytes than announced), "whole" (200, without a range), "page" (200, an HTML page of a proxy),
"reset", "expired" (400, of a token of S3), "etag" (from now on another entity tag).
"""

import contextlib
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import unquote

from typing_extensions import override

PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Guest network</body></html>"


class Request(NamedTuple):
    """What the server was asked. number: from 0, over all requests."""

    number: int
    method: str
    path: str
    first: int | None
    last: int | None
    authorization: str | None


class RangeServer:
    """Files by path below the address, served until the end of the `with` block. Thread-safe.

    files:         content by path; changed by assignment while it serves. redirects: addresses by path
    fault:         the fault of a request; None: none
    latency_s:     before each answer
    bandwidth:     bytes a second of all answers together; 0: as fast as it goes
    if_match:      whether the condition is honored
    tags:          whether answers have an entity tag, beside the time of modification
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        fault: Callable[[Request], str | None] = lambda request: None,
        *,
        latency_s: float = 0,
        bandwidth: float = 0,
        if_match: bool = True,
        tags: bool = True,
    ) -> None:
        self.files, self.fault = dict(files), fault
        self.latency_s, self.bandwidth, self.if_match, self.tags = latency_s, bandwidth, if_match, tags
        self.redirects: dict[str, str] = {}
        self.requests: list[Request] = []
        self.sent_bytes = 0
        self.most_in_flight = 0
        self._in_flight, self._free_at = 0, 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._digests: dict[bytes, str] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """The files below a folder."""
        return cls({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"server_owner": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def etag(self, path: str) -> str:
        """Of the content now."""
        content = self.files[path]
        if content not in self._digests:
            self._digests[content] = hashlib.sha256(content).hexdigest()[:16]
        return f'"{self._digests[content]}"'

    def counts(self) -> dict[str, int]:
        """Requests and bytes since the last call; also what GET /.counts answers, for another process."""
        with self._lock:
            found = {"requests": len(self.requests), "bytes": self.sent_bytes, "most_in_flight": self.most_in_flight}
            self.requests, self.sent_bytes, self.most_in_flight = [], 0, self._in_flight
            return found

    def _begin(self, method: str, path: str, first: int | None, last: int | None, authorization: str | None) -> Request:
        with self._lock:
            request = Request(len(self.requests), method, path, first, last, authorization)
            self.requests.append(request)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            return request

    def _wait(self, count: int) -> None:
        """The latency, and the time that `count` bytes take on the one line."""
        with self._lock:
            self.sent_bytes += count
            until = time.monotonic() + self.latency_s
            if self.bandwidth:
                self._free_at = max(self._free_at, time.monotonic()) + count / self.bandwidth
                until = max(until, self._free_at + self.latency_s)
        if until > time.monotonic():
            time.sleep(until - time.monotonic())

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients close connections whenever they like."""


class _Handler(BaseHTTPRequestHandler):
    server_owner: RangeServer
    protocol_version = "HTTP/1.1"
    _is_in_flight = False
    disable_nagle_algorithm = True

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        owner, path = self.server_owner, self.path.lstrip("/")
        path = path if path in owner.files else unquote(path.partition("?")[0])
        if path == ".counts":
            self._reply(200, json.dumps(owner.counts()).encode(), {})
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)?", self.headers.get("Range", ""))
        first, last = (None, None) if found is None else (int(found[1]), int(found[2]) if found[2] else None)
        request = owner._begin(self.command, path, first, last, self.headers.get("Authorization"))
        self._is_in_flight = True
        try:
            self._send(request)
        finally:
            self._end()

    def _end(self) -> None:
        """Before the answer goes out: a client may ask again once it has it."""
        if self._is_in_flight:
            self._is_in_flight = False
            self.server_owner._end()

    def _send(self, request: Request) -> None:
        owner, fault = self.server_owner, self.server_owner.fault(request)
        if fault == "stall":
            owner._ended.wait(30)
        if fault in ("stall", "reset"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault == "etag":
            owner.files[request.path] = owner.files[request.path] + b"\0\0"
        if request.path in owner.redirects:
            self._reply(302, b"", {"Location": owner.redirects[request.path]})
            return
        content = owner.files.get(request.path)
        status, _, text = (fault or "").partition(" ")
        if status.isdecimal():
            self._reply(int(status), (text or "slow down").encode(), {"Retry-After": "1"} if status == "429" else {})
        elif fault == "expired":
            self._reply(400, b"<Error><Code>ExpiredToken</Code></Error>", {})
        elif fault == "page":
            self._reply(200, PAGE, {"Content-Type": "text/html"})
        elif content is None:
            self._reply(404, b"no such file", {})
        else:
            self._content(request, content, fault)

    def _content(self, request: Request, content: bytes, fault: str | None) -> None:
        owner = self.server_owner
        tags = {"ETag": owner.etag(request.path)} if owner.tags else {}
        headers = {**tags, "Last-Modified": "Sat, 28 Nov 2026 10:00:00 GMT", "Accept-Ranges": "bytes"}
        wanted = self.headers.get("If-Match")
        if owner.if_match and wanted is not None and wanted != tags.get("ETag"):
            self._reply(412, b"changed", headers)
        elif request.first is None or fault == "whole":
            self._reply(200, content, headers, short=fault == "short")
        elif request.first >= len(content):
            self._reply(416, b"", headers)
        else:
            end = len(content) if request.last is None else min(len(content), request.last + 1)
            headers["Content-Range"] = f"bytes {request.first}-{end - 1}/{len(content)}"
            self._reply(206, content[request.first : end], headers, short=fault == "short")

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str], *, short: bool = False) -> None:
        head = self.command == "HEAD"
        self.server_owner._wait(0 if head else len(body))
        self._end()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if not head:
                self.wfile.write(body[: len(body) // 2] if short else body)
        self.close_connection |= short


def _main(folder: str, latency_s: str, bandwidth: str) -> None:
    with RangeServer.of_folder(Path(folder)) as server:
        server.latency_s, server.bandwidth = float(latency_s), float(bandwidth)
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(*sys.argv[1:])
