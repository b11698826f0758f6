"""A fingerprint follows names, sizes and content, not places and times, and the digests say which files changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpus_files import write_megatron, write_shard
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.corpus import open_corpus
from dali_pipes.storage.fingerprint import sample_places


def marks(folder: Path) -> tuple[str, tuple[str, ...]]:
    with open_corpus(folder) as corpus:
        return corpus.fingerprint, corpus.file_digests


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five flat shards of 100,000 ids: too large to be sampled whole."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(5):
        ids = np.random.default_rng(number).integers(0, 50257, 100_000).astype("uint16")
        write_shard(folder / f"s_{number}.bin", ids, "flat")
    return folder


def test_form(shards: Path) -> None:
    fingerprint, digests = marks(shards)
    assert len(fingerprint) == 16
    assert len(digests) == 5 == len(set(digests))
    assert all(len(digest) == 8 for digest in digests)
    assert all(set(text) <= set("0123456789abcdef") for text in (fingerprint, *digests))


def test_another_place_another_time_and_a_list_leave_it(shards: Path, tmp_path: Path) -> None:
    before = marks(shards)
    os.utime(shards / "s_2.bin", (1, 1))
    assert marks(shards) == before
    moved = tmp_path / "elsewhere" / "deeper"
    shutil.copytree(shards, moved)
    assert marks(moved) == before
    with open_corpus([moved / f"s_{number}.bin" for number in range(5)]) as corpus:
        assert (corpus.fingerprint, corpus.file_digests) == before


def flip(byte: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[byte] ^= 1
        path.write_bytes(content)

    return change


CHANGES = [flip(start) for start, _ in sample_places(200_000)] + [
    flip(199_999),
    lambda path: os.truncate(path, 199_998),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_byte_or_size_changes_one_digest(shards: Path, change: Callable[[Path], None]) -> None:
    fingerprint, digests = marks(shards)
    change(shards / "s_3.bin")
    changed_fingerprint, changed = marks(shards)
    assert changed_fingerprint != fingerprint
    assert [one == other for one, other in zip(digests, changed, strict=True)] == [True, True, True, False, True]


def test_renamed_added_and_reordered_files(shards: Path) -> None:
    fingerprint, digests = marks(shards)
    with open_corpus([shards / f"s_{number}.bin" for number in (1, 0, 2, 3, 4)]) as corpus:
        assert corpus.fingerprint != fingerprint
        assert sorted(corpus.file_digests) == sorted(digests)
    shutil.copy(shards / "s_0.bin", shards / "s_9.bin")
    added_fingerprint, added = marks(shards)
    assert added_fingerprint != fingerprint
    assert added[:5] == digests
    assert added[5] not in digests
    (shards / "s_9.bin").unlink()
    assert marks(shards) == (fingerprint, digests)
    (shards / "s_4.bin").rename(shards / "s_04.bin")
    renamed_fingerprint, renamed = marks(shards)
    assert renamed_fingerprint != fingerprint
    assert renamed[:4] == digests[:4]
    assert renamed[4] != digests[4]


def test_type_and_format_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    with open_corpus(tmp_path, dtype="uint16") as one, open_corpus(tmp_path, dtype="int16") as other:
        assert one.fingerprint != other.fingerprint


def test_headers_and_indexes_are_part_of_it(tmp_path: Path) -> None:
    ids = np.arange(40, dtype="uint16")
    found = set()
    for shape in ((40,), (8, 5), (5, 8)):
        np.save(tmp_path / "a.npy", ids.reshape(shape))
        found.add(marks(tmp_path / "a.npy")[0])
    for documents in ([0, 2], [0, 1, 2], [0, 1, 1, 2]):
        write_megatron(tmp_path / "a", [ids[:20], ids[20:]], documents)
        found.add(marks(tmp_path / "a.bin")[0])
    assert len(found) == 6


@pytest.mark.parametrize(("files", "digests"), [(1, 1), (24, 24), (25, 13), (48, 24), (49, 17), (300, 24)])
def test_at_most_24_digests(tmp_path: Path, files: int, digests: int) -> None:
    for number in range(files):
        (tmp_path / f"s_{number}.bin").write_bytes(number.to_bytes(2, "little"))
    _, before = marks(tmp_path)
    assert len(before) == digests
    (tmp_path / "s_0.bin").write_bytes(b"\7\7")
    _, after = marks(tmp_path)
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] + [True] * (digests - 1)


@given(st.one_of(st.integers(0, 100_000), st.integers(0, 2**50)))
def test_sample_places_are_few_aligned_and_inside(size: int) -> None:
    places = sample_places(size)
    assert len(places) <= 6
    assert all(start % 8 == 0 and count > 0 and start + count <= size for start, count in places)
    assert sum(count for _, count in places) <= 6 * 4096 + 7
    assert places == sorted(places)
    if size:
        assert places[0][0] == 0
        assert sum(places[-1]) == size
    if size <= 6 * 4096:
        assert sum(count for _, count in places) == size


def test_large_file_is_sampled_all_over() -> None:
    starts = [start for start, _ in sample_places(10**12)]
    assert starts == sorted(starts)
    assert np.diff(starts).max() < 0.4 * 10**12
