"""Converts what users pass for a setting to the type of the setting, or rejects it and says what to do instead.

    Path("data/a.bin")                    ("data/a.bin",)
    np.memmap("train.bin", np.uint16)     this array is a memory map of train.bin: pass the file instead ...
    torch.device("cuda", 1)               "cuda:1"
    "mps"                                 not supported: ...

Only lists, tuples and mappings are iterated: a dataset may be endless. Errors are `ValueError`s, to which pydantic adds
the name of the setting.
"""

import functools
import os
import re
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MappingView, Set
from numbers import Integral
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from dali_pipes.errors import EMPTY_PATH, WEIGHTS_IN_MIXTURE, ConfigError
from dali_pipes.uris import check_uri, entry_text, is_uri

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_OTHER_DEVICES = {
    "mps": "an Apple GPU",
    "xpu": "an Intel GPU",
    "tpu": "a TPU",
    "xla": "an XLA device",
    "hpu": "a Gaudi accelerator",
    "npu": "an Ascend NPU",
    "neuron": "a Trainium or Inferentia chip",
    "privateuseone": "a device of a torch extension",
    "meta": "torch's device for tensors without data",
}
_PARQUET = 'pyarrow.parquet.write_table(pyarrow.table({"input_ids": documents}), "tokens.parquet")'

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_LONGEST = 240
_LARGEST = 2**64 - 1


def shown(value: Any) -> str:
    """Any value as a short text for a message."""
    try:
        text = _short.repr(value)
    except Exception:  # an integer too long for str(), or an object whose repr() fails
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


class Shown:
    """A value whose `repr` is short."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return shown(self._value)


def refuse_as_corpus(given: Any, settings: Collection[str]) -> None:
    """Raise `ConfigError` for a dict of settings or a configuration file passed as the corpus."""
    if isinstance(given, Mapping) and given and all(name in settings for name in given):
        raise ConfigError("pass settings as keywords: TokenLoader(**settings)")
    if isinstance(given, str | os.PathLike) and str(given).endswith((".toml", ".yaml", ".yml")):
        path = entry_text(given)
        raise ConfigError(
            f"{path} is a configuration file, not a token file: use TokenLoader(LoaderConfig.from_file({path!r}))"
        )


def as_value_error(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that any exception from inspecting an object becomes a `ValueError` for the setting.

    For example, a library's proxy object may raise on any attribute, and a table of a closed file on its entries.
    """

    @functools.wraps(read)
    def reads(value: Any, *arguments: Any) -> Any:
        try:
            return read(value, *arguments)
        except ValueError:
            raise
        except Exception as error:
            kind = type(value).__name__
            raise ValueError(f"cannot use this {kind}: it raised {shown(error)}; pass a plain value") from error

    return reads


@as_value_error
def refuse_huge_number(value: Any) -> Any:
    """Reject whole numbers too large for any setting; return everything else unchanged."""
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"expected a number of at most 64 bits, found {shown(value)}")
    return value


PathText = Annotated[str, PlainValidator(lambda value: value), PlainSerializer(lambda value: value, return_type=Any)]
"""A path that `parse_paths` returned. A `Uri` stays one, also in a copy of the settings, and is saved as it shows."""


@as_value_error
def parse_paths(value: Any, setting: str) -> tuple[str, ...]:
    """The paths that `corpus` or `loss_masks` names."""
    if isinstance(value, str | os.PathLike):
        value = [value]
    if isinstance(value, Mapping):
        raise ValueError(_mapping_error(value, setting))
    if not isinstance(value, list | tuple):
        raise ValueError(_object_error(value, setting))
    for entry in value:
        if not isinstance(entry, str | os.PathLike):
            raise ValueError(_entry_error(value, entry, setting))
        if not os.fspath(entry):
            raise ValueError(EMPTY_PATH)
    if not value and setting == "corpus":
        raise ValueError("the list of paths is empty; expected at least one file, folder or glob")
    entries = tuple(map(entry_text, value))
    for entry in entries:
        check_uri(entry, "")
    return entries


