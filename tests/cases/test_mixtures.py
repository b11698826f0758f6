"""Mixtures end to end: whatever ranks, batch sizes, blocks and restarts there are, the rows are those of an oracle that
knows the interleave and each source's own order, and nothing of loaders.
"""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.errors import ConfigError, CorpusError, StateError, TokenRangeError
from dali_pipes.loader.state_change import MixtureChange
from dali_pipes.schedule.mixture import MixtureOrder

SEQ_LEN = 16
SIZES = {"web": 6_000, "code": 1_500, "math": 700}
FIRST_IDS = {"web": 0, "code": 20_000, "math": 40_000}
DTYPES = {"web": "uint16", "code": "uint32", "math": "int32"}
NAMES = list(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of ids that tell their source and place: id = first id of the source + position."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, size in SIZES.items():
        ids = np.arange(size) + FIRST_IDS[name]
        if name == "math":  # documents of 7 tokens, which end with one id
            ids[6::7] = 50_000
        ids.astype(DTYPES[name]).tofile(folder / f"{name}.bin")
    return folder


def mixture(folder: Path, **weights: Any) -> dict[str, dict[str, Any]]:
    weights = weights or {"web": 0.6, "code": 0.3, "math": 0.1}
    return {
        name: {"corpus": folder / f"{name}.bin", "dtype": DTYPES[name], "weight": weight}
        for name, weight in weights.items()
    }


def loader(folder: Path, **settings: Any) -> TokenLoader:
    defaults: dict[str, Any] = {
        "mixture": mixture(folder),
        "total_rows": 900,
        "batch_size": 4,
        "seq_len": SEQ_LEN,
        "outputs": ("input_ids", "labels", "row_ids", "source_ids"),
        "quiet": True,
        "seed": 5,
    }
    return TokenLoader(**{**defaults, **settings})


def rows_of(batches: Any) -> dict[int, tuple[int, int]]:
    """Source and first position of each row, by its place in the epoch; the tokens and labels are checked."""
    found = {}
    for batch in batches:
        for place, source, ids, labels in zip(
            batch["row_ids"].tolist(), batch["source_ids"].tolist(), batch["input_ids"], batch["labels"], strict=True
        ):
            if place < 0:
                assert source == -1
                assert (labels == -100).all()
                continue
            base = FIRST_IDS[NAMES[source]]
            known = ids[ids != 50_000]
            assert (known >= base).all()
            assert (known < base + SIZES[NAMES[source]]).all()
            at = torch.nonzero(ids != 50_000)[0, 0]
            start = int(ids[at]) - int(at)
            expected = torch.arange(start, start + SEQ_LEN + 1)
            assert (ids[ids != 50_000] == expected[:-1][ids != 50_000]).all()
            kept = (labels != -100) & (labels != 50_000)
            assert (labels[kept] == expected[1:][kept]).all()
            assert place not in found
            found[place] = (source, start - base)
    return found


def expected_rows(weights: dict[str, Any], num_rows: int, seed: int = 5, first: int = 0) -> dict[int, tuple[int, int]]:
    """By the interleave alone, and the order of a loader over one source."""
    order = MixtureOrder(NAMES, [(0, {name: Fraction(str(weights.get(name, 0))) for name in NAMES})], seed=seed)
    sources, counts = order.rows(np.arange(first, first + num_rows))
    rows = {}
    for place, (source, count) in enumerate(zip(sources.tolist(), counts.tolist(), strict=True)):
        rows[place] = (source, own_start(NAMES[source], count, seed))
    return rows


def own_start(name: str, count: int, seed: int) -> int:
    """First position of the row number `count` of a source, from its key."""
    import hashlib

    from dali_pipes.operators import permute

    windows = (SIZES[name] - 1) // SEQ_LEN
    pass_number, place = divmod(count, windows)
    text = f"dali_pipes order {seed} {json.dumps(name)} {pass_number}"
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return int(permute(np.array([place]), windows, key)[0]) * SEQ_LEN


def test_rows_are_those_of_the_formula(folder: Path) -> None:
    with loader(folder) as whole:
        assert rows_of(whole) == expected_rows({"web": 0.6, "code": 0.3, "math": 0.1}, 900)


def test_a_second_epoch_goes_on(folder: Path) -> None:
    with loader(folder) as whole:
        list(whole)
        assert rows_of(whole) == expected_rows({"web": 0.6, "code": 0.3, "math": 0.1}, 900, first=900)


def test_a_mixture_of_one_source_is_that_source(folder: Path) -> None:
    with loader(folder, mixture=mixture(folder, code=1), outputs=("input_ids",)) as alone:
        starts = [int(ids[0]) - FIRST_IDS["code"] for batch in alone for ids in batch["input_ids"]]
    order = MixtureOrder(["code"], [(0, {"code": 1})], seed=5)
    counts = order.rows(np.arange(900))[1].tolist()
    assert starts == [own_start("code", count, 5) for count in counts]


@hypothesis_settings(max_examples=examples(20))
@given(
    weights=st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any),
    ranks=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    batches_per_run=st.integers(1, 9),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    documents=st.booleans(),
)
def test_ranks_blocks_and_threads_change_no_row(
    folder: Path,
    weights: list[int],
    ranks: int,
    batch_size: int,
    batches_per_run: int,
    threads: int,
    seed: int,
    documents: bool,
) -> None:
    by_name = dict(zip(NAMES, weights, strict=True))
    found: dict[int, tuple[int, int]] = {}
    outputs = ("input_ids", "labels", "row_ids", "source_ids", *(["attention_mask"] if documents else []))
    for rank in range(ranks):
        with loader(
            folder,
            mixture=mixture(folder, **by_name),
            eos_id=50_000,
            rank=rank,
            world_size=ranks,
            batch_size=batch_size,
            batches_per_run=batches_per_run,
            num_threads=threads,
            seed=seed,
            total_rows=150,
            drop_last=False,
            outputs=outputs,
        ) as part:
            rows = rows_of(part)
            assert not rows.keys() & found.keys()
            found |= rows
    assert found == expected_rows(by_name, 150, seed)


