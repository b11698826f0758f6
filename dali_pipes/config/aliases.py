"""Names that users of other loaders and trainers type as a setting, and what to use here: in errors and in the manual.

The names are those of torch's DataLoader, Hugging Face Trainer, Megatron, MosaicML Streaming, Grain and nanoGPT.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from dali_pipes.config.validators import shown


class Alias(NamedTuple):
    """Names elsewhere that mean the same, and what stands for them here."""

    here: str
    """A setting, or NOT_NEEDED, NOT_SUPPORTED, ELSEWHERE or REMOVED."""
    note: str
    names: tuple[str, ...]


NOT_NEEDED = "not needed"
NOT_SUPPORTED = "not supported"
ELSEWHERE = "not a setting"
"""The note tells where it is done instead."""
REMOVED = "removed"
"""A setting of an earlier release."""

_ANSWERS = (NOT_NEEDED, NOT_SUPPORTED, ELSEWHERE, REMOVED)


def _alias(here: str, note: str, names: str) -> Alias:
    return Alias(here, note, tuple(names.split()))


ALIASES = (
    _alias(
        "num_threads",
        "threads of the training process that read ahead; there are no worker processes",
        "num_workers n_workers worker_count dataloader_num_workers",
    ),
    _alias(
        "prefetch_queue_depth",
        "counts blocks of several batches, so small numbers are enough",
        "prefetch_factor dataloader_prefetch_factor prefetch_size prefetch_batches prefetch prefetch_buffer_size "
        "worker_buffer_size predownload",
    ),
    _alias(
        "seq_len",
        "tokens in a row; the additional token for the last label is read automatically",
        "block_size context_length context_size n_ctx n_positions sequence_length seq_length max_length max_seq_length "
        "max_seq_len max_position_embeddings encoder_seq_length",
    ),
    _alias(
        "batch_size",
        "rows in a batch of one rank; gradient accumulation is up to the trainer",
        "micro_batch_size mbs per_device_train_batch_size per_device_eval_batch_size per_device_batch_size "
        "local_batch_size device_batch_size train_micro_batch_size_per_gpu device_train_microbatch_size",
    ),
    _alias(
        "corpus",
        "a file, folder, glob pattern or URI, or a list of them; with weights, use mixture",
        "data_path data_paths data_prefix data_dir data_files path paths data dataset dataset_path train_data "
        "train_data_path train_file train_files file_pattern local remote",
    ),
    _alias(
        "objective",
        'a list of tables with kind, such as [{kind = "mlm", rate = 0.15, mask_id = 103}]',
        "mlm mlm_probability mlm_prob mask_prob masked_lm_prob whole_word_mask prefix_lm goldfish_loss span_corruption "
        "objectives",
    ),
    _alias(
        "objective",
        'a list of tables with kind, such as [{kind = "fim", rate = 0.5, spm = 0.5, tokens = {prefix = 50257, middle = '
        "50258, suffix = 50259}}]",
        "fim fim_data fim_rate fim_spm_rate fim_extra_tokens",
    ),
    _alias(
        "mixture",
        "a table for each source, with its corpus, its weight and, if it is limited, max_epochs",
        "blend data_blend data_mix data_mixture mix mixtures streams weights data_weights train_weights "
        "dataset_weights source_weights sampling_weights probabilities probs proportion proportions datasets "
        "interleave_datasets per_split_data_args_path",
    ),
    _alias(
        "on_exhausted",
        '"error", "drop" or "stop", for a source of a mixture that has been read max_epochs times',
        "stopping_strategy on_exhaustion exhausted_strategy",
    ),
    _alias(
        "total_tokens",
        'the length of an epoch of a mixture, such as "300B"',
        "train_tokens training_tokens total_training_tokens num_train_tokens num_tokens token_budget",
    ),
    _alias("total_rows", "the length of an epoch of a mixture in rows of all ranks", "train_samples"),
    _alias(
        "stages",
        "weights of a mixture that change during the run; for a curriculum, make each difficulty a source",
        "curriculum curriculum_learning data_stages phases annealing",
    ),
    _alias(
        "random_offset",
        "begins the rows of each epoch at another offset; every epoch still has every token once",
        "random_crop random_start",
    ),
    _alias(
        "world_size",
        "detected automatically under a launcher; otherwise set rank and world_size together",
        "num_replicas num_shards shard_count num_processes process_count dp_size dp_world_size data_parallel_size",
    ),
    _alias(
        "rank",
        "detected automatically under a launcher; otherwise set rank and world_size together",
        "shard_index process_index global_rank dp_rank data_parallel_rank",
    ),
    _alias(
        "device", 'for example "cuda:1"; "auto" is the current GPU, or the one of LOCAL_RANK', "local_rank device_id"
    ),
    _alias("repeat", "iterates over epochs endlessly, each in a new order", "infinite loop"),
    _alias(
        "seed",
        "decides the order of every epoch, whatever the number of ranks",
        "shuffle_seed data_seed random_seed sampler_seed generator",
    ),
    _alias("drop_last", "drops the incomplete last step of all ranks", "drop_remainder dataloader_drop_last"),
    _alias("split", '"train" or "validation", as divided by validation_fraction', "subset partition"),
    _alias(
        "rows",
        'with "pack", rows hold as many whole documents as fit; with "pad", one document each',
        "packing pack sequence_packing sample_packing packing_strategy",
    ),
    _alias("length_buckets", 'with rows = "pad", a list of row widths', "group_by_length bucket_boundaries buckets"),
    _alias(
        "batch_tokens",
        'with rows = "pad", the maximum number of tokens in a batch of one rank, including padding',
        "max_tokens_per_batch max_batch_tokens max_tokens_in_batch",
    ),
    _alias("long_documents", 'with rows = "pack" or "pad": "split", "truncate" or "drop"', "truncation truncate"),
    _alias(
        "eos_id",
        "the token id, a number, that ends a document in the corpus; none is added",
        "eos eos_token eos_token_id eod eod_id eod_token eod_token_id eot_token",
    ),
    _alias(
        "document_start_id",
        "the token id, a number, that begins a document in the corpus; none is added",
        "bos bos_id bos_token bos_token_id",
    ),
    _alias("pad_id", "the input id of padding positions", "pad_token pad_token_id padding_value"),
    _alias("mask_boundaries", "ignores labels that belong to the next document", "eod_mask_loss"),
    _alias(
        "outputs",
        'the fields of a batch: add "position_ids", "segment_ids" or "cu_seqlens" to keep documents apart',
        "reset_position_ids reset_attention_mask create_attention_mask return_position_ids columns",
    ),
    _alias(
        "tokenizer",
        "the path of a tokenizer.json, for a text corpus",
        "tokenizer_path tokenizer_file tokenizer_name tokenizer_name_or_path tokenizer_model",
    ),
    _alias("text_key", "the key or column that holds the text", "text_column text_field dataset_text_field json_keys"),
    _alias("token_column", "the column of token ids in Parquet, Arrow and MDS files", "token_key input_ids_column"),
    _alias(
        "dtype",
        "the integer type of ids in files without a header; that of batches is index_dtype",
        "token_dtype data_dtype np_dtype",
    ),
    _alias("vocab_size", "a token id at or above it raises an error", "n_vocab padded_vocab_size"),
    _alias(
        "validation_fraction",
        'the fraction of tokens at the end of the corpus that split = "validation" reads, from 0 to 1',
        "val_fraction val_split val_ratio validation_split validation_size test_size",
    ),
    _alias(
        "context_parallel",
        "a pair, the rank and the size of the group that shares each row",
        "cp_size cp_rank context_parallel_size sequence_parallel_size",
    ),
    _alias("read_retries", "the number of times a failed read is retried", "download_retry max_retries num_retries"),
    _alias("verify_checksums", "verifies the checksums that an MDS index records", "validate_hash"),
    _alias(
        NOT_NEEDED,
        "host staging buffers are pinned whenever the device is a GPU",
        "pin_memory pin_memory_device dataloader_pin_memory",
    ),
    _alias(
        NOT_NEEDED,
        "there are no worker processes; the reader threads live as long as the loader",
        "persistent_workers dataloader_persistent_workers worker_init_fn multiprocessing_context",
    ),
    _alias(
        NOT_NEEDED,
        "the loader handles order, ranks and resuming: use shuffle, seed, drop_last and load_state_dict()",
        "sampler batch_sampler dataloader_type",
    ),
    _alias(
        NOT_NEEDED,
        "batches are tensors of one shape, listed in outputs; change them in the training loop",
        "collate_fn data_collator",
    ),
    _alias(NOT_NEEDED, "the order is always deterministic and depends only on seed", "deterministic in_order"),
    _alias(NOT_NEEDED, "files are always read on demand", "streaming"),
    _alias(NOT_NEEDED, "batches are torch tensors, int64 or int32 by index_dtype", "return_tensors"),
    _alias(NOT_NEEDED, "a failed read is retried read_retries times", "timeout"),
    _alias(
        NOT_NEEDED,
        'each epoch is shuffled as a whole, by a formula without a buffer; order = "blocks" shuffles large parts',
        "shuffle_buffer shuffle_buffer_size shuffle_block_size shuffle_algo buffer_size reshuffle_each_iteration",
    ),
    _alias(NOT_NEEDED, "the order does not depend on the number of nodes", "num_canonical_nodes"),
    _alias(
        NOT_NEEDED,
        "each rank already gets different rows, and all ranks the same number of steps",
        "split_batches dispatch_batches even_batches",
    ),
    _alias(
        NOT_NEEDED,
        "no index is built; cached files go to the user's cache folder, or to DALI_PIPES_CACHE",
        "data_cache_path path_to_cache",
    ),
    _alias(
        NOT_NEEDED,
        "files are read, not memory-mapped: a truncated file raises an error",
        "mmap use_mmap mmap_bin_files",
    ),
    _alias(NOT_NEEDED, "tokenizing uses all cores", "num_proc preprocessing_num_workers"),
    _alias(
        NOT_NEEDED,
        "accumulate gradients in the training loop; with global_batch, loader.step_end says when a step is complete",
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
    ),
    _alias(
        NOT_NEEDED,
        "the training loop decides when to stop; repeat = true yields batches endlessly, and total_steps is the length "
        "of an epoch of a mixture",
        "max_steps max_iters train_iters num_iterations num_steps",
    ),
    _alias(
        NOT_NEEDED,
        "each `for` over the loader is one epoch; repeat = true yields all of them in one",
        "epochs num_epochs num_train_epochs",
    ),
    _alias(
        NOT_NEEDED,
        "call load_state_dict() to resume where a state was saved; the manual explains how to start after a number of "
        "rows",
        "consumed_samples consumed_train_samples start_step skip_batches skip_first_batches",
    ),
    _alias(
        NOT_SUPPORTED,
        "rows are served as they are in the corpus; change batches in the training loop, with a function as an "
        "objective, or in the pipeline with TokenLoader(config, graph=...)",
        "transform transforms augment map map_fn operations preprocess",
    ),
    _alias(
        NOT_SUPPORTED,
        "documents are not filtered by a function; the setting keep takes a file that says which ones to read",
        "filter filter_fn min_length",
    ),
    _alias(
        NOT_SUPPORTED,
        "an epoch serves every row once; use repeat = true to continue with the next epoch",
        "replacement sampling_method",
    ),
    _alias(NOT_SUPPORTED, "padding is always at the end of a row", "padding_side"),
    _alias(
        NOT_SUPPORTED,
        'truncated documents lose their end; long_documents = "split" loses nothing',
        "truncation_side",
    ),
    _alias(
        NOT_SUPPORTED,
        "rows are seq_len wide, or as wide as their bucket in length_buckets; choose multiples there",
        "pad_to_multiple_of",
    ),
    _alias(
        NOT_SUPPORTED,
        "credentials of object stores come from the environment; they are not settings",
        "storage_options credentials token use_auth_token",
    ),
    _alias(
        ELSEWHERE,
        "set batch_size, the rows of one rank in one batch: divide the global batch by the number of ranks and of "
        "accumulated batches, and a number of tokens also by seq_len; or set global_batch to the rows of an optimizer "
        "step over all ranks, and step when loader.step_end is true",
        "global_batch_size train_batch_size total_batch_size tokens_per_batch max_tokens",
    ),
    _alias(
        "global_batch",
        'rows of an optimizer step over all ranks; a list such as [[0, 256], ["10B", 512]] changes it during the run',
        "rampup_batch_size batch_size_warmup batch_size_schedule batch_size_rampup batch_warmup",
    ),
    _alias(
        "seq_len",
        'a list such as [[0, 2048], ["20B", 8192]] changes the length of rows during the run',
        "seq_len_warmup seq_length_warmup sequence_length_warmup seq_len_schedule length_schedule",
    ),
    _alias(
        ELSEWHERE,
        "an epoch is the whole split; use fewer files, or break out of the loop. With mixture, set total_rows or "
        "total_steps",
        "epoch_size steps_per_epoch num_samples max_samples max_train_samples",
    ),
    _alias(
        ELSEWHERE,
        "each `for` over the loader is one epoch; in a source of mixture, max_epochs limits the passes over it",
        "max_epochs",
    ),
    _alias(
        ELSEWHERE,
        "it belongs in a source of mixture, and is the part of the source that is used",
        "share",
    ),
    _alias(ELSEWHERE, "it belongs in a source of mixture, next to its corpus", "weight"),
    _alias(
        ELSEWHERE,
        "set rank and world_size, which count processes and are detected automatically under a launcher",
        "node_rank nnodes num_nodes nproc_per_node local_world_size",
    ),
    _alias(
        ELSEWHERE,
        "a device mesh is an argument of the loader: TokenLoader(config, mesh=...)",
        "mesh data_dims context_dim device_mesh",
    ),
    _alias(ELSEWHERE, "DALI operators are an argument of the loader: TokenLoader(config, graph=...)", "graph"),
    _alias(
        ELSEWHERE,
        "call load_state_dict(): it resumes in the epoch of the saved state",
        "start_epoch initial_epoch epoch",
    ),
    _alias(ELSEWHERE, "data that cannot be read is an error; skip its steps with skip_steps", "on_error ignore_errors"),
    _alias(
        ELSEWHERE,
        "token ids are served as they are in the corpus; `dali-pipes tokenize` adds an end id after each document",
        "add_bos add_bos_token add_eos add_eos_token append_eod",
    ),
    _alias(
        ELSEWHERE,
        "validation files are the corpus of another loader, with shuffle = false and drop_last = false",
        "val_data_path valid_data_path val_path eval_data_path test_data_path validation_file val_data",
    ),
    _alias(REMOVED, "there are no worker processes; delete it", "py_num_workers"),
    _alias(
        REMOVED,
        "give skip_steps in rows instead: skip_step_rows = 8 with skip_steps = [[4, 6]] is now "
        "skip_steps = [{rows = [32, 48]}]",
        "skip_step_rows",
    ),
)
"""In the order of the manual's table."""

