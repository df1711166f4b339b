"""A fuser that has Inductor compile as much of a trace as a graph can hold."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.collectives import compute_in_pieces, in_order
from thunder_cg.analysis.ops import Ops, read
from thunder_cg.analysis.rules import VJP
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.torch import CompileError, TooManyLayouts, free_layouts
from thunder_cg.kernels import activation, derivatives, loss, normalization  # noqa: F401  (they register operators)
from thunder_cg.kernels.convolution import has_channels_last

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
        self._compiling = _FusionPass()
        for id_, implementation in compat.torch_implementations().items():
            self.register_supported(id_, implementation.checker, grad_transform=implementation.grad_transform)
        for name in (*compat.torch_operators(), *derivatives.executor.opmap, *derivatives.fused_executor.opmap):
            self.register_supported(name)
        for id_ in [id_ for id_ in self.implmap if str(id_).endswith(VJP)]:
            del self.implmap[id_]

    def can_fuse(self, bsym: compat.BoundSymbol) -> bool:
        """Whether the executor takes the symbol. In a fusion pass, that depends on the operator's arguments, too."""
        return id(bsym) not in self._compiling.eager and super().can_fuse(bsym)

    def fusion_pass(self, trace: compat.TraceCtx) -> compat.TraceCtx:
        ops = read(trace)
        aliasing = Aliasing.of(ops)
        trace = in_order(trace, ops, compute_in_pieces(ops, aliasing))
        self._compiling.eager = _eager_symbols(ops, aliasing)
        written = frozenset().union(*aliasing.writes)
        self._compiling.written = frozenset(name for name, of in aliasing.sets.items() if of in written)
        self._compiling.ops, self._compiling.sets = ops, aliasing.sets
        self._compiling.writes = {id(op.symbol): aliasing.writes[op.index] for op in ops.ops}
        self._compiling.order = {id(symbol): position for position, symbol in enumerate(trace.bound_symbols)}
        self._compiling.makers = {
            proxy.name: symbol for symbol in trace.bound_symbols for proxy in symbol.flat_proxy_outs
        }
        self._compiling.returned = frozenset(ops.ops[-1].inputs)
        returns = trace.bound_symbols[-1]
        read_names = {name for op in ops.ops for name in op.inputs}
        writes = (op.symbol for op in ops.ops if aliasing.writes[op.index])
        results = [proxy for each in writes for proxy in each.flat_proxy_outs if proxy.name not in read_names]
        # Thunder drops what makes nothing that is read, and computes anew what leads to it. Not so a write.
        trace.bound_symbols[-1] = returns.from_bsym(args=(*returns.args, *results))
        try:
            fused = super().fusion_pass(trace)
        finally:
            self._compiling.eager, self._compiling.makers = frozenset(), {}
            self._compiling.ops = _FusionPass.ops
            self._compiling.order, self._compiling.writes = {}, {}
        fused.bound_symbols[-1] = returns
        return fused

    def fuse(self, region: Any, fusion_counter: int) -> compat.BoundSymbol:
        inputs, outputs = ([compat.unvariableify(each) for each in found] for found in (region.inputs, region.outputs))
        symbols = _complete(region.bound_symbols, inputs, outputs, self._compiling.makers, self._compiling.order)
        _keep_what_costs(symbols)
        for inner in symbols:  # computed once more, it would write once more, or read what was written since
            if any(proxy.name in self._compiling.written for proxy in (*inner.flat_proxy_args, *inner.flat_proxy_outs)):
                inner.tags.add(_ONCE)
        returned = [i for i, proxy in enumerate(outputs) if proxy.name in self._compiling.returned]
        is_free = any("conv" in inner.sym.name for inner in _walk(symbols)) and not self._returns_views(
            symbols, inputs, [outputs[i] for i in returned]
        )
        name = f"Inductor{fusion_counter}"
        in_torch = compat.in_torch(symbols, inputs, outputs)
        writes = frozenset().union(*(self._compiling.writes[id(symbol)] for symbol in symbols))
        written = [i for i, proxy in enumerate(inputs) if self._compiling.sets.get(proxy.name) in writes]
        refuses = any(inner.kwargs.get("grad_enabled") for inner in _walk(symbols))
        context = {name: Fusion(name, in_torch, returned if is_free else None, written, refuses)}
        symbol = compat.Symbol(name, meta=None, is_fusion=True, executor=self)
        return compat.BoundSymbol(symbol, inputs, {}, outputs, symbols, _call_ctx=context)

    def _returns_views(
        self, symbols: Iterable[compat.BoundSymbol], inputs: Iterable[compat.Proxy], returned: Sequence[compat.Proxy]
    ) -> bool:
        """Whether an image that the caller gets shares memory with an input or with another result that it gets."""
        inside = {id(symbol) for symbol in symbols}
        ops = self._compiling.ops
        sets = Aliasing.of(replace(ops, ops=tuple(op for op in ops.ops if id(op.symbol) in inside))).sets
        sharing = Counter(sets[proxy.name] for proxy in (*inputs, *returned) if proxy.name in sets)
        images = (proxy.name for proxy in returned if getattr(proxy, "ndim", 0) in (4, 5))
        return any(sharing[sets[name]] > 1 for name in images)


