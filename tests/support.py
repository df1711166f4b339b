"""What tests compare and count with."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import thunder
import torch
from thunder.core.transform_common import Transform

from thunder_cg import explain
from thunder_cg.report.programs import locate
from thunder_cg.runtime.program import Program


def same(a: Any, b: Any) -> None:
    """Bit for bit, and laid out alike."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (a.stride(), b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Equal parameters, gradients and buffers."""
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters()):
        same(p.detach(), q.detach())
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            same(p.grad, q.grad)
    for (_, p), (_, q) in zip(a.named_buffers(), b.named_buffers()):
        same(p, q)


def twice(fn: Any, transform: Transform, **jit: Any) -> tuple[Any, Any]:
    """A module or a function compiled without and with the transform; modules get equal weights of their own."""
    other = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
    return thunder.jit(fn, **jit), thunder.jit(other, transforms=[transform], **jit)


Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


def on_threads(*calls: Callable[[], object]) -> None:
    """Makes all calls at once, each on a thread of its own. Raises what one of them has raised."""
    errors: list[BaseException] = []

    def make(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def train(model: Any, batches: Sequence[Sequence[torch.Tensor]], optimizer: Optimizer = sgd) -> list[torch.Tensor]:
    """The loss of each step, a batch a step, from one seed. What is no loss yet is squared and averaged."""
    torch.manual_seed(7)
    steps = optimizer(model.parameters())
    losses = []
    for batch in batches:
        steps.zero_grad()
        loss = model(*batch)
        loss = loss if loss.dim() == 0 else loss.float().square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return losses


def training_step(model: torch.nn.Module, lr: float = 0.1) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of SGD on the mean of the squared results, for `graphed_step`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def usual_step(
    model: torch.nn.Module,
    make: Optimizer = sgd,
    after: Callable[[], object] = lambda: None,
    compiled: Callable[..., Any] | None = None,
    loss_of: Callable[..., torch.Tensor] = torch.nn.functional.cross_entropy,
) -> Any:
    """The step that most people write, for `graphed_step`: it classifies, and clips the norm of the gradient.

    Args:
        make: makes the optimizer, which is an attribute of the step.
        after: is called at the end of each step.
        compiled: is called instead of ``model``.
        loss_of: makes the loss of what the model returns, and the classes.
    """
    optimizer = make(model.parameters())
    compiled = model if compiled is None else compiled

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(compiled(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after()
        return loss

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def same_training(
    plain: Any, graphed: Any, batches: Sequence[Sequence[torch.Tensor]], optimizer: Optimizer = sgd
) -> None:
    """Trains both on the same batches: equal losses, and equal models at the end."""
    same(train(plain, batches, optimizer), train(graphed, batches, optimizer))
    same_state(plain, graphed)


def programs(jfn: Any) -> list[Program]:
    """All programs of a compiled function, as its report has them: a report of each call would take longer than it."""
    return [located.program for located in locate(jfn).programs]


def regions(jfn: Any) -> list[dict[str, Any]]:
    """All regions of a compiled function, as its report has them."""
    return [asdict(region) for trace in explain(jfn).traces for region in trace.regions]


def replays(jfn: Any) -> int:
    return sum(region.stats.replays for program in programs(jfn) for region in program.regions)


def fast_path_calls(jfn: Any) -> int:
    """How many calls went around Thunder's dispatch."""
    return sum(program.counts.fast_path_calls for program in programs(jfn))


def no_fast_path(jfn: Any) -> list[str | None]:
    """Of each forward: why no call can go around Thunder's dispatch."""
    return [program.no_fast_path for program in programs(jfn) if program.kind == "forward"]


def run_what_inductor_gets(monkeypatch: Any) -> None:
    """Runs the graphs that thunderfx gives Inductor as they are: it would need a C++ compiler, and takes long."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)
    # Later passes would change the graph, so it is copied, as Inductor's code is what it was.
    one_way = lambda graph, inputs, **options: partial(_run_boxed, copy.deepcopy(graph))  # noqa: E731
    monkeypatch.setattr("thunder_cg.compat.inductor.compile_fx_inner", one_way)


def _run_boxed(graph: Any, tensors: list[torch.Tensor]) -> Any:
    return graph(*tensors)
