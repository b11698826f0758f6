"""The page of `report` in a real browser: Chromium, without a window. `make test-browser` runs it.

Screenshots are kept in `runs/browser`.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import run_json, run_well
from report_material import HOSTILE, write_log, write_mixture, write_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.needs("playwright")]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOTS = Path(__file__).parents[2] / "runs" / "browser"
SIZES = {"phone": (360, 740), "desk": (1600, 1000)}
CONTRAST = """() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    if (parts.length === 4 && parts[3] === 0) return null;
    const linear = parts.slice(0, 3).map((each) => each / 255)
      .map((each) => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2];
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const found = light(getComputedStyle(each).backgroundColor);
      if (found !== null) return found;
    }
    return 1;
  };
  const ratio = (color, element) => {
    const pair = [light(color), behind(element)].sort((a, b) => b - a);
    return (pair[0] + .05) / (pair[1] + .05);
  };
  const low = [], check = (what, color, element, least) => {
    const found = ratio(color, element);
    if (found < least) low.push([what, element.tagName, element.className, found]);
  };
  for (const element of document.querySelectorAll("body *:not(svg *, script, style)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (own && element.checkVisibility()) check("text", getComputedStyle(element).color, element, 4.5);
  }
  for (const text of document.querySelectorAll("figure svg text"))
    check("chart", getComputedStyle(text).fill, text, 4.5);
  for (const entry of document.querySelectorAll(".legend li"))
    check("series", getComputedStyle(entry, "::before").backgroundColor, entry, 3);
  return low;
}"""
"""Text in and beside charts with a contrast below 4.5, and series below 3: what WCAG AA asks for."""
TAB_STOP = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  if (at === document.body) return null;
  const name = at.getAttribute("aria-label") || at.textContent.trim();
  return {kind: at.tagName, name, outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth)};
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The page, and its configuration."""
    folder = tmp_path_factory.mktemp("browser")
    config, out = write_mixture(folder), folder / "report.html"
    tokenizer, log = write_tokenizer(folder), write_log(folder / "stats.jsonl")
    run_well("report", config, "--steps", "0,7", "--tokenizer", tokenizer, "--log", log, "--out", out)
    return out, config


class Opened:
    """A page in a window of its own, with what the browser complained about and asked for."""

    def __init__(self, browser: "Browser", path: Path, size: str = "desk", scheme: Any = "light") -> None:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.set_default_timeout(20_000)
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def origin(self) -> dict[str, str]:
        """What is told of the token pointed at."""
        facts = self.page.locator("#origin [data-fact]").all()
        return {fact.get_attribute("data-fact") or "": fact.inner_text().partition(" ")[2].strip() for fact in facts}


@pytest.fixture
def opened(browser: "Browser", made: tuple[Path, Path]) -> Iterator[Opened]:
    found = Opened(browser, made[0])
    yield found
    found.page.context.close()
    assert found.complaints == []
    assert found.asked == [made[0].as_uri()], "nothing is loaded from elsewhere"


def expected_origin(config: Path, step: int, row: int, column: int) -> dict[str, str]:
    """By `locate` and `preview`."""
    place = run_json("locate", config, "--step", step, "--row", row)
    shown = run_json("preview", config, "--step", step, "--rows", row + 1)["rows"][row]
    piece = [piece for piece in place["pieces"] if piece["column"] <= column][-1]
    inside = column - piece["column"]
    label = shown["labels"][column]
    return {
        "id": str(shown["input_ids"][column]),
        "label": "not learned" if label < 0 else str(label),
        "position": str(shown["position_ids"][column]),
        "document": f"{piece['document']:,}, token {piece['document_offset'] + inside:,} of "
        f"{piece['document_length']:,}",
        "source": place["source_name"],
        "file": piece["file"],
        "offset": f"{piece['offset'] + inside:,}",
    }


@pytest.mark.parametrize("column", [0, 1, 17, 40])
def test_pointing_at_a_token_tells_its_origin(opened: Opened, made: tuple[Path, Path], column: int) -> None:
    row = opened.page.locator("#step-7 .tokens").nth(1)
    row.locator("i").nth(column).hover()
    assert opened.origin() == expected_origin(made[1], 7, 1, column)


def test_tab_reaches_everything_once(opened: Opened) -> None:
    """Each has a name that a screen reader says, and an outline while it has the focus."""
    stops: list[dict[str, Any]] = []
    while len(stops) < 200:
        opened.page.keyboard.press("Tab")
        stop = opened.page.evaluate(TAB_STOP)
        if stop is None:
            break
        stops.append(stop)
    count = Counter(stop["kind"] for stop in stops)
    shown = {kind: opened.page.locator(kind).count() for kind in ("a", "button", "summary")}
    assert {kind.lower(): number for kind, number in count.items() if kind in ("A", "BUTTON", "SUMMARY")} == shown
    assert count["DIV"] == opened.page.locator(".table").count(), "tables that are wider than the window scroll by keys"
    assert count["I"] == opened.page.locator(".tokens").count(), "one token of each row"
    assert [stop for stop in stops if not stop["name"] or stop["outline"] < 1] == []


