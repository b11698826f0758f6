"""Objectives with batches of a number of tokens, several labels, and one another; and ids that cannot be right."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import objective_oracle as oracle
import pytest
import torch
from objective_oracle import Row, is_dropped
from streams import check_every_resume

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import ConfigError
from dali_pipes.schedule.plans import plan_step

VOCABULARY, END, MASK, T = 1100, 0, 7, 16
SHAPE: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "seq_len": T, "quiet": True, "device": "cpu"}
SHAPE |= {"vocab_size": VOCABULARY, "rows": "pad"}
BUDGET: dict[str, Any] = {"batch_tokens": 64, "drop_last": False}
BASE = ("input_ids", "labels", "row_ids")
MLM = {"kind": "mlm", "mask_id": MASK, "rate": "0.4", "special_ids": [END]}
DIFFUSION = {"kind": "diffusion", "mask_id": MASK}
DROP = {"kind": "drop", "drop_id": 39, "rate": "0.25"}
GOLDFISH = {"kind": "goldfish", "h": 3, "k": 3}
FIM = {"kind": "fim", "rate": "0.6", "tokens": {"prefix": 1001, "middle": 1002, "suffix": 1003}}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mlm": (MLM, ()),
    "diffusion": (DIFFUSION, ("noisy_ids", "masked", "p_mask")),
    "prefix": ({"kind": "prefix"}, ("prefix_lengths",)),
    "drop": (DROP, ()),
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(3)
    lengths = random.choice([0, 1, 2, 8, 11, 12], 150)
    path = tmp_path / "corpus.bin"
    np.concatenate([np.append(random.integers(8, 30, size), END) for size in lengths]).astype(np.uint16).tofile(path)
    return path


def rows_of(corpus: Path, settings: dict[str, Any], epochs: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row of batches of some tokens without its objective, and its fields with it."""
    plain = {**settings, "objective": [], "outputs": BASE}
    with TokenLoader(corpus, **settings) as loader, TokenLoader(corpus, **plain) as other:
        for epoch in range(epochs):
            for step, (batch, bare) in enumerate(itertools.zip_longest(loader, other)):
                plan = plan_step(other._schedule, epoch, step)
                assert plan.pieces is not None
                lengths, firsts = plan.pieces.row_lengths.tolist(), dict[int, int]()
                for row, place in enumerate(bare["row_ids"].tolist()):
                    number = place * 2**32 + row - firsts.setdefault(place, row)  # of the row, in all batches
                    ids, labels = bare["input_ids"][row].tolist(), bare["labels"][row].tolist()
                    fields = {name: value[row].tolist() for name, value in batch.items() if name != "row_ids"}
                    if place >= 0:
                        yield Row(ids, labels, lengths[row], int(plan.starts[row]), number, epoch, epoch), fields
                    else:
                        assert set(fields["labels"]) == {-100}


