"""The output of a run in an object store: how an interrupted run continues, and a finished one is recognized.

    OUT/_tokenize/plan.json                  created once, by the process that comes first
    OUT/tokens-00003-0001.bin ...            uploaded from a temporary folder when the shard is finished
    OUT/_tokenize/tokens-00003-0001.json     the receipt of a finished shard, written after its files
    OUT/manifest.json                        written last, if there are tokens; then _tokenize is removed

Objects appear when they are whole. Stores do not rename, so shards get their names before the run is done; a folder
with _tokenize and without a manifest is refused as a corpus. They do not have locks either: two processes that do the
same item write the same bytes.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dali_pipes.corpus.discovery.manifests import MANIFEST, WORK_FOLDER
from dali_pipes.errors import ConfigError, CorpusReadError, CorpusWriteError
from dali_pipes.storage import stores
from dali_pipes.storage.byte_file import open_file
from dali_pipes.storage.listings import Listings
from dali_pipes.storage.retries import DEFAULT_REQUESTS, tried_again
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.run_plan import (
    MOST_NAMES,
    Receipt,
    RunPlan,
    as_json,
    in_order,
    is_done,
    read_plan,
    read_receipt,
    shard_name,
)
from dali_pipes.uris import WEB, Uri

_PLAN = "plan.json"
_RECEIPT = re.compile(r"tokens-(\d+)-(\d+)\.json")
_READ_ONLY = (*WEB, "hf")


class RunInStore:
    """A `Run` in the folder `out` of a store.

    settings, inputs: must be the same to continue a run here.
    Raises ConfigError for a folder that contains something else or cannot be written, CorpusWriteError if writing
    fails.
    """

    def __init__(self, out: Uri, settings: Mapping[str, Any], inputs: Sequence[TextFile], made_by: str) -> None:
        if out.scheme in _READ_ONLY:
            raise ConfigError(
                f"{out}: {out.scheme}:// is read-only; write to s3://, gs:// or az://, or to a local folder"
            )
        self.out = out.as_folder()
        if not self.out.path:
            raise ConfigError(f"{out}: names a bucket, expected a folder in it, such as {self.out}/tokens")
        self._work = self.out / WORK_FOLDER
        self._plan = RunPlan(self.out, settings, inputs, made_by)
        self._folder: Path | None = None

    @property
    def work(self) -> Path:
        """As `Run.work`: a temporary folder, removed after each item."""
        assert self._folder is not None, "shards are written inside `item`"
        return self._folder

    def begin(self) -> dict[str, Any] | None:
        """As `Run.begin`. A plan that differs is refused: without locks, nobody knows whether its run goes on."""
        manifest = self.manifest()
        if manifest is not None:
            self._remove_work()  # which a process that died may have left
            return manifest
        path = self._work / _PLAN
        try:
            plan = read_plan(path, lambda: _content(path))
        except FileNotFoundError:
            if self._is_published():
                return self.manifest()
            with contextlib.suppress(FileExistsError):  # of a process that was faster
                _put(path, as_json(self._plan.content), new=True)
            plan = read_plan(path, lambda: _content(path))
        self._plan.compare(plan, "an unfinished run")
        return None

    def manifest(self) -> dict[str, Any] | None:
        """As `Run.manifest`."""
        path = self.out / MANIFEST
        return self._plan.finished(path, lambda: _content(path))

    @contextlib.contextmanager
    def item(self, number: int) -> Iterator[None]:
        """As `Run.item`: room for the files of a shard. number: not used, since there are no locks."""
        with tempfile.TemporaryDirectory(prefix="dali_pipes-") as folder:
            self._folder = Path(folder)
            try:
                yield
            finally:
                self._folder = None

    def receipts(self, item: int) -> list[Receipt]:
        """As `Run.receipts`."""
        return in_order(lambda part: self._receipt(item, part))

    def all_receipts(self, num_items: int) -> list[list[Receipt]]:
        """As `Run.all_receipts`: one listing, then all together."""
        objects, _ = Listings().folder(self._work)
        named = (_RECEIPT.fullmatch(one.name) for one in objects)
        keys = sorted((int(one[1]), int(one[2])) for one in named if one is not None)
        found: list[list[Receipt]] = [[] for _ in range(num_items)]
        with ThreadPoolExecutor(DEFAULT_REQUESTS) as pool:
            read = list(pool.map(lambda key: self._receipt(*key), keys))
        for (item, part), receipt in zip(keys, read, strict=True):
            if item < num_items and part == len(found[item]):
                found[item].append(receipt)
        return found

    def keep(self, item: int, part: int, receipt: Receipt) -> None:
        """Upload the files of a shard, and then its receipt. Blocks."""
        for name in receipt.files:
            _put(self.out / name, self.work / name)
            (self.work / name).unlink()
        _put(self._receipt_place(item, part), as_json(vars(receipt)))

    def publish(self, num_items: int) -> dict[str, Any] | None:
        """As `Run.publish`. Raises CorpusWriteError if an uploaded object is missing, or of another size."""
        manifest = self.manifest()
        if manifest is None:
            found = self.all_receipts(num_items)
            if not all(map(is_done, found)):
                return self.manifest()  # another process may have published it meanwhile
            receipts = [receipt for item in found for receipt in item]
            manifest = self._plan.manifest(receipts)
            if not any(receipt.files for receipt in receipts):
                return manifest
            self._check_uploads(receipts)
            _put(self.out / MANIFEST, as_json(manifest))
        self._remove_work()
        return manifest

    def _remove_work(self) -> None:
        objects, _ = Listings().folder(self._work)
        with _writing(self._work):
            tried_again(lambda: stores.delete(objects))

    def _is_published(self) -> bool:
        """Whether another process has just published the run. Raises ConfigError for a folder with something else."""
        objects, folders = Listings().folder(self.out)
        names = sorted(one.name for one in objects + folders)
        if names and WORK_FOLDER not in names and MANIFEST not in names:
            found = ", ".join(names[:MOST_NAMES])
            raise ConfigError(f"{self.out}: the output folder contains other files ({found}); use a new folder")
        return MANIFEST in names

    def _check_uploads(self, receipts: Sequence[Receipt]) -> None:
        listings = Listings()
        listings.folder(self.out)
        for name, about in (pair for receipt in receipts for pair in receipt.files.items()):
            facts = listings.facts(self.out / name)
            if facts is None or facts.size != about.get("bytes"):
                state = "is missing" if facts is None else f"has {facts.size:,} of {about.get('bytes'):,} bytes"
                raise CorpusWriteError(
                    f"{self.out / name}: was uploaded, but {state}; remove {self.out} and run the command again"
                )

    def _receipt(self, item: int, part: int) -> Receipt:
        path = self._receipt_place(item, part)
        return read_receipt(path, lambda: _content(path))

    def _receipt_place(self, item: int, part: int) -> Uri:
        return self._work / f"{shard_name(item, part)}.json"


def _content(uri: Uri) -> bytes:
    """All bytes of an object. Raises FileNotFoundError without one, CorpusReadError."""
    try:
        with open_file(uri) as file:
            return file.read(0, file.size)
    except CorpusReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _put(uri: Uri, content: bytes | Path, *, new: bool = False) -> None:
    with _writing(uri):
        tried_again(lambda: stores.put(uri, content, new=new))


@contextlib.contextmanager
def _writing(uri: Uri) -> Iterator[None]:
    """Turns an OSError into a CorpusWriteError that names the object, except FileExistsError."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        failure = error
    else:
        return
    raise CorpusWriteError(f"{uri}: cannot be written: {failure.strerror or failure}") from failure
