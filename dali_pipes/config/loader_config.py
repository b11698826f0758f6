"""The configuration of a loader: one checked, frozen model, from keywords or from a TOML, YAML or JSON file.

    config = LoaderConfig.from_file("configs/gpt2_124m.toml", batch_size=16)
    config = LoaderConfig(corpus="data/*.bin", batch_size=16, seq_len=1024)
    print(config.to_toml())

Relative corpus paths are taken from the working directory of the process. A key that is not known is an error: it
names the setting that is spelt nearly like it, or what other loaders' name for it is here.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from dali_pipes.config.aliases import unknown_setting
from dali_pipes.config.context_parallel import shared_ranges
from dali_pipes.config.outputs import OUTPUT_NAMES, OUTPUTS
from dali_pipes.config.settings_files import MISSING, Source, blamed, first_of_each, merged, read_file, read_preset
from dali_pipes.config.skip_steps import SkippedRange, merged_ranges
from dali_pipes.config.validators import (
    Shown,
    device_name,
    dtype_name,
    in_range,
    list_of,
    paths_of,
    refuse_as_corpus,
    shown,
)
from dali_pipes.errors import ConfigError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or a list of paths: files, folders or globs."""

ORDER_FIELDS = ("seq_len", "stride", "shuffle", "seed", "split", "validation_fraction", "label_shift")
DOCUMENT_ORDER_FIELDS = (
    "rows",
    "long_documents",
    "window_documents",
    "eos_id",
    "document_start_id",
    "documents_end_at_files",
)
"""Settings that decide which tokens are in which row, and the order of rows: a state is refused when they differ."""


