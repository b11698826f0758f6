"""Notes for the user when a corpus is opened: columns that are used or not, suspicious zeros, mixed id types."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.runtime.messages import counted


def notes_on(files: Sequence[DataFile], dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Notes on all files. dtype: the type in which ids are served."""
    return (*_on_columns(files), *_on_unused(files), *_on_zeros(files), *_on_types(files, dtype))


def _on_columns(files: Sequence[DataFile]) -> list[str]:
    notes = []
    masked = [file for file in files if file.loss_mask is not None and file.columns.unlearned is not None]
    if masked:
        total = sum(file.num_tokens for file in masked)
        learned = total - sum(file.columns.unlearned or 0 for file in masked)
        names = _names([file.columns.masks for file in masked])
        notes.append(f"{names}: {learned:,} of {total:,} tokens are learned")
    packed = [file for file in files if file.columns.packing]
    if packed:
        rows = sum(file.columns.rows for file in packed)
        documents = sum(file.num_documents or 0 for file in packed)
        names = _names([file.columns.packing for file in packed])
        notes.append(
            f"{names}: rows are already packed: {counted(rows, 'row')} read as {counted(documents, 'document')}"
        )
    padded = [file for file in files if file.columns.padding]
    if padded:
        removed, kept = (
            sum(counts) for counts in zip(*((f.columns.removed, f.num_tokens) for f in padded), strict=True)
        )
        names = _names([file.columns.padding for file in padded])
        notes.append(f"{names}: {removed:,} of {removed + kept:,} tokens are padding and are skipped")
    return notes


def _on_unused(files: Sequence[DataFile]) -> list[str]:
    seen: dict[str, list[DataFile]] = {}
    for file in files:
        for name in file.columns.unused:
            seen.setdefault(name, []).append(file)
    return [
        f"{name}: this column is not used in {len(some):,} file{'s' * (len(some) > 1)} (first in {some[0].path}); if "
        "it marks the tokens to learn, rename it to loss_mask"
        for name, some in seen.items()
    ]


def _on_zeros(files: Sequence[DataFile]) -> list[str]:
    found = [file.path for file in files if file.zeros_last]
    if not found:
        return []
    others = f" and of {len(found) - 1:,} more file{'s' * (len(found) > 2)}" if len(found) > 1 else ""
    note = (
        f"the last ids of {found[0]}{others} are all 0, as in a file that was not written completely; `dali-pipes "
        "check` shows where the zeros start. Recreate the file, unless 0 is a token there"
    )
    return [note]


def _on_types(files: Sequence[DataFile], dtype: np.dtype[Any]) -> list[str]:
    names = sorted({file.stored.name for file in files})
    if len(names) == 1:
        return []
    return [f"files with {', '.join(names)} ids are read as one corpus of {dtype.name} ids"]


def _names(groups: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(dict.fromkeys(name for group in groups for name in group))
