"""A user's own objective: `kind = "module:function"`, called with the arrays of rows and keyed draws.

def noise(batch, draws, *, rate):                  # rate from `options`
    hidden = draws.u32() < int(rate * 2**32)       # (R, T)
    batch["labels"][~hidden] = -100
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dali_pipes.config.objectives import Users
from dali_pipes.errors import ConfigError
from dali_pipes.operators import keyed_draws
from dali_pipes.operators.noised_rows import KEY, LENGTH

Array = Any  # NumPy's or CuPy's


class Draws:
    """Random numbers of the rows of a call, by keys, so that they do not depend on how rows are grouped.

    lengths: int64 (R,), tokens in each row; positions after them are padding
    """

    def __init__(self, rows: Array, seq_len: int) -> None:
        self._keys, self._seq_len = rows[:, KEY], seq_len
        self.lengths = rows[:, LENGTH]

    def u32(self, stream: int = 0) -> Array:
        """A new uint32 (R, T) of uniform numbers; those of two streams do not depend on each other. Does not block."""
        return keyed_draws(self._keys, self._seq_len, stream)

    def of_rows(self, stream: int = 0) -> Array:
        """The same, one for each row: (R,)."""
        return keyed_draws(self._keys, 1, stream)[:, 0]


def load_function(entry: Users) -> Callable[..., None]:
    """The function that `kind` names. Blocks to import the module; raises `ConfigError` if that fails."""
    name, _, attribute = entry.kind.partition(":")
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'objective: kind = "{entry.kind}": cannot import the function: {error}; expected "module:function" with '
            "a module on the Python path"
        ) from error
    try:
        inspect.signature(function).bind({}, None, **entry.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'objective: kind = "{entry.kind}": cannot call the function as function(batch, draws, **options) '
            f"with options = {entry.options}: {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., None], entry: Users, out: Mapping[str, Array], rows: Array, seq_len: int) -> None:
    """Let a function change the arrays of a part of a block, (R, T) each."""
    function(dict(out), Draws(rows, seq_len), **entry.options)
