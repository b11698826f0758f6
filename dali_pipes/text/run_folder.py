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
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_pipes.corpus.discovery.manifests import MANIFEST, WORK_FOLDER
from dali_pipes.errors import ConfigError, CorpusWriteError
from dali_pipes.runtime.locks import lock, locked, unlock
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.run_plan import (
    MOST_NAMES,
    ItemInUseError,
    Receipt,
    RunPlan,
    as_json,
    in_order,
    is_done,
    read_plan,
    read_receipt,
    shard_name,
)
from dali_pipes.text.shard_writer import UNFINISHED, sync_folder, write_whole, writing


class RunFolder:
    """The output folder of one run.

    settings, inputs: must be the same to continue a run here.
    Raises ConfigError for a folder that contains something else, CorpusWriteError if it cannot be written.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], inputs: Sequence[TextFile], made_by: str) -> None:
        self.out = Path(os.path.abspath(os.path.expanduser(out)))
        self.work = self.out / WORK_FOLDER
        self._plan = RunPlan(self.out, settings, inputs, made_by)
        self._plan_lock = self.work / "plan.lock"
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
                    f"{self.out}: the output folder contains other files ({', '.join(strangers[:MOST_NAMES])}); "
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
            mine.write_bytes(as_json(self._plan.content))
            try:
                os.link(mine, plan)  # unlike a rename, keeps the plan of a process that was faster
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not plan.exists():
                    mine.rename(plan)
            mine.unlink(missing_ok=True)
        with locked(self._plan_lock) as is_held:
            try:
                self._compare_plan()
            except ConfigError:
                if not (is_held and self._is_without_result()):
                    raise
                with writing(plan):
                    for receipt in self.work.glob("tokens-*.json"):
                        receipt.unlink()
                    write_whole(plan, as_json(self._plan.content))
        return None

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the finished run, compared with this one; None for an unfinished run."""
        path = self.out / MANIFEST
        return self._plan.finished(path, path.read_bytes)

    @contextlib.contextmanager
    def item(self, number: int) -> Iterator[None]:
        """Hold the lock of an item. Unfinished files that a killed process left are removed first."""
        try:
            with locked(self._plan_lock):
                held, _ = lock(self.work / f"item-{number:05d}.lock", wait=False)
                try:
                    self._compare_plan()  # a run with other settings may have begun here since `begin`
                except BaseException:
                    if held is not None:
                        unlock(held)
                    raise
        except BlockingIOError:
            raise ItemInUseError(
                f"{self.out}: another process is working on input {number} ({self._plan.input_name(number)}); wait for "
                "it, or divide the inputs among the processes with --shard I/N"
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
        return in_order(lambda part: self._receipt(item, part))

    def all_receipts(self, num_items: int) -> list[list[Receipt]]:
        """As `Run.all_receipts`."""
        return [self.receipts(item) for item in range(num_items)]

    def keep(self, item: int, part: int, receipt: Receipt) -> None:
        """Declare a shard finished."""
        write_whole(self._receipt_path(item, part), as_json(vars(receipt)))

    def publish(self, num_items: int) -> dict[str, Any] | None:
        """Move the shards to their places and write the manifest, if all items are done; else None. Blocks for a lock.

        The manifest of a run without tokens is returned but not written, so that a run with other settings may follow.
        """
        with locked(self.work / "publish.lock"):
            if (manifest := self.manifest()) is not None:
                shutil.rmtree(self.work, ignore_errors=True)
                return manifest
            found: list[list[Receipt]] = []
            for item in reversed(range(num_items)):  # the last one is most likely not done: this runs after each part
                found.insert(0, self.receipts(item))
                if not is_done(found[0]):
                    return None
            receipts = [receipt for item in found for receipt in item]
            if not any(receipt.files for receipt in receipts):
                return self._plan.manifest(receipts)
            for name in (name for receipt in receipts for name in receipt.files):
                # A run that was killed here has moved some already.
                if not (self.out / name).exists():
                    with writing(self.out / name):
                        (self.work / name).rename(self.out / name)
            sync_folder(self.out)
            manifest = self._plan.manifest(receipts)
            write_whole(self.out / MANIFEST, as_json(manifest))
            shutil.rmtree(self.work, ignore_errors=True)
            return manifest

    def _compare_plan(self) -> None:
        plan = self.work / "plan.json"
        about = os.stat(plan)
        version = about.st_ino, about.st_mtime_ns, about.st_size
        if version != self._compared:  # reading it takes tens of ms for many inputs, and each of them asks
            self._plan.compare(read_plan(plan, plan.read_bytes), "an unfinished run")
            self._compared = version

    def _is_without_result(self) -> bool:
        """Whether the run has not finished any shard, and no process is working on one. The lock of the plan is held.

        Raises ConfigError for a receipt that cannot be read.
        """
        for path in self.work.glob("tokens-*.json"):
            if read_receipt(path, path.read_bytes).files:
                return False
        for path in self.work.glob("item-*.lock"):
            try:
                held, _ = lock(path, wait=False)
            except BlockingIOError:
                return False
            if held is not None:
                unlock(held)
        return True

    def _receipt(self, item: int, part: int) -> Receipt:
        path = self._receipt_path(item, part)
        return read_receipt(path, path.read_bytes)

    def _receipt_path(self, item: int, part: int) -> Path:
        return self.work / f"{shard_name(item, part)}.json"
