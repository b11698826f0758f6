"""What a run prints: the start line on standard error, of rank 0 alone, and nothing else until it ends."""

from collections.abc import Callable
from typing import Any

import pytest
from scenarios import PREAMBLE, without_end

# Standard error of a scenario is the file beside its working folder.
CHECK = """
def life(**settings):
    loader = load(shuffle=True, quiet=False, **settings)
    state = loader.state_dict()
    for _ in range(2):
        for batch in loader:
            state = loader.state_dict()
    for batch in loader:
        break
    loader.load_state_dict(state)
    next(iter(loader))
    loader.locate(0, 0), loader.stats(), len(loader)
    loader.close()
    loader.close()
    return loader

def printed():
    return Path(os.getcwd() + ".err").read_text()
"""
RUNS = {
    "one rank": "loader = life(); assert printed() == 'dali_pipes: ' + loader.summary() + '\\n', printed()",
    "rank 0 of 2": """
        os.environ.update(RANK="0", WORLD_SIZE="2")
        loader = life()
        assert "10 steps of 2 ranks" in printed()
        assert printed() == 'dali_pipes: ' + loader.summary() + '\\n', printed()
    """,
    "rank 1 of 2": """
        os.environ.update(RANK="1", WORLD_SIZE="2")
        assert life().config.rank == 1
        assert printed() == ""
    """,
    "the same loader again": """
        loader, other = life(), life()
        assert printed() == 'dali_pipes: ' + loader.summary() + '\\n', printed()
    """,
    "what is said to the quiet": """
        import logging, warnings
        warnings.simplefilter("error")
        logging.basicConfig(level=logging.DEBUG, filename="log")
        state = load().state_dict()
        state["rows"] = 20
        before = len(printed())
        load(batch_size=5).load_state_dict(state)  # steps of another size
        assert len(printed()) == before
        load(seq_len=2, on_change="nearest").load_state_dict(state)
        assert printed()[before:].startswith("dali_pipes: the state was saved with rows of "), printed()
        before = len(printed())
        load(rows="pack", eos_id=10**6, outputs=["input_ids"])
        assert printed()[before:].startswith("dali_pipes: eos_id = 1000000 "), printed()
        before = len(printed())
        load(batch_size=5, quiet=False).load_state_dict(state)
        assert "row 20 " in printed()[before:]
        assert "dali_pipes" not in Path("log").read_text()
    """,
    "after a break": """
        loader = load()
        for batch in loader:
            if loader.step == 9:
                within = loader.epoch, loader.step
                break
        state = loader.state_dict()
        assert (within, loader.epoch, loader.step) == ((0, 9), 1, 0)
        assert (state["epoch"], state["rows"]) == (0, 18)
    """,
    "standard error is closed": """
        sys.stderr.close()
        life()
        sys.stderr = None
        life(seed=1)
        assert printed() == ""
    """,
    "imports": """
        import subprocess
        names = "TokenLoader, build_pipeline, open_corpus"
        done = subprocess.run([sys.executable, "-c", f"from dali_pipes import {names}"], capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    """,
}


@pytest.fixture(scope="module")
def ended(run_scenarios: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_scenarios(PREAMBLE + CHECK, without_end(RUNS))


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_prints(ended: dict[str, Any], name: str) -> None:
    assert (ended[name].code, ended[name].out) == (0, ""), ended[name].err
