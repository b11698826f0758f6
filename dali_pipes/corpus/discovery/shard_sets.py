"""Folders that are one corpus, with a file that lists their shards and decides the order.

MosaicML Streaming    index.json with "shards"
LitData               index.json with "chunks"
Hugging Face          state.json with "_data_files", dataset_dict.json with "splits"
"""

import json

from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import file_size, open_file
from dali_pipes.uris import FilePath

_HEAD_BYTES = 1 << 16
_MARKS = {
    "index.json": {b'"shards"': "mds", b'"chunks"': "litdata"},
    "state.json": {b'"_data_files"': "huggingface"},
    "dataset_dict.json": {b'"splits"': "huggingface"},
}


def find_index(folder: FilePath) -> FilePath | None:
    """The file in `folder` that lists the shards of a set; None without one."""
    return next((folder / name for name in _MARKS if kind_of_index(folder / name) is not None), None)


def kind_of_index(path: FilePath) -> str | None:
    """The format of the set that the file at `path` lists; None for another kind of file.

    Raises CorpusReadError, and CorpusFormatError for an `index.json` that is not valid JSON: it may be half written.
    """
    marks = _MARKS.get(path.name)
    if marks is None or file_size(path) is None:
        return None
    with open_file(path) as file:
        head = file.read(0, min(file.size, _HEAD_BYTES))
    kind = next((kind for mark, kind in marks.items() if mark in head), None)
    if kind is None and path.name == "index.json" and file.size <= _HEAD_BYTES:
        try:
            json.loads(head)
        except (ValueError, RecursionError) as error:
            raise CorpusFormatError(
                f"{path}: {file.size:,} bytes are not valid JSON ({error}): the index is half written or damaged. Wait "
                "for its writer to finish, or copy or recreate it; if it is not an index, name the data files, not "
                "the folder."
            ) from error
    return kind
