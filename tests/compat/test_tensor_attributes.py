"""What the user's code asks of a tensor, it is told as by PyTorch, where something of ours is compiled."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn

FLOAT32, TYPES, FACTORS = torch.float32, (torch.float16, torch.float32), {torch.float32: 2.0, torch.int64: 3.0}
CPU = torch.device("cpu")


class Model(nn.Module):
    """Its forward computes with what it is told."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.ask = ask
        self.linear = nn.Linear(4, 4)
        self.kind, self.place = torch.float32, torch.device("cpu")

    def forward(self, x):
        answer = self.ask(self, x, (x > 0).cumsum(0))
        return self.linear(x).sin().cos() + answer


def _matches(model, x, y):
    match x.dtype:
        case torch.float32:
            return 2
        case _:
            return 3


def _device_context(model, x, y):
    with torch.device("cpu"):
        return 2 if torch.ones(4).device == CPU else 3


def _written(model, x, y):
    z = torch.zeros_like(x)
    before = z.requires_grad
    z.add_(x)
    return before + 2 * (z * 1).requires_grad


def _inside_of(mode):
    """What is so inside of a mode, and after it."""

    def ask(model, x, y):
        with mode():
            inside = torch.is_grad_enabled() + 2 * (x * 2).requires_grad
            with torch.no_grad():
                inside += 4 * torch.is_grad_enabled() + 8 * x.requires_grad
            inside += 16 * torch.is_grad_enabled() + 32 * (x * 3).requires_grad
        return inside + 64 * torch.is_grad_enabled() + 128 * (x * 4).requires_grad

    return ask


def _autocast(model, x, y):
    kind, before = x.device.type, torch.is_autocast_enabled(x.device.type)
    with torch.autocast(kind, torch.float16):
        inside = torch.is_autocast_enabled(kind) + 2 * (torch.get_autocast_dtype(kind) == torch.float16)
        with torch.autocast(kind, enabled=False):
            inside += 4 * torch.is_autocast_enabled(kind)
    return inside + 8 * before + 16 * torch.is_autocast_enabled(kind)


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * (2 if (x * 2).requires_grad else 3)

    @staticmethod
    def backward(context, gradient):
        return gradient * 3


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.kind = x.dtype
        return x * (2 if x.dtype == torch.float32 else 3)

    @staticmethod
    def backward(context, gradient):
        return gradient * (2 if context.kind == gradient.dtype else 3)


