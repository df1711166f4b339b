"""What a compiled module may be relied on for, as Thunder's own tests show it."""

from __future__ import annotations

import builtins
import dis
import gc
import re
import sys
import weakref
from collections import Counter, OrderedDict

import pytest
import thunder
import torch
from support import replays, same, same_state
from thunder.core import interpreter, symbol
from thunder.dynamo import thunderfx
from torch import nn

import thunder_cg
from thunder_cg.compat import tracing


class Model(nn.Module):
    """Parameters, buffers that it writes, random numbers, and an ``.item()`` that splits it into two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        y = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.5, self.training)
        scale = x.sum().item()
        return torch.tanh(self.second(y) * 2) * scale


class Simple(nn.Module):
    """A model that goes around Thunder's dispatch once it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("make", "calls", "training"),
    [(Simple, 0, False), (Simple, 1, True), (Simple, 5, False), (Simple, 5, True), (Model, 5, False), (Model, 5, True)],
)
@pytest.mark.nightly_after(2)
def test_it_is_freed_by_reference_counting(transform, device, make, calls, training):
    """The compiled module, the original one, and the memory of the graphs; the transform may live on."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
    shared = transform()
    model = make().to(device).requires_grad_(training)
    jmodel = thunder.jit(model, transforms=[shared])
    for _ in range(calls):
        result = jmodel(torch.randn(4, 8, device=device))
        if training:
            result.sum().backward()
        del result
    assert calls < 5 or replays(jmodel)
    arenas = list(shared._shared.arenas._arenas)
    assert calls == 0 or arenas
    gc.collect()  # what Thunder leaves of a compilation, traces in reference cycles, holds the original module
    gc.disable()
    try:
        references = [weakref.ref(model), weakref.ref(jmodel), *arenas]
        del model, jmodel
        assert [reference() for reference in references] == [None] * len(references)
        if device == "cuda":
            assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.nightly_after(1)
def test_traces_pass_thunders_checker(transform, device, training):
    """Every symbol has a meta function, and every trace says where its values come from."""
    check = thunder.DebugOptions(check_traces=2)
    models = Model().to(device).requires_grad_(training), Model().to(device).requires_grad_(training)
    models[1].load_state_dict(models[0].state_dict())
    plain = thunder.jit(models[0], debug_options=check)
    graphed = thunder.jit(models[1], transforms=[transform()], debug_options=check)
    for step in range(4):
        x = torch.randn(4, 8, device=device)
        found = []
        for model in (plain, graphed):
            torch.manual_seed(step)
            found.append(model(x))
            if training:
                found[-1].sum().backward()
        same(*(result.detach() for result in found))
        same_state(plain, graphed)
    assert replays(graphed)


def test_the_name_of_its_node_in_the_autograd_graph(twins, device):
    plain, graphed = twins(Simple())
    for _ in range(5):
        x = torch.randn(4, 8, device=device)
        a, b = plain(x), graphed(x)
        assert type(b.grad_fn).__name__ == type(a.grad_fn).__name__
        assert b.grad_fn.name() == a.grad_fn.name()
        b.sum().backward()


def test_its_node_with_thunderfx(transform, device):
    """Its name, and its device: Note [The thread of a node] in fastpath/training.py."""
    graphed = thunderfx(Simple().to(device), transforms=[transform()])
    for _ in range(5):
        result = graphed(torch.randn(4, 8, device=device))
        assert result.grad_fn.name() == "ThunderFunctionBackward"
        assert [each.device for each in result.grad_fn._input_metadata] == [result.device]
        result.sum().backward()


class Builtins(nn.Module):
    """Uses all that `faster_tracing` does itself, and what is much like it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factors, self.name = nn.Linear(4, 4), {"a": 2.0, "b": 3}, "1"
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.ReLU())])
        self.layers[0].register_forward_hook(lambda module, args, result: result * 2)
        self.ordered = OrderedDict(c=1.5)

    @property
    def two(self):
        return 2

    def parts(self, *args, **kwargs):
        return [*args, *(each for each in args), *kwargs.values()]

    def forward(self, x, *more, mask=None, scale=1):
        for _, factor in enumerate(sorted(self.factors.values())):
            x = x * max(factor, abs(scale), int(self.name)) if isinstance(factor, float) and len(more) else x + 1
        x = self.layer(x) if hasattr(self, "layer") and not getattr(self, "none", None) else x
        x = x if mask or not self.ordered or "c" not in self.ordered or "z" in self.factors else x * self.ordered["c"]
        nothing, known = {}, {"k": self.two}
        parts = self.parts(x, *more, **nothing, **known)
        x = x * more[0] + more[-1][-2]
        try:
            x = x + parts[-1] + parts[:2][1] + self.factors["none"]
        except KeyError:
            x = x - parts[0]
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.nightly
def test_faster_tracing_changes_no_trace(transform, device, monkeypatch):
    """Guards included. And it interprets less than a quarter as many functions."""
    interpreted = []
    run = interpreter._run_frame
    monkeypatch.setattr(
        interpreter, "_run_frame", lambda *args, **kwargs: interpreted.append(1) or run(*args, **kwargs)
    )

    def traces() -> tuple[str, int]:
        interpreted.clear()
        model = thunder.jit(Builtins().to(device), transforms=[transform()])
        model(torch.ones(2, 4, device=device), 1, (2, 3), scale=3).sum().backward()
        made = thunder.last_prologue_traces(model) + thunder.last_traces(model) + thunder.last_backward_traces(model)
        return re.sub(r"took \d+ milliseconds|0x[0-9a-f]+", "", "\n".join(map(str, made))), len(interpreted)

    fast, few = traces()
    tracing._patches.close()  # as in a process of the user's: nothing is faster but what the module's dispatch compiles
    try:
        slow, many = traces()
        with monkeypatch.context() as context:
            context.setattr(tracing, "_inside", 0)
            with monkeypatch.context() as interrupt:
                interrupt.delattr(symbol, "tree_flatten_with_dataclass")  # the last that is patched
                with pytest.raises(AttributeError):
                    tracing.faster_tracing().__enter__()
            with tracing.faster_tracing():
                with tracing.faster_tracing():
                    pass
                assert interpreter.globals_lookup is tracing._look_up_global
        assert interpreter.globals_lookup is tracing._look_up and interpreter.dis is dis
    finally:
        tracing._patch()
    assert slow == fast and "check_literal_like" in fast
    assert few < many / 4, (few, many)


