"""Part 2: the GPU says what the CPU says, bit for bit: every operator, both placements, states, and the error."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dali_pipes import TokenLoader
from dali_pipes.config import OUTPUT_NAMES
from dali_pipes.errors import TokenRangeError
from gpu.batches import ALL_OUTPUTS, ON_GPU, array_difference, collect, difference
from gpu.environment import OUTPUT_DTYPES, token_dtypes
from gpu.session import Session

_LARGEST = 2**63 - 1


def permute_equals_numpy(session: Session) -> None:
    session.machine.synchronize()  # makes the machine; in a dry run it brings what `import cupy` finds
    import cupy

    from dali_pipes.operators import permute

    generator = np.random.default_rng(1)
    sizes = (1, 2, 3, 5, 16, 17, 255, 256, 257, 10**6, 2**31 - 1, 2**31 + 1, 2**32 + 1, 2**40, 2**62 + 1, 2**63 - 1)
    problems = ""
    for size, key in itertools.product(sizes, (0, 2**64 - 1, int(generator.integers(2**63)))):
        indices = generator.integers(0, size, session.pick(10_000, 64))
        indices[:2] = 0, size - 1
        problem = array_difference(cupy.asnumpy(permute(cupy.asarray(indices), size, key)), permute(indices, size, key))
        problems += f"n = {size}, key {key}: {problem}; " if problem else ""
    session.verify(f"permute, {len(sizes)} sizes, 3 keys each", problems)


def rows_equal_numpy(session: Session) -> None:
    import cupy

    from dali_pipes.operators import rows

    generator = np.random.default_rng(2)
    shapes = [(1, 1), (1, 1024), (5, 1), (7, 3), (4, 31), (3, 1000), (2, 1025), session.pick((512, 1024), (5, 64))]
    for token in token_dtypes(session):
        problems = ""
        for (count, seq_len), output, shift in itertools.product(shapes, OUTPUT_DTYPES, (True, False)):
            tokens = random_ids(generator, token, seq_len + 200 + count)
            last = tokens.size - seq_len - shift
            starts = generator.integers(0, last + 1, count)
            starts[-1] = last  # reads up to the last token
            for places in (starts, range(count)):
                options: dict[str, Any] = {"label_shift": shift, "dtype": np.dtype(output), "vocab_size": 100}
                sides = []
                for array in (cupy.asarray, np.asarray):
                    given = places if isinstance(places, range) else array(places)
                    bad = array(np.array([0, _LARGEST]))
                    sides.append([*rows(array(tokens), given, seq_len, **options, bad=bad), bad])
                problem = _differences(cupy, *sides)
                problems += f"({count}, {seq_len}) to {output}, shift {shift}: {problem}; " if problem else ""
        session.verify(f"rows of {token}, {len(shapes)} shapes", problems)


def shuffled_rows_equal_numpy(session: Session) -> None:
    import cupy

    from dali_pipes.operators import shuffled_rows

    generator = np.random.default_rng(3)
    # first row, rows, step between rows, rows of the epoch, tokens a row, stride
    cases = [
        (0, 1, 1, 1, 1, 1),
        (0, 6, 1, 6, 8, 8),
        (1, 5, 2, 11, 7, 3),
        (3, 9, 4, 33, 16, 16),
        (2, 4, 3, 12, 31, 40),
        (8, 5, 1, 11, 4, 4),  # runs past the end: padding
        session.pick((5, 512, 8, 5000, 1024, 1024), (5, 6, 8, 60, 64, 64)),
    ]
    for token in token_dtypes(session):
        problems = ""
        for case, key, output, shift in itertools.product(cases, (None, 9, 2**64 - 1), OUTPUT_DTYPES, (True, False)):
            first, count, row_step, num_rows, seq_len, stride = case
            origin = 3
            tokens = random_ids(generator, token, origin + (num_rows - 1) * stride + seq_len + shift)
            sides = []
            for array in (cupy.asarray, np.asarray):
                row_ids, bad = array(np.zeros(count, np.int64)), array(np.array([0, _LARGEST]))
                got = shuffled_rows(
                    array(tokens),
                    first,
                    count,
                    row_step=row_step,
                    num_rows=num_rows,
                    key=key,
                    origin=origin,
                    stride=stride,
                    seq_len=seq_len,
                    label_shift=shift,
                    dtype=np.dtype(output),
                    row_ids=row_ids,
                    vocab_size=100,
                    bad=bad,
                )
                sides.append([*got, row_ids, bad])
            problem = _differences(cupy, *sides)
            problems += f"{case}, key {key} to {output}, shift {shift}: {problem}; " if problem else ""
        session.verify(f"shuffled_rows of {token}, {len(cases)} shapes", problems)


def rows_in_slots_equal_numpy(session: Session) -> None:
    """As the windows of a pool lie: the first slot is short where the rows do not fill all."""
    import cupy

    from dali_pipes.operators import shuffled_rows
    from dali_pipes.operators.shuffled_rows import Slots

    generator = np.random.default_rng(4)
    shapes = [(1, 1, 1), (5, 7, 3), (33, 16, 16), session.pick((5000, 1024, 1024), (60, 64, 64))]
    problems = ""
    for (num_rows, seq_len, stride), slot_rows, key in itertools.product(shapes, (1, 3, 7), (None, 9)):
        missing = -num_rows % slot_rows
        slot_tokens = (slot_rows - 1) * stride + seq_len + 2
        slots = Slots(slot_rows, slot_tokens, slot_rows - missing if missing else num_rows, missing)
        tokens = random_ids(generator, "uint16", 3 + (num_rows + missing) // slot_rows * slot_tokens)
        place: dict[str, Any] = {
            "row_step": 2,
            "num_rows": num_rows,
            "key": key,
            "origin": 3,
            "stride": stride,
            "seq_len": seq_len,
        }
        sides = []
        for array in (cupy.asarray, np.asarray):
            row_ids, bad = array(np.zeros(-(-num_rows // 2), np.int64)), array(np.array([0, _LARGEST]))
            check: dict[str, Any] = {"row_ids": row_ids, "vocab_size": 100, "bad": bad}
            got = shuffled_rows(array(tokens), 2**40, len(row_ids), begin=2**40, slots=slots, **place, **check)
            sides.append([*got, row_ids, bad])
        problem = _differences(cupy, *sides)
        problems += f"{num_rows} rows, {slots}, key {key}: {problem}; " if problem else ""
    session.verify(f"shuffled_rows in slots, {len(shapes)} shapes", problems)


def whole_loader(session: Session) -> None:
    """Two epochs with every combination that changes how blocks are made, and none that changes what is in them."""
    wide, narrow = session.pick((8, 512), (3, 16)), session.pick((5, 33), (2, 7))
    padded = {"batches_per_run": 2, "drop_last": False, "rank": 1, "world_size": 2}
    variants: list[dict[str, Any]] = [
        {},
        {"batches_per_run": 1, "prefetch_queue_depth": 1, "num_threads": 1},
        {"batches_per_run": 3, "prefetch_queue_depth": 4, "num_threads": 4},
        padded,
        {"batches_per_run": 2, "drop_last": False, "rank": 2, "world_size": 3, "num_threads": 4},
        {"batches_per_run": 5, "label_shift": False, "shuffle": False, "stride": 11},
        {"split": "validation", "validation_fraction": 0.3, "drop_last": False},
    ]
    for dtype in token_dtypes(session):
        # Every setting for one dtype, every dtype for two settings: a loader takes a good part of a second to build.
        of_dtype = (
            list(itertools.product((wide, narrow), variants)) if dtype == "uint16" else [(wide, {}), (narrow, padded)]
        )
        problems = dict.fromkeys((on_gpu["placement"] for on_gpu in ON_GPU), "")
        for (batch_size, seq_len), variant in of_dtype:
            tokens = batch_size * seq_len * session.pick(21, 7) + seq_len // 2
            corpus = session.corpus("parity", tokens, dtype=dtype, files=3, below=200)
            settings = _settings(corpus, dtype, batch_size, seq_len) | variant
            expected = two_epochs(settings | {"device": "cpu"})
            for on_gpu in ON_GPU:
                problem = difference(two_epochs(settings | on_gpu), expected)
                problems[on_gpu["placement"]] += f"{variant} at {batch_size, seq_len}: {problem}; " if problem else ""
        for placement, problem in problems.items():
            session.verify(f"loader {placement}, {dtype}, {len(of_dtype)} settings, 2 epochs", problem)


def rows_of_documents(session: Session) -> None:
    """Packed and padded rows and windows with boundaries, with every output; ids of 0 end the documents."""
    batch_size, seq_len = session.pick((8, 512), (2, 16))
    corpus = session.corpus("documents", batch_size * seq_len * session.pick(40, 8) + 1, below=session.pick(200, 9))
    settings = _settings(corpus, "uint16", batch_size, seq_len)
    settings |= {"eos_id": 0, "outputs": (*OUTPUT_NAMES,), "drop_last": False, "batches_per_run": 3}
    for variant in (
        {"rows": "pack"},
        {"rows": "pack", "long_documents": "truncate", "mtp": 3, "pad_id": 7, "window_documents": 50},
        {"rows": "pad", "long_documents": "drop", "rank": 1, "world_size": 2},
        {"rows": "stream", "mask_boundaries": True},
        {"rows": "stream", "mask_boundaries": False, "mtp": 2},
        {"rows": "pack", "mask_boundaries": False, "mtp": 4},
        {"rows": "pad", "length_buckets": [seq_len // 4, seq_len // 2], "context_parallel": (1, 2)},
        {"rows": "pack", "context_parallel": (0, 2), "context_split": "zigzag", "static_buffers": True},
        {"rows": "stream", "skip_steps": [[1, 3]]},
    ):
        expected = two_epochs(settings | variant | {"device": "cpu"})
        for on_gpu in ON_GPU:
            problem = difference(two_epochs(settings | variant | on_gpu), expected)
            session.verify(f"documents, {on_gpu['placement']}, {' '.join(map(str, variant.values()))}", problem)


def states(session: Session) -> None:
    """A run that moves between CPU and GPU in mid-epoch, with other block sizes on the way."""
    batch_size, seq_len = session.pick((8, 512), (2, 16))
    corpus = session.corpus("states", batch_size * seq_len * 20 + 1)
    settings = _settings(corpus, "uint16", batch_size, seq_len) | {"repeat": True}
    on_cpu = {"device": "cpu"}
    host, device, pinned = ON_GPU
    whole = run(settings | on_cpu, None, 48)[0]
    routes: dict[str, list[dict[str, Any]]] = {
        "host, resumed twice": [host, host, host],
        "device, resumed twice": [device, device, device],
        "CPU, then host, then CPU": [on_cpu, host, on_cpu],
        "CPU, then device, then CPU": [on_cpu, device, on_cpu],
        "host, then device, then CPU": [host, device, on_cpu],
        "pinned, then host, then pinned": [pinned, host, pinned],
    }
    for name, route in routes.items():
        got, state = [], None
        for place, (count, blocks) in zip(route, ((7, 4), (18, 1), (23, 3)), strict=True):  # ends within blocks
            part, state = run(settings | place | {"batches_per_run": blocks}, state, count)
            got += part
        session.verify(f"resume: {name}", difference(got, whole))


def bad_id(session: Session) -> None:
    """An id at or above `vocab_size`: the same words and as many good batches before it as on the CPU."""
    batch_size, seq_len = session.pick((4, 256), (2, 16))
    good = session.corpus("bad", batch_size * seq_len * 12 + 1, dtype="uint16", below=100)
    folder = session.folder / "bad_id"
    folder.mkdir(exist_ok=True)
    tokens = np.fromfile(good.replace("*", "shard_0"), np.uint16)
    tokens[len(tokens) // 2] = 100
    tokens.tofile(folder / "tokens.bin")
    settings = _settings(str(folder / "tokens.bin"), "uint16", batch_size, seq_len) | {"vocab_size": 100}
    for blocks in (1, 3):
        settings["batches_per_run"] = blocks
        expected = until_error(settings | {"device": "cpu"})
        for on_gpu in ON_GPU:
            got = until_error(settings | on_gpu)
            problem = "" if got == expected else f"{got}, on the CPU {expected}"
            session.verify(f"bad id, {on_gpu['placement']}, batches_per_run {blocks}", problem)


def _settings(corpus: str, dtype: str, batch_size: int, seq_len: int) -> dict[str, Any]:
    return {
        "corpus": corpus,
        "dtype": dtype,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "seed": 11,
        "outputs": ALL_OUTPUTS,
        "rank": 0,
        "world_size": 1,
    }


def two_epochs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All batches of a loader's first two epochs."""
    with TokenLoader(**settings) as loader:
        return [*collect(loader), *collect(loader)]


def run(settings: Mapping[str, Any], state: Any, count: int) -> tuple[list[dict[str, Any]], Any]:
    """`count` batches after a state, or from the start, and the state after them."""
    with TokenLoader(**settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return collect(loader, count), loader.state_dict()


def until_error(settings: Mapping[str, Any]) -> tuple[int, str]:
    """Batches before the error, and its words."""
    count = 0
    try:
        with TokenLoader(**settings) as loader:
            for _batch in loader:
                count += 1
    except TokenRangeError as error:
        return count, str(error)
    return count, "no error"


def random_ids(generator: np.random.Generator, dtype: str, count: int) -> np.ndarray[Any, Any]:
    """Ids over all of the dtype's range, negative ids and those above 2^31 included."""
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)


def _differences(cupy: Any, mine: list[Any], expected: list[Any]) -> str:
    pairs = zip(mine, expected, strict=True)
    return next(filter(None, (array_difference(cupy.asnumpy(a), b) for a, b in pairs)), "")


CHECKS = (
    permute_equals_numpy,
    rows_equal_numpy,
    shuffled_rows_equal_numpy,
    rows_in_slots_equal_numpy,
    whole_loader,
    rows_of_documents,
    states,
    bad_id,
)
