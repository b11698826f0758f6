"""SampleLoader over encoded files with a graph: the same batches after any resume and in any batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import jpeg

from dali_pipes import SampleLoader
from dali_pipes.errors import SampleError
from dali_pipes.samples.encoded_files import EncodedFiles

fn = pytest.importorskip("nvidia.dali.fn")
types = pytest.importorskip("nvidia.dali.types")

ITEMS = 13


@pytest.fixture
def files(tmp_path: Path) -> EncodedFiles:
    for item in range(ITEMS):
        path = tmp_path / f"class {item % 3}" / f"{item:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(item, (30 + item, 40 - item)))
    return EncodedFiles.from_folder(tmp_path)


def graph(nodes: Any, u: Any) -> Any:
    image = fn.decoders.image(nodes["image"], device="cpu")
    image = fn.crop(image, crop=(24, 24), crop_pos_x=u[0], crop_pos_y=u[1])
    image = fn.rotate(image, angle=u[2] * 90, keep_size=True, fill_value=0)
    return {"image": image, "label": nodes["label"]}


def loader(files: EncodedFiles, **settings: Any) -> SampleLoader:
    return SampleLoader(files, shuffle=True, graph=graph, device="cpu", seed=4, **settings)


def rows_of(batches: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("image", "label")}


def test_batches_are_equal_in_any_batch_size_and_after_a_resume_at_every_step(files: EncodedFiles) -> None:
    with loader(files, batch_size=4) as whole:
        first, second = rows_of(list(whole)), rows_of(list(whole))
    assert first["image"].shape == (ITEMS, 24, 24, 3)
    assert not torch.equal(first["image"], second["image"])
    assert sorted(first["label"].tolist()) == sorted(files.labels or [])
    for stop in range(5):
        with loader(files, batch_size=4) as begun:
            before = [batch for _, batch in zip(range(stop), begun, strict=False)]
            state = begun.state_dict()
        with loader(files, batch_size=3) as resumed:
            resumed.load_state_dict(state)
            after = [] if stop == 4 else list(resumed)
            found = rows_of(before + after)
            assert all(torch.equal(found[name], first[name]) for name in found)
            following = rows_of(list(resumed))
            assert all(torch.equal(following[name], second[name]) for name in following)


def test_a_file_that_cannot_be_read_or_decoded_is_named_at_its_batch(files: EncodedFiles) -> None:
    with loader(files, batch_size=2) as one:
        damaged, missing = one.locate(2, 1).item, one.locate(4, 0).item
        Path(files.paths[damaged]).write_bytes(b"not an image")
        Path(files.paths[missing]).unlink()
        batches = iter(one)
        for _ in range(2):
            assert next(batches)["image"].shape == (2, 24, 24, 3)
        with pytest.raises(SampleError, match=rf"item {damaged} of EncodedFiles .*row 5\).*decoders\.image") as raised:
            next(batches)
        assert (raised.value.item, raised.value.row) == (damaged, 5)
        Path(files.paths[damaged]).write_bytes(jpeg(0))
        batches = iter(one)
        for _ in range(2):
            assert next(batches)["image"].shape == (2, 24, 24, 3)
        with pytest.raises(SampleError, match=Path(files.paths[missing]).name):
            next(batches)
