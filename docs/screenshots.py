"""Take the pictures of report.md: `python docs/screenshots.py`. Needs the extra `browser` and a Chromium."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parent
DATA = ROOT / "benchmarks" / "data" / "tinyshakespeare"
SETTINGS = {
    "batch_size": 8,
    "seq_len": 160,
    "rows": "pack",
    "eos_id": 50256,
    "vocab_size": 50257,
    "total_tokens": "1.2M",
    "mixture": {
        "early": {"corpus": "train.bin", "weight": 0.7},
        "late": {"corpus": "val.bin", "weight": 0.3},
    },
    "stages": [{"at": "400K", "weights": {"early": 0.4, "late": 0.6}}],
}
FIND_ROW = """() => {
  const rows = [...document.querySelectorAll(".tokens")].filter((row) => row.querySelectorAll(".piece").length > 2);
  const heights = rows.map((row) => row.getBoundingClientRect().height);
  const row = rows[heights.indexOf(Math.max(...heights.filter((height) => height < 430)))];
  row.closest("details").scrollIntoView();
  return [...document.querySelectorAll(".tokens")].indexOf(row);
}"""


def write_report(folder: Path) -> Path:
    """The page of a mixture of the repository's plays."""
    for name in ("train.bin", "val.bin"):
        shutil.copy(DATA / name, folder)
    (folder / "run.json").write_text(json.dumps(SETTINGS))
    subprocess.run([sys.executable, ROOT / "benchmarks" / "gpt2_tokenizer.py", folder / "tokenizer.json"], check=True)
    steps = ",".join(map(str, range(12)))
    options = ["--steps", steps, "--rows", "8", "--tokenizer", "tokenizer.json"]
    subprocess.run([sys.executable, "-m", "dali_pipes", "report", "run.json", *options], cwd=folder, check=True)
    return folder / "report.html"


def take(page: Page, section: str, name: str) -> None:
    """A picture of the window, from the beginning of a section on."""
    if section:
        page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
    page.screenshot(path=HERE / "images" / f"{name}.png")


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_report(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 640}, color_scheme="light")
        page.goto(path.as_uri())
        take(page, "mixture", "report_mixture")
        page.locator(".tokens").nth(page.evaluate(FIND_ROW)).locator("i").nth(23).hover()
        take(page, "", "report_batch")
        browser.close()


if __name__ == "__main__":
    main()
