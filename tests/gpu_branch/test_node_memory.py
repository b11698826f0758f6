"""Memory that the processes of a node share: filled once, whoever dies, and gone with the last of them."""

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same

from dali_pipes import TokenLoader
from dali_pipes.errors import BackendError, CorpusReadError
from dali_pipes.placement import node_memory
from dali_pipes.placement.node_memory import NodeMemory, available_bytes, socket_name
from dali_pipes.rows.source import Source
from dali_pipes.runtime.locks import lock_number, unlock_number

SIZE = 3_000_017
WAIT_S = 60.0

CHILD = """
import os, sys, time
from pathlib import Path
import numpy as np
from dali_pipes.placement.node_memory import NodeMemory

folder, key, size, pause_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def fill(memory, advance):
    (folder / f"filling-{os.getpid()}").touch()
    for begin in range(0, size, 100_000):
        end = min(begin + 100_000, size)
        memory.allocate(begin, end)
        memory.array[begin:end] = np.arange(begin, end) % 251
        advance(end - begin)
        time.sleep(pause_s)

memory = NodeMemory(key, size, fill, "the corpus")
(folder / f"has-{os.getpid()}").touch()
while not (folder / "look").exists():
    time.sleep(0.01)
assert np.array_equal(memory.array, np.arange(size) % 251)
(folder / f"right-{os.getpid()}").touch()
time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float], subprocess.Popen[bytes]]]:
    """Starts a process that asks for the memory; how long it takes to fill a part is the argument."""
    children: list[subprocess.Popen[bytes]] = []
    key = f"{tmp_path} {os.getpid()}"

    def begin(pause_s: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CHILD, str(tmp_path), key, str(SIZE), str(pause_s)]
        children.append(subprocess.Popen(command))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.wait()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def named(folder: Path, what: str) -> set[int]:
    """Processes that have left a mark."""
    return {int(path.name.split("-")[1]) for path in folder.glob(f"{what}-*")}


def is_listening(key: str, size: int) -> bool:
    """Whether the name is taken."""
    return socket_name(key, size).replace("\0", "@") in Path("/proc/net/unix").read_text().split()


def left_files() -> list[str]:
    """Without the folder of decoded chunks, which other tests use."""
    return [entry.name for entry in os.scandir("/dev/shm") if "dali" in entry.name and not entry.is_dir()]


def test_it_is_filled_once_and_outlives_the_process_that_filled_it(
    tmp_path: Path, start: Callable[[float], subprocess.Popen[bytes]]
) -> None:
    key = f"{tmp_path} {os.getpid()}"
    children = {child.pid: child for child in (start(0.0) for _ in range(4))}
    until(lambda: named(tmp_path, "has") == set(children))
    (owner,) = named(tmp_path, "filling")
    assert is_listening(key, SIZE)
    os.kill(owner, signal.SIGKILL)
    children.pop(owner).wait()
    (tmp_path / "look").touch()
    until(lambda: named(tmp_path, "right") >= set(children))
    assert not is_listening(key, SIZE), "nobody needs the name any more"
    assert not left_files()
    for child in children.values():
        child.kill()
        child.wait()
    late = start(0.0)
    until(lambda: late.pid in named(tmp_path, "right"))
    assert named(tmp_path, "filling") == {owner, late.pid}, "nothing was left of the others' memory"


def test_another_process_takes_over_when_the_one_that_fills_it_is_killed(
    tmp_path: Path, start: Callable[[float], subprocess.Popen[bytes]]
) -> None:
    first = start(1000.0)
    until(lambda: named(tmp_path, "filling") == {first.pid})
    others = {child.pid for child in (start(0.0) for _ in range(3))}
    time.sleep(0.3)
    assert not named(tmp_path, "has"), "they wait for the first one"
    first.kill()
    first.wait()
    until(lambda: named(tmp_path, "has") == others)
    (tmp_path / "look").touch()
    until(lambda: named(tmp_path, "right") == others)
    assert len(named(tmp_path, "filling") & others) == 1


def fill_with(value: int) -> Callable[[NodeMemory, Callable[[int], None]], None]:
    def fill(memory: NodeMemory, advance: Callable[[int], None]) -> None:
        memory.allocate(0, memory.size)
        memory.array[:] = value
        advance(memory.size)

    return fill


def test_it_is_shared_within_a_process_and_by_its_key(tmp_path: Path) -> None:
    one = NodeMemory(f"{tmp_path} a", 5000, fill_with(1), "the corpus")
    same = NodeMemory(f"{tmp_path} a", 5000, fill_with(2), "the corpus")
    other = NodeMemory(f"{tmp_path} b", 5000, fill_with(3), "the corpus")
    one.array[7] = 9
    assert (same.array[7], same.array[8], other.array[7]) == (9, 1, 3)
    view = one.array[:10]
    one.close()
    one.close()
    again = NodeMemory(f"{tmp_path} a", 5000, fill_with(4), "the corpus")
    assert (view[7], same.array[7], again.array[7]) == (9, 9, 4), "closing frees the name, not what others have"
    for memory in (same, other, again):
        memory.close()


def memories_and_sockets() -> int:
    """Descriptors of these kinds; files of other tests in this process come and go."""
    gc.collect()
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            kinds.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(kind.startswith(("/memfd:", "socket:")) for kind in kinds)


def test_what_fails_while_it_is_filled_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(memory: NodeMemory, advance: Callable[[int], None]) -> None:
        raise OSError("the disk is gone")

    descriptors = memories_and_sockets()
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            NodeMemory(f"{tmp_path}", 5000, fail, "the corpus")
    until(lambda: memories_and_sockets() <= descriptors)
    assert not is_listening(f"{tmp_path}", 5000)
    memory = NodeMemory(f"{tmp_path}", 5000, fill_with(1), "the corpus")
    memory.close()
    del memory
    until(lambda: memories_and_sockets() <= descriptors)


def test_too_little_memory_is_an_error_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available, why = available_bytes()
    assert 0 < available < 1 << 50
    assert why
    with pytest.raises(BackendError, match=r"1,125,899,906,842,624 bytes.* available .*placement = \"host\""):
        NodeMemory(f"{tmp_path}", 1 << 50, fill_with(1), "the corpus")

    def no_room(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(BackendError, match=r"5,000 bytes.* available"):
        NodeMemory(f"{tmp_path}", 5000, fill_with(1), "the corpus")


def test_a_process_that_does_not_answer_is_named(
    tmp_path: Path, start: Callable[[float], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a debugger has stopped."""
    monkeypatch.setattr(node_memory, "ANSWER_S", 0.5)
    first = start(1000.0)
    until(lambda: named(tmp_path, "filling") == {first.pid})
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(BackendError, match=f"the corpus: process {first.pid:,}.* not answered"):
        NodeMemory(f"{tmp_path} {os.getpid()}", SIZE, fill_with(1), "the corpus")