DTYPES = {
    "==": lambda model, x, y: x.dtype == torch.float32,
    "!=": lambda model, x, y: x.dtype != torch.float32,
    "is": lambda model, x, y: x.dtype is FLOAT32,
    "in": lambda model, x, y: x.dtype in TYPES,
    "in a set": lambda model, x, y: x.dtype in {torch.float16, torch.bfloat16},
    "of a dict": lambda model, x, y: FACTORS[x.dtype] + FACTORS[y.dtype],
    "get": lambda model, x, y: FACTORS.get(x.dtype, 5.0),
    "match": _matches,
    "of what is computed": lambda model, x, y: y.dtype == torch.int64,
    "of a mask": lambda model, x, y: (x > 0).dtype == torch.bool,
    "of a parameter": lambda model, x, y: model.linear.weight.dtype is x.dtype,
    "an attribute": lambda model, x, y: x.dtype == model.kind,
    "the default": lambda model, x, y: x.dtype == torch.get_default_dtype(),
    "getattr": lambda model, x, y: getattr(x, "dtype") == torch.float32,  # noqa: B009
    "two": lambda model, x, y: (x.dtype == y.dtype) + 2 * (x.dtype == x.sum().dtype),
    "isinstance": lambda model, x, y: isinstance(x.dtype, torch.dtype),
    "str": lambda model, x, y: len(f"{x.dtype}"),
    "kind": lambda model, x, y: x.dtype.is_floating_point + 2 * y.dtype.is_complex + x.dtype.itemsize,
    "limits": lambda model, x, y: x.clamp(torch.finfo(x.dtype).min, torch.iinfo(y.dtype).max),
    "to": lambda model, x, y: y.to(x.dtype) + y.to(device=x.device, dtype=x.dtype) + y.type(x.dtype) + y.to(x),
    "made": lambda model, x, y: torch.zeros(4, dtype=x.dtype, device=x.device) + x.new_ones(4, dtype=x.dtype),
    "reduced": lambda model, x, y: y.sum(dtype=x.dtype) + y.cumsum(0, dtype=x.dtype),
    "a function": lambda model, x, y: _Doubles.apply(x),
}
DEVICES = {
    "== a global": lambda model, x, y: x.device == CPU,
    "!= an attribute": lambda model, x, y: x.device != model.place,
    "== what is made": lambda model, x, y: x.device == torch.device("cpu"),
    "== a GPU": lambda model, x, y: torch.device("cuda") == torch.device("cuda", 0),  # one names no GPU
    "of a dict": lambda model, x, y: {CPU: 2.0}.get(x.device, 3.0),
    "isinstance": lambda model, x, y: isinstance(x.device, torch.device),
    "str": lambda model, x, y: len(str(x.device)),
    "type": lambda model, x, y: (x.device.type == CPU.type) + 2 * (x.device.index == CPU.index),
    "context": _device_context,
}
GRADIENTS = {
    "of inputs": lambda model, x, y: x.requires_grad + 2 * model.linear.weight.requires_grad + 4 * y.requires_grad,
    "of what is computed": lambda model, x, y: (x.sin() + 1).requires_grad + 2 * model.linear(x).relu().requires_grad,
    "of a mask": lambda model, x, y: (x > 0).requires_grad + 2 * x.long().float().requires_grad,
    "of a view": lambda model, x, y: x.view(2, 2)[0].requires_grad + 2 * x.to(torch.float64).requires_grad,
    "detached": lambda model, x, y: x.sin().detach().cos().requires_grad,
    "made": lambda model, x, y: x.new_zeros(4).requires_grad + 2 * torch.rand_like(x).requires_grad,
    "of several": lambda model, x, y: x.sort()[0].requires_grad + 2 * x.sort()[1].requires_grad,
    "written": _written,
    "no_grad": _inside_of(torch.no_grad),
    "enable_grad": _inside_of(torch.enable_grad),
    "inference_mode": _inside_of(torch.inference_mode),
    "autocast": _autocast,
    "a function": lambda model, x, y: _Asks.apply(x) + _Asks.apply(x).requires_grad,
}
TYPES_OF = {
    "is": lambda model, x, y: (type(x) is torch.Tensor) + 2 * (type(model.linear.weight) is nn.Parameter),
    "of what is computed": lambda model, x, y: type(y) is type(x),
    "of others": lambda model, x, y: (type(x.shape[0]) is int) + 2 * (type(model) is Model),
    "issubclass": lambda model, x, y: issubclass(type(y), torch.Tensor),
    "like one": lambda model, x, y: torch.overrides.is_tensor_like(y),
}
KINDS = {"type": TYPES_OF, "dtype": DTYPES, "device": DEVICES, "gradient": GRADIENTS}
ASKED = {f"{kind}: {name}": ask for kind, of in KINDS.items() for name, ask in of.items()}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_a_tensor_answers_as_in_eager_mode(transform, device, ask):
    model, x = Model(ask).to(device), torch.randn(4, device=device, requires_grad=True)
    jmodel = thunder.jit(model, transforms=[transform()], sharp_edges="error")
    expected = model(x)
    for _ in range(3):
        result = jmodel(x)
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in (result, model(x))))


def test_another_compilation_has_thunders_dtypes(transform):
    """This tells when Thunder has mended it, too. Then ours can go."""

    def fn(x):
        return x + (1 if x.dtype == torch.float32 else 2)

    x = torch.zeros(3)
    assert thunder.jit(fn, transforms=[transform()])(x)[0] == 1
    assert thunder.jit(fn)(x)[0] == 2


