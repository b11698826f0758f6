"""`reads = "mapped"`: the same ids as with calls, and an error where a file has lost its size before a read."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes import TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusError, CorpusReadError


@given(data=st.data())
def test_equals_the_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Pieces of equal and of different lengths, one after another in memory or with gaps, in files of several types."""
    sizes = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 12))
    folder = tmp_path_factory.mktemp("data")
    tokens = np.arange(sum(sizes)) % 251
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        dtype = data.draw(st.sampled_from(["<u2", ">u2", "<u4", "<i8"]))
        np.save(folder / f"s_{number}.npy", part.astype(dtype))
    count = data.draw(st.integers(1, 12))
    length = data.draw(st.none() | st.integers(1, 12))
    lengths = np.array([length or data.draw(st.integers(0, 12)) for _ in range(count)])
    starts = np.array([data.draw(st.integers(0, len(tokens) - int(one))) for one in lengths])
    gaps = np.array([data.draw(st.sampled_from([0, 0, 3])) for _ in range(count)])
    targets = np.cumsum(lengths + gaps) - lengths
    with open_corpus(folder, reads="mapped") as corpus:
        out = np.full(int((lengths + gaps).sum()) + 1, 77, corpus.dtype)
        corpus.read_pieces(starts, lengths, targets, out)
    expected = np.full(len(out), 77)
    for start, one, target in zip(starts, lengths, targets, strict=True):
        expected[target : target + one] = tokens[start : start + one]
    assert out.tolist() == expected.tolist()


@given(data=st.data())
def test_rows_in_one_step_equal_rows_that_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of one file in this machine's byte order; others have to be read."""
    count, length = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 20))
    dtype, files = data.draw(st.sampled_from(["<u2", ">u2", "<u4", "<i8", "<u8"])), data.draw(st.integers(1, 2))
    path = tmp_path_factory.mktemp("data")
    for number in range(files):
        np.save(path / f"{number}.npy", (np.arange(count) * 3).astype(dtype))
    starts = np.array(data.draw(st.lists(st.integers(-1, files * count), min_size=1, max_size=12)))
    with open_corpus(path, reads="mapped") as corpus, open_corpus(path) as read:
        if files > 1 or dtype in (">u2", "<u8"):
            assert corpus.gathered_rows(starts, length) is None
        elif starts.min() < 0 or starts.max() + length > count:
            with pytest.raises(CorpusError, match=f"{count:,} tokens"):
                corpus.gathered_rows(starts, length)
        else:
            out = np.empty((len(starts), length), read.dtype)
            read.read_rows(starts, out)
            rows = corpus.gathered_rows(starts, length)
            assert rows is not None
            assert (rows.dtype, rows.tolist()) == (out.dtype, out.tolist())
        assert read.gathered_rows(starts, length) is None


@pytest.mark.parametrize(("files", "most_gathered"), [(1, 1 << 21), (1, 0), (3, 1 << 21)])
@pytest.mark.parametrize("more", [{}, {"label_shift": False, "index_dtype": "int32"}, {"engine": "dali"}])
def test_a_loader_hands_out_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, most_gathered: int, more: dict[str, Any]
) -> None:
    """With padding rows at the end: rank 1 has fewer rows in the last step."""
    monkeypatch.setattr("dali_pipes.storage.mapped_reads._MOST_GATHERED", most_gathered)
    ids = np.random.default_rng(3).integers(1, 90, 990).astype(np.uint16)
    for number, part in enumerate(np.array_split(ids, files)):
        part.tofile(tmp_path / f"{number}.bin")
    common: dict[str, Any] = {"batch_size": 4, "seq_len": 16, "device": "cpu", "quiet": True, "drop_last": False}
    common |= {"rank": 1, "world_size": 2, "outputs": ("input_ids", "labels", "row_ids"), **more}
    streams = []
    for reads in ("calls", "mapped"):
        with TokenLoader(tmp_path, dtype="uint16", reads=reads, **common) as loader:
            streams.append([{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader])
    assert streams[0] == streams[1]
    assert -1 in streams[0][-1]["row_ids"]


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_a_loader_hands_out_the_same(tmp_path: Path, rows: Any) -> None:
    ids = np.random.default_rng(3).integers(1, 90, 5_000).astype(np.uint16)
    ids[::13] = 0
    for number, part in enumerate(np.array_split(ids, 3)):
        part.tofile(tmp_path / f"{number}.bin")
    common: dict[str, Any] = {"batch_size": 3, "seq_len": 16, "eos_id": 0, "rows": rows, "device": "cpu", "quiet": True}
    streams = []
    for reads in ("calls", "mapped"):
        with TokenLoader(tmp_path, dtype="uint16", reads=reads, **common) as loader:
            streams.append([{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader])
    assert streams[0] == streams[1]


def test_a_mixture_reads_from_maps_too(tmp_path: Path) -> None:
    streams = []
    for number, name in enumerate(("web", "code")):
        (np.arange(2_000, dtype=np.uint16) + 3_000 * number).tofile(tmp_path / f"{name}.bin")
    mixture = {name: {"corpus": str(tmp_path / f"{name}.bin"), "weight": 0.5} for name in ("web", "code")}
    for reads in ("calls", "mapped"):
        with TokenLoader(
            mixture=mixture, total_rows=200, batch_size=4, seq_len=8, device="cpu", quiet=True, reads=reads
        ) as loader:
            streams.append([batch["input_ids"].tolist() for batch in loader])
    assert streams[0] == streams[1]


@pytest.mark.parametrize("to", [0, 1_000])
def test_a_file_that_has_shrunk_is_an_error(tmp_path: Path, to: int) -> None:
    """A look at the size comes before each block; a map of what is gone would end the process."""
    path = tmp_path / "a.bin"
    np.arange(20_000, dtype=np.uint16).tofile(path)
    with open_corpus(path, reads="mapped") as corpus:
        assert corpus.tokens(15_000, 3).tolist() == [15_000, 15_001, 15_002]
        os.truncate(path, to)
        with pytest.raises(CorpusReadError) as caught:
            corpus.tokens(15_000, 3)
    for fact in (str(path), "40,000 bytes", f"{to:,} now"):
        assert fact in str(caught.value)


def test_a_file_that_cannot_be_mapped_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    np.arange(100, dtype=np.uint16).tofile(path)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(19, "No such device")

    monkeypatch.setattr("dali_pipes.storage.local.mmap.mmap", refuse)
    with open_corpus(path, reads="mapped") as corpus, pytest.raises(CorpusReadError) as caught:
        corpus.tokens(0, 3)
    for fact in (str(path), "No such device", 'reads = "calls"'):
        assert fact in str(caught.value)


def test_batches_outlive_the_maps(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.arange(1_000, dtype=np.uint16).tofile(path)
    with TokenLoader(path, batch_size=2, seq_len=8, shuffle=False, device="cpu", quiet=True, reads="mapped") as loader:
        batches = list(loader)
    path.unlink()
    assert [int(batch["input_ids"][0, 0]) for batch in batches] == list(range(0, 16 * len(batches), 16))
