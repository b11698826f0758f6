"""What the tests of the page work on: a corpus whose text, file names and source names are hostile, and a parser."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

END = 0
HOSTILE = (
    "<script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "</i></div></section><svg onload=window.pwned=1>",
    "{{ 7 * 191 }}{% raw %}",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnitirw",
    "javascript:window.pwned=1",
    "<!--",
    "]]></script><style>*{display:none}</style>",
    "&lt;b&gt;&#x3c;",
    "\0\x1b[31m",
    " two words\nof two lines",
    "$x^2$",
)
WORDS = ("<|end|>", *HOSTILE, *(f" w{number}" for number in range(len(HOSTILE) + 1, 100)))
SOURCE = '<img src=x onerror="window.pwned = 2">'
FILE = "\"'><svg onload=window.pwned=3>&amp;$x$.bin"


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose ids are the words of `WORDS`; the first one is special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    library = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(WORDS[0], special=True)])
    path = folder / "tokenizer.json"
    library.save(str(path))
    return path


def documents(count: int, seed: int) -> list[list[int]]:
    """Documents of 1 to 60 ids and their end."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(1, len(WORDS), length).tolist(), END] for length in generator.integers(1, 60, count)]


def write_mixture(folder: Path) -> Path:
    """A mixture of two sources, one of two files, with a stage."""
    for number, name in enumerate((FILE, "second.bin", "third.bin")):
        ids = [token for document in documents(150, number) for token in document]
        np.array(ids, np.uint16).tofile(folder / name)
    settings = {
        "batch_size": 4,
        "seq_len": 64,
        "rows": "pack",
        "eos_id": END,
        "vocab_size": len(WORDS),
        "total_rows": 600,
        "window_documents": 32,
        "mixture": {
            SOURCE: {"corpus": [str(folder / FILE), str(folder / "second.bin")], "weight": 0.7},
            "plain": {"corpus": str(folder / "third.bin"), "weight": 0.3},
        },
        "stages": [{"at": 20_000, "weights": {SOURCE: 0.2, "plain": 0.8}}],
    }
    path = folder / "run.json"
    path.write_text(json.dumps(settings))
    return path


def write_log(path: Path, lines: int = 50) -> Path:
    """Lines of `metrics()`, of losses, and one that is cut off."""
    records = [
        {
            "step": 10 * line,
            "loss": 5 - line / 20,
            "loss_by_source": {SOURCE: 5 - line / 25, "plain": 4 - line / 25},
            "data/tokens": 1000.0 * line * line,
            "data/wall_seconds": 2.0 * line,
            "data/tokens_per_second": 500.0 * line,
            "data/data_wait_ratio": 0.01,
            "data/ready_blocks": 3.0,
            "mfu": 0.4,
            "nothing": float("nan"),
        }
        for line in range(1, lines + 1)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 9')
    return path


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class ParsedPage(HTMLParser):
    """The elements of a page, the values by part and name, tables, and the tokens of each row."""

    html: str
    elements: list[Element] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._part, self._table, self._token = "", "", False
        self._step: int | None = None
        self._open: list[Element] = []
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append(Element(tag, found))
        self._open.append(self.elements[-1])
        if "data-part" in found:
            self._part, self._table = found["data-part"] or "", ""
        if tag == "section" and found.get("data-step") is not None:
            self._step = int(found["data-step"] or 0)
        if tag == "table":
            self._table = f"{self._part}:{found['data-table']}"
            self.tables[self._table] = []
        if tag == "tr" and self._table:
            self.tables[self._table].append({})
        if tag == "data":
            key, value = found["data-key"] or "", found["value"] or ""
            if self._table:
                self.tables[self._table][-1][key] = value
            else:
                self.values[f"{self._part}.{key}"] = value
        if "data-ids" in found:
            self.rows.append({**found, "step": self._step, "tokens": [], "special": 0, "masked": 0})
        if tag == "i" and self.rows:
            self.rows[-1]["tokens"].append("")
            self.rows[-1]["special"] += found.get("class") == "x"
            self._token = True

    def handle_endtag(self, tag: str) -> None:
        self._token = self._token and tag != "i"
        if tag == "table":
            self.tables[self._table] = [row for row in self.tables[self._table] if row]
            self._table = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data
        if self._token:
            self.rows[-1]["tokens"][-1] += data


def equal(shown: str, value: Any) -> bool:
    """Whether a value of the page is that of the JSON, without a digit less."""
    if value is None or isinstance(value, str):
        return shown == (value or "")
    return float(shown) == float(value)


def assert_same(shown: dict[str, str], expected: dict[str, Any], names: str) -> None:
    assert {name: shown[name] for name in names.split() if not equal(shown[name], expected[name])} == {}
