"""`bisect`: which op gives other results in a graph than eagerly.

Step by step:

1.  What was compiled is compiled anew with ``verify=1`` and called a few times, so each replay runs beside its ops.
2.  If a region disagrees, the value hashes name the op. Where they do not, halves of the region's ops are denied until
    one op is left.
3.  The op is denied, and all starts again, so that the last round shows that nothing else is wrong.
4.  If no region disagrees, the compiled function itself is compared with uncaptured Thunder: an op may read something
    that has changed since its capture, and a new capture has the new value.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_cg.compat.tensors import tensors_in, tree_map_only
from thunder_cg.diagnose.compiling import compiled_as, refuse_sharded, transform_of
from thunder_cg.errors import DisagreementWarning, NotCompiledError
from thunder_cg.report.programs import locate, original
from thunder_cg.report.state import StateBefore
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.transform import CudagraphTransform
from thunder_cg.verify.compare import describe_difference, is_tolerable, same

_CALLS = 4  # a warm-up, a capture, and two replays, all but the first one verified
_NOTHING_COMPARED = "No replay was compared with an eager run: print(thunder_cg.explain(fn)) says why none ran."
_RUNS = 3  # of each side where results of whole calls are compared


@dataclass(frozen=True, slots=True)
class Culprit:
    """An op that gives other results in a graph than eagerly."""

    op: str  # as deny= takes it
    where: str  # "at model.py:12"
    region: str
    difference: str  # which result differs, and by how much

    def __str__(self) -> str:
        return f"{self.op} {self.where}, in {self.region}: {self.difference}"


@dataclass(frozen=True, slots=True, repr=False)
class Bisection:
    """What `bisect` found. It is true if something is wrong."""

    culprits: tuple[Culprit, ...]
    verified: int  # how many replays were compared with eager runs in the last round
    other: str = ""  # what is wrong besides, and is not known to be one op's fault

    def __bool__(self) -> bool:
        return bool(self.culprits or self.other)

    def __str__(self) -> str:
        lines = [*map(str, self.culprits), *([self.other] if self.other else [])]
        if self.culprits:
            agree = f"all {self.verified} replays agree with eager runs" if self.verified else "nothing is replayed"
            lines.append(f"Without these, {agree}." if not self.other else "")
            lines.append(f"To change it: deny={[each.op for each in self.culprits]!r} keeps the rest captured.")
        compared = f"All {self.verified} replays agree with eager runs." if self.verified else _NOTHING_COMPARED
        return "\n".join(filter(None, lines)) or compared

    __repr__ = __str__


def bisect(jfn: Any, /, *inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Bisection:
    """Finds the ops whose capture changes the results of a compiled function or module.

    What ``jfn`` was made of is compiled anew, once for each op that is found and once more, and called on copies of the
    inputs, with a backward if a result requires grad. Buffers, gradients and generators are as before afterwards; what
    an operator keeps by itself is not. Regions that communicate are not compared. Call it on all ranks: Thunder's ddp
    broadcasts parameters when it compiles, and the calls communicate.

    Args:
        jfn: what ``thunder.jit`` made with :func:`cudagraph_transform`.
        inputs: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        A `Bisection`: print it. It is false if all replays agree with eager runs, bit for bit, or as closely as eager
        runs agree among themselves.

    Raises:
        NotCompiledError: ``jfn`` is something else, or ranks have shards of its parameters (fsdp, tensor parallelism).
    """
    transform = transform_of(jfn)
    if transform is None:
        raise NotCompiledError(jfn, "thunder.jit did not make this with cudagraph_transform()", "bisect")
    trials = _Trials(jfn, transform, (inputs, dict(kwargs or {})))
    culprits: list[Culprit] = []
    with trials.state_kept():
        while wrong := trials.wrong({each.op for each in culprits}):
            culprit = trials.culprit(wrong[0], {each.op for each in culprits})
            if culprit is None or culprit.op in {each.op for each in culprits}:
                assert wrong[0].disagreement is not None
                other = f"{wrong[0].name} disagrees and no single op is to blame: {wrong[0].disagreement.difference}"
                return Bisection(tuple(culprits), trials.verified, other)
            culprits.append(culprit)
        other = "" if culprits else trials.stale()
    return Bisection(tuple(culprits), trials.verified, other)


class _Trials:
    """Compiles and calls ``jfn``'s original again and again, on the same inputs."""

    def __init__(self, jfn: Any, transform: CudagraphTransform, inputs: tuple[Any, dict[str, Any]]) -> None:
        self._jfn, self._options, self._inputs = jfn, transform.options, inputs
        self._source = original(jfn)
        refuse_sharded(jfn, self._source, "bisect")
        module = self._source if isinstance(self._source, torch.nn.Module) else None
        self._parameters = [*module.parameters()] if module is not None else []
        self._buffers = [*module.buffers()] if module is not None else []
        self.verified = 0  # replays that the last round has compared

    def wrong(self, denied: Set[str]) -> list[RuntimeRegion]:
        """The regions that disagree with their ops while ``denied`` ops are eager."""
        deny = {*self._options.deny, *denied}
        options = replace(self._options, verify=1, strict=False, deny=deny, allow={*self._options.allow} - deny)
        jitted = compiled_as(self._jfn, self._source, CudagraphTransform(options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DisagreementWarning)
            for _ in range(_CALLS):
                self._call(jitted)
        regions = [region for located in locate(jitted).programs for region in located.program.regions]
        self.verified = sum(region.stats.verified for region in regions)
        return [region for region in regions if region.disagreement is not None]

    def culprit(self, region: RuntimeRegion, denied: Set[str]) -> Culprit | None:
        """The op that is to blame for what ``region`` does while ``denied`` ops are eager."""
        disagreement = region.disagreement
        assert disagreement is not None
        if disagreement.op is not None:
            return Culprit(disagreement.op.deny_name, disagreement.where, region.name, disagreement.difference)
        names = [*dict.fromkeys(op.deny_name for op in region.ops)]
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = names[len(half) :] if self.wrong({*denied, *half}) else half
        where = next(
            (f"at {op.line}" for op in region.ops if op.line and op.deny_name == names[0]), "at an unknown line"
        )
        return Culprit(names[0], where, region.name, disagreement.difference)

    def stale(self) -> str:
        """What is wrong with the graphs that ``jfn`` has already, where new ones are right; "" if nothing is."""
        plain = compiled_as(self._jfn, self._source, None)
        for _ in range(_CALLS):  # from here on, it replays
            self._call(self._jfn)
        eagers, graphs = ([self._call(fn) for _ in range(_RUNS)] for fn in (plain, self._jfn))
        for i, (eager, graph) in enumerate(zip(zip(*eagers), zip(*graphs))):
            # What differs from run to run on both sides is an op that is eager on both.
            is_steady = any(all(same(value, side[0]) for value in side) for side in (eager, graph))
            if is_steady and not is_tolerable(eager, graph, None):
                difference = f"value {i} of a call: {describe_difference(eager[0], graph[0])}"
                why = "an op reads something besides its arguments that has changed since the capture"
                return f"New graphs are right, and those captured before are not ({difference}): {why}."
        return ""

    @contextmanager
    def state_kept(self) -> Iterator[None]:
        """Inside, calls may change buffers, gradients and generators; at the end, these are as they were."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._saved = StateBefore(self._buffers, [*tensors_in(self._inputs), *self._parameters])
        try:
            yield
        finally:
            self._restore()
            for parameter, gradient in zip(self._parameters, gradients):
                parameter.grad = gradient

    def _restore(self) -> None:
        self._saved.restore()
        for parameter in self._parameters:
            parameter.grad = None

    def _call(self, fn: Any) -> list[torch.Tensor]:
        """The tensors that a call returns, and the gradients of its inputs and parameters, from the state kept."""
        self._restore()
        args, kwargs = _copies(self._inputs)
        results = tensors_in(fn(*args, **kwargs))
        if trained := [result for result in results if result.requires_grad]:
            torch.autograd.backward(trained, [torch.ones_like(result) for result in trained])
        leaves = [*tensors_in((args, kwargs)), *self._parameters]
        return [*(t.detach() for t in results), *(t.grad for t in leaves if t.is_leaf and t.grad is not None)]


def _copies(inputs: Any) -> Any:
    """Copies that share memory with each other where the inputs do."""
    leaves: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return leaves.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

    return copy.deepcopy(tree_map_only(torch.Tensor, leaf, inputs))
