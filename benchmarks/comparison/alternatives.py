"""The list of alternatives: what each is called, what it does, which packages it needs, and where its code is.

An alternative opens a stream of batches, `(input_ids, labels)`, int64 `(B, T)` torch tensors, contiguous, on the CPU,
without end: after one epoch comes the next. Importing this module imports no loader; `load()` does, in the child
process that measures it.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from comparison.work import Work

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]
Kind = Literal["yardstick", "ours", "loader", "loop"]

# Above the largest batch of the comparison, so that glibc keeps freed output memory instead of giving it back.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


class Loader(Protocol):
    """One alternative, imported. `open` blocks until the loader is built, not until its first batch."""

    def prepare(self, work: Work) -> None:
        """Write the corpus in the format the loader needs, unless it is there. Never timed."""

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        """Build a fresh loader, at the start of the first epoch or where `state` points, and stream its batches.

        Closing the stream (it is a generator) closes the loader.
        """

    def state_after(self, work: Work, batches: int) -> Any:
        """A state as taken after `batches` batches of the first epoch; None for a loader without state."""


@dataclass(frozen=True)
class Alternative:
    name: str
    kind: Kind
    summary: str
    target: str
    """`module:class` under `comparison`."""
    packages: tuple[str, ...] = ()
    """Modules imported before anything is measured; one that is missing skips the alternative."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    random_windows: bool = False
    prepared_format: str | None = None
    """Name of the format the corpus must first be written in; None where the flat file is read."""

    def missing_package(self) -> str | None:
        """The first package that is not installed. Imports nothing."""
        names = (package.partition(".")[0] for package in self.packages)
        return next((name for name in names if importlib.util.find_spec(name) is None), None)

    def load(self) -> Loader:
        """Import the packages and the alternative. Raises ImportError where one is missing."""
        for package in self.packages:
            importlib.import_module(package)
        module, _, name = self.target.partition(":")
        return cast(Loader, getattr(importlib.import_module(f"comparison.{module}"), name)(**self.arguments))


_DALI = ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types", "nvidia.dali.plugin.pytorch")

ALTERNATIVES = {
    alternative.name: alternative
    for alternative in [
        Alternative(
            "numpy",
            "yardstick",
            "NumPy, one thread: np.memmap, two assignments per row, reused buffers",
            "loops:RowCopies",
            arguments={"plain": False},
        ),
        Alternative(
            "numpy_view",
            "yardstick",
            "the same over a plain array view of the map",
            "loops:RowCopies",
            arguments={"plain": True},
        ),
        Alternative(
            "numpy_gather",
            "yardstick",
            "NumPy, one thread: one strided gather per batch, reused buffers",
            "loops:Gather",
            arguments={"keep_buffers": True},
        ),
        Alternative(
            "dali_pipes",
            "ours",
            "dali_pipes.TokenLoader, CPU, defaults",
            "dali_loaders:DaliPipes",
            ("dali_pipes.loader.token_loader",),
        ),
        Alternative(
            "dali_pipes_mapped",
            "ours",
            'the same with reads = "mapped"',
            "dali_loaders:DaliPipes",
            ("dali_pipes.loader.token_loader",),
            arguments={"reads": "mapped"},
        ),
        Alternative(
            "dali_pipes_dali",
            "ours",
            'the same with engine = "dali"',
            "dali_loaders:DaliPipes",
            (*_DALI, "dali_pipes.loader.token_loader"),
            arguments={"engine": "dali"},
        ),
        Alternative(
            "memmap",
            "loop",
            "random windows, astype and stack (as in nanoGPT; rows repeat)",
            "loops:RandomWindows",
            random_windows=True,
        ),
        Alternative(
            "gather_loop",
            "loop",
            "hand-written loop: one strided gather per batch, new tensors",
            "loops:Gather",
            arguments={"keep_buffers": False},
        ),
        Alternative(
            "torch_dataloader_0",
            "loader",
            "torch DataLoader, one row per item, no workers",
            "torch_loaders:RowDataLoader",
            arguments={"workers": 0},
        ),
        Alternative(
            "torch_dataloader_2",
            "loader",
            "torch DataLoader, one row per item, 2 workers, prefetch 4",
            "torch_loaders:RowDataLoader",
            arguments={"workers": 2},
        ),
        Alternative(
            "torch_batches_0",
            "loader",
            "torch DataLoader, __getitems__ copies rows, no workers",
            "torch_loaders:BatchDataLoader",
            arguments={"workers": 0},
        ),
        Alternative(
            "torch_batches_0_malloc",
            "loader",
            "the same, with glibc set to keep freed memory",
            "torch_loaders:BatchDataLoader",
            arguments={"workers": 0},
            environment=_KEEP_MEMORY,
        ),
        Alternative(
            "torch_batches_2",
            "loader",
            "torch DataLoader, __getitems__ copies rows, 2 workers, prefetch 4",
            "torch_loaders:BatchDataLoader",
            arguments={"workers": 2},
        ),
        Alternative(
            "torch_gather_0",
            "loader",
            "torch DataLoader, __getitems__ is one strided gather of a plain view, no workers",
            "torch_loaders:BatchDataLoader",
            arguments={"workers": 0, "gather": True},
        ),
        Alternative(
            "stateful_dataloader",
            "loader",
            "torchdata StatefulDataLoader, one row per item, no workers",
            "torch_loaders:StatefulRowDataLoader",
            ("torchdata.stateful_dataloader",),
        ),
        Alternative(
            "dali_plain",
            "loader",
            "DALI, one batch per run: external_source, slice, cast, DALIGenericIterator",
            "dali_loaders:PlainDali",
            _DALI,
        ),
        Alternative(
            "grain",
            "loader",
            "Grain MapDataset: source, shuffle, batch, to_iter_dataset",
            "grain_loader:Grain",
            ("grain",),
        ),
        Alternative(
            "streaming",
            "loader",
            "MosaicML Streaming: MDS shards, py1e shuffle, no workers",
            "mosaic_loader:Mosaic",
            ("streaming",),
            prepared_format="mds",
        ),
        Alternative(
            "litdata",
            "loader",
            "LitData: TokensLoader chunks, shuffle, no workers",
            "litdata_loader:LitData",
            ("litdata",),
            prepared_format="litdata",
        ),
        Alternative(
            "hf_datasets",
            "loader",
            "HF datasets: Arrow rows, with_format('torch'), DataLoader, no workers",
            "hf_loader:HuggingFace",
            ("datasets",),
            prepared_format="arrow",
        ),
    ]
}


def choose(only: list[str], skip: list[str]) -> list[Alternative]:
    """The alternatives left by `--only` and `--skip`. Raises ValueError for a name that is not in the list."""
    unknown = [name for name in [*only, *skip] if name not in ALTERNATIVES]
    if unknown:
        raise ValueError(f"unknown alternative {', '.join(unknown)}; expected some of {', '.join(ALTERNATIVES)}")
    return [
        alternative for name, alternative in ALTERNATIVES.items() if (not only or name in only) and name not in skip
    ]
