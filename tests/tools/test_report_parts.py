"""What the page of `report` computes for itself: documents of rows, the sample of ids, text of single ids, logs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_json
from fake_notebook import run_cell
from hypothesis import given
from hypothesis import strategies as st
from report_material import WORDS, write_tokenizer

from dali_pipes import LoaderConfig, TokenLoader, open_corpus
from dali_pipes.errors import ConfigError
from dali_pipes.text.token_text import TokenText
from dali_pipes.tools.reports.page import keyed_sample, make_page
from dali_pipes.tools.reports.page.keyed_sample import IdSample, sample_ids
from dali_pipes.tools.reports.page.opened_run import opened_run
from dali_pipes.tools.reports.page.order_section import order_section
from dali_pipes.tools.reports.page.row_figures import figures_of
from dali_pipes.tools.reports.page.rows_section import rows_section
from dali_pipes.tools.reports.page.run_log import read_log
from dali_pipes.tools.reports.page.run_section import run_section

END = 0
DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=1, max_size=25)


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
@given(documents=DOCUMENTS, seq_len=st.integers(2, 12), ranks=st.integers(1, 3))
def test_rows_have_the_documents_that_explain_tells(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, documents: list[list[int]], seq_len: int, ranks: int
) -> None:
    """Of every step, by its pieces: each is of one document."""
    path = tmp_path_factory.mktemp("rows") / "data.bin"
    ids = [token for document in documents for token in (*document, END)]
    np.array(ids * 3 + [1] * 40, np.uint16).tofile(path)
    config = LoaderConfig(
        corpus=str(path),
        batch_size=2,
        seq_len=seq_len,
        rows=rows,
        eos_id=END,
        mask_boundaries=True,
        rank=0,
        world_size=ranks,
        drop_last=False,
    )
    with opened_run(config, 0, (0,), None, None) as run:
        for step in range(run.built.schedule.steps()):
            figures = figures_of(run.plan(step), run.cutters)
            assert figures.documents is not None
            origins = [run.cutters.origin(run.plan(step), row, row) for row in range(len(figures.tokens))]
            assert figures.tokens.tolist() == [sum(piece.length for piece in row.pieces) for row in origins]
            assert figures.documents.tolist() == [len(row.pieces) for row in origins]
            assert figures.widths.tolist() == [seq_len] * len(origins)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_a_small_corpus_is_its_own_sample(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    path = tmp_path_factory.mktemp("sample") / "data.bin"
    np.array(ids, np.uint16).tofile(path)
    with open_corpus(path, dtype="uint16") as corpus:
        sample = sample_ids(corpus)
    assert (sample.is_all, sample.num_ids) == (True, len(ids))
    expected = sorted(((token, ids.count(token)) for token in set(ids)), key=lambda each: (-each[1], each[0]))
    assert sample.most_frequent(3) == expected[:3]
    ends = [index for index, token in enumerate(ids) if token == END]
    assert sample.lengths_of_documents(END, None).tolist() == np.diff([-1, *ends]).tolist()


def test_a_large_corpus_is_sampled_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run a part, anywhere in it, and the same each time."""
    monkeypatch.setattr(keyed_sample, "RUN_IDS", 16)
    count = keyed_sample.RUNS * 1000
    np.arange(count, dtype=np.uint32).tofile(tmp_path / "data.bin")
    with open_corpus(tmp_path / "data.bin", dtype="uint32") as corpus:
        first, second = sample_ids(corpus), sample_ids(corpus)
    assert not first.is_all
    assert [run.tolist() for run in first.runs] == [run.tolist() for run in second.runs]
    begins = [int(run[0]) for run in first.runs]
    assert [begin // 1000 for begin in begins] == list(range(keyed_sample.RUNS))
    assert all(run.tolist() == list(range(run[0], run[0] + 16)) for run in first.runs)
    assert len({begin % 1000 for begin in begins}) > keyed_sample.RUNS // 2


def test_documents_within_a_run_are_measured() -> None:
    sample = IdSample((np.array([5, END, 1, 2, END, 3, END, 7]),), 0, False)
    assert sample.lengths_of_documents(END, None).tolist() == [3, 2]
    assert sample.lengths_of_documents(None, END).tolist() == [3, 2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.needs("tokenizers")
@given(ids=st.lists(st.integers(0, len(WORDS) + 5), max_size=30))
def test_the_texts_of_ids_are_those_of_all(text: TokenText, ids: list[int]) -> None:
    assert text.special_ids == {0}
    assert "".join(text.each(ids)) == text.decode(ids)
    assert len(text.each(ids)) == len(ids)


@pytest.mark.needs("tokenizers")
def test_spaces_between_words_stay(tmp_path: Path) -> None:
    """Decoders that strip the first space, or write one between two words, do so once, and not for each id."""
    from tokenizers import Tokenizer, decoders, models

    words = ["\N{LOWER ONE EIGHTH BLOCK}the", "\N{LOWER ONE EIGHTH BLOCK}world", "ly", "\N{LOWER ONE EIGHTH BLOCK}"]
    for decoder, expected in (
        (decoders.Metaspace(), ["the", " world", "ly", " "]),
        (None, [words[0], f" {words[1]}", " ly", f" {words[3]}"]),
    ):
        library = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="ly"))
        if decoder is not None:
            library.decoder = decoder
        library.save(str(tmp_path / "tokenizer.json"))
        text = TokenText(tmp_path)
        assert text.each([0, 1, 2, 3]) == expected
        assert "".join(text.each([0, 1, 2, 3])) == text.decode([0, 1, 2, 3])


