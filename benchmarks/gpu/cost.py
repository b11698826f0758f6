"""Part 5: what the loader costs the card, the link, the trainer's thread and memory.

Methods, where the name of a figure does not say it all:

- Kernels: bytes that must be read once and written once, over the time of the device; the ceiling beside it is a device
  copy that moves as many bytes.
- Corpus load: the time to build a loader and get its first batch with the large corpus, less the same with a tiny one.
- CPU seconds: of the process tree, over many steps beside the product, less the same with one fixed batch.
- Single calls: `next()` on an idle machine, with CPU caches that other work has filled between two calls, and where it
  goes to the next block, all of whose batches have been made by then; see `next_calls`.
- Mean of `next()`: over many blocks, so that it holds what a block's first batch costs.
- After close: the highest of several loaders that are built, used and closed, against the first; what is freed late,
  or kept in a pool that torch cannot use, is in it.
- Time of the device a step: rounds of equal steps (a matrix product) with the loader and with one fixed batch, in
  turns; the median of the differences. So it holds all that the loader slows the step down by, also what runs beside
  it on another stream.
- Reading alone: the same reads without a GPU, by one thread and by as many as the placement has.
- Profile: seconds and calls of each function, of the trainer's thread and over the profiler's own cost, a batch.
- Memory growth: from after a warm-up of a tenth as many steps; each side is the highest of several looks.
"""

import cProfile
import itertools
import os
import pstats
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from comparison.process import CpuMeter, tree_memory_bytes
from next_calls import AIMS, Evictor, measure

from dali_pipes import TokenLoader
from gpu.batches import ON_GPU
from gpu.ceilings import PINNED_COPY, ceilings, device_copy_rate
from gpu.pace import Feed, Pace, Product, fixed_feed, our_feed, paced, torch_feed
from gpu.reads import CHUNK_READ, ROW_READ, THREADS, rate_name, read_rates
from gpu.session import Session

KERNEL_SHARE = 0.7
NEXT_US = {"p50": 12.0, "p99": 100.0, "p99.9": 1000.0, "mean": 16.0}
MAIN_THREAD_US = 20.0
CPU_S = {"host": 3.0, "device": 1.0, "pinned": 1.0}  # for 10^9 tokens; a NumPy thread on a CPU takes 1.1 to 2.7
_PROFILE_LINES = 25
_GROWTH_MIB = 1.0  # what the interpreter itself may come and go by


def training_settings(session: Session) -> tuple[dict[str, Any], int]:
    """The loader of the training part, and the tokens of its corpus."""
    batch_size, seq_len = session.pick((16, 1024), (2, 16))
    tokens = session.pick(200_000_000, 2 * 16 * 20 + 1)
    return {"corpus": session.corpus("training", tokens), "batch_size": batch_size, "seq_len": seq_len}, tokens


def kernels(session: Session) -> None:
    machine = session.machine  # first: in a dry run it brings what `import cupy` finds
    seq_len = session.pick(1024, 16)
    for log_tokens in session.pick((20, 24), (6, 8)):
        count = 2**log_tokens // seq_len
        moved = count * (seq_len + 1) * 2 + 2 * count * seq_len * 8
        ceiling = device_copy_rate(machine, moved)
        session.figure(f"device copy of {moved} bytes, read + write", ceiling / 1e9, "GB/s")
        for name, function in _kernel_calls(count, seq_len).items():
            rate = moved / machine.timed(function, calls=20)
            session.figure(f"{name}, 2^{log_tokens} tokens", rate / 1e9, "GB/s")
            session.figure(f"{name}, 2^{log_tokens} tokens: share", rate / ceiling, "of copy", at_least=KERNEL_SHARE)


def _kernel_calls(count: int, seq_len: int) -> dict[str, Callable[[], object]]:
    """Calls that make `count` rows from uint16 ids into the same arrays, without allocating."""
    import cupy

    from dali_pipes.operators import rows, shuffled_rows

    windows = 4 * count
    ids = np.random.default_rng(4).integers(0, 50257, windows * seq_len + 1, dtype=np.uint16)
    tokens, staged = cupy.asarray(ids), cupy.asarray(ids[: count * (seq_len + 1)])
    out = (cupy.empty((count, seq_len), np.int64), cupy.empty((count, seq_len), np.int64))
    check: dict[str, Any] = {"vocab_size": 50257, "bad": cupy.asarray(np.array([0, 2**63 - 1]))}
    starts = range(0, count * (seq_len + 1), seq_len + 1)  # as the rows of a block lie when they have been sent
    order: dict[str, Any] = {"row_step": 1, "num_rows": windows, "key": 7, "origin": 0, "stride": seq_len}
    order |= {"seq_len": seq_len, "out": out}
    return {
        "rows": lambda: rows(staged, starts, seq_len, out=out),
        "rows, ids checked": lambda: rows(staged, starts, seq_len, out=out, **check),
        "shuffled_rows, ids checked": lambda: shuffled_rows(tokens, 0, count, **order, **check),
    }


