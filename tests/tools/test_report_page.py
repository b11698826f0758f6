"""The page of `report`, read without a browser: its numbers are those of the commands, text is inert."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import one_line_error, run, run_json, run_well
from report_material import (
    END,
    FILE,
    HOSTILE,
    SOURCE,
    WORDS,
    ParsedPage,
    assert_same,
    documents,
    equal,
    write_log,
    write_mixture,
    write_tokenizer,
)

from dali_pipes.runtime.messages import printable
from dali_pipes.tools.reports.page import data_page, keyed_sample

ELEMENTS = (
    "a b body button caption data dd details div dl dt figcaption figure footer h1 h2 h3 head header html i li link "
    "main meta nav ol p pre script section span style summary table tbody td th thead title tr ul "
    "clippath defs g path rect svg text use"
)
STEPS = "0,7,60"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return write_mixture(folder)


@pytest.fixture(scope="module")
def page(folder: Path, config: Path) -> ParsedPage:
    out, tokenizer, log = folder / "report.html", write_tokenizer(folder), write_log(folder / "stats.jsonl")
    run_well(
        "report", config, "--steps", STEPS, "--tokenizer", tokenizer, "--log", log, "--out", out, "--world-size", 2
    )
    return ParsedPage(out.read_text(encoding="utf-8"))


def test_the_corpus_is_what_inspect_says(page: ParsedPage, folder: Path) -> None:
    names = "tokens bytes documents largest_id ids_looked_at"
    for source, files in {SOURCE: [FILE, "second.bin"], "plain": ["third.bin"]}.items():
        expected = run_json("inspect", *(folder / name for name in files), "--eos", END, "--vocab-size", len(WORDS))
        part = f"corpus.{source}"
        shown = {name.removeprefix(f"{part}."): value for name, value in page.values.items() if name.startswith(part)}
        assert_same(shown, expected, names)
        lengths = {name.removeprefix("lengths."): value for name, value in shown.items() if name.startswith("lengths.")}
        assert_same(lengths, expected["lengths"], "shortest median mean longest empty")
        assert shown["num_files"] == str(len(files))
        ids = np.concatenate([np.fromfile(folder / name, np.uint16) for name in files])
        counts = np.bincount(ids, minlength=len(WORDS))
        frequent = page.tables[f"{part}:frequent"]
        assert [int(row["count"]) for row in frequent] == sorted(counts.tolist(), reverse=True)[: len(frequent)]
        assert all(counts[int(row["id"])] == int(row["count"]) for row in frequent)
    by_path = {row["path"]: row for row in page.tables[f"corpus.{SOURCE}:files"]}
    assert int(by_path[str(folder / FILE)]["tokens"]) == (folder / FILE).stat().st_size // 2


def test_the_order_is_what_shuffle_says(page: ParsedPage, config: Path) -> None:
    expected = run_json("shuffle", config, "--world-size", 2)
    names = "distance_tokens distance from_one_block from_one_file correlation blocks"
    for shown, figures in zip(page.tables["order:orders"], expected["orders"], strict=True):
        assert shown["order"].removesuffix(" (used)") == figures["order"]
        assert_same(shown, figures, names)
    assert_same({name: page.values[f"order.{name}"] for name in ("step_rows",)}, expected, "step_rows")


def test_the_steps_are_what_explain_says(page: ParsedPage, config: Path) -> None:
    names = "step num_rows padding_rows width tokens padding documents num_files"
    of_ranks = np.zeros(2, np.int64)
    for shown, step in zip(page.tables["rows:steps"], STEPS.split(","), strict=True):
        assert_same(shown, run_json("explain", config, "--step", step, "--world-size", 2), names)
        for rank in range(2):
            of_ranks[rank] += run_json("explain", config, "--step", step, "--world-size", 2, "--rank", rank)["tokens"]
    assert [int(row["tokens"]) for row in page.tables["order:ranks"]] == of_ranks.tolist()


def test_the_mixture_is_what_mixture_says(page: ParsedPage, config: Path) -> None:
    expected = run_json("mixture", config, "--world-size", 2)
    assert equal(page.values["mixture.tokens"], expected["tokens"])
    for shown, use in zip(page.tables["mixture:sources"], expected["sources"], strict=True):
        assert_same(shown, use, "name weight share tokens rows passes rows_left")
    for shown, stage in zip(page.tables["mixture:stages"], expected["stages"], strict=True):
        assert_same(shown, {"tokens": stage["tokens"], **stage["weights"]}, "tokens plain")
        assert equal(shown[SOURCE], stage["weights"][SOURCE])


def test_batches_are_what_preview_says(page: ParsedPage, config: Path) -> None:
    for step in STEPS.split(","):
        expected = run_json("preview", config, "--step", step, "--world-size", 2, "--rank", 0)
        shown = [row for row in page.rows if row["step"] == int(step)]
        assert len(shown) == len(expected["rows"]) == 4
        for row, own in zip(shown, expected["rows"], strict=True):
            count = len(row["tokens"])
            assert count == 64 - own["padding"]
            assert row["data-source"] == printable(own["source_name"])
            assert row["data-ids"] == " ".join(map(str, own["input_ids"][:count]))
            assert row["data-labels"] == " ".join(map(str, own["labels"][:count]))
            assert row["special"] == own["input_ids"][:count].count(END)


def test_text_of_the_data_is_inert(page: ParsedPage) -> None:
    assert {element.tag for element in page.elements} <= set(ELEMENTS.split())
    names = {name for element in page.elements for name in element.attributes}
    assert [name for name in names if name.startswith("on") or name == "src"] == []
    targets = {value for element in page.elements for name, value in element.attributes.items() if "href" in name}
    assert {target for target in targets if not re.fullmatch(r"#[\w-]+|data:,", target or "")} == set()
    (script,) = (element for element in page.elements if element.tag == "script")
    assert "pwned" not in script.text
    shown = {text for row in page.rows for text in row["tokens"]}
    ids = {int(token) for row in page.rows for token in row["data-ids"].split()}
    for number, word in enumerate(HOSTILE, start=1):
        assert number in ids, "each is in a row that is shown"
        assert "".join(letter if letter in "\n\t" else printable(letter) for letter in word) in shown
    assert "1337" not in page.html
    assert not re.search(r"https?://(?!www\.w3\.org/)", page.html)


def test_every_part_has_its_charts(page: ParsedPage) -> None:
    found = [element.attributes["data-chart"] for element in page.elements if "data-chart" in element.attributes]
    expected = "lengths files lengths order fill documents_a_row shares passes"
    of_run = "tokens_per_second data_wait_ratio ready_blocks mfu loss loss_by_source"
    assert found == f"{expected} {of_run}".split()
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert page.html.count("<svg ") == len(found)


def test_the_log_is_read_as_rates(page: ParsedPage) -> None:
    """The rate between the last two lines, and not since the start."""
    assert float(page.values["run.tokens_per_second"]) == pytest.approx(1000 * (50**2 - 49**2) / 2)
    assert float(page.values["run.loss"]) == 2.5
    assert page.values["run.last_step"] == "500"
    assert any("1 line could not" in element.text for element in page.elements)


def test_json_says_what_is_in_the_page(folder: Path, config: Path, page: ParsedPage) -> None:
    out = folder / "again.html"
    told = run_json("report", config, "--out", out, "--steps", 7, "--world-size", 2)
    assert (told["path"], told["bytes"], told["missing"]) == (str(out), out.stat().st_size, [])
    again = ParsedPage(out.read_text(encoding="utf-8"))
    facts = {f"{section}.{name}": value for section, own in told["sections"].items() for name, value in own.items()}
    assert facts.keys() == again.values.keys()
    assert [name for name, value in facts.items() if not equal(again.values[name], value)] == []
    assert again.rows[0]["tokens"] == again.rows[0]["data-ids"].split(), "without a tokenizer, ids are the text"


@pytest.mark.slow
def test_the_page_stays_small(folder: Path) -> None:
    """Eight steps of long rows: fewer tokens of each are shown."""
    out = folder / "large.html"
    arguments = ["--batch-size", 64, "--seq-len", 8192, "--rows", 64, "--tokens", 8192, "--steps", "0,1,2,3,4,5,6,7"]
    told = run_json("report", "synthetic:200M", *arguments, "--out", out, "--set", "vocab_size=50257")
    assert told["bytes"] < 5_000_000
    assert len(ParsedPage(out.read_text()).rows) == 8 * 64
    short = folder / ("long" * 50) / "short.bin"
    short.parent.mkdir()
    np.tile(np.array([7, END], np.uint16), 200_000).tofile(short)
    arguments += ["--seq-len", 512, "--set", "rows=pack", "--set", f"eos_id={END}"]
    assert run_json("report", short, *arguments, "--out", out)["bytes"] < 5_000_000
    assert len(ParsedPage(out.read_text()).rows) == 8 * 64


def test_a_corpus_of_any_size_is_read_as_a_sample(folder: Path) -> None:
    """A trillion tokens: nothing but the steps and the sample can have been read."""
    told = run_json("report", "synthetic:1T", "--batch-size", 4, "--seq-len", 128, "--out", folder / "huge.html")
    assert told["sections"]["corpus"]["ids_looked_at"] < 2_000_000
    assert "documents" not in told["sections"]["corpus"]


def test_documents_that_no_index_tells_are_estimated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows do not need them, a large corpus is not searched for them."""
    ids = np.array([token for document in documents(6000, 3) for token in document], np.uint16)
    ids.tofile(folder / "many.bin")
    monkeypatch.setattr(keyed_sample, "RUN_IDS", 512)
    monkeypatch.setattr("dali_pipes.tools.reports.page.corpus_section.RUN_IDS", 512)
    monkeypatch.setattr("dali_pipes.documents.documents.scan_offsets", None)  # what would search
    settings = ["--set", f"eos_id={END}", "--set", "mask_boundaries=false"]
    told = run_json(
        "report", folder / "many.bin", "--batch-size", 4, "--seq-len", 64, *settings, "--out", folder / "many.html"
    )
    facts = told["sections"]["corpus"]
    assert facts["documents_about"] == pytest.approx(6000, rel=0.1)
    assert facts["mean_about"] == pytest.approx(len(ids) / 6000, rel=0.1)


