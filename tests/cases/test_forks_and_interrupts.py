"""Forked children and Ctrl-C, each scenario in its own process: one clear error, right data, no hang."""

from collections.abc import Callable
from typing import Any

import pytest
from scenarios import PREAMBLE

FORKS = {
    "a forked child that leaves the loader alone": """
        loader = load(prefetch_queue_depth=4)
        iterator = iter(loader)
        first = next(iterator)
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                sys.exit()  # takes the interpreter down, with the copy of the loader in it
            status = os.waitpid(pid, 0)[1]
            assert status == 0, status
        assert [batch["row_ids"].tolist() for batch in iterator] == [[n, n + 1] for n in range(2, 40, 2)]
        print("done")
    """,
    "a forked child that drops the loader": """
        loader = load(prefetch_queue_depth=4)
        iterator = iter(loader)
        first = next(iterator)
        pid = os.fork()
        if pid == 0:
            del loader, iterator
            gc.collect()
            sys.exit()
        status = os.waitpid(pid, 0)[1]
        assert status == 0, status  # 14: a hang, ended by the alarm
        assert len(list(iterator)) == 19
        print("done")
    """,
    "a forked child that closes the loader": """
        loader = load(prefetch_queue_depth=4)
        iterator = iter(loader)
        first = next(iterator)
        pid = os.fork()
        if pid == 0:
            loader.close()
            sys.exit()
        status = os.waitpid(pid, 0)[1]
        assert status == 0, status  # 14: a hang, ended by the alarm
        assert len(list(iterator)) == 19
        print("done")
    """,
    "a forked child that uses the loader": """
        for depth in (1, 4):
            for used in (False, True):
                loader = load(prefetch_queue_depth=depth)
                iterator = iter(loader)
                if used:
                    next(iterator)
                    time.sleep(0.02)
                state = loader.state_dict()
                pid = os.fork()
                if pid == 0:
                    for attempt in range(2):
                        try:
                            list(iterator) if attempt == 0 else list(loader)
                        except LoaderClosedError as error:
                            assert "fork" in str(error) and str(os.getppid()) in str(error), error
                        else:
                            raise AssertionError("no error in the child")
                    assert loader.state_dict() == state  # what needs no thread still works
                    loader.locate(0, 0)
                    check_epoch(load("data.bin"))  # and so does a loader of its own
                    os._exit(0)
                status = os.waitpid(pid, 0)[1]
                assert status == 0, (depth, used, status)
                rest = [batch["row_ids"].tolist() for batch in iterator]
                assert rest == [[n, n + 1] for n in range(2 if used else 0, 40, 2)], (depth, used, rest)
        print("done")
    """,
    "a forked child while other threads wait inside next()": """
        dali_pipes.engine.block_stream._EXIT_WAIT_S = 3600
        go_on, read_rows = threading.Event(), Corpus.read_rows
        def held(self, starts, *others):
            if 16 in starts:
                go_on.wait()
            read_rows(self, starts, *others)
        Corpus.read_rows = held
        path = corpus()
        loaders = [load(path, prefetch_queue_depth=1) for _ in range(2)]
        rows = [[], []]
        def train(loader, rows):
            for batch in loader:
                rows += batch["row_ids"].tolist()
        threads = [threading.Thread(target=train, args=pair) for pair in zip(loaders, rows)]
        for thread in threads:
            thread.start()
        for loader, given in zip(loaders, rows):
            while len(given) < 4 or loader._stream._gate.acquire(blocking=False):
                if len(given) == 4:
                    loader._stream._gate.release()
                time.sleep(0.001)
        pid = os.fork()
        if pid == 0:
            sys.exit()
        status = os.waitpid(pid, 0)[1]
        assert status == 0, status  # 14: a hang, ended by the alarm
        go_on.set()
        for thread in threads:
            thread.join()
        assert rows == [list(range(40))] * 2
        print("done")
    """,
    "torch workers forked beside a loader": """
        from torch.utils.data import DataLoader, TensorDataset
        loader = load(prefetch_queue_depth=4)
        rows = []
        for batch in loader:
            if not rows:
                other = DataLoader(TensorDataset(torch.arange(8)), num_workers=2, multiprocessing_context="fork")
                assert [int(item[0]) for item in other] == list(range(8))
            rows += batch["row_ids"].tolist()
        assert rows == list(range(40))
        del loader, other
        print("done")
    """,
}

