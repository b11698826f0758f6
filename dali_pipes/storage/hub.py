"""Datasets on the Hugging Face Hub: a file is read from its web address, a folder is listed by the Hub's API.

    hf://datasets/org/name/data/a.bin         https://huggingface.co/datasets/org/name/resolve/main/data/a.bin
    hf://datasets/org/name@v2/data/a.bin      the same of the revision v2

`HF_TOKEN` and `HF_ENDPOINT` are used as by the Hub's own client.
(API: https://huggingface.co/docs/hub/api)
"""

import errno
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from dali_pipes.errors import ConfigError
from dali_pipes.storage.retries import StoreError
from dali_pipes.uris import Uri

_KINDS = ("datasets", "models", "spaces")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_TIMEOUT_S = 30.0


class HubPath(NamedTuple):
    """kind: "datasets" ... repository: `org/name`. path: below it, without a slash at either end."""

    kind: str
    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, uri: Uri) -> "HubPath":
        """Raises ConfigError for an address that does not name a repository."""
        parts = f"{uri.server}/{uri.path}".strip("/").split("/")
        if parts[0] not in _KINDS or len(parts) < 3:
            raise ConfigError(
                f"{uri}: expected hf://datasets/ORGANIZATION/NAME/..., with @REVISION after NAME if needed"
            )
        name, _, revision = parts[2].partition("@")
        return cls(parts[0], f"{parts[1]}/{name}", revision or "main", "/".join(parts[3:]))

    @property
    def key(self) -> str:
        """Of the file, below the endpoint."""
        kind = "" if self.kind == "models" else f"{self.kind}/"
        return f"{kind}{self.repository}/resolve/{self.revision}/{self.path}"


def endpoint() -> str:
    """The address of the Hub, without a slash at its end."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def headers() -> dict[str, str]:
    """That go with each request."""
    token = os.environ.get("HF_TOKEN")
    return {"authorization": f"Bearer {token}"} if token else {}


def list_entries(uri: Uri, *, deep: bool) -> Iterator[tuple[Uri, int | None, str]]:
    """Address, size (None for a folder) and version of what is in a folder; `deep`: of all below. Blocks; OSError.

    Empty if there is no such folder.
    """
    at = HubPath.of(uri)
    base = f"{endpoint()}/api/{at.kind}/{at.repository}/tree/{quote(at.revision, safe='')}"
    url: str | None = f"{base}/{quote(at.path)}".rstrip("/") + ("?recursive=true" if deep else "")
    root = Uri(uri.full.removesuffix("/").removesuffix(at.path).rstrip("/"))
    while url is not None:
        entries, url = _page(url)
        for entry in entries:
            size = int(entry["size"]) if entry["type"] == "file" else None
            yield root / entry["path"], size, str(entry.get("oid"))


def _page(url: str) -> tuple[list[Any], str | None]:
    """The entries of one answer, and the address of the next one."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers()), timeout=_TIMEOUT_S) as answer:
            following = _NEXT.search(answer.headers.get("Link", ""))
            return json.load(answer), None if following is None else following[1]
    except urllib.error.HTTPError as error:
        status, reason, asked = error.code, error.reason, error.headers.get("Retry-After", "")
        error.close()
    except urllib.error.URLError as error:
        raise StoreError(errno.ECONNREFUSED, f"cannot connect to {endpoint()}: {error.reason}") from None
    except ValueError as error:
        raise StoreError(errno.EIO, f"the Hub's answer is not valid JSON ({error})") from None
    if status == 404:
        return [], None
    if status in (401, 403):
        raise StoreError(errno.EACCES, f"access is denied ({status} {reason}); set HF_TOKEN, and accept the terms")
    raise StoreError(
        errno.EIO if status == 429 or status >= 500 else errno.EINVAL,
        f"{status} {reason}",
        busy=status in (429, 503),
        after_s=float(asked) if asked.isdecimal() else 0,
    )