@pytest.mark.parametrize(
    "kind", [kind if kind != "drop" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_rows_of_a_budget_are_those_of_the_rule(corpus: Path, kind: str) -> None:
    entry, outputs = KINDS[kind]
    settings = {**SHAPE, **BUDGET, "objective": [entry], "outputs": (*BASE, *outputs), "world_size": 2, "rank": 1}
    changed = widths = 0
    for row, found in rows_of(corpus, settings, 2):
        assert found == oracle.by_kind(kind, row, MLM, DIFFUSION, DROP, VOCABULARY)
        changed += found["labels"] != row.labels or found["input_ids"] != row.ids
        widths |= 1 << len(row.ids)
    assert changed > 20
    assert bin(widths).count("1") > 3


def test_a_budget_gives_the_same_on_any_ranks(corpus: Path) -> None:
    settings = {**SHAPE, **BUDGET, "objective": [DIFFUSION], "outputs": (*BASE, "noisy_ids", "p_mask")}

    def batches(loaders: list[TokenLoader]) -> dict[int, Any]:
        found = {}
        for loader in loaders:
            with loader:
                for batch in loader:
                    found[int(batch["row_ids"][0])] = {name: values.tolist() for name, values in batch.items()}
        found.pop(-1, None)  # of a rank that came out short
        return found

    alone = batches([TokenLoader(corpus, **settings, batches_per_run=1)])
    assert batches([TokenLoader(corpus, **settings, rank=rank, world_size=3) for rank in range(3)]) == alone


def test_every_resume_of_a_budget_goes_on(corpus: Path) -> None:
    own = {**SHAPE, **BUDGET, "objective": [GOLDFISH, {"kind": "prefix"}, DROP], "outputs": BASE, "batch_tokens": 160}
    check_every_resume(lambda: TokenLoader(corpus, **own))


@pytest.mark.parametrize("long_documents", ["split", "truncate", "drop"])
def test_a_budget_has_the_rearranged_rows_of_rows_of_a_number(corpus: Path, long_documents: str) -> None:
    """The same rows, with the same noise, in other batches; nothing is read after the end of the corpus."""
    settings = {**SHAPE, "seq_len": 12, "objective": [FIM, GOLDFISH, DROP], "outputs": BASE, "drop_last": False}
    settings["long_documents"] = long_documents

    def rows(**sizes: Any) -> list[tuple[list[int], list[int]]]:
        found = []
        with TokenLoader(corpus, **settings, **sizes) as loader:
            for batch in (batch for _ in range(2) for batch in loader):
                for number, *row in zip(*(batch[name].tolist() for name in ("row_ids", *BASE[:2])), strict=True):
                    ids, labels = (values + [0] * (12 - len(values)) for values in row)
                    found += [(ids, labels[: len(row[1])] + [-100] * (12 - len(row[1])))] * (number >= 0)
        return sorted(found)

    expected = rows(batch_size=4)
    assert rows(batch_tokens=64) == expected
    assert sum(1001 in ids for ids, _ in expected) > 20


def test_masked_shares_of_a_batch_are_stratified(tmp_path: Path) -> None:
    np.tile([8, 9, 10, END], 128).astype(np.uint16).tofile(tmp_path / "c.bin")
    settings = {**SHAPE, "batch_tokens": 64 * 4, "seq_len": 4, "objective": [DIFFUSION]}
    with TokenLoader(tmp_path / "c.bin", **settings, outputs=("input_ids", "noisy_ids", "p_mask")) as loader:
        for batch in loader:
            shares = (batch["p_mask"].double() - 0.001) / 0.999
            assert sorted((shares * 64).int().tolist()) == list(range(64))


@pytest.mark.parametrize(
    "changes",
    [{}, {"mtp": 2}, {"seq_len": 10}, pytest.param({"level": "document", "seq_len": 10}, marks=pytest.mark.slow)],
    ids=str,
)
def test_goldfish_hashes_what_the_model_sees_of_a_rearranged_document(corpus: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    fim = {**FIM, "level": changes.pop("level", "piece")}
    settings = {**SHAPE, "objective": [fim, GOLDFISH], "batch_size": 4, "outputs": BASE, **changes}
    plain = {**settings, "objective": [fim]}
    dropped = 0
    with TokenLoader(corpus, **settings) as loader, TokenLoader(corpus, **plain) as other:
        for step, (batch, bare) in enumerate(itertools.zip_longest(loader, other)):
            assert torch.equal(batch["input_ids"], bare["input_ids"])
            pieces = plan_step(other._schedule, 0, step).pieces
            assert pieces is not None
            for row, length in enumerate(pieces.row_lengths.tolist()):
                ids = bare["input_ids"][row].tolist()
                expected = bare["labels"][row].clone().reshape(len(ids), -1)
                found = batch["labels"][row].reshape(len(ids), -1)
                for t, ahead in np.ndindex(*expected.shape):
                    at = t + 1 + ahead
                    if at < 3 and 1001 not in ids:  # a part that is left as it is has the ids before in its document
                        expected[t, ahead] = found[t, ahead]
                    if 3 <= at < length and is_dropped(ids[at - 3 : at], 3):
                        assert expected[t, ahead] == ids[at]
                        expected[t, ahead] = -100
                        dropped += 1001 in ids
                assert torch.equal(found, expected)
    assert dropped > 20


@pytest.mark.slow
def test_every_resume_of_both_goes_on(corpus: Path) -> None:
    settings = {**SHAPE, "objective": [FIM, GOLDFISH, DROP], "rows": "pack", "batch_size": 4, "seq_len": 24}
    check_every_resume(lambda: TokenLoader(corpus, **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": [{**MLM, "special_ids": [3, 1100]}]}, ["mlm", "special_ids", "1,100", "vocab_size = 1,100"]),
        ({"objective": [{**DIFFUSION, "mask_id": 1100}]}, ["diffusion", "mask_id", "1,100"]),
        ({"objective": [{**DROP, "special_ids": [5000]}]}, ["drop", "special_ids", "5,000"]),
        ({"objective": [{**DROP, "drop_id": 1200}]}, ["drop", "drop_id", "1,200"]),
        ({"objective": [{**MLM, "mask_id": END}]}, ["mlm", "mask_id is 0", "eos_id"]),
        ({"objective": [{**DROP, "drop_id": 4}], "document_start_id": 4}, ["drop_id is 4", "document_start_id"]),
        ({"objective": [{**FIM, "tokens": {"prefix": 1, "middle": END, "suffix": 2}}]}, ["tokens.middle is 0", "eos"]),
        ({"objective": [{**FIM, "tokens": {"prefix": 1, "middle": 2, "suffix": 1100}}]}, ["tokens.suffix", "1,100"]),
        (
            {"objective": [{"kind": "spans", "sentinels": 1099, "denoisers": {"mode_token": 1100}}]},
            ["mode_token", "1,100"],
        ),
        ({"objective": [{"kind": "spans", "sentinels": 99}]}, ["eos_id = 0", "sentinels 0 to 99"]),
        ({"objective": [{"kind": "spans", "sentinels": 150}], "pad_id": 60}, ["pad_id = 60", "sentinels 51 to 150"]),
        ({"objective": [{"kind": "spans", "sentinels": 1099}], "mtp": 2}, ["mtp = 2", "spans", "next tokens"]),
        ({"objective": [{"kind": "spans", "sentinels": 1099}], **BUDGET}, ["batch_tokens = 64", "widths"]),
        ({"objective": [MLM], "mtp": 2}, ["mtp = 2", "own position"]),
        ({"objective": [{**MLM, "random": 0, "words": "words.json"}], "vocab_size": None}, ["words", "vocab_size"]),
    ],
    ids=str,
)
def test_what_cannot_be_right_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    kind = settings["objective"][0]["kind"]
    outputs = [*BASE, *{"diffusion": ["noisy_ids"], "spans": ["encoder_ids"]}.get(kind, [])]
    with pytest.raises(ConfigError) as error:
        LoaderConfig(corpus="a.bin", **{"batch_size": 1, **SHAPE, "outputs": outputs, **settings})
    assert [word for word in words if word not in str(error.value)] == []


def test_a_table_of_words_has_every_id(corpus: Path, tmp_path: Path) -> None:
    """A list that is too short is refused; ids that a tokenizer does not have begin words."""
    settings = {**SHAPE, "batch_size": 4, "outputs": BASE, "vocab_size": 40}
    for name, table in (("words.json", [1] * 39), ("words.npy", [1] * 39)):
        path = tmp_path / name
        path.write_text(json.dumps(table)) if name.endswith("json") else np.save(path, table)
        objective = [{**MLM, "words": str(path)}]
        with pytest.raises(ConfigError, match=rf"{name}' has 39 entries.*vocab_size = 40"):
            TokenLoader(corpus, **settings, objective=objective)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0, "##b": 20}}}))
    objective = [{**MLM, "words": str(tokenizer)}]
    starts = [int(token != 20) for token in range(40)]
    for row, found in rows_of(corpus, {**settings, "objective": objective}, 1):
        assert found == oracle.mlm(row, {**MLM, "starts": starts}, 2 * 2**32 // 5, 40)
