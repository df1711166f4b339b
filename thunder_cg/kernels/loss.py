"""Cross entropy that keeps the logits and one number for each row.

Thunder keeps the logarithm of the softmax for the backward. It is as large as the logits, often the largest tensor of a
language model, and has to be written first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, like, register, widened


def _cross_entropy_meta(logits: Any, target: Any, ignored: int, reduction: str) -> Any:
    shape = target.shape if reduction == "none" else ()
    logsumexp = compat.TensorProxy(like=logits, shape=target.shape, dtype=compat.get_computation_dtype(logits.dtype))
    return compat.TensorProxy(like=logits, shape=shape), logsumexp


def _cross_entropy(logits: Tensor, target: Tensor, ignored: int, reduction: str) -> tuple[Tensor, Tensor]:
    """The loss, and the logsumexp of each row. ``logits`` are (rows, classes)."""
    wide = widened(logits)
    highest = wide.amax(1, keepdim=True)
    logsumexp = (wide - highest).exp().sum(1).log() + highest.squeeze(1)
    is_counted = target != ignored
    picked = wide.gather(1, torch.where(is_counted, target, 0).unsqueeze(1)).squeeze(1)
    losses = torch.where(is_counted, logsumexp - picked, 0.0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / is_counted.sum()
    return losses.to(logits.dtype), logsumexp


def _gradient(
    gradient: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, ignored: int, reduction: str
) -> Tensor:
    is_counted = (target != ignored).unsqueeze(1)
    of_row = gradient.to(logsumexp.dtype)
    if reduction == "mean":
        of_row = of_row / is_counted.sum()
    of_row = of_row.unsqueeze(1) if reduction == "none" else of_row
    softmax = (logits - logsumexp.unsqueeze(1)).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == target.unsqueeze(1)
    return torch.where(is_counted, (softmax - is_target.to(softmax.dtype)) * of_row, 0.0).to(logits.dtype)


cross_entropy = fused_executor.register_operator(
    "cross_entropy", meta=_cross_entropy_meta, fn=_cross_entropy, tags=[compat.OpTags.REDUCTION_OP]
)
cross_entropy_gradient = fused_executor.register_operator("cross_entropy_gradient", meta=like(1), fn=_gradient)


def _derived_cross_entropy(
    a: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    derives: bool,
) -> Any:
    loss, logsumexp = cross_entropy(a, target, ignore_index, reduction)
    if derives:
        gradient = compat.prims.get_grad(loss)
        compat.prims.put_grad(a, cross_entropy_gradient(gradient, a, target, logsumexp, ignore_index, reduction))
    return loss


def _is_plain(
    *,
    a: Any,
    target: Any,
    weight: Any,
    size_average: Any,
    reduce: Any,
    reduction: str,
    label_smoothing: float,
    **_: Any,
) -> bool:
    """Whether rows are classified by the number of a class, without weights and smoothing."""
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    are_rows = a.ndim == 2 and target.ndim == 1 and math.prod(a.shape) > 0
    return is_plain and are_rows and reduction in ("mean", "sum", "none")


register(fused_executor, F.cross_entropy, _derived_cross_entropy, _is_plain)
