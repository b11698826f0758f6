"""A fuzzer with a time box: damages small valid files of every kind that is parsed, and reads them.

    python tests/fuzz/run.py --seconds 60 [--kinds arrow mds] [--seed 7] [--out findings]
    python tests/fuzz/run.py --replay findings/arrow-7-1234.zip

Each case is read in a child process under a limit of memory: a crash of a library, a hang and memory beyond that of the
files are findings too. A finding is kept as a .zip of the files that reproduce it. Exit status 1 if there are any.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "corpus")]
CASE_S = 20
"""A case takes some milliseconds; on a loaded machine it gets more, see `_limit`."""
MOST_MEMORY = 3 << 30


def work(kind: str, seed: int, first: int, seconds: float, folder: Path) -> None:
    """In a child: case after case, each announced by a line, findings by one more. Imports are not timed."""
    sys.modules["nvidia.dali"] = None  # type: ignore[assignment]  # the same batches, sooner
    os.environ["DALI_PIPES_CACHE"] = str(folder / "cache")
    from trial import damaged, read, seeds

    files = seeds(kind, folder / "valid")
    assert read(kind, folder / "case", files) is not None, "the valid files can be read"
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_MEMORY, held + MOST_MEMORY))
    number, until = first, time.monotonic() + seconds
    while time.monotonic() < until:
        print(number, flush=True)
        try:
            read(kind, folder / "case", damaged(Random(f"{seed} {number}"), kind, files, folder / "case"))
        except BaseException as error:
            print(json.dumps(f"{type(error).__name__}: {error}"[:500]), flush=True)
            if isinstance(error, KeyboardInterrupt):
                raise
        number += 1


def keep(kind: str, seed: int, number: int, out: Path) -> Path:
    """The files of a case, packed."""
    from trial import damaged, seeds

    with tempfile.TemporaryDirectory() as folder:
        files = seeds(kind, Path(folder) / "valid")
        case = damaged(Random(f"{seed} {number}"), kind, files, Path(folder) / "case")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind.replace(' ', '_')}-{seed}-{number}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = kind.encode()
        for name, content in case.items():
            archive.writestr(name, content)
    return path


def fuzz(kind: str, seed: int, seconds: float, out: Path) -> tuple[int, list[str]]:
    """How many cases were read, and what was found, each kind of finding once."""
    number, findings, left = 0, dict[str, str](), seconds
    while left > 0:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--work",
                kind,
                "--seed",
                str(seed),
                "--first",
                str(number),
                "--seconds",
                str(left),
            ]
            errors = Path(folder) / "stderr"
            with (
                errors.open("w") as err,
                subprocess.Popen(
                    [*command, "--folder", folder], stdout=subprocess.PIPE, stderr=err, text=True
                ) as child,
            ):
                assert child.stdout is not None
                begun: float | None = None
                what: str | None = None
                while True:
                    with _limit(CASE_S if begun else 3 * CASE_S) as late:
                        line = child.stdout.readline()
                    if late:
                        what = f"a hang of more than {CASE_S} s"
                        child.kill()
                        break
                    if not line:
                        code = child.wait()
                        if code and begun:
                            what = f"the process ended with {code}: {errors.read_text()[-300:]}"
                        elif code:
                            raise RuntimeError(errors.read_text())
                        break
                    if line.startswith('"'):
                        _note(findings, json.loads(line), kind, seed, number, out)
                    else:
                        begun, number = begun or time.monotonic(), int(line)
            if what is not None:
                _note(findings, what, kind, seed, number, out)
            left -= time.monotonic() - (begun or 0.0)
        number += 1
    return number, list(findings.values())


class _limit(contextlib.AbstractContextManager[list[int]]):
    """Interrupts a blocking read after some seconds, times the processes a core; what it gives is not empty then."""

    def __init__(self, seconds: int) -> None:
        self._seconds, self._late = seconds, list[int]()

    def __enter__(self) -> list[int]:
        def ring(*_: object) -> None:
            self._late.append(1)
            raise TimeoutError

        from hang_watchdog import processes_per_core

        signal.signal(signal.SIGALRM, ring)
        signal.alarm(math.ceil(self._seconds * max(1.0, processes_per_core())))
        return self._late

    def __exit__(self, kind: object, *_: object) -> bool:
        signal.alarm(0)
        return kind is TimeoutError


def _note(findings: dict[str, str], what: str, kind: str, seed: int, number: int, out: Path) -> None:
    like = "".join(letter for letter in what if not letter.isdigit())[:60]  # others of the same kind are not kept
    if like not in findings:
        findings[like] = f"{what}\n    {keep(kind, seed, number, out)}"


def replay(path: Path) -> None:
    """Read the files of a finding, in this process."""
    sys.modules["nvidia.dali"] = None  # type: ignore[assignment]
    from trial import read

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        os.environ["DALI_PIPES_CACHE"] = str(Path(folder) / "cache")
        files = {name: archive.read(name) for name in archive.namelist()}
        found = read(archive.comment.decode(), Path(folder) / "case", files)
    print("an error of ours" if found is None else f"read: {found!r:.1000}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for all kinds together")
    parser.add_argument("--kinds", nargs="*", help="by default all")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument("--out", type=Path, default=Path("runs") / "fuzz", help="folder for findings")
    parser.add_argument("--replay", type=Path)
    for name, kind in (("work", str), ("first", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.seed, arguments.first, arguments.seconds, arguments.folder)
        return 0
    if arguments.replay:
        replay(arguments.replay)
        return 0
    from seeds import KINDS

    kinds = arguments.kinds or list(KINDS)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"no such kind: {unknown[0]}; there are {', '.join(KINDS)}")
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.seconds:g} s for {len(kinds)} kinds")
    failed = False
    for kind in kinds:
        seconds = arguments.seconds / len(kinds)
        cases, findings = fuzz(kind, seed, seconds, arguments.out)
        print(f"{kind:28s}{cases / seconds:8.0f} cases a second, {len(findings)} findings", flush=True)
        for finding in findings:
            failed = True
            print(f"  {finding}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
