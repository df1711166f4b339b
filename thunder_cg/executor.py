"""The registered Thunder executor that owns region symbols."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from thunder_cg.compat import thunder as compat


class CudagraphExecutor(compat.FusionExecutor):
    """Owns the symbols that the transform puts into a trace. It claims no operators of its own.

    Named in ``executors=`` it only makes its symbols known to Thunder; regions are made by the transform, after all
    other executors have had their turn.
    """

    def can_fuse(self, bsym: compat.BoundSymbol) -> bool:
        return False

    def fusion_pass(self, trace: compat.TraceCtx) -> compat.TraceCtx:
        if not compat.is_ours(compat.get_compile_data()):
            warnings.warn(
                "executors=['cudagraph'] alone captures nothing; add transforms=[thunder_cg.cudagraph_transform()]",
                stacklevel=2,
            )
        return trace

    def bind(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        output: Any,
        *,
        subsymbols: Sequence[compat.BoundSymbol] = (),
        has_effect: bool = False,
    ) -> compat.BoundSymbol:
        """A bound symbol ``output = name(*args)`` that runs ``fn``; with ``has_effect`` it stays without an output.

        Its meta function returns ``output``: a symbol of this executor is bound once, for one place in one trace.
        """
        tags = [compat.OpTags.DONT_DCE] if has_effect else None
        symbol = compat.Symbol(name, meta=lambda *args: output, is_fusion=True, executor=self, tags=tags)
        return compat.BoundSymbol(symbol, tuple(args), {}, output, tuple(subsymbols), _call_ctx={name: fn})


executor = CudagraphExecutor("cudagraph")
compat.register_executor(executor)
