"""Tables packed and padded before, and files of several id types, give the batches of plain documents, everywhere."""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from test_batches import DEVICES

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError

PAD, END = 9, 0
OUTPUTS = ("input_ids", "labels", "position_ids", "segment_ids", "loss_mask", "attention_mask", "row_ids")


def on(place: str) -> AbstractContextManager[Any]:
    if place == "cpu":
        return contextlib.nullcontext()
    reason = gpu_stand_in.why_not()
    return pytest.skip(reason) if reason else gpu_stand_in.installed("late")


def batches(corpus: Path, place: str, **settings: Any) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"batch_size": 2, "outputs": OUTPUTS, "drop_last": False, **DEVICES[place]}
    with on(place), TokenLoader(corpus=str(corpus), **(common | settings)) as loader:
        return [{n: v if isinstance(v, int) else v.tolist() for n, v in batch.items()} for batch in loader]


def write(path: Path, columns: dict[str, Any]) -> Path:
    types = {name: pa.list_(pa.int32()) for name in columns}
    table = pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
    pa.parquet.write_table(table, path, row_group_size=2)
    return path


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_packed_before_are_their_documents(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder, draw = tmp_path_factory.mktemp("tables"), data.draw
    token = st.tuples(st.integers(1, 8), st.integers(0, 1))
    rows = draw(st.lists(st.lists(st.lists(token, min_size=1, max_size=6), max_size=4), min_size=1, max_size=8))
    rows += [[[(1, 1), (2, 1), (3, 0)], [(4, 1)]]] * 2  # enough for a window
    how = draw(st.sampled_from(["attention_mask", "position_ids", "seq_lengths"]))
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], how: []}
    for row in rows:
        flat = [pair for document in row for pair in document]
        padding = draw(st.integers(0, 3)) if how == "attention_mask" else 0
        packed["input_ids"].append([token for token, _ in flat] + [PAD] * padding)
        packed["labels"].append([token if flag else -100 for token, flag in flat] + [-100] * padding)
        lengths = [len(document) for document in row]
        packed[how].append(
            {
                "attention_mask": [n for n, size in enumerate(lengths, 1) for _ in range(size)] + [0] * padding,
                "position_ids": [at for size in lengths for at in range(size)],
                "seq_lengths": lengths,
            }[how]
        )
    # A row without documents is one without tokens.
    documents = [document for row in rows for document in (row or [[]])]
    plain = {
        "input_ids": [[token for token, _ in document] for document in documents],
        "loss_mask": [[flag for _, flag in document] for document in documents],
    }
    one, two = write(folder / "packed.parquet", packed), write(folder / "plain.parquet", plain)
    mode = draw(st.sampled_from(["stream", "pack", "pad"]))
    seq_len = draw(st.sampled_from([1, 3, 5]))
    arguments: dict[str, Any] = {
        "rows": mode,
        "seq_len": seq_len,
        "shuffle": draw(st.booleans()),
        "mask_boundaries": draw(st.booleans()),
        "mtp": draw(st.sampled_from([0, 0, 2])) if seq_len > 2 else 0,
        "window_documents": draw(st.integers(1, 9)),
    }
    place = draw(st.sampled_from(sorted(DEVICES)))
    expected = batches(two, "cpu", **arguments)
    assert batches(one, place, **arguments) == expected
    assert batches(one, place, **arguments, loss_masks=[]) == batches(two, "cpu", **arguments, loss_masks=[])


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_files_of_several_types_are_their_ids(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder, draw = tmp_path_factory.mktemp("types"), data.draw
    types = draw(st.lists(st.sampled_from(["|u1", "<u2", ">u2", "<i4", ">i4", "<u4", "<i8"]), min_size=2, max_size=5))
    (folder / "parts").mkdir()
    ids: list[int] = []
    for number, name in enumerate(types):
        most = min(int(np.iinfo(name).max), 100_000)
        part = draw(st.lists(st.integers(0, most), min_size=6, max_size=20))
        np.save(folder / "parts" / f"s_{number}.npy", np.array(part, name))
        ids += part
    np.save(folder / "whole.npy", np.array(ids, np.int64))
    arguments: dict[str, Any] = {
        "rows": draw(st.sampled_from(["stream", "pack", "pad"])),
        "eos_id": END,
        "seq_len": draw(st.sampled_from([1, 4, 7])),
        "shuffle": draw(st.booleans()),
        "batches_per_run": draw(st.integers(1, 3)),
        "vocab_size": 100_001,
        "window_documents": 4,
    }
    place = draw(st.sampled_from(sorted(DEVICES)))
    assert batches(folder / "parts", place, **arguments) == batches(folder / "whole.npy", "cpu", **arguments)


def test_what_columns_do_is_said_at_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.parquet", {"input_ids": [[1, 2, 3, PAD]], "attention_mask": [[1, 1, 1, 0]], "x": [[1]]})
    arguments: dict[str, Any] = {"rows": "pad", "seq_len": 4, "batch_size": 1}
    batches(path, "cpu", **arguments, quiet=True)
    assert capfd.readouterr().err == ""
    batches(path, "cpu", **arguments)
    said = capfd.readouterr().err
    assert "\n  attention_mask: 1 of 4 tokens are padding" in said
    assert "\n  x: this column is not used in 1 file" in said
    batches(path, "cpu", **arguments)
    assert capfd.readouterr().err == ""  # once


def test_a_state_says_that_masks_changed(tmp_path: Path) -> None:
    """A run that was saved without looking at the labels does not go on with them in silence."""
    path = write(tmp_path / "a.parquet", {"input_ids": [[1, 2, 3, 4]] * 4, "labels": [[-100, 2, 3, 4]] * 4})
    common: dict[str, Any] = {"corpus": str(path), "batch_size": 1, "seq_len": 3, "device": "cpu"}
    with TokenLoader(**common, loss_masks=[]) as loader:
        state = loader.state_dict()
    with TokenLoader(**common) as loader, pytest.raises(StateError, match="loss mask"):
        loader.load_state_dict(state)
    with TokenLoader(**common, loss_masks=[]) as loader:
        loader.load_state_dict(state)
