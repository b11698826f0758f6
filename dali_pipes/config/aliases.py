"""What a user of another loader or trainer may type as a setting, and what to say: our setting, and the difference.

The names are those of torch's DataLoader and samplers, Hugging Face's trainers, Megatron and DeepSpeed, MosaicML
Streaming, Grain, LitData, WebDataset, nanoGPT and llm.c. The README has the first of them in a table.
"""

import difflib
from collections.abc import Iterable, Mapping

from dali_pipes.config.validators import shown
from dali_pipes.errors import NO_WEIGHTS

_ALIKE = {
    "num_threads": (
        "n_workers num_workers worker_count workers dataloader_num_workers",
        "threads that read ahead in the trainer's process, instead of worker processes",
    ),
    "prefetch_queue_depth": (
        (
            "prefetch prefetch_size prefetch_batches prefetch_factor dataloader_prefetch_factor prefetch_buffer_size "
            "worker_buffer_size predownload"
        ),
        "it counts blocks of several batches, not batches, so small numbers do",
    ),
    "seq_len": (
        (
            "block_size context_length context_len context_size ctx_len n_ctx n_positions sequence_length seq_length "
            "sequence_len max_length max_seq_length max_seq_len max_sequence_length max_position_embeddings "
            "encoder_seq_length"
        ),
        "tokens of a row that the model sees; the one more that the last label needs is read by itself",
    ),
    "batch_size": (
        (
            "micro_batch_size microbatch_size mbs per_device_train_batch_size per_device_eval_batch_size "
            "per_device_batch_size per_gpu_batch_size local_batch_size device_batch_size device_train_batch_size "
            "device_train_microbatch_size train_micro_batch_size_per_gpu eval_batch_size val_batch_size"
        ),
        "rows that one rank gets in one step; gradient accumulation is the trainer's",
    ),
    "corpus": (
        (
            "data_path data_paths paths path data data_dir data_files data_file data_prefix data_root root_dir "
            "input_dir dataset dataset_path dataset_dir train_data train_data_path train_data_dir train_path "
            "train_file train_files train_bin filename filenames file_pattern urls url shards local remote"
        ),
        "one file, folder or glob, or a list of them, local or mounted",
    ),
    "world_size": (
        (
            "world num_replicas replicas num_shards shard_count num_ranks n_ranks num_processes process_count dp_size "
            "dp_world_size dp_degree data_parallel_size"
        ),
        "found by itself under a launcher; else it goes together with rank",
    ),
    "split": (
        "mode phase partition subset is_train is_training",
        '"train" or "validation", the parts into which validation_fraction splits the corpus',
    ),
    "rank": (
        "shard_index shard_id process_index process_rank global_rank dp_rank data_parallel_rank",
        "found by itself under a launcher; else it goes together with world_size",
    ),
    "device": (
        "local_rank device_id gpu_id gpu",
        '"cuda:1", for one; by itself it is the current device, or that of LOCAL_RANK',
    ),
    "repeat": (
        "infinite loop cycle resampled",
        "it runs on through the epochs, each in a new order and with every row once",
    ),
    "seed": (
        "shuffle_seed random_seed data_seed sampler_seed dataset_seed rng_seed base_seed random_state generator",
        "it decides the order of every epoch, which does not depend on the number of ranks",
    ),
    "drop_last": (
        "drop_remainder dataloader_drop_last",
        "it leaves out a last, partial step, of all ranks together",
    ),
    "rows": (
        "packing pack packed pack_sequences sequence_packing sample_packing packing_strategy",
        'rows = "pack" lays whole documents into rows, rows = "pad" one in each',
    ),
    "length_buckets": (
        "buckets bucket_sizes bucket_boundaries bucket_by_length group_by_length",
        'with rows = "pad", a list of the widths that batches may have',
    ),
    "long_documents": (
        "truncation truncate",
        'with rows = "pack" or "pad": "split", "truncate" or "drop"',
    ),
    "eos_id": (
        (
            "eos eos_token eos_token_id eod eod_id eod_token eod_token_id eot_id eot_token end_of_text_id end_id "
            "document_end_id"
        ),
        "the id, a number, that ends a document in the corpus as it lies; none is added",
    ),
    "document_start_id": (
        "bos bos_id bos_token bos_token_id start_id",
        "the id, a number, that begins a document in the corpus as it lies, where none ends it; none is added",
    ),
    "pad_id": (
        "pad_token pad_token_id padding_id padding_value pad_value",
        "the input id behind the last document of a row",
    ),
    "mask_boundaries": (
        "eod_mask_loss",
        "labels that cross into the next document are ignored",
    ),
    "outputs": (
        (
            "columns output_keys fields reset_position_ids reset_attention_mask create_attention_mask "
            "return_position_ids return_attention_mask intra_document_masking document_masking"
        ),
        'what a batch holds: add "position_ids", "segment_ids", "cu_seqlens" and others to keep documents apart',
    ),
    "tokenizer": (
        "tokenizer_path tokenizer_file tokenizer_name tokenizer_name_or_path tokenizer_model",
        "the path of a tokenizer.json, for a corpus of text alone",
    ),
    "text_key": (
        "text_column text_column_name text_field dataset_text_field content_field json_keys",
        "key or column of the text",
    ),
    "token_column": (
        "token_key tokens_key tokens_column ids_column input_ids_column",
        "column of the ids in Parquet, Arrow or MDS files",
    ),
    "dtype": (
        "token_dtype data_dtype np_dtype",
        "integer type of ids in files without a header; batches are int64",
    ),
    "vocab_size": (
        "n_vocab padded_vocab_size",
        "ids at or above it are refused",
    ),
    "validation_fraction": (
        "val_fraction val_split val_ratio validation_split validation_ratio validation_size eval_fraction test_size",
        'the share of tokens at the corpus\' end that split = "validation" reads, 0 to 1',
    ),
    "context_parallel": (
        "cp_size cp_rank context_parallel_size context_parallel_rank sequence_parallel_size",
        "a pair, the rank and the number of the processes that share each row",
    ),
    "read_retries": (
        "retries num_retries max_retries download_retry",
        "times that a read which failed for a reason that may pass is tried again",
    ),
    "verify_checksums": (
        "validate_hash check_hash",
        "it compares the checksums that an MDS index records",
    ),
}
"""Our setting: names that mean about the same, and what is to be known about it."""

