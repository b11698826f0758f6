"""Which room may import which. The order below is the documentation; the tests read every import and compare.

A room imports from the rooms before it alone; inside a room, modules import one another without cycles. Imports for
type checkers count as imports.

    storage ─ corpus ─▶ rows ─▶ schedule ─▶ placement ─▶ engine ─▶ loader ─▶ adapters, tools
    bytes     tokens    rows    steps of    tokens to    blocks    batches
                        of one  every rank  a device     ahead
                        corpus
"""

import ast
import graphlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
Runner = Callable[..., "CompletedProcess[str]"]

ROOMS = {
    "errors": "",
    "fields": "",
    "uris": "",
    "config": "numpy pydantic yaml",
    "runtime": "numpy rich",
    "monitoring": "",
    "markup": "jinja2",
    "operators": "numpy cupy",
    "storage": "cramjam numpy obstore zstandard xxhash",
    "corpus": "numpy pyarrow array_record",
    "documents": "numpy",
    "objectives": "numpy",
    "rows": "numpy",
    "schedule": "numpy",
    "placement": "numpy cupy",
    "text": "numpy jinja2 pyarrow ray tokenizers zstandard",
    "corpus_or_text": "numpy",
    "tokenizing": "",
    "engine": "numpy",
    "loader": "numpy torch",
    "samples": "matplotlib numpy torch",
    "adapters": "jax numpy torch transformers",
    "huggingface": "",
    "attention": "",
    "tools": "matplotlib numpy rich typer",
    "__main__": "",
    "__init__": "",
}
"""Rooms in the order of imports, and the packages from outside the standard library that each of them uses."""

FEW_MODULES = {
    "nvidia": {"engine/dali", "samples/graph", "samples/gaussian_noise"},
    "cupyx": {"placement/cuda"},
    "IPython": {"runtime/notebook_output"},
    "boto3": {"storage/aws_profiles"},
    "botocore": {"storage/aws_profiles"},
    "obstore": {"storage/store_errors", "storage/stores"},
    "array_record": {"corpus/formats/arrayrecord"},
    "ray": {"text/on_ray"},
}
"""Packages that these modules alone import."""

ONLY_INSIDE_FUNCTIONS = {
    "IPython",
    "nvidia",
    "cramjam",
    "cupy",
    "cupyx",
    "array_record",
    "boto3",
    "botocore",
    "jax",
    "jinja2",
    "obstore",
    "pyarrow",
    "ray",
    "tokenizers",
    "transformers",
    "xxhash",
    "zstandard",
}
"""Optional packages: a module imports without them, and the function that needs one says so when it is missing."""

NOT_FOR_ARITHMETIC = {"glob", "io", "mmap", "os", "pathlib", "shutil", "subprocess", "sys", "tempfile"}
"""What the schedule and the rows have no use for: ways to files, processes and the environment."""

FORBIDDEN_WORDS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}


class Import(NamedTuple):
    file: Path
    line: int
    name: str
    """Full dotted name; for `from a import b`, `a.b`."""
    at_import: bool
    """Whether it happens when the module is imported: not in a function, and not for type checkers alone."""


