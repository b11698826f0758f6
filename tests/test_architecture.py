"""Who may import whom. The tables below are the documentation; the tests read every import and compare.

cli ─► loader ─┬─► block_queue ─► pipeline ─┬─► cpu_placements ─┬─► source ─┬─► schedule    (integers only)
               └─► state                    ├─► gpu_placements ─┴─► device  ├─► corpus      (files)
                                            └─► choice                      └─► operators   (arrays; own backend choice)

pipeline ─► opening ─┬─► text        (text files; a tokenizer makes them token files)
                     └─► corpus

config, stats: plain data, read by those above        errors: imported by all, imports nothing
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


class Imports(NamedTuple):
    inside: str
    """Modules of dali_pipes; a package counts as one. `errors` is free to all and not listed."""
    outside: str = ""
    """Packages that are not in the standard library."""


ALLOWED = {
    "errors": Imports(""),
    "metrics": Imports(""),
    "printed": Imports(""),
    "stats": Imports("metrics printed"),
    "context_parallel": Imports(""),
    "skipped_steps": Imports("given_values"),
    "given_values": Imports(""),
    "other_loaders": Imports("given_values"),
    "fields": Imports(""),
    "setting_sources": Imports("", "yaml"),  # files and presets; a mistake names the one that has it
    "config": Imports("context_parallel given_values other_loaders setting_sources skipped_steps", "pydantic"),
    "schedule": Imports("", "numpy"),
    "file_locks": Imports(""),
    "user_cache": Imports("file_locks"),  # beside text, the one that writes files
    "kept_files": Imports("user_cache", "numpy"),
    "corpus": Imports("fields kept_files progress readers stats", "numpy pyarrow zstandard xxhash array_record"),
    "operators": Imports("", "numpy cupy"),
    "readers": Imports(""),
    "progress": Imports("", "rich"),
    "documents": Imports("corpus kept_files progress readers", "numpy"),
    "text": Imports("corpus fields file_locks progress user_cache", "numpy jinja2 pyarrow tokenizers zstandard"),
    "opening": Imports("corpus text __init__", "numpy"),
    "length_buckets": Imports("operators", "numpy"),
    "document_rows": Imports("documents length_buckets schedule operators", "numpy"),
    "plan_reports": Imports("announce document_rows corpus operators progress user_cache"),
    "row_plan": Imports("document_rows documents schedule corpus operators", "numpy"),
    "row_outputs": Imports("documents operators", "numpy"),
    "source": Imports("profiling readers row_plan schedule corpus stats", "numpy"),
    "cpu_placements": Imports("source row_outputs row_plan schedule corpus operators stats", "numpy"),
    "device": Imports("", "numpy cupy cupyx"),  # the one module that owns streams, events and device memory
    "gpu_placements": Imports(
        "cpu_placements device progress readers source row_outputs row_plan documents schedule corpus operators stats",
        "numpy",
    ),
    "profiling": Imports("device"),
    "choice": Imports("device"),
    "ranks": Imports("config given_values"),
    "pipeline": Imports(
        "choice device cpu_placements gpu_placements source row_outputs row_plan document_rows length_buckets "
        "skipped_steps documents profiling ranks schedule opening corpus config stats",
        "nvidia numpy",
    ),  # the one module that knows DALI
    "piece_memory": Imports("", "numpy"),
    "block_queue": Imports(
        "pipeline piece_memory cpu_placements device row_plan documents operators readers source schedule config stats",
        "numpy",
    ),
    "state_change": Imports("schedule"),
    "grown_corpus": Imports("corpus state_change"),
    "state": Imports("grown_corpus state_change schedule corpus operators config"),
    "announce": Imports("config corpus ranks schedule stats state_change"),
    "batches": Imports("block_queue context_parallel row_outputs", "numpy torch"),
    "loader": Imports(
        "announce batches block_queue loader_parts loader_table not_a_data_set printed ranks readers state "
        "state_change pipeline row_plan document_rows schedule corpus config stats",
        "torch",
    ),
    "loader_parts": Imports(
        "announce batches block_queue plan_reports state pipeline row_plan schedule config"
    ),  # what a loader of one rank is made of
    "loader_table": Imports("announce config pipeline printed schedule stats"),
    "huggingface": Imports("announce attention loader schedule trainer_settings config", "torch transformers"),
    "trainer_settings": Imports("config"),
    "not_a_data_set": Imports("config", "torch"),
    "attention": Imports("", "torch"),  # what attention kernels take, from a batch
    "reports": Imports(
        "skipped_steps block_queue context_parallel pipeline row_plan state schedule documents text readers kept_files "
        "corpus operators config",
        "numpy",
    ),  # what the command shows, as plain data
    "terminal": Imports("reports", "rich"),
    "cli_errors": Imports("terminal", "typer"),
    "cli_help": Imports("", "typer"),
    "cli_settings": Imports("setting_sources ranks corpus config", "typer"),  # what a command is given
    "cli_text": Imports("cli_errors cli_help fields terminal text __init__", "typer"),
    "cli": Imports(
        "cli_errors cli_help cli_settings cli_text terminal reports progress setting_sources corpus config __init__",
        "typer",
    ),
    "__main__": Imports("cli"),
    "__init__": Imports(
        "loader pipeline opening row_plan corpus config stats"
    ),  # for type checkers; loaded when first used
}

ONLY_INSIDE_FUNCTIONS = {
    "nvidia",
    "cupy",
    "cupyx",
    "array_record",
    "jinja2",
    "pyarrow",
    "tokenizers",
    "transformers",
    "xxhash",
    "zstandard",
}
"""Optional packages: a module imports without them, and the function that needs one says so when it is missing."""

WITH_TORCH = {name for name, imports in ALLOWED.items() if "torch" in imports.outside.split()} | {
    "__init__",
    "loader_parts",
}

NOT_FOR_ARITHMETIC = {"glob", "io", "mmap", "os", "pathlib", "shutil", "subprocess", "sys", "tempfile", "threading"}
"""What the schedule has no use for: ways to files, processes, threads and the environment."""

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
    """The line of the table that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "operators" else parts[1]


