"""`loader.preview`: the batch that the loader hands out, without moving it; and what notebooks show."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.errors import ConfigError, LoaderClosedError

END = 0
KINDS: list[dict[str, Any]] = [
    {},
    {"rows": "pack", "eos_id": END},
    {"rows": "pad", "eos_id": END, "length_buckets": [8, 16]},
    {"order": "blocks", "shuffle_window": 2},
    {"drop_last": False, "world_size": 3, "rank": 1},
    {"skip_steps": [[2, 4]]},
    {"context_parallel": [1, 2], "context_split": "zigzag"},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    ids = np.random.default_rng(1).integers(1, 90, 4000)
    ids[np.random.default_rng(2).integers(0, 4000, 300)] = END
    path = tmp_path / "<script>alert(1)</script>.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    ids.astype(np.uint16).tofile(path)
    return path


def load(data: Path, **settings: Any) -> TokenLoader:
    given = {"batch_size": 4, "seq_len": 16, "device": "cpu", "quiet": True, "seed": 3, **settings}
    return TokenLoader(str(data), **given)


@pytest.mark.parametrize("settings", KINDS, ids=json.dumps)
def test_a_preview_is_the_batch_and_moves_nothing(data: Path, settings: dict[str, Any]) -> None:
    """Before, between, and after batches; the loader then hands out what another one does."""
    with load(data, **settings) as loader, load(data, **settings) as other:
        expected = [batch["input_ids"].tolist() for batch in other]
        count = len(expected)
        steps = [step for step in range(count + 2) if not (settings.get("skip_steps") and 2 <= step < 4)][:count]
        batches = []
        for number, batch in enumerate(loader):
            batches.append(batch["input_ids"].tolist())
            if number in (0, 3):
                state = loader.state_dict()
                for at in (0, 1, number, count - 1):
                    shown = loader.preview(steps[at], epoch=0, rows=9, tokens=99)
                    assert [row.outputs["input_ids"] for row in shown.rows] == expected[at]
                following = loader.preview(rows=9)
                assert [row.outputs["input_ids"] for row in following.rows] == expected[number + 1]
                assert loader.state_dict() == state
        assert batches == expected
        assert loader.preview().batch.epoch == 1


def test_a_preview_follows_weights_that_change(data: Path, tmp_path: Path) -> None:
    """With the order that the loader has now, before and after a resume."""
    other = tmp_path / "other.bin"
    np.full(3000, 95, np.uint16).tofile(other)
    mixture = {"a": {"corpus": str(data), "weight": 0.9}, "b": {"corpus": str(other), "weight": 0.1}}
    settings: dict[str, Any] = {"mixture": mixture, "total_rows": 600, "batch_size": 4, "seq_len": 16, "device": "cpu"}
    with TokenLoader(**settings, quiet=True) as loader, TokenLoader(**settings, quiet=True) as resumed:
        batches, served = iter(loader), []
        for number in range(60):
            served.append(next(batches)["input_ids"].tolist())
            if number == 9:
                loader.set_weights({"a": "0.1", "b": "0.9"})
                state = loader.state_dict()
                ahead = loader.preview(50, rows=9)
        resumed.load_state_dict(state)
        for each in (loader.preview(50, epoch=0, rows=9), resumed.preview(50, rows=9), ahead):
            assert [row.outputs["input_ids"] for row in each.rows] == served[50]
        assert [row.outputs["input_ids"] for row in loader.preview(5, epoch=0, rows=9).rows] == served[5]


def test_a_preview_of_nothing_is_refused(data: Path) -> None:
    loader = load(data)
    with pytest.raises(ConfigError, match="999"):
        loader.preview(999)
    with pytest.raises(ConfigError, match=r"none\.json"):
        loader.preview(0, tokenizer="none.json")
    loader.close()
    with pytest.raises(LoaderClosedError):
        loader.preview(0)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_notebooks_show_small_tables_without_scripts(data: Path) -> None:
    with load(data, rows="pack", eos_id=END) as loader, open_corpus(data, dtype="uint16") as corpus:
        next(iter(loader))
        for each in (loader, corpus, loader.stats(), loader.plan_report(), loader.preview(0)):
            html = each._repr_html_()
            found = Tags(html)
            assert found.tags <= {"div", "b", "table", "tr", "td", "p", "style", "span", "i"}
            assert not any(name.startswith("on") for name in found.attributes)
            assert "<script" not in html
            assert len(html) < 20_000
            assert type(each).__name__ in repr(each)
        assert f"{loader.plan_report().rows:,}" in repr(loader.plan_report())
        assert "&lt;script&gt;" in corpus._repr_html_()
        assert str(loader.preview(0).rows[0].outputs["input_ids"][0]) in repr(loader.preview(0))


def test_what_packing_cuts_is_shown(data: Path) -> None:
    with load(data, rows="pack", eos_id=END) as loader:
        report = loader.plan_report()
        for value in (report.documents, report.tokens, report.padding_tokens, report.split_documents):
            assert f"{value:,}" in report._repr_html_()


def test_a_sentinel_is_of_no_file(data: Path) -> None:
    sentinels = {"prefix": 95, "middle": 96, "suffix": 97}
    fim = {"kind": "fim", "rate": 1, "tokens": sentinels}
    with load(data, rows="pack", eos_id=END, vocab_size=98, objective=[fim]) as loader:
        preview = loader.preview(0)
    for html in (preview._repr_html_(), preview.as_html()):
        assert all(f"sentinel before the {part}" in html for part in sentinels)
        pieces = sum(len(row.pieces) for row in preview.rows)
        marks = sum(piece.origin.sentinel is not None for row in preview.rows for piece in row.pieces)
        assert html.count("data-file=") == html.count("data-offset=") == pieces - marks
        assert "None" not in html
