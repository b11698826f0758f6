"""Folders that are one corpus because a file in them lists their shards: its order counts, that of the folder does not.

MosaicML Streaming    index.json with "shards"
LitData               index.json with "chunks"
Hugging Face          state.json with "_data_files", dataset_dict.json with "splits"
"""

import json
from pathlib import Path

from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.local import OpenFile

_HEAD_BYTES = 1 << 16
_MARKS = {
    "index.json": {b'"shards"': "mds", b'"chunks"': "litdata"},
    "state.json": {b'"_data_files"': "huggingface"},
    "dataset_dict.json": {b'"splits"': "huggingface"},
}


def find_index(folder: Path) -> Path | None:
    """The file in `folder` that lists the shards of a set, if it has one."""
    return next((folder / name for name in _MARKS if kind_of_index(folder / name) is not None), None)


def kind_of_index(path: Path) -> str | None:
    """The format of the set that the file at `path` lists, None if it lists none.

    Raises CorpusReadError, and CorpusFormatError for an `index.json` that is not even JSON: perhaps half written.
    """
    marks = _MARKS.get(path.name)
    try:
        if marks is None or not path.is_file():
            return None
    except OSError as error:  # too long a name, for one
        raise CorpusReadError(f"{path}: cannot be looked up: {error.strerror or error}") from error
    with OpenFile(path) as file:
        head = file.read(0, min(file.size, _HEAD_BYTES))
    kind = next((kind for mark, kind in marks.items() if mark in head), None)
    if kind is None and path.name == "index.json" and file.size <= _HEAD_BYTES:
        try:
            json.loads(head)
        except (ValueError, RecursionError) as error:
            raise CorpusFormatError(
                f"{path}: {file.size} bytes that are not JSON ({error}): is a half-written or damaged index of shards? "
                f"Wait for its writer, or make or copy it again; if it is none, name the data files, not the folder."
            ) from error
    return kind
