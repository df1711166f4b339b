"""Results that are copied out before the end of their region."""

from __future__ import annotations

import weakref

import pytest
import thunder
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_cg import cudagraph_transform
from thunder_cg.runtime import tape
from thunder_cg.runtime.early_outputs import CopiedEarly, EarlyCopier

CPU = torch.device("cpu")


def test_they_wait_until_they_are_worth_a_copy():
    sent = []
    copier = EarlyCopier(CPU, lambda tensors: sent.append(list(tensors)) or [t.clone() for t in tensors], 100)
    a, b, c, d = (torch.full((10,), float(i)) for i in range(4))  # 40 bytes each
    results = [copier(t) for t in (a, b, c, d)]
    assert len(sent) == 1 and all(x is y for x, y in zip(sent[0], (a, b, c)))
    settled = copier.finish([results[2], results[3], results[0], results[1]])
    assert settled[1] is d
    assert [(r.order, r.tensor[0].item()) for r in settled if isinstance(r, CopiedEarly)] == [
        (2, 2.0),
        (0, 0.0),
        (1, 1.0),
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        None,
        torch.zeros(0),
        torch.zeros(4)[::2],
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch._efficientzerotensor((2,)),
    ],
    ids=["none", "empty", "gaps", "conjugate", "elsewhere", "sparse", "zeros without memory"],
)
def test_only_whole_blocks_of_memory_are_copied_early(tensor):
    copier = EarlyCopier(CPU, lambda tensors: pytest.fail("it was copied"), 0)
    assert copier(tensor) is tensor


def test_only_what_may_be_copied_is():
    copier = EarlyCopier(CPU, lambda tensors: pytest.fail("it was copied"), 0, lambda tensor: False)
    assert copier(tensor := torch.zeros(2)) is tensor


def test_what_cannot_be_copied_stays():
    calls = []

    def send(tensors):
        calls.append(len(tensors))
        raise torch.OutOfMemoryError("no")

    copier = EarlyCopier(CPU, send, 8, must=False)
    tensors = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    results = [copier(t) for t in tensors]
    assert calls == [2] and all(a is b for a, b in zip(copier.finish(results), tensors))
    with pytest.raises(torch.OutOfMemoryError):
        EarlyCopier(CPU, send, 0)(torch.zeros(1))


class Alive(TorchDispatchMode):
    """The peak of the bytes that operators' results occupy."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._end, storage.nbytes())
        return made

    def _end(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize("early", [True, False])
def test_gradients_are_not_all_in_the_arena_at_once(monkeypatch, early):
    """The memory of a backward's arena, with and without results that are copied out early. With a budget, they are."""
    most = {}
    early_copier = tape.EarlyCopier

    def warm_up(self, fn, args, workspaces_inside):
        outside = []

        def send(tensors):
            with _disable_current_modes():
                outside.extend(t.clone() for t in tensors)
                return outside[-len(tensors) :]

        copier = early_copier(self._device, send, 0, lambda tensor: early)
        with Alive() as alive:
            made = copier.finish(fn(*args, copier))
        most["backward" if most else "forward"] = alive.most
        return made

    monkeypatch.setattr(tape.TapePool, "warm_up", warm_up)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape", memory_budget=2**30)])
    jmodel(torch.randn(2, 64)).sum().backward()
    assert (most["backward"] < nbytes / 4) if early else (most["backward"] > nbytes)
