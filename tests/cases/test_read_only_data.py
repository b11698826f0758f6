"""Shared archives are read-only, and so may be everything else; nothing is written, and nothing warns."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import hashlib, json, os, sys, warnings
from pathlib import Path
import numpy as np
import torch
import nvidia.dali.fn, nvidia.dali.types, nvidia.dali.pipeline
from dali_pipes import TokenLoader
from oracle import epoch_batches, same

base = Path(sys.argv[3])
home, data = base / "home", base / "data"
tokens = np.arange(2000) % 250
formats = {
    "flat": lambda folder: [part.astype(np.uint16).tofile(folder / f"{n}.bin") for n, part in enumerate(halves)],
    "npy": lambda folder: [np.save(folder / f"{n}.npy", part.astype(np.uint32)) for n, part in enumerate(halves)],
    "llmc": lambda folder: [write_llmc(folder / f"{n}.bin", part) for n, part in enumerate(halves)],
    "megatron": lambda folder: [write_megatron(folder / f"{n}", part) for n, part in enumerate(halves)],
}
halves = tokens[:900], tokens[900:]


def write_llmc(path, part):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(part)
    path.write_bytes(header.tobytes() + part.astype(np.uint16).tobytes())


def write_megatron(prefix, part):
    lengths = np.full(len(part) // 100, 100, np.int32)
    pointers = np.arange(len(lengths), dtype=np.int64) * 400
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    counts = np.array([len(lengths), len(documents)], np.uint64)
    head = b"MMIDIDX\\0\\0" + np.uint64(1).tobytes() + bytes([4]) + counts.tobytes()
    arrays = lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    prefix.with_suffix(".idx").write_bytes(head + arrays)
    prefix.with_suffix(".bin").write_bytes(part.astype(np.int32).tobytes())


def snapshot():
    found = {}
    for path in sorted([data, home, *data.rglob("*"), *home.rglob("*")]):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else sorted(os.listdir(path))
        found[str(path)] = [content, path.stat().st_mtime_ns, path.stat().st_mode]
    return found


home.mkdir()
for name, write in formats.items():
    (data / name).mkdir(parents=True)
    write(data / name)
for path in [*data.rglob("*"), data, home]:
    path.chmod(0o555 if path.is_dir() else 0o444)
for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "TMPDIR"):
    os.environ[name] = str(home)
before = snapshot()

written = []
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def watch(event, arguments):
    # Root may write anywhere, so what is asked for counts, not what is granted.
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS:
        written.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "tempfile.mkstemp"):
        written.append(f"{event} {arguments}")


sys.addaudithook(watch)
if os.geteuid() == 0:
    os.chown(base, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path in (data / "flat" / "0.bin", home / "x"):
    try:
        path.open("ab")
    except PermissionError:
        continue
    raise AssertionError(f"{path} is not read-only for this user")
written.clear()

warnings.simplefilter("error")
outputs = ("input_ids", "labels", "row_ids")
report = {}
for name in formats:
    order = {"batch_size": 7, "seq_len": 8, "drop_last": False}
    common = dict(corpus=str(data / name), format=name, device="cpu", vocab_size=250, outputs=outputs)
    with TokenLoader(**common, **order) as loader:
        for epoch in range(2):
            batches = list(loader)
            expected = list(epoch_batches(tokens, epoch=epoch, **order))
            assert len(batches) == len(expected)
            assert all(same(got, want) for got, want in zip(batches, expected))
            for batch in batches:  # a trainer masks labels in place, and goes back to NumPy
                batch["labels"].masked_fill_(batch["labels"] == 3, -100)
                assert batch["input_ids"].numpy().flags.writeable
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        assert len(list(loader)) == len(expected)
        report[name] = len(batches)
print(json.dumps({"formats": report, "written": written, "unchanged": snapshot() == before}))
"""


@pytest.fixture(scope="module")
def report(run_ranks: Callable[..., list[Any]]) -> Iterator[Any]:
    base = Path(tempfile.mkdtemp(prefix="dali_pipes_read_only_"))  # pytest's folders are closed to other users
    try:
        yield run_ranks(SCRIPT, 1, base)[0]
    finally:
        for path in [base, *base.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(base)


def test_every_format_serves_whole_epochs(report: Any) -> None:
    """As a user who may write neither to the data nor to a home or cache folder; every warning an error."""
    assert report["formats"] == dict.fromkeys(("flat", "npy", "llmc", "megatron"), 36)


def test_nothing_is_opened_for_writing(report: Any) -> None:
    assert report["written"] == []


def test_files_and_folders_are_as_they_were(report: Any) -> None:
    """Content, times, modes, and no new file."""
    assert report["unchanged"] is True
