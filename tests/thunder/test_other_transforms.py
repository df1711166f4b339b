"""Thunder's other transforms, before or after this one in ``transforms=[...]``."""

from __future__ import annotations

import re

import pytest
import thunder
import torch
from support import replays, same, same_state
from thunder.dev_utils.debug_transform import DebugTransform
from thunder.dev_utils.nvtx_profile_transform import NvtxProfileTransform, nvtx_pop, nvtx_push
from thunder.dev_utils.profile_transform import ProfileTransform
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn

from thunder_cg import CudagraphError, explain

BOTH = pytest.mark.parametrize("place", ["before", "after"])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def compiled(transform, device, other, place):
    """Uncaptured with the other transform, and with both."""
    transforms = [other(), transform()] if place == "before" else [transform(), other()]
    return thunder.jit(model().to(device), transforms=[other()]), thunder.jit(model().to(device), transforms=transforms)


def train(plain, graphed, device, steps=5):
    for _ in range(steps):
        x = torch.randn(4, 8, device=device)
        for jmodel in (plain, graphed):
            jmodel.zero_grad()
            jmodel(x).sum().backward()
        same_state(plain, graphed)


@BOTH
@pytest.mark.nightly_after(1)
def test_debug(transform, device, place):
    """The callbacks see each call: each op where theirs comes first, each region and each eager op where ours does."""
    seen = []

    def note(symbol, *args, **kwargs):
        seen.append(symbol.sym.name)
        return "seen"

    plain, graphed = compiled(transform, device, lambda: DebugTransform(pre_callback=note, post_callback=note), place)
    found = []
    for _ in range(5):
        x = torch.randn(4, 8, device=device)
        for jmodel in (plain, graphed):
            seen.clear()
            jmodel.zero_grad()
            jmodel(x).sum().backward()
            found.append(seen.copy())
        same_state(plain, graphed)
    plains, graphs = found[::2], found[1::2]
    assert all(names == graphs[0] for names in graphs), "the callbacks do not run at each call"
    if place == "before":
        assert graphs == plains
        assert all(op["reason"] for trace in explain(graphed).to_dict()["traces"] for op in trace["ops"])
    else:
        assert replays(graphed) >= 8


@BOTH
@pytest.mark.nightly_after(1)
def test_nvtx_ranges(transform, device, place, monkeypatch):
    """Each range holds what it names, so that a profile can be read."""
    open_ranges = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_ranges.pop())
    plain, graphed = compiled(transform, device, NvtxProfileTransform, place)
    train(plain, graphed, device)
    assert not open_ranges
    if place == "after":
        assert replays(graphed) >= 8
    for trace in (thunder.last_traces(graphed)[-1], thunder.last_backward_traces(graphed)[-1]):
        symbols = [symbol for symbol in trace.bound_symbols if symbol.sym.name not in ("python_del", "unpack_trivial")]
        pushes = [i for i, symbol in enumerate(symbols) if symbol.sym.id == nvtx_push.id]
        assert pushes
        for i in pushes:
            named = set(re.findall(r"\bt\d+\b", symbols[i].args[0].partition("=")[0]))
            pop = next(j for j in range(i, len(symbols)) if symbols[j].sym.id == nvtx_pop.id)
            assert {proxy.name for symbol in symbols[i + 1 : pop] for proxy in symbol.flat_proxy_outs} >= named


@BOTH
@pytest.mark.nightly_after(1)
def test_profile(transform, device, place):
    plain, graphed = compiled(transform, device, lambda: ProfileTransform(warmup_runs=3, number_runs=1), place)
    train(plain, graphed, device)
    assert place == "before" or replays(graphed) >= 8


@BOTH
def test_thunders_own_graphs(transform, device, place):
    """Two graph transforms would capture each other's graphs."""
    theirs, ours = CUDAGraphTransform(), transform()
    transforms = [theirs, ours] if place == "before" else [ours, theirs]
    with pytest.raises(CudagraphError, match="drop CUDAGraphTransform"):
        thunder.jit(model().to(device), transforms=transforms)(torch.randn(4, 8, device=device))


def test_two_of_this_one(transform, device):
    with pytest.raises(CudagraphError, match="drop all but one"):
        thunder.jit(model().to(device), transforms=[transform(), transform()])(torch.randn(4, 8, device=device))


def test_functions_refuse_two_as_well(transform, device):
    """Thunder asks a transform about modules only before the first call."""
    for transforms in ([CUDAGraphTransform(), transform()], [transform(), CUDAGraphTransform()]):
        with pytest.raises(CudagraphError, match="drop CUDAGraphTransform"):
            thunder.jit(lambda x: torch.cos(torch.tanh(x)), transforms=transforms)(torch.randn(4, 4, device=device))


def test_the_same_transform_for_another_model(transform, device):
    """One transform in two lists is no second transform."""
    shared = transform()
    models = [thunder.jit(model().to(device), transforms=[shared]) for _ in range(2)]
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        same(*(jmodel(x).detach() for jmodel in models))
    assert all(replays(jmodel) for jmodel in models)
