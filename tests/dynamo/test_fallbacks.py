"""Every fallback that stays in Thunder has PyTorch's values and gradients, as far as PyTorch's own samples tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import thunder
import torch
from thunder.dynamo.utils import auto_register_ops

from thunder_cg import explain, thunderfx
from thunder_cg.compat.operators import operator_table
from thunder_cg.compat.tensors import tree_leaves, tree_map
from thunder_cg.dynamo.fallbacks import objection_to_operator

_OFTEN = ("addmm", "new_ones", "detach", "min", "histc", "sinc", "addcmul", "softplus")


def fallbacks() -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    for info in operator_table():
        for function in {f for f in (info.op, info.method_variant) if f in auto_register_ops}:
            yield f"{info.name}.{info.variant_test_name}", info, function


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def outcome(fn: Callable[..., Any], args: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """The results, the gradients of the arguments, and which results have one."""
    torch.manual_seed(0)
    copies = tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if is_plain(t) else t, args)
    found = fn(*copies)
    results = tensors(found) or tree_leaves(found)
    ends = [end for end in tensors(results) if end.requires_grad]
    leaves = [leaf for leaf in tensors(copies) if leaf.requires_grad]
    gradients = torch.autograd.grad(ends, leaves, [*map(torch.ones_like, ends)], allow_unused=True) if ends else ()
    return results, list(gradients), [end.requires_grad for end in tensors(results)]


def is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def equal(one: Any, other: Any) -> bool:
    if not is_plain(one) or not is_plain(other):  # a gradient that is zero may also be None
        given = [value for value in (one, other) if is_plain(value)]
        return not given[0].any() if given else type(one) is type(other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    # Some solvers compute the same values by another formula where a gradient is wanted.
    return alike and torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)


def problems(info: Any, function: Callable[..., Any], samples: int) -> set[str]:
    """What differs from PyTorch. A call that Thunder refuses, the splitter gives to Inductor."""
    dtype = torch.float32 if torch.float32 in info.dtypes else sorted(info.dtypes, key=str)[0]
    differentiable = info.supports_autograd and dtype.is_floating_point
    found = set()
    for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        args = (sample.input, *sample.args)
        in_lists = [leaf for arg in args if isinstance(arg, (list, tuple)) for leaf in tensors(arg)]
        if number >= samples or any(leaf.requires_grad for leaf in in_lists):
            continue
        call = lambda *args, kwargs=sample.kwargs: function(*args, **kwargs)  # noqa: E731
        try:
            expected = outcome(call, args)
        except (RuntimeError, TypeError):
            continue
        try:
            results = outcome(thunder.jit(call), args)
        except (NotImplementedError, RuntimeError, ValueError, AssertionError, TypeError, KeyError, AttributeError):
            continue
        for what, ours, theirs in zip(("values", "gradients"), results, expected):
            if len(ours) != len(theirs) or not all(map(equal, ours, theirs)):
                found.add(what)
        if results[2] != expected[2]:
            found.add("which results have a gradient")
    return found


@pytest.mark.filterwarnings("ignore")  # of what is deprecated
@pytest.mark.parametrize(
    ("names", "samples"),
    [(_OFTEN, 3), pytest.param(None, 6, marks=pytest.mark.nightly)],
    ids=["that models use", "all"],
)
def test_fallbacks_have_the_values_and_gradients_of_pytorch(names, samples):
    wrong = {}
    checked = 0
    for name, info, function in fallbacks():
        if name == "new_empty.":  # its values are not defined
            continue
        is_left_to_inductor = objection_to_operator(function, with_gradient=True) is not None
        if is_left_to_inductor or (names is not None and name.split(".")[0] not in names):
            continue
        checked += 1
        if found := problems(info, function, samples):
            wrong[name] = found
    assert checked >= (6 if names is not None else 280)
    assert not wrong, f"Thunder's fallbacks differ from PyTorch: {wrong}; add them to dynamo/fallbacks.py"


_TABLE = np.linspace(0, 1, 8).astype(np.float32)


@pytest.mark.parametrize(
    ("operator", "name"),
    [(lambda: torch.tensor(_TABLE), "torch.tensor"), (lambda: torch.from_numpy(_TABLE)[:], "torch.from_numpy")],
    ids=["tensor", "from_numpy"],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_tensor_of_an_array_is_to_be_made_once(operator, name):
    compiled = thunderfx(lambda x: torch.tanh(x) * operator(), backend="tape")
    torch.testing.assert_close(compiled(torch.ones(2, 8)), torch.ones(2, 8).tanh() * torch.from_numpy(_TABLE))
    report = explain(compiled)
    (outside,) = [*report.outside, *report.joined]
    assert outside.operator == name
    assert outside.reason == "it makes a tensor of an array of NumPy's in each call, which Thunder does not trace"
    assert outside.fix == "make the array a tensor or a buffer once, outside of what is compiled"
