"""Fill in the middle: draws, chances and cuts, as integers, and what a state and a configuration say of it."""

import json
from typing import Any

import numpy as np
import pytest
from fim_oracle import TOKENS, draws

from dali_pipes import LoaderConfig
from dali_pipes.config.objectives import Fim, parse_objectives
from dali_pipes.config.rates import threshold
from dali_pipes.errors import ConfigError
from dali_pipes.objectives.fim import FillInMiddle, as_they_are, first_tokens, runs_of
from dali_pipes.rows.base import order_key

COUNT, T = 40_000, 64


def planned(fim: FillInMiddle, lengths: Any, key: int, seq_len: int = T) -> Any:
    """`FimPieces` of documents one after another, which are a piece each."""
    documents = np.arange(len(lengths))
    ends = np.cumsum(lengths)
    moved = fim.moved(key, documents, 0, lengths, seq_len)
    zeros = np.zeros(len(lengths), np.int64)
    return fim.pieces(key, documents, zeros, lengths + 3 * moved, (ends - lengths, ends), seq_len)


def test_chances_and_cuts_are_uniform() -> None:
    """Chi-square on fixed seeds: which documents are rearranged, in which order, and each pair of cuts."""
    fim = FillInMiddle(threshold(parse(rate=0.3)), threshold(parse(rate=0.25)), 1, 2, 3)
    tokens = 4
    found = planned(fim, np.full(COUNT, tokens), order_key(7, "fim", 0))
    orders = np.bincount(found.orders, minlength=3)
    assert chi_square(orders, COUNT * np.array([0.7, 0.3 * 0.75, 0.3 * 0.25])) < 18.4  # p = 1e-4
    cuts = found.borders[found.orders > 0][:, 2:4] - found.borders[found.orders > 0][:, :1]
    pairs = np.bincount(cuts[:, 0] * (tokens + 1) + cuts[:, 1], minlength=(tokens + 1) ** 2).reshape(5, 5)
    assert not np.tril(pairs, -1).any()
    expected = len(cuts) / 25 * (2 - np.eye(5))  # two ways to draw a pair of different cuts
    assert chi_square(pairs[np.triu_indices(5)], expected[np.triu_indices(5)]) < 42.6  # 14 degrees of freedom


def test_passes_documents_and_choices_are_independent() -> None:
    fim = FillInMiddle(2**31, 2**31, 1, 2, 3)
    lengths = np.full(COUNT, 20)
    passes = [planned(fim, lengths, order_key(7, "fim", number)) for number in range(2)]
    moved = [found.orders > 0 for found in passes]
    agree = np.bincount(2 * moved[0] + moved[1], minlength=4)
    assert chi_square(agree, np.full(4, COUNT / 4)) < 21.1
    neighbors = np.bincount(2 * moved[0][:-1] + moved[0][1:], minlength=4)
    assert chi_square(neighbors, np.full(4, (COUNT - 1) / 4)) < 21.1
    chosen = passes[0].orders[moved[0]] == 1
    early = (passes[0].borders[moved[0]][:, 2] - passes[0].borders[moved[0]][:, 0]) < 6  # the first cut; its median
    table = np.bincount(2 * chosen + early, minlength=4).reshape(2, 2)
    expected = table.sum(0) * table.sum(1)[:, None] / table.sum()
    assert chi_square(table, expected) < 15.1


def test_draws_are_the_oracles() -> None:
    fim = FillInMiddle(2**32, 2**31, 1, 2, 3)
    for seed in (0, 2**64 - 1):
        found = planned(fim, np.full(200, 1000), order_key(seed, "fim", 3), 4096)
        for document, (order, borders) in enumerate(zip(found.orders.tolist(), found.borders.tolist(), strict=True)):
            _, spm, *cuts = draws(document, 0, seed=seed, pass_number=3)
            assert order == (2 if spm < 2**31 else 1)
            assert [border - borders[0] for border in borders[2:4]] == sorted(cut * 1001 >> 32 for cut in cuts)


@pytest.mark.parametrize("rate", [0, 2**32])
def test_never_and_always(rate: int) -> None:
    fim = FillInMiddle(rate, rate, 1, 2, 3, keeps_last=1)
    lengths = np.arange(0, T + 3)
    orders = planned(fim, lengths, 99).orders
    fits = (lengths > 3) & (lengths + 3 <= T)
    assert orders[:-2].tolist() == [2 * bool(rate and fit) for fit in fits[:-2]]