class _FusionPass(threading.local):
    ops: Ops = Ops((), {}, ())  # the trace
    eager: frozenset[int] = frozenset()  # addresses of the symbols of the trace that no graph can hold
    written: frozenset[str] = frozenset()  # values in memory that the trace writes in place
    sets: Mapping[str, str] = {}  # of the trace: the alias set of each tensor
    writes: Mapping[int, frozenset[str]] = {}  # of the trace: the alias sets that each symbol writes, by its address
    returned: frozenset[str] = frozenset()  # results of the trace, gradients included
    makers: Mapping[str, compat.BoundSymbol] = {}  # of the trace: the symbol that makes each value
    order: Mapping[int, int] = {}  # of the trace: the position of each symbol, by its address


def _eager_symbols(ops: Ops, aliasing: Aliasing) -> frozenset[int]:
    devices = {value.device.split(":")[0] for value in ops.values.values() if value.device is not None}
    captured = {
        op.index
        for device in devices
        for op, verdict in zip(ops.ops, classify(ops, aliasing, UserRules(), device))
        if verdict.capture and not op.communicates
    }
    return frozenset(id(op.symbol) for op in ops.ops if op.index not in captured)


def _complete(
    symbols: Iterable[compat.BoundSymbol],
    inputs: Iterable[compat.Proxy],
    outputs: Iterable[compat.Proxy],
    makers: Mapping[str, compat.BoundSymbol],
    order: Mapping[int, int],
) -> tuple[compat.BoundSymbol, ...]:
    """The symbols of a fusion, and those that make what it reads or returns and nothing in it makes, in trace order.

    Where Thunder (0.2.6) recomputes a value in a later fusion, it forgets what a symbol without arguments makes, such
    as zeros, and orders symbols by what they read and make alone: a read may then follow a write in place.
    """
    found = {id(symbol): symbol for symbol in symbols}
    known = {proxy.name for proxy in inputs}.union(p.name for each in found.values() for p in each.flat_proxy_outs)
    waiting = [*outputs, *(proxy for symbol in found.values() for proxy in symbol.flat_proxy_args)]
    while waiting:
        if (name := waiting.pop().name) not in known:
            lost = makers[name]
            if any(compat.OpTags.RANDOM_OP in (inner.sym.tags or ()) for inner in _walk([lost])):
                raise RuntimeError("Thunder's rematerialization lost a random draw; torchcompile has that, too")
            found[id(lost)] = lost
            known.update(proxy.name for proxy in lost.flat_proxy_outs)
            waiting += lost.flat_proxy_args
    return tuple(sorted(found.values(), key=lambda symbol: order[id(symbol)]))


def _keep_what_costs(symbols: Sequence[compat.BoundSymbol]) -> None:
    """Has the backward get what it would take long to compute once more.

    That is what expensive operators make. It is also what an expensive operator and another one take, as the sum at the
    end of a residual block. It is in memory in any case, and to compute it the backward would go through all blocks.
    """
    users: dict[str, list[compat.BoundSymbol]] = {}
    expensive: set[int] = set()
    for symbol in symbols:
        if symbol.sym.name in _EXPENSIVE:
            symbol.tags.add(_ONCE)
        if compat.has_tags(symbol, {_ONCE}):
            expensive.add(id(symbol))
        for name in {proxy.name for proxy in symbol.flat_proxy_args}:
            users.setdefault(name, []).append(symbol)
    for symbol in symbols:
        for proxy in symbol.flat_proxy_outs:
            of = users.get(proxy.name, ())
            if len(of) > 1 and any(id(user) in expensive for user in of):
                symbol.tags.add(_ONCE)


