"""What a trainer gets: every output of every batch against a slow oracle, in every row mode, on CPU and GPU."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, Row, batch_outputs, problem, some_documents, write_documents

from dali_pipes import TokenLoader
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import ConfigError

ALL = tuple(name for name in OUTPUT_NAMES if name not in ("row_ids", "source_ids"))
DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "cuda", "placement": "host"},
    "device": {"device": "cuda", "placement": "device"},
    "pinned": {"device": "cuda", "placement": "pinned"},
}


def rows_of(loader: TokenLoader, epoch: int, row_ids: list[int]) -> list[Row]:
    """The pieces of rows, as the loader's own plan says; that plan has its tests in test_document_rows.py."""
    pieces = loader._schedule.interleave.plan(epoch, np.array(row_ids)).pieces
    assert pieces is not None
    columns = list(zip(*(column.tolist() for column in pieces[1:4]), strict=True))
    ends = pieces.row_offsets.tolist()
    return [columns[first:last] for first, last in itertools.pairwise(ends)]


def windows_of(tokens: list[int], starts: list[int], seq_len: int, lookahead: int, end_id: int | None) -> list[Row]:
    """The pieces of windows of the stream; `end_id` None: documents are not told apart."""
    rows: list[Row] = []
    for start in starts:
        row: Row = []
        piece = start
        for place in range(start, start + seq_len):
            if (end_id is not None and tokens[place] == end_id) or place + 1 == start + seq_len:
                end = place + 1
                while end_id is not None and tokens[end - 1] != end_id and end < len(tokens):
                    end += 1  # to the end of the document
                end = len(tokens) if end_id is None else end
                row.append((piece, place + 1 - piece, min(end, start + seq_len + lookahead)))
                piece = place + 1
        rows.append(row)
    return rows


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), documents=some_documents(2))
def test_two_epochs_of_documents_equal_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, documents: list[list[int]]
) -> None:
    draw = data.draw
    folder = tmp_path_factory.mktemp("documents")
    dtype = draw(st.sampled_from(["uint16", "int64"]))
    tokens = write_documents(folder / "corpus", documents, dtype)
    world_size = draw(st.integers(1, 2))
    seq_len = draw(st.sampled_from([1, 4, 7, 16]))
    mtp = draw(st.sampled_from([0, 0, *(ahead for ahead in (1, 3) if ahead < seq_len)]))
    options = {"pad_id": draw(st.sampled_from([0, END])), "mtp": mtp, "mask_boundaries": draw(st.booleans())}
    place = draw(st.sampled_from(sorted(DEVICES)))
    common: dict[str, Any] = {
        "corpus": str(folder / "corpus"),
        "dtype": dtype,
        "eos_id": END,
        "vocab_size": 10,
        "rows": draw(st.sampled_from(["pack", "pad"])),
        "long_documents": draw(st.sampled_from(["split", "truncate", "drop"])),
        "window_documents": draw(st.integers(1, 30)),
        "batch_size": draw(st.integers(1, 3)),
        "seq_len": seq_len,
        "drop_last": False,
        "shuffle": draw(st.booleans()),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "batches_per_run": draw(st.integers(1, 3)),
        "outputs": (*ALL, "row_ids"),
        **options,
        **DEVICES[place],
    }
    stand_in = gpu_stand_in.installed("late") if place != "cpu" else contextlib.nullcontext()
    with stand_in:
        try:
            loader = TokenLoader(**common)
        except ConfigError as error:
            assert "fewer than one step" in str(error)  # noqa: PT017
            return
        with loader:
            for epoch in range(2):
                batches = 0
                for batch in loader:
                    row_ids = batch["row_ids"].tolist()
                    expected = batch_outputs(tokens, rows_of(loader, epoch, row_ids), seq_len, **options)
                    assert problem(batch, expected) == "", (epoch, batches)
                    assert set(batch) == {*ALL, "row_ids", "num_segments"}
                    batches += 1
                assert len(loader) >= 1
                assert batches == loader._schedule.steps(0, epoch)


