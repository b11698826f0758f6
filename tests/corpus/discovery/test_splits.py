"""Files for training and for validation are not brought together by a folder or a pattern, but by a list."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import write_megatron

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.errors import CorpusError
from dali_pipes.text import find_text_files

MIXED = {
    "nanoGPT": (["train.bin", "val.bin"], "train.bin", "val.bin"),
    "llm.c": (
        ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"],
        "fineweb_train_*.bin",
        "fineweb_val_000000.bin",
    ),
    "Hugging Face": (
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"],
        "train-*-of-00002.parquet",
        "test-00000-of-00001.parquet",
    ),
    "C4": (
        ["c4-train.00000-of-01024.jsonl.gz", "c4-train.00001-of-01024.jsonl.gz", "c4-validation.00000.jsonl.gz"],
        "c4-train.*-of-01024.jsonl.gz",
        "c4-validation.00000.jsonl.gz",
    ),
    "WikiText": (
        ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"],
        "wiki.train.tokens",
        "wiki.test.tokens",
    ),
    "capitals": (["Train.npy", "Dev.npy"], "Train.npy", "Dev.npy"),
    "by source": (["b_train.bin", "a_train.bin", "c_eval.bin", "d.bin"], "*_train.bin", "c_eval.bin"),
    "between": (["1_train_a.bin", "2_train_b.bin", "holdout.bin"], "*train*.bin", "holdout.bin"),
    "a word of all": (["test_train_1.bin", "test_train_2.bin", "test_val_1.bin"], "test_train_*.bin", "test_val_1.bin"),
    "folders": (["train/a.bin", "train/b/c.bin", "val/a.bin"], "train/**/*.bin", "val/a.bin"),
    "data behind": (["traindata.bin", "valdata.bin"], "traindata.bin", "valdata.bin"),
    "sets": (["trainset_0.bin", "trainset_1.bin", "testset_0.bin"], "trainset_*.bin", "testset_0.bin"),
    "camels": (["SplitTrain.bin", "SplitVal.bin"], "SplitTrain.bin", "SplitVal.bin"),
    "held out": (["training.bin", "held_out.bin"], "training.bin", "held_out.bin"),
    "short": (["trn.bin", "validate.bin"], "trn.bin", "validate.bin"),
    "twice": (["test_corpus_train.bin", "test_corpus_test.bin"], "test_corpus_train.bin", "test_corpus_test.bin"),
    "twice val": (["val_train.bin", "val_val.bin"], "val_train.bin", "val_val.bin"),
}
APART = {
    "one kind": ["train_1.bin", "train_2.bin"],
    "validation alone": ["val.bin", "test.bin", "dev_2.bin"],
    "neither": ["a.bin", "train.bin", "b.bin"],
    "parts of words": ["train.bin", "latest.bin", "invalid.bin", "devices.bin", "testament.bin", "evaluate.bin"],
    "a word of all": ["train_test_0.bin", "train_test_1.bin"],
    "both words": ["train_test_split.bin", "train.bin"],
    "folders": ["test/train/a.bin", "test/train/b.bin"],
    "one kind by two words": ["train_set_1.bin", "trainingData.bin"],
}


def make(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.full(40, 3, np.uint16).tofile(folder / name)
    return folder


def refused(find: Callable[[Any], object], named: object) -> str:
    with pytest.raises(CorpusError, match="contains both training and validation files") as caught:
        find(named)
    return str(caught.value)


@pytest.mark.parametrize("case", MIXED)
def test_both_kinds_are_refused_and_named(tmp_path: Path, case: str) -> None:
    """Whatever order they are in; what the message says to name instead is of one kind, and finds them all."""
    names, *patterns = MIXED[case]
    make(tmp_path, names)
    expected = [tuple(str(tmp_path / pattern) for pattern in patterns)]
    ways = [str(tmp_path / "**" / "*")] + ([] if case == "folders" else [str(tmp_path), str(tmp_path / "*")])
    for way in ways:
        for find in (find_files, find_text_files):
            assert re.findall(r"such as '([^']*)', and read '([^']*)' with", refused(find, [way])) == expected
    named = sorted(file for pattern in expected[0] for file in find_files(pattern))
    assert named == sorted(tmp_path / name for name in names if name not in ("d.bin", "wiki.valid.tokens"))


@pytest.mark.parametrize("case", MIXED)
def test_a_list_takes_both(tmp_path: Path, case: str) -> None:
    make(tmp_path, MIXED[case][0])
    files = [tmp_path / name for name in MIXED[case][0]]
    assert find_files(files) == files


@pytest.mark.parametrize("case", APART)
def test_what_is_of_one_kind_is_left_alone(tmp_path: Path, case: str) -> None:
    make(tmp_path / "train" / "val", APART[case])  # folders above the data tell nothing
    assert len(find_files(str(tmp_path / "train" / "**" / "*.bin"))) == len(APART[case])


def test_an_index_is_no_file_of_its_own(tmp_path: Path) -> None:
    for name in ("my_train", "my_val"):
        write_megatron(tmp_path / name, [np.arange(9, dtype=np.uint16)])
    message = refused(open_corpus, tmp_path)
    assert f"{str(tmp_path / 'my_train.bin')!r}, and read {str(tmp_path / 'my_val.bin')!r}" in message


def test_masks_go_with_the_data_that_was_named(tmp_path: Path) -> None:
    make(tmp_path, ["train.bin", "val.bin"])
    for name in ("train", "val"):
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / "masks" / f"{name}.bin.loss").write_bytes(bytes([1] * 40))
    with open_corpus([tmp_path / "train.bin", tmp_path / "val.bin"], loss_masks=tmp_path / "masks") as corpus:
        assert corpus.loss_mask is not None


def test_the_loader_refuses_them_and_takes_each(tmp_path: Path) -> None:
    make(tmp_path, ["train.bin", "val.bin"])
    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 13, "device": "cpu", "quiet": True}
    with pytest.raises(CorpusError, match=r"train\.bin.* and .*val\.bin"):
        TokenLoader(corpus=tmp_path / "*.bin", **settings)
    with TokenLoader(corpus=tmp_path / "val.bin", shuffle=False, drop_last=False, **settings) as loader:
        assert len(list(loader)) == 3
