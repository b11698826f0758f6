"""Manifests next to the data: `manifest*.json`, as `dali-pipes tokenize` writes them.

{"settings": {"format": "flat", "eos_id": 0, "tokenizer": "5f2c..."}, "shards": [{"files": {...}}]}
{"files": [{"name": "tokens-00000-0000.bin", "sha256": "9f86..."}]}
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.discovery.file_names import utf8_name
from dali_pipes.errors import ConfigError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import is_listed, open_file
from dali_pipes.uris import FilePath, Uri

MANIFEST = "manifest.json"
WORK_FOLDER = "_tokenize"
"""In the output folder of `dali-pipes tokenize` while it is not finished."""
_MASK_SUFFIX, _INDEX_SUFFIX = ".loss", ".idx"


class StatedTokenizer(NamedTuple):
    """What ids were made with: SHA-256 of the `tokenizer.json`, and of its vocabulary if that is stated, too."""

    manifest: FilePath
    sha256: str
    vocabulary: str | None

    def differs(self, other: "StatedTokenizer") -> bool:
        """Whether the same id may stand for other text."""
        if self.vocabulary is None or other.vocabulary is None:
            return self.sha256 != other.sha256
        return self.vocabulary != other.vocabulary


class Manifest(NamedTuple):
    """The content of one. end_id: the id that ends every document of its files, if they are flat; None: not stated."""

    path: FilePath
    names: Mapping[str, int | None]
    """Bytes of each listed file, by name."""
    end_id: int | None
    tokenizer: StatedTokenizer | None


class Manifests:
    """The manifests next to the files of one corpus, each read once."""

    def __init__(self) -> None:
        self._read: dict[str, Manifest] = {}

    def refuse_lost_files(self, files: Sequence[DataFile], *, masks: bool, indexes: bool) -> None:
        """Raise CorpusFormatError if the manifest in a file's folder lists a mask or index of it that is missing.

        Without its mask a file would be learned whole, and without its index it would lose its documents, silently.

        masks, indexes: whether these are read from the folder of the data
        """
        for file in files:
            names = self._beside(file).names
            if not names:
                continue
            wanted: list[tuple[FilePath, str]] = []
            if masks and file.loss_mask is None:
                mask = file.path.with_name(file.path.name + _MASK_SUFFIX)
                wanted.append((mask, "to learn all tokens, set loss_masks = []"))
            if indexes and file.format == "flat":
                index = file.path.with_suffix(_INDEX_SUFFIX)
                wanted.append((index, f"to read only {file.path.name}, set format = 'flat' and dtype"))
            for path, otherwise in wanted:
                if utf8_name(path.name) in names and not is_listed(path):
                    raise CorpusFormatError(
                        f"{path}: is missing, but {path.with_name(MANIFEST)} lists it. Copy it here, or recreate the "
                        f"data; {otherwise}."
                    )

    def end_id(self, files: Sequence[DataFile], given: int | None) -> tuple[int, FilePath] | None:
        """The id that ends every document of flat files of `dali-pipes tokenize`, and the manifest that states it.

        None if one of the files has another origin, changed later, or ends its documents differently. Raises
        ConfigError for a `given` id that differs from the manifest.
        """
        found: set[tuple[int, FilePath] | None] = set()
        for file in files:
            manifest = self._beside(file)
            end_id = manifest.end_id if manifest.names.get(utf8_name(file.path.name)) == file.size else None
            if end_id is not None and given not in (None, end_id):
                raise ConfigError(
                    f"eos_id = {given}: documents of {file.path} end with id {end_id} according to {manifest.path}. "
                    f"Leave eos_id out, or set eos_id = {end_id}."
                )
            found.add(None if end_id is None else (end_id, manifest.path))
        same = None not in found and len({entry[0] for entry in found if entry is not None}) == 1
        return min(entry for entry in found if entry is not None) if same else None

    def tokenizers(self, files: Sequence[DataFile]) -> tuple[StatedTokenizer, ...]:
        """The tokenizers of the files, each once, where manifests state them and files did not change later."""
        beside = [(file, self._beside(file)) for file in files]
        return tuple(
            dict.fromkeys(
                manifest.tokenizer
                for file, manifest in beside
                if manifest.tokenizer is not None and manifest.names.get(utf8_name(file.path.name)) == file.size
            )
        )

    def _beside(self, file: DataFile) -> Manifest:
        # Of a path as text: there may be thousands of files.
        folder = file.path.parent if isinstance(file.path, Uri) else os.path.dirname(file.path)
        if folder not in self._read:
            path = folder / MANIFEST if isinstance(folder, Uri) else Path(folder, MANIFEST)
            content = _read(path) if is_listed(path) else {}
            found = content.get("settings")
            settings = found if isinstance(found, dict) else {}
            end_id = None
            if settings.get("format") == "flat" and type(settings.get("eos_id")) is int:
                end_id = settings["eos_id"]
            sha256, vocabulary = settings.get("tokenizer"), settings.get("vocabulary")
            tokenizer = None
            if isinstance(sha256, str):
                tokenizer = StatedTokenizer(path, sha256, vocabulary if isinstance(vocabulary, str) else None)
            names = {name: facts.get("bytes") for name, facts in _listed(content)}
            self._read[folder] = Manifest(path, names, end_id, tokenizer)
        return self._read[folder]


def recorded_checksums(manifest: FilePath) -> dict[str, str]:
    """SHA-256 of the listed files, by name; empty if the file is not a manifest."""
    return {name: facts["sha256"] for name, facts in _listed(_read(manifest))}


def _read(manifest: FilePath) -> dict[str, Any]:
    """The content of a manifest; empty if the file is not one."""
    try:
        with open_file(manifest) as file:
            content = json.loads(file.read(0, file.size))
    except (CorpusReadError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _listed(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and facts, "sha256" among them, of the listed files."""
    shards = content.get("shards")
    for part in [content, *(shards if isinstance(shards, list) else [])]:
        files = part.get("files") if isinstance(part, dict) else None
        if isinstance(files, dict):
            files = [{"name": name, **facts} for name, facts in files.items() if isinstance(facts, dict)]
        for facts in files if isinstance(files, list) else []:
            if isinstance(facts, dict) and isinstance(facts.get("name"), str) and isinstance(facts.get("sha256"), str):
                yield facts["name"], facts
