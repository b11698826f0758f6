"""The order of files is defined, and a state that does not fit is refused with the list of differences."""

import glob
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, take

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError

T = 4
SETTINGS: dict[str, Any] = {"dtype": "uint32", "device": "cpu", "batch_size": 5, "seq_len": T}


def write(folder: Path, name: str, start: int, count: int) -> Path:
    folder.mkdir(exist_ok=True)
    np.arange(start, start + count, dtype=np.uint32).tofile(folder / name)
    return folder / name


def four_shards(folder: Path, *, backwards: bool = False) -> Path:
    shards = [("s_1.bin", 0), ("s_2.bin", 50), ("s_03.bin", 100), ("s_10.bin", 150)]
    for name, start in reversed(shards) if backwards else shards:
        write(folder, name, start, 50)
    return folder


def refused(state: dict[str, Any], **settings: Any) -> str:
    """The message of a loader that must not take a state; the loader works on as if it had not been asked."""
    with TokenLoader(**{**SETTINGS, **settings}) as loader:
        before = loader.state_dict()
        with pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        assert len(take(loader, 2)) == 2
    return str(caught.value)


def state_after(count: int, **settings: Any) -> dict[str, Any]:
    with TokenLoader(**{**SETTINGS, **settings}) as loader:
        take(loader, count)
        return loader.state_dict()


@pytest.mark.parametrize("how", ["folder", "pattern", "list of folders"])
@pytest.mark.parametrize("listing", ["reversed", "shuffled"])
def test_the_order_of_a_listing_plays_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, listing: str
) -> None:
    """Two folders made in opposite order, listed in another order still: the same stream, in natural order."""
    a, b = four_shards(tmp_path / "a"), four_shards(tmp_path / "b", backwards=True)

    def mixed(names: list[str]) -> list[str]:
        return names[::-1] if listing == "reversed" else random.Random(len(names)).sample(names, len(names))

    plain_listdir, plain_glob = os.listdir, glob.glob
    monkeypatch.setattr(os, "listdir", lambda *args: mixed(plain_listdir(*args)))
    monkeypatch.setattr(glob, "glob", lambda *args, **kwargs: mixed(plain_glob(*args, **kwargs)))
    for folder in (a, b):
        corpus = {"folder": str(folder), "pattern": str(folder / "s_*"), "list of folders": [str(folder)]}[how]
        with TokenLoader(corpus=corpus, **SETTINGS) as loader:
            assert [path.name for path in loader.corpus.files] == ["s_1.bin", "s_2.bin", "s_03.bin", "s_10.bin"]
            assert all_same(loader, epoch_batches(np.arange(200), batch_size=5, seq_len=T))


