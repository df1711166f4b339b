"""Each cause's advice, followed to the letter on a model that has the cause, leaves nothing eager."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor

from thunder_cg import explain
from thunder_cg.report import CauseReport

Function = Callable[[torch.Tensor], torch.Tensor]

executor = OperatorExecutor("advice_ex")
unknown = executor.register_operator("unknown", meta=lambda x: TensorProxy(like=x), fn=torch.sin)
OUTSIDE = torch.tensor([1.0, 2.0])


def around(middle: Function) -> Function:
    """The function with enough around it for a region before and one after."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(middle(torch.tanh(torch.relu(x) * 2))) * 3)

    return whole


def causes(fn: Function, transform: Callable[..., Any], jit: dict[str, Any]) -> tuple[CauseReport, ...]:
    executors = [executor, *thunder.get_default_executors()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "symbolic values" are experimental
        compiled = thunder.jit(around(fn), executors=executors, transforms=[transform], **jit)
        compiled(torch.ones(2))
        return explain(compiled).causes


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def makes(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("fn", "jit", "options", "advice", "better", "better_jit"),
    [
        (reads, {}, {}, "keep the value on the device as a 0-dim tensor", lambda x: x * x.sum(), {}),
        (makes, {}, {}, "make the tensor once, outside of the compiled function", lambda x: x + OUTSIDE, {}),
        (makes, {}, {}, "or with torch.full or torch.arange", lambda x: x + torch.arange(1, 3, dtype=x.dtype), {}),
        (unknown, {}, {}, "the same kernels for the same shapes, cudagraph_transform(allow=", None, {}),
        (torch.sin, {}, {"deny": ["torch.sin"]}, "remove 'torch.sin' from deny=", None, {}),
        (
            torch.sin,
            {"cache": "symbolic values"},
            {},
            'compile with the default cache="constant values"',
            torch.sin,
            {},
        ),
    ],
    ids=["item", "tensor", "tensor-full", "unknown", "denied", "symbolic"],
)
def test_advice(transform, backend, fn, jit, options, advice, better, better_jit):
    if backend == "cuda":
        pytest.skip("constants of this file are on the CPU")
    found = causes(fn, transform(**options), jit)
    assert any(advice in cause.fix for cause in found), found
    if better is not None:
        assert causes(better, transform(), better_jit) == ()
        return
    allowed = re.findall(r"allow=\['([^']+)'\]", found[0].fix)  # else a name in deny= is removed
    assert causes(fn, transform(allow=allowed), jit) == ()
    assert len(found) == 1 and found[0].added_regions == 1
