"""Part 3: what rows of documents, masks and shares of rows add: on a card they go other ways than plain windows do.

All is compared with NumPy or with the loader on the CPU, bit for bit, as in `parity`.
"""

import gc
import itertools
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dali_pipes import LoaderConfig, SourceLoss, TokenLoader, build_pipeline
from dali_pipes.config import OUTPUT_NAMES
from gpu.batches import ALL_OUTPUTS, ON_GPU, Arrays, array_difference, arrays, collect, difference, from_cpu
from gpu.environment import token_dtypes
from gpu.parity import random_ids, run, two_epochs, until_error
from gpu.pool import pool_batches, pool_memory_and_rate
from gpu.session import Session

_LONG_S, _SHORT_S = 5e-3, 2e-4


def segments_equal_numpy(session: Session) -> None:
    """All outputs together, for each dtype: rows without pieces, masks, several labels, labels across boundaries."""
    session.machine.synchronize()  # makes the machine; in a dry run it brings what `import cupy` finds
    import cupy

    from dali_pipes.operators import segments
    from dali_pipes.operators.segments import OUTPUTS

    generator = np.random.default_rng(7)
    # rows, positions, rows of a batch, tokens of the longest piece
    shapes = [
        (1, 1, 1, 1),
        (5, 7, 2, 3),
        (19, 64, 9, 64),
        (3, 1000, 3, 8),
        session.pick((64, 4096, 16, 900), (7, 33, 3, 9)),
    ]
    rules = list(itertools.product((False, True), (0, 1, 5), (False, True)))
    for token in token_dtypes(session):
        problems = ""
        for (count, seq_len, batch_rows, longest), (masked, mtp, cross) in itertools.product(shapes, rules):
            tables, num_tokens = _pieces(generator, count, seq_len, longest)
            tokens = random_ids(generator, token, num_tokens)
            if tokens.dtype.kind == "i":
                tokens[::5] = -100  # which no label may be taken for
            learn = generator.integers(0, 2, num_tokens, dtype=np.uint8) if masked else None
            sides = []
            for array in (cupy.asarray, np.asarray):
                given: dict[str, Any] = {name: array(table) for name, table in tables.items()}
                given |= {"loss_mask": None if learn is None else array(learn), "bad": array(np.array([0, 2**63 - 1]))}
                options: dict[str, Any] = {
                    "mtp": mtp,
                    "mask_boundaries": not cross,
                    "batch_rows": batch_rows,
                    "vocab_size": 100,
                    "index_dtype": np.int32 if cross else np.int64,
                    "mask_dtype": np.bool_ if mtp else None,
                }
                made = segments(array(tokens), seq_len=seq_len, outputs=OUTPUTS, pad_id=3, **given, **options)
                sides.append(made | {"bad": given["bad"]})
            for name, expected in sides[1].items():
                problem = array_difference(cupy.asnumpy(sides[0][name]), expected)
                case = f"{name} of ({count}, {seq_len}), mask {masked}, mtp {mtp}, across {cross}"
                problems += f"{case}: {problem}; " if problem else ""
        session.verify(f"segments of {token}, {len(shapes)} shapes, {len(rules)} rules", problems)


def _pieces(generator: np.random.Generator, count: int, seq_len: int, longest: int) -> tuple[dict[str, Any], int]:
    """Tables of random pieces, every third row without any or full to its last position, and the tokens they need."""
    rows: list[list[int]] = []
    for row in range(count):
        left, lengths = (
            (0 if row % 3 == 1 else seq_len if row % 3 == 2 else int(generator.integers(0, seq_len + 1))),
            [],
        )
        while left > 0:
            lengths.append(min(left, int(generator.integers(1, longest + 1))))
            left -= lengths[-1]
        rows.append(lengths)
    lengths_of_all = np.array([*itertools.chain(*rows)], np.int64)
    ahead = generator.integers(0, 4, len(lengths_of_all))  # tokens of the document after the piece
    ends = np.cumsum(lengths_of_all + ahead)
    starts = ends - ahead - lengths_of_all
    tables = {
        "row_offsets": np.cumsum([0, *map(len, rows)]),
        "piece_starts": starts,
        "piece_lengths": lengths_of_all,
        "piece_ends": ends,
    }
    return tables, int(ends[-1]) if len(ends) else 1


