"""Linear layers of one row, as a token of a decode step has them: sums that Inductor fuses with what is around them.

They take as long as the weight takes to be read. On an H200, cuBLAS, whose kernels are for tiles of rows, took 1.1 to
4 x the time of Inductor's sums, with weights of 1 to 34 MB and at most 4,096 sums. It is the faster one from three rows
on, and with larger weights, as those of a vocabulary. ``tools/results/RESULTS.md`` says what that makes of models.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.compat.torch_compile import in_memory
from thunder_cg.kernels.derivatives import HALF, fused_executor

_MOST_SUMS, _MOST_ELEMENTS = 2**12, 2**24  # of a weight


def _meta(a: Any, weight: Any, bias: Any = None) -> Any:
    return compat.TensorProxy(like=a, shape=(*a.shape[:-1], weight.shape[0]))


def _run(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.compiler.is_compiling():  # op by op, the products would be written to memory
        return F.linear(a, weight, bias)
    sums = (in_memory(a.flatten()).float() * weight.float()).sum(1)
    return (sums if bias is None else sums + bias).to(a.dtype).view(*a.shape[:-1], -1)


def _has_one_row(a: Any, weight: Any, bias: Any = None) -> bool:
    sums, length = weight.shape
    is_small = 0 < sums <= _MOST_SUMS and 0 < sums * length <= _MOST_ELEMENTS
    return is_small and math.prod(a.shape) == length and compat.to_torch_dtype(a.dtype) in HALF


linear = fused_executor.register_operator("linear_of_one_row", meta=_meta, fn=_run, tags=[compat.OpTags.MATMUL_OP])
# By name: what Thunder has for PyTorch's function is no symbol, but calls one or that of distributed tensors.
fused_executor.register_implementation("torch.nn.functional.linear", linear, checker=_has_one_row)
