"""BatchNorm, LayerNorm and the mean of images, with derivatives in closed form; and RMSNorm.

Thunder derives them operator by operator. Inductor cannot simplify what comes out of that: it reads the images more
often, and keeps more of them between forward and backward, than the formula needs. Here one operator computes the
statistics, which are kept for the backward, one applies them, and one computes all gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.convolution import memory_format
from thunder_cg.kernels.derivatives import fused_executor, like, register, widened

Axes = list[int]


def _statistics_meta(a: Any, over: Axes, eps: float) -> Any:
    shape = tuple(1 if i in over else size for i, size in enumerate(a.shape))
    dtype = compat.get_computation_dtype(a.dtype)
    return tuple(compat.TensorProxy(like=a, shape=shape, dtype=dtype) for _ in range(3))


def _statistics(a: Tensor, over: Axes, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the variance, and what to multiply by so that it is one.

    They have a size of one where they are taken ``over``, and are in float32 for types of 16 bits.
    """
    variance, mean = torch.var_mean(widened(a), over, correction=0, keepdim=True)
    return mean, variance, torch.rsqrt(variance + eps)


def _apply(a: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, along: Axes) -> Tensor:
    """Weight and bias vary ``along`` these axes of ``a``: of one in the middle, PyTorch keeps channels last."""
    shape = [size if i in along else 1 for i, size in enumerate(a.shape)]
    result = (a - mean) * scale
    result = result if weight is None else result * weight.reshape(shape)
    result = result if bias is None else result + bias.reshape(shape)
    laid_out = memory_format(a) if along == [1] else torch.contiguous_format
    return result.to(a.dtype).contiguous(memory_format=laid_out)


def _gradients_meta(gradient: Any, a: Any, mean: Any, scale: Any, weight: Any, over: Axes, along: Axes) -> Any:
    shape = tuple(a.shape[i] for i in along)
    return compat.TensorProxy(like=a), *(compat.TensorProxy(like=mean, shape=shape) for _ in range(2))


def _gradients(
    gradient: Tensor, a: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, over: Axes, along: Axes
) -> tuple[Tensor, ...]:
    """The gradients of ``a``, of the weight and of the bias, the last two in the type of the statistics."""
    wide, centered = gradient.to(mean.dtype), a - mean
    weights = 1 if weight is None else weight.reshape([size if i in along else 1 for i, size in enumerate(a.shape)])
    others = [i for i in range(a.dim()) if i not in along]
    if over == others:  # one pass over the images is enough for all sums
        of_bias = wide.sum(others, keepdim=True)
        of_weight = (wide * centered).sum(others, keepdim=True) * scale
        count = a.numel() / mean.numel()
        of_a = scale * weights * (wide - of_bias / count - centered * (scale * of_weight / count))
    else:
        normalized, weighted = centered * scale, wide * weights
        of_bias, of_weight = wide, wide * normalized
        if others:  # a sum over no dimensions is one over all
            of_bias, of_weight = of_bias.sum(others), of_weight.sum(others)
        projected = normalized * (weighted * normalized).mean(over, keepdim=True)
        of_a = scale * (weighted - weighted.mean(over, keepdim=True) - projected)
    return of_a.to(a.dtype), *(each.reshape([a.shape[i] for i in along]) for each in (of_weight, of_bias))


# Thunder computes nothing with this tag once more in the backward.
statistics = fused_executor.register_operator(
    "normalization_statistics", meta=_statistics_meta, fn=_statistics, tags=[compat.OpTags.REDUCTION_OP]
)
apply = fused_executor.register_operator("normalization_apply", meta=like(0), fn=_apply)
# Thunder drops what the result of an implementation does not need. The mean needs the update of the running statistics,
# so that Thunder keeps the update.
after_update = fused_executor.register_operator(
    "normalization_after_update", meta=like(0), fn=lambda mean, updated: mean.clone(), tags=[compat.OpTags.REDUCTION_OP]
)
gradients = fused_executor.register_operator("normalization_gradients", meta=_gradients_meta, fn=_gradients)


def _derive(result: Any, a: Any, mean: Any, scale: Any, weight: Any, bias: Any, over: Axes, along: Axes) -> None:
    """The derivative of the result."""
    gradient = compat.prims.get_grad(result)
    of_a, *others = gradients(gradient, a, mean, scale, weight, over, along)
    compat.prims.put_grad(a, of_a)
    for parameter, found in zip((weight, bias), others):
        if parameter is not None:
            compat.prims.put_grad(parameter, compat.maybe_convert_to_dtype(found, parameter.dtype))


@compat.in_torchs_language
def _layer_norm(
    a: Any, normalized_shape: Axes, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, derives: bool
) -> Any:
    parameter = weight if weight is not None else bias
    last = len(normalized_shape if parameter is None else parameter.shape)
    axes = [*range(a.ndim - last, a.ndim)]
    mean, _, scale = statistics(a, axes, eps)
    result = apply(a, mean, scale, weight, bias, axes)
    if derives:
        _derive(result, a, mean, scale, weight, bias, axes, axes)
    return result


@compat.in_torchs_language
def _batch_norm(
    a: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    derives: bool,
) -> Any:
    over = [0, *range(2, a.ndim)]
    mean, variance, scale = statistics(a, over, eps)
    count = math.prod(a.shape) / a.shape[1]
    updated = []
    for running, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
        if running is not None:
            now = (1 - momentum) * running + momentum * now.reshape(running.shape)
            updated.append(compat.write_in_place(running, now))
    mean = after_update(mean, updated)
    result = apply(a, mean, scale, weight, bias, [1])
    if derives:
        _derive(result, a, mean, scale, weight, bias, over, [1])
    return result


def _trains(*, a: Any, training: bool, momentum: float, **_: Any) -> bool:
    count = math.prod(a.shape) / max(a.shape[1], 1)
    return training is True and isinstance(momentum, (int, float)) and count > 1


@compat.in_torchs_language
def _mean_of_images(a: Any, output_size: Any, *, derives: bool) -> Any:
    """``adaptive_avg_pool2d`` to one pixel, of which PyTorch's kernel for the gradient is slow."""
    result = a.mean([-2, -1], keepdim=True)
    if derives:
        gradient = compat.prims.get_grad(result) / (a.shape[-2] * a.shape[-1])
        compat.prims.put_grad(a, gradient.expand(a.shape))
    return result


def _is_one_pixel(*, a: Any, output_size: Any, **_: Any) -> bool:
    return output_size in (1, (1, 1), [1, 1]) and math.prod(a.shape) > 0


@compat.in_torchs_language
def rms_norm(a: Any, normalized_shape: Axes, weight: Any = None, eps: float | None = None) -> Any:
    """``F.rms_norm`` in operators that Inductor fuses, as it does what a model writes out by itself."""
    dtype = compat.get_computation_dtype(a.dtype)
    wide = compat.maybe_convert_to_dtype(a, dtype)
    axes = [*range(a.ndim - len(normalized_shape), a.ndim)]
    least = torch.finfo(compat.to_torch_dtype(dtype)).eps if eps is None else eps
    result = wide * ((wide * wide).mean(axes, keepdim=True) + least).rsqrt()
    result = result if weight is None else result * weight
    return compat.maybe_convert_to_dtype(result, a.dtype)


register(fused_executor, F.adaptive_avg_pool2d, _mean_of_images, _is_one_pixel)
register(fused_executor, F.layer_norm, _layer_norm, lambda *, a, **_: math.prod(a.shape) > 0)
register(fused_executor, F.batch_norm, _batch_norm, _trains)
