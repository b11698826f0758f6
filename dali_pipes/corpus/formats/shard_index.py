"""Read the `index.json` of a set of shards with checks: it may be half written, damaged, or name files elsewhere.

Entry("index.json: shards[3]", {"samples": 10, ...}).integer("samples")      10, or an error that says what is there
"""

import json
from typing import Any, NoReturn

from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import file_size, open_file
from dali_pipes.uris import FilePath

MOST_SHARD_BYTES = 2**32 - 1
"""Offsets inside a shard of MDS and LitData have 32 bits."""


class Entry:
    """One JSON object of an index. Its methods raise CorpusFormatError for values of another type."""

    __slots__ = ("_values", "where")

    def __init__(self, where: str, values: object) -> None:
        self.where = where
        if not isinstance(values, dict):
            self._refuse("", values, "an object")
        self._values: dict[str, Any] = values

    def integer(self, key: str, most: int = MOST_SHARD_BYTES) -> int:
        """An integer from 0 to `most`."""
        value = self._values.get(key)
        if type(value) is not int or not 0 <= value <= most:
            self._refuse(key, value, f"an integer from 0 to {most:,}")
        return value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.optional_text(key)
        if not value:
            self._refuse(key, value, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string; None if it is missing or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, value, "a string or null")
        return value

    def items(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self._values.get(key)
        if not isinstance(value, list):
            self._refuse(key, value, "a list")
        return value

    def child(self, key: str) -> "Entry":
        """An object."""
        return Entry(f"{self.where}.{key}", self._values.get(key))

    def children(self, key: str) -> list["Entry"]:
        """A list of objects."""
        return [Entry(f"{self.where}.{key}[{at}]", value) for at, value in enumerate(self.items(key))]

    def texts(self) -> dict[str, str]:
        """All of it, names to strings."""
        return {key: self.text(key) for key in self._values}

    def get(self, key: str) -> Any:
        """The value as it is, None without one."""
        return self._values.get(key)

    def path_in(self, folder: FilePath, key: str) -> FilePath:
        """A file in `folder` or below it, by name: `..`, absolute names and the like are refused."""
        name = self.text(key)
        parts = name.split("/")
        if parts[-1] in ("", ".") or parts[0] == "" or ".." in parts or "\\" in name or "\0" in name:
            self._refuse(key, name, "the name of a file in the folder of the index or below it")
        return folder / name

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        found = repr(value)
        place = f"{self.where}.{key}" if key else self.where
        raise CorpusFormatError(
            f"{place} is {found[:100]}{'...' if len(found) > 100 else ''}, expected {expected}: the index is damaged "
            "or of another kind. Copy or recreate the set."
        )


def read_index(path: FilePath) -> Entry:
    """The whole index. Raises CorpusFormatError for other than a JSON object, CorpusReadError if it is unreadable."""
    with open_file(path) as file:
        data = file.read(0, file.size)
    try:
        return Entry(f"{path}: index", json.loads(data))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorpusFormatError):
            raise
        raise CorpusFormatError(
            f"{path}: {len(data):,} bytes are not valid JSON ({error}): the index is half written or damaged. Wait for "
            "its writer to finish, or copy or recreate it."
        ) from error


def listed_size(path: FilePath, listed_in: str) -> int:
    """Bytes of the file at `path`. Raises CorpusFormatError if it is missing, although `listed_in` names it."""
    size = file_size(path)
    if size is None:
        raise CorpusFormatError(f"{path}: is missing, but {listed_in} lists it. Copy it, or recreate the set.")
    return size