INTERRUPTS = {
    "Ctrl-C, caught, many times": """
        loader = load(prefetch_queue_depth=3, num_threads=3)
        for number in range(14):
            received = 0
            loader.load_state_dict({**loader.state_dict(), "epoch": number, "rows": 0})
            timer = threading.Timer(0.0005 * (number % 7), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                for batch in loader:
                    received += 2
                threading.Event().wait()  # for an interrupt that comes late
            except KeyboardInterrupt:
                pass
            timer.join()
            state = loader.state_dict()
            at = state["rows"] + 40 * (state["epoch"] - number)
            assert at == received, (state, received)
            check_rest(loader)
            check_epoch(loader)
        print("done")
    """,
    "Ctrl-C while waiting for a block, caught": """
        read_rows, calls, received, go_on = Corpus.read_rows, [], 0, threading.Event()
        def held(self, starts, *others):
            calls.append(starts)
            if len(calls) > 5:
                go_on.wait()
            read_rows(self, starts, *others)
        Corpus.read_rows = held
        loader = load(prefetch_queue_depth=3, num_threads=1)
        def interrupt():
            while received < 10:
                time.sleep(0.001)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            go_on.set()
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            for batch in loader:
                received += 2
        except KeyboardInterrupt:
            print("done")
        assert loader.state_dict()["rows"] == received == 10
    """,
    "Ctrl-C between any two lines": """
        # A trace function raises KeyboardInterrupt at the n-th line of our modules and of DALI's, for every n. Lines of
        # `with` are left out: at their end, where the interpreter takes no signal, a lock would stay locked. So are
        # those of `yield`, where it takes none either.
        import linecache
        FILES = ("loader.py", "block_stream.py", "source.py", "dali/pipeline.py", "external_source.py")
        sys.unraisablehook = lambda _: None  # an interrupt inside a finalizer is reported there, and goes nowhere

        class Interrupt:
            def __init__(self, number):
                self.number, self.count, self.place = number, 0, None

            def __call__(self, frame, event, argument):
                code = frame.f_code
                if event == "call":
                    ours = code.co_filename.endswith(FILES) and code.co_name not in ("__del__", "_shutdown")
                    return self if ours else None
                if event == "line":
                    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
                    self.count += not line.startswith(("with ", "yield "))
                    if self.count == self.number:
                        self.place = f"{os.path.basename(code.co_filename)}: {line}"
                        self.number = -1
                        raise KeyboardInterrupt
                return self

        def run(loader, received):
            for batch in loader:
                received.append(batch["row_ids"].tolist())
                if len(received) == 3:
                    break
            for batch in loader:
                received.append(batch["row_ids"].tolist())

        def check(loader, epoch, received):
            whole = [[row, row + 1] for row in range(0, 12, 2)]
            assert received == (whole[:3] + whole)[:len(received)], received
            state = loader.state_dict()
            if len(received) < 3:
                step = len(received)
            elif len(received) == 3 and state["epoch"] == epoch:
                step = 3
            else:
                step = 6 + len(received) - 3
            assert (state["epoch"], state["rows"]) == divmod(epoch * 12 + 2 * step, 12), (received, state)
            rest = whole[state["rows"] // 2:]
            assert [batch["row_ids"].tolist() for batch in loader] in (whole, rest)
            loader.load_state_dict(state)
            assert [batch["row_ids"].tolist() for batch in loader] == rest

        path = corpus(rows=12)
        engines, faults = [], []
        for engine in ("dali", "direct"):
            if engine == "direct":
                sys.modules["nvidia.dali"] = None
            loader = load(path, prefetch_queue_depth=2, num_threads=2, engine=engine)
            number, ended = 0, False
            while not ended:
                number += STEP
                loader.load_state_dict({**loader.state_dict(), "epoch": 2 * number, "rows": 0})
                received, interrupt = [], Interrupt(number)
                sys.settrace(interrupt)
                try:
                    run(loader, received)
                    ended = True
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(None)
                try:
                    check(loader, 2 * number, received)
                except Exception as error:
                    faults.append(f"{engine}, interrupted at {interrupt.place}: {error!r}")
                    loader = load(path, prefetch_queue_depth=2, num_threads=2, engine=engine)
            engines.append(loader.stats().engine)
            loader.close()
        assert engines == ["dali", "direct"] and number > 200, (engines, number)
        assert not faults, "\\n".join(faults)
        print("done")
    """,
}


@pytest.fixture(scope="module")
def ended(run_scenarios: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_scenarios(PREAMBLE + "STEP = 61\n", {**FORKS, **INTERRUPTS})


@pytest.mark.parametrize("name", [*FORKS, *INTERRUPTS])
def test_it_goes_on_and_ends(ended: dict[str, Any], name: str) -> None:
    assert ended[name].err == ""
    assert (ended[name].code, ended[name].out) == (0, "done\n")


@pytest.mark.slow
def test_an_interrupt_at_every_single_line(run_scenarios: Callable[..., dict[str, Any]]) -> None:
    name = "Ctrl-C between any two lines"
    (ended,) = run_scenarios(PREAMBLE + "STEP = 1\n", {name: INTERRUPTS[name]}).values()
    assert ended.err == ""
    assert (ended.code, ended.out) == (0, "done\n")
