"""`mixture`, and `locate`, `explain` and `preview` of a mixture, against what a loader hands out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run_json, run_well

from dali_pipes import LoaderConfig, TokenLoader

SEQ_LEN = 12
BATCH = 8
TOTAL = 12 * 640
FIRST_IDS = {"web": 1000, "code": 20000, "chat": 40000}
END = 9


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two sources of flat files, one of them two files, and a source of documents in packed rows.

    Every id of a source but the ends of documents is its place in the source plus the first id of the source.
    """
    documents = [(7 * number) % 17 + 2 for number in range(80)]
    for name, sizes in {"web": [3000, 2005], "code": [1500], "chat": [sum(documents)]}.items():
        ids = np.arange(sum(sizes)) + FIRST_IDS[name]
        ids[np.cumsum(documents) - 1] = END
        (tmp_path / name).mkdir()
        for number, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
            part.astype(np.uint16).tofile(tmp_path / name / f"{number}.bin")
    path = tmp_path / "run.toml"
    path.write_text(
        f"batch_size = {BATCH}\nseq_len = {SEQ_LEN}\ntotal_tokens = {TOTAL}\ndrop_last = false\n"
        f'on_exhausted = "drop"\neos_id = {END}\n'
        f'[mixture.web]\ncorpus = "{tmp_path / "web"}"\nweight = 0.6\n'
        f'[mixture.code]\ncorpus = "{tmp_path / "code"}"\nweight = 0.2\nmax_epochs = 0.5\n'
        f'[mixture.chat]\ncorpus = "{tmp_path / "chat"}"\nweight = 0.2\nrows = "pack"\nmax_epochs = 100\n'
        f"[[stages]]\nat = {TOTAL // 2}\nweights = {{web = 0.3, code = 0.0, chat = 0.7}}\n"
    )
    return path


def open_loader(config: Path, **given: Any) -> TokenLoader:
    return TokenLoader(
        LoaderConfig.from_file(config, device="cpu", outputs=["input_ids", "row_ids"], rank=0, world_size=1, **given)
    )


def ids_of(piece: dict[str, Any], name: str, config: Path) -> list[int]:
    """What a piece's file holds at its place, after checks that its position and its document agree with that."""
    files = sorted((config.parent / name).glob("*.bin"))
    data = [np.fromfile(file, np.uint16).tolist() for file in files]
    whole = [token for part in data for token in part]
    number = files.index(Path(piece["file"]))
    begin = piece["offset"]
    found: list[int] = data[number][begin : begin + piece["length"]]
    assert whole[piece["position"] : piece["position"] + piece["length"]] == found
    if piece["document"] is not None:
        ends = np.flatnonzero(np.array(whole) == END) + 1
        first = int(np.concatenate(([0], ends))[piece["document"]])
        assert first + piece["document_offset"] == piece["position"]
    return found


def test_located_tokens_are_those_of_the_loader(config: Path) -> None:
    with open_loader(config) as loader:
        batches = list(loader)
    seen: set[str] = set()
    names = list(FIRST_IDS)
    for step in (0, 17, len(batches) - 1):
        report = run_json("explain", config, "--step", step, "--world-size", 1)
        shown = run_json("preview", config, "--step", step, "--rows", BATCH, "--tokens", SEQ_LEN)
        files, documents = set(), set()
        for row, ids, previewed in zip(report["rows"], batches[step]["input_ids"].tolist(), shown["rows"], strict=True):
            assert row["source_name"] == names[row["source"]]
            seen.add(row["source_name"])
            located = run_json("locate", config, "--step", step, "--row", row["row"])
            assert {"rank": 0, **located} == row
            assert previewed["input_ids"] == ids
            assert (previewed["source"], previewed["source_name"]) == (row["source"], row["source_name"])
            for piece in row["pieces"]:
                column = piece["column"]
                assert ids_of(piece, row["source_name"], config) == ids[column : column + piece["length"]]
                files.add(piece["file"])
                documents.add((row["source"], piece["document"]))
        assert set(report["files"]) == files
        assert report["num_files"] == len(files)
        assert report["documents"] == len(documents)
    assert seen == set(names)


def test_the_row_of_the_command_is_that_of_the_method(config: Path) -> None:
    with open_loader(config) as loader:
        for row in range(BATCH):
            place = loader.locate(3, row)
            found = run_json("locate", config, "--step", 3, "--row", row)
            assert (found["file"], found["offset"], found["position"]) == (
                str(place.file),
                place.offset,
                place.position,
            )
            assert (found["source"], found["source_name"]) == (place.source, place.source_name)
            assert found["row_id"] == place.row_id
            assert str(place.source_name) in run_well("locate", config, "--step", 3, "--row", row)


