"""A state with anything at all in any of its places is the state it says, or a `StateError`; no other exception."""

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError

State = dict[str, Any]
Path = tuple[str, ...]
END = 9
MODES: dict[str, dict[str, Any]] = {
    "stream": {},
    "pack": {"rows": "pack", "eos_id": END, "window_documents": 7},
    "buckets": {"rows": "pad", "eos_id": END, "window_documents": 11, "length_buckets": [4, 8]},
}


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TokenLoader]]:
    """By mode. The corpus has a loss mask, so that its state has every entry there may be."""
    folder = tmp_path_factory.mktemp("damaged")
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(1, END, 900).astype(np.uint16)
    tokens[drawn.random(900) < 0.15] = END
    tokens.tofile(folder / "x.bin")
    np.ones(900, np.uint8).tofile(folder / "x.bin.loss")
    common: dict[str, Any] = {"corpus": str(folder / "*.bin"), "dtype": "uint16", "device": "cpu", "quiet": True}
    common |= {"seq_len": 16, "batch_size": 3, "num_threads": 1, "outputs": ("row_ids",), "rank": 0, "world_size": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "nvidia.dali", None)
        opened = {name: TokenLoader(**common, **how) for name, how in MODES.items()}
        for loader in opened.values():
            next(iter(loader))
        yield opened
        for loader in opened.values():
            loader.close()


def places(state: State, path: Path = ()) -> Iterator[Path]:
    for name, value in state.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


nested: list[Any] = []
for _ in range(5000):
    nested = [nested]

whole = st.integers(-3, 40) | st.sampled_from([10**30, 2**63 - 1, 2**63])
plain = st.none() | st.booleans() | whole | st.floats() | st.text(max_size=4) | st.binary(max_size=2)
tables = st.dictionaries(st.text(max_size=2) | st.integers(), plain, max_size=2)
json_like = plain | tables | st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
ODD: list[Any] = [
    np.int64(3),
    np.float32("nan"),
    np.bool_(True),
    np.str_("a"),
    np.datetime64("2020-01-01"),
    np.array(3),
    np.array([]),
    np.array([[1, 2], [3, 4]]),
    np.array([None, "a"], object),
    np.array([torch.tensor([1, 2]), 8], object),
    np.array([(1, 2.0)], "i4,f4"),
    np.zeros(10**6, np.uint8),
    torch.tensor(3),
    torch.tensor([1, 2]),
    torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
    torch.tensor([4], device="meta"),
    torch.eye(2).to_sparse(),
    [torch.tensor([4, 8]), np.array([16])],
    [np.array([1, 2]), 8, 16],
    (1, 2),
    nested,
    10**5000,
    -(10**5000),
]


def drawn_value(data: st.DataObject) -> Any:
    number = data.draw(st.integers(0, 2 * len(ODD)))  # by number, since not all of them can be shown
    return ODD[number] if number < len(ODD) else data.draw(json_like)


def as_other_types(value: Any) -> list[Any]:
    """The same value, as a checkpoint library may hand it back."""
    if isinstance(value, list):
        return [
            tuple(value),
            np.array(value),
            torch.tensor(value),
            [*map(np.int64, value)],
            [*map(torch.tensor, value)],
        ]
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 2**63:
        return [np.array(value), torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)]
    return [np.array(value)] if isinstance(value, bool | str) else [value]


def put(state: State, path: Path, value: Any) -> None:
    for name in path[:-1]:
        state = state.get(name, {}) if isinstance(state, dict) else {}
    if isinstance(state, dict):
        state[path[-1]] = value


def drop(state: State, path: Path) -> None:
    for name in path[:-1]:
        state = state.get(name, {}) if isinstance(state, dict) else {}
    if isinstance(state, dict):
        state.pop(path[-1], None)


@settings(max_examples=examples(50), phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data(), mode=st.sampled_from(sorted(MODES)), on_change=st.sampled_from(["refuse", "nearest"]))
def test_anything_anywhere(loaders: dict[str, TokenLoader], data: st.DataObject, mode: str, on_change: Any) -> None:
    loader = loaders[mode]
    good = loader.state_dict()
    everywhere = [*places(good), ("config", "length_buckets"), ("config", "rows")]
    state: Any = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(everywhere))
        if data.draw(st.integers(0, 4)):
            put(state, path, drawn_value(data))
        else:
            drop(state, path)
    if not data.draw(st.integers(0, 20)):
        state = drawn_value(data)
    refusal: str | None = None
    try:
        loader.load_state_dict(state, on_change)
    except StateError as error:
        refusal = str(error)
    if refusal is not None:
        assert len(refusal) < 3000
        assert loader.state_dict() == good
        return
    now = loader.state_dict()
    assert {name: now[name] for name in ("config", "corpus", "order", "version")} == {
        name: good[name] for name in ("config", "corpus", "order", "version")
    }
    assert json.loads(json.dumps(now)) == now
    assert next(iter(loader))["row_ids"][0] == now["rows"]
    loader.load_state_dict(good)


@pytest.mark.parametrize("mode", MODES)
def test_a_state_in_other_types_is_the_same(loaders: dict[str, TokenLoader], mode: str) -> None:
    loader = loaders[mode]
    good = loader.state_dict()
    for path in places(good):
        value: Any = good
        for name in path:
            value = value[name]
        for other in as_other_types(value):
            state = copy.deepcopy(good)
            put(state, path, other)
            loader.load_state_dict(state)
            assert loader.state_dict() == good
            assert loader.state_change is None


def test_a_stream_and_documents_are_named(loaders: dict[str, TokenLoader]) -> None:
    """The state of a stream does not say "rows", nor what only documents have."""
    for saved, now, line in (("stream", "pack", "'stream', now 'pack'"), ("pack", "stream", "'pack', now 'stream'")):
        with pytest.raises(StateError) as caught:
            loaders[now].load_state_dict(loaders[saved].state_dict())
        lines = [text.strip() for text in str(caught.value).splitlines() if "saved" in text and "now" in text]
        assert lines == [f"rows: saved {line}"]
