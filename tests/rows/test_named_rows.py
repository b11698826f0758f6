"""Named sources: orders of their own, shares that depend on the name alone, and windows at a random offset."""

import hashlib
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.errors import ConfigError
from dali_pipes.operators import permute
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.windows import WindowCuts, WindowRows, Windows, split_windows

NAMES = st.one_of(st.none(), st.text(max_size=12))
SHARES = st.one_of(
    st.none(), st.integers(1, 40).flatmap(lambda below: st.integers(1, below).map(lambda above: Fraction(above, below)))
)
LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=40)


def document_rows(lengths: list[int], **changes: Any) -> DocumentRows:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    options = {"mode": "pack", "long_documents": "split", "window_documents": 5, "shuffle": True, "seed": 3, **changes}
    return DocumentRows(offsets, 8, **options)


def starts_of(rows: WindowRows, pass_number: int) -> list[int]:
    starts: list[int] = rows.plan(pass_number, np.arange(rows.count(pass_number))).starts.tolist()
    return starts


def tokens_of(rows: DocumentRows, pass_number: int) -> list[tuple[int, ...]]:
    """The tokens of each row of a pass."""
    pieces = rows.plan(pass_number, np.arange(rows.count(pass_number))).pieces
    assert pieces is not None
    runs = [range(s, s + n) for s, n in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)]
    bounds = pieces.row_offsets.tolist()
    return [sum((tuple(run) for run in runs[a:b]), ()) for a, b in itertools.pairwise(bounds)]


def key_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def num_kept(share: Fraction | None, count: int) -> int:
    return count if share is None else max(1, int(share * count))


