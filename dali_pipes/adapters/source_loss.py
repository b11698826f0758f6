"""`SourceLoss`: the mean loss of each source of a mixture, added up where the losses are.

    source_ids   labels (B, T)   losses (B, T)            sum   labels   mean
         1         5    9 -100    2.0  4.0  9.9    web    3.0     3       1.0
         0         7    3    8    1.0  0.5  1.5    code   6.0     2       3.0
        -1      -100 -100 -100    0.0  0.0  0.0

Labels of -100 and padding rows, whose source is -1, do not count.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dali_pipes.adapters.batch_fields import field_of
from dali_pipes.errors import ConfigError
from dali_pipes.loader.batches import outside_modes
from dali_pipes.loader.token_loader import TokenLoader
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch are without it


class SourceLoss:
    """The mean loss of each source of a mixture, over the batches that were added.

        losses = SourceLoss(loader)  # a mixture, with "source_ids" among its outputs
        for batch in loader:
            token_losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
            losses.add(batch, token_losses)
            if loader.step % 100 == 0:
                print(losses.means())  # {"web": 3.21, "code": 1.87}
                losses.reset()

    device: where the losses and the batches are; None: `loader.device`

    Sums are float64 (float32 on a device without float64, such as MPS). Raises `ConfigError` for a loader without a
    mixture or without the output `source_ids`.
    """

    @outside_modes
    def __init__(self, loader: TokenLoader, *, device: torch.device | str | None = None) -> None:
        config = loader.config
        if config.mixture is None:
            raise ConfigError(
                "SourceLoss needs a mixture, but this loader reads one corpus: set mixture instead of corpus"
            )
        if "source_ids" not in config.outputs:
            raise ConfigError(
                f"SourceLoss needs the output 'source_ids', but outputs = {list(config.outputs)}: add 'source_ids'"
            )
        self._names = tuple(config.mixture)
        self._first_label = 0 if config.label_shift else 1
        device = loader.device if device is None else torch.device(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # Sums of the losses and of their weights by source; the last column takes the padding rows.
        self._totals = torch.zeros(2, len(self._names) + 1, dtype=dtype, device=device)

    def add(self, batch: Mapping[str, Any], losses: Tensor, weights: Tensor | None = None) -> None:
        """Add the losses of a batch. Does not block, and works in a function that `torch.compile` compiles.

        batch:   a batch of the loader; `source_ids` and, without `weights`, `labels` are used
        losses:  of any floating type. Either a loss for each label, without reduction: (B, T), with `mtp` (B, T, k),
                 or the same flat, (B * T,); or the mean of each row, (B,), which counts once for each label of the row
        weights: how often each loss counts, at least 0, in the shape of `losses`. None: 1 for each label, 0 where the
                 label is -100. Then `losses` may also have other shapes, as long as the first axis is that of the rows

        A loss of weight 0 is ignored, even if it is NaN; so are padding rows. Losses are detached. With
        `label_shift=False`, the labels are `labels[:, 1:]`, so there are T - 1 losses a row. Raises `ConfigError` for a
        missing output, another shape and another device.
        """
        source_ids: Tensor = field_of(batch, "source_ids")
        rows, losses = len(source_ids), losses.detach()
        if weights is None:
            counted = field_of(batch, "labels")[:, self._first_label :] != IGNORE_INDEX
            weights = counted.flatten(1).sum(1) if losses.shape == source_ids.shape else counted
            weights = weights.flatten() if losses.ndim == 1 else weights
            expected = f"({rows},), {tuple(counted.shape)} or ({counted.numel()},)"
        else:
            expected = f"{tuple(weights.shape)}, the shape of the weights, with {rows} rows"
        has_rows = losses.ndim > 0 and (losses.numel() % rows == 0 if losses.ndim == 1 else len(losses) == rows)
        if losses.shape != weights.shape or not has_rows:
            raise ConfigError(
                f"the losses have the shape {tuple(losses.shape)}, expected {expected}: compute the loss with "
                'reduction="none", or the mean of each row'
            )
        for name, tensor in {"losses": losses, "source_ids": source_ids, "weights": weights}.items():
            if tensor.device != self._totals.device:
                raise ConfigError(
                    f"{name} are on {tensor.device}, but SourceLoss adds on {self._totals.device}: move the batch to "
                    "the device of the losses, and pass that device as SourceLoss(loader, device=...)"
                )
        weights = weights.reshape(rows, -1).to(self._totals.dtype)
        weighted = losses.reshape(rows, -1).to(self._totals.dtype) * weights
        sums = torch.where(weights == 0, 0.0, weighted).sum(1)
        # Not by a mask of rows: on a GPU the host would wait for its number of entries.
        columns = torch.where(source_ids < 0, len(self._names), source_ids)
        self._totals.index_add_(1, columns, torch.stack([sums, weights.sum(1)]))

    def means(self, group: "ProcessGroup | None" = None) -> dict[str, float]:
        """The mean loss of each source with labels since the last `reset`, by name, in the order of `mixture`. Blocks.

        group: the ranks whose losses are added up, such as `torch.distributed.group.WORLD`: all of them must call, and
               all get the same means. None: the losses of this rank alone, without communication
        """
        totals = self._totals
        if group is not None:
            totals = totals.clone()
            torch.distributed.all_reduce(totals, group=group)
        sums, counts = totals.tolist()
        return {name: sums[number] / counts[number] for number, name in enumerate(self._names) if counts[number]}

    def reset(self) -> None:
        """Forget the losses so far. Does not block."""
        self._totals.zero_()
