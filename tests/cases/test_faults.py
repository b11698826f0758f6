"""Storage that goes away, is full or forbidden, signals, and starting processes at any moment.

Right data or one clear error, in a process of its own each: never a crash, a hang, or anything left behind.
"""

from collections.abc import Callable
from typing import Any

import pytest
from faulty_storage import FILES
from scenarios import PREAMBLE, without_end

# What is read through a descriptor that is open goes on as it was; what is opened again is missed and named.
LOST = """
    for kind in KINDS:
        folder = Path(kind)
        path = make(kind, folder)
        loader = load_kind(kind, folder)
        iterator = iter(loader)
        first, second = next(iterator), next(iterator)
        {fault}
        rows, error = rest(iterator)
        assert rows == list(range(4, 4 + len(rows))), (kind, rows)
        if kind in KEPT_OPEN and {goes_on}:
            # The second shard of a set may not be open yet.
            assert (error is None and len(rows) == 36) or (kind == "mds" and path.name in error), (kind, rows, error)
        else:
            assert error is not None and path.name in error, (kind, rows, error)
            assert loader.state_dict()["rows"] == 4 + len(rows), kind
        loader.close()
    print("done")
"""
LOST_STORAGE = {
    "deleted": LOST.format(fault="path.unlink()", goes_on=True),
    "replaced": LOST.format(
        fault="""
        content = path.read_bytes()
        Path("new").write_bytes(bytes(255 - byte for byte in content))
        Path("new").rename(path)
        """.strip(),
        goes_on=True,
    ),
    "truncated": LOST.format(fault="os.truncate(path, 1)", goes_on=False),
    "the folder renamed": LOST.format(fault='folder.rename(kind + " gone")', goes_on=True),
    "the file system unmounted": "    private_mounts()\n    mount_tmpfs('disk', '4m')\n"
    + LOST.format(fault='unmount("disk"); mount_tmpfs("disk", "4m")', goes_on=True).replace(
        "Path(kind)", 'Path("disk") / kind'
    ),
    "the folder made unreadable": """
    with open_folder() as base:
        os.environ["DALI_PIPES_CACHE"] = "/proc/no cache"
        for kind in KINDS:
            make(kind, Path(kind))
        def work():
            for kind in KINDS:
                loader = load_kind(kind, Path(kind))
                iterator = iter(loader)
                next(iterator), next(iterator)
                opened.write(".")
                opened.flush()
                assert closed.read(1)
                rows, error = rest(iterator)
                assert rows == list(range(4, 4 + len(rows))), (kind, rows)
                if error is None:
                    assert kind in KEPT_OPEN and len(rows) == 36, (kind, rows)
                else:
                    assert "/a." in error or "/shard." in error or "index" in error, error
                    assert "Permission denied" in error, error
                loader.close()
        if os.geteuid():
            print("skip: needs root, to read as another user what root makes unreadable")
            sys.exit()
        (seen, opened), (closed, close) = [[open(end, "rw"[at]) for at, end in enumerate(os.pipe())] for _ in range(2)]
        def forbid():
            for kind in KINDS:
                assert seen.read(1)
                Path(kind).chmod(0)
                close.write(".")
                close.flush()
        threading.Thread(target=forbid, daemon=True).start()
        assert in_child(work, user=65534) == 0
    print("done")
    """,
    "no file of data is mapped": """
    for kind in KINDS:
        folder = Path(kind).absolute()
        make(kind, folder)
        loader = load_kind(kind, folder)
        iterator = iter(loader)
        next(iterator)
        maps = Path("/proc/self/maps").read_text()
        assert str(folder) not in maps, maps
        assert rest(iterator) == (list(range(2, 40)), None), kind
        assert str(folder) not in Path("/proc/self/maps").read_text()
    print("done")
    """,
}