@pytest.mark.parametrize("place", sorted(DEVICES))
def test_labels_far_ahead_of_the_last_window(tmp_path: Path, place: str) -> None:
    """They are in the corpus, behind the tokens that windows show and their next one."""
    tokens = write_documents(tmp_path / "corpus", [list(range(1, 12))])
    with (
        gpu_stand_in.installed("late"),
        TokenLoader(
            corpus=str(tmp_path / "corpus"),
            batch_size=1,
            seq_len=4,
            shuffle=False,
            mtp=3,
            mask_boundaries=False,
            **DEVICES[place],  # type: ignore[arg-type]
        ) as loader,
    ):
        last = list(loader)[-1]
    assert last["input_ids"].tolist() == [tokens[4:8]]
    assert last["labels"].tolist() == [[[6, 7, 8], [7, 8, 9], [8, 9, 10], [9, 10, 11]]]


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), documents=some_documents(2))
def test_boundaries_of_the_stream_equal_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, documents: list[list[int]]
) -> None:
    draw = data.draw
    folder = tmp_path_factory.mktemp("stream")
    tokens = write_documents(folder / "corpus", documents)
    seq_len = draw(st.sampled_from([1, 3, 8]))
    mtp = draw(st.sampled_from([0, 0, *(ahead for ahead in (1, 2, 3) if ahead < seq_len)]))
    masked = draw(st.booleans())
    outputs = draw(st.sampled_from([ALL, ("input_ids", "labels"), ("labels", "loss_mask"), ("position_ids",)]))
    options = {"mtp": mtp, "mask_boundaries": masked}
    place = draw(st.sampled_from(sorted(DEVICES)))
    common: dict[str, Any] = {
        "corpus": str(folder / "corpus"),
        "dtype": "uint16",
        "eos_id": END,
        "batch_size": draw(st.integers(1, 3)),
        "seq_len": seq_len,
        "drop_last": False,
        "batches_per_run": draw(st.integers(1, 3)),
        "outputs": (*outputs, "row_ids"),
        **options,
        **DEVICES[place],
    }
    if len(tokens) < seq_len + 1:
        return
    with (
        gpu_stand_in.installed("late") if place != "cpu" else contextlib.nullcontext(),
        TokenLoader(**common) as loader,
    ):
        knows = loader.config.uses_documents
        for step, batch in enumerate(loader):
            starts = [loader.locate(step, row, epoch=0).position for row in range(len(batch["row_ids"]))]
            rows = windows_of(tokens, starts, seq_len, max(1, mtp), END if knows else None)
            if knows and not masked:  # labels go on into the next document, as far as tokens are read
                expected = batch_outputs(tokens, rows, seq_len, mtp=mtp, mask_boundaries=True)
                plain = windows_of(tokens, starts, seq_len, max(1, mtp), None)
                crossing = batch_outputs(tokens, plain, seq_len, mtp=mtp)
                expected |= {name: crossing[name] for name in ("labels", "loss_mask")}
            else:
                expected = batch_outputs(tokens, rows, seq_len, mtp=mtp)
            assert problem(batch, expected) == "", step


def test_an_id_that_never_occurs_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One document, as the user has it; but a wrong id looks just like that."""
    write_documents(tmp_path / "corpus", [[1, 2, 3, 4, 5, 6]])
    with TokenLoader(corpus=str(tmp_path / "corpus"), eos_id=77, rows="pack", batch_size=1, seq_len=3) as loader:
        assert len(list(loader)) == 2
        report = loader.plan_report()
        assert (report.documents, report.rows, report.fill, report.split_documents) == (1, 2, 1.0, 1)
        assert loader.length_is_known
    assert "eos_id = 77 does not occur in the corpus" in capfd.readouterr().err


def test_documents_need_an_id(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1, 2, 3, 4, 5, 6]])
    with pytest.raises(ConfigError, match="set eos_id"):
        TokenLoader(corpus=str(tmp_path / "corpus"), rows="pack", batch_size=1, seq_len=3)
    with TokenLoader(corpus=str(tmp_path / "corpus"), batch_size=1, seq_len=3) as loader, pytest.raises(ConfigError):
        loader.plan_report()
