"""Hugging Face's `Trainer` on a `TokenLoader`: batches are used as they are, and runs resume exactly.

    trainer = loader_trainer(Trainer)(model, arguments, train_dataset=loader, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=True)

Trainer normally passes a `DataLoader` to its `accelerator`, which splits batches over the ranks. A loader's batches are
already split, so it bypasses that.

Trainer assumes that all epochs are as long as the first, and derives the epoch and the batch from its optimizer steps.
If epochs are equally long, that is right: a resumed Trainer skips batches by iterating, and gets numbers instead of
data, so nothing is read for them. Epochs of packed rows differ in length. For these Trainer gets one endless epoch and
skips nothing; the loader's state alone says where the run is.
"""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dali_pipes.adapters.attention import varlen_args
from dali_pipes.adapters.trainer_settings import (
    refuse_hook,
    refuse_loss,
    refuse_old_liger,
    refuse_settings,
    refuse_token_batches,
)
from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.announcements import speaks_for_all
from dali_pipes.loader.token_loader import TokenLoader
from dali_pipes.runtime.messages import say_once
from dali_pipes.runtime.optional import optional_package
from dali_pipes.schedule import Position

if TYPE_CHECKING:
    from transformers import Trainer

    AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

CALLBACK = "TokenLoaderState"
"""Name of the loader's state in a checkpoint's `trainer_state.json`."""


class EndlessBatches(torch.utils.data.IterableDataset[Any]):
    """The batches of a loader, epoch after epoch, with the argument names of transformers' models.

    Shifted labels are also passed as `shift_labels`, so that the model does not shift them again; `cu_seqlens` and
    `max_seqlen` also under the names that its flash attention takes.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader
        self.is_over = False
        """Whether a resumed run has already done all its steps, so that no batch follows."""

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over:
            yield from self._epoch()

    def _epoch(self) -> Iterator[Any]:
        config = self.loader.config
        shifted = config.label_shift and "labels" in config.outputs
        segments = {"cu_seqlens", "max_seqlen"} <= set(config.outputs) and config.context_parallel is None
        for batch in self.loader:
            if shifted:
                batch = {**batch, "shift_labels": batch["labels"]}
            yield {**batch, **_flash_arguments(batch)} if segments else batch


class Batches(EndlessBatches):
    """The batches of one epoch, after one number for each batch that a resumed Trainer skips."""

    def __init__(self, loader: TokenLoader) -> None:
        super().__init__(loader)
        self.counted_off = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        numbers, self.counted_off = range(self.counted_off), 0
        if not self.is_over:
            yield from numbers
            yield from self._epoch()


def _flash_arguments(batch: Any) -> dict[str, Any]:
    """The arguments of flash attention, as transformers names them: `cu_seq_lens_q`, `max_length_q`, ..."""
    names = {"cu_seqlens": "cu_seq_lens", "max_seqlen": "max_length"}
    return {names[name[:-2]] + name[-2:]: value for name, value in varlen_args(batch).items()}


def _epochs_differ(loader: TokenLoader) -> bool:
    """Whether epochs differ in length: documents in another order pack into another number of rows, and rows grow."""
    return loader.config.rows == "pack" or loader.config.changes_length


def _keep_apart(config: LoaderConfig, model: Any, use_cache: bool) -> str | None:
    """What to change so that documents packed into a row do not attend to each other; None if they do not.

    With a mask, transformers separates documents by `position_ids`, but only without an `attention_mask` and without a
    cache. Its flash attention does not take a mask: it needs `cu_seqlens`, and derives them only for one-row batches.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if config.rows != "pack" or attention is None:
        return None
    names, changes = ["position_ids"], []
    if "flash" in attention and (config.batch_size > 1 or "position_ids" not in config.outputs):
        names = ["cu_seqlens", "max_seqlen"]
    missing = [f'"{name}"' for name in names if name not in config.outputs]
    if missing:
        changes.append(f"add {' and '.join(missing)} to outputs")
    if "attention_mask" in config.outputs:
        changes.append('leave "attention_mask" out of outputs')
    if use_cache and "flash" not in attention:
        changes.append("set use_cache = False in TrainingArguments")
    return ", ".join(changes) or None


def _begin_epoch(loader: TokenLoader) -> None:
    """Go back to the beginning of the current epoch."""
    state = loader.state_dict()
    epoch, step = state["epoch"], loader.step
    if state["rows"]:
        loader.load_state_dict(loader._states.at(Position(epoch, 0)))
        _say(loader.config, f"training starts at the beginning of epoch {epoch}; the loader was at batch {step}")


