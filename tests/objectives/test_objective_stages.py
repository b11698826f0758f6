"""Lists of rates: each row has what holds at its tokens of the run, as in a run that has only that from the start."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import check_every_resume

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.rates import value_at
from dali_pipes.errors import ConfigError, StateError

VOCABULARY, END, MASK, T = 1100, 0, 7, 12
DOCUMENTS, WINDOW = 120, 16
SHAPE: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "batch_size": 4, "seq_len": T, "quiet": True}
SHAPE |= {"vocab_size": VOCABULARY, "device": "cpu", "window_documents": WINDOW}
FIM = {"kind": "fim", "tokens": {"prefix": 1001, "middle": 1002, "suffix": 1003}}
BASE = ("input_ids", "labels", "row_ids")
OF_SPANS = {"sentinels": 1099, "num_sentinels": 12}
Entry = Callable[[Any, Any], dict[str, Any]]
KINDS: dict[str, tuple[Entry, Any, Any, tuple[str, ...]]] = {
    "mlm": (lambda at, to: {"kind": "mlm", "mask_id": MASK, "rate": _list(0.2, at, to)}, 0.2, 0.7, ()),
    "drop": (lambda at, to: {"kind": "drop", "drop_id": MASK, "rate": _list(0, at, to)}, 0, 0.5, ()),
    "diffusion": (
        lambda at, to: {"kind": "diffusion", "mask_id": MASK, "min_rate": _list(0.1, at, to)},
        0.1,
        0.9,
        ("noisy_ids", "masked", "p_mask"),
    ),
    "prefix": (lambda at, to: {"kind": "prefix", "longest": _list(0, at, to)}, 0, "1/3", ("prefix_lengths",)),
    "spans": (
        lambda at, to: {
            "kind": "spans",
            **OF_SPANS,
            "denoisers": [{"weight": _list(1, at, to)}, {"rate": 0.5, "weight": 1}],
        },
        1,
        20,
        ("encoder_ids", "decoder_labels"),
    ),
}
"""Of each kind: an entry whose setting changes at a number of tokens, its first and later value, and more outputs."""


def _list(first: Any, at: int | None, later: Any) -> Any:
    """at: None for the later value from the start on."""
    return later if at is None else [[0, first], [at, later]]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(3)
    lengths = random.choice([0, 1, 2, 8, 11], DOCUMENTS)
    path = tmp_path / "corpus.bin"
    np.concatenate([np.append(random.integers(8, 1000, size), END) for size in lengths]).astype(np.uint16).tofile(path)
    return path


def fields_by_row(loaders: Sequence[TokenLoader], epochs: int) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for loader in loaders:
        with loader:
            for epoch, batch in itertools.chain.from_iterable(zip(itertools.repeat(e), loader) for e in range(epochs)):
                for row, place in enumerate(batch["row_ids"].tolist()):
                    found[epoch, place] = {name: value[row].tolist() for name, value in batch.items()}
    return found


def settings_of(kind: str, at: int | None, *, later: bool = True, **others: Any) -> dict[str, Any]:
    entry, first, last, outputs = KINDS[kind]
    return {**SHAPE, "outputs": (*BASE, *outputs), "objective": [entry(at, last if later else first)], **others}


def check_stages(
    corpus: Any, kind: str, at: int, tokens_of: Callable[[TokenLoader, int, int], int], **others: Any
) -> None:
    """tokens_of: of the run, before a row of an epoch, as a test of its own counts them."""
    ranks = [{**others, "batch_size": 2, "world_size": 2, "rank": rank, "batches_per_run": 3} for rank in range(2)]
    found = fields_by_row([TokenLoader(corpus, **settings_of(kind, at, **own)) for own in ranks], 2)
    runs = [
        fields_by_row([TokenLoader(corpus, **settings_of(kind, None, later=later, **others))], 2)
        for later in (False, True)
    ]
    counted = TokenLoader(corpus, **settings_of(kind, at, **others))
    changed = [0, 0]
    with counted:
        for (epoch, place), fields in found.items():
            is_later = tokens_of(counted, epoch, place) >= at
            assert fields == runs[is_later][epoch, place], (epoch, place)
            changed[is_later] += fields != runs[not is_later][epoch, place]
    assert min(changed) > 5


@pytest.mark.parametrize(
    "kind", [kind if kind in ("spans", "diffusion") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_of_windows(corpus: Path, kind: str) -> None:
    def tokens(loader: TokenLoader, epoch: int, place: int) -> int:
        return (epoch * 4 * len(loader) + place) * T

    check_stages(corpus, kind, 30 * T, tokens)


@pytest.mark.parametrize("kind", ["prefix", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mlm", "spans"))])
def test_of_documents(corpus: Path, kind: str) -> None:
    """By the windows that are packed, each with its share of the tokens, and in proportion to its rows within one."""
    total, windows = corpus.stat().st_size // 2, -(-DOCUMENTS // WINDOW)

    def tokens(loader: TokenLoader, epoch: int, place: int) -> int:
        window, within = divmod(place, WINDOW)  # with "pad" each document is a row, and none is longer
        rows = min(WINDOW, DOCUMENTS - window * WINDOW)
        begin, end = ((epoch * windows + number) * total // windows for number in (window, window + 1))
        return begin + (end - begin) * within // rows

    check_stages(corpus, kind, total * 5 // 4, tokens, rows="pad")


def test_of_growing_rows(corpus: Path) -> None:
    lists: dict[str, Any] = {
        "seq_len": [[0, T // 2], [20 * T, T]],
        "global_batch": 4,
        "shuffle": False,
        "batch_size": 2,
    }

    def tokens(loader: TokenLoader, epoch: int, place: int) -> int:
        switch = 64  # the end of the first group of 64 rows of T, which are 128 of half of it
        in_epoch = place * T // 2 if place < 2 * switch else switch * T + (place - 2 * switch) * T
        places: int = loader._schedule.interleave.num_places(0)  # type: ignore[attr-defined]
        return epoch * places * T + in_epoch

    with TokenLoader(corpus, **settings_of("prefix", 50 * T, **lists)) as loader:
        later = []
        for epoch in range(2):
            for batch in loader:
                for place, length in zip(batch["row_ids"].tolist(), batch["prefix_lengths"].tolist(), strict=True):
                    if tokens(loader, epoch, place) >= 50 * T:
                        later.append(length)
                    else:
                        assert length == 0
    assert np.mean([length > 0 for length in later]) > 0.6


def test_of_a_mixture(corpus: Path, tmp_path: Path) -> None:
    """By the tokens of the whole mixture, for a source that has its own list."""
    np.arange(8, 40, dtype=np.uint16).repeat(9).tofile(tmp_path / "other.bin")
    at, rows = 40 * T, 96
    found = []
    for entry in (KINDS["drop"][0](at, 1), {"kind": "drop", "drop_id": MASK, "rate": 1}):
        sources = {
            "a": {"corpus": str(corpus), "weight": 1, "objective": [entry]},
            "b": {"corpus": str(tmp_path / "other.bin"), "weight": 1},
        }
        own = {**SHAPE, "outputs": (*BASE, "source_ids"), "total_rows": rows}
        found.append(fields_by_row([TokenLoader(**own, mixture=sources)], 1))
    listed, later = found
    for (_, place), fields in listed.items():
        is_dropped = fields["source_ids"] == 0 and place * T >= at
        assert (fields["input_ids"] == [MASK] * T) == is_dropped
        assert not is_dropped or fields == later[0, place]


def test_documents_are_rearranged_by_windows(corpus: Path) -> None:
    total, windows = corpus.stat().st_size // 2, -(-DOCUMENTS // WINDOW)
    at = total // 2

    def rows(rate: Any, **others: Any) -> list[list[int]]:
        own = {**SHAPE, "rows": "pad", "seq_len": 16, "drop_last": False, "objective": [{**FIM, "rate": rate}]}
        with TokenLoader(corpus, **{**own, **others}) as loader:
            return [row for _ in range(2) for batch in loader for row in batch["input_ids"].tolist()]

    never, always, listed = rows(0), rows(1), rows([[0, 0], [at, 1]])
    first = -(-at * windows // total) * WINDOW  # each document is a row
    assert listed == never[:first] + always[first:]
    assert never != listed != always
    halves = [rows([[0, 0], [at, 1]], rank=rank, world_size=2, batch_size=2) for rank in range(2)]
    assert sorted(itertools.chain(*halves)) == sorted(listed)


@pytest.mark.parametrize(("kind", "rows"), [("prefix", "pack"), pytest.param("drop", "stream", marks=pytest.mark.slow)])
def test_every_resume_goes_on(corpus: Path, kind: str, rows: str) -> None:
    settings = settings_of(kind, 500, rows=rows, batch_size=9)
    states = check_every_resume(lambda: TokenLoader(corpus, **settings), epochs=2)
    other = TokenLoader(corpus, **settings_of(kind, 501, rows=rows, batch_size=9))
    with other, pytest.raises(StateError, match="objective: saved "):
        other.load_state_dict(states[-1])


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("diffusion", "fim") else pytest.param(kind, marks=pytest.mark.slow) for kind in (*KINDS, "fim")],
)
def test_every_pass_over_the_validation_split_has_the_same_draws(corpus: Path, kind: str) -> None:
    """Those of the end of the run; passes over the training split have other ones."""
    common: dict[str, Any] = {"split": "validation", "validation_fraction": 0.5, "drop_last": False}
    found = {}
    for split in ("validation", "train"):
        own = {**common, "split": split, "shuffle": False}
        if kind == "fim":
            own |= {**SHAPE, "rows": "pack", "seq_len": 16, "objective": [{**FIM, "rate": [[0, 0], [10**6, 1]]}]}
            own["objective"][0] |= {"validation": True} | ({"rate": 1} if split == "train" else {})
        else:
            own = settings_of(kind, 10**6 if split == "validation" else None, **own)
            own["objective"][0]["validation"] = True
        with TokenLoader(corpus, **own) as loader:
            passes = [[{name: x.tolist() for name, x in batch.items()} for batch in loader] for _ in range(3)]
        found[split] = passes
    first, *others = found["validation"]
    assert all(other == first for other in others)
    assert found["train"][0] != found["train"][1]
    last = settings_of(kind, None, **common) if kind != "fim" else None
    if last is not None:
        last["objective"][0]["validation"] = True
        with TokenLoader(corpus, **last) as loader:
            assert [{name: x.tolist() for name, x in batch.items()} for batch in loader] == first


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "prefix", "longest": [[0, 0.5], [10, 0.1]], "shortest": 0.3}, ["0.3", "0.1", "10"]),
        ({"kind": "prefix", "shortest": 1}, ["shortest = 1"]),
        ({"kind": "diffusion", "mask_id": 1, "min_rate": [[5, 0.1]]}, ["min_rate", "5"]),
        ({"kind": "mlm", "mask_id": 1, "rate": [[0, 0.1], [0, 0.2]]}, ["rate", "0"]),
        ({"kind": "mlm", "mask_id": 1, "rate": 0}, ["rate = 0"]),
        ({"kind": "mlm", "mask_id": 1, "rate": [[0, 0.1], [2**63, 0.2]]}, ["rate", str(2**63)]),
        ({**FIM, "rate": []}, ["rate", "empty"]),
        ({"kind": "spans", **OF_SPANS, "denoisers": [{"weight": [[0, 1], [7, 0]]}]}, ["weight", "7"]),
        ({"kind": "spans", **OF_SPANS, "denoisers": [{"weight": 0}]}, ["weight", "0"]),
        ({"kind": "goldfish", "k": [[0, 4], [10, 5]]}, ["k", "[[0, 4], [10, 5]]"]),
    ],
    ids=str,
)
def test_wrong_lists_are_refused(entry: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(corpus="a.bin", **{**SHAPE, "rows": "pack"}, objective=[entry])
    assert [word for word in words if word not in str(error.value)] == []


def test_values_by_tokens() -> None:
    steps = ((0, 1), (10, 2), (20, 3))
    assert [value_at(steps, at) for at in (0, 9, 10, 19, 20, 99)] == [1, 1, 2, 2, 3, 3]  # type: ignore[arg-type]
