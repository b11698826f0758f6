"""`explain`, `locate` and `preview` of batches: against the loader, and against the files read without the package."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run, run_json, run_well
from corpus_files import write_megatron
from sample_corpora import NAMES, load_sample

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.tools.reports import TokenText

END = 9
ROW_KEYS = {"row", "row_id", "is_padding", "file", "offset", "source", "position", "pieces"}
PIECE_KEYS = {
    "column", "length", "file", "offset", "position", "document", "document_offset", "document_length"
}  # fmt: skip
MODES = [
    {"rows": "stream"},
    {"rows": "stream", "mask_boundaries": "true"},
    {"rows": "stream", "stride": 5, "mtp": 2},
    {"rows": "stream", "label_shift": "false"},
    {"rows": "pack"},
    {"rows": "pack", "long_documents": "truncate", "mask_boundaries": "false"},
    {"rows": "pad"},
    {"rows": "pad", "split": "validation", "validation_fraction": 0.4},
]


def documents(count: int) -> list[list[int]]:
    """Documents of different lengths, some longer than a row, each with its end; no other token is there twice."""
    lengths = np.random.default_rng(7).integers(1, 40, count).tolist()
    firsts = np.cumsum([100, *lengths]).tolist()
    return [[*range(first, first + length), END] for first, length in zip(firsts, lengths, strict=False)]


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Files that end within documents, and one that is empty."""
    folder = tmp_path / "flat"
    folder.mkdir()
    ids = np.array([token for document in documents(60) for token in document], np.uint16)
    borders = [0, 333, 333, 700, len(ids)]
    for number, (begin, end) in enumerate(pairwise(borders)):
        ids[begin:end].tofile(folder / f"{number}.bin")
    return folder


@pytest.fixture
def scattered(tmp_path: Path) -> Path:
    """An index whose sequences lie in the file in another order; documents of one or two of them, two empty."""
    sequences = [np.array(document, np.uint16) for document in documents(60)]
    places = np.random.default_rng(3).permutation(60)
    starts = np.zeros(60, np.int64)
    starts[places] = np.cumsum([0, *(len(sequences[place]) for place in places[:-1])])
    entries = [0, 0, *range(2, 41, 2), *range(41, 51), 50, *range(51, 61)]
    path = write_megatron(tmp_path / "scattered", sequences, entries, pointers=(2 * starts).tolist())
    path.write_bytes(b"".join(sequences[place].tobytes() for place in places))
    return path


def write_config(tmp_path: Path, corpus: Path | str, **settings: object) -> Path:
    given = {"corpus": str(corpus), "batch_size": 3, "seq_len": 16, "seed": 4, "window_documents": 16, **settings}
    lines = [
        f"{name} = {value if str(value) in ('true', 'false') or not isinstance(value, str) else repr(value)}"
        for name, value in given.items()
    ]
    path = tmp_path / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def loader_batches(path: Path, **settings: Any) -> list[dict[str, Any]]:
    with TokenLoader(LoaderConfig.from_file(path, device="cpu", **settings)) as loader:
        return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


def read_piece(piece: dict[str, Any], dtype: str = "uint16", header: int = 0) -> list[int]:
    """The tokens of a piece, read from its file."""
    width = np.dtype(dtype).itemsize
    found: list[int] = np.fromfile(
        piece["file"], dtype, count=piece["length"], offset=header + piece["offset"] * width
    ).tolist()
    return found


def assert_tells_the_row(row: dict[str, Any], tokens: Sequence[int], offsets: Sequence[int] | None) -> None:
    """Pieces lie one behind the other from column 0, and their files and documents hold the tokens of the row."""
    column = 0
    for piece in row["pieces"]:
        assert set(piece) >= PIECE_KEYS
        assert piece["column"] == column
        assert read_piece(piece) == list(tokens[column : column + piece["length"]])
        column += piece["length"]
        if offsets is None:
            assert piece["document"] is piece["document_offset"] is piece["document_length"] is None
        else:
            first, end = offsets[piece["document"] : piece["document"] + 2]
            assert first + piece["document_offset"] == piece["position"]
            assert piece["document_length"] == end - first
            assert piece["position"] + piece["length"] <= end
    if row["pieces"]:
        assert {name: row["pieces"][0][name] for name in ("file", "offset", "position")} == {
            name: row[name] for name in ("file", "offset", "position")
        }


