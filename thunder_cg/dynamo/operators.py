"""Operators that Thunder has no symbol for, or one that takes fewer arguments: PyTorch runs them as they are.

A symbol's values and gradients are PyTorch's own: its meta function runs the operator on fake tensors, and its backward
runs it under autograd. Symbols are made where a graph first needs them, and belong to an executor of this package, so
nothing of Thunder's changes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any

import torch
from torch.nn import functional as F

from thunder_cg.communication import functional
from thunder_cg.compat.operators import grouped_mm, int_mm, library_name, pad, transformer_encoder_layer, weight_norm
from thunder_cg.compat.splitter import for_splitter
from thunder_cg.compat.thunder import (
    OVERWRITE,
    OperatorExecutor,
    current_trace,
    get_compile_data,
    proxy_like,
    register_executor,
    register_function,
    requires_grad,
    to_torch_device,
    to_torch_dtype,
    trace_as,
    with_derivative,
)
from thunder_cg.kernels import normalization
from thunder_cg.kernels.derivatives import fused_executor

# Thunder's symbols refuse some arguments, such as ceil_mode, or have no gradient. ``pad`` may reflect or be circular.
_PARTIAL = (
    *(torch.index_add, pad, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.flip, torch.lerp, torch.minimum, torch.remainder, torch.repeat_interleave, torch.round, torch.trunc),
    torch.Tensor.repeat,
)

# Of what is in a list, Thunder's fallbacks lose the gradient. These get each tensor by itself.
_OF_LISTS: dict[Any, Callable[..., Any]] = {
    torch.column_stack: lambda *tensors: torch.column_stack(tensors),
    torch.dstack: lambda *tensors: torch.dstack(tensors),
    torch.hstack: lambda *tensors: torch.hstack(tensors),
    torch.lstm_cell: lambda x, hidden, cell, *weights: torch.lstm_cell(x, (hidden, cell), *weights),
    torch.vstack: lambda *tensors: torch.vstack(tensors),
}

# They make tensors of numbers alone. Thunder's splitter takes them for functions of Python's, and Thunder then raises.
_FACTORIES = (
    *(torch.bartlett_window, torch.blackman_window, torch.eye, torch.hamming_window, torch.hann_window),
    *(torch.kaiser_window, torch.linspace, torch.logspace, torch.tril_indices, torch.triu_indices),
)

# They have no gradient: PyTorch calls the former, for nn.TransformerEncoder, only where nothing wants one.
_FUSED = transformer_encoder_layer, int_mm

executor = register_executor(OperatorExecutor("torch_ops"))
_LOSSES = F.cross_entropy, F.nll_loss  # of classes: Thunder's gradient of a sum raises, among others

_OTHERS = (
    F.interpolate,
    F.max_pool1d,  # Thunder's is NaN where it is padded, and another derivative where values are equal
    torch.mul,  # of complex numbers, as in rotary embeddings: see Note [Other derivatives]
    torch.rms_norm,
    F.scaled_dot_product_attention,  # Thunder's symbol does not take enable_gqa
    torch.segment_reduce,
    weight_norm,
    *grouped_mm,
)
_NAMES: dict[Any, str] = {
    each: each.__name__.removeprefix("_").removesuffix("_fwd")
    for each in (*_LOSSES, *_PARTIAL, *_FACTORIES, *_FUSED, *_OTHERS)
}

# Those that are methods, too. A method takes what the function takes, and sizes one by one.
_METHODS = {name: getattr(torch.Tensor, name) for name in _NAMES.values() if hasattr(torch.Tensor, name)}
_NAMES |= {method: name for name, method in _METHODS.items()}


def is_partial(function: Any) -> bool:
    """Whether Thunder has a symbol for the function, which may do."""
    return isinstance(function, Hashable) and _NAMES.get(function) in {each.__name__ for each in _PARTIAL}


def instead_of(function: Any) -> Callable[..., Any] | None:
    """What a graph calls in the place of an operator of PyTorch's or of a library; None if the operator stays."""
    name = library_name(function) or (_NAMES.get(function) if isinstance(function, Hashable) else None)
    return _by_autograd(_METHODS.get(name, function), name) if name is not None else None


@cache
def of_list(function: Any) -> Callable[..., Any] | None:
    """What takes each tensor of a list by itself, in the place of an operator; None if the operator stays."""
    flat = _OF_LISTS.get(function)
    if flat is None:
        return None
    return _symbol(f"{function.__name__}_each", flat)  # Thunder has a symbol of the operator's own name


def collective(function: Any) -> Callable[..., Any] | None:
    """What a graph calls in the place of a functional collective; None if Thunder cannot trace it."""
    in_trace = functional().get(function)
    return for_splitter(in_trace, str(function)) if in_trace is not None else None