@hypothesis_settings(max_examples=examples(12))
@given(
    steps=st.integers(0, 100),
    after=st.sampled_from([(1, 4), (2, 2), (4, 1), (2, 3), (3, 5)]),
    modes=st.lists(st.sampled_from(["stream", "pack", "pad"]), min_size=3, max_size=3),
)
def test_every_resume_goes_on_exactly(folder: Path, steps: int, after: tuple[int, int], modes: list[str]) -> None:
    sources = mixture(folder)
    for source, mode in zip(sources.values(), modes, strict=True):
        source |= {"rows": mode, "window_documents": 20}
    given_settings: dict[str, Any] = {
        "mixture": sources,
        "eos_id": 50_000,
        "outputs": ("input_ids", "labels", "row_ids", "source_ids"),
        "total_rows": 500,
    }
    with loader(folder, **given_settings) as whole:
        batches, state = [], whole.state_dict()
        for number, batch in enumerate(whole):
            batches.append(batch)
            if number + 1 == steps:
                state = json.loads(json.dumps(whole.state_dict()))
    expected = {
        place: (ids, labels, source)
        for batch in batches
        for place, ids, labels, source in zip(
            batch["row_ids"].tolist(),
            batch["input_ids"].tolist(),
            batch["labels"].tolist(),
            batch["source_ids"].tolist(),
            strict=True,
        )
    }
    ranks, batch_size = after
    found = {}
    for rank in range(ranks):
        with loader(folder, **{**given_settings, "rank": rank, "world_size": ranks, "batch_size": batch_size}) as part:
            part.load_state_dict(state)
            for batch in part:
                for place, ids, labels, source in zip(
                    batch["row_ids"].tolist(),
                    batch["input_ids"].tolist(),
                    batch["labels"].tolist(),
                    batch["source_ids"].tolist(),
                    strict=True,
                ):
                    found[place] = (ids, labels, source)
    begin = 4 * steps if steps <= 100 else 0
    whole_steps = (500 - begin) // (ranks * batch_size) * ranks * batch_size
    if begin == 500:  # the state is that of the next epoch
        return
    assert found == {place: row for place, row in expected.items() if begin <= place < begin + whole_steps}


def test_located_rows_are_the_rows(folder: Path) -> None:
    with loader(folder) as whole:
        for step, batch in enumerate(whole):
            for row in range(4):
                place = whole.locate(step, row)
                name = NAMES[int(batch["source_ids"][row])]
                assert (place.source_name, place.file.name) == (name, f"{name}.bin")
                assert place.offset == place.position
                assert int(batch["input_ids"][row, 0]) in (place.offset + FIRST_IDS[name], 50_000)


