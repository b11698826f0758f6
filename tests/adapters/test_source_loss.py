"""The mean loss of each source is that of a plain loop over labels, and adding never waits for a device."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from torch import Tensor

from dali_pipes import SourceLoss, TokenLoader
from dali_pipes.errors import ConfigError

NAMES = ("web", "code", "math")
IGNORED = -100
SETTINGS: dict[str, Any] = {
    "mixture": {
        name: {"corpus": f"synthetic:{size}", "weight": 1} for name, size in zip(NAMES, (900, 500, 300), strict=True)
    },
    "total_rows": 30,
    "batch_size": 4,
    "seq_len": 8,
    "vocab_size": 50,
    "outputs": ("input_ids", "labels", "source_ids"),
    "device": "cpu",
    "quiet": True,
}


@pytest.fixture(scope="module")
def loader() -> Iterator[TokenLoader]:
    with TokenLoader(**SETTINGS) as made:
        yield made


def expected_means(added: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """By source, of (source ids, loss, weight), each with an entry for each loss."""
    products, weights_of = defaultdict(list), defaultdict(list)
    for sources, losses, weights in added:
        for source, loss, weight in zip(
            sources.flatten().tolist(),
            losses.double().flatten().tolist(),
            weights.double().flatten().tolist(),
            strict=True,
        ):
            if source >= 0 and weight:
                products[source].append(loss * weight)
                weights_of[source].append(weight)
    return {NAMES[s]: math.fsum(products[s]) / math.fsum(weights_of[s]) for s in range(len(NAMES)) if weights_of[s]}


def on_meta(arguments: Any) -> Any:
    """The same tensors without their values, as on a device that has not computed them yet."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments)


def random_batch(generator: np.random.Generator, rows: int, width: int, mtp: int) -> dict[str, Tensor]:
    """With padding rows and ignored labels."""
    sources = generator.integers(-1, len(NAMES), rows)
    labels = generator.integers(0, 50, (rows, width, mtp) if mtp else (rows, width))
    labels[generator.random(labels.shape) < generator.choice([0, 0.5, 1])] = IGNORED
    labels[sources < 0] = IGNORED
    return {"source_ids": torch.from_numpy(sources), "labels": torch.from_numpy(labels)}


@settings(max_examples=examples(60))
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4),
    form=st.sampled_from(["labels", "flat", "rows", "weights"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_means_are_those_of_a_loop(
    loader: TokenLoader, shapes: list[tuple[int, int, int]], form: str, dtype: torch.dtype, seed: int
) -> None:
    """What does not count is NaN, and must not be seen. Nothing waits for a value."""
    generator = np.random.default_rng(seed)
    by_source, added = SourceLoss(loader), []
    without_values = SourceLoss(loader, device="meta")
    for shape in shapes:
        batch = random_batch(generator, *shape)
        counted = batch["labels"] != IGNORED
        losses = torch.from_numpy(generator.exponential(3, counted.shape)).to(dtype)
        weights = counted.double()
        if form == "rows":
            weights = weights.flatten(1).sum(1)
            losses = losses.flatten(1)[:, 0]
        elif form == "weights":
            weights = torch.from_numpy(generator.integers(0, 3, counted.shape) * generator.random(counted.shape))
        losses[weights == 0] = math.nan
        losses[batch["source_ids"] < 0] = math.nan
        given_losses = losses.flatten() if form == "flat" else losses
        arguments = (batch, given_losses.requires_grad_(), weights if form == "weights" else None)
        by_source.add(*arguments)
        without_values.add(*on_meta(arguments))
        sources = batch["source_ids"].reshape(-1, *[1] * (losses.ndim - 1)).expand(losses.shape)
        added.append((sources, losses.detach(), weights))
    means = by_source.means()
    expected = expected_means(added)
    assert list(means) == [name for name in NAMES if name in expected]
    assert means == pytest.approx(expected, rel=1e-12)


def test_reading_a_value_of_a_tensor_without_values_fails() -> None:
    """Which is why adding to such a tensor shows that nothing waits for a device."""
    rows = torch.tensor([1, 0, 2]).to("meta")
    for wait in (lambda: rows[0].item(), rows.tolist, lambda: rows[rows > 0], lambda: bool((rows > 0).any())):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


def test_written_out(loader: TokenLoader) -> None:
    by_source = SourceLoss(loader)
    assert by_source.means() == {}
    batch = {
        "source_ids": torch.tensor([1, 0, -1]),
        "labels": torch.tensor([[5, 9, IGNORED], [7, 3, 8], [IGNORED] * 3]),
    }
    losses = torch.tensor([[2.0, 4.0, 9.9], [1.0, 0.5, 1.5], [7.0, 7.0, 7.0]])
    by_source.add(batch, losses)
    assert by_source.means() == {"web": 1.0, "code": 3.0}
    by_source.add(batch, torch.tensor([6.0, 2.0, math.nan]))
    assert by_source.means() == {"web": 1.5, "code": 4.5}
    by_source.reset()
    assert by_source.means() == {}
    by_source.add(batch, losses, weights=torch.tensor([[0, 0, 1], [0, 0, 0], [1, 1, 1]]))
    assert by_source.means() == {"code": pytest.approx(9.9)}
    by_source.add(batch, torch.full((3, 3), math.nan))
    assert math.isnan(by_source.means()["web"]), "a loss that counts and is not a number shows"


def test_many_small_losses_do_not_get_lost(loader: TokenLoader) -> None:
    """As in float32, where a sum stops to grow at 2**24."""
    by_source = SourceLoss(loader)
    batch = {"source_ids": torch.tensor([0])}
    by_source.add(batch, torch.tensor([1.0]), weights=torch.tensor([2.0**40]))
    for _ in range(8):
        by_source.add(batch, torch.tensor([2.0**40 + 1], dtype=torch.float64), weights=torch.tensor([1]))
    assert by_source.means()["web"] * (2**40 + 8) == 2**40 + 8 * (2**40 + 1)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"drop_last": False, "total_rows": 29, "batch_size": 3, "world_size": 2, "rank": 1},
        {"mtp": 2},
        {"label_shift": False},
        {"static_buffers": True},
        {"batches_per_run": 3},
        {"rows": "pack", "eos_id": 7},
    ],
)
def test_batches_of_a_loader(how: dict[str, Any]) -> None:
    """With the padding rows, labels and source ids that a loader gives."""
    added, paddings = [], 0
    with TokenLoader(**{**SETTINGS, **how}) as made:
        by_source = SourceLoss(made)
        for number, batch in enumerate(made):
            labels = batch["labels"][:, 1:] if how.get("label_shift") is False else batch["labels"]
            losses = labels.double().square() + number
            by_source.add(batch, losses)
            sources = batch["source_ids"].clone().reshape(-1, *[1] * (labels.ndim - 1)).expand(labels.shape)
            added.append((sources, losses, labels != IGNORED))
            paddings += int((batch["source_ids"] < 0).sum())
        assert by_source.means() == pytest.approx(expected_means(added), rel=1e-12)
    assert (paddings > 0) == ("drop_last" in how)
    assert len(added) > 1


