"""Batches as `jax.Array`s that are sharded over a mesh.

    from dali_pipes import LoaderConfig
    from dali_pipes.adapters.jax import jax_batches

    config = LoaderConfig(corpus="data/*.bin", batch_size=8, seq_len=1024)         # 8 rows for each data shard
    for batch in jax_batches(config, mesh, data_axes=("data",)):
        state, loss = train_step(state, batch["input_ids"], batch["labels"])       # int32 (8 * shards, 1024) each

The loader needs torch; JAX gets the arrays. Importing this package imports neither of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dali_pipes.adapters.jax.batches import JaxBatches
from dali_pipes.adapters.jax.fields import Fields, Labels, Names
from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError

if TYPE_CHECKING:
    from dali_pipes.loader.token_loader import TokenLoader

__all__ = ["JaxBatches", "jax_batches"]


def jax_batches(
    config_or_loader: "LoaderConfig | TokenLoader",
    mesh: Any,
    data_axes: str | Sequence[str] = ("data",),
    *,
    labels: Labels = "ignore",
    names: Names | None = None,
) -> JaxBatches:
    """Batches of a `LoaderConfig` or a `TokenLoader` as dicts of `jax.Array`s, sharded over a mesh by rows.

    mesh:      a `jax.sharding.Mesh`
    data_axes: the mesh axes that split the rows. Devices that differ only along other axes get the same rows. With (),
               all devices get the same rows
    labels:    "ignore": labels are -100 where they do not count; "weights": they are 0 there, and the float32 array
               `loss_weights` is 1 where the label counts, else 0
    names:     None: the names of `outputs`; "maxtext": `inputs`, `targets`, and `_position` and `_segmentation` of both

    The number of data shards is the product of the sizes of `data_axes`. In a config, `batch_size` is the number of
    rows per data shard, so the global batch is `batch_size` times the number of data shards. Shard k gets the rows of a
    `TokenLoader` with the same settings, `rank=k`, and `world_size` set to the number of shards, no matter how the
    devices are distributed over processes. `index_dtype` is int32, and ranks come from the mesh.

    A `TokenLoader` must have `index_dtype="int32"` and deliver exactly the rows of this process. In a single-process
    program, it is rank 0 of 1, and its `batch_size` is the global batch, a multiple of the number of shards. A config
    works with every mesh.

    Call this with the same arguments in every process. Blocks while the corpus is opened. Raises `ConfigError` for
    settings and outputs that do not work on the mesh, `ModuleNotFoundError` if torch or JAX is not installed, and the
    errors of `TokenLoader`.
    """
    _require("jax", 'pip install "dali-pipes[jax]"')
    _require("torch", "pip install torch")
    from dali_pipes.adapters.jax.arrays import placement_for
    from dali_pipes.adapters.jax.data_shards import DataShards
    from dali_pipes.loader.token_loader import TokenLoader

    if not isinstance(config_or_loader, LoaderConfig | TokenLoader):
        raise ConfigError(
            f"jax_batches expects a LoaderConfig or a TokenLoader, got {type(config_or_loader).__name__}; pass "
            "LoaderConfig(corpus=..., batch_size=..., seq_len=...)"
        )
    shards = DataShards.of(mesh, data_axes)
    given = config_or_loader if isinstance(config_or_loader, TokenLoader) else None
    config = config_or_loader.config if isinstance(config_or_loader, TokenLoader) else config_or_loader
    fields = Fields.of(config, shards, labels, names, may_add=given is None)
    placement = placement_for(shards, config, given)
    loaders = [given] if given is not None else placement.open_loaders(config.replace(outputs=fields.outputs))
    return JaxBatches(loaders, placement, fields, shards.sharding)


def _require(package: str, install: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"jax_batches requires {package}, which is not installed; run: {install}", name=package
        )