def test_a_batch_that_cannot_be_read_is_missing(tmp_path: Path) -> None:
    """An id out of range: its batch is left out, and the others are shown."""
    ids = np.arange(640, dtype=np.uint16) % 50
    ids[40] = 60
    ids.tofile(tmp_path / "data.bin")
    given = ["--batch-size", 2, "--seq-len", 16, "--set", "vocab_size=50", "--set", "shuffle=false"]
    told = run("report", tmp_path / "data.bin", *given, "--steps", "0,1,5", "--out", tmp_path / "report.html")
    assert told.exit_code == 0, told.output
    assert "step 1" in told.stderr
    shown = ParsedPage((tmp_path / "report.html").read_text())
    assert {row["step"] for row in shown.rows} == {0, 5}
    assert shown.values["corpus.problems"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0,x"], "0,x"),
        (["--steps", "0,99999"], "99,999"),
        (["--steps", ",".join(map(str, range(data_page.MOST_STEPS + 1)))], str(data_page.MOST_STEPS)),
        (["--log", "none.jsonl"], "none.jsonl"),
        (["--log", __file__], "test_report_page.py"),
        (["--state", "none.json"], "none.json"),
        (["--tokenizer", "none.json"], "none.json"),
        (["--out", "no/such/folder/report.html"], "no/such/folder"),
        (["--set", "seq_length=3"], "seq_len"),
    ],
)
def test_a_mistake_of_the_page_is_one_line(config: Path, arguments: list[str], message: str) -> None:
    assert message in one_line_error("report", config, *arguments)


