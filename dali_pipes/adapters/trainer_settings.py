"""Refuses settings and hooks of transformers' `Trainer` that conflict with a loader and would change the training.

Some settings tell `Trainer` how to order, split, or collate a dataset. Some hooks shift the labels of a batch, because
they were written for labels that equal the inputs.
"""

import inspect
from collections.abc import Callable
from typing import Any

from dali_pipes.config import LoaderConfig
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted

SHIFTED = "labels_are_shifted"
"""Attribute of a hook that expects shifted labels: the label at position t is for the logits at t."""


def refuse_settings(trainer: Any, config: LoaderConfig, data_collator: Any) -> None:
    """Raise `ConfigError` for settings of a `Trainer` that would have no effect on a training loader."""
    args = trainer.args
    seed, drop_last, accelerator = args.data_seed, args.dataloader_drop_last, args.accelerator_config
    refusals = {
        "data_collator": data_collator is not None and "a loader's batches are complete; leave it out",
        f"data_seed = {seed}": seed not in (None, config.seed)
        and f"the loader decides the order; set seed = {seed} on the loader and leave it out here",
        f'train_sampling_strategy = "{args.train_sampling_strategy}"': args.train_sampling_strategy != "random"
        and 'the loader decides the order; leave it out, and for rows of similar length use rows = "pad" with '
        "length_buckets",
        "dataloader_drop_last = True": drop_last
        and not config.drop_last
        and "the loader has drop_last = False; set drop_last = True on the loader and leave it out here",
        "auto_find_batch_size = True": args.auto_find_batch_size
        and "the loader decides the batch size, and Trainer cannot reduce it; leave it off",
        "accelerator_config: split_batches = True": accelerator.split_batches
        and "the loader already serves one rank's batches; leave it off, and divide batch_size by the number of ranks",
        "accelerator_config: dispatch_batches = True": accelerator.dispatch_batches
        and "every rank has its own loader; leave it out",
        f"gradient_accumulation_steps = {args.gradient_accumulation_steps}": _conflict_with_global_batch(
            args.gradient_accumulation_steps, config
        ),
    }
    for setting, why in refusals.items():
        if why:
            raise ConfigError(f"{setting}: {why}")
    _refuse_shared_rows(trainer, config)


def _conflict_with_global_batch(accumulation: int, config: LoaderConfig) -> str:
    """Why `Trainer`, which accumulates the same number of batches all the time, does not make the loader's steps."""
    sizes = sorted({stage.global_batch for stage in config.curriculum})
    rows = config.batch_size * (config.world_size or 1)
    if len(sizes) > 1:
        return (
            f"the loader's global_batch changes during the run ({sizes[0]:,} to {sizes[-1]:,} rows), which Trainer "
            "does not support; set global_batch to one number, or use loader.step_end in your own training loop"
        )
    if sizes and sizes[0] != accumulation * rows:
        return (
            f"with {counted(rows, 'row')} in the batches of all ranks, that is {accumulation * rows:,} rows per "
            f"optimizer step, but the loader has global_batch = {sizes[0]:,}; set gradient_accumulation_steps = "
            f"{sizes[0] // rows}"
        )
    return ""


def _refuse_shared_rows(trainer: Any, config: LoaderConfig) -> None:
    """Ranks that work on the same rows need loaders that deliver the same rows."""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_size > 1 or parallel.sp_size > 1):
        raise ConfigError(
            "parallelism_config with cp_size or sp_size: Trainer does not support labels that are already shifted; use "
            "the loader's context_parallel in your own training loop"
        )
    tensor_parallel, processes = trainer.get_tp_size(), trainer.accelerator.num_processes
    if tensor_parallel > 1 and (config.world_size or 1) * tensor_parallel != processes:
        raise ConfigError(
            f"tensor parallelism: each group of {tensor_parallel} of the {processes} ranks shares its rows, but the "
            f"loader has {counted(config.world_size or 1, 'rank')}; set mesh and data_dims, or rank and world_size = "
            f"{processes // tensor_parallel}"
        )


