"""A call that runs eagerly has no more memory at a time than one of uncaptured Thunder."""

from __future__ import annotations

import weakref

import pytest
import thunder
import torch
from models import mlp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_cg import cudagraph_transform
from thunder_cg.runtime.skip_reasons import held_back


class Peak(TorchDispatchMode):
    """Notes how many bytes what operators have made takes at most."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0
        self._made = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        self._made += [weakref.ref(each) for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
        self._made = [each for each in self._made if each() is not None]
        alive = [tensor.untyped_storage() for each in self._made if (tensor := each()) is not None]
        self.nbytes = max(self.nbytes, sum({s.data_ptr(): s.nbytes() for s in alive}.values()))
        return results


def peak(model, compiled):
    x = torch.randn(32, 32)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with Peak() as peak, held_back(True):
            compiled(x).square().mean().backward()
    return peak.nbytes


@pytest.mark.parametrize("deny", [[], ["relu"]])
def test_a_backward_frees_what_it_has_read(deny):
    model = mlp(6, 32)
    graphed = thunder.jit(model, transforms=[cudagraph_transform(backend="tape", deny=deny)])
    assert peak(model, graphed) <= peak(model, thunder.jit(model)) + 1024  # the loss and such