JOB = """
def make_job(folder):
    # Documents of 3 ids, the last of which is 9: as ids alone, and as rows of a table.
    folder.mkdir(exist_ok=True)
    ids = np.arange(30_000, dtype=np.uint16) % 8
    ids[2::3] = 9
    (folder / "flat").mkdir()
    ids.tofile(folder / "flat" / "a.bin")
    rows = np.split(ids, range(3, len(ids), 3))
    (folder / "table").mkdir()
    # Of one row group of 10000 rows, which takes more bytes than are read again at each start.
    write_parquet(folder / "table" / "a.parquet", table_of([list_array([row.tolist() for row in rows], "uint16")]),
                  compression="none", use_dictionary=False)

def run_job(folder):
    # What comes out of a start, checked, and what was said.
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for kind, dtype in (("flat", "uint16"), ("table", None)):
            common = dict(dtype=dtype, rows="pack", seq_len=5, outputs=["input_ids", "labels"])
            loader = load(str(folder / kind), eos_id=9 if kind == "flat" else None, **common)
            for again in range(2):
                report = loader.plan_report()
            assert (report.documents, report.tokens) == (10_000, 30_000), report
            assert len(loader) == report.rows // 2
            batches = [batch["input_ids"] for batch, _ in zip(loader, range(20))]
            assert all(set(batch[:, 2].tolist()) == {9} for batch in batches)
            loader.close()
    return said.getvalue().splitlines()

def kept(folder):
    # Whole files, and those that are not.
    names = [path.name for path in Path(folder).iterdir() if path.suffix != ".lock"]
    return sorted(name for name in names if name.endswith((".npy", ".json"))), [n for n in names if n.endswith(".tmp")]
"""
NO_ROOM = {
    "a disk that is full, then has room": """
    private_mounts()
    make_job(Path("data"))
    mount_tmpfs("cache", "64k")
    fill("cache/other")
    os.environ["DALI_PIPES_CACHE"] = os.path.abspath("cache")
    said = run_job(Path("data"))
    assert len(said) == len(set(said)) and all("No space left on device" in line for line in said), said
    assert any("documents" in line for line in said) and any("report" in line for line in said), said
    assert kept("cache") == ([], []), os.listdir("cache")
    os.unlink("cache/other")
    assert in_child(lambda: run_job(Path("data"))) == 0  # some of it has room
    assert kept("cache")[1] == []
    resize_tmpfs("cache", "4m")
    assert in_child(lambda: run_job(Path("data"))) == 0
    whole = kept("cache")
    assert len(whole[0]) == 4 and whole[1] == [], whole
    before = {name: os.stat("cache/" + name).st_mtime_ns for name in whole[0]}
    assert in_child(lambda: run_job(Path("data"))) == 0
    assert before == {name: os.stat("cache/" + name).st_mtime_ns for name in whole[0]}
    print("done")
    """,
    "a disk that is full while text is tokenised": """
    private_mounts()
    from corpus_truth import CharacterEncoder, write_jsonl
    from dali_pipes.text import Job, find_text_files, tokenize_files
    texts = ["abc" * 300] * 60
    write_jsonl(Path("in.jsonl"), texts)
    mount_tmpfs("disk", "64k")
    out = Path("disk/out")
    job = Job(find_text_files(Path("in.jsonl")), CharacterEncoder(), format="megatron", shard_tokens=10_000)
    for _ in range(2):
        try:
            tokenize_files(job, out, "dali_pipes test")
            raise AssertionError("it had room")
        except CorpusWriteError as error:
            assert "No space left on device" in str(error) and "disk/out" in str(error), error
        assert [path.name for path in out.iterdir()] == ["_tokenize"], list(out.iterdir())
        try:
            open_corpus(out)
            raise AssertionError("half a set was opened")
        except CorpusError:
            pass
    resize_tmpfs("disk", "4m")
    tokenize_files(job, out, "dali_pipes test")
    with open_corpus(out) as corpus:
        assert (corpus.num_documents, corpus.num_tokens) == (60, 60 * 901)
        assert corpus.tokens(901, 901).tolist() == [*map(ord, texts[1]), 0]
    print("done")
    """,
    "no home, or one that cannot be written": """
    with open_folder() as base:
        make_job(base / "data")
        (base / "locked").mkdir(mode=0o555)
        (base / "file").write_text("")
        def work(environment):
            for name in ("HOME", "XDG_CACHE_HOME", "DALI_PIPES_CACHE"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            said = run_job(base / "data")
            assert 2 <= len(said) == len(set(said)), said
            assert all("cached" in line for line in said), said
        for environment in (
            {},
            {"HOME": str(base / "locked")},
            {"HOME": "/nonexistent", "XDG_CACHE_HOME": str(base / "file")},
            {"DALI_PIPES_CACHE": str(base / "file" / "below")},
            {"DALI_PIPES_CACHE": str(base / "locked")},
        ):
            assert in_child(lambda: work(environment), user=65534) == 0, environment
        assert not list((base / "locked").iterdir())
    print("done")
    """,
    "killed while the cache is written": """
    make_job(Path("data"))
    os.environ["DALI_PIPES_CACHE"] = os.path.abspath("cache")
    fsync = os.fsync
    for number in WRITES:
        writes = [0]
        def killing(descriptor):
            writes[0] += 1
            if writes[0] == number:
                os.ftruncate(descriptor, 100)  # as what a disk has of it
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)
        def work():
            os.fsync = killing
            run_job(Path("data"))
        code = in_child(work)
        assert code == (0 if number == 5 else -9), (number, code)
        assert len(kept("cache")[1]) <= 1
        assert in_child(lambda: run_job(Path("data"))) == 0
        whole = kept("cache")
        assert len(whole[0]) == 4 and whole[1] == [], whole
        for name in whole[0]:
            os.unlink("cache/" + name)
    print("done")
    """,
    "three jobs at once, and the cache is cold": """
    make_job(Path("data"))
    os.environ["DALI_PIPES_CACHE"] = os.path.abspath("cache")
    pids = []
    for rank in range(3):
        pids.append(os.fork())
        if pids[-1] == 0:
            Path(f"ready {rank}").touch()
            while len(list(Path().glob("ready *"))) < 3:
                time.sleep(0.001)
            assert run_job(Path("data")) == []
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    whole = kept("cache")
    assert len(whole[0]) == 4 and whole[1] == [], whole
    print("done")
    """,
}