def test_figures_are_those_of_the_rows(config: Path) -> None:
    """Counted from the ids that the loader hands out, at the end and within the run."""
    with open_loader(config) as loader:
        rows = np.concatenate([batch["input_ids"].numpy() for batch in loader])
    whose = np.searchsorted([20000, 40000], rows.max(axis=1), side="right")
    for at in (None, 0, 1, 100 * SEQ_LEN, 333 * SEQ_LEN, TOTAL):
        place = TOTAL // SEQ_LEN if at is None else -(-at // SEQ_LEN)
        found = run_json("mixture", config, *([] if at is None else ["--at", at]))
        assert found["place"] == place
        counts = [int(np.count_nonzero(whose[:place] == number)) for number in range(3)]
        assert [use["rows"] for use in found["sources"]] == counts
        web, code, chat = found["sources"]
        assert (web["tokens"], code["tokens"]) == (counts[0] * SEQ_LEN, counts[1] * SEQ_LEN)
        assert sum(use["tokens"] for use in found["sources"]) == found["tokens"]
        assert (web["is_exact"], web["rows_left"], chat["is_exact"]) == (True, None, False)
        assert code["rows_left"] == 1500 // SEQ_LEN // 2 - counts[1]
    assert found["stages"][0]["weights"] == pytest.approx({"web": 0.6, "code": 0.2, "chat": 0.2})
    assert found["stages"][-1]["weights"] == pytest.approx({"web": 0.3, "code": 0, "chat": 0.7})
    assert [source["name"] for source in found["exhausted"]] == ["code"]
    assert found["exhausted"][0]["tokens"] == found["exhausted"][0]["place"] * SEQ_LEN <= TOTAL // 2


def test_text_names_sources_stages_and_figures(config: Path) -> None:
    report = run_json("mixture", config, "--at", "1200")
    printed = run_well("mixture", config, "--at", "1200")
    for use in report["sources"]:
        (line,) = (line for line in printed.splitlines() if line.startswith(use["name"]) and "leaves" not in line)
        assert f"{use['tokens']:,}" in line
        assert f"{use['rows']:,}" in line
    assert "from token 0, row 0: web 60.00%" in printed
    assert "code leaves" in run_well("mixture", config)


def test_plot_is_a_figure(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "mixture.png"
    run_well("mixture", config, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mixture.unknown" in one_line_error("mixture", config, "--plot", tmp_path / "mixture.unknown")
    assert "--at" in one_line_error("mixture", config, "--at", 0, "--plot", picture)


def test_errors_name_the_setting(config: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"corpus": "synthetic:10M", "batch_size": 4, "seq_len": 8}))
    assert "mixture" in one_line_error("mixture", plain)
    assert "--at 1.5" in one_line_error("mixture", config, "--at", "1.5")
    assert "--at -5" in one_line_error("mixture", config, "--at=-5")


