"""`JaxBatches`: the iterator that `jax_batches` returns."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from dali_pipes.adapters.jax.arrays import Placement
from dali_pipes.adapters.jax.fields import Fields
from dali_pipes.config.validators import shown
from dali_pipes.errors import LoaderClosedError, StateError
from dali_pipes.monitoring.stats import CacheStats, LoaderStats

if TYPE_CHECKING:
    from dali_pipes.loader.state import OnChange
    from dali_pipes.loader.token_loader import TokenLoader


class JaxBatches(Iterator[dict[str, Any]]):
    """An iterator over batches, which are dicts of `jax.Array`s by name. `jax_batches` returns it.

    Arrays are int32; masks can be bool with `mask_dtype`, and `loss_weights` is float32. Rows are sharded over the data
    axes, see `sharding`; `row_ids` and `source_ids` have one axis. `max_seqlen` and `num_segments` are Python integers.

    A `for` loop ends after an epoch, and the next one runs the next epoch; with `repeat`, it does not end. Leaving a
    `for` loop early does not end the epoch: as with other iterators, the next loop or `next()` continues it.

    `next()` blocks until the loaders have a batch, but not until it has been copied to devices. Arrays stay valid as
    long as you hold them. After an error in `next()`, the next call continues after the last batch that was returned.
    Use it in one thread at a time; all processes of a program must take the same number of batches.
    """

    def __init__(self, loaders: "Sequence[TokenLoader]", placement: Placement, fields: Fields, sharding: Any) -> None:
        self._loaders = tuple(loaders)
        self._placement, self._fields, self._sharding = placement, fields, sharding
        self._iterators: list[Iterator[Mapping[str, Any]]] | None = None

    @property
    def loaders(self) -> "tuple[TokenLoader, ...]":
        """The loaders of this process: one, or one for each of its data shards."""
        return self._loaders

    @property
    def sharding(self) -> Any:
        """The `jax.sharding.NamedSharding` of the arrays."""
        return self._sharding

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._loaders[0].epoch

    @property
    def step(self) -> int:
        """Number of the next batch within its epoch."""
        return self._loaders[0].step

    def __len__(self) -> int:
        """Number of batches in an epoch, as with `len()` of a `TokenLoader`; the same in every process."""
        return len(self._loaders[0])

    def __bool__(self) -> bool:
        return True  # checkpoint handlers ask `item or args.item`, for which `len()` might plan a whole epoch

    def __next__(self) -> dict[str, Any]:
        first = self._loaders[0]
        before = first._position  # a state costs much more where there are many sources
        try:
            if self._iterators is None:
                self._iterators = [iter(loader) for loader in self._loaders]
            batches = [next(iterator, None) for iterator in self._iterators]
            if batches[0] is not None:
                return self._placement.arrays([batch for batch in batches if batch is not None], self._fields)
        except BaseException:
            with contextlib.suppress(LoaderClosedError):
                self.load_state_dict(first._states.at(before))  # loaders may have handed out their part of the step
            raise
        self._iterators = None
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned, as in `TokenLoader.state_dict()`; the same in every process.

        JSON-serializable. The state does not depend on the mesh: it loads on any number of devices and processes.
        """
        return self._loaders[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any], on_change: "OnChange | None" = None) -> None:
        """Resume after the last batch that the saved run returned. See `TokenLoader.load_state_dict`."""
        self._iterators = None
        for loader in self._loaders:
            loader.load_state_dict(state, on_change)

    def get_state(self) -> bytes:
        """`state_dict()` as JSON in UTF-8, which Grain's checkpoint handler, and therefore Orbax, expects."""
        return json.dumps(self.state_dict(), indent=4).encode()

    def set_state(self, state: bytes | str | Mapping[str, Any]) -> None:
        """Load a state from `get_state()` or `state_dict()`. Raises `StateError` for anything else."""
        try:
            read = state if isinstance(state, Mapping) else json.loads(state)
        except ValueError as error:
            raise StateError(
                f"this is not a loader state: expected JSON from get_state(), got {shown(state)} ({error}); the file "
                "may be incomplete: load an earlier one"
            ) from error
        self.load_state_dict(read)

    def start_prefetch(self) -> None:
        """Called by Grain's checkpoint handler after `set_state`. Does nothing: reading begins with the first batch."""

    def stats(self) -> LoaderStats:
        """The statistics of this process; tokens, waits, retries and cache are summed over its loaders."""
        first, *others = every = [loader.stats() for loader in self._loaders]
        if not others:
            return first
        return dataclasses.replace(
            first,
            tokens=sum(stats.tokens for stats in every),
            wall_s=max(stats.wall_s for stats in every),
            data_wait_s=sum(stats.data_wait_s for stats in every),
            read_retries=sum(stats.read_retries for stats in every),
            cache=CacheStats.sum(stats.cache for stats in every),
        )

    def close(self) -> None:
        """Close the loaders, including one passed to `jax_batches`; idempotent. Arrays stay valid."""
        self._iterators = None
        self._placement.close()
        for loader in self._loaders:
            loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
