"""Decode a whole corpus into memory when it is opened, so that training decodes nothing."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted
from dali_pipes.storage.decoded_cache import ChunkCache

_CGROUPS = (  # limit, use, and statistics with the part that the kernel can reclaim
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
_RECLAIMABLE = ("file", "total_cache")


def decoded_bytes(files: Sequence[DataFile]) -> int:
    """Bytes of the ids in files that have to be decoded."""
    return sum(file.num_tokens * file.stored.itemsize for file in files if file.decode is not None)


def decode_all(files: Sequence[DataFile], cache: ChunkCache) -> None:
    """Put every chunk of `files` into `cache`, which is large enough. Blocks; prints the size on standard error.

    Raises ConfigError without enough memory, before anything is decoded, and what decoding raises.
    """
    needed = decoded_bytes(files)
    if not needed:
        return
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"eager: the decoded corpus needs {needed:,} bytes ({needed / 2**30:.3g} GiB), but {available:,} bytes "
            f"({available / 2**30:.3g} GiB) of memory are available. Set eager = False, which keeps at most "
            "decoded_cache_bytes of it in memory, or convert the corpus to a flat format."
        )
    print(f"dali_pipes: eager: decoding {counted(len(files), 'file')} into {needed:,} bytes of memory", file=sys.stderr)
    chunks = [
        (number, file.decode, int(chunk), int(count) * file.stored.itemsize)
        for number, file in enumerate(files)
        if file.decode is not None
        for chunk, count in file.extents.tolist()
    ]

    def decode(at: int) -> None:
        number, decode_chunk, chunk, _ = chunks[at]
        cache.get(number, chunk, decode_chunk)

    with ColumnScans("decoding the corpus") as scans:
        scans.for_chunks(decode, [size for _, _, _, size in chunks])


def available_bytes() -> int | None:
    """Memory that this process can still use, by the kernel and by its control group; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for limit, used, statistics in _CGROUPS:
        try:
            counts = dict(line.split() for line in Path(statistics).read_text().splitlines())
            reclaimable = max(int(counts.get(name, 0)) for name in _RECLAIMABLE)
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()) + reclaimable)
        except (OSError, ValueError):  # no such group, or "max": without a limit
            continue
    return max(0, min(found)) if found else None