def test_faster_passes_change_no_fusion(device, monkeypatch):
    """How often Thunder compares symbols and gathers tags grows with the square of what is fused."""
    counted = Counter()

    def count(of, name):
        original = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args: counted.update([name]) or original(*args))

    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    count(symbol.BoundSymbol, "__eq__")
    count(symbol, "gather_tags")

    def repeated(x):
        for _ in range(30):
            x = torch.tanh(x)
        return x

    def traces() -> tuple[str, Counter[str]]:
        counted.clear()
        jitted = thunder.jit(repeated, executors=thunder_cg.executors())
        jitted(torch.ones(8, device=device))
        made = map(str, thunder.last_traces(jitted))
        return re.sub(r"took \d+ milliseconds|0x[0-9a-f]+", "", "\n".join(made)), Counter(counted)

    fast, few = traces()
    tracing._patches.close()
    try:
        slow, many = traces()
    finally:
        tracing._patch()
    assert slow == fast and "Inductor0" in fast
    assert all(few[name] < many[name] / 2 for name in many)


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="Thunder takes a function's globals for constants there, without this package, too",
)
def test_faster_tracing_keeps_the_guards_of_what_is_found_through_builtins(transform, device, monkeypatch):
    """A value that a builtin is the key of, and one that a function uses which somebody put among the builtins."""
    factors, shift = {float: 2.0}, [1.0]
    monkeypatch.setattr(builtins, "shifted", lambda x: x + shift[0], raising=False)

    class Uses(nn.Module):
        def forward(self, x):
            return shifted(x * factors[float])  # noqa: F821

    graphed = thunder.jit(Uses(), transforms=[transform()])
    for factors[float], shift[0] in [(2.0, 1.0), (3.0, 1.0), (3.0, 4.0)]:
        assert graphed(torch.ones(2, device=device)).tolist() == [factors[float] + shift[0]] * 2
