"""Which outputs keep the documents of packed rows apart in transformers: the loss is that of each document alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dali_pipes import TokenLoader
from dali_pipes.huggingface import loader_trainer
from dali_pipes.runtime.messages import say_once

pytestmark = pytest.mark.needs("transformers", "accelerate")

VOCAB = 64
PLAIN = ("input_ids", "labels")
POSITIONS = (*PLAIN, "position_ids")
MASK = (*POSITIONS, "attention_mask")
BOUNDS = (*POSITIONS, "cu_seqlens", "max_seqlen")
OUTPUTS = {"plain": PLAIN, "positions": POSITIONS, "mask": MASK, "bounds": BOUNDS}
VARLEN = "flash_stand_in"


def varlen_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
    """What flash attention of transformers makes of `cu_seq_lens_q` and the rest, without its kernels.

    query, key, value: (B, heads, T, width).
    """
    outputs = torch.zeros_like(query.transpose(1, 2)).flatten(0, 1)
    bounds = others["cu_seq_lens_q"].tolist()
    assert bounds == others["cu_seq_lens_k"].tolist()
    assert max(end - begin for begin, end in pairwise(bounds)) == others["max_length_q"]
    assert others["max_length_q"] == others["max_length_k"]
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    for begin, end in pairwise(bounds):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in flat)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=others["scaling"])
        outputs[begin:end] = attended[0].transpose(0, 1)
    return outputs.view(query.transpose(1, 2).shape), None


def llama(attention: str = "sdpa") -> Any:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(VARLEN, varlen_attention)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "initializer_range": 0.5,
    }
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    model.config._attn_implementation = attention  # behind the check that looks for kernels of flash attention
    return model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 12, 60)
    tokens = random.integers(1, VOCAB, lengths.sum() + 60)
    tokens[np.cumsum(lengths + 1) - 1] = 0
    path = tmp_path_factory.mktemp("packed") / "tokens.bin"
    tokens.astype(np.uint16).tofile(path)
    return str(path)


def loader_of(corpus: str, **changes: Any) -> TokenLoader:
    settings: dict[str, Any] = {"rows": "pack", "eos_id": 0, "batch_size": 2, "seq_len": 32, "device": "cpu"}
    return TokenLoader(corpus=corpus, **{**settings, "quiet": True, "outputs": POSITIONS, **changes})


def summed(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))


@torch.no_grad()
def loss_of_documents(model: Any, corpus: str) -> tuple[float, int]:
    """Summed loss of the first batch, each document alone, and its labels."""
    with loader_of(corpus, outputs=(*PLAIN, "segment_ids")) as loader:
        batch = next(iter(loader))
    total, segments = 0.0, batch["segment_ids"]
    for row in range(2):
        for segment in range(1, int(segments[row].max()) + 1):
            here = segments[row] == segment
            logits = model(input_ids=batch["input_ids"][row, here][None], use_cache=False).logits[0]
            total += summed(logits, batch["labels"][row, here])
    return total, int((batch["labels"] != -100).sum())


def trainer_of(loader: TokenLoader, model: Any, folder: Path, validation: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    common: dict[str, Any] = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no"}
    common |= {"logging_steps": 1, "disable_tqdm": True, "learning_rate": 0.0}
    training = TrainingArguments(str(folder), **{**common, **arguments})
    return loader_trainer(Trainer)(model, training, train_dataset=loader, eval_dataset=validation)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_plain_calls(corpus: str, outputs: str, use_cache: bool | None, train: bool) -> None:
    """`position_ids` keep documents apart, without a mask of tokens and without the cache that is on by default."""
    model = llama().train(train)
    with loader_of(corpus, outputs=OUTPUTS[outputs]) as loader, torch.no_grad():
        batch = next(iter(loader))
        labels = batch.pop("labels")
        logits = model(**batch, **({} if use_cache is None else {"use_cache": use_cache})).logits
    found, expected = summed(logits.flatten(0, 1), labels.flatten()), loss_of_documents(model, corpus)[0]
    apart = outputs in ("positions", "bounds") and use_cache is False
    assert (found == pytest.approx(expected, rel=1e-5)) == apart


CASES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("sdpa", "plain", {}, 'add "position_ids" to outputs'),
    ("sdpa", "positions", {}, None),
    ("eager", "positions", {}, None),
    ("sdpa", "mask", {}, 'leave "attention_mask" out of outputs'),
    ("sdpa", "bounds", {}, None),
    ("sdpa", "positions", {"use_cache": True}, "use_cache = False in TrainingArguments"),
    (VARLEN, "bounds", {}, None),
]


@pytest.mark.parametrize(
    ("attention", "outputs", "arguments", "change"),
    CASES,
    ids=["-".join([attention, outputs, *arguments]) for attention, outputs, arguments, _ in CASES],
)
def test_the_trainer_says_what_lets_documents_attend_to_each_other(
    corpus: str,
    attention: str,
    outputs: str,
    arguments: dict[str, Any],
    change: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said once, and only where the losses of training and evaluation are not those of the documents alone."""
    say_once.cache_clear()
    loss, labels = loss_of_documents(llama(), corpus)
    settings: dict[str, Any] = {"outputs": OUTPUTS[outputs], "quiet": False}
    with loader_of(corpus, **settings) as loader, loader_of(corpus, **settings) as validation:
        trainer = trainer_of(loader, llama(attention), tmp_path, validation, **arguments)
        trainer.train()
        batch = {**next(iter(trainer.get_eval_dataloader()))}
        with torch.no_grad():
            evaluated = float(trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)[0])
    for found in (trainer.state.log_history[0]["loss"], evaluated):
        assert (found == pytest.approx(loss / labels, rel=1e-5)) == (change is None)
    said = [line for line in capsys.readouterr().err.splitlines() if "attend to each other" in line]
    assert len(said) == (change is not None)
    assert change is None or said[0].endswith(change)


@pytest.mark.parametrize(
    ("outputs", "batch_size", "change"),
    [
        (PLAIN, 2, 'add "cu_seqlens" and "max_seqlen" to outputs'),
        (PLAIN, 1, 'add "cu_seqlens" and "max_seqlen" to outputs'),
        (POSITIONS, 2, 'add "cu_seqlens" and "max_seqlen" to outputs'),
        (POSITIONS, 1, None),
        (BOUNDS, 2, None),
        ((*BOUNDS, "attention_mask"), 2, 'leave "attention_mask" out of outputs'),
    ],
    ids=["plain-2", "plain-1", "positions-2", "positions-1", "bounds-2", "bounds-mask-2"],
)
def test_what_is_said_for_flash_attention(
    corpus: str,
    outputs: tuple[str, ...],
    batch_size: int,
    change: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It tells documents apart by their bounds, and by positions only in batches of one row."""
    for quiet in (True, False):
        say_once.cache_clear()
        with loader_of(corpus, outputs=outputs, batch_size=batch_size, quiet=quiet) as loader:
            trainer_of(loader, llama(VARLEN), tmp_path)
        said = capsys.readouterr().err
        assert ("attend to each other" in said) == (change is not None and not quiet)
        assert quiet or change is None or said.strip().endswith(change)


@pytest.mark.parametrize("rows", ["stream", "pad"])
def test_other_rows_are_not_spoken_of(
    corpus: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    with loader_of(corpus, rows=rows, outputs=PLAIN, quiet=False) as loader:
        trainer_of(loader, llama(), tmp_path)
    assert "attend" not in capsys.readouterr().err
