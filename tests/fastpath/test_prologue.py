"""The one check of all parameters refuses whatever Thunder's own checks refuse, and nothing else."""

from __future__ import annotations

import pytest
import thunder
import torch
from models import mlp
from support import same
from torch import nn

from thunder_cg.fastpath.prologue import Metadata, ParameterCheck

METADATA = Metadata((2, 3), "cpu", torch.float32, False)


def test_it_shows_in_the_prologue(transform, device):
    jfn = thunder.jit(mlp().to(device), transforms=[transform()])
    jfn(torch.randn(4, 16, device=device))
    prologue = str(thunder.last_prologue_traces(jfn)[-1])
    assert prologue.count("cudagraph_check_parameters(") == 1
    assert prologue.count("= check_tensor_metadata(") + prologue.count("\n  check_tensor_metadata(") == 1  # the input's


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, requires_grad=True), None, 3],
    ids=["shape", "dtype", "requires_grad", "none", "number"],
)
@pytest.mark.parametrize("position", [0, 1])
def test_it_refuses(wrong, position):
    check = ParameterCheck((METADATA, METADATA))
    good = [torch.zeros(2, 3), torch.ones(2, 3)]
    for _ in range(3):
        check(*good)
    bad = list(good)
    bad[position] = wrong
    for _ in range(2):
        with pytest.raises((AssertionError, TypeError)):
            check(*bad)
        check(*good)


def test_it_admits_what_thunder_admits():
    check = ParameterCheck((METADATA, METADATA))
    for _ in range(2):
        check(torch.zeros(2, 3), torch.zeros(2, 3))
        check(torch.zeros(3, 2).t(), torch.zeros(1, 3).expand(2, 3))
        check(tied := torch.zeros(2, 3), tied)
        check(nn.Parameter(torch.zeros(2, 3), requires_grad=False), torch.zeros(2, 3))
        with torch.inference_mode():
            check(torch.zeros(2, 3), torch.zeros(2, 3))


def test_every_change_compiles_anew(twins, device):
    plain, graphed = twins(mlp())
    x = torch.randn(4, 16, device=device)
    changes = [
        lambda m: m.get_parameter("0.weight").requires_grad_(False),
        lambda m: m.to(torch.float64),
        lambda m: m.get_parameter("2.weight").requires_grad_(False),
        lambda m: m.to(torch.float32),
    ]
    for change in [lambda m: None, *changes]:
        for model in (plain, graphed):
            change(model)
        for _ in range(3):
            at = x.to(next(iter(graphed.parameters())).dtype)
            same(plain(at).detach(), graphed(at).detach())
        assert thunder.cache_misses(plain) == thunder.cache_misses(graphed)
