"""Whatever Thunder's prologue checks, the fast path refuses as well, and takes the call again once it is as before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import thunder
import torch
from models import Dropout, Linear
from support import fast_path_calls, same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import DeviceContext

from thunder_cg.compat import guards
from thunder_cg.compat.guards import attribute_writes_are_reported
from thunder_cg.fastpath import guard


class Act(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 2.0

    def forward(self, x):
        return torch.tanh(x * self.slope) + self.slope


@dataclass
class Options:
    power: float = 2.0
    clips: bool = False


class Model(nn.Module):
    """Reads whatever a prologue can check."""

    gain = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 4)
        self.conv = nn.Conv1d(1, 1, 1)  # all settings may choose its kernels
        self.act = Act()  # a module that is called with hooks
        self.drop = Dropout(0.0)
        self.scale = 2.0
        self.sizes = (1.0, (2.0, 3.0))
        self.table = {"a": [1.0, 2.0]}
        self.options = Options()
        self.register_buffer("shift", torch.ones(4))
        self.unused = nn.Parameter(torch.zeros(3))

    @property
    def factor(self):
        return self.scale * self.gain

    def forward(self, x, y, z=None, *, k=1.0):
        x = self.conv(self.first(x)[:, None])[:, 0]
        x = self.act(self.drop(x)) * self.factor + self.shift
        x = x * self.sizes[1][0] + self.table["a"][1] * self.unused.shape[0]
        x = x.clamp(-1, 1) if self.options.clips else x * self.options.power
        return torch.relu(x) * k + y.shape[0] if z is None else x * z


@contextmanager
def setting(owner: Any, key: str, value: Any):
    old = getattr(owner, key)
    setattr(owner, key, value)
    try:
        yield
    finally:
        setattr(owner, key, old)


@contextmanager
def item(owner: Any, key: Any, value: Any):
    old = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = old


@contextmanager
def class_attribute(key: str, value: Any, kind: type = Model):
    old = vars(kind).get(key)
    setattr(kind, key, value)
    try:
        yield
    finally:
        if old is None:
            delattr(kind, key)
        else:
            setattr(kind, key, old)


@contextmanager
def other_mode(model: Any):
    model.train(not model.training)
    try:
        yield
    finally:
        model.train(not model.training)


@contextmanager
def default_device(model: Any):
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        try:
            torch.get_default_device()
        except AttributeError:  # torch 2.9 does not know it any more
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


@contextmanager
def replaced_dictionary(model: Any):
    inner = model._model
    old = inner.__dict__
    inner.__dict__ = {**old, "scale": 5.0}
    try:
        yield
    finally:
        inner.__dict__ = old


@contextmanager
def other_class(model: Any):
    class Other(Model):
        @property
        def factor(self):
            return 7.0

    inner = model._model
    inner.__class__ = Other
    try:
        yield
    finally:
        inner.__class__ = Model


@contextmanager
def frozen(model: Any, name: str):
    model.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        model.get_parameter(name).requires_grad_(True)


def swapped(model: Any, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[None]:
    home = model._overrides_parameters if name in model._overrides_parameters else model._overrides_buffers
    old = home[name]
    new = make(old.detach())
    return item(home, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)


def moved(model: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[None]:
    weight = model.get_parameter("first.weight")
    return setting(weight, "data", make(weight.data))


KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def without(kernel: SDPBackend, model: Any) -> AbstractContextManager[None]:
    return sdpa_kernel([other for other in KERNELS if other is not kernel])


@contextmanager
def precision(model: Any):
    """Of all that have none of their own."""
    with setting(products, "fp32_precision", "none"), setting(backends, "fp32_precision", "tf32"):
        yield


@contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], Any], value: Any):
    old = read()
    write(value)
    try:
        yield
    finally:
        write(old)


SURROUNDINGS = {
    "mode": other_mode,
    "grad mode": lambda m: torch.set_grad_enabled(not torch.is_grad_enabled()),  # at once, and for both models
    "inference mode": lambda m: torch.inference_mode(),
    "autocast": lambda m: torch.autocast(next(m.parameters()).device.type, torch.bfloat16),
    "default dtype": lambda m: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": default_device,
    "device context": lambda m: torch.device("meta"),
    "attribute": lambda m: setting(m._model, "scale", 4.0),
    "attribute of another type": lambda m: setting(m._model, "scale", 2),
    "attribute in the dictionary": lambda m: item(m._model.__dict__, "scale", 4.0),
    "whole dictionary": replaced_dictionary,
    "attribute of a submodule": lambda m: setting(m._model.act, "slope", 3.0),
    "mode of a submodule": lambda m: setting(m._model.drop, "training", not m._model.drop.training),
    "tuple": lambda m: setting(m._model, "sizes", (1.0, (5.0, 3.0))),
    "item of a list in a dictionary": lambda m: item(m._model.table["a"], 1, 9.0),
    "attribute of an object": lambda m: setting(m._model.options, "power", 3.0),
    "another object": lambda m: setting(m._model, "options", Options(power=4.0)),
    "class attribute over that of an object": lambda m: class_attribute("clips", property(lambda self: True), Options),
    "class attribute": lambda m: class_attribute("gain", 1.5),
    "class attribute over the object's": lambda m: class_attribute("scale", property(lambda self: 6.0)),
    "property": lambda m: class_attribute("factor", property(lambda self: 5.0)),
    "class": other_class,
    "parameter": lambda m: swapped(m, "first.weight", lambda t: t * 2),
    "parameter's address": lambda m: moved(m, torch.clone),
    "parameter's strides": lambda m: moved(m, torch.t),
    "parameter that requires no grad": lambda m: frozen(m, "first.bias"),
    "unused parameter that requires no grad": lambda m: frozen(m, "unused"),
    "tied parameters": lambda m: item(
        m._overrides_parameters, "first.bias", m._overrides_parameters["first.weight"][0]
    ),
    "dictionary of parameters": lambda m: setting(
        m,
        "_overrides_parameters",
        {**m._overrides_parameters, "first.weight": nn.Parameter(torch.ones_like(m.first.weight))},
    ),
    "buffer": lambda m: swapped(m, "shift", lambda t: t * 2),
    "buffer's dtype": lambda m: swapped(m, "shift", lambda t: t.to(torch.float16)),
}

# What kernels are chosen by.
backends, cuda, products = torch.backends, torch.backends.cuda, torch.backends.cuda.matmul
SURROUNDINGS |= {
    "deterministic algorithms": lambda m: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "deterministic algorithms, or a warning": lambda m: switched(
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda only: torch.use_deterministic_algorithms(False, warn_only=only),
        True,
    ),
    "cuDNN": lambda m: setting(backends.cudnn, "enabled", False),
    "cuDNN's benchmark": lambda m: setting(backends.cudnn, "benchmark", True),
    "cuDNN's deterministic algorithms": lambda m: setting(backends.cudnn, "deterministic", True),
    "precision": precision,
    "precision of products": lambda m: setting(products, "fp32_precision", "tf32"),
    "precision of convolutions": lambda m: setting(backends.cudnn.conv, "fp32_precision", "ieee"),
    "precision of RNNs": lambda m: setting(backends.cudnn.rnn, "fp32_precision", "ieee"),
    "reduction in float16": lambda m: setting(products, "allow_fp16_reduced_precision_reduction", False),
    "reduction in bfloat16": lambda m: setting(products, "allow_bf16_reduced_precision_reduction", False),
    "accumulation in float16": lambda m: setting(products, "allow_fp16_accumulation", True),
    **{f"attention other than {kernel.name}": partial(without, kernel) for kernel in KERNELS},
    "order of attentions": lambda m: sdpa_kernel(KERNELS[::-1], set_priority=True),
    "reduction of attention": lambda m: switched(
        cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "library of products": lambda m: switched(cuda.preferred_blas_library, cuda.preferred_blas_library, "cublaslt"),
    "library of linear algebra": lambda m: switched(
        cuda.preferred_linalg_library, cuda.preferred_linalg_library, "cusolver"
    ),
}

Arguments = Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
ARGUMENTS: dict[str, Arguments] = {
    "shape": lambda x: ((x[:1], x), {}),
    "shape of what is not computed with": lambda x: ((x, x.new_zeros(5, 4)), {}),
    "dtype": lambda x: ((x.double(), x.clone()), {}),
    "dtype of what is not computed with": lambda x: ((x, x.double()), {}),
    "device": lambda x: ((x.to("meta"), x), {}),
    "strides": lambda x: ((x.t().contiguous().t(), x), {}),
    "requires grad": lambda x: ((x.clone().requires_grad_(), x), {}),
    "parameter": lambda x: ((nn.Parameter(x.clone()), x), {}),
    "subclass": lambda x: ((x.clone().as_subclass(type("Mine", (torch.Tensor,), {})), x), {}),
    "number": lambda x: ((3.0, x), {}),
    "the same twice": lambda x: ((x, x), {}),
    "views of one": lambda x: ((x[:1], x[1:]), {}),
    "arity": lambda x: ((x, x.clone(), x * 2), {}),
    "missing": lambda x: ((x,), {}),
    "value": lambda x: ((x, x.clone()), {"k": 2.0}),
    "type of a value": lambda x: ((x, x.clone()), {"k": 1}),
    "unknown keyword": lambda x: ((x, x.clone()), {"q": 1.0}),
}


def outcome(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        y = model(*args, **kwargs)
    except Exception as error:
        return type(error)
    return y.detach() if type(y) is torch.Tensor else y.detach().as_subclass(torch.Tensor)


_shared: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    _shared.clear()


def in_turns(changes: Iterable[str]) -> Iterator[Any]:
    """Each change in training and in inference; every run has one of the two."""
    for i, change in enumerate(changes):
        for j, mode in enumerate(("training", "inference")):
            marks = [] if (i + j) % 2 == 0 else [pytest.mark.nightly]
            yield pytest.param(change, mode == "training", marks=marks, id=f"{mode}-{change}")


@pytest.fixture
def established(twins, device, change, trains):
    """Plain and graphed, both called with what the fast path has been established for, and how to call them so.

    Tests share them, but for those that move parameters: what moves often is no longer expected where it was.
    """
    with torch.set_grad_enabled(trains):
        if "parameter" in change:
            yield establish(*twins(Model().train(trains)), device)
            return
        found = _shared.get((device, trains))
        if found is None:
            found = _shared[device, trains] = establish(*twins(Model().train(trains)), device)
        for entry in found[1]._forward_fn._certain():
            for recording in entry.compiled.forward.pair.recordings:
                recording.may_launch_early = True
        yield found


def test_what_fails_after_the_launch_is_checked_before_it_from_then_on(twins, device):
    with torch.no_grad():
        model = Model().eval()
        model.drop = nn.Identity()  # a dropout may draw, and a draw is an effect
        _, graphed, call = establish(*twins(model), device)
        (recording,) = graphed._forward_fn._certain()[0].compiled.forward.pair.recordings
        assert recording.may_launch_early
        slope = graphed._model.act.slope
        graphed._model.act.slope = 3.0
        x = torch.randn(2, 4, device=device)
        graphed(x, x.clone(), k=1.0)
        graphed._model.act.slope = slope
        assert not recording.may_launch_early and call() == 1


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = Options()

    def forward(self, x):
        return torch.tanh(x.clamp(-1, 1) if self.options.clips else x * self.options.power)


def test_attributes_of_objects_cost_steady_calls_nothing(twins, device):
    with torch.no_grad():
        plain, graphed = twins(Configured())
        for x in torch.randn(4, 4, 4, device=device):
            same(plain(x), graphed(x))
    assert fast_path_calls(graphed) == 2
    assert graphed._forward_fn._certain()[0]._guard.keywords == ()


def establish(plain, graphed, device):
    def call() -> int:
        x, y = torch.randn(2, 2, 4, device=device)
        before = fast_path_calls(graphed)
        y = y.clone()
        same(plain(x, y, k=1.0).detach(), graphed(x, y, k=1.0).detach())
        return fast_path_calls(graphed) - before

    assert [call() for _ in range(4)] == [0, 0, 1, 1]
    return plain, graphed, call


@pytest.mark.parametrize(("change", "trains"), [*in_turns(SURROUNDINGS)])
@pytest.mark.nightly_after(4)
def test_it_refuses_a_change_of(established, device, change):
    plain, graphed, call = established
    x, y = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    before = fast_path_calls(graphed)
    with ExitStack() as stack:
        if "class attribute" in change or change in ("property", "grad mode"):  # which both share
            stack.enter_context(SURROUNDINGS[change](None))
        else:
            for model in (plain, graphed):
                stack.enter_context(SURROUNDINGS[change](model))
        results = [outcome(model, (x, y), {"k": 1.0}) for model in (plain, graphed)]
    assert fast_path_calls(graphed) == before
    same(*results)
    assert thunder.cache_misses(plain) == thunder.cache_misses(graphed)
    assert sum(call() for _ in range(3)) >= 1


@pytest.mark.parametrize(("change", "trains"), [*in_turns(ARGUMENTS)])
@pytest.mark.nightly_after(6)
def test_it_refuses_an_argument_of_another(established, device, change):
    plain, graphed, call = established
    args, kwargs = ARGUMENTS[change](torch.randn(2, 4, device=device))
    kwargs = {"k": 1.0, **kwargs}
    before = fast_path_calls(graphed)
    results = [outcome(model, args, kwargs) for model in (plain, graphed)]
    assert fast_path_calls(graphed) == before
    same(*results)
    assert thunder.cache_misses(plain) == thunder.cache_misses(graphed)
    assert call() == 1


class Late(nn.Module):
    def forward(self, x):
        return self.act(x) * 2


def test_a_submodule_from_after_the_compilation_is_replaced(twins, device):
    plain, graphed = twins(Late())
    for slope in (2.0, 3.0, 2.0):
        for model in (plain, graphed):
            model._model.act = Act()
            model._model.act.slope = slope
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            same(plain(x), graphed(x))
    assert fast_path_calls(graphed) == 8


def test_attributes_that_keep_changing_are_checked_at_each_call(twins, device):
    plain, graphed = twins(Model())
    with torch.no_grad():
        for step in range(80):
            for model in (plain, graphed):
                model._model.mode = object()  # which nothing reads
                model._model.scale = 3.0 if step == 77 else 2.0
            x = torch.randn(2, 4, device=device)
            same(plain(x, x.clone()), graphed(x, x.clone()))
    assert fast_path_calls(graphed) == 77


def test_what_an_interpreter_does_not_show_is_checked_at_each_call(twins, device, monkeypatch):
    """CPython 3.13.0 tells nobody who watches a dictionary of a write to an attribute."""
    assert attribute_writes_are_reported() == (sys.version_info[:3] != (3, 13, 0))
    monkeypatch.setattr(guards, "attribute_writes_are_reported", lambda: False)
    plain, graphed, call = establish(*twins(Model()), device)
    (entry,) = graphed._forward_fn._certain()
    assert not entry._guard.attributes.unchanged() and not entry._guard.parameters_cache.unchanged()
    x, y = torch.randn(2, 2, 4, device=device)
    before = fast_path_calls(graphed)
    for model in (plain, graphed):
        model._model.act.slope = 3.0
    same(plain(x, y.clone()), graphed(x, y.clone()))
    assert fast_path_calls(graphed) == before
    for model in (plain, graphed):
        model._model.act.slope = 2.0
    assert call() == 1


def test_who_shares_memory_is_found_without_the_default_device(monkeypatch):
    """Which PyTorch asks at each method of a tensor: a call with many tensors took ten times as long."""
    tensors = (*torch.ones(6).split(2), torch.ones(2), torch.ones(2).to_sparse(), 3, "text")
    asked = []
    monkeypatch.setattr(DeviceContext, "__torch_function__", lambda *args, **kwargs: asked.append(args))
    with torch.device("cpu"):
        assert guard._nothing_is_shared(tensors[2:], {})
        assert not guard._nothing_is_shared((), {"x": tensors[0], "y": [tensors[1]]})
    assert not asked
    assert guard._shares("0,1,2", tensors, {}) and not guard._shares("0,1", tensors, {})
