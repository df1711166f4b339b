"""The variants: ten ways to run the same step of the same model."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import Tensor, nn

from thunder_cg.tools.bench.cases import Case
from thunder_cg.tools.bench.models import MaskRcnn
from thunder_cg.transform import CudagraphTransform, cudagraph_transform

Step = Callable[[], Any]

EAGER = "eager"
THUNDER = "thunder"
THUNDER_OWN = "thunder + CUDAGraphTransform"
OURS = "thunder_cg"
COMPILE = "torch.compile"
REDUCE_OVERHEAD = "torch.compile, reduce-overhead"
GRAPHED_CALLABLES = "make_graphed_callables"
OURS_FUSED = "thunder_cg, torch.compile fusions"
FLOOR_OF_THUNDER = "hand-made graph of Thunder's kernels"
FLOOR = "hand-made graph"


class TimedTransform(CudagraphTransform):
    """The transform, with the seconds that its hooks took: what the analysis adds to a compilation.

    A collection of garbage that falls into a hook costs what is in the whole process, so it has to wait.
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


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of one variant alone, in training or evaluation mode, and its inputs, on the device."""

    case: Case
    model: nn.Module
    inputs: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that can be called; for thunder_cg, what `explain` can read, and the transform."""

    step: Step
    compiled: Any = None
    transform: TimedTransform | None = None


def step_of(subject: Subject, model: Callable[..., Any]) -> Step:
    """One call of `model`, the subject's or what it was compiled to.

    Inference: the output. TrainingFastPath: the loss; gradients are set to None before, and left on the parameters.
    """
    inputs = subject.inputs
    if not subject.case.trains:

        def infer() -> Any:
            with torch.no_grad():
                return model(*inputs)

        return infer
    parameters = list(subject.model.parameters())

    def train() -> Any:
        for parameter in parameters:
            parameter.grad = None
        loss = model(*inputs)
        loss.backward()
        return loss.detach()

    return train


def _eager(subject: Subject) -> Prepared:
    return Prepared(step_of(subject, subject.model))


def _thunder(subject: Subject) -> Prepared:
    return Prepared(step_of(subject, _jit(subject, [])))


def _thunder_own(subject: Subject) -> Prepared:
    return Prepared(step_of(subject, _jit(subject, [CUDAGraphTransform()])))


def _ours(subject: Subject) -> Prepared:
    backend = "cuda" if subject.device.type == "cuda" else "tape"
    transform = TimedTransform(cudagraph_transform(backend=backend).options)
    compiled = _jit(subject, [transform])
    return Prepared(step_of(subject, compiled), compiled, transform)


def _ours_fused(subject: Subject) -> Prepared:
    """With Thunder's executor that hands as much as it can to Inductor: other kernels, and fewer."""
    transform = cudagraph_transform(backend="cuda" if subject.device.type == "cuda" else "tape")
    return Prepared(step_of(subject, _jit(subject, [transform], executors=["torchcompile"])))


def _jit(subject: Subject, transforms: list[Any], **options: Any) -> Any:
    if not subject.case.dynamo:
        return thunder.jit(subject.model, transforms=transforms, **options)
    from thunder.dynamo import thunderfx  # it is slow to import, and few cases need it

    if isinstance(subject.model, MaskRcnn):
        subject.model.hide_from_dynamo()
    return thunderfx(subject.model, transforms=transforms, **options)


def _compile(subject: Subject) -> Prepared:
    return Prepared(step_of(subject, torch.compile(subject.model)))


def _reduce_overhead(subject: Subject) -> Prepared:
    step = step_of(subject, torch.compile(subject.model, mode="reduce-overhead"))

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return Prepared(marked)


def _graphed_callables(subject: Subject) -> Prepared:
    grad = torch.enable_grad() if subject.case.trains else torch.no_grad()
    with grad, _mended(subject.device) as pool:
        graphed: Any = torch.cuda.make_graphed_callables(subject.model, subject.inputs, pool=pool)
    return Prepared(step_of(subject, graphed))


def _hand_made_of_thunder(subject: Subject) -> Prepared:
    """The kernels that plain Thunder runs in a step, in one graph: what capturing them can reach."""
    return _graph_of(subject, _jit(subject, []))


def _hand_made(subject: Subject) -> Prepared:
    """The eager kernels of a step in one graph, its gradients in the graph's memory: nothing around the replay."""
    return _graph_of(subject, subject.model)


def _graph_of(subject: Subject, model: Callable[..., Any]) -> Prepared:
    step = step_of(subject, model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with _mended(subject.device) as pool, torch.cuda.graph(graph, pool=pool, stream=stream):
        output = step()

    def replay(alive: Any = (subject, step)) -> Any:
        """A graph keeps neither the tensors alive that it reads nor the compiled kernels that it launches."""
        graph.replay()
        return output

    return Prepared(replay)


@contextmanager
def _mended(device: torch.device) -> Iterator[Any]:
    """A pool to capture into. If that fails, it raises what broke the capture and leaves the process as it was.

    What a broken capture leaves behind (torch 2.9 to 2.11): its stream is current, the allocator still serves its pool,
    and the default generator does not draw before some capture has succeeded.
    """
    stream = torch.cuda.current_stream(device)
    pool = torch.cuda.graph_pool_handle()
    try:
        yield pool
    except Exception as error:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # a capture that ended in good order is not under way
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the graph is empty
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                pass
        raise (error.__context__ or error) from None


VARIANTS: dict[str, Callable[[Subject], Prepared]] = {
    EAGER: _eager,
    THUNDER: _thunder,
    THUNDER_OWN: _thunder_own,
    OURS: _ours,
    COMPILE: _compile,
    REDUCE_OVERHEAD: _reduce_overhead,
    GRAPHED_CALLABLES: _graphed_callables,
    OURS_FUSED: _ours_fused,
    FLOOR_OF_THUNDER: _hand_made_of_thunder,
    FLOOR: _hand_made,
}
ON_CPU = (EAGER, THUNDER, OURS)


def variants(device: torch.device) -> Sequence[str]:
    """The names of all that run there. The hand-made graph is last: it is the floor."""
    return tuple(VARIANTS) if device.type == "cuda" else ON_CPU
