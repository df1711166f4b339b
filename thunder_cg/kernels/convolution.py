"""Convolutions with PyTorch's own kernels for their gradients.

Thunder writes the derivative of a convolution with convolutions, for which cuDNN has no fast kernels: the training of a
ResNet-50 takes nine times as long as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels.derivatives import HALF, executor, like


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """What PyTorch's kernels of images lay their results out in, by an argument: channels last if that has it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    is_last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


def _may_be_last(dimensions: int, dtype: torch.dtype, groups: int) -> bool:
    """Whether channels last may be the fastest: cuDNN has kernels for gradients of 16 bits with that only."""
    return dimensions == 4 and dtype in HALF and groups == 1


def _fastest(a: torch.Tensor, groups: int) -> torch.memory_format:
    """The layout in which to compute gradients."""
    return torch.channels_last if a.is_cuda and _may_be_last(a.dim(), a.dtype, groups) else memory_format(a)


def _lay_out(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """The tensor in the layout in which to compute gradients, where Inductor compiles it.

    Inductor computes convolutions in that layout. Elsewhere PyTorch does, and the results have its strides.
    """
    return tensor.contiguous(memory_format=_fastest(tensor, groups)) if torch.compiler.is_compiling() else tensor


# Thunder computes nothing with this tag once more in the backward.
_laid_out = executor.register_operator(
    "convolution_laid_out", meta=like(0), fn=_lay_out, tags=[compat.OpTags.REDUCTION_OP]
)


def _laid_out_once(tensor: Any, trace: compat.TraceCtx, groups: int) -> Any:
    """What lays the tensor out in the trace that is being made: several convolutions may take one tensor."""
    made = {each.args[0].name: each.output for each in trace.bound_symbols if each.sym is _laid_out}
    return made[tensor.name] if tensor.name in made else _laid_out(tensor, groups)


def _register(name: str, position: int) -> compat.Symbol:
    """An operator that computes the gradient of one argument of a convolution, in the layout of what was ``given``."""
    mask = [position == 0, position == 1, False]

    def run(
        gradient: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, given: torch.Tensor, *geometry: Any
    ) -> torch.Tensor:
        laid_out = memory_format(given)  # as autograd has it for a parameter
        if (last := _fastest(a, geometry[-1])) != torch.contiguous_format:  # PyTorch would convert for each gradient
            gradient, a = (each.contiguous(memory_format=last) for each in (gradient, a))
        result: torch.Tensor = torch.ops.aten.convolution_backward(gradient, a, weight, None, *geometry, mask)[position]
        return result if last == laid_out else result.contiguous(memory_format=laid_out)

    return executor.register_operator(name, meta=like(1 + position), fn=run)


_of_input = _register("convolution_backward_input", 0)
_of_weight = _register("convolution_backward_weight", 1)


def _convolution(
    a: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """A convolution and its gradients. Those that nobody needs are dropped by Thunder.

    The backward gets weights, and images of the caller's, as the forward has laid them out, and converts none.
    """
    stride, padding, dilation, transposed, output_padding, groups = compat.constants(
        (stride, padding, dilation, transposed, output_padding, groups)
    )
    given_a, given_weight = a, weight
    # Without images, PyTorch's kernels give gradients other strides than Inductor expects of such a layout.
    if _may_be_last(a.ndim, compat.to_torch_dtype(a.dtype), groups) and math.prod(a.shape) > 0:
        trace = compat.current_trace()
        assert trace is not None
        if any(a is each for each in trace.args):  # else Inductor has laid it out already
            a = _laid_out_once(a, trace, groups)
        if set(weight.shape[2:]) != {1}:  # else both layouts are one
            weight = _laid_out_once(weight, trace, groups)
    result = compat.prims.convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    gradient = compat.prims.get_grad(result)
    dimensions = a.ndim - 2
    geometry = (*(_each(value, dimensions) for value in (stride, padding, dilation)), transposed)
    geometry += (_each(output_padding, dimensions), groups)
    compat.prims.put_grad(given_a, _of_input(gradient, a, weight, given_a, *geometry))
    compat.prims.put_grad(given_weight, _of_weight(gradient, a, weight, given_weight, *geometry))
    if bias is not None:
        compat.prims.put_grad(bias, compat.torch_sum(gradient, [0, *range(2, a.ndim)]))
    return result


def _each(value: Sequence[int], dimensions: int) -> list[int]:
    """A number for each dimension: Thunder takes one for all."""
    return [*value] * dimensions if len(value) == 1 else [*value]


_torch = compat.torch_implementations()[compat.prims.convolution.id]
executor.register_implementation(
    compat.prims.convolution, execution_transform=_torch.execution_transform, grad_transform=_convolution
)
