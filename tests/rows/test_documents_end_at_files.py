"""`documents_end_at_files`: a document without its id ends where its file does, as if an index said so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import write_megatron
from document_oracle import offsets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import StateError

E = 9
ID = {"end": "eos_id", "start": "document_start_id"}
EXACT: dict[str, Any] = {"device": "cpu", "quiet": True, "dtype": "uint16", "drop_last": False, "batch_size": 2}


def load(corpus: Path, **changes: Any) -> TokenLoader:
    return TokenLoader(LoaderConfig(corpus=str(corpus), seq_len=4, outputs=OUTPUT_NAMES, **EXACT | changes))


def batches(loader: TokenLoader) -> list[dict[str, Any]]:
    with loader:
        return [
            {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.items()}
            for batch in loader
        ]


def write_flat(folder: Path, files: list[list[int]]) -> Path:
    folder.mkdir()
    for number, ids in enumerate(files):
        np.array(ids, np.uint16).tofile(folder / f"{number}.bin")
    return folder


@settings(max_examples=examples(8))
@given(
    files=st.lists(st.lists(st.sampled_from([1, 2, 3, E]), max_size=9), min_size=2, max_size=5).filter(
        lambda files: sum(map(len, files)) > 12
    ),
    kind=st.sampled_from(list(ID)),
    rows=st.sampled_from(["stream", "pack", "pad"]),
    long_documents=st.sampled_from(["split", "truncate", "drop"]),
    mtp=st.sampled_from([0, 2]),
    fraction=st.sampled_from([0.0, 0.3]),
)
def test_the_same_batches_as_of_an_index(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    kind: str,
    rows: str,
    long_documents: str,
    mtp: int,
    fraction: float,
) -> None:
    folder = tmp_path_factory.mktemp("ends")
    ids = [token for file in files for token in file]
    ends = np.cumsum([len(file) for file in files]).tolist()
    offsets = offsets_of(ids, kind, E, ends)
    indexed = write_megatron(folder / "indexed", [np.array(part, np.uint16) for part in np.split(ids, offsets[1:-1])])
    how: dict[str, Any] = {"rows": rows, "mtp": mtp, "mask_boundaries": True, "validation_fraction": fraction}
    if rows != "stream":
        how["long_documents"] = long_documents
    own = {ID[kind]: E, "documents_end_at_files": True}

    def found(corpus: Path, **settings: Any) -> Any:
        try:
            return batches(load(corpus, **how, **settings))
        except ValueError as error:  # too few rows or documents for a split
            return str(error).partition(":")[2]

    assert found(write_flat(folder / "flat", files), **own) == found(indexed)


@pytest.mark.parametrize("rows", ["pack", "pad"])
def test_a_state_is_compared_on_it_and_leaves_out_the_default(tmp_path: Path, rows: str) -> None:
    corpus = write_flat(tmp_path / "flat", [[1, 2, E, 3, 1, 2], [2, E, 1, 3, E, 2]])
    with (
        load(corpus, rows=rows, eos_id=E) as usual,
        load(corpus, rows=rows, eos_id=E, documents_end_at_files=True) as cut,
    ):
        states = {False: usual.state_dict(), True: cut.state_dict()}
    assert "documents_end_at_files" not in states[False]["config"]
    assert states[True]["config"]["documents_end_at_files"] is True
    for is_cut, state in states.items():
        with load(corpus, rows=rows, eos_id=E, documents_end_at_files=is_cut) as same:
            same.load_state_dict(state)
        with load(corpus, rows=rows, eos_id=E, documents_end_at_files=not is_cut) as other:
            what = f"documents_end_at_files: saved {is_cut}, now {not is_cut}"
            with pytest.raises(StateError, match=what):
                other.load_state_dict(state)


def test_rows_of_the_stream_do_not_depend_on_it(tmp_path: Path) -> None:
    corpus = write_flat(tmp_path / "flat", [[1, 2, E, 3, 1, 2], [2, E, 1, 3, E, 2]])
    with load(corpus, eos_id=E) as usual, load(corpus, eos_id=E, documents_end_at_files=True) as cut:
        cut.load_state_dict(usual.state_dict())
        assert cut.state_dict() == usual.state_dict()
