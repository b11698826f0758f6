"""`tokenize --chat`: ids and masks on the disk, dropped conversations counted, and the loader that reads them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import samples
from chat_cases import tokenizer as library
from corpus_truth import read_documents, words_tokenizer
from typer.testing import CliRunner, Result

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.text.chat import ChatEncoder, TurnsToLearn, load_template, parse_conversation
from dali_pipes.text.chat.template import CHATML
from dali_pipes.tools.cli import app


def tokenize(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tokenize", *map(str, arguments), "--chat"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer."""
    folder = tmp_path_factory.mktemp("chat_tokenizer")
    library().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def expected(
    records: list[Any], learn: TurnsToLearn, template: str | None = "chatml"
) -> list[tuple[list[int], list[int]]]:
    eos = None if template else library().token_to_id("</s>")
    encoder = ChatEncoder(library(), load_template(None, template) if template else None, learn, eos_id=eos)
    found = encoder.encode_batch([parse_conversation(record, "x") for record in records])
    return [(one[0].tolist(), one[1].tolist()) for one in found if one is not None]


def masks_of(folder: Path) -> list[int]:
    return [bit for path in sorted(folder.glob("*.loss")) for bit in path.read_bytes()]


@pytest.mark.parametrize(
    ("kind", "learn"),
    [("messages", "assistant"), ("messages", "all"), ("sharegpt", "last"), ("prompt_completion", "all")],
)
def test_the_samples(tmp_path: Path, tokenizer: Path, kind: str, learn: TurnsToLearn) -> None:
    records = samples()[kind]
    path = write_records(tmp_path / "in.jsonl", records)
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml", "--learn", learn]
    result = tokenize(path, *arguments, "--shard-tokens", 5000)
    assert result.exit_code == 0, result.stderr
    wanted = expected(records, learn)
    assert read_documents(tmp_path / "out") == [ids for ids, _ in wanted]
    assert masks_of(tmp_path / "out") == [bit for _, mask in wanted for bit in mask]
    assert "50 documents (0 empty)" in result.stdout
    assert re.search(r"1 input .*uint16.*chat template chatml", result.stderr)


@pytest.mark.parametrize("known", [[], ["<|im_start|>"], ["<|im_end|>"], ["<|im_start|>", "<|im_end|>"]])
@pytest.mark.parametrize("source", ["chatml", "a file"])
def test_markers_of_a_template_that_are_no_tokens_are_named(tmp_path: Path, known: list[str], source: str) -> None:
    """And become ordinary text: the run goes on."""
    markers = ["<|im_start|>", "<|im_end|>"]
    words = words_tokenizer(tmp_path / "t.json", {"?": 0}, {name: 1 + at for at, name in enumerate(known)})
    path = write_records(tmp_path / "in.jsonl", samples()["messages"][:2])
    template = tmp_path / "mine.jinja"
    template.write_text(CHATML)
    chosen = "chatml" if source == "chatml" else str(template)
    result = tokenize(path, "--tokenizer", words, "--out", tmp_path / "out", "--chat-template", chosen)
    assert result.exit_code == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: the chat template")]
    assert len(warnings) == (known != markers)
    for marker in markers:
        assert all((marker in line) == (marker not in known) for line in warnings)
    assert all(chosen in line and str(words) in line for line in warnings)
    assert "warning" not in result.stdout


def test_prompt_and_completion_without_a_template(tmp_path: Path, tokenizer: Path) -> None:
    records = samples()["prompt_completion"]
    path = write_records(tmp_path / "in.jsonl", records)
    arguments = [
        "--tokenizer",
        tokenizer,
        "--out",
        tmp_path / "out",
        "--chat-template",
        "none",
        "--eos",
        library().token_to_id("</s>"),
    ]
    result = tokenize(path, *arguments)
    assert result.exit_code == 0, result.stderr
    assert read_documents(tmp_path / "out") == [ids for ids, _ in expected(records, "assistant", None)]


