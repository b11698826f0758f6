"""Hugging Face's `Trainer` on a `TokenLoader`: its own batches, neither sharded nor collated again, resumed exactly.

    trainer = loader_trainer(Trainer)(model, arguments, train_dataset=loader, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=True)

Trainer passes a `DataLoader` over an iterable data set through its `accelerator`, which shares its batches out over the
ranks; ours are shared out already, so the loader goes in as it is. A resumed Trainer counts off the batches of its
epoch that it has had, by iterating; it is given as many numbers, and no data is read for them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dali_pipes.errors import BackendError, ConfigError, StateError
from dali_pipes.loader import TokenLoader

if TYPE_CHECKING:
    from transformers import Trainer

    AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

CALLBACK = "TokenLoaderState"
"""Under this name `trainer_state.json` of a checkpoint keeps the loader's state."""


class Batches(torch.utils.data.IterableDataset[Any]):
    """The batches of a loader; with `resumes`, before them a number for each that a resumed Trainer counts off.

    Labels that are shifted already go to the model as `shift_labels` too, or it would shift them again.
    """

    def __init__(self, loader: TokenLoader, *, resumes: bool = False) -> None:
        self.loader, self._resumes = loader, resumes

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._resumes:
            yield from range(self.loader.step)
        shifted = self.loader.config.label_shift and "labels" in self.loader.config.outputs
        for batch in self.loader:
            yield {**batch, "shift_labels": batch["labels"]} if shifted else batch


def loader_trainer(trainer: "type[AnyTrainer]") -> "type[AnyTrainer]":
    """A subclass of transformers' `Trainer`, or of a subclass of it, whose data sets may be `TokenLoader`s.

    Its checkpoints hold the loader's state. `per_device_train_batch_size` and `per_device_eval_batch_size` are set to
    the loaders', which is what Trainer's figures are made of. Data sets of other kinds are left to Trainer.

    `train()` raises `StateError` where it resumes with other ranks, batch size or accumulation, which its own count of
    steps does not follow. Building one raises `ConfigError` for a model that cannot be told that labels are shifted
    already, and for a loader with `skip_steps`; this raises `BackendError` without transformers.
    """
    try:
        from transformers.trainer_callback import ExportableState, TrainerCallback
    except ImportError as error:
        raise BackendError('transformers is not installed: pip install "dali-pipes[trainers]"') from error

    def state_callback(own: Any, loader: TokenLoader) -> Any:
        class Callback(TrainerCallback, ExportableState):
            def state(self) -> dict[str, Any]:
                # Trainer makes a new callback with `args` when it resumes, so the loader is not among them.
                counted = {"step": loader.step, "accumulation": own.args.gradient_accumulation_steps}
                return {"args": {}, "attributes": {**counted, "loader": loader.state_dict()}}

            def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                saved = state.stateful_callbacks.get(CALLBACK, {}).get("attributes")
                if saved is None:
                    raise StateError("the checkpoint has no state of a loader: it was not saved by loader_trainer")
                loader.load_state_dict(saved["loader"])
                found = {"step": loader.step, "accumulation": args.gradient_accumulation_steps}
                if state.global_step and args.ignore_data_skip:
                    raise ConfigError("ignore_data_skip = True: leave it off; no data is read for what is skipped")
                if {name: saved[name] for name in found} != found:
                    raise StateError(
                        f"the checkpoint was saved behind step {saved['step']} of its epoch, with "
                        f"gradient_accumulation_steps = {saved['accumulation']}; this run would go on behind step "
                        f"{found['step']} with {found['accumulation']}, and Trainer would skip others than it has "
                        "had: resume with the ranks, batch size and accumulation of the saving run"
                    )

        Callback.__name__ = Callback.__qualname__ = CALLBACK
        return Callback()

    def whole(loader: TokenLoader, *, resumes: bool = False) -> Any:
        return torch.utils.data.DataLoader(Batches(loader, resumes=resumes), batch_size=None)

    class LoaderTrainer(trainer):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for data, name in (
                (self.train_dataset, "per_device_train_batch_size"),
                (self.eval_dataset, "per_device_eval_batch_size"),
            ):
                if isinstance(data, TokenLoader):
                    setattr(self.args, name, data.config.batch_size)
                    if data.config.label_shift and not self.model_accepts_loss_kwargs:
                        raise ConfigError(
                            f"{type(self.model).__name__} takes no labels that are shifted already (`shift_labels`): "
                            "set label_shift = False"
                        )
            if isinstance(self.train_dataset, TokenLoader):
                if self.train_dataset.config.skip_steps:
                    raise ConfigError(
                        "skip_steps: Trainer takes every epoch for as long as the first, and counts off what it has "
                        "had; leave steps out in a loop of your own"
                    )
                self.add_callback(state_callback(self, self.train_dataset))

        def get_train_dataloader(self) -> Any:
            if not isinstance(self.train_dataset, TokenLoader):
                return super().get_train_dataloader()
            return whole(self.train_dataset, resumes=True)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            data = self.eval_dataset if eval_dataset is None else eval_dataset
            data = self.eval_dataset[data] if isinstance(data, str) else data
            return whole(data) if isinstance(data, TokenLoader) else super().get_eval_dataloader(eval_dataset)

    LoaderTrainer.__name__ = LoaderTrainer.__qualname__ = f"Loader{trainer.__name__}"
    return LoaderTrainer
