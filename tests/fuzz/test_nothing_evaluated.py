"""Data are data: nothing that is read is unpickled, evaluated or imported, and templates run in a sandbox."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dali_pipes import open_corpus
from dali_pipes.errors import CorpusFormatError, DaliPipesError

ROOT = Path(__file__).parents[2]
BY_NAME = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "xml"}
CALLS = {
    "yaml.load": "safe_load does it",
    "yaml.unsafe_load": "safe_load does it",
    "yaml.full_load": "safe_load does it",
    "torch.load": "it unpickles",
    "np.load": "it may unpickle",
    "numpy.load": "it may unpickle",
    "np.memmap": "a page that is gone ends the process",
    "jinja2.Environment": "SandboxedEnvironment is safe with templates of others",
    "jinja2.Template": "SandboxedEnvironment is safe with templates of others",
    "os.system": "no commands are run",
    "subprocess.run": "no commands are run",
    "subprocess.Popen": "no commands are run",
    "pyarrow.memory_map": "a page that is gone ends the process",
    "pa.memory_map": "a page that is gone ends the process",
    "importlib.import_module": "modules are named in the code",
}
SAFE = {
    "dali_pipes/__init__.py: importlib.import_module",  # the package's own modules, by a table of its own
    "dali_pipes/samples/fetch.py: pickle",  # batches on their way from the loader's own workers
    "dali_pipes/samples/workers.py: pickle",
    "dali_pipes/tools/reports/samples_preview.py: importlib.import_module",  # a module that the command line names
    "dali_pipes/markup/render.py: jinja2.Environment",  # of templates of the package alone
    "dali_pipes/config/objectives.py: np.load",  # without pickles, which is NumPy's default
    "dali_pipes/objectives/users.py: importlib.import_module",  # of the function that the user names
    "dali_pipes/text/chat/template.py: jinja2.Environment",  # for type checkers alone; see the test of the sandbox
}


def found_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in names if name.split(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom):
                yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in CALLS)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
                yield node.func.id
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in CALLS:
                yield ast.unparse(node.func)
            for keyword in node.keywords:
                text = f"{keyword.arg}={ast.unparse(keyword.value)}"
                if text in ("allow_pickle=True", "shell=True", "weights_only=False", "memory_map=True"):
                    yield text


def test_no_source_evaluates_what_it_reads() -> None:
    paths = [path for folder in ("dali_pipes", "operators") for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.relative_to(ROOT)}: {what}" for path in paths for what in found_in(path.read_text())}
    assert len(paths) > 100
    assert found - SAFE == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "x = eval(y)",
        "yaml.load(f)",
        "from yaml import load",
        "np.load(f)",
        "g(allow_pickle=True)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Environment",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(found_in(source))


def test_templates_run_in_a_sandbox() -> None:
    pytest.importorskip("jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from dali_pipes.text.chat.template import _environment

    assert isinstance(_environment(), ImmutableSandboxedEnvironment)
    sources = {path.name: path.read_text() for path in (ROOT / "dali_pipes").rglob("*.py")}
    assert [name for name, source in sources.items() if "import jinja2" in source] == ["template.py"]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "where", ["corpus.npy", "corpus.bin", "corpus.bin.loss", "index.json", "corpus.arrow", "corpus.ds"]
)
def test_a_bomb_does_not_go_off(tmp_path: Path, where: str) -> None:
    """Objects in a .npy array, whole pickles under other names."""
    fuse = tmp_path / "went off"
    path = tmp_path / "data" / where
    path.parent.mkdir()
    if where.endswith(("npy", "loss")):
        with path.open("wb") as file:
            np.save(file, np.array([Bomb(fuse)] * 8, object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps([Bomb(fuse)] * 8))
    if where.endswith("loss"):
        np.arange(500, dtype=np.uint16).tofile(tmp_path / "data" / "corpus.bin")
    expected = CorpusFormatError if where == "corpus.npy" else DaliPipesError
    with pytest.raises(expected) as caught:
        open_corpus(path.parent)
    assert where != "corpus.npy" or "pickled Python objects" in str(caught.value)
    assert not fuse.exists()
    pickle.loads(pickle.dumps(Bomb(fuse))).close()
    assert fuse.exists(), "the bomb works"