class LoaderConfig(BaseModel):
    """Settings of a loader; every instance is validated and immutable. Raises `ConfigError`.

    `replace(batch_size=16)` returns a new one. `print(config)` shows the settings that differ from their defaults,
    `config.to_toml()` all of them.

    Sizes are in tokens or rows unless a name says bytes. `batch_size` is the number of rows a rank gets in one step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    corpus: tuple[str, ...] = Field(
        description="files, folders or glob patterns; or synthetic:10B for generated ids", min_length=1
    )
    format: str = Field("auto", description="corpus format; auto recognises it by content")
    dtype: str | None = Field(None, description="integer type of headerless ids; None: uint16 for flat files")
    token_column: str | None = Field(
        None, description="column of Parquet, Arrow or MDS files; None: input_ids, tokens, or the only list of integers"
    )
    eos_id: int | None = Field(None, ge=0, description="id that ends a document")
    document_start_id: int | None = Field(None, ge=0, description="id that begins a document, where none ends it")
    documents_end_at_files: bool = Field(
        False,
        description="end a document at the end of its file, even without an end id; False: it continues in the next "
        "file",
    )
    tokenizer: str | None = Field(None, description="tokenizer.json for a corpus of text, tokenised at the first start")
    text_key: str | None = Field(None, description="key or column of the text; None: text")
    loss_masks: tuple[str, ...] | None = Field(
        None, description="files, folders or globs of loss masks, one a data file; None: FILE.loss beside it; []: none"
    )
    vocab_size: int | None = Field(None, gt=0, description="ids at or above it are refused at the first read")
    split: Literal["train", "validation"] = Field(
        "train", description="part of the corpus; validation has a fixed order"
    )
    validation_fraction: float = Field(0.0, ge=0.0, lt=1.0, description="share of tokens, at the end of the corpus")

    batch_size: int = Field(gt=0, description="rows a rank gets in one step (B)")
    seq_len: int = Field(gt=0, description="tokens in a row (T); a row reads T + 1 tokens of the corpus")
    stride: int | None = Field(None, gt=0, description="tokens between the starts of neighbouring rows; None: seq_len")
    rows: Literal["stream", "pack", "pad"] = Field(
        "stream", description="stream: windows of the corpus; pack: whole documents, best fit; pad: one document a row"
    )
    long_documents: Literal["split", "truncate", "drop"] = Field(
        "split", description="what becomes of a document longer than a row of pack or pad"
    )
    length_buckets: tuple[int, ...] | None = Field(
        None, description="with pad, rising widths: a batch has the smallest that holds its rows; None: seq_len alone"
    )
    window_documents: int = Field(65536, gt=0, description="documents that are packed together; each window is planned")
    pad_id: int = Field(0, ge=0, description="input id behind the last document of a row")
    mask_boundaries: bool | None = Field(
        None, description="ignore labels that cross into the next document; None: yes with pack, pad and mtp"
    )
    mtp: int = Field(0, ge=0, description="labels of the next k tokens, (B, T, k); 0: of the next one, (B, T)")
    shuffle: bool = Field(True, description="a new order each epoch; False: the order of the corpus")
    seed: int = Field(0, ge=0, lt=2**64, description="decides the order of every epoch, the same on any machine")
    drop_last: bool = Field(True, description="leave out the last, partial step of an epoch")
    repeat: bool = Field(False, description="run through epoch after epoch without end")
    skip_steps: tuple[SkippedRange, ...] = Field(
        (),
        description="steps that are left out, as [first, end] or [first, end, epoch], half-open as ranges in Python: "
        "steps first to end - 1 of epoch 0 or another; the rest keep their numbers and rows",
    )
    skip_step_rows: int | None = Field(
        None,
        gt=0,
        description="rows of a step, over all ranks, that skip_steps count; None: this run's, and a state that was "
        "saved with another number of them, without it or with rows of another length is refused",
    )
    on_change: Literal["refuse", "nearest"] = Field(
        "refuse",
        description="a state of another seq_len, stride or length_buckets: refuse it, or go on at the row nearest to "
        "the same count of tokens",
    )
    outputs: tuple[str, ...] = Field(
        ("input_ids", "labels"), description=f"fields of a batch: {', '.join(OUTPUT_NAMES)}"
    )
    label_shift: bool = Field(
        True,
        description="labels[t] is the token after input_ids[t]; False: labels equal inputs, in the same rows, which "
        "take T + 1 tokens of the corpus all the same",
    )

    rank: int | None = Field(None, ge=0, description="None: from torch.distributed or the launcher's RANK")
    world_size: int | None = Field(None, gt=0, description="None: from torch.distributed or the launcher's WORLD_SIZE")
    context_parallel: tuple[int, int] | None = Field(
        None, description="(rank, size): this process gets its share of every row; None: whole rows"
    )
    context_split: Literal["contiguous", "zigzag"] = Field(
        "contiguous", description="which share: one piece of a row, or two that make causal attention equal work"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; only auto falls back to the CPU")
    placement: Literal["auto", "host", "device"] = Field(
        "auto", description="host sends rows to the GPU, device keeps the corpus there; auto: device for a small corpus"
    )

    quiet: bool = Field(False, description="no line at the start, and no warning when the trainer waits for data")
    nvtx: bool | None = Field(
        None, description="ranges on a profiler's timeline; None: if the process was started by Nsight Systems"
    )

    prefetch_queue_depth: int = Field(2, gt=0, le=64, description="blocks DALI keeps ready")
    num_threads: int = Field(2, gt=0, le=256, description="threads that read ahead")
    decoded_cache_bytes: int = Field(
        1 << 30, ge=0, description="bytes of decoded ids that are kept, for formats that have to be decoded"
    )
    verify_checksums: bool = Field(
        False, description="compare checksums that the format records (MDS) at the start, which reads all data"
    )
    read_retries: int = Field(
        4, ge=0, le=100, description="times that a read is tried again which failed for a reason that may pass"
    )
    eager: bool = Field(False, description="decode the whole corpus at the start and keep it in memory")
    py_num_workers: int = Field(0, ge=0, description="processes for Python work per row; no format needs any")
    batches_per_run: int | None = Field(None, gt=0, description="batches in one DALI run (K); None: from a byte target")
    max_device_bytes: int | None = Field(
        None, ge=0, description="GPU memory the corpus may take; None: placement auto takes a tenth of what is free"
    )
    static_buffers: bool = Field(
        False, description="deliver every batch at the same addresses, for CUDA graphs; it is valid until the next one"
    )
    max_block_bytes: int = Field(64 << 20, gt=0, description="bytes one block of K batches may take when delivered")

    def __init__(self, **settings: Any) -> None:
        _refuse_unknown(settings)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            problems = first_of_each((".".join(map(str, e["loc"])), _message(e)) for e in error.errors())
            refused = ConfigError("; ".join(f"{name or 'config'}: {problem}" for name, problem in problems))
            refused.problems = problems
            raise refused from None

    @field_validator("corpus", "loss_masks", mode="before")
    @classmethod
    def _paths_as_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        setting = str(info.field_name)
        return None if value is None and setting == "loss_masks" else paths_of(value, setting)

    _in_range = field_validator("*", mode="before")(in_range)
    _finite_lists = field_validator("outputs", "length_buckets", "context_parallel", mode="before")(list_of)
    _ranges_merged = field_validator("skip_steps", mode="before")(merged_ranges)
    _device_as_name = field_validator("device", mode="before")(device_name)
    _dtype_as_name = field_validator("dtype", mode="before")(dtype_name)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("rank and world_size go together: give both or neither")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        if self.context_parallel is not None:
            rank, size = self.context_parallel
            if not 0 <= rank < size:
                raise ValueError(f"context_parallel = [{rank}, {size}]: expected (rank, size) with 0 <= rank < size")
            for width in self.bucket_widths or (self.seq_len,):
                shared_ranges(width, rank, size, self.context_split)
        if self.split == "validation" and self.validation_fraction == 0.0:
            raise ValueError(
                'split = "validation" needs a validation_fraction above 0 (0.01 keeps 1 % of the tokens); for '
                'files of their own, such as val.bin, name them as the corpus and set split = "train", shuffle = False '
                "and drop_last = False"
            )
        if self.split == "validation" and self.skip_steps:
            raise ValueError('skip_steps leave steps out of training; set skip_steps = [] with split = "validation"')
        unknown = [name for name in self.outputs if name not in OUTPUT_NAMES]
        if unknown or not self.outputs or len(set(self.outputs)) != len(self.outputs):
            raise ValueError(
                f"outputs {list(self.outputs)}: expected one or more different names of {list(OUTPUT_NAMES)}"
                + (f"; {unknown[0]!r} is not made by this version" if unknown else "")
            )
        if self.py_num_workers:
            raise ValueError(
                f"py_num_workers = {self.py_num_workers}: token files need no Python work per row, so there is nothing "
                "for worker processes to do; leave it at 0"
            )
        if self.vocab_size is not None and self.rows != "stream" and self.pad_id >= self.vocab_size:
            raise ValueError(
                f"pad_id = {self.pad_id} is not below vocab_size = {self.vocab_size}, but goes into the model as other "
                "ids do; name one below it (labels are ignored there, and attention_mask leaves it out)"
            )
        if self.rows != "stream" and self.stride is not None:
            raise ValueError(f'rows = "{self.rows}" are made of documents, which have no stride; leave it out')
        if self.mtp >= self.seq_len:
            raise ValueError(
                f"mtp = {self.mtp} asks for labels {self.mtp} tokens ahead, but a row has only seq_len = "
                f"{self.seq_len} tokens; set mtp below seq_len"
            )
        if self.length_buckets is not None:
            self._check_buckets(self.length_buckets)
        if not self.label_shift and self.uses_pieces:
            raise ValueError("label_shift = False copies the inputs; documents, masks and mtp need shifted labels")
        if self.placement == "device" and self.device == "cpu":
            raise ValueError('placement = "device" keeps the corpus in GPU memory and needs device = "cuda"')
        return self

    def _check_buckets(self, widths: tuple[int, ...]) -> None:
        if self.rows != "pad":
            raise ValueError(f'length_buckets go with rows = "pad", one document a row; rows is "{self.rows}"')
        rising = all(low < high for low, high in itertools.pairwise((0, *widths)))
        if not widths or not rising or widths[-1] > self.seq_len:
            raise ValueError(
                f"length_buckets {list(widths)}: expected one or more rising widths of 1 to seq_len = {self.seq_len}"
            )

    @property
    def bucket_widths(self) -> tuple[int, ...] | None:
        """The widths a batch may have, the last one seq_len; None where all have that."""
        if self.length_buckets is None:
            return None
        return self.length_buckets + ((self.seq_len,) if self.length_buckets[-1] < self.seq_len else ())

    @property
    def batch_names(self) -> tuple[str, ...]:
        """What a batch holds: the outputs, and beside `cu_seqlens` the number of segments in it."""
        return self.outputs + tuple(name for name, spec in OUTPUTS.items() if spec.with_field in self.outputs)

    @property
    def uses_documents(self) -> bool:
        """Whether rows, labels or outputs depend on where documents begin and end."""
        return (
            self.rows != "stream"
            or self.masks_boundaries
            or any(OUTPUTS[name].tells_documents for name in self.outputs)
        )

    @property
    def masks_boundaries(self) -> bool:
        """Whether labels that cross into the next document are ignored."""
        return self.rows != "stream" or self.mtp > 0 if self.mask_boundaries is None else self.mask_boundaries

    @property
    def uses_pieces(self) -> bool:
        """Whether rows are put together from pieces of documents, instead of cut from the stream as they lie.

        A corpus with a loss mask asks for that, too.
        """
        return self.uses_documents or self.mtp > 0 or any(OUTPUTS[name].needs_pieces for name in self.outputs)

    @classmethod
    def from_file(cls, *paths: str | os.PathLike[str], **overrides: Any) -> Self:
        """Read `.toml`, `.yaml`/`.yml` or `.json` files; later files, then keywords, replace what earlier ones say.

        So a preset of a model and one of a machine combine: `from_file("configs/gpt2_124m.toml", "configs/h100.toml")`.
        Raises `ConfigError` naming the file.
        """
        return cls.from_sources(*map(read_file, map(Path, paths)), Source("", overrides))

    @classmethod
    def from_preset(cls, *names: str, **overrides: Any) -> Self:
        """Combine presets, which `dali-pipes config` lists; later ones override earlier ones, keywords override both.

        `from_preset("gpt2_124m", "h100", corpus="data/*.bin")`. Raises `ConfigError` listing the known names.
        """
        return cls.from_sources(*map(read_preset, names), Source("", overrides))

    @classmethod
    def from_sources(cls, *sources: Source) -> Self:
        """As `from_file`, from settings and the names of the places where they are written, which an error names."""
        for source in sources:
            try:
                _refuse_unknown(source.settings)
            except ConfigError as error:
                raise ConfigError(f"{source.name}: {error}" if source.name else str(error)) from None
        try:
            return cls(**merged(sources))
        except ConfigError as error:
            raise blamed(error, sources, cls._problems) from None

    @classmethod
    def _problems(cls, settings: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        try:
            cls(**settings)
        except ConfigError as error:
            return error.problems
        return ()

    @classmethod
    def of(cls, given: "LoaderConfig | Paths | None", settings: Mapping[str, Any]) -> Self:
        """The configuration that a loader was given: one, or the paths of its corpus, or None; and settings, which win.

        Raises `ConfigError` where the corpus is given twice.
        """
        if isinstance(given, cls):
            return given.replace(**settings) if settings else given
        if given is None:
            return cls(**settings)
        refuse_as_corpus(given, cls.model_fields)
        if "corpus" in settings:
            raise ConfigError("the corpus is given twice: pass it as the first argument or as corpus=, not both")
        return cls(corpus=given, **settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields:
            raise ConfigError(unknown_setting(name, type(self).model_fields))
        raise ConfigError(
            f"a configuration cannot be changed: create a new one with config.replace({name}={shown(value)}) and "
            "build the loader from it"
        )

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Settings that differ from their defaults."""
        for name, field in type(self).model_fields.items():
            value = self.__dict__.get(name)
            if field.is_required() or value != field.default:
                yield name, value[0] if name == "corpus" and value is not None and len(value) == 1 else Shown(value)

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed, checked again."""
        return type(self)(**{**self.model_dump(), **changes})

    def order_settings(self) -> dict[str, Any]:
        """The settings that decide the order of the data, JSON-able: what a saved state is compared with."""
        settings = {name: getattr(self, name) for name in ORDER_FIELDS}
        settings["stride"] = self.stride if self.stride is not None else self.seq_len
        if self.rows != "stream":
            settings |= {name: getattr(self, name) for name in DOCUMENT_ORDER_FIELDS}
            if not self.documents_end_at_files:  # as states of releases that did not know it
                del settings["documents_end_at_files"]
        if self.bucket_widths is not None:
            settings["length_buckets"] = list(self.bucket_widths)
        return settings

    def to_toml(self) -> str:
        """The checked configuration as TOML, defaults included; settings that are None are left out."""
        # JSON's strings, numbers, booleans and lists are valid TOML values.
        values = self.model_dump(mode="json", exclude_none=True)
        return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in LoaderConfig.model_fields:
            raise ConfigError(unknown_setting(name, LoaderConfig.model_fields))


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return MISSING
    text = str(error["msg"]).removeprefix("Value error, ")
    return text if error["type"] == "value_error" else f"{text}, found {shown(error['input'])}"