def loss_masks(session: Session) -> None:
    """Masks of some of the files, in every kind of rows; the third file has none."""
    settings = _documents(session, masked=True)
    pads = {"rank": 1, "world_size": 2}
    variants: list[dict[str, Any]] = [
        {"outputs": ALL_OUTPUTS, "rows": "stream"},
        {"outputs": ALL_OUTPUTS, "rows": "stream", "split": "validation", "validation_fraction": 0.3, **pads},
        {"rows": "stream", "mtp": 3},
        {"rows": "stream", "mask_boundaries": False, "mtp": 3, "stride": 100},
        {"rows": "pack", "mtp": 2, **pads},
        {"rows": "pack", "mask_boundaries": False, "context_parallel": (1, 2), "context_split": "zigzag"},
        {"rows": "pad", "length_buckets": _buckets(settings)},
    ]
    _same_as_cpu(session, "loss masks", settings, variants)


def plain_windows(session: Session) -> None:
    """Settings that change nothing about a window's tokens, where `device` computes the order itself."""
    settings = _documents(session) | {"outputs": ALL_OUTPUTS, "rows": "stream", "eos_id": None}
    variants: list[dict[str, Any]] = [
        {"skip_steps": [[1, 3], [4, 5]]},
        {"skip_steps": [[0, 2]], "rank": 2, "world_size": 3, "batches_per_run": 4},
        {"context_parallel": (1, 2)},
        {"context_parallel": (0, 2), "context_split": "zigzag", "static_buffers": True, "skip_steps": [[2, 3]]},
    ]
    _same_as_cpu(session, "windows", settings, variants)


def types_of_fields(session: Session) -> None:
    settings = _documents(session) | {"index_dtype": "int32"}
    variants: list[dict[str, Any]] = [
        {"outputs": ("input_ids", "labels", "row_ids"), "rows": "stream", "eos_id": None},
        {"outputs": ALL_OUTPUTS, "rows": "stream", "mask_dtype": "bool"},
        {"rows": "pack", "mtp": 2, "static_buffers": True, "mask_dtype": "bool"},
        {"rows": "pad", "length_buckets": _buckets(settings), "context_parallel": (1, 2), "mask_dtype": "bool"},
        {"rows": "pack", "index_dtype": "int64", "mask_dtype": "bool"},
    ]
    _same_as_cpu(session, "types", settings, variants)


def objectives(session: Session) -> None:
    """One of each kind, at rows of every sort that it works with."""
    settings = _documents(session) | {"vocab_size": 512, "outputs": ("input_ids", "labels", "row_ids")}
    spans = {"kind": "spans", "sentinels": 400, "num_sentinels": 5, "end_id": 1, "sentinel_step": 1}
    spans |= {"denoisers": [{"rate": 0.4, "mean_length": 1.5}]}
    fim = {"kind": "fim", "tokens": {"prefix": 301, "middle": 302, "suffix": 303}}
    kinds: dict[str, dict[str, Any]] = {
        "mlm": {"objective": [{"kind": "mlm", "mask_id": 200}]},
        "diffusion": {
            "objective": [{"kind": "diffusion", "mask_id": 201}],
            "outputs": ("noisy_ids", "masked", "p_mask"),
        },
        "prefix": {"objective": [{"kind": "prefix"}], "outputs": ("input_ids", "labels", "prefix_lengths")},
        "drop": {"objective": [{"kind": "drop", "rate": 0.3, "drop_id": 9}], "rows": "pad"},
        "goldfish": {"objective": [{"kind": "goldfish", "k": 3, "h": 3}], "rows": "pack"},
        "fim": {"objective": [fim], "rows": "pack"},
        "spans": {"objective": [spans], "outputs": ("encoder_ids", "decoder_input_ids", "decoder_labels")},
    }
    for name, variant in kinds.items():
        _same_as_cpu(session, f"objective {name}", settings | variant, [{}])


def length_buckets(session: Session) -> None:
    settings = _documents(session) | {"rows": "pad", "length_buckets": _buckets(_documents(session))}
    variants: list[dict[str, Any]] = [
        {"batches_per_run": 1},
        {"batches_per_run": 4, "mtp": 3, "rank": 2, "world_size": 3},
        {"static_buffers": True, "skip_steps": [[1, 2]]},
        {"context_parallel": (0, 2), "context_split": "zigzag", "mask_boundaries": False},
    ]
    _same_as_cpu(session, "buckets", settings, variants)


