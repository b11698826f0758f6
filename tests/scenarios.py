"""What every scenario of a process of its own begins with; `run_scenarios` has made the imports."""

import textwrap

PREAMBLE = """
def corpus(rows=40, name="data"):
    np.arange(rows * 4 + 1, dtype=np.uint32).tofile(f"{name}.bin")
    return f"{name}.bin"

def load(path=None, **settings):
    common = dict(corpus=path or corpus(), dtype="uint32", batch_size=2, seq_len=4, device="cpu", batches_per_run=1)
    common |= dict(outputs=["input_ids", "labels", "row_ids"], shuffle=False, quiet=True)
    return TokenLoader(**common | settings)

def slow_reads(seconds, after=0):
    # Gives an event: a read has begun that is slow.
    read_rows, count, begun = Corpus.read_rows, [0], threading.Event()
    def slow(self, starts, *others):
        count[0] += 1
        if count[0] > after:
            begun.set()
            time.sleep(seconds)
        read_rows(self, starts, *others)
    Corpus.read_rows = slow
    return begun

def interrupt_after(seconds, event):
    def send():
        event.wait()
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=send, daemon=True).start()

def check_epoch(loader):
    epoch, rows = loader.epoch, []
    for batch in loader:
        assert (batch["input_ids"][:, 0] == 4 * batch["row_ids"]).all(), (epoch, batch)
        rows += batch["row_ids"].tolist()
    assert rows == list(range(40)), (epoch, rows)

def check_rest(loader):
    # What comes after a state: every row from there on, once.
    state, rows = loader.state_dict(), []
    other = load(loader.config.corpus[0])
    other.load_state_dict(state)
    for batch in other:
        assert (batch["input_ids"][:, 0] == 4 * batch["row_ids"]).all()
        rows += batch["row_ids"].tolist()
    assert rows == list(range(state["rows"], 40)), (state, rows)
    other.close()
"""


def without_end(scenarios: dict[str, str]) -> dict[str, str]:
    """Scenarios that are not about how a process ends: they leave out Python's end, a quarter of a second of each."""
    return {name: textwrap.dedent(source) + "\nsys.stdout.flush()\nos._exit(0)\n" for name, source in scenarios.items()}
