"""A Hugging Face Trainer that goes on from every checkpoint of a run, with epochs of equal and of different lengths."""

import gc
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Outcome, Training, documents, outcome

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.runtime.messages import say_once

pytestmark = pytest.mark.needs("transformers", "accelerate")

EPOCHS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "14-13-14-13": ({"count": 60, "shortest": 1, "longest": 11, "seed": 25}, {"window_documents": 12}),
    "14-16-15-16": ({"count": 24, "shortest": 2, "longest": 13, "seed": 144}, {"window_documents": 4, "batch_size": 1}),
}
"""By the lengths of four epochs: documents, and the settings that pack them."""


@pytest.fixture(params=list(EPOCHS))
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Training:
    made_of, settings = EPOCHS[request.param]
    packing: dict[str, Any] = {"rows": "pack", "drop_last": False, **settings}
    run = Training(tmp_path, {"corpus": documents(tmp_path / "data", **made_of), **packing})
    assert [len(epoch) for epoch in run.epochs(4)] == [int(length) for length in request.param.split("-")]
    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So little is computed that threads only wait for each other; and Trainer collects garbage at each start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    say_once.cache_clear()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["stream", "pad"])
def equal(request: pytest.FixtureRequest, tmp_path: Path) -> Training:
    """Epochs of 11 or 12 batches."""
    corpus = documents(tmp_path / "data", count=24, shortest=2, longest=13, seed=1)
    return Training(
        tmp_path, {"corpus": corpus, "rows": request.param, "seq_len": 8 if request.param == "stream" else 16}
    )