_NOT_NEEDED = {
    "pin_memory pin_memory_device dataloader_pin_memory": (
        "host staging buffers are pinned whenever the device is a GPU"
    ),
    "persistent_workers dataloader_persistent_workers worker_init_fn multiprocessing_context mp_context "
    "multiprocessing": "there are no worker processes; the reader threads live as long as the loader",
    "sampler batch_sampler sampler_type dataloader_type sampler_class": (
        "the loader handles order, ranks and resume: use shuffle, seed, drop_last and load_state_dict()"
    ),
    "collate_fn collate data_collator collator": (
        "batches are tensors of one shape, listed in outputs; change them in the training loop"
    ),
    "deterministic in_order sort_batches": "the order is always deterministic; seed determines it",
    "streaming lazy": "files are always read on demand",
    "return_tensors as_tensors tensor_type to_tensor": "batches are int64 torch tensors",
    "timeout": "transient read errors are retried read_retries times",
    "rank_zero_only main_process_first": "every process opens the corpus itself and does not wait for the others",
    "shuffle_buffer shuffle_buffer_size shuffle_block_size shuffle_size shuffle_algo buffer_size reshuffle "
    "reshuffle_each_iteration": "every epoch is shuffled whole, by a formula without a buffer, and anew each time",
    "num_canonical_nodes": "the order does not depend on the number of nodes",
    "split_batches dispatch_batches even_batches": (
        "every rank gets rows of its own already, and all the same number of steps"
    ),
    "cache_dir data_cache_path path_to_cache index_mapping_dir": (
        "there is no index; what is kept goes to the user's cache directory, or where DALI_PIPES_CACHE says"
    ),
    "mmap use_mmap mmap_bin_files": "files are read by calls that can fail, never through a map",
    "num_proc preprocessing_num_workers": "tokenising uses all cores",
    "gradient_accumulation_steps grad_accum_steps accumulation_steps grad_accum accumulate_grad_batches": (
        "gradient accumulation is the trainer's; each batch is one step here"
    ),
    "max_steps max_iters max_train_steps train_iters num_iterations total_steps num_steps": (
        "the trainer's loop says when it ends; repeat = true hands out batches without end"
    ),
    "epochs num_epochs n_epochs max_epochs num_train_epochs": (
        "each `for` over the loader is one epoch; repeat = true hands out all of them in one"
    ),
    "consumed_samples consumed_train_samples start_step resume_step skip_batches skip_first_batches": (
        "load_state_dict() goes on where a state was saved; the README says how to begin behind a number of rows"
    ),
}

