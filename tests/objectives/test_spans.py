"""Span corruption of a loader: T5's rule token by token, rows that can be put together again, and what is refused."""

import itertools
import json
import tomllib
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import objective_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_oracle import Row, uncorrupted
from streams import check_every_resume

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.objectives import Spans, parse_objectives
from dali_pipes.config.span_counts import span_counts, span_widths
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.objectives import span_draws
from dali_pipes.objectives.span_draws import draw_spans
from dali_pipes.schedule.plans import plan_step
from dali_pipes.tools.reports import preview_batch

T, END, FIRST = 24, 0, 99
FIELDS = ("encoder_ids", "decoder_input_ids", "decoder_labels", "causal_ids", "causal_labels")
OUTPUTS = ("input_ids", "labels", "row_ids", "encoder_lengths", "decoder_lengths", *FIELDS)
UL2: dict[str, Any] = {
    "kind": "spans",
    "sentinels": FIRST,
    "num_sentinels": 12,
    "end_id": 1,
    "denoisers": [
        {"rate": 0.15, "mean_length": 3, "mode_token": 80, "weight": 2},
        {"rate": 0.5, "mean_length": "3/2"},
        {"rate": 0.25, "mean_length": "end", "mode_token": 81},
    ],
}
SHAPE: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "batch_size": 4, "seq_len": T, "quiet": True}
SHAPE |= {"vocab_size": 120, "device": "cpu", "drop_last": False, "outputs": OUTPUTS, "objective": [UL2], "pad_id": 2}


