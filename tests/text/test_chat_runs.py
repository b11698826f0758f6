"""`tokenize --chat`: ids and masks on the disk, dropped conversations counted, and the loader that reads them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_cases import gpt2, samples
from corpus_truth import read_documents, words_tokenizer
from typer.testing import CliRunner, Result

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.cli import app
from dali_pipes.text.chat import ChatEncoder, Learn, load_template, parse_conversation


def tokenize(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tokenize", *map(str, arguments), "--chat"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the samples, with a template beside it."""
    folder = tmp_path_factory.mktemp("chat_tokenizer")
    gpt2().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def expected(records: list[Any], learn: Learn, template: str | None = "chatml") -> list[tuple[list[int], list[int]]]:
    eos = None if template else 50256
    encoder = ChatEncoder(gpt2(), load_template(None, template) if template else None, learn, eos_id=eos)
    found = encoder.encode_batch([parse_conversation(record, "x") for record in records])
    return [(one[0].tolist(), one[1].tolist()) for one in found if one is not None]


def masks_of(folder: Path) -> list[int]:
    return [bit for path in sorted(folder.glob("*.loss")) for bit in path.read_bytes()]


@pytest.mark.parametrize(
    ("kind", "learn"),
    [("messages", "assistant"), ("messages", "all"), ("sharegpt", "last"), ("prompt_completion", "all")],
)
def test_the_samples(tmp_path: Path, tokenizer: Path, kind: str, learn: Learn) -> None:
    records = samples()[kind]
    path = write_records(tmp_path / "in.jsonl", records)
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml", "--learn", learn]
    result = tokenize(path, *arguments, "--shard-tokens", 5000)
    assert result.exit_code == 0, result.stderr
    wanted = expected(records, learn)
    assert read_documents(tmp_path / "out") == [ids for ids, _ in wanted]
    assert masks_of(tmp_path / "out") == [bit for _, mask in wanted for bit in mask]
    assert "50 documents (0 empty)" in result.stdout
    assert "1 inputs, uint16 ids, ends of documents as the chat template of chatml writes them, into " in result.stderr


@pytest.mark.parametrize("known", [[], ["<|im_start|>"], ["<|im_end|>"], ["<|im_start|>", "<|im_end|>"]])
def test_chatml_markers_that_are_no_tokens_are_named(tmp_path: Path, known: list[str]) -> None:
    """And become ordinary text: the run goes on."""
    markers = ["<|im_start|>", "<|im_end|>"]
    words = words_tokenizer(tmp_path / "t.json", {"?": 0}, {name: 1 + at for at, name in enumerate(known)})
    path = write_records(tmp_path / "in.jsonl", samples()["messages"][:2])
    result = tokenize(path, "--tokenizer", words, "--out", tmp_path / "out", "--chat-template", "chatml")
    assert result.exit_code == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: --chat-template")]
    assert len(warnings) == (known != markers)
    for marker in markers:
        assert all(
            (f"no {marker}" in line or f"no token {marker}" in line) == (marker not in known) for line in warnings
        )
    assert "warning" not in result.stdout


def test_prompt_and_completion_without_a_template(tmp_path: Path, tokenizer: Path) -> None:
    records = samples()["prompt_completion"]
    path = write_records(tmp_path / "in.jsonl", records)
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "none", "--eos", 50256]
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


@pytest.mark.parametrize(("learn", "what"), [("assistant", "no assistant turn"), ("all", "no message")])
def test_that_all_were_dropped_is_explained(tmp_path: Path, tokenizer: Path, learn: str, what: str) -> None:
    user = {"role": "user", "content": "Hi", "weight": 0}
    path = write_records(tmp_path / "in.jsonl", [{"messages": [user]}])
    arguments = ["--tokenizer", tokenizer, "--out", tmp_path / "out", "--chat-template", "chatml", "--learn", learn]
    result = tokenize(path, *arguments)
    assert result.exit_code == 2
    assert f"1 documents, 0 of them empty, 1 dropped, because {what} in them is to be learned" in result.stderr


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
        (["--chat-template", "chatml", "--eos", "1"], "what ends a conversation is said by its template"),
        (["--chat-template", "chatml", "--no-eos"], "what ends a conversation is said by its template"),
        (["--chat-template", "none", "--no-eos"], "in.jsonl: line 1: messages need a chat template"),
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
    assert "holds texts; conversations are records of" in result.stderr
