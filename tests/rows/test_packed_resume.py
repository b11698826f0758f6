"""Rows of documents after a resume: at every step, twice, with other ranks and batch sizes, with every output the same.

What a row holds is compared with the run that never stopped, by epoch and number of the row, so these tests say nothing
about what is right in the first place; test_batches.py does.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from row_oracle import END, IGNORED, write_documents
from streams import loader_stream, take

from dali_pipes import TokenLoader
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import StateError

T = 16
Batch = dict[str, Any]
State = dict[str, Any]
Row = dict[str, Any]


def draw_documents() -> list[list[int]]:
    """Documents of 1 to 40 tokens, in which token 8 ends documents too, if it is asked to."""
    draw = random.Random(5)
    return [[draw.randint(1, 8) for _ in range(draw.choice([0, 2, 5, 7, 12, 20, 39]))] + [END] for _ in range(80)]


DOCUMENTS = draw_documents()


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_documents(tmp_path / "corpus", DOCUMENTS)
    return str(tmp_path / "corpus")


def load(corpus: str, **settings: Any) -> TokenLoader:
    common: dict[str, Any] = {
        "dtype": "uint16",
        "eos_id": END,
        "device": "cpu",
        "rows": "pack",
        "window_documents": 13,
        "batch_size": 4,
        "seq_len": T,
        "seed": 3,
        "drop_last": False,
        "outputs": OUTPUT_NAMES,
    }
    return TokenLoader(corpus=corpus, **{**common, **settings})


def resumed(state: State | None, corpus: str, **settings: Any) -> TokenLoader:
    loader = load(corpus, **settings)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def plain(batch: Batch) -> Batch:
    return {name: value if isinstance(value, int) else value.tolist() for name, value in batch.items()}


def whole_run(loader: TokenLoader, epochs: int) -> tuple[list[Batch], list[State]]:
    """All batches of the next epochs; the states before the first and behind each."""
    batches, states = [], [loader.state_dict()]
    for _ in range(epochs):
        for batch in loader:
            batches.append(plain(batch))
            states.append(loader.state_dict())
    return batches, states


def rows_of(batch: Batch) -> dict[int, Row]:
    """Each row with all it has by itself, by its number; what a batch says as a whole is checked on the way."""
    count = len(batch["row_ids"])
    real_bounds = batch["cu_seqlens"][: batch["num_segments"] + 1].tolist()
    assert set(batch["cu_seqlens"][batch["num_segments"] :].tolist()) == {count * T}
    sizes = [end - begin for begin, end in itertools.pairwise(real_bounds)]
    assert min(sizes) > 0
    assert batch["max_seqlen"] == max(sizes)
    rows: dict[int, Row] = {}
    for number, row_id in enumerate(batch["row_ids"].tolist()):
        bounds = [bound - number * T for bound in real_bounds if number * T <= bound <= (number + 1) * T]
        assert (bounds[0], bounds[-1]) == (0, T)
        row = {n: v[number].tolist() for n, v in batch.items() if n in OUTPUT_NAMES and not isinstance(v, int)}
        assert row_id == -1 or row_id not in rows
        rows[row_id] = {**row, "row_ids": row_id, "cu_seqlens": bounds}
    if -1 in rows:
        assert set(rows[-1]["labels"]) == {IGNORED}
        assert not any(rows.pop(-1)["attention_mask"])
    return rows


def steps_of(ranks: list[TokenLoader], count: int) -> Iterator[tuple[int, dict[int, Row]]]:
    """The next steps of all ranks: the epoch, and its rows over all ranks by their number."""
    streams = [loader_stream(loader) for loader in ranks]
    for _ in range(count):
        (epoch,) = {loader.epoch for loader in ranks}
        parts = [next(stream) for stream in streams]
        assert len({len(part["row_ids"]) for part in parts}) == 1
        rows: dict[int, Row] = {}
        for part in parts:
            own = rows_of(part)
            assert not own.keys() & rows.keys()
            rows |= own
        yield epoch, rows


def leg(
    corpus: str, state: State | None, world_size: int, count: int, **settings: Any
) -> tuple[list[tuple[int, dict[int, Row]]], State]:
    """Some steps of a run that goes on from a state; the state behind them, which all ranks agree on."""
    ranks = [resumed(state, corpus, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    steps = list(steps_of(ranks, count))
    states = [loader.state_dict() for loader in ranks]
    for loader in ranks:
        loader.close()
    assert all(other == states[0] for other in states)
    return steps, states[0]


@pytest.mark.parametrize("settings", [{"drop_last": True, "mtp": 2}, {"rows": "pad", "long_documents": "truncate"}, {}])
def test_resume_at_every_step_of_two_epochs_and_once_more(corpus: str, settings: dict[str, Any]) -> None:
    settings = {"batch_size": 8, **settings}
    with load(corpus, batches_per_run=3, **settings) as loader:
        batches, states = whole_run(loader, 2)
    assert set(batches[0]) == {*OUTPUT_NAMES, "num_segments"}
    assert len(batches) >= 14
    assert len(json.dumps(states[-1])) < 1024
    for step, state in enumerate(states[:-1]):
        again = min(step % 5 + 1, len(batches) - step)  # steps until the second resume
        with resumed(state, corpus, batches_per_run=2, **settings) as loader:
            assert loader.state_dict() == state
            assert list(map(plain, take(loader_stream(loader), again))) == batches[step : step + again], step
            second = loader.state_dict()
        assert second == states[step + again]
        with resumed(second, corpus, **settings) as loader:
            rest = batches[step + again :]
            assert list(map(plain, take(loader_stream(loader), len(rest)))) == rest, step
            assert loader.state_dict() == states[-1]


@pytest.fixture
def unbroken(corpus: str) -> list[tuple[int, dict[int, Row]]]:
    """Four epochs of one rank, 4 rows a step, step by step."""
    with load(corpus) as loader:
        return list(steps_of([loader], sum(loader._schedule.steps(0, epoch) for epoch in range(4))))


def test_one_two_four_and_one_ranks(corpus: str, unbroken: list[tuple[int, dict[int, Row]]]) -> None:
    """4 rows a step throughout: each step, over all ranks, holds what it holds in the run that never stopped."""
    at = 0
    state: State | None = None
    chain = itertools.cycle([1, 2, 4, 1])
    served = []
    for count in (3, 5, 1, 2, 4, 4, 7, 6, 3, 1):
        steps, state = leg(corpus, state, world_size := next(chain), count, batch_size=4 // world_size)
        assert steps == unbroken[at : at + count]
        at += count
        served += [(epoch, row) for epoch, rows in steps for row in rows]
    assert unbroken[at][0] == 2
    assert len(set(served)) == len(served)
    for epoch in (0, 1):
        rows = sorted(row for e, row in served if e == epoch)
        assert rows == list(range(len(rows)))
        assert len(rows) == sum(len(rows) for e, rows in unbroken if e == epoch)


def test_other_batch_sizes_and_block_sizes(corpus: str, unbroken: list[tuple[int, dict[int, Row]]]) -> None:
    """The rows follow each other without a seam, whatever the steps that they come in."""
    expected: dict[int, dict[int, Row]] = {epoch: {} for epoch in range(4)}
    for epoch, rows in unbroken:
        expected[epoch] |= rows
    state: State | None = None
    served: list[tuple[int, int]] = []
    for world_size, batch_size, count, how in [
        (1, 3, 4, {"batches_per_run": 3}),
        (3, 1, 3, {"batches_per_run": 5, "num_threads": 1}),
        (2, 5, 2, {"prefetch_queue_depth": 5}),
        (1, 1, 7, {"batches_per_run": 2}),
        (3, 3, 5, {"num_threads": 4}),
        (1, 100, 1, {}),
        (2, 2, 1, {}),
    ]:
        steps, state = leg(corpus, state, world_size, count, batch_size=batch_size, **how)
        for epoch, rows in steps:
            assert rows == {row: expected[epoch][row] for row in rows}
            served += [(epoch, row) for row in sorted(rows)]
    every = [(epoch, row) for epoch in range(4) for row in range(len(expected[epoch]))]
    assert served == every[: len(served)]
    assert served[-1][0] > 0


def test_a_state_does_not_depend_on_the_epochs_looked_at(corpus: str) -> None:
    """What a loader knows of this epoch's plan may be given up for another's; its states stay what they are."""
    with load(corpus) as loader:
        _, states = whole_run(loader, 1)
    with load(corpus) as loader:
        for state, _ in zip(states[1:], loader, strict=False):
            assert [loader.locate(0, 0, epoch=epoch).row_id for epoch in (5, 6, 7)] == [0, 0, 0]
            assert loader.state_dict() == state


def test_one_loader_goes_back_and_forth(corpus: str) -> None:
    """States loaded into a loader that is reading ahead, of earlier and of later windows."""
    with load(corpus) as loader:
        batches, states = whole_run(loader, 2)
        for step in (3, 20, 9, 0, 14, 1, 25, 12):
            loader.load_state_dict(states[step])
            assert loader.state_dict() == states[step]
            assert list(map(plain, take(loader_stream(loader), 6))) == batches[step : step + 6], step


@pytest.mark.parametrize("window", [[0, 0], [1, 0], [99, 0], [2, 10**6], [-1, 0], [0], None, "12"])
def test_a_damaged_window_is_refused_and_changes_nothing(corpus: str, window: Any) -> None:
    with load(corpus) as loader:
        batches, states = whole_run(loader, 1)
    with load(corpus) as loader:
        with pytest.raises(StateError, match="window"):
            loader.load_state_dict({**states[6], "window": window})
        assert list(map(plain, loader)) == batches


def test_a_wrong_place_that_may_well_be_one_is_refused(corpus: str) -> None:
    """Any other epoch, row, window or number of rows before it, each of which a state could have."""
    with load(corpus) as loader:
        batches, states = whole_run(loader, 2)
    middle = states[6]
    assert middle["window"][0] > 0
    changes = [(name, state[name]) for state in states for name in ("epoch", "rows", "window")]
    changes += [("window", [middle["window"][0], before]) for before in range(middle["rows"] + 1)]
    wrong = [{**middle, name: value} for name, value in changes if value != middle[name]]
    wrong += [{**middle, "check": check} for check in ("00000000", "", None, 7)]
    assert len(wrong) > 60
    with load(corpus) as loader:
        for state in wrong:
            with pytest.raises(StateError) as caught:
                loader.load_state_dict(state)
            message = str(caught.value)
            assert "check value" in message
            place = f"epoch {state['epoch']}, rows {state['rows']}, window {state['window']}"
            assert place in message
            assert repr(state["check"]) in message
        assert list(map(plain, loader)) == batches[: states.index(next(s for s in states if s["epoch"] == 1))]


def test_a_check_value_knows_the_settings(corpus: str) -> None:
    """A state whose settings were edited to fit another loader names a window of another plan."""
    with load(corpus) as loader:
        state = whole_run(loader, 1)[1][6]
    for name, value in (("seed", 4), ("window_documents", 14), ("long_documents", "truncate")):
        edited = {**state, "config": {**state["config"], name: value}}
        with load(corpus, **{name: value}) as loader, pytest.raises(StateError, match="check value"):
            loader.load_state_dict(edited)


def test_states_without_a_check_value_load(corpus: str) -> None:
    """As the first release with rows of documents wrote them; its settings that were None may be missing too."""
    with load(corpus) as loader:
        batches, states = whole_run(loader, 1)
    for step in (0, 6, len(states) - 2):
        old = {name: value for name, value in states[step].items() if name != "check"}
        with resumed(old, corpus) as loader:
            assert loader.state_dict() == states[step]
            assert list(map(plain, loader)) == batches[step:]
    del states[6]["config"]["document_start_id"]
    with resumed(states[6], corpus) as loader:
        assert list(map(plain, loader)) == batches[6:]


SAMPLES = 512
PER_ROW = 3.7


class ManyDocuments:
    """About 512 rows of about 3.7 documents; every token but the last of a document is the document's number."""

    def __init__(self, folder: Path) -> None:
        draw = random.Random(11)
        self.count = int(SAMPLES * PER_ROW)
        sizes = [draw.randint(2, 6) for _ in range(self.count)]
        numbers = itertools.count(END + 1)
        self.tokens = write_documents(folder / "many", [[next(numbers)] * (size - 1) + [END] for size in sizes])
        self.settings: dict[str, Any] = {"corpus": str(folder / "many"), "window_documents": 300}
        self.numbers = range(END + 1, END + 1 + self.count)


