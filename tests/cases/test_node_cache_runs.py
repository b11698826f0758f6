"""Loaders with the cache of the node: the same batches and states, whatever is kept, shared, damaged or killed."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer
from table_files import list_array, table_of, write_parquet
from test_samples import CASES

from dali_pipes import TokenLoader
from dali_pipes.corpus import block_reads
from dali_pipes.engine import node_caching
from dali_pipes.errors import ConfigError
from dali_pipes.rows import make
from dali_pipes.storage.live_jobs import live_jobs

BLOCK = 512
T = 16
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "seq_len": T,
    "device": "cpu",
    "seed": 3,
    "quiet": True,
    "order": "blocks",
    "shuffle_window": 3,
    "batches_per_run": 4,
    "num_threads": 2,
    "prefetch_queue_depth": 2,
}
FEW = ("megatron/gpt2_text_document", "parquet/tokens_list_i32.parquet")
"""Samples of the quick tests; the others are slow together."""
SAMPLES: list[tuple[list[str], str | None]] = [
    *((names, dtype) for names, _, _, dtype, *_ in CASES),
    (["mds/tokens_u16"], None),
    (["mds/concat_bytes_i64"], "int64"),
    (["litdata/gpt2_numpy_u16"], None),
    (["litdata/gpt2_torch_i32/index.json"], None),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "BLOCK_TOKENS", BLOCK)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm, so that tests do not share it."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(node_caching, "SHARED_MEMORY", folder)
    return folder


def batches_of(loader: TokenLoader, epochs: int = 2) -> list[dict[str, Any]]:
    return [{name: value.numpy().copy() for name, value in batch.items()} for _ in range(epochs) for batch in loader]


def delivered(paths: Any, epochs: int = 2, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Batches, the state after them, and what the cache says."""
    given = {**SETTINGS, **settings}
    with TokenLoader(paths, **given) if paths is not None else TokenLoader(**given) as loader:
        found = batches_of(loader, epochs)
        return found, loader.state_dict(), loader.stats().cache


def check_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(ours) == len(expected) > 0
    for one, other in zip(ours, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in other)


def flat(path: Path, count: int, seed: int = 0) -> Path:
    np.random.default_rng(seed).integers(1, 60_000, count).astype(np.uint16).tofile(path)
    return path


def parquet(path: Path, documents: int = 60, row_group_size: int = 10) -> Path:
    draw = np.random.default_rng(1)
    lists = [draw.integers(0, 1000, draw.integers(1, 80)).tolist() for _ in range(documents)]
    write_parquet(path, table_of([list_array(lists)]), row_group_size=row_group_size)
    return path


