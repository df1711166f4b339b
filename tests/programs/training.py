"""Random training steps, and what may happen between their calls. What a step finds around it is in world.py."""

from __future__ import annotations

import collections
import contextvars
import copy
import gc
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

_WORLD = Path(__file__).with_name("world.py").read_text(encoding="utf-8")
_OPTIMIZERS = (
    "SGD(model.parameters(), lr=0.1)",
    "SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)",
    "Adam(model.parameters(), lr=0.01, fused=True)",
)
_PLAIN_LOSS = "out = model(x); loss = cross_entropy(out, y)"
_BEFORE = r"""
x = x + torch.randn_like(x) * 0.1
x = x * state.scale
x = x * config["scale"]
x = x * config["deep"]["list"][0]
x = x * state.doubled
x = x * k
x = scaled(x)
x = functions["scaled"](x)
x = x * get_rate()
x = half(x) * 2
x = x * float(array[0])
x = x * getattr(state, "scale")
x = x * vars(state)["scale"]
x = x * state.config.scale
x = x * (2.0 if state.config.mode is Mode.A else 1.0)
x = x * len(history) if len(history) < 2 else x
x = x * rng.random()
x = x * random.choice([0.5, 1.0])
x = x * np.random.rand()
x = x + torch.rand(4, generator=generator)
state.calls += 1
state.count()
count()
functions["count"]()
x = x * 2 if state.calls % 3 == 0 else x
config["count"] += 1
config["count"] = config.get("count", 0) + 1
model.seen += 1
model.steps += 1
state.buffer.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
state.buffer = state.buffer * 0.9 + 0.1 * x.detach().mean(0)
x = x - state.buffer
state.mean = 0.9 * state.mean + 0.1 * x.detach().mean()
x = x - state.mean
state.queue.append(x.detach().mean())
x = x + sum(state.queue)
state.table["a"].append(1.0)
x = x * state.table["b"]["c"]
state.table["b"]["c"] = 1.5
state.history.append(state.calls)
history.append(1)
model.train()
model.eval()
torch.manual_seed(3)
x = x.requires_grad_()
model.rate = 0.5
state.config = dataclasses.replace(state.config, scale=1.5)
x = dropout(x, 0.2)
x.mul_(0.5)
flags["counts"] = 1
for p in model.parameters(): p.requires_grad_(True)
x = x * 0.3 if flag else x
x = x * (state.extra if hasattr(state, "extra") else 1.0)
x = x * context.get() * local.scale
x = x * slots.scale
x = (lambda each: x * each.scale)(slots)
slots.calls += 1
x = x * len([each.__name__ for each in named][0])
x = x * (1 + len(f"{scaled}") % 2)
x = x * cached()
x = x + model_of().rate
x = x * sum(generated())
x = x * float(os.environ.get("SCALE", "1"))
try: x = x * config["missing"]\nexcept KeyError: x = x * 0.9
with torch.no_grad(): x = x * model.first.weight.norm()
x = x * of_mode[state.config.mode]
x = x * {**config}["scale"] * max(config["deep"]["list"])
x = x[torch.randperm(len(x))]
x = x * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
state.calls += x.shape[0]
state.before, state.now = state.now, x.detach().mean()
context.set(1.5)
local.scale = 0.9
x = x * (2.0 if id(x) == state.scale else 1.0)
state.extra = 2.0
"""
_LOSSES = r"""
out = model(x); loss = cross_entropy(out * state.weight, y)
out = Doubled.apply(model(x)); loss = cross_entropy(out, y)
out = model.second(model.first(x)); loss = cross_entropy(out, y)
with torch.no_grad(): t = teacher(x)\nout = model(x); loss = cross_entropy(out, y) + (out - t).pow(2).mean()
out = model(x); out.register_hook(lambda g: g * 0.5); loss = cross_entropy(out, y)
out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False); loss = cross_entropy(out, y)
out = torch.func.functional_call(model, dict(model.named_parameters()), (x,)); loss = cross_entropy(out, y)
with torch.autocast("cpu", torch.bfloat16): out = model(x)\nloss = cross_entropy(out.float(), y)
"""
_AFTER = r"""
loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
loss = loss + (0 if state.last is None else state.last * 0.1); state.last = loss.detach()
history.append(loss.detach())
state.history.append(loss.detach())
metrics["loss"] += loss.detach()
metrics["loss"] = metrics["loss"] + loss.detach()
metrics["last"] = loss.detach()
metrics.setdefault("all", []).append(loss.detach())
loss.item()
history.extend([loss.detach(), out.detach()])
losses = state.history; losses.append(loss.detach())
state.pair = loss.detach(), out.detach()
loss = loss * 2 if flags["counts"] else loss
"""
_BACKWARDS = r"""
loss.backward()
loss.backward()
loss.backward()
loss.backward(retain_graph=True); loss.backward()
for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)): p.grad = g
loss.backward(inputs=[*model.second.parameters()])
pass
"""
_UPDATES = r"""
nn.utils.clip_grad_norm_(model.parameters(), 0.1)
state.norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
for p in model.parameters(): p.grad = None if p.grad is None else p.grad * 0.5
for p in model.parameters(): p.grad is not None and p.grad.add_(torch.randn_like(p.grad) * 0.01)
opt.step()
opt.step(); opt.zero_grad()
opt.step(lambda: cross_entropy(model(x), y))
nn.utils.clip_grad_value_(model.parameters(), 0.05)
torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
for p in model.parameters(): p.grad = None
saved = copy.deepcopy(model.state_dict()); model.load_state_dict(saved)
[p.data.clamp_(-0.3, 0.3) for p in model.parameters()]
opt.zero_grad(set_to_none=False)
sched.step()
with torch.no_grad(): [t.lerp_(p, 0.1) for t, p in zip(teacher.parameters(), model.parameters())]
teacher.load_state_dict(model.state_dict())
model.first.weight.data = model.first.weight.data * 0.99
opt.param_groups[0]["lr"] *= 0.9
for g in opt.param_groups: g["lr"] = 0.1 / (1 + state.calls)
state.snap = [p.detach().clone() for p in model.parameters()]
state.grads = [p.grad for p in model.parameters()]
if state.calls % 2 == 0: opt.step()
"""
_RESULTS = r"""
loss
loss
loss.detach(), out
{"loss": loss, "n": state.calls}
None
model.first.weight.detach()
out[0], out
[loss, {"out": out[:2], "n": len(x)}]
x
model.first.weight.grad
state.mean
loss.detach(), state.buffer
"""
_BETWEEN = r"""
w.state.scale = 0.5
w.config["scale"] = 0.25
w.config["deep"]["list"][0] = 3.0
w.config = {"scale": 1.5, "count": 5, "deep": {"list": [2.0]}}
w.SCALE = 0.5
w.scaled.k = 0.7
w.set_rate(0.8)
w.array[0] = 0.6
w.state.config.scale = 0.9
w.state.config.mode = w.Mode.B
w.state.config = w.Config(2.0)
w.state.table["b"]["c"] = 0.1
w.state.calls = 0
w.state = w.State()
w.state.buffer.add_(1)
w.state.buffer = torch.ones(4)
w.state.mean = torch.ones(())
w.state.queue.clear()
w.state.extra = 0.4
w.state.weight[0] = 0.5
w.State.count = lambda self: 3
w.history.clear()
w.history = []
w.flags["counts"] = 1
w.model.rate = 0.5
w.model.eval()
w.model.train()
w.model.act = torch.relu
w.model.first.weight.requires_grad_(False)
w.model.first.weight.requires_grad_(True)
w.model.second = nn.Linear(6, 3)
w.model.first.weight.data = w.model.first.weight.data * 0.5
w.model.load_state_dict(w.teacher.state_dict())
w.opt.load_state_dict(copy.deepcopy(w.opt.state_dict()))
w.opt.zero_grad()
w.opt.zero_grad(set_to_none=False)
w.opt.param_groups[0]["lr"] = 0.02
w.opt.state.clear()
w.sched.step()
w.model.norm.momentum = 0.3
w.model.first.weight.grad = torch.ones_like(w.model.first.weight)
[p.grad is not None and p.grad.zero_() for p in w.model.parameters()]
[setattr(p, "grad", None) for p in w.model.parameters()]
torch.manual_seed(11)
random.seed(4)
np.random.seed(4)
w.rng.seed(1)
w.generator.manual_seed(2)
gc.collect()
w.model(x)
w.train_step(x, y)
torch.rand(3)
isinstance(w.results[-1], torch.Tensor) and w.results[-1].detach().mul_(2)
w.model.register_forward_hook(lambda m, a, out: out * 0.5)
w.model.first.weight.register_hook(lambda g: g * 0.5)
w.model.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
w.functions["scaled"] = lambda x: x * 0.2
w.context.set(0.5)
setattr(w.local, "scale", 0.5)
setattr(w.slots, "scale", 0.5)
setattr(w.scaled, "__name__", "s")
setattr(w.generated, "__defaults__", ((1.0, 0.5),))
w.cached.cache_clear()
w.os.environ.update(SCALE="0.5")
w.of_mode.update({w.Mode.A: 0.7})
w.named.reverse()
torch.use_deterministic_algorithms(True)
w.kept = w.model.state_dict()
w.kept = w.model.first.weight.data
w.kept = w.results[-1]
w.model = copy.deepcopy(w.model)
w.opt.param_groups[0]["params"].reverse()
w.opt.param_groups[0]["weight_decay"] = 0.1
[p.requires_grad_(not p.requires_grad) for p in w.model.second.parameters()]
w.model.to(torch.float64).to(torch.float32)
contextvars.copy_context().run(step, x, y)
torch.inference_mode()(lambda: w.model(x))()
torch.no_grad()(lambda: step(x, y))()
torch.func.grad(lambda x: w.model(x).sum())(x)
w.model.forward = lambda x: w.model.second(w.model.first(x))
w.opt.add_param_group({"params": [*w.teacher.parameters()]})
w.teacher = copy.deepcopy(w.model)
w.kept = [p.grad for p in w.model.parameters()]
w.model.first.bias = None
"""
_CALLS = (*("x, y",) * 9, "x[:3], y[:3]", "x, y, k=0.5", "x, y, flag='on'", "x.t().contiguous().t(), y", "None, y")
_numbers = itertools.count()


