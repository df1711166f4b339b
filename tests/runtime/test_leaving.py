"""Results that leave before the end of their region."""

from __future__ import annotations

import pytest
import torch

from thunder_cg.runtime.leaving import Departed, Leaving

CPU = torch.device("cpu")


def test_they_wait_until_they_are_worth_a_copy():
    sent = []
    leave = Leaving(CPU, lambda tensors: sent.append(list(tensors)) or [t.clone() for t in tensors], 100)
    a, b, c, d = (torch.full((10,), float(i)) for i in range(4))  # 40 bytes each
    results = [leave(t) for t in (a, b, c, d)]
    assert len(sent) == 1 and all(x is y for x, y in zip(sent[0], (a, b, c)))
    settled = leave.settle([results[2], results[3], results[0], results[1]])
    assert settled[1] is d
    assert [(r.order, r.tensor[0].item()) for r in settled if isinstance(r, Departed)] == [(2, 2.0), (0, 0.0), (1, 1.0)]


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
def test_only_whole_blocks_of_memory_go(tensor):
    leave = Leaving(CPU, lambda tensors: pytest.fail("it went"), 0)
    assert leave(tensor) is tensor


def test_only_what_is_admitted_goes():
    leave = Leaving(CPU, lambda tensors: pytest.fail("it went"), 0, lambda tensor: False)
    assert leave(tensor := torch.zeros(2)) is tensor