def test_pieces_without_a_token_of_the_corpus() -> None:
    """Of a document that is cut where rows end, a piece may be sentinels alone: it starts where its document does."""
    fim = FillInMiddle(2**32, 0, 1, 2, 3, by_piece=False)
    ends = np.array([100, 220])
    found = fim.pieces(5, np.arange(2), np.array([0, 8]), np.array([1, 8]), (np.array([0, 100]), ends), 8)
    assert first_tokens(found, np.array([1, 8])).tolist()[0] == 0
    runs = runs_of(found, np.array([1, 8]))
    assert (runs.starts[0], runs.lengths[0], runs.pieces[0]) == (-2, 1, 0)
    assert runs.lengths[1:].sum() == 8


def test_pieces_of_a_source_without() -> None:
    starts, lengths = np.array([5, 90]), np.array([3, 7])
    runs = runs_of(as_they_are(starts, lengths), lengths)
    assert (runs.starts.tolist(), runs.lengths.tolist(), runs.begins.tolist()) == ([5, 90], [3, 7], [0, 0])


def test_sentinels_by_their_strings(tmp_path: Any) -> None:
    path = tmp_path / "tokenizer.json"
    added = [{"id": 7, "content": "<MID>"}, {"id": 8, "content": "<SUF>"}]
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "<PRE>": 1}}, "added_tokens": added}))
    names = {"prefix": "<PRE>", "middle": "<MID>", "suffix": "<SUF>"}
    for place in ("objective", "loader"):
        entry: dict[str, Any] = {"kind": "fim", "tokens": names}
        entry |= {"tokenizer": str(path)} if place == "objective" else {}
        settings: dict[str, Any] = {"corpus": "x", "batch_size": 1, "seq_len": 16, "rows": "pack", "objective": [entry]}
        settings |= {"tokenizer": str(path)} if place == "loader" else {}
        config = LoaderConfig(**settings)
        (found,) = config.objectives
        assert isinstance(found, Fim)
        assert found.ids(config.tokenizer) == (1, 7, 8)
        with pytest.raises(ConfigError, match=r"'<MIDDLE>'.*tokenizer.json"):
            LoaderConfig(**{**settings, "objective": [{**entry, "tokens": {**names, "middle": "<MIDDLE>"}}]})
        with pytest.raises(ConfigError, match=r"8.*vocab_size = 8"):
            LoaderConfig(**settings, vocab_size=8)
    (in_folder,) = parse_objectives([{"kind": "fim", "tokens": names, "tokenizer": str(tmp_path)}])
    assert isinstance(in_folder, Fim)
    assert in_folder.ids(None) == (1, 7, 8)
    with pytest.raises(ValueError, match=r"tokens\.pre.*middle"):
        parse_objectives([{"kind": "fim", "tokens": {"pre": 1, "middle": 7, "suffix": 8}}])
    (entry_,) = parse_objectives([{"kind": "fim", "tokens": names, "tokenizer": str(path)}])
    (other,) = parse_objectives([{"kind": "fim", "tokens": {"prefix": 1, "middle": 7, "suffix": 8}}])
    assert entry_.identity() == other.identity()


@pytest.mark.parametrize(
    ("changes", "entry", "text"),
    [
        ({"rows": "stream"}, {}, "stream.*pack"),
        ({"seq_len": 7}, {}, "8.*seq_len = 7"),
        ({}, {"tokens": {**TOKENS, "middle": 1001}}, "1001, 1001 and 1003"),
        ({}, {"tokens": {"prefix": 1, "suffix": 2}}, "middle"),
        ({}, {"tokens": {**TOKENS, "prefix": "<PRE>"}}, "'<PRE>'.*tokenizer"),
        ({}, {"tokens": {**TOKENS, "prefix": -1}}, "prefix"),
        ({}, {"rate": 1.5}, "rate.*1.5"),
        ({}, {"level": "row"}, "level.*row"),
        ({}, {"tokenizer": "/missing.json", "tokens": {**TOKENS, "prefix": "<PRE>"}}, "/missing.json"),
        ({"vocab_size": 1003}, {}, "1,003.*vocab_size = 1,003"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], entry: dict[str, Any], text: str) -> None:
    settings: dict[str, Any] = {"corpus": "x", "batch_size": 1, "seq_len": 16, "rows": "pack", **changes}
    others = settings.pop("objective", [])
    with pytest.raises(ConfigError, match=text):
        LoaderConfig(**settings, objective=[{"kind": "fim", "tokens": TOKENS, **entry}, *others])


def parse(**entry: Any) -> Any:
    (found,) = parse_objectives([{"kind": "fim", "tokens": TOKENS, **entry}])
    assert isinstance(found, Fim)
    return found.rate[0][1]


def chi_square(found: Any, expected: Any) -> float:
    return float(((found - expected) ** 2 / expected).sum())