def parse_path(value: Any, setting: str) -> str:
    """The one path that `keep` names."""
    several = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(path, str | os.PathLike) for path in several):
        name = type(value).__name__
        raise ValueError(
            f"expected the path of a file, found a {name}; write the numbers to one, for example with "
            f'np.save("{setting}.npy", numbers), and set {setting} = "{setting}.npy"'
        )
    paths: tuple[str, ...] = parse_paths(value, setting)
    if len(paths) != 1:
        raise ValueError(f"expected one path, found {len(paths):,}")
    return paths[0]


@as_value_error
def parse_folder(value: Any) -> Any:
    """The path of a local folder, with `~` replaced; None stays."""
    if value is None or not isinstance(value, str | os.PathLike):
        return value
    path = entry_text(value)
    if not path:
        raise ValueError("expected a folder; found empty text")
    if is_uri(path):
        raise ValueError(f"expected a folder on this machine, found {shown(path)}")
    return os.path.expanduser(path)


@as_value_error
def parse_list(value: Any) -> Any:
    """A list of numbers or names, also from an array. Anything else that can be iterated is rejected."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if isinstance(value, list | tuple | Set | str) or not _has_items(value):
        return value
    raise ValueError(f"expected a list, found a {type(value).__name__}; pass a list")


@as_value_error
def parse_auto(value: Any) -> Any:
    """A number or "auto", which None stands for too."""
    if isinstance(value, str) and value != "auto" and not value.strip().lstrip("+-").isdigit():
        raise ValueError(f'expected a whole number or "auto", found {shown(value)}')
    return "auto" if value is None else value


@as_value_error
def parse_dtype(value: Any) -> Any:
    """The name of an integer type, also from a `np.dtype` or a NumPy scalar type."""
    if value is None or isinstance(value, str):
        return value
    return getattr(value, "name", getattr(value, "__name__", value))


@as_value_error
def parse_device(value: Any) -> str:
    """The name of a device, also from a `torch.device`: "auto", "cpu", "cuda" or "cuda:1"."""
    name = str(value) if hasattr(value, "type") and hasattr(value, "index") else value  # a torch.device
    if isinstance(name, int) and not isinstance(name, bool):
        raise ValueError(f'{shown(name)} is not a device name: use device = "cuda:{shown(name)}"')
    if isinstance(name, str):
        if _DEVICE.fullmatch(name):
            return name
        kind = name.partition(":")[0].lower()
        if kind in _OTHER_DEVICES:
            raise ValueError(
                f"{shown(name)} is {_OTHER_DEVICES[kind]}, which is not supported: batches are created on the CPU or "
                f'on an NVIDIA GPU. Set device = "cpu" and move each batch with batch["input_ids"].to(...)'
            )
    raise ValueError(f'expected "auto", "cpu", "cuda" or a GPU by number such as "cuda:1"; found {shown(name)}')


def _mapping_error(value: Mapping[Any, Any], setting: str) -> str:
    first = next(iter(value.items()), None)
    if first is None or isinstance(first[1], int | float):
        return (
            f"{shown(first)} is not a path: {WEIGHTS_IN_MIXTURE}"
            if first
            else f"expected a path or a list of paths{_found(value)}"
        )
    if isinstance(first[1], Mapping):
        return f"expected a list of paths, found a dict of tables: {WEIGHTS_IN_MIXTURE}"
    if isinstance(first[1], str | os.PathLike):
        split = f"{setting} = ...[{first[0]!r}]"
        return f"expected a list of paths, found a dict of splits: pass the paths of one split, {split}"
    return _in_memory_error(
        value, 'pyarrow.parquet.write_table(pyarrow.table(data), "tokens.parquet")', "tokens.parquet"
    )


def _entry_error(value: Collection[Any], entry: Any, setting: str) -> str:
    """The error for a list with an entry that is not a path."""
    others = any(isinstance(other, str | os.PathLike) for other in value)
    has_one = isinstance(entry, list | tuple) and any(isinstance(part, str | os.PathLike) for part in entry)
    if setting != "corpus" or others or has_one or isinstance(entry, float):
        return f"{shown(entry)} is not a path: {WEIGHTS_IN_MIXTURE}"
    if isinstance(entry, Integral):
        return _in_memory_error(value, 'np.save("tokens.npy", ids)', "tokens.npy")
    if isinstance(entry, Mapping):
        records = 'pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "tokens.parquet")'
        return _in_memory_error(value, records, "tokens.parquet")
    if isinstance(entry, list | tuple) or hasattr(entry, "__array__"):
        return _in_memory_error(value, _PARQUET, "tokens.parquet")
    return f"{shown(entry)} is not a path; {setting} takes files, folders or globs"


def _object_error(value: Any, setting: str) -> str:
    """The error for a value that is neither a path nor a list. Inspects its type, never its content."""
    kind, module = type(value).__name__, type(value).__module__.partition(".")[0]
    if isinstance(value, Iterator):
        return f"a {kind} can be read only once: pass a list, such as sorted(paths), or the glob pattern as a string"
    if isinstance(value, deque | MappingView) or getattr(getattr(value, "dtype", None), "kind", "") == "U":
        return f"expected a list of paths, found a {kind}: pass list(paths)"
    if isinstance(value, Set):
        return f"a {kind} does not have an order: pass a list, such as sorted(paths)"
    if isinstance(value, bytes | bytearray | memoryview):
        return _in_memory_error(value, 'pathlib.Path("tokens.bin").write_bytes(data)', "tokens.bin")
    file = getattr(value, "filename", None)
    if isinstance(file, str | os.PathLike) and hasattr(value, "dtype"):
        dtype = f', dtype = "{value.dtype}"'
        return f"this array is a memory map of {file}: pass the file instead, {setting} = {shown(str(file))}{dtype}"
    if callable(getattr(value, "save_to_disk", None)):
        return _in_memory_error(value, 'data.save_to_disk("tokens")', "tokens")
    if callable(getattr(value, "to_parquet", None)):
        return _in_memory_error(value, 'data.to_parquet("tokens.parquet")', "tokens.parquet")
    if callable(getattr(value, "write_parquet", None)):
        return _in_memory_error(value, 'data.write_parquet("tokens.parquet")', "tokens.parquet")
    if module == "pyarrow":
        return _in_memory_error(value, 'pyarrow.parquet.write_table(data, "tokens.parquet")', "tokens.parquet")
    if callable(getattr(value, "detach", None)):
        return _in_memory_error(value, 'np.save("tokens.npy", data.cpu().numpy())', "tokens.npy")
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return _in_memory_error(value, 'np.save("tokens.npy", data)', "tokens.npy")
    if _has_items(value):
        return _in_memory_error(value, _PARQUET, "tokens.parquet")
    return f"expected a path or a list of paths{_found(value)}"


def _has_items(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _in_memory_error(value: Any, write: str, name: str) -> str:
    return (
        f"expected a path, found data in memory ({type(value).__name__}). Write its token ids to a file, for example "
        f'with {write}, and pass that file: corpus = "{name}"'
    )


def _found(value: Any) -> str:
    return "" if value is None else f", found {shown(value)}"


_WORDS = {
    ", unable to": "",
    ", got a": "",
    "Input should be": "must be",
    "a valid integer": "an integer",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid tuple": "a list",
    "a valid dictionary or instance of SourceSettings": "a table with corpus and weight",
    "a valid dictionary or instance of Stage": "a table with at and weights",
    "a valid dictionary": "a table",
}
"""Phrases of pydantic's messages and what a user reads instead; "" cuts the rest off."""


def plain_words(message: str) -> str:
    """A message of pydantic in the words of this package."""
    for pydantics, ours in _WORDS.items():
        message = message.partition(pydantics)[0] if not ours else message.replace(pydantics, ours)
    return message
