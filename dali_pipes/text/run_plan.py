"""What a run is, and what it has done: its plan, the receipts of its shards, and its manifest, as JSON.

    plan       settings and inputs, which must be the same to continue a run
    receipt    of a finished shard: its files, with sizes and checksums, and counts
    manifest   of a finished run: the plan, the counts, and the files of all receipts

`run_folder` and `run_in_store` keep them.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dali_pipes.corpus.discovery.file_names import utf8_name
from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.uris import FilePath

_MOST_DIFFERENCES = 5
_FOLLOWS = "vocabulary"
"""A setting that follows from the tokenizer, and that folders of earlier releases lack."""
COUNTS = ("documents", "tokens", "empty", "dropped")
MOST_NAMES = 5


@dataclass(frozen=True)
class Receipt:
    """A finished shard. end: number of documents of its item up to its end. last: whether it is the last of its item.
    notes: of its documents, from `Notes.as_json`.
    """

    files: dict[str, dict[str, Any]]
    documents: int
    tokens: int
    empty: int
    dropped: int
    end: int
    last: bool
    notes: dict[str, Any] = field(default_factory=dict)


class RunPlan:
    """The plan of one run. where: its output folder, for messages."""

    def __init__(self, where: FilePath, settings: Mapping[str, Any], inputs: Sequence[TextFile], made_by: str) -> None:
        self.content: dict[str, Any] = {
            "settings": dict(settings),
            "inputs": [
                {"name": utf8_name(file.path.name), "bytes": file.size, "digest": file.digest, **file.version}
                for file in inputs
            ],
        }
        self._where = where
        self._inputs = [utf8_name(str(file.path)) for file in inputs]
        self._made_by = made_by

    def input_name(self, number: int) -> str:
        """The path of an input, for messages."""
        return self._inputs[number] if number < len(self._inputs) else "?"

    def finished(self, path: FilePath, read: Callable[[], bytes]) -> dict[str, Any] | None:
        """The manifest at `path`, compared with this plan; None without one."""
        try:
            manifest = _read_json(path, read, _check_manifest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self.compare(manifest, "a finished corpus")
        return manifest

    def manifest(self, receipts: Sequence[Receipt]) -> dict[str, Any]:
        """That of a run with these receipts."""
        notes = notes_of(receipts).as_json()
        return {
            "made_by": self._made_by,
            **total_counts(receipts),
            **self.content,
            **({"notes": notes} if notes else {}),
            "paths": self._inputs,
            "shards": [{name: getattr(receipt, name) for name in ("files", *COUNTS)} for receipt in receipts],
        }

    def compare(self, there: Mapping[str, Any], what: str) -> None:
        """Raise ConfigError for a plan or manifest with other settings or inputs. what: what it is, for the message."""
        differences = [
            f"{name}: was {there['settings'].get(name)!r}, is {self.content['settings'].get(name)!r}"
            for name in sorted({*there["settings"], *self.content["settings"]} - {_FOLLOWS})
            if there["settings"].get(name) != self.content["settings"].get(name)
        ]
        before, now = there["inputs"], self.content["inputs"]
        if len(before) != len(now):
            differences.append(f"number of inputs: was {len(before):,}, is {len(now):,}")
        differences += [
            f"input {number}: {_input_difference(old, new)}"
            for number, (old, new) in enumerate(zip(before, now, strict=False))
            if old != new
        ]
        if differences:
            more = "; ..." if len(differences) > _MOST_DIFFERENCES else ""
            raise ConfigError(
                f"{self._where}: contains {what} with other settings or inputs: "
                f"{'; '.join(differences[:_MOST_DIFFERENCES])}{more}. Use another folder, or remove this one"
            )


class ItemInUseError(ConfigError):
    """Another process holds the lock of an item."""


class Run(Protocol):
    """Where a run keeps its plan, receipts and shards.

    out:  where the result appears
    work: local folder that shards are written to, inside `item`
    """

    @property
    def out(self) -> FilePath: ...

    @property
    def work(self) -> Path: ...

    def begin(self) -> dict[str, Any] | None:
        """Create the plan, or compare an existing one. Returns the manifest of a finished run.

        Several processes may begin at the same time. Raises ConfigError for an `out` that contains something else,
        CorpusWriteError if it cannot be written.
        """

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the finished run, compared with this one; None for an unfinished run."""

    def item(self, number: int) -> AbstractContextManager[None]:
        """Around the work on one item. Raises ItemInUseError where there are locks."""

    def receipts(self, item: int) -> list[Receipt]:
        """The finished shards of an item, in order."""

    def all_receipts(self, num_items: int) -> list[list[Receipt]]:
        """Those of each item."""

    def keep(self, item: int, part: int, receipt: Receipt) -> None:
        """Declare a shard finished; its files are in `work`."""

    def publish(self, num_items: int) -> dict[str, Any] | None:
        """Make the result visible, if all items are done; else None. Blocks.

        The manifest of a run without tokens is returned but not written.
        """