_IN_SOURCES = {
    **dict.fromkeys(("proportion", "probability", "prob", "ratio", "fraction", "sampling_weight"), "weight"),
    **dict.fromkeys(("repeat", "epochs", "num_epochs", "repetitions", "upsample"), "max_epochs"),
    **dict.fromkeys(("subset", "choose", "limit"), "share"),
}
"""Names elsewhere for the settings of a source of a mixture, where they differ from those for a loader."""

_BY_NAME = {name: alias for alias in ALIASES for name in alias.names}

_LEAST_SIMILARITY = 0.82
"""From here on a name counts as a misspelled setting. At 0.5 `global_batch_size` and `max_length` did."""
_LONGEST = 60
"""Letters of a name that may be a misspelled setting."""


def alias_rows() -> list[tuple[str, str, str]]:
    """The table of the manual: names elsewhere, the setting here (or why there is none), and what is different."""
    return [
        (
            ", ".join(f"`{name}`" for name in alias.names),
            alias.here if alias.here in _ANSWERS else f"`{alias.here}`",
            alias.note[0].upper() + alias.note[1:],
        )
        for alias in ALIASES
        if alias.here != REMOVED
    ]


def unknown_setting(name: object, known: Iterable[str]) -> str:
    """What to answer to a name that is not one of the `known` settings; short, whatever the name is."""
    usual = name.lower().replace("-", "_") if isinstance(name, str) and len(name) <= _LONGEST else ""
    alias = _BY_NAME.get(usual)
    unknown = f"unknown setting {shown(name)}"
    if alias is None:
        near = difflib.get_close_matches(usual, known, n=1, cutoff=_LEAST_SIMILARITY)
        if near:
            return f"{unknown}; did you mean {near[0]!r}?"
        near = difflib.get_close_matches(usual, _BY_NAME, n=1, cutoff=_LEAST_SIMILARITY)  # a misspelled foreign name
        if not near:
            return f'{unknown}; see "Configuration" in the manual'
        alias = _BY_NAME[near[0]]
    if alias.here == ELSEWHERE:
        return f"{unknown}: {alias.note}"
    if alias.here in _ANSWERS:
        verb = "was" if alias.here == REMOVED else "is"
        return f"{name} {verb} {alias.here}: {alias.note}{'; remove it' * (alias.here == NOT_NEEDED)}"
    return f"{unknown}; did you mean {alias.here!r}? ({alias.note})"


def unknown_in_source(name: object, known: Collection[str]) -> str:
    """As `unknown_setting`, for the settings of a source of a mixture."""
    here = _IN_SOURCES.get(name.lower()) if isinstance(name, str) and len(name) <= _LONGEST else None
    return f"unknown setting {shown(name)}; did you mean {here!r}?" if here else unknown_setting(name, known)


def drop_removed(settings: dict[str, object]) -> dict[str, object]:
    """The settings of a file without those that earlier releases saved with every run and that had no effect."""
    return {name: value for name, value in settings.items() if (name, value) != ("py_num_workers", 0)}
