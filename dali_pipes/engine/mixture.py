"""From the configuration of a mixture to its rows: corpora, weights in rows, the length of an epoch, and caps."""

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.amounts import plain_fraction
from dali_pipes.corpus import Corpus
from dali_pipes.corpus_or_text import open_corpus
from dali_pipes.errors import ConfigError, CorpusError
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.make import Named, make_rows
from dali_pipes.runtime.messages import counted
from dali_pipes.runtime.threads import ReaderThreads, Task
from dali_pipes.uris import Uri, is_uri

if TYPE_CHECKING:
    from dali_pipes.schedule.mixed_rows import MixedRows
    from dali_pipes.schedule.mixture import MixtureOrder

Int64Array = npt.NDArray[np.int64]
_MOST_OPENING = 16
"""Remote sources that are opened at the same time."""
RowWeights = Mapping[str, Fraction]


def open_corpora(config: LoaderConfig) -> dict[str, Corpus]:
    """The corpora of a mixture by source name, or the only one by the name "". Blocks; errors name the source.

    Remote ones are opened at the same time, since that is mostly waiting.
    """
    sources = {"": config} if config.mixture is None else config.sources
    remote = [name for name, own in sources.items() if _is_remote(own)]
    threads = ReaderThreads(min(len(remote), _MOST_OPENING)) if len(remote) > 1 else None
    futures = {name: threads.submit(open_source, sources[name]) for name in remote} if threads is not None else {}
    corpora: dict[str, Corpus] = {}
    try:
        for name, own in sources.items():
            try:
                if threads is not None and name in futures:
                    corpora[name] = threads.result(futures[name])
                else:
                    corpora[name] = open_source(own)
            except (ConfigError, CorpusError) as error:
                if not name:
                    raise
                raise type(error)(f"mixture.{name}: {error}") from error
        _refuse_shared_files(corpora)
        _refuse_other_vocabularies(corpora)
    except BaseException:
        for future in futures.values():
            future.cancel()
            future.add_done_callback(_close_opened)
        for corpus in corpora.values():
            corpus.close()
        raise
    finally:
        if threads is not None:
            threads.stop(0)
    return corpora


def _is_remote(config: LoaderConfig) -> bool:
    return any(map(is_uri, config.corpus or ()))


def _close_opened(future: "Task[Corpus]") -> None:
    if future.exception() is None:
        future.result().close()


def open_source(config: LoaderConfig) -> Corpus:
    """The corpus of a configuration, or of one source of a mixture. Blocks."""
    assert config.corpus is not None
    return open_corpus(
        config.corpus,
        format=config.format,
        dtype=config.dtype,
        eos_id=config.eos_id,
        tokenizer=config.tokenizer,
        text_key=config.text_key,
        loss_masks=config.loss_masks,
        token_column=config.token_column,
        cache_bytes=config.decoded_cache_bytes,
        eager=config.eager,
        verify=config.verify_checksums,
        read_retries=config.read_retries,
        read_requests=config.read_requests,
        reads=config.reads,
        vocab_size=config.vocab_size,
        keep=config.keep,
    )


def _refuse_shared_files(corpora: Mapping[str, Corpus]) -> None:
    """One file in two sources would be read more often than either weight says."""
    owners: dict[object, str] = {}
    for name, corpus in corpora.items():
        if corpus.is_synthetic:
            continue
        for file in corpus.files:
            about = None if isinstance(file, Uri) else file.stat()
            owner = owners.setdefault(file if about is None else (about.st_dev, about.st_ino), name)
            if owner != name:
                raise ConfigError(
                    f"mixture: {file} is in two sources, {owner!r} and {name!r}; list it in one of them, or give one "
                    "source both weights"
                )


def _refuse_other_vocabularies(corpora: Mapping[str, Corpus]) -> None:
    """With two vocabularies, one id stands for different text. Only what manifests state is known."""
    stated = [(name, tokenizer) for name, corpus in corpora.items() if name for tokenizer in corpus.tokenizers]
    distinct = {(tokenizer.sha256, tokenizer.vocabulary): (name, tokenizer) for name, tokenizer in reversed(stated)}
    for (other, theirs), (name, tokenizer) in combinations(reversed(distinct.values()), 2):
        if tokenizer.differs(theirs):
            sources = f"sources {other!r} and {name!r}" if name != other else f"files of source {name!r}"
            raise ConfigError(
                f"mixture: {sources} were tokenized with different vocabularies: tokenizer {theirs.sha256[:12]} "
                f"according to {theirs.manifest}, and {tokenizer.sha256[:12]} according to {tokenizer.manifest}. "
                "Tokenize all with the same tokenizer.json, or remove one of them"
            )


