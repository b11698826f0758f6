"""The order is a pure function of (seed, epoch), and nothing else in the process is disturbed or has a say."""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import epoch_batches
from streams import all_same, loader_stream, oracle_stream, take

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.errors import TokenRangeError

T = 4
Load = Callable[..., TokenLoader]
ORDER: dict[str, Any] = {"batch_size": 5, "seq_len": T, "seed": 11}


def order_of(loader: Any) -> list[int]:
    """Windows of one epoch, in the order in which they are served."""
    return [int(row[0]) // T for batch in loader for row in batch["input_ids"]]


def global_states() -> tuple[Any, ...]:
    """What Python's, NumPy's and torch's global generators are about to draw."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    numpy_state = (name, np.asarray(keys).tolist(), *rest)
    return random.getstate(), numpy_state, torch.get_rng_state().tolist(), torch.initial_seed()


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def test_epochs_and_seeds_have_orders_of_their_own(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """Also neighbouring seeds, and seed and epoch exchanged."""
    corpus = counting(401)
    orders = {}
    for seed in (0, 1, 2, 11, 2**32, 2**63, 2**64 - 1):
        loader = load(corpus, batch_size=5, seq_len=T, seed=seed)
        for epoch in range(3):
            orders[seed, epoch] = order_of(loader)
            assert sorted(orders[seed, epoch]) == list(range(100))
    for one, other in itertools.combinations(orders, 2):
        places_in_common = sum(a == b for a, b in zip(orders[one], orders[other], strict=True))
        assert places_in_common < 15, (one, other)  # 1 on average, and more than 14 in one of 10^11 pairs
        assert orders[one][1:] != orders[other][:-1]


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_an_epoch_does_not_depend_on_how_it_was_reached(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """Run through, left early, loaded, repeated."""
    corpus = counting(401)
    expected = list(epoch_batches(corpus.tokens, epoch=3, **ORDER))
    through, left_early, loaded = (load(corpus, **ORDER) for _ in range(3))
    for _ in range(3):
        list(through)
        take(left_early, 1)
    take(loaded, 3)
    loaded.load_state_dict({**loaded.state_dict(), "epoch": 3, "rows": 0})
    repeating = load(corpus, **ORDER, repeat=True)
    assert len(take(repeating, 60)) == 60
    for loader in (through, left_early, loaded):
        assert all_same(loader, expected)
    repeating.load_state_dict(loaded.state_dict() | {"epoch": 3})
    assert all_same(take(repeating, 20), expected)


def test_a_fresh_process(counting: Callable[..., Any], run_script: Callable[..., Any]) -> None:
    """With other global seeds, another hash seed, another number of threads, and from another folder."""
    corpus = counting(200, 201)
    source = """
        import hashlib, os, random, sys
        import numpy as np
        import torch
        from dali_pipes import TokenLoader

        random.seed(99)
        np.random.seed(99)
        torch.manual_seed(99)
        torch.set_num_threads(3)
        digest = hashlib.sha256()
        with TokenLoader(corpus=sys.argv[1], dtype="uint32", batch_size=5, seq_len=4, seed=11, device="cpu") as loader:
            for epoch in range(3):
                for batch in loader:
                    digest.update(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes())
        print(digest.hexdigest())
    """
    expected = hashlib.sha256()
    for batch in take(oracle_stream(corpus.tokens, **ORDER), 60):
        expected.update(batch["input_ids"].tobytes() + batch["labels"].tobytes())
    done = run_script(source, corpus.pattern, environment={**os.environ, "PYTHONHASHSEED": "4321"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.hexdigest()


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_global_generators_are_left_alone(counting: Callable[..., Any], engine: str) -> None:
    """Building, reading, saving, loading, an error, closing."""
    corpus = counting(401)
    seed_everything(1)
    before = global_states()
    common: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "device": "cpu", **ORDER}
    with TokenLoader(**common, vocab_size=400) as loader, pytest.raises(TokenRangeError):
        list(loader)
    with TokenLoader(**common) as loader:
        assert len(take(loader_stream(loader), 25)) == 25
        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        loader.locate(0, 0)
        loader.stats()
    if engine == "dali":
        pipe = build_pipeline(LoaderConfig(**common))
        pipe.build()
        pipe.run()
        del pipe
    assert global_states() == before


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_two_loaders_side_by_side(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """A second loader, built and read in between, and draws from every global generator, change nothing."""
    corpus, other_corpus = counting(401), counting(150, 151, name="other")
    other_order: dict[str, Any] = {**ORDER, "seed": 12, "batch_size": 3}
    seed_everything(7)
    undisturbed = [draw() for _ in range(30)]
    seed_everything(7)
    drawn = []
    stream = loader_stream(load(corpus, batches_per_run=3, **ORDER))
    expected = oracle_stream(corpus.tokens, **ORDER)
    others = []
    for step in range(30):
        assert all_same([next(stream)], [next(expected)])
        drawn.append(draw())
        if step % 10 == 3:
            others.append((load(other_corpus, **other_order), oracle_stream(other_corpus.tokens, **other_order)))
        for other, other_expected in others[-2:]:
            assert all_same(take(other, 1), take(other_expected, 1))
            take(other_expected, len(other) - 1)  # leaving a `for` after one batch ends that epoch
        if step == 17:
            others.pop(0)[0].close()
    assert drawn == undisturbed


def test_two_loaders_over_the_same_files_in_lockstep(counting: Callable[..., Any], load: Load) -> None:
    """Training and evaluation over one corpus, and two copies of the same loader, each keep their own place."""
    corpus = counting(1001)
    order: dict[str, Any] = {**ORDER, "validation_fraction": 0.2}
    training, copy = load(corpus, **order), load(corpus, **order, batches_per_run=1)
    evaluation = load(corpus, **order, split="validation")
    for step, (one, two) in enumerate(zip(training, copy, strict=True)):
        assert all(torch.equal(one[name], two[name]) for name in one)
        if step % 7 == 0:
            evaluated = [int(row[0]) for batch in evaluation for row in batch["input_ids"]]
            assert evaluated == list(range(801, 801 + 4 * len(evaluated), 4))
    assert training.state_dict() == copy.state_dict()
    assert training.epoch == 1
    assert evaluation.epoch == -(-len(training) // 7)
