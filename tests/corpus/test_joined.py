"""Corpora joined for a mixture give the ids that each gives by itself, with no more files open than one corpus has."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_parquet

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.corpus.joined import JoinedCorpora
from dali_pipes.storage import file_pool

TYPES = ["<u2", ">u2", "<i4", "<u8"]


def write(folder: Path, kind: str, ids: npt.NDArray[np.int64]) -> Path:
    """The ids in two files of a kind, or of a synthetic corpus its name."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(ids, 2)):
        if kind == "parquet":
            write_parquet(folder / f"s_{number}.parquet", table_of([list_array([part.tolist()], "uint16", "list")]))
        else:
            np.save(folder / f"s_{number}.npy", part.astype(kind))
    return folder


@settings(max_examples=examples(30))
@given(data=st.data())
def test_pieces_are_those_of_each_corpus(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder, draw = tmp_path_factory.mktemp("joined"), data.draw
    kinds = draw(st.lists(st.sampled_from([*TYPES, "parquet", "synthetic"]), min_size=1, max_size=5))
    corpora: dict[str, Corpus] = {}
    for number, kind in enumerate(kinds):
        size = draw(st.integers(2, 40))
        ids = np.random.default_rng(number).integers(0, 60_000, size)
        where = "synthetic:1000" if kind == "synthetic" else write(folder / f"{number}", kind, ids)
        corpora[f"source_{number}"] = open_corpus(where)
    joined = JoinedCorpora(corpora)
    expected = np.concatenate([corpus.tokens(0, corpus.num_tokens) for corpus in corpora.values()])
    assert joined.bases.tolist() == [0, *np.cumsum([corpus.num_tokens for corpus in corpora.values()]).tolist()]
    for _ in range(3):
        starts = draw(st.lists(st.integers(0, len(expected) - 1), max_size=12))
        lengths = [draw(st.integers(0, min(30, len(expected) - start))) for start in starts]
        targets = np.cumsum([0, *(length + 1 for length in lengths)])
        out = np.full(int(targets[-1]) + 1, 7, joined.dtype)
        joined.read_pieces(np.array(starts, np.int64), np.array(lengths, np.int64), targets[:-1], out)
        for start, length, target in zip(starts, lengths, targets.tolist(), strict=False):
            assert out[target : target + length].tolist() == expected[start : start + length].tolist()
            assert out[target + length] == 7
    joined.close()


def test_files_of_all_corpora_share_the_limit_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_pool, "_default_limit", lambda: 4)
    corpora = {}
    for number in range(30):
        path = tmp_path / f"{number}.bin"
        (np.arange(5) + 100 * number).astype(np.uint16).tofile(path)
        corpora[str(number)] = open_corpus(path, dtype="uint16")
    joined = JoinedCorpora(corpora)
    out = np.empty(5 * 30, np.uint16)
    joined.read_pieces(joined.bases[:-1], np.full(30, 5), joined.bases[:-1], out)
    assert out.tolist() == [100 * number + token for number in range(30) for token in range(5)]
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    assert 0 < sum(link.startswith(str(tmp_path)) for link in links) <= 4
    joined.close()
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    assert not any(link.startswith(str(tmp_path)) for link in links)


def _is_open(name: str) -> bool:
    """Not that of the listing itself."""
    return os.path.lexists(f"/proc/self/fd/{name}")
