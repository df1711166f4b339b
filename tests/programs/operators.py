"""Operators that a user brings: they keep, write, return, draw, count and raise as no rule can know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import thunder
import torch
from thunder.core.transforms import get_grad, put_grad
from thunder.executors.custom_op_ex import custom_op_ex
from thunder.torch.custom_op import _register_custom_op


class Flaky(Exception):
    """What ``ops.flaky`` raises while it is told to."""


class Effects:
    """What the operators did outside of their results, in the world whose turn it is."""

    kept: list[torch.Tensor]
    broken: bool

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.kept, self.broken = [], False


class _Current:
    effects = Effects()


current = _Current()


def _keep(x: torch.Tensor) -> torch.Tensor:
    current.effects.kept.append(x)
    return x * 0.5


def _write(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(0.5).clone()


def _window(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _note(x: torch.Tensor) -> torch.Tensor:
    current.effects.kept.append(x.sum())
    return x + 1


def _draw(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, device=x.device)


def _flaky(x: torch.Tensor) -> torch.Tensor:
    if current.effects.broken:
        raise Flaky
    return x * 3


_functions = {"keep": _keep, "write": _write, "window": _window, "note": _note, "draw": _draw, "flaky": _flaky}


@torch.library.custom_op("programs::scale", mutates_args=())
def _scale(a: torch.Tensor, factor: float) -> torch.Tensor:
    return a * factor


@torch.library.register_fake("programs::scale")
def _(a: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(a)


def _scale_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    a, _ = inputs
    ctx.save_for_backward(a)


def _scale_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (a,) = ctx.saved_tensors
    return grad * torch.sign(a), None


torch.library.register_autograd("programs::scale", _scale_backward, setup_context=_scale_setup_context)


@torch.library.custom_op("programs::product", mutates_args=())
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        raise ValueError("one shape, please")
    return a * b


@torch.library.register_fake("programs::product")
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def _product_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    a, b = inputs
    ctx.save_for_backward(a, b)


def _product_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    return torch.ops.programs.product(grad, b), torch.ops.programs.product(grad, a)


torch.library.register_autograd("programs::product", _product_backward, setup_context=_product_setup_context)


class Operators:
    """The operators, as PyTorch calls them and as Thunder does."""

    def __init__(self) -> None:
        library = torch.ops.programs
        self.eager = {"ops": SimpleNamespace(**_functions), "library": library}
        self._own = thunder.extend.OperatorExecutor("random_programs")
        thunder.extend.register_executor(self._own)
        symbols = {name: self._symbol(name) for name in _functions}
        for op in (_scale, _product):
            _register_custom_op(op)
        self.traced = {"ops": SimpleNamespace(**symbols), "library": library}
        self.executors = [self._own, custom_op_ex, *thunder.get_default_executors()]

    def _symbol(self, name: str) -> Any:
        like = thunder.core.proxies.TensorProxy
        symbol = self._own.register_operator(name, fn=_functions[name], meta=lambda x: like(like=x))

        def with_gradient(x: Any) -> Any:
            y = symbol(x)
            put_grad(x, get_grad(y) * 0.5)
            return y

        self._own.register_implementation(symbol, symbol, grad_transform=with_gradient)
        return symbol

    def close(self) -> None:
        thunder.extend.deregister_executor(self._own)