def states_of_documents(session: Session) -> None:
    """A run that moves between CPU and GPU within blocks of rows made of documents."""
    for rows in ({"rows": "pack"}, {"rows": "pad", "length_buckets": _buckets(_documents(session))}):
        settings = _documents(session, masked=True) | rows | {"repeat": True, "drop_last": True}
        on_cpu = {"device": "cpu"}
        whole = run(settings | on_cpu, None, 20)[0]
        for route in ((ON_GPU[0], on_cpu, ON_GPU[1]), (on_cpu, ON_GPU[1], ON_GPU[0])):
            got: list[Arrays] = []
            state = None
            for place, (count, blocks) in zip(route, ((5, 4), (8, 1), (7, 3)), strict=True):
                part, state = run(settings | place | {"batches_per_run": blocks}, state, count)
                got += part
            names = ", ".join(str(place.get("placement", "CPU")) for place in route)
            session.verify(f"resume of {rows['rows']}: {names}", difference(got, whole))


def bad_ids_in_documents(session: Session) -> None:
    """An id at or above `vocab_size` in rows made of pieces: the words and the good batches of the CPU."""
    settings = _documents(session)
    folder = session.folder / "bad_ids_in_documents"
    folder.mkdir(exist_ok=True)
    tokens = np.fromfile(str(settings["corpus"]).replace("*", "shard_1"), np.uint16)
    tokens[len(tokens) // 2] = 300
    tokens.tofile(folder / "tokens.bin")
    settings |= {"corpus": str(folder / "tokens.bin"), "vocab_size": 300}
    kinds: list[dict[str, Any]] = [{"rows": "stream"}, {"rows": "pack"}]
    kinds.append({"rows": "pad", "length_buckets": _buckets(settings)})
    for rows, on_gpu in itertools.product(kinds, ON_GPU):
        got, expected = until_error(settings | rows | on_gpu), until_error(settings | rows | {"device": "cpu"})
        problem = "" if got == expected else f"{got}, on the CPU {expected}"
        session.verify(f"bad id, {on_gpu['placement']}, {' '.join(rows)} {rows['rows']}", problem)
    tokens[len(tokens) // 2] = 1
    tokens[settings["seq_len"] * 2] = 300  # the first token of a row, and before that the label after another
    tokens.tofile(folder / "tokens.bin")
    settings |= {"rows": "stream", "shuffle": False, "batch_size": 1, "batches_per_run": 1}
    for on_gpu in ON_GPU:
        got, expected = until_error(settings | on_gpu), until_error(settings | {"device": "cpu"})
        problem = "" if got == expected else f"{got}, on the CPU {expected}"
        session.verify(f"bad label after a row, {on_gpu['placement']}", problem)


def slow_consumer_of_documents(session: Session) -> None:
    """As in `lifetime`, with all that rows of documents need: tables, masks, several widths, copied shares."""
    machine, steps = session.machine, session.pick(200, 12)
    kinds: list[dict[str, Any]] = [
        {"rows": "pack", "mtp": 2},
        {"rows": "pack", "context_parallel": (0, 2), "context_split": "zigzag"},
        {"rows": "pad", "length_buckets": _buckets(_documents(session)), "static_buffers": True},
    ]
    for rows, on_gpu in itertools.product(kinds, ON_GPU):
        settings = _documents(session, masked=True) | rows | {"repeat": True, "batches_per_run": 2}
        seen: list[dict[str, Any]] = []
        with TokenLoader(**settings | on_gpu) as loader, machine.on(machine.stream()), machine.no_waits():
            for step, batch in zip(range(steps), loader, strict=False):
                machine.busy(_LONG_S if step % 25 == 0 else _SHORT_S)
                seen.append({n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()})
                del batch
        machine.synchronize()
        problem = difference([arrays(copy) for copy in seen], from_cpu(settings, steps))
        session.verify(f"{steps} steps behind long kernels, {on_gpu['placement']}, {' '.join(rows)}", problem)


def ranges_for_a_profiler(session: Session) -> None:
    """Ranges are begun and ended around everything, whether anyone looks or not."""
    settings = _documents(session) | {"rows": "pack"}
    _same_as_cpu(session, "ranges", settings, [{"nvtx": True}])


def beyond_two_to_the_31(session: Session) -> None:
    """The last rows of a corpus, and of its mask, that are after 2^31 tokens; the files have holes before them."""
    tokens = session.pick(2**31 + 2**20, 2**12)
    last = np.random.default_rng(8).integers(1, 50257, 2**11, dtype=np.uint16)
    mask = np.random.default_rng(9).integers(0, 2, 2**11, dtype=np.uint8)
    for masked in (False, True):
        folder = session.folder / f"beyond_{masked}"
        folder.mkdir(exist_ok=True)
        _with_hole(folder / "tokens.bin", tokens, last)
        if masked:
            _with_hole(folder / "tokens.bin.loss", tokens, mask)
        settings: dict[str, Any] = {"corpus": str(folder / "tokens.bin"), "dtype": "uint16", "shuffle": False}
        settings |= {"batch_size": 2, "seq_len": 64, "outputs": ALL_OUTPUTS, "quiet": True, "batches_per_run": 4}
        with TokenLoader(**settings, device="cpu") as loader:
            state = loader.state_dict() | {"rows": (tokens - 2**10) // 64}
        expected = run(settings | {"device": "cpu"}, state, 6)[0]
        for on_gpu in ON_GPU:
            problem = difference(run(settings | on_gpu, state, 6)[0], expected)
            session.verify(f"row {state['rows']} of {tokens} tokens, mask {masked}, {on_gpu['placement']}", problem)
        for path in folder.iterdir():
            path.unlink()


def _with_hole(path: Path, count: int, last: np.ndarray[Any, Any]) -> None:
    """A file of `count` ids, zeros but for the last ones."""
    with path.open("wb") as file:
        file.truncate((count - len(last)) * last.itemsize)
        file.seek(0, 2)
        file.write(last.tobytes())


def dali_by_hand(session: Session) -> None:
    """`build_pipeline` under DALI's own iterator, and DALI operators in a loader; on the CPU in a dry run."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    machine = session.machine
    settings = _documents(session) | {"outputs": ALL_OUTPUTS, "rows": "stream", "eos_id": None, "drop_last": True}
    on_cpu: dict[str, Any] = {"device": "cpu", "placement": "host"}
    expected = two_epochs(settings | on_cpu)
    for on_gpu in session.pick(ON_GPU, (on_cpu,)):
        pipe = build_pipeline(LoaderConfig(**settings | on_gpu | {"batches_per_run": 1}))
        batches = DALIGenericIterator([pipe], list(ALL_OUTPUTS), auto_reset=True)
        seen = []
        for _epoch in range(2):
            for (batch,) in batches:
                machine.busy(_SHORT_S)
                seen.append({name: tensor[0].clone() for name, tensor in batch.items()})
                del batch
        machine.synchronize()
        session.verify(f"DALI's iterator, {on_gpu['placement']}", difference([arrays(one) for one in seen], expected))
        del batches, pipe

        def add_one(nodes: dict[str, Any]) -> dict[str, Any]:
            return nodes | {"input_ids": nodes["input_ids"] + 1}

        with TokenLoader(**settings | on_gpu, graph=add_one) as loader:
            got = [batch | {"input_ids": batch["input_ids"] - 1} for batch in [*collect(loader), *collect(loader)]]
        session.verify(f"a graph of DALI's operators, {on_gpu['placement']}", difference(got, expected))


def masks_for_attention(session: Session) -> None:
    """`block_mask` on the device says what it says on the CPU, and neither waits for the device."""
    from dali_pipes.attention import block_mask, varlen_args

    settings = _documents(session) | {"rows": "pack"} | ON_GPU[0]
    block_size = session.pick(128, 8)
    problem = ""
    with TokenLoader(**settings) as loader:
        for batch in itertools.islice(loader, 3):
            with session.machine.no_waits():
                mask, bounds = block_mask(batch, block_size=block_size), varlen_args(batch)
            on_cpu = block_mask({"segment_ids": batch["segment_ids"].cpu()}, block_size=block_size)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                mine, other = (getattr(side, name).cpu().numpy() for side in (mask, on_cpu))
                problem = problem or array_difference(mine, other)
            ends = bounds["cu_seqlens_q"].diff()
            longest = int(ends.max())
            if longest != bounds["max_seqlen_q"] or int(ends.min()) < 1:
                problem = problem or f"segments of {int(ends.min())} to {longest}, max_seqlen {bounds['max_seqlen_q']}"
    session.verify("masks for attention", problem)


def losses_by_source(session: Session) -> None:
    """`SourceLoss` on the device says what a loop over rows says, and adding does not wait for the device."""
    batch_size, seq_len = session.pick((8, 512), (2, 16))
    settings: dict[str, Any] = {
        "mixture": {
            name: {"corpus": session.corpus(f"source_{name}", batch_size * seq_len * 8), "weight": weight}
            for name, weight in {"first": 3, "second": 2}.items()
        },
        "total_steps": session.pick(40, 6),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "outputs": ("labels", "source_ids"),
        "quiet": True,
    }
    for on_gpu in ON_GPU:
        with TokenLoader(**settings | on_gpu) as loader:
            by_source = SourceLoss(loader, device=session.machine.device)
            losses_of: dict[int, list[float]] = {}
            for batch in loader:
                losses = batch["labels"].float().sqrt()
                with session.machine.no_waits():
                    by_source.add(batch, losses)
                    by_source.add(batch, losses.mean(1))
                for source, row in zip(batch["source_ids"].tolist(), losses.tolist(), strict=True):
                    losses_of.setdefault(source, []).extend(row)
            expected = {name: math.fsum(losses_of[n]) / len(losses_of[n]) for n, name in enumerate(settings["mixture"])}
            means = by_source.means()
        wrong = [name for name in expected if not math.isclose(means.get(name, math.nan), expected[name], rel_tol=1e-6)]
        problem = f"means {means}, expected {expected}" if wrong else ""
        session.verify(f"loss by source, {on_gpu['placement']}", problem)


def memory_of_documents(session: Session) -> None:
    """What many steps of packed rows add: tables grow with the pieces of a block."""
    steps = session.pick(1500, 30)
    for on_gpu in ON_GPU:
        settings = _documents(session, masked=True) | {"rows": "pack", "repeat": True} | on_gpu
        with TokenLoader(**settings) as loader:
            batches = iter(loader)
            looks = []
            for _look in range(2):
                for _ in range(steps):
                    next(batches)
                session.machine.synchronize()
                free, total = session.machine.free_and_total_bytes()
                looks.append(vars(loader.stats().memory) | {"the device": total - free})
        for name, value in looks[1].items():
            growth = (value - looks[0][name]) / 2**20
            session.figure(f"packed, {on_gpu['placement']}: growth of {name} in {steps} steps", growth, "MiB")


def memory_of_dropped_loaders(session: Session) -> None:
    """A loader that nobody closes gives the corpus on the device back."""
    tokens = session.pick(64 << 20, 1 << 12)
    settings: dict[str, Any] = {
        "corpus": session.corpus("dropped", tokens),
        "batch_size": 2,
        "seq_len": 16,
        "quiet": True,
    }
    taken = []
    for _ in range(4):
        others = set(threading.enumerate())
        loader = TokenLoader(**settings | ON_GPU[1])
        next(iter(loader))
        del loader
        gc.collect()
        for thread in set(threading.enumerate()) - others:  # holds what it fills until it gets to run, and ends
            thread.join(60)
        session.machine.synchronize()
        free, total = session.machine.free_and_total_bytes()
        taken.append(total - free)
    growth = taken[-1] - taken[0]  # the first one leaves what DALI and CUDA keep for the process
    problem = f"{growth} bytes more after three loaders with {2 * tokens} bytes" if growth > 2 * tokens else ""
    session.verify("dropped loaders, device", problem)


def _documents(session: Session, *, masked: bool = False) -> dict[str, Any]:
    """Settings for three files of documents that end with 0, with every output; `masked`: two have a loss mask."""
    batch_size, seq_len = session.pick((8, 512), (2, 16))
    tokens = batch_size * seq_len * session.pick(24, 8) + 3
    corpus = session.corpus(f"features_{masked}", tokens, files=3, below=session.pick(200, 9))
    for number in range(2 if masked else 0):
        path = Path(corpus.replace("*", f"shard_{number}"))
        beside = path.with_name(path.name + ".loss")
        if not beside.exists():
            size = path.stat().st_size // 2
            np.random.default_rng(number).integers(0, 2, size, dtype=np.uint8).tofile(beside)
    return {
        "corpus": corpus,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "eos_id": 0,
        "seed": 12,
        "outputs": (*OUTPUT_NAMES,),
        "drop_last": False,
        "batches_per_run": 3,
        "rank": 0,
        "world_size": 1,
    }


def _buckets(settings: Mapping[str, Any]) -> list[int]:
    return [settings["seq_len"] // 4, settings["seq_len"] // 2]


def _same_as_cpu(session: Session, what: str, settings: dict[str, Any], variants: list[dict[str, Any]]) -> None:
    for variant in variants:
        expected = two_epochs(settings | variant | {"device": "cpu"})
        words = " ".join(f"{name} {value}" for name, value in variant.items() if name != "outputs")
        for on_gpu in ON_GPU:
            problem = difference(two_epochs(settings | variant | on_gpu), expected)
            session.verify(f"{what}, {on_gpu['placement']}, {words}", problem)


CHECKS = (
    segments_equal_numpy,
    loss_masks,
    plain_windows,
    types_of_fields,
    objectives,
    length_buckets,
    states_of_documents,
    bad_ids_in_documents,
    ranges_for_a_profiler,
    slow_consumer_of_documents,
    beyond_two_to_the_31,
    masks_for_attention,
    losses_by_source,
    dali_by_hand,
    memory_of_documents,
    memory_of_dropped_loaders,
    pool_batches,
    pool_memory_and_rate,
)
