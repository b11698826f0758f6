"""However a run ends, it ends at once, with its own exit code and message, and leaves nothing behind."""

import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from scenarios import PREAMBLE

# What the loader waits for at the end of the interpreter comes, however slow the machine is.
PATIENT = """
import dali_pipes.runtime.threads
dali_pipes.engine.block_stream._EXIT_WAIT_S = dali_pipes.runtime.threads._EXIT_WAIT_S = 3600
"""

# Programs that end with code 0 and print "done" and nothing else, also not while the interpreter takes itself down.
CLEAN = {
    "ends at the end of an epoch": "loader = load(); list(loader); print('done')",
    "ends without a batch": "loader = load(); iterator = iter(loader); print('done')",
    "ends after break, loader global": """
        loader = load(prefetch_queue_depth=6, num_threads=4)
        for batch in loader:
            break
        print("done")
    """,
    "ends in mid-epoch, iterator and batch global": """
        loader = load(prefetch_queue_depth=6, num_threads=4, repeat=True)
        iterator = iter(loader)
        batch = next(iterator)
        batch = next(iterator)
        print("done")
    """,
    "ends in mid-epoch, everything in a cycle": """
        class Trainer: pass
        trainer = Trainer()
        trainer.self, trainer.loader = trainer, load(repeat=True)
        trainer.iterator = iter(trainer.loader)
        next(trainer.iterator)
        print("done")
    """,
    "ends while a block is being read": """
        slow_reads(0.3, after=3)
        loader = load(prefetch_queue_depth=2)
        iterator = iter(loader)
        next(iterator), next(iterator)
        print("done")
    """,
    "sys.exit in the loop": """
        for batch in load(repeat=True):
            print("done")
            sys.exit(0)
    """,
    "with block and close at exit": """
        import atexit
        loader = load(repeat=True)
        atexit.register(loader.close)
        with loader:
            next(iter(loader))
        print("done")
    """,
    "closed by atexit in mid-epoch": """
        import atexit
        loader = load(repeat=True, prefetch_queue_depth=4)
        atexit.register(loader.close)
        iterator = iter(loader)
        next(iterator)
        print("done")
    """,
    "in a daemon thread that is in its loop body": """
        started = threading.Event()
        def consume():
            for batch in load(repeat=True, prefetch_queue_depth=4):
                started.set()
                time.sleep(3600)
        threading.Thread(target=consume, daemon=True).start()
        started.wait()
        print("done")
    """,
    "in a daemon thread that never ends": """
        # A thread that is inside torch when the interpreter goes down aborts the process, so the loader has to end it.
        dali_pipes.engine.block_stream._USER_WAIT_S = 3600  # it ends, however long that takes on a busy machine
        for number in range(8):  # the exit falls into another part of the loop each time
            pid = os.fork()
            if pid == 0:
                started = threading.Event()
                def consume():
                    for batch in load(repeat=True, prefetch_queue_depth=1 + number % 2):
                        started.set()
                threading.Thread(target=consume, daemon=True).start()
                started.wait()
                time.sleep(0.003 * number)
                sys.exit()
            status = os.waitpid(pid, 0)[1]
            assert status == 0, status
        print("done")
    """,
    "in a daemon thread that waits for a block": """
        slow_reads(0.5, after=4)
        started = threading.Event()
        def consume():
            for batch in load(repeat=True):
                started.set()
        threading.Thread(target=consume, daemon=True).start()
        started.wait()
        time.sleep(0.1)
        print("done")
    """,
    "in a daemon thread, to the end": """
        def consume():
            check_epoch(load())
            print("done")
        thread = threading.Thread(target=consume, daemon=True)
        thread.start()
        thread.join()
    """,
    "in a daemon thread that an atexit handler stops and joins": """
        import atexit
        started, stop = threading.Event(), threading.Event()
        def consume():
            for batch in load(repeat=True):
                started.set()
                if stop.is_set():
                    return
        thread = threading.Thread(target=consume, daemon=True)
        def end():
            time.sleep(0.2)  # other handlers have their turn
            stop.set()
            thread.join()
            print("done")
        atexit.register(end)
        thread.start()
        started.wait()
        time.sleep(0.05)
    """,
    "in a daemon thread that fills a queue and is joined at exit": """
        import atexit, queue
        batches = queue.Queue(maxsize=2)
        stop = threading.Event()
        def consume():
            try:
                for batch in load(repeat=True):
                    while not stop.is_set():
                        try:
                            batches.put(batch, timeout=0.01)
                            break
                        except queue.Full:
                            continue
                    if stop.is_set():
                        return
            except Exception as error:
                print(error)
        thread = threading.Thread(target=consume, daemon=True)
        thread.start()
        @atexit.register
        def end():
            stop.set()
            thread.join()
        batches.get(), batches.get()
        print("done")
    """,
    "used by an atexit handler": """
        import atexit
        def end():
            try:
                check_epoch(loader)
            except LoaderClosedError:
                pass  # as good as the epoch: what it must not do is wait for ever
            print("done")
        atexit.register(end)
        loader = load()
        next(iter(loader))
    """,
    "built and used by an atexit handler": """
        import atexit
        @atexit.register
        def end():
            try:
                check_epoch(load("data.bin"))
            except LoaderClosedError:
                pass
            print("done")
        check_epoch(load())
    """,
    "in a thread that ends after the main one": """
        def consume():
            loader = load()
            time.sleep(0.1)
            check_epoch(loader)
            print("done")
        threading.Thread(target=consume).start()
    """,
    "the pipeline alone, in mid-epoch": """
        pipe = build_pipeline(LoaderConfig(corpus=corpus(), dtype="uint32", batch_size=2, seq_len=4, device="cpu"))
        pipe.build()
        pipe.run()
        print("done")
    """,
    "an error of the source, caught, then everything dropped": """
        for error in (OSError, KeyboardInterrupt, ValueError):
            read_rows = Corpus.read_rows
            def failing(self, starts, *others):
                if 24 in starts:
                    raise error("bad")
                read_rows(self, starts, *others)
            Corpus.read_rows = failing
            loader = load(prefetch_queue_depth=6)
            try:
                list(loader)
            except error as caught:
                assert str(caught) == "bad"
            Corpus.read_rows = read_rows
            check_rest(loader)
            del loader
            gc.collect()
            check_epoch(load())
        print("done")
    """,
    "without DALI, in mid-epoch": """
        sys.modules["nvidia.dali"] = None
        loader = load(repeat=True)
        iterator = iter(loader)
        next(iterator)
        assert loader.stats().engine == "direct"
        print("done")
    """,
    "closed by a handler of SIGTERM in the loop": """
        loader = load(repeat=True)
        signal.signal(signal.SIGTERM, lambda *_: (loader.close(), print("done"), sys.exit(0)))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for batch in loader:
            pass
    """,
}