def test_ranks_of_a_mixture_of_streams_without_documents(config: Path) -> None:
    """All ranks of a step together, of rows that are single windows."""
    streams = config.with_name("streams.toml")
    text = config.read_text().replace(f"eos_id = {END}\n", "").replace('rows = "pack"\n', "")
    streams.write_text(text.replace(f"total_tokens = {TOTAL}", f"total_tokens = {TOTAL - 2 * SEQ_LEN}"))
    steps = -(-(TOTAL // SEQ_LEN - 2) // (3 * BATCH))
    ranks = []
    for rank in range(3):
        settings: dict[str, Any] = {"device": "cpu", "rank": rank, "world_size": 3, "outputs": ["input_ids", "row_ids"]}
        with TokenLoader(LoaderConfig.from_file(streams, **settings)) as loader:
            ranks.append([batch["input_ids"].tolist() for batch in loader])
    assert {len(batches) for batches in ranks} == {steps}
    for step in (0, steps - 1):
        report = run_json("explain", streams, "--step", step, "--world-size", 3)
        assert report["documents"] is None
        for row in report["rows"]:
            ids = ranks[row["rank"]][step][row["row"]]
            if row["is_padding"]:
                assert (row["source"], row["source_name"], row["pieces"]) == (None, None, [])
                continue
            assert [token for piece in row["pieces"] for token in ids_of(piece, row["source_name"], config)] == ids
    assert report["padding_rows"]
    assert "source" in run_well("preview", streams, "--world-size", 3, "--rank", 1)


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_commands_on_data_refuse_a_configuration(config: Path, command: str) -> None:
    error = one_line_error(command, config)
    assert str(config) in error
    assert "mixture" in error


def test_one_setting_of_one_source_is_set(config: Path) -> None:
    weights = ["--set", "mixture.web.weight=0.3", "--set", 'mixture."code".weight = "1/2"']
    weights += ["--set", "mixture.code.max_epochs=none"]
    found = run_json("config", config, *weights)
    assert {name: source["weight"] for name, source in found["mixture"].items()} == {
        "web": 0.3,
        "code": 0.5,
        "chat": 0.2,
    }
    assert "max_epochs" not in found["mixture"]["code"]
    assert found["mixture"]["chat"] == run_json("config", config)["mixture"]["chat"]
    asked = [use["weight"] for use in run_json("mixture", config, *weights, "--at", 0)["sources"]]
    assert asked == pytest.approx([0.3, 0.5, 0.2])
    more = ["--set", 'mixture."a.b c".corpus=synthetic:1K', "--set", "mixture.'a.b c'.weight=0"]
    assert list(run_json("config", config, *more, "--set", "stages=[]")["mixture"]) == [*FIRST_IDS, "a.b c"]
    for name, facts in {
        "mixture.web.weight": ["--set mixture.web.weight=-1", "mixture.web.weight: ", "-1"],
        "mixture.web.wieght": ["--set mixture.web.wieght=-1", "mixture.web.wieght: ", "weight"],
        "mixture.wbe.weight": ["--set mixture.wbe.weight=-1", "mixture: 'wbe'"],
        "mixture.web": ["--set mixture.web=-1", "mixture.web: "],
        "mixture.a b.weight": ["--set mixture.a b.weight=-1", "mixture.a b"],
        "model.web.weight": ["--set model.web.weight=-1", "model.web.weight"],
    }.items():
        error = one_line_error("config", config, "--set", f"{name}=-1")
        assert [fact for fact in facts if fact not in error] == []


def test_a_place_that_the_run_cannot_reach(config: Path) -> None:
    """Where all sources have had their passes, or where one would exceed them."""
    capped = ["--set", "mixture.web.max_epochs=0.5", "--set", "mixture.chat.max_epochs=2"]
    error = one_line_error("mixture", config, *capped, "--at", "10M")
    assert "--at 10,000,000" in error
    end = int(error.partition("ends after ")[2].split()[0].replace(",", ""))
    found = run_json("mixture", config, *capped, "--at", end)
    assert [source["name"] for source in found["exhausted"]] != []
    assert {source["name"] for source in found["exhausted"]} == set(FIRST_IDS)
    assert "--at" in one_line_error("mixture", config, *capped, "--at", end + 1)
    strict = ["--set", "on_exhausted=error", "--set", "mixture.code.max_epochs=1"]
    assert run_json("mixture", config, *strict, "--at", TOTAL)["place"] == TOTAL // SEQ_LEN
    strict[-1] = "mixture.web.max_epochs=1"
    strict += ["--set", "mixture.code.max_epochs=1"]
    assert "mixture.web: max_epochs = 1" in one_line_error("mixture", config, *strict, "--at", 3 * TOTAL)


def test_a_state_of_a_mixture_tells_where_the_run_went_on(config: Path, tmp_path: Path) -> None:
    """With weights that `set_weights` changed, and another batch size since."""
    with open_loader(config) as first:
        batches = iter(first)
        for step in range(30):
            next(batches)
            if step == 10:
                first.set_weights({"web": 0, "code": 0.5, "chat": 0.5})
        saved = first.state_dict()
    state = tmp_path / "state.json"
    state.write_text(json.dumps(saved))
    options = ["--state", state, "--batch-size", 6]
    with open_loader(config, batch_size=6) as loader:
        loader.load_state_dict(saved)
        step, batch = loader.step, next(iter(loader))
        places = [loader.locate(step, row) for row in range(6)]
    assert step == 30 * BATCH // 6
    report = run_json("explain", config, "--step", step, *options)
    shown = run_json("preview", config, "--step", step, "--rows", 6, "--tokens", SEQ_LEN, *options)
    assert [row["input_ids"] for row in shown["rows"]] == batch["input_ids"].tolist()
    for row, place in enumerate(places):
        found = run_json("locate", config, "--step", step, "--row", row, *options)
        assert {"rank": 0, **found} == report["rows"][row]
        expected = (str(place.file), place.offset, place.source_name, place.row_id)
        assert (found["file"], found["offset"], found["source_name"], found["row_id"]) == expected
        assert place.source_name != "web"
    other = one_line_error("explain", config, "--step", step, *options, "--set", "mixture.web.weight=0.1")
    assert "mixture.web" in other
    state.write_text(json.dumps({**saved, "mixture": {**saved["mixture"], "place": 7}}))
    assert "state" in one_line_error("explain", config, "--step", step, *options)
