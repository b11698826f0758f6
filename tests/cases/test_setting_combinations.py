"""Settings together: refused with the name of one, or the same rows on any ranks, in any blocks, after any resume.

Also with a cache on the node, in previews, and on a GPU's stand-in; and tokens are those of the places that previews
say. `setting_combinations` draws the settings, most of which are refused or change nothing.
"""

import itertools
import random
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from setting_combinations import END, MASK, SENTINELS, Corpora, plain, random_settings, rows_of, same_batch

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import ConfigError
from dali_pipes.loader.batch_view import PreviewRow
from dali_pipes.rows import make

Epochs = list[list[dict[str, Any]]]
FAST = (7, 21, 27, 34, 43, 45, 49)
SEEDS = [pytest.param(seed, marks=() if seed in FAST else pytest.mark.slow) for seed in range(300)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return Corpora(tmp_path_factory.mktemp("corpora"))


@pytest.mark.parametrize("seed", SEEDS)
def test_settings_together(corpora: Corpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(make, "BLOCK_TOKENS", 100)
    draw = random.Random(seed)
    settings = {**random_settings(draw, corpora), "rank": 0, "world_size": 1}
    expected, refusal = epochs_or_refusal(settings)
    if refusal:
        assert any(name in refusal for name in settings), refusal
        return
    for count in (1, 4):
        assert_same(epochs_of({**settings, "batches_per_run": count}), expected)
    check_resumes(settings, expected, draw)
    for world_size in (2, 3):
        with suppress(ConfigError):  # too few rows for so many ranks, or steps that are not whole there
            check_ranks(settings, expected, world_size)
    with suppress(ConfigError):
        for _ in range(2):
            assert_same(epochs_of({**settings, "cache_dir": str(tmp_path), "batches_per_run": 2}), expected)
    check_previews(corpora, settings, expected, draw)
    if gpu_stand_in.why_not() is None:
        placement = draw.choice(["host", "device", "pinned", "pool"])
        on_gpu = {**settings, "device": "cuda", "placement": placement, "batches_per_run": 2}
        with gpu_stand_in.installed("random", seed=seed), suppress(ConfigError):
            assert_same(epochs_of(on_gpu), expected)


def epochs_of(settings: dict[str, Any], state: dict[str, Any] | None = None) -> Epochs:
    """The batches of epochs 0 and 1, or what is left of them after a state."""
    with TokenLoader(**settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [list(map(plain, loader)) for _ in range(loader.epoch, 2)]


def epochs_or_refusal(settings: dict[str, Any]) -> tuple[Epochs, str]:
    try:
        return epochs_of(settings), ""
    except ConfigError as error:
        return [], str(error)


def assert_same(found: Epochs, expected: Epochs) -> None:
    assert list(map(len, found)) == list(map(len, expected))
    assert all(map(same_batch, itertools.chain(*found), itertools.chain(*expected)))


def check_resumes(settings: dict[str, Any], expected: Epochs, draw: random.Random) -> None:
    with TokenLoader(**settings) as loader:
        states = [loader.state_dict() for _ in range(2) for _ in loader]
    batches = list(itertools.chain(*expected))
    for number in draw.sample(range(len(states)), min(3, len(states))):
        rest = list(itertools.chain(*epochs_of({**settings, "batches_per_run": 3}, states[number])))
        assert len(rest) == len(batches) - number - 1
        assert all(map(same_batch, rest, batches[number + 1 :]))


def check_ranks(settings: dict[str, Any], expected: Epochs, world_size: int) -> None:
    """The batches of several ranks together."""
    ranks = [epochs_of({**settings, "rank": rank, "world_size": world_size}) for rank in range(world_size)]
    for epoch, alone in enumerate(expected):
        together = [batch for step in zip(*(rank[epoch] for rank in ranks), strict=True) for batch in step]
        if "batch_tokens" in settings:  # a place of the order is a batch
            if "skip_steps" not in settings:
                assert all(map(same_batch, together, alone))
                assert all((batch["labels"] == -100).all() for batch in together[len(alone) :])
            continue
        rows = real_rows(alone)
        found = real_rows(together)
        for number in rows.keys() & found.keys():
            for name, values in rows[number].items():
                assert_equal_but_for_width(np.asarray(values), np.asarray(found[number][name]), name)
        if not settings.get("drop_last", True) and "skip_steps" not in settings:
            assert rows.keys() == found.keys()


def real_rows(batches: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By their places, each of which comes once; padding rows are checked."""
    rows: dict[int, dict[str, Any]] = {}
    for number, row in (row for batch in batches for row in rows_of(batch)):
        if number < 0:
            assert (row["labels"] == -100).all()
            assert not any(np.any(row[name]) for name in ("masked", "p_mask", "prefix_lengths") if name in row)
        else:
            assert number not in rows
            rows[number] = row
    return rows


def assert_equal_but_for_width(one: Any, other: Any, name: str) -> None:
    """A row is as wide as its batch: what one has more is padding."""
    width = min(one.shape[:1], other.shape[:1])
    for values in (one, other) if width else ():
        assert (values[width[0] :] == (-100 if name == "labels" else 0)).all()
    cut = slice(*width) if width else ()
    assert np.array_equal(one[cut], other[cut]), name


def check_previews(corpora: Corpora, settings: dict[str, Any], expected: Epochs, draw: random.Random) -> None:
    with closing(TokenLoader(**settings)) as loader:
        for epoch, batches in enumerate(expected):
            for step in draw.sample(range(len(batches)), min(3, len(batches))):
                if settings.get("skip_steps"):  # which previews count, and show
                    continue
                batch = batches[step]
                for number, row in enumerate(loader.preview(step, epoch=epoch, rows=99, tokens=999).rows):
                    for name, values in (*row.outputs.items(), *row.drawn.items()):
                        assert name not in batch or np.array_equal(values, batch[name][number]), name
                    if not row.origin.is_padding:
                        check_origin(corpora, loader.config, row)


def check_origin(corpora: Corpora, config: LoaderConfig, row: PreviewRow) -> None:
    """The tokens and labels of a row are those of the places that it is from."""
    own = config if row.origin.source_name is None else config.sources[row.origin.source_name]
    assert own.corpus is not None
    name = Path(own.corpus[0]).parent.name
    ids, mask = corpora.tokens[name], corpora.masks[name]
    kinds = {entry.kind for entry in own.objectives}
    inputs, labels = np.array(row.outputs["input_ids"]), np.array(row.outputs["labels"])
    labels = labels if labels.ndim == 1 else labels[:, 0]
    places = np.full(len(inputs) + 1, -1)  # and the place after the last
    tokens = np.full(len(inputs) + 1, -1)
    segments = np.zeros(len(inputs) + 1, np.int64)
    before: tuple[Any, Any] | None = None
    for piece in row.origin.pieces:
        at = slice(piece.column, piece.column + piece.length)
        if piece.sentinel is not None:
            tokens[at] = SENTINELS[piece.sentinel]
            continue
        places[at] = np.arange(piece.position, piece.position + piece.length)
        tokens[at] = ids[places[at]]
        goes_on = piece.document is None or before in (None, (piece.document, piece.document_offset))
        segments[piece.column :] += not goes_on
        before = piece.document, (piece.document_offset or 0) + piece.length
    used = sum(piece.length for piece in row.origin.pieces)
    assert (labels[used:] == -100).all()
    assert (inputs[used:] == 0).all()
    is_changed = inputs[:used] != tokens[:used]
    if "mlm" in kinds:
        assert not is_changed[labels[:used] == -100].any()
    else:
        assert not is_changed.any() or ("drop" in kinds and (inputs[:used][is_changed] == MASK).all())
    if kinds & {"mlm", "diffusion"}:
        is_learned = labels[:used] != -100
        assert np.array_equal(labels[:used][is_learned], tokens[:used][is_learned])
        assert mask is None or not (is_learned & (places[:used] >= 0) & (mask[places[:used]] == 0)).any()
        return
    if not config.label_shift:
        assert np.isin(labels[:used] - tokens[:used], [0, *(-100 - tokens[:used])]).all()
        return
    wanted, reads = tokens[1 : used + 1].copy(), places[1 : used + 1].copy()
    if used and places[used - 1] >= 0 and places[used - 1] + 1 < len(ids):
        wanted[-1], reads[-1] = ids[places[used - 1] + 1], places[used - 1] + 1
        segments[used] = segments[used - 1] + (ids[places[used - 1]] == END)
    wanted[(reads >= 0) & ((mask is not None) and mask[reads] == 0)] = -100
    if config.masks_boundaries and "fim" not in kinds:
        wanted[segments[1 : used + 1] != segments[:used]] = -100
    if "prefix" in kinds:
        wanted[np.arange(1, used + 1) < row.drawn["prefix_lengths"]] = -100
    found = labels[:used]
    may_be_less = "goldfish" in kinds or "fim" in kinds
    is_open = np.arange(used) == used - 1  # of a document, its last label is not always read
    assert ((found == wanted) | ((found == -100) & (may_be_less | is_open)))[: used if used < 2 else None].all()


def test_an_output_of_an_objective_that_no_source_has_is_refused(corpora: Corpora) -> None:
    """All sources override that of the run, so nothing would write `noisy_ids`."""
    diffusion, drop = {"kind": "diffusion", "mask_id": MASK}, {"kind": "drop", "rate": 0.3, "drop_id": MASK}
    source = {**corpora.data("flat"), "weight": 1, "objective": [drop]}
    settings: dict[str, Any] = {"batch_size": 2, "seq_len": 8, "total_rows": 8, "objective": [diffusion]}
    with pytest.raises(ConfigError, match=r"noisy_ids.*diffusion"):
        LoaderConfig(**settings, mixture={"flat": source}, outputs=["input_ids", "noisy_ids"])
    assert LoaderConfig(**settings, mixture={"flat": source}).all_objectives[0].kind == "drop"
