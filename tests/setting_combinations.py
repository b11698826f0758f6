"""Random settings of a loader over two small corpora, many of which are refused, and what must hold for the others.

Documents end in `END`; ids of documents are nearly all different, so that a wrong token is seen.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

END, VOCABULARY, MASK, SENTINELS = 0, 60_010, 60_004, {"prefix": 60_001, "middle": 60_002, "suffix": 60_003}
T = 16
Row = dict[str, Any]


class Corpora:
    """Three corpora of the same kind: `flat` in two files, `masked` with loss masks, `table`, which is decoded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: dict[str, npt.NDArray[np.int64]] = {}
        self.masks: dict[str, npt.NDArray[np.int64] | None] = {}
        self.documents: dict[str, int] = {}
        for number, name in enumerate(("flat", "masked", "table")):
            random_numbers = np.random.default_rng(number)
            (folder / name).mkdir()
            lengths = random_numbers.choice([0, 1, 2, 3, 5, 9, 14, 15, 16, 17, 30, 33, 50], 50)
            documents = [np.append(random_numbers.integers(1, 60_000, length), END) for length in lengths]
            ids = np.concatenate(documents)
            self.tokens[name], self.masks[name], self.documents[name] = ids, None, len(documents)
            if name == "table":
                table = pa.table({"input_ids": [document.astype(np.uint16) for document in documents]})
                pq.write_table(table, folder / name / "0.parquet", row_group_size=7)
            else:
                cut = int(np.cumsum([len(document) for document in documents])[25])
                for part, own in enumerate(np.split(ids, [cut])):
                    own.astype(np.uint16).tofile(folder / name / f"{part}.bin")
                if name == "masked":
                    mask = (random_numbers.random(len(ids)) < 0.8).astype(np.uint8)
                    self.masks[name] = mask.astype(np.int64)
                    for part, own_mask in enumerate(np.split(mask, [cut])):
                        own_mask.tofile(folder / name / f"{part}.bin.loss")
            keep = random_numbers.choice([0, 1, 1, 2, 3], len(documents))
            np.savetxt(folder / f"{name}.txt", keep, fmt="%d")

    def data(self, name: str) -> dict[str, Any]:
        pattern = {"table": "*.parquet"}.get(name, "*.bin")
        return {"corpus": str(self.folder / name / pattern)} | ({} if name == "table" else {"dtype": "uint16"})


