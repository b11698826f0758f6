"""Tar archives whose members are not as they should be: the texts, or an error that names the member."""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from test_text_tables import make_tar

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text import find_text_files
from dali_pipes.text.reading import read_batches

MEMBERS = [("a/1.txt", b"one"), ("a/1.json", b"{}"), ("a/2.txt", b"two"), ("b/1.txt", b"three")]


def texts(path: Path) -> list[str]:
    batches = read_batches(find_text_files(path), "text", None, 0, 10**6)
    return [document.content for batch in batches for document in batch.documents]


def refused(path: Path, message: str) -> None:
    with pytest.raises(CorpusFormatError, match=message):
        texts(path)


def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    refused(make_tar(tmp_path / "a.tar", [*MEMBERS[:1], *MEMBERS]), r"member a/1\.txt ")
    refused(make_tar(tmp_path / "b.tar", [*MEMBERS, MEMBERS[0]]), r"member a/1\.txt .*--sort=name")


def test_members_of_a_sample_that_are_apart(tmp_path: Path) -> None:
    order = [MEMBERS[0], MEMBERS[2], MEMBERS[1]]
    refused(make_tar(tmp_path / "a.tar", order), r"member a/1\.json .*--sort=name")


@given(
    st.permutations(
        [
            (f"{sample}.{field}", b"{}" if field == "json" else b"x")
            for sample in "ab"
            for field in ("txt", "json", "jpg")
        ]
    )
)
@settings(max_examples=examples(18))
def test_any_order_of_members(tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]) -> None:
    """Both texts, or an error: never one of them."""
    path = make_tar(tmp_path_factory.mktemp("order") / "a.tar", members)
    keys = [name[0] for name, _ in members]
    if keys in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3):
        assert texts(path) == ["x", "x"]
    else:
        refused(path, r"member [ab]\.\w+ |sample [ab]: ")


@pytest.mark.parametrize("padding", [0, 512, 1024, 20480])
def test_archives_put_together_by_cat(tmp_path: Path, padding: int) -> None:
    one, other = (
        make_tar(tmp_path / f"{n}.tar", part).read_bytes() for n, part in ((1, MEMBERS[:3]), (2, MEMBERS[3:]))
    )
    (tmp_path / "both.tar").write_bytes(one + bytes(padding) + other)
    refused(tmp_path / "both.tar", "end-of-archive marker at byte .* `cat`")
    (tmp_path / "1.tar").write_bytes(one + bytes(padding))
    assert texts(tmp_path / "1.tar") == ["one", "two"]


@pytest.mark.parametrize("at", range(5))
def test_a_damaged_header_is_not_the_end(tmp_path: Path, at: int) -> None:
    """The library takes a header that it cannot read for the end, if it is not the first."""
    data = bytearray(make_tar(tmp_path / "a.tar", MEMBERS).read_bytes())
    with tarfile.open(tmp_path / "a.tar") as archive:
        heads = [member.offset for member in archive]
    data[heads[at] + 148] ^= 1  # of its checksum
    (tmp_path / "a.tar").write_bytes(data)
    refused(tmp_path / "a.tar", f"a.tar: .*byte {heads[at]:,}: bad checksum")


@given(st.integers(0, 11_000))
@settings(max_examples=examples(20))
def test_an_archive_that_is_cut_off_anywhere(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    """Also between two members: what follows its last member is a block of zeros, or it is not whole."""
    folder = tmp_path_factory.mktemp("cut")
    data = make_tar(folder / "a.tar", MEMBERS).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.getmembers()
        end = archive.offset
    (folder / "a.tar").write_bytes(data[:size])
    if size >= end + 512:
        assert texts(folder / "a.tar") == ["one", "two", "three"]
    else:
        refused(folder / "a.tar", "a.tar: ")


def test_links_whose_text_would_be_missing(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in MEMBERS[:1]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("a/9.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "a/1.txt"
        archive.addfile(link)
    refused(tmp_path / "a.tar", r"member a/9\.txt .*a/1\.txt")


def test_litter_of_file_managers_is_no_sample(tmp_path: Path) -> None:
    litter = [("a/.DS_Store", b"x"), ("a/._1.txt", b"\0\5"), ("a/Thumbs.db", b"x")]
    assert texts(make_tar(tmp_path / "a.tar", [*litter, *MEMBERS])) == ["one", "two", "three"]