@cache
def _by_autograd(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    if function in _FACTORIES or function in _FUSED:
        return _symbol(name, function, _with_torchs_types(function), differentiable=False)
    if function is torch.rms_norm:
        return _symbol(name, function, decomposed=normalization.rms_norm)
    return _symbol(name, function, _with_constant_weights(function) if function in _LOSSES else function)


def _symbol(
    name: str,
    function: Callable[..., Any],
    runs: Callable[..., Any] | None = None,
    *,
    decomposed: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """What a graph calls for a new symbol of this name: the symbol in a trace; the function where Inductor got the
    checkpointed function that it is called in.

    Args:
        runs: what the symbol runs, if not the function.
        decomposed: what a trace has instead if it is compiled with `kernels.executors`, which fuse it.
        options: those of `register_function`.
    """
    symbol = register_function(executor, name, runs or function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_trace() is None:
            return function(*args, **kwargs)
        if decomposed is not None and fused_executor in get_compile_data().executors_list:
            return decomposed(*args, **kwargs)
        return symbol(*args, **kwargs)

    trace_as(call, call)  # Thunder calls it as it is
    return for_splitter(call, name)


def _with_torchs_types(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function, for the dtypes and devices of Thunder that a trace has."""
    converts = {"device": to_torch_device, "dtype": to_torch_dtype}

    @wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return factory(
            *args, **{key: converts[key](value) if key in converts else value for key, value in kwargs.items()}
        )

    return call


def _with_constant_weights(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of classes, whose weights have no gradient: PyTorch refuses weights that require one."""

    @wraps(loss)
    def call(scores: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(scores, target, None if weight is None else weight.detach(), *args, **kwargs)

    return call


class _MaskedScatter(torch.autograd.Function):
    """``masked_scatter`` with PyTorch's bits, whose backward does not count the mask on the host."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = source.shape
        return tensor.masked_scatter(mask, source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (mask,) = grads, ctx.saved_tensors
        mask = mask.expand(grad.shape)
        flat, size = mask.flatten(), ctx.shape.numel()
        places = torch.where(flat, torch.cumsum(flat, 0) - 1, size)  # what came from elsewhere goes to the end, and off
        taken = grad.new_zeros(size + 1).scatter(0, places, grad.flatten())
        return grad.masked_fill(mask, 0), None, taken[:size].view(ctx.shape)


def _masked_scatter(tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _MaskedScatter.apply(tensor, mask, source)
    return result


@cache
def masked_scatter() -> Callable[..., Any]:
    """``x.masked_scatter(mask, source)``, where ``x`` is not broadcast."""
    return _symbol("scatter_masked", _masked_scatter)


def _unfold(tensor: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    return tensor.unfold(dimension, size, step).clone()


@cache
def unfold() -> Callable[..., Any]:
    """``x.unfold(0, 4, 2)`` in new memory. Thunder's method of that name is another function."""
    return _symbol("unfold_copy", _unfold)


@cache
def part_of_complex(name: str) -> Callable[..., Any]:
    """``x.real`` or ``x.imag`` of complex numbers, in new memory. Thunder's own gradients of both are wrong."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(tensor, name)
        return result.clone()

    return _symbol(f"{name}_copy", part)


@cache
def normalize() -> Callable[..., Any]:
    """``F.normalize`` with PyTorch's bits, where nothing wants a gradient."""
    return _symbol("normalize", F.normalize, differentiable=False)


@cache
def drawn(method: str) -> Callable[..., Any]:
    """``x.uniform_(0, 1)`` of a tensor that nothing else sees, in a new one. It has no gradient."""

    def draw(like: torch.Tensor, *numbers: float, **named: float) -> torch.Tensor:
        result: torch.Tensor = getattr(torch.empty_like(like), method)(*numbers, **named)
        return result

    return _symbol(method.removesuffix("_"), draw, differentiable=False)


def in_layout(tensor: Any, stride: tuple[int, ...] | None) -> Any:
    """The tensor with these strides, itself if it has them. The copy has one value for all that strides of 0 show."""
    if stride is None or len(stride) != tensor.dim():  # Dynamo's example had another shape then
        return tensor
    if all(size == 1 or now == then for size, now, then in zip(tensor.shape, tensor.stride(), stride)):
        return tensor
    shown_once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    values = tensor[shown_once]
    return (
        torch.empty_strided(values.shape, stride, dtype=tensor.dtype, device=tensor.device)
        .copy_(values)
        .expand(tensor.shape)
    )


@cache
def laid_out() -> Callable[..., Any]:
    """`in_layout` in a trace."""
    return _symbol("laid_out", in_layout)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` in what Thunder's symbol takes, and zeros for what attends to nothing.

    On the CPU, Thunder writes the symbol out, and there are NaNs without this.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (torch.repeat_interleave(each, groups, -3) for each in (key, value))
    if attn_mask is None or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    attends = attn_mask != -torch.inf if attn_mask.is_floating_point() else attn_mask
    idle = torch.logical_not(torch.any(attends, -1, keepdim=True))
    mask = attn_mask.masked_fill(idle, 0.0 if attn_mask.is_floating_point() else True)
    attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale=scale)
    return attended.masked_fill(idle, 0.0)


attention = for_splitter(_attention, "scaled_dot_product_attention")


@cache
def multi_head_attention(*, output_only: bool = False) -> Callable[..., Any]:
    """``F.multi_head_attention_forward``, or the first of its results, as a function that Thunder traces into.

    Thunder knows the original and calls it as it is, so this is a copy of it.
    """
    original = F.multi_head_attention_forward
    own = {"scaled_dot_product_attention": _attention, "_canonical_mask": _float_mask}
    names = {**original.__globals__, **own}
    copy = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    traced = (lambda *args, **kwargs: copy(*args, **kwargs)[0]) if output_only else copy
    return for_splitter(traced, "multi_head_attention_forward")


def _float_mask(mask: torch.Tensor | None, *_: Any, target_type: torch.dtype, **__: Any) -> torch.Tensor | None:
    """A mask to be added. PyTorch asks for its dtype, which Thunder has another object for."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=target_type).masked_fill(mask, -torch.inf)


_RESHAPE = frozenset(["flatten", "reshape", "view"])
VIEWS = _RESHAPE | {"diagonal", "getitem", "movedim", "moveaxis", "narrow", "permute", "select", "squeeze", "swapaxes"}
VIEWS |= {"swapdims", "t", "transpose", "unflatten", "unsqueeze"}
Views = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]  # names, arguments, and those by name


def reshapes(views: Views) -> bool:
    """Whether a view is one only for some strides."""
    return any(name in _RESHAPE for name, *_ in views)


def _shown(tensor: torch.Tensor, views: Views) -> torch.Tensor:
    for name, args, kwargs in views:
        method = {"getitem": "__getitem__", "view": "reshape"}.get(name, name)
        tensor = getattr(tensor, method)(*args, **dict(kwargs))
    return tensor


def _write_to_copy(tensor: torch.Tensor, index: Any, value: Any, views: Views, accumulate: bool) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format if reshapes(views) else torch.preserve_format)
    part = _shown(copy, views)
    if not isinstance(value, torch.Tensor):  # where the index is a tensor, PyTorch would copy a number to the device
        value = torch.full((), value, dtype=part.dtype, device=part.device)
    if accumulate:
        part.index_put_(index, value, accumulate=True)
    else:
        part[index] = value
    return copy


def _read_written(
    gradient: torch.Tensor, index: Any, views: Views, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    part = _shown(gradient, views)[index].to(to_torch_dtype(dtype)).contiguous()  # of which autograd sums
    return part.sum_to_size(shape[max(len(shape) - part.dim(), 0) :]).reshape(shape)


@cache
def write_to_copy() -> Callable[..., Any]:
    """A copy of a tensor, with a value written at an index of a view of it. The gradients are PyTorch's.

    Its arguments are the tensor, the index, the value, the views that the index is of, one of the other, and whether
    the value is added.
    """

    def backward(tensor: Any, index: Any, value: Any, views: Views, accumulate: bool, gradient: Any) -> Any:
        kept = gradient if accumulate else write(gradient, index, 0, views, False)
        is_tensor = hasattr(value, "dtype")
        given = read(gradient, index, views, tuple(value.shape), value.dtype) if is_tensor else None
        return kept, None, given, None, None

    def like_first(tensor: Any, index: Any, value: Any, *_: Any) -> Any:
        return proxy_like(tensor, requires_grad=requires_grad(tensor) or requires_grad(value))

    def like_value(gradient: Any, index: Any, views: Views, shape: tuple[int, ...], dtype: Any) -> Any:
        return proxy_like(gradient, requires_grad=False, shape=shape, dtype=dtype)

    write = _symbol("write_to_copy", _write_to_copy, meta=like_first, backward=backward)
    read = _symbol("read_written", _read_written, meta=like_value, differentiable=False)
    return write


def _overwrite(tensor: torch.Tensor, values: torch.Tensor, is_data: bool) -> torch.Tensor:
    (tensor.data if is_data else tensor).copy_(values)
    return tensor


@cache
def overwritten() -> Callable[..., Any]:
    """A tensor after values were written there without a gradient. What uses it gives its gradient to the tensor.

    ``is_data`` writes to ``tensor.data``, of which autograd does not know.
    """
    write = register_function(executor, OVERWRITE, torch.no_grad()(_overwrite), differentiable=False, is_kept=True)

    def call(tensor: Any, values: Any, is_data: bool) -> Any:
        def forward(*tensors: Any) -> Any:
            return (write(*tensors, is_data),), ()

        (result,) = with_derivative(forward, lambda gradient: (gradient, None), tensor, values)
        return result

    return for_splitter(call, "overwritten")