@pytest.mark.parametrize("kind", ["flat", "scattered"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(map(str, mode.values())))
def test_a_batch_is_told_as_the_loader_serves_it(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, mode: dict[str, object]
) -> None:
    """Every row mode, on each rank, in the last step too, which is partial and padded."""
    path = write_config(tmp_path, request.getfixturevalue(kind), eos_id=END, drop_last="false", **mode)
    whole = documents(60)
    lengths = [len(document) for document in whole]
    if kind == "scattered":
        entries = [0, 0, *range(2, 41, 2), *range(41, 51), 50, *range(51, 61)]
        lengths = [sum(lengths[a:b]) for a, b in pairwise(entries)]
    offsets = np.cumsum([0, *lengths]).tolist()
    uses_documents = mode["rows"] != "stream" or "mask_boundaries" in mode or "mtp" in mode
    known = offsets if kind == "scattered" or uses_documents else None
    extra = ("position_ids", "segment_ids") if uses_documents else ()
    num_padding = 0
    for rank in (0, 1):
        outputs = ("input_ids", "labels", "row_ids", *extra)
        batches = loader_batches(path, rank=rank, world_size=2, outputs=outputs)
        for step in {0, len(batches) // 2, len(batches) - 1}:
            batch = batches[step]
            arguments = [path, "--step", step, "--rank", rank, "--world-size", 2]
            located = run_json("explain", *arguments)
            assert [row["row_id"] for row in located["rows"]] == batch["row_ids"]
            shown = run_json("preview", *arguments, "--rows", 3, "--tokens", 16)
            assert shown["batch_rows"] == len(shown["rows"]) == len(located["rows"])
            for number, (place, row) in enumerate(zip(located["rows"], shown["rows"], strict=True)):
                assert set(place) == {"rank", *ROW_KEYS}
                assert {name: row[name] for name in outputs if name != "row_ids"} == {
                    name: batch[name][number] for name in outputs if name != "row_ids"
                }
                assert_tells_the_row(place, row["input_ids"], known)
                assert {name: row[name] for name in ROW_KEYS - {"pieces"}} == {
                    name: place[name] for name in ROW_KEYS - {"pieces"}
                }
                first_labels = [label[0] if isinstance(label, list) else label for label in row["labels"]]
                assert row["masked"] == first_labels.count(-100)
                covered = sum(piece["length"] for piece in row["pieces"])
                assert row["padding"] == 16 - covered
                assert row["is_padding"] == (row["row_id"] == -1) == (covered == 0)
                num_padding += row["is_padding"]
                if uses_documents:
                    assert row["segment_ids"][covered:] == [0] * row["padding"]
                    for piece in row["pieces"]:
                        last = piece["column"] + piece["length"] - 1
                        assert piece["segment"] == row["segment_ids"][last]
                        assert piece["positions"] == [row["position_ids"][at] for at in (piece["column"], last)]
    assert num_padding or mode not in (MODES[0],)


def test_a_step_is_reached_without_those_before_it(tmp_path: Path) -> None:
    """A corpus of 10^11 tokens, most of them holes in the file: nobody could read up to the step."""
    path = tmp_path / "holes.bin"
    with path.open("wb") as file:
        file.truncate(2 * 10**11)
        file.seek(2 * 16 * 3 * 10**9)
        file.write(np.arange(1, 60, dtype=np.uint16).tobytes())
    config = write_config(tmp_path, path, shuffle="false", dtype="uint16")
    shown = run_json("preview", config, "--step", 10**9, "--tokens", 3)
    assert [row["input_ids"] for row in shown["rows"]] == [[1, 2, 3], [17, 18, 19], [33, 34, 35]]
    assert [row["position"] for row in shown["rows"]] == [16 * 3 * 10**9 + 16 * row for row in range(3)]


@pytest.mark.parametrize("rows", ["stream", "pack"])
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_previewed(samples: Path, tmp_path: Path, name: str, rows: str) -> None:
    """Rows are the true tokens, in documents whose lengths are the true ones."""
    sample = load_sample(samples, name)
    kind, token_id = sample.delimiter or ("--eos", sample.eos)
    dtype = {"dtype": sample.options[1]} if sample.options else {}
    delimiter = {"eos_id" if kind == "--eos" else "document_start_id": int(token_id)}
    config = write_config(tmp_path, "unused", rows=rows, seq_len=64, **dtype, **delimiter)
    paths = f"corpus={[str(path) for path in sample.paths]}".replace("'", '"')
    shown = run_json("preview", config, "--set", paths, "--step", 5, "--epoch", 1, "--tokens", 64)
    offsets = np.cumsum([0, *sample.lengths]).tolist()
    for row in shown["rows"]:
        for piece in row["pieces"]:
            own = row["input_ids"][piece["column"] : piece["column"] + piece["length"]]
            assert own == sample.tokens[piece["position"] : piece["position"] + piece["length"]]
            if piece["document"] is not None:
                assert piece["position"] - piece["document_offset"] == offsets[piece["document"]]
                assert piece["document_length"] == sample.lengths[piece["document"]]
            elif kind == "--eos":  # in windows, documents are told apart by the id itself
                assert sample.eos not in own[:-1]
            else:
                assert sample.eos not in own[1:]


def test_a_row_that_runs_over_files_is_cut_at_their_borders(tmp_path: Path, flat: Path) -> None:
    config = write_config(tmp_path, flat, seq_len=400, batch_size=1, shuffle="false")
    (row,) = run_json("explain", config, "--step", 0)["rows"]
    assert [(Path(piece["file"]).name, piece["column"], piece["length"]) for piece in row["pieces"]] == [
        ("0.bin", 0, 333),
        ("2.bin", 333, 67),
    ]
    lines = run_well("locate", config, "--step", 0, "--row", 0).splitlines()
    assert [line for line in lines if line.startswith("piece")] == [
        f"piece     columns 0 to 332: {flat / '0.bin'} token 0",
        f"piece     columns 333 to 399: {flat / '2.bin'} token 0",
    ]
    assert {"rank": 0, **run_json("locate", config, "--step", 0, "--row", 0)} == row
    shown = run_well("explain", config, "--step", 0)
    assert f"-- columns 333 to 399: {flat / '2.bin'} token 0" in shown


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One word for each id up to 200, but id 150 is a special token and 160 is missing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{number}": number for number in range(200) if number not in (150, 160)}
    words["<s>"] = 150
    library = Tokenizer(models.WordLevel(words, "w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken("<s>", special=True)])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_are_decoded_and_what_the_tokenizer_lacks_is_named(tmp_path: Path, tokenizer: Path) -> None:
    assert TokenText(tokenizer).decode([3, 4, 150, 160, 7000, 5]) == "w3w4<s><id 160><id 7000>w5"
    np.array([3, 4, END, 150, 160, 7000, 5, 6], np.uint16).tofile(tmp_path / "a.bin")
    config = write_config(tmp_path, tmp_path / "a.bin", seq_len=7, batch_size=1, eos_id=END, mask_boundaries="true")
    (row,) = run_json("preview", config, "--tokenizer", tokenizer / "tokenizer.json")["rows"]
    assert [piece["text"] for piece in row["pieces"]] == ["w3w4w9", "<s><id 160><id 7000>w5"]
    assert "w3w4⟦w9⟧\n" in run_well("preview", config, "--tokenizer", tokenizer)


@pytest.mark.parametrize("format", ["flat", "megatron"])
def test_what_tokenize_makes_is_clean_and_shows_its_text(tmp_path: Path, tokenizer: Path, format: str) -> None:
    """Checksums of the manifest included, until a byte changes."""
    texts = ["w1 w2 w3", "w4", "w5 w6"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "tokens"
    arguments = ["--tokenizer", tokenizer, "--out", out, "--eos", 150, "--format", format]
    made = run("tokenize", tmp_path / "a.jsonl", *arguments)
    assert made.exit_code == 0, made.output
    options = ["--eos", 150, "--vocab-size", 200]
    report = run_json("check", out, *options)
    assert (report["documents"], report["tokens"]) == (3, 9)
    assert report["checksums"] == (1 if format == "flat" else 2)
    config = write_config(tmp_path, out, rows="pad", batch_size=3, eos_id=150, tokenizer=str(tokenizer))
    shown = run_json("preview", config, "--set", "shuffle=false")
    assert [row["pieces"][0]["text"] for row in shown["rows"]] == ["w1w2w3<s>", "w4<s>", "w5w6<s>"]
    (data,) = out.glob("*.bin")
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.chmod(0o644)
    data.write_bytes(content)
    report = run_json("check", out, *options, status=1)
    assert report["problem_counts"] == {"checksum": 1}
    assert report["problems"][0]["file"] == str(data)


def test_masks_padding_and_what_is_left_out_show_without_colour(tmp_path: Path) -> None:
    np.array([1, 2, 3, END, 4, 5, END], np.uint16).tofile(tmp_path / "a.bin")
    config = write_config(tmp_path, tmp_path / "a.bin", seq_len=9, batch_size=1, eos_id=END, rows="pack")
    lines = run_well("preview", config, "--tokens", 6).splitlines()
    assert re.findall(r"\d+", lines[0]) == ["0", "0", "0", "1", "1", "1"]  # step, epoch, rank, ranks, shown, rows
    assert re.search(r"labels .*⟦.*⟧", lines[1])
    row = lines.index("row 0, row id 0: 4 of 9 labels ignored")
    origin = f"{tmp_path / 'a.bin'} token"
    assert lines[row + 1 :] == [
        f"-- columns 0 to 3: document 0 from token 0 of 4, {origin} 0, segment 1, positions 0 to 3",
        "1 2 3 ⟦9⟧",
        f"-- columns 4 to 6: document 1 from token 0 of 3, {origin} 4, segment 2, positions 0 to 2",
        "4 5 ... 1 more token",
        "-- padding, 2 positions",
    ]


def test_a_bad_id_in_the_batch_is_the_error_that_a_loader_raises(tmp_path: Path, flat: Path) -> None:
    config = write_config(tmp_path, flat, vocab_size=200, shuffle="false")
    message = one_line_error("preview", config, "--step", 5)
    assert re.search(r"1\.bin|0\.bin", message)
    assert "steps 4, 5" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 9999], "step 9,999"),
        (["--step", -1], "step -1"),
        (["--epoch", -1], "epoch -1"),
        (["--rank", 2, "--world-size", 2], "world_size = 2"),
        (["--set", "rows=pack"], "eos_id"),
        (["--tokenizer", "none.json"], "none.json"),
        (["--tokenizer", __file__], __file__),
        (["--set", "corpus=none.bin"], "none.bin"),
        (["--set", "eos_id=9", "--set", "rows=pack", "--step", 9999], "step 9,999"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, flat: Path, arguments: list[object], message: str) -> None:
    config = write_config(tmp_path, flat)
    assert message in one_line_error("preview", config, *arguments, "--json")
