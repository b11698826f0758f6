"""EncodedFiles: the items and labels of ImageFolder, read by threads, with errors that name the file."""

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dali_pipes.errors import CorpusReadError
from dali_pipes.samples.encoded_files import EncodedFiles

FILES = {
    "dog/b/2.JPG": b"dog two",
    "dog/10.png": b"dog ten",
    "dog/9.png": b"dog nine",
    "cat/z.webp": b"cat z",
    "cat/notes.txt": b"not an image",
    "Ant/x.jpeg": b"ant",
    "readme.jpg": b"not in a class",
}
IN_ORDER = ["Ant/x.jpeg", "cat/z.webp", "dog/10.png", "dog/9.png", "dog/b/2.JPG"]
"""As torchvision's ImageFolder lists them: classes, folders and names, each in the order of their characters."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "photos"


def test_items_and_labels_are_those_of_image_folder(root: Path) -> None:
    files = EncodedFiles.from_folder(root)
    assert files.classes == ["Ant", "cat", "dog"]
    assert files.class_to_idx == {"Ant": 0, "cat": 1, "dog": 2}
    assert [os.path.relpath(path, root) for path in files.paths] == IN_ORDER
    assert len(files) == 5
    found = [(sample["image"].tobytes(), sample["label"]) for sample in (files[index] for index in range(5))]
    assert found == [(FILES[name], label) for name, label in zip(IN_ORDER, [0, 1, 2, 2, 2], strict=True)]
    assert files[-1]["image"].tobytes() == b"dog two"
    with pytest.raises(IndexError):
        files[5]


def test_files_without_labels(root: Path) -> None:
    files = EncodedFiles([root / "dog/9.png", str(root / "cat/z.webp")])
    assert [list(sample) for sample in files.read_items([0, 1])] == [["image"], ["image"]]
    with pytest.raises(ValueError, match=r"3 labels for 2 paths"):
        EncodedFiles(files.paths, [1, 2, 3])


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_many_items_are_read_in_the_order_asked_for(root: Path, threads: int) -> None:
    files = EncodedFiles.from_folder(root, threads=threads)
    for indices in ([], [3], [4, 0, 0, 2, 1, 3, 3]):
        found = [(sample["image"].tobytes(), sample["label"]) for sample in files.read_items(indices)]
        assert found == [(files[index]["image"].tobytes(), files[index]["label"]) for index in indices]


def test_callers_in_several_threads(root: Path) -> None:
    files = EncodedFiles.from_folder(root, threads=2)
    wanted = [[(place * step) % 5 for place in range(7)] for step in range(1, 30)]
    with ThreadPoolExecutor(4) as pool:
        for indices, samples in zip(wanted, pool.map(files.read_items, wanted), strict=True):
            assert [sample["image"].tobytes() for sample in samples] == [FILES[IN_ORDER[index]] for index in indices]


def test_a_file_that_cannot_be_read_is_named(root: Path) -> None:
    files = EncodedFiles.from_folder(root)
    (root / "dog/10.png").unlink()
    (root / "dog/9.png").write_bytes(b"")
    for read in (lambda: files[2], lambda: files.read_items([0, 4, 2, 1])):
        with pytest.raises(CorpusReadError, match=r"dog/10\.png"):
            read()
    with pytest.raises(CorpusReadError, match=r"dog/9\.png.*empty"):
        files.read_items([3])
    assert len(files.read_items([0, 1, 4])) == 3


def test_folders_that_are_not_classes_of_images_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusReadError, match="nowhere"):
        EncodedFiles.from_folder(tmp_path / "nowhere")
    with pytest.raises(CorpusReadError, match=r"photos/dog/b"):
        EncodedFiles.from_folder(root / "dog/b")
    with pytest.raises(CorpusReadError, match=r"photos/Ant.*\.png"):
        EncodedFiles.from_folder(root, suffixes=[".png"])


def test_copies_have_their_own_threads(root: Path) -> None:
    """As workers get them: by pickling, and by a fork, in which no threads run."""
    files = EncodedFiles.from_folder(root)
    expected = [sample["image"].tobytes() for sample in files.read_items(range(5))]
    for one in (pickle.loads(pickle.dumps(files)), copy.deepcopy(files)):
        assert [sample["image"].tobytes() for sample in one.read_items(range(5))] == expected
    child = os.fork()
    if child == 0:
        found = [sample["image"].tobytes() for sample in files.read_items(range(5))]
        os._exit(int(found != expected))
    assert os.waitpid(child, 0)[1] == 0


def test_the_fingerprint_follows_names_and_labels_but_not_the_folder(root: Path, tmp_path: Path) -> None:
    first = EncodedFiles.from_folder(root)
    root.rename(tmp_path / "moved")
    assert EncodedFiles.from_folder(tmp_path / "moved")._fingerprint == first._fingerprint
    assert EncodedFiles(first.paths, [0, 1, 2, 2, 1])._fingerprint != first._fingerprint
    assert EncodedFiles(first.paths[::-1], first.labels)._fingerprint != first._fingerprint
