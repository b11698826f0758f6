"""The configuration of a loader: one checked, frozen model, from keywords or from a TOML, YAML or JSON file.

    config = LoaderConfig.from_file("configs/gpt2_124m.toml", batch_size=16)
    config = LoaderConfig(corpus="data/*.bin", batch_size=16, seq_len=1024)
    print(config.to_toml())

A mixture takes `mixture` instead of `corpus`; `config.sources` has a configuration for each of its sources.

Relative corpus paths are resolved against the working directory of the process. An unknown key is an error that names
the setting with a similar spelling, or what a name from another loader is called here.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from dali_pipes.config.aliases import unknown_in_source, unknown_setting
from dali_pipes.config.amounts import parse_bytes
from dali_pipes.config.context_parallel import shared_ranges
from dali_pipes.config.curriculum import CurriculumStage, Scheduled, merged_stages, steps_of, values
from dali_pipes.config.exact_numbers import Count, Positive, Subset
from dali_pipes.config.outputs import OBJECTIVE_OUTPUTS, OUTPUT_NAMES, OUTPUTS, require_kinds
from dali_pipes.config.settings_files import (
    MISSING,
    Source,
    first_problem_of_each,
    merged,
    name_sources,
    read_file,
    read_preset,
    toml_text,
)
from dali_pipes.config.skip_steps import SkippedRange, parse_ranges
from dali_pipes.config.span_counts import SpanWidths
from dali_pipes.config.tables import Objectives, Sources, Stages
from dali_pipes.config.validators import (
    PathText,
    Shown,
    parse_auto,
    parse_device,
    parse_dtype,
    parse_folder,
    parse_list,
    parse_path,
    parse_paths,
    plain_words,
    refuse_as_corpus,
    refuse_huge_number,
    shown,
)
from dali_pipes.errors import ConfigError

if TYPE_CHECKING:
    from dali_pipes.config.objectives import Goldfish, Objective, Spans

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or a list of paths: files, folders or globs."""

Auto = Literal["auto"]

ORDER_FIELDS = ("seq_len", "stride", "shuffle", "seed", "split", "validation_fraction", "label_shift")
DOCUMENT_ORDER_FIELDS = (
    "rows",
    "long_documents",
    "window_documents",
    "eos_id",
    "document_start_id",
    "documents_end_at_files",
)
"""Settings that decide which tokens are in which row, and the order of rows: a state is rejected when they differ."""

MIXTURE_FIELDS = ("total_tokens", "total_rows", "total_steps", "temperature", "on_exhausted", "proxy", "stages")
"""Settings that need `mixture`."""


INT32_IDS = 2**31
"""Token ids below this fit int32."""