class Training(NamedTuple):
    """A training loop.

    Attributes:
        optimizer: without its module.
        lines: of the step; some are two.
        rounds: statements, and the arguments of the call after them.
    """

    optimizer: str
    lines: tuple[str, ...]
    rounds: tuple[tuple[tuple[str, ...], str], ...]

    @property
    def source(self) -> str:
        head = (
            "from torch.nn.functional import cross_entropy",
            f"opt = torch.optim.{self.optimizer}",
            "sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)",
            "results, kept = [None], None",
            "def train_step(x, y, *, k=1.0, flag=None):",
        )
        lines = (f"    {line}" for each in self.lines for line in each.split(r"\n"))
        return "\n".join((_WORLD, *head, *lines, ""))

    def __str__(self) -> str:
        return "\n".join((self.optimizer, *self.lines, *map(str, self.rounds)))


def _any(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.strip().split("\n"))


def _some(text: str, most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(_any(text), max_size=most).map(tuple)


def _in_order(parts: tuple[Any, ...]) -> tuple[str, ...]:
    zero, before, loss, after, backward, updates, result = parts
    return (*zero, *before, loss, *after, backward, *updates, "opt.step()", f"return {result}")


trainings: st.SearchStrategy[Training] = st.builds(
    Training,
    st.sampled_from(_OPTIMIZERS),
    st.tuples(
        st.sampled_from((("opt.zero_grad()",), ("opt.zero_grad()",), ())),
        _some(_BEFORE, 3),
        st.one_of(st.just(_PLAIN_LOSS), _any(_LOSSES)),
        _some(_AFTER, 1),
        _any(_BACKWARDS),
        _some(_UPDATES, 1),
        _any(_RESULTS),
    ).map(_in_order),
    st.tuples(
        st.lists(st.just(((), "x, y")), min_size=3, max_size=3),
        st.lists(st.tuples(_some(_BETWEEN, 1), st.sampled_from(_CALLS)), min_size=4, max_size=7),
    ).map(lambda found: (*found[0], *found[1])),
)


def run(training: Training, folder: Path, graphed: Callable[..., Any]) -> tuple[list[Any], Any]:
    """What a user can see after each call, and the step.

    Args:
        folder: for the source.
        graphed: what makes a step of a function, a module and an optimizer.
    """
    name = f"random_training_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(training.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    w: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = w
    batches, found = torch.Generator().manual_seed(42), []
    try:
        spec.loader.exec_module(w)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        step = graphed(w.train_step, w.model, w.opt)
        for statements, arguments in training.rounds:
            x, y = torch.randn(5, 4, generator=batches), torch.randint(0, 3, (5,), generator=batches)
            names = {
                "contextvars": contextvars,
                "copy": copy,
                "gc": gc,
                "nn": nn,
                "np": np,
                "random": random,
                "torch": torch,
            }
            names |= {"w": w, "x": x, "y": y, "step": step}
            for each in statements:
                found.append(error if isinstance(error := _tried(each, names), str) else None)
            w.results.append(_tried(f"step({arguments})", names))
            found.append(_seen([{k: v for k, v in vars(w).items() if k not in ("np", "torch")}, x, y]))
            found.append([torch.get_rng_state(), random.getstate(), str(np.random.get_state()), w.rng.getstate()])
            found.append([w.generator.get_state(), w.count.__closure__[0].cell_contents, w.get_rate()])
            found.append([w.slots.calls, w.slots.scale, w.context.get(), w.local.scale])
    finally:
        torch.use_deterministic_algorithms(False)
        w.os.environ.pop("SCALE", None)
        del sys.modules[name]
    return found, step


def _tried(statement: str, names: dict[str, Any]) -> Any:
    """What it returns, if it is an expression, or what it raises."""
    try:
        is_call = not any(f" {sign} " in statement for sign in ("=", "+="))
        return eval(statement, names) if is_call or "step(" in statement else exec(statement, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:60]


def _seen(value: Any) -> Any:
    """A copy that can be compared."""
    if isinstance(value, nn.Module):
        own = {k: v for k, v in vars(value).items() if isinstance(v, (bool, int, float))}
        return [own, _seen(value._parameters), _seen(value._buffers), _seen(value._modules)]
    if isinstance(value, torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        return [value.detach().clone(), isinstance(value, nn.Parameter) and value.requires_grad, _seen(gradient)]
    if isinstance(value, Optimizer):
        return _seen(value.state_dict())
    if isinstance(value, dict):
        return {repr(key): _seen(each) for key, each in value.items() if not str(key).startswith("__")}
    if isinstance(value, (list, tuple, collections.deque)):
        return [_seen(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value).__name__ in ("State", "Config"):
        return _seen(vars(value))
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__
