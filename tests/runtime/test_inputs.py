"""Memory of the pool for inputs that are copied, and inputs that no graph can have."""

from __future__ import annotations

import pytest
import torch
from support import fast_path_calls, regions, replays, same
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from thunder_cg import explain
from thunder_cg.analysis.partition import Region
from thunder_cg.analysis.region_io import RegionInput, RegionIO
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.inputs import static_buffer
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.region_capture import check_inputs
from thunder_cg.runtime.tape import TapeBackend
from thunder_cg.runtime.tensors import overlaps_itself


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(4, 4),
        torch.randn(4, 4).t(),
        torch.randn(17)[1:].view(4, 4),
        torch.randn(8, 4)[::2],
        torch.randn(4).expand(3, 4),
        torch.randn(6).as_strided((3, 3), (1, 1)),
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
)
def test_a_static_buffer_is_laid_out_like_its_input(like):
    buffer = static_buffer(TapeBackend().pool(torch.device("cpu")), like)
    assert buffer.stride() == like.stride() and buffer.shape == like.shape and buffer.is_conj() == like.is_conj()
    assert buffer.data_ptr() % 16 == like.data_ptr() % 16 or like.numel() == 0
    assert overlaps_itself(buffer) == overlaps_itself(like)


def test_an_input_on_another_device_than_the_trace_says_is_refused():
    inputs = tuple(RegionInput(name, written=False, aliased=False) for name in ("x", "seed"))
    io = RegionIO(inputs, (), (), frozenset())
    region = RuntimeRegion("CUDAGraph1", Region((), "meta", ""), (), io, lambda *_: lambda inputs: ())
    with pytest.raises(CaptureRefused, match="input 'seed' is on cpu, and the graph on meta"):
        check_inputs(region, [torch.empty(2, device="meta"), torch.tensor(0)], frozenset())


def test_what_a_graph_writes_is_not_copied(twins, device):
    """A cache of keys and values is larger than all else that a step reads. Each new one is captured, up to a bound."""

    def write(cache, x, at):
        cache.index_copy_(0, at, x)
        return (cache * 2).sum(0)

    plain, graphed = twins(write)
    captures, kept = [], []
    for _ in range(6):
        caches = [torch.zeros(64, 4, device=device) for _ in range(2)]
        for at in range(4):
            x, place = torch.randn(1, 4, device=device), torch.tensor([at], device=device)
            same(plain(caches[0], x, place), graphed(caches[1], x, place))
            same(*caches)
        (region,) = regions(graphed)
        captures.append((region["captures"], region["bytes_in"]))
        kept += caches  # so that each cache is at a new address
    assert [many for many, _ in captures] == [1, 2, 3, 4, 4, 4]
    assert captures[0][1] == 4 * 4 + 8, "the row and its place"
    assert captures[-1][1] == 64 * 4 * 4 + 4 * 4 + 8, "a cache that moves again and again is copied"
    assert fast_path_calls(graphed) == 0 and region["failure"] is None


class Masked(torch.nn.Module):
    """A decoder's step, with a mask for all positions as a plain attribute, and a table in a dictionary."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4).to(device)
        self.mask = torch.ones(64, 4, device=device)
        self.tables = {"angles": torch.rand(64, 4, device=device)}

    def forward(self, x, at):
        return self.linear(x) * self.mask.index_select(0, at) + self.tables["angles"].index_select(0, at)


def masked(twins, device):
    """Both, and what calls each with the same position, compares, and returns captures and bytes copied in."""
    plain, graphed = twins(Masked(device))

    def step(at, inputs=4 * 4 + 8):
        x, place = torch.randn(1, 4, device=device), torch.tensor([at], device=device)
        with torch.no_grad():
            same(plain(x, place), graphed(x, place))
        (region,) = regions(graphed)
        assert region["failure"] is None
        return region["captures"], region["bytes_in"] - inputs

    return plain, graphed, step


def test_a_mask_that_a_module_has_is_not_copied(twins, device):
    plain, graphed, step = masked(twins, device)
    found = [step(at) for at in range(5)]
    for each in (plain, graphed):
        each.mask[5:] = 0.5  # in place: the graph reads it there
    found += [step(at) for at in range(5, 8)]
    assert found[1:] == [(1, 0)] * 7 and fast_path_calls(graphed) >= 4
    kept = []
    for times in (2, 3):  # other masks: each is captured
        kept.append(graphed.mask)
        for each in (plain, graphed):
            each.mask = torch.full((64, 4), float(times), device=device)
        found += [step(at) for at in range(4)]
    assert found[-1] == (3, 0)
    for _ in range(2):  # both are known
        for mask in [*kept[1:], graphed.mask]:
            plain.mask = graphed.mask = mask
            found += [step(9)]
    assert found[-1] == (3, 0)
    assert "copies of inputs 24 B" in str(explain(graphed))


def test_an_attribute_that_changes_with_each_call_is_copied(twins, device):
    plain, graphed, step = masked(twins, device)
    kept, found = [], []
    for at in range(8):
        kept.append(graphed.tables["angles"])
        for each in (plain, graphed):
            each.tables["angles"] = torch.full((64, 4), float(at), device=device)
        found.append(step(at))
    assert found[1:] == [(1, 64 * 4 * 4)] * 7, "what has moved between warm-up and capture is copied at once"


def test_an_attribute_in_training_is_copied(twins, device):
    """Its values at the forward count in the backward."""
    plain, graphed = twins(Masked(device))
    for at in range(5):
        x, place = torch.randn(1, 4, device=device), torch.tensor([at], device=device)
        for each in (plain, graphed):
            each.zero_grad()
            each(x, place).sum().backward()
            each.mask = each.mask * 0.5
        same(plain.linear.weight.grad, graphed.linear.weight.grad)
    assert replays(graphed) >= 4


def test_what_a_functional_collective_returns_in_python(twins, device):
    """PyTorch waits for it when an operator gets it, which a graph does not see."""
    plain, graphed = twins(lambda x: torch.tanh(x * 2) + 1)
    for _ in range(3):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(AsyncCollectiveTensor(x)))
    why = "input 'x' is a AsyncCollectiveTensor, not a plain tensor"
    (trace,) = explain(graphed).traces
    assert trace.fallbacks == {why: 3} and trace.fixes == {why: "pass what its wait() returns"}
