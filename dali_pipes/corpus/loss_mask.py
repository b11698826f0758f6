"""Loss masks: a byte for each id of a corpus, 0 for ids that are not learned, such as prompts in fine-tuning.

    data file   train.bin        ids     5 8 2 9 1
    its mask    train.bin.loss   bytes   0 0 1 1 1       as datatrove writes it, or any file that `loss_masks` names

A mask is without a header, or a `.npy` array of bool or one-byte integers. Its bytes are in the order of the ids in the
data file; for a Megatron pair that is the `.bin`. Tables have their masks in columns (`row_columns`). A file without a
mask is learned whole.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.corpus import Corpus
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.corpus.formats import npy
from dali_pipes.corpus.formats.token_run import Layout, token_run
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.storage.byte_file import is_listed, look_up_all, open_file
from dali_pipes.uris import FilePath

SUFFIX = ".loss"
_STORED = np.dtype(np.uint8)
_NO_DIGEST = bytes(32)


class LossMask:
    """The mask of a whole corpus, by its positions. Immutable, thread-safe.

    dtype:   uint8: 1 for an id that is learned, 0 for one that is not
    digests: of each data file's mask, zeros for a file without one
    stored:  the masks as a corpus, of the files that have one
    covers_all: whether all files have one: then positions there are those here
    """

    dtype = _STORED

    def __init__(self, files: Sequence[DataFile], masks: Sequence[DataFile | None]) -> None:
        """`masks`: a file of one-byte ids for each of `files`, as long as that and in its order; None: all ones."""
        sizes = np.array([file.num_tokens for file in files])
        stored = [mask for mask in masks if mask is not None]
        assert all(m is None or m.num_tokens == size for m, size in zip(masks, sizes, strict=True)), "mask and data"
        self.stored = Corpus(stored)
        self._has_mask = np.array([mask is not None for mask in masks])
        self.covers_all = bool(self._has_mask.all())
        # Token position of each file's start, then the end of the last; and the distance from there to its mask.
        self._borders: Int64Array = np.concatenate(([0], np.cumsum(sizes)))
        masked = np.where(self._has_mask, sizes, 0)
        self._shifts: Int64Array = np.cumsum(masked) - masked - self._borders[:-1]
        self.num_files = len(stored)
        self.digests = tuple(_NO_DIGEST if mask is None else mask.digest for mask in masks)

    def read_pieces(
        self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[np.uint8]
    ) -> None:
        """As `Corpus.read_pieces`, for the masks of the same ids. Blocks.

        Also raises CorpusFormatError for a value that is neither 0 nor 1: text, or a mask of wider values.
        """
        if not self.covers_all:
            starts, lengths, targets = self._stored_parts(starts, lengths, targets, out)
        self.stored.read_pieces(starts, lengths, targets, out)
        if out.max(initial=0) > 1:
            self._refuse_other_values(starts, lengths, targets, out)

    def _refuse_other_values(
        self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[np.uint8]
    ) -> None:
        for start, length, target in zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
            wrong = np.flatnonzero(out[target : target + length] > 1)
            if len(wrong):
                place = self.stored.locate(start + int(wrong[0]))
                raise CorpusFormatError(
                    f"{place.file}: entry {place.offset:,} of the loss mask is {out[target + int(wrong[0])]}, expected "
                    "0 (not learned) or 1 (learned). Write it with one byte per id, for example with astype('bool')."
                )

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.stored.close()

    def _stored_parts(
        self, starts: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[np.uint8]
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The parts of pieces that have a mask, by their places in all masks. Those without become 1 here."""
        ends = starts + lengths
        first = np.searchsorted(self._borders, starts, side="right") - 1
        counts = np.maximum(np.searchsorted(self._borders, ends, side="left") - first, 0)
        piece = np.repeat(np.arange(len(starts)), counts)
        file = np.arange(len(piece)) + (first - np.cumsum(counts) + counts)[piece]
        begins = np.maximum(self._borders[file], starts[piece])
        sizes = np.minimum(self._borders[file + 1], ends[piece]) - begins
        places = targets[piece] + begins - starts[piece]
        has_mask = self._has_mask[file]
        for place, size in zip(places[~has_mask].tolist(), sizes[~has_mask].tolist(), strict=True):
            out[place : place + size] = 1
        return (begins + self._shifts[file])[has_mask], sizes[has_mask], places[has_mask]


def open_loss_mask(
    files: Sequence[DataFile], named: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
) -> LossMask | None:
    """The mask of the data files, None if none of them has one.

    named: the masks' files, folders or globs, one file for each data file in the same order; an empty list: no masks.
           None: the file NAME.loss next to each data file NAME, else columns in the data file.

    Raises ConfigError if masks and data files differ in number, CorpusReadError for an unreadable mask,
    CorpusFormatError for one that is damaged or differs from its data in length.
    """
    if isinstance(named, list | tuple) and not named:
        return None
    if named is None:
        beside = [file.path.with_name(file.path.name + SUFFIX) for file in files]
        look_up_all(beside)
        paths: list[FilePath | None] = [path if is_listed(path) else None for path in beside]
        twice = next((f for f, path in zip(files, paths, strict=True) if path is not None and f.loss_mask), None)
        if twice is not None:
            raise CorpusFormatError(
                f"{twice.path}: has two loss masks, in its columns ({', '.join(twice.columns.masks)}) and in "
                f"{twice.path.name}{SUFFIX} next to it. Remove one, or set loss_masks to the file."
            )
    else:
        paths = [*find_files(named, "loss_masks")]
        if len(paths) != len(files):
            raise ConfigError(
                f"loss_masks: found {len(paths):,} masks for {len(files):,} data files (first {paths[0]} for "
                f"{files[0].path}); name one for each, in the same order, or leave loss_masks out and put NAME{SUFFIX} "
                "next to each data file NAME"
            )
    masks = [file.loss_mask if path is None else _inspect(path, file) for path, file in zip(paths, files, strict=True)]
    return LossMask(files, masks) if any(mask is not None for mask in masks) else None


def _inspect(path: FilePath, data: DataFile) -> DataFile:
    """The mask at `path`, after a check that it is as long as its data."""
    with open_file(path) as file:
        has_header = file.size >= len(npy.MAGIC) and file.read(0, len(npy.MAGIC)) == npy.MAGIC
        layout = npy.parse_npy_mask(file) if has_header else Layout(_STORED, 0, file.size)
        width, first = data.stored.itemsize, data.data_offset
        expected = data.num_tokens if first is None else (data.size - first) // width
        if layout.num_tokens != expected:
            raise CorpusFormatError(
                f"{path}: the loss mask has {layout.num_tokens:,} entries, expected {expected:,}, one for each id of "
                f"{data.path}: it is truncated or belongs to other data. Copy or recreate it."
            )
        mask = token_run(file, "loss mask", layout)
    if first is None:  # ids that are scattered over the file are masked in reading order
        return mask
    extents = data.extents.copy()
    extents[:, 0] = (extents[:, 0] - first) // width + layout.data_offset
    return replace(mask, extents=extents)
