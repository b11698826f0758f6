"""What objectives cost: each on a loader, compared with none, with the collator of transformers, and with plain torch.

    python benchmarks/objectives.py
    python benchmarks/objectives.py --rounds 3 --seconds 0.2

Random tokens in the page cache. One process opens all loaders and takes batches from them in turn, in short slices, so
that every case meets the same machine. The others get batches of the loader without an objective: the collator of
transformers as lists of rows with a mask of special tokens, which is what `datasets` hands it, and the plain versions
as tensors. For span corruption, transformers contains an example for Flax instead of a collator: its rule, in NumPy,
once with arrays and once with lists of rows, which is what that example's collator gets from `datasets`. Ratios are
taken within a round. The last line is one JSON line.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from comparison.report import machine, wide_console
from comparison.work import make_corpus, warm
from numpy.typing import NDArray
from rich.table import Table

from dali_pipes import TokenLoader

VOCABULARY = 50_257
MASK, END = VOCABULARY - 1, 0
MLM = {"kind": "mlm", "mask_id": MASK, "special_ids": [END]}
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "mlm": [MLM],
    "diffusion": [{"kind": "diffusion", "mask_id": MASK, "special_ids": [END]}],
    "drop": [{"kind": "drop", "rate": 0.1, "drop_id": MASK}],
    "prefix": [{"kind": "prefix"}],
    "spans": [{"kind": "spans", "sentinels": MASK, "end_id": END}],
    "none, in pieces": [],
    "goldfish": [{"kind": "goldfish", "k": 4, "h": 13}],
}
"""Those from the second "none" on need documents, which have a cost, too."""

Array = NDArray[np.int64]
_RANDOM = np.random.default_rng(0)

Case = Callable[[], int]
"""Takes a batch and returns its tokens."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="slices per case")] = 9,
    seconds: Annotated[float, typer.Option(help="length of a slice")] = 0.3,
    tokens: Annotated[int, typer.Option(min=1, help="random tokens")] = 20_000_000,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    seq_len: Annotated[int, typer.Option(min=1)] = 1024,
) -> None:
    """Measure, print a table and, as the last line, one line of JSON."""
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder), tokens)
        warm(Path(folder))
        cases, loaders = _cases(corpus, batch_size, seq_len)
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for case in cases.values():  # threads, buffers, kernels of torch
            for _ in range(3):
                case()
        for number in range(rounds):
            names = list(cases)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                figures[name].append(_slice(cases[name], seconds))
        for loader in loaders:
            loader.close()
    entries = [_entry(name, found, figures[_other(name)]) for name, found in figures.items()]
    wide_console().print(_table(entries))
    shape = {"batch_size": batch_size, "seq_len": seq_len, "torch_threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "objectives", "machine": about, **shape, "entries": entries}))


def _cases(corpus: Path, batch_size: int, seq_len: int) -> tuple[dict[str, Case], list[TokenLoader]]:
    shape: dict[str, Any] = {"dtype": "uint16", "batch_size": batch_size, "seq_len": seq_len, "eos_id": END}
    shape |= {"vocab_size": VOCABULARY, "device": "cpu", "quiet": True, "repeat": True}
    loaders, cases = [], dict[str, Case]()
    for name, objective in OBJECTIVES.items():
        outputs = ["input_ids", "labels"]
        outputs += ["noisy_ids", "masked", "p_mask"] * (name == "diffusion") + ["position_ids"] * ("pieces" in name)
        outputs += ["encoder_ids", "decoder_input_ids", "decoder_labels"] * (name == "spans")
        loaders.append(TokenLoader(corpus, **shape, objective=objective, outputs=outputs))
        cases[name] = _taking(iter(loaders[-1]), _as_it_is)
    loaders.append(TokenLoader(corpus, **shape))
    plain = iter(loaders[-1])
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "mlm, torch": torch_mlm,
        "diffusion, torch": torch_diffusion,
        "goldfish, torch": torch_goldfish,
        "spans, collator": numpy_spans,
        "spans, collator, lists": numpy_spans_of_lists,
    }
    for name, change in changes.items():
        cases[name] = _taking(plain, change)
    cases["mlm, transformers"] = _taking(plain, _collator())
    return cases, loaders


def _taking(batches: Iterator[dict[str, Any]], change: Callable[[dict[str, Any]], object]) -> Case:
    def case() -> int:
        batch = next(batches)
        change(batch)
        return int(batch["input_ids"].numel())

    return case


def _as_it_is(batch: dict[str, Any]) -> None:
    """What is measured is the loader alone."""


