"""The output folder of a run: how an interrupted run continues, and a finished one is recognized.

    OUT/_tokenize/plan.json                  settings and inputs, which must be the same to continue the run; others
                                             replace it only if no shard is finished and no process is working
    OUT/_tokenize/plan.lock                  held while the plan is replaced, and while the lock of an item is taken
    OUT/_tokenize/tokens-00003-0001.bin ...  finished files, and unfinished ones that end in .tmp
    OUT/_tokenize/tokens-00003-0001.json     the receipt of a finished shard, written after its files
    OUT/_tokenize/item-00003.lock            held by the process that works on this input
    OUT/tokens-00003-0001.bin ...            all files, moved here when all inputs are done
    OUT/manifest.json                        written last, if there are tokens; then _tokenize is removed

A shard is one input, or a part of it if it has more tokens than a shard may have. An unfinished corpus cannot be
opened, since OUT does not contain token files before the end.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from dali_pipes.corpus.discovery.file_names import utf8_name
from dali_pipes.errors import ConfigError, CorpusWriteError
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.text.shard_writer import UNFINISHED, sync_folder, write_whole, writing

MANIFEST = "manifest.json"
WORK_FOLDER = "_tokenize"
_MOST_DIFFERENCES = 5
_FOLLOWS = "vocabulary"
"""A setting that follows from the tokenizer, and that folders of earlier releases lack."""
COUNTS = ("documents", "tokens", "empty", "dropped")


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


class RunFolder:
    """The output folder of one run.

    settings, inputs: must be the same to continue a run here.
    Raises ConfigError for a folder that contains something else, CorpusWriteError if it cannot be written.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], inputs: Sequence[TextFile], made_by: str) -> None:
        self.out = Path(os.path.abspath(os.path.expanduser(out)))
        self.work = self.out / WORK_FOLDER
        self._plan: dict[str, Any] = {
            "settings": dict(settings),
            "inputs": [
                {
                    "name": utf8_name(file.path.name),
                    "bytes": file.size,
                    "digest": file.digest,
                    "modified_ns": file.modified_ns,
                }
                for file in inputs
            ],
        }
        self._inputs = [utf8_name(str(file.path)) for file in inputs]
        self._made_by = made_by
        self._compared: tuple[int, int, int] | None = None

    def begin(self) -> dict[str, Any] | None:
        """Create the folder and its plan, or compare an existing plan. Returns the manifest of a finished run.

        Several processes may begin at the same time.
        """
        manifest = self.manifest()
        if manifest is not None:
            return manifest
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            strangers = [] if self.work.exists() else sorted(os.listdir(self.out))
            if MANIFEST in strangers:  # another process has just finished it
                return self.manifest()
            if [name for name in strangers if not name.startswith(".") and name != WORK_FOLDER]:
                raise ConfigError(
                    f"{self.out}: the output folder contains other files ({', '.join(strangers[:_MOST_DIFFERENCES])}); "
                    "use a new folder"
                )
            self.work.mkdir(exist_ok=True)
        except OSError as error:
            # Also for FileNotFoundError, which some file systems raise for a new folder, such as /proc.
            raise CorpusWriteError(
                f"{self.out}: the output folder cannot be created or written: {error.strerror or error}"
            ) from error
        plan = self.work / "plan.json"
        mine = plan.with_name(f"plan.{uuid.uuid4().hex}{UNFINISHED}")
        with writing(plan):
            mine.write_bytes(_as_json(self._plan))
            try:
                os.link(mine, plan)  # unlike a rename, keeps the plan of a process that was faster
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not plan.exists():
                    mine.rename(plan)
            mine.unlink(missing_ok=True)
        with self._plan_held() as is_held:
            try:
                self._compare_plan()
            except ConfigError:
                if not (is_held and self._is_without_result()):
                    raise
                with writing(plan):
                    for receipt in self.work.glob("tokens-*.json"):
                        receipt.unlink()
                    write_whole(plan, _as_json(self._plan))
        return None

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the finished run, compared with this one; None for an unfinished run."""
        try:
            manifest = _read_json(self.out / MANIFEST, _check_manifest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._compare(manifest, "a finished corpus")
        return manifest

    @contextlib.contextmanager
    def item(self, number: int) -> Iterator[None]:
        """Hold the lock of an item. Unfinished files that a killed process left are removed first."""
        try:
            with self._plan_held():
                held, _ = lock(self.work / f"item-{number:05d}.lock", wait=False)
                try:
                    self._compare_plan()  # a run with other settings may have begun here since `begin`
                except BaseException:
                    if held is not None:
                        unlock(held)
                    raise
        except BlockingIOError:
            raise ConfigError(
                f"{self.out}: another process is working on input {number} ({self._input_name(number)}); wait for it, "
                "or divide the inputs among the processes with --shard i/n"
            ) from None
        try:
            whole = {name for receipt in self.receipts(number) for name in receipt.files}
            for path in sorted(self.work.glob(f"tokens-{number:05d}-*")):
                if path.suffix != ".json" and path.name not in whole:
                    path.unlink()
            yield
        finally:
            if held is not None:
                unlock(held)

    def receipts(self, item: int) -> list[Receipt]:
        """The finished shards of an item, in order."""
        found: list[Receipt] = []
        while not (found and found[-1].last):
            path = self._receipt_path(item, len(found))
            try:
                content = _read_json(path, partial(_check_receipt, f"{path.stem}."))
            except FileNotFoundError:
                break
            found.append(Receipt(**content))
        return found

    def keep(self, item: int, part: int, receipt: Receipt) -> None:
        """Declare a shard finished."""
        write_whole(self._receipt_path(item, part), _as_json(vars(receipt)))

    def publish(self, num_items: int) -> dict[str, Any] | None:
        """Move the shards to their places and write the manifest, if all items are done; else None. Blocks for a lock.

        The manifest of a run without tokens is returned but not written, so that a run with other settings may follow.
        """
        held, _ = lock(self.work / "publish.lock")
        try:
            if (manifest := self.manifest()) is not None:
                shutil.rmtree(self.work, ignore_errors=True)
                return manifest
            found = [self.receipts(item) for item in range(num_items)]
            if not all(receipts and receipts[-1].last for receipts in found):
                return None
            receipts = [receipt for item in found for receipt in item]
            if not any(receipt.files for receipt in receipts):
                return self._manifest(receipts)
            for name in (name for receipt in receipts for name in receipt.files):
                # A run that was killed here has moved some already.
                if not (self.out / name).exists():
                    with writing(self.out / name):
                        (self.work / name).rename(self.out / name)
            sync_folder(self.out)
            manifest = self._manifest(receipts)
            write_whole(self.out / MANIFEST, _as_json(manifest))
            shutil.rmtree(self.work, ignore_errors=True)
            return manifest
        finally:
            if held is not None:
                unlock(held)

    def _manifest(self, receipts: Sequence[Receipt]) -> dict[str, Any]:
        notes = notes_of(receipts).as_json()
        return {
            "made_by": self._made_by,
            **total_counts(receipts),
            **self._plan,
            **({"notes": notes} if notes else {}),
            "paths": self._inputs,
            "shards": [{name: getattr(receipt, name) for name in ("files", *COUNTS)} for receipt in receipts],
        }

    @contextlib.contextmanager
    def _plan_held(self) -> Iterator[bool]:
        """Hold the lock of the plan; False on a file system without locks. Blocks while another process has it."""
        held, _ = lock(self.work / "plan.lock")
        try:
            yield held is not None
        finally:
            if held is not None:
                unlock(held)

    def _compare_plan(self) -> None:
        plan = self.work / "plan.json"
        about = os.stat(plan)
        version = about.st_ino, about.st_mtime_ns, about.st_size
        if version != self._compared:  # reading it takes tens of ms for many inputs, and each of them asks
            self._compare(_read_json(plan, _check_plan), "an unfinished run")
            self._compared = version

    def _is_without_result(self) -> bool:
        """Whether the run has not finished any shard, and no process is working on one. The lock of the plan is held.

        Raises ConfigError for a receipt that cannot be read.
        """
        for path in self.work.glob("tokens-*.json"):
            if _read_json(path, partial(_check_receipt, f"{path.stem}."))["files"]:
                return False
        for path in self.work.glob("item-*.lock"):
            try:
                held, _ = lock(path, wait=False)
            except BlockingIOError:
                return False
            if held is not None:
                unlock(held)
        return True

    def _compare(self, there: Mapping[str, Any], what: str) -> None:
        differences = [
            f"{name}: was {there['settings'].get(name)!r}, is {self._plan['settings'].get(name)!r}"
            for name in sorted({*there["settings"], *self._plan["settings"]} - {_FOLLOWS})
            if there["settings"].get(name) != self._plan["settings"].get(name)
        ]
        before, now = there["inputs"], self._plan["inputs"]
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
                f"{self.out}: contains {what} with other settings or inputs: "
                f"{'; '.join(differences[:_MOST_DIFFERENCES])}{more}. Use another folder, or remove this one"
            )

    def _receipt_path(self, item: int, part: int) -> Path:
        return self.work / f"{shard_name(item, part)}.json"

    def _input_name(self, number: int) -> str:
        return self._inputs[number] if number < len(self._inputs) else "?"


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


def _read_json(path: Path, check: Callable[[Any], None]) -> dict[str, Any]:
    """The content of a JSON file of a run. Raises ConfigError if `check` raises ValueError, and FileNotFoundError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read as the {path.stem} of a run: {error}. Remove the folder, or use another one"
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
        return f"{new['name']} has other content"
    return (
        f"{new['name']} was changed, or copied without its modification time: modified_ns was "
        f"{old.get('modified_ns')}, is {new['modified_ns']}"
    )


def _as_json(value: Any) -> bytes:
    """JSON in UTF-8, with an escape for each byte of a file name that is not UTF-8."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
