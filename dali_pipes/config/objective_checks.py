"""What an entry of `objective` requires of the other settings. Every function raises a ValueError that names both."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dali_pipes.config.objectives import FEWEST_FIM_POSITIONS, Fim, Goldfish, Mlm, Objective, Spans
from dali_pipes.config.outputs import OUTPUTS
from dali_pipes.config.span_counts import SpanWidths
from dali_pipes.config.validators import shown


class Ids(NamedTuple):
    """The settings that say which ids there are, and which of them have a meaning already."""

    vocab_size: int | None
    eos_id: int | None
    document_start_id: int | None
    pad_id: int

    def of_documents(self) -> dict[str, int]:
        """Ids that begin and end documents, by setting."""
        given = {"eos_id": self.eos_id, "document_start_id": self.document_start_id}
        return {name: number for name, number in given.items() if number is not None}


def require_shared_functions(entries: Iterable[Objective], own: Mapping[str, object]) -> None:
    """own: the objectives of sources that set theirs, by source."""
    users = [entry.kind for entry in entries if ":" in entry.kind]
    if users and own:
        raise ValueError(
            f'objective: kind = "{users[0]}" applies to all sources, but mixture.{next(iter(own))} sets its own '
            "objective; remove one of the two"
        )


def require_one_goldfish(different: Collection[Goldfish], mtp: int) -> None:
    """different: entries, of all sources of a mixture."""
    if len(different) > 1:
        raise ValueError(
            'objective: kind = "goldfish" has different k or h in the sources of the mixture; use the same in all '
            "of them"
        )
    for entry in different:
        if mtp > entry.h:
            raise ValueError(f'objective: kind = "goldfish" has h = {entry.h}, less than mtp = {mtp}; use a larger h')


def require_noisy_ids(entries: Iterable[Objective], outputs: Collection[str]) -> None:
    """The inputs that masked diffusion makes are delivered."""
    if "diffusion" in {entry.kind for entry in entries} and "noisy_ids" not in outputs:
        raise ValueError('objective: kind = "diffusion" writes the model inputs to "noisy_ids"; add it to outputs')


def check_ids(entry: Objective, ids: Ids) -> None:
    """The ids of an entry are ids of the vocabulary, and what it inserts is not taken for the end of a document."""
    for name, number in entry.inserted.items():
        _require_in_vocabulary(entry, number, name, ids)
    if ids.vocab_size is not None and (outside := [own for own in entry.special if own >= ids.vocab_size]):
        raise ValueError(
            f'objective: kind = "{entry.kind}": special_ids has {outside[0]:,}, which must be below vocab_size = '
            f"{ids.vocab_size:,}; such an id cannot occur, so correct it or remove it"
        )
    inserted = entry.inserted
    if isinstance(entry, Spans):
        inserted = {name: number for name, number in inserted.items() if name.endswith("mode_token")}
        lowest, highest = entry.sentinel_range(entry.num_sentinels)
        for name, number in {**ids.of_documents(), "pad_id": ids.pad_id}.items():
            if lowest <= number <= highest:
                raise ValueError(
                    f'objective: kind = "spans": {name} = {number:,} is one of the sentinels {lowest:,} to '
                    f"{highest:,}; use other sentinels, or another {name}"
                )
    _require_apart(entry, inserted, ids)


def check_mlm(entry: Mlm, ids: Ids) -> None:
    """The size of the vocabulary is known where it is needed."""
    if ids.vocab_size is None and (entry.random or entry.words is not None):
        use = "to draw random ids; set vocab_size, or random = 0"
        if not entry.random:
            use = f"to check that words = {shown(entry.words)} has an entry for each id; set vocab_size"
        raise ValueError(f'objective: kind = "mlm" needs vocab_size {use}')


def check_fim(entry: Fim, ids: Ids, rows: str, shortest: int, tokenizer: str | None) -> None:
    """shortest: row, in tokens; tokenizer: the setting, for sentinels that are strings."""
    if rows == "stream":
        raise ValueError(
            'objective: kind = "fim" rearranges whole documents, but rows = "stream" cuts the corpus into windows '
            'that begin and end anywhere in a document; set rows = "pack" or "pad"'
        )
    if shortest < FEWEST_FIM_POSITIONS:
        raise ValueError(
            f'objective: kind = "fim" needs rows of at least {FEWEST_FIM_POSITIONS} positions, three of them for '
            f"sentinels, but seq_len = {shortest}; use a larger seq_len"
        )
    try:
        sentinels = entry.ids(tokenizer)
    except ValueError as error:
        raise ValueError(f'objective: kind = "fim": {error}') from None
    inserted = {f"tokens.{name}": own for name, own in zip(("prefix", "middle", "suffix"), sentinels, strict=True)}
    for name, number in inserted.items():
        _require_in_vocabulary(entry, number, name, ids)
    _require_apart(entry, inserted, ids)


def check_spans(entry: Spans, widths: SpanWidths, row_len: int, outputs: Collection[str]) -> None:
    """There are outputs for the corrupted rows, and sentinels for the spans of the longest row."""
    made = [name for name, spec in OUTPUTS.items() if spec.needs_objective == "spans" and not spec.from_plan]
    if not set(made) & set(outputs):
        raise ValueError(
            f'objective: kind = "spans" writes corrupted rows to {", ".join(made)}, none of which is in outputs; '
            "add those that the model reads"
        )
    if widths.spans > entry.num_sentinels:
        raise ValueError(
            f'objective: kind = "spans" needs up to {widths.spans:,} sentinels in a row of seq_len = '
            f"{row_len:,}, found num_sentinels = {entry.num_sentinels:,}; add sentinels to the vocabulary, or "
            "use a shorter seq_len, a lower rate or a larger mean_length"
        )
    lowest, highest = entry.sentinel_range(entry.num_sentinels)
    if lowest < 0:
        raise ValueError(
            f'objective: kind = "spans" has {entry.num_sentinels:,} sentinels down from {entry.sentinels:,}, the '
            f"last of which would be {lowest:,}; set num_sentinels, or sentinel_step = 1"
        )
    for name, number in entry.inserted.items():
        if name not in ("sentinels", "start_id") and lowest <= number <= highest:
            raise ValueError(
                f'objective: kind = "spans": {name} is {number:,}, one of the sentinels {lowest:,} to {highest:,}; '
                "use another id"
            )


def _require_apart(entry: Objective, inserted: Mapping[str, int], ids: Ids) -> None:
    """inserted: by setting; a model could not tell them from the begin or end of a document."""
    for name, number in inserted.items():
        for other, taken in ids.of_documents().items():
            if number == taken:
                raise ValueError(
                    f'objective: kind = "{entry.kind}": {name} is {number:,}, which is also {other}, so the model '
                    "could not tell the two apart; use another id"
                )


def _require_in_vocabulary(entry: Objective, inserted: int, setting: str, ids: Ids) -> None:
    """setting: of the entry, names the id in the message."""
    if ids.vocab_size is not None and inserted >= ids.vocab_size:
        raise ValueError(
            f'objective: kind = "{entry.kind}" inserts id {inserted:,} ({setting}), which must be below '
            f"vocab_size = {ids.vocab_size:,}, the size of the model's vocabulary"
        )
