"""Without a GPU, a driver or DALI the same batches come; asking for a GPU that is not there is one clear error."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, loader_stream, oracle_stream, take

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.errors import BackendError, DaliPipesError

T = 4
OUTPUTS = ("input_ids", "labels", "row_ids")
DTYPES = {"uint8": 255, "uint16": 65535, "uint32": 2**31 + 5, "int32": 2**31 - 1, "int64": 2**31 + 5}

# Every file is served for two epochs, saved, resumed and finished; what was handed out and saved is printed.
SCRIPT = """
import itertools, json, sys
{before}
import torch
from dali_pipes import LoaderConfig, TokenLoader, build_pipeline

report = {{"engines": [], "streams": {{}}, "states": {{}}}}
for dtype in {dtypes}:
    common = dict(corpus=f"{{sys.argv[1]}}/{{dtype}}.bin", dtype=dtype, format="flat", batch_size=3, seq_len=4)
    common |= dict(device="cpu", engine="{engine}", drop_last=False, outputs=["input_ids", "labels", "row_ids"])
    stream = []
    with TokenLoader(**common) as loader:
        for _ in range(2):
            stream += [[tensor.tolist() for tensor in batch.values()] for batch in loader]
        stream += [[tensor.tolist() for tensor in batch.values()] for batch in itertools.islice(loader, 4)]
        state = json.loads(json.dumps(loader.state_dict()))
        report["engines"].append(loader.stats().engine)
    with TokenLoader(**common, batches_per_run=1, num_threads=1) as loader:
        loader.load_state_dict(state)
        stream += [[tensor.tolist() for tensor in batch.values()] for batch in loader]
    report["streams"][dtype], report["states"][dtype] = stream, state
{after}
report["cuda initialised"] = torch.cuda.is_initialized()
report["cupy imported"] = "cupy" in sys.modules
report["dali imported"] = "nvidia.dali" in sys.modules
report["libraries"] = [line for line in open("/proc/self/maps") if "libcuda.so" in line or "libnvidia-ml" in line]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 13 rows for each stored type, with the type's awkward value in every other place."""
    folder = tmp_path_factory.mktemp("widths")
    for dtype, value in DTYPES.items():
        expected_tokens(dtype, value).astype(dtype).tofile(folder / f"{dtype}.bin")
    return folder


def expected_tokens(dtype: str, value: int) -> Any:
    tokens = np.arange(13 * T + 1, dtype=np.int64)
    tokens[::2] = value
    return tokens


def check_streams(report: Any) -> None:
    """Two epochs, four batches of the third, then, after the resume, the last one of it: 15 batches."""
    for dtype, value in DTYPES.items():
        expected = take(oracle_stream(expected_tokens(dtype, value), batch_size=3, seq_len=T, drop_last=False), 15)
        got = report["streams"][dtype]
        assert got == [[batch[name].tolist() for name in ("input_ids", "labels", "row_ids")] for batch in expected]
        assert any(value in row for row in got[0][0])
        assert (report["states"][dtype]["epoch"], report["states"][dtype]["rows"]) == (2, 12)