def test_a_missing_package_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "dali-pipes[report]" in one_line_error("report", config)


def test_weights_that_a_state_changes_are_shown(tmp_path: Path, folder: Path, config: Path) -> None:
    from dali_pipes import LoaderConfig, TokenLoader

    with TokenLoader(LoaderConfig.from_file(config), device="cpu", quiet=True, rank=0, world_size=2) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        begin = loader.set_weights({SOURCE: "0.5", "plain": "0.5"})
        next(batches)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    out = tmp_path / "report.html"
    run_well("report", config, "--state", tmp_path / "state.json", "--out", out, "--world-size", 2, "--steps", 6)
    stages = ParsedPage(out.read_text()).tables["mixture:stages"]
    assert [int(stage["tokens"]) for stage in stages][1] == begin * 64


@pytest.mark.needs("tokenizers")
def test_text_is_shown_with_its_tokenizer(tmp_path: Path) -> None:
    """Text files are tokenized, as a loader does with the same settings."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", *["all", "the", "world", "is", "a", "stage"]]
    library = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text(40 * (json.dumps({"text": "all the world is a stage"}) + "\n"))
    given = ["--batch-size", 2, "--seq-len", 8, "--tokenizer", tmp_path / "tokenizer.json"]
    run_well("report", tmp_path / "text.jsonl", *given, "--out", tmp_path / "report.html")
    shown = ParsedPage((tmp_path / "report.html").read_text())
    assert {text.strip() for text in shown.rows[0]["tokens"]} == set(words)
