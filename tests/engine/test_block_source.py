"""The block source by itself: what a block holds, how errors surface, and that buffers are kept and reused."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_lines import AtLine, lines_of
from oracle import epoch_batches

from dali_pipes.config import LoaderConfig
from dali_pipes.engine import block_source as source_module
from dali_pipes.engine.block_source import BlockInfo, BlockSource
from dali_pipes.engine.build import BuiltSource, batches_per_run
from dali_pipes.errors import LoaderClosedError, TokenRangeError
from dali_pipes.rows.windows import WindowRows, Windows
from dali_pipes.runtime.ranks import resolve_ranks
from dali_pipes.schedule import Position, Schedule


def build(corpus: Any, endless: bool = False, **settings: Any) -> BlockSource:
    defaults = {"corpus": corpus.pattern, "dtype": corpus.dtype, "batch_size": 2, "seq_len": 4, "device": "cpu"}
    return BuiltSource(resolve_ranks(LoaderConfig(**{**defaults, **settings})), endless=endless).source


def copied(block: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(array.copy() for array in block)


def test_blocks_are_whole_batches_in_the_files_width(counting: Callable[..., Any]) -> None:
    """Five batches in blocks of two: 4, 4 and 2 rows; then StopIteration, as often as asked."""
    corpus = counting(41, dtype="uint16")
    source = build(corpus, batches_per_run=2, outputs=("input_ids", "labels", "row_ids"), shuffle=False)
    blocks = [copied(source(BlockInfo(i, 0))) for i in range(3)]
    assert [block[0].shape for block in blocks] == [(1, 4, 4), (1, 4, 4), (1, 2, 4)]
    assert blocks[0][0].dtype == blocks[0][1].dtype == np.uint16
    assert blocks[0][0][0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert blocks[0][1][0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert blocks[2][2].tolist() == [[8, 9]]
    for _ in range(3):
        with pytest.raises(StopIteration):
            source(BlockInfo(3, 0))
    source.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_block_depends_on_its_number_alone(counting: Callable[..., Any], num_threads: int) -> None:
    source = build(counting(100), num_threads=num_threads, batches_per_run=3)
    order = [(0, 0), (0, 1), (1, 0), (0, 3), (0, 1), (2, 2), (0, 0), (1, 0)]
    seen: dict[tuple[int, int], Any] = {}
    for epoch, number in order:
        block = copied(source(BlockInfo(number, epoch)))
        expected = seen.setdefault((epoch, number), block)
        assert all(np.array_equal(a, b) for a, b in zip(block, expected, strict=True))
    source.close()


def test_endless_blocks_run_on_through_epochs(counting: Callable[..., Any]) -> None:
    corpus = counting(41)
    source = build(corpus, endless=True, batches_per_run=2)
    got = [source(BlockInfo(i, 0))[0][0].copy() for i in range(6)]
    expected = [b["input_ids"] for e in (0, 1) for b in epoch_batches(corpus.tokens, batch_size=2, seq_len=4, epoch=e)]
    assert np.array_equal(np.concatenate(got), np.concatenate(expected))
    source.close()


def test_restart_moves_to_any_position(counting: Callable[..., Any]) -> None:
    corpus = counting(41)
    source = build(corpus, endless=True, batches_per_run=2)
    source(BlockInfo(0, 0))
    source.restart(Position(3, 4), iteration=7)
    got = source(BlockInfo(7, 0))[0][0]
    expected = list(epoch_batches(corpus.tokens, batch_size=2, seq_len=4, epoch=3, first_row=4))[:2]
    assert np.array_equal(got, np.concatenate([b["input_ids"] for b in expected]))
    source.close()


def test_buffers_are_kept_and_reused(counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many blocks no more buffers exist than blocks can be on their way: threads + 1 ahead and one handed out."""
    source = build(counting(2000), endless=True, batches_per_run=1, num_threads=2)
    made = 0
    original = source.placement.new_slot

    def counted(max_rows: int) -> Any:
        nonlocal made
        made += 1
        return original(max_rows)

    monkeypatch.setattr(source.placement, "new_slot", counted)
    for number in range(100):
        source(BlockInfo(number, 0))
    source.close()
    assert 1 <= made <= 4


@pytest.mark.parametrize(
    ("dtype", "bad", "vocab_size", "expected"),
    [
        ("uint16", 60000, 50304, "vocab_size = 50304"),
        ("uint32", 2**31, 50304, "vocab_size = 50304"),
        ("int32", -1, None, "is -1"),
        ("int32", -5, 50304, "is -5"),
        ("int64", 128256, 128256, "vocab_size = 128256"),
        ("uint8", 255, 255, "vocab_size = 255"),
    ],
)
def test_ids_out_of_range_are_named(
    tmp_path: Path, dtype: str, bad: int, vocab_size: int | None, expected: str
) -> None:
    """The file, the token's place in it, the value, and what was expected."""
    tokens = np.ones(41, dtype=dtype)
    tokens[30] = bad
    tokens[:17].tofile(tmp_path / "a.bin")
    tokens[17:].tofile(tmp_path / "b.bin")
    config = LoaderConfig(
        corpus=str(tmp_path / "*.bin"),
        dtype=dtype,
        vocab_size=vocab_size,
        batch_size=1,
        seq_len=4,
        shuffle=False,
        device="cpu",
        batches_per_run=1,
    )
    source = BuiltSource(resolve_ranks(config), endless=False).source
    for number in range(7):
        source(BlockInfo(number, 0))
    for _ in range(2):
        with pytest.raises(TokenRangeError, match=r"b\.bin: token 13 \(corpus position 30\) is") as error:
            source(BlockInfo(7, 0))
        assert expected in str(error.value)
    source.close()


def test_no_thread_before_the_first_call_or_after_close(counting: Callable[..., Any]) -> None:
    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    before = set(threading.enumerate())
    source = build(counting(1000))
    assert not started()
    source(BlockInfo(0, 0))
    assert started()
    source.close()
    source.close()
    assert not started()
    with pytest.raises(LoaderClosedError):
        source(BlockInfo(1, 0))


def test_batches_per_run_follows_the_byte_target_and_its_cap() -> None:
    def choose(rows: int = 10**6, target: int = 1 << 20, **settings: int) -> int:
        config = LoaderConfig(corpus="x", **{"batch_size": 8, "seq_len": 1024, **settings})
        windows = Windows(0, rows, config.row_len, config.row_len, rows * config.row_len + 1)
        return batches_per_run(config, Schedule(WindowRows(windows), config.batch_size), target)

    assert choose() * 8 * 1024 == 1 << 20
    assert choose(target=1 << 18) * 8 * 1024 == 1 << 18
    assert choose(batches_per_run=5) == 5
    assert choose(batches_per_run=5, max_block_bytes=3 * 8 * 1024 * 16) == 3
    assert choose(batches_per_run=5, max_block_bytes=1) == 1
    assert choose(batch_size=64, seq_len=10**6) == 1
    assert choose(rows=24) == 3  # never more than an epoch has


def test_a_signal_handler_asks_for_times(counting: Callable[..., Any]) -> None:
    """At any line of a call: it waits for no one, and for itself least of all."""
    corpus = counting(41)
    source = build(corpus, endless=True)
    source(BlockInfo(0, 0))
    lines = [line for line in lines_of(lambda: source(BlockInfo(1, 0))) if line[0] == source_module.__file__]
    assert len(lines) > 20
    for number, line in enumerate(lines, 2):
        with AtLine(line, source.block_times):
            source(BlockInfo(number, 0))
    assert source.block_times().blocks >= len(lines)
    source.close()
