"""What the manual tells users of other loaders, its code run as it is printed; and what rows and states count."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from manual import recipe
from streams import all_same, loader_stream, oracle_stream, row_ids, take

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import StateError

ROOT = Path(__file__).parents[2]
T = 4


def open_ranks(corpus: Any, world_size: int, batch_size: int, **more: Any) -> list[TokenLoader]:
    settings = {"corpus": corpus.pattern, "dtype": "uint32", "device": "cpu", "quiet": True, "seq_len": T, "seed": 3}
    settings |= {"outputs": ("input_ids", "labels", "row_ids"), "batch_size": batch_size, "world_size": world_size}
    return [TokenLoader(LoaderConfig(**{**settings, **more}, rank=rank)) for rank in range(world_size)]


def write_samples(folder: Path, format: str, samples: list[list[int]]) -> str:
    import shard_files
    import table_files

    arrays = [np.array(sample, np.uint16) for sample in samples]
    if format == "npy":
        np.save(folder / "a.npy", np.stack(arrays))
    elif format == "parquet":
        table_files.write_parquet(folder / "a.parquet", table_files.table_of([table_files.list_array(samples)]))
    elif format == "mds":
        rows = [{"tokens": array} for array in arrays]
        shards = [rows[:7], rows[7:10], rows[10:]]
        return str(shard_files.write_mds(folder / "a", {"tokens": f"ndarray:uint16:{T + 1}"}, shards))
    else:
        for number, half in enumerate((arrays[:9], arrays[9:])):
            np.concatenate(half).tofile(folder / f"{number}.bin")
    return str(folder)


@pytest.mark.parametrize("format", ["mds", "parquet", "npy", "flat"])
def test_a_sample_of_fixed_length_is_a_row(tmp_path: Path, format: str) -> None:
    """Each once an epoch, cut into inputs and labels as its owner did, over the borders of files."""
    samples = np.arange(1, 17 * (T + 1) + 1).reshape(17, T + 1).tolist()
    corpus = write_samples(tmp_path, format, samples)
    settings: dict[str, Any] = {"corpus": corpus, "seq_len": T, "stride": T + 1, "device": "cpu", "quiet": True}
    with TokenLoader(**settings, batch_size=3, drop_last=False) as loader:
        for _ in range(2):
            rows = [row for batch in loader for row in zip(*(batch[name].tolist() for name in batch), strict=True)]
            assert sorted(rows) == [(sample[:-1], sample[1:]) for sample in samples]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 3), (3, 1)])
def test_a_run_begins_behind_a_number_of_rows(counting: Callable[..., Any], world_size: int, batch_size: int) -> None:
    """In any epoch, on every rank; a number within a step begins at that step."""
    corpus = counting(60, 43 * T + 1 - 60)
    step_rows = world_size * batch_size
    steps_an_epoch = 43 // step_rows
    for steps in (0, 1, steps_an_epoch - 1, steps_an_epoch, 2 * steps_an_epoch + 3):
        for rank, loader in enumerate(open_ranks(corpus, world_size, batch_size)):
            names = {"loader": loader, "consumed_rows": steps * step_rows + step_rows // 2}
            exec(recipe("start-after-rows"), names)
            order: dict[str, Any] = {"rank": rank, "world_size": world_size, "batch_size": batch_size, "seed": 3}
            expected = itertools.islice(oracle_stream(corpus.tokens, seq_len=T, **order), steps, None)
            assert all_same(take(loader_stream(loader), 2 * steps_an_epoch), take(expected, 2 * steps_an_epoch))
            loader.close()


@pytest.mark.parametrize("rows", ["pack", "pad"])
def test_rows_of_documents_begin_later_by_steps_that_are_left_out(counting: Callable[..., Any], rows: str) -> None:
    corpus = counting(300, vocab_size=11)
    settings: dict[str, Any] = {"rows": rows, "eos_id": 10, "window_documents": 7}
    ((whole,), (behind,)) = (open_ranks(corpus, 1, 2, **settings, **more) for more in ({}, {"skip_steps": [[0, 5]]}))
    with whole, behind:
        assert row_ids(behind) == row_ids(whole)[10:]
        with pytest.raises(StateError, match="check value"):
            exec(recipe("start-after-rows"), {"loader": whole, "consumed_rows": 10})


KINDS = [{}, {"rows": "pack", "eos_id": 10}, {"rows": "pad", "eos_id": 10}, {"drop_last": False}]


@pytest.mark.parametrize("settings", KINDS, ids=["stream", "pack", "pad", "partial step"])
def test_a_corpus_that_grows_and_one_that_lost_a_file(
    counting: Callable[..., Any], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The epoch is finished on the old files; the next one begins on the new ones, in its own order, in any epoch."""

    def rows(loader: TokenLoader, count: int | None = None) -> list[Any]:
        return [batch["input_ids"].tolist() for batch in itertools.islice(loader, count)]

    def one(files: Any = None) -> TokenLoader:
        named = corpus if files is None else SimpleNamespace(pattern=files)
        (loader,) = open_ranks(named, 1, 4, **{"outputs": ("input_ids", "labels"), **settings})
        return loader

    corpus = counting(*[30] * 11, vocab_size=11)
    old = list(map(str, corpus.files))
    with one() as whole, one() as begun:
        expected, found, state = rows(whole), rows(begun, 5), begun.state_dict()
    np.arange(50, dtype=np.uint32).tofile(corpus.folder / "shard_004_more.bin")
    for lost in (None, corpus.files[7]):
        if lost is not None:
            old[7] = str(tmp_path / lost.name)  # of the same name, elsewhere
            lost.rename(old[7])
        with one() as refused, one(old) as last:
            with pytest.raises(StateError, match="corpus"):
                refused.load_state_dict(state)
            last.load_state_dict(state)
            assert found + rows(last) == expected
            assert last.epoch == 1
        for epoch in (1, 4):
            with one() as new, one() as other:
                exec(recipe("next-epoch"), {"loader": new, "next_epoch": epoch})
                of_epochs = [rows(other) for _ in range(epoch + 2)][epoch:]
                head = rows(new, 3)
                new.load_state_dict(new.state_dict())
                assert [head + rows(new), rows(new)] == of_epochs


