"""What is installed is what is in the tree, under the names that are promised."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

import dali_pipes
import dali_pipes.operators

ROOT = Path(__file__).parents[1]
PUBLIC_NAMES = [
    "Corpus",
    "EncodedFiles",
    "LoaderConfig",
    "LoaderStats",
    "MixtureReport",
    "RowLocation",
    "SampleLoader",
    "SampleLocation",
    "SampleStats",
    "SourceLoss",
    "SourceUse",
    "TokenLoader",
    "build_pipeline",
    "keyed_noise",
    "open_corpus",
]
OPERATORS = [
    "corrupted_spans",
    "gather_runs",
    "goldfish",
    "keyed_draws",
    "noised_rows",
    "permute",
    "rows",
    "segments",
    "shuffled_rows",
]


_LOADER_PACKAGES = {"annotated_types", "dali_pipes", "pydantic", "pydantic_core", "typing_inspection"}
_LOADER_ROOMS = {
    *("config", "corpus", "corpus_or_text", "documents", "engine", "errors", "fields", "loader", "monitoring"),
    *("objectives", "operators", "placement", "rows", "runtime", "schedule", "storage", "uris"),
}
IMPORTS = {
    "import dali_pipes": ({"dali_pipes"}, set[str]()),
    "from dali_pipes import LoaderConfig": (_LOADER_PACKAGES, _LOADER_ROOMS - {"engine", "loader", "placement"}),
    "from dali_pipes import TokenLoader": (_LOADER_PACKAGES, _LOADER_ROOMS),
}
"""What a statement may import next to torch, NumPy and Python's own modules: packages, and rooms of this one."""


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a clean copy of the tree, and the wheel that is built from that sdist. Needs no network."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("dali_pipes", "operators", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (sdist,) = (tree / "dist").glob("*.whl"), (tree / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def files_of_the_tree() -> set[str]:
    """Names in a wheel of every file of the three folders, except caches and an editor's hidden files."""
    found = set()
    for folder, prefix in (("dali_pipes", ""), ("operators", "dali_pipes/"), ("configs", "dali_pipes/")):
        for path in (ROOT / folder).rglob("*"):  # does not follow the link
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
                found.add(prefix + name)
    return found


def test_the_wheel_holds_the_tree_and_nothing_else(built: Built) -> None:
    """A package that pyproject.toml does not list would be left out silently; a stray file would be installed."""
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == files_of_the_tree()
    assert {name.split("/")[0] for name in names} == {"dali_pipes"}
    assert {"dali_pipes/py.typed", "dali_pipes/operators/rows.cu", "dali_pipes/operators/rows.py"} <= names


def test_the_wheel_says_what_it_is(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        info = f"dali_pipes-{dali_pipes.__version__}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert wheel.read(f"{info}/top_level.txt").decode().split() == ["dali_pipes"]
        assert "dali-pipes = dali_pipes.tools.cli:app" in wheel.read(f"{info}/entry_points.txt").decode()
    assert re.search(rf"^Version: {re.escape(dali_pipes.__version__)}$", metadata, re.MULTILINE)
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)


def test_the_sdist_holds_each_source_once(built: Built) -> None:
    """Through the link a build could pick up the operators a second time."""
    with tarfile.open(built.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert len(names) == len(set(names))
    assert [name for name in names if name.endswith("/rows.cu")] == ["operators/rows.cu"]
    assert [name for name in names if name.endswith("h100.toml")] == ["configs/h100.toml"]


def test_the_wheel_works_from_a_plain_folder(
    built: Built, tmp_path: Path, run_script: Callable[..., "CompletedProcess[str]"]
) -> None:
    """Without the link, and with the kernels beside their modules."""
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path / "site")
    result = run_script(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import dali_pipes.operators
        from dali_pipes.operators import _kernel
        import dali_pipes.corpus, dali_pipes.engine.dali
        print(dali_pipes.operators.__file__)
        assert "__global__" in _kernel.source_of("rows")
        from dali_pipes import LoaderConfig
        assert LoaderConfig.from_preset("gpt2_124m", "h100", batch_size=3).device == "cuda"
        """,
        tmp_path / "site",
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == tmp_path / "site" / "dali_pipes" / "operators" / "__init__.py"


def test_operators_cannot_be_imported_under_another_name() -> None:
    """From the repository root `operators` is on the path; two copies of one module must not exist."""
    command = [sys.executable, "-c", "import operators"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: import this package as dali_pipes.operators, not as operators" in result.stderr


def test_public_names() -> None:
    assert dali_pipes.__all__ == PUBLIC_NAMES == sorted(PUBLIC_NAMES)
    assert dali_pipes.operators.__all__ == OPERATORS == sorted(OPERATORS)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    public = getattr(dali_pipes, name)
    assert public.__name__ == name
    assert inspect.getdoc(public)
    if inspect.isclass(public):
        for member, value in vars(public).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                own = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                assert getattr(own, "__doc__", None), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_a_function_with_a_docstring(name: str) -> None:
    operator = getattr(dali_pipes.operators, name)
    assert inspect.isfunction(operator)
    assert operator.__name__ == name
    assert inspect.getdoc(operator)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dali_pipes' has no attribute 'TokenLoder'"):
        dali_pipes.TokenLoder  # noqa: B018


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == dali_pipes.__version__


def test_the_readme_of_the_tests_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.parametrize(
    "statement",
    [name if "TokenLoader" in name else pytest.param(name, marks=pytest.mark.slow) for name in IMPORTS],
)
def test_a_start_imports_only_what_it_needs(run_script: Callable[..., CompletedProcess[str]], statement: str) -> None:
    """Not pyarrow, yaml, rich, typer, tokenizers and the like, nor what reads text: each takes part of a start."""
    source = f"""
        import sys
        import torch

        before = set(sys.modules)
        {statement}
        names = {{name for name in set(sys.modules) - before if not name.startswith("_")}}
        packages = {{name.partition(".")[0] for name in names}} - sys.stdlib_module_names - {{"numpy", "torch"}}
        rooms = {{name.split(".")[1] for name in names if name.startswith("dali_pipes.")}}
        print(sorted(packages), sorted(rooms), sep="\\n")
    """
    done = run_script(source)
    assert done.returncode == 0, done.stderr
    packages, rooms = (set(ast.literal_eval(line)) for line in done.stdout.splitlines())
    allowed_packages, allowed_rooms = IMPORTS[statement]
    assert packages <= allowed_packages
    assert rooms <= allowed_rooms
    assert "dali_pipes" in packages


def test_a_batch_of_token_files_needs_no_other_package(
    run_script: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(1, 201)))
    source = """
        import sys
        import torch

        before = set(sys.modules)
        from dali_pipes import TokenLoader

        with TokenLoader(corpus=sys.argv[1], batch_size=2, seq_len=8, device="cpu", quiet=True) as loader:
            assert next(iter(loader))["input_ids"].shape == (2, 8)
        names = set(sys.modules) - before
        print([name for name in ("html", "pyarrow", "rich", "tokenizers", "typer", "yaml") if name in names])
        print([name for name in names if name.startswith(("dali_pipes.text", "dali_pipes.tools"))])
    """
    done = run_script(source, tmp_path / "a.bin")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[]", "[]"]), done.stderr
