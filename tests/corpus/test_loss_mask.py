"""Masks beside the data: found, checked, and read for the same ids as the tokens, file borders and gaps included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import npy_bytes, write_llmc, write_megatron, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError, CorpusReadError

FORMATS = ("flat", "llmc", "npy", "megatron")
SUFFIXES = {"npy": ".npy"}


def shards(folder: Path, sizes: Sequence[int], format: str = "flat") -> list[Path]:
    """uint16 files in which the ids count on from file to file."""
    folder.mkdir(exist_ok=True)
    ends = np.cumsum(sizes)
    return [
        write_shard(
            folder / f"s_{number}{SUFFIXES.get(format, '.bin')}", np.arange(end - size, end, dtype=np.uint16), format
        )
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def beside(path: Path, mask: Sequence[int]) -> Path:
    """The mask of a data file, where it is looked for."""
    mask_path = path.with_name(path.name + ".loss")
    mask_path.write_bytes(bytes(mask))
    return mask_path


def mask_of(corpus: Corpus) -> list[int]:
    assert corpus.loss_mask is not None
    out = np.full(corpus.num_tokens, 7, np.uint8)
    one = np.zeros(1, np.int64)
    corpus.loss_mask.read_pieces(one, np.array([corpus.num_tokens]), one, out)
    return out.tolist()


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_of_masks_are_those_of_the_tokens(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw, folder = data.draw, tmp_path_factory.mktemp("masks")
    format = draw(st.sampled_from(FORMATS))
    sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
    paths = shards(folder / "data", sizes, format)
    total = sum(sizes)
    masks = [draw(st.none() | st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n)) for n in sizes]
    expected: list[int] = []
    for path, size, mask in zip(paths, sizes, masks, strict=True):
        if mask is not None:
            beside(path, mask)
        expected += [1] * size if mask is None else mask
    with open_corpus(paths, format=format) as corpus:
        if all(mask is None for mask in masks):
            assert corpus.loss_mask is None
            return
        assert corpus.loss_mask is not None
        assert mask_of(corpus) == expected
        pieces = draw(st.lists(st.tuples(st.integers(0, total), st.integers(0, 30), st.integers(0, 3)), max_size=20))
        starts, lengths, targets, place = [], [], [], 0
        for start, length, gap in pieces:
            starts.append(start)
            lengths.append(min(length, total - start))
            targets.append(place + gap)
            place += gap + lengths[-1]
        out, wanted = np.full(place, 9, np.uint8), [9] * place
        for start, length, target in zip(starts, lengths, targets, strict=True):
            wanted[target : target + length] = expected[start : start + length]
        columns = [np.array(column, np.int64) for column in (starts, lengths, targets)]
        corpus.loss_mask.read_pieces(columns[0], columns[1], columns[2], out)
        assert out.tolist() == wanted


def test_the_mask_of_a_megatron_pair_goes_with_its_bin(tmp_path: Path) -> None:
    """Sequences may lie in the `.bin` in another order than they are read in."""
    sequences = [np.array([4, 5], np.int32), np.array([6, 7, 8], np.int32)]
    path = write_megatron(tmp_path / "pair", sequences, lengths=[3, 2], pointers=[8, 0])
    beside(path, [0, 1, 0, 0, 1])
    with open_corpus(tmp_path) as corpus:
        assert corpus.tokens(0, 5).tolist() == [6, 7, 8, 4, 5]
        assert mask_of(corpus) == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [0, 19, 21, 40])
def test_another_length_than_the_data_is_refused(tmp_path: Path, format: str, length: int) -> None:
    (path,) = shards(tmp_path / "data", [20], format)
    mask = beside(path, [1] * length)
    with pytest.raises(CorpusFormatError) as caught:
        open_corpus(path, format=format)
    assert f"{mask}: the loss mask has {length} entries, expected 20, one for each id of {path}:" in str(caught.value)


def test_masks_are_never_taken_for_data(tmp_path: Path) -> None:
    paths = shards(tmp_path / "data", [5, 6])
    for path in paths:
        beside(path, [1] * (path.stat().st_size // 2))
    for named in (tmp_path / "data", str(tmp_path / "data" / "*"), str(tmp_path / "**" / "*")):
        with open_corpus(named) as corpus:
            assert list(corpus.files) == paths


def named_masks(folder: Path, masks: Sequence[bytes]) -> list[str]:
    folder.mkdir()
    for number, mask in enumerate(masks):
        (folder / f"s_{number}.bin.loss").write_bytes(mask)
    return [str(folder / f"s_{number}.bin.loss") for number in range(len(masks))]


@pytest.mark.parametrize("how", ["list", "glob", "folder"])
def test_masks_of_other_names_go_with_the_files_in_their_order(tmp_path: Path, how: str) -> None:
    sizes = [3] * 11
    shards(tmp_path / "data", sizes)
    wanted = [bytes([n % 2, n % 3 == 0, 1]) for n in range(11)]
    paths = named_masks(tmp_path / "masks", wanted)
    named: Any = {"list": paths, "glob": str(tmp_path / "masks" / "*.loss"), "folder": [str(tmp_path / "masks")]}[how]
    with open_corpus(tmp_path / "data", loss_masks=named) as corpus:
        assert mask_of(corpus) == list(b"".join(wanted))
    with open_corpus(tmp_path / "data") as corpus:
        assert corpus.loss_mask is None


def test_a_mask_is_in_the_order_of_its_data_whatever_follows_its_name(tmp_path: Path) -> None:
    """`a.loss` comes behind `a.b.loss` by itself, but `a` before `a.b`."""
    for number, name in enumerate(("a", "a.b")):
        np.full(3, number, np.uint16).tofile(tmp_path / name)
        (tmp_path / f"{name}.loss").write_bytes(bytes([number] * 3))
    with open_corpus(str(tmp_path / "a*"), loss_masks=str(tmp_path / "*.loss")) as corpus:
        assert corpus.tokens(0, 6).tolist() == mask_of(corpus) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("descr", ["|b1", "|u1", "|i1"])
def test_a_real_npy_mask(tmp_path: Path, descr: str) -> None:
    (path,) = shards(tmp_path / "data", [4])
    (tmp_path / "data" / "s_0.bin.loss").write_bytes(npy_bytes(repr(descr), (2, 2), bytes([1, 0, 0, 1])))
    with open_corpus(path) as corpus:
        assert mask_of(corpus) == [1, 0, 0, 1]


def test_a_mask_that_numpy_saved(tmp_path: Path) -> None:
    (path,) = shards(tmp_path / "data", [4])
    np.save(tmp_path / "m.npy", np.array([0, 1, 1, 0], bool))
    with open_corpus(path, loss_masks=tmp_path / "m.npy") as corpus:
        assert mask_of(corpus) == [0, 1, 1, 0]


@pytest.mark.parametrize("descr", ["<f4", "<u2", "|O", "<i8"])
def test_a_mask_of_wider_numbers_is_refused(tmp_path: Path, descr: str) -> None:
    (path,) = shards(tmp_path / "data", [4])
    beside(path, npy_bytes(repr(descr), (4,), bytes(4 * 8)))
    with pytest.raises(CorpusFormatError, match=r"s_0\.bin\.loss: holds .*loss mask is bool"):
        open_corpus(path)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path / "data", [4, 5])
    masks = named_masks(tmp_path / "masks", [bytes(4), bytes(5), bytes(4)])
    with pytest.raises(ConfigError, match=r"loss_masks: found 3 masks for 2 data files"):
        open_corpus(paths, loss_masks=masks)
    with pytest.raises(CorpusFormatError, match=r"s_1\.bin\.loss: the loss mask has 5 entries, expected 4"):
        open_corpus(paths, loss_masks=masks[1::-1])
    with pytest.raises(CorpusReadError, match="no file matches"):
        open_corpus(paths, loss_masks=str(tmp_path / "masks" / "*.mask"))
    with pytest.raises(ConfigError, match="loss_masks: 5 is a int"):
        open_corpus(paths, loss_masks=5)  # type: ignore[arg-type]
    (tmp_path / "data" / "s_0.bin.loss").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusReadError, match=r"s_0\.bin\.loss: cannot be opened"):  # not: all is learned
        open_corpus(paths)


def test_a_mask_that_is_cut_short_later_on(tmp_path: Path) -> None:
    (path,) = shards(tmp_path / "data", [400])
    mask = beside(path, [1] * 400)
    with open_corpus(path) as corpus:
        mask.write_bytes(bytes(100))
        with pytest.raises(CorpusReadError, match=r"s_0\.bin\.loss: .*after the corpus was opened"):
            mask_of(corpus)


def test_the_fingerprint_knows_the_mask_and_is_the_same_without(tmp_path: Path) -> None:
    paths = shards(tmp_path / "data", [400, 30])

    def seen(**settings: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        with open_corpus(paths, **settings) as corpus:
            return corpus.fingerprint, corpus.file_digests, corpus.mask_digests

    plain = seen()
    assert plain[2] == ()
    beside(paths[1], [1] * 30)
    one = seen()
    beside(paths[1], [1] * 29 + [0])
    changed = seen()
    beside(paths[0], [1] * 400)
    both = seen()
    assert len({plain[0], one[0], changed[0], both[0]}) == 4
    assert plain[1] == one[1] == changed[1] == both[1], "the data are the same"
    assert one[2][0] == changed[2][0] != both[2][0]
    assert one[2][1] != changed[2][1] == both[2][1]
    assert seen(loss_masks=[]) == plain


def test_the_short_digests_of_many_masks(tmp_path: Path) -> None:
    paths = [write_llmc(tmp_path / f"{number}.bin", np.arange(3, dtype=np.uint16)) for number in range(30)]
    beside(paths[7], [1, 0, 1])
    with open_corpus(paths) as corpus:
        assert len(corpus.mask_digests) == 10
        assert len(set(corpus.mask_digests)) == 2, "one run has a mask"
        assert corpus.loss_mask is not None
        assert corpus.loss_mask.num_files == 1
