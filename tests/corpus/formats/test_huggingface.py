"""Folders that Hugging Face datasets saves: shards in the order of state.json, splits chosen by the user."""

import json
from pathlib import Path
from typing import Any

import pytest
from table_files import list_array, table_of, write_arrow

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError, CorpusReadError


def save(folder: Path, shards: dict[str, list[list[int]]], **more: Any) -> Path:
    """Shards by name, in their order, as `save_to_disk` lays them out."""
    folder.mkdir(parents=True)
    for name, rows in shards.items():
        write_arrow(folder / name, table_of([list_array(rows)]), stream=True)
    state = {"_data_files": [{"filename": name} for name in shards], "_fingerprint": "0", **more}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_the_order_is_that_of_the_state(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", {"data-2.arrow": [[1], [], [2]], "data-1.arrow": [[3, 4]], "data-0.arrow": [[5]]})
    write_arrow(folder / "cache-0123.arrow", table_of([list_array([[9]])]), stream=True)
    for path in (folder, folder / "state.json"):
        with open_corpus(path) as corpus:
            assert corpus.format == "arrow"
            assert corpus.tokens(0, 5).tolist() == [1, 2, 3, 4, 5]
            assert [file.name for file in corpus.files] == ["data-2.arrow", "data-1.arrow", "data-0.arrow"]
            assert corpus.num_documents == 5


def test_splits(tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    save(splits / "train", {"data-0.arrow": [[1, 2]]})
    (splits / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with open_corpus(splits) as corpus:
        assert corpus.tokens(0, 2).tolist() == [1, 2]
    save(splits / "test", {"data-0.arrow": [[3]]})
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(CorpusError, match=r"2 splits \(train, test\).*/train"):
        open_corpus(splits)
    with open_corpus([splits / "test", splits / "train"]) as corpus:
        assert corpus.tokens(0, 3).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"_data_files": [{"filename": "data-0.arrow"}', "not valid JSON"),
        ('{"_data_files": 3}', "_data_files is 3, expected a list"),
        ('{"_data_files": ["data-0.arrow"]}', "lists None, expected the name of a file"),
        ('{"_data_files": [{"filename": "../data-0.arrow"}]}', r"lists '\.\./data-0\.arrow'"),
        ('["_data_files"]', "expected a JSON object"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "indices table"),
    ],
)
def test_a_damaged_state(tmp_path: Path, state: str, message: str) -> None:
    folder = save(tmp_path / "set", {"data-0.arrow": [[1]]})
    (folder / "state.json").write_text(state)
    with pytest.raises(CorpusFormatError, match=rf"state\.json: .*{message}"):
        open_corpus(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", {"data-0.arrow": [[1]], "data-1.arrow": [[2]]})
    (folder / "data-1.arrow").unlink()
    with pytest.raises(CorpusReadError, match=r"data-1\.arrow: cannot be opened"):
        open_corpus(folder)


def test_a_set_without_rows(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"set/state\.json: .*empty"):
        open_corpus(save(tmp_path / "set", {}))


def test_another_format_was_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\.json: .*'arrow', but format = 'flat'"):
        open_corpus(save(tmp_path / "set", {"data-0.arrow": [[1]]}) / "state.json", format="flat")
