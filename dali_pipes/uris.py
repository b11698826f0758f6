"""Addresses of data that does not lie on this machine: `s3://bucket/prefix/a.bin`.

    given   https://me:secret@host/data/a.bin?X-Amz-Signature=5f2c
    shown   https://***@host/data/a.bin?***                            in messages, states and saved settings

A URI is a string through and through: `pathlib.Path` would make `s3:/bucket` of it.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote, unquote

from dali_pipes.errors import ConfigError

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https", "hf", "memory")
"""What can be read."""
WEB = ("http", "https")
"""Without listings."""
_KEYED = tuple(scheme for scheme in SCHEMES if scheme not in WEB)
"""Their names may have a question mark; elsewhere a query begins there."""
HIDDEN = "***"
"""In place of credentials."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_AS_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_OPEN_PARAMETERS = frozenset(
    {"alt", "download", "dl", "file", "filename", "format", "id", "path", "raw", "v", "version"}
)
"""Of a query that says which file is meant. Any other parameter may be a signature, so its query is hidden."""


class Uri(str):
    """The address of a file or folder, with the members of a `Path` that formats use. Immutable.

    Its text is what may be shown; `full` has the credentials too. Two addresses with one text are equal.
    """

    full: str
    """With credentials; for requests alone."""

    def __new__(cls, address: str) -> Self:
        """`address`: as the user gave it; without a scheme an assertion fails."""
        full = address.full if isinstance(address, Uri) else address
        found = _URI.match(full)
        assert found is not None, "callers ask is_uri first"
        scheme, rest, mark, query = found[1].lower(), full[found.end() :], "", ""
        if scheme not in _KEYED:
            rest, mark, query = rest.partition("?")
        server, slash, path = rest.partition("/")
        user, at, host = server.rpartition("@")
        if at and (scheme not in _KEYED or ":" in user):  # the container of abfss://container@account is not secret
            server = f"{HIDDEN}@{host}"
        if mark and any(part.partition("=")[0].lower() not in _OPEN_PARAMETERS for part in query.split("&")):
            query = HIDDEN
        shown = super().__new__(cls, f"{found[1]}://{server}{slash}{path}{mark}{query}")
        shown.full = full
        return shown

    def __reduce__(self) -> tuple[Any, ...]:
        return Uri, (self.full,)

    @property
    def scheme(self) -> str:
        """In lower case."""
        return self.partition("://")[0].lower()

    @property
    def server(self) -> str:
        """The bucket, container or host, with credentials."""
        return self._split()[0]

    @property
    def path(self) -> str:
        """Below the server, without a slash at either end; of a web address decoded."""
        path = self._split()[1].strip("/")
        return unquote(path) if self.scheme in WEB else path

    @property
    def query(self) -> str:
        """With credentials; empty without one."""
        return self._split()[2]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """As `Path.suffix`."""
        return Path(self.name).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The text from slash to slash, and the scheme first."""
        return tuple(self.replace("://", "/", 1).split("/"))

    @property
    def parent(self) -> "Uri":
        """The folder that it lies in; of a server the server itself."""
        return self._with_path(self._split()[1].rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> "Uri":
        """Another file of the same folder."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> "Uri":
        """As `Path.with_suffix`."""
        return self.with_name(str(Path(self.name).with_suffix(suffix)))

    def __truediv__(self, name: str) -> "Uri":
        folder, text = self._split()[1].rstrip("/"), quote(name) if self.scheme in WEB else name
        return self._with_path(f"{folder}/{text}" if folder else text)

    def _split(self) -> tuple[str, str, str]:
        rest = self.full.partition("://")[2]
        rest, _, query = rest.partition("?") if self.scheme in WEB else (rest, "", "")
        server, _, path = rest.partition("/")
        return server, path, query

    def _with_path(self, path: str) -> "Uri":
        server, _, query = self._split()
        slash, mark = "/" if path else "", "?" if query else ""
        return Uri(f"{self.full.partition('://')[0]}://{server}{slash}{path}{mark}{query}")

    def as_folder(self) -> "Uri":
        """Without a slash at its end, as `parent` gives it."""
        return self._with_path(self._split()[1].rstrip("/"))


FilePath: TypeAlias = Path | Uri
"""Where a file is."""


def is_uri(text: str) -> bool:
    """Whether a text has the form of a URI, of any scheme."""
    return _URI.match(text) is not None


def named_path(entry: str) -> FilePath:
    """Where an entry of the user is: a URI, or an absolute path, in which `~` is a home folder if there is one."""
    return Uri(entry) if is_uri(entry) else Path(os.path.abspath(os.path.expanduser(entry)))


def without_secrets(text: str) -> str:
    """A path as it is, a URI as a `Uri`, which shows no credentials."""
    return Uri(text) if is_uri(text) else text


def check_uri(entry: str, setting: str) -> None:
    """Raise ConfigError for a URI with an unknown scheme, one that went through a `Path`, or one without credentials
    that were removed from a saved configuration.

    setting: begins the message; empty where the caller adds it
    """
    found = _URI.match(entry) or _AS_PATH.match(entry)
    if found is None:
        return
    shown, scheme, lead = without_secrets(entry), found[1].lower(), f"{setting}: " if setting else ""
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme, SCHEMES, n=1)
        meant = f"did you mean {near[0]}://?" if near else f"use one of {', '.join(SCHEMES)}, or a local path"
        raise ConfigError(f"{lead}{shown}: the scheme {found[1]!r} is unknown; {meant}")
    if _URI.match(entry) is None:
        raise ConfigError(
            f"{lead}{shown}: this URI went through pathlib, which removes a slash; pass it as a string, "
            f"{entry.replace(':/', '://', 1)!r}"
        )
    if HIDDEN in (entry.full if isinstance(entry, Uri) else entry):
        raise ConfigError(
            f"{lead}{shown}: credentials are not saved with a configuration; give the URI with them again, or "
            "use the credentials of the environment"
        )


def entry_text(path: str | os.PathLike[str]) -> str:
    """What the user named, as text; a URI keeps its credentials to itself."""
    return path if isinstance(path, Uri) else without_secrets(os.fsdecode(path))
