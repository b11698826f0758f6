"""The manual's recipe that fine-tunes on conversations: the command as it is printed, then the script, at toy size."""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from manual import recipe
from typer.testing import CliRunner

from dali_pipes import TokenLoader
from dali_pipes.tools.cli import app

pytestmark = pytest.mark.needs("transformers", "accelerate", "tokenizers", "jinja2")

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
)
ANSWERS = [f"It is {number} times {'very ' * (number % 5)}good." for number in range(48)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Conversations, and a model whose tokenizer has an id a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    place = tmp_path / "my/model"
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=258, num_attention_heads=2, **sizes)).save_pretrained(place)
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    records = [
        {"messages": [{"role": "user", "content": "How good?"}, {"role": "assistant", "content": answer}]}
        for answer in ANSWERS
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "my/model/tokenizer.json"))


def test_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three epochs of whole conversations, of which the answers are learned; nothing is said of documents that mix."""
    command, source = shlex.split(recipe("fine-tuning-tokenize")), recipe("fine-tuning")
    assert len([line for line in source.splitlines() if line]) <= 10
    source = source.replace("2048", "256").replace('("run", ', '("run", use_cpu=True, report_to=[], logging_steps=1, ')
    variables: dict[str, Any] = {}
    with contextlib.chdir(folder):
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.output
        exec(compile(source, "<recipe>", "exec"), variables)
        with TokenLoader(variables["loader"].config, outputs=("labels",)) as fresh:
            learned = [batch["labels"][batch["labels"] != -100].tolist() for batch in fresh]
    assert sum(map(len, learned)) >= sum(map(len, ANSWERS))
    text = tokenizer_of(folder).decode([token for batch in learned for token in batch], skip_special_tokens=False)
    assert [answer for answer in ANSWERS if f"{answer}<|im_end|>" not in text] == []
    assert "How good?" not in text
    assert variables["arguments"].max_steps == 3 * len(learned) > 3
    assert "attend to each other" not in capsys.readouterr().err
