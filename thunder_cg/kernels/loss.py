"""Cross entropy that keeps the logits and one number for each row.

Thunder keeps the logarithm of the softmax for the backward. It is as large as the logits, often the largest tensor of a
language model, and has to be written first.

Thunder (0.2.6) is also wrong: where labels are smoothed, its mean includes the targets that are to be ignored, and for
logits of three dimensions, or of more than four, its gradient has another shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, like, register, widened


def _meta(logits: Any, target: Any, weight: Any, ignored: int, reduction: str, smoothing: float) -> Any:
    shape = target.shape if reduction == "none" else ()
    logsumexp = compat.TensorProxy(like=logits, shape=target.shape, dtype=compat.get_computation_dtype(logits.dtype))
    return compat.TensorProxy(like=logits, shape=shape), logsumexp


def _along_classes(vector: Tensor, logits: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (logits.dim() - 2))


def _classes(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The class of each row, of which some are ignored. Inductor would count a negative one from the end."""
    classes = torch.where(target != ignored, target, 0)
    return torch.where(classes < 0, logits.shape[1], classes)  # which is refused, as in PyTorch


def _count(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What a mean is divided by: how many rows count, or the sum of their weights."""
    is_counted = target != ignored
    if weight is None:
        return is_counted.sum()
    return torch.where(is_counted, widened(weight)[torch.where(is_counted, target, 0)], 0.0).sum()


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss, and the logsumexp of each row. ``logits`` are (rows, classes, *pixels)."""
    wide = widened(logits)
    highest = wide.amax(1, keepdim=True)
    logsumexp = (wide - highest).exp().sum(1).log() + highest.squeeze(1)
    classes = _classes(logits, target, ignored)
    losses = logsumexp - wide.gather(1, classes.unsqueeze(1)).squeeze(1)
    losses = losses if weight is None else losses * widened(weight)[classes]
    if smoothing:
        of_all = logsumexp.unsqueeze(1) - wide
        of_all = of_all if weight is None else of_all * _along_classes(widened(weight), logits)
        losses = (1 - smoothing) * losses + smoothing * of_all.mean(1)
    losses = torch.where(target != ignored, losses, 0.0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / _count(target, weight, ignored)
    return losses.to(logits.dtype), logsumexp


def _gradient(
    gradient: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    weight: Tensor | None,
    ignored: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    of_row = gradient.to(logsumexp.dtype)
    if reduction == "mean":
        of_row = of_row / _count(target, weight, ignored)
    of_row = of_row.unsqueeze(1) if reduction == "none" else of_row
    softmax = (logits - logsumexp.unsqueeze(1)).exp()
    classes = _along_classes(torch.arange(logits.shape[1], device=logits.device), logits)
    is_target = classes == target.unsqueeze(1)
    wanted = is_target.to(softmax.dtype)
    wanted = wanted * (1 - smoothing) + smoothing / logits.shape[1] if smoothing else wanted
    if weight is not None:
        wanted = wanted * _along_classes(widened(weight), logits)
        softmax = softmax * wanted.sum(1, keepdim=True)
    is_counted = (target != ignored).unsqueeze(1)
    return torch.where(is_counted, (softmax - wanted) * of_row, 0.0).to(logits.dtype)


cross_entropy = fused_executor.register_operator(
    "cross_entropy", meta=_meta, fn=_cross_entropy, tags=[compat.OpTags.REDUCTION_OP]
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
    options = weight, ignore_index, reduction, label_smoothing
    loss, logsumexp = cross_entropy(a, target, *options)
    if derives:
        gradient = compat.prims.get_grad(loss)
        compat.prims.put_grad(a, cross_entropy_gradient(gradient, a, target, logsumexp, *options))
    return loss


def _is_of_classes(
    *, a: Any, target: Any, weight: Any, size_average: Any, reduce: Any, reduction: str, **_: Any
) -> bool:
    """Whether targets are the numbers of classes."""
    is_plain = size_average is None and reduce is None and not compat.requires_grad(weight)
    are_classes = target.ndim == a.ndim - 1 > 0 and math.prod(a.shape) > 0
    return is_plain and are_classes and reduction in ("mean", "sum", "none")


register(fused_executor, F.cross_entropy, _derived_cross_entropy, _is_of_classes)
