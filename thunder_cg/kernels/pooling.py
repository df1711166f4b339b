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
from thunder_cg.compat.torch_compile import indices_of_places, max_pool_with_places
from thunder_cg.kernels.derivatives import fused_executor, like, register

Pair = tuple[int, int]
_LARGEST_WINDOW = 25  # that Inductor computes so


def _pair(value: int | Sequence[int]) -> Pair:
    """A number for each dimension: PyTorch takes one for both."""
    numbers = (value,) if isinstance(value, int) else (*value,)
    return numbers[0], numbers[-1]


def _max_pool(a: Tensor, *geometry: Pair) -> tuple[Tensor, Tensor]:
    result, places = max_pool_with_places(a, *geometry, False)
    return result, places


def _gradient(gradient: Tensor, a: Tensor, places: Tensor, kernel: Pair, *geometry: Pair) -> Tensor:
    indices = indices_of_places(places, kernel, a.shape[-2:], *geometry)
    result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, a, kernel, *geometry, False, indices)
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
    """Whether Inductor computes it so."""
    is_small = math.prod(_pair(kernel_size)) <= _LARGEST_WINDOW and math.prod(a.shape) > 0
    return is_small and not return_indices and not ceil_mode and compat.is_float_dtype(a.dtype)


register(fused_executor, F.max_pool2d, _max_pool2d, _fits)
