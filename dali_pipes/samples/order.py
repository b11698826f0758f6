"""The order of samples: which item of the dataset each row of an epoch takes.

    run       0  1  2  3  4  5  6  7  8  9 10 ...     rows of all epochs, one after another
    pass      0  0  0  0  0  0  0  1  1  1  1         a dataset of 7 items
    item      4  2  0  6  1  5  3  2  6  0  5         each pass permuted with its own key

Rows are counted over all ranks, so an order does not depend on ranks, batch size or workers. Without `num_samples`, an
epoch is one pass; with it, an epoch is that many rows, and passes continue from one epoch into the next.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import ORDER_NAME, permute
from dali_pipes.rows.base import order_key
from dali_pipes.rows.item_order import SEQUENTIAL
from dali_pipes.schedule import Counted

Int64Array = npt.NDArray[np.int64]


class ItemOrder(Counted, Protocol):
    """Counted rows, each of which takes an item."""

    name: str
    """Stored in states; a different order needs a different name."""
    settings: dict[str, Any]
    """Other settings that determine the items of rows, in JSON."""

    def items(self, epoch: int, rows: Int64Array, /) -> Int64Array:
        """The items of rows of an epoch, (R,) each."""

    def group(self, epoch: int, row: int, /) -> str | None:
        """The group of a row's item; None without groups."""

    def digest(self, epoch: int, /) -> str | None:
        """A hash of the epoch's list of items, for orders that are lists; None for computed orders."""


class SampleLocation(NamedTuple):
    """The item in a row of a batch."""

    item: int
    """Index in the dataset."""
    epoch: int
    row: int
    """Number of the row in the epoch, over all ranks."""
    group: str | None = None


class Passes:
    """Every item once per pass, in the order of the dataset or shuffled."""

    is_uniform = True

    def __init__(self, num_items: int, num_rows: int, seed: int, *, shuffle: bool) -> None:
        self._num_items, self._num_rows, self._seed, self._shuffle = num_items, num_rows, seed, shuffle
        self.name = ORDER_NAME if shuffle else SEQUENTIAL
        self.settings: dict[str, Any] = {"num_samples": num_rows}

    def count(self, epoch: int, at_least: int | None = None) -> int:
        return self._num_rows

    def items(self, epoch: int, rows: Int64Array) -> Int64Array:
        first_pass, begin = divmod(epoch * self._num_rows, self._num_items)  # of any size
        passes, items = np.divmod(rows + begin, self._num_items)
        if not self._shuffle:
            return items
        for number in np.unique(passes).tolist():
            inside = passes == number
            items[inside] = permute(
                items[inside], self._num_items, order_key("samples", self._seed, first_pass + number)
            )
        return items

    def group(self, epoch: int, row: int) -> str | None:
        return None

    def digest(self, epoch: int) -> str | None:
        return None