@pytest.mark.needs("tokenizers")
def test_a_character_of_several_ids_is_shown_once(tmp_path: Path) -> None:
    """Byte-level ids: one that is part of a character does not show as a replacement mark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    ids = library.encode("a\N{EURO SIGN}b\N{SMILING FACE WITH OPEN MOUTH}").ids
    texts = TokenText(tmp_path).each(ids)
    assert texts == ["a", "\N{EURO SIGN}", "", "", "b", "\N{SMILING FACE WITH OPEN MOUTH}", "", "", ""]
    assert TokenText(tmp_path).each(ids[:3])[0] == "a", "a character that is cut off does not take what follows"


def test_a_long_log_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dali_pipes.tools.reports.page.run_log._MOST_LINES", 100)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0, "x": True}) + "\n" for step in range(1000)))
    log = read_log(path)
    assert (log.lines, log.lines_read, log.lines_wrong, log.last_step) == (1000, 101, 0, 999)
    assert log.courses.keys() == {"loss"}
    (part,) = run_section(log).parts
    assert [chart.key for chart in part.charts] == ["loss"]
    assert any("1,000" in note for note in part.notes)


def test_a_log_without_known_figures_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"foo": 1}\n')
    (part,) = run_section(read_log(tmp_path / "log.jsonl")).parts
    assert (part.charts, "foo" in part.notes[0]) == ((), True)
    for content in ("", "\n\n", "no\n", "[1]\n", '{"text": "x"}\n'):
        (tmp_path / "log.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=r"log\.jsonl"):
            read_log(tmp_path / "log.jsonl")


def test_a_counter_that_begins_anew_is_no_negative_rate(tmp_path: Path) -> None:
    """A run that was resumed writes on in the same log."""
    lines = [(1, 100.0, 1.0), (2, 200.0, 2.0), (3, 50.0, 0.5), (4, 100.0, 1.0)]
    path = tmp_path / "log.jsonl"
    names = ("step", "tokens", "wall_seconds")
    records = [{**dict(zip(names, line, strict=True)), "tokens_per_second": 1.0} for line in lines]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (part,) = run_section(read_log(path)).parts
    assert {fact.key: fact.value.raw for fact in part.facts}["tokens_per_second"] == 100


def test_a_page_that_takes_long_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in a notebook: the bar is there until the page is made, and on a mistake, too."""
    cell = run_cell(monkeypatch)
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "data.bin")
    config = LoaderConfig(corpus=str(tmp_path / "data.bin"), batch_size=2, seq_len=16, rank=0, world_size=1)
    make_page(config, "page", steps=(0,))
    with pytest.raises(ConfigError):
        make_page(config, "page", steps=(99,))
    for number, (first, *_, last) in enumerate(cell.displays):
        assert ("making the page" in first, last) == (True, ""), number
    assert [len(shown) for shown in cell.displays] == [5, 2]