def test_a_forked_child_neither_keeps_the_name_nor_answers(tmp_path: Path) -> None:
    memory = NodeMemory(f"{tmp_path}", 5000, fill_with(1), "the corpus")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.pause()
        os._exit(0)
    try:
        memory.close()
        again = NodeMemory(f"{tmp_path}", 5000, fill_with(2), "the corpus")
        assert again.array[0] == 2
        again.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_name_that_another_process_took_without_listening_is_an_error(tmp_path: Path) -> None:
    key = f"{tmp_path} {os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(socket_name(key, 4096))
        with pytest.raises(BackendError, match=socket_name(key, 4096)[1:]):
            NodeMemory(key, 4096, lambda memory, advance: None, "the corpus", answer_s=0.2)


def test_memory_of_another_user_is_refused_and_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of any user may take the name, and may connect to it."""
    key, of_user = f"{tmp_path} {os.getpid()}", node_memory._peer
    memory = NodeMemory(key, 4096, lambda memory, advance: None, "the corpus")
    monkeypatch.setattr(node_memory, "_peer", lambda connection: (*of_user(connection)[:1], os.getuid() + 1, 0))
    with pytest.raises(BackendError, match=f"{os.getuid() + 1:,}"):
        NodeMemory(key, 4096, lambda memory, advance: None, "the corpus")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(socket_name(key, 4096))
        assert socket.recv_fds(connection, 8, 1)[:2] == (b"", [])
    memory.close()


def test_a_python_built_for_an_old_libc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of conda and uv, on a system that has what they lack."""
    for name in ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"):
        monkeypatch.delattr(os, name, raising=False)
    for name in ("F_OFD_SETLK", "F_ADD_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW"):
        monkeypatch.delattr(fcntl, name, raising=False)
    memory = NodeMemory(str(tmp_path), 4096, lambda memory, advance: None, "the corpus")
    held = lock_number(memory.path, 3)
    assert held is not None
    with pytest.raises(BlockingIOError):
        lock_number(memory.path, 3)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(memory.path, 0)
    unlock_number(held)
    memory.close()


