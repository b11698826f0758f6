"""A sample of 25 tokens of which the last five are learned: what becomes of its mask in rows of several kinds."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dali_pipes import TokenLoader
from dali_pipes.errors import CorpusFormatError

END = 60000
MASK = np.array([0] * 20 + [1] * 5, np.uint8)


def sample(first: int) -> npt.NDArray[np.uint16]:
    return np.array([*range(first, first + 24), END], np.uint16)


def write(folder: Path, parts: list[tuple[npt.NDArray[np.uint16], npt.NDArray[Any] | None]]) -> Path:
    for number, (tokens, mask) in enumerate(parts):
        tokens.tofile(folder / f"{number}.bin")
        if mask is not None:
            (folder / f"{number}.bin.loss").write_bytes(mask.tobytes())
    return folder


def batches(corpus: Path, **settings: Any) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"batch_size": 1, "eos_id": END, "shuffle": False, "drop_last": False, "device": "cpu"}
    outputs = ("input_ids", "labels", "loss_mask", "attention_mask")
    with TokenLoader(corpus=corpus, outputs=outputs, **common, **settings) as loader:
        return list(loader)


@pytest.mark.parametrize("rows", ["pad", "pack"])
def test_labels_are_one_place_before_the_tokens_that_are_learned(tmp_path: Path, rows: str) -> None:
    (batch,) = batches(write(tmp_path, [(sample(0), MASK)]), rows=rows, seq_len=32)
    assert torch.nonzero(batch["labels"][0] != -100).flatten().tolist() == [19, 20, 21, 22, 23]
    assert batch["loss_mask"].nonzero()[:, 1].tolist() == [19, 20, 21, 22, 23]


@pytest.mark.parametrize("long_documents", ["truncate", "split"])
def test_a_cut_before_the_answer_leaves_a_row_that_says_so(tmp_path: Path, long_documents: str) -> None:
    corpus = write(tmp_path, [(sample(0), MASK)])
    first, *rest = batches(corpus, rows="pad", seq_len=16, long_documents=long_documents)
    assert first["attention_mask"].all()
    assert not first["loss_mask"].any()
    assert (first["labels"] == -100).all()
    learned = sum(int(batch["loss_mask"].sum()) for batch in rest)
    assert learned == (5 if long_documents == "split" else 0)


def test_a_source_without_a_mask_is_learned_whole_and_moves_no_other(tmp_path: Path) -> None:
    middle = np.array([100, 101, 102, 103, 104, 105, END], np.uint16)
    corpus = write(tmp_path, [(sample(0), MASK), (middle, None), (sample(200), MASK)])
    (batch,) = batches(corpus, rows="pack", seq_len=64)
    learned = batch["labels"][batch["labels"] != -100].tolist()
    expected = [[20, 21, 22, 23, END], [101, 102, 103, 104, 105, END], [220, 221, 222, 223, END]]
    assert sorted(learned) == sorted(token for part in expected for token in part)
    for part in expected:  # each label stands at the token before it
        for token in part[:-1]:
            at = batch["labels"][0].tolist().index(token)
            assert batch["input_ids"][0, at] == token - 1


def test_a_mask_one_entry_short_is_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path, [(sample(0), MASK[:-1])])
    with pytest.raises(CorpusFormatError, match=r"0\.bin\.loss: the loss mask has 24 entries, expected 25"):
        batches(corpus, rows="pad", seq_len=32)


@pytest.mark.parametrize("stored", [np.int8, np.bool_, np.uint8])
@pytest.mark.parametrize("has_header", [True, False])
def test_types_of_one_byte_mean_the_same(tmp_path: Path, stored: type[np.generic], has_header: bool) -> None:
    corpus = write(tmp_path, [(sample(0), None)])
    mask = tmp_path / "mask.npy"
    if has_header:
        np.save(mask, MASK.astype(stored))
    else:
        mask.write_bytes(MASK.astype(stored).tobytes())
    (batch,) = batches(corpus / "0.bin", rows="pad", seq_len=32, loss_masks=[mask])
    assert batch["loss_mask"].nonzero()[:, 1].tolist() == [19, 20, 21, 22, 23]


@pytest.mark.parametrize("place", [0, 17, 24])
@pytest.mark.parametrize("value", [2, ord("0"), 255])
def test_a_mask_of_other_values_is_refused_where_it_is_read(tmp_path: Path, place: int, value: int) -> None:
    mask = MASK.copy()
    mask[place] = value
    corpus = write(tmp_path, [(sample(0), MASK), (sample(100), mask)])
    with pytest.raises(
        CorpusFormatError, match=rf"1\.bin\.loss: entry {place} of the loss mask is {value}, expected 0"
    ):
        batches(corpus, rows="pack", seq_len=32)


@pytest.mark.parametrize("stored", [np.float32, np.int64])
def test_wider_types_are_refused_and_say_how_to_save_them(tmp_path: Path, stored: type[np.generic]) -> None:
    corpus = write(tmp_path, [(sample(0), None)])
    np.save(tmp_path / "mask.npy", MASK.astype(stored))
    with pytest.raises(CorpusFormatError, match=r"mask\.npy: .*astype\('bool'\)"):
        batches(corpus / "0.bin", rows="pad", seq_len=32, loss_masks=[tmp_path / "mask.npy"])
