"""PyTorch's derivatives where Thunder (0.2.6) has others: they are NaN, or other ones where values are equal.

Thunder writes these operators out and differentiates each part. The exponential of a large number is infinite, and zero
times infinity is NaN: so are gradients of a sigmoid below -88. At a bound of ``clamp`` or beside an equal maximum, a
comparison chooses another side. The operator itself stays, and who runs it: this executor has derivatives alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat

_where = compat.torch_where
_SELU = 1.6732632423543772, 1.0507009873554805  # alpha and scale


class _Derivatives(compat.OperatorExecutor):
    """Takes operators where Thunder asks who differentiates them, and not where it asks who runs them."""

    def can_execute(self, bsym: compat.BoundSymbol) -> bool:
        return False

    def can_execute_or_fuse(self, bsym: compat.BoundSymbol) -> bool:
        return bool(super().can_execute(bsym))


executor = _Derivatives("torchs_derivatives")
compat.register_executor(executor)


def _register(operator: Any, gradients: Callable[..., Any], fits: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Has the operator differentiated so.

    Args:
        operator: a function of PyTorch's, or one of Thunder's prims.
        gradients: gets the gradient of the result, or of the first one, the result, and the arguments, and returns the
            gradients of the first arguments. What is no tensor gets none.
        fits: gets the arguments, and says whether `gradients` is for them.
    """
    symbol = compat.symbols_of_functions().get(operator, operator)

    @compat.in_torchs_language
    def derive(*args: Any, **kwargs: Any) -> Any:
        result = symbol(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        found = gradients(compat.prims.get_grad(first), result, *args, **kwargs)
        for arg, gradient in zip(args, found if isinstance(found, tuple) else (found,)):
            if isinstance(arg, compat.TensorProxy) and gradient is not None:
                compat.prims.put_grad(arg, compat.maybe_convert_to_dtype(_summed(gradient, arg), arg.dtype))
        return result

    def check(a: Any, *args: Any, **kwargs: Any) -> bool:
        is_float = isinstance(a, compat.TensorProxy) and compat.is_float_dtype(a.dtype)
        return is_float and fits(a, *args, **kwargs)

    executor.register_implementation(symbol, execution_transform=derive, grad_transform=derive, checker=check)


def _summed(gradient: Any, arg: Any) -> Any:
    """The gradient of an argument that was broadcast."""
    more = gradient.ndim - arg.ndim
    over = [i for i, size in enumerate(gradient.shape) if i < more or arg.shape[i - more] != size]
    return gradient.sum(over).reshape(arg.shape) if over else gradient


def _not_in_place(*args: Any, inplace: bool = False, **_: Any) -> bool:
    return not inplace and args[-1] is not True  # the last argument by position


def _clamp(gradient: Any, result: Any, a: Any, min: Any = None, max: Any = None) -> Any:
    if min is None:
        return _where(a <= max, gradient, 0.0), None, _where(a > max, gradient, 0.0)
    if max is None:
        return _where(a >= min, gradient, 0.0), _where(a < min, gradient, 0.0)
    of_min = _where((a < min) & (min < max), gradient, 0.0) if isinstance(min, compat.TensorProxy) else None
    of_max = _where((a > max) | (max < min), gradient, 0.0) if isinstance(max, compat.TensorProxy) else None
    return _where((a >= min) & (a <= max), gradient, 0.0), of_min, of_max


def _hardtanh(
    gradient: Any, result: Any, a: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    """Other than that of ``clamp``, it is zero at the bounds."""
    return _where((a > min_val) & (a < max_val), gradient, 0.0)


def _relu6(gradient: Any, result: Any, a: Any, inplace: bool = False) -> Any:
    return _hardtanh(gradient, result, a, 0.0, 6.0)


def _hardsigmoid(gradient: Any, result: Any, a: Any, inplace: bool = False) -> Any:
    return _where((a > -3.0) & (a < 3.0), gradient / 6.0, 0.0)


def _is_by_position(a: Any, *bounds: Any, **named: Any) -> bool:
    """Whether all bounds that may have a gradient are."""
    return not any(isinstance(bound, compat.TensorProxy) for bound in named.values())


def _sigmoid(gradient: Any, result: Any, a: Any) -> Any:
    return gradient * (1 - result) * result


def _elu(gradient: Any, result: Any, a: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return _exponential(gradient, a, alpha, 1.0, 1.0)


def _celu(gradient: Any, result: Any, a: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return _exponential(gradient, a, alpha, 1.0, 1.0 / alpha)


def _selu(gradient: Any, result: Any, a: Any, inplace: bool = False) -> Any:
    return _exponential(gradient, a, *_SELU, 1.0)


def _exponential(gradient: Any, a: Any, alpha: float, scale: float, inner: float) -> Any:
    """That of ``scale * a`` above zero, and of ``scale * alpha * (exp(a * inner) - 1)`` below."""
    below = (_where(a <= 0, a, 0.0) * inner).exp()  # of no large number
    return _where(a <= 0, gradient * (inner * alpha * scale) * below, gradient * scale)


def _mish(gradient: Any, result: Any, a: Any, inplace: bool = False) -> Any:
    bent = a.exp().log1p().tanh()
    return gradient * (bent + a * a.sigmoid() * (1 - bent * bent))


def _relu(gradient: Any, result: Any, a: Any, inplace: bool = False) -> Any:
    return _where(result <= 0, 0.0, gradient)  # that of a NaN stays


def _max(gradient: Any, result: Any, a: Any, dim: int, keepdim: bool = False) -> Any:
    indices = result[1]
    if not keepdim:
        gradient, indices = gradient.unsqueeze(dim), indices.unsqueeze(dim)
    places = [1] * a.ndim
    places[dim] = a.shape[dim]
    numbers = compat.symbols_of_functions()[torch.arange](a.shape[dim], device=a.device).reshape(places)
    return _where(numbers == indices, gradient, 0.0)


def _is_along_one(a: Any, dim: Any = None, keepdim: bool = False) -> bool:
    return type(dim) is int and a.ndim > 0 and a.numel() > 0


def _prod(gradient: Any, result: Any, a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axes = [*range(a.ndim)] if dim is None else [dim % a.ndim]
    if not keepdim:
        shape = [1 if i in axes else size for i, size in enumerate(a.shape)]
        gradient, result = gradient.reshape(shape), result.reshape(shape)
    is_zero = a == 0
    zeros = is_zero.sum(axes, keepdim=True)
    others = _where(is_zero, 1.0, a)
    product = others
    for axis in axes:
        product = product.prod(axis).unsqueeze(axis)  # Inductor cannot compile Thunder's with keepdim
    return gradient * _where(is_zero, _where(zeros == 1, product, 0.0), result / others)


def _is_product(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> bool:
    return dtype is None and (dim is None or type(dim) is int) and a.ndim > 0


def _pow(gradient: Any, result: Any, a: Any, b: Any) -> Any:
    if isinstance(b, (int, float)):  # 0
        return gradient * 0.0
    exponent = b if isinstance(b, compat.TensorProxy) else compat.symbols_of_functions()[torch.zeros_like](a) + b
    of_a = _where(exponent == 0, 0.0, gradient * (b * a ** (b - 1)))
    return of_a, gradient * _where((exponent >= 0) & (a == 0), 0.0, result * a.log()) if exponent is b else None


def _is_power_of_zero(a: Any, b: Any) -> bool:
    """Whether the exponent is zero, or may be."""
    return isinstance(a, compat.TensorProxy) and not (isinstance(b, (int, float)) and b != 0)


def _atan2(gradient: Any, result: Any, a: Any, b: Any) -> Any:
    squares = a * a + b * b
    inverse = _where(squares == 0, 0.0, 1.0 / squares)
    return gradient * (b * inverse), gradient * (-a * inverse)


def _normalize(
    gradient: Any, result: Any, a: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    norm = (a * a).sum(dim, keepdim=True).sqrt()
    along = result * (gradient * result).sum(dim, keepdim=True)
    return (gradient - _where(norm < eps, 0.0, along)) / _where(norm < eps, eps, norm)


def _is_euclidean(a: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> bool:
    return p == 2 and type(dim) is int and out is None


_register(torch.clamp, _clamp, _is_by_position)
_register(torch.sigmoid, _sigmoid)
_register(F.hardtanh, _hardtanh, _not_in_place)
_register(F.hardsigmoid, _hardsigmoid, _not_in_place)
_register(F.relu6, _relu6, _not_in_place)
_register(F.elu, _elu, _not_in_place)
_register(F.celu, _celu, _not_in_place)
_register(F.selu, _selu, _not_in_place)
_register(F.mish, _mish, _not_in_place)
_register(torch.relu, _relu, _not_in_place)
_register(torch.max, _max, _is_along_one)
_register(torch.prod, _prod, _is_product)
_register(F.normalize, _normalize, _is_euclidean)
_register(compat.prims.pow, _pow, _is_power_of_zero)
_register(compat.prims.atan2, _atan2)
