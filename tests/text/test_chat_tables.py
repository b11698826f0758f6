"""Conversations in tables give the ids and masks of the same records in .jsonl, whatever keys each record has.

A table has one type for all rows: where a record lacks a key, at any depth, its row has a null.
"""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.text import Document, find_text_files
from dali_pipes.text.chat import ChatTemplate, ConversationEncoder
from dali_pipes.text.reading import read_documents
from dali_pipes.text.streams import ByteMeter
from dali_pipes.text.tokenizer import LoadedTokenizer

TEMPLATE = """\
{%- if tools %}{{- 'TOOLS ' + (tools | tojson) + '<|stop|>' }}{%- endif %}
{%- for d in documents or [] %}{{- d | tojson }}{%- endfor %}
{%- if style is defined %}{{- 'STYLE ' + style }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + ('[' + m.name + ']' if m.name is defined else '') + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{- c | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def struct(**fields: Any) -> pa.DataType:
    return pa.struct(list(fields.items()))


PLACE = struct(name=pa.string(), height=pa.float64())
ARGUMENTS = struct(city=pa.string(), days=pa.list_(pa.int64()), place=PLACE, stops=pa.list_(PLACE), exact=pa.bool_())
CALL = struct(id=pa.string(), type=pa.string(), function=struct(name=pa.string(), arguments=ARGUMENTS))
OPTION = struct(type=pa.string(), default=pa.string(), enum=pa.list_(pa.string()))
PARAMETERS = struct(type=pa.string(), properties=struct(city=OPTION, unit=OPTION), required=pa.list_(pa.string()))
TOOL = struct(type=pa.string(), function=struct(name=pa.string(), description=pa.string(), parameters=PARAMETERS))
MESSAGE = struct(role=pa.string(), content=pa.string(), name=pa.string(), weight=pa.int64(), tool_calls=pa.list_(CALL))
SCHEMA = pa.schema(
    {
        "messages": pa.list_(MESSAGE),
        "tools": pa.list_(TOOL),
        "documents": pa.list_(struct(title=pa.string(), text=pa.string())),
        "chat_template_kwargs": struct(style=pa.string()),
        "system": pa.string(),
    }
)
TEXT = st.text('ab é\n"{}', max_size=4)
NEEDED = {"role", "messages", "arguments"}


def values(type: pa.DataType, name: str = "") -> st.SearchStrategy[Any]:
    """Values of a type, the keys of objects in its order; any key may be missing or null but for those that count."""
    if name == "role":
        return st.sampled_from(["user", "assistant", "tool"])
    if name == "weight":
        return st.sampled_from([0, 1])
    if pa.types.is_struct(type):
        fields = {field.name: values(field.type, field.name) for field in type}
        kept = {key: value if key in NEEDED else value | st.none() for key, value in fields.items()}
        needed = {key: value for key, value in kept.items() if key in NEEDED}
        optional = {key: value for key, value in kept.items() if key not in NEEDED}
        made = st.fixed_dictionaries(needed, optional=optional)
        return made.map(lambda found: {key: found[key] for key in fields if key in found})
    if pa.types.is_list(type):
        return st.lists(values(type.value_type, name), min_size=name == "messages", max_size=2)
    if pa.types.is_string(type):
        return TEXT
    return {pa.int64(): st.integers(0, 9), pa.float64(): st.sampled_from([0.5, 2.0]), pa.bool_(): st.booleans()}[type]


def with_content(record: dict[str, Any]) -> dict[str, Any]:
    """Messages without any content would be refused; the turn to learn comes last."""
    messages = [message | {"content": message.get("content") or "x"} for message in record["messages"]]
    return record | {"messages": [*messages, {"role": "assistant", "content": "end"}]}


RECORDS = st.lists(values(pa.struct(list(SCHEMA))).map(with_content), min_size=1, max_size=4)


def written(folder: Path, records: list[dict[str, Any]]) -> dict[str, Path]:
    """The records as files of all kinds."""
    table = pa.Table.from_pylist(records, SCHEMA)
    paths = {kind: folder / f"in.{kind}" for kind in ("jsonl", "parquet", "arrow", "stream")}
    paths["jsonl"].write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(table, paths["parquet"])
    for kind, new in (("arrow", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with new(paths[kind], SCHEMA) as writer:
            writer.write_table(table)
    return paths


def encoder(template: str = TEMPLATE) -> ConversationEncoder:
    loaded = LoadedTokenizer(tokenizer(), Path("t.json"), "", 2100, can_lose_characters=False)
    made = ChatTemplate("a template", {"default": template}, {}, datetime.now(UTC))
    return ConversationEncoder(loaded, made, "assistant", None)


def read(path: Path) -> list[Document]:
    return [d for file in find_text_files(path) for d in read_documents(file, None, None, ByteMeter())]


@settings(max_examples=examples(12), deadline=None)
@given(records=RECORDS)
def test_tables_and_lines_give_the_same_ids_and_masks(records: list[dict[str, Any]]) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in written(Path(folder), records).items():
            encoded = encoder().encode(read(path))
            found[kind] = [None if one is None else (one.ids.tolist(), one.mask.tolist()) for one in encoded]  # type: ignore[union-attr]
    assert len(found["jsonl"]) == len(records)
    assert all(one is not None for one in found["jsonl"])
    for kind, of_kind in found.items():
        assert of_kind == found["jsonl"], kind


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "stream"])
def test_what_the_template_shows_of_records_with_other_keys(tmp_path: Path, kind: str) -> None:
    """Written out, since files that are all wrong in the same way are equal too."""
    here = {"function": {"name": "f", "arguments": {"city": "Oslo"}}}
    there = {"function": {"name": "g", "arguments": {"days": [1], "place": {"height": 0.5}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"unit": {"type": "s"}}}}}]
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "assistant", "content": "A", "tool_calls": [here]}], "tools": tools},
        {"messages": [{"role": "assistant", "content": "B", "tool_calls": [there]}, {"role": "tool", "content": "C"}]},
        {"messages": [{"role": "assistant", "content": "D", "weight": 1}], "chat_template_kwargs": {"style": "s"}},
    ]
    documents = read(written(tmp_path, records)[kind])
    texts = [
        tokenizer().decode(one.ids.tolist(), skip_special_tokens=False) for one in encoder().encode(documents) if one
    ]
    call = '{"function": {"name": "f", "arguments": {"city": "Oslo"}}}'
    other = '{"function": {"name": "g", "arguments": {"days": [1], "place": {"height": 0.5}}}}'
    assert texts == [
        f"TOOLS {json.dumps(tools)}<|stop|><|im_start|>assistant\nA{call}<|im_end|>\n",
        f"<|im_start|>assistant\nB{other}<|im_end|>\n<|im_start|>tool\nC<|im_end|>\n",
        "STYLE s<|im_start|>assistant\nD<|im_end|>\n",
    ]


def test_maps_are_objects(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    call = struct(function=struct(name=pa.string(), arguments=arguments))
    schema = pa.schema({"messages": pa.list_(struct(role=pa.string(), content=pa.string(), tool_calls=pa.list_(call)))})
    for number, pairs in enumerate(([("city", "Oslo"), ("unit", None)], [])):
        made = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": pairs}}]}
        pq.write_table(pa.Table.from_pylist([{"messages": [made]}], schema), tmp_path / f"{number}.parquet")
        (encoded,) = encoder().encode(read(tmp_path / f"{number}.parquet"))
        assert encoded is not None
        text = tokenizer().decode(encoded.ids.tolist(), skip_special_tokens=False)
        assert f'"arguments": {json.dumps({"city": "Oslo"} if pairs else {})}' in text