@pytest.mark.needs("obstore")
@pytest.mark.parametrize(
    ("names", "dtype"),
    [pytest.param(*one, marks=() if one[0][0] in FEW else pytest.mark.slow) for one in SAMPLES],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_format_through_a_faulty_server(samples: Path, tmp_path: Path, names: list[str], dtype: Any) -> None:
    chance = random.Random(1)
    faults = ["short", "reset", "whole"]
    settings: dict[str, Any] = {"dtype": dtype, "shuffle_window": 2, "epochs": 1}
    expected, state, _ = delivered([str(samples / name) for name in names], **settings)
    with RangeServer.of_folder(samples) as server:
        server.fault = lambda request: chance.choice(faults) if chance.random() < 0.1 else None
        remote = {**settings, "cache_dir": tmp_path / "cache", "read_retries": 9}
        ours, own_state, stats = delivered([f"{server.url}/{name}" for name in names], **remote)
    check_same(ours, expected)
    assert own_state == state
    assert stats.misses > 0
    assert stats.fetched_bytes >= stats.all_bytes * 0.5
    assert (stats.damaged, stats.evictions) == (0, 0)


KINDS: dict[str, dict[str, Any]] = {
    "windows": {},
    "windows that overlap": {"stride": 5},
    "a random offset": {"random_offset": True, "stride": 12},
    "in order": {"shuffle": False},
    "packed": {"rows": "pack", "window_documents": 20, "outputs": ("input_ids", "labels", "segment_ids")},
    "padded": {"rows": "pad", "length_buckets": (4, 8)},
    "copies": {"rows": "pack", "window_documents": 20, "keep": "keep.npy"},
    "copies of few": {"rows": "pad", "keep": "few.npy"},
    "several labels": {"mtp": 3},
    "validation": {"split": "validation", "validation_fraction": 0.3, "drop_last": False},
    "what comes before rows": {"objective": [{"kind": "goldfish", "h": 5, "k": 3}]},
    "growing": {"seq_len": [[0, 4], [800, 8]], "order_len": 8, "global_batch": 4},
    "shares of a mixture": {
        "mixture": {"a": {"weight": 0.7, "share": 0.5}, "b": {"weight": 0.3, "rows": "pack"}},
        "total_rows": 300,
        "window_documents": 20,
    },
}


FEW_KINDS = [
    ("windows", "little"),
    ("what comes before rows", "all"),
    ("a random offset", "all"),
    ("packed", "all"),
    ("copies", "little"),
    ("copies of few", "all"),
    ("shares of a mixture", "all"),
]


def test_a_block_holds_what_comes_before_its_first_row(tmp_path: Path) -> None:
    """What goldfish hashes there does not take the whole block before: with room for two, each is fetched once."""
    path = str(flat(tmp_path / "a.bin", 6000))
    common: dict[str, Any] = {"shuffle_window": 1, "num_threads": 1, "batches_per_run": 1, "epochs": 1, "eos_id": 0}
    for objective in ([], [{"kind": "goldfish", "h": 5}]):
        room: dict[str, Any] = {
            "cache_dir": str(tmp_path / f"cache {len(objective)}"),
            "cache_bytes": 2500,
            "objective": objective,
        }
        _, _, stats = delivered(path, **common, **room)
        assert stats.evictions
        assert stats.fetched_bytes < 1.25 * stats.all_bytes


@pytest.mark.parametrize(
    ("kind", "room"),
    [
        pytest.param(kind, room, marks=() if (kind, room) in FEW_KINDS else pytest.mark.slow)
        for kind in KINDS
        for room in ("all", "little")
    ],
)
def test_every_kind_of_rows(tmp_path: Path, kind: str, room: str) -> None:
    ids = np.fromfile(flat(tmp_path / "a.bin", 6000), np.uint16)
    ids[np.random.default_rng(5).random(len(ids)) < 0.05] = 0
    ids[:2501].tofile(tmp_path / "a.bin")
    ids[2501:].tofile(tmp_path / "b.bin")
    (ids[:2501] % 3 > 0).astype(np.uint8).tofile(tmp_path / "a.bin.loss")
    (ids[2501:] % 3 > 0).astype(np.uint8).tofile(tmp_path / "b.bin.loss")
    paths: Any = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    settings = {"eos_id": 0, **KINDS[kind]}
    if "keep" in settings:
        copies = np.arange(np.count_nonzero(ids == 0) + (ids[-1] != 0)) % 4
        np.save(tmp_path / "keep.npy", copies)
        np.save(tmp_path / "few.npy", np.where(np.arange(len(copies)) % 30 == 7, 60, 0))
        settings["keep"] = str(tmp_path / settings["keep"])
    if "mixture" in settings:
        sources = {name: {**one, "corpus": str(tmp_path / f"{name}.bin")} for name, one in settings["mixture"].items()}
        paths, settings = None, {**settings, "mixture": sources}
    expected, state, _ = delivered(paths, **settings)
    cached = {**settings, "cache_dir": str(tmp_path / "cache"), "cache_bytes": 10**8 if room == "all" else 5000}
    ours, own_state, stats = delivered(paths, **cached)
    check_same(ours, expected)
    assert own_state == state
    assert stats.hits > 0
    assert (stats.num_bytes <= 5000) or room == "all"
    again, _, after = delivered(paths, **cached)  # with what is there
    check_same(again, expected)
    assert after.fetched_bytes == 0 or room == "little"


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_decoded_chunks_are_shared(tmp_path: Path, memory: Path, where: str) -> None:
    path = parquet(tmp_path / "a.parquet")
    given: dict[str, Any] = {"order": "rows", "shuffle_window": 512}
    expected, state, alone = delivered(str(path), **given)
    place = {"cache": "node"} if where == "memory" else {"cache_dir": str(tmp_path / "cache")}
    with TokenLoader(str(path), **{**SETTINGS, **given, **place}) as loader:
        check_same(batches_of(loader), expected)
        assert loader.state_dict() == state
        with TokenLoader(str(path), **{**SETTINGS, **given, **place}) as other:
            check_same(batches_of(other), expected)
            ours, theirs = loader.stats().cache, other.stats().cache
    assert ours is not None
    assert theirs is not None
    assert (ours.misses, theirs.misses, ours.num_bytes) == (alone.misses, 0, alone.num_bytes)
    assert ours.folder.startswith(str(memory)) == (where == "memory")
    assert len(list(tmp_path.rglob("*.ids"))) == (0 if where == "memory" else 6)


def test_without_shared_memory_each_process_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = parquet(tmp_path / "a.parquet")
    (tmp_path / "none").write_bytes(b"")
    monkeypatch.setattr(node_caching, "SHARED_MEMORY", tmp_path / "none")
    expected, _, alone = delivered(str(path))
    ours, _, stats = delivered(str(path), cache="node")
    check_same(ours, expected)
    assert (stats.misses, stats.folder) == (alone.misses, "")
    assert str(tmp_path / "none") in capsys.readouterr().err


@pytest.mark.needs("obstore")
def test_every_byte_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks span files; what is read along are the headers at the start, and a label for each block."""
    monkeypatch.setattr(block_reads, "_SPARE_PART", 10**6)  # nothing to spare
    files = {
        f"{name}.bin": flat(tmp_path / f"{name}.bin", count).read_bytes() for name, count in (("a", 7001), ("b", 9000))
    }
    with RangeServer(files) as server:
        paths = [f"{server.url}/{name}" for name in files]
        with TokenLoader(paths, **{**SETTINGS, "cache_dir": str(tmp_path / "cache")}) as loader:
            server.counts()
            batches_of(loader, 3)
            counted, stats = server.counts(), loader.stats().cache
    assert stats is not None
    assert counted["bytes"] == stats.fetched_bytes
    assert 32_000 <= counted["bytes"] <= 32_002 + 2 * 32


@pytest.mark.needs("obstore")
def test_a_replaced_object_never_serves_old_rows(tmp_path: Path) -> None:
    old, new = (flat(tmp_path / f"{seed}.bin", 3000, seed) for seed in (1, 2))
    with RangeServer({"a.bin": old.read_bytes()}) as server:
        cached: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
        check_same(delivered(f"{server.url}/a.bin", **cached)[0], delivered(str(old))[0])
        server.files["a.bin"] = new.read_bytes()
        check_same(delivered(f"{server.url}/a.bin", **cached)[0], delivered(str(new))[0])
        server.files["a.bin"] = old.read_bytes()
        ours, _, stats = delivered(f"{server.url}/a.bin", **cached)
        check_same(ours, delivered(str(old))[0])
        assert stats.misses == 0  # its blocks are still there


def test_a_local_file_that_is_rewritten_has_other_entries(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.bin", 3000, 1)
    cached: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    delivered(str(path), **cached)
    ids = np.fromfile(path, np.uint16)
    ids[1500] += 1  # where the fingerprint does not look
    ids.tofile(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    check_same(delivered(str(path), **cached)[0], delivered(str(path))[0])


def test_damaged_entries_are_fetched_again(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.bin", 6000)
    cached: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    expected, _, first = delivered(str(path), **cached)
    draw = random.Random(2)
    files = sorted((tmp_path / "cache").glob("*.ids"))
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        if number % 3 == 0:
            data[draw.randrange(32, len(data))] ^= 4
        file.write_bytes(data[: draw.randrange(len(data))] if number % 3 == 1 else data)
    ours, _, stats = delivered(str(path), **cached)
    check_same(ours, expected)
    damaged = len(files) - len(files[2::3])
    assert (stats.damaged, stats.misses) == (damaged, damaged)
    assert stats.num_bytes == first.num_bytes


def test_where_a_run_stands_is_told_to_others(tmp_path: Path) -> None:
    """Of a mixture, each source by its own places; a resumed run tells where it goes on."""
    for name in ("a", "b"):
        flat(tmp_path / f"{name}.bin", 9000, ord(name))
    mixture = {name: {"corpus": str(tmp_path / f"{name}.bin"), "weight": 0.5} for name in ("a", "b")}
    settings = {**SETTINGS, "mixture": mixture, "total_rows": 800, "cache_dir": str(tmp_path / "cache")}

    def places() -> list[int | None]:
        orders = [order for job in live_jobs(tmp_path / "cache") for order in job["orders"]]
        return [order.get("place") for order in orders]

    with TokenLoader(**settings) as loader:
        assert places() == [None, None]
        iterator = iter(loader)
        for _ in range(150):
            next(iterator)
        state = loader.state_dict()
        told = places()
        assert all(200 <= place <= 310 for place in told if place is not None), told
    assert places() == []
    with TokenLoader(**settings) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        assert all(place is not None and 290 <= place <= 310 for place in places()), places()


def test_two_jobs_with_different_budgets(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.bin", 6000)
    expected = [delivered(str(path), seed=seed)[0] for seed in (1, 2)]
    given = {**SETTINGS, "cache_dir": str(tmp_path / "cache")}
    with (
        TokenLoader(str(path), **{**given, "seed": 1, "cache_bytes": 3000}) as one,
        TokenLoader(str(path), **{**given, "seed": 2, "cache_bytes": 7000}) as two,
    ):
        found: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(2):
            for pair in zip(one, two, strict=True):
                for batch, batches in zip(pair, found, strict=True):
                    batches.append({name: value.numpy().copy() for name, value in batch.items()})
        for ours, wanted in zip(found, expected, strict=True):
            check_same(ours, wanted)
        stats = one.stats().cache
        assert stats is not None
        assert 3000 < stats.num_bytes <= 7000


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    path, folder = str(flat(tmp_path / "a.bin", 3000)), str(tmp_path / "cache")
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (
            {"cache_dir": folder, "order": "rows", "shuffle_window": 512},
            [folder, '"blocks"', "dali-pipes copy", "flat"],
        ),
        ({"cache_bytes": "1GB"}, ["cache_bytes = 1,000,000,000", "cache_dir"]),
        ({"cache_dir": "s3://bucket/cache"}, ["cache_dir", "s3://bucket/cache"]),
        ({"cache_dir": folder, "cache_bytes": "1 apple"}, ["cache_bytes", "1 apple", "50GB"]),
        ({"cache_dir": folder, "reads": "mapped"}, ["cache_dir", "mapped"]),
        ({"cache": "node", "eager": True}, ["cache", "node", "eager"]),
        ({"cache_dir": folder, "eager": True}, ["cache_dir", "eager"]),
    ]
    for settings, words in cases:
        with pytest.raises(ConfigError) as raised:
            TokenLoader(path, **{**SETTINGS, **settings}).close()
        assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_window_that_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(flat(tmp_path / "a.bin", 6000))
    with TokenLoader(path, **{**SETTINGS, "cache_dir": str(tmp_path / "cache"), "cache_bytes": 2500}):
        said = capsys.readouterr().err
    assert all(word in said for word in ("cache_bytes = 2,500", "3,072", "shuffle_window = 2 ")), said


# ---- real processes


_RANK = """
import json, sys, time
from dali_pipes import TokenLoader
from dali_pipes.corpus import block_reads
from dali_pipes.engine import node_caching
from dali_pipes.rows import make
from pathlib import Path

rank, world_size, path, shm, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
make.BLOCK_TOKENS, block_reads._SPARE_PART = 512, 10**6
node_caching.SHARED_MEMORY = Path(shm)
with TokenLoader(path, rank=rank, world_size=world_size, **json.loads(settings)) as loader:
    rows = [batch["input_ids"].tolist() for _ in range(2) for batch in loader]
    stats = loader.stats().cache
    Path(f"{rank}.done").touch()
    while sum(Path(f"{one}.done").exists() for one in range(world_size)) < world_size:
        time.sleep(0.01)
print(json.dumps([rows, stats.misses, stats.fetched_bytes, stats.num_bytes]))
"""


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        (2, "decoded"),
        pytest.param(2, "blocks", marks=pytest.mark.slow),
        pytest.param(8, "decoded", marks=pytest.mark.slow),
        pytest.param(8, "blocks", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_node_make_each_part_once(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, memory: Path, world_size: int, kind: str
) -> None:
    path = parquet(tmp_path / "a.parquet", 200) if kind == "decoded" else flat(tmp_path / "a.bin", 16_000)
    given = {**SETTINGS, "batch_size": 2}
    place = {"cache": "node"} if kind == "decoded" else {"cache_dir": str(tmp_path / "cache")}
    found = run_ranks(_RANK, world_size, path, memory, json.dumps({**given, **place}), forked=True)
    for rank, (rows, *_) in enumerate(found):
        expected, _, _ = delivered(str(path), **{**given, "rank": rank, "world_size": world_size})
        assert rows == [batch["input_ids"].tolist() for batch in expected]
    all_bytes = found[0][3]
    assert {one[3] for one in found} == {all_bytes}
    assert sum(one[2] for one in found) == all_bytes  # made once by any of them, and kept once
    chunks = 20 if kind == "decoded" else -(-(16_000 - 1) // T * T // BLOCK)
    assert sum(one[1] for one in found) == chunks
    assert len(list(memory.rglob("*.ids"))) == 0


_JOB = """
import json, sys
from dali_pipes import TokenLoader
from dali_pipes.rows import make

make.BLOCK_TOKENS = 512
with TokenLoader(sys.argv[1], **json.loads(sys.argv[2])) as loader:
    while True:
        for batch in loader:
            print(end=".", flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []

    def start(path: Path, settings: dict[str, Any]) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", textwrap.dedent(_JOB), str(path), json.dumps(settings)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.communicate()


@pytest.mark.slow
def test_kill_9_at_any_moment(
    tmp_path: Path, job: Callable[..., "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    """While entries are written, evicted and read; then another job delivers what it should, with the same folder."""
    path, draw = flat(tmp_path / "a.bin", 9000), random.Random(4)
    given = {**SETTINGS, "cache_dir": str(tmp_path / "cache"), "cache_bytes": 9000}
    expected, _, _ = delivered(str(path))
    for _ in range(8):
        running = job(path, given)
        assert running.stdout is not None
        assert running.stdout.read(1) == "."
        time.sleep(draw.random() * 0.1)
        running.send_signal(signal.SIGKILL)
        running.wait()
        for temporary in (tmp_path / "cache").glob("*.tmp"):
            os.utime(temporary, (0, 0))
        ours, _, stats = delivered(str(path), **given)
        check_same(ours, expected)
        assert stats.damaged == 0
        files = list((tmp_path / "cache").iterdir())
        assert sum(file.stat().st_size - 32 for file in files if file.suffix == ".ids") <= 9000
        assert {file.suffix for file in files} <= {".ids", ""}
    assert str(tmp_path / "cache") not in capsys.readouterr().err.replace("shuffle_window", "")


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "tokens.bin"
    np.arange(4 * BLOCK, dtype=np.uint16).tofile(corpus)
    with pytest.raises(ConfigError, match=r"cache_dir: .*tokens\.bin"):
        TokenLoader(corpus, **SETTINGS, cache_dir=corpus)
    capfd.readouterr()
    with TokenLoader(corpus, **SETTINGS, cache="node") as loader:
        assert loader.stats().cache is None
    said = capfd.readouterr().err
    assert 'cache = "node"' in said
    assert "cache_dir" in said
    with TokenLoader(corpus, **SETTINGS, decoded_cache_bytes="2KiB") as loader:
        assert loader.config.decoded_cache_bytes == 2048
    assert capfd.readouterr().err == ""