def test_conversations_with_nothing_to_learn_are_dropped_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "Hi"}]}, samples()["messages"][0], {"messages": []}]
    path = write_records(tmp_path / "in.jsonl", records)
    result = tokenize(path, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml")
    assert result.exit_code == 0, result.stderr
    assert "3 documents (0 empty, 2 dropped)" in result.stdout
    assert len(read_documents(tmp_path / "out")) == 1


@pytest.mark.parametrize(("learn", "what"), [("assistant", "assistant turn"), ("all", "message")])
def test_that_all_were_dropped_is_explained(tmp_path: Path, tokenizer: Path, learn: str, what: str) -> None:
    user = {"role": "user", "content": "Hi", "weight": 0}
    path = write_records(tmp_path / "in.jsonl", [{"messages": [user]}])
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml", "--learn", learn]
    result = tokenize(path, *arguments)
    assert result.exit_code == 2
    assert re.search(f"1 document, 0 .*empty, 1 dropped.* {what} ", result.stderr.splitlines()[-1])


def test_a_table_of_conversations_gives_the_same(tmp_path: Path, tokenizer: Path) -> None:
    records = samples()["messages"]
    arguments = ["--tokenizer", tokenizer, "--chat-template", "chatml"]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet")
    for name, path in (("a", write_records(tmp_path / "in.jsonl", records)), ("b", tmp_path / "in.parquet")):
        assert tokenize(path, *arguments, "--out", tmp_path / name).exit_code == 0
    assert read_documents(tmp_path / "a") == read_documents(tmp_path / "b")
    assert masks_of(tmp_path / "a") == masks_of(tmp_path / "b")


def test_the_loader_learns_what_the_mask_says(tmp_path: Path, tokenizer: Path) -> None:
    records = samples()["messages"][:5]
    path = write_records(tmp_path / "in.jsonl", records)
    arguments = ["--tokenizer", tokenizer, "--chat-template", "chatml"]
    assert tokenize(path, *arguments, "--out", tmp_path / "out").exit_code == 0
    wanted = expected(records, "assistant")
    longest = max(len(ids) for ids, _ in wanted)
    with TokenLoader(
        corpus=str(tmp_path / "out"), rows="pad", batch_size=1, seq_len=longest, shuffle=False, device="cpu"
    ) as loader:
        labels = [batch["labels"][0].tolist() for batch in loader]
    assert [[label for label in row if label != -100] for row in labels] == [
        [id for id, bit in zip(ids[1:], mask[1:], strict=True) if bit] for ids, mask in wanted
    ]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.loss_mask is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "chat template"),
        (["--chat-template", "chatml", "--eos", "1"], "--eos 1: "),
        (["--chat-template", "chatml", "--no-eos"], "--no-eos: "),
        (["--chat-template", "none", "--no-eos"], "in.jsonl: line 1: "),
        (["--chat-template", "gone.jinja"], "gone.jinja"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, tokenizer: Path, options: list[str], message: str) -> None:
    path = write_records(tmp_path / "in.jsonl", samples()["messages"][:1])
    result = tokenize(path, "--tokenizer", tokenizer, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_texts_are_no_conversations(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_text("Hi")
    result = tokenize(
        tmp_path / "in.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml"
    )
    assert result.exit_code == 2
    assert re.search(r"in\.txt: .*\.jsonl.*\.csv", result.stderr)


SHOWS = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- if brief is defined and brief %}{{- 'BRIEF ' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'developer' %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION_CALL = {"name": "clock", "arguments": '{"zone": "CET"}'}
CALL = {"type": "function", "function": FUNCTION_CALL}


def run(
    folder: Path, tokenizer: Path, records: list[Any], *options: str, template: str = SHOWS
) -> tuple[Result, list[str]]:
    """The result, and the texts that were written."""
    (folder / "t.jinja").write_text(template)
    path = folder / "in.jsonl"
    if not path.exists():  # a run goes on with the same file only
        write_records(path, records)
    arguments = [path, "--tokenizer", tokenizer, "--chat-template", folder / "t.jinja", "--out", folder / "out"]
    result = tokenize(*arguments, *options)
    ids = read_documents(folder / "out") if result.exit_code == 0 else []
    return result, [library().decode(one, skip_special_tokens=False) for one in ids]


def warnings_of(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [line.removeprefix("warning: ") for line in result.stderr.splitlines() if line.startswith("warning: ")]


def test_what_is_not_used_is_mentioned_once_with_its_count(tmp_path: Path, tokenizer: Path) -> None:
    """Keys of records, messages and calls, texts and settings that the template does not show; bookkeeping is quiet."""
    call = CALL | {"id": "call_1", "result": "noon"}
    records: list[Any] = [
        {"messages": [USER, ASSISTANT], "id": 1, "chosen": "c", "tags": [], "source": "web"},
        {"messages": [USER | {"train": 1, "tool_call_id": "1"}, ASSISTANT | {"reasoning_content": "so"}]},
        {"messages": [{"role": "developer", "content": "Be kind."}, USER, ASSISTANT | {"tool_calls": [call, call]}]},
        {"messages": [USER, ASSISTANT | {"reasoning_content": "why"}], "documents": [{"text": "d"}], "chosen": "d"},
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"brief": True, "loud": True}},
        {"messages": [USER], "rejected": "of a conversation that is dropped"},
    ]
    result, texts = run(tmp_path, tokenizer, records)
    assert len(texts) == 5
    place = f"first in {tmp_path / 'in.jsonl'}: line"
    assert sorted(warnings_of(result)) == sorted(
        [
            f"records: the field 'chosen' is not used (2 times, {place} 1)",
            f"turns that are not the assistant's: the field 'train' is not used (1 time, {place} 2)",
            f"messages: the field 'reasoning_content' is not used (2 times, {place} 2)",
            f"developer messages: the field 'content' is not used (1 time, {place} 3)",
            f"tool calls: the field 'result' is not used (2 times, {place} 3)",
            f"records: the field 'documents' is not used (1 time, {place} 4)",
            f"chat_template_kwargs: the field 'loud' is not used (1 time, {place} 5)",
        ]
    )
    again, _ = run(tmp_path, tokenizer, records)
    assert warnings_of(again) == warnings_of(result), "of a run that is finished too"


def test_keys_that_a_template_shows_with_the_whole_message_are_used(tmp_path: Path, tokenizer: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ m | tojson }}|{% endfor %}"
    calls = [CALL | {"result": "noon"}]
    records = [{"messages": [USER | {"mood": "good"}, ASSISTANT | {"tool_calls": calls}], "tools": [CALL]}]
    result, (text,) = run(tmp_path, tokenizer, records, template=template)
    assert '"mood": "good"' in text
    assert '"result": "noon"' in text
    assert warnings_of(result) == [
        f"records: the field 'tools' is not used (1 time, first in {tmp_path / 'in.jsonl'}: line 1)"
    ]


def test_flags_of_other_turns_count_where_all_is_learned(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"messages": [USER | {"train": True}, ASSISTANT]}]
    result, _ = run(tmp_path, tokenizer, records, "--learn", "all")
    assert warnings_of(result) == []