@pytest.mark.parametrize("objective", [[], [{"kind": "fim", "tokens": {"prefix": 95, "middle": 96, "suffix": 97}}]])
def test_costs_and_copies_are_those_of_the_plan_report(tmp_path: Path, objective: list[dict[str, Any]]) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    ids = np.concatenate([[*np.arange(length) % 9 + 1, END] for length in lengths])
    ids.astype(np.uint16).tofile(tmp_path / "data.bin")
    np.save(tmp_path / "keep.npy", np.arange(400, dtype=np.uint8) % 3)
    config = LoaderConfig(
        corpus=str(tmp_path / "data.bin"),
        keep=str(tmp_path / "keep.npy"),
        batch_size=2,
        seq_len=32,
        rows="pad",
        balance="cost",
        balance_cost=[1, 1],
        eos_id=END,
        rank=0,
        world_size=4,
        objective=objective,
    )
    with opened_run(config, 0, (0,), None, None) as run:
        (part,) = [part for part in rows_section(run).parts if part.key == "plan"]
    with TokenLoader(config, device="cpu", quiet=True) as loader:
        report = loader.plan_report()
    shown = {fact.key: fact.value.raw for fact in part.facts}
    assert shown == {name: getattr(report, name) for name in shown}
    assert report.cost_ratio is not None
    assert shown["cost_ratio"] < shown["unbalanced_cost_ratio"]
    assert shown["removed_documents"] == int((np.arange(400) % 3 == 0).sum())
    (chart,) = part.charts
    assert [entry.name for entry in chart.legend] == ['balance = "cost"', "in random order"]
    for figure in (report.worst_cost_ratio, report.unbalanced_worst_cost_ratio):
        assert f"{figure:.3f}" in chart.description


def test_rows_that_grow_are_shown(tmp_path: Path) -> None:
    """Where a stage begins is what the loader does."""
    out = tmp_path / "report.html"
    settings = ["--set", "global_batch=[[0, 8], [4096, 16]]", "--set", "seq_len=[[0, 16], [8192, 32]]"]
    given = ["synthetic:100K", "--batch-size", 4, *settings]
    told = run_json("report", *given, "--out", out, "--steps", "0,100")
    assert told["missing"] == []
    assert 'data-chart="seq_len"' in out.read_text()
    assert 'data-chart="global_batch"' in out.read_text()


def test_with_batch_tokens_each_rank_has_a_batch(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    ids = np.concatenate([[*np.arange(length) % 9 + 1, END] for length in lengths])
    ids.astype(np.uint16).tofile(tmp_path / "data.bin")
    settings: dict[str, Any] = {"corpus": str(tmp_path / "data.bin"), "seq_len": 32, "rows": "pad", "eos_id": END}
    settings |= {"batch_tokens": 96, "world_size": 3}
    config = LoaderConfig(**settings, rank=0)
    with opened_run(config, 0, (0, 2), None, None) as run:
        (table, _) = order_section(run).parts[0].tables
    shown = [[value.raw for value in row] for row in table.rows]
    expected = []
    for rank in range(3):
        outputs = ("input_ids", "labels", "attention_mask")
        with TokenLoader(**settings, rank=rank, device="cpu", quiet=True, outputs=outputs) as loader:
            masks = [batch["attention_mask"] for step, batch in enumerate(loader) if step in (0, 2)]
        tokens = sum(int(mask.sum()) for mask in masks)
        expected.append([rank, sum(map(len, masks)), tokens, sum(mask.numel() for mask in masks) - tokens])
    assert shown == expected
    assert len({rows for _, rows, _, _ in shown}) > 1
    page = make_page(config, "batches", steps=(0,), rows=3)
    assert "96 tokens per batch" in page.html
    assert page.html.count('class="tokens') == 3
