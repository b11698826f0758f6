"""Hugging Face's `Trainer` on a `TokenLoader`: its own batches, neither sharded nor collated again, resumed exactly.

    trainer = loader_trainer(Trainer)(model, arguments, train_dataset=loader, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=True)

Trainer passes a `DataLoader` over an iterable data set through its `accelerator`, which shares its batches out over the
ranks; ours are shared out already, so the loader goes in as it is.

Trainer takes every epoch for as long as the first, and works out from its optimizer steps how many batches of which
epoch it has had. Where epochs are equally long that is right: a resumed Trainer counts off, by iterating, what it has
had, is given as many numbers, and no data is read for them. Epochs of packed rows differ in length. There Trainer gets
one epoch without an end and is told to count nothing off; where the run stands is for the loader's state to say.
"""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dali_pipes.adapters.attention import varlen_args
from dali_pipes.adapters.trainer_settings import refuse_hook, refuse_loss, refuse_old_liger, refuse_settings
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
"""Under this name `trainer_state.json` of a checkpoint keeps the loader's state."""


class EndlessBatches(torch.utils.data.IterableDataset[Any]):
    """The batches of a loader, epoch after epoch, under the names that models of transformers know.

    Labels that are shifted already go to the model as `shift_labels` too, or it would shift them again; `cu_seqlens`
    and `max_seqlen` also as what its flash attention asks for.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader
        self.is_over = False
        """Whether a resumed run has had all its steps: there is no batch more."""

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
    """Those of one epoch; before them a number for each batch that a resumed Trainer counts off."""

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
    """What flash attention takes, under the names that transformers has for it: `cu_seq_lens_q`, `max_length_q`, ..."""
    names = {"cu_seqlens": "cu_seq_lens", "max_seqlen": "max_length"}
    return {names[name[:-2]] + name[-2:]: value for name, value in varlen_args(batch).items()}


def _epochs_differ(loader: TokenLoader) -> bool:
    """Whether epochs differ in length: another order of the documents packs into another number of rows."""
    return loader.config.rows == "pack"


def _keep_apart(config: LoaderConfig, model: Any, use_cache: bool) -> str | None:
    """What to change so that documents packed into a row do not attend to each other; None where they do not.

    With a mask, transformers tells them apart by `position_ids` alone, if it is given no `attention_mask` and keeps no
    cache. Its flash attention takes no mask: it needs their bounds, and finds them itself only in batches of one row.
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
        changes.append("leave use_cache of TrainingArguments off")
    return ", ".join(changes) or None


def _begin_epoch(loader: TokenLoader) -> None:
    """Go back to the beginning of the epoch that the loader stands in."""
    state = loader.state_dict()
    epoch, step = state["epoch"], loader.step
    if state["rows"]:
        loader.load_state_dict(loader._states.at(Position(epoch, 0)))
        _say(loader.config, f"training begins at the beginning of epoch {epoch}; the loader stood behind batch {step}")


def _say(config: LoaderConfig, text: str) -> None:
    if not config.quiet and speaks_for_all(config):
        say_once(text)


