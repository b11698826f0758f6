"""What a manifest beside the data lists: `manifest*.json`, as `dali-pipes tokenize` writes it.

{"shards": [{"files": {"tokens-00000-0000.bin": {"bytes": 2048, "sha256": "9f86..."}}}]}
{"files": [{"name": "tokens-00000-0000.bin", "sha256": "9f86..."}]}
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_pipes.corpus.datafile import DataFile
from dali_pipes.corpus.file_names import utf8_name
from dali_pipes.corpus.reader import OpenFile
from dali_pipes.errors import CorpusFormatError, CorpusReadError

MANIFEST = "manifest.json"
_MASK_SUFFIX, _INDEX_SUFFIX = ".loss", ".idx"


def refuse_lost_files(files: Sequence[DataFile], *, masks: bool, indexes: bool) -> None:
    """Raise CorpusFormatError where the manifest of a file's folder lists a mask or an index of it that is not there.

    Without its mask a file would be learned whole, and without its index have no documents, both without a word.

    masks, indexes: which of them are looked for beside the data
    """
    listed: dict[Path, frozenset[str]] = {}
    for file in files:
        folder = file.path.parent
        wanted: list[tuple[Path, str]] = []
        if masks and file.loss_mask is None:
            mask = file.path.with_name(file.path.name + _MASK_SUFFIX)
            wanted.append((mask, "to learn all of the data without masks, say loss_masks = []"))
        if indexes and file.format == "flat":
            index = file.path.with_suffix(_INDEX_SUFFIX)
            wanted.append((index, f"to read {file.path.name} alone, say format='flat' and a dtype"))
        if wanted and folder not in listed:
            listed[folder] = _names_in(folder / MANIFEST)
        for path, otherwise in wanted:
            if utf8_name(path.name) in listed[folder] and not os.path.lexists(path):
                raise CorpusFormatError(
                    f"{path}: is listed by {folder / MANIFEST}, but is not there: copy it, or make the data again; "
                    f"{otherwise}"
                )


def recorded_checksums(manifest: Path) -> dict[str, str]:
    """SHA-256 by name of what a manifest lists; none if it cannot be read as one."""
    try:
        with OpenFile(manifest) as file:
            content = json.loads(file.read(0, file.size))
    except (CorpusReadError, ValueError, RecursionError):
        return {}
    return dict(_listed(content)) if isinstance(content, dict) else {}


def _names_in(manifest: Path) -> frozenset[str]:
    return frozenset(recorded_checksums(manifest)) if os.path.lexists(manifest) else frozenset()


def _listed(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, sha256) of what a manifest lists."""
    shards = content.get("shards")
    for part in [content, *(shards if isinstance(shards, list) else [])]:
        files = part.get("files") if isinstance(part, dict) else None
        if isinstance(files, dict):
            files = [{"name": name, **facts} for name, facts in files.items() if isinstance(facts, dict)]
        for facts in files if isinstance(files, list) else []:
            if isinstance(facts, dict) and isinstance(facts.get("name"), str) and isinstance(facts.get("sha256"), str):
                yield facts["name"], facts["sha256"]
