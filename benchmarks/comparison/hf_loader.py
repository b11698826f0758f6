"""HF datasets: one Arrow row a window, `with_format("torch")`, fed to torch's DataLoader as their guide does."""

import shutil
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, List, Value, disable_progress_bars, load_from_disk
from torch.utils.data import DataLoader

from comparison.alternatives import Pair
from comparison.loops import Loop
from comparison.torch_loaders import loader_settings
from comparison.work import Work

_COLUMN = "tokens"


class HuggingFace(Loop):
    def prepare(self, work: Work) -> None:
        target = work.prepared("arrow")
        if target.exists():
            return
        unfinished, cache = target.with_suffix(".unfinished"), target.with_suffix(".cache")
        for folder in (unfinished, cache):
            shutil.rmtree(folder, ignore_errors=True)
        disable_progress_bars()
        features = Features({_COLUMN: List(Value("uint16"), length=work.seq_len + 1)})
        rows = Dataset.from_generator(_rows, features=features, cache_dir=str(cache), gen_kwargs={"work": work})
        rows.save_to_disk(str(unfinished))
        shutil.rmtree(cache)
        unfinished.rename(target)

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        dataset = load_from_disk(str(work.prepared("arrow"))).with_format("torch")
        loader: DataLoader[Any] = DataLoader(dataset, **loader_settings(work, 0))
        while True:
            for batch in loader:
                rows = batch[_COLUMN]
                yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _rows(work: Work) -> Iterator[dict[str, Any]]:
    for row in work.window_view():
        yield {_COLUMN: row}