@pytest.mark.parametrize("change_at", [0, 1, 31, 32, 33, 100, 224])
def test_new_weights_change_no_row_before_them(folder: Path, change_at: int) -> None:
    old = expected_rows({"web": 0.6, "code": 0.3, "math": 0.1}, 900)
    begins, batches, states = [], [], []
    with loader(folder, batches_per_run=7) as live:
        for step, batch in enumerate(live):
            if step == change_at:
                begins.append(live.set_weights({"web": 0.1, "code": 0.9, "math": 0}))
            batches.append(batch)
            states.append(json.loads(json.dumps(live.state_dict())))
    rows, (begin,) = rows_of(batches), begins
    assert begin == -(-4 * (change_at + 1) // 128) * 128
    assert len(rows) == 900
    assert all(rows[place] == old[place] for place in range(min(900, begin)))
    later = Counter(rows[place][0] for place in range(begin, 900))
    assert later[2] == 0
    assert begin > 700 or later[1] > 5 * later[0]
    for cut in (change_at, 150):  # a state from after the change has it, one from before does not
        with loader(folder) as resumed:
            resumed.load_state_dict(states[cut])
            again = rows_of(resumed)
        if change_at <= cut < 224:  # the last state is that of the next epoch
            assert again == {place: row for place, row in rows.items() if place >= 4 * (cut + 1)}


def test_stages_begin_at_their_tokens(folder: Path) -> None:
    stages = [{"at": 300 * SEQ_LEN, "weights": {"web": 0, "code": 1, "math": 0}}]
    with loader(folder, stages=stages) as staged:
        rows = rows_of(staged)
    old = expected_rows({"web": 0.6, "code": 0.3, "math": 0.1}, 900)
    assert all(rows[place] == old[place] for place in range(384))
    assert {rows[place][0] for place in range(384, 900)} == {1}


def test_of_stages_that_begin_within_one_row_the_later_counts(folder: Path) -> None:
    weights = [{"web": 0, "code": 1, "math": 0}, {"web": 0, "code": 0, "math": 1}]
    stages = [{"at": at, "weights": of} for at, of in zip((300 * SEQ_LEN + 1, 300 * SEQ_LEN + 2), weights, strict=True)]
    with loader(folder, stages=stages) as staged:
        assert {source for place, (source, _) in rows_of(staged).items() if place >= 384} == {2}


def test_sources_come_and_go_on_resume(folder: Path) -> None:
    before, total = mixture(folder, web=0.7, code=0.3), 896  # whole strata
    with loader(folder, mixture=before, total_rows=total) as first:
        early = []
        for batch in first:
            early.append(batch)
            if len(early) == 50:
                break
        state = first.state_dict()
    with loader(folder, total_rows=total) as other, pytest.raises(StateError, match=r"mixture\.math"):
        other.load_state_dict(state)
    with loader(folder, total_rows=total, on_change="mixture") as other:
        other.load_state_dict(state)
        late = rows_of(other)
        again = other.state_dict()
    have = rows_of(early)
    assert sorted([*have, *late]) == list(range(total))
    for number, name in enumerate(NAMES[:2]):  # each source goes on where it was: every row once a pass
        windows = (SIZES[name] - 1) // SEQ_LEN
        passes = Counter(start for source, start in (have | late).values() if source == number)
        assert max(passes.values()) - min([passes[start * SEQ_LEN] for start in range(windows)]) <= 1
    assert any(source == 2 for source, _ in late.values())
    fewer = mixture(folder, code=0.5, math=0.5)
    with loader(folder, mixture=fewer, total_rows=total, on_change="mixture") as smaller:
        smaller.load_state_dict(again)
        assert {source for batch in smaller for source in batch["source_ids"].tolist()} == {0, 1}


@pytest.mark.parametrize("growing", [False, True])
def test_a_source_stays_until_other_weights_begin(folder: Path, growing: bool) -> None:
    """Removed before, it would be missing in rows that are planned; with weight 0 it gives those and no others."""
    before, total = mixture(folder, web=0.7, code=0.3), 896
    lengths = {"seq_len": [[0, SEQ_LEN // 2]], "order_len": SEQ_LEN, "global_batch": 4} if growing else {}
    states: dict[int, dict[str, Any]] = {}
    with loader(folder, mixture=before, total_rows=total, **lengths) as first:
        for _ in first:
            place = first.state_dict()["mixture"]["place"]
            states.setdefault(place, first.state_dict())
    removed = mixture(folder, code=0.5, math=0.5)
    with loader(folder, mixture=removed, total_rows=total, on_change="mixture", **lengths) as other:
        with pytest.raises(StateError, match=r"mixture\.web.* row 384.*weight = 0"):
            other.load_state_dict(states[320])
        if growing:  # parts of the rows before row 384 have not been handed out
            with pytest.raises(StateError, match=r"mixture\.web.* row 384"):
                other.load_state_dict(states[384])
        else:
            other.load_state_dict(states[384])
            next(iter(other))
    paused = {name: removed.get(name) or {**before[name], "weight": 0} for name in NAMES}
    with loader(folder, mixture=paused, total_rows=total, on_change="mixture", **lengths) as other:
        other.load_state_dict(states[320])
        batches = iter(other)
        while other.state_dict()["mixture"]["place"] <= 384 + 128:
            next(batches)
        state = other.state_dict()
    with loader(folder, mixture=removed, total_rows=total, on_change="mixture", **lengths) as other:
        other.load_state_dict(state)
        assert {source for batch in other for source in batch["source_ids"].tolist()} == {0, 1}


@pytest.mark.parametrize("growing", [False, True])
def test_a_run_that_stops_gives_all_its_rows_and_saves_its_end(folder: Path, growing: bool) -> None:
    """Its last epoch is shorter, without a resume as with one, and more passes let it go on from the saved end."""
    sources = mixture(folder, web=0.5, code=0.5)
    sources["code"]["max_epochs"] = 4.5  # 418 rows, so that the run has 6 strata
    lengths = {"seq_len": [[0, SEQ_LEN // 2]], "order_len": SEQ_LEN, "global_batch": 4} if growing else {}
    settings: dict[str, Any] = {"mixture": sources, "total_rows": 480, "on_exhausted": "stop", **lengths}
    parts = 2 if growing else 1
    with loader(folder, **settings) as run:
        lengths_of_epochs = [sum(len(batch["row_ids"]) for batch in run) for _ in range(2)]
        assert lengths_of_epochs == [480 * parts, (768 - 480) * parts]
        end, report = run.state_dict(), run.mixture_report()
        assert end["mixture"]["place"] == report.place == 768
        assert (run.tokens_seen, run.step, run.epoch) == (768 * SEQ_LEN, 0, 2)
        with pytest.raises(ConfigError, match="1,000,000"):
            run.mixture_report(step=10**6)
        assert "epoch 2" in run.summary()
        with pytest.raises(ConfigError, match=r"768 rows.*'code'.*max_epochs"):
            next(iter(run))
    with loader(folder, **settings) as again:
        again.load_state_dict(json.loads(json.dumps(end)))
        assert again.state_dict() == end
        with pytest.raises(ConfigError, match=r"768 rows.*'code'.*max_epochs"):
            next(iter(again))
    sources["code"]["max_epochs"] = 9
    with loader(folder, **settings) as more:
        more.load_state_dict(end)
        next(iter(more))
        assert more.mixture_report(step=0).place == 768
    with loader(
        folder, **{**settings, "mixture": {**sources, "code": {**sources["code"], "max_epochs": 4.5}}}
    ) as paused:
        paused.load_state_dict(end)
        assert paused.set_weights({"web": 1, "code": 0}) == 768
        assert {source for batch in paused for source in batch["source_ids"].tolist()} == {0}
        assert paused.tokens_seen == (768 + 480) * SEQ_LEN


@pytest.mark.parametrize("on_exhausted", ["drop", "stop"])
def test_passes_that_do_not_fill_the_first_rows_are_named(folder: Path, on_exhausted: str) -> None:
    sources = mixture(folder, code=1)
    sources["code"]["max_epochs"] = 0.5
    for more in ({}, {"global_batch": 8}):
        with pytest.raises(ConfigError, match=r"mixture\.code: max_epochs = 0\.5 allows 46 rows.* 128 rows"):
            loader(folder, mixture=sources, on_exhausted=on_exhausted, **more)


def test_weights_too_small_for_a_row_are_those_of_a_pause(folder: Path) -> None:
    for tiny in (1e-19, 1e-30, "1e-60"):
        with loader(folder, mixture=mixture(folder, web=tiny, code=1, math=tiny), total_rows=None) as mixed:
            assert {source for source, _ in rows_of(mixed).values()} == {1}
        with loader(folder) as mixed:
            begin = mixed.set_weights({"web": tiny, "code": 1, "math": 0})
            assert {source for place, (source, _) in rows_of(mixed).items() if place >= begin} == {1}


def test_an_earlier_state_of_a_run_that_ends_can_be_loaded_after_a_later_one(folder: Path) -> None:
    """The later one is in an epoch that is cut short, with fewer rows than the earlier one has had."""
    sources = mixture(folder, web=0.5, code=0.5)
    sources["code"]["max_epochs"] = 4.5
    settings: dict[str, Any] = {"mixture": sources, "total_rows": 480, "on_exhausted": "stop"}
    with loader(folder, **settings) as first:
        states = [first.state_dict() for _ in first]
    with loader(folder, **settings) as other:
        other.load_state_dict(states[-1])
        assert 0 < len(other) < 100
        other.load_state_dict(states[110])
        assert len(rows_of(other)) == 480 - 111 * 4


def test_a_changed_weight_is_not_taken_silently(folder: Path) -> None:
    with loader(folder) as first:
        next(iter(first))
        state = first.state_dict()
    changed = loader(folder, mixture=mixture(folder, web=0.5, code=0.4, math=0.1))
    with changed, pytest.raises(StateError, match=r"mixture\.web.*0\.6.*0\.5"):
        changed.load_state_dict(state)


def test_caps_that_cannot_be_met_name_what_would_fit(folder: Path) -> None:
    sources = mixture(folder)
    sources["math"]["max_epochs"] = 1.5
    with pytest.raises(ConfigError, match=r"mixture\.math.*max_epochs.*total_tokens = (\d+)") as refused:
        loader(folder, mixture=sources)
    fits = int(str(refused.value).split("total_tokens = ")[1].split()[0])
    with loader(folder, mixture=sources, total_rows=None, total_tokens=fits) as fitting:
        assert Counter(source for source, _ in rows_of(fitting).values())[2] <= 1.5 * ((SIZES["math"] - 1) // SEQ_LEN)
    with loader(folder, mixture=sources, on_exhausted="drop") as dropping:
        used = Counter(source for source, _ in rows_of(dropping).values())
        assert used[2] <= 64 < used[0]
        assert sum(used.values()) == 900
    with loader(folder, mixture=sources, on_exhausted="stop") as stopping:
        rows = rows_of(stopping)
        assert 0 < len(rows) < 900
        assert list(rows) == list(range(len(rows)))


def test_without_a_total_an_epoch_ends_with_the_first_source(folder: Path) -> None:
    with loader(folder, total_rows=None, batch_size=1) as shortest:
        rows = rows_of(shortest)
    used = Counter(source for source, _ in rows.values())
    whole = {number: (SIZES[name] - 1) // SEQ_LEN for number, name in enumerate(NAMES)}
    assert any(used[number] == whole[number] for number in whole)
    assert all(used[number] <= whole[number] for number in whole)


def test_damaged_states_are_refused(folder: Path) -> None:
    with loader(folder) as first:
        next(iter(first))
        state = first.state_dict()
        for change in ("place", "marks", "stages", "given"):
            broken = json.loads(json.dumps(state))
            broken["mixture"][change] = {"place": 77, "marks": {"web": [1]}, "stages": [], "given": 3}[change]
            with pytest.raises(StateError):
                first.load_state_dict(broken)
        broken = {**state, "mixture": None}
        with pytest.raises(StateError):
            first.load_state_dict(broken)
        first.load_state_dict(state)
    with TokenLoader(folder / "web.bin", dtype="uint16", batch_size=4, seq_len=SEQ_LEN, quiet=True) as single:
        with pytest.raises(StateError):
            single.load_state_dict(state)
        other = single.state_dict()
    with loader(folder) as mixed, pytest.raises(StateError):
        mixed.load_state_dict(other)


def test_a_bad_id_names_its_source(folder: Path) -> None:
    with loader(folder, vocab_size=30_000) as mixed, pytest.raises(TokenRangeError, match=r"mixture\.math.*math\.bin"):
        list(mixed)


def test_one_file_in_two_sources_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "again.bin"
    link.hardlink_to(folder / "web.bin")
    sources = mixture(folder)
    sources["code"] = {"corpus": link, "dtype": "uint16", "weight": 1}
    with pytest.raises(ConfigError, match=r"'web' and 'code'"):
        loader(folder, mixture=sources)


def test_loss_masks_of_one_source(folder: Path, tmp_path: Path) -> None:
    mask = (np.arange(SIZES["code"]) % 3 != 0).astype(np.uint8)
    path = tmp_path / "code.loss"
    mask.tofile(path)
    sources = mixture(folder)
    sources["code"]["loss_masks"] = [path]
    with loader(folder, mixture=sources) as masked:
        for batch in masked:
            for source, ids, labels in zip(
                batch["source_ids"].tolist(), batch["input_ids"], batch["labels"], strict=True
            ):
                positions = ids.numpy() + 1 - FIRST_IDS["code"]
                learned = mask[positions].astype(bool) if NAMES[source] == "code" else np.ones(SEQ_LEN, bool)
                assert ((labels != -100).numpy() == learned).all()


def test_reports_and_validation(folder: Path) -> None:
    with loader(folder, validation_fraction=0.1) as mixed:
        report = mixed.mixture_report(step=225)
        with pytest.raises(ConfigError, match=r"step 226 .* step 225"):
            mixed.mixture_report(step=226)
        rows = rows_of(mixed)
        used = Counter(source for source, _ in rows.values())
        assert [source.rows for source in report.sources] == [used[number] for number in range(3)]
        loaders = mixed.validation_loaders()
        for name, one in loaders.items():
            with one:
                tokens = torch.cat([batch["input_ids"].reshape(-1) for batch in one])
                assert len(tokens) == (int(SIZES[name] * 0.1) - 1) // SEQ_LEN * SEQ_LEN


def capped(folder: Path, **settings: Any) -> TokenLoader:
    """An epoch of 256 rows, 26 of them of math, which may give 43."""
    sources = mixture(folder)
    sources["math"]["max_epochs"] = 1
    return loader(folder, mixture=sources, total_rows=256, **settings)


EXCEEDED = r"mixture\.math: max_epochs = 1 \(43 rows\).* of 8,192 tokens.*max_epochs = 1\.\d+ or more, fewer epochs"


def test_an_epoch_beyond_max_epochs_is_refused_before_its_first_batch(folder: Path) -> None:
    with capped(folder) as twice:
        rows = rows_of(twice)
        assert len(rows) == 256
        state = twice.state_dict()
        for _ in range(2):
            with pytest.raises(ConfigError, match=EXCEEDED):
                next(iter(twice))
        assert twice.state_dict() == state
        twice.load_state_dict(state)
        with pytest.raises(ConfigError, match=EXCEEDED):
            next(iter(twice))
    with capped(folder, repeat=True, batches_per_run=5) as endless:
        batches = iter(endless)
        assert rows_of(next(batches) for _ in range(64)) == rows
        with pytest.raises(ConfigError, match=EXCEEDED):
            next(batches)
    with capped(folder) as left:  # which ends the epoch, as it does without a mixture
        next(iter(left))
        state = left.state_dict()
        with pytest.raises(ConfigError, match=EXCEEDED):
            next(iter(left))
    with capped(folder) as resumed:  # goes on within the epoch
        resumed.load_state_dict(state)
        assert rows_of(resumed) == {place: row for place, row in rows.items() if place >= 4}
        with pytest.raises(ConfigError, match=EXCEEDED):
            next(iter(resumed))
        with pytest.raises(ConfigError, match=EXCEEDED):
            resumed.locate(0, 0, epoch=1)


def test_weights_that_come_with_a_state_are_checked(folder: Path) -> None:
    with capped(folder) as first:
        batches = iter(first)
        for _ in range(8):
            next(batches)
        state = first.state_dict()
    for weight, passes, fits in ((0.5, 1.8, True), (0.5, 1.7, False), (0.9, 2.98, True), (0.9, 2.95, False)):
        sources = mixture(folder, web=1 - weight, code=0, math=weight)  # from row 128 on, after 13 rows of math
        sources["math"]["max_epochs"] = passes
        with pytest.raises(ConfigError, match=r"mixture\.math"):  # from the start on
            loader(folder, mixture=sources, total_rows=256)
        with loader(folder, mixture=sources, total_rows=256, on_change="mixture") as other:
            if not fits:
                with pytest.raises(ConfigError, match=r"mixture\.math"):
                    next(iter(other))
            other.load_state_dict(state)
            if fits:
                assert len(rows_of(other)) == 256 - 32
            else:
                with pytest.raises(ConfigError, match=r"mixture\.math: max_epochs"):
                    next(iter(other))


def test_without_a_total_passes_end_every_epoch(folder: Path) -> None:
    sources = mixture(folder)
    sources["code"]["max_epochs"] = 1
    with loader(folder, mixture=sources, total_rows=None, batch_size=1) as passes:
        code = [[source for source, _ in rows_of(passes).values()].count(1) for _ in range(2)]
    assert code[0] == (SIZES["code"] - 1) // SEQ_LEN == 93
    assert 80 <= code[1] <= 106  # the second epoch may begin and end within a stratum


def test_a_pipeline_is_refused_an_epoch_beyond_max_epochs(folder: Path) -> None:
    sources = mixture(folder)
    sources["math"]["max_epochs"] = 1
    settings: dict[str, Any] = {"mixture": sources, "total_rows": 256, "batch_size": 4, "seq_len": SEQ_LEN}
    built = BuiltSource(LoaderConfig(**settings, rank=0, world_size=1, device="cpu"), endless=False)
    try:
        built.source(BlockInfo(0, 0))
        with pytest.raises(ConfigError, match=EXCEEDED):
            built.source(BlockInfo(0, 1))
    finally:
        built.close()


def test_another_proxy_or_share_is_another_order(folder: Path) -> None:
    for before, after in (("1/2", "1/4"), ("1/2", None), (None, "1/2")):
        with loader(folder, proxy=before) as first:
            next(iter(first))
            state = first.state_dict()
        with loader(folder, proxy=after, on_change="mixture") as other, pytest.raises(StateError, match="share"):
            other.load_state_dict(state)
        with loader(folder, proxy=before) as same:
            same.load_state_dict(json.loads(json.dumps(state)))


def test_what_a_state_changed_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loader(folder, mixture=mixture(folder, web=0.7, code=0.3)) as first:
        batches = iter(first)
        for _ in range(64):  # two strata: web, which is removed, gives no row of the next
            next(batches)
        state = first.state_dict()
    now = mixture(folder, code=0.3, math=0.1)
    with loader(folder, mixture=now, on_change="mixture", quiet=False, batch_size=8) as other:
        capsys.readouterr()
        other.load_state_dict(state)
        change, said = other.state_change, capsys.readouterr().err
        assert isinstance(change, MixtureChange)
        assert change.settings == {
            "mixture.code": (pytest.approx(0.3), 0.75),
            "mixture.math": (None, 0.25),
            "mixture.web": (pytest.approx(0.7), None),
        }
        assert (change.begin, change.epoch, change.rows_before, change.rows) == (256, 0, 256, 256)
        assert change.line() in said
        facts = (
            "row 256",
            "global batch of 8 rows",
            "step 32",
            "mixture.code 75.00% (was 30.00%)",
            "mixture.math 25.00% (new)",
            "mixture.web removed",
        )
        assert [fact for fact in facts if fact not in said] == []
        again = other.state_dict()
        other.load_state_dict(again)
        assert other.state_change is None
        for value in (-1, "70%"):
            with pytest.raises(ConfigError, match=rf"set_weights: 'math': .*{value}"):
                other.set_weights({"code": 0.5, "math": value})
        other.set_weights({"code": 0.5, "math": 0.5})
        live = other.state_dict()
    more = mixture(folder, code=0.3, math=0.1, web=0.4)
    with loader(folder, mixture=more, on_change="mixture") as third:
        third.load_state_dict(live)
        assert third.state_change is not None
        assert third.state_change.settings == {
            "mixture.code": (0.5, pytest.approx(0.375)),
            "mixture.math": (0.5, 0.125),
            "mixture.web": (None, 0.5),
        }
        third.load_state_dict(live, on_change="mixture")
        list(third)


@pytest.mark.parametrize("mode", ["stream", "pack"])
def test_a_rank_may_have_padding_alone(folder: Path, mode: str) -> None:
    """9 rows on 4 ranks of 2: the second step has one row for all of them."""
    places = []
    for rank in range(4):
        settings: dict[str, Any] = {"rank": rank, "world_size": 4, "batch_size": 2, "batches_per_run": 1}
        settings |= {"total_rows": 9, "drop_last": False, "rows": mode, "eos_id": 50_000}
        settings["mixture"] = mixture(folder, math=1)
        with loader(folder, **settings) as part:
            batches = [next(iter(part))]
            state = part.state_dict()
        with loader(folder, **settings) as part:  # so that nothing else is planned with the last step
            part.load_state_dict(state)
            batches += part
        assert len(batches) == 2
        for batch in batches:
            places += batch["row_ids"].tolist()
            is_padding = batch["row_ids"] < 0
            assert (batch["source_ids"] == -is_padding.long()).all()
            assert ((batch["labels"] == -100).all(1) == is_padding).all()
    assert sorted(places) == [-1] * 3 + list(range(9))  # the last step is as small as it may be: one row on each rank


@pytest.mark.parametrize("mode", ["stream", "pack"])
def test_the_rows_of_a_source_do_not_depend_on_the_others(folder: Path, mode: str) -> None:
    """Its first, second and later rows alone, with others, and with other weights for them."""
    found: list[dict[int, tuple[list[int], list[int]]]] = []
    for weights in ({"math": 1}, {"math": 0.3, "web": 0.7}, {"code": 0.5, "math": 0.1, "web": 0.4}):
        names = list(weights)
        sources = mixture(folder, **weights)
        sources["math"] |= {"rows": mode, "window_documents": 30}
        settings: dict[str, Any] = {"eos_id": 50_000, "total_rows": 896, "mask_boundaries": True}
        with loader(folder, mixture=sources, **settings) as mixed:
            batches = list(mixed)
            sources_of, counts = mixed._built.mixture.order.rows(np.arange(896))  # type: ignore[union-attr]
        rows = {}
        for batch in batches:
            for place, ids, labels in zip(
                batch["row_ids"].tolist(), batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
            ):
                if names[sources_of[place]] == "math":
                    rows[int(counts[place])] = (ids, labels)
        found.append(rows)
    alone, *others = found
    assert sorted(alone) == list(range(896))
    for rows in others:
        assert len(rows) > 80
        assert rows == {count: alone[count] for count in rows}


def test_stages_before_the_position_stay_and_later_ones_may_change(folder: Path) -> None:
    with loader(folder, stages=[{"at": 600 * SEQ_LEN, "weights": {"web": 1, "code": 0, "math": 0}}]) as first:
        batches = iter(first)
        for _ in range(50):
            next(batches)
        state = first.state_dict()
    other = {"web": 0, "code": 1, "math": 0}
    with (
        loader(folder, stages=[{"at": 100 * SEQ_LEN, "weights": other}]) as early,
        pytest.raises(StateError, match=r"stages: .* row 200") as refused,
    ):
        early.load_state_dict(state)
    assert 'on_change = "mixture"' in str(refused.value)
    with loader(folder, stages=[{"at": 400 * SEQ_LEN, "weights": other}]) as late:
        late.load_state_dict(state)
        rows = rows_of(late)
    old = expected_rows({"web": 0.6, "code": 0.3, "math": 0.1}, 512)
    assert {place: row for place, row in rows.items() if place < 512} == {
        place: old[place] for place in range(200, 512)
    }
    assert {row[0] for place, row in rows.items() if place >= 512} == {1}


def test_a_source_that_cannot_give_rows_is_named(folder: Path, tmp_path: Path) -> None:
    short, empty = tmp_path / "short.bin", tmp_path / "empty.bin"
    np.arange(SEQ_LEN, dtype=np.uint16).tofile(short)  # a row reads one token more
    empty.touch()
    for path, fact in ((short, f"{SEQ_LEN}"), (empty, "empty.bin"), (tmp_path / "none.bin", "none.bin")):
        sources = mixture(folder)
        sources["small"] = {"corpus": path, "dtype": "uint16", "weight": 0.1}
        with pytest.raises((ConfigError, CorpusError), match=r"^mixture\.small: ") as refused:
            loader(folder, mixture=sources)
        assert fact in str(refused.value)


def test_the_ranks_of_a_run_go_from_one_to_four_to_two(folder: Path) -> None:
    """With new weights in each life, asked for after a step of chance."""
    random = np.random.default_rng(6)
    settings: dict[str, Any] = {"eos_id": 50_000, "batch_size": 3, "total_rows": 408}
    settings["mixture"] = mixture(folder)
    settings["mixture"]["math"] |= {"rows": "pack", "window_documents": 25}
    state: dict[str, Any] | None = None
    lives = [(ranks, int(random.integers(6, 12)), random.dirichlet([1] * 3).round(3)) for ranks in (1, 4, 2, 1)]
    found: dict[int, Any] = {}

    def live(ranks: int, rank: int, begin: dict[str, Any] | None, steps: int, weights: Any) -> dict[str, Any]:
        with loader(folder, **{**settings, "rank": rank, "world_size": ranks}) as part:
            if begin is not None:
                part.load_state_dict(begin)
            batches = iter(part)
            for step in range(steps):
                keep(next(batches))
                if step == steps // 2:
                    part.set_weights(dict(zip(NAMES, weights.tolist(), strict=True)))
            return dict(json.loads(json.dumps(part.state_dict())))

    def keep(batch: Any) -> None:
        columns = (batch[name].tolist() for name in ("row_ids", "source_ids", "input_ids", "labels"))
        for place, *row in zip(*columns, strict=True):
            assert found.setdefault(place, row) == row, place

    for ranks, steps, weights in lives:
        states = [live(ranks, rank, state, steps, weights) for rank in range(ranks)]
        assert all(one == states[0] for one in states)
        state = states[0]
    assert sorted(found) == list(range(3 * sum(ranks * steps for ranks, steps, _ in lives)))
    with loader(folder, **settings) as whole:  # never stopped; told the same after the same rows
        changes, place = {}, 0
        for ranks, steps, weights in lives:
            changes[place + 3 * ranks * (steps // 2 + 1)] = weights
            place += 3 * ranks * steps
        expected = found.copy()
        found.clear()
        for step, batch in enumerate(whole):
            keep(batch)
            if (told := changes.get(3 * (step + 1))) is not None:
                whole.set_weights(dict(zip(NAMES, told.tolist(), strict=True)))
    assert {place: found[place] for place in expected} == expected


def test_a_start_makes_the_configurations_of_sources_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sources there are: each time makes all of them."""
    times: list[int] = []
    real = LoaderConfig.sources.fget  # type: ignore[attr-defined]

    def noted(config: LoaderConfig) -> Any:
        times[-1] += 1
        return real(config)

    monkeypatch.setattr(LoaderConfig, "sources", property(noted))
    for count in (2, 12):
        times.append(0)
        sources: dict[str, Any] = {}
        for number in range(count):
            np.arange(500, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
            sources[str(number)] = {"corpus": tmp_path / f"{number}.bin", "weight": 1}
        loader(tmp_path, mixture=sources, total_rows=100).close()
    assert 0 < times[0] == times[1]


def test_statistics_and_plan_reports_know_sources(folder: Path) -> None:
    sources = mixture(folder)
    sources["math"] |= {"rows": "pack", "eos_id": 50_000, "share": 0.5, "window_documents": 20}
    sources["code"] |= {"eos_id": 65_000}
    sources["web"] |= {"eos_id": 65_000}
    with loader(folder, mixture=sources) as run:
        assert run.stats().source_rows == {"web": 0, "code": 0, "math": 0}
        given: Counter[int] = Counter()
        for step, batch in enumerate(run):
            given.update(batch["source_ids"].tolist())
            if step in (10, 99):
                stats = run.stats()
                assert stats.source_rows == {name: given[number] for number, name in enumerate(NAMES)}
                assert stats.since(stats).source_rows == {"web": 0, "code": 0, "math": 0}
                assert f"web {given[0] / (4 * step + 4):.1%}" in repr(stats)
        reports = [run.plan_report("math") for _ in range(2)]
        assert reports[0] == reports[1]
        assert reports[0].documents == 50
        assert reports[0].tokens == 350
        assert reports[0].epoch == given[2] // reports[0].rows
        for name, word in (("web", "stream"), ("chat", "math"), (None, "math")):
            with pytest.raises(ConfigError, match=word):
                run.plan_report(name)
    with TokenLoader(folder / "web.bin", batch_size=2, seq_len=8, quiet=True) as single:
        assert single.stats().source_rows == {}
        with pytest.raises(ConfigError, match="mixture"):
            single.plan_report("web")