def torch_mlm(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's masking as it is usually written."""
    inputs = batch["input_ids"].clone()
    chosen = (torch.rand(inputs.shape) < 0.15) & (inputs != END)
    labels = torch.where(chosen, inputs, -100)
    action = torch.rand(inputs.shape)
    inputs[chosen & (action < 0.8)] = MASK
    random = chosen & (action >= 0.8) & (action < 0.9)
    inputs[random] = torch.randint(VOCABULARY, (int(random.sum()),))
    return inputs, labels


def torch_diffusion(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward process that LLaDA's guidelines give."""
    ids, eps = batch["input_ids"], 1e-3
    p_mask = ((1 - eps) * torch.rand(len(ids)) + eps)[:, None].repeat(1, ids.shape[1])
    masked = torch.rand(ids.shape) < p_mask
    return torch.where(masked, MASK, ids), masked, p_mask


def torch_goldfish(batch: dict[str, Any], k: int = 4, h: int = 13) -> torch.Tensor:
    """A hash of the ids before each label, by one product and sum for each of them; documents are not kept apart."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    sums = torch.zeros_like(ids)
    for back in range(h):
        sums[:, h - 1 :] += (ids[:, h - 1 - back : ids.shape[1] - back] + 1) * (6364136223846793005 >> back)
    labels[:, h - 1 :][(sums[:, h - 1 :] >> 20) % k == 0] = -100
    found: torch.Tensor = labels
    return found


def numpy_spans(batch: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Span corruption as collators do it: a mask of noise for each row, then sentinels and a filter for all rows."""
    ids = batch["input_ids"].numpy()
    rows, length = ids.shape
    noise = round(length * 0.15)
    count = round(noise / 3)
    masks = np.stack([_noise_mask(length - noise, noise, count) for _ in range(rows)])
    inputs, labels = _with_sentinels(ids, masks), _with_sentinels(ids, ~masks)
    return inputs, labels, np.concatenate((np.full((rows, 1), END), labels[:, :-1]), 1)


def numpy_spans_of_lists(batch: dict[str, Any]) -> list[torch.Tensor]:
    """The same of rows that are lists, as tensors."""
    rows = np.array(batch["input_ids"].tolist())
    return [torch.from_numpy(part) for part in numpy_spans({"input_ids": torch.from_numpy(rows)})]


def _noise_mask(kept: int, noise: int, count: int) -> NDArray[np.bool_]:
    lengths = np.empty(2 * count, np.int64)
    for first, items in ((0, kept), (1, noise)):
        is_cut = np.arange(items - 1) < count - 1
        _RANDOM.shuffle(is_cut)
        lengths[first::2] = np.bincount(np.append(0, is_cut.cumsum()), minlength=count)
    is_noise: NDArray[np.bool_] = np.tile([False, True], count).repeat(lengths)
    return is_noise


def _with_sentinels(ids: Array, mask: NDArray[np.bool_]) -> Array:
    """The ids, each run of the mask replaced by a sentinel; with an end."""
    begins = mask & ~np.roll(mask, 1, 1)
    begins[:, 0] = mask[:, 0]
    sentinels = np.where(begins, MASK + 1 - begins.cumsum(1), ids)
    rows = sentinels[~mask | begins].reshape(len(ids), -1)
    return np.concatenate((rows, np.full((len(ids), 1), END)), 1)


def _collator() -> Callable[[dict[str, Any]], object]:
    """Of transformers, with a vocabulary of words that stand for their ids."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"[MASK]": MASK}
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), mask_token="[MASK]", pad_token="w0"
    )
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15)

    def collate(batch: dict[str, Any]) -> object:
        rows, special = batch["input_ids"].tolist(), (batch["input_ids"] == END).tolist()
        return collator(
            [{"input_ids": ids, "special_tokens_mask": mask} for ids, mask in zip(rows, special, strict=True)]
        )

    return collate


def _slice(case: Case, seconds: float) -> dict[str, float]:
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 2:  # what threads have read while others were timed
        case()
    tokens, begin, cpu = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - begin) < seconds:
        tokens += case()
    return {"tokens_per_s": tokens / spent, "cpu_s_per_mtok": (time.process_time() - cpu) / tokens * 1e6}


def _other(name: str) -> str:
    """What a case is compared with."""
    if "," in name and "pieces" not in name:
        return name.partition(",")[0]
    return "none, in pieces" if name == "goldfish" else "none"


def _entry(name: str, found: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"case": name, "compared_with": _other(name), "rounds": found}
    for key in ("tokens_per_s", "cpu_s_per_mtok"):
        values = [one[key] for one in found]
        ratios = [one[key] / theirs[key] for one, theirs in zip(found, other, strict=True)]
        entry[key], entry[f"{key}_ratio"] = _spread(values), _spread(ratios)
    return entry


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="median (low to high); ratios within a round")
    for heading in ("case", "Mtok/s", "CPU ms a Mtok", "compared with", "rate, ratio", "CPU, ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "compared with") else "right")
    form = "{median:.3g} ({low:.3g} to {high:.3g})"
    for entry in entries:
        rate = {part: value / 1e6 for part, value in entry["tokens_per_s"].items()}
        cpu = {part: value * 1e3 for part, value in entry["cpu_s_per_mtok"].items()}
        ratios = [form.format(**entry[f"{key}_ratio"]) for key in ("tokens_per_s", "cpu_s_per_mtok")]
        table.add_row(entry["case"], form.format(**rate), form.format(**cpu), entry["compared_with"], *ratios)
    return table


if __name__ == "__main__":
    typer.run(main)
