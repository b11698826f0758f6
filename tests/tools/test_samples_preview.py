"""`dali-pipes preview MODULE:LOADER`: finds the loader, writes the picture, says which samples are in it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import one_line_error, run_json, run_well

from dali_pipes import SampleLoader

SOURCE = """
import torch
from types import SimpleNamespace
from dali_pipes import SampleLoader

images = [(torch.full((6, 5), float(item)), item) for item in range(10)]
loader = SampleLoader(images, batch_size=4, shuffle=True, seed=3, device="cpu")
texts = SampleLoader(["a", "b"], device="cpu")
number = 5

def make():
    return SampleLoader(images, batch_size=2, groups=["even", "odd"] * 5, device="cpu")

wrapped = SimpleNamespace(loader=SampleLoader(images, device="cpu"))
nested = SimpleNamespace(loader=SampleLoader(images, device="cpu"))
"""
NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, not imported before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"samples_of_test_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


def test_picture_and_samples(module: str, tmp_path: Path) -> None:
    with SampleLoader(range(10), batch_size=4, shuffle=True, seed=3, device="cpu") as loader:
        items = [loader.locate(1, row, 2).item for row in range(3)]
    report = run_json("preview", f"{module}:loader", "--step", 1, "--epoch", 2, "--rows", 3, "--out", "a.svg")
    assert [sample["item"] for sample in report["samples"]] == items
    assert [sample["row"] for sample in report["samples"]] == [4, 5, 6]
    assert (report["path"], report["dataset"], report["step"], report["epoch"]) == ("a.svg", "list", 1, 2)
    assert f"item {items[2]}, row 6" in (tmp_path / "a.svg").read_text()
    lines = run_well("preview", f"{module}:make").splitlines()
    assert "preview.png" in lines[0]
    assert [line.partition("group ")[2] for line in lines[1:]] in (["even", "odd"], ["odd", "even"])
    assert (tmp_path / "preview.png").read_bytes().startswith(b"\x89PNG")
    assert run_json("preview", f"{module}:nested.loader", "--step", 7)["samples"][0]["item"] == 7
    assert run_json("preview", f"{module}:wrapped", "--step", 7)["samples"][0]["item"] == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda name: ("nothere.at_all:loader",), ["nothere", "not found"]),
        (lambda name: (f"{name}:other",), ["other"]),
        (lambda name: (f"{name}:number",), ["int", "SampleLoader"]),
        (lambda name: (f"{name}:images",), ["list", "SampleLoader"]),
        (lambda name: (f"{name}:texts",), ["images or volumes"]),
        (lambda name: (f"{name}:loader", "--step", 3), ["step 3"]),
        (lambda name: (f"{name}:loader", "--batch-size", 3), ["--batch-size"]),
        (lambda name: (f"{name}:loader", "--set", "seed=3"), ["--set"]),
        (lambda name: (f"{name}:loader", "--out", "missing/a.png"), ["missing"]),
        (lambda name: ("synthetic:1M", "--batch-size", 2, "--seq-len", 8, "--out", "a.png"), ["--out a.png"]),
    ],
)
def test_what_is_refused(module: str, arguments: Callable[[str], tuple[object, ...]], words: list[str]) -> None:
    message = one_line_error("preview", *arguments(module))
    assert all(word in message for word in words), message


def test_a_package_that_the_module_needs(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import a_package_that_is_missing")
    assert "a_package_that_is_missing" in one_line_error("preview", f"{module}:loader")