def random_settings(draw: random.Random, corpora: Corpora) -> dict[str, Any]:
    """Settings that may be refused: of each group, mostly the default."""

    def often(part: float) -> bool:
        return draw.random() < part

    settings: dict[str, Any] = {"eos_id": END, "vocab_size": VOCABULARY, "seq_len": T, "quiet": True, "device": "cpu"}
    settings |= {"seed": draw.randrange(1000), "batch_size": draw.randint(1, 4), "max_block_bytes": 1 << 16}
    rows = draw.choice(["stream", "stream", "pack", "pad"])
    outputs = ["input_ids", "labels", "row_ids"]
    if often(0.35):
        names = draw.sample(["flat", "masked", "table"], draw.choice([1, 2, 2, 3]))
        settings["mixture"] = {}
        for name in names:
            source: dict[str, Any] = {**corpora.data(name), "weight": draw.choice([0.1, 0.3, 1])}
            own_rows = draw.choice([None, None, "stream", "pack", "pad"])
            if own_rows is not None:
                source["rows"] = own_rows
            if own_rows in ("pack", "pad") and often(0.3):
                source["keep"] = str(corpora.folder / f"{name}.txt")
            if often(0.3):
                source["share"] = draw.choice([0.5, 0.8])
            if often(0.4):
                source["objective"] = random_objective(draw, outputs)
            settings["mixture"][name] = source
        settings["total_rows"] = draw.choice([60, 150])
        if often(0.2):
            settings["proxy"] = "1/2"
        if often(0.3):
            weights = {name: draw.choice([0.5, 1, 2]) for name in names}
            settings["stages"] = [{"at": draw.choice([500, 1500]), "weights": weights}]
        if often(0.5):
            outputs.append("source_ids")
    else:
        name = draw.choice(["flat", "masked", "table"])
        settings |= corpora.data(name)
        if rows != "stream" and often(0.3):
            settings["keep"] = str(corpora.folder / f"{name}.txt")
        if often(0.2):
            settings |= {"validation_fraction": draw.choice([0.3, 0.5]), "split": draw.choice(["train", "validation"])}
    settings["rows"] = rows
    if rows != "stream":
        if often(0.5):
            settings["long_documents"] = draw.choice(["split", "truncate", "drop"])
        if often(0.6):
            settings["window_documents"] = draw.choice([7, 30])
        if rows == "pad" and often(0.25):
            settings["length_buckets"] = draw.choice([[4, 8], [8, 12]])
        elif often(0.3):
            settings |= {"balance": "cost", "balance_cost": draw.choice([[0, 1], [3, 1]])}
        elif rows == "pad" and often(0.3):
            settings["batch_tokens"] = draw.choice([T, 3 * T, 100])
            del settings["batch_size"]
            if often(0.4):
                settings["batch_shapes"] = [[3, 5], [1, T]] if often(0.5) else [[1, T]]
    elif often(0.15):
        settings["stride"] = draw.choice([5, 16, 20])
    if rows == "stream" and often(0.15):
        settings["random_offset"] = True
    if often(0.5):
        settings["objective"] = random_objective(draw, outputs)
    if often(0.3):
        settings["order"] = "blocks"
        if often(0.7):
            settings["shuffle_window"] = draw.choice([2, 3])
    if often(0.2):
        settings["skip_steps"] = draw.choice(
            [[[1, 3]], [{"rows": [4, 12]}], [[0, 1], [2, 3, 1]], [{"tokens": [192, 384]}]]
        )
    if often(0.12):
        settings["mtp"] = draw.choice([1, 2, 3])
    if often(0.2):
        settings["mask_boundaries"] = draw.choice([True, False])
    if often(0.1):
        settings |= {"seq_len": draw.choice([[[0, 8], [600, T]], [[0, T], [700, 8]]]), "global_batch": 12}
    if often(0.4):
        settings["drop_last"] = False
    if often(0.1):
        settings["shuffle"] = False
    if often(0.1):
        settings["static_buffers"] = True
    if often(0.1):
        settings["label_shift"] = False
    if often(0.15):
        settings["index_dtype"] = "int32"
    for extra in ("position_ids", "segment_ids", "loss_mask", "attention_mask", "cu_seqlens", "max_seqlen"):
        if often(0.2):
            outputs.append(extra)
    settings["outputs"] = outputs
    return settings


def random_objective(draw: random.Random, outputs: list[str]) -> list[dict[str, Any]]:
    """One or two entries; the outputs that they make are added."""
    rate = draw.choice([0.3, [[0, 0.9], [800, 0.2]]])
    of_kinds: dict[str, dict[str, Any]] = {
        "mlm": {"mask_id": MASK, "special_ids": [END], "rate": rate},
        "diffusion": {"mask_id": MASK, "min_rate": draw.choice([0.001, [[0, 0.5], [700, 0.1]]])},
        "prefix": {"longest": draw.choice([1, [[0, 0.2], [600, 1]]])},
        "goldfish": {"k": 3, "h": draw.choice([3, 5])},
        "drop": {"rate": rate, "drop_id": MASK},
        "fim": {
            "tokens": SENTINELS,
            "rate": draw.choice([1, 0.6, [[0, 0.1], [500, 1]]]),
            "level": draw.choice(["piece", "document"]),
        },
    }
    kinds = draw.sample(list(of_kinds), draw.choice([1, 1, 1, 2]))
    if own := [kind for kind in kinds if kind in ("mlm", "diffusion")]:
        kinds = [draw.choice(own), *(["fim"] if "fim" in kinds or draw.random() < 0.2 else [])]
    validation = {"validation": True} if draw.random() < 0.3 else {}
    for kind, names in {"diffusion": ["noisy_ids", "masked", "p_mask"], "prefix": ["prefix_lengths"]}.items():
        if kind in kinds:
            outputs += [name for name in names if name not in outputs]
    return [{"kind": kind, **of_kinds[kind], **validation} for kind in kinds]


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """A copy as NumPy arrays and numbers."""
    return {name: value if isinstance(value, int) else np.array(value.numpy()) for name, value in batch.items()}


def same_batch(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def rows_of(batch: dict[str, Any]) -> Iterator[tuple[int, Row]]:
    """The row number and fields of each row of a batch; those of a whole batch are left out."""
    names = [name for name in batch if name not in ("cu_seqlens", "max_seqlen", "num_segments", "row_ids")]
    for row, number in enumerate(batch["row_ids"].tolist()):
        yield number, {name: batch[name][row] for name in names}