def test_calls_of_the_older_form_are_shown_as_those_of_the_newer_one(tmp_path: Path, tokenizer: Path) -> None:
    older = [USER, ASSISTANT | {"function_call": FUNCTION_CALL}, {"role": "function", "name": "clock", "content": "9"}]
    result, (text,) = run(tmp_path, tokenizer, [{"messages": [*older, ASSISTANT]}])
    assert 'Helloclock{"zone": "CET"}<|im_end|>\n<|im_start|>tool\n9<|im_end|>' in text
    assert warnings_of(result) == []


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_calls_to_learn_that_are_not_shown_are_refused(tmp_path: Path, tokenizer: Path, key: str) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}|{% endfor %}"
    calls = {"tool_calls": [CALL], "function_call": FUNCTION_CALL}
    answer = ASSISTANT | {key: calls[key]}
    result, _ = run(tmp_path, tokenizer, [{"messages": [USER, answer]}], template=template)
    assert result.exit_code == 2
    assert re.search(f"line 1: .*{key} of message 1", result.stderr)
    (tmp_path / "b").mkdir()
    records = [{"messages": [USER, answer | {"weight": 0}, USER, ASSISTANT]}]
    result, _ = run(tmp_path / "b", tokenizer, records, template=template)
    (warning,) = warnings_of(result)
    assert warning.startswith(f"messages: the field {key!r} is not used")


def test_tools_in_the_form_that_the_template_reads(tmp_path: Path, tokenizer: Path) -> None:
    """A template that reads the name of a tool gets the function itself."""
    function = {"name": "clock", "description": "tells the time"}
    template = "{% for t in tools or [] %}{{ t.name }}: {{ t.description }};{% endfor %}" + SHOWS.replace(
        "c.function.name + (c.function.arguments | tojson)", "c.name"
    )
    for number, tool in enumerate((function, {"type": "function", "function": function})):
        (tmp_path / str(number)).mkdir()
        records = [{"messages": [USER, ASSISTANT], "tools": [tool]}]
        _, (text,) = run(tmp_path / str(number), tokenizer, records, template=template)
        assert text.startswith('clock: tells the time;[{"name": "clock"')


def test_settings_of_the_command_for_the_template(tmp_path: Path, tokenizer: Path) -> None:
    """A record comes first; a run goes on with the same settings only."""
    records = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], "chat_template_kwargs": '{"brief": 0}'}]
    option = "--chat-template-kwargs"
    result, texts = run(tmp_path, tokenizer, records, option, '{"brief": true, "brif": 1}')
    assert [text.startswith("BRIEF") for text in texts] == [True, False]
    (warning,) = warnings_of(result)
    assert re.match(rf"{option}: .*{tmp_path / 't.jinja'} .*'brif'.* brief", warning)
    for more in ([], [option, '{"brief": false, "brif": 1}']):
        result, _ = run(tmp_path, tokenizer, records, *more)
        assert result.exit_code == 2
        assert "chat_template_kwargs" in result.stderr
    same, _ = run(tmp_path, tokenizer, records, option, '{"brif": 1, "brief": true}')
    assert same.exit_code == 0
    for bad, message in (
        ("{", "character 2"),
        ("[1]", "[1] (list)"),
        ('{"messages": 1}', "messages"),
    ):
        result, _ = run(tmp_path, tokenizer, records, option, bad)
        assert result.exit_code == 2
        assert f"{option} {bad}" in result.stderr.splitlines()[-1]
        assert message in result.stderr.splitlines()[-1]


def test_a_system_text_without_a_template_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = write_records(tmp_path / "in.jsonl", [{"prompt": "a", "completion": "b", "system": "Be kind."}])
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "none", "--no-eos"]
    result = tokenize(path, *arguments)
    assert result.exit_code == 2
    assert re.search("line 1: 'system' .*--chat-template", result.stderr)
    path = write_records(tmp_path / "in.jsonl", [{"prompt": "a", "completion": "b", "tools": [CALL], "system": ""}])
    (warning,) = warnings_of(tokenize(path, *arguments[:2], "--out", tmp_path / "out2", *arguments[4:]))
    assert warning.startswith("records: the field 'tools' is not used")