# Programs that end by an error of their own: the code, the last line they print, and no further message.
FAILING: dict[str, tuple[str, int, str]] = {
    "an exception in the loop body": (
        """
        loader = load(prefetch_queue_depth=6, repeat=True)
        for batch in loader:
            raise ZeroDivisionError("in the model")
        """,
        1,
        "ZeroDivisionError: in the model",
    ),
    "a bad token": (
        "list(load(vocab_size=100, prefetch_queue_depth=6))",
        1,
        "dali_pipes.errors.TokenRangeError: ",
    ),
    "a truncated file": (
        """
        loader = load(prefetch_queue_depth=6)
        iterator = iter(loader)
        next(iterator)
        os.truncate("data.bin", 100)
        loader.load_state_dict({**loader.state_dict(), "rows": 20})
        list(loader)
        """,
        1,
        "dali_pipes.errors.CorpusReadError: ",
    ),
    "Ctrl-C in the loop": (
        """
        begun = threading.Event()
        interrupt_after(0.1, begun)
        for batch in load(repeat=True, prefetch_queue_depth=4):
            begun.set()
        """,
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "Ctrl-C while waiting for a block": (
        """
        interrupt_after(0.3, slow_reads(1.0, after=4))
        for batch in load(repeat=True):
            pass
        """,
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "Ctrl-C in the loop body": (
        """
        begun = threading.Event()
        interrupt_after(0.1, begun)
        for batch in load(repeat=True):
            begun.set()
            threading.Event().wait()
        """,
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "Ctrl-C without DALI": (
        """
        sys.modules["nvidia.dali"] = None
        begun = threading.Event()
        interrupt_after(0.1, begun)
        for batch in load(repeat=True):
            begun.set()
        """,
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
}


# Each end takes a third of a second of CPU; these go the way of another one, by a detour.
DETOURS = {
    "ends without a batch",
    "ends in mid-epoch, everything in a cycle",
    "sys.exit in the loop",
    "with block and close at exit",
    "in a daemon thread that waits for a block",
    "in a daemon thread, to the end",
    "in a daemon thread that fills a queue and is joined at exit",
    "built and used by an atexit handler",
    "in a thread that ends after the main one",
    "Ctrl-C in the loop body",
    "Ctrl-C without DALI",
}


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in DETOURS else []) for name in names]


@pytest.fixture(scope="module")
def ended(run_scenarios: Callable[..., dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of those that are selected."""
    sources = {**CLEAN, **{name: source for name, (source, _, _) in FAILING.items()}}
    tests: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [test.callspec.params["name"] for test in tests]
    return run_scenarios(PREAMBLE + PATIENT, {name: sources[name] for name in names})


@pytest.mark.parametrize("name", marked(CLEAN))
def test_a_clean_end(ended: dict[str, Any], name: str) -> None:
    assert ended[name].err == ""
    assert (ended[name].code, ended[name].out) == (0, "done\n")


@pytest.mark.parametrize("name", marked(FAILING))
def test_an_end_by_an_error(ended: dict[str, Any], name: str) -> None:
    _, code, last_line = FAILING[name]
    lines = ended[name].err.strip().splitlines()
    assert lines[-1].startswith(last_line), ended[name].err
    assert ended[name].err.count("Traceback (most recent call last)") == 1, ended[name].err
    assert "Exception ignored" not in ended[name].err
    assert ended[name].code == code