def segment_kernels(session: Session) -> None:
    """`segments` with every output, on rows packed from documents of log-normal length; for blocks of batches, too."""
    machine = session.machine
    limit = session.pick(1 << 20, 1 << 8)
    for batch_size, seq_len in session.pick(((4, 32_768), (16, 4096)), ((4, 32), (2, 16))):
        for batches in (1, max(2, limit // (batch_size * seq_len))):
            function, moved, pieces = _segments_call(batches, batch_size, seq_len, median=session.pick(400, 5))
            ceiling = device_copy_rate(machine, moved)
            rate = moved / machine.timed(function, calls=20)
            name = f"segments, all outputs, {batches} x ({batch_size}, {seq_len}), {pieces} pieces"
            session.figure(name, rate / 1e9, "GB/s")
            session.figure(f"{name}: share", rate / ceiling, "of copy")


def _segments_call(
    batches: int, batch_size: int, seq_len: int, *, median: float
) -> tuple[Callable[[], object], int, int]:
    """A call for a block of packed rows that lie side by side among uint16 ids, its bytes, and the number of pieces."""
    import cupy

    from dali_pipes.operators import segments
    from dali_pipes.operators.segments import OUTPUTS
    from dali_pipes.rows.packing import pack

    rows = batches * batch_size
    generator = np.random.default_rng(rows)
    documents = 1 + generator.lognormal(np.log(median), 1.2, 2 * rows * seq_len // int(median) + rows).astype(np.int64)
    packing = pack(documents, seq_len, "split")
    packed_rows = np.split(packing.piece_lengths.astype(np.int64), packing.row_offsets[1:-1])
    chosen = [packed_rows[row] for row in generator.permutation(len(packed_rows))[:rows]]
    offsets = np.cumsum([0, *map(len, chosen)])
    lengths = np.concatenate(chosen)
    starts = np.cumsum(lengths) - lengths
    ids = generator.integers(0, 50257, int(lengths.sum()), dtype=np.uint16)
    tables = {"row_offsets": offsets, "piece_starts": starts, "piece_lengths": lengths, "piece_ends": starts + lengths}
    arguments: dict[str, Any] = {name: cupy.asarray(table) for name, table in tables.items()}
    arguments |= {"tokens": cupy.asarray(ids), "seq_len": seq_len, "outputs": OUTPUTS, "batch_rows": batch_size}
    out = segments(**arguments)
    moved = ids.nbytes + sum(table.nbytes for table in tables.values())
    moved += (len(OUTPUTS) - 2) * rows * seq_len * 8 + batches * (batch_size * seq_len + 1) * 4 + batches * 8
    return lambda: segments(**arguments, out=out), moved, len(lengths)


def host_bytes_sent(session: Session) -> None:
    """The `host` placement flat out: nothing but `next()`, at the usual shape and at one with large batches."""
    machine = session.machine
    settings, _tokens = training_settings(session)
    large = {"batch_size": session.pick(256, 4), "seq_len": session.pick(4096, 32), "batches_per_run": 8}
    large |= {"max_block_bytes": 1 << 28, "prefetch_queue_depth": 4, "num_threads": min(8, os.cpu_count() or 1)}
    for name, changes in (("defaults", {}), ("large batches", large)):
        with our_feed(settings | ON_GPU[0] | changes) as (loader, feed):
            row_bytes = 2 * (loader.config.row_len + 1)
            for _batch in itertools.islice(feed, session.pick(50, 4)):
                pass
            machine.synchronize()
            before = vars(loader.stats().block_times)
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < session.pick(2.0, 0.02):
                for _batch in itertools.islice(feed, 8):
                    count += loader.config.batch_size
            machine.synchronize()
            seconds = time.perf_counter() - started
            rate, after = count * row_bytes / seconds, vars(loader.stats().block_times)
        shape = f"({loader.config.batch_size}, {loader.config.row_len})"
        session.figure(f"host sends, {name} {shape}", rate / 1e9, "GB/s")
        if changes:
            alone = read_rates(session)[rate_name(ROW_READ, THREADS)]
            session.figure(f"host sends, {name} {shape}: share of reading", rate / alone, "of reading alone")
        spent = {part: (after[part] - before[part]) / seconds for part in ("plan_s", "read_s", "wait_s", "kernels_s")}
        session.note(f"host sends, {name} {shape}: seconds of a second, all threads", spent)


def corpus_load(session: Session) -> None:
    machine = session.machine
    room_tokens = min(shutil.disk_usage(session.folder).free // 4, machine.free_and_total_bytes()[0] // 4) // 2
    tokens = session.pick(min(2**30, room_tokens), 2**12)
    shape: dict[str, Any] = {"batch_size": session.pick(16, 2), "seq_len": session.pick(1024, 16)}
    alone = read_rates(session)[rate_name(CHUNK_READ, THREADS)]
    for on_gpu in ON_GPU[1:]:
        seconds: dict[int, list[float]] = {session.pick(2**20, 2**10): [], tokens: []}
        for _round, size in itertools.product(range(3), seconds):
            settings = shape | on_gpu | {"corpus": session.corpus("load", size), "max_device_bytes": 2 * size}
            started = time.perf_counter()
            with TokenLoader(**settings) as loader:
                next(iter(loader))
                machine.synchronize()
                seconds[size].append(time.perf_counter() - started)
        small, large = (statistics.median(found) for found in seconds.values())
        rate = 2 * (tokens - min(seconds)) / max(large - small, 1e-9)
        name = on_gpu["placement"]
        session.figure(f"{name}: build and first batch, {2 * tokens / 2**30:.2f} GiB", large, "s")
        session.figure(f"{name}: corpus load", rate / 1e9, "GB/s")
        session.figure(f"{name}: corpus load: share of reading", rate / alone, "of reading alone")


def reading_alone(session: Session) -> None:
    """What the threads can read at all, so that a placement that is slower than the link says why."""
    ceiling = ceilings(session)[PINNED_COPY]
    for name, rate in read_rates(session).items():
        session.figure(f"reading alone, {name}", rate / 1e9, "GB/s")
        session.figure(f"reading alone, {name}: share", rate / ceiling, "of pinned copy")


def profile_of_the_trainers_thread(session: Session) -> None:
    """Where the main-thread CPU of a batch goes, function by function; whole blocks, beside the product."""
    settings, _tokens = training_settings(session)
    product = Product(session)
    for on_gpu in ON_GPU:
        with our_feed(settings | on_gpu) as (loader, feed):
            steps = session.pick(6, 2) * loader.stats().batches_per_run
            paced(session.machine, feed, steps, product)
            profile = cProfile.Profile(time.thread_time)
            for _step in range(steps):
                profile.enable()
                next(feed)
                profile.disable()
                product()
        rows = sorted(pstats.Stats(profile).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
        lines = {
            f"{Path(file).name}:{line} {function}": f"{1e6 * own / steps:.2f} us in {calls / steps:.2f} calls per batch"
            for (file, line, function), (_primitive, calls, own, _with_callees, _callers) in rows[:_PROFILE_LINES]
        }
        session.note(f"ours {on_gpu['placement']}: profile of the main thread", lines)


def next_beside_a_product(session: Session) -> None:
    """Latency and main-thread CPU of `next()`, and memory over many steps; torch's DataLoader beside it."""
    machine, product = session.machine, Product(session)
    settings, tokens = training_settings(session)
    steps = session.pick(10_000, 40)
    batch_tokens = settings["batch_size"] * settings["seq_len"]
    ours: dict[str, Pace] = {}
    with fixed_feed(settings | ON_GPU[0]) as fixed:
        paced(machine, fixed, steps // 10, product)
        meter = CpuMeter()
        paced(machine, fixed, steps // 4, product)
        fixed_cpu_s = 4 * meter.elapsed_s()
    for on_gpu in ON_GPU:
        placement = str(on_gpu["placement"])
        with our_feed(settings | on_gpu) as (loader, feed):
            paced(machine, feed, steps // 10, product)
            before = _highest_memory(session, loader, feed, product)
            meter = CpuMeter()
            ours[placement] = paced(machine, feed, steps, product)
            cpu_s = meter.elapsed_s() - fixed_cpu_s
            switches = steps / loader.stats().batches_per_run
            after = _highest_memory(session, loader, feed, product)
        _report_pace(session, f"ours {placement}", ours[placement], wanted=True)
        session.note(f"ours {placement}: block switches in these steps", f"{switches:.1f}")
        seconds = 1e9 * cpu_s / (steps * batch_tokens)
        session.figure(f"ours {placement}: CPU for 10^9 tokens", seconds, "s", at_most=CPU_S[placement])
        session.note(f"ours {placement}: memory held", {name: f"{value:.1f} MiB" for name, value in after.items()})
        for name in after:
            limit = _GROWTH_MIB if name == "the process" else 0.0
            growth = after[name] - before[name]
            session.figure(f"ours {placement}: growth of {name} in {steps} steps", growth, "MiB", at_most=limit)
    for workers in session.pick((0, 8), (0, 2)):
        with torch_feed(session, settings, tokens, workers) as batches:
            paced(machine, batches, session.pick(100, 2), product)
            pace = paced(machine, batches, session.pick(1500, 8), product)
        name = f"torch DataLoader, {workers} workers"
        _report_pace(session, name, pace, wanted=False)
        for placement, mine in ours.items():
            ratio = pace.next_cpu_s / max(mine.next_cpu_s, 1e-9)
            session.figure(f"{name}: main-thread CPU against ours {placement}", ratio, "x")


def single_calls(session: Session) -> None:
    """`next()` within a block and to the next one, which a thread has made: 256 batches in a block."""
    _machine = session.machine  # first: in a dry run it brings what `import cupy` finds
    per_block, count = session.pick((256, 60), (6, 12))
    corpus = session.corpus("calls", session.pick(20_000_000, 2**15))
    evict = Evictor(session.pick(64, 1))
    for on_gpu in ON_GPU:
        for name, found in measure(corpus, per_block, count, evict, **on_gpu).items():
            label, middle = f"ours {on_gpu['placement']}: single calls, {name}", float(np.median(found))
            session.figure(label, middle, "us", at_most=AIMS.get(name))


def device_time_of_loader(session: Session) -> None:
    for placement, seconds in loader_device_s(session).items():
        session.figure(f"ours {placement}: time of the device a step", 1e6 * seconds, "us")


def loader_device_s(session: Session) -> dict[str, float]:
    """Seconds of the device that a step takes longer for the loader, by placement. Measured once a run."""
    return session.kept("loader_device_s", lambda: _measure_device_s(session))


def _measure_device_s(session: Session) -> dict[str, float]:
    machine, product = session.machine, Product(session)
    settings, _tokens = training_settings(session)
    steps, found = session.pick(250, 4), {}
    with fixed_feed(settings | ON_GPU[0]) as fixed:
        for on_gpu in ON_GPU:
            with our_feed(settings | on_gpu) as (_loader, feed):
                paced(machine, feed, steps, product)
                differences = []
                for _round in range(session.pick(9, 2)):
                    with_loader = paced(machine, feed, steps, product).device_s
                    differences.append(with_loader - paced(machine, fixed, steps, product).device_s)
                found[str(on_gpu["placement"])] = statistics.median(differences)
    return found


def _report_pace(session: Session, name: str, pace: Pace, *, wanted: bool) -> None:
    found = {f"p{share:g}": float(np.percentile(pace.next_s, share)) for share in (50, 99, 99.9)}
    for label, seconds in {**found, "mean": float(pace.next_s.mean())}.items():
        most = NEXT_US[label] if wanted else None
        session.figure(f"{name}: next() {label}", 1e6 * seconds, "us", at_most=most)
    limit = MAIN_THREAD_US if wanted else None
    session.figure(f"{name}: main-thread CPU a batch", 1e6 * pace.next_cpu_s, "us", at_most=limit)


def _highest_memory(session: Session, loader: TokenLoader, feed: Feed, product: Product) -> dict[str, float]:
    """MiB: what the loader says it holds, and what device and process have in use; the most of several looks."""
    looks = []
    for _ in range(session.pick(20, 2)):
        paced(session.machine, feed, 7, product)  # few enough to meet the blocks in different places
        memory = loader.stats().memory
        free, total = session.machine.free_and_total_bytes()
        held = {
            "pinned memory": memory.pinned_bytes,
            "loader's device memory": memory.device_bytes,
            "DALI's memory": memory.dali_bytes,
            "the device": total - free,
            "the process": tree_memory_bytes()["unshared"],
        }
        looks.append({name: value / 2**20 for name, value in held.items()})
    return {name: max(look[name] for look in looks) for name in looks[0]}


def memory_after_close(session: Session) -> None:
    """Device memory and pinned blocks are what they were, once a loader is closed and its batches are dropped."""
    import cupy

    machine, product = session.machine, Product(session)
    settings, _tokens = training_settings(session)
    for on_gpu in ON_GPU:
        used, kept = [], []
        for _ in range(3):
            with our_feed(settings | on_gpu) as (loader, feed):
                paced(machine, feed, session.pick(300, 4), product)
                del feed
            held = vars(loader.stats().memory)
            del loader
            machine.synchronize()
            free, total = machine.free_and_total_bytes()
            used.append(total - free)
            kept.append(cupy.get_default_pinned_memory_pool().n_free_blocks())
        name = f"ours {on_gpu['placement']}, closed"
        session.verify(f"{name}: counted as held", "" if not any(held.values()) else f"{held}")
        growth = (max(used[1:]) - used[0]) / 2**20  # the first leaves what DALI and CUDA keep for the process
        session.figure(f"{name}: device memory above the first", growth, "MiB", at_most=0.0)
        session.figure(f"{name}: pinned blocks kept by CuPy", max(kept), "blocks", at_most=0.0)


CHECKS = (
    kernels,
    segment_kernels,
    reading_alone,
    host_bytes_sent,
    corpus_load,
    device_time_of_loader,
    next_beside_a_product,
    single_calls,
    memory_after_close,
    profile_of_the_trainers_thread,
)
