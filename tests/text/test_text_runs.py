"""Runs: shards, masks, receipts, restarts after a kill at any moment, several processes, changed inputs."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_truth import CharacterEncoder, files_of, joined, read_documents, read_megatron, run, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import open_corpus
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError, CorpusReadError, CorpusWriteError
from dali_pipes.text import Document, Encoded, Job, Summary, find_text_files, tokenize_files
from dali_pipes.text import tokenize as tokenize_module
from dali_pipes.text.run_folder import RunFolder

DROP = "drop"


def expected(texts: Sequence[str]) -> list[list[int]]:
    return [[*map(ord, text), 0] if text else [] for text in texts if text != DROP]


def make_inputs(folder: Path, seed: int = 0, files: int = 6) -> tuple[Path, list[str]]:
    """Files of documents, some empty, some dropped, one file without a document; and the documents."""
    draw = random.Random(seed)
    folder.mkdir()
    everything = []
    for number in range(files):
        texts = ["".join(draw.choices("abc !é\n", k=draw.choice([0, 1, 5, 30]))) for _ in range(draw.randint(3, 12))]
        texts[draw.randrange(3)] = DROP
        texts = [] if number == 2 else texts
        write_jsonl(folder / f"in-{number}.jsonl", texts)
        everything += texts
    return folder, everything


LETTERS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(LETTERS | st.just(DROP), max_size=8), min_size=1, max_size=4),
    limit=st.integers(1, 30),
    batch=st.integers(64, 200),
)
def test_every_document_is_there_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], limit: int, batch: int
) -> None:
    """Whatever the sizes of shards and batches; counts and checksums are those of the files."""
    folder = tmp_path_factory.mktemp("run")
    for number, texts in enumerate(files):
        write_jsonl(folder / f"in-{number}.jsonl", texts)
    texts = [text for file in files for text in file]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize_module, "_MOST_CHARACTERS", batch)
        if not any(expected(texts)):
            with pytest.raises(CorpusError, match=f"in-0.jsonl.*: .* {len(texts)} documents?, "):
                run(folder, folder / "out", shard_tokens=limit)
            return
        summary = run(folder, folder / "out", shard_tokens=limit)
    shards = [read_megatron(path) for path in sorted((folder / "out").glob("*.idx"))]
    found = [document for shard in shards for document in shard]
    # A shard of which no document has an id is not written: other readers cannot open it.
    assert [document for document in found if document] == [document for document in expected(texts) if document]
    assert all(len(shard) == 1 or sum(map(len, shard[:-1])) < limit for shard in shards)
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    counts: dict[str, Any] = {
        "documents": len(texts),
        "tokens": sum(map(len, expected(texts))),
        "empty": texts.count(""),
    }
    counts["dropped"] = texts.count(DROP)
    assert {name: manifest[name] for name in counts} == counts
    assert summary == Summary(**counts, shards=len(shards), missing=0)
    for shard in manifest["shards"]:
        for name, about in shard["files"].items():
            data = (folder / "out" / name).read_bytes()
            assert about == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {path.name for path in (folder / "out").iterdir()} == {
        "manifest.json",
        *(name for shard in manifest["shards"] for name in shard["files"]),
    }


def test_the_result_opens_as_one_corpus_with_its_documents(tmp_path: Path) -> None:
    inputs, texts = make_inputs(tmp_path / "in")
    run(inputs, tmp_path / "out")
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.format == "megatron"
        assert corpus.tokens(0, corpus.num_tokens).tolist() == joined(expected(texts))
        assert corpus.num_documents == len(read_documents(tmp_path / "out"))


@pytest.mark.parametrize("format", ["flat", "megatron"])
def test_masks_lie_beside_their_ids(tmp_path: Path, format: str) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    run(inputs, tmp_path / "out", CharacterEncoder(has_mask=True), format=format)
    names = {path.name for path in (tmp_path / "out").glob("*.bin")}
    assert len(names) > 3
    assert {path.name for path in (tmp_path / "out").glob("*.loss")} == {f"{name}.loss" for name in names}
    for name in names:
        ids = np.fromfile(tmp_path / "out" / name, np.uint16)
        mask = np.fromfile(tmp_path / "out" / f"{name}.loss", np.uint8)
        assert mask.tolist() == (ids != ord("!")).tolist()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {name for shard in manifest["shards"] for name in shard["files"]} >= {f"{name}.loss" for name in names}


def test_a_mask_of_another_length_is_an_error(tmp_path: Path) -> None:
    class Short(CharacterEncoder):
        def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
            return [Encoded(np.arange(3), np.ones(2, np.uint8)) for _ in documents]

    inputs, _ = make_inputs(tmp_path / "in")
    with pytest.raises(ValueError, match=r"3 ids .*mask of 2"):
        run(inputs, tmp_path / "out", Short(has_mask=True))


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_parts_of_several_processes_are_the_whole(tmp_path: Path, count: int) -> None:
    """Also with more parts than inputs; the corpus appears with the last part, whichever that is."""
    inputs, _ = make_inputs(tmp_path / "in")
    run(inputs, tmp_path / "whole")
    order = random.Random(count).sample(range(count), count)
    for at, part in enumerate(order):
        summary = run(inputs, tmp_path / "parts", shard=(part, count))
        done = [number for number in range(6) if number % count in order[: at + 1]]
        assert summary.missing == 6 - len(done)
        if summary.missing:
            with pytest.raises(CorpusError, match="--shard"):
                open_corpus(tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_very_many_inputs_share_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_module, "MOST_ITEMS", 4)
    (tmp_path / "in").mkdir()
    for number in range(10):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}")
    assert run(tmp_path / "in", tmp_path / "out", shard_tokens=10**6).shards == 4
    assert read_documents(tmp_path / "out") == expected([f"text {number}" for number in range(10)])


MOST_KILLS = 5
KILLED = """
    import os, signal, sys
    sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
    from corpus_truth import run
    import dali_pipes.text.shard_writer as writer, pathlib
    events, end = 0, int(sys.argv[4])

    def counted(function):
        def call(*arguments, **keywords):
            global events
            events += 1
            if events == end:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return call

    for owner, name in ((os, "fsync"), (os, "link"), (pathlib.Path, "rename"), (pathlib.Path, "unlink"), (os, "rmdir")):
        setattr(owner, name, counted(getattr(owner, name)))
    writer._HashedFile.write = counted(writer._HashedFile.write)
    run(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_killed_at_any_moment_and_started_again(tmp_path: Path, seed: int) -> None:
    """In the end the same bytes as an unbroken run; what was finished at a kill is still the same file."""
    inputs, _ = make_inputs(tmp_path / "in", seed, files=4)
    run(inputs, tmp_path / "whole")
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    draw, kills = random.Random(seed), 0
    finished: dict[str, int] = {}
    while True:
        # A start needs some ten of these events for one more shard.
        end = draw.randint(1, 40) if kills < MOST_KILLS else 10**9
        command = [sys.executable, script, Path(__file__).parent, inputs, out, end]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        there = {path.name: path for path in out.rglob("tokens-*") if path.suffix not in (".tmp", ".json")}
        assert {name: there[name].stat().st_mtime_ns for name in finished} == finished, (
            "a finished shard was done again"
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        whole = {path.stem for path in out.rglob("tokens-*.json")}
        finished |= {n: p.stat().st_mtime_ns for n, p in there.items() if n.split(".")[0] in whole}
        if not (out / "manifest.json").exists() and (out / "_tokenize").exists() and not list(out.glob("*.bin")):
            with pytest.raises(CorpusError):
                open_corpus(out)
    assert kills >= 2
    assert finished
    assert files_of(out) == files_of(tmp_path / "whole")


def test_interrupted_at_any_moment_of_the_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = make_inputs(tmp_path / "in", files=2)
    run(inputs, tmp_path / "whole")
    out, rename, moves = tmp_path / "out", Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal moves
        if target.parent == out:
            moves += 1
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(inputs, out)
    names = sorted(name for name in files_of(tmp_path / "whole") if name != "manifest.json")
    for name in names:
        assert not (out / "manifest.json").exists()
        rename(out / "_tokenize" / name, out / name)
        with pytest.raises(KeyboardInterrupt):  # at the next one, or at the manifest
            run(inputs, out)
    monkeypatch.undo()
    run(inputs, out)
    assert moves == len(names) + 1
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    class Unused(CharacterEncoder):
        def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
            raise AssertionError("encoded again")

    inputs, _ = make_inputs(tmp_path / "in")
    first = run(inputs, tmp_path / "out")
    before = files_of(tmp_path / "out")
    assert run(inputs, tmp_path / "out", Unused()) == first
    assert files_of(tmp_path / "out") == before


def broken_run(inputs: Path, out: Path) -> None:
    """A run that ends with an error in its fourth input."""

    class Broken(CharacterEncoder):
        def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
            if any(document.file.name == "in-3.jsonl" for document in documents):
                raise CorpusFormatError("broken")
            return super().encode(documents)

    with pytest.raises(CorpusFormatError, match="broken"):
        run(inputs, out, Broken())
    assert not list(out.rglob("*.tmp")), "an error leaves no unfinished files"
    assert not list(out.glob("*.bin"))


@pytest.mark.parametrize("is_finished", [False, True])
def test_other_settings_and_inputs_are_refused_by_name(tmp_path: Path, is_finished: bool) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    out = tmp_path / "out"
    run(inputs, out) if is_finished else broken_run(inputs, out)
    what = "a finished corpus" if is_finished else "an unfinished run"
    before = files_of(out)

    def refused(message: str, **job: Any) -> None:
        with pytest.raises(ConfigError, match=rf"out: .*{what} .*{message}"):
            run(inputs, out, **job)
        assert files_of(out) == before

    class Other(CharacterEncoder):
        settings = {"characters": 2}  # noqa: RUF012

    refused("shard_tokens: .*40.*41", shard_tokens=41)
    refused("format: .*'megatron'.*'flat'", format="flat")
    refused("characters: .*1.*2", encoder=Other())
    data = (inputs / "in-1.jsonl").read_bytes()
    time = (inputs / "in-1.jsonl").stat().st_mtime_ns
    (inputs / "in-1.jsonl").write_bytes(data.replace(b"a", b"c", 1))
    refused(r"input 1: in-1\.jsonl ")
    (inputs / "in-1.jsonl").write_bytes(data + b"\n")
    refused(rf"input 1: .*in-1\.jsonl, {len(data)} bytes, .*in-1\.jsonl, {len(data) + 1} bytes")
    (inputs / "in-1.jsonl").write_bytes(data)
    os.utime(inputs / "in-1.jsonl", ns=(time, time + 1000))
    refused(rf"input 1: in-1\.jsonl .*modified_ns .*{time}.*{time + 1000}")
    os.utime(inputs / "in-1.jsonl", ns=(0, time))
    (inputs / "in-6.jsonl").write_bytes(data)
    refused("inputs: .*6.*7")
    (inputs / "in-6.jsonl").unlink()
    record = out / "manifest.json" if is_finished else out / "_tokenize" / "plan.json"
    made = json.loads(record.read_text())
    for file in made["inputs"]:
        del file["modified_ns"]  # as releases before version 2 of the settings left it
    made["settings"]["version"] = 1
    kept = record.read_bytes()
    record.write_text(json.dumps(made))
    before = files_of(out)
    refused("version: .*1.*2")
    record.write_bytes(kept)
    inputs.rename(tmp_path / "moved")  # not a change
    run(tmp_path / "moved", out)
    run(tmp_path / "moved", tmp_path / "whole")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_an_item_is_done_by_one_process_at_a_time(tmp_path: Path) -> None:
    inputs, _ = make_inputs(tmp_path / "in")

    class Second(CharacterEncoder):
        def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
            with pytest.raises(ConfigError, match=r"out: .*input 0 \(.*in-0\.jsonl\).*--shard"):
                run(inputs, tmp_path / "out")
            # Another part is free, and waits for nothing.
            assert run(inputs, tmp_path / "out", shard=(1, 6)).missing == 5
            raise CorpusFormatError("enough")

    with pytest.raises(CorpusFormatError, match="enough"):
        run(inputs, tmp_path / "out", Second())
    run(inputs, tmp_path / "out")
    run(inputs, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    before = files_of(inputs)
    with pytest.raises(ConfigError, match=r"in: .*\(in-0\.jsonl"):
        run(inputs, inputs)
    assert files_of(inputs) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusWriteError, match=r"file: .*File exists"):
        run(inputs, tmp_path / "file")
    with pytest.raises(CorpusWriteError, match=r"/proc/x: .*No such file"):
        run(inputs, Path("/proc/x"))


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_parts_that_cannot_be(tmp_path: Path, shard: tuple[int, int]) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"shard .*i/n"):
        run(inputs, tmp_path / "out", shard=shard)


def test_an_input_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    job = Job(find_text_files(inputs), CharacterEncoder(), "megatron")
    with (inputs / "in-4.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(CorpusReadError, match=r"in-4\.jsonl: .*\d+ bytes .*\d+ bytes"):
        tokenize_files(job, tmp_path / "out", "test")


def test_an_input_of_the_same_size_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    job = Job(find_text_files(inputs), CharacterEncoder(), "megatron")
    data = (inputs / "in-4.jsonl").read_bytes()
    (inputs / "in-4.jsonl").write_bytes(data.replace(b"a", b"c", 1))
    os.utime(inputs / "in-4.jsonl", (1, 1))
    with pytest.raises(CorpusReadError, match=r"in-4\.jsonl: "):
        tokenize_files(job, tmp_path / "out", "test")
    with pytest.raises(ConfigError, match=r"input 4: in-4\.jsonl"):
        run(inputs, tmp_path / "out", shard_tokens=job.shard_tokens)


def test_progress_adds_up(tmp_path: Path) -> None:
    inputs, texts = make_inputs(tmp_path / "in")
    files = find_text_files(inputs)
    total = sum(file.size for file in files)
    for tokens in (sum(map(len, expected(texts))), 0):  # the second time nothing is left to do
        steps: list[tuple[int, int]] = []
        job = Job(files, CharacterEncoder(), "megatron", shard_tokens=40)
        tokenize_files(job, tmp_path / "out", "test", advance=lambda *step: steps.append(step))  # noqa: B023
        assert sum(done for done, _ in steps) == (total if tokens else 0)
        assert sum(count for _, count in steps) == tokens


class Failing(CharacterEncoder):
    """Fails at the first document of an input whose name is in `names`, or drops all documents."""

    def __init__(self, *names: str, drops: bool = False) -> None:
        super().__init__()
        self._names, self._drops = names, drops

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        if any(document.file.name in self._names for document in documents):
            raise CorpusFormatError("broken")
        return [None for _ in documents] if self._drops else super().encode(documents)


def test_a_run_without_a_finished_shard_does_not_block_the_corrected_command(tmp_path: Path) -> None:
    """With other settings, and with other inputs: it leaves the bytes of a run in a new folder."""
    inputs, _ = make_inputs(tmp_path / "in")
    out = tmp_path / "out"
    for other in ({}, {"shard_tokens": 30}, {"format": "flat"}):
        with pytest.raises(CorpusFormatError, match="broken"):
            run(inputs, out, Failing("in-0.jsonl"), **other)
    (inputs / "in-5.jsonl").unlink()
    run(inputs, out, shard_tokens=35)
    run(inputs, tmp_path / "whole", shard_tokens=35)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_run_that_made_no_token_does_not_block_the_corrected_command(tmp_path: Path) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    out = tmp_path / "out"
    for _ in range(2):  # the same again is the same error
        with pytest.raises(CorpusError, match=r"in-0\.jsonl.* dropped"):
            run(inputs, out, Failing(drops=True))
        assert not (out / "manifest.json").exists()
    run(inputs, out, format="flat")
    run(inputs, tmp_path / "whole", format="flat")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_one_finished_shard_blocks_other_settings(tmp_path: Path) -> None:
    """Also where the inputs before it made none, or hold no token."""
    inputs, _ = make_inputs(tmp_path / "in")
    out = tmp_path / "out"
    with pytest.raises(CorpusFormatError, match="broken"):
        run(inputs, out, Failing("in-3.jsonl"), shard=(3, 6))
    run(inputs, out, shard=(2, 6))  # an input without a document
    run(inputs, out, shard_tokens=41, shard=(2, 6))
    run(inputs, out, shard_tokens=41, shard=(1, 6))
    before = files_of(out)
    with pytest.raises(ConfigError, match=r"unfinished .*shard_tokens: .*41.*40"):
        run(inputs, out)
    assert files_of(out) == before
    run(inputs, out, shard_tokens=41)
    run(inputs, tmp_path / "whole", shard_tokens=41)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_run_at_work_is_not_taken_over(tmp_path: Path) -> None:
    """Another with other settings is refused while it works, and it goes on undisturbed."""
    inputs, _ = make_inputs(tmp_path / "in")

    class Watched(CharacterEncoder):
        refused = 0

        def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
            with pytest.raises(ConfigError, match=r"shard_tokens: .*40.*41"):
                run(inputs, tmp_path / "out", shard_tokens=41)
            Watched.refused += 1
            return super().encode(documents)

    run(inputs, tmp_path / "out", Watched())
    assert Watched.refused
    run(inputs, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_run_that_was_taken_over_before_its_first_shard_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found its own plan, and before it takes an input another run replaces the plan."""
    inputs, _ = make_inputs(tmp_path / "in")
    begin, out = RunFolder.begin, tmp_path / "out"

    def begin_and_be_taken_over(self: RunFolder) -> dict[str, Any] | None:
        manifest = begin(self)
        monkeypatch.undo()
        with pytest.raises(CorpusFormatError, match="broken"):
            run(inputs, out, Failing("in-0.jsonl"), shard_tokens=41)
        return manifest

    monkeypatch.setattr(RunFolder, "begin", begin_and_be_taken_over)
    with pytest.raises(ConfigError, match=r"shard_tokens: .*41.*40"):
        run(inputs, out)
    assert not list(out.rglob("tokens-*"))
    run(inputs, out)
    run(inputs, tmp_path / "whole")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_without_locks_nothing_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = make_inputs(tmp_path / "in")
    for module in ("runtime.locks", "text.run_folder"):
        monkeypatch.setattr(f"dali_pipes.{module}.lock", lambda path, wait=True: (None, False))
    with pytest.raises(CorpusFormatError, match="broken"):
        run(inputs, tmp_path / "out", Failing("in-0.jsonl"))
    with pytest.raises(ConfigError, match=r"shard_tokens: .*40.*41"):
        run(inputs, tmp_path / "out", shard_tokens=41)
    run(inputs, tmp_path / "out")


TAKERS = """
    import os, pathlib, sys
    sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
    from corpus_truth import run
    from dali_pipes.errors import ConfigError
    inputs, out, tokens, part = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    try:
        run(inputs, out, shard_tokens=tokens, shard=(part, 2))
    except ConfigError as error:
        print(error)
        sys.exit(3)
"""


def test_of_several_that_take_over_at_once_one_kind_wins(tmp_path: Path) -> None:
    """Two parts of one command and two of another, over a run that failed: what comes out is all of one command."""
    inputs, _ = make_inputs(tmp_path / "in")
    for tokens in (30, 50):
        run(inputs, tmp_path / f"whole-{tokens}", shard_tokens=tokens)
    script = tmp_path / "taker.py"
    script.write_text(textwrap.dedent(TAKERS))
    out = tmp_path / "out"
    with pytest.raises(CorpusFormatError, match="broken"):
        run(inputs, out, Failing("in-0.jsonl"))
    commands = [
        [*map(str, (sys.executable, script, Path(__file__).parent, inputs, out, tokens, part))]
        for part in (0, 1)
        for tokens in (30, 50)
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[0] for process in started]
    codes = [process.returncode for process in started]
    assert set(codes) <= {0, 3}, (codes, outputs)
    winner = next(tokens for code, tokens in zip(codes, (30, 50, 30, 50), strict=True) if code == 0)
    for part in (0, 1):  # a part that came too early, while the other command was at work
        run(inputs, out, shard_tokens=winner, shard=(part, 2))
    assert files_of(out) == files_of(tmp_path / f"whole-{winner}")
