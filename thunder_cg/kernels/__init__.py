"""The executors to pass to ``thunder.jit``: a graph replays the kernels that they choose.

Without a fuser, Thunder runs a kernel of PyTorch for each of its prims, and computes gradients of convolutions with
convolutions. Both are slower than eager PyTorch. What goes out is a list for ``thunder.jit(..., executors=...)``:
PyTorch's own kernels where they are the best (``attention``, ``convolution``), and a fuser for the rest. On machines
without nvFuser that is ``inductor``, with shorter derivatives for it to fuse (``normalization``, ``loss``,
``activation``, ``embedding``, ``pooling``), and sums in the place of linear layers of one row (``linear``). Where
Thunder's derivatives are wrong, ``torchs_derivatives`` has others. What comes in, later and from Thunder, are traces.
Thunder's registry owns the executors, each trace owns what was compiled for it.
"""

from __future__ import annotations

from typing import Any

from thunder_cg.compat import thunder as compat
from thunder_cg.kernels import attention, derivatives, inductor, torchs_derivatives


def executors() -> list[Any]:
    """The executors to train and serve with on this machine: ``thunder.jit(model, executors=thunder_cg.executors())``.

    nvFuser fuses where Thunder can use it, else Inductor. Other executors have other kernels, which round differently:
    give the same ones to both sides of a comparison.
    """
    fusers = [derivatives.fused_executor, torchs_derivatives.executor, inductor.executor]
    if compat.nvfuserex is not None:
        fusers = [torchs_derivatives.executor, compat.nvfuserex]
    return [attention.executor, compat.get_executor("sdpa"), derivatives.executor, *fusers]


__all__ = ["executors"]
