"""Compiles calls without and with the transform, and compares their results bit for bit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import thunder
import torch

from thunder_cg.analysis import rules
from thunder_cg.analysis.ops import Op
from thunder_cg.analysis.rules import Key, Reason
from thunder_cg.compat.tensors import tree_leaves
from thunder_cg.compat.thunder import get_default_executors, get_executor
from thunder_cg.report.programs import locate
from thunder_cg.runtime.backend import Pool
from thunder_cg.runtime.backends import resolve
from thunder_cg.runtime.program import Program
from thunder_cg.tools.measuring import deterministic_algorithms
from thunder_cg.tools.operators.samples import DRAWS, SampledCall, twins
from thunder_cg.tools.workers import failure_text
from thunder_cg.transform import cudagraph_transform
from thunder_cg.verify.compare import same_bits

AGAIN = 8  # uncaptured calls that have to agree before a difference counts as an error of the capture
WITHIN = 4.0  # largest distance of a sum that varies from call to call, in distances between uncaptured calls
_FRAME = frozenset({Reason.BOOKKEEPING, Reason.TOO_SMALL})


class NotTraced(Exception):
    """Uncaptured Thunder cannot compile or run a call, with the values of `draw`."""

    def __init__(self, reason: str, draw: int) -> None:
        super().__init__(reason)
        self.draw = draw


@dataclass(slots=True)
class CaptureTrial:
    """The results of some calls that were compiled together.

    Attributes:
        verdicts: for each call "pass", "wrong" or "nondeterministic".
        captured: how often each symbol was replayed, in the forward and in the backward.
        eager: symbols outside of the regions, and why.
        failure: the symbol, if it is known, and the error: a region could not be captured, or a call with graphs
            raised.
        unfit: why regions that were captured were not replayed; "" if they were.
    """

    verdicts: list[str] = field(default_factory=list)
    captured: dict[str, Counter[Key]] = field(default_factory=dict)
    eager: dict[Key, str] = field(default_factory=dict)
    failure: tuple[Key | None, str] | None = None
    unfit: str = ""

    @property
    def clean(self) -> bool:
        return self.failure is None and not self.unfit and "wrong" not in self.verdicts


def attempt(
    calls: Sequence[SampledCall], device: str, grad: bool, allow: Iterable[str] = (), executors: Sequence[str] = ()
) -> CaptureTrial:
    """Compiles and runs the calls, uncaptured and captured.

    Raises:
        NotTraced: Thunder without the transform raises.
    """
    jit: dict[str, Any] = {"executors": [*map(get_executor, executors), *get_default_executors()]} if executors else {}
    fn = together(calls)
    keep_alive = torch.linspace(0.5, 1.5, 4, device=device)
    plain = thunder.jit(fn, **jit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected: list[list[list[Any]]] = []
        try:
            for draw in range(DRAWS):
                expected.append(_run(plain, calls, keep_alive, draw, grad))
        except Exception as error:
            raise NotTraced(failure_text(error), len(expected)) from None
        transform = cudagraph_transform(allow=list(allow), backend="tape" if device == "cpu" else "cuda", debug=True)
        graphed = thunder.jit(fn, transforms=[transform], **jit)
        trial = CaptureTrial()
        try:
            found = [_run(graphed, calls, keep_alive, draw, grad) for draw in range(DRAWS)]
        except Exception as error:
            trial.failure = (None, failure_text(error))
            return trial
        for index, call in enumerate(calls):
            pairs = [(expected[d][index], found[d][index]) for d in range(DRAWS)]

            def again(draw: int, index: int = index) -> Any:
                return _run(plain, calls, keep_alive, draw, grad)[index]

            trial.verdicts.append(verdict(pairs, again, call.defined))
    for located in locate(graphed).programs:
        _add_program(located.program, trial)
    return trial


def verdict(pairs: Sequence[tuple[Any, Any]], again: Callable[[int], Any], defined: bool = True) -> str:
    """Compares the expected with the captured results, draw by draw.

    Args:
        again: repeats the uncaptured call of a draw.
    """
    bad = [draw for draw, (expected, found) in enumerate(pairs) if not _same(expected, found, defined)]
    if not bad:
        return "pass"
    usual, found = pairs[bad[0]][0], partial(again, bad[0])
    varies = any(not _same(usual, found(), defined) for _ in range(AGAIN)) or _may_vary(usual, found, defined)
    close = varies and all(
        _same(*pairs[draw], defined, close=True) or _is_usual(*pairs[draw], partial(again, draw)) for draw in bad
    )
    return "nondeterministic" if close else "wrong"


def _is_usual(expected: list[Any], found: list[Any], again: Callable[[], list[Any]]) -> bool:
    """Whether uncaptured calls differ as much from each other as from `found`: much, where terms of a sum cancel."""
    others = [again() for _ in range(AGAIN)]
    for index, (usual, mine) in enumerate(zip(expected, found)):
        if _same(usual, mine, defined=True, close=True):
            continue
        if (
            not isinstance(usual, torch.Tensor)
            or usual.layout != torch.strided
            or not _same(usual, mine, defined=False)
        ):
            return False
        spread = max(float((other[index] - usual).abs().max()) for other in others)
        if not float((mine - usual).abs().max()) <= WITHIN * spread:  # nor if one is not a number
            return False
    return True


def _may_vary(usual: Any, again: Callable[[], Any], defined: bool) -> bool:
    """Whether PyTorch has a different deterministic kernel, or warns that it has none."""
    with warnings.catch_warnings(record=True) as said, deterministic_algorithms(warn_only=True):
        warnings.simplefilter("always")
        found = again()
    return any("deterministic implementation" in str(w.message) for w in said) or not _same(usual, found, defined)


def capture_alone(call: SampledCall, device: str, grad: bool) -> tuple[str, str] | None:
    """Captures without Thunder what PyTorch runs for a call, or for its derivative, and replays it.

    Returns:
        "pass", "wrong" or "fail" and the error, or None if PyTorch itself raises.
    """
    pool = resolve("tape" if device == "cpu" else "cuda").pool(torch.device(device))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return _captured_alone(call, pool, grad)
    finally:
        pool.close()


def _captured_alone(call: SampledCall, pool: Pool, grad: bool) -> tuple[str, str] | None:
    inputs = twins(call.draws[0])
    try:
        expected = [_alone(call, twins(draw), grad, seed) for seed, draw in enumerate(call.draws)]
    except Exception:
        return None
    try:
        graph, results = pool.capture(lambda: _alone(call, inputs, grad), ())
        for seed in range(1, DRAWS):
            for mine, fresh in zip(inputs, call.draws[seed]):
                mine.copy_(fresh)
            torch.manual_seed(seed)
            graph.replay()
            if not _same(expected[seed], list(results), call.defined):
                return "wrong", "captured without Thunder"
    except Exception as error:
        return "fail", f"captured without Thunder: {failure_text(error)}"
    return "pass", ""


def _alone(call: SampledCall, tensors: Sequence[torch.Tensor], grad: bool, seed: int | None = None) -> list[Any]:
    args, kwargs = call.arguments(tensors)
    if seed is not None:
        torch.manual_seed(seed)
    with torch.set_grad_enabled(grad):
        results = tree_leaves(call.fn(*args, **kwargs))
    if not grad:
        return results
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    if not roots:
        raise NotImplementedError("nothing that it returns requires grad")
    return [*torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)]


def together(calls: Sequence[SampledCall]) -> Callable[..., Any]:
    """One function that makes all calls. It adds two kernels, because a region needs two."""
    space: dict[str, Any] = {"torch": torch}
    lines, count = [], 0
    for index, call in enumerate(calls):
        names = [f"t{count + i}" for i in range(len(call.draws[0]))]
        count += len(names)
        args, kwargs = call.arguments(map(_Variable, names))
        space[f"f{index}"] = call.fn
        words = [_literal(a, space) for a in args] + [f"{k}={_literal(v, space)}" for k, v in kwargs.items()]
        lines.append(f"        f{index}({', '.join(words)}),\n")
    head = ", ".join(["keep_alive", *(f"t{i}" for i in range(count))])
    source = f"def calls({head}):\n    return (\n{''.join(lines)}        torch.sin(torch.cos(keep_alive)),\n    )\n"
    exec(compile(source, "<operator sweep>", "exec"), space)
    function: Callable[..., Any] = space["calls"]
    return function


class _Variable(str):
    """A variable in the text of `together`."""


def _literal(value: Any, space: dict[str, Any]) -> str:
    if isinstance(value, _Variable):
        return value
    if type(value) in (bool, int, str, type(None)) or (type(value) is float and abs(value) < float("inf")):
        return repr(value)
    if type(value) is torch.dtype:
        return str(value)
    if type(value) in (tuple, list):
        inside = "".join(f"{_literal(v, space)}, " for v in value)
        return f"({inside})" if type(value) is tuple else f"[{inside}]"
    if type(value) is dict:
        return "{" + "".join(f"{_literal(k, space)}: {_literal(v, space)}, " for k, v in value.items()) + "}"
    if type(value) is slice:
        return f"slice({', '.join(_literal(v, space) for v in (value.start, value.stop, value.step))})"
    name = f"c{len(space)}"
    space[name] = value
    return name


def _run(
    compiled: Any, calls: Sequence[SampledCall], keep_alive: torch.Tensor, draw: int, grad: bool
) -> list[list[Any]]:
    """For each call: its results and its arguments after it; with gradients, its results and the gradients."""
    given = [twins(call.draws[draw]) for call in calls]
    torch.manual_seed(draw)
    results = compiled(keep_alive + draw, *(t for tensors in given for t in tensors))
    results = results[: len(calls)]
    if not grad:
        return [[*tree_leaves(r), *tensors] for r, tensors in zip(results, given)]
    roots = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for tensors in given for t in tensors if t.requires_grad]
    if not roots or not wanted:
        raise NotImplementedError("nothing that it returns requires grad")
    torch.manual_seed(DRAWS + draw)
    cotangents = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in roots]
    found = iter(torch.autograd.grad(roots, wanted, cotangents, allow_unused=True))
    gradients = [[next(found) for t in tensors if t.requires_grad] for tensors in given]
    leaves = [[leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(r)] for r in results]
    return [found + g for found, g in zip(leaves, gradients)]


def _same(expected: Any, found: Any, defined: bool, close: bool = False) -> bool:
    """Whether layouts are equal, and values equal in every bit, or `close`."""
    if isinstance(expected, list):
        return len(expected) == len(found) and all(_same(a, b, defined, close) for a, b in zip(expected, found))
    if not isinstance(expected, torch.Tensor):
        return type(expected) is type(found) and (expected == found or expected != expected)
    if not isinstance(found, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    if expected.layout != torch.strided or found.layout != torch.strided:
        return expected.layout == found.layout and _close(expected.to_dense(), found.to_dense())
    if expected.stride() != found.stride():
        return False
    return not defined or (_close(expected, found) if close else same_bits(expected, found))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _add_program(program: Program, trial: CaptureTrial) -> None:
    """Adds the symbols of a program to the trial: replayed, eager, or failed."""
    ops, verdicts = program.ops.ops, program.plan.verdicts
    own = _keep_alive_ops(ops)
    replayed = trial.captured.setdefault(program.kind, Counter())
    inside: set[int] = set()
    for region in program.regions:
        if region.failure is not None:
            problem = region.failure.problem
            trial.failure = trial.failure or (_blamed(problem, ops, region.planned.ops), problem)
        elif not program.counts.calls:  # an unused backward: the forward returned its argument
            continue
        elif region.stats.replays < DRAWS - 1:
            trial.unfit = "; ".join(program.counts.fallbacks) or f"{program.counts.calls} calls of {DRAWS}"
        else:
            inside.update(region.planned.ops)
    for op in ops:
        if op.index in own:
            continue
        if op.index in inside:
            replayed.update(_keys(op))
        elif not verdicts[op.index].capture and verdicts[op.index].reason not in _FRAME:
            why = verdicts[op.index]
            trial.eager.setdefault(_key(op), f"{why.reason.name}: {why.detail}")


def _keep_alive_ops(ops: Sequence[Op]) -> set[int]:
    """The ops of `together`'s own kernels."""
    names, found = {"keep_alive"}, set()
    for op in ops:
        if not op.bookkeeping and not names.isdisjoint(op.inputs):
            names.update(op.outputs)
            found.add(op.index)
    return found


def _keys(op: Op) -> Iterable[Key]:
    """The symbol. For a fusion, also the symbols inside of it; for a symbol without a rule, its parts instead."""
    key = _key(op)
    consists = bool(op.subs) and not op.is_fusion and key not in rules.RULES
    if not consists:
        yield key
    if consists or op.is_fusion:
        for sub in op.subs:
            yield from _keys(sub)


def _key(op: Op) -> Key:
    executor, id_ = rules.key_of(op.executor, op.id)
    return executor, id_ if id_ is not None else "fusion"


def _blamed(problem: str, ops: Sequence[Op], indices: Sequence[int]) -> Key | None:
    for index in indices:
        if problem.startswith(f"{ops[index].name} at "):
            return _key(ops[index])
    return None