def python_files() -> list[Path]:
    # rglob does not follow the link dali_pipes/operators: its files are listed once, under operators/.
    return [path for folder in ("dali_pipes", "operators") for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """Dotted name below `dali_pipes`; a package's own module is its name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "operators" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> Iterator[Import]:
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True)]
    while waiting:
        node, at_import = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute, from dali_pipes on"
            yield from (Import(path, node.lineno, f"{node.module}.{alias.name}", at_import) for alias in node.names)
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        )
        waiting += [(child, at_import and not is_later) for child in reversed(list(ast.iter_child_nodes(node)))]


FILES = python_files()
MODULES = {module_of(path): path for path in FILES}
IMPORTS_OF = {module: list(imports_of(path)) for module, path in MODULES.items()}
IMPORTS = [found for imports in IMPORTS_OF.values() for found in imports]
LAZY_NAMES = {  # public name: module that `from dali_pipes import name` loads
    found.name.rpartition(".")[2]: found.name.rpartition(".")[0]
    for found in IMPORTS
    if module_of(found.file) == "__init__" and found.name.startswith("dali_pipes.")
}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def target_of(name: str) -> str | None:
    """The module of ours that `dali_pipes.x...` means; None for the package's version, and for what is not ours."""
    if name.partition(".")[0] != "dali_pipes" or name == "dali_pipes.__version__":
        return None
    name = name.removeprefix("dali_pipes").removeprefix(".")
    if name in LAZY_NAMES:
        return target_of(LAZY_NAMES[name])
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_rooms_import_from_the_rooms_before_them() -> None:
    order = list(ROOMS)
    wrong = [
        f"{found.file.relative_to(ROOT)}:{found.line}: {found.name}"
        for found in IMPORTS
        if (target := target_of(found.name)) is not None
        and order.index(room_of(target)) > order.index(room_of(module_of(found.file)))
    ]
    assert wrong == []


def test_modules_import_one_another_without_cycles() -> None:
    """Also for type checkers. A package's own module stands for what it hands on, so it may be imported inside."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        target = target_of(found.name)
        if target is not None and target != module_of(found.file):
            graph[module_of(found.file)].add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_use_the_packages_that_the_table_says(room: str) -> None:
    """Both ways: one that is not listed breaks the architecture, one that is not used misleads its reader."""
    roots = {found.name.split(".")[0] for found in IMPORTS if room_of(module_of(found.file)) == room}
    found = roots - sys.stdlib_module_names - {"dali_pipes"} - set(FEW_MODULES)
    assert found == set(ROOMS[room].split()) - set(FEW_MODULES)


@pytest.mark.parametrize("package", FEW_MODULES)
def test_packages_that_few_modules_know(package: str) -> None:
    files = {found.file for found in IMPORTS if found.name.split(".")[0] == package}
    assert files == {ROOT / "dali_pipes" / f"{module}.py" for module in FEW_MODULES[package]}


def test_optional_packages_are_imported_inside_functions_only() -> None:
    early = [found for found in IMPORTS if found.at_import and found.name.split(".")[0] in ONLY_INSIDE_FUNCTIONS]
    assert early == []


def test_errors_import_nothing() -> None:
    assert [found.name for found in IMPORTS if module_of(found.file) == "errors"] == []


@pytest.mark.parametrize("room", ["schedule", "rows"])
def test_order_is_arithmetic_only(room: str) -> None:
    files = [path for path in FILES if room_of(module_of(path)) == room and path.name != "plan_reports.py"]
    found = {found.name.split(".")[0] for path in files for found in imports_of(path)}
    assert not found & NOT_FOR_ARITHMETIC - {"pathlib"}  # a location names a file
    calls = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    assert calls == []


def test_imports_cannot_hide_from_the_table() -> None:
    """`import_module` and `__import__` would: they are for the package's lazy names, and for a user's own module."""
    users = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id in {"import_module", "__import__"})
    }
    assert users == {"__init__", "objectives.users", "tools.reports.samples_preview"}


def test_operators_are_imported_under_their_full_name() -> None:
    scripts = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    everywhere = IMPORTS + [found for path in scripts if "operators" in path.read_text() for found in imports_of(path)]
    assert [found for found in everywhere if found.name.split(".")[0] == "operators"] == []


def test_importing_the_package_does_no_work(run_script: Runner) -> None:
    """Nothing but the package itself is imported, and the environment is not read."""
    result = run_script(
        """
        import json, os, sys

        class Trap(dict):
            def refuse(self, *arguments):
                raise AssertionError(f"the environment was read: {arguments}")
            __getitem__ = __contains__ = __iter__ = get = items = keys = values = refuse

        before = set(sys.modules)
        environment, os.environ = os.environ, Trap()
        import dali_pipes
        os.environ = environment
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(json.dumps(sorted(new - sys.stdlib_module_names)))
        """
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["dali_pipes"]


LATER = {
    "config": {"mixture", "objective_checks", "objectives"},
    "corpus": {"block_reads", "blocks_ahead", "columns.row_chunks", "columns.row_columns", "columns.row_facts"},
    "corpus.formats": {"arrayrecord", "arrow", "datatrove", "litdata", "mds", "megatron", "parquet", "tfrecord"},
    "engine": {"node_plans"},
    "loader": {"batch_preview", "batch_view", "state_change"},
    "objectives": {"fim", "row_draws", "transforms"},
    "rows": {"batch_rows", "cost_balance", "document_rows", "packing", "plan_report", "token_batches", "window_counts"},
    "schedule": {"mixed_rows", "mixture", "mixture_report"},
    "storage": {"node_cache"},
    "text": {"chat", "tokenize"},
    "tools": {"cli", "reports"},
}
"""What a run over flat files does without: imported with the first mixture, objective, table, cache or document."""

LATER_PACKAGES = {"asyncio", "http", "jinja2", "nvidia", "obstore", "pyarrow", "rich", "tomllib", "typer", "yaml"}


def test_the_loader_imports_what_every_run_needs_and_no_more(run_script: Runner, tmp_path: Path) -> None:
    """Neither what most runs never need, nor anything so late that the first batch waits for it."""
    (tmp_path / "tokens.bin").write_bytes(bytes(range(200)) * 400)
    result = run_script(
        """
        import json, sys
        import numpy, torch

        before = set(sys.modules)
        from dali_pipes import TokenLoader

        from pydantic import BaseModel

        def below(model):
            return [each for one in model.__subclasses__() for each in (one, *below(one))]

        imported = set(sys.modules)
        built = [one.__name__ for one in below(BaseModel) if one.__module__.startswith("dali_pipes.")]
        loader = TokenLoader(sys.argv[1], batch_size=2, seq_len=8, device="cpu")
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        next(iter(loader))
        loader.close()
        print(json.dumps([sorted(imported - before), built, sorted(set(sys.modules) - imported)]))
        """,
        str(tmp_path / "tokens.bin"),
    )
    assert result.returncode == 0, result.stderr
    imported, models, late = json.loads(result.stdout)
    early = {f"dali_pipes.{room}.{name}" for room, names in LATER.items() for name in names} | LATER_PACKAGES
    assert early <= {f"dali_pipes.{module}" for module in MODULES} | LATER_PACKAGES, "modules that are not there"
    assert early & set(imported) == set()
    assert models == ["LoaderConfig"]
    assert [name for name in late if name.split(".")[0] in {"dali_pipes", "pydantic"}] == []


def needs_torch(module: str) -> bool:
    """Whether importing a module imports torch, perhaps by way of another one."""
    seen, left = set(), [module]
    while left:
        for found in IMPORTS_OF[left.pop()]:
            if not found.at_import:
                continue
            if found.name.split(".")[0] == "torch":
                return True
            target = target_of(found.name)
            if target is not None and target not in seen:
                seen.add(target)
                left.append(target)
    return False


def test_all_but_the_loader_import_without_torch_dali_and_cupy(run_script: Runner) -> None:
    modules = [module for module in MODULES if not needs_torch(module)]
    rooms_with_torch = {room_of(module) for module in MODULES} - {room_of(module) for module in modules}
    assert rooms_with_torch <= {"loader", "samples", "adapters", "huggingface", "attention"}
    assert "loader.state" in modules, "the command line reads states, and works without torch"
    result = run_script(
        """
        import importlib, json, sys

        before = set(sys.modules)
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
        """,
        *(f"dali_pipes.{module}" for module in modules),
    )
    assert result.returncode == 0, result.stderr
    imported = set(json.loads(result.stdout))
    assert {"dali_pipes", "numpy", "typer"} <= imported
    assert not imported & {"torch", *ONLY_INSIDE_FUNCTIONS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_named_for_one_thing(path: Path) -> None:
    assert not set(path.stem.strip("_").split("_")) & FORBIDDEN_WORDS
