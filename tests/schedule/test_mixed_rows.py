"""Rows of a mixture that are planned together are those that each source plans by itself, one at a time."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule.mixed_rows import MixedRows
from dali_pipes.schedule.mixture import MixtureOrder

SEQ_LEN = 8


@settings(max_examples=examples(60))
@given(data=st.data())
def test_plans_of_sources_one_by_one(data: st.DataObject) -> None:
    draw = data.draw
    shuffle, random_offset = draw(st.booleans()), draw(st.booleans())
    blocks = draw(st.none() | st.builds(BlockShape, st.integers(1, 5), st.sampled_from([1, 24, 40, 2**21])))
    names = [f"source {number}" for number in range(draw(st.integers(1, 12)))]
    sources = []
    for name in names:
        tokens = draw(st.one_of(st.integers(2 * SEQ_LEN, 40 * SEQ_LEN), st.integers(2 * SEQ_LEN, 10**12)))
        share = draw(st.sampled_from([None, None, Fraction(1, 3)]))
        windows = split_windows(tokens, SEQ_LEN)
        sources.append(
            WindowRows(
                windows, shuffle=shuffle, seed=3, name=name, share=share, random_offset=random_offset, blocks=blocks
            )
        )
    bases = np.cumsum([0, *(source.num_tokens for source in sources)])
    weights = {name: Fraction(draw(st.integers(0, 5))) for name in names} | {names[0]: Fraction(1)}
    order = MixtureOrder(names, [(0, weights)], seed=3)
    total = 10**12
    mixed = MixedRows(names, sources, bases, order, total, {}, [(0, weights)])
    epoch, first = draw(st.integers(0, 3)), draw(st.integers(0, total - 300 * 10**6))
    step = draw(st.sampled_from([1, 7, 128, 10**6]))
    places = first + step * np.arange(draw(st.one_of(st.integers(0, 3), st.integers(0, 300))))
    padding = np.full(draw(st.integers(0, 2)), -1)
    rows = mixed.plan(epoch, np.concatenate((places, padding)))
    assert rows.pieces is None
    assert rows.sources is not None
    assert rows.sources.tolist() == [*order.rows(places + epoch * total)[0].tolist(), *padding.tolist()]
    expected = []
    for number, count in zip(*order.rows(places + epoch * total), strict=True):
        passes, own_places = sources[number].at(np.array([count]))
        expected.append(int(sources[number].plan(int(passes[0]), own_places).starts[0]) + int(bases[number]))
    assert all(source.formula(0) is not None for source in sources)  # so all of these are planned together
    assert rows.starts.tolist() == [*expected, *(0 for _ in padding)]
