"""`bisect` names operators that are wrong in a graph, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import thunder
import torch
from models import Linear
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad
from torch import nn

from thunder_cg import NotCompiledError, bisect, cudagraph_transform
from thunder_cg.diagnose import bisection
from thunder_cg.diagnose.compiling import transform_of
from thunder_cg.verify import ReplayVerifier

HERE = "test_bisection.py"


class Frozen:
    """Operators that read what a graph freezes: a counter of their calls, and a factor."""

    def __init__(self) -> None:
        self.executor = thunder.extend.OperatorExecutor("frozen")
        thunder.extend.register_executor(self.executor)
        self.counts, self.factor = {"counted": 0, "numbered": 0}, 2.0
        self.ops = {name: self.register(name, self.counter(name)) for name in self.counts}
        self.ops["scaled"] = self.register("scaled", lambda x: x * self.factor)

    def counter(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def count(x: torch.Tensor) -> torch.Tensor:
            self.counts[name] += 1
            return x * self.counts[name]

        return count

    def register(self, name: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        op = self.executor.register_operator(name, fn=fn, meta=lambda x: TensorProxy(like=x))

        def gradient(x: Any) -> Any:
            y = op(x)
            put_grad(x, get_grad(y) * 2)
            return y

        self.executor.register_implementation(op, op, grad_transform=gradient)
        return op

    def jit(self, fn: Any) -> Any:
        transforms = [cudagraph_transform(backend="tape", allow=[*self.ops])]
        return thunder.jit(fn, transforms=transforms, executors=[self.executor, *thunder.get_default_executors()])


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    made = Frozen()
    yield made
    thunder.extend.deregister_executor(made.executor)


class Net(nn.Module):
    def __init__(self, *ops: Any) -> None:
        super().__init__()
        self.ops, self.layer = ops, Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        for op in self.ops:
            x = torch.cos(op(torch.sin(x))) * 2
        self.calls.add_(1)
        return nn.functional.dropout(self.layer(x), 0.5) + self.calls


@pytest.mark.nightly
def test_each_wrong_operator_is_named(frozen: Frozen) -> None:
    model = Net(frozen.ops["counted"], torch.tanh, frozen.ops["numbered"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradient = model.layer.weight.grad = torch.ones(4, 4)
    x, generator = torch.randn(3, 4), torch.get_rng_state()
    jmodel = frozen.jit(model)
    found = bisect(jmodel, x)
    assert found and [each.op for each in found.culprits] == ["counted", "numbered"] and found.other == ""
    assert all(f"{HERE}:" in each.where and each.region.startswith("CUDAGraph") for each in found.culprits)
    said = str(found).splitlines()
    assert said[0].startswith(f"counted at {HERE}:") and "elements differ" in said[0]
    assert said[-1] == "To change it: deny=['counted', 'numbered'] keeps the rest captured."
    assert found.verified > 0 and said[-2] == f"Without these, all {found.verified} replays agree with eager runs."
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.layer.weight.grad is gradient and model.layer.bias.grad is None
    assert torch.equal(torch.get_rng_state(), generator) and thunder.cache_misses(jmodel) == 0


def test_halves_are_denied_where_no_value_tells_the_operator(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayVerifier, "_first_op", lambda self, trial, wrong: None)
    wrong = frozen.ops["counted"]
    found = bisect(frozen.jit(lambda x: torch.cos(torch.tanh(wrong(torch.sin(x)).exp()))), torch.randn(3))
    assert [each.op for each in found.culprits] == ["counted"] and f"at {HERE}:" in found.culprits[0].where


def test_what_has_changed_since_the_capture(frozen: Frozen) -> None:
    op = frozen.ops["scaled"]
    jfn, x = frozen.jit(lambda x: torch.cos(op(torch.sin(x)))), torch.randn(3)
    for _ in range(3):
        jfn(x)
    right = bisect(jfn, x)
    assert not right and str(right) == f"All {right.verified} replays agree with eager runs." and right.verified > 0
    frozen.factor = 3.0
    found = bisect(jfn, x)
    assert found and not found.culprits
    assert str(found).startswith("New graphs are right, and those captured before are not (value 0 of a call: 3 of 3")


def test_graphs_are_not_blamed_for_an_eager_operator_that_differs_from_run_to_run(frozen: Frozen) -> None:
    """Where nothing is captured, nothing was compared either."""
    counted = frozen.ops["counted"]
    for fn, options, verified in (
        (lambda x: torch.cos(counted(torch.sin(torch.cos(x)))) * 2, {"deny": ["counted"]}, True),
        (lambda x: counted(x), {}, False),
    ):
        executors = [frozen.executor, *thunder.get_default_executors()]
        jfn = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape", **options)], executors=executors)
        found = bisect(jfn, torch.randn(3))
        assert not found and bool(found.verified) == verified
        assert str(found).startswith("All " if verified else "No replay was compared with an eager run: print(thunder")
    found = bisect(frozen.jit(counted), torch.randn(3))
    assert [each.op for each in found.culprits] == ["counted"] and "all 0 replays" not in str(found)


def test_inputs_share_memory_as_they_do_in_the_call(frozen: Frozen) -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.cos(torch.sin(y))

    x = torch.ones(2, 2)
    y = x.view(4)
    jfn, seen = frozen.jit(writes), []
    assert not bisect(jfn, x, y) and torch.equal(x, torch.ones(2, 2))
    trials = bisection._Trials(jfn, transform_of(jfn), ((x, y), {}))
    with trials.state_kept():
        trials._call(lambda *inputs: seen.extend(inputs) or x)
    assert seen[1].data_ptr() == seen[0].data_ptr() != x.data_ptr() and seen[1].shape == (4,)


def test_what_it_cannot_take() -> None:
    with pytest.raises(NotCompiledError, match=r"bisect\(function\): thunder.jit did not make this"):
        bisect(lambda x: x, torch.ones(1))
