"""The CPUs of a rank and their NUMA node, with a folder that stands for the kernel's."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dali_pipes.runtime.cpus import cpus_of_a_rank, numa_node, parse_cpu_list, usable_cpus


def as_list(cpus: set[int]) -> str:
    """As the kernel writes it: runs of three or more with a dash here, so that both forms occur."""
    parts, left = [], sorted(cpus)
    while left:
        length = next((n for n in range(len(left), 0, -1) if left[n - 1] == left[0] + n - 1), 1)
        length = length if length > 2 else 1
        parts.append(f"{left[0]}-{left[length - 1]}" if length > 1 else str(left[0]))
        left = left[length:]
    return ",".join(parts) + "\n"


@given(st.sets(st.integers(0, 60)))
def test_lists_of_cpus(cpus: set[int]) -> None:
    assert parse_cpu_list(as_list(cpus)) == cpus


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nodes=st.dictionaries(st.integers(0, 40), st.sets(st.integers(0, 50)), max_size=4),
    cpus=st.sets(st.integers(0, 50), min_size=1),
    bound_to=st.integers(0, 3),
)
def test_the_node_of_all_cpus(
    tmp_path_factory: pytest.TempPathFactory, nodes: dict[int, set[int]], cpus: set[int], bound_to: int
) -> None:
    """Named only where CPUs are on several nodes, and all that may be used on one of them."""
    folder, taken = tmp_path_factory.mktemp("nodes"), set[int]()
    for number in nodes:  # no CPU is on two nodes
        nodes[number] -= taken
        taken |= nodes[number]
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(as_list(nodes[number]))
    (folder / "possible").write_text("0-3\n")
    cpus = (list(nodes.values())[bound_to] if bound_to < len(nodes) else cpus) or cpus
    having_all = [number for number, of_node in nodes.items() if cpus <= of_node]
    several = sum(map(bool, nodes.values())) > 1
    assert numa_node(cpus, folder) == (str(having_all[0]) if having_all and several else None)


@pytest.mark.parametrize("content", ["fast\n", "0-\n", b"\xff"])
def test_a_kernel_that_says_something_else(tmp_path: Path, content: str | bytes) -> None:
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{number}\n")
    assert numa_node({1}, tmp_path) == "1"
    (tmp_path / "node0" / "cpulist").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert numa_node({1}, tmp_path) is None
    assert numa_node({1}, tmp_path / "not there") is None


def test_the_cpus_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it = usable_cpus()
    assert all_of_it == os.sched_getaffinity(0)
    one = min(all_of_it)
    os.sched_setaffinity(0, {one})
    try:
        assert usable_cpus() == {one}
    finally:
        os.sched_setaffinity(0, all_of_it)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == set(range(os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("usable", "ranks", "node", "share"),
    [
        (128, 1, None, 128),
        (128, 8, None, 16),  # nobody is bound
        (4, 8, None, 1),  # a container with less
        (64, 8, "1", 16),  # torchrun --numa-binding=node on two nodes: four ranks on each
        (16, 8, "0", 16),  # --numa-binding=exclusive
        (8, 1, "0", 8),
        (1, 300, "0", 1),
    ],
)
def test_the_share_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, usable: int, ranks: int, node: str | None, share: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert cpus_of_a_rank(set(range(usable)), ranks, node) == share