WAITS = """
import errno
from dali_pipes.storage import retries as read_retries
down = threading.Event()
def waits_for_ever():
    def fails(*arguments):
        down.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    read_retries._FIRST_WAIT_S = read_retries._LONGEST_WAIT_S = 3600
    os.preadv = fails
"""
WAITING = {
    "closed while a read waits to be tried again": """
        loader = load(repeat=True)
        iterator = iter(loader)
        next(iterator)
        waits_for_ever()
        def close():
            down.wait()
            time.sleep(0.1)
            loader.close()
        threading.Thread(target=close).start()
        try:
            while True:
                next(iterator)
        except (LoaderClosedError, CorpusReadError):
            print("done")
    """,
    "the program ends while a read waits to be tried again": """
        loader = load(repeat=True)
        iterator = iter(loader)
        next(iterator)
        waits_for_ever()
        try:
            loader.load_state_dict({**loader.state_dict(), "rows": 20})
            interrupt_after(0.1, down)
            for batch in loader:
                pass
        except KeyboardInterrupt:
            print("done")
    """,
    "a trainer in a daemon thread waits for a read that waits to be tried again": """
        def train():
            for batch in load(repeat=True):
                waits_for_ever()
        threading.Thread(target=train, daemon=True).start()
        down.wait()
        time.sleep(0.1)
        print("done")
    """,
}

