"""Attention by cuDNN, where PyTorch would choose it: on an H100 its kernels take about 60 % of the time of the others.

Thunder's own executor knows PyTorch's flash and memory-efficient kernels only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_cg.compat import thunder as compat
from thunder_cg.compat.cuda import chooses_cudnn_attention, cudnn_attention, cudnn_attention_backward
from thunder_cg.kernels.derivatives import like, register

executor = compat.OperatorExecutor("cudnn_attention")
compat.register_executor(executor)


def _meta(query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None) -> Any:
    return compat.TensorProxy(like=query, shape=(*query.shape[:-1], value.shape[-1]))


def _forward_meta(query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None) -> Any:
    shape, dtype = (*query.shape[:-1], 1), compat.get_computation_dtype(query.dtype)
    return _meta(query, key, value, bias, is_causal, scale), compat.TensorProxy(like=query, shape=shape, dtype=dtype)


def _compact(tensor: Tensor) -> Tensor:
    """As cuDNN needs it: the elements of a head lie next to each other, and no element stands for several."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()


def _run(
    results: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Any:
    """The first of the results, or it and the logsumexp of each row, which a backward needs."""
    inputs = map(_compact, (query, key, value))
    computed: Any = cudnn_attention(*inputs, bias, results == 2, 0.0, is_causal, False, scale=scale)
    return computed[:2] if results == 2 else computed[0]


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = map(_compact, (query, key, value))
    unused = torch.empty((), dtype=torch.int64, device=query.device)  # the seed and the offset of a dropout
    lengths = query.shape[2], key.shape[2]
    gradients: tuple[Tensor, Tensor, Tensor] = cudnn_attention_backward(
        gradient, *inputs, result, logsumexp, unused, unused, bias, None, None, *lengths, 0.0, is_causal, scale=scale
    )
    return gradients


infer = executor.register_operator("cudnn_attention", meta=_meta, fn=partial(_run, 1))
forward = executor.register_operator("cudnn_attention_forward", meta=_forward_meta, fn=partial(_run, 2))
backward = executor.register_operator("cudnn_attention_backward", meta=like(1, 2, 3), fn=_backward)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    derives: bool,
) -> Any:
    bias = attn_mask
    if bias is not None and compat.to_torch_dtype(bias.dtype) == torch.bool:  # Inductor does it once for each mask
        bias = compat.torch_to(compat.torch_where(bias, 0.0, float("-inf")), query.dtype)
    if not derives:
        return infer(query, key, value, bias, is_causal, scale)
    result, logsumexp = forward(query, key, value, bias, is_causal, scale)
    gradient = compat.prims.get_grad(result)
    gradients = backward(gradient, query, key, value, result, logsumexp, bias, is_causal, scale)
    for argument, of_argument in zip((query, key, value), gradients):
        compat.prims.put_grad(argument, of_argument)
    return result


def _is_for_cudnn(
    *, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> bool:
    """Whether PyTorch would have cuDNN compute it, without dropout and a derivative of the mask."""
    inputs = (query, key, value)
    trains = compat.get_compile_data().is_grad_enabled
    if dropout_p != 0.0 or any(each.ndim != 4 for each in inputs):
        return False
    layouts = [(each.shape, compat.to_torch_dtype(each.dtype)) for each in inputs]
    if attn_mask is not None:
        layouts.append((attn_mask.shape, compat.to_torch_dtype(attn_mask.dtype)))
        types = (torch.bool,) if trains else (torch.bool, layouts[0][1])  # a boolean has no derivative
        if layouts[-1][1] not in types or attn_mask.device != query.device:
            return False
    return chooses_cudnn_attention(compat.to_torch_device(query.device), layouts, bool(is_causal), scale, trains)


register(executor, F.scaled_dot_product_attention, _attention, _is_for_cudnn)
