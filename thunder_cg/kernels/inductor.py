"""A fuser that has Inductor compile as much of a trace as a graph can hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.collectives import in_order, needless_copies
from thunder_cg.analysis.ops import Ops, read
from thunder_cg.analysis.pieces import compute_in_pieces
from thunder_cg.analysis.rules import VJP
from thunder_cg.compat import thunder as compat
from thunder_cg.kernels import activation, attention, derivatives, embedding, linear, loss, normalization, pooling  # noqa: F401  (they register)
from thunder_cg.kernels.fusion import Fusion, Kernels

_EXPENSIVE = frozenset({"convolution", "cumsum", "sort", "topk"})  # operators of PyTorch's that Thunder has no tags for
_ONCE = compat.OpTags.MATMUL_OP  # what has this tag, Thunder does not compute once more in the backward


class InductorExecutor(compat.TorchCompileExecutor):
    """Has Inductor compile whole stretches of a trace, as Thunder's executor ``torchcompile`` does, with these changes.

    - An operator keeps the derivative that Thunder has for PyTorch's kernel of it. Thunder's executor hides it.
    - What a graph cannot hold is not fused: one such operator would keep the whole fusion eager.
    - So is a derivative that Thunder takes with PyTorch's autograd, which Dynamo cannot trace.
    - Stretches end where collectives can overlap with the next one, not at each collective.
    - What writes in place is computed once, and a fusion keeps the order of the trace around it.
    - A stretch that Inductor cannot compile runs operator by operator, and `explain` says so.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._running = _Running()
        for id_, implementation in compat.torch_implementations().items():
            self.register_supported(id_, implementation.checker, grad_transform=implementation.grad_transform)
        # Attention is a call of cuDNN inside of what Inductor makes, so that a stretch does not end there. It does in
        # training: what a backward reads is freed between stretches.
        inside = (attention.infer.id, *derivatives.executor.opmap, *derivatives.fused_executor.opmap)
        for name in (*compat.torch_operators(), *inside):
            self.register_supported(name)
        for id_ in [id_ for id_ in self.implmap if str(id_).endswith(VJP)]:
            del self.implmap[id_]

    def can_fuse(self, bsym: compat.BoundSymbol) -> bool:
        """Whether the executor takes the symbol. In a fusion pass, that depends on the operator's arguments, too."""
        facts = self._running.facts
        return (facts is None or facts.is_captured(bsym)) and super().can_fuse(bsym)

    def fusion_pass(self, trace: compat.TraceCtx) -> compat.TraceCtx:
        facts = _TraceFacts(trace)
        trace = facts.in_order()
        returns = trace.bound_symbols[-1]
        # Thunder drops what makes nothing that is read, and computes anew what leads to it. Not so a write.
        trace.bound_symbols[-1] = returns.from_bsym(args=(*returns.args, *facts.unread_results_of_writes()))
        self._running.facts = facts
        try:
            fused = super().fusion_pass(trace)
        finally:
            self._running.facts = None
        fused.bound_symbols[-1] = returns
        return fused

    def fuse(self, region: Any, fusion_counter: int) -> compat.BoundSymbol:
        facts = self._running.facts
        assert facts is not None, "Thunder fuses in a fusion pass"
        inputs, outputs = ([compat.unvariableify(each) for each in found] for found in (region.inputs, region.outputs))
        symbols = facts.completed(region.bound_symbols, inputs, outputs)
        for each in facts.computed_once(symbols):
            each.tags.add(_ONCE)
        name = f"Inductor{fusion_counter}"
        symbol = compat.Symbol(name, meta=lambda *args: outputs, is_fusion=True, executor=self)
        if isinstance(region, compat.Region):  # Thunder has each fusion made anew after its rematerialization
            return compat.BoundSymbol(symbol, inputs, {}, outputs, symbols)
        returned = facts.returned(outputs)
        has_free_layouts = any("conv" in inner.sym.name for inner in _walk(symbols)) and not facts.share_memory(
            symbols, inputs, [outputs[i] for i in returned]
        )
        known = facts.functions[has_free_layouts]
        written_out, results = facts.without_round_trips(symbols, inputs, outputs)
        fusion = Fusion(
            name,
            facts.kernels(compat.in_torch(written_out, inputs, results, known)),
            returned if has_free_layouts else None,
            facts.written(inputs, symbols),
            any(inner.kwargs.get("grad_enabled") for inner in _walk(symbols)),
            facts.reduced(outputs),
            facts.new(inputs, outputs),
        )
        return compat.BoundSymbol(symbol, inputs, {}, outputs, symbols, _call_ctx={name: fusion})