_NOT_SUPPORTED = {
    "fim fim_rate fim_spm_rate fim_prob fim_probability fim_split_sample fim_fragment_rate": (
        "fill-in-the-middle moves text within documents; apply it before or during tokenization"
    ),
    "mlm mlm_prob mlm_probability masking_probability mask_probability mask_prob masked_lm_prob mask_token "
    "mask_token_id noise_density mean_noise_span_length random_token_prob": (
        "labels are the next tokens; mask a copy of input_ids in the training loop"
    ),
    "curriculum curriculum_learning curriculum_scheduler curriculum_steps data_efficiency": (
        "every epoch is shuffled as a whole; shuffle = false keeps corpus order, and each phase of a run can use its "
        "own loader"
    ),
    "transform transforms augment augmentation augmentations map map_fn batch_transform preprocess preprocessing "
    "preprocess_fn preprocessing_fn postprocess post_process token_dropout target_transform": (
        "rows are served as they are in the corpus; change batches in the training loop, or in the pipeline with "
        "TokenLoader(config, graph=...)"
    ),
    "filter filter_fn filters predicate min_length min_len min_document_length": (
        "every document is used; filter them before or during tokenization"
    ),
    "replacement with_replacement sample_with_replacement": (
        "an epoch serves every row once; use repeat = true to continue with the next epoch"
    ),
    "random_crop random_cropping random_offset random_start random_window random_shift offset_jitter jitter": (
        "rows start at fixed positions, so an epoch has every token once; use a stride below seq_len for overlapping "
        "rows"
    ),
    "padding_side pad_side": "padding is always at the end of a row",
    "truncation_side": 'truncated documents lose their end; long_documents = "split" loses nothing',
    "pad_to_multiple_of": "rows are seq_len wide, or as wide as length_buckets says; choose multiples there",
    "reverse backward bidirectional prefix_lm": "labels are the next tokens; change them in the training loop",
    "storage_options storage_client credentials endpoint_url token use_auth_token hf_token revision": (
        "only local or mounted paths are read; mount the bucket, or copy the files first"
    ),
}

_NO_SETTING = {
    "global_batch_size global_train_batch_size train_batch_size total_batch_size tokens_per_batch batch_tokens "
    "tokens_per_step global_batch_tokens max_tokens": (
        "batch_size counts rows of one rank in one step: divide by the number of ranks and of accumulated batches, and "
        "a number of tokens by seq_len, too"
    ),
    "blend blends data_blend blend_per_split streams mixture mixtures data_mix data_mixture weights data_weights "
    "train_weights mixture_weights sampling_weights probabilities interleave_probs proportion datasets": NO_WEIGHTS,
    "epoch_size samples_per_epoch steps_per_epoch num_samples max_samples max_train_samples limit subset_fraction "
    "sample_fraction": "an epoch is the whole split; use fewer files, or break out of the loop",
    "node_rank nnodes num_nodes nproc_per_node local_world_size": (
        "rank and world_size count processes, and are detected automatically under a launcher"
    ),
    "mesh data_dims context_dim device_mesh": (
        "ranks of a device mesh are an argument of the loader: TokenLoader(config, mesh=...)"
    ),
    "graph": "DALI operators are an argument of the loader: TokenLoader(config, graph=...)",
    "start_epoch initial_epoch epoch": "load_state_dict() resumes in the epoch of the saved state",
    "on_error ignore_errors skip_errors skip_bad_samples": (
        "data that cannot be read is an error; skip its steps with skip_steps"
    ),
    "add_bos add_bos_token add_eos add_eos_token append_eod": (
        "ids are handed out as the corpus has them; `dali-pipes tokenize` puts an end behind each document"
    ),
    "val_data val_data_path valid_data_path val_path validation_data_path eval_data_path test_data_path val_bin "
    "validation_file eval_file": (
        "validation data is the corpus of a loader of its own, with shuffle = false and drop_last = false"
    ),
}


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: why for names, why in groups.items() for name in names.split()}


FOREIGN_NAMES = {name: ours for ours, (names, _) in _ALIKE.items() for name in names.split()}
NOT_NEEDED = _by_name(_NOT_NEEDED)
NO_SETTING = _by_name(_NO_SETTING)
NOT_SUPPORTED = _by_name(_NOT_SUPPORTED)

_CLOSE = 0.82
"""Likeness from which a name is taken for a misspelt one. At 0.5, `global_batch_size` and `max_length` were."""
_LONGEST = 60
"""Letters of a name that may be a misspelt one."""


def unknown_setting(name: object, known: Iterable[str]) -> str:
    """What to say to a name that is not one of the `known` settings; short, whatever the name is."""
    usual = name.lower().replace("-", "_") if isinstance(name, str) and len(name) <= _LONGEST else ""
    if usual in NOT_NEEDED:
        return f"{name} is not needed: {NOT_NEEDED[usual]}; remove it"
    if usual in NOT_SUPPORTED:
        return f"{name} is not supported: {NOT_SUPPORTED[usual]}"
    unknown = f"unknown setting {shown(name)}"
    if usual in NO_SETTING:
        return f"{unknown}: {NO_SETTING[usual]}"
    if usual in FOREIGN_NAMES:
        ours = FOREIGN_NAMES[usual]
        return f"{unknown}; did you mean {ours!r}? ({_ALIKE[ours][1]})"
    near = difflib.get_close_matches(usual, known, n=1, cutoff=_CLOSE)
    return f"{unknown}; " + (f"did you mean {near[0]!r}?" if near else 'see "Configuration" in the README')
