"""What else trainers ask of a loader: lengths, evaluation, limits, labels that are shifted already."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from counting import CountingCorpus
from recipes import SEQ_LEN, Run, expected_batches, recipe

from dali_pipes import TokenLoader
from dali_pipes.errors import BackendError, ConfigError, StateError
from dali_pipes.huggingface import loader_trainer

HUGGING_FACE = pytest.mark.needs("transformers", "accelerate")
END = 61
"""Id that ends a document."""
LIGHTNING = pytest.mark.needs("lightning")


def changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


@pytest.mark.needs("accelerate")
def test_accelerate_hands_the_loader_back(corpus: CountingCorpus, tmp_path: Path) -> None:
    variables = Run(tmp_path, corpus.pattern).start(changed(recipe("accelerate"), "range(loader.epoch, 2)", "()"))
    loader = variables["loader"]
    assert variables["accelerator"].prepare(loader) is loader
    assert len(variables["accelerator"]._dataloaders) == 0


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    with pytest.raises(BackendError, match=r"dali-pipes\[trainers\]"):
        loader_trainer(cast(Any, object))


@HUGGING_FACE
class TestHuggingFace:
    def test_lengths_and_evaluation(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Steps an epoch, and `eval_loss`: the mean over the split where all its batches are full."""
        source = changed(
            recipe("huggingface"), "save_steps=2", 'save_strategy="no", eval_strategy="steps", eval_steps=3'
        )
        variables = Run(tmp_path, corpus.pattern).start(source)
        trainer, loader, validation = (variables[name] for name in ("trainer", "loader", "validation"))
        assert (len(loader), len(validation)) == (10, 4)
        state = trainer.state
        assert (state.max_steps, state.global_step, state.epoch) == (
            6,
            6,
            2.0,
        )  # 3 steps an epoch, of 4, 4 and 2 batches
        evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
        assert [(entry["step"], entry["epoch"]) for entry in evaluations] == [(3, 1.0), (6, 2.0)]
        with torch.no_grad():
            losses = [float(trainer.model(**batch, shift_labels=batch["labels"]).loss) for batch in validation]
        assert evaluations[-1]["eval_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)

    def test_prediction_and_figures(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """`predict` takes a loader too; samples a second are those of its batch size; no pass is endless."""
        variables = Run(tmp_path, corpus.pattern).start(recipe("huggingface"))
        trainer, loader, validation = (variables[name] for name in ("trainer", "loader", "validation"))
        assert trainer.state.train_batch_size == loader.config.batch_size
        figures = trainer.state.log_history[-1]
        samples = figures["train_samples_per_second"] / figures["train_steps_per_second"]
        rows = 2 * len(loader) * loader.config.batch_size  # of two epochs
        assert samples == pytest.approx(rows / trainer.state.global_step, rel=0.01)
        found = trainer.predict(validation)
        with torch.no_grad():
            logits = [trainer.model(**batch).logits for batch in validation]
        assert np.array_equal(found.predictions, torch.cat(logits).numpy())
        endless = TokenLoader(validation.config.replace(repeat=True))
        with endless, pytest.raises(ConfigError, match="repeat = True: "):
            trainer.evaluate(endless)

    @pytest.mark.slow
    def test_max_steps_run_on_over_epochs(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        source = changed(recipe("huggingface"), "num_train_epochs=2, save_steps=2", "max_steps=8, save_steps=5")
        run = Run(tmp_path, corpus.pattern)
        loader = run.start(source)["loader"]
        assert run.batches == expected_batches(loader, 3)[: 10 + 10 + 4 + 4]
        stopped = Run(tmp_path / "stopped", corpus.pattern)
        stopped.start(source, 25)
        stopped.start(source)
        assert stopped.kept[-1] == 10 + 4 + 4  # behind step 5, the second of the second epoch
        assert stopped.batches == run.batches

    def test_a_resume_with_another_batch_size_is_refused(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Trainer would skip batches that it has not had."""
        run = Run(tmp_path, corpus.pattern)
        run.start(recipe("huggingface"), 12)
        with pytest.raises(StateError, match="gradient_accumulation_steps = "):
            run.start(changed(recipe("huggingface"), 'batch_size": 3', 'batch_size": 2'))

    @pytest.mark.parametrize("accumulation", [2, 8])
    def test_a_resume_with_another_accumulation_is_refused(
        self, corpus: CountingCorpus, tmp_path: Path, accumulation: int
    ) -> None:
        run = Run(tmp_path, corpus.pattern)
        source = recipe("huggingface")
        run.start(source, 12)
        with pytest.raises(StateError, match="gradient_accumulation_steps = "):
            run.start(changed(source, "accumulation_steps=4", f"accumulation_steps={accumulation}"))
        with pytest.raises(ConfigError, match="ignore_data_skip"):
            run.start(changed(source, "accumulation_steps=4", "accumulation_steps=4, ignore_data_skip=True"))

    def test_a_checkpoint_of_another_trainer_is_refused(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """It says nothing of the loader, which would begin again while the model goes on."""
        run = Run(tmp_path, corpus.pattern)
        run.start(recipe("huggingface"), 12)
        for path in tmp_path.glob("run/checkpoint-*/trainer_state.json"):
            content = json.loads(path.read_text())
            del content["stateful_callbacks"]["TokenLoaderState"]
            path.write_text(json.dumps(content))
        with pytest.raises(StateError, match="loader_trainer"):
            run.start(recipe("huggingface"))

    def test_a_model_that_would_shift_again_is_refused(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        source = recipe("huggingface")
        deaf = "model.forward = lambda input_ids, labels=None: None\narguments = "
        with pytest.raises(ConfigError, match="label_shift = False"):
            Run(tmp_path, corpus.pattern).start(changed(source, "arguments = ", deaf))

    def test_steps_that_are_left_out_are_refused(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Trainer asks for the length of an epoch once, and counts off batches that a resumed run has had."""
        source = changed(
            recipe("huggingface"), "TokenLoader(**settings),", "TokenLoader(**settings, skip_steps=[[2, 4]]),"
        )
        with pytest.raises(ConfigError, match="skip_steps"):
            Run(tmp_path, corpus.pattern).start(source)

    def test_labels_of_a_type_that_the_loss_does_not_take_are_refused(
        self, corpus: CountingCorpus, tmp_path: Path
    ) -> None:
        source = changed(
            recipe("huggingface"), "TokenLoader(**settings),", 'TokenLoader(**settings, index_dtype="int32"),'
        )
        with pytest.raises(ConfigError, match='index_dtype = "int32"'):
            Run(tmp_path, corpus.pattern).start(source)

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"objective": {"kind": "mlm", "mask_id": 60, "random": 0}, "label_shift": False}, ["mlm", "label_shift"]),
            (
                {"objective": {"kind": "diffusion", "mask_id": 60}, "outputs": ["input_ids", "labels", "noisy_ids"]},
                ["diffusion", "noisy_ids", "compute_loss"],
            ),
        ],
        ids=["mlm", "diffusion"],
    )
    def test_an_objective_that_the_model_would_not_learn_is_refused(
        self, corpus: CountingCorpus, tmp_path: Path, settings: dict[str, Any], named: list[str]
    ) -> None:
        """Labels at their own positions must not be shifted, and masked ids must be what the model sees."""
        source = changed(
            recipe("huggingface"), "TokenLoader(**settings),", f"TokenLoader(**{{**settings, **{settings}}}),"
        )
        with pytest.raises(ConfigError) as refused:
            Run(tmp_path, corpus.pattern).start(source)
        assert all(name in str(refused.value) for name in named)
        if "noisy_ids" in named:
            loss = "lambda _, model, *__, **___: next(model.parameters()).sum()"
            own = f"class Trainer(Trainer):\n    compute_loss = {loss}\n"
            assert Run(tmp_path / "own", corpus.pattern).start(changed(source, "arguments = ", f"{own}arguments = "))

    def test_batches_of_differing_numbers_of_rows_are_refused(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        source = changed(
            recipe("huggingface"),
            "TokenLoader(**settings),",
            'TokenLoader(**{**settings, "batch_size": 1}, rows="pad", eos_id=61, batch_tokens=4096),',
        )
        with pytest.raises(ConfigError, match=r"batch_tokens = 4,096.*batch_size"):
            Run(tmp_path, corpus.pattern).start(source)

    def test_other_data_sets_are_left_to_trainer(self, tmp_path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        rows = [{"input_ids": torch.arange(SEQ_LEN), "labels": torch.arange(SEQ_LEN)}] * 6
        tiny: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=2, per_device_train_batch_size=3
        )
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=2, num_key_value_heads=2, **tiny))
        trainer = loader_trainer(Trainer)(model, arguments, train_dataset=rows, eval_dataset={"rows": rows})
        trainer.train()
        assert trainer.state.global_step == 2
        assert trainer.evaluate()["eval_rows_loss"] > 0

    def test_labels_that_are_shifted_already(self, tmp_path: Path) -> None:
        """`shift_labels` is taken as it is: boundaries stay masked, and the label behind the last input counts."""
        tokens = np.arange(400) % 61
        tokens[::5] = END
        tokens.astype(np.uint16).tofile(tmp_path / "tokens.bin")
        fraction = '"validation_fraction": 0.3'
        masked = f'{fraction}, "eos_id": {END}, "mask_boundaries": True'
        source = changed(recipe("huggingface"), fraction, masked)
        source = changed(source, "gradient_accumulation_steps=4", "gradient_accumulation_steps=1, max_steps=1")
        variables = Run(tmp_path, str(tmp_path / "tokens.bin")).start(source)
        torch.manual_seed(0)
        untrained = variables["LlamaForCausalLM"](variables["model"].config)
        with TokenLoader(variables["loader"].config) as fresh, torch.no_grad():
            batch = next(iter(fresh))
            logits = untrained(input_ids=batch["input_ids"]).logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert (batch["labels"] == -100).any()
        assert (batch["labels"][:, -1] != -100).all()
        loss = variables["trainer"].state.log_history[0]["loss"]
        assert loss == pytest.approx(float(expected), rel=1e-5)


