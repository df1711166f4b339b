"""Has Thunder promote dtypes as PyTorch does, in what our `thunderfx` compiles.

Thunder (0.2.6) has what is made of a number or of a 0-dim tensor decide no dtype, even where it has dimensions by then,
as ``torch.where(mask, 0.0, x)`` of a 0-dim ``x``, ``x[None]`` and ``mask * 1.5`` have. PyTorch has all that has
dimensions decide it. So Thunder would take ``w + mask * 1.5`` for bfloat16 if ``w`` is, and leave out the conversion
that a program makes of the float32 that PyTorch computes, or add one that overflows.
"""

from __future__ import annotations

from typing import Any

from thunder import clang
from thunder.core import dtypes, proxies
from thunder.core.compile_data import _compile_data
from thunder.core.proxies import TensorProxy

from thunder_cg.compat.compiled import has_pytorchs_numbers

_infer = proxies._infer_tensor_properties
_copysign = clang.copysign
_TRUE_DTYPE = 3  # its place among the properties


def _infer_with_strong_dtype(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    inferred: tuple[Any, ...] = _infer(*args, **kwargs)
    shape, true_dtype = inferred[0], inferred[_TRUE_DTYPE]
    if len(shape) == 0 or not true_dtype.is_weak or not has_pytorchs_numbers(_compile_data.get()[0]):
        return inferred
    return *inferred[:_TRUE_DTYPE], dtypes.to_strong_dtype(true_dtype), *inferred[_TRUE_DTYPE + 1 :]


def _copysign_in_dtype(a: Any, b: Any) -> Any:
    """The zero that Thunder's floor division of floats gives a sign has the dtype of the others."""
    result = _copysign(a, b)
    is_number = not isinstance(a, TensorProxy) and isinstance(b, TensorProxy)
    is_number = is_number and has_pytorchs_numbers(_compile_data.get()[0])
    return clang.maybe_convert_to_dtype(result, b.true_dtype) if is_number else result


def promote_as_pytorch() -> None:
    """See the module's docstring."""
    proxies._infer_tensor_properties = _infer_with_strong_dtype
    clang.copysign = _copysign_in_dtype
