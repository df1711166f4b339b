"""The executors of operators that have a derivative of their own, and how those implement functions of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from thunder_cg.compat import thunder as compat

executor = compat.OperatorExecutor("derivatives")
compat.register_executor(executor)
# Of operators that are fast only where Inductor fuses them.
fused_executor = compat.OperatorExecutor("fused_derivatives")
compat.register_executor(fused_executor)
HALF = (torch.float16, torch.bfloat16)  # types of 16 bits


def register(
    executor: compat.OperatorExecutor,
    function: Callable[..., Any],
    implementation: Callable[..., Any],
    checker: Callable[..., bool],
) -> None:
    """Has the executor implement a function of PyTorch.

    Args:
        implementation: takes the function's arguments, and whether it derives the result, too.
        checker: takes the same arguments by name, defaults included, and says whether the implementation is for them.
    """
    signature = inspect.signature(implementation)
    symbol = compat.symbols_of_functions()[function]

    def check(*args: Any, **kwargs: Any) -> bool:
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        return checker(**bound.arguments)

    def derive(*args: Any, **kwargs: Any) -> Any:
        return implementation(*compat.constants(args), **compat.constants(kwargs), derives=True)

    derive.__signature__ = inspect.signature(symbol.meta)  # type: ignore[attr-defined]  # of which Thunder takes names
    executor.register_implementation(
        symbol, checker=check, execution_transform=partial(implementation, derives=False), grad_transform=derive
    )


def like(*positions: int) -> Callable[..., Any]:
    """The meta function of an operator whose result is like the argument at a position, or results like several."""

    def meta(*args: Any) -> Any:
        results = tuple(compat.TensorProxy(like=args[position]) for position in positions)
        return results if len(results) > 1 else results[0]

    return meta


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that PyTorch computes with: float32 for types of 16 bits."""
    return tensor.float() if tensor.dtype in HALF else tensor
