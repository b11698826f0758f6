"""The files that the examples of the manual work on."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from manual import ROOT

BENCHMARKS = ROOT / "benchmarks"
SHAKESPEARE = BENCHMARKS / "data" / "tinyshakespeare"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
RUN = 'corpus = "data/*.bin"\nbatch_size = 8\nseq_len = 1024\neos_id = 50256\nseed = 7\n'


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the folder of each page begins with; CONTRIBUTING.md lists it."""
    folder = tmp_path_factory.mktemp("material")
    for name in ("data", "fineweb", "text", "runs", "my/model"):
        (folder / name).mkdir(parents=True)
    train, validation = (np.fromfile(SHAKESPEARE / name, "<u2") for name in ("train.bin", "val.bin"))
    half = int(np.flatnonzero(train[: len(train) // 2] == 50256)[-1]) + 1
    for name, ids in {
        "data/000.bin": train,
        "data/001.bin": validation,
        "fineweb/train_000.bin": train[:half],
        "fineweb/train_001.bin": train[half:],
        "fineweb/val_000.bin": validation,
    }.items():
        ids.tofile(folder / name)
    tokenizer = gpt2_tokenizer()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for content in ("<|im_start|>", "<|im_end|>"):
        ids = 50256 + len(tokenizer["added_tokens"])
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": ids, "content": content})
    (folder / "my/model/tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "my/model/tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("a", "b"):
        texts = [{"text": f"Speech {number} of {name}: all the world's a stage."} for number in range(40)]
        (folder / f"text/{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    chats = [
        [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "runs/run.toml").write_text(RUN)
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path) -> Path:
    """A copy of the material, with the folders of the repository that examples read."""
    copy = tmp_path / "page"
    shutil.copytree(material, copy)
    for name in ("benchmarks", "configs", "Makefile"):
        (copy / name).symlink_to(ROOT / name)
    return copy


def gpt2_tokenizer() -> dict[str, list[dict[str, object]]]:
    """As `python benchmarks/gpt2_tokenizer.py` writes it."""
    sys.path.append(str(BENCHMARKS))
    try:
        from gpt2_tokenizer import tokenizer_json
    finally:
        sys.path.remove(str(BENCHMARKS))
    found: dict[str, list[dict[str, object]]] = json.loads(tokenizer_json())
    return found