def numbers_in(rows: dict[int, Row]) -> list[int]:
    """The documents that some rows hold."""
    return [n for row in rows.values() for n, _ in itertools.groupby(row["input_ids"]) if n > END]


@pytest.fixture
def many(tmp_path: Path) -> ManyDocuments:
    return ManyDocuments(tmp_path)


def test_documents_are_not_counted_as_rows(many: ManyDocuments) -> None:
    """2 ranks, 32 rows a step, saved at step 10; on with other ranks, batch sizes and threads, and once more."""
    with load(**many.settings, batch_size=32) as loader:
        unbroken = list(steps_of([loader], loader._schedule.steps()))
    count = sum(len(rows) for _, rows in unbroken)
    assert 3.5 < many.count / count < 3.9
    before, saved = leg(state=None, world_size=2, count=10, batch_size=16, **many.settings)
    assert before == unbroken[:10]
    assert (saved["epoch"], saved["rows"]) == (0, 320)
    done = [n for _, rows in before for n in numbers_in(rows)]
    for world_size, batch_size, threads in [(1, 32, 1), (2, 16, 8), (4, 8, 2), (3, 11, 2), (2, 24, 1)]:
        how = {"world_size": world_size, "batch_size": batch_size, "num_threads": threads, **many.settings}
        size = world_size * batch_size
        first, second = leg(state=saved, count=2, **how)
        assert (second["epoch"], second["rows"]) == (0, 320 + 2 * size)
        rest, end = leg(state=second, count=-(-(count - 320 - 2 * size) // size), **how)
        steps = first + rest
        for number, (_, rows) in enumerate(steps):
            assert sorted(rows) == list(range(320 + number * size, min(320 + (number + 1) * size, count)))
        if size == 32:
            assert steps == unbroken[10:]
        assert sorted(done + [n for _, rows in steps for n in numbers_in(rows)]) == list(many.numbers)
        assert (end["epoch"], end["rows"]) == (1, 0)


def test_ranks_that_share_data_get_identical_batches(many: ManyDocuments) -> None:
    """Two processes of one data rank are given the same rank, and see the same."""
    state = leg(state=None, world_size=2, count=10, batch_size=16, **many.settings)[1]
    seen = []
    for threads, per_run in ((1, 1), (4, 7)):
        how = {"rank": 1, "world_size": 2, "num_threads": threads, "batches_per_run": per_run, **many.settings}
        with resumed(state, batch_size=16, **how) as loader:
            seen.append([plain(batch) for batch in take(loader_stream(loader), 12)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("documents", [200, 201, 203, 206])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_rank_makes_the_same_number_of_steps(tmp_path: Path, documents: int, drop_last: bool) -> None:
    """Documents of 100 and of 10 tokens in turn, rows of 128, 2 ranks; also after a resume."""
    write_documents(tmp_path / "uneven", [[n % 8 + 1] * (9 if n % 2 else 99) + [END] for n in range(documents)])
    how: dict[str, Any] = {"seq_len": 128, "batch_size": 3, "window_documents": 50, "drop_last": drop_last}
    ranks = [load(str(tmp_path / "uneven"), **how, rank=rank, world_size=2) for rank in range(2)]
    reports = [loader.plan_report() for loader in ranks]
    assert reports[0] == reports[1]
    rows = reports[0].rows
    steps = rows // 6 if drop_last else -(-rows // 6)
    assert [(len(loader), loader.length_is_known) for loader in ranks] == [(steps, True)] * 2
    assert [len(list(loader)) for loader in ranks] == [steps] * 2
    states = [loader.state_dict() for loader in ranks]
    assert states[0] == states[1]
    rest = [len(list(loader)) for loader in ranks]
    assert rest[0] == rest[1]
    for rank, loader in enumerate(ranks):
        loader.close()
        with resumed(states[0], str(tmp_path / "uneven"), **how, rank=rank, world_size=2) as other:
            assert len(list(other)) == rest[0]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("long_documents", "split", "truncate"),
        ("long_documents", "drop", "split"),
        ("window_documents", 13, 14),
        ("rows", "pack", "pad"),
        ("rows", "pack", "stream"),
        ("rows", "stream", "pack"),
        ("eos_id", END, 8),
    ],
)
def test_a_state_of_other_rows_is_refused(corpus: str, name: str, old: Any, new: Any) -> None:
    with load(corpus, **{name: old}) as loader:
        take(loader, 2)
        state = loader.state_dict()
    with load(corpus, **{name: new}) as loader:
        with pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        message = str(caught.value)
        windows = "stream" in (old, new)  # whose states say nothing of documents
        assert (f"{name}: saved " if windows else f"{name}: saved {old!r}, now {new!r}") in message
        others = {"long_documents", "window_documents", "rows", "eos_id"} - {name}
        assert name == "rows" or not [other for other in others if f"{other}: saved" in message]
        refused = [plain(batch) for batch in take(loader, 3)]
    with load(corpus, **{name: new}) as loader:
        assert refused == [plain(batch) for batch in take(loader, 3)]