def mix(config: LoaderConfig, corpora: Mapping[str, Corpus], bases: Int64Array) -> "tuple[MixedRows, str | None]":
    """The rows of a mixture, and what the user should know about the documents of its sources. May block."""
    # With the first mixture: most runs have one corpus.
    from dali_pipes.schedule.mixed_rows import MixedRows
    from dali_pipes.schedule.mixture import STRATUM, MixtureOrder

    assert config.mixture is not None
    in_pieces = config.uses_pieces or any(corpus.loss_mask is not None for corpus in corpora.values())
    looks_back = config.goldfish is not None
    rows: dict[str, RowSource] = {}
    warnings = []
    for name, own in config.sources.items():
        try:
            rows[name], warning = make_rows(
                own, corpora[name], Named(name, share_of(config, name), in_pieces, looks_back)
            )
        except (ConfigError, CorpusError) as error:
            raise type(error)(f"mixture.{name}: {error}") from error
        if warning is not None:
            warnings.append(f"mixture.{name}: {warning}")
    caps = {
        name: math.floor(source.max_epochs * rows[name].rows_of_pass())
        for name, source in config.mixture.items()
        if source.max_epochs is not None
    }
    total = _total_rows(config)
    stages = stages_in_rows(config, rows)
    may_end = total is not None and config.on_exhausted != "error"
    may_be_exceeded = total is not None and not may_end  # without a total, passes end epochs
    order = MixtureOrder(
        tuple(rows),
        stages,
        seed=config.seed,
        caps=caps if may_end else None,
        on_exhausted="stop" if config.on_exhausted == "stop" else "drop",
    )
    if order.end == 0:
        name, _, _, cap = order.exhausted[-1]
        raise ConfigError(
            f"mixture.{name}: max_epochs = {plain_fraction(config.mixture[name].max_epochs or Fraction(0))} allows "
            f"{counted(cap, 'row')}, fewer than its part of the first {STRATUM} rows, so the run would be empty; "
            "raise max_epochs, or lower the weight"
        )
    if total is None:
        total = _until_one_ends(config, order, rows)
    mixture = MixedRows(
        tuple(rows), tuple(rows.values()), bases, order, total, caps, stages, keeps_caps=may_be_exceeded
    )
    return mixture, "\n".join(warnings) or None


def share_of(config: LoaderConfig, name: str) -> Fraction | None:
    """The part of a source that is used, with `proxy`; None: all."""
    assert config.mixture is not None
    parts = [part for part in (config.mixture[name].share, config.proxy) if part is not None]
    return math.prod(parts, start=Fraction(1)) if parts else None


def stages_in_rows(config: LoaderConfig, rows: Mapping[str, RowSource]) -> list[tuple[int, dict[str, Fraction]]]:
    """The stages of a configuration: first place, and weights in rows. Of two within one row, the later counts."""
    stages = {0: in_rows(_base_weights(config, rows), rows)}
    stages |= {-(-stage.at // config.row_len): in_rows(stage.weights, rows) for stage in config.stages}
    return list(stages.items())


def in_rows(weights: RowWeights, rows: Mapping[str, RowSource]) -> dict[str, Fraction]:
    """Weights in tokens as weights in rows, which add up to 1: divided by the tokens of a row of each source."""
    by_rows = {name: weight / rows[name].mean_tokens() if weight else Fraction(0) for name, weight in weights.items()}
    total = sum(by_rows.values())
    return {name: weight / total for name, weight in by_rows.items()}


def _base_weights(config: LoaderConfig, rows: Mapping[str, RowSource]) -> dict[str, Fraction]:
    """The weights in tokens, with "size" resolved: in proportion to tokens^(1 / temperature)."""
    weights: dict[str, Fraction] = {}
    sizes = {name: rows[name].num_tokens for name, weight in config.weights.items() if weight == "size"}
    power = 1 / float(config.temperature or 1)
    total = sum((size / max(sizes.values())) ** power for size in sizes.values())
    for name, weight in config.weights.items():
        if isinstance(weight, Fraction):
            weights[name] = weight
        elif config.temperature is None:
            weights[name] = Fraction(sizes[name], sum(sizes.values()))
        else:  # rounded, so that every machine has the same number
            weights[name] = Fraction(round((sizes[name] / max(sizes.values())) ** power / total * 10**9), 10**9)
    return weights


def _total_rows(config: LoaderConfig) -> int | None:
    """Rows of an epoch over all ranks, where a total is given."""
    if config.total_tokens is not None:
        return config.total_tokens // config.row_len
    if config.total_steps is not None:
        return config.total_steps * config.batch_size * (config.world_size or 1)
    return config.total_rows


def _until_one_ends(config: LoaderConfig, order: "MixtureOrder", rows: Mapping[str, RowSource]) -> int:
    """Rows until the first source has had its passes, one where `max_epochs` does not say."""
    assert config.mixture is not None
    ends = []
    for number, (name, source) in enumerate(config.mixture.items()):
        passes = Fraction(1) if source.max_epochs is None else source.max_epochs
        end = order.places_for(number, math.floor(passes * rows[name].rows_of_pass()))
        if end is not None:
            ends.append(end)
    if not ends:
        raise ConfigError(
            "mixture: no source reaches its max_epochs, so an epoch does not end; set total_tokens, total_rows or "
            "total_steps"
        )
    return min(ends)
