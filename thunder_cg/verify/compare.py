"""Two values compared bit for bit, and which differences are tolerated.

Note [Tolerated differences]
    Kernels that are not deterministic (atomic additions, some attention and convolution backwards) differ from run to
    run. So after a difference both sides run a few times more. A result may differ if the eager runs differ among
    themselves *and the replays do, too*: an operator that reads a Python variable is frozen in a graph. The graph may
    then be off by four times the spread of the eager runs, and by no more than sqrt(eps) of the result's dtype times
    the largest value (3e-4 of it in float32, 3 % in float16, 9 % in bfloat16): more is not rounding. Integers and
    booleans have no tolerance. A difference that is the same in every run, such as that of a library which chose
    another algorithm for the graph, has none either. Memory that a kernel never writes, such as the seed of an
    attention without dropout, is ignored. It is found by filling memory before a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from thunder_cg.compat.tensors import is_inexact

_SPREADS = 4  # how many times the spread of the eager runs is tolerated
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: -0.0 is not 0.0, and a NaN is itself."""
    tensor = tensor.int_repr() if tensor.is_quantized else _as_real(tensor)
    return tensor.view(_AS_INTEGERS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Unlike in `torch.equal`, 0.0 is not -0.0, and a NaN is itself."""
    return torch.equal(bits(one), bits(other))


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def ones(tensor: torch.Tensor) -> int:
    """What `bits` are in memory that is filled with ones."""
    return 255 if tensor.element_size() == 1 else -1


def effective_layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Size, strides and dtype; the strides only where they matter."""
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.size()) if n != 1) if tensor.numel() else ()
    return tuple(tensor.size()), strides, tensor.dtype


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same but for their values."""
    same = one.device == other.device and one.layout == other.layout
    return same and (one.layout is not torch.strided or effective_layout(one) == effective_layout(other))


def same(one: Any, other: Any) -> bool:
    """Equal, and tensors bit for bit and with the same layout."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_layout(one, other) and same_bits(one, other)
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))


def is_tolerable(eagers: Sequence[Any], graphs: Sequence[Any], ignored: torch.Tensor | None) -> bool:
    """Whether eager runs and replays agree, but for ``ignored`` elements. See Note [Tolerated differences]."""
    eager, graph = eagers[0], graphs[0]
    if not all(isinstance(value, torch.Tensor) and same_layout(value, eager) for value in (*eagers, *graphs)):
        return False
    unlike = bits(eager) != bits(graph)
    if ignored is not None:
        # Ones that ops write are there in each run; those of freed memory, which is filled with them, in some.
        for value in eagers:
            unlike &= ~(ignored & (bits(value) != ones(value)))
    if not unlike.any():
        return True
    if not is_inexact(eager):
        return False
    if all(same(value, eager) for value in eagers) or all(same(value, graph) for value in graphs):
        return False
    doubles, graph = [_as_real(value).double() for value in eagers], _as_real(graph).double()
    finite, unlike = doubles[0].isfinite(), unlike.reshape(graph.shape)
    if not all(torch.equal(value.isfinite() | ~unlike, finite | ~unlike) for value in (*doubles, graph)):
        return False
    unlike = unlike & finite
    if not unlike.any():
        return True
    stacked = torch.stack(doubles)[:, finite]
    spread = float((stacked.amax(0) - stacked.amin(0)).nan_to_num().max())
    scale = float(doubles[0][finite].abs().max())
    distance = float((graph - doubles[0])[unlike].abs().max())
    return distance <= min(_SPREADS * spread, math.sqrt(torch.finfo(eager.dtype).eps) * scale)


def describe_difference(eager: Any, graph: Any) -> str:
    """How many elements differ, by how much, and where first."""
    if not (isinstance(eager, torch.Tensor) and isinstance(graph, torch.Tensor)):
        return f"{graph!r} in the graph, {eager!r} eagerly"
    if not same_layout(eager, graph):
        layouts = [f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in (graph, eager)]
        return f"{layouts[0]} in the graph, {layouts[1]} eagerly"
    unlike = (bits(eager) != bits(graph)).reshape(*eager.shape, -1).any(-1)
    first = tuple(unlike.nonzero()[0].tolist())
    distance = float((_as_real(graph).double() - _as_real(eager).double()).abs().max())
    values = f"{graph[first].item()!r} in the graph, {eager[first].item()!r} eagerly"
    count = f"{int(unlike.sum())} of {eager.numel()} elements differ"
    return f"{count}, by up to {distance:.3g}, first at {first}: {values}"
