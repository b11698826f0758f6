"""The saved state of a `SampleLoader`: JSON, under 1 KB.

    {"version": 1, "kind": "samples", "order": "philox24-v1", "config": {"seed": 0, "num_samples": 50000},
     "dataset": {"length": 50000, "fingerprint": null}, "epoch": 3, "rows": 40960, "step_rows": 64}

`rows` counts the rows of the epoch that all ranks together have consumed, so a run can resume with a different number
of ranks, batch size and number of workers. With a torch sampler, "list" is the hash of the epoch's list of items.
"""

from collections.abc import Mapping
from typing import Any

from dali_pipes.errors import StateError
from dali_pipes.loader.state_form import check_entries, is_count, short, state_of
from dali_pipes.samples.order import ItemOrder
from dali_pipes.schedule import Position

VERSION = 1
KIND = "samples"
_ENTRIES = ("kind", "order", "config", "dataset", "epoch", "rows")


class SampleStates:
    """The states of one loader: made, and read."""

    def __init__(
        self, order: ItemOrder, seed: int, *, length: int, fingerprint: str | None, name: str, step_rows: int
    ) -> None:
        self._order, self._name, self._step_rows = order, name, step_rows
        self._config = {"seed": seed, **order.settings}
        self._dataset = {"length": length, "fingerprint": fingerprint}

    def at(self, position: Position) -> dict[str, Any]:
        """A fresh dict that shares nothing with the loader."""
        state: dict[str, Any] = {
            "version": VERSION,
            "kind": KIND,
            "order": self._order.name,
            "config": dict(self._config),
            "dataset": dict(self._dataset),
            "epoch": position.epoch,
            "rows": position.rows,
            "step_rows": self._step_rows,
        }
        digest = self._order.digest(position.epoch)
        if digest is not None:
            state["list"] = digest
        return state

    def read(self, state: Mapping[str, Any]) -> Position:
        """The position of the run in a state. Raises a `StateError` that lists every difference from this loader."""
        state = state_of(state, VERSION)
        if state.get("kind") != KIND:
            raise StateError(
                f"this is not the state of a SampleLoader (kind = {short(state.get('kind'))}); load it into the loader "
                "that saved it, such as a TokenLoader"
            )
        check_entries(state, _ENTRIES, dicts=("config", "dataset"))
        self._refuse_differences(state)
        epoch, rows = state["epoch"], state["rows"]
        if not (is_count(epoch) and is_count(rows)):
            raise StateError(f"the state is damaged: epoch {short(epoch)}, rows {short(rows)}; expected integers")
        digest = self._order.digest(epoch)
        if digest != state.get("list"):
            raise StateError(
                f"sampler: {self._config.get('sampler')} yields different items for epoch {epoch:,} than in the saved "
                "run; use the sampler, data and seed that the state was saved with"
            )
        if rows > self._order.count(epoch):
            raise StateError(
                f"the state is damaged: rows {rows:,}, expected at most {self._order.count(epoch):,} in epoch {epoch:,}"
            )
        return Position(epoch, rows)

    def _refuse_differences(self, state: Mapping[str, Any]) -> None:
        now = {"order": self._order.name, **self._config}
        saved = {"order": state["order"], **state["config"]}
        lines = [
            f"{name}: saved {short(saved.get(name, 'nothing'))}, now {short(now.get(name, 'nothing'))}"
            for name in dict.fromkeys([*now, *saved])
            if saved.get(name) != now.get(name)
        ]
        for name, value in self._dataset.items():
            before = state["dataset"].get(name)
            is_known = name == "length" or None not in (before, value)  # runs without a fingerprint may get one
            if is_known and before != value:
                lines.append(f"{name} of {self._name}: saved {short(before)}, now {short(value)}")
        if lines:
            raise StateError(
                "the state does not match this loader; resuming would change the data order:\n  "
                + "\n  ".join(lines)
                + "\nUse the dataset and settings that the state was saved with, or start without the state"
            )