def _say(config: LoaderConfig, text: str) -> None:
    if not config.quiet and speaks_for_all(config):
        say_once(text)


def loader_trainer(trainer: "type[AnyTrainer]") -> "type[AnyTrainer]":
    """A subclass of transformers' `Trainer`, or of a subclass of it, that accepts `TokenLoader`s as datasets.

    Its checkpoints contain the loader's state. `per_device_train_batch_size` and `per_device_eval_batch_size` are set
    to the loaders' batch sizes, which Trainer's statistics use. Other datasets are handled by Trainer as usual.

    `train()` without a checkpoint starts at the beginning of the loader's current epoch, even if batches of it were
    inspected before or used by a run that `max_steps` ended. With `rows="pack"`, where epochs differ in length,
    `max_steps` sets the length of a run and `ConfigError` is raised without it; accumulation continues from one epoch
    into the next, and what Trainer does at the end of an epoch happens after the step that reaches it.

    `label_smoothing_factor` applies to the loader's labels, all T of a row. Hooks that take labels
    (`compute_loss_func`, `compute_metrics`, `preprocess_logits_for_metrics`) get the loader's shifted labels and must
    declare that they expect them: `compute_metrics.labels_are_shifted = True`. `label_ids` of `predict()` are shifted
    too.

    If epochs are equally long, `train()` raises `StateError` when it resumes with another accumulation or global batch
    size, which Trainer's step count cannot represent. The constructor raises `ConfigError` for a model or a hook that
    would shift labels a second time, for a loader with `skip_steps`, and for settings that only apply to a dataset.
    This function raises `BackendError` without transformers.
    """
    with optional_package("transformers", "trainers", purpose="for Hugging Face Trainer"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.trainer_callback import DefaultFlowCallback, ExportableState, TrainerCallback

    def state_callback(own: Any, loader: TokenLoader) -> Any:
        class Callback(TrainerCallback, ExportableState):
            def state(self) -> dict[str, Any]:
                # Trainer rebuilds the callback from `args` when it resumes, so they cannot include the loader.
                counted = {"accumulation": own.args.gradient_accumulation_steps}
                return {"args": {}, "attributes": {**counted, "loader": loader.state_dict()}}

            def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                saved = state.stateful_callbacks.get(CALLBACK, {}).get("attributes")
                if saved is None:
                    raise StateError(
                        "the checkpoint does not contain a loader state: it was not saved by loader_trainer"
                    )
                loader.load_state_dict(saved["loader"])
                if not state.global_step:
                    _begin_epoch(loader)
                elif not _epochs_differ(loader):
                    own.train_batches.counted_off = counted_off(args, state, saved)
                own.train_batches.is_over = state.global_step >= state.max_steps
                self.epoch, self.batches = loader.epoch, len(loader)

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if _epochs_differ(loader):  # Trainer sees a single endless epoch
                    at_end, self.epoch = loader.epoch > self.epoch, loader.epoch
                    state.epoch = self.epoch + min(loader.step / self.batches, 1)
                    if at_end and not control.should_training_stop:
                        DefaultFlowCallback().on_epoch_end(args, state, control)

        def counted_off(args: Any, state: Any, saved: Any) -> int:
            accumulation, step_rows = args.gradient_accumulation_steps, loader.state_dict()["step_rows"]
            if args.ignore_data_skip:
                raise ConfigError(
                    "ignore_data_skip = True: set it to False; a loader skips batches without reading them"
                )
            saved_with = saved["accumulation"], saved["loader"].get("step_rows", step_rows)
            if saved_with != (accumulation, step_rows):
                raise StateError(
                    f"the checkpoint was saved with gradient_accumulation_steps = {saved_with[0]} and {saved_with[1]} "
                    f"rows per step over all ranks; this run has {accumulation} and {step_rows}, so Trainer would skip "
                    "the wrong batches. Resume with the same number of ranks, batch size, and accumulation"
                )
            count: int = state.global_step % -(-len(loader) // accumulation) * accumulation
            if count != loader.step:
                raise StateError(
                    f"the checkpoint was saved after batch {loader.step} of its epoch, but Trainer places its step "
                    f"{state.global_step} after batch {count}: an epoch ended early, which Trainer's step count cannot "
                    "represent"
                )
            return count

        Callback.__name__ = Callback.__qualname__ = CALLBACK
        return Callback()

    def whole(batches: EndlessBatches) -> Any:
        # A separate generator: an iterator draws a seed, and would change the random state that a resume restored.
        return torch.utils.data.DataLoader(batches, batch_size=None, generator=torch.Generator())

    def one_pass(own: Any, loader: TokenLoader) -> Any:
        if loader.config.repeat:
            raise ConfigError("repeat = True: evaluation would never end; set repeat = False on the evaluation loader")
        refuse_labels(own, loader)
        refuse_hook("compute_metrics", own.compute_metrics, loader.config)
        refuse_hook("preprocess_logits_for_metrics", own.preprocess_logits_for_metrics, loader.config)
        return whole(Batches(loader))

    def refuse_labels(own: Any, loader: TokenLoader) -> None:
        refuse_token_batches(loader.config)
        refuse_loss(own, loader.config, own.model, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())

    class LoaderTrainer(trainer):  # type: ignore[misc, valid-type]
        label_smoother: Any

        def __init__(self, *arguments: Any, **options: Any) -> None:
            given = inspect.signature(super().__init__).bind(*arguments, **options).arguments
            super().__init__(*arguments, **options)
            for data, name in (
                (self.train_dataset, "per_device_train_batch_size"),
                (self.eval_dataset, "per_device_eval_batch_size"),
            ):
                if isinstance(data, TokenLoader):
                    setattr(self.args, name, data.config.batch_size)
                    if data is self.train_dataset:
                        self._train_batch_size = data.config.batch_size  # Trainer has just copied it
                    refuse_labels(self, data)
                    change = _keep_apart(data.config, self.model, self.args.use_cache)
                    if change:
                        _say(
                            data.config,
                            f'rows = "pack": documents packed into a row will attend to each other; {change}',
                        )
            if isinstance(self.eval_dataset, TokenLoader):
                one_pass(self, self.eval_dataset)
            if isinstance(self.train_dataset, TokenLoader):
                is_alone = self.eval_dataset is None or isinstance(self.eval_dataset, TokenLoader)
                collator = given.get("data_collator", options.get("data_collator")) if is_alone else None
                refuse_settings(self, self.train_dataset.config, collator)
                if self.train_dataset.config.skip_steps:
                    raise ConfigError(
                        "skip_steps: Trainer assumes that all epochs have the same number of steps; use skip_steps in "
                        "your own training loop"
                    )
                self.add_callback(state_callback(self, self.train_dataset))

        def set_initial_training_values(self, args: Any, *others: Any, **options: Any) -> Any:
            data = self.train_dataset
            if isinstance(data, TokenLoader) and _epochs_differ(data):
                if args.max_steps <= 0:
                    steps = max(1, round(args.num_train_epochs * len(data) / args.gradient_accumulation_steps))
                    raise ConfigError(
                        f'num_train_epochs = {args.num_train_epochs:g}: with rows = "pack" epochs differ in length, '
                        f"but Trainer assumes equal lengths; set max_steps instead, here about {steps}"
                    )
                args.ignore_data_skip = True
            return super().set_initial_training_values(args, *others, **options)

        def get_train_dataloader(self) -> Any:
            data = self.train_dataset
            if not isinstance(data, TokenLoader):
                return super().get_train_dataloader()
            if self.args.use_liger_kernel and data.config.label_shift:
                refuse_old_liger(self.model)
            self.train_batches = EndlessBatches(data) if _epochs_differ(data) else Batches(data)
            return whole(self.train_batches)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            data = self.eval_dataset if eval_dataset is None else eval_dataset
            data = self.eval_dataset[data] if isinstance(data, str) else data
            return one_pass(self, data) if isinstance(data, TokenLoader) else super().get_eval_dataloader(eval_dataset)

        def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
            smoother, labels = self.label_smoother, inputs.get("shift_labels")
            if smoother is None or labels is None:
                return super().compute_loss(model, inputs, *others, **options)

            def smoothed(outputs: Any, _: Any, shift_labels: bool = False, **counts: Any) -> Any:
                return smoother(outputs, labels, **counts)  # Trainer would shift the labels of a causal model

            if not self.model_accepts_loss_kwargs:  # its own loss is not used
                inputs = {name: value for name, value in inputs.items() if name != "shift_labels"}
            self.label_smoother = smoothed
            try:
                return super().compute_loss(model, inputs, *others, **options)
            finally:
                self.label_smoother = smoother

        def num_examples(self, dataloader: Any) -> int:
            batches = getattr(dataloader, "dataset", None)
            if isinstance(batches, Batches):
                return len(batches) * batches.loader.config.batch_size
            count: int = super().num_examples(dataloader)
            return count

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            is_ours = isinstance(test_dataset, TokenLoader)
            return one_pass(self, test_dataset) if is_ours else super().get_test_dataloader(test_dataset)

    LoaderTrainer.__name__ = LoaderTrainer.__qualname__ = f"Loader{trainer.__name__}"
    return LoaderTrainer
