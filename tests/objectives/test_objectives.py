"""Objectives of a loader: every row is that of the rule, whatever the ranks, blocks and resumes; what is refused."""

import itertools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import objective_oracle as oracle
import pytest
import torch
from objective_oracle import Row, is_dropped
from streams import check_every_resume

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.objectives import read_word_starts
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.schedule.plans import plan_step
from dali_pipes.tools.reports import explain_step, preview_batch

VOCABULARY, END, MASK, T = 40, 0, 7, 12
SHAPE: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "batch_size": 4, "seq_len": T, "quiet": True}
SHAPE |= {"vocab_size": VOCABULARY, "device": "cpu"}
MLM = {"kind": "mlm", "mask_id": MASK, "rate": "0.4", "special_ids": [END]}
DIFFUSION = {"kind": "diffusion", "mask_id": MASK}
GOLDFISH = {"kind": "goldfish", "h": 3, "k": 3}
DROP = {"kind": "drop", "drop_id": 39, "rate": "0.25"}
OF_DIFFUSION = ("input_ids", "labels", "row_ids", "noisy_ids", "masked", "p_mask")
KINDS: dict[str, dict[str, Any]] = {
    "mlm": {"objective": [MLM]},
    "diffusion": {"objective": [DIFFUSION], "outputs": OF_DIFFUSION},
    "prefix": {"objective": [{"kind": "prefix"}], "outputs": ("input_ids", "labels", "row_ids", "prefix_lengths")},
    "drop": {"objective": [DROP]},
    "goldfish": {"objective": [GOLDFISH]},
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of 1 to 30 tokens, many short; ids include that of the mask."""
    random = np.random.default_rng(3)
    parts = [np.append(random.integers(1, VOCABULARY - 2, random.choice([0, 1, 2, 8, 29])), END) for _ in range(150)]
    path = tmp_path / "corpus.bin"
    np.concatenate(parts).astype(np.uint16).tofile(path)
    return path


def settings_of(kind: str, **others: Any) -> dict[str, Any]:
    return {**SHAPE, "outputs": ("input_ids", "labels", "row_ids"), "drop_last": False, **KINDS[kind], **others}


def without(settings: dict[str, Any]) -> dict[str, Any]:
    """The same without an objective."""
    outputs = tuple(name for name in settings["outputs"] if name in ("input_ids", "labels", "row_ids"))
    return {**settings, "objective": [], "outputs": outputs}


def rows_of(corpus: Path, settings: dict[str, Any], epochs: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row without its objective, and its fields with it."""
    plain = {"mask_boundaries": settings.get("rows", "stream") != "stream", **without(settings)}
    with TokenLoader(corpus, **settings) as loader, TokenLoader(corpus, **plain) as other:
        for epoch in range(epochs):
            for step, (batch, bare) in enumerate(itertools.zip_longest(loader, other)):
                plan = plan_step(other._schedule, epoch, step)
                for row, place in enumerate(bare["row_ids"].tolist()):
                    length = T
                    if plan.pieces is not None:
                        own = slice(*plan.pieces.row_offsets[row : row + 2].tolist())
                        length = int(plan.pieces.lengths[own].sum())
                    ids, labels = bare["input_ids"][row].tolist(), bare["labels"][row].tolist()
                    yield (
                        Row(ids, labels, 0 if place < 0 else length, int(plan.starts[row]), place, epoch, epoch),
                        {name: value[row].tolist() for name, value in batch.items() if name != "row_ids"},
                    )


@pytest.mark.parametrize("rows", ["stream", "pack", pytest.param("pad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mlm", "diffusion", "prefix", "drop"])
def test_every_row_is_that_of_the_rule(corpus: Path, kind: str, rows: str) -> None:
    changed = 0
    for row, found in rows_of(corpus, settings_of(kind, rows=rows, world_size=3, rank=2), 2):
        if row.place < 0:
            assert set(found["labels"]) == {-100}
            continue
        assert found == oracle.by_kind(kind, row, MLM, DIFFUSION, DROP, VOCABULARY)
        changed += found["labels"] != row.labels or found["input_ids"] != row.ids
    assert changed > 20


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mask_boundaries": True},
        pytest.param({"stride": 5}, marks=pytest.mark.slow),
        {"random_offset": True},
        {"mtp": 3},
        pytest.param({"mtp": 3, "mask_boundaries": False}, marks=pytest.mark.slow),
        {"rows": "pack"},
        pytest.param({"rows": "pad"}, marks=pytest.mark.slow),
        {"validation_fraction": 0.3},
        {"rows": "pack", "loss_masks": True},
    ],
    ids=str,
)
def test_goldfish_drops_by_the_ids_before_in_the_document(corpus: Path, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    tokens = np.fromfile(corpus, np.uint16).astype(np.int64)
    if settings.pop("loss_masks", False):
        mask = (np.random.default_rng(1).random(len(tokens)) < 0.7).astype(np.uint8)
        mask.tofile(corpus.with_name("corpus.bin.loss"))
    begins = np.maximum.accumulate(np.where(np.append(True, tokens[:-1] == END), np.arange(len(tokens)), 0))
    own = settings_of("goldfish", outputs=("input_ids", "labels", "row_ids", "loss_mask"), **settings)
    dropped = 0
    with TokenLoader(corpus, **own) as loader, TokenLoader(corpus, **without(own)) as other:
        for step, (batch, bare) in enumerate(itertools.zip_longest(loader, other)):
            assert torch.equal(batch["input_ids"], bare["input_ids"])
            plan = plan_step(other._schedule, 0, step)
            for row in range(len(bare["row_ids"])):
                expected = bare["labels"][row].clone().reshape(T, -1)
                places, pieces = list(range(int(plan.starts[row]), int(plan.starts[row]) + T)), plan.pieces
                short: set[int] = set()
                if pieces is not None:
                    places = []
                    for piece in range(int(pieces.row_offsets[row]), int(pieces.row_offsets[row + 1])):
                        start, length = int(pieces.starts[piece]), int(pieces.lengths[piece])
                        places += range(start, start + length)
                        if own.get("rows", "stream") != "stream" and length < min(3, start - begins[start]):
                            short |= {*range(start, start + length)}
                for t, j in np.ndindex(*expected.shape):
                    if expected[t, j] == -100:
                        continue
                    at = places[t + j + 1] if t + j + 1 < len(places) else places[-1] + t + j + 2 - len(places)
                    assert tokens[at] == expected[t, j]
                    if at - begins[at] >= 3 and at not in short and is_dropped(tokens[at - 3 : at].tolist(), 3):
                        expected[t, j] = -100
                        dropped += 1
                assert torch.equal(batch["labels"][row].reshape(T, -1), expected)
            labels = batch["labels"] if batch["labels"].ndim == 2 else batch["labels"][..., 0]
            assert torch.equal(batch["loss_mask"], (labels != -100).long())
    assert dropped > 50


def fields_by_row(loaders: list[TokenLoader], epochs: int) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for loader in loaders:
        for epoch in range(epochs):
            for batch in loader:
                for row, place in enumerate(batch["row_ids"].tolist()):
                    if place >= 0:
                        found[epoch, place] = {name: value[row].tolist() for name, value in batch.items()}
        loader.close()
    return found


@pytest.mark.parametrize("rows", [pytest.param("stream", marks=pytest.mark.slow), "pack"])
@pytest.mark.parametrize(
    "kind", [kind if kind == "diffusion" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_neither_ranks_nor_blocks_matter(corpus: Path, kind: str, rows: str) -> None:
    settings = settings_of(kind, rows=rows)
    alone = fields_by_row([TokenLoader(corpus, **settings, batches_per_run=1)], 2)
    ranks = [
        TokenLoader(corpus, **{**settings, "batch_size": 2}, batches_per_run=3, rank=rank, world_size=3)
        for rank in range(3)
    ]
    assert fields_by_row(ranks, 2) == alone


@pytest.mark.parametrize("kind", ["mlm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])])
def test_every_resume_goes_on(corpus: Path, kind: str) -> None:
    settings = settings_of(kind, rows="pack")
    check_every_resume(lambda: TokenLoader(corpus, **settings))


def test_a_changed_objective_is_refused(corpus: Path) -> None:
    with TokenLoader(corpus, **settings_of("mlm")) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    assert len(json.dumps(state)) < 1024
    changed = [[{**MLM, "rate": "0.3"}], [], [{**MLM, "special_ids": []}], [GOLDFISH]]
    for objective in changed:
        with TokenLoader(corpus, **{**settings_of("mlm"), "objective": objective}) as loader:
            with pytest.raises(StateError, match=r"objective: saved .*mlm"):
                loader.load_state_dict(state)
            assert ("objective" in loader.state_dict()["config"]) == bool(objective)
            with pytest.raises(StateError, match="objective: saved "):
                loader.load_state_dict(state, on_change="nearest")


def test_validation_is_left_alone_unless_asked(corpus: Path) -> None:
    common = settings_of("diffusion", split="validation", validation_fraction=0.4)
    with TokenLoader(corpus, **common) as loader, TokenLoader(corpus, **without(common)) as bare:
        for batch, plain in zip(loader, bare, strict=True):
            assert torch.equal(batch["labels"], plain["labels"])
            assert torch.equal(batch["noisy_ids"], plain["input_ids"])
            assert not batch["masked"].any()
            assert not batch["p_mask"].any()
        assert "objective" not in loader.state_dict()["config"]
    asked = {**common, "objective": [{**DIFFUSION, "validation": True}]}
    with TokenLoader(corpus, **asked) as loader:
        assert all(bool(batch["masked"].any()) for batch in loader)


def test_sources_have_their_own(corpus: Path, tmp_path: Path) -> None:
    """And other sources do not change what is drawn for one; a second pass draws anew."""
    other = tmp_path / "other.bin"
    np.arange(1, 30, dtype=np.uint16).repeat(9).tofile(other)
    shared = {**settings_of("diffusion"), "drop_last": True, "outputs": (*OF_DIFFUSION, "source_ids")}
    shared |= {"objective": [DIFFUSION], "total_rows": 256}
    sources = {
        "small": {"corpus": str(other), "weight": 1},
        "big": {"corpus": str(corpus), "weight": 3, "objective": [MLM]},
    }
    found: dict[int, dict[str, Any]] = {}
    with TokenLoader(**shared, mixture=sources) as loader:
        for step, batch in enumerate(loader):
            for number, place in enumerate(batch["row_ids"].tolist()):
                fields = {name: value[number].tolist() for name, value in batch.items()}
                found[place] = {
                    **fields,
                    "from": loader.locate(step, number),
                    "plan": plan_step(loader._schedule, 0, step),
                }
                passes = found[place]["plan"].rows.passes
                found[place]["pass"] = int(passes[number])
    tokens = [np.fromfile(path, np.uint16).astype(int) for path in (other, corpus)]
    passes_seen = set()
    for place, fields in found.items():
        source, start = fields["source_ids"], fields["from"].position
        ids = tokens[source][start : start + T].tolist()
        row = Row(ids, [], T, start, place, 0, fields["pass"], 0, ["small", "big"][source])
        passes_seen.add((source, fields["pass"]))
        if source:
            expected = oracle.mlm(row, MLM, 2 * 2**32 // 5, VOCABULARY)
            assert fields["masked"] == [0] * T
            assert fields["p_mask"] == 0
        else:
            expected = oracle.diffusion(row, DIFFUSION)
        assert {name: fields[name] for name in expected} == expected
    assert (0, 1) in passes_seen
    with TokenLoader(**{**shared, "objective": []} | {"outputs": ("input_ids",)}, mixture=sources) as loader:
        state = loader.state_dict()
        of_sources = state["corpus"]["sources"]
        assert "objective" in of_sources["big"]["rows"]
        assert "objective" not in of_sources["small"]["rows"]
    sources["big"]["objective"] = [DROP]
    changed = TokenLoader(**{**shared, "objective": []} | {"outputs": ("input_ids",)}, mixture=sources)
    with changed, pytest.raises(StateError, match=r"mixture\.big: objective: saved .*mlm"):
        changed.load_state_dict(state, on_change="mixture")


def test_goldfish_in_one_source_alone(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    np.arange(1, 30, dtype=np.uint16).repeat(9).tofile(other)
    sources = {
        "small": {"corpus": str(other), "weight": 1},
        "big": {"corpus": str(corpus), "weight": 3, "objective": [GOLDFISH]},
    }
    shared = {**SHAPE, "total_rows": 128, "outputs": ("input_ids", "labels", "row_ids", "source_ids")}
    plain = {
        name: {key: value for key, value in table.items() if key != "objective"} for name, table in sources.items()
    }
    tokens = np.fromfile(corpus, np.uint16).astype(int)
    begins = np.maximum.accumulate(np.where(np.append(True, tokens[:-1] == END), np.arange(len(tokens)), 0))
    dropped = 0
    with TokenLoader(**shared, mixture=sources) as loader, TokenLoader(**shared, mixture=plain) as other_loader:
        for step, (batch, bare) in enumerate(zip(loader, other_loader, strict=True)):
            for row, source in enumerate(bare["source_ids"].tolist()):
                expected = bare["labels"][row].tolist()
                start = loader.locate(step, row).position
                for t in range(T if source else 0):
                    at = start + t + 1
                    if at - begins[at] >= 3 and is_dropped(tokens[at - 3 : at].tolist(), 3):
                        expected[t] = -100
                        dropped += 1
                assert batch["labels"][row].tolist() == expected
    assert dropped


def test_rates_are_those_asked_for(tmp_path: Path) -> None:
    """Chi-square over 200,000 tokens: chosen or not, and what became of the chosen ones; fixed seeds."""
    ids = np.random.default_rng(0).integers(100, 1000, 200_001).astype(np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    shape = {**SHAPE, "vocab_size": 1000, "seq_len": 1000, "batch_size": 40, "shuffle": False}
    with TokenLoader(tmp_path / "ids.bin", **shape, objective=[{"kind": "mlm", "mask_id": 3}]) as loader:
        batches = list(loader)
    inputs = torch.cat([batch["input_ids"] for batch in batches]).reshape(-1).numpy()
    labels = torch.cat([batch["labels"] for batch in batches]).reshape(-1).numpy()
    chosen = labels != -100
    assert (inputs[~chosen] == ids[:200_000][~chosen]).all()
    assert (labels[chosen] == ids[:200_000][chosen]).all()
    masked, kept = inputs[chosen] == 3, inputs[chosen] == labels[chosen]
    counts = [(~chosen).sum(), masked.sum(), kept.sum(), (~masked & ~kept).sum()]
    assert chi_square(counts, [0.85, 0.15 * 0.8, 0.15 * (0.1 + 0.1 / 1000), 0.15 * 0.1 * 0.999]) < 16.3  # p = 0.001
    random = inputs[chosen][~masked & ~kept]
    assert chi_square(np.bincount(random // 100, minlength=10), [0.1] * 10) < 27.9


def chi_square(counts: Any, shares: list[float]) -> float:
    expected = np.array(shares) / sum(shares) * np.sum(counts)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


def test_masked_shares_lie_once_in_each_stratum(tmp_path: Path) -> None:
    np.ones(64 * 8 * 4 + 1, np.uint16).tofile(tmp_path / "ones.bin")
    settings = {**settings_of("diffusion"), "seq_len": 8, "batch_size": 64}
    with TokenLoader(tmp_path / "ones.bin", **settings) as loader:
        for batch in loader:
            shares = (batch["p_mask"].double() - 0.001) / 0.999
            assert sorted((shares * 64).int().tolist()) == list(range(64))


def test_words_are_chosen_whole(corpus: Path, tmp_path: Path) -> None:
    starts = (np.arange(VOCABULARY) % 3 == 1).astype(int).tolist()
    (tmp_path / "words.json").write_text(json.dumps(starts))
    entry = {**MLM, "words": str(tmp_path / "words.json")}
    settings = {**settings_of("mlm"), "objective": [entry]}
    for row, found in rows_of(corpus, settings, 1):
        assert found == oracle.mlm(row, {**entry, "starts": starts}, 2 * 2**32 // 5, VOCABULARY) or row.place < 0
    with TokenLoader(corpus, **settings) as loader:
        state = loader.state_dict()
    (tmp_path / "words.json").write_text(json.dumps([1, *starts[1:]]))
    with TokenLoader(corpus, **settings) as loader, pytest.raises(StateError, match="objective"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        ({"the": 0, "##re": 1, "[MASK]": 2}, [1, 0, 1]),
        ({"the": 0, "Ġthe": 1, "re": 2}, [0, 1, 0]),
        ({"▁the": 0, "re": 1}, [1, 0]),
        ([["▁the", -1.0], ["re", -2.0]], [1, 0]),
    ],
)
def test_words_of_tokenizers(tmp_path: Path, vocabulary: Any, expected: list[int]) -> None:
    path = tmp_path / "tokenizer.json"
    added = [{"content": "[MASK]", "id": 2}] if "[MASK]" in vocabulary else []
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    assert read_word_starts(str(path)).tolist() == expected


def test_ids_that_are_not_learned_are_not_chosen(corpus: Path) -> None:
    mask = (np.random.default_rng(1).random(corpus.stat().st_size // 2) < 0.5).astype(np.uint8)
    mask.tofile(corpus.with_name("corpus.bin.loss"))
    settings = {**settings_of("mlm"), "objective": [{**MLM, "rate": 1, "special_ids": []}]}
    learned = np.concatenate([mask, [0]])
    with TokenLoader(corpus, **settings) as loader:
        for step, batch in enumerate(loader):
            for row, labels in enumerate(batch["labels"].tolist()):
                if batch["row_ids"][row] < 0:
                    continue
                start = loader.locate(step, row).position
                tokens = np.fromfile(corpus, np.uint16)[start : start + T].tolist()
                can_be = [learned[start + t] and token != MASK for t, token in enumerate(tokens)]
                assert labels == [token if can else -100 for token, can in zip(tokens, can_be, strict=True)]


def test_rows_are_shared_after_they_were_changed(corpus: Path) -> None:
    settings = settings_of("diffusion")
    with TokenLoader(corpus, **settings) as loader:
        whole = next(iter(loader))
    for rank in range(2):
        with TokenLoader(corpus, **settings, context_parallel=(rank, 2)) as loader:
            part = next(iter(loader))
            columns = loader.row_positions()
        for name in ("input_ids", "labels", "noisy_ids", "masked"):
            assert torch.equal(part[name], whole[name][:, columns])
        assert torch.equal(part["p_mask"], whole["p_mask"])


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_masking_is_that_of_the_collator_of_transformers(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code, on the draws of a batch: they stand in for those of torch."""
    from transformers import DataCollatorForLanguageModeling

    settings = {**settings_of("mlm"), "drop_last": True}
    with TokenLoader(corpus, **settings) as loader, TokenLoader(corpus, **without(settings)) as plain:
        batch, bare = next(iter(loader)), next(iter(plain))
        starts = [loader.locate(0, row, 0).position for row in range(SHAPE["batch_size"])]
    keys = [Row([], [], T, start, 0, 0, 0).key for start in starts]
    words = [[oracle.splitmix64(key, 2 * t + 1) for t in range(T)] for key in keys]
    chosen = torch.tensor([[word >> 32 for word in row] for row in words])
    actions = torch.tensor([[word % 2**32 for word in row] for row in words])
    random = [[(oracle.splitmix64(key, 2 * t + 2) >> 32) * VOCABULARY >> 32 for t in range(T)] for key in keys]
    tenth = 2**32 // 10
    answers = iter([actions >= 2 * 2**32 // 10, actions < tenth])

    def bernoulli(shares: torch.Tensor, generator: object = None) -> torch.Tensor:
        if (shares == 0).any() or shares.max() == 0.4:
            return (chosen < (shares.double() * 2**32).floor()).float()
        return next(answers).float()

    class Tokenizer:
        mask_token = "[MASK]"

        def convert_tokens_to_ids(self, token: str) -> int:
            return MASK

        def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
            return [int(token in (END, MASK)) for token in ids]

        def __len__(self) -> int:
            return VOCABULARY

    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    monkeypatch.setattr(torch, "randint", lambda *arguments, **options: torch.tensor(random))
    collator = DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling)
    for name, value in {
        "tokenizer": Tokenizer(),
        "mlm_probability": 0.4,
        "mask_replace_prob": 0.8,
        "random_replace_prob": 0.1,
        "whole_word_mask": False,
        "generator": None,
    }.items():
        object.__setattr__(collator, name, value)
    inputs, labels = collator.torch_mask_tokens(bare["input_ids"].clone())
    assert torch.equal(batch["input_ids"], inputs)
    assert torch.equal(batch["labels"], labels)


def hide_some(batch: dict[str, npt.NDArray[Any]], draws: Any, *, share: int) -> None:
    hidden = (draws.u32() < share) & (np.arange(batch["labels"].shape[1]) < draws.lengths[:, None])
    batch["labels"][hidden] = -100
    batch["input_ids"][:, 0] = draws.of_rows(1) % 5


def test_a_function_of_the_users(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    settings = settings_of("mlm", rows="pack")
    settings["objective"] = {"kind": "test_objectives:hide_some", "options": {"share": 2**31}}
    hidden = 0
    for row, found in rows_of(corpus, settings, 1):
        seed = [oracle.splitmix64(row.key, 2**63 + stream) for stream in range(2)]
        draws = [oracle.splitmix64(seed[0], t + 1) >> 32 for t in range(T)]
        labels = [
            -100 if draw < 2**31 and t < row.length else label
            for t, (draw, label) in enumerate(zip(draws, row.labels, strict=True))
        ]
        if row.place >= 0:
            assert found == {
                "input_ids": [(oracle.splitmix64(seed[1], 1) >> 32) % 5, *row.ids[1:]],
                "labels": labels,
            }
        hidden += labels != row.labels
    assert hidden
    alone = fields_by_row([TokenLoader(corpus, **settings, batches_per_run=1)], 1)
    assert fields_by_row([TokenLoader(corpus, **settings, rank=r, world_size=2) for r in range(2)], 1) == alone
    for kind, message in (("not_there:f", "not_there"), ("test_objectives:missing", "missing")):
        with pytest.raises(ConfigError, match=message):
            TokenLoader(corpus, **{**settings, "objective": {"kind": kind}})
    with pytest.raises(ConfigError, match="share"):
        TokenLoader(corpus, **{**settings, "objective": {"kind": "test_objectives:hide_some"}})


def replace_labels(batch: dict[str, npt.NDArray[Any]], draws: Any) -> None:
    batch["labels"] = batch["labels"] + 1


def add_to_labels(batch: dict[str, npt.NDArray[Any]], draws: Any) -> None:
    batch["labels"] += 1


def return_batch(batch: dict[str, npt.NDArray[Any]], draws: Any) -> dict[str, npt.NDArray[Any]]:
    return batch


def read_weights(batch: dict[str, npt.NDArray[Any]], draws: Any) -> None:
    batch["weights"][:] = 1


def test_what_a_function_would_lose_is_an_error(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def first_labels(name: str | None) -> Any:
        objective = [] if name is None else [{"kind": f"test_objectives:{name}"}]
        with TokenLoader(corpus, **{**settings_of("mlm"), "objective": objective}) as loader:
            return next(iter(loader))["labels"]

    assert torch.equal(first_labels("add_to_labels"), first_labels(None) + 1)
    for name, said in (("replace_labels", "'labels'"), ("return_batch", "dict")):
        with pytest.raises(ConfigError, match=f"{name}.*{said}"):
            first_labels(name)
    with pytest.raises(KeyError, match="weights") as raised:
        first_labels("read_weights")
    assert any("read_weights" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": [{"kind": "mlm"}]}, ["mlm", "mask_id"]),
        ({"objective": [{"kind": "bert"}]}, ["bert", "mlm"]),
        ({"objective": [{"kind": "prefix", "k": 3}]}, ["prefix", "'k'", "shortest"]),
        ({"objective": [{**MLM, "rate": 2}]}, ["rate", "2"]),
        ({"objective": [{**MLM, "mask_id": "<mask>"}]}, ["mask_id", "integer", "'<mask>'"]),
        ({"objective": [{**MLM, "rate": [[5, 0.1]]}]}, ["rate", "5"]),
        ({"objective": [MLM, DIFFUSION]}, ["mlm", "diffusion"]),
        ({"objective": [GOLDFISH, GOLDFISH]}, ["goldfish"]),
        ({"objective": [{**MLM, "mask_id": 40}]}, ["40", "vocab_size"]),
        ({"objective": [MLM], "vocab_size": None}, ["vocab_size", "random"]),
        ({"objective": [MLM], "mtp": 2}, ["mlm", "mtp = 2"]),
        ({"objective": [GOLDFISH], "mtp": 4}, ["h = 3", "mtp = 4"]),
        ({"objective": [GOLDFISH], "label_shift": False}, ["label_shift"]),
        ({"objective": [DIFFUSION]}, ["noisy_ids"]),
        ({"outputs": ["input_ids", "prefix_lengths"]}, ["prefix_lengths", "prefix"]),
        ({"objective": [{**MLM, "random": 0.6, "keep": 0.6}]}, ["random", "keep"]),
        ({"objective": [{"kind": "prefix", "shortest": 0.6, "longest": 0.5}]}, ["shortest", "longest"]),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(corpus="a.bin", **{**SHAPE, **settings})
    assert [word for word in words if word not in str(error.value)] == []


def test_settings_are_written_and_read_again() -> None:
    objective = [{"kind": "prefix", "longest": "1/3"}, GOLDFISH, {"kind": "a.b:c", "options": {"x": [1]}}]
    config = LoaderConfig(corpus="a.bin", **SHAPE, objective=objective)
    assert LoaderConfig(**tomllib.loads(config.to_toml())) == config
    assert config.replace(seed=1).objective == config.objective
    assert hash(config.replace(seed=0)) == hash(config)


@pytest.mark.parametrize("content", [None, "[0, 2]", "{}", "[[1]]", "no JSON"])
def test_wrong_tables_of_words_are_refused(corpus: Path, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "words.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"words.*words\.json"):
        TokenLoader(corpus, **{**settings_of("mlm"), "objective": [{**MLM, "words": str(path)}]})


def test_reports_show_what_is_learned(corpus: Path) -> None:
    config = LoaderConfig(corpus=str(corpus), rank=0, world_size=1, **settings_of("diffusion"))
    preview = preview_batch(config, 0, rows=4, tokens=T)
    with TokenLoader(config) as loader:
        batch = next(iter(loader))
        assert f"diffusion (mask_id = {MASK})" in repr(loader)
    assert preview.objective == f"diffusion (mask_id = {MASK})"
    assert json.loads(json.dumps(preview.as_dict()))["objective"] == preview.objective
    for row, shown in enumerate(preview.rows):
        runs = [run for piece in shown.pieces for run in piece.runs]
        assert [token for run in runs for token in run.ids] == batch["noisy_ids"][row].tolist()
        learned = [label for run in runs for label in run.own_labels or [-100] * len(run.ids)]
        assert learned == batch["labels"][row].tolist()
        assert shown.drawn == {"p_mask": pytest.approx(batch["p_mask"][row].item())}
    step = explain_step(config, 0, all_ranks=True, most=2)
    assert step.objective == preview.objective
    plain = LoaderConfig(corpus=str(corpus), rank=0, world_size=1, **without(settings_of("mlm")))
    assert explain_step(plain, 0, all_ranks=True, most=2).objective is None
    assert "objective" not in preview_batch(plain, 0, rows=1, tokens=T).as_dict()


@pytest.mark.parametrize("kind", ["mlm", "diffusion"])
def test_dali_hands_out_the_same(corpus: Path, kind: str) -> None:
    settings = settings_of(kind, world_size=3, rank=2)
    with TokenLoader(corpus, **settings, engine="dali") as dali, TokenLoader(corpus, **settings) as direct:
        for batch, expected in zip(dali, direct, strict=True):
            assert all(torch.equal(batch[name], value) for name, value in expected.items())
