"""Descriptors: bounded in number, never closed under a reader, never given to a file that changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.errors import CorpusError, CorpusReadError
from dali_pipes.storage.file_pool import FilePool
from dali_pipes.storage.local import LocalFile


def pool_of(folder: Path, count: int, limit: int | None = None) -> FilePool:
    """A pool of files 0, 1, 2 ... that hold 100 times the byte of their number."""
    paths = [folder / f"{number}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return FilePool(paths, [100] * count, limit)


def local_file(pool: FilePool, number: int) -> LocalFile:
    file = pool.acquire(number)
    assert isinstance(file, LocalFile)
    return file


def is_open(descriptor: int) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_least_recently_used_file_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(tmp_path, 4, limit=2)
    opened: list[str] = []
    open_descriptor = os.open

    def recorded(path: Path, flags: int) -> int:
        opened.append(path.name)
        return open_descriptor(path, flags)

    monkeypatch.setattr(os, "open", recorded)
    for number in (0, 1, 0, 2, 0, 1):  # 2 puts out 1, which was used before 0
        assert pool.acquire(number).read(0, 1)[0] == number
    assert opened == ["0.bin", "1.bin", "2.bin", "1.bin"]
    pool.close()


def test_evicted_file_stays_open_for_its_reader(tmp_path: Path) -> None:
    """The number of a descriptor that is in use is never given to another file."""
    pool = pool_of(tmp_path, 6, limit=1)
    held = local_file(pool, 0)
    others = [local_file(pool, number) for number in range(1, 6)]
    assert len({file.descriptor for file in [held, *others]}) == 6
    assert [file.read(0, 1)[0] for file in [held, *others]] == [0, 1, 2, 3, 4, 5]
    descriptor = held.descriptor
    del held
    assert not is_open(descriptor)
    pool.close()
    assert is_open(others[4].descriptor)
    assert others[4].read(50, 2) == bytes([5, 5])
    with pytest.raises(CorpusError, match="closed"):
        pool.acquire(0)


def test_file_that_changed_size_is_refused_when_opened_again(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 2, limit=1)
    pool.acquire(0)
    pool.acquire(1)
    (tmp_path / "0.bin").write_bytes(bytes(101))
    with pytest.raises(CorpusReadError, match=r"0\.bin: .*100 bytes then, 101 now"):
        pool.acquire(0)
    pool.close()


MANY_FILES = """
import os, resource, sys
import numpy as np
from dali_pipes.corpus import open_corpus
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
corpus = open_corpus(sys.argv[1])
generator = np.random.default_rng(0)
out = np.zeros((50, 30), "uint16")
for turn in range(10):
    if turn == 5:  # nothing is left: the corpus gives up files of its own
        hogs = []
        while True:
            try:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
    starts = generator.integers(0, corpus.num_tokens - 30, 50)
    corpus.read_rows(starts, out)
    assert (out == starts[:, None] + np.arange(30)).all()
assert len(corpus.files) == 400
"""


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    for number in range(400):
        ids = range(100 * number, 100 * number + 100)
        (tmp_path / f"s_{number}.bin").write_bytes(b"".join(token.to_bytes(2, "little") for token in ids))
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", MANY_FILES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