def imports_of(path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute, from dali_pipes on"
            yield from (Import(path, node.lineno, f"{node.module}.{alias.name}", at_import) for alias in node.names)
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not is_later)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


FILES = python_files()
IMPORTS = [found for path in FILES for found in imports_of(path)]
LAZY_NAMES = {  # public name: module that `from dali_pipes import name` loads
    found.name.split(".")[-1]: found.name.split(".")[1]
    for found in IMPORTS
    if module_of(found.file) == "__init__" and found.name.startswith("dali_pipes.")
}


def target_inside(name: str) -> str:
    """The line of the table that `dali_pipes.x...` means."""
    first = name.split(".")[1] if "." in name else "__init__"
    return first if first in ALLOWED else LAZY_NAMES.get(first, "__init__")


def found_inside(module: str) -> set[str]:
    targets = {
        target_inside(found.name)
        for found in IMPORTS
        if module_of(found.file) == module and found.name.split(".")[0] == "dali_pipes"
    }
    return targets - {module, "errors"}


def found_outside(module: str) -> set[str]:
    roots = {found.name.split(".")[0] for found in IMPORTS if module_of(found.file) == module}
    return roots - sys.stdlib_module_names - {"dali_pipes"}


def test_every_module_is_in_the_table() -> None:
    modules = {module_of(path) for path in FILES}
    assert modules == set(ALLOWED), "a new module needs a line in ALLOWED, a removed one must leave it"


@pytest.mark.parametrize("module", ALLOWED)
def test_modules_import_what_the_table_says(module: str) -> None:
    """Both ways: an import that is not listed breaks the architecture, a line that is not used misleads its reader."""
    assert found_inside(module) == set(ALLOWED[module].inside.split())
    assert found_outside(module) == set(ALLOWED[module].outside.split())


def test_the_table_has_no_circles() -> None:
    graph = {module: set(allowed.inside.split()) - {"__init__"} for module, allowed in ALLOWED.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("source") < order.index("pipeline") < order.index("reports") < order.index("cli")


def test_optional_packages_are_imported_inside_functions_only() -> None:
    early = [found for found in IMPORTS if found.at_import and found.name.split(".")[0] in ONLY_INSIDE_FUNCTIONS]
    assert early == []


def test_errors_import_nothing() -> None:
    assert [found.name for found in IMPORTS if module_of(found.file) == "errors"] == []


def test_the_schedule_is_arithmetic_only() -> None:
    found = {found.name.split(".")[0] for found in IMPORTS if module_of(found.file) == "schedule"}
    assert not found & NOT_FOR_ARITHMETIC
    calls = [
        node
        for path in FILES
        if module_of(path) == "schedule"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    assert calls == []


def test_imports_cannot_hide_from_the_table() -> None:
    """`import_module` and `__import__` would: the package's lazy names are the one use there is."""
    users = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id in {"import_module", "__import__"})
    }
    assert users == {"__init__"}


def test_operators_are_imported_under_their_full_name() -> None:
    scripts = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    everywhere = IMPORTS + [found for path in scripts for found in imports_of(path)]
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


def test_all_but_the_loader_import_without_torch_dali_and_cupy(run_script: Runner) -> None:
    names = [f"dali_pipes.{module}" for module in ALLOWED if module not in WITH_TORCH]
    result = run_script(
        """
        import importlib, json, sys

        before = set(sys.modules)
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
        """,
        *names,
    )
    assert result.returncode == 0, result.stderr
    imported = set(json.loads(result.stdout))
    assert {"dali_pipes", "numpy", "typer"} <= imported
    assert not imported & {"torch", *ONLY_INSIDE_FUNCTIONS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_named_for_one_thing(path: Path) -> None:
    assert not set(path.stem.strip("_").split("_")) & FORBIDDEN_WORDS
