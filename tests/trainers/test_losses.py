"""The loss and the gradients of each step of transformers' Trainer, against those worked out from the same batches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dali_pipes import TokenLoader
from dali_pipes.adapters.trainer_settings import refuse_old_liger, refuse_settings
from dali_pipes.errors import ConfigError
from dali_pipes.huggingface import loader_trainer

pytestmark = pytest.mark.needs("transformers", "accelerate")

VOCAB = 64
SMOOTHING = 0.2
KINDS: dict[str, dict[str, Any]] = {
    "shifted": {},
    "not shifted": {"label_shift": False},
    "masked at boundaries": {"mask_boundaries": True},
    "packed": {"rows": "pack", "outputs": ("input_ids", "labels", "position_ids")},
    "padded": {"rows": "pad"},
    "padded to buckets": {"rows": "pad", "length_buckets": (6, 12, 24)},
}
HOOK_ERROR = r".*labels_are_shifted = True.*label_shift = False"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 24 tokens, so that batches differ widely in how many labels they have."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 24, 60)
    tokens = random.integers(1, VOCAB, lengths.sum() + len(lengths))
    tokens[np.cumsum(lengths + 1) - 1] = 0
    path = tmp_path_factory.mktemp("losses") / "tokens.bin"
    tokens.astype(np.uint16).tofile(path)
    return str(path)


def loader_of(corpus: str, **settings: Any) -> TokenLoader:
    common = {"eos_id": 0, "batch_size": 2, "seq_len": 24, "device": "cpu", "quiet": True}
    return TokenLoader(corpus=corpus, **{**common, **settings})


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads))


class Unshifted(torch.nn.Module):
    """A model that Trainer does not know, with logits alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
        self.config = SimpleNamespace(use_cache=False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(input_ids)}