def in_order(read: Callable[[int], Receipt]) -> list[Receipt]:
    """The finished shards of an item. read: the receipt of a part; FileNotFoundError if it is not finished."""
    found: list[Receipt] = []
    with contextlib.suppress(FileNotFoundError):
        while not is_done(found):
            found.append(read(len(found)))
    return found


def is_done(receipts: Sequence[Receipt]) -> bool:
    """Whether these, of one item, are all of its receipts."""
    return bool(receipts) and receipts[-1].last


def total_counts(receipts: Sequence[Receipt]) -> dict[str, int]:
    """The sums of documents, tokens and so on over all receipts."""
    return {name: sum(getattr(receipt, name) for receipt in receipts) for name in COUNTS}


def notes_of(receipts: Sequence[Receipt]) -> Notes:
    """The notes of all receipts."""
    notes = Notes()
    for receipt in receipts:
        notes.add(Notes.from_json(receipt.notes))
    return notes


def shard_name(item: int, part: int) -> str:
    """Name of a shard without suffix. The natural order of names is the order of the documents."""
    return f"tokens-{item:05d}-{part:04d}"


def read_plan(path: FilePath, read: Callable[[], bytes]) -> dict[str, Any]:
    """The plan at `path`. Raises ConfigError for a damaged one, and what `read` raises for a missing file."""
    return _read_json(path, read, _check_plan)


def read_receipt(path: FilePath, read: Callable[[], bytes]) -> Receipt:
    """The same for a receipt, whose files are those of the shard that it is named for."""
    prefix = path.name.removesuffix("json")
    return Receipt(**_read_json(path, read, partial(_check_receipt, prefix)))


def _read_json(path: FilePath, read: Callable[[], bytes], check: Callable[[Any], None]) -> dict[str, Any]:
    try:
        found = json.loads(read().decode("utf-8"))
        check(found)
    except (FileNotFoundError, NotADirectoryError, CorpusReadError):
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(
            f"{path}: not a valid {Path(path.name).stem} of a run: {error}. Remove the folder, or use another one"
        ) from None
    checked: dict[str, Any] = found
    return checked


def _check_plan(found: Any) -> None:
    _expect(isinstance(found, dict), "expected a JSON object")
    _expect(isinstance(found.get("settings"), dict), "settings are missing")
    inputs = found.get("inputs")
    _expect(isinstance(inputs, list), "the list of inputs is missing")
    _expect(all(map(_is_input, inputs)), "the name, size or digest of an input is missing")


def _is_input(file: Any) -> bool:
    kinds = {"name": str, "bytes": int, "digest": str}
    return isinstance(file, dict) and all(type(file.get(key)) is kind for key, kind in kinds.items())


def _check_manifest(found: Any) -> None:
    _check_plan(found)
    _check_counts(found)
    Notes.from_json(found.get("notes", {}))
    shards = found.get("shards")
    _expect(isinstance(shards, list), "the list of shards is missing")
    _expect(
        all(isinstance(one, dict) and isinstance(one.get("files"), dict) for one in shards),
        "the files of a shard are missing",
    )


def _check_receipt(prefix: str, found: Any) -> None:
    _expect(isinstance(found, dict), "expected a JSON object")
    names = {field.name for field in fields(Receipt)}
    _expect(
        names - {"notes"} <= set(found) <= names,
        f"expected the keys {', '.join(sorted(names))}, found {', '.join(found)}",
    )  # older releases: no notes
    Notes.from_json(found.get("notes", {}))
    _check_counts(found)
    _expect(type(found["end"]) is int and type(found["last"]) is bool, "end or last is missing")
    # Files are moved by these names.
    names = found["files"]
    _expect(isinstance(names, dict) and all(isinstance(about, dict) for about in names.values()), "files are missing")
    json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair raises a ValueError
    _expect(
        all(name.startswith(prefix) and not set(name) & set("/\\\0") for name in names),
        "a file belongs to another shard",
    )


def _check_counts(found: dict[str, Any]) -> None:
    counts = [found.get(name) for name in COUNTS]
    _expect(all(type(count) is int and count >= 0 for count in counts), f"{', '.join(COUNTS)} are {counts}")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise[:200])


def _input_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if (old["name"], old["bytes"]) != (new["name"], new["bytes"]):
        return f"was {old['name']}, {old['bytes']:,} bytes, is {new['name']}, {new['bytes']:,} bytes"
    if old["digest"] != new["digest"]:
        return f"{new['name']} has different content"
    if "version" in new:
        return f"{new['name']} was replaced: version was {old.get('version')}, is {new['version']}"
    return (
        f"{new['name']} was changed, or copied without its modification time: modified_ns was "
        f"{old.get('modified_ns')}, is {new['modified_ns']}"
    )


def as_json(value: Any) -> bytes:
    """JSON in UTF-8, with an escape for each byte of a file name that is not UTF-8."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