class LoaderConfig(BaseModel):
    """The settings of a loader, validated and immutable. Invalid settings raise `ConfigError`.

    `config.replace(batch_size=16)` returns a changed copy. `print(config)` shows the settings that differ from their
    defaults, `config.to_toml()` shows all of them.

    Sizes are in tokens or rows, unless the name ends in `_bytes`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    corpus: tuple[PathText, ...] | None = Field(
        None,
        description="Files, folders, glob patterns or URIs; or `synthetic:10B` for generated tokens. Required, except "
        "with `mixture`.",
        min_length=1,
    )
    format: str = Field("auto", description="Corpus format. `auto` detects it from the content of the files.")
    dtype: str | None = Field(
        None, description="Integer type of the token ids in files without a header. None: uint16 for flat files."
    )
    token_column: str | None = Field(
        None,
        description="Column with the token ids in Parquet, Arrow and MDS files, or feature with the ids in Examples "
        "(ArrayRecord, TFRecord). None: `input_ids`, else `tokens`, else the only list of integers.",
    )
    eos_id: int | None = Field(None, ge=0, description="Token id that ends each document.")
    document_start_id: int | None = Field(
        None, ge=0, description="Token id that begins each document, for a corpus without an end id."
    )
    documents_end_at_files: bool = Field(
        False,
        description="End a document at the end of its file even if the end id is missing. False: it continues in the "
        "next file.",
    )
    tokenizer: str | None = Field(
        None, description="Path of a `tokenizer.json` for a text corpus, which is tokenized at the first start."
    )
    text_key: str | None = Field(None, description="Key or column that holds the text. None: `text`.")
    loss_masks: tuple[PathText, ...] | None = Field(
        None,
        description="Files, folders or globs of loss masks, one for each data file. None: `FILE.loss` next to the data "
        "file, if it exists. []: no loss masks.",
    )
    keep: PathText | None = Field(
        None,
        description='File with the number of times to read each document, with `rows = "pack"` or `"pad"`; 0 drops the '
        "document. A `.npy` array, or text with one integer per line. None: each document once.",
    )
    vocab_size: int | None = Field(
        None, gt=0, description="Size of the vocabulary. A token id at or above it raises an error when it is read."
    )
    split: Literal["train", "validation"] = Field(
        "train",
        description="Part of the corpus to read. `validation` is the end of the corpus and is never shuffled.",
    )
    validation_fraction: float = Field(
        0.0, ge=0.0, lt=1.0, description="Fraction of the tokens, at the end of the corpus, reserved for validation."
    )

    mixture: Sources | None = Field(
        None, description="Instead of `corpus`: a table of settings for each source, by name. See below."
    )
    total_tokens: Count | None = Field(
        None,
        description="Length of an epoch of the mixture in tokens, such as `300B`. None: until the first source has "
        "been read `max_epochs` times, once by default.",
    )
    total_rows: Count | None = Field(None, description="The same in rows.")
    total_steps: Count | None = Field(None, description="The same in steps of all ranks.")
    temperature: Positive | None = Field(
        None,
        description='Flattens weights of `"size"`: they are proportional to tokens to the power of 1 / `temperature`. '
        "None: 1.",
    )
    on_exhausted: Literal["error", "drop", "stop"] = Field(
        "error",
        description="What to do when a source would exceed its `max_epochs`. `error`: raise an error at the start; "
        "`drop`: continue with the other sources; `stop`: end the epoch.",
    )
    proxy: Subset | None = Field(
        None,
        description="Use this part of each source, such as `1/16`, the same for every seed: a small run then repeats "
        "its data as often as the whole run. None: all.",
    )
    stages: Stages = Field(
        (), description="Weights that change during the run: a list of tables with `at` and `weights`. See below."
    )

    batch_size: int = Field(gt=0, description="Rows in a batch of one rank (B). Do not set it with `batch_tokens`.")
    batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Maximum number of tokens in a batch of one rank, including padding; replaces `batch_size` with "
        '`rows = "pad"`. Rows of similar length form batches of different shapes. States and `skip_steps` count '
        "batches.",
    )
    batch_shapes: tuple[tuple[int, int], ...] | None = Field(
        None,
        description="The only batch shapes to use with `batch_tokens`, for compiled models: `[rows, width]` pairs with "
        "increasing widths up to `seq_len`. None: any shape.",
    )
    seq_len: Scheduled = Field(
        description="Tokens in a row (T). A row reads T + 1 tokens from the corpus to shift the labels. A list of "
        '[tokens, T], such as `[[0, 2048], ["20B", 8192]]`, changes the length during the run and needs '
        "`global_batch`.",
    )
    order_len: int | None = Field(
        None,
        gt=0,
        description="Tokens in a row of the order. Rows of all lengths in a `seq_len` list are cut from these rows, so "
        "it must be a multiple of each length. None: the longest length.",
    )
    global_batch: Scheduled | None = Field(
        None,
        description="Rows in an optimizer step over all ranks, or a list of [tokens, rows]: a multiple of ranks times "
        "`batch_size`. `loader.step_end` says when a step is complete. None: every batch is a step.",
    )
    stride: int | None = Field(
        None,
        gt=0,
        description="Distance in tokens between the starts of consecutive rows. None: `seq_len`, no overlap.",
    )
    random_offset: bool = Field(
        False,
        description='With `rows = "stream"`, begin the rows of each epoch at another offset below `stride`, so that '
        "tokens change their positions in rows.",
    )
    rows: Literal["stream", "pack", "pad"] = Field(
        "stream",
        description="How rows are built. `stream`: consecutive windows of the corpus; `pack`: whole documents, packed "
        "by best fit; `pad`: one document in each row.",
    )
    long_documents: Literal["split", "truncate", "drop"] = Field(
        "split", description="What to do with documents longer than a row when `rows` is `pack` or `pad`."
    )
    length_buckets: tuple[int, ...] | None = Field(
        None,
        description='Increasing row widths for `rows = "pad"`: each batch has the smallest width that fits its rows. '
        "None: always `seq_len`.",
    )
    balance: Literal["cost"] | None = Field(
        None,
        description='Balances the work of ranks with `rows = "pack"` or `"pad"`. `cost`: each step takes rows of about '
        "equal cost, so that all ranks have about the same work. A document of L tokens costs a L + b L^2. None: no "
        "balancing.",
    )
    balance_cost: tuple[int, int] | None = Field(
        None,
        description='`[a, b]` for `balance = "cost"`, two integers: a is the cost per token, b the cost per pair of '
        "tokens in a document. None: computed from `hidden_size`, `num_layers` and `vocab_size`.",
    )
    hidden_size: int | None = Field(
        None, gt=0, lt=2**31, description="Hidden size of the model. Set it with `num_layers`, or set `balance_cost`."
    )
    num_layers: int | None = Field(None, gt=0, lt=2**31, description="Number of layers of the model.")
    window_documents: int = Field(
        65536, gt=0, description="Number of documents in a packing window. Documents are packed within their window."
    )
    pad_id: int = Field(0, ge=0, description="Input id of padding positions.")
    mask_boundaries: bool | None = Field(
        None,
        description="Ignore labels that belong to the next document. None: only with `pack`, `pad` or `mtp`.",
    )
    mtp: int = Field(
        0,
        ge=0,
        description="Multi-token prediction: labels hold the next k tokens, with shape (B, T, k). 0: the next token, "
        "(B, T).",
    )
    shuffle: bool = Field(True, description="Shuffle rows in a new order each epoch. False: read them in corpus order.")
    order: Literal["rows", "blocks"] = Field(
        "rows",
        description="How rows are shuffled. `rows`: all rows of an epoch among themselves; `blocks`: blocks of about 2 "
        "million tokens, and then the rows of each `shuffle_window` of them, so that neighbors are read together: for "
        "corpora that are remote, compressed, or on slow disks.",
    )
    shuffle_window: int = Field(
        512,
        gt=0,
        description='With `order = "blocks"`, the number of blocks whose rows are shuffled together. More shuffle '
        "better; fewer need less memory or cache for each to be read once.",
    )
    seed: int = Field(
        0, ge=0, lt=2**64, description="Seed of the shuffle. The order of every epoch is the same on any machine."
    )
    drop_last: bool = Field(True, description="Drop the last step of an epoch if it is incomplete.")
    repeat: bool = Field(False, description="Iterate over epochs endlessly in a single `for` loop.")
    skip_steps: tuple[SkippedRange, ...] = Field(
        (),
        description="Half-open ranges of steps to skip: `[first, end]` in epoch 0 or `[first, end, epoch]`; or in rows "
        'over all ranks, `{rows = [first, end]}`, or tokens, `{tokens = ["10B", "10.1B"], epoch = 1}`. The other steps '
        "keep their numbers and data.",
    )
    on_change: Literal["refuse", "nearest", "mixture"] = Field(
        "refuse",
        description="What to do with a state saved with other settings. `refuse`: raise an error; `nearest`: with "
        "another `seq_len`, `stride` or `length_buckets`, resume at the row nearest to the same number of tokens; "
        "`mixture`: with other sources or weights, continue every source where it was.",
    )
    outputs: tuple[str, ...] = Field(
        ("input_ids", "labels"),
        description=f"Fields of a batch: {', '.join(f'`{name}`' for name in OUTPUT_NAMES)}. With `objective`, also "
        f"{', '.join(f'`{name}`' for name in OBJECTIVE_OUTPUTS)}.",
    )
    index_dtype: Literal["int64", "int32"] = Field(
        "int64",
        description="Integer type of the fields with a value for each position: ids, labels, positions and masks. "
        "`int32` halves their size and is what JAX expects. PyTorch's `cross_entropy` needs int64 labels: "
        '`batch["labels"].long()`.',
    )
    mask_dtype: Literal["bool"] | None = Field(
        None, description="`bool`: `attention_mask` and `loss_mask` are boolean. None: they have the `index_dtype`."
    )
    label_shift: bool = Field(
        True,
        description="Shift labels by one token: `labels[t]` is the token after `input_ids[t]`. False: labels equal "
        "inputs, for models that shift them; rows are the same.",
    )

    objective: Objectives = Field(
        (),
        description="Training objectives, such as masked language modeling: a list of tables with `kind`. []: "
        "next-token prediction. See Training objectives.",
    )

    rank: int | None = Field(
        None, ge=0, description="Rank of this process. None: detected from `torch.distributed`, else from `RANK`."
    )
    world_size: int | None = Field(
        None, gt=0, description="Number of ranks. None: detected from `torch.distributed`, else from `WORLD_SIZE`."
    )
    context_parallel: tuple[int, int] | None = Field(
        None,
        description="(rank, size) within the context-parallel group: each process gets its share of every row. None: "
        "whole rows.",
    )
    context_split: Literal["contiguous", "zigzag"] = Field(
        "contiguous",
        description="How rows are shared. `contiguous`: one chunk for each process; `zigzag`: two chunks that balance "
        "the work of causal attention.",
    )
    device: str = Field(
        "auto",
        description="`auto`, `cpu`, `cuda` or `cuda:N`. `auto` falls back to the CPU; the others raise an error if the "
        "device is missing.",
    )
    placement: Literal["auto", "host", "device", "pinned", "pool"] = Field(
        "auto",
        description="How rows get to the GPU. `host`: they are read on the host and copied; `device`: the whole corpus "
        "is kept in GPU memory; `pinned`: it is kept in host memory, page-locked and shared by the processes of a "
        'node, where the GPU reads it; `pool`: the windows of `order = "blocks"` are kept in GPU memory, two at a '
        "time; `auto`: `device` if the corpus is small, else `host`.",
    )
    engine: Literal["auto", "dali", "direct"] = Field(
        "auto",
        description="What runs the queue of blocks. `auto`: DALI on a GPU and with `graph`, else none: on a CPU reader "
        "threads alone, the `direct` queue, need less time and memory than DALI.",
    )

    quiet: bool = Field(
        False, description="Do not print the summary at the start or warnings when training waits for data."
    )
    nvtx: bool | None = Field(
        None, description="Mark ranges for profilers with NVTX. None: only if Nsight Systems started the process."
    )

    prefetch_queue_depth: Annotated[int, Field(gt=0, le=64)] | Auto = Field(
        "auto",
        description="Number of blocks of batches to prefetch, apart from those that threads work on. `auto`: chosen at "
        "the start; without DALI, it also grows while training waits for data.",
    )
    num_threads: Annotated[int, Field(gt=0, le=256)] | Auto = Field(
        "auto",
        description="Number of threads that read ahead. `auto`: at first 2, or 1 if the process has one CPU or reads "
        "plain rows of 3 KiB or more on a CPU; more while training waits for data and they help.",
    )
    decoded_cache_bytes: int = Field(
        1 << 30,
        ge=0,
        description='Memory for decoded tokens, such as "8GB", for formats that have to be decoded.',
    )
    cache: Literal["process", "node"] = Field(
        "process",
        description="Where decoded tokens are kept. `process`: in each process separately; `node`: shared by the "
        "processes of a node, in memory (/dev/shm) up to `decoded_cache_bytes` for all of them, or in `cache_dir` up "
        "to `cache_bytes`.",
    )
    cache_dir: str | None = Field(
        None,
        description="Cache folder on the node, shared by all its processes and jobs. It holds decoded tokens of "
        'formats that are decoded, and with `order = "blocks"` whole blocks of all other formats. None: no folder.',
    )
    cache_bytes: int = Field(
        50_000_000_000, gt=0, description='Maximum size of `cache_dir`, such as "50GB", for the whole node.'
    )
    verify_checksums: bool = Field(
        False, description="Verify the checksums recorded in MDS and TFRecord files at the start, which reads all data."
    )
    read_retries: int = Field(
        4, ge=0, le=100, description="Number of times a read is retried after an error that may be transient."
    )
    read_requests: int = Field(
        64, ge=1, le=1024, description="Requests to object stores and web servers in flight, in the whole process."
    )
    reads: Literal["calls", "mapped"] = Field(
        "calls",
        description="How ids get from files into memory. `calls`: by system calls, which can fail with an error; "
        "`mapped`: from maps of the files, which costs less on a local disk, but ends the process with SIGBUS if a "
        "file shrinks or the disk fails. URIs are always read by calls.",
    )
    eager: bool = Field(False, description="Decode the whole corpus at the start and keep it in memory.")
    batches_per_run: Annotated[int, Field(gt=0)] | Auto = Field(
        "auto", description="Batches in a block (K). `auto`: as many as reach a target size in bytes."
    )
    max_device_bytes: int | None = Field(
        None,
        ge=0,
        description='GPU memory in bytes that the corpus may use with `placement = "auto"`. None: a tenth of the free '
        "memory. With `device` and `pool`, needing more is an error.",
    )
    static_buffers: bool = Field(
        False,
        description="Deliver every batch at the same addresses, for CUDA graphs. A batch is valid until the next one.",
    )
    max_block_bytes: int = Field(64 << 20, gt=0, description="Maximum size in bytes of a delivered block of K batches.")

    def __init__(self, **settings: Any) -> None:
        _refuse_unknown(settings)
        if settings.get("batch_tokens") is not None:  # a place of the order is then a batch
            settings.setdefault("batch_size", 1)
        refused = _refuse_huge_numbers(settings)
        try:
            super().__init__(**settings | dict.fromkeys(refused, _REFUSED))
        except ValidationError as error:
            problems = first_problem_of_each(
                (_place(e["loc"]), refused.get(str(e["loc"][0]) if e["loc"] else "") or _message(e))
                for e in error.errors()
            )
        else:
            problems = ()
        if settings.get("corpus") is None and settings.get("mixture") is None:
            problem = "expected a path or a list of paths" if "corpus" in settings else MISSING
            problems = (("corpus", problem), *(found for found in problems if found[0]))
        if problems:
            found = ConfigError("; ".join(f"{name}: {problem}" if name else problem for name, problem in problems))
            found.problems = problems
            raise found

    @field_validator("corpus", "loss_masks", mode="before")
    @classmethod
    def _paths_as_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        return None if value is None else parse_paths(value, str(info.field_name))

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_as_path(cls, value: Any) -> Any:
        return None if value is None else parse_path(value, "keep")

    _finite_lists = field_validator(
        "outputs",
        "length_buckets",
        "balance_cost",
        "batch_shapes",
        "context_parallel",
        "seq_len",
        "global_batch",
        mode="before",
    )(parse_list)
    _auto_or_number = field_validator("prefetch_queue_depth", "num_threads", "batches_per_run", mode="before")(
        parse_auto
    )
    _ranges_merged = field_validator("skip_steps", mode="before")(parse_ranges)
    _device_as_name = field_validator("device", mode="before")(parse_device)
    _dtype_as_name = field_validator("dtype", mode="before")(parse_dtype)

    _size_in_bytes = field_validator("cache_bytes", "decoded_cache_bytes", mode="before")(parse_bytes)
    _folder_as_text = field_validator("cache_dir", mode="before")(parse_folder)

    _stages_as_list = field_validator("stages", mode="before")(parse_list)

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: Stages, info: ValidationInfo) -> Stages:
        sources = info.data.get("mixture")
        if sources is None or not stages:
            return stages
        from dali_pipes.config.mixture import check_stages  # see `tables`

        return check_stages(stages, sources)

    @field_serializer("skip_steps")
    def _ranges_spelled(self, ranges: tuple[SkippedRange, ...]) -> list[Any]:
        return [skipped.plain() for skipped in ranges]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("rank and world_size go together: set both or neither")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(
                f"rank = {self.rank} must be below world_size = {self.world_size}: ranks are numbered from 0"
            )
        if self.context_parallel is not None:
            rank, size = self.context_parallel
            if not 0 <= rank < size:
                raise ValueError(f"context_parallel = [{rank}, {size}]: expected (rank, size) with 0 <= rank < size")
            for width in self.widths:
                shared_ranges(width, rank, size, self.context_split)
        self._check_mixture()
        self._check_curriculum()
        if self.split == "validation" and self.validation_fraction == 0.0:
            raise ValueError(
                'split = "validation" needs a validation_fraction above 0 (0.01 reserves 1% of the tokens). To '
                'validate on separate files, such as val.bin, make them the corpus and set split = "train", '
                "shuffle = False and drop_last = False"
            )
        if self.split == "validation" and self.skip_steps:
            raise ValueError('skip_steps applies to training only: set skip_steps = [] with split = "validation"')
        known = (*OUTPUT_NAMES, *OBJECTIVE_OUTPUTS)
        unknown = [name for name in self.outputs if name not in known]
        if unknown or not self.outputs or len(set(self.outputs)) != len(self.outputs):
            raise ValueError(
                f"outputs = {list(self.outputs)}: expected one or more distinct names from {', '.join(known)}"
                + (f"; {unknown[0]!r} is not one of them" if unknown else "")
            )
        if self.vocab_size is not None and self._row_modes != {"stream"} and self.pad_id >= self.vocab_size:
            raise ValueError(
                f"pad_id = {self.pad_id} must be below vocab_size = {self.vocab_size}, because padding goes into the "
                "model too: choose any id of the vocabulary (its labels are ignored and attention_mask excludes it)"
            )
        if self.index_dtype == "int32":
            for name, ids in (("vocab_size", (self.vocab_size or 1) - 1), ("pad_id", self.pad_id)):
                if ids >= INT32_IDS:
                    raise ValueError(
                        f'{name} = {getattr(self, name)} does not fit index_dtype = "int32", which holds ids below '
                        f'{INT32_IDS:,}: set index_dtype = "int64"'
                    )
        if "stream" not in self._row_modes:
            modes = " or ".join(f'"{mode}"' for mode in sorted(self._row_modes))
            for name in ("stride", "random_offset"):
                if value := getattr(self, name):
                    raise ValueError(f'{name} = {value} applies to rows = "stream" only; remove it with rows = {modes}')
        if self.keep is not None and self.mixture is None and self.rows == "stream":
            raise ValueError(
                f'keep = {shown(str(self.keep))} drops and repeats whole documents, but rows = "stream" cuts rows from '
                'the stream of tokens across documents: set rows = "pack" or "pad"'
            )
        if self.order == "rows" and self.shuffle_window != type(self).model_fields["shuffle_window"].default:
            raise ValueError(
                f'shuffle_window = {self.shuffle_window:,} applies to order = "blocks" only: remove it, or set order = '
                '"blocks"'
            )
        self._check_cache()
        if self.random_offset and self.split == "validation":
            raise ValueError('random_offset applies to training only: remove it with split = "validation"')
        shortest = min(self.widths) if self.length_buckets is None else self.row_len
        if self.mtp >= shortest:
            raise ValueError(
                f"mtp = {self.mtp} needs labels {self.mtp} tokens ahead, but a row has only seq_len = {shortest} "
                "tokens: set mtp below seq_len"
            )
        if self.length_buckets is not None:
            self._check_buckets(self.length_buckets)
        self._check_batch_tokens()
        self._check_balance()
        if not self.label_shift and self.uses_pieces:
            raise ValueError(
                "label_shift = False copies the inputs, but documents, masks and mtp need shifted labels: set "
                "label_shift = True"
            )
        self._check_objective()
        if self.placement not in ("auto", "host") and self.device == "cpu":
            raise ValueError(f'placement = "{self.placement}" needs device = "cuda", but device is "cpu"')
        if self.placement == "pool":
            self._check_pool()
        _ = self.sources  # refuses what a loader of one source would refuse
        return self

    def _check_pool(self) -> None:
        """What `placement = "pool"` cannot hold: anything but windows of one corpus, shuffled by blocks."""
        conflicts = {
            f'order = "{self.order}"': self.order != "blocks",
            "shuffle = false": not self.shuffle,
            f'rows = "{self.rows}"': self.rows != "stream",
            "a mixture": self.mixture is not None,
            "a list as seq_len": self.changes_length,
            # It hashes the ids before a row, which may be in a block that is not in the pool.
            'objective: kind = "goldfish"': _of_kind("goldfish", self.objective) is not None,
        }
        if found := _first_conflict(conflicts):
            raise ValueError(
                f'placement = "pool" does not work with {found}; it requires one corpus, order = "blocks", shuffle = '
                'true, rows = "stream", and a fixed seq_len. Change that, or set placement = "host"'
            )

    def _check_cache(self) -> None:
        if self.cache_dir is None and self.cache_bytes != type(self).model_fields["cache_bytes"].default:
            raise ValueError(f"cache_bytes = {self.cache_bytes:,} limits cache_dir, which is not set: set cache_dir")
        if self.eager and (self.cache == "node" or self.cache_dir is not None):
            name = 'cache = "node"' if self.cache_dir is None else f"cache_dir = {shown(self.cache_dir)}"
            raise ValueError(
                f"eager = true keeps the whole corpus in each process, but {name} shares it among processes: remove "
                "one of the two"
            )
        if self.reads == "mapped" and self.cache_dir is not None:
            raise ValueError(
                f'reads = "mapped" reads the files directly and would bypass cache_dir = {shown(self.cache_dir)}: '
                "remove one of the two"
            )

    def _check_objective(self) -> None:
        """What goes with `objective` and what does not."""
        require_kinds(self.outputs, {entry.kind for entries in self._of_sources for entry in entries})
        if not any(self._of_sources):
            return
        from dali_pipes.config import objective_checks as checks  # see `tables`
        from dali_pipes.config.objectives import Fim, Goldfish, Mlm

        own = {name: source.objective for name, source in (self.mixture or {}).items() if source.objective is not None}
        entries = (entry for entries in (self.objective, *own.values()) for entry in entries)
        checks.require_shared_functions(entries, own)
        checks.require_one_goldfish({entry for entry in self.all_objectives if isinstance(entry, Goldfish)}, self.mtp)
        if self.mixture is None:  # else in the configuration of each source
            checks.require_noisy_ids(self.objectives, self.outputs)
        self._check_spans()
        ids = checks.Ids(self.vocab_size, self.eos_id, self.document_start_id, self.pad_id)
        for entry in self.objective:
            if isinstance(entry, Fim) and self.mixture is None:  # else the same
                checks.check_fim(entry, ids, self.rows, min(values(steps_of(self.seq_len))), self.tokenizer)
            if entry.has_own_labels and self.mtp:
                raise ValueError(
                    f'objective: kind = "{entry.kind}" predicts each id at its own position, so there are no later '
                    f"labels for mtp = {self.mtp} to predict; remove one of the two"
                )
            checks.check_ids(entry, ids)
            if isinstance(entry, Mlm):
                checks.check_mlm(entry, ids)

    def _check_spans(self) -> None:
        """What goes with `kind = "spans"`, which every source must have, and in the same way."""
        entries = self._spans
        if entries == {None}:
            return
        if len(entries) > 1:
            raise ValueError(
                'objective: kind = "spans" differs between the sources of the mixture, or is missing in some; use the '
                "same in all of them"
            )
        (entry,) = entries
        fixed = ", because all of its batches have the same widths"
        conflicts = {
            f"mtp = {self.mtp}": self.mtp and ", because its targets are the removed spans and not the next tokens",
            "context_parallel": self.context_parallel is not None and fixed,
            "length_buckets": self.length_buckets is not None and fixed,
            f"batch_tokens = {self.batch_tokens}": self.batch_tokens is not None and fixed,
            "a list as seq_len": self.changes_length and fixed,
        }
        if found := _first_conflict(conflicts):
            raise ValueError(
                f'objective: kind = "spans" does not work with {found}{conflicts[found]}; remove one of them'
            )
        from dali_pipes.config.objective_checks import check_spans  # see `tables`

        widths = self.span_widths
        assert entry is not None
        assert widths is not None
        check_spans(entry, widths, self.row_len, self.outputs)

    def _check_mixture(self) -> None:
        """What goes with `mixture` and what does not."""
        if self.mixture is None:
            for name in MIXTURE_FIELDS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} = {shown(self._plain(name))} applies to a mixture only: remove it, or set mixture "
                        "instead of corpus"
                    )
            return
        if self.corpus is not None:
            raise ValueError(
                f"corpus = {shown(list(self.corpus))} and mixture are both set: each source of a mixture has its own "
                "corpus, so remove one of the two"
            )
        if len(self._totals) > 1:
            values = " and ".join(f"{name} = {getattr(self, name):,}" for name in self._totals)
            raise ValueError(f"{values} are both set: set the length of an epoch once")
        if self.total_tokens is not None and self.total_tokens < self.row_len:
            raise ValueError(
                f"total_tokens = {self.total_tokens:,} is less than a row: expected at least seq_len = {self.row_len:,}"
            )
        if self.temperature is not None and any(source.weight != "size" for source in self.mixture.values()):
            raise ValueError(
                f'temperature = {self._plain("temperature")} flattens weights of "size" only: set weight = "size" in '
                "every source, or remove temperature"
            )
        if self.split == "validation":
            raise ValueError(
                'split = "validation" does not work with mixture: use loader.validation_loaders() of the training '
                "loader, which returns a loader for each source"
            )
        if self.length_buckets is not None:
            raise ValueError("length_buckets does not work with mixture, whose batches all have one width: remove it")
        if self.balance is not None:
            raise ValueError(
                "balance does not work with mixture, which draws the rows of a step from several sources: remove "
                "balance"
            )
        if self.keep is not None:
            raise ValueError(
                f"keep = {shown(str(self.keep))} applies to one corpus, but the run has a mixture: set keep in "
                "the sources of mixture"
            )
        if self.loss_masks:
            raise ValueError(
                f"loss_masks = {shown(list(self.loss_masks))} does not say which source it belongs to: set loss_masks "
                "in the sources of mixture"
            )

    def _check_buckets(self, widths: tuple[int, ...]) -> None:
        if self.rows != "pad":
            raise ValueError(f'length_buckets needs rows = "pad" (one document in each row), but rows = "{self.rows}"')
        rising = all(low < high for low, high in itertools.pairwise((0, *widths)))
        if not widths or not rising or widths[-1] > self.row_len:
            raise ValueError(
                f"length_buckets = {list(widths)}: expected one or more increasing widths from 1 to seq_len = "
                f"{self.row_len}"
            )

    def _check_batch_tokens(self) -> None:
        """What goes with `batch_tokens`."""
        if self.batch_tokens is None:
            if self.batch_shapes is not None:
                raise ValueError(
                    f"batch_shapes = {shown(self._shapes)} applies only with batch_tokens: remove it, or set "
                    "batch_tokens"
                )
            return
        conflicts = {
            f"batch_size = {self.batch_size}": self.batch_size != 1,
            "mixture": self.mixture is not None,
            f'rows = "{self.rows}"': self.rows != "pad",
            "length_buckets": self.length_buckets is not None,
            "balance": self.balance is not None,
            "global_batch": self.global_batch is not None,
            "context_parallel": self.context_parallel is not None,
            "static_buffers": self.static_buffers,
            'on_change = "nearest"': self.on_change == "nearest",
            "skip_steps in tokens": any(skipped.unit == "tokens" for skipped in self.skip_steps),
        }
        if found := _first_conflict(conflicts):
            advice = 'set rows = "pad"' if found.startswith("rows") else "remove one of the two"
            reasons = {
                "length_buckets": ", which keeps the number of rows and gives all ranks the same width",
                "mixture": ", which draws single rows from its sources, not batches",
                "balance": ", which orders single rows, not batches",
            }
            found += reasons.get(found, "")
            raise ValueError(f"batch_tokens = {self.batch_tokens:,} does not work with {found}: {advice}")
        if self.batch_tokens < self.row_len:
            raise ValueError(
                f"batch_tokens = {self.batch_tokens:,} is less than a row of seq_len = {self.row_len:,} tokens: use a "
                "larger batch_tokens, or a smaller seq_len"
            )
        widths = [width for _, width in self._shapes]
        rising = all(low < high for low, high in itertools.pairwise([0, *widths]))
        fits = all(rows > 0 and rows * width <= self.batch_tokens for rows, width in self._shapes)
        if self.batch_shapes is not None and not (widths and rising and fits and widths[-1] == self.row_len):
            raise ValueError(
                f"batch_shapes = {shown(self._shapes)}: expected [rows, width] pairs of at most batch_tokens = "
                f"{self.batch_tokens:,} tokens, with increasing widths, the last of them seq_len = {self.row_len:,}"
            )

    @property
    def _shapes(self) -> list[list[int]]:
        return [list(shape) for shape in self.batch_shapes or ()]

    @property
    def place_tokens(self) -> int:
        """Most tokens at a place of the order, which is a row, or with `batch_tokens` a batch."""
        return self.row_len if self.batch_tokens is None else self.batch_tokens

    def _check_balance(self) -> None:
        """What goes with `balance`."""
        of_cost = {name: getattr(self, name) for name in ("balance_cost", "hidden_size", "num_layers")}
        given = [f"{name} = {shown(value)}" for name, value in of_cost.items() if value is not None]
        if self.balance is None:
            if given:
                raise ValueError(f'{given[0]} applies only with balance = "cost": remove it, or set balance = "cost"')
            return
        conflicts = {
            f'rows = "{self.rows}"': self.rows == "stream"
            and 'whose rows all cost about the same: set rows = "pack" or "pad"',
            f"length_buckets = {shown(self.length_buckets)}": self.length_buckets is not None
            and "which also decides the order of rows: remove one of the two",
            "a seq_len list": self.changes_length
            and "whose windows have rows of several lengths: remove one of the two",
            "shuffle = False": not self.shuffle and "because it decides the order of rows: remove one of the two",
        }
        if found := _first_conflict(conflicts):
            raise ValueError(f'balance = "cost" does not work with {found}, {conflicts[found]}')
        if (self.balance_cost is None) != (self.hidden_size is not None and self.num_layers is not None) or (
            self.balance_cost is not None and len(given) > 1
        ):
            raise ValueError(
                'balance = "cost" needs the cost of a document: set hidden_size and num_layers of the model, or '
                f"balance_cost = [a, b]; found {' and '.join(given) or 'neither'}"
            )
        a, b = self._cost
        if min(a, b) < 0 or a + b == 0 or (a + b * self.row_len) * self.row_len >= 2**62:
            raise ValueError(
                f"balance_cost = {[a, b]}: expected integers of at least 0, not both 0, such that a document of "
                f"{self.row_len:,} tokens (a full row) costs less than 2^62"
            )

    def _check_curriculum(self) -> None:
        """What goes with lists as `seq_len` and `global_batch`."""
        if self.global_batch is not None and self.split == "validation":
            number = f", and set seq_len = {self.row_len}" * (not isinstance(self.seq_len, int))
            lengths = "global_batch and order_len" if self.order_len is not None else "global_batch"
            raise ValueError(
                f'split = "validation" does not work with global_batch, which is for training: remove {lengths}{number}'
            )
        if self.global_batch is not None and not self.drop_last:
            raise ValueError(
                "drop_last = False does not work with global_batch, because an epoch then consists of whole optimizer "
                "steps: set drop_last = True, or remove global_batch"
            )
        if not self.changes_length:
            return
        given = f"seq_len = {shown(self._plain('seq_len'))}" + f", order_len = {self.order_len}" * (
            self.order_len is not None
        )
        if self.global_batch is None:
            raise ValueError(
                f"{given} needs global_batch, because lengths change only between optimizer steps: set global_batch to "
                "the rows of an optimizer step over all ranks"
            )
        for skipped in self.skip_steps:
            if skipped.unit == "tokens":
                raise ValueError(
                    f"skip_steps: {skipped} in tokens does not work with a seq_len list or order_len: give it in rows"
                )
        if self.grows_by_window:
            self._check_growing_packs(given)
            return
        if self._row_modes != {"stream"} or self.stride is not None:
            of_documents = " and ".join(f'rows = "{mode}"' for mode in sorted(self._row_modes - {"stream"}))
            found = f"stride = {self.stride}" if self.stride is not None else of_documents
            raise ValueError(
                f'{given} changes the length of rows, which works with rows = "stream" without stride, and with rows = '
                f'"pack" without a mixture: remove {found}'
            )
        for length in values(steps_of(self.seq_len)):
            if self.row_len % length:
                raise ValueError(
                    f"{given}: rows of {length} tokens are cut from rows of order_len = {self.row_len}, which is not a "
                    f"multiple of {length}; set order_len to a common multiple of all lengths"
                )

    def _check_growing_packs(self, given: str) -> None:
        needed: dict[str, Any] = {"long_documents": "split", "order_len": None}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f'{given} with rows = "pack" needs {name} = {shown(value)}, found {shown(getattr(self, name))}'
                )
        if not isinstance(self.global_batch, int):
            raise ValueError(
                f'{given} with rows = "pack" needs one number as global_batch, found '
                f"{shown(self._plain('global_batch'))}"
            )

    @property
    def id_limit(self) -> int | None:
        """Token ids are below this: `vocab_size`, or what `index_dtype` can hold. None: any id is accepted."""
        return INT32_IDS if self.vocab_size is None and self.index_dtype == "int32" else self.vocab_size

    @property
    def grows_by_window(self) -> bool:
        """Whether the length of rows changes from packing window to packing window."""
        return self.changes_length and self.rows == "pack" and self.mixture is None

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are parts of those of the order, and change their length between groups of these."""
        return self.changes_length and not self.grows_by_window

    @property
    def has_total(self) -> bool:
        """Whether the length of an epoch of a mixture is set."""
        return bool(self._totals)

    @property
    def _totals(self) -> list[str]:
        """The settings of the length of an epoch that are given."""
        return [name for name in MIXTURE_FIELDS if name.startswith("total_") and getattr(self, name) is not None]

    @property
    def bucket_widths(self) -> tuple[int, ...] | None:
        """The widths that a batch may have, the last of them seq_len; None if all batches have that width."""
        if self.length_buckets is None:
            return None
        return self.length_buckets + ((self.row_len,) if self.length_buckets[-1] < self.row_len else ())

    @property
    def cost_weights(self) -> tuple[int, int] | None:
        """Cost of a token, and of a pair of tokens of a document, which decide the order; None if they do not.

        A training step of a decoder with n layers of width h, feed-forward layers of 4 h and a vocabulary of V takes
        6 h ((12 n h + V) L + n L^2) operations for a document of L tokens: forward and backward, attention causal.
        """
        return None if self.balance is None or self.split == "validation" else self._cost

    @property
    def _cost(self) -> tuple[int, int]:
        if self.balance_cost is not None:
            return self.balance_cost
        layers = self.num_layers or 0
        return 12 * layers * (self.hidden_size or 0) + (self.vocab_size or 0), layers

    @property
    def row_len(self) -> int:
        """Tokens of a row of the order: `seq_len`, or with a list the length that shorter rows are cut from."""
        return self.order_len or max(values(steps_of(self.seq_len)))

    @property
    def changes_length(self) -> bool:
        """Whether rows may be shorter than those of the order, and change their length during the run."""
        return not isinstance(self.seq_len, int) or self.order_len is not None

    @property
    def varies_width(self) -> bool:
        """Whether batches may have different widths."""
        return self.length_buckets is not None or self.changes_length or self.batch_tokens is not None

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that a batch may have, rising."""
        return self.bucket_widths or values(steps_of(self.seq_len))

    @property
    def curriculum(self) -> tuple[CurriculumStage, ...]:
        """How `seq_len` and `global_batch` change with the tokens of the run; empty without `global_batch`."""
        if self.global_batch is None:
            return ()
        lengths = ((0, self.row_len),) if self.grows_by_window else steps_of(self.seq_len)
        return merged_stages(lengths, steps_of(self.global_batch))

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The fields of a batch: the outputs, and with `cu_seqlens` also the number of its segments."""
        return self.outputs + tuple(name for name, spec in OUTPUTS.items() if spec.with_field in self.outputs)

    @property
    def sources(self) -> dict[str, "LoaderConfig"]:
        """The configuration of each source of a mixture, as for a loader over it alone; empty without a mixture.

        Labels are masked at boundaries as in the whole mixture. `share` and `max_epochs` are left out.
        """
        shared = {name: getattr(self, name) for name in type(self).model_fields}
        for name in ("mixture", "skip_steps", *MIXTURE_FIELDS):
            del shared[name]
        shared["mask_boundaries"] = self.masks_boundaries
        shared |= {"seq_len": self.row_len, "order_len": None, "global_batch": None}
        checked: dict[tuple[tuple[str, Any], ...], LoaderConfig] = {}
        """By the settings that need to be checked together: most of many sources have the same."""
        sources = {}
        for name, source in (self.mixture or {}).items():
            overrides = source.overrides()
            data = {"corpus": source.corpus, "loss_masks": overrides.pop("loss_masks", self.loss_masks)}
            kind = tuple(overrides.items())
            if kind not in checked:
                settings = {**shared, **overrides, **data}
                settings["outputs"] = _outputs_of(settings["outputs"], settings["objective"])
                if settings["rows"] != "stream":
                    settings |= {"stride": None, "random_offset": False}
                try:
                    checked[kind] = type(self)(**settings)
                except ConfigError as error:
                    raise ConfigError(f"{_place(('mixture', name))}: {error}") from None
            sources[name] = checked[kind].model_copy(update=data)
        return sources

    @property
    def objectives(self) -> "tuple[Objective, ...]":
        """The entries of `objective` that this split uses."""
        return self._used(self.objective)

    @property
    def all_objectives(self) -> "tuple[Objective, ...]":
        """The entries of `objective` that this split uses, of any source of a mixture."""
        return self._used(entry for entries in self._of_sources for entry in entries)

    @property
    def objective_line(self) -> str | None:
        """What this split learns, of each source of a mixture; None: the next token."""
        if not any(self._of_sources):
            return None
        from dali_pipes.config.objectives import objective_line  # see `tables`

        names = ("",) if self.mixture is None else self.mixture
        return objective_line(dict(zip(names, map(self._used, self._of_sources), strict=True)))

    @property
    def goldfish(self) -> "Goldfish | None":
        """The entry of `objective` of this kind, if this split of any source uses it: all sources have the same."""
        found: Goldfish | None = _of_kind("goldfish", self.all_objectives)
        return found

    @property
    def span_widths(self) -> SpanWidths | None:
        """Room for a row of the `objective` of kind "spans"; None without."""
        entry = next(iter(self._spans))  # all sources have the same
        return None if entry is None else entry.widths(self.row_len, is_full=self._row_modes == {"stream"})

    @property
    def weights(self) -> dict[str, Fraction | Literal["size"]]:
        """The weights at the start, by source; empty without a mixture."""
        return {name: source.weight for name, source in (self.mixture or {}).items()}

    @property
    def _row_modes(self) -> set[str]:
        """The values of `rows`, those of all sources of a mixture."""
        return {self.rows} if self.mixture is None else {source.rows or self.rows for source in self.mixture.values()}

    @property
    def _spans(self) -> "set[Spans | None]":
        """The different entries of this kind, of all sources of a mixture; None stands for those without."""
        return {_of_kind("spans", own) for own in self._of_sources}

    @property
    def _of_sources(self) -> "list[tuple[Objective, ...]]":
        """`objective` of each source of a mixture, or of the only corpus."""
        if self.mixture is None:
            return [self.objective]
        given = [source.objective for source in self.mixture.values()]
        return [self.objective if own is None else own for own in given]

    def _used(self, entries: "Iterable[Objective]") -> "tuple[Objective, ...]":
        """Those that this split uses."""
        return tuple(entry for entry in entries if self.split == "train" or entry.validation)

    @property
    def uses_documents(self) -> bool:
        """Whether rows, labels or outputs depend on where documents begin and end; of any source of a mixture."""
        return (
            self._row_modes != {"stream"}
            or self.masks_boundaries
            or self.goldfish is not None
            or any(OUTPUTS[name].tells_documents for name in self.outputs)
        )

    @property
    def masks_boundaries(self) -> bool:
        """Whether labels that cross into the next document are ignored."""
        if self.mask_boundaries is not None:
            return self.mask_boundaries
        return self._row_modes != {"stream"} or self.mtp > 0

    @property
    def uses_pieces(self) -> bool:
        """Whether rows are assembled from pieces of documents instead of being cut from the stream.

        A corpus with a loss mask needs that too.
        """
        return self.uses_documents or self.mtp > 0 or any(OUTPUTS[name].needs_pieces for name in self.outputs)

    @classmethod
    def from_file(cls, *paths: str | os.PathLike[str], **overrides: Any) -> Self:
        """Read `.toml`, `.yaml`/`.yml` or `.json` files. Later files override earlier ones, and keywords override both.

        For example, one file for the model and one for the machine:
        `from_file("configs/gpt2_124m.toml", "configs/h100.toml")`. Raises `ConfigError` naming the file.
        """
        return cls.from_sources(*map(read_file, map(Path, paths)), Source("", overrides))

    @classmethod
    def from_preset(cls, *names: str, **overrides: Any) -> Self:
        """Combine presets (`dali-pipes config` lists them). Later ones override earlier ones, keywords override both.

        For example `from_preset("gpt2_124m", "h100", corpus="data/*.bin")`. Raises `ConfigError` listing the known
        names.
        """
        return cls.from_sources(*map(read_preset, names), Source("", overrides))

    @classmethod
    def from_sources(cls, *sources: Source) -> Self:
        """Like `from_file`, from sources of settings; an error names the source."""
        for source in sources:
            try:
                _refuse_unknown(source.settings)
            except ConfigError as error:
                raise ConfigError(f"{source.name}: {error}" if source.name else str(error)) from None
        try:
            return cls(**merged(sources))
        except ConfigError as error:
            raise name_sources(error, sources, cls._problems) from None

    @classmethod
    def _problems(cls, settings: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        try:
            cls(**settings)
        except ConfigError as error:
            return error.problems
        return ()

    @classmethod
    def of(cls, given: "LoaderConfig | Paths | None", settings: Mapping[str, Any]) -> Self:
        """The configuration from a loader's arguments: a configuration, the paths of a corpus, or None; and settings.

        The settings override the configuration. Raises `ConfigError` if the corpus is given twice.
        """
        if isinstance(given, cls):
            return given.replace(**settings) if settings else given
        if given is None:
            return cls(**settings)
        refuse_as_corpus(given, cls.model_fields)
        if "corpus" in settings:
            raise ConfigError("corpus was given twice: pass it as the first argument or as corpus=, not both")
        return cls(corpus=given, **settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields:
            raise ConfigError(unknown_setting(name, type(self).model_fields))
        raise ConfigError(
            f"a configuration is immutable: create a new one with config.replace({name}={shown(value)}) and build the "
            "loader from it"
        )

    def __eq__(self, other: object) -> bool:
        # The order of the sources is part of it: it numbers them.
        return super().__eq__(other) and list(self.mixture or ()) == list(getattr(other, "mixture", None) or ())

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash(tuple(tuple(value.items()) if isinstance(value, dict) else value for value in values))

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Settings that differ from their defaults."""
        for name, field in type(self).model_fields.items():
            value = self.__dict__.get(name)
            if field.is_required() or value != field.default:
                if name in ("mixture", "seq_len", "global_batch", "objective", *MIXTURE_FIELDS):
                    value = self._plain(name)
                yield name, value[0] if name == "corpus" and value is not None and len(value) == 1 else Shown(value)

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed, validated again."""
        return type(self)(**{**self.model_dump(), **changes})

    def order_settings(self) -> dict[str, Any]:
        """The settings that decide the order of the data, JSON-serializable. A saved state must match them.

        Of a mixture, those of all sources; `sources` has the others, and weights are not among them.
        """
        settings = {name: getattr(self, name) for name in ORDER_FIELDS}
        settings["seq_len"] = self.row_len
        settings["stride"] = self.stride if self.stride is not None else self.row_len
        if self.random_offset:  # states of releases without this setting leave it out
            settings["random_offset"] = True
        if self.order != "rows":  # the same; the order's name and the stride say how many rows a block has
            settings |= {"order": self.order, "shuffle_window": self.shuffle_window}
        if self.rows != "stream" and self.mixture is None:
            settings |= {name: getattr(self, name) for name in DOCUMENT_ORDER_FIELDS}
            if not self.documents_end_at_files:  # states of releases without this setting leave it out
                del settings["documents_end_at_files"]
        if self.bucket_widths is not None:
            settings["length_buckets"] = list(self.bucket_widths)
        if self.objectives and self.mixture is None:
            settings["objective"] = json.dumps([entry.identity() for entry in self.objectives], sort_keys=True)
        if self.batch_tokens is not None:  # the same
            settings |= {"batch_tokens": self.batch_tokens, "batch_shapes": self._shapes}
        if self.cost_weights is not None:  # states of releases without this setting leave it out
            settings["balance_cost"] = list(self.cost_weights)
        return settings

    def to_toml(self) -> str:
        """The configuration as TOML, including defaults but not settings that are None."""
        return toml_text(self.model_dump(mode="json", exclude_none=True))

    def _plain(self, name: str) -> Any:
        """A setting as a configuration spells it."""
        return self.model_dump(include={name}, exclude_none=True)[name]


_LONGEST_PLACE = 200
"""Letters of a name in the place of an error."""


def _of_kind(kind: str, entries: "Iterable[Objective]") -> Any:
    """The first entry of a kind, or None. Not by class: that would import the classes in every run."""
    return next((entry for entry in entries if entry.kind == kind), None)


def _outputs_of(names: tuple[str, ...], objective: "tuple[Objective, ...]") -> tuple[str, ...]:
    """The outputs of a mixture that a source with this objective could have alone."""
    made = {"", *(entry.kind for entry in objective)}
    return tuple(name for name in names if name not in OUTPUTS or OUTPUTS[name].needs_objective in made) or names[:1]


def _first_conflict(conflicts: Mapping[str, object]) -> str | None:
    """The first of some settings whose value is true; None: none is."""
    return next((setting for setting, is_set in conflicts.items() if is_set), None)


_REFUSED = object()
"""In place of a value that was refused: no setting accepts it, so it is refused along with the others."""

_NEVER_A_NUMBER = ("mixture", "skip_steps", "device")
"""Settings that say what they expect when they are given a number, whatever its size."""


def _refuse_huge_numbers(settings: Mapping[str, Any]) -> dict[str, str]:
    """The errors of `refuse_huge_number`, by setting.

    Not a validator of each field: building 78 of them would add several milliseconds to the import.
    """
    errors = {}
    for name, value in settings.items():
        if name in _NEVER_A_NUMBER:
            continue
        try:
            refuse_huge_number(value)
        except ValueError as error:
            errors[name] = str(error)
    return errors


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in LoaderConfig.model_fields:
            raise ConfigError(unknown_setting(name, LoaderConfig.model_fields))


def _unknown_in_table(place: Sequence[Any]) -> str:
    """What to answer to an unknown name in a source or a stage."""
    from dali_pipes.config.mixture import SourceSettings, Stage  # see `tables`

    name = place[-1]
    if place[0] == "stages":
        return f"unknown setting {shown(name)}; a stage has {', '.join(Stage.model_fields)}"
    if name in LoaderConfig.model_fields and name != "repeat":
        return f"all sources share this setting: set {name} outside of the sources of mixture"
    return unknown_in_source(name, SourceSettings.model_fields)


_UNIONS = ("seq_len", "global_batch", "prefetch_queue_depth", "num_threads", "batches_per_run")
"""Settings with values of several kinds, which pydantic names after the setting."""


def _place(names: Sequence[Any]) -> str:
    """Where a wrong setting is, such as `mixture.web.weight`; short."""
    names = names[:1] if names and names[0] in _UNIONS else names
    return ".".join(
        text if len(text := str(name)) <= _LONGEST_PLACE else f"{text[:_LONGEST_PLACE]}..." for name in names
    )


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return _unknown_in_table(error["loc"])
    if error["type"] == "missing":
        return MISSING
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{plain_words(error['msg'])}, found {shown(error['input'])}"