@LIGHTNING
class TestLightning:
    def test_lengths_and_validation(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Half an epoch apart, all rows of the split each time; the loaders are ours, without a sampler put in."""
        calls = 'self.validated = [*getattr(self, "validated", []), (self.global_step, batch["input_ids"].shape[0])]'
        source = changed(recipe("lightning"), "        sums = {", f"        {calls}\n        sums = {{")
        variables = Run(tmp_path, corpus.pattern).start(source)
        trainer, loader, validation = (variables[name] for name in ("trainer", "loader", "validation"))
        assert trainer.train_dataloader is loader
        assert trainer.val_dataloaders is validation
        assert trainer.num_training_batches == len(loader) == 10
        assert trainer.num_val_batches == [len(validation)] == [5]
        assert trainer.estimated_stepping_batches == 20
        sanity_check = [(0, 3), (0, 3)]
        whole = [(step, rows) for step in (5, 10, 15, 20) for rows in (3, 3, 3, 3, 1)]
        assert trainer.lightning_module.validated == sanity_check + whole
        sums = trainer.callback_metrics
        assert float(sums["labels"]) == 13 * SEQ_LEN
        with torch.no_grad():
            loss = sum(
                float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
                for batch in validation
                for logits, labels in [(trainer.model.layers(batch["input_ids"]), batch["labels"])]
            )
        assert float(sums["loss"]) == pytest.approx(loss, rel=1e-5)

    @pytest.mark.slow
    def test_epochs_of_batches_by_tokens(self, tmp_path: Path) -> None:
        """Epochs differ in their number of batches, and Lightning takes each one whole, in its order."""
        import lightning

        draw = np.random.default_rng(0)
        ends = [*np.cumsum(draw.choice([1, 3, 5, 12, 25], 70)).tolist()]
        tokens = np.ones(ends[-1], np.uint16)
        tokens[np.array(ends) - 1] = END
        tokens.tofile(tmp_path / "tokens.bin")
        seen: list[tuple[int, int]] = []

        class Model(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Embedding(64, 2), torch.nn.Linear(2, 64))

            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                seen.append((self.current_epoch, int(batch["row_ids"][0])))
                logits, labels = self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                mean: torch.Tensor = loss / (labels != -100).sum().clamp(min=1)
                return mean

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters())

        settings: dict[str, Any] = {"corpus": str(tmp_path / "tokens.bin"), "eos_id": END, "rows": "pad", "seq_len": 16}
        settings |= {"batch_tokens": 40, "window_documents": 9, "outputs": ("input_ids", "labels", "row_ids")}
        with TokenLoader(**settings, device="cpu", quiet=True) as loader:
            counts = [loader._schedule.rows_known(epoch) for epoch in range(4)]
            options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            options["reload_dataloaders_every_n_epochs"] = 1
            trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", default_root_dir=tmp_path, **options)
            trainer.fit(Model(), loader)
        assert len(set(counts)) > 1
        assert seen == [(epoch, place) for epoch, count in enumerate(counts) for place in range(count)]

    def test_accumulated_gradients_survive_a_stop(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """10 batches in steps of 4, 4 and 2; the checkpoint is behind the second step of the second epoch."""
        source = changed(recipe("lightning"), "max_epochs=2", "max_epochs=2, accumulate_grad_batches=4")
        source = changed(source, "every_n_train_steps=2", "every_n_train_steps=5")
        whole, run = (Run(tmp_path / name, corpus.pattern) for name in ("whole", "broken"))
        expected = whole.start(source)["trainer"].model.state_dict()
        run.start(source, 19)
        found = run.start(source)["trainer"].model.state_dict()
        assert run.kept == [18]
        assert run.batches == whole.batches
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_a_limited_epoch(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Each epoch has its own order, from its beginning. A stop within one is made good; one at its end is not."""
        source = changed(recipe("lightning"), "max_epochs=2", "max_epochs=2, limit_train_batches=7")
        source = changed(source, "every_n_train_steps=2", "every_n_train_steps=1")
        whole = Run(tmp_path / "whole", corpus.pattern)
        loader = whole.start(source)["loader"]
        epochs = expected_batches(loader, 2)
        assert whole.batches == epochs[:7] + epochs[10:17]
        within, at_end = (Run(tmp_path / name, corpus.pattern) for name in ("within", "at_end"))
        within.start(source, 6)
        within.start(source)
        assert within.batches == whole.batches
        at_end.start(source, 8)
        at_end.start(source)
        assert at_end.batches == epochs[:10]  # goes on in the first epoch, and stops at its end

    def test_another_batch_size_within_an_epoch_leaves_batches_out(
        self, corpus: CountingCorpus, tmp_path: Path
    ) -> None:
        """Lightning takes the 4 batches of 3 rows that it had for 4 of the 6 of 5 rows that an epoch has now."""
        run = Run(tmp_path, corpus.pattern)
        run.start(recipe("lightning"), 6)
        loader = run.start(changed(recipe("lightning"), 'batch_size": 3', 'batch_size": 5'))["loader"]
        rows = [row for batch in expected_batches(loader, 2, batch_size=1) for row in batch]
        found = [row for batch in run.batches[-8:] for row in batch]
        assert found == rows[12:22] + rows[30:60]

    def test_a_checkpoint_behind_an_epoch(self, corpus: CountingCorpus, tmp_path: Path) -> None:
        """Saved by steps, it is gone on from; of `save_on_train_epoch_end` Lightning loads no loader's state."""
        whole = Run(tmp_path / "whole", corpus.pattern)
        whole.start(recipe("lightning"))
        by_steps, by_epochs = (Run(tmp_path / name, corpus.pattern) for name in ("by_steps", "by_epochs"))
        by_steps.start(changed(recipe("lightning"), "every_n_train_steps=2", "every_n_train_steps=10"), 12)
        by_steps.start(recipe("lightning"))
        assert by_steps.kept == [10]
        assert by_steps.batches == whole.batches
        source = changed(recipe("lightning"), "every_n_train_steps=2", "every_n_epochs=1, save_on_train_epoch_end=True")
        by_epochs.start(source, 12)
        by_epochs.start(source)
        assert by_epochs.kept == []
        assert by_epochs.batches == whole.batches[:10]  # a second time
