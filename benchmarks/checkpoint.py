"""Checkpoints of a training run: written atomically, checked when read, and unpickled only as plain values.

A checkpoint is a `torch.save` file of one dict with the key "format". It holds tensors, numbers, strings, lists and
dicts, so `torch.load(..., weights_only=True)` reads it and a file from an unknown source cannot run code.
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dali_pipes.errors import StateError

FORMAT = "dali_pipes/train_gpt"
VERSION = 1
NAME = "checkpoint.pt"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file that appears under `path` only once it is complete and on the disk.

    A reader, or a machine that loses power at any moment, finds the old file or the new one. Blocks until the disk has
    the bytes. What `write` raises is raised, and `path` is left as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The new name is an entry of the folder, and reaches the disk with it.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, a dict of tensors and plain values. Blocks until the disk has it."""
    complete = {"format": FORMAT, "version": VERSION, **content}
    write_atomically(path, lambda file: torch.save(complete, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint (or the one in a run's folder), tensors on the CPU.

    Raises `StateError` for a file that is missing, truncated, altered, or not a checkpoint of this program.
    """
    path = path / NAME if path.is_dir() else path
    try:
        # torch.load does not notice a flipped bit; the zip file that it reads has a checksum for each of its parts.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise StateError(f"{path}: no such checkpoint; --resume takes a {NAME} or the folder of a run") from error
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path}: not a checkpoint of this program: it contains more than tensors and plain values, "
            "so it was not loaded"
        ) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise StateError(
            f"{path}: not a checkpoint, or a damaged one: {error}; expected a file that train_gpt.py wrote"
        ) from error
    if damaged:
        raise StateError(f"{path}: damaged checkpoint: {damaged} has a wrong checksum; use another checkpoint")
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or found != FORMAT:
        raise StateError(f"{path}: not a checkpoint of this program: format {found!r}, expected {FORMAT!r}")
    if content["version"] != VERSION:
        raise StateError(f"{path}: checkpoint version {content['version']!r}; this program reads version {VERSION}")
    return content