def test_a_system_without_memfd_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(OSError, match="memfd_create"):
        NodeMemory(str(tmp_path), 4096, lambda memory, advance: None, "the corpus")


@pytest.mark.parametrize("masked", [False, True])
def test_ranks_of_a_node_read_the_corpus_once(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    masked: bool,
) -> None:
    from dali_pipes.placement import pinned

    corpus = counting(600)
    if masked:
        np.ones(600, np.uint8).tofile(f"{corpus.files[0]}.loss")
    loads: list[int] = []
    real = pinned.load_span

    def load_span(*arguments: Any, **options: Any) -> None:
        loads.append(len(loads))
        real(*arguments, **options)

    monkeypatch.setattr(pinned, "load_span", load_span)
    monkeypatch.setattr(pinned, "LOAD_CHUNK_BYTES", 64)
    settings: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "batch_size": 3, "seq_len": 4}
    settings |= {"device": "cuda", "placement": "pinned", "world_size": 2}
    with TokenLoader(**settings, rank=0) as first, TokenLoader(**settings, rank=1) as second:
        assert len(loads) == 1 + masked
        assert len(late_gpu.registered) == 2, "each rank locks it for its own device"
        for rank, loader in enumerate((first, second)):
            assert loader.stats().memory.pinned_bytes > 2400
            expected = epoch_batches(corpus.tokens, batch_size=3, seq_len=4, rank=rank, world_size=2)
            assert all_same(loader, expected)
    assert late_gpu.registered == {}


def test_a_limit_on_locked_memory_is_an_error_with_the_sizes(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any]
) -> None:
    late_gpu.lock_limit = 100
    with pytest.raises(BackendError, match=r"202 bytes.*page-locked for cuda:0.*RLIMIT_MEMLOCK is .*\"host\""):
        TokenLoader(**settings, device="cuda", placement="pinned")
    late_gpu.lock_limit, late_gpu.device_offset = 1 << 30, 4096
    with pytest.raises(BackendError, match=r"cuda:0 cannot read host memory at its own addresses"):
        TokenLoader(**settings, device="cuda", placement="pinned")
    assert late_gpu.registered == {}
    late_gpu.device_offset = 0
    TokenLoader(**settings, device="cuda", placement="pinned").close()
    assert late_gpu.registered == {}


def test_auto_never_chooses_it(settings: dict[str, Any]) -> None:
    for capacity in (2019, 10**6, 10**9):
        with (
            gpu_stand_in.installed(capacity=capacity),
            TokenLoader(**settings, device="cuda", batches_per_run=1) as loader,
        ):
            assert loader.stats().placement in ("host", "device")


def test_a_read_that_fails_ends_the_loading(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not been read is not read any more."""
    from dali_pipes.placement import pinned

    corpus = counting(600)
    calls: list[int] = []

    def read_span(self: Any, begin: int, tokens: Any, *, of_loss_mask: bool = False) -> None:
        calls.append(begin)
        if begin == 0:
            raise CorpusReadError("shard_000.bin: the disk is gone")
        time.sleep(0.01)

    monkeypatch.setattr(Source, "read_span", read_span)
    monkeypatch.setattr(pinned, "LOAD_CHUNK_BYTES", 4)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    settings: dict[str, Any] = {"corpus": corpus.pattern, "dtype": "uint32", "batch_size": 3, "seq_len": 4}
    with pytest.raises(CorpusReadError, match="the disk is gone"):
        TokenLoader(**settings, device="cuda", placement="pinned")
    assert len(calls) < 600
    assert late_gpu.registered == {}