def loader_trainer(trainer: "type[AnyTrainer]") -> "type[AnyTrainer]":
    """A subclass of transformers' `Trainer`, or of a subclass of it, whose data sets may be `TokenLoader`s.

    Its checkpoints hold the loader's state. `per_device_train_batch_size` and `per_device_eval_batch_size` are set to
    the loaders', which is what Trainer's figures are made of. Data sets of other kinds are left to Trainer.

    `train()` without a checkpoint begins at the beginning of the epoch that the loader stands in: batches that were
    taken from it before, to look at them or by a run that `max_steps` ended, count for nothing. With `rows="pack"`,
    whose epochs differ in length, a run is as long as `max_steps` says and raises `ConfigError` without it; groups of
    accumulated batches run on from one epoch into the next, and what Trainer does at an epoch's end is done behind the
    step that reaches it.

    `label_smoothing_factor` smooths the loader's labels, all T of a row. Hooks that take labels (`compute_loss_func`,
    `compute_metrics`, `preprocess_logits_for_metrics`) get the loader's shifted labels and must declare that they
    expect them: `compute_metrics.labels_are_shifted = True`. `label_ids` of `predict()` are shifted too.

    Where epochs are equally long `train()` raises `StateError` if it resumes with another accumulation or other rows of
    a step (ranks times batch size), which Trainer's own count of steps does not follow. Building one raises
    `ConfigError` for a model or a hook that would shift labels a second time, for a loader with `skip_steps`, and for
    settings that only a data set could follow; this raises `BackendError` without transformers.
    """
    with optional_package("transformers", "trainers", purpose="for Hugging Face Trainer"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.trainer_callback import DefaultFlowCallback, ExportableState, TrainerCallback

    def state_callback(own: Any, loader: TokenLoader) -> Any:
        class Callback(TrainerCallback, ExportableState):
            def state(self) -> dict[str, Any]:
                # Trainer makes a new callback with `args` when it resumes, so the loader is not among them.
                counted = {"accumulation": own.args.gradient_accumulation_steps}
                return {"args": {}, "attributes": {**counted, "loader": loader.state_dict()}}

            def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                saved = state.stateful_callbacks.get(CALLBACK, {}).get("attributes")
                if saved is None:
                    raise StateError("the checkpoint has no state of a loader: it was not saved by loader_trainer")
                loader.load_state_dict(saved["loader"])
                if not state.global_step:
                    _begin_epoch(loader)
                elif not _epochs_differ(loader):
                    own.train_batches.counted_off = counted_off(args, state, saved)
                own.train_batches.is_over = state.global_step >= state.max_steps
                self.epoch, self.batches = loader.epoch, len(loader)

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if _epochs_differ(loader):  # Trainer knows of no epoch
                    at_end, self.epoch = loader.epoch > self.epoch, loader.epoch
                    state.epoch = self.epoch + min(loader.step / self.batches, 1)
                    if at_end and not control.should_training_stop:
                        DefaultFlowCallback().on_epoch_end(args, state, control)

        def counted_off(args: Any, state: Any, saved: Any) -> int:
            accumulation, step_rows = args.gradient_accumulation_steps, loader.state_dict()["step_rows"]
            if args.ignore_data_skip:
                raise ConfigError("ignore_data_skip = True: leave it off; no data is read for what is skipped")
            saved_with = saved["accumulation"], saved["loader"].get("step_rows", step_rows)
            if saved_with != (accumulation, step_rows):
                raise StateError(
                    f"the checkpoint was saved with gradient_accumulation_steps = {saved_with[0]} and {saved_with[1]} "
                    f"rows in a step over all ranks; this run has {accumulation} and {step_rows}, and Trainer would "
                    "skip others than it has had: resume with the ranks, batch size and accumulation of the saving run"
                )
            count: int = state.global_step % -(-len(loader) // accumulation) * accumulation
            if count != loader.step:
                raise StateError(
                    f"the checkpoint was saved behind batch {loader.step} of its epoch, and Trainer takes its "
                    f"{state.global_step} steps to end behind batch {count}: an epoch was ended early, which Trainer's "
                    "count of steps does not follow"
                )
            return count

        Callback.__name__ = Callback.__qualname__ = CALLBACK
        return Callback()

    def whole(batches: EndlessBatches) -> Any:
        # Its own generator: an iterator draws a seed, which would come from random states that a resume has restored.
        return torch.utils.data.DataLoader(batches, batch_size=None, generator=torch.Generator())

    def one_pass(own: Any, loader: TokenLoader) -> Any:
        if loader.config.repeat:
            raise ConfigError("repeat = True: evaluation would never end; leave it out for the loader of it")
        refuse_labels(own, loader)
        refuse_hook("compute_metrics", own.compute_metrics, loader.config)
        refuse_hook("preprocess_logits_for_metrics", own.preprocess_logits_for_metrics, loader.config)
        return whole(Batches(loader))

    def refuse_labels(own: Any, loader: TokenLoader) -> None:
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
                        self._train_batch_size = data.config.batch_size  # a copy that Trainer made of it just now
                    refuse_labels(self, data)
                    change = _keep_apart(data.config, self.model, self.args.use_cache)
                    if change:
                        _say(data.config, f'rows = "pack": the documents of a row will attend to each other; {change}')
            if isinstance(self.eval_dataset, TokenLoader):
                one_pass(self, self.eval_dataset)
            if isinstance(self.train_dataset, TokenLoader):
                is_alone = self.eval_dataset is None or isinstance(self.eval_dataset, TokenLoader)
                collator = given.get("data_collator", options.get("data_collator")) if is_alone else None
                refuse_settings(self, self.train_dataset.config, collator)
                if self.train_dataset.config.skip_steps:
                    raise ConfigError(
                        "skip_steps: Trainer takes every epoch for as long as the first, and counts off what it has "
                        "had; leave steps out in a loop of your own"
                    )
                self.add_callback(state_callback(self, self.train_dataset))

        def set_initial_training_values(self, args: Any, *others: Any, **options: Any) -> Any:
            data = self.train_dataset
            if isinstance(data, TokenLoader) and _epochs_differ(data):
                if args.max_steps <= 0:
                    steps = max(1, round(args.num_train_epochs * len(data) / args.gradient_accumulation_steps))
                    raise ConfigError(
                        f'num_train_epochs = {args.num_train_epochs:g}: with rows = "pack" epochs differ in length, '
                        f"and Trainer takes them for equally long; set max_steps instead, here about {steps}"
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
                return smoother(outputs, labels, **counts)  # Trainer would shift those of a causal model

            if not self.model_accepts_loss_kwargs:  # nor needs it to, as its loss is not its own
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