def test_a_screen_reader_finds_its_way(opened: Opened) -> None:
    """Headings without a gap, sections and rows with their names; charts are said in words."""
    page = opened.page
    levels = page.locator("h1, h2, h3").evaluate_all("(all) => all.map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for title in ("Corpus", "Order", "Rows", "Mixture", "Batches", "Run"):
        assert page.get_by_role("region", name=title, exact=True).count() == 1
    assert page.get_by_role("navigation", name="Sections").get_by_role("link").count() == 6
    assert page.get_by_role("group", name="Tokens of row 0").count() == 2
    assert page.locator("figure svg:not([aria-hidden=true])").count() == 0
    assert all(page.locator("figure > .about").all_inner_texts())
    assert page.get_by_role("columnheader").count() == page.locator("th").count() > 0
    page.locator("#step-0 .tokens i").first.focus()
    assert page.get_by_role("status").inner_text()


def test_keys_move_from_token_to_token(opened: Opened, made: tuple[Path, Path]) -> None:
    """Tab reaches a row once; arrows, Home and End move in it."""
    keyboard = opened.page.keyboard
    opened.page.locator("#step-0 [data-copy=text]").first.focus()
    keyboard.press("Tab")
    assert opened.origin() == expected_origin(made[1], 0, 0, 0)
    for _ in range(3):
        keyboard.press("ArrowRight")
    keyboard.press("ArrowLeft")
    assert opened.origin() == expected_origin(made[1], 0, 0, 2)
    keyboard.press("End")
    last = opened.page.locator("#step-0 .tokens").first.locator("i").count() - 1
    assert opened.origin() == expected_origin(made[1], 0, 0, last)
    keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.closest('.tokens i')") is None
    keyboard.press("Escape")
    assert opened.page.locator("#origin").is_hidden()


def test_a_row_is_copied(opened: Opened, made: tuple[Path, Path]) -> None:
    expected = run_json("preview", made[1], "--step", 0)["rows"][0]
    count = 64 - expected["padding"]
    for kind, text in {"ids": " ".join(map(str, expected["input_ids"][:count])), "text": None}.items():
        opened.page.locator(f"#step-0 [data-copy={kind}]").first.click()
        opened.page.wait_for_function("document.querySelector('#step-0 .actions').textContent.includes('Copied')")
        copied = opened.page.evaluate("navigator.clipboard.readText()")
        shown = opened.page.locator("#step-0 .tokens").first.locator("i").all_text_contents()
        assert copied == ("".join(shown) if text is None else text)


def test_hostile_text_does_nothing(opened: Opened) -> None:
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.locator("img, iframe, object, .tokens svg, .tokens script").count() == 0
    texts = set(opened.page.locator(".tokens i").all_text_contents())
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[2]} <= texts
    opened.page.evaluate("setTimeout('window.pwned = 4', 0)")  # a policy forbids what is not the page's script
    opened.page.wait_for_timeout(50)
    assert opened.page.evaluate("window.pwned") is None
    opened.complaints = [text for text in opened.complaints if "Content Security Policy" not in text]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_is_readable(browser: "Browser", made: tuple[Path, Path], size: str, scheme: str) -> None:
    """Nothing is wider than the window, contrast is that of WCAG AA, and a finger hits what it points at."""
    opened = Opened(browser, made[0], size, scheme)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.locator("#step-0 .tokens i").first.focus()  # what is told of it is text, too
    assert page.evaluate(CONTRAST) == []
    targets = page.locator("button, summary").evaluate_all("(all) => all.map((each) => each.offsetHeight)")
    assert min(targets) >= 24
    narrow = "(cells) => cells.filter((each) => each.textContent.trim().length > 3 && each.clientWidth < 40).length"
    assert page.locator("th, td").evaluate_all(narrow) == 0
    charts = page.locator("figure svg")
    assert charts.count() == len(page.locator("figure").all()) > 8
    for chart in charts.all():
        box = chart.bounding_box()
        assert box is not None
        assert 200 < box["width"] < 620
        assert box["height"] > 80
        assert page.evaluate("(chart) => chart.querySelectorAll('path, use').length", chart.element_handle()) > 3
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
    page.screenshot(path=SHOTS / f"{size}_{scheme}.png", full_page=True)
    assert opened.complaints == []
    page.context.close()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of rows that are folded, but the first one."""
    folder = tmp_path_factory.mktemp("long")
    config = json.loads(write_mixture(folder).read_text()) | {"seq_len": 512, "total_rows": 200}
    (folder / "long.json").write_text(json.dumps(config))
    run_well("report", folder / "long.json", "--out", folder / "long.html")
    return folder / "long.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_shows_all_rows(browser: "Browser", long: Path, scheme: str) -> None:
    """Whole, also those that are folded on the screen, in black on white whatever the scheme of the system is."""
    opened = Opened(browser, long, "phone", scheme)  # as narrow as a sheet of paper, so rows are high
    page = opened.page
    rows = page.locator(".tokens")
    seen = "(all) => all.filter((each) => each.checkVisibility()).length"
    assert rows.evaluate_all(seen) == 1
    page.emulate_media(media="print")
    assert page.locator("nav, button").evaluate_all(seen) == 0
    assert rows.evaluate_all(seen) == rows.count() == 4
    cut = "(all) => all.filter((each) => each.scrollHeight > each.clientHeight + 1).length"
    assert page.locator(".tokens, .table").evaluate_all(cut) == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(CONTRAST) == []
    (SHOTS / f"paper_{scheme}.pdf").write_bytes(page.pdf())
    page.context.close()


def test_rows_fold(browser: "Browser", long: Path) -> None:
    """Long rows but the first; a folded one shows its beginning, and opens by the keyboard."""
    opened = Opened(browser, long)
    details = opened.page.locator("#step-0 details")
    assert [each.get_attribute("open") is not None for each in details.all()] == [True, False, False, False]
    assert details.nth(1).locator(".beginning").inner_text()
    details.nth(1).locator("summary").focus()
    opened.page.keyboard.press("Enter")
    assert details.nth(1).locator(".tokens").is_visible()
    opened.page.context.close()
