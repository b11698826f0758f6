"""Batches as `jax.Array`s that are sharded over a mesh.

    from dali_pipes import LoaderConfig
    from dali_pipes.adapters.jax import jax_batches

    config = LoaderConfig(corpus="data/*.bin", batch_size=8, seq_len=1024)         # 8 rows for each data shard
    for batch in jax_batches(config, mesh, data_axes=("data",)):
        state, loss = train_step(state, batch["input_ids"], batch["labels"])       # int32 (8 * shards, 1024) each

torch reads, shuffles and packs; JAX gets the arrays. Importing this package imports neither of them.
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
    data_axes: the mesh axes that split the rows. Devices that differ only in other axes get the same rows. With (), all
               devices get the same rows
    labels:    "ignore": -100 where a label does not count; "weights": 0 there, and an array `loss_weights`, float32,
               which is 1 where the label counts, else 0
    names:     None: names of `outputs`; "maxtext": `inputs`, `targets`, and `_position` and `_segmentation` of both

    A data shard is the part of a batch on one device: there are as many as the product of the sizes of `data_axes`.
    `batch_size` of a config is the rows of one data shard, so the global batch is `batch_size` times the data shards.
    Shard k has the rows of a `TokenLoader` with the same settings, `rank=k` and `world_size` the number of shards,
    however the devices are spread over processes. `index_dtype` is int32, and ranks come from the mesh.

    A `TokenLoader` must have `index_dtype="int32"` and deliver exactly the rows of this process: in a program of one
    process it is rank 0 of 1, and its `batch_size` is the global batch, a multiple of the shards. A config works with
    every mesh.

    Every process calls this with the same arguments. Blocks while the corpus is opened. Raises `ConfigError` for
    settings and outputs that do not work on the mesh, `ModuleNotFoundError` if torch or JAX is not installed, and what
    `TokenLoader` raises.
    """
    _require("jax", 'pip install "dali-pipes[jax]"')
    _require("torch", "pip install torch")
    from dali_pipes.adapters.jax.arrays import placement_for
    from dali_pipes.adapters.jax.data_shards import DataShards
    from dali_pipes.loader.token_loader import TokenLoader

    if not isinstance(config_or_loader, LoaderConfig | TokenLoader):
        raise ConfigError(
            f"jax_batches needs a LoaderConfig or a TokenLoader, got {type(config_or_loader).__name__}: pass "
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
        raise ModuleNotFoundError(f"jax_batches requires {package}, which is not installed: {install}", name=package)
