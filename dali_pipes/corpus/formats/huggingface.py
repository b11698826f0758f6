"""Datasets that Hugging Face `save_to_disk` wrote: from `state.json` to the Arrow files that it lists, in its order.

tokens/             state.json  dataset_info.json  data-00000-of-00002.arrow  data-00001-of-00002.arrow
splits/             dataset_dict.json  train/  test/                          each a folder as above
"""

import json
from typing import Any

from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError
from dali_pipes.storage.byte_file import open_file
from dali_pipes.uris import FilePath


def list_shards(path: FilePath, format: str = "auto") -> list[FilePath]:
    """The shards that the file at `path` lists, in order; `path` itself if it is another kind of file.

    format: as the user gave it

    Raises CorpusError for several splits or an empty dataset, CorpusFormatError for a damaged list, CorpusReadError,
    and ConfigError for another format.
    """
    if kind_of_index(path) != "huggingface":
        return [path]
    if format not in ("auto", "arrow"):
        raise ConfigError(f"{path}: a saved Hugging Face dataset has format 'arrow', but format = {format!r} was given")
    listed = _read_json(path)
    if path.name == "dataset_dict.json":
        splits = [_plain_name(path, name) for name in _list(path, listed, "splits")]
        if len(splits) != 1:
            raise CorpusError(
                f"{path.parent}: contains {len(splits)} splits ({', '.join(splits)}); name the folder of one, such as "
                f"{path.parent / (splits[0] if splits else 'train')}"
            )
        return list_shards(path.parent / splits[0] / "state.json")
    if listed.get("_indices_data_files") or listed.get("_indices_files"):
        raise CorpusFormatError(
            f"{path}: rows are selected by an indices table, which is not supported. Save the dataset again with a "
            "recent version of datasets, whose save_to_disk writes the selected rows."
        )
    entries = _list(path, listed, "_data_files")
    if not entries:
        raise CorpusError(f"{path}: does not list any shards: the dataset is empty")
    return [path.parent / _plain_name(path, entry["filename"] if _has_name(entry) else None) for entry in entries]


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and "filename" in entry


def _plain_name(path: FilePath, name: Any) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise CorpusFormatError(
            f"{path}: lists {name!r:.100}, expected the name of a file or folder next to it. Save it again."
        )
    return name


def _list(path: FilePath, listed: dict[str, Any], key: str) -> list[Any]:
    entries = listed.get(key)
    if not isinstance(entries, list):
        raise CorpusFormatError(
            f"{path}: {key} is {entries!r}, expected a list: the file is damaged. Save the dataset again."
        )
    return entries


def _read_json(path: FilePath) -> dict[str, Any]:
    with open_file(path) as file:
        data = file.read(0, file.size)
    try:
        listed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(
            f"{path}: is not valid JSON ({error}): it is half written or damaged. Save it again."
        ) from error
    if not isinstance(listed, dict):
        raise CorpusFormatError(f"{path}: expected a JSON object, found {type(listed).__name__}")
    return listed