@given(st.integers(60, 400), NAMES, SHARES, st.booleans(), st.booleans(), st.integers(1, 9), st.integers(0, 9))
def test_every_kept_window_comes_once_a_pass(
    num_tokens: int, name: str | None, share: Fraction | None, shuffle: bool, offset: bool, stride: int, seed: int
) -> None:
    windows = split_windows(num_tokens, 5, stride, validation_fraction=0.1)
    rows = WindowRows(windows, shuffle=shuffle, seed=seed, name=name, share=share, random_offset=offset)
    fitting = [
        first
        for first in range(0, windows.num_tokens, stride)
        if first + (stride - 1 if offset else 0) + 6 <= windows.num_tokens
    ]
    assert rows.count(0) == rows.count(7) == rows.rows_of_pass() == num_kept(share, len(fitting))
    subsets = []
    for pass_number in range(3):
        starts = starts_of(rows, pass_number)
        shift = rows.first_of(pass_number)
        numbers = [(start - shift) // stride for start in starts]
        assert len(set(starts)) == len(starts)
        assert set(starts) <= {first + shift for first in fitting}
        assert 0 <= shift < (stride if offset else 1)
        assert min(starts) >= rows.first_token
        assert max(starts) + rows.row_tokens <= rows.first_token + rows.span
        assert rows.first_token + rows.span <= windows.num_tokens
        subsets.append(set(numbers))
    assert all(subset == subsets[0] for subset in subsets)
    other = WindowRows(windows, shuffle=not shuffle, seed=seed + 1, name=name, share=share, random_offset=offset)
    assert {(start - other.first_of(0)) // stride for start in starts_of(other, 0)} == subsets[0]


@given(st.integers(60, 300), st.text(max_size=5), SHARES, st.booleans(), st.booleans(), st.integers(0, 5))
def test_windows_against_plain_steps(
    num_tokens: int, name: str, share: Fraction | None, shuffle: bool, offset: bool, pass_number: int
) -> None:
    """Place, order of the pass, kept windows, window number, offset: one after the other."""
    stride, seed = 4, 11
    rows = WindowRows(
        Windows(100, (num_tokens - 6) // stride + 1, 5, stride, num_tokens),
        shuffle=shuffle,
        seed=seed,
        name=name,
        share=share,
        random_offset=offset,
    )
    # JSON's quotes, written by hand for the characters that need them
    quoted = '"' + "".join(_quoted(character) for character in name) + '"'
    n = (num_tokens - 5) // stride if offset else (num_tokens - 6) // stride + 1
    m = num_kept(share, n)
    numbers = np.arange(m)
    if shuffle:
        numbers = permute(numbers, m, key_of(f"dali_pipes order {seed} {quoted} {pass_number}"))
    if share is not None and share < 1:
        numbers = permute(numbers, n, key_of(f"dali_pipes share {quoted}"))
    first = 100 + (key_of(f"dali_pipes offset {seed} {quoted} {pass_number}") % stride if offset else 0)
    assert starts_of(rows, pass_number) == [first + stride * number for number in numbers.tolist()]
    formula = rows.formula(pass_number)
    assert formula is not None
    assert (formula.order.count, formula.first, formula.stride) == (m, first, stride)
    assert formula.key == rows.key(pass_number)
    is_part = share is not None and share < 1
    assert formula.order.num_items == n
    assert formula.order.kept_key == (key_of(f"dali_pipes share {quoted}") if is_part else None)
    assert formula.is_one_permutation != is_part


def _quoted(character: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
    if character in short:
        return short[character]
    if " " <= character <= "~":
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


@given(st.integers(60, 200), NAMES, SHARES, st.booleans(), st.booleans(), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=examples(50))
def test_places_of_a_token_are_all_rows_that_read_it(
    num_tokens: int, name: str | None, share: Fraction | None, shuffle: bool, offset: bool, stride: int, passes: int
) -> None:
    rows = WindowRows(
        split_windows(num_tokens, 5, stride), shuffle=shuffle, name=name, share=share, random_offset=offset
    )
    starts = starts_of(rows, passes)
    for position in range(num_tokens):
        reading = [place for place, start in enumerate(starts) if start <= position < start + rows.row_tokens]
        assert sorted(rows.places_of(passes, position) or []) == reading


@given(st.integers(60, 200), st.integers(1, 3), st.integers(1, 9), SHARES)
def test_rows_in_pieces_read_nothing_beyond_the_split(
    num_tokens: int, lookahead: int, stride: int, share: Fraction | None
) -> None:
    windows = split_windows(num_tokens, 5, stride, validation_fraction=0.1)
    cuts = WindowCuts(None, lookahead, windows.first + windows.num_tokens, False)
    rows = WindowRows(windows, cuts=cuts, share=share, random_offset=True)
    assert rows.first_token + rows.span <= cuts.limit
    for pass_number in range(3):
        plan = rows.plan(pass_number, np.arange(rows.count(pass_number)))
        sizes = np.full(len(plan.starts), rows.row_tokens)
        reads = rows.reads(plan, np.cumsum(sizes) - sizes, sizes)
        assert (reads.starts >= rows.first_token).all()
        assert (reads.starts + reads.lengths <= rows.first_token + rows.span).all()
        assert (reads.lengths >= 6).all()


@pytest.mark.parametrize("stride", [1, 2, 5, 8])
def test_all_alignments_are_seen_over_passes(stride: int) -> None:
    rows = WindowRows(split_windows(200, 5, stride), name="web", random_offset=True)
    seen = np.bincount([rows.first_of(pass_number) for pass_number in range(4000)], minlength=stride)
    expected = 4000 / stride
    assert len(seen) == stride
    assert ((seen - expected) ** 2 / expected).sum() < 30  # chi-square, at most 7 degrees of freedom: p < 1e-4


@pytest.mark.parametrize(("num_tokens", "count"), [(12, None), (13, 1), (20, 1), (21, 2)])
def test_offsets_at_the_edges(num_tokens: int, count: int | None) -> None:
    """The largest offset is token 7, and a row reads 6 tokens from there on."""
    windows = split_windows(num_tokens, 5, 8)
    if count is None:
        with pytest.raises(ConfigError) as raised:
            WindowRows(windows, random_offset=True)
        assert all(part in str(raised.value) for part in ("random_offset", "12 tokens", "13 tokens", "7 tokens"))
    else:
        assert WindowRows(windows, random_offset=True).count(0) == count


def orders_of(names: list[str | None]) -> list[list[int]]:
    lengths = [3] * 60
    found: list[list[int]] = []
    for name in names:
        found.append(starts_of(WindowRows(split_windows(500, 4), seed=1, name=name), 0))
        found.append([row[0] for row in tokens_of(document_rows(lengths, name=name, mode="pad"), 0)])
    return found


def test_names_make_orders_of_their_own() -> None:
    """Also names that look like other parts of a key, or like another name with its quotes."""
    names = [None, "", " ", "0", "1 0", "order", "None", "null", '"', '""', '"web"', "web", 'web" 0', "web\\", "wéb"]
    orders = orders_of(names)
    assert len(set(map(tuple, orders))) == len(orders)
    assert orders_of(names) == orders
    for kind in (0, 1):
        assert len({tuple(sorted(order)) for order in orders[kind::2]}) == 1


@given(st.lists(st.text(alphabet='"\\ 01a', max_size=4), min_size=2, max_size=20, unique=True), st.integers(0, 20))
def test_keys_of_two_names_are_never_equal(names: list[str], seed: int) -> None:
    windows = split_windows(100, 4)
    keys = [
        WindowRows(windows, seed=seed, name=name).key(number) for name in [None, *names] for number in (0, 1, 10, 11)
    ]
    assert len(set(keys)) == len(keys)


def test_a_pass_without_a_name_keeps_its_key() -> None:
    windows = split_windows(100, 4)
    assert WindowRows(windows, seed=5).key(3) == key_of("dali_pipes order 5 3")
    plain, share_of_one = document_rows([4] * 30), document_rows([4] * 30, share=Fraction(1))
    assert tokens_of(plain, 2) == tokens_of(share_of_one, 2)
    assert starts_of(WindowRows(windows), 1) == starts_of(WindowRows(windows, share=Fraction(1)), 1)
    numbers = permute(np.arange(5), 30, key_of("dali_pipes 3 order 2"))
    first = {tuple(range(4 * number, 4 * number + 4)) for number in numbers.tolist()}
    pad = tokens_of(document_rows([4] * 30, mode="pad"), 2)
    assert set(pad[:5]) == first, "window 0 has the first five documents of the pass"


@given(LENGTHS, NAMES, SHARES, st.sampled_from(["pack", "pad"]), st.booleans(), st.integers(1, 9))
def test_a_share_of_documents(
    lengths: list[int], name: str | None, share: Fraction | None, mode: str, shuffle: bool, window: int
) -> None:
    rows = document_rows(lengths, name=name, share=share, mode=mode, shuffle=shuffle, window_documents=window)
    text = "dali_pipes share" if name is None else "dali_pipes share " + '"' + "".join(map(_quoted, name)) + '"'
    count = num_kept(share, len(lengths))
    numbers = np.arange(count)
    if share is not None and share < 1:
        numbers = permute(numbers, len(lengths), key_of(text))
    ends = np.cumsum(lengths)
    expected = sorted(t for number in numbers.tolist() for t in range(ends[number] - lengths[number], ends[number]))
    assert rows.num_documents == count
    for pass_number in range(2):
        served = [token for row in tokens_of(rows, pass_number) for token in row]
        assert sorted(served) == expected
        report = rows.report(pass_number)
        assert (report.documents, report.tokens, report.rows) == (count, len(expected), rows.count(pass_number))
    other = document_rows(lengths, name=name, share=share, mode=mode, seed=99)
    assert sorted(token for row in tokens_of(other, 5) for token in row) == expected
    if not shuffle:
        assert tokens_of(rows, 0) == tokens_of(rows, 1)
        if mode == "pad" and max(lengths) <= 8:
            assert [row[-1] for row in tokens_of(rows, 0)] == [int(ends[number]) - 1 for number in numbers]


def test_what_long_documents_lose_is_that_of_the_share() -> None:
    lengths = [3, 30] * 50
    rows = document_rows(lengths, share=Fraction(1, 4), name="web", long_documents="drop")
    report, lost = rows.report(0), rows.left_out()
    assert (lost.documents, lost.tokens, lost.is_exact) == (report.dropped_documents, report.dropped_tokens, True)
    assert 0 < lost.documents < 25


def test_passes_of_a_named_source_differ() -> None:
    rows = document_rows([3, 5, 7] * 20, name="web", share=Fraction(1, 2))
    orders = [tokens_of(rows, pass_number) for pass_number in range(5)]
    assert len(set(map(str, orders))) == 5
    windows = WindowRows(split_windows(500, 4), name="web", share=Fraction(1, 2))
    assert len({tuple(starts_of(windows, pass_number)) for pass_number in range(5)}) == 5