def test_a_batch_size_that_grows_loses_and_repeats_no_row(counting: Callable[..., Any]) -> None:
    """From 1 to 8 rows within an epoch, then on into the next one."""
    corpus = counting(100 * T + 1)
    (loader,) = open_ranks(corpus, 1, 1)
    names: dict[str, Any] = {"loader": loader, "TokenLoader": TokenLoader}
    served = []
    for batch_size in (1, 2, 4, 8):
        batches = take(names["loader"], 3)
        assert [len(batch["row_ids"]) for batch in batches] == [batch_size] * 3
        served += row_ids(batches)
        names["config"] = names["loader"].config
        exec(recipe("larger-batch"), names)
    with names["loader"] as last:
        served += row_ids(last)
        assert served == list(range(45 + (100 - 45) // 16 * 16))
        assert row_ids(take(last, 1)) == list(range(16))


@pytest.mark.parametrize(
    "runs",
    [[(2, 3, 3), (1, 5, 3), (3, 2, 1)], [(2, 3, 3), (1, 6, 4), (3, 2, 10)]],
    ids=["other sizes in one epoch", "one size in three epochs"],
)
def test_tokens_seen_are_those_of_all_ranks(counting: Callable[..., Any], runs: list[tuple[int, int, int]]) -> None:
    """After every step of runs on so many ranks, with a batch size, for some steps."""
    corpus = counting(50 * T + 1)
    seen, state = 0, None
    for world_size, batch_size, steps in runs:
        ranks = open_ranks(corpus, world_size, batch_size)
        for loader in ranks:
            loader.load_state_dict(state or loader.state_dict())
        for batches in itertools.islice(zip(*map(loader_stream, ranks), strict=True), steps):
            seen += sum(batch["input_ids"].numel() for batch in batches)
            for loader in ranks:
                names: dict[str, Any] = {"loader": loader, "config": loader.config}
                exec(recipe("tokens-seen"), names)
                state = names["state"]
                assert names["tokens_seen"] == seen
        for loader in ranks:
            loader.close()
    assert seen > 30 * T


@pytest.mark.parametrize("num_rows", [1, 5])
def test_labels_that_equal_the_inputs_change_no_row(counting: Callable[..., Any], num_rows: int) -> None:
    """A token behind the last row is needed either way: exactly k * T tokens make k - 1 rows."""
    for more, count in ((0, num_rows), (1, num_rows + 1), (T, num_rows + 1)):
        corpus = counting((num_rows + 1) * T + more, name=f"data_{more}")
        found = []
        for label_shift in (True, False):
            (loader,) = open_ranks(corpus, 1, 1, label_shift=label_shift)
            with loader:
                found.append([(batch["row_ids"].tolist(), batch["input_ids"].tolist()) for batch in loader])
                assert len(found[-1]) == count
        assert found[0] == found[1]


def test_bounds_of_a_partial_batch_are_as_many_as_of_a_whole_one(counting: Callable[..., Any]) -> None:
    """They end with the positions that the batch has, and repeat them."""
    corpus = counting(5 * T + 1)
    (loader,) = open_ranks(corpus, 1, 3, eos_id=2, drop_last=False, outputs=("input_ids", "cu_seqlens", "max_seqlen"))
    with loader:
        whole, partial = list(loader)
    assert (len(whole["input_ids"]), len(partial["input_ids"])) == (3, 2)
    assert len(whole["cu_seqlens"]) == len(partial["cu_seqlens"]) == 3 * T + 1
    bounds = partial["cu_seqlens"].tolist()
    assert set(bounds[partial["num_segments"] :]) == {2 * T}
    assert bounds[partial["num_segments"] - 1] < 2 * T