def trainer_of(folder: Path, model: Any, hooks: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A Trainer whose model stays what it is; it notes the gradients of each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Notes(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            trainer.gradients.append([value.grad.clone() for value in others["model"].parameters()])

    data = {name: arguments.pop(name) for name in ("train_dataset", "eval_dataset") if name in arguments}
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    settings |= {"logging_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 3}
    whole = TrainingArguments(str(folder), **{**settings, **arguments})
    trainer: Any = loader_trainer(Trainer)(model, whole, callbacks=[Notes()], **data, **(hooks or {}))
    trainer.gradients = []
    return trainer


def summed(model: Any, batch: dict[str, Any], smoothing: float, label_shift: bool) -> tuple[torch.Tensor, int]:
    """Loss over the labels of a batch, and how many those are."""
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "position_ids")}
    output, labels = model(**inputs), batch["labels"]
    logits = output["logits"]
    if not label_shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.flatten(0, 1), labels.flatten()
    loss = cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss, int((labels != -100).sum())


def expected_steps(model: Any, loader: TokenLoader, smoothing: float, accumulation: int, steps: int) -> list[Any]:
    """Loss and gradients of each step: the mean over the labels of all its batches."""
    with TokenLoader(loader.config, repeat=True) as fresh:
        batches = iter(fresh)
        found = []
        for _ in range(steps):
            parts = [summed(model, next(batches), smoothing, loader.config.label_shift) for _ in range(accumulation)]
            loss = torch.stack([part for part, _ in parts]).sum() / sum(count for _, count in parts)
            found.append((loss.item(), torch.autograd.grad(loss, list(model.parameters()))))
    return found


def assert_steps(trainer: Any, expected: list[Any]) -> None:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert len(trainer.gradients) == len(expected)
    for found, (_, wanted) in zip(trainer.gradients, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("smoothing", "accumulation"),
    [
        (0.0, 3),
        (SMOOTHING, 1),
        pytest.param(0.0, 1, marks=pytest.mark.slow),
        pytest.param(SMOOTHING, 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_means_over_their_labels(
    corpus: str, tmp_path: Path, kind: str, smoothing: float, accumulation: int
) -> None:
    model = llama()
    with loader_of(corpus, **KINDS[kind]) as loader:
        arguments: dict[str, Any] = {
            "label_smoothing_factor": smoothing,
            "gradient_accumulation_steps": accumulation,
        }
        trainer = trainer_of(tmp_path, model, train_dataset=loader, **arguments)
        trainer.train()
        assert_steps(trainer, expected_steps(model, loader, smoothing, accumulation, 3))


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_mean_of_its_batches(corpus: str, tmp_path: Path, kind: str, smoothing: float) -> None:
    model = llama()
    with loader_of(corpus, **KINDS[kind]) as loader:
        trainer = trainer_of(tmp_path, model, eval_dataset=loader, label_smoothing_factor=smoothing)
        found = trainer.evaluate()["eval_loss"]
        again = trainer.evaluate()["eval_loss"]
        for loss in (found, again):
            with TokenLoader(loader.config) as fresh, torch.no_grad():
                if loss is again:
                    list(fresh)  # the epoch before
                sums = [summed(model, batch, smoothing, loader.config.label_shift) for batch in fresh]
            assert loss == pytest.approx(float(np.mean([float(part) / count for part, count in sums])), rel=1e-4)


def test_smoothing_of_a_model_that_knows_no_labels(corpus: str, tmp_path: Path) -> None:
    """Trainer takes its loss from the logits, so it needs no `shift_labels`."""
    model = Unshifted()
    with loader_of(corpus) as loader:
        trainer = trainer_of(tmp_path, model, train_dataset=loader, label_smoothing_factor=SMOOTHING)
        trainer.train()
        assert_steps(trainer, expected_steps(model, loader, SMOOTHING, 1, 3))
        with pytest.raises(ConfigError, match=r"Unshifted .*label_shift = False"):
            trainer_of(tmp_path, model, train_dataset=loader)
    with loader_of(corpus, label_shift=False) as loader, pytest.raises(ConfigError, match="set label_shift = True"):
        trainer_of(tmp_path, model, train_dataset=loader, label_smoothing_factor=SMOOTHING)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])  # of no effect beside the function, as without a loader
@pytest.mark.parametrize("label_shift", [True, False])
def test_a_loss_function(corpus: str, tmp_path: Path, label_shift: bool, smoothing: float, accumulation: int) -> None:
    model = llama()

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"]
        if not label_shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss: torch.Tensor = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        mean: torch.Tensor = loss / num_items_in_batch
        return mean

    arguments: dict[str, Any] = {"label_smoothing_factor": smoothing, "gradient_accumulation_steps": accumulation}
    changes: dict[str, Any] = {"mask_boundaries": True} if label_shift else {"label_shift": False}
    with loader_of(corpus, **changes) as loader:
        hooks = {"compute_loss_func": loss_of}
        if label_shift:
            with pytest.raises(ConfigError, match=f"compute_loss_func: {HOOK_ERROR}"):
                trainer_of(tmp_path, model, hooks, train_dataset=loader, **arguments)
            loss_of.labels_are_shifted = True  # type: ignore[attr-defined]
        trainer = trainer_of(tmp_path, model, hooks, train_dataset=loader, **arguments)
        trainer.train()
        assert_steps(trainer, expected_steps(model, loader, 0.0, accumulation, 3))


@pytest.mark.parametrize("hook", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_hooks_that_take_labels(corpus: str, tmp_path: Path, hook: str) -> None:
    """They get the labels as the loader has them, which is what they have to say they know."""
    taken = []

    def noting(*arguments: Any) -> Any:
        taken.append(arguments[0].label_ids if hook == "compute_metrics" else arguments[1])
        return {} if hook == "compute_metrics" else arguments[0]

    with loader_of(corpus, batch_size=4) as loader, loader_of(corpus, batch_size=4, label_shift=False) as plain:
        with pytest.raises(ConfigError, match=f"{hook}: {HOOK_ERROR}"):
            trainer_of(tmp_path, llama(), {hook: noting}, eval_dataset=loader)
        trainer = trainer_of(tmp_path, llama(), {hook: noting}, eval_dataset=plain)
        for take in (trainer.evaluate, trainer.predict):
            with pytest.raises(ConfigError, match=f"{hook}: {HOOK_ERROR}"):
                take(loader)
        assert taken == []
        for data in (loader, plain):
            noting.labels_are_shifted = data is loader  # type: ignore[attr-defined]
            taken.clear()
            (trainer.evaluate if hook == "compute_metrics" else trainer.predict)(data)
            with TokenLoader(data.config) as fresh:
                expected = np.concatenate([batch["labels"].numpy() for batch in fresh])
            assert np.array_equal(np.concatenate([np.asarray(labels) for labels in taken]), expected)


REFUSED: dict[str, dict[str, Any]] = {
    "data_seed = 7": {"data_seed": 7},
    'train_sampling_strategy = "group_by_length"': {"train_sampling_strategy": "group_by_length"},
    "dataloader_drop_last = True": {"dataloader_drop_last": True},
    "auto_find_batch_size = True": {"auto_find_batch_size": True},
    "accelerator_config: split_batches = True": {"accelerator_config": {"split_batches": True}},
    "accelerator_config: dispatch_batches = True": {"accelerator_config": {"dispatch_batches": True}},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_only_a_data_set_could_follow(corpus: str, tmp_path: Path, setting: str) -> None:
    with loader_of(corpus, drop_last=False) as loader:
        with pytest.raises(ConfigError, match=setting):
            trainer_of(tmp_path, llama(), train_dataset=loader, **REFUSED[setting])
        trainer_of(tmp_path, llama(), eval_dataset=loader, **REFUSED[setting])  # they are about training


def test_trainer_makes_the_optimizer_steps_of_the_loader_or_refuses(corpus: str, tmp_path: Path) -> None:
    rows = 4
    for global_batch, accumulation, words in (
        (3 * rows, 2, r"gradient_accumulation_steps = 2: .*12.*gradient_accumulation_steps = 3"),
        ([[0, rows], [99, 2 * rows]], 1, r"4 to 8 rows"),
    ):
        with (
            loader_of(corpus, batch_size=rows, global_batch=global_batch) as loader,
            pytest.raises(ConfigError, match=words),
        ):
            trainer_of(tmp_path, llama(), train_dataset=loader, gradient_accumulation_steps=accumulation)
    with loader_of(corpus, batch_size=rows, global_batch=3 * rows) as loader:
        trainer_of(tmp_path, llama(), train_dataset=loader, gradient_accumulation_steps=3)


def test_settings_that_say_what_the_loader_says(corpus: str, tmp_path: Path) -> None:
    with loader_of(corpus, seed=7) as loader:
        trainer_of(tmp_path, llama(), train_dataset=loader, data_seed=7, dataloader_drop_last=True)


def test_a_collator_has_nothing_to_put_together(corpus: str, tmp_path: Path) -> None:
    from transformers import default_data_collator

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 6
    hooks = {"data_collator": default_data_collator}
    with loader_of(corpus) as loader:
        with pytest.raises(ConfigError, match="data_collator: "):
            trainer_of(tmp_path, llama(), hooks, train_dataset=loader)
        assert trainer_of(tmp_path, llama(), hooks, train_dataset=loader, eval_dataset=rows).evaluate()["eval_loss"] > 0


def test_ranks_that_share_rows(corpus: str, tmp_path: Path) -> None:
    """Played: several ranks would be needed, each with a part of the model."""
    with loader_of(corpus) as loader:
        trainer = trainer_of(tmp_path, llama(), train_dataset=loader)
        args, config = trainer.args, loader.config

        def played(processes: int, **sizes: int) -> Any:
            parallel = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, **sizes})
            accelerator = SimpleNamespace(parallelism_config=parallel, num_processes=processes)
            return SimpleNamespace(args=args, accelerator=accelerator, get_tp_size=lambda: sizes.get("tp_size", 1))

        for sizes in ({"cp_size": 2}, {"sp_size": 2}):
            with pytest.raises(ConfigError, match="context_parallel"):
                refuse_settings(played(2, **sizes), config, None)
        with pytest.raises(ConfigError, match="rank and world_size = 2"):
            refuse_settings(played(4, tp_size=2), config.replace(rank=0, world_size=4), None)
        refuse_settings(played(4, tp_size=2), config.replace(rank=0, world_size=2), None)


def test_liger(corpus: str, tmp_path: Path) -> None:
    """Played: its kernels need a GPU. What is looked at is whether its `forward` knows `shift_labels`."""

    class Old(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: Any = None, **others: Any) -> Any:
            shift_labels = labels[..., 1:]
            return shift_labels, input_ids, others

    class New(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: Any = None, **others: Any) -> Any:
            return others.pop("shift_labels", None), input_ids, labels

    refuse_old_liger(New())
    with pytest.raises(ConfigError, match=r"liger-kernel .*label_shift = False"):
        refuse_old_liger(Old())
    with loader_of(corpus) as loader, pytest.raises(ConfigError, match="label_smoothing_factor and use_liger_kernel: "):
        trainer_of(tmp_path, llama(), train_dataset=loader, use_liger_kernel=True, label_smoothing_factor=SMOOTHING)