def refuse_token_batches(config: LoaderConfig) -> None:
    """Raise `ConfigError` for batches of differing numbers of rows, which `Trainer` takes to be equal."""
    if config.batch_tokens is not None:
        raise ConfigError(
            f"batch_tokens = {config.batch_tokens:,}: Trainer counts samples and epochs by a fixed number of rows per "
            "batch; set batch_size instead, with length_buckets to save padding, or use your own training loop"
        )


def refuse_loss(trainer: Any, config: LoaderConfig, model: Any, causal_models: Any) -> None:
    """Raise `ConfigError` if `Trainer` or the model would shift labels twice, or not at all.

    causal_models: names of the classes for which Trainer's label smoother shifts labels.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, hook = type(inner).__name__, trainer.compute_loss_func
    if "labels" not in config.outputs:
        return
    if config.index_dtype != "int64":
        raise ConfigError(
            f'index_dtype = "{config.index_dtype}": the loss of transformers\' models needs int64 labels; leave '
            "index_dtype out"
        )
    _refuse_own_labels(trainer, config, name if hook is None and name in causal_models else None)
    refuse_hook("compute_loss_func", hook, config)
    smoothed = trainer.label_smoother is not None and hook is None
    if smoothed and trainer.args.use_liger_kernel and config.label_shift:
        raise ConfigError(
            "label_smoothing_factor and use_liger_kernel: Liger does not compute logits when labels are already "
            "shifted; turn one of them off, or set label_shift = False"
        )
    if smoothed and not config.label_shift and name not in causal_models:
        raise ConfigError(
            f"label_smoothing_factor: Trainer does not shift the labels of {name}, and label_shift = False does not "
            "either; set label_shift = True"
        )
    if config.label_shift and hook is None and not smoothed and not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            f"{name} does not accept labels that are already shifted (`shift_labels`): set label_shift = False"
        )


def _refuse_own_labels(trainer: Any, config: LoaderConfig, shifting: str | None) -> None:
    """Raise `ConfigError` where an objective learns ids at their own positions, and others would be learned.

    shifting: the model, if it shifts labels that the loader has not shifted
    """
    entries = config.all_objectives
    shifted = next((entry.kind for entry in entries if entry.has_own_labels), None)
    if shifted is not None and shifting is not None and not config.label_shift:
        raise ConfigError(
            f'objective: kind = "{shifted}" learns ids at their own positions, but with label_shift = False {shifting} '
            "shifts the labels; set label_shift = True"
        )
    # Defined here and by transformers; a third is the user's, or that of another trainer, and sees all fields.
    has_own_loss = sum("compute_loss" in vars(kind) for kind in type(trainer).__mro__) > 2
    inputs = {"diffusion": "noisy_ids", "spans": "encoder_ids"}
    apart = next((entry.kind for entry in entries if entry.kind in inputs), None)
    if apart is not None and not has_own_loss:
        raise ConfigError(
            f'objective: kind = "{apart}": Trainer gives the model input_ids, which this objective does not change; '
            "override compute_loss in a subclass of Trainer, and give the model the fields of the objective, such as "
            f"{inputs[apart]}"
        )


def refuse_hook(name: str, hook: Callable[..., Any] | None, config: LoaderConfig) -> None:
    """Raise `ConfigError` for a hook that may shift labels that are already shifted."""
    if hook is not None and config.label_shift and "labels" in config.outputs and not getattr(hook, SHIFTED, False):
        raise ConfigError(
            f"{name}: its labels are already shifted: the label at position t is for the logits at t. If it expects "
            f"that, set {name}.{SHIFTED} = True; if it shifts labels itself, set label_shift = False on the loader"
        )


def refuse_old_liger(model: Any) -> None:
    """Raise `ConfigError` if the Liger loss that was patched into a model would shift labels again."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    code = getattr(inspect.unwrap(inner.forward), "__code__", None)
    if code is not None and "shift_labels" not in (*code.co_consts, *code.co_varnames[: code.co_argcount]):
        raise ConfigError(
            "use_liger_kernel: this version of liger-kernel shifts labels that are already shifted; update it, or set "
            "label_shift = False"
        )