def of_oracle(entry: dict[str, Any]) -> dict[str, Any]:
    """The same with all settings, and exact numbers."""
    ways = [
        {
            "rate": Fraction(str(own.get("rate", "0.15"))),
            "mean_length": None if own.get("mean_length") == "end" else Fraction(own.get("mean_length", 3)),
            "mode_token": own.get("mode_token"),
            "weight": own.get("weight", 1),
        }
        for own in entry.get("denoisers", [{}])
    ]
    return {"sentinel_step": -1, "start_id": None, "end_id": None, **entry, "denoisers": ways}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of 1 to 30 tokens."""
    random = np.random.default_rng(3)
    parts = [np.append(random.integers(3, 70, random.choice([0, 1, 2, 8, 29])), END) for _ in range(150)]
    path = tmp_path / "corpus.bin"
    np.concatenate(parts).astype(np.uint16).tofile(path)
    return path


def padded(fields: dict[str, list[int]], widths: dict[str, int], pad_id: int) -> dict[str, list[int]]:
    padding = {name: -100 if name.endswith("labels") else pad_id for name in fields}
    return {name: (values + [padding[name]] * widths[name])[: widths[name]] for name, values in fields.items()}


@pytest.mark.parametrize("rows", [pytest.param("stream", marks=pytest.mark.slow), "pack", "pad"])
def test_every_row_is_that_of_the_rule(corpus: Path, rows: str) -> None:
    settings = {**SHAPE, "rows": rows, "world_size": 3, "rank": 2}
    kinds = Counter[int]()
    with TokenLoader(corpus, **settings) as loader:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                plan = plan_step(loader._schedule, epoch, step)
                widths = {name: batch[name].shape[1] for name in FIELDS}
                for number, place in enumerate(batch["row_ids"].tolist()):
                    found = {name: batch[name][number].tolist() for name in FIELDS}
                    counts = [int(batch[f"{part}_lengths"][number]) for part in ("encoder", "decoder")]
                    if place < 0:
                        assert found == padded({name: [] for name in FIELDS}, widths, 2)
                        assert counts == [0, 0]
                        continue
                    length = T
                    if plan.pieces is not None:
                        own = slice(*plan.pieces.row_offsets[number : number + 2].tolist())
                        length = int(plan.pieces.lengths[own].sum())
                    ids, start = batch["input_ids"][number].tolist(), int(plan.starts[number])
                    row = Row(ids, [], length, start, place, epoch, epoch)
                    expected = oracle.spans(row, of_oracle(UL2), pad_id=2)
                    assert found == padded(expected, widths, 2)
                    assert counts == [len(expected["encoder_ids"]), len(expected["decoder_labels"])]
                    kinds[found["encoder_ids"][0]] += 1
                    sentinels = range(FIRST - 11, FIRST + 1)
                    inputs = found["encoder_ids"][found["encoder_ids"][0] in (80, 81) : counts[0] - 1]
                    assert uncorrupted(inputs, found["decoder_labels"][: counts[1] - 1], sentinels) == ids[:length]
    assert min(kinds[80], kinds[81]) > 3


def fields_by_row(loaders: list[TokenLoader]) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for loader in loaders:
        for epoch in range(2):
            for batch in loader:
                for row, place in enumerate(batch["row_ids"].tolist()):
                    if place >= 0:
                        found[epoch, place] = {name: value[row].tolist() for name, value in batch.items()}
        loader.close()
    return found


@pytest.mark.parametrize("rows", ["stream", pytest.param("pack", marks=pytest.mark.slow)])
def test_neither_ranks_nor_blocks_matter(corpus: Path, rows: str) -> None:
    alone = fields_by_row([TokenLoader(corpus, **SHAPE, rows=rows, batches_per_run=1)])
    shape = {**SHAPE, "batch_size": 2, "rows": rows}
    ranks = [TokenLoader(corpus, **shape, batches_per_run=3, rank=rank, world_size=3) for rank in range(3)]
    assert fields_by_row(ranks) == alone


def test_every_resume_goes_on(corpus: Path) -> None:
    states = check_every_resume(
        lambda: TokenLoader(corpus, **SHAPE), lambda: TokenLoader(corpus, **SHAPE, batches_per_run=2)
    )
    assert len(json.dumps(states[0])) < 1024
    changed = {**UL2, "denoisers": UL2["denoisers"][:2]}
    other = TokenLoader(corpus, **{**SHAPE, "objective": [changed]})
    with other, pytest.raises(StateError, match="objective: saved "):
        other.load_state_dict(states[1])


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    rate=st.fractions("0.01", "0.99", max_denominator=100),
    mean_length=st.none() | st.fractions(1, 12, max_denominator=4),
    key=st.integers(0, 2**64 - 1),
)
def test_rows_are_put_together_again(length: int, rate: Fraction, mean_length: Fraction | None, key: int) -> None:
    """By the parts that are drawn; numbers are T5's, and fit in what is kept for them."""
    entry = parse_objectives(
        [{"kind": "spans", "sentinels": 9, "denoisers": {"rate": str(rate), "mean_length": str(mean_length or "end")}}]
    )[0]
    assert isinstance(entry, Spans)
    widths = entry.widths(60, is_full=False)
    drawn = draw_spans(entry, np.array([length]), np.array([key], np.uint64), np.zeros(1, np.int64), 2**62 + 3, widths)
    count, mode, *sums = drawn.table[0].tolist()
    kept, noise = (np.diff(sums[first : first + count], prepend=0) for first in (0, widths.spans))
    mask = [bool(part) for pair in zip(kept, noise, strict=True) for part in (0, 1) for _ in range(pair[part])]
    assert mask == oracle.noise_mask(length, rate, mean_length, key)
    assert mode == -1
    assert (kept > 0).all()
    assert (noise > 0).all() or length == 1
    assert drawn.encoder_lengths[0] == kept.sum() + count <= widths.encoder
    assert drawn.decoder_lengths[0] == noise.sum() + count <= widths.decoder
    assert set(sums[count - 1 : widths.spans]) == {int(kept.sum())}


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=30), key=st.integers(0, 2**64 - 1), part=st.sampled_from([1, 300]))
def test_rows_are_drawn_apart_from_others(lengths: list[int], key: int, part: int) -> None:
    """Rows of several denoisers and lengths in one call, whatever is drawn together, are those of the rule."""
    (entry,) = parse_objectives([UL2])
    assert isinstance(entry, Spans)
    widths, whole = entry.widths(60, is_full=False), of_oracle(UL2)
    keys = [oracle.splitmix64(key, number) for number in range(len(lengths))]
    with mock.patch.object(span_draws, "_PART", part):
        own = np.array(lengths, np.int64), np.array(keys, np.uint64), np.zeros(len(lengths), np.int64)
        drawn = draw_spans(entry, *own, 2**62 + 3, widths)
    for number, length in enumerate(lengths):
        draw = oracle.splitmix64(keys[number], 2**62 + 3) >> 32
        way = whole["denoisers"][sum(draw >= weight * 2**32 // 4 for weight in (2, 3))]
        count, mode, *sums = drawn.table[number].tolist()
        kept, noise = (np.diff(sums[at : at + count], prepend=0) for at in (0, widths.spans))
        mask = [bool(part) for pair in zip(kept, noise, strict=True) for part in (0, 1) for _ in range(pair[part])]
        assert mask == oracle.noise_mask(length, way["rate"], way["mean_length"], keys[number])
        assert mode == (-1 if way["mode_token"] is None else way["mode_token"])
        assert {*sums[count - 1 : widths.spans]} == {int(kept.sum())}
        assert {*sums[widths.spans + count - 1 :]} == {int(noise.sum())}
        assert drawn.encoder_lengths[number] == (mode >= 0) + kept.sum() + count + 1
        assert drawn.decoder_lengths[number] == noise.sum() + count + 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.fractions("0.01", "0.99", max_denominator=1000), st.fractions(1, 70, max_denominator=9))
def test_widths_hold_every_length(most: int, rate: Fraction, mean_length: Fraction) -> None:
    lengths = np.arange(1, most + 1)
    noise, spans = span_counts(lengths, rate, mean_length)
    for length in range(2, most + 1):
        expected = min(max(round(length * rate), 1), length - 1)
        of_noise = max(round(expected / mean_length), 1)
        assert noise[length - 1] == expected
        assert spans[length - 1] == min(of_noise, expected, length - expected)
    widths = span_widths(lengths, [(rate, mean_length, True)], has_end=True)
    assert widths.encoder == (lengths - noise + spans + 2).max()
    assert widths.decoder == (noise + spans + 1).max()
    assert widths.causal == (lengths + 2 * spans + 2).max()


def test_widths_of_t5() -> None:
    """568 tokens fill 512 inputs and 114 targets, as `compute_input_and_target_lengths` of T5 says."""
    (entry,) = parse_objectives([{"kind": "spans", "sentinels": 32099, "end_id": 1}])
    assert isinstance(entry, Spans)
    assert entry.widths(568, is_full=True)[1:3] == (512, 114)


def test_denoisers_and_cuts_are_as_likely_as_they_should_be() -> None:
    """Chi-square over 20,000 keys: which denoiser, and each way to cut seven tokens that are kept into three parts."""
    (entry,) = parse_objectives([{**UL2, "denoisers": [{"rate": "0.3", "mean_length": 1}, {"weight": 3}]}])
    assert isinstance(entry, Spans)
    keys = np.random.default_rng(5).integers(0, 2**63, 20_000).astype(np.uint64)
    widths = entry.widths(10, is_full=True)
    table = draw_spans(entry, np.full(len(keys), 10), keys, np.zeros(len(keys), np.int64), 2**62 + 3, widths).table
    first = table[:, 0] == 3
    assert chi_square([first.sum(), (~first).sum()], [1, 3]) < 10.8  # p = 0.001
    cuts = Counter(map(tuple, table[first, 2:4].tolist()))
    assert set(cuts) == set(itertools.combinations(range(1, 7), 2))
    assert chi_square([*cuts.values()], [1] * 15) < 36.1


def chi_square(counts: Any, shares: list[float]) -> float:
    expected = np.array(shares) / sum(shares) * np.sum(counts)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


def test_ids_that_are_not_learned_are_not_targets(corpus: Path) -> None:
    tokens = np.fromfile(corpus, np.uint16)
    learned = tokens % 3 > 0
    learned.astype(np.uint8).tofile(corpus.with_name("corpus.bin.loss"))
    plain, hidden = 0, 0
    with TokenLoader(corpus, **SHAPE) as loader:
        for batch in loader:
            labels, inputs = batch["decoder_labels"][:, :-1], batch["decoder_input_ids"][:, 1:]
            is_token = (
                (torch.arange(labels.shape[1]) < batch["decoder_lengths"][:, None]) & (inputs < 70) & (inputs != 1)
            )
            expected = torch.where(inputs % 3 > 0, inputs, -100)
            assert torch.equal(labels[is_token], expected[is_token])
            plain, hidden = plain + int((labels[is_token] >= 0).sum()), hidden + int((labels[is_token] < 0).sum())
    assert min(plain, hidden) > 50


def test_rows_for_validation_are_corrupted_too(corpus: Path) -> None:
    common = {**SHAPE, "split": "validation", "validation_fraction": 0.4}
    with TokenLoader(corpus, **common) as loader:
        assert all(bool((batch["decoder_lengths"] > 0).any()) for batch in loader)
    with pytest.raises(ConfigError, match="validation"):
        LoaderConfig(corpus="a.bin", **{**SHAPE, "objective": [{**UL2, "validation": False}]})


def test_sources_share_it(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    np.arange(3, 60, dtype=np.uint16).repeat(9).tofile(other)
    sources: dict[str, Any] = {"a": {"corpus": str(other), "weight": 1}, "b": {"corpus": str(corpus), "weight": 3}}
    shape = {**SHAPE, "total_rows": 128, "outputs": (*OUTPUTS, "source_ids"), "drop_last": True}
    with TokenLoader(**shape, mixture=sources) as loader:
        for step, batch in enumerate(loader):
            for number, source in enumerate(batch["source_ids"].tolist()):
                place, passes = loader.locate(step, number), plan_step(loader._schedule, 0, step).rows.passes
                assert passes is not None
                ids = batch["input_ids"][number].tolist()
                row = Row(ids, [], T, place.position, 0, 0, int(passes[number]), 0, "ab"[source])
                expected = oracle.spans(row, of_oracle(UL2), pad_id=2)["encoder_ids"]
                assert batch["encoder_ids"][number].tolist()[: len(expected)] == expected
    longer = {**UL2, "end_id": 2, "denoisers": [{"rate": 0.5, "mean_length": 1}]}
    for own in sources.values():
        own["objective"] = [longer]
    with TokenLoader(**shape, mixture=sources) as loader:  # though the run has another
        assert next(iter(loader))["decoder_labels"].shape[1] == T + 1
    sources["b"]["objective"] = [UL2]
    with pytest.raises(ConfigError, match="mixture"):
        LoaderConfig(**shape, mixture=sources)


def test_dali_hands_out_the_same(corpus: Path) -> None:
    common = {**SHAPE, "world_size": 3, "rank": 2}
    with TokenLoader(corpus, **common, engine="dali") as dali, TokenLoader(corpus, **common) as direct:
        for batch, expected in zip(dali, direct, strict=True):
            assert all(torch.equal(batch[name], value) for name, value in expected.items())


def test_reports_show_what_is_learned(corpus: Path) -> None:
    config = LoaderConfig(corpus=str(corpus), rank=0, world_size=1, **SHAPE)
    preview = preview_batch(config, 0, rows=4, tokens=50)
    with TokenLoader(config) as loader:
        batch = next(iter(loader))
        assert "spans (sentinels = 99" in repr(loader)
    assert "spans (sentinels = 99" in str(preview.objective)
    for row, shown in enumerate(preview.rows):
        counts = [int(batch[f"{part}_lengths"][row]) for part in ("encoder", "decoder")]
        assert shown.drawn == {"encoder_lengths": counts[0], "decoder_lengths": counts[1]}
        expected = [batch[name][row, :count].tolist() for name, count in zip(FIELDS[::2], counts, strict=False)]
        assert [run.ids for _, run in shown.corrupted] == expected
        assert json.loads(json.dumps(shown.as_dict()))["causal_ids"] == batch["causal_ids"][row].tolist()[:50]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mtp": 2}, ["mtp = 2"]),
        ({"context_parallel": (0, 2)}, ["context_parallel"]),
        ({"rows": "pad", "length_buckets": (8, 16)}, ["length_buckets"]),
        ({"seq_len": [[0, 8], [800, 24]], "order_len": 24, "global_batch": 4, "drop_last": True}, ["seq_len"]),
        ({"outputs": ["input_ids", "encoder_lengths"]}, ["encoder_ids", "causal_ids"]),
        ({"objective": [UL2, {"kind": "goldfish"}]}, ["spans", "goldfish"]),
        ({"objective": [{"kind": "a.b:c"}, UL2]}, ["spans", "a.b:c"]),
        ({"objective": [{**UL2, "num_sentinels": 3}]}, ["num_sentinels = 3", "8"]),
        ({"objective": [{**UL2, "sentinels": 10}]}, ["10", "-1"]),
        ({"objective": [{**UL2, "sentinel_step": 1, "num_sentinels": 30}]}, ["128", "vocab_size", "120"]),
        ({"objective": [{**UL2, "end_id": 95}]}, ["end_id", "95", "88", "99"]),
        ({"objective": [{**UL2, "denoisers": [{"mode_token": 120}]}]}, ["denoisers[0].mode_token", "120"]),
        ({"objective": [{**UL2, "denoisers": []}]}, ["denoisers"]),
        ({"objective": [{**UL2, "denoisers": [{"rate": 1}]}]}, ["rate", "1"]),
        ({"objective": [{**UL2, "denoisers": [{"mean_length": 0.5}]}]}, ["mean_length", "0.5"]),
        ({"objective": [{**UL2, "denoisers": [{"length": 2}]}]}, ["length"]),
        ({"objective": [{"kind": "spans"}]}, ["sentinels"]),
        ({"objective": []}, ["encoder_lengths", "spans"]),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(corpus="a.bin", **{**SHAPE, **changed})
    assert [word for word in words if word not in str(error.value)] == []


def test_settings_are_written_and_read_again() -> None:
    config = LoaderConfig(corpus="a.bin", **SHAPE)
    assert LoaderConfig(**tomllib.loads(config.to_toml())) == config
    assert config.objective[0].plain()["denoisers"] == [
        {"rate": 0.15, "mean_length": 3, "mode_token": 80, "weight": 2},
        {"rate": 0.5, "mean_length": 1.5},
        {"rate": 0.25, "mean_length": "end", "mode_token": 81},
    ]
    hash(config)
