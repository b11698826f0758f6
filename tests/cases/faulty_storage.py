"""What scenarios of faulty storage begin with, behind `PREAMBLE`: files of several kinds, and mounts of their own."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

FILES = f"""
sys.path += [{str(TESTS)!r}, {str(TESTS / "corpus")!r}, {str(TESTS / "text")!r}]
import ctypes, io, contextlib
from table_files import list_array, table_of, write_arrow, write_parquet
from shard_files import write_mds
from dali_pipes import open_corpus
from dali_pipes.runtime import user_cache
from dali_pipes.documents import find_documents

IDS = np.arange(161, dtype=np.uint32)
KINDS = ("flat", "parquet", "arrow", "arrow zstd", "mds", "mds zstd")
KEPT_OPEN = ("flat", "arrow", "mds")  # read as they lie, through one descriptor; others are opened chunk by chunk

def make(kind, folder, ids=IDS):
    folder.mkdir()
    rows = np.split(ids, range(7, len(ids), 7))
    halves = [list_array([row.tolist() for row in part], "uint32") for part in (rows[:12], rows[12:])]
    if kind == "flat":
        ids.tofile(folder / "a.bin")
        return folder / "a.bin"
    if kind == "parquet":
        return write_parquet(folder / "a.parquet", table_of(halves), row_group_size=12)
    if kind.startswith("arrow"):
        return write_arrow(folder / "a.arrow", table_of(halves), kind[6:] or None)
    shards = [[dict(tokens=row) for row in part] for part in (rows[:12], rows[12:])]
    write_mds(folder, dict(tokens="ndarray:uint32"), shards, compression=[kind[4:] or None])
    return folder / ("shard.00001.mds" + ".zstd" * ("zstd" in kind))

def load_kind(kind, folder):
    dtype = "uint32" if kind == "flat" else None
    return load(str(folder), dtype=dtype, decoded_cache_bytes=0, num_threads=1, prefetch_queue_depth=1)

def rest(iterator):
    # Rows that were right, and the error if there is one.
    rows = []
    try:
        for batch in iterator:
            assert (batch["input_ids"] == 4 * batch["row_ids"][:, None] + torch.arange(4)).all(), batch
            rows += batch["row_ids"].tolist()
    except CorpusReadError as error:
        return rows, str(error)
    return rows, None

@contextlib.contextmanager
def open_folder():
    # One that other users may enter, which those of pytest are not.
    import shutil, tempfile
    folder = Path(tempfile.mkdtemp(prefix="dali_pipes_faults_"))
    folder.chmod(0o755)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)

def in_child(work, user=None):
    # How a child ended that did it, as another user if this one is root, whom modes do not bind.
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if user is not None and os.geteuid() == 0:
                os.setgroups([]), os.setgid(user), os.setuid(user)
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

LIBC = ctypes.CDLL(None, use_errno=True)

def private_mounts():
    # For this thread and those it starts.
    if LIBC.unshare(0x20000) or LIBC.mount(None, b"/", None, 0x44000, None):
        print("skip: no mounts:", os.strerror(ctypes.get_errno()))
        sys.exit(0)

def mount_tmpfs(path, size):
    Path(path).mkdir(exist_ok=True)
    done = LIBC.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={{size}},mode=777".encode())
    assert done == 0, os.strerror(ctypes.get_errno())

def resize_tmpfs(path, size):
    assert LIBC.mount(None, str(path).encode(), None, 32, f"size={{size}}".encode()) == 0

def unmount(path):
    assert LIBC.umount2(str(path).encode(), 2) == 0, os.strerror(ctypes.get_errno())  # lazily, as in use

def fill(path):
    # To the last byte.
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
"""
