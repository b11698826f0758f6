"""Memory that is filled once a node and shared by its processes, and that nobody has to clean up.

    first process    memfd ◀─ fill          listens at an abstract socket, whose name comes from a key of the content
    the others       connect ──▶ progress while it is filled, then the memfd's descriptor

Neither a memfd nor an abstract socket is a file: both are gone when the last process that has them ends, however it
ends. A memfd does not count towards the size of `/dev/shm`. If the first process ends before the memory is full, one
that waits for it takes its place; afterwards all have the memory, and nobody needs the first one.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import BackendError
from dali_pipes.runtime.progress import progress_bar

Bytes = npt.NDArray[np.uint8]
Advance = Callable[[int], None]

ANSWER_S = 30.0
"""Without a word from the process that fills the memory, which reports its progress several times a second."""
_PROGRESS_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PROGRESS = struct.Struct("<Q")
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 1033, 2, 4
"""As in Linux; Python lacks them, and `os.memfd_create`, where it was built for an old libc, as for conda and uv."""


class NodeMemory:
    """`size` bytes with the content that `key` stands for, the same memory in all processes of this user on the node.

    `array` is uint8 (size,) and must not be written to. Blocks until it is full, and shows the progress.

    fill:   writes all of the array, for which it allocates parts (`allocate`) before it writes to them, and reports the
            bytes done; called in one process of the node
    text:   what the memory holds, for messages and the progress bar
    answer_s:   how long to wait for a word from the process that fills it; None: ANSWER_S

    Raises `BackendError` with the sizes if there is too little memory, or if the process that fills it does not answer.
    """

    def __init__(
        self,
        key: str,
        size: int,
        fill: Callable[["NodeMemory", Advance], None],
        text: str,
        answer_s: float | None = None,
    ) -> None:
        self.size, self._text, self._answer_s = size, text, ANSWER_S if answer_s is None else answer_s
        self.array: Bytes
        self._server: _Server | None = None
        self._release: weakref.finalize[..., NodeMemory] | None = None
        name = socket_name(key, size)
        # Bounded: anyone may take the name without listening there, so that nobody can connect.
        for _ in range(max(2, round(self._answer_s / _PROGRESS_S))):
            listener = _listen(name)
            if listener is not None:
                self._fill(listener, fill)
                return
            descriptor = self._receive(name)
            if descriptor is not None:
                self._map(descriptor)
                return
            time.sleep(_PROGRESS_S)  # the process that was to fill it has ended
        raise BackendError(
            f"{self._text}: a process has taken the socket @{name[1:]} and does not answer; end that process, or use "
            "another placement"
        )

    def allocate(self, begin: int, end: int) -> None:
        """Take the memory of bytes `begin` to `end`. What is missing is an error here, and would be SIGBUS later."""
        try:
            os.posix_fallocate(self._descriptor, begin, end - begin)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise self._too_little(*available_bytes()) from error

    @property
    def path(self) -> Path:
        """By which this process can open the memory anew, for locks of parts of it; until `close`."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def close(self) -> None:
        """Let go of the memory; other processes keep it. Arrays over it stay valid. Idempotent."""
        self.array = np.empty(0, np.uint8)
        if self._release is not None:
            self._release()
        elif self._server is not None:  # the memory could not be had
            self._server.stop()

    def _fill(self, listener: socket.socket, fill: Callable[["NodeMemory", Advance], None]) -> None:
        self._server = server = _Server(listener)
        try:
            available, why = available_bytes()
            if self.size > available:
                raise self._too_little(available, why)
            server.descriptor = _create_memfd()
            os.ftruncate(server.descriptor, self.size)
            fcntl.fcntl(server.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._map(os.dup(server.descriptor))
            with progress_bar(f"{self._text} to host memory", self.size, in_bytes=True) as advance:

                def done(count: int) -> None:
                    server.done += count
                    advance(count)

                fill(self, done)
            server.is_full = True
        except BaseException:
            self.close()
            raise

    def _map(self, descriptor: int) -> None:
        self._descriptor, self._release = descriptor, weakref.finalize(self, _let_go, descriptor, self._server)
        self._release.atexit = False
        mapped = mmap.mmap(descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.array = np.frombuffer(mapped, np.uint8)

    def _receive(self, name: str) -> int | None:
        """The descriptor, from the process that fills the memory; None if it has ended. Blocks until it is full."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(self._answer_s)
            owner = "the process that loads it"
            try:
                connection.connect(name)
                process, user, _ = _peer(connection)
                owner = f"process {process:,}, which loads it,"
                if user != os.getuid():
                    raise BackendError(
                        f"{self._text}: {owner} belongs to user {user:,}, and this process to user {os.getuid():,}; "
                        "end that process, or use another placement"
                    )
                text = f"{self._text} to host memory, by process {process}"
                with progress_bar(text, self.size, in_bytes=True) as advance:
                    before = 0
                    while True:
                        message, descriptors, _, _ = socket.recv_fds(connection, _PROGRESS.size, 1)
                        if descriptors:
                            return descriptors[0]
                        if not message:
                            return None
                        (done,) = _PROGRESS.unpack(message)
                        advance(done - before)
                        before = done
            except TimeoutError as error:
                raise BackendError(
                    f"{self._text}: {owner} has not answered for {self._answer_s:.0f} s; end that process, or use "
                    "another placement"
                ) from error
            except (ConnectionError, FileNotFoundError):
                return None

    def _too_little(self, available: int, why: str) -> BackendError:
        return BackendError(
            f"{self._text} takes {_gib(self.size)} ({self.size:,} bytes) of host memory, but {_gib(available)} "
            f'({available:,} bytes) are available ({why}); use placement = "host", or a machine with more memory'
        )


def _let_go(descriptor: int, server: "_Server | None") -> None:
    os.close(descriptor)
    if server is not None:
        server.stop()


class _Server:
    """Tells processes that connect how far the memory is, and gives them its descriptor when it is full."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.descriptor, self.done, self.is_full = -1, 0, False
        self._stopped = False
        _servers.add(self)
        threading.Thread(target=self._serve, name="dali_pipes-node-memory", daemon=True).start()

    def stop(self) -> None:
        """Connections end; the name is free."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def leave_to_parent(self) -> None:
        """In a forked child, where this thread does not exist: nobody must wait for an answer from it."""
        self._listener.close()

    def _serve(self) -> None:
        waiting: list[socket.socket] = []
        while not self._stopped:
            with contextlib.suppress(OSError):  # a timeout, or the end
                self._listener.settimeout(None if self.is_full and not waiting else _PROGRESS_S)
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if _peer(connection)[1] == os.getuid():
                    waiting.append(connection)
                else:
                    connection.close()
            waiting = [connection for connection in waiting if not self._is_done_with(connection)]
        for connection in waiting:
            connection.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _is_done_with(self, connection: socket.socket) -> bool:
        is_full = self.is_full
        try:
            if is_full:
                socket.send_fds(connection, [b"full"], [self.descriptor])
            else:
                connection.send(_PROGRESS.pack(self.done))
                return False
        except BlockingIOError:  # it has been stopped, and may go on
            return False
        except OSError:
            pass
        connection.close()
        return True


_servers: "weakref.WeakSet[_Server]" = weakref.WeakSet()


def _leave_servers_to_parent() -> None:
    for server in list(_servers):
        server.leave_to_parent()


os.register_at_fork(after_in_child=_leave_servers_to_parent)


def socket_name(key: str, size: int) -> str:
    """The abstract name at which the process that fills the memory listens."""
    digest = hashlib.sha256(f"{os.getuid()} {size} {key}".encode()).hexdigest()
    return f"\0dali_pipes-{digest[:32]}"


def _create_memfd() -> int:
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = -1 if create is None else int(create(b"dali_pipes", _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        number = errno.ENOSYS if create is None else ctypes.get_errno()
        raise OSError(number, f"memfd_create: {os.strerror(number)}")
    return descriptor


def _listen(name: str) -> socket.socket | None:
    """A socket that listens at an abstract name; None if another process does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def _peer(connection: socket.socket) -> Any:
    """Process, user and group at the other end."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def available_bytes() -> tuple[int, str]:
    """Memory that this process may still take, and what limits it: the machine, or a control group (version 2)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    least, why = 1024 * int(lines["MemAvailable"].split()[0]), "MemAvailable of the machine"
    with contextlib.suppress(OSError, ValueError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        path = Path("/sys/fs/cgroup") / next(line[3:] for line in groups if line.startswith("0::")).lstrip("/")
        for group in (path, *path.parents):
            limit_file = group / "memory.max"
            if limit_file.exists() and (limit := limit_file.read_text().strip()) != "max":
                parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(parts["inactive_file"])
                if int(limit) - used < least:
                    least, why = max(0, int(limit) - used), f"memory.max = {int(limit):,} of control group {group}"
    return least, why


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
