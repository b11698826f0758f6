"""Token batches for language-model training on NVIDIA GPUs: exact order, exact resume, no data wait.

    from dali_pipes import TokenLoader

    for batch in TokenLoader(corpus="data/*.bin", batch_size=16, seq_len=1024):
        batch["input_ids"], batch["labels"]          # int64 (16, 1024) each

`SampleLoader` does the same for any map-style dataset, such as images or volumes.

Importing the package imports neither torch nor DALI nor CuPy; the names below are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_pipes.adapters.source_loss import SourceLoss
    from dali_pipes.config import LoaderConfig
    from dali_pipes.corpus import Corpus
    from dali_pipes.corpus_or_text import open_corpus
    from dali_pipes.engine.dali import build_pipeline
    from dali_pipes.loader.token_loader import TokenLoader
    from dali_pipes.monitoring.stats import LoaderStats
    from dali_pipes.samples.encoded_files import EncodedFiles
    from dali_pipes.samples.gaussian_noise import keyed_noise
    from dali_pipes.samples.order import SampleLocation
    from dali_pipes.samples.sample_loader import SampleLoader
    from dali_pipes.samples.stats import SampleStats
    from dali_pipes.schedule.mixture_report import MixtureReport, SourceUse
    from dali_pipes.schedule.plans import RowLocation

__version__ = "0.1.0"

_MODULES = {
    "Corpus": "corpus",
    "EncodedFiles": "samples.encoded_files",
    "LoaderConfig": "config",
    "LoaderStats": "monitoring.stats",
    "MixtureReport": "schedule.mixture_report",
    "RowLocation": "schedule.plans",
    "SampleLoader": "samples.sample_loader",
    "SampleLocation": "samples.order",
    "SampleStats": "samples.stats",
    "SourceLoss": "adapters.source_loss",
    "SourceUse": "schedule.mixture_report",
    "TokenLoader": "loader.token_loader",
    "build_pipeline": "engine.dali",
    "keyed_noise": "samples.gaussian_noise",
    "open_corpus": "corpus_or_text",
}

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"{name} requires torch, which is not installed. Install the CPU or CUDA build for this machine: "
                "pip install torch",
                name="torch",
            ) from error
        raise
    return getattr(module, name)
