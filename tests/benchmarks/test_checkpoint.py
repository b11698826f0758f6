"""Checkpoints are written whole or not at all, and what is no whole checkpoint is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from checkpoint import FORMAT, NAME, load_checkpoint, save_checkpoint, write_atomically
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dali_pipes.errors import StateError

CONTENT = {"model": {"weight": torch.arange(12.0).reshape(3, 4)}, "step": 7, "losses": [1.5, 0.1], "name": "x" * 40}


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def test_a_checkpoint_reads_back_by_file_and_by_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / NAME, CONTENT)
    expected = {"format": FORMAT, "version": 1, **CONTENT}
    assert equal(load_checkpoint(tmp_path / NAME), expected)
    assert equal(load_checkpoint(tmp_path), expected)
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    """Either the file is refused, or the bit was in padding and all content is what was saved."""
    whole, damaged = tmp_path / "whole.pt", tmp_path / "damaged.pt"
    save_checkpoint(whole, CONTENT)
    content = bytearray(whole.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged.write_bytes(content)
    try:
        loaded = load_checkpoint(damaged)
    except StateError as error:
        assert "damaged.pt" in str(error)  # noqa: PT017  loading it unharmed is right too
    else:
        assert equal(loaded, load_checkpoint(whole))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, share: float) -> None:
    save_checkpoint(tmp_path / "whole.pt", CONTENT)
    content = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: int(share * len(content))])
    with pytest.raises(StateError, match=r"cut\.pt"):
        load_checkpoint(tmp_path / "cut.pt")


def test_a_flipped_weight_is_named_as_damage(tmp_path: Path) -> None:
    """torch.load alone would return the wrong weight."""
    save_checkpoint(tmp_path / NAME, CONTENT)
    content = (tmp_path / NAME).read_bytes()
    weight = torch.arange(12.0).numpy().tobytes()
    (tmp_path / NAME).write_bytes(content.replace(weight, weight[:-1] + b"\x55"))
    with pytest.raises(StateError, match=r"damage"):
        load_checkpoint(tmp_path / NAME)


class Planted:
    """Unpickling one creates a file: what a checkpoint from a stranger could do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_foreign_files_are_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"format": FORMAT, "version": 1, "planted": Planted(tmp_path / "pwned")}, tmp_path / "planted.pt")
    torch.save({"model": {}, "optimizer": {}}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"format": FORMAT, "version": 99}, tmp_path / "newer.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint\n" * 50)
    (tmp_path / "empty.pt").touch()
    for name, reason in {
        "planted.pt": "more than tensors and plain values",
        "other.pt": "format None, expected",
        "list.pt": "format 'list', expected",
        "newer.pt": "version 99",
        "text.pt": "not a checkpoint, or a damaged one",
        "empty.pt": "not a checkpoint, or a damaged one",
        "missing.pt": "no such checkpoint",
    }.items():
        with pytest.raises(StateError) as caught:
            load_checkpoint(tmp_path / name)
        assert name in str(caught.value)
        assert reason in str(caught.value)
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(StateError, match="no such checkpoint"):
        load_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(b"new, and then")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
