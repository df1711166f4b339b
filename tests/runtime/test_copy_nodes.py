"""The addresses that copy nodes get before a launch, with a stand-in for the driver that runs nothing."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from thunder_cg.compat import cuda
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.cuda import copy_nodes, graph
from thunder_cg.runtime.cuda.copy_nodes import Copies

driver = pytest.importorskip("cuda.bindings.driver")
DONE, FAILED = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


class Driver:
    """Notes what a launch would see."""

    CUDA_KERNEL_NODE_PARAMS = driver.CUDA_KERNEL_NODE_PARAMS

    def __init__(self) -> None:
        self.updates: list[tuple[object, object]] = []
        self.launches: list[tuple[object, int]] = []
        self.answer = DONE

    def cuLaunchKernel(self, *args):
        return (DONE,)

    def cuGraphExecKernelNodeSetParams(self, executable, node, parameters):
        self.updates.append((executable, node))
        return (self.answer,)

    def cuGraphLaunch(self, executable, stream):
        self.launches.append((executable, stream))
        return (self.answer,)


@pytest.fixture
def fake(monkeypatch) -> Driver:
    fake, nodes = Driver(), count()
    monkeypatch.setattr(cuda, "driver", fake)
    monkeypatch.setattr(cuda, "current_raw_stream", lambda index: 7)
    monkeypatch.setattr(cuda, "last_captured_node", lambda stream: f"node {next(nodes)}")
    monkeypatch.setattr(copy_nodes, "_kernels", lambda index: {4: 0, 120: 0})
    return fake


def spans(copies: Copies) -> list[tuple[int, int, int]]:
    """Of all copies that a launch would make: where from, where to, and how many bytes."""
    rows = []
    for node, place in copies._nodes:
        words = list(node.words)
        rows += [tuple(words[4 * i : 4 * i + 3]) for i in range(place.stop - place.start)]
    return rows


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("sizes", [[5], [5, 0], [0], [3, 0, 40000, 2], list(range(1, 300))], ids=len)
def test_addresses(fake, into, sizes):
    copies = Copies(0, into=into)
    fixed = [torch.zeros(size) for size in sizes]
    middle = len(fixed) // 2
    copies.record(fixed[:middle])
    copies.record(fixed[middle:])
    copies.bind("executable")
    for _ in range(2):
        others = [torch.zeros(size) for size in sizes]
        fake.updates.clear()
        copies.set_addresses(others)
        pairs = zip(others, fixed) if into else zip(fixed, others)
        expected = [(a.data_ptr(), b.data_ptr(), 4 * a.numel()) for a, b in pairs if a.numel()]
        assert spans(copies) == expected
        assert [executable for executable, _ in fake.updates] == ["executable"] * len(copies._nodes)
    fake.answer = FAILED
    if expected:
        with pytest.raises(ReplayRefused, match="address"):
            copies.set_addresses(others)


def test_a_fast_replay(fake):
    copies = [Copies(0, into=into) for into in (True, False)]
    fixed, others = [torch.zeros(3)], [torch.zeros(3)]
    for each in copies:
        each.record(fixed)
        each.bind("executable")
    stream = SimpleNamespace(index=0, lock=nullcontext(), order=SimpleNamespace(last_raw=7))
    launch, scalars = partial(cuda.driver.cuGraphLaunch, "executable"), []
    replay = graph._make_fast_replay(stream, launch, *(each.set_addresses for each in copies), scalars.append)
    replay(others, others, (3,))
    assert scalars == [(3,)]
    assert fake.launches == [("executable", 7)] and len(fake.updates) == 2
    assert [spans(each)[0][1 - into] for into, each in zip((1, 0), copies)] == [others[0].data_ptr()] * 2
    with pytest.raises(ReplayRefused):
        replay([], others, ())  # whatever fails before the launch
    assert len(fake.launches) == 1
    only_launch = graph._make_fast_replay(stream, launch, None, None, None)
    fake.answer = FAILED
    with pytest.raises(ReplayRefused, match=r"launch a graph.*OUT_OF_MEMORY"):
        only_launch([], [], ())
