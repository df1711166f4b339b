"""GELU with PyTorch's formula for its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, register


def _gelu_meta(a: Any, approximate: str) -> Any:
    return compat.TensorProxy(like=a)


def _gelu_gradient_meta(gradient: Any, a: Any, approximate: str) -> Any:
    return compat.TensorProxy(like=a)


gelu = fused_executor.register_operator(
    "gelu", meta=_gelu_meta, fn=lambda a, approximate: F.gelu(a, approximate=approximate)
)
gelu_gradient = fused_executor.register_operator(
    "gelu_gradient",
    meta=_gelu_gradient_meta,
    fn=lambda gradient, a, approximate: torch.ops.aten.gelu_backward(gradient, a, approximate=approximate),
)


def _derived_gelu(a: Any, *, approximate: str = "none", derives: bool) -> Any:
    result = gelu(a, approximate)
    if derives:
        compat.prims.put_grad(a, gelu_gradient(compat.prims.get_grad(result), a, approximate))
    return result


register(fused_executor, F.gelu, _derived_gelu, lambda *, approximate, **_: approximate in ("none", "tanh"))
