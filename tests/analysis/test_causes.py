"""root_causes: which operator makes what eager, and what the plan would save without it."""

from __future__ import annotations

import pytest
import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.causes import refuse_eager_ops, root_causes
from thunder_cg.analysis.ops import Ops
from thunder_cg.errors import CaptureError


def causes_of(trace):
    """Each root cause of a hand-built trace: name, place, its ops, and the two costs."""
    found = root_causes(trace.done(), trace.plan(), Aliasing.of(trace.done()))
    return [(each.name, each.place, each.ops, each.eager_ops, each.added_regions) for each in found]


def test_what_computes_with_a_number_is_eager_because_of_what_reads_it(trace):
    t = trace().add("a b", "x").add("x b", "y").item("y", "n0").op("mul", "y n0", "z").op("mul", "b n0", "w")
    t.add("z b", "u").add("u w", "v").add("v b", "q").returns("q")
    assert causes_of(t) == [("Tensor.item", "at model.py:7", (2, 3, 4), 3, 1)]


def test_ops_that_are_alone_between_eager_ones_count_for_their_neighbour(trace):
    t = trace().add("a b", "x").mine("x", "y").add("y b", "z").mine("z", "w").add("w b", "v").add("v b", "u")
    t.returns("u")
    assert causes_of(t) == [("my_op", "at model.py:9", (1, 3), 4, 0)]  # both are one line


def test_an_op_elsewhere_is_the_cause_of_what_follows_there(trace):
    t = trace().add("a b", "x").add("x b", "y").op("to", "y", "c0", name="Tensor.to", line="model.py:3")
    t.op("relu", "c0", "c1", line="model.py:4").op("tanh", "c1", "c2", line="model.py:5").returns("c2")
    ((name, place, ops, eager, _),) = causes_of(t)
    assert (name, place, ops, eager) == ("Tensor.to", "at model.py:3", (2, 3, 4), 3)


def test_what_is_alone_before_a_move_is_not_its_cause(trace):
    t = trace().op("relu", "a", "x", line="model.py:2").op("to", "x", "c0", name="Tensor.to", line="model.py:3")
    t.op("tanh", "c0", "c1", line="model.py:4").returns("c1")
    ((name, place, ops, eager, _),) = causes_of(t)
    assert (name, place, ops, eager) == ("Tensor.to", "at model.py:3", (1, 2), 3)


def test_a_trace_too_small_for_a_region_is_its_own_cause(trace):
    t = trace().op("relu", "a", "x", name="torch.relu", line="model.py:2").returns("x")
    assert causes_of(t) == [("torch.relu", "at model.py:2", (0,), 1, 0)]
    (verdict, _) = t.plan().verdicts
    assert "all that the trace runs on its device: one kernel" in verdict.detail and "nothing to gain" in verdict.fix
    assert causes_of(trace().add("a b", "x").add("x b", "y").returns("y")) == []


def test_a_number_of_the_forward_is_the_cause_in_the_backward(traces_of, on_cpu):
    def scaled(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) + 1
        return torch.tanh(y * y.sum().item()) + 1

    def computed(x: torch.Tensor) -> torch.Tensor:  # the backward gets what is computed with the number
        number = (torch.tanh(x) + 1).sum().item()
        return torch.tanh(torch.tanh(x) * (1 + 2 * number)) + 1

    forward, backward = traces_of(computed, torch.ones(3, requires_grad=True))
    backward = Ops(backward.ops, backward.values, backward.args, forward.near, {**forward.made_by, **backward.made_by})
    (found,) = root_causes(backward, on_cpu(backward), Aliasing.of(backward))
    assert found.name == "Tensor.item" and found.source == "number = (torch.tanh(x) + 1).sum().item()"

    forward, backward = traces_of(scaled, torch.ones(3, requires_grad=True))
    backward = Ops(backward.ops, backward.values, backward.args, forward.near, {**forward.made_by, **backward.made_by})
    for ops in (forward, backward):
        found = root_causes(ops, on_cpu(ops), Aliasing.of(ops))
        assert [each.name for each in found] == ["Tensor.item"] and "test_causes.py:" in found[0].place
        assert found[0].source == "return torch.tanh(y * y.sum().item()) + 1"
    assert found[0].reason == "a number known only at run time"  # as the backward has not the operator itself


def test_what_the_forward_captures_is_no_cause_in_the_backward(traces_of, on_cpu):
    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(x).cos().cpu()) * 2

    forward, backward = traces_of(moved, torch.ones(3, requires_grad=True))
    backward = Ops(backward.ops, backward.values, backward.args, forward.near, {**forward.made_by, **backward.made_by})
    found = root_causes(backward, on_cpu(backward), Aliasing.of(backward))
    assert [(each.name, each.reason) for each in found] == [("cpu_vjp", "moves between devices")]


def test_strict_ops_names_the_root_cause(trace):
    t = trace().add("a b", "x").add("x b", "y").item("y", "n0").op("mul", "y n0", "z").add("z b", "u").returns("u")
    said = r"Tensor.item at model.py:7: runs eagerly, the cause of 3 of 3 eager ops: .*; .*or drop strict=.ops."
    with pytest.raises(CaptureError, match=said):
        refuse_eager_ops(t.done(), t.plan(), Aliasing.of(t.done()))
    whole = trace().add("a b", "x").add("x b", "y").returns("y")
    refuse_eager_ops(whole.done(), whole.plan(), Aliasing.of(whole.done()))
