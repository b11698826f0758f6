"""The rule for fields: one that would change what the model learns is used, refused, or reported once.

A field is a key of a record, a message or a tool call, or a column of a table. A reader uses it, raises an error that
names it, or adds it here as unused; the run then reports each unused name once. Two kinds of unused fields are not
reported: empty ones, since tables give every row the fields of all rows, and known bookkeeping. The columns beside
token ids come last.

    {"messages": [...], "id": 7, "score": null, "persona": "pirate"}         unused and reported: persona
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = """
    __index_level_0__ added attributes author bucket category char_count chars conversation_hash conversation_id created
    created_at crawl_date data_source dataset date doc_id docid document_id domain dump file file_path filename hash id
    idx index lang language language_score length line_number md5 meta metadata model n_tokens num_chars num_tokens
    num_turns origin path prompt_id quality_score redpajama_v1 row_id score sha1 sha256 shard source split subset
    subset_name task text_id timestamp title token_count topic turn_id url uuid version warc_id warc_path
"""
BOOKKEEPING = frozenset(_NAMES.split())
"""Names of fields that describe a sample, such as its origin or length, and are not learned."""

# Keys of chat records, of their messages and of tool calls.

CHAT_FORMS = (("messages",), ("conversations",), ("prompt", "completion"))
"""The keys with the turns of a record: the first of these forms that it has."""
SYSTEM_TEXTS = ("system", "system_prompt")
"""The text of a system turn, in any of the forms."""
TOOL_LISTS = ("tools", "functions", "tool_defs")
"""The tools of a conversation; templates call them `tools`."""
DOCUMENTS = "documents"
TEMPLATE_SETTINGS = "chat_template_kwargs"
"""Variables for the template."""
_OWN = """
    messages add_generation_prompt continue_final_message strftime_now raise_exception mark_generated_ bos_token
    eos_token unk_token sep_token pad_token cls_token mask_token
"""
TEMPLATE_OWN = frozenset(_OWN.split())
"""Variables of a template that are not settings: `tokenize` sets them."""
MEDIA = frozenset(("audio", "audios", "image", "images", "pixel_values", "video", "videos"))
"""Media in addition to the text, which cannot be tokenized."""
LEARNED_FLAGS = ("weight", "train", "loss", "loss_mask", "loss_weight", "loss_scale")
"""On a message: 1 or true if it is learned."""
MASKED_FLAG = "masked"
"""On a message: true if it is not learned."""
MESSAGE_LINKS = frozenset(("call_id", "index", "parent_id", "tool_call_id"))
"""On a message or a tool call: the identifier of what it belongs to."""
CALL_KEYS = frozenset(("arguments", "function", "id", "name", "type"))
"""The keys of a tool call."""


def holds_nothing(value: Any) -> bool:
    """Whether a value is empty: None, a blank string, an empty list, or a list or mapping of such values."""
    if isinstance(value, Mapping):
        return all(holds_nothing(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(holds_nothing(item) for item in value)
    return value is None or (isinstance(value, str) and not value.strip())


def without_nulls(value: Any) -> Any:
    """The same JSON value without null keys, at any depth; nulls in lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def null_keys(value: Any) -> list[str]:
    """Names of the keys that `without_nulls` removes."""
    if isinstance(value, Mapping):
        here = [key for key, item in value.items() if item is None]
        return here + [name for item in value.values() for name in null_keys(item)]
    return [name for item in value for name in null_keys(item)] if isinstance(value, list) else []


def unused(fields: Mapping[str, Any], used: Collection[str]) -> list[str]:
    """Names of fields that are not empty, not in `used`, and not bookkeeping, in their order."""
    return [
        name
        for name, value in fields.items()
        if name not in used and name.lower() not in BOOKKEEPING and not holds_nothing(value)
    ]


@dataclass
class _Seen:
    first: str
    count: int = 0


@dataclass
class UnusedFields:
    """Collects the unused fields of a run, to report each once. Not thread-safe."""

    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    def add(self, kind: str, names: Collection[str], where: str, count: int = 1) -> None:
        """kind: what has the fields, in the plural: "records", "messages". where: file and line, or file."""
        for name in names:
            self._seen.setdefault((kind, name), _Seen(where)).count += count

    def entries(self) -> list[tuple[str, str, str, int]]:
        """(kind, name, first place, count) of each field, in the order of `add`, whose arguments these are."""
        return [(kind, name, seen.first, seen.count) for (kind, name), seen in self._seen.items()]

    def lines(self) -> list[str]:
        """A sentence for each field, in the order of `add`."""
        return [
            f"{kind}: the field {name!r} is not used "
            f"({seen.count:,} time{'s' * (seen.count > 1)}, first in {seen.first})"
            for (kind, name), seen in self._seen.items()
        ]


# Columns beside token ids, by what they say of the ids.

MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask")
"""1 if the id is learned, 0 if it is not."""
LABELS = "labels"
"""The id if it is learned, -100 if it is not."""
ATTENTION = "attention_mask"
"""0 for padding, 1 for an id; or, in packed rows, the number of the document from 1."""
SEGMENTS = ("segment_ids", "sequence_id")
"""The number of the document, from 0 or 1."""
POSITIONS = "position_ids"
"""0, 1, 2, ... from the start of each document."""
LENGTHS = "seq_lengths"
"""The lengths of the documents of a row."""
ENDS = "cu_seqlens"
"""0, then the end of each document of a row."""
BESIDE_IDS = (*MASKS, LABELS, ATTENTION, *SEGMENTS, POSITIONS, LENGTHS, ENDS)
"""All of these columns, in the order of messages."""
NOT_IDS = frozenset((*BESIDE_IDS, "special_tokens_mask", "token_type_ids"))
"""Lists of integers that are not token ids."""


def unused_columns(names: Collection[str], used: Collection[str]) -> tuple[str, ...]:
    """Columns of lists of numbers that may describe the ids, but are not known to any reader."""
    return tuple(name for name in names if name not in (*used, *NOT_IDS) and name.lower() not in BOOKKEEPING)
