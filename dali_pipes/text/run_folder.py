"""What a run leaves in its output folder, so that a broken one goes on and a finished one is known.

    OUT/_tokenize/plan.json                  settings and inputs: a run goes on only with the same, unless no shard is
                                             finished, and nobody at work: then a run with others begins anew
    OUT/_tokenize/plan.lock                  held while a plan is replaced, and while a lock of an item is taken
    OUT/_tokenize/tokens-00003-0001.bin ...  finished files, and unfinished ones that end in .tmp
    OUT/_tokenize/tokens-00003-0001.json     the receipt of a finished shard: written last, so its files are whole
    OUT/_tokenize/item-00003.lock            held by the process that is at work on this input
    OUT/tokens-00003-0001.bin ...            everything, moved here when all inputs are done
    OUT/manifest.json                        written last, if there is a token; then _tokenize is removed

A shard is one input, or a part of it where it has more tokens than a shard may have. A half-made corpus cannot be
opened: before the end there is no token file in OUT.
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
from dali_pipes.text.inputs import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.text.shard_writer import UNFINISHED, sync_folder, write_whole, writing

MANIFEST = "manifest.json"
WORK_FOLDER = "_tokenize"
_MOST_DIFFERENCES = 5
_COUNTS = ("documents", "tokens", "empty", "dropped")


@dataclass(frozen=True)
class Receipt:
    """A finished shard. end: how many documents of its item it and those before it took; last: of its item.
    notes: what there is to say of its documents, as `Notes.as_json` gives it.
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

    settings, inputs: what a run that goes on here must have in common with the one that began.
    Raises ConfigError for a folder that holds something else, CorpusWriteError where it cannot be written.
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
        """Make the folder and leave the plan there, or find that what is there has the same. The manifest if finished.

        Several processes may begin at once.
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
                    f"{self.out}: is not empty ({', '.join(strangers[:_MOST_DIFFERENCES])}), and what is in it is not "
                    "of a run of this kind; name a new folder"
                )
            self.work.mkdir(exist_ok=True)
        except OSError as error:
            # FileNotFoundError among them: nothing removes this folder, but some file systems make none, /proc for one.
            raise CorpusWriteError(
                f"{self.out}: the folder cannot be made or written: {error.strerror or error}"
            ) from error
        plan = self.work / "plan.json"
        own = plan.with_name(f"plan.{uuid.uuid4().hex}{UNFINISHED}")
        with writing(plan):
            own.write_bytes(_as_json(self._plan))
            try:
                os.link(own, plan)  # unlike a rename, leaves the plan of a process that was faster
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not plan.exists():
                    own.rename(plan)
            own.unlink(missing_ok=True)
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
        """The manifest of the finished run, compared with this one; None before the end."""
        try:
            manifest = _read_json(self.out / MANIFEST, _check_manifest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._compare(manifest, "the finished corpus")
        return manifest

    @contextlib.contextmanager
    def item(self, number: int) -> Iterator[None]:
        """Hold the lock of an item. What a killed process left of it, apart from finished shards, is removed first."""
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
                f"{self.out}: another process is at work on input {number} ({self._inputs_of(number)}); wait for it, "
                "or give each process a part of its own: --shard i/n"
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
        """Move the shards in place and write the manifest, if all items are done; None if not. Blocks for a lock.

        The manifest of a run that made no token is returned, and not left there: a run with other settings may follow.
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
                # A run that was killed while it did this has moved some already.
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
            **{name: sum(getattr(receipt, name) for receipt in receipts) for name in _COUNTS},
            **self._plan,
            **({"notes": notes} if notes else {}),
            "paths": self._inputs,
            "shards": [{name: getattr(receipt, name) for name in ("files", *_COUNTS)} for receipt in receipts],
        }

    @contextlib.contextmanager
    def _plan_held(self) -> Iterator[bool]:
        """Hold the lock of the plan; False where there are no locks to be had. Blocks while another has it."""
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
        if version != self._compared:  # of many inputs it takes tens of ms to read, and is asked for at each of them
            self._compare(_read_json(plan, _check_plan), "an unfinished run")
            self._compared = version

    def _is_without_result(self) -> bool:
        """Whether a run here has finished no shard, and nobody is at work on one: the lock of the plan is held.

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
            f"{name} was {there['settings'].get(name)!r} and is {self._plan['settings'].get(name)!r}"
            for name in sorted({*there["settings"], *self._plan["settings"]})
            if there["settings"].get(name) != self._plan["settings"].get(name)
        ]
        before, now = there["inputs"], self._plan["inputs"]
        if len(before) != len(now):
            differences.append(f"there were {len(before)} inputs and are {len(now)}")
        differences += [
            f"input {number} was {old['name']}, {old['bytes']} bytes, and is {new['name']}, {new['bytes']} bytes"
            + _beyond_size(old, new)
            for number, (old, new) in enumerate(zip(before, now, strict=False))
            if old != new
        ]
        if differences:
            more = "; ..." if len(differences) > _MOST_DIFFERENCES else ""
            raise ConfigError(
                f"{self.out}: holds {what} of other settings or inputs: "
                f"{'; '.join(differences[:_MOST_DIFFERENCES])}{more}. Name another folder, or remove this one."
            )

    def _receipt_path(self, item: int, part: int) -> Path:
        return self.work / f"{shard_name(item, part)}.json"

    def _inputs_of(self, number: int) -> str:
        return self._inputs[number] if number < len(self._inputs) else "?"


def notes_of(receipts: Sequence[Receipt]) -> Notes:
    """What there is to say of all of them."""
    notes = Notes()
    for receipt in receipts:
        notes.add(Notes.from_json(receipt.notes))
    return notes


def shard_name(item: int, part: int) -> str:
    """Name of a shard without suffix; natural order of names is the order of the documents."""
    return f"tokens-{item:05d}-{part:04d}"


def _read_json(path: Path, check: Callable[[Any], None]) -> dict[str, Any]:
    """What is in a file of a run, which `check` raises a ValueError for. ConfigError, or FileNotFoundError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read as the {path.stem} of a run: {error}. Remove the folder, or name another one."
        ) from None
    checked: dict[str, Any] = found
    return checked


