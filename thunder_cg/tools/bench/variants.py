"""The variants: twelve ways to run the same step of the same model."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import thunder
import torch
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import Tensor, nn

from thunder_cg.compat.cuda import end_allocate_to_pool
from thunder_cg.kernels import executors
from thunder_cg.step import graphed_step
from thunder_cg.tools.bench.cases import BenchmarkCase
from thunder_cg.tools.bench.models import MaskRcnn
from thunder_cg.tools.measuring import backend_of
from thunder_cg.transform import CudagraphTransform, cudagraph_transform

Step = Callable[[], Any]

EAGER = "eager"
THUNDER = "thunder"
THUNDER_OWN = "thunder + CUDAGraphTransform"
THUNDER_FUSED = "thunder, torch.compile fusions"
OURS = "thunder_cg"
COMPILE = "torch.compile"
REDUCE_OVERHEAD = "torch.compile, reduce-overhead"
GRAPHED_CALLABLES = "make_graphed_callables"
OURS_FUSED = "thunder_cg, torch.compile fusions"
GRAPHED_STEP = "thunder_cg, graphed_step"
GRAPHED_STEP_FUSED = "thunder_cg, graphed_step, torch.compile fusions"
FLOOR_OF_THUNDER = "hand-made graph of Thunder's kernels"
FLOOR = "hand-made graph"


class TimedTransform(CudagraphTransform):
    """The transform, with the seconds that its hooks took: what the analysis adds to a compilation.

    Garbage collection is off in a hook: its time depends on all objects of the process, not on the hook.
    """

    seconds = 0.0

    def transform_traces_pre_prologue(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed():
            return super().transform_traces_pre_prologue(*args, **kwargs)

    def transform_trace_post_optimization(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed():
            return super().transform_trace_post_optimization(*args, **kwargs)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        collects = gc.isenabled()
        gc.disable()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            if collects:
                gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSettings:
    """Which cases to measure in which variants, and where the numbers go.

    Attributes:
        device: with several ranks, of which kind; each rank has its own.
        quick: a few small cases and calls.
        names: the cases whose names hold one of these.
        variants: those that one of these means: it is the variant's name, or a part of it and no other variant's name.
            None for all.
        calls: of a turn, at most; None for the default.
        jobs: how many cases are prepared at once. They are timed one by one.
        json: a file for the numbers. Those that it has of other cases, from this machine, stay in it.
    """

    device: torch.device
    quick: bool = False
    names: Sequence[str] = ("",)
    variants: Sequence[str] = ()
    calls: int | None = None
    jobs: int = 1
    json: Path | None = None

    def has(self, case: str) -> bool:
        """Whether to measure the case of this name."""
        return any(name in case for name in self.names)

    def meant(self, names: Sequence[str]) -> list[str]:
        """Those of the variants of these names to measure."""
        texts = self.variants
        return [n for n in names if not texts or any(text == n or (text in n and text not in names) for text in texts)]


@dataclass(frozen=True, slots=True)
class Subject:
    """One variant's own copy of a model, in training or evaluation mode, and its inputs, on the device."""

    case: BenchmarkCase
    model: nn.Module
    inputs: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that can be called; for Thunder also what `explain` takes, and of ranks what gets gradients."""

    step: Step
    compiled: Any = None
    transform: TimedTransform | None = None
    parameters: Sequence[nn.Parameter] = ()


def step_of(subject: Subject, model: Callable[..., Any], parameters: Sequence[nn.Parameter] | None = None) -> Step:
    """One call of `model`, the subject's or what it was compiled to.

    Inference returns the output. Training returns the loss; it sets gradients to None before, and leaves the
    new ones on the parameters. A whole step also clips them and updates the parameters.

    Args:
        parameters: those that get gradients; by default the subject's.
    """
    inputs = subject.inputs
    if not subject.case.trains:

        def infer() -> Any:
            with torch.no_grad():
                return model(*inputs)

        return infer
    if subject.case.steps:
        return partial(_whole_step(subject, model), *inputs)
    trained = [*subject.model.parameters()] if parameters is None else parameters

    def train() -> Any:
        for parameter in trained:
            parameter.grad = None
        loss = model(*inputs)
        loss.backward()
        return loss.detach()

    return train


def _whole_step(subject: Subject, model: Callable[..., Any]) -> Callable[..., Any]:
    """A step as users write it, to be called with the inputs."""
    parameters = list(subject.model.parameters())
    on_gpu = subject.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=on_gpu)

    def step(*inputs: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    return step


def _jit(subject: Subject, *transforms: Any, **options: Any) -> Any:
    if not subject.case.dynamo:
        return thunder.jit(subject.model, transforms=[*transforms], **options)
    from thunder.dynamo import thunderfx  # it is slow to import, and few cases need it

    if isinstance(subject.model, MaskRcnn):
        subject.model.hide_from_dynamo()
    return thunderfx(subject.model, transforms=[*transforms], **options)


def _graphs(subject: Subject) -> CudagraphTransform:
    return cudagraph_transform(backend=backend_of(subject.device))


def _ours_fused(subject: Subject) -> Any:
    if not subject.case.dynamo:
        return _jit(subject, _graphs(subject), executors=executors())
    from thunder_cg.dynamo.compiler import compile_with

    return compile_with(subject.model, transforms=[_graphs(subject)], executors=executors())


def _calling(compiled: Callable[[Subject], Any]) -> Callable[[Subject], Prepared]:
    """The variant that calls what the model was compiled to."""
    return lambda subject: Prepared(step_of(subject, compiled(subject)))


def _ours(subject: Subject) -> Prepared:
    transform = TimedTransform(_graphs(subject).options)
    compiled = _jit(subject, transform)
    return Prepared(step_of(subject, compiled), compiled, transform)


def _graphed_step(subject: Subject, **options: Any) -> Prepared:
    compiled = _jit(subject, _graphs(subject), **options)
    step = graphed_step(_whole_step(subject, compiled), modules=[compiled], backend=backend_of(subject.device))
    return Prepared(partial(step, *subject.inputs), step)


def marked(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function that was compiled with reduce-overhead, whose calls are steps of their own."""

    def call(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return call


def _graphed_callable(subject: Subject) -> Any:
    grad = torch.enable_grad() if subject.case.trains else torch.no_grad()
    with grad, recovering_pool(subject.device) as pool:
        return torch.cuda.make_graphed_callables(subject.model, subject.inputs, pool=pool)


def _hand_made(compiled: Callable[[Subject], Any]) -> Callable[[Subject], Prepared]:
    """A step in one graph, gradients in the graph's memory, and nothing around the replay."""
    return lambda subject: Prepared(in_one_graph(subject, step_of(subject, compiled(subject))))


def in_one_graph(subject: Subject, step: Step) -> Step:
    """Captures a step."""
    torch.cuda.synchronize()  # the other stream reads what was made by now
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    mode = "thread_local"  # NCCL's watchdog asks about events meanwhile, from another thread
    with (
        recovering_pool(subject.device) as pool,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
    ):
        output = step()

    def replay(alive: Any = (subject, step)) -> Any:
        """Keeps alive the tensors that the graph reads and the compiled kernels that it launches."""
        graph.replay()
        return output

    return replay


@contextmanager
def recovering_pool(device: torch.device) -> Iterator[Any]:
    """A memory pool for a capture. After a failed capture, it restores the process and raises the original error.

    After a failed capture (torch 2.9 to 2.11), its stream is still current, the allocator still allocates to its pool,
    and the default generator raises until another capture has succeeded.
    """
    stream = torch.cuda.current_stream(device)
    pool = torch.cuda.graph_pool_handle()
    try:
        yield pool
    except Exception as error:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # the capture may have ended already
            end_allocate_to_pool(stream.device_index, pool)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                pass
        raise (error.__context__ or error) from None


VARIANTS: dict[str, Callable[[Subject], Prepared]] = {
    EAGER: _calling(lambda subject: subject.model),
    THUNDER: _calling(_jit),
    THUNDER_OWN: _calling(lambda subject: _jit(subject, CUDAGraphTransform())),
    OURS: _ours,
    COMPILE: _calling(lambda subject: torch.compile(subject.model)),
    REDUCE_OVERHEAD: _calling(lambda subject: marked(torch.compile(subject.model, mode="reduce-overhead"))),
    GRAPHED_CALLABLES: _calling(_graphed_callable),
    # With kernels that are chosen for the machine: fewer and other ones than Thunder's own.
    THUNDER_FUSED: _calling(lambda subject: _jit(subject, executors=executors())),
    OURS_FUSED: _calling(_ours_fused),
    GRAPHED_STEP: _graphed_step,
    GRAPHED_STEP_FUSED: lambda subject: _graphed_step(subject, executors=executors()),
    FLOOR_OF_THUNDER: _hand_made(_jit),  # the bound for a graph of these kernels
    FLOOR: _hand_made(lambda subject: subject.model),
}
ON_CPU = (EAGER, THUNDER, OURS)
_OF_WHOLE_STEPS = (GRAPHED_STEP, GRAPHED_STEP_FUSED)
_NOT_OF_WHOLE_STEPS = (THUNDER_OWN, GRAPHED_CALLABLES)  # they say nothing that training without updates does not


def variants(device: torch.device) -> Sequence[str]:
    """The names of the variants for a device. The hand-made graph comes last, because it is the lower bound."""
    return tuple(VARIANTS) if device.type == "cuda" else ON_CPU


def is_of(case: BenchmarkCase, name: str) -> bool:
    """Whether the case has this variant."""
    return name not in (_NOT_OF_WHOLE_STEPS if case.steps else _OF_WHOLE_STEPS)
