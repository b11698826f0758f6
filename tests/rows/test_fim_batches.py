"""Fill in the middle in batches: every piece equals the oracle's, on any rank, after any resume, and back again."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import fim_oracle
import numpy as np
import pytest
from fim_oracle import MIDDLE, PREFIX, SUFFIX, TOKENS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from streams import check_every_resume

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError, StateError

END, T = 9, 16
SENTINELS = {PREFIX, MIDDLE, SUFFIX}
Ids = tuple[int, ...]


def write(folder: Path, documents: list[list[int]], learn: list[int] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    tokens = [token for document in documents for token in document]
    np.array(tokens, np.uint16).tofile(folder / "tokens.bin")
    if learn is not None:
        (folder / "tokens.bin.loss").write_bytes(bytes(learn))
    return str(folder)


def load(corpus: str | None, fim: dict[str, Any] | None = None, **changes: Any) -> TokenLoader:
    common: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "device": "cpu", "rows": "pack", "quiet": True}
    common |= {"batch_size": 3, "seq_len": T, "drop_last": False, "window_documents": 13, "seed": 5}
    common |= {"outputs": ("input_ids", "labels", "segment_ids", "attention_mask", "row_ids")}
    objective = [{"kind": "fim", "tokens": TOKENS, **(fim or {})}]
    return TokenLoader(**{**common, "corpus": corpus, "objective": objective, **changes})


def pieces_in(batch: Any) -> list[Ids]:
    """The pieces of all rows, row after row."""
    found = []
    for ids, numbers, mask in zip(batch["input_ids"], batch["segment_ids"], batch["attention_mask"], strict=True):
        used = ids[mask.bool()].tolist()
        found += [
            tuple(token for token, _ in group)
            for _, group in itertools.groupby(zip(used, numbers.tolist(), strict=False), key=lambda pair: pair[1])
        ]
    return found


def some_documents(count: int, most: int = 40) -> list[list[int]]:
    """Lengths of 1 to `most`, every token but the end another one."""
    draw, number = random.Random(count), itertools.count(10)
    lengths = [draw.choice([0, 1, 2, 3, 4, 9, 12, 13, 14, 15, 16, most - 1]) for _ in range(count)]
    return [[*(next(number) % 990 + 10 for _ in range(length)), END] for length in lengths]


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_piece_equals_megatrons_rule(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    document = st.lists(st.integers(10, 40), max_size=draw(st.sampled_from([3, 20, 60])))
    is_ended = draw(st.booleans())
    documents = draw(st.lists(document.filter(len) if not is_ended else document, min_size=1, max_size=25))
    if is_ended:
        documents = [[*ids, END] for ids in documents]
        delimiter: dict[str, Any] = {"eos_id": END}
    else:
        documents = [[END, *ids] for ids in documents]
        delimiter = {"eos_id": None, "document_start_id": END}
    rows, seq_len = draw(st.sampled_from(["pack", "pad"])), draw(st.sampled_from([8, 9, 16, 31]))
    fim: dict[str, Any] = {
        "level": draw(st.sampled_from(["piece", "document"])),
        "rate": draw(st.sampled_from([0, 0.5, 1])),
    }
    fim["spm"] = draw(st.sampled_from([0, 0.25, 1]))
    how: dict[str, Any] = {
        "long_documents": draw(st.sampled_from(["split", "truncate", "drop"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    corpus = write(tmp_path_factory.mktemp("corpus"), documents)
    shuffle = draw(st.booleans())
    try:
        loader = load(corpus, fim, rows=rows, seq_len=seq_len, shuffle=shuffle, **delimiter, **how)
    except ConfigError:
        assert how["long_documents"] == "drop"
        assert all(len(ids) > seq_len for ids in documents)
        return
    with loader:
        for epoch in range(2):
            expected = fim_oracle.pieces_of(
                documents, seq_len, pass_number=epoch, starts=not is_ended, ends=is_ended, **fim, **how
            )
            report = loader.plan_report()
            found = [piece for batch in loader for piece in pieces_in(batch)]
            assert Counter(found) == Counter(expected)
            assert report.epoch == epoch
            assert report.tokens - report.dropped_tokens == sum(map(len, expected))
            if how["long_documents"] == "split" and fim["level"] == "piece":
                back = [fim_oracle.undone(piece, END if is_ended else None) for piece in expected]
                assert Counter(itertools.chain(*back)) == Counter(itertools.chain(*documents))


def test_all_documents_come_back(tmp_path: Path) -> None:
    """Of documents that no row is too short for: each is there once a pass, whatever was cut where."""
    documents = some_documents(300)
    corpus = write(tmp_path, documents)
    with load(corpus, {"rate": 0.8}, seq_len=64) as loader:
        cut_in = []
        for _ in range(3):
            pieces = [piece for batch in loader for piece in pieces_in(batch)]
            back = Counter(tuple(fim_oracle.undone(piece, END)) for piece in pieces)
            assert back == Counter(map(tuple, documents))
            cut_in.append({piece for piece in pieces if PREFIX in piece})
    for one, other in itertools.combinations(cut_in, 2):
        assert len(one & other) < 0.2 * len(one)


@pytest.mark.parametrize(("level", "rows"), [("piece", "pack"), ("document", "pad")])
def test_it_is_the_same_on_any_ranks_and_threads(tmp_path: Path, level: str, rows: str) -> None:
    corpus = write(tmp_path, some_documents(80))
    whole: dict[tuple[int, int], list[int]] = {}
    for world_size, how in ((1, {}), (3, {"batches_per_run": 3, "num_threads": 3}), (2, {"batch_size": 5})):
        seen: dict[tuple[int, int], list[int]] = {}
        for rank in range(world_size):
            with load(corpus, {"level": level}, rows=rows, rank=rank, world_size=world_size, **how) as loader:
                for epoch in range(2):
                    for batch in loader:
                        for row, ids in zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True):
                            if row >= 0:
                                seen[epoch, row] = ids
        whole = whole or seen
        assert seen == whole


def test_a_run_goes_on_at_every_step(tmp_path: Path) -> None:
    corpus = write(tmp_path, some_documents(30))
    fim = {"level": "document", "rate": 0.7}
    check_every_resume(lambda: load(corpus, fim), epochs=2)


@pytest.mark.parametrize(
    "change", [{"rate": 0.6}, {"spm": 0.1}, {"level": "document"}, {"tokens": {**TOKENS, "middle": 7}}]
)
def test_a_state_of_other_settings_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    corpus = write(tmp_path, some_documents(60))
    with load(corpus) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with load(corpus, change) as loader, pytest.raises(StateError, match="objective"):
        loader.load_state_dict(state)
    with load(corpus, objective=[]) as loader, pytest.raises(StateError, match=r"objective|order"):
        loader.load_state_dict(state)


def test_loss_masks_move_with_their_tokens(tmp_path: Path) -> None:
    """A token is a label where it is learned, wherever it was moved; sentinels are learned."""
    documents = some_documents(100, most=20)
    tokens = list(itertools.chain(*documents))
    learn = [token % 3 != 0 for token in tokens]
    corpus = write(tmp_path, documents, [int(bit) for bit in learn])
    with load(corpus, {"rate": 0.9}, seq_len=32, mtp=2) as loader:
        moved = 0
        for batch in loader:
            for ids, labels, numbers in zip(
                batch["input_ids"].tolist(), batch["labels"].tolist(), batch["segment_ids"].tolist(), strict=True
            ):
                for at, ahead in itertools.product(range(len(ids)), (1, 2)):
                    to = at + ahead
                    inside = to < len(ids) and numbers[at] == numbers[to] != 0
                    is_label = inside and (ids[to] in SENTINELS or ids[to] % 3 != 0)
                    assert labels[at][ahead - 1] == (ids[to] if is_label else -100)
                moved += PREFIX in ids
        assert moved > 10


def test_shares_of_context_parallel_ranks(tmp_path: Path) -> None:
    corpus = write(tmp_path, some_documents(50))
    with (
        load(corpus) as whole,
        load(corpus, context_parallel=(0, 2)) as left,
        load(corpus, context_parallel=(1, 2)) as right,
    ):
        for batch, *parts in zip(whole, left, right, strict=True):
            for name in ("input_ids", "labels"):
                assert np.concatenate([part[name] for part in parts], 1).tolist() == batch[name].tolist()


def test_sources_of_a_mixture(tmp_path: Path) -> None:
    """Each has its own: one with, one without, and one that is a stream of tokens."""
    folders = {name: write(tmp_path / name, some_documents(60 + number)) for number, name in enumerate("abc")}
    mixture: dict[str, Any] = {name: {"corpus": path, "weight": 1} for name, path in folders.items()}
    mixture["a"]["objective"] = [{"kind": "fim", "tokens": TOKENS, "rate": 1}]
    mixture["c"] |= {"rows": "stream"}
    outputs = ("input_ids", "segment_ids", "attention_mask", "source_ids", "row_ids")
    with load(None, mixture=mixture, objective=[], total_rows=90, outputs=outputs) as loader:
        found: dict[int, list[Ids]] = {0: [], 1: [], 2: []}
        for batch in loader:
            for source in range(3):
                of_source = {name: values[batch["source_ids"] == source] for name, values in batch.items()}
                found[source] += pieces_in(of_source)
    assert all(found.values())
    how: dict[str, Any] = {"level": "piece", "long_documents": "split", "rate": 1, "spm": 0.5, "seed": 5, "name": "a"}
    passes = [set(fim_oracle.pieces_of(some_documents(60), T, pass_number=number, **how)) for number in range(4)]
    assert set(found[0]) <= set.union(*passes)
    assert any(PREFIX in piece for piece in found[0])
    assert not any(SENTINELS & set(piece) for source in (1, 2) for piece in found[source])
    untouched = {tuple(ids) for ids in some_documents(61)}
    assert set(filter(lambda piece: len(piece) < T - 1, found[1])) & untouched


def test_goldfish_in_another_source(tmp_path: Path) -> None:
    """Its pieces are read with the tokens before them, also beside rearranged ones."""
    goldfish = {"kind": "goldfish", "k": 2, "h": 4}
    rows_of = []
    for total, objective in ((240, []), (80, [{"kind": "fim", "tokens": TOKENS, "rate": 1}])):
        mixture: dict[str, Any] = {
            name: {"corpus": write(tmp_path / name, some_documents(60 + number)), "weight": 1}
            for number, name in enumerate("ab")
        }
        mixture["a"]["objective"], mixture["b"]["objective"] = objective, [goldfish]
        outputs = ("input_ids", "labels", "source_ids")
        with load(None, mixture=mixture, objective=[], total_rows=total, outputs=outputs) as loader:
            rows = [
                (*row["input_ids"], *row["labels"])
                for batch in loader
                for row in (
                    {name: batch[name][at].tolist() for name in ("input_ids", "labels")}
                    for at in np.flatnonzero(batch["source_ids"] == 1)
                )
            ]
        rows_of.append(rows)
    assert len(rows_of[1]) > 30
    assert set(rows_of[1]) < set(rows_of[0])
    assert any(row[T : 2 * T].count(-100) > 5 for row in rows_of[0])


def test_other_objectives_come_after(tmp_path: Path) -> None:
    """Inputs are dropped from rows that are rearranged, and labels stay."""
    corpus = write(tmp_path, some_documents(60))
    drop = {"kind": "drop", "rate": 0.3, "drop_id": 5, "special_ids": sorted(SENTINELS)}
    with load(corpus) as plain, load(corpus, objective=[drop, {"kind": "fim", "tokens": TOKENS}]) as loader:
        dropped = 0
        for batch, expected in zip(loader, plain, strict=True):
            assert batch["labels"].tolist() == expected["labels"].tolist()
            changed = batch["input_ids"] != expected["input_ids"]
            assert (batch["input_ids"][changed] == 5).all()
            assert not np.isin(expected["input_ids"][changed], list(SENTINELS)).any()
            dropped += int(changed.sum())
        assert dropped > 50


def test_validation_is_as_it_is(tmp_path: Path) -> None:
    corpus = write(tmp_path, some_documents(80))
    held_out: dict[str, Any] = {"split": "validation", "validation_fraction": 0.3}
    asked = [{"kind": "fim", "tokens": TOKENS, "rate": 1, "validation": True}]
    with load(corpus, {"rate": 1}, **held_out) as loader, load(corpus, objective=[], **held_out) as plain:
        for batch, expected in zip(loader, plain, strict=True):
            assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
    with load(corpus, objective=asked, **held_out) as loader:
        assert any(PREFIX in piece for batch in loader for piece in pieces_in(batch))


def test_sentinels_in_the_data_stay(tmp_path: Path) -> None:
    documents = [[PREFIX, 20, 21, MIDDLE, END], [30, SUFFIX, 31, 32, 33, END]]
    with load(write(tmp_path, documents), {"rate": 1}, long_documents="drop") as loader:
        pieces = [piece for batch in loader for piece in pieces_in(batch)]
    counts = Counter(itertools.chain(*pieces))
    assert counts == Counter(itertools.chain(*documents, SENTINELS, SENTINELS))


def test_an_index_says_whether_documents_end_with_an_id(tmp_path: Path) -> None:
    """Parquet rows: with end ids these stay last; without, the last token moves as any other."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for number, ends in enumerate((True, False)):
        documents = [[*range(20 + at, 29 + at), *[END] * ends] for at in range(40)]
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"input_ids": pa.array(documents, pa.list_(pa.uint16()))}), path)
        with load(str(path), {"rate": 1}, dtype=None) as loader:
            pieces = [piece for batch in loader for piece in pieces_in(batch)]
        how: dict[str, Any] = {"level": "piece", "long_documents": "split", "rate": 1, "spm": 0.5, "seed": 5}
        assert Counter(pieces) == Counter(fim_oracle.pieces_of(documents, T, ends=ends, **how))
        assert all(piece[-1] == END for piece in pieces) == ends
