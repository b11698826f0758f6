"""SampleGraph: what goes in and comes out, in order; errors at their batch; nothing left running."""

import io
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import jpeg, numbers_of, run
from PIL import Image

from dali_pipes.errors import BackendError, GraphError, LoaderClosedError
from dali_pipes.samples.graph import SampleGraph, _Pipeline

fn = pytest.importorskip("nvidia.dali.fn")

Pair = namedtuple("Pair", "image label")
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


def unchanged(nodes: Any, u: Any) -> Any:
    return nodes


def test_values_come_back_in_their_structure() -> None:
    samples = [
        {"x": np.full((2, 3), place, np.int16), "meta": Pair(f"name {place}", [place, place / 2, place > 0]), "u": None}
        for place in range(3)
    ]
    batch = run(unchanged, samples)
    assert list(batch) == ["x", "meta", "u"]
    assert torch.equal(batch["x"], torch.arange(3, dtype=torch.int16)[:, None, None].expand(3, 2, 3))
    assert batch["meta"].image == ["name 0", "name 1", "name 2"]
    assert batch["u"] == [None, None, None]
    whole, half, positive = batch["meta"].label
    assert (whole.tolist(), whole.dtype) == ([0, 1, 2], torch.int64)
    assert (half.tolist(), half.dtype) == ([0, 0.5, 1], torch.float64)
    assert (positive.tolist(), positive.dtype) == ([False, True, True], torch.bool)


@pytest.mark.parametrize("samples", [[np.arange(4) + place for place in range(3)], [(1, 2), (3, 4), (5, 6)]])
def test_samples_that_are_arrays_or_tuples(samples: list[Any]) -> None:
    batch = run(unchanged, samples)
    expected = torch.utils.data.default_collate(samples)
    assert type(batch) is (torch.Tensor if torch.is_tensor(expected) else tuple)
    assert all(torch.equal(found, wanted) for found, wanted in zip(batch, expected, strict=True))


