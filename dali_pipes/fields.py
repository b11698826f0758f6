"""The rule for fields: what would change what is learned is used, refused, or mentioned once.

A field is a key of a record, of a message or of a tool call, or a column of a table. A reader uses it, or raises an
error that names it, or reports it here as unused; the run then mentions each unused name once. Two kinds of unused
fields are not worth a word: those that hold nothing, since tables give every row the fields of all rows, and those
that are known to be bookkeeping.

    {"messages": [...], "id": 7, "score": null, "persona": "pirate"}         unused and worth a word: persona
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
"""Names that say where a sample comes from or what it measures: not part of what is learned."""


def holds_nothing(value: Any) -> bool:
    """Whether a value says nothing: None, an empty text or list, or a list or mapping of such values."""
    if isinstance(value, Mapping):
        return all(holds_nothing(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(holds_nothing(item) for item in value)
    return value is None or (isinstance(value, str) and not value.strip())


def unused(fields: Mapping[str, Any], used: Collection[str]) -> list[str]:
    """Names of fields that hold something, are not among `used`, and are not bookkeeping, in their order."""
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
    """Collects unused fields of a run, to mention each once. Not safe from several threads at once."""

    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    def add(self, kind: str, names: Collection[str], where: str) -> None:
        """kind: what has the fields, in the plural: "records", "messages". where: file and line, or file."""
        for name in names:
            self._seen.setdefault((kind, name), _Seen(where)).count += 1

    def lines(self) -> list[str]:
        """A sentence for each name, in the order of first use."""
        return [
            f"the field {name!r} of {seen.count:,} {kind} is not used (first in {seen.first})"
            for (kind, name), seen in self._seen.items()
        ]