def test_an_explicit_list_keeps_its_order(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    names = ["s_10.bin", "s_1.bin", "s_03.bin"]
    with TokenLoader(corpus=[str(folder / name) for name in names], shuffle=False, **SETTINGS) as loader:
        first = [int(row[0]) for batch in loader for row in batch["input_ids"]]
        assert first[0] == 150
        tokens = np.concatenate([np.fromfile(folder / name, np.uint32) for name in names])
        assert all_same(loader, epoch_batches(tokens, batch_size=5, seq_len=T, epoch=1, shuffle=False))
    state = state_after(2, corpus=[str(folder / name) for name in names])
    message = refused(state, corpus=[str(folder / name) for name in sorted(names)])
    assert "order" in message.splitlines()[1]


def test_a_moved_folder_resumes(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    for name in ("moved", "copied"):
        moved = tmp_path / name
        if name == "moved":
            folder.rename(moved)
        else:
            shutil.copytree(tmp_path / "moved", moved, copy_function=shutil.copyfile)  # new times
        with TokenLoader(corpus=str(moved / "*.bin"), **SETTINGS) as loader:
            loader.load_state_dict(state)
            assert all_same(loader, epoch_batches(np.arange(200), batch_size=5, seq_len=T, first_row=15))


def test_a_renamed_shard(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    (folder / "s_2.bin").rename(folder / "s_2b.bin")
    message = refused(state, corpus=str(folder))
    assert "s_2b.bin" in message
    assert "renamed" in message
    assert "s_1.bin" not in message


def test_an_added_and_a_removed_shard(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    write(folder, "s_11.bin", 200, 7)
    message = refused(state, corpus=str(folder))
    assert "files: saved 4, now 5" in message
    assert "tokens: saved 200, now 207" in message
    (folder / "s_11.bin").unlink()
    (folder / "s_10.bin").unlink()
    message = refused(state, corpus=str(folder))
    assert "files: saved 4, now 3" in message
    assert "tokens: saved 200, now 150" in message


def test_changed_content_of_the_same_size(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    write(folder, "s_03.bin", 101, 50)
    message = refused(state, corpus=str(folder))
    assert "s_03.bin" in message
    assert "s_1.bin" not in message


@pytest.mark.parametrize("kind", [{}, {"rows": "pack", "eos_id": 7}], ids=["stream", "pack"])
@pytest.mark.parametrize("where", ["after", "among"])
@pytest.mark.parametrize("shards", [1, 24, 25])
@pytest.mark.parametrize("taken", [0, 1])
def test_the_advice_for_a_corpus_that_has_grown(
    tmp_path: Path, shards: int, where: str, kind: dict[str, Any], taken: int
) -> None:
    """It is followed as it is written: the epoch of the state on the old files, the next one on all."""
    folder, settings = tmp_path / "growing", {**kind, "quiet": True}
    old = [str(write(folder, f"s_{number}.bin", 100 * number, 50)) for number in range(1, shards + 1)]
    with TokenLoader(old, **SETTINGS, **settings) as loader:
        rest = list(loader)[taken:]
    state = state_after(taken, corpus=old, **settings)
    added = ["s_0.bin", "s_500.bin"] if where == "among" else ["s_500.bin", "s_501.bin"]
    for name in added:
        write(folder, name, 3, 20)
    with TokenLoader(folder, **SETTINGS, **settings) as grown, pytest.raises(StateError) as caught:
        grown.load_state_dict(state)
    message = str(caught.value)
    if where == "among" and shards > 24:  # of so many files a state does not tell each
        assert "has grown" not in message
        return
    still = "come first" if where == "after" else "are still there, in the same order"
    assert f"The corpus has grown: the files of the state {still}, and 2 files were added {where} them" in message
    assert f"({', '.join(added)})" in message
    epoch = taken  # an epoch that has not been begun begins with all
    with TokenLoader(old, **SETTINGS, **settings) as again:
        again.load_state_dict(state)
        assert all_same(again, rest)
    code = re.search(rf"To start epoch {epoch} with all {shards + 2} files: (.*)$", message)
    assert code is not None
    with TokenLoader(folder, **SETTINGS, **settings) as grown, TokenLoader(folder, **SETTINGS, **settings) as other:
        exec(code[1], {"loader": grown})
        assert (grown.epoch, grown.step) == (epoch, 0)
        of_epochs = [list(other) for _ in range(epoch + 1)]
        assert all_same(grown, of_epochs[epoch])


@pytest.mark.parametrize("change", ["another seed", "a file changed", "a file gone", "another order", "fewer files"])
def test_no_advice_on_growth_where_more_has_changed(tmp_path: Path, change: str) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    write(folder, "s_11.bin", 200, 7)
    settings: dict[str, Any] = {"corpus": str(folder)}
    if change == "another seed":
        settings["seed"] = 7
    elif change == "a file changed":
        write(folder, "s_1.bin", 1, 50)
    elif change == "a file gone":
        (folder / "s_1.bin").unlink()
        write(folder, "s_12.bin", 200, 9)
    elif change == "another order":
        settings["corpus"] = sorted(map(str, folder.iterdir()))
    else:
        settings["corpus"] = [str(folder / "s_1.bin"), str(folder / "s_2.bin")]
    message = refused(state, **settings)
    assert "has grown" not in message
    assert "start without the state" in message


@pytest.mark.parametrize("shards", [24, 25, 49, 60])
def test_the_changed_shard_of_many_is_among_those_named(tmp_path: Path, shards: int) -> None:
    """The state has room for 24 digests: with more shards than that, a run of neighbours is named."""
    folder = tmp_path / "many"
    for number in range(shards):
        write(folder, f"s_{number}.bin", 10 * number, 10)
    state = state_after(1, corpus=str(folder))
    wrong = []
    for changed in range(shards):
        write(folder, f"s_{changed}.bin", 10 * changed + 5, 10)
        with TokenLoader(corpus=str(folder), **SETTINGS) as loader, pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        message = str(caught.value)
        spans = [(int(a), int(b)) for a, b in re.findall(r"corpus files (\d+) to (\d+)", message)]
        spans += [(int(number), int(number)) for number in re.findall(r"corpus file s_(\d+)\.bin", message)]
        if not (len(spans) == 1 and spans[0][0] <= changed <= spans[0][1] < spans[0][0] + -(-shards // 24)):
            wrong.append((changed, spans))
        write(folder, f"s_{changed}.bin", 10 * changed, 10)
    assert not wrong, f"(changed shard, shards named): {wrong[:5]}"


ORDER_CHANGES = {
    "seq_len": 3,
    "stride": 2,
    "shuffle": False,
    "seed": 7,
    "split": "validation",
    "validation_fraction": 0.25,
    "label_shift": False,
}


@pytest.mark.parametrize("name", ORDER_CHANGES)
def test_every_setting_that_changes_the_order_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = four_shards(tmp_path / "a")
    base: dict[str, Any] = {"corpus": str(folder), "validation_fraction": 0.5}
    state = state_after(3, **base)
    old, new = {"stride": 4, "seed": 0}.get(name, state["config"][name]), ORDER_CHANGES[name]
    message = refused(state, **{**base, name: new})
    assert f"{name}: saved {old!r}, now {new!r}" in message
    others = set(ORDER_CHANGES) - {name} - ({"stride"} if name == "seq_len" else set())
    assert not [other for other in others if f"{other}: saved" in message]


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    write(folder, "s_1.bin", 1, 50)
    write(folder, "s_11.bin", 1, 50)
    message = refused(state, corpus=str(folder), seed=1, seq_len=8, stride=6, shuffle=False, validation_fraction=0.25)
    for name in ("order", "seq_len", "stride", "shuffle", "seed", "validation_fraction", "files", "tokens"):
        assert f"{name}: saved" in message, name


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 3},
        {"batches_per_run": 3},
        {"prefetch_queue_depth": 5},
        {"num_threads": 5},
        {"drop_last": False},
        {"repeat": True},
        {"rank": 0, "world_size": 1},
        {"max_block_bytes": 1},
        {"vocab_size": 2000},
        {"eos_id": 3},
        {"stride": T},
        {"format": "flat"},
        {"outputs": ("row_ids", "labels")},
    ],
    ids=str,
)
def test_settings_that_do_not_change_the_order_may_differ(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    with TokenLoader(**{**SETTINGS, "corpus": str(folder), "outputs": ("row_ids",), **change}) as loader:
        loader.load_state_dict(state)
        assert {**loader.state_dict(), "step_rows": state["step_rows"]} == state
        rows = next(iter(loader))["row_ids"].tolist()
        assert rows == list(range(15, 15 + loader.config.batch_size))


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"version": None},
        {"order": "feistel-v0"},
        {"order": None},
        {"config": {}},
        {"config": None},
        {"config": "seed"},
        {"corpus": {}},
        {"corpus": None},
        {"corpus": ["fingerprint"]},
        {"epoch": -1},
        {"epoch": 1.0},
        {"epoch": "1"},
        {"epoch": None},
        {"epoch": True},
        {"rows": -1},
        {"rows": 10**6},
        {"rows": 2.5},
        {"rows": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_a_state_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    assert refused({**state, **damage}, corpus=str(folder))


@pytest.mark.parametrize(
    "value", [None, {}, [], "state", 3, {"version": 1}, {"version": "1.0"}, {"model": {}, "optimizer": {}}], ids=str
)
def test_what_is_no_state_at_all_is_a_state_error(tmp_path: Path, value: Any) -> None:
    folder = four_shards(tmp_path / "a")
    assert refused(value, corpus=str(folder))


@pytest.mark.parametrize("name", ["version", "order", "config", "corpus", "epoch", "rows"])
def test_a_missing_part_is_named(tmp_path: Path, name: str) -> None:
    folder = four_shards(tmp_path / "a")
    state = state_after(3, corpus=str(folder))
    del state[name]
    message = refused(state, corpus=str(folder))
    assert name == "version" or name in message