def test_a_graph_may_return_another_structure() -> None:
    batch = run(lambda nodes, u: ([nodes["a"] + nodes["b"], u[1]], nodes["c"]), [{"a": 1, "b": 2, "c": "z", "d": 9.0}])
    assert isinstance(batch, tuple)
    assert batch[0][0].tolist() == [3]
    assert batch[0][1].numpy().tolist() == numbers_of([0])[:, 1].tolist()
    assert batch[1] == ["z"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept(dtype: str) -> None:
    values = [np.array([[0, 1, 1]], dtype) * (place > 0) for place in range(2)]
    batch = run(unchanged, values)
    assert batch.numpy().dtype == dtype
    assert np.array_equal(batch.numpy(), np.stack(values))


def test_memory_of_any_layout_and_kind() -> None:
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    for value in (
        grid.T,
        grid[::-1, ::2],
        grid.astype(">i4"),
        torch.from_numpy(grid).T,
        np.broadcast_to(grid[0], (2, 4)),
    ):
        expected = np.asarray(value).astype("=i4")
        assert np.array_equal(run(unchanged, [value, value]).numpy(), np.stack([expected, expected]))
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    assert np.array_equal(run(unchanged, [image])[0].numpy(), np.asarray(image))
    for encoded in (b"\1\2\3", bytearray(b"\1\2\3"), memoryview(b"\1\2\3")):
        assert run(unchanged, [encoded]).tolist() == [[1, 2, 3]]
    assert run(unchanged, [np.zeros((0, 3))]).shape == (1, 0, 3)


def test_u_is_a_sequence_of_the_samples_numbers() -> None:
    def graph(nodes: Any, u: Any) -> Any:
        assert len(u) == 5
        first, *_, last = u
        with pytest.raises(IndexError, match=r"u\[5\].*num_draws is 5"):
            u[5]
        return [first, last, u[-2], *u[1:3]]

    numbers = numbers_of([4, 9], 5)
    found = run(graph, [0, 0], numbers)
    assert [node.numpy().tolist() for node in found] == numbers[:, [0, 4, 3, 1, 2]].T.tolist()


def test_batches_of_changing_sizes_come_in_order() -> None:
    """Smaller ones, and larger ones than the first, while others are in work."""
    sizes = [4, 4, 1, 6, 3, 7, 2]
    graph = SampleGraph(lambda nodes, u: (nodes + 0, u[0]), num_draws=2, device_id=None, num_threads=1, depth=3)
    for number, size in enumerate(sizes):
        graph.submit([number * 10 + place for place in range(size)], numbers_of(range(size), 2))
    for number, size in enumerate(sizes):
        values, first = graph.result()
        assert values.tolist() == [number * 10 + place for place in range(size)]
        assert first.tolist() == numbers_of(range(size), 2)[:, 0].tolist()
    graph.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_stay_as_they_were_handed_out(depth: int) -> None:
    """Also one that is an input itself, when the next ones come and when the samples change after their result."""
    graph = SampleGraph(lambda nodes, u: (nodes, nodes * 2), num_draws=0, device_id=None, num_threads=2, depth=depth)
    submitted = [[np.full((64, 64), number, np.int32) for _ in range(4)] for number in range(20)]
    held = []
    for number, samples in enumerate(submitted):
        graph.submit(samples, np.zeros((4, 0), np.float32))
        if number >= 2:
            held.append(graph.result())
            for sample in submitted[number - 2]:
                sample[:] = -1
    held += [graph.result(), graph.result()]
    graph.close()
    for number, (same, double) in enumerate(held):
        assert (same == number).all()
        assert (double == 2 * number).all()


def test_a_graph_that_fails_does_so_at_its_batch() -> None:
    """With its own error; each time, since every batch needs it."""

    def graph(nodes: Any, u: Any) -> Any:
        return nodes["imgae"]

    one = SampleGraph(graph, num_draws=0, device_id=None)
    for _ in range(2):
        one.submit([{"image": 1}], np.zeros((1, 0), np.float32))
    for _ in range(2):
        with pytest.raises(KeyError, match="imgae") as raised:
            one.result()
        assert any("graph=" in note for note in raised.value.__notes__)
    one.close()


def decoded(nodes: Any, u: Any) -> Any:
    return {"image": fn.resize(fn.decoders.image(nodes["image"], device="cpu"), size=(8, 8)), "id": nodes["id"]}


def test_an_operator_that_fails_does_so_at_its_batch_and_sample() -> None:
    """Batches before it were handed out, those after it follow."""
    graph = SampleGraph(decoded, num_draws=0, device_id=None, num_threads=1, depth=3)
    for number in range(5):
        samples = [{"image": jpeg(place), "id": number * 10 + place} for place in range(4)]
        if number == 2:
            samples[3]["image"] = b"not an image"
        graph.submit(samples, np.zeros((4, 0), np.float32))
    for number in range(5):
        if number == 2:
            with pytest.raises(GraphError, match=r"sample 3 .*decoders\.image") as raised:
                graph.result()
            assert raised.value.position == 3
            assert "Current pipeline" not in str(raised.value)
        else:
            assert graph.result()["id"].tolist() == [number * 10 + place for place in range(4)]
    graph.close()


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_interrupt_loses_its_batch_alone(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a result is waited for, as in a notebook: the batches after it are not mixed up."""
    graph = SampleGraph(lambda nodes, u: nodes + 1, num_draws=0, device_id=None, depth=2)
    for number in range(4):
        graph.submit([number], np.zeros((1, 0), np.float32))
    take = _Pipeline.take

    def interrupted(self: _Pipeline, stream: int | None = None) -> Any:
        monkeypatch.setattr(_Pipeline, "take", take)
        if is_taken:
            take(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Pipeline, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.result()
    assert [graph.result().tolist() for _ in range(3)] == [[2], [3], [4]]
    graph.close()


@pytest.mark.parametrize("bad", [None, 0, 1, 4])
def test_reset_drops_what_was_submitted(bad: int | None) -> None:
    graph = SampleGraph(decoded, num_draws=0, device_id=None, num_threads=1, depth=2)
    for number in range(5):
        image = b"not an image" if number == bad else jpeg(number)
        graph.submit([{"image": image, "id": number}], np.zeros((1, 0), np.float32))
    graph.reset()
    graph.reset()
    for number in range(3):
        graph.submit([{"image": jpeg(0), "id": 10 + number}], np.zeros((1, 0), np.float32))
    assert [graph.result()["id"].tolist() for _ in range(3)] == [[10], [11], [12]]
    graph.close()


CASES: dict[str, tuple[Any, list[Any], list[str], int | None]] = {
    "dtype": (unchanged, [{"x": np.zeros(2)}, {"x": np.zeros(2, np.int8)}], ["x", "sample 1", "int8", "float64"], 1),
    "axes": (unchanged, [(0, np.zeros((2, 2))), (0, np.zeros(2))], ["[1]", "sample 1", "1 axis", "2 axes"], 1),
    "fields": (unchanged, [{"x": 1, "y": 2}, {"x": 1}], ["sample 1", "x, y"], 1),
    "not an array": (unchanged, [{"x": 1}, {"x": "one"}], ["x", "sample 1", "not an array", "int64"], 1),
    "complex": (unchanged, [np.zeros(2, complex)], ["sample 0", "complex128"], 0),
    "text": (unchanged, [{"words": np.array(["a"])}], ["words", "<U1"], 0),
    "objects": (unchanged, [{"x": np.array([None])}], ["x", "object"], 0),
    "long": (unchanged, [{"x": 2**63}], ["x", "sample 0"], 0),
    "bfloat16": (unchanged, [{"x": torch.zeros(2, dtype=torch.bfloat16)}], ["x", "BFloat16"], 0),
    "grad": (unchanged, [{"x": torch.zeros(2, requires_grad=True)}], ["x", "grad"], 0),
    "ragged": (
        unchanged,
        [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 3))}, {"x": np.zeros((4, 3))}],
        ["x", "(2, 3)", "(4, 3)", "sample 2", "fn.crop"],
        2,
    ),
    "no node": (lambda nodes, u: {"y": 3, "x": nodes}, [1], ["y", "int"], None),
    "nothing": (lambda nodes, u: {}, [1], ["node"], None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named(case: str) -> None:
    graph, samples, words, position = CASES[case]
    with pytest.raises(GraphError) as raised:
        run(graph, samples)
    assert raised.value.position == position
    for word in words:
        assert word in str(raised.value)


def test_later_batches_have_to_fit_the_first_one() -> None:
    graph = SampleGraph(unchanged, num_draws=0, device_id=None)
    values = [np.zeros(2), np.zeros(2, np.float32), np.ones(2)]
    for value in values:
        graph.submit([value, value], np.zeros((2, 0), np.float32))
    assert graph.result().sum() == 0
    with pytest.raises(GraphError, match=r"sample 0 .*float32.*float64"):
        graph.result()
    assert graph.result().sum() == 4
    graph.close()


def test_an_output_that_does_not_depend_on_the_samples() -> None:
    """Its number of samples is the largest that the pipeline takes, not that of the batch."""
    graph = SampleGraph(lambda nodes, u: fn.random.uniform(range=(0.0, 1.0)), num_draws=0, device_id=None)
    graph.submit([1, 2, 3], np.zeros((3, 0), np.float32))
    assert graph.result().shape == (3,)
    graph.submit([1, 2], np.zeros((2, 0), np.float32))
    with pytest.raises(GraphError, match=r"3 samples.*2 "):
        graph.result()
    graph.close()


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before, others = tasks(), set(threading.enumerate())
    yield
    assert tasks() <= before
    assert set(threading.enumerate()) <= others


def test_close_ends_everything_and_more_is_refused(no_threads_left: None) -> None:
    run(decoded, [{"image": jpeg(0), "id": 0}])  # what DALI starts once for all pipelines
    before = tasks()
    graph = SampleGraph(decoded, num_draws=0, device_id=None, num_threads=3)
    for _ in range(4):
        graph.submit([{"image": jpeg(0), "id": 0}], np.zeros((1, 0), np.float32))
    graph.result()
    assert len(tasks()) > len(before)
    graph.close()
    graph.close()
    assert tasks() <= before
    for call in (graph.result, lambda: graph.submit([0], np.zeros((1, 0), np.float32))):
        with pytest.raises(LoaderClosedError):
            call()


def test_a_graph_that_is_dropped_ends_its_threads() -> None:
    run(decoded, [{"image": jpeg(0), "id": 0}])
    before = tasks()
    graph = SampleGraph(decoded, num_draws=0, device_id=None, num_threads=3)
    graph.submit([{"image": jpeg(0), "id": 0}], np.zeros((1, 0), np.float32))
    assert len(tasks()) > len(before)
    del graph
    assert tasks() <= before


def test_forks_and_the_end_of_the_process_do_not_wait_for_dali(run_script: Any) -> None:
    result = run_script(
        """
        import os, numpy as np
        from dali_pipes.samples.graph import SampleGraph, _Pipeline
        graph = SampleGraph(lambda nodes, u: nodes + 1, num_draws=0, device_id=None, num_threads=2)
        for _ in range(3):
            graph.submit([1, 2], np.zeros((2, 0), np.float32))
        print(graph.result().tolist(), flush=True)
        child = os.fork()
        if child == 0:
            del graph
            raise SystemExit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), graph.result().tolist())
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[2, 3]", "7 [2, 3]"]


def test_without_dali_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(BackendError, match=r"dali-pipes\[cpu\]"):
        SampleGraph(unchanged, num_draws=0, device_id=None)


def test_importing_the_samples_does_not_import_dali(run_script: Any) -> None:
    result = run_script(
        """
        import sys, dali_pipes.samples.graph, dali_pipes.samples.gaussian_noise, dali_pipes.samples.encoded_files
        assert not [name for name in sys.modules if name.startswith("nvidia.dali")]
        """
    )
    assert result.returncode == 0, result.stderr


def test_decoded_images_are_those_of_pil() -> None:
    """But for the rounding of the inverse transform and of the colors."""
    samples: list[dict[str, Any]] = [{"image": jpeg(place, (37, 50))} for place in range(3)]
    batch = run(lambda nodes, u: fn.decoders.image(nodes["image"], device="cpu"), samples)
    for sample, found in zip(samples, batch, strict=True):
        expected = np.asarray(Image.open(io.BytesIO(sample["image"])), np.int32)
        assert found.shape == expected.shape == (50, 37, 3)
        assert np.abs(found.numpy() - expected).mean() < 1
