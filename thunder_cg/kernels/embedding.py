"""The gradient of an embedding of 16 bits, summed in rows that are as many as the indices, not as the embedding's.

Sums of 16 bits are taken in float32. Inductor takes them in a copy of the whole embedding, which it fills with zeros
and converts: of a vocabulary of 32,000 and a few hundred tokens, most rows are zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, register, widened


def _meta(indices: Any, weight: Any) -> Any:
    return compat.TensorProxy(like=weight, shape=(*indices.shape, weight.shape[1]))


def _gradient_meta(gradient: Any, indices: Any, rows: int, padding: int | None) -> Any:
    return compat.TensorProxy(like=gradient, shape=(rows, gradient.shape[-1]))


def _gradient(gradient: Tensor, indices: Tensor, rows: int, padding: int | None) -> Tensor:
    """The gradient of all ``rows``. That of the row ``padding`` is zero."""
    indices, of_each = indices.flatten().long(), widened(gradient).flatten(0, -2)
    if padding is not None:
        of_each = torch.where((indices == padding).unsqueeze(1), 0, of_each)
    # Of equal indices, the position of one of them, no matter which: it is where they are summed.
    positions = torch.arange(len(indices), device=indices.device)
    place = indices.new_full((rows,), -1).scatter(0, indices, positions)
    sums = torch.zeros_like(of_each).index_put((place[indices],), of_each, accumulate=True)
    return torch.where((place >= 0).unsqueeze(1), sums[place.clamp(min=0)], 0).to(gradient.dtype)


embedding = fused_executor.register_operator("embedding", meta=_meta, fn=F.embedding)
embedding_gradient = fused_executor.register_operator("embedding_gradient", meta=_gradient_meta, fn=_gradient)


def _embedding(
    a: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    derives: bool,
) -> Any:
    result = embedding(a, weight)
    if derives:
        rows = weight.shape[0]
        padding = None if padding_idx is None else padding_idx % rows
        compat.prims.put_grad(weight, embedding_gradient(compat.prims.get_grad(result), a, rows, padding))
    return result


def _has_fewer_indices_than_rows(
    *, a: Any, weight: Any, max_norm: Any, scale_grad_by_freq: bool, sparse: bool, **_: Any
) -> bool:
    """Whether it takes less memory: of 16 bits, with fewer indices than rows."""
    is_plain = max_norm is None and not scale_grad_by_freq and not sparse and weight.ndim == 2 and a.ndim > 0
    return is_plain and weight.dtype.bytes == 2 and 0 < math.prod(a.shape) < weight.shape[0]


register(fused_executor, F.embedding, _embedding, _has_fewer_indices_than_rows)
