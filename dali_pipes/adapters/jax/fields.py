"""The arrays of a batch for JAX: which outputs they come from, their names, and how labels are converted.

    outputs of a loader           names = None                    names = "maxtext"
    input_ids                     input_ids                       inputs
    labels                        labels                          targets, 0 where ignored
    position_ids                  position_ids                    inputs_position, targets_position
    segment_ids                   segment_ids                     inputs_segmentation; targets_segmentation, 0 where
                                                                  the label is ignored
    labels, labels = "weights"    labels, 0 where ignored,        loss_weights beside the above
                                  and loss_weights

Segments count from 1 in each row and are 0 on padding, as MaxText expects; its loss counts where `targets_segmentation`
is not 0. The other outputs keep their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dali_pipes.adapters.jax.data_shards import DataShards
from dali_pipes.config import LoaderConfig
from dali_pipes.config.loader_config import INT32_IDS
from dali_pipes.config.outputs import OUTPUTS, Axes
from dali_pipes.errors import ConfigError
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX

Labels = Literal["ignore", "weights"]
Names = Literal["maxtext"]

LOSS_WEIGHTS = "loss_weights"
MAXTEXT_NEEDS = ("input_ids", "labels", "position_ids", "segment_ids")


@dataclass(frozen=True)
class Fields:
    """The arrays of a batch.

    outputs: the loader's, all of which travel
    """

    outputs: tuple[str, ...]
    labels: Labels
    names: Names | None

    @classmethod
    def of(
        cls, config: LoaderConfig, shards: DataShards, labels: Labels, names: Names | None, *, may_add: bool
    ) -> "Fields":
        """Check what was asked for. Raises `ConfigError`.

        may_add: whether outputs that `names` needs may be added
        """
        for name, value, known in (("labels", labels, get_args(Labels)), ("names", names, (None, *get_args(Names)))):
            if value not in known:
                raise ConfigError(f"{name} = {value!r}: expected {' or '.join(map(repr, known))}")
        outputs = config.outputs
        needed = MAXTEXT_NEEDS if names == "maxtext" else ("labels",) if labels == "weights" else ()
        missing = tuple(name for name in needed if name not in outputs)
        if names == "maxtext" and may_add:
            outputs, missing = (*outputs, *missing), ()
        if missing:
            why = 'names = "maxtext"' if names == "maxtext" else 'labels = "weights"'
            raise ConfigError(f"{why} needs {', '.join(missing)}, but outputs = {list(outputs)}; add them to outputs")
        if names == "maxtext" and (config.mtp or not config.label_shift):
            found = f"mtp = {config.mtp}" if config.mtp else "label_shift = False"
            raise ConfigError(
                f'names = "maxtext" needs targets that are shifted by one token, but {found}; remove this setting'
            )
        learned = next((entry.kind for entry in config.all_objectives if entry.has_own_labels), None)
        if names == "maxtext" and learned is not None:
            raise ConfigError(
                f'names = "maxtext" needs targets that are shifted by one token, but the objective "{learned}" learns '
                "ids at their own positions; remove names"
            )
        for name in outputs:
            if OUTPUTS[name].axes in (Axes.SEGMENT_BOUNDS, Axes.NUMBER) and shards.count > 1:
                raise ConfigError(
                    f"the output {name!r} differs between the {shards.count} data shards of {shards.described}, so it "
                    "cannot be sharded; use segment_ids instead"
                )
        return cls(outputs, labels, names)

    def of_batch(self, batch: Mapping[str, Any], xp: Any) -> dict[str, Any]:
        """The arrays of a loader's batch, by the names they are delivered under. On a GPU nothing blocks but `row_ids`.

        xp: the module whose arrays the batch holds, NumPy or torch. Both know what is used here
        """
        arrays: dict[str, Any] = {}
        counts = None
        if self.names == "maxtext" or self.labels == "weights":
            counts = batch["labels"] != IGNORE_INDEX
        for name, values in batch.items():
            if name == "labels" and counts is not None:
                arrays[name] = xp.where(counts, values, 0)
            elif OUTPUTS[name].axes is Axes.ROWS and OUTPUTS[name].dtype == "int64":
                arrays[name] = _as_int32(name, values, xp)
            elif not isinstance(values, int) and values.dtype == xp.int64:
                raise ConfigError(
                    f"{name} is int64 after the loader's graph, but JAX arrays are int32; cast it to int32 in the graph"
                )
            else:
                arrays[name] = values
        if self.labels == "weights":
            arrays[LOSS_WEIGHTS] = xp.asarray(counts, dtype=xp.float32)
        if self.names == "maxtext":
            segments, positions = arrays.pop("segment_ids"), arrays.pop("position_ids")
            own = {"inputs": arrays.pop("input_ids"), "targets": arrays.pop("labels")}
            own |= {"inputs_position": positions, "targets_position": positions}
            own |= {"inputs_segmentation": segments, "targets_segmentation": xp.where(counts, segments, 0)}
            arrays = own | arrays
        return arrays


def _as_int32(name: str, values: Any, xp: Any) -> Any:
    """Numbers of rows and sources, which loaders deliver as int64. Raises `ConfigError` if one is too large."""
    if len(values) and int(values.max()) >= INT32_IDS:
        raise ConfigError(
            f"the output {name!r} has the value {int(values.max()):,}, which does not fit in int32; remove {name!r} "
            "from outputs, or use a larger seq_len"
        )
    return xp.asarray(values, dtype=xp.int32)