def test_context_parallel_shares_add_up() -> None:
    means, sums = {}, defaultdict(list)
    for parallel in (None, (0, 2), (1, 2)):
        with TokenLoader(**SETTINGS, context_parallel=parallel) as made:
            by_source = SourceLoss(made)
            counts = dict.fromkeys(NAMES, 0)
            for batch in made:
                by_source.add(batch, batch["labels"].double())
                for source, labels in zip(batch["source_ids"].tolist(), batch["labels"], strict=True):
                    counts[NAMES[source]] += int((labels != IGNORED).sum())
            if parallel is None:
                means = by_source.means()
            else:
                for name, mean in by_source.means().items():
                    sums[name].append((mean * counts[name], counts[name]))
    for name in NAMES:
        totals = np.sum(sums[name], axis=0)
        assert len(sums[name]) == 2
        assert means[name] == pytest.approx(totals[0] / totals[1])


def test_compiled_and_in_inference_mode(loader: TokenLoader) -> None:
    """Without a break in the graph; an object made in inference mode works outside."""
    with torch.inference_mode():
        by_source = SourceLoss(loader)
    generator = np.random.default_rng(1)
    batches = [random_batch(generator, 4, 8, 0) for _ in range(3)]
    torch.manual_seed(0)
    weight = torch.rand(50, requires_grad=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses = weight[batch["labels"].clamp(min=0)]
        by_source.add(batch, losses)
        return losses.mean()

    compiled: Callable[[dict[str, Tensor]], Tensor] = torch.compile(step, backend="aot_eager", fullgraph=True)
    added = []
    for batch in batches:
        torch.autograd.backward(compiled(batch))
        counted = batch["labels"] != IGNORED
        added.append(
            (
                batch["source_ids"][:, None].expand(counted.shape),
                weight.detach()[batch["labels"].clamp(min=0)],
                counted,
            )
        )
    assert weight.grad is not None
    assert by_source.means() == pytest.approx(expected_means(added), rel=1e-12)
    before = by_source.means()
    with torch.inference_mode():
        for batch in batches:
            step(batch)
    assert by_source.means() == pytest.approx(before)


def test_ranks_add_up(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Every rank gets the means of all; without a group, its own. Sources that one rank alone has seen are there."""
    script = """
    import json, sys
    import torch
    import torch.distributed as dist
    from dali_pipes import SourceLoss, TokenLoader

    rank, world_size = map(int, sys.argv[1:3])
    settings = json.loads(sys.argv[3])
    with TokenLoader(**settings, rank=rank, world_size=world_size) as loader:
        by_source = SourceLoss(loader)
        report = {"counts": [], "before": by_source.means(dist.group.WORLD)}
        dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=world_size)
        for step, batch in enumerate(loader):
            if rank == 1 and step == 0:
                batch["source_ids"][:] = -1
            losses = batch["labels"].double() + rank
            by_source.add(batch, losses)
            rows = zip(batch["source_ids"].tolist(), losses.sum(1).tolist(), strict=True)
            report["counts"] += [(source, loss, losses.shape[1]) for source, loss in rows if source >= 0]
        for _ in range(2):
            report["all"] = by_source.means(dist.group.WORLD)
        report["own"] = by_source.means()
    print(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
    """
    reports = run_ranks(script, 2, json.dumps(SETTINGS), tmp_path / "store")

    def means_of(counts: list[tuple[int, float, int]]) -> dict[str, float]:
        found = {}
        for number, name in enumerate(NAMES):
            rows = [row for row in counts if row[0] == number]
            if rows:
                found[name] = sum(row[1] for row in rows) / sum(row[2] for row in rows)
        return found

    everything = means_of(reports[0]["counts"] + reports[1]["counts"])
    for report in reports:
        assert report["before"] == {}
        assert report["all"] == pytest.approx(everything, rel=1e-12)
        assert report["own"] == pytest.approx(means_of(report["counts"]), rel=1e-12)
    assert reports[0]["all"] == reports[1]["all"]
    assert reports[0]["own"] != reports[1]["own"]


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ({"mixture": None, "total_rows": None, "corpus": "synthetic:900"}, ["SourceLoss", "mixture"]),
        ({"outputs": ("input_ids", "labels")}, ["SourceLoss", "source_ids", "['input_ids', 'labels']", "outputs"]),
    ],
)
def test_loaders_that_do_not_fit_are_refused(how: dict[str, Any], facts: list[str]) -> None:
    wanted = {**SETTINGS, **how}
    if how.get("corpus"):
        wanted["outputs"] = ("input_ids", "labels")
    with TokenLoader(**wanted) as made, pytest.raises(ConfigError) as caught:
        SourceLoss(made)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("shape", "weights", "facts"),
    [
        ((), None, ["()", "(4,), (4, 8) or (32,)"]),
        ((8, 4), None, ["(8, 4)", "(4, 8)"]),
        ((4, 7), None, ["(4, 7)", "(4, 8)"]),
        ((31,), None, ["(31,)", "(32,)"]),
        ((4, 8, 1), None, ["(4, 8, 1)", "(4, 8)"]),
        ((4, 8), (4, 7), ["(4, 8)", "(4, 7)"]),
        ((4, 8), (4, 1), ["(4, 8)", "(4, 1)"]),
        ((8, 4), (8, 4), ["(8, 4)", "4 rows"]),
        ((31,), (31,), ["(31,)", "4 rows"]),
        ((), (), ["()", "4 rows"]),
    ],
)
def test_other_shapes_are_refused(
    loader: TokenLoader, shape: tuple[int, ...], weights: tuple[int, ...] | None, facts: list[str]
) -> None:
    by_source = SourceLoss(loader)
    batch = random_batch(np.random.default_rng(0), 4, 8, 0)
    with pytest.raises(ConfigError) as caught:
        by_source.add(batch, torch.zeros(shape), None if weights is None else torch.ones(weights))
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert by_source.means() == {}


@pytest.mark.parametrize("missing", ["source_ids", "labels"])
def test_a_missing_output_is_named(loader: TokenLoader, missing: str) -> None:
    batch = random_batch(np.random.default_rng(0), 4, 8, 0)
    del batch[missing]
    with pytest.raises(ConfigError, match=missing):
        SourceLoss(loader).add(batch, torch.zeros(4, 8))


def test_another_device_is_refused_and_can_be_named(loader: TokenLoader) -> None:
    batch = random_batch(np.random.default_rng(0), 4, 8, 0)
    with pytest.raises(ConfigError, match=r"losses are on meta.*cpu.*device="):
        SourceLoss(loader).add(batch, torch.zeros(4, 8, device="meta"))
    elsewhere = SourceLoss(loader, device="meta")
    with pytest.raises(ConfigError, match=r"losses are on cpu.*meta"):
        elsewhere.add(batch, torch.zeros(4, 8))
    elsewhere.add(*on_meta((batch, torch.zeros(4, 8))))
