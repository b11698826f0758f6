"""Where chat templates are found, and what they may use."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from chat_cases import TOKENS

from dali_pipes.errors import ConfigError
from dali_pipes.text.chat.template import ChatTemplate, load_template

NOW = datetime(2024, 7, 26, 13, 5, tzinfo=UTC)
ASK = [{"role": "user", "content": "<b>é"}]


def render(source: str, **more: Any) -> str:
    return ChatTemplate("t", {"default": source}, TOKENS, NOW).render(
        ASK, {"tools": more.pop("tools", None)}, "x:1", **more
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ nothing }}{{ eos_token }}", "<s></s>"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<b>é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<b>é"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% for i in 'ab' %}{% if i == 'a' %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}!", "b!"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ messages[0].content }}{{ messages[0]['content'] }}", "<b>é<b>é"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    ],
)  # fmt: skip
def test_templates_see_what_transformers_gives_them(source: str, text: str) -> None:
    assert render(source) == text


def test_the_prompt_and_the_tools_are_handed_on() -> None:
    assert render("{{ add_generation_prompt }}{{ tools }}", prompt=True, tools=[1]) == "True[1]"


def test_generation_blocks_are_found_where_they_are() -> None:
    blocks = "é{% generation %}{{ m.content }}{% endgeneration %}|{% generation %}{% endgeneration %}"
    source = "{% for m in messages %}" + blocks + "{% endfor %}"
    template = ChatTemplate("t", {"default": source}, {}, NOW)
    text = template.render(ASK * 2, {}, "x")
    assert text == "é<b>é|é<b>é|"
    assert template.has_generation({})
    spans = template.generated(ASK * 2, {}, "x", text)
    assert [text[start:end] for start, end in spans] == ["<b>é", "", "<b>é", ""]
    assert not ChatTemplate("t", {"default": "{# {% generation %} #}"}, {}, NOW).has_generation({})


def test_a_template_with_tools_is_used_for_tools() -> None:
    template = ChatTemplate("t", {"default": "d", "tool_use": "u", "rag": "r"}, {}, NOW)
    assert [template.render(ASK, {"tools": tools}, "x") for tools in (None, [1])] == ["d", "u"]


def test_the_hash_is_that_of_source_and_tokens() -> None:
    made = [
        ChatTemplate("a", {"default": "x"}, {}, NOW),
        ChatTemplate("b", {"default": "x"}, {}, datetime.now(UTC)),
        ChatTemplate("a", {"default": "y"}, {}, NOW),
        ChatTemplate("a", {"default": "x"}, TOKENS, NOW),
    ]
    assert len({template.sha256 for template in made[:2]}) == 1
    assert len({template.sha256 for template in made}) == 3


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


BOS = {"content": "<s>", "lstrip": False}


def shown(template: ChatTemplate) -> str:
    return template.render(ASK, {}, "x")


def test_templates_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    write(tmp_path / "tokenizer_config.json", {"chat_template": "old{{ bos_token }}", "bos_token": BOS})
    assert shown(load_template(tokenizer)) == "old<s>"
    write(tmp_path / "chat_template.jinja", "new{{ bos_token }}")
    found = load_template(tokenizer)
    assert shown(found) == "new<s>"
    assert found.name == str(tmp_path / "chat_template.jinja")


def test_templates_from_a_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "u"}]
    config = write(tmp_path / "a" / "config.json", {"chat_template": named, "eos_token": "</s>", "bos_token": None})
    assert shown(load_template(None, config)) == "d</s>"
    assert load_template(None, str(config)).render(ASK, {"tools": [1]}, "x") == "u"
    source = write(tmp_path / "b" / "mine.jinja", "m{{ eos_token }}")
    write(tmp_path / "c" / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": "other"})
    assert shown(load_template(tmp_path / "c" / "tokenizer.json", source)) == "m<eos>"
    write(tmp_path / "b" / "tokenizer_config.json", {"eos_token": "<end>"})
    assert shown(load_template(tmp_path / "c" / "tokenizer.json", source)) == "m<end>"


def test_chatml_has_a_name() -> None:
    template = load_template(None, "chatml", now=NOW)
    messages = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": ""}]
    assert template.render(messages, {}, "x", prompt=True) == (
        "<|im_start|>user\na\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "markers"),
    [
        ("<|a|>{{ '<|b_1|>' + messages[0].content }}{% set c = '<|c|>' %}{{ c }}", {"<|a|>", "<|b_1|>", "<|c|>"}),
        ("{% if true %}{{ '<|a|>x<|b|>' if true else messages }}{% endif %}", {"<|a|>", "<|b|>"}),
        ("<\uff5cUser\uff5c>{{ messages[0].content }}<\uff5cmixed|>", {"<\uff5cUser\uff5c>"}),
        ("{% for m in messages %}{% generation %}{{ m ~ '<|end|>' }}{% endgeneration %}{% endfor %}", {"<|end|>"}),
        ("{# <|a|> #}{% if '<|b|>' in messages[0].content %}[INST]<think> <|c d|> <|> a <b|c>{% endif %}", set()),
    ],
)  # fmt: skip
def test_markers_are_what_a_template_writes_between_bars(source: str, markers: set[str]) -> None:
    assert ChatTemplate("t", {"default": source}, {}, NOW).markers == markers
    assert load_template(None, "chatml").markers == {"<|im_start|>", "<|im_end|>"}


def test_the_places_that_were_looked_at_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template FILE.*chatml"):
        load_template(None)
    tokenizer = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"chat_template\.jinja .*tokenizer_config\.json does not exist"):
        load_template(tokenizer)
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>"})
    with pytest.raises(ConfigError, match=r"chat_template\.jinja .*tokenizer_config\.json does not contain"):
        load_template(tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jinja", "a\n{% for x %}", "t.jinja, line 2: "),
        ("t.jinja", "{{ bos_token }}", "t.jinja uses bos_token"),
        ("t.json", "{", "t.json "),
        ("t.json", [1], "t.json "),
        ("t.json", {"eos_token": "a"}, "t.json "),
        ("t.json", {"chat_template": [{"name": "a"}]}, "t.json "),
        ("t.json", {"chat_template": [{"name": "rag", "template": "a"}]}, "named default; choose one of rag"),
    ],
)
def test_files_that_are_no_template_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_template(None, write(tmp_path / name, content))
    with pytest.raises(ConfigError, match=r"missing\.jinja "):
        load_template(None, tmp_path / "missing.jinja")


def test_without_the_libraries_the_extra_is_named(run_script: Callable[..., CompletedProcess[str]]) -> None:
    result = run_script(
        """
        import sys
        sys.modules["jinja2"] = sys.modules["tokenizers"] = None
        from dali_pipes.errors import BackendError
        from dali_pipes.text.chat import ChatEncoder, load_template

        class Library:
            def to_str(self):
                return "{}"

        for make in (lambda: load_template(None, "chatml"), lambda: ChatEncoder(Library(), None)):
            try:
                make()
            except BackendError as error:
                print(error)
        """
    )
    assert result.returncode == 0, result.stderr
    assert [line.split(": ")[1] for line in result.stdout.splitlines()] == ['pip install "dali-pipes[chat]"'] * 2