def _check_plan(found: Any) -> None:
    _expect(isinstance(found, dict), "it is no object")
    _expect(isinstance(found.get("settings"), dict), "it has no settings")
    inputs = found.get("inputs")
    _expect(isinstance(inputs, list), "it lists no inputs")
    known = {"name", "bytes", "digest"}
    _expect(all(isinstance(file, dict) and known <= set(file) for file in inputs), "an input lacks its name or size")


def _check_manifest(found: Any) -> None:
    _check_plan(found)
    _check_counts(found)
    Notes.from_json(found.get("notes", {}))
    shards = found.get("shards")
    _expect(isinstance(shards, list), "it lists no shards")
    _expect(all(isinstance(one, dict) and isinstance(one.get("files"), dict) for one in shards), "a shard has no files")


def _check_receipt(prefix: str, found: Any) -> None:
    _expect(isinstance(found, dict), "it is no object")
    names = {field.name for field in fields(Receipt)}
    _expect(names - {"notes"} <= set(found) <= names, f"it has {', '.join(found)}")  # none in those of older releases
    Notes.from_json(found.get("notes", {}))
    _check_counts(found)
    _expect(type(found["end"]) is int and type(found["last"]) is bool, "end or last is missing")
    # Files are moved by these names.
    names = found["files"]
    _expect(isinstance(names, dict) and all(isinstance(about, dict) for about in names.values()), "it has no files")
    json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
    _expect(all(name.startswith(prefix) and not set(name) & set("/\\\0") for name in names), "files are not its own")


def _check_counts(found: dict[str, Any]) -> None:
    counts = [found.get(name) for name in _COUNTS]
    _expect(all(type(count) is int and count >= 0 for count in counts), f"{', '.join(_COUNTS)} are {counts}")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise[:200])


def _beyond_size(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if (old["name"], old["bytes"]) != (new["name"], new["bytes"]):
        return ""
    if old["digest"] != new["digest"]:
        return ", with other content"
    return (
        f", but was changed, or copied without its time: modified_ns was {old.get('modified_ns')} and is "
        f"{new['modified_ns']}"
    )


def _as_json(value: Any) -> bytes:
    """JSON in UTF-8, with an escape for each byte of a file name that is not."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