SIGNALS = {
    "SIGTERM at any moment": """
    # Of building, an epoch, and closing: by itself it ends the process, a handler that exits ends it cleanly.
    LIBC.prctl(36, 1, 0, 0, 0)  # whom children leave behind becomes ours
    path = corpus()
    for number in range(TRIES // 2):
        has_handler = number % 2
        seen, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            if has_handler:
                # Python drops what a handler raises inside of a finalizer, and says so: the signal is sent again.
                os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            os.write(begun, b"x")
            while True:
                with load(path, prefetch_queue_depth=1 + number % 3, num_threads=1 + number % 3) as loader:
                    for epoch in range(3):
                        check_epoch(loader)
        os.read(seen, 1)
        time.sleep(0.0123 * number % 0.1)
        ended = sent = 0
        while not ended:
            os.kill(pid, signal.SIGTERM)
            sent += 1
            for _ in range(100):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    break
                time.sleep(0.01)
        code = os.waitstatus_to_exitcode(status)
        # At its very end Python takes handlers away.
        expected = {7, -signal.SIGTERM if sent > 1 else 7} if has_handler else {-signal.SIGTERM}
        assert code in expected, (number, code, sent)
        os.close(seen), os.close(begun)
    try:
        raise AssertionError(f"child {os.waitpid(-1, os.WNOHANG)} was left behind")
    except ChildProcessError:
        pass
    print("done")
    """,
    "threads that hold locks while loaders are built": """
    # Of logging, BLAS and the allocator; and children that are forked meanwhile.
    import logging
    stop = threading.Event()
    logger = logging.getLogger("busy")
    logger.addHandler(logging.FileHandler("log"))
    a = np.ones((64, 64), np.float32)
    def log():
        while not stop.is_set():
            logger.warning("busy")
            with logger.handlers[0].lock:
                time.sleep(0.001)
    def multiply():
        while not stop.is_set():
            (a @ a).sum(), torch.ones(64, 64) @ torch.ones(64, 64)
            time.sleep(0.0005)
    busy = [threading.Thread(target=target) for target in (log, multiply)]
    for thread in busy:
        thread.start()
    path = corpus()
    for number in range(TRIES):
        with load(path, prefetch_queue_depth=1 + number % 3) as loader:
            check_epoch(loader)
            if number % 5 == 0:
                pid = os.fork()
                if pid == 0:
                    check_epoch(load(path))
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in busy:
        thread.join()
    print("done")
    """,
}
# These take long: large batches, and a second start of everything that is imported.
LONG = {
    "64 MB of shared memory, batches of 100 MB": """
    private_mounts()
    mount_tmpfs("/dev/shm", "64m")
    np.tile(np.arange(1 << 16, dtype=np.uint16), 200).tofile("large.bin")
    common = dict(dtype="uint16", seq_len=4096, batch_size=1600, outputs=["input_ids", "labels"])
    loader = load("large.bin", **common)
    batches = list(loader)
    assert len(batches) == 1 and batches[0]["labels"].shape == (1600, 4096)
    assert sum(part.nbytes for part in batches[0].values()) > 100_000_000
    assert (batches[0]["input_ids"][:, 0] == 4096 * torch.arange(1600) % 65536).all()
    loader.close()
    assert os.listdir("/dev/shm") == []
    print("done")
    """,
    "a process started by spawn": """
    # From a thread, while a loader is in use here; and a loader's configuration goes there by pickle.
    import multiprocessing
    Path("spawned.py").write_text("\\n".join([
        "from dali_pipes import TokenLoader",
        "def epoch(config):",
        "    with TokenLoader(config) as loader:",
        "        return [batch['row_ids'].tolist() for batch in loader]",
    ]))
    sys.path.append(os.getcwd())
    del sys.modules["__main__"].__file__  # which a child would run
    from spawned import epoch
    loader = load()
    iterator = iter(loader)
    next(iterator)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(epoch, [loader.config])
    assert there == [[row, row + 1] for row in range(0, 40, 2)]
    assert len(list(iterator)) == 19
    print("done")
    """,
}

SCENARIOS = {**without_end({**LOST_STORAGE, **NO_ROOM, **SIGNALS}), **WAITING}


@pytest.fixture(scope="module")
def ended(run_scenarios: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    numbers = "TRIES, WRITES = 12, (2, 4)\n"
    return run_scenarios(PREAMBLE + FILES + JOB + WAITS + numbers, SCENARIOS)


@pytest.fixture(scope="module")
def ended_later(run_scenarios: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    numbers = "TRIES, WRITES = 100, (1, 2, 3, 4, 5)\n"
    names = [*SIGNALS, "killed while the cache is written"]
    scenarios = {**LONG, **{name: SCENARIOS[name] for name in names}}
    return run_scenarios(PREAMBLE + FILES + JOB + WAITS + numbers, scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_right_data_or_an_error(ended: dict[str, Any], name: str) -> None:
    check(ended[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LONG, *SIGNALS, "killed while the cache is written"])
def test_at_length(ended_later: dict[str, Any], name: str) -> None:
    check(ended_later[name])


def check(end: Any) -> None:
    assert (end.code, end.err) == (0, "")
    if end.out.startswith("skip: "):
        pytest.skip(end.out.removeprefix("skip: "))
    assert end.out == "done\n"
