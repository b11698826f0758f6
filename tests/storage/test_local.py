"""Files on a disk: read to the last byte or an error, with descriptors that are closed and not inherited."""

import os
from pathlib import Path

import pytest

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.local import LocalFile


def is_open(descriptor: int) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_open_file_reads_at_an_offset(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    with LocalFile(tmp_path / "a") as file:
        assert file.size == 100
        assert file.read(10, 3) == bytes([10, 11, 12])
        buffer = bytearray(b"ab???")
        file.finish_read(memoryview(buffer), 50, done=2)
        assert buffer == b"ab" + bytes([52, 53, 54])
        with pytest.raises(CorpusReadError, match=r"a: ends early: .*4 bytes at byte 98, got 2"):
            file.read(98, 4)
        descriptor = file.descriptor
    assert not is_open(descriptor)
    file.close()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusReadError, match="none: cannot be opened: No such file or directory"):
        LocalFile(tmp_path / "none")


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    with LocalFile(tmp_path / "a") as file:
        assert not os.get_inheritable(file.descriptor)