def flat(epochs: list[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(epochs))


SOME_OR_ALL = pytest.mark.parametrize(
    "everywhere", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)
"""Go on from the checkpoints at the ends of epochs and a few others, or from all of them."""


def goes_on(run: Training, whole: Outcome, everywhere: bool = True, **arguments: Any) -> list[int]:
    """Resume from checkpoints: rows, weights and number of steps are those of the whole run. Returns all there are."""
    steps = run.checkpoints()
    for step in steps:
        state = json.loads(Path(run.checkpoint(step), "trainer_state.json").read_text())
        of_loader = state["stateful_callbacks"]["TokenLoaderState"]["attributes"]["loader"]
        at_end = of_loader["rows"] <= run.settings["batch_size"]
        if not (everywhere or at_end or step % 15 == 0 or step == steps[-1]):
            continue
        rest = run.start(run.checkpoint(step), **arguments)
        assert rest.batches == whole.batches[len(whole.batches) - len(rest.batches) :], f"checkpoint {step}"
        assert all(map(torch.equal, rest.weights, whole.weights)), f"checkpoint {step}"
        assert rest.trainer.state.global_step == whole.trainer.state.global_step
    return steps


@SOME_OR_ALL
@pytest.mark.parametrize(
    ("packed", "accumulation"),
    [
        ("14-13-14-13", 2),
        ("14-13-14-13", 3),
        pytest.param("14-16-15-16", 1, marks=pytest.mark.slow),
        pytest.param("14-13-14-13", 1, marks=pytest.mark.slow),
        pytest.param("14-16-15-16", 2, marks=pytest.mark.slow),
        pytest.param("14-16-15-16", 3, marks=pytest.mark.slow),
    ],
    indirect=["packed"],
)
def test_packed_rows_go_on_from_every_checkpoint(packed: Training, accumulation: int, everywhere: bool) -> None:
    """Through four epochs: no batch is left out, and a group of accumulated batches runs on into the next epoch."""
    batches = flat(packed.epochs(5))
    steps = -(-sum(map(len, packed.epochs(4))) // accumulation)
    arguments: dict[str, Any] = {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    whole = packed.start(**arguments, save_steps=1)
    assert whole.batches == batches[: steps * accumulation]
    assert goes_on(packed, whole, everywhere, **arguments) == list(range(1, steps + 1))


@SOME_OR_ALL
@pytest.mark.parametrize(
    ("equal", "limit", "accumulation"),
    [
        ("stream", "num_train_epochs", 2),
        ("stream", "max_steps", 3),
        ("pad", "num_train_epochs", 3),
        ("pad", "max_steps", 1),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in [
                ("stream", "num_train_epochs", 1),
                ("stream", "num_train_epochs", 3),
                ("stream", "max_steps", 1),
                ("stream", "max_steps", 2),
                ("pad", "num_train_epochs", 1),
                ("pad", "num_train_epochs", 2),
                ("pad", "max_steps", 2),
                ("pad", "max_steps", 3),
            ]
        ),
    ],
    indirect=["equal"],
)
def test_equal_epochs_go_on_from_every_checkpoint(
    equal: Training, accumulation: int, limit: str, everywhere: bool
) -> None:
    """A group ends with its epoch, so the last one may be smaller; `max_steps` end a run within an epoch."""
    epochs = equal.epochs(3)
    an_epoch = -(-len(epochs[0]) // accumulation)
    arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    arguments |= {limit: 3 if limit == "num_train_epochs" else 2 * an_epoch + 2}
    whole = equal.start(**arguments, save_steps=1)
    assert (
        whole.batches == flat(epochs)[: None if limit == "num_train_epochs" else 2 * len(epochs[0]) + 2 * accumulation]
    )
    goes_on(equal, whole, everywhere, **arguments)


@pytest.mark.parametrize(
    ("changes", "accumulation"),
    [
        pytest.param({"batch_size": 3}, 3, id="3x3"),
        pytest.param({"batch_size": 1}, 2, id="1x2", marks=pytest.mark.slow),
        pytest.param({"batch_size": 4}, 1, id="4x1", marks=pytest.mark.slow),
        pytest.param({}, 5, id="2x5", marks=pytest.mark.slow),
    ],
)
def test_packed_rows_go_on_with_another_batch_size_and_accumulation(
    packed: Training, changes: dict[str, int], accumulation: int
) -> None:
    """Rows are without a gap or a repeat, and the run ends behind `max_steps`, at every place of an epoch."""
    rows = flat(flat(packed.epochs(18)))
    whole = packed.start(max_steps=30, save_steps=1)
    for step in (13, 14, 15, 28, 30):
        had = len(flat(whole.batches[:step]))
        rest = packed.start(
            packed.checkpoint(step), changes=changes, max_steps=32, gradient_accumulation_steps=accumulation
        )
        found = flat(rest.batches)
        assert len(rest.batches) == (32 - step) * accumulation
        assert found == rows[had : had + len(found)]


def test_packed_rows_are_limited_by_steps(packed: Training) -> None:
    with pytest.raises(ConfigError, match=r"num_train_epochs = 3: .*max_steps .*\b21\b"):
        packed.start(num_train_epochs=3, gradient_accumulation_steps=2)


def test_what_is_done_at_an_epochs_end(packed: Training) -> None:
    """Once an epoch, behind the step that reaches its end; the last one where the run ends. All can be gone on from."""
    ends = list(itertools.accumulate(map(len, packed.epochs(3))))
    arguments: dict[str, Any] = {"max_steps": ends[-1] + 2, "save_strategy": "epoch", "logging_strategy": "epoch"}
    whole = packed.start(**arguments)
    assert packed.checkpoints() == [*ends, ends[-1] + 2]
    logged = [entry for entry in whole.trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [*ends, ends[-1] + 2]
    assert [entry["epoch"] for entry in logged[:3]] == [1.0, 2.0, 3.0]
    assert 3 < logged[3]["epoch"] < 3.2
    goes_on(packed, whole, **arguments)


def test_an_epoch_that_was_ended_early_is_refused(equal: Training) -> None:
    """By a callback: Trainer counts in whole epochs, so it would count off others than it has had."""
    from transformers import TrainerCallback

    class EndsEarly(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_epoch_stop = state.global_step == 4

    equal.start(num_train_epochs=2, save_steps=6, callbacks=[EndsEarly()])
    with pytest.raises(StateError, match=r"\bbatch 2\b.*\bbatch 6\b"):
        equal.start(equal.checkpoint(6), num_train_epochs=2)


def test_another_batch_size_behind_an_epoch_is_refused(equal: Training) -> None:
    """Where both count the batches of the next epoch from 0, too: Trainer would take other epochs for had."""
    equal.start(num_train_epochs=2, save_strategy="epoch")
    checkpoint = equal.checkpoint(equal.checkpoints()[0])
    with pytest.raises(StateError, match=r"gradient_accumulation_steps = \d+ and 2 rows .*\b1 and 1\b"):
        equal.start(checkpoint, changes={"batch_size": 1}, num_train_epochs=2)


def held(loader: TokenLoader, trainer: Any) -> Any:
    batches = iter(loader)
    next(batches)
    return batches


def left(loader: TokenLoader, trainer: Any) -> None:
    for _ in loader:
        break


LOOKS: dict[str, Callable[[TokenLoader, Any], Any]] = {
    "iterator held": held,
    "iterator dropped": lambda loader, trainer: next(iter(loader)),
    "for left": left,
    "through the trainer": lambda loader, trainer: next(iter(trainer.get_train_dataloader())),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_looking_at_a_batch_uses_nothing_up(
    look: Callable[[TokenLoader, Any], Any], rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = documents(tmp_path / "data", count=24, shortest=2, longest=13, seed=1)
    run = Training(tmp_path, {"corpus": corpus, "rows": rows, "quiet": rows == "pack"})
    expected = flat(run.epochs(6))[:20]
    capsys.readouterr()
    with TokenLoader(**run.settings) as loader:
        trainer = run.trainer(loader, max_steps=20, gradient_accumulation_steps=1)
        batches = look(loader, trainer)
        trainer.train()
        del batches
    assert outcome(trainer).batches == expected
    said = [line for line in capsys.readouterr().err.splitlines() if re.search(r"\bepoch 0\b.*\bbatch 1\b", line)]
    assert len(said) == (rows == "stream")


def test_training_again_begins_the_epoch_again(packed: Training) -> None:
    """Behind a run that `max_steps` ended within an epoch; behind one that ended with it, the next epoch."""
    first, second, third = packed.epochs(3)
    with TokenLoader(**packed.settings) as loader:
        trainer = packed.trainer(loader, max_steps=len(first) + 5)
        trainer.train()
        assert trainer.model.batches == first + second[:5]
        trainer.model.batches.clear()
        trainer.args.max_steps = len(second)
        trainer.train()
        assert trainer.model.batches == second
        trainer.model.batches.clear()
        trainer.args.max_steps = 3
        trainer.train()
        assert trainer.model.batches == third[:3]
