"""Which of several templates a conversation gets: the one that transformers would take, or the one that is named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_cases import tokenizer
from typer.testing import CliRunner

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.chat.template import load_template
from dali_pipes.tools.cli import app

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
LISTED = [{"name": name, "template": f"config {name}"} for name in ("default", "tool_use", "rag")]
FOLDERS: dict[str, dict[str, Any]] = {
    "one in the config": {"tokenizer_config.json": {"chat_template": "config"}},
    "several in the config": {"tokenizer_config.json": {"chat_template": LISTED}},
    "no default in the config": {"tokenizer_config.json": {"chat_template": LISTED[1:]}},
    "a file before the config": {"tokenizer_config.json": {"chat_template": LISTED}, "chat_template.jinja": "file"},
    "a file and more": {
        "chat_template.jinja": "file",
        "additional_chat_templates/tool_use.jinja": "file tool_use",
        "additional_chat_templates/rag.v2.jinja": "file rag.v2",
        "additional_chat_templates/notes.txt": "{% nothing",
    },
    "more before the config": {
        "tokenizer_config.json": {"chat_template": "config"},
        "additional_chat_templates/tool_use.jinja": "file tool_use",
    },
    "more without tools": {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "file rag"},
}


def model(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("name", [None, "default", "tool_use", "rag", "rag.v2"])
def test_the_template_is_the_one_of_transformers(tmp_path: Path, kind: str, name: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    file = model(tmp_path, FOLDERS[kind])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for tools in (None, TOOLS):
        several = theirs.chat_template if isinstance(theirs.chat_template, dict) else {"default": theirs.chat_template}
        if name is not None and name not in several:  # which transformers takes for the source of a template
            with pytest.raises(ConfigError, match=f"named {name};.*--chat-template-name"):
                load_template(file, name=name)
            continue
        made = load_template(file, name=name)
        try:
            chosen = name if isinstance(theirs.chat_template, dict) else None
            expected = theirs.apply_chat_template(ASK, tools=tools, chat_template=chosen, tokenize=False)
        except ValueError:
            with pytest.raises(CorpusFormatError, match=r"x:1: .*default.*--chat-template-name"):
                made.render(ASK, {"tools": tools}, "x:1")
        else:
            assert made.render(ASK, {"tools": tools}, "x:1") == expected


def test_a_named_template_alone_must_be_right(tmp_path: Path) -> None:
    files = {"chat_template.jinja": "{% for", "additional_chat_templates/good.jinja": "good"}
    file = model(tmp_path, files)
    assert load_template(file, name="good").render(ASK, {"tools": TOOLS}, "x") == "good"
    with pytest.raises(ConfigError, match=r"chat_template\.jinja, line 1"):
        load_template(file)
    assert load_template(None, "chatml", name="default").name == "chatml"
    with pytest.raises(ConfigError, match=r"chatml .*rag.*default"):
        load_template(None, "chatml", name="rag")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "chat_template"])
def test_a_record_cannot_set_what_depends_on_the_rendering(tmp_path: Path, name: str) -> None:
    made = load_template(None, "chatml")
    with pytest.raises(CorpusFormatError, match=f"x:1: .*{name}"):
        made.render(ASK, {name: True}, "x:1")
    assert made.render(ASK, {name: False}, "x:1") == made.render(ASK, {}, "x:1")


def test_thoughts_have_the_names_that_templates_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    file = model(tmp_path, {"chat_template.jinja": source})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for thoughts in ({"reasoning": "a"}, {"thinking": "b", "reasoning": "a"}, {"reasoning_content": "c"}, {}):
        message = {"role": "assistant", "content": "x", **thoughts}
        mine = load_template(file).render([message], {}, "x")
        assert json.loads(mine) == json.loads(theirs.apply_chat_template([message], tokenize=False))


def test_the_command_takes_a_name_and_a_run_goes_on_with_the_same_options_only(tmp_path: Path) -> None:
    turn = "{% for m in messages %}{{ m.role + ': ' + (m.reasoning_content or '') + m.content + '|' }}{% endfor %}"
    file = model(tmp_path / "model", {"chat_template.jinja": "{{ 1 / 0 }}", "additional_chat_templates/my.jinja": turn})
    said = {"role": "assistant", "content": "b", "reasoning_content": "so"}
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [*ASK, said]}) + "\n")
    arguments = ["tokenize", tmp_path / "in.jsonl", "--tokenizer", file, "--out", tmp_path / "out"]

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, [*map(str, arguments), *options])

    assert "in.jsonl: line 1: " in run("--chat").stderr
    assert re.search(r"--chat-template-name my: .*--chat\b", run("--chat-template-name", "my").stderr)
    assert re.search(r"--no-learn-thoughts: .*--chat\b", run("--no-learn-thoughts").stderr)
    both = run("--chat", "--chat-template", "none", "--chat-template-name", "my").stderr
    assert re.search("--chat-template-name: .*--chat-template none", both)
    arguments[-1] = tmp_path / "named"
    done = run("--chat", "--chat-template-name", "my")
    assert done.exit_code == 0, done.stderr
    everything = [path.read_bytes() for path in sorted((tmp_path / "named").glob("*.loss"))]
    other = run("--chat", "--chat-template-name", "my", "--no-learn-thoughts")
    assert other.exit_code == 2
    assert re.search("learn_thoughts: .*None.*False", other.stderr)
    arguments[-1] = tmp_path / "less"
    assert run("--chat", "--chat-template-name", "my", "--no-learn-thoughts").exit_code == 0
    fewer = [path.read_bytes() for path in sorted((tmp_path / "less").glob("*.loss"))]
    assert sum(map(sum, fewer)) == sum(map(sum, everything)) - len(tokenizer().encode("so").ids)