def test_autocast_is_off_after_a_call_under_it(transform, device):
    def fn(x):
        return x + (2 if torch.is_autocast_enabled(device) else 3)

    jfn, x = thunder.jit(fn, transforms=[transform()]), torch.zeros(3, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert jfn(x)[0] == 2
    assert jfn(x)[0] == 3


def _computes_without_gradients(x, w):
    with torch.no_grad():
        with torch.no_grad():
            a = w * 2
        return x * w.detach() + a + w * 3


def _without_gradients(x, w):
    with torch.no_grad():
        y = _computes_without_gradients(x, w) + w * 5
    return y + w * x


def test_no_grad_inside_of_another_one_does_not_end_it(transform, device):
    x = torch.full((3,), 11.0, device=device)
    gradients = []
    for jfn in (_without_gradients, thunder.jit(_without_gradients, transforms=[transform()])):
        w = torch.ones(3, device=device, requires_grad=True)
        jfn(x, w).sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)


def test_thunder_ends_both():
    """Where this fails, Thunder has mended it, and ours can go."""
    w = torch.ones(3, requires_grad=True)
    thunder.jit(_without_gradients)(torch.ones(3), w).sum().backward()
    assert w.grad[0] == 9


class _Modes(torch.autograd.Function):
    """Computes with what it is told of gradients, which are off in a function."""

    @staticmethod
    def forward(context, x):
        before = torch.is_grad_enabled()
        with torch.enable_grad():
            inside = torch.is_grad_enabled()
        with torch.no_grad():
            return x * (1 + before + 2 * inside + 4 * torch.is_grad_enabled())

    @staticmethod
    def backward(context, gradient):
        with torch.no_grad():
            return gradient * (5 + torch.is_grad_enabled())


def test_a_function_that_computes_without_gradients_has_its_backward(transform, device):
    def fn(x, w):
        return _Modes.apply(x * w) * (2 if torch.is_grad_enabled() else 3) + w

    x = torch.full((3,), 11.0, device=device)
    results = []
    for jfn in (fn, thunder.jit(fn, transforms=[transform()])):
        for _ in range(3):
            w = torch.ones(3, device=device, requires_grad=True)
            result = jfn(x, w)
            result.sum().backward()
        results.append((result, w.grad))
    torch.testing.assert_close(*results)


def test_thunder_takes_such_a_function_for_a_constant():
    """Where this fails, Thunder has mended it, and ours can go."""
    x = torch.ones(3, requires_grad=True)
    assert not thunder.jit(_Modes.apply)(x).requires_grad


class _Members(nn.Module):
    """Computes with its parameters and buffers in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(3.0))
        self.inner = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
        self.register_buffer("last", torch.tensor(5.0))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        for parameter in self.parameters():
            x = (x + parameter.reshape(1)).sin()
        for name, buffer in self.named_buffers(prefix="of"):
            x = (x + buffer.reshape(1) * len(name)).sin()
        for name, parameter in self.inner[2].named_parameters("of", recurse=True):
            x = (x + parameter.reshape(1) * len(name)).sin()
        return x * next(self.inner.parameters()).reshape(1)


def test_parameters_and_buffers_are_in_order(transform, device):
    model, x = _Members().to(device), torch.zeros(2, device=device)
    jmodel = thunder.jit(model, transforms=[transform()])
    for _ in range(3):
        torch.testing.assert_close(jmodel(x), model(x))


def test_a_device_is_assigned_to_what_is_passed(transform, device):
    class Cache:
        place = None

    def fn(x, cache):
        cache.place = x.device
        return x + (1 if cache.place.type == device else 2)

    caches, x = [Cache(), Cache()], torch.zeros(3, device=device)
    jfn = thunder.jit(fn, transforms=[transform()])
    assert [jfn(x, cache)[0] for cache in caches] == [1, 1]
    assert [cache.place for cache in caches] == [x.device] * 2


def test_dtypes_and_devices_are_returned_and_checked(transform, device):
    def fn(x):
        return x.sin().cos(), x.dtype, x.device

    jfn = thunder.jit(fn, transforms=[transform()])
    for dtype in (torch.float32, torch.float64, torch.float32):
        x = torch.zeros(3, dtype=dtype, device=device)
        assert jfn(x)[1:] == (dtype, x.device)
    assert thunder.cache_misses(jfn) == 2
