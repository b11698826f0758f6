"""What a part works with: the machine, sizes, a folder, and the record of its checks, written as they are made."""

import functools
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from gpu.machine import Machine

Record = dict[str, Any]
NOT_RUN = "not run"
_MOST_CHARACTERS = 1000
Value = TypeVar("Value")


class Session:
    """One part's run. `emit` takes each record immediately, so that what was found before a crash is kept."""

    def __init__(self, folder: Path, *, dry: bool, limit_s: float, emit: Callable[[Record], None]) -> None:
        self.folder = folder
        self.dry = dry
        self._emit = emit
        self._end = time.monotonic() + limit_s

    @functools.cached_property
    def machine(self) -> "Machine":
        """The device; importing torch and making the CUDA context happen here."""
        from gpu.machine import make_machine

        machine = make_machine(self.dry)
        try:
            about = machine.about()
        except Exception as error:  # a card that cannot be described can still be checked
            about = {"not_described": f"{type(error).__name__}: {error}"}
        self._emit({"about": about})
        return machine

    @property
    def left_s(self) -> float:
        """Seconds until this part is killed."""
        return self._end - time.monotonic()

    def pick(self, real: Value, dry: Value) -> Value:
        """A size: what it is on a card, and what it is in a dry run."""
        return dry if self.dry else real

    def run(self, checks: Sequence[Callable[["Session"], None]]) -> None:
        """Every check in turn; one that raises is a failed check."""
        self._emit({"plan": [_title(check) for check in checks]})
        for check in checks:
            started = time.perf_counter()
            try:
                check(self)
            except Exception as error:
                self.verify(f"{_title(check)} runs", f"{type(error).__name__}: {error}", traceback.format_exc())
            self._emit({"done": _title(check), "seconds": time.perf_counter() - started})

    def verify(self, name: str, problem: str, details: str | None = None) -> None:
        """A check of correctness: passed if there is no `problem`."""
        problem = problem[:_MOST_CHARACTERS]
        record = {"check": name, "value": problem or "ok", "wanted": "", "result": "fail" if problem else "pass"}
        self._emit(record | ({"details": details} if details else {}))

    def figure(
        self, name: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """A measured figure, and what is wanted of it."""
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        wanted = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else ""
        result = ("pass" if met else "missed") if wanted else ""
        self._emit({"check": name, "value": value, "unit": unit, "wanted": wanted, "result": result})

    def note(self, name: str, value: Any) -> None:
        """Something worth knowing that is neither right nor wrong."""
        self._emit({"check": name, "value": value, "wanted": "", "result": ""})

    def not_run(self, name: str, why: str) -> None:
        """A check that this machine does not allow, and why."""
        self._emit({"check": name, "value": why, "wanted": "", "result": NOT_RUN})

    def kept(self, name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Figures that several parts need: those of an earlier part of this run, else measured now."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(measure()))
            unfinished.rename(path)
        figures: dict[str, float] = json.loads(path.read_text())
        return figures

    def corpus(self, name: str, tokens: int, *, dtype: str = "uint16", files: int = 1, below: int = 50257) -> str:
        """A pattern for `files` flat files of random ids under `below`, made once a run; from 2^25 on they repeat."""
        import numpy as np

        folder = self.folder / f"{name}-{tokens}-{dtype}-{files}"
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            piece = np.random.default_rng(tokens).integers(0, below, min(tokens, 1 << 25), dtype=dtype)
            for number, ids in enumerate(np.array_split(np.resize(piece, tokens), files)):
                ids.tofile(unfinished / f"shard_{number}.bin")
            os.rename(unfinished, folder)
        return str(folder / "*.bin")


def _title(check: Callable[..., object]) -> str:
    return check.__name__.replace("_", " ")
