"""GELU and ReLU with PyTorch's derivatives: of GELU in one formula, of ReLU from its result instead of its argument.

Whatever follows a ReLU needs its result in the backward, too. So the argument need not be kept or computed once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import fused_executor, like, register

gelu = fused_executor.register_operator(
    "gelu", meta=like(0), fn=lambda a, approximate: F.gelu(a, approximate=approximate)
)
gelu_gradient = fused_executor.register_operator(
    "gelu_gradient",
    meta=like(0),
    fn=lambda gradient, a, approximate: torch.ops.aten.gelu_backward(gradient, a, approximate=approximate),
)
relu = fused_executor.register_operator("relu", meta=like(0), fn=torch.relu)
relu_gradient = fused_executor.register_operator(
    "relu_gradient", meta=like(0), fn=lambda gradient, result: torch.ops.aten.threshold_backward(gradient, result, 0)
)


def _gelu(a: Any, *, approximate: str = "none", derives: bool) -> Any:
    result = gelu(a, approximate)
    if derives:
        compat.prims.put_grad(a, gelu_gradient(compat.prims.get_grad(result), a, approximate))
    return result


def _relu(a: Any, inplace: bool = False, *, derives: bool) -> Any:
    result = relu(a)
    result = compat.write_in_place(a, result) if inplace else result
    if derives:
        compat.prims.put_grad(a, relu_gradient(compat.prims.get_grad(result), result))
    return result


register(fused_executor, F.gelu, _gelu, lambda *, approximate, **_: approximate in ("none", "tanh"))
register(fused_executor, torch.relu, _relu, lambda *, a, **_: compat.is_float_dtype(a.dtype))