def run(
    run_script: Callable[..., Any],
    files: Path,
    before: str = "",
    after: str = "",
    engine: str = "auto",
    **variables: str,
) -> Any:
    source = SCRIPT.format(before=before, after=after, engine=engine, dtypes=list(DTYPES))
    done = run_script(source, files, environment={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    assert not re.search(r"Traceback|Error|[Ww]arning", done.stderr), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", [pytest.param("dali", marks=pytest.mark.slow), "auto"])
def test_no_driver_is_looked_for(run_script: Callable[..., Any], files: Path, tmp_path: Path, engine: str) -> None:
    """The dynamic linker reports every library that anything in the process tries to open, also where there is none."""
    mark = 'import ctypes\ntry: ctypes.CDLL("libend_of_the_run.so")\nexcept OSError: pass'
    log = tmp_path / "linker"
    report = run(run_script, files, after=mark, engine=engine, LD_DEBUG="libs", LD_DEBUG_OUTPUT=str(log))
    check_streams(report)
    assert report["engines"] == ["dali" if engine == "dali" else "direct"] * len(DTYPES)
    assert report["dali imported"] == (engine == "dali")
    assert (report["cuda initialised"], report["cupy imported"]) == (False, False)
    assert report["libraries"] == []
    lines = "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("linker.*"))
    searched = re.findall(r"find library=(\S+)", lines)
    assert "libend_of_the_run.so" in searched
    before_the_end = searched[: searched.index("libend_of_the_run.so")]  # DALI itself looks for it when a process ends
    assert [name for name in before_the_end if name.startswith(("libcuda.so", "libnvidia-ml"))] == []


def test_without_dali(run_script: Callable[..., Any], files: Path) -> None:
    """DALI cannot be found by any import; the batches are the same, and what needs DALI says what to install."""
    before = """
import importlib.abc

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "nvidia" or name.startswith("nvidia."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
    after = """
report["errors"] = []
for action in (lambda: build_pipeline(LoaderConfig(**common)), lambda: next(iter(TokenLoader(**common, graph=dict)))):
    try:
        action()
    except Exception as error:
        report["errors"].append(f"{type(error).__name__}: {error}")
"""
    report = run(run_script, files, before=before, after=after)
    check_streams(report)
    assert report["engines"] == ["direct"] * len(DTYPES)
    assert (report["cuda initialised"], report["dali imported"]) == (False, False)
    assert len(report["errors"]) == 2
    for message in report["errors"]:
        assert message.startswith("BackendError: ")
        assert "DALI" in message
        assert "pip install" in message


@pytest.mark.parametrize(("dtype", "value"), DTYPES.items())
def test_engines_hand_over_to_each_other(files: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value: int) -> None:
    """A state saved with DALI goes on without, and the other way round."""
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T, "drop_last": False}
    common: dict[str, Any] = {
        "corpus": str(files / f"{dtype}.bin"),
        "dtype": dtype,
        "format": "flat",
        "device": "cpu",
        **order,
    }
    expected = oracle_stream(expected_tokens(dtype, value), **order)
    state = None
    for number, engine in enumerate(["dali", "direct", "direct", "dali", "direct"]):
        with monkeypatch.context() as patch:
            if engine == "direct":
                patch.setitem(sys.modules, "nvidia.dali", None)
            with TokenLoader(**common, outputs=OUTPUTS, batches_per_run=1 + number % 2, engine=engine) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                assert all_same(take(loader_stream(loader), 3), take(expected, 3))
                assert loader.stats().engine == engine
                state = loader.state_dict()


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_gpu_that_is_not_there_is_one_clear_error(files: Path, device: str) -> None:
    common: dict[str, Any] = {"corpus": str(files / "uint16.bin"), "batch_size": 3, "seq_len": T, "device": device}
    for make in (lambda: TokenLoader(**common), lambda: build_pipeline(LoaderConfig(**common))):
        with pytest.raises(BackendError) as caught:
            make()
        message = str(caught.value)
        assert "cuda" in message
        assert 'device = "cpu"' in message
        assert "\n" not in message.strip()


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
def test_auto_falls_back_and_says_why(files: Path) -> None:
    common: dict[str, Any] = {"corpus": str(files / "uint16.bin"), "batch_size": 3, "seq_len": T, "drop_last": False}
    with TokenLoader(**common, device="auto") as loader:
        assert str(loader.device) == "cpu"
        assert all_same(
            loader, epoch_batches(expected_tokens("uint16", 65535), batch_size=3, seq_len=T, drop_last=False)
        )
        assert loader.stats().placement_reason
    with pytest.raises(DaliPipesError, match="GPU"):
        TokenLoader(**common, device="auto", placement="device")


def test_importing_the_package_imports_none_of_the_large_ones(run_script: Callable[..., Any]) -> None:
    source = """
        import sys
        import dali_pipes, dali_pipes.config, dali_pipes.corpus, dali_pipes.schedule, dali_pipes.loader.state
        print([name for name in ("torch", "nvidia.dali", "cupy") if name in sys.modules])
    """
    done = run_script(source)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
