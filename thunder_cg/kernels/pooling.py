"""Max pooling that keeps a byte of each result for the backward: the place of the maximum in its window.

Thunder keeps PyTorch's indices into the whole image, which take eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, like, register

Pair = tuple[int, int]
_LARGEST_WINDOW = torch.iinfo(torch.int8).max + 1


def _pair(value: int | Sequence[int]) -> Pair:
    """A number for each dimension: PyTorch takes one for both."""
    numbers = (value,) if isinstance(value, int) else (*value,)
    return numbers[0], numbers[-1]


def _first_pixels(pooled: Tensor, stride: Pair, padding: Pair) -> list[Tensor]:
    """The row in which each row of windows begins, and the column of each column. Padding is below zero."""
    counts = zip(pooled.shape[-2:], stride, padding)
    rows, columns = (torch.arange(count, device=pooled.device) * step - before for count, step, before in counts)
    return [rows.unsqueeze(1), columns]


def _max_pool(a: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> tuple[Tensor, Tensor]:
    """The maxima, and the place of each in its window, counted row by row."""
    result, indices = F.max_pool2d(a, kernel, stride, padding, dilation, return_indices=True)
    rows, columns = _first_pixels(result, stride, padding)
    row, column = (indices // a.shape[-1] - rows) // dilation[0], (indices % a.shape[-1] - columns) // dilation[1]
    return result, (row * kernel[1] + column).to(torch.int8)


def _gradient(
    gradient: Tensor, a: Tensor, places: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    rows, columns = _first_pixels(places, stride, padding)
    places = places.long()
    row, column = places // kernel[1] * dilation[0] + rows, places % kernel[1] * dilation[1] + columns
    geometry = kernel, stride, padding, dilation, False, row * a.shape[-1] + column
    result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, a, *geometry)
    return result


def _meta(a: Any, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Any:
    shape = F.max_pool2d(torch.empty(tuple(a.shape), device="meta"), kernel, stride, padding, dilation).shape
    return compat.TensorProxy(like=a, shape=shape), compat.TensorProxy(like=a, shape=shape, dtype=compat.int8)


# Thunder computes nothing with this tag once more in the backward.
max_pool = fused_executor.register_operator("max_pool", meta=_meta, fn=_max_pool, tags=[compat.OpTags.REDUCTION_OP])
max_pool_gradient = fused_executor.register_operator("max_pool_gradient", meta=like(1), fn=_gradient)


def _max_pool2d(
    a: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
    *,
    derives: bool,
) -> Any:
    geometry = [*map(_pair, (kernel_size, stride or kernel_size, padding, dilation))]
    result, places = max_pool(a, *geometry)
    if derives:
        compat.prims.put_grad(a, max_pool_gradient(compat.prims.get_grad(result), a, places, *geometry))
    return result


def _fits(*, a: Any, kernel_size: Any, return_indices: bool, ceil_mode: bool, **_: Any) -> bool:
    """Whether a byte can hold any place in a window."""
    is_small = math.prod(_pair(kernel_size)) <= _LARGEST_WINDOW and math.prod(a.shape) > 0
    return is_small and not return_indices and not ceil_mode and compat.is_float_dtype(a.dtype)


register(fused_executor, F.max_pool2d, _max_pool2d, _fits)