def _walk(symbols: Iterable[compat.BoundSymbol]) -> Iterator[compat.BoundSymbol]:
    for symbol in symbols:
        yield symbol
        yield from _walk(symbol.subsymbols)


class Fusion:
    """A stretch of a trace, compiled by Inductor at its first call.

    Note [Layouts of convolutions]
        Convolutions are fastest with channels last, so Inductor converts to that and, at the end of what it compiles,
        back. Where a forward and its backward are compiled apart, it would convert whatever the forward saves. So a
        stretch with convolutions leaves its results as they are, and only what the caller gets is converted back. That
        is a copy. So results stay in PyTorch's layouts where the caller gets an image and a view of it.

    Args:
        in_torch: the stretch with PyTorch's operators.
        returned: of a stretch with convolutions, the positions of the results that the caller gets.
        written: the positions of the arguments whose memory it writes.
        refuses_leaves: whether PyTorch refuses that where autograd accumulates a gradient for one of them.

    Attributes:
        failure: why Inductor could not compile it, so that it runs operator by operator; None if it could.
    """

    def __init__(
        self,
        name: str,
        in_torch: Callable[..., Any],
        returned: Sequence[int] | None,
        written: Sequence[int],
        refuses_leaves: bool,
    ) -> None:
        self._written, self._refuses_leaves = frozenset(written), refuses_leaves
        self.__name__ = name
        self._in_torch, self._returned = compat.outside_of_autograd(in_torch), returned
        self._run = compat.outside_of_autograd(torch.compile(in_torch, fullgraph=True, dynamic=False))
        self.failure: str | None = None

    def __call__(self, *args: Any) -> Any:
        if self._written:
            if _overlap(args, self._written):
                return self._run_in_torch(args, "it writes an argument that shares memory with another one")
            if self._refuses_leaves and any(args[i].is_leaf and args[i].requires_grad for i in self._written):
                return self._in_torch(*args)  # which raises
            # As in a graph. Inductor refuses to compile some writes to what requires grad.
            detached = [arg.detach() if i in self._written and arg.requires_grad else arg for i, arg in enumerate(args)]
            given = dict(zip(map(id, detached), args))
            return [given.get(id(result), result) for result in self._run_compiled(detached)]
        return self._run_compiled(args)

    def _run_in_torch(self, args: Sequence[Any], why: str) -> Any:
        if self.failure is None:
            warnings.warn(f"Inductor cannot compile {self.__name__}, which runs op by op: {why}", stacklevel=3)
        self.failure = why
        return self._in_torch(*args)

    def _run_compiled(self, args: Sequence[Any]) -> Any:
        try:
            if self._returned is None:
                return self._run(*args)
            with free_layouts():
                results = [*self._run(*args)]
            for i in self._returned:
                results[i] = _laid_out_for_caller(results[i], args)
            return results
        except TooManyLayouts:  # the others stay compiled
            return self._run_in_torch(args, "too many layouts of arguments, see torch._dynamo.config.recompile_limit")
        except CompileError as error:  # raised before anything ran
            self._run, self._returned = self._in_torch, None
            cause = str(error).strip().replace("raised:\n", "raised: ").splitlines()[0]
            return self._run_in_torch(args, f"{type(error).__name__}: {cause}")


def _overlap(args: Sequence[Any], written: Iterable[int]) -> bool:
    """Whether a written argument may share elements with another one.

    PyTorch (2.11) compiles such arguments as views of one tensor, which it takes for another one when it is called.
    """
    spans = [_span(arg) if isinstance(arg, torch.Tensor) and arg.numel() else (0, 0) for arg in args]
    return any(
        spans[i][0] < end and start < spans[i][1] for i in written for j, (start, end) in enumerate(spans) if i != j
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element and of the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return (start := tensor.data_ptr()), start + (last + 1) * tensor.element_size()


def _laid_out_for_caller(result: Any, args: Sequence[Any]) -> Any:
    """A result with channels last as PyTorch has it: contiguous, unless the model has channels last itself."""
    if has_channels_last(result) is not True:
        return result
    images = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == result.dim()]
    alike = [arg for arg in images if arg.shape == result.shape] or images
    keeps = all(has_channels_last(arg) is not False for arg in alike) and any(map(has_channels_last, alike))
    return result if keeps else result.contiguous()


executor = InductorExecutor("inductor")
compat.register_executor(executor)
