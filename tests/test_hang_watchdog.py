"""What the watchdog of the tests takes for a hang, and what it does about one."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hang_watchdog import Look, Rules, Watch, below, cpu_s, started_by

RULES = Rules(still_s=120, moved_cpu_s=12, most_cpu_s=1000)


def first_hang(cores_used: float, per_core: float, seconds: int = 20_000, tests_of_s: int | None = None) -> int | None:
    """When a test that uses so much is taken to hang; looks are a second apart."""
    watch = Watch(RULES, Look(0, 50, per_core))
    for second in range(1, seconds):
        if tests_of_s and second % tests_of_s == 0:
            watch.begin()
        if watch.hang(Look(second, 50 + cores_used * second, per_core)):
            return second
    return None


@pytest.mark.parametrize("cores_used", [0, 0.001, 0.05])
def test_what_sleeps_or_only_polls_hangs(cores_used: float) -> None:
    assert first_hang(cores_used, per_core=0) == first_hang(cores_used, per_core=1) == 120


@pytest.mark.parametrize("per_core", [2, 5, 30])
def test_what_gets_its_share_of_a_loaded_machine_does_not_hang(per_core: float) -> None:
    """Not even a tenth of that share. What gets nothing hangs, later than on an idle machine."""
    assert first_hang(1 / per_core, per_core, seconds=1000) is None
    assert first_hang(0.11 / per_core, per_core, seconds=1000) is None
    assert first_hang(0, per_core) == 120 * per_core


def test_a_busy_test_ends_at_its_cap_and_not_before() -> None:
    assert first_hang(1, per_core=1) == 1000
    assert first_hang(4, per_core=4) == 250


def test_each_test_has_the_whole_time_and_the_whole_cap() -> None:
    assert first_hang(0, per_core=1, tests_of_s=119) is None
    assert first_hang(1, per_core=1, tests_of_s=900) is None


def test_the_longest_load_of_the_wait_counts() -> None:
    watch = Watch(RULES, Look(0, 0, 0))
    found = [watch.hang(Look(second, 0, 3 if second == 60 else 0)) for second in range(1, 400)]
    assert next(second for second, why in enumerate(found, 1) if why) == 360


def test_time_in_which_the_watchdog_did_not_run_is_not_held_against_the_test() -> None:
    watch = Watch(RULES, Look(0, 0, 1))
    assert watch.hang(Look(10_000, 0, 1)) is None
    assert watch.hang(Look(20_000, 0, 1)) is None


def test_cpu_time_that_a_lost_process_takes_with_it_is_not_counted_twice() -> None:
    watch = Watch(RULES, Look(0, 500, 1))
    for second in range(1, 120):
        assert watch.hang(Look(second, 100, 1)) is None
    assert watch.hang(Look(120, 100, 1)) == "it has used 0.0 s of CPU time in 120 s"


def test_once_something_was_aborted_the_rest_goes_soon() -> None:
    watch = Watch(RULES, Look(0, 0, 1))
    found = [second for second in range(1, 160) if watch.hang(Look(second, 0, 1))]
    assert found == [120, 132, 144, 156]


WATCHED = """
import os, signal, subprocess, sys
sys.path.append({tests!r})
from hang_watchdog import Rules, Watchdog

os.environ["PYTHONFAULTHANDLER"] = "1"
child = "import threading, time\\ndef stuck():\\n    print('begun', flush=True)\\n    {stuck}\\nstuck()"
hanging = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
hanging.stdout.readline()
watchdog = Watchdog(Rules(still_s=0.3, moved_cpu_s=0.1, most_cpu_s=0.5, after_abort=1e6), look_every_s=0.1)
watchdog.begin("this one")
stacks = hanging.communicate()[1]
watchdog.end()
assert hanging.returncode == -signal.SIGABRT, hanging
assert "in stuck" in stacks, stacks
print("gone on")
"""


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param("time.sleep(1e6)", id="sleeps"),
        pytest.param("while True: pass", id="is busy"),
        pytest.param("threading.Event().wait()", id="waits for another thread"),
    ],
)
def test_a_child_that_hangs_is_aborted_with_its_stacks_and_its_parent_goes_on(tmp_path: Path, stuck: str) -> None:
    script = tmp_path / "watched.py"
    script.write_text(textwrap.dedent(WATCHED.format(tests=str(Path(__file__).parent), stuck=stuck)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "gone on\n"), done.stderr
    assert "watchdog: this one hangs: it has used" in done.stderr


def test_processes_below_and_what_they_used() -> None:
    """A child of a child is found; CPU time of what has ended is that of who waited for it."""
    grandchild = "import time\nwhile time.process_time() < 0.3: pass\nprint('used', flush=True); input()"
    child = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {grandchild!r}])
print("over", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "used\n"
        tree = below(process.pid)
        assert len(tree) == 2
        (last,) = started_by(process.pid)
        assert tree == {process.pid: [last], last: []}
        assert cpu_s(last) >= 0.25
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "over\n"
        assert below(process.pid) == {process.pid: []}
        assert cpu_s(process.pid) >= 0.25
        process.stdin.write("\n")
        process.stdin.flush()
    assert cpu_s(process.pid) == 0.0