class _TraceFacts:
    """What a fusion pass knows of its trace.

    Attributes:
        functions: of PyTorch's operators, for `in_torch`, by whether Inductor may choose layouts.
        kernels: has Inductor compile one of them. Equal layers share it, and are compiled once.
    """

    def __init__(self, trace: compat.TraceCtx) -> None:
        self.functions: dict[bool, dict[Any, Any]] = {False: {}, True: {}}
        self.kernels = cache(Kernels)
        self._trace, self._ops = trace, read(trace)
        ops, aliasing = self._ops, Aliasing.of(self._ops)
        self._aliasing, self._order = aliasing, compute_in_pieces(ops, aliasing)
        self._captured = _captured(ops, aliasing)
        self._written = frozenset().union(*aliasing.writes)  # alias sets
        self._returned = frozenset(ops.ops[-1].inputs)  # gradients included
        self._reduced = frozenset(name for index in needless_copies(ops, aliasing) for name in ops.ops[index].inputs)
        symbols = [ops.ops[index].symbol for index in self._order]
        self._makers = {proxy.name: symbol for symbol in symbols for proxy in symbol.flat_proxy_outs}
        # By address, which no other symbol has as long as the trace is there.
        self._position = {id(symbol): position for position, symbol in enumerate(symbols)}
        self._writes = {id(op.symbol): aliasing.writes[op.index] for op in ops.ops}

    def in_order(self) -> compat.TraceCtx:
        """The trace in the order in which it is fused."""
        return in_order(self._trace, self._ops, self._order)

    def is_captured(self, symbol: compat.BoundSymbol) -> bool:
        """Whether a graph can hold the symbol. One that the trace does not have is not known to be eager."""
        return self._captured.get(id(symbol), True)

    def unread_results_of_writes(self) -> list[compat.Proxy]:
        read_names = {name for op in self._ops.ops for name in op.inputs}
        writes = (op.symbol for op in self._ops.ops if self._aliasing.writes[op.index])
        return [proxy for each in writes for proxy in each.flat_proxy_outs if proxy.name not in read_names]

    def returned(self, outputs: Sequence[compat.Proxy]) -> list[int]:
        """The positions of those that the trace returns."""
        return [i for i, proxy in enumerate(outputs) if proxy.name in self._returned]

    def reduced(self, outputs: Sequence[compat.Proxy]) -> list[int]:
        """The positions of those that an all-reduce writes, and that share memory with nothing."""
        return [i for i, proxy in enumerate(outputs) if proxy.name in self._reduced]

    def new(self, inputs: Iterable[compat.Proxy], outputs: Sequence[compat.Proxy]) -> list[int]:
        """The positions of those that are in no input's memory."""
        sets = self._aliasing.sets
        given = {sets.get(proxy.name) for proxy in inputs}
        return [i for i, proxy in enumerate(outputs) if proxy.name in sets and sets[proxy.name] not in given]

    def share_memory(
        self, symbols: Iterable[compat.BoundSymbol], inputs: Iterable[compat.Proxy], returned: Sequence[compat.Proxy]
    ) -> bool:
        """Whether one of the results shares memory, in these symbols, with an input or another one. Vectors may."""
        inside = {id(symbol) for symbol in symbols}
        ops = replace(self._ops, ops=tuple(op for op in self._ops.ops if id(op.symbol) in inside))
        sets = Aliasing.of(ops).sets
        sharing = Counter(sets[proxy.name] for proxy in (*inputs, *returned) if proxy.name in sets)
        return any(sharing[sets[proxy.name]] > 1 for proxy in returned if getattr(proxy, "ndim", 0) > 1)

    def written(self, inputs: Sequence[compat.Proxy], symbols: Iterable[compat.BoundSymbol]) -> list[int]:
        """The positions of the inputs whose memory the symbols write."""
        written = frozenset().union(*(self._writes[id(symbol)] for symbol in symbols))
        return [i for i, proxy in enumerate(inputs) if self._aliasing.sets.get(proxy.name) in written]

    def completed(
        self, symbols: Iterable[compat.BoundSymbol], inputs: Iterable[compat.Proxy], outputs: Iterable[compat.Proxy]
    ) -> tuple[compat.BoundSymbol, ...]:
        """The symbols of a fusion, and those that make what it lacks of what it reads or returns, in trace order.

        Where Thunder (0.2.6) recomputes a value in a later fusion, it forgets what a symbol without arguments makes,
        such as zeros, and orders symbols by what they read and make alone: a read may then follow a write in place.
        """
        found = {id(symbol): symbol for symbol in symbols}
        known = {proxy.name for proxy in inputs}.union(p.name for each in found.values() for p in each.flat_proxy_outs)
        waiting = [*outputs, *(proxy for symbol in found.values() for proxy in symbol.flat_proxy_args)]
        while waiting:
            if (name := waiting.pop().name) not in known:
                lost = self._makers[name]
                if any(compat.OpTags.RANDOM_OP in (inner.sym.tags or ()) for inner in _walk([lost])):
                    raise RuntimeError("Thunder's rematerialization lost a random draw; torchcompile has that, too")
                found[id(lost)] = lost
                known.update(proxy.name for proxy in lost.flat_proxy_outs)
                waiting += lost.flat_proxy_args
        return tuple(sorted(found.values(), key=lambda symbol: self._position[id(symbol)]))

    def computed_once(self, symbols: Sequence[compat.BoundSymbol]) -> list[compat.BoundSymbol]:
        """Those of a fusion whose results the backward gets, and does not compute once more. They are:

        - What takes or makes a value in memory that the trace writes. A second time, it would write once more, or read
          what was written since.
        - What is expensive.
        - What an expensive operator takes, as the result of a normalization or of an activation: that operator's own
          backward needs it, and would have it written to memory once more. But not what was in memory before in another
          type, as the weights are under autocast: to convert it again costs less than the memory.
        """
        expensive = {id(each) for each in symbols if each.sym.name in _EXPENSIVE or compat.has_tags(each, {_ONCE})}
        taken = {proxy.name for each in symbols if id(each) in expensive for proxy in each.flat_proxy_args}
        computed = set[str]()  # what is more than a conversion of what was in memory before
        for each in symbols:
            if not compat.computes_nothing(each) or any(proxy.name in computed for proxy in each.flat_proxy_args):
                computed.update(proxy.name for proxy in each.flat_proxy_outs)
        kept = taken & computed
        return [
            each
            for each in symbols
            if id(each) in expensive
            or any(proxy.name in kept for proxy in each.flat_proxy_outs)
            or any(self._is_written(proxy) for proxy in (*each.flat_proxy_args, *each.flat_proxy_outs))
        ]

    def without_round_trips(
        self, symbols: Iterable[compat.BoundSymbol], inputs: Iterable[compat.Proxy], outputs: Sequence[compat.Proxy]
    ) -> tuple[list[compat.BoundSymbol], list[compat.Proxy]]:
        """The symbols and results of a fusion, with a value itself where it was converted to a wider type and back.

        Thunder's derivative of a sum of 16 bits converts so. Inductor would write the wider value to memory, and a
        result that equals another value once more. Each result keeps memory of its own.
        """
        wider: dict[str, compat.TensorProxy] = {}  # by name, what was converted to it
        same: dict[Any, compat.TensorProxy] = {}  # by what equals it
        found = []
        for symbol in symbols:
            found.append(symbol.from_bsym_swap_proxies(same, skip_output=True))
            if (converted := compat.conversion_of_tensor(symbol)) is None or any(map(self._is_written, converted)):
                continue
            source, result = converted
            if (origin := wider.get(source.name)) is not None and origin.dtype == result.dtype:
                same[compat.variableify(result)] = origin
            elif compat.is_exact(source.dtype, result.dtype):
                wider[result.name] = same.get(compat.variableify(source), source)
        sets = self._aliasing.sets
        apart = {sets.get(proxy.name) for proxy in (*inputs, *outputs)}
        results: list[compat.Proxy] = []
        for proxy in outputs:
            origin = same.get(compat.variableify(proxy), proxy)
            results.append(proxy if sets.get(origin.name) in apart else origin)
            apart.add(sets.get(origin.name))
        return found, results

    def _is_written(self, proxy: compat.Proxy) -> bool:
        """Whether a value is in memory that the trace writes in place."""
        return self._aliasing.sets.get(proxy.name) in self._written


class _Running(threading.local):
    facts: _TraceFacts | None = None  # in a fusion pass of this thread


def _captured(ops: Ops, aliasing: Aliasing) -> dict[int, bool]:
    """Whether a graph can hold it, of each symbol by its address."""
    devices = {value.device.split(":")[0] for value in ops.values.values() if value.device is not None}
    captured = {
        op.index
        for device in devices - {"cpu"} or devices  # what is on the host would keep a whole fusion eager
        for op, verdict in zip(ops.ops, classify(ops, aliasing, UserRules(), device))
        if verdict.capture and not op.communicates
    }
    return {id(op.symbol): op.index in captured for op in ops.ops}


def _walk(symbols: Iterable[compat.BoundSymbol]) -> Iterator[compat.BoundSymbol]:
    for symbol in symbols:
        yield symbol
        yield from _walk(symbol.subsymbols)


executor = InductorExecutor("inductor")
compat.register_executor(executor)
