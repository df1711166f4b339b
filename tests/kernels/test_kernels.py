"""`thunder_cg.executors()`: what they fuse, and that values, gradients and layouts are PyTorch's."""

from __future__ import annotations

import copy
import inspect
from functools import partial

import pytest
import thunder
import torch
from support import programs, same, same_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_cg
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.tensors import tensors_in
from thunder_cg.compat.torch_compile import CompileError
from thunder_cg.kernels import attention, convolution, derivatives, fusion, inductor, torchs_derivatives
from thunder_cg.kernels.fusion import Fusion, Kernels
from thunder_cg.runtime import outputs


class ConvNet(nn.Module):
    """All kinds of convolutions, with padding, strides, groups and biases, BatchNorm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.strided = nn.Conv2d(8, 8, 3, stride=(2, 1), padding=(1, 0), groups=4, bias=False)
        self.dilated = nn.Conv2d(8, 6, 3, dilation=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        images = self.dilated(self.strided(x))
        return images, self.head(F.adaptive_avg_pool2d(images, 1).flatten(1))


class Clicks(nn.Module):
    """Thunder takes the derivative of its loss with PyTorch's autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x, clicked):
        return F.binary_cross_entropy_with_logits(self.head(F.silu(self.table(x))).squeeze(1), clicked)


class WithItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = torch.relu(self.layers[0](x)).exp()
        scale = x.mean().item()
        return torch.tanh(self.layers[1](x) * 2) + scale


@pytest.fixture
def step(device):
    """A training step, from one seed."""

    def run(model, *inputs):
        model.zero_grad()
        torch.manual_seed(3)
        found = model(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        sum(each.float().square().sum() for each in found).backward()
        return [each.detach() for each in found]

    return run


def compiled(model, *transforms):
    return thunder.jit(model, executors=thunder_cg.executors(), transforms=transforms)


def fusions(jfn):
    return [op for program in programs(jfn) for op in program.ops.ops if op.is_fusion and op.executor == "inductor"]


@pytest.mark.nightly
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_are_pytorchs(transform, device, step, memory_format):
    torch.manual_seed(0)
    model = ConvNet().double().to(device, memory_format=memory_format)
    plain, graphed = copy.deepcopy(model), copy.deepcopy(model)
    uncaptured, captured = compiled(model), compiled(graphed, transform())
    for _ in range(4):
        x = torch.randn(4, 3, 24, 24, dtype=torch.float64, device=device).to(memory_format=memory_format)
        with torch.backends.cudnn.flags(deterministic=True):
            expected, found, replayed = step(plain, x), step(uncaptured, x), step(captured, x)
        same(found, replayed)
    same_state(model, graphed)
    for a, b in zip((*expected, *_state(plain)), (*found, *_state(model))):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    assert [len(op.subs) > 20 for op in fusions(captured)] == [True, True], "one fusion each way"


def _state(model):
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.nightly
def test_a_convolution_in_three_dimensions(device, step):
    model = nn.Sequential(nn.Conv3d(2, 3, 2, padding=1), nn.GELU(), nn.ConvTranspose3d(3, 2, 2)).double().to(device)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 2, 4, 4, 4, dtype=torch.float64, device=device)
    same_values = zip((*step(plain, x), *_state(plain)), (*step(compiled(model), x), *_state(model)))
    for a, b in same_values:
        torch.testing.assert_close(a, b)


def test_views_of_images_stay_views(transform, device):
    """In another layout, an image that the caller gets was copied: a view of it, or of an input, was none any more."""

    def fn(x, weight):
        a = x.permute(0, 3, 1, 2)
        y = torch.relu(F.conv2d(a, weight))
        return a, y, y.permute(0, 2, 3, 1), y[0]

    plain, captured = (thunder.jit(fn, executors=thunder_cg.executors(), transforms=t) for t in ([], [transform()]))
    for _ in range(4):
        x, weight = torch.randn(2, 4, 4, 3, device=device), torch.randn(3, 3, 1, 1, device=device)
        expected, *others = fn(x, weight), plain(x, weight), captured(x, weight)
        for found in others:
            assert [each.stride() for each in found] == [each.stride() for each in expected]
            bases = (x, found[1], found[1], found[1])
            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, bases))
            torch.testing.assert_close(found, expected)


class NothingFake(TorchDispatchMode):
    """Sees what is computed, as the tape does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        assert not any(isinstance(each, FakeTensor) for each in tensors_in(results))
        return results


@pytest.mark.parametrize("last", [False, True])
def test_the_caller_gets_pytorchs_strides(last, device):
    """Whatever layouts Inductor has, and whichever arguments have channels last."""

    def fn(x, weight):
        y = F.conv2d(x, weight)
        return [y, y.sum(2), y.mean((2, 3), keepdim=True).expand_as(y)]

    fusion = Fusion("Inductor0", Kernels(fn), [0, 1, 2], [], False, [], [])
    formats = torch.contiguous_format, torch.channels_last
    fusion._run = lambda *args: [fn(*args)[0].to(memory_format=formats[not last]), *fn(*args)[1:]]
    for count in (4, 5, 4):
        x = torch.randn(2, 3, count, 6, device=device).to(memory_format=formats[last])
        weight = torch.randn(4, 3, 3, 3, device=device)
        with NothingFake():
            results = fusion(x, weight)
        for found, expected in zip(results, fn(x, weight)):
            assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("reduced", [[], [0, 1, 2, 3]])
def test_what_is_reduced_has_memory_of_its_own(reduced, device):
    """Inductor may return one tensor as two results, or an argument."""

    def fn(x):
        return [x.sum(0) / 2, x.sum(0) / 2, x * 1, torch.ones_like(x).sum(0)]

    x = torch.randn(3, 4, device=device)
    fusion = Fusion("Inductor0", Kernels(fn), None, [], False, reduced, [])
    fusion._run = lambda x: [*fn(x)[:1] * 2, x, torch.full((1,), 3.0, device=device).expand(4)]
    results = fusion(x)
    for found, expected in zip(results, fn(x), strict=True):
        assert torch.equal(found, expected)
    addresses = {x.data_ptr(), *(each.data_ptr() for each in results)}
    assert len(addresses) == (5 if reduced else 3) and results[3].is_contiguous() == bool(reduced)


def test_gradients_of_weights_have_their_strides(device):
    """Also where the image has channels last, so that autograd need not copy them."""
    conv = thunder.jit(F.conv2d, executors=[derivatives.executor])
    x = torch.randn(2, 3, 5, 6, device=device).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(conv(x, weight).sum(), weight)
    assert found.stride() == weight.stride()


def _strides(tensor):
    return [stride for size, stride in zip(tensor.size(), tensor.stride()) if size > 1]


class SharedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.last = nn.Conv2d(8, 8, 3, bias=False)

    def forward(self, x):
        y = torch.relu(self.mix(self.first(x)))
        return self.last(y) + self.last(y * 2), y


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.nightly_after(1)
def test_what_a_forward_lays_out_is_not_converted_in_the_backward(transform, device, step, monkeypatch, memory_format):
    """Weights and images are saved with channels last, once each; what the caller gets has PyTorch's strides."""
    monkeypatch.setattr(convolution, "_fastest", lambda a, groups: torch.channels_last)  # as on CUDA
    plain = SharedConv().to(device, torch.bfloat16, memory_format=memory_format)
    model, graphed = copy.deepcopy(plain), copy.deepcopy(plain)
    uncaptured, captured = compiled(model), compiled(graphed, transform())
    saved = []
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8, device=device).bfloat16().to(memory_format=memory_format)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
            uncaptured(x)
        last = [tuple(t.shape) for t in saved if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)]
        assert {*last} >= {(2, 3, 8, 8), (8, 3, 3, 3), (8, 8, 3, 3)}
        expected, found = step(plain, x), step(uncaptured, x)
        same(found, step(captured, x))
        same_state(model, graphed)
        for a, b in zip((*expected, *_state(plain)), (*found, *_state(model))):
            torch.testing.assert_close(a, b, atol=0.1, rtol=0.1)
            assert _strides(a) == _strides(b)
    subs = [[sub.id for sub in op.subs].count("convolution_laid_out") for op in fusions(captured)]
    assert subs == [3, *[0] * (len(subs) - 1)]


def test_a_batch_without_images_in_16_bits(device, step, monkeypatch):
    monkeypatch.setattr(convolution, "_fastest", lambda a, groups: torch.channels_last)  # as on CUDA
    plain = nn.Conv2d(3, 4, 3).to(device, torch.bfloat16)
    model = copy.deepcopy(plain)
    x = torch.randn(0, 3, 8, 8, device=device).bfloat16()
    same(step(plain, x), step(compiled(model), x))
    same_state(plain, model)


def test_what_dynamo_cannot_trace_is_left_out(transform, device, step, monkeypatch):
    if device == "cpu":  # where Inductor takes long; Dynamo traces for any backend
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    model = Clicks().to(device)
    plain, graphed = copy.deepcopy(model), copy.deepcopy(model)
    uncaptured, captured = compiled(model), compiled(graphed, transform(strict=True))
    for _ in range(4):
        inputs = torch.randint(20, (6,), device=device), torch.rand(6, device=device)
        expected = step(plain, *inputs)
        same(step(uncaptured, *inputs), step(captured, *inputs))
    same_state(model, graphed)
    torch.testing.assert_close(expected, step(uncaptured, *inputs))
    backward = programs(captured)[1]
    assert [op.id for op in backward.ops.ops if not op.is_fusion and not op.bookkeeping] == [
        "binary_cross_entropy_with_logits_vjp"
    ]
    assert len(backward.regions) == 1


def test_what_no_graph_holds_is_not_fused(transform, device, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    model = WithItem().to(device)
    plain = copy.deepcopy(model)
    captured = compiled(model, transform())
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(captured(x), plain(x))
    (program,) = programs(captured)
    assert next(op.id for op in program.ops.ops if not op.bookkeeping and not op.is_fusion) == "item"
    assert len(fusions(captured)) == 2


class Layers(nn.Module):
    """Alike, but for one slope. Reading a number ends a fusion."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.leaky_relu(layer(x), 0.2 if i == 2 else 0.1)
            x = x + x.mean().item()
        return x


def test_equal_layers_are_compiled_once(transform, device, monkeypatch):
    """One of the five has another slope."""
    functions = []
    monkeypatch.setattr(torch, "compile", lambda fn, **_: functions.append(fn) or fn)
    model = Layers().to(device)
    uncaptured, captured = compiled(copy.deepcopy(model)), compiled(copy.deepcopy(model), transform())
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            found = captured(x)
            same(found, uncaptured(x))
            torch.testing.assert_close(found, model(x))
    assert len(fusions(captured)) == 5
    assert len(functions) == 2 * 2


def test_a_fusion_that_does_not_compile_runs_op_by_op(transform, device, monkeypatch):
    def fails(self, region, counter):
        symbol = _fuse(self, region, counter)
        if not (bound := compat.bound_functions(symbol)):
            return symbol
        (fusion,) = bound.values()

        def run(*args):
            raise CompileError("no kernel for this\nand much more")

        fusion._run = run
        return symbol

    _fuse = inductor.InductorExecutor.fuse
    monkeypatch.setattr(inductor.InductorExecutor, "fuse", fails)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    plain = thunder.jit(copy.deepcopy(model))
    captured = compiled(model, transform())
    x = torch.randn(4, 8, device=device)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="Inductor0, which runs op by op: .*no kernel for this"):
            captured(x)
        for _ in range(3):
            torch.testing.assert_close(captured(x), plain(x))
    (op,) = [op for op in thunder_cg.explain(captured).traces[0].ops if op.fused]
    assert op.detail.endswith(
        "Inductor cannot compile it, so it runs op by op: TorchDynamoException: no kernel for this"
    )


def test_nvfuser_where_thunder_can_use_it(monkeypatch):
    attention_by_cudnn, sdpa = thunder_cg.executors()[:2]
    assert (attention_by_cudnn, sdpa) == (attention.executor, compat.get_executor("sdpa"))
    monkeypatch.setattr(compat, "nvfuserex", None)
    own = [derivatives.fused_executor, torchs_derivatives.executor, inductor.executor]
    assert thunder_cg.executors()[-3:] == own
    nvfuser = object()
    monkeypatch.setattr(compat, "nvfuserex", nvfuser)
    expected = [derivatives.executor, torchs_derivatives.executor, nvfuser]
    assert thunder_cg.executors()[2:] == expected, "it would not fuse the other derivatives"


@pytest.mark.nightly
def test_through_thunderfx(device, backend):
    model = ConvNet().to(device).eval()
    captured = thunder_cg.thunderfx(model, executors=thunder_cg.executors(), backend=backend)
    x = torch.randn(4, 3, 24, 24, device=device)
    with torch.no_grad():
        for _ in range(3):
            found = captured(x)
        for a, b in zip(model(x), found):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert [op.executor for trace in thunder_cg.explain(captured).traces for op in trace.ops if op.fused] == [
        "inductor"
    ]


def _traced(function):
    """What Thunder traces of a function of one tensor: what the fuser knows of it, its operators and its argument."""
    compiled = thunder.jit(function)
    compiled(torch.ones(4))
    trace = thunder.last_traces(compiled)[0]
    (a,) = trace.args
    symbols = [each for each in trace.bound_symbols if each.sym.name not in ("unpack_trivial", "python_return")]
    return inductor._TraceFacts(trace), symbols, a


def test_a_fusion_has_all_that_it_reads():
    """Thunder's rematerialization forgets symbols without arguments."""
    facts, (zeros, add), a = _traced(lambda a: a + torch.zeros(4))
    assert facts.completed([add], [a], []) == (zeros, add)
    assert facts.completed([add, zeros], [a], []) == (zeros, add)
    assert facts.completed([], [a], [zeros.output]) == (zeros,)


def test_a_random_draw_is_not_made_again():
    facts, (_, add), a = _traced(lambda a: a + torch.rand(4))
    with pytest.raises(RuntimeError, match="lost a random draw"):
        facts.completed([add], [a], [])


def test_what_is_converted_to_a_wider_type_and_back_is_read_itself(device, monkeypatch):
    """Thunder's derivative of a sum of 16 bits has such conversions. Not so what was rounded, or is written later."""
    fused = []
    in_torch = compat.in_torch
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(compat, "in_torch", lambda symbols, *rest: fused.extend(symbols) or in_torch(symbols, *rest))

    def f(a, b):
        equal, before = a.float().to(a.dtype), b.float().to(a.dtype)
        twice = (equal + 1).float().to(a.dtype).to(torch.float64).to(a.dtype)
        rounded = twice.half().to(a.dtype)
        b.add_(1)
        return torch.sin(equal), torch.cos(twice), torch.tan(rounded), torch.exp(before)

    inputs = [(torch.randn(8, device=device) * 1e-6).bfloat16() for _ in range(2)]
    expected = f(*(each.clone() for each in inputs))
    same(compiled(f)(*inputs), expected)
    names = {proxy.name: each.sym.name for each in fused for proxy in each.flat_proxy_outs}
    read = {each.sym.name: names.get(each.flat_proxy_args[0].name) for each in fused}
    assert [read[name] for name in ("sin", "cos", "tan", "exp")] == [None, "add", "to", "to"]


def test_a_result_that_equals_another_value_is_not_written_once_more(device, monkeypatch):
    """The gradient of a sum, which both of its terms get, and the next fusion. Each result has memory of its own."""
    results = []
    in_torch = compat.in_torch

    def noting(symbols, inputs, outputs, known):
        results.append([{p.name: s.sym.name for s in symbols for p in s.flat_proxy_outs}.get(o.name) for o in outputs])
        return in_torch(symbols, inputs, outputs, known)

    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(compat, "in_torch", noting)

    def f(a):
        b = a + 1
        equal, same_again = b.float().to(a.dtype), b.float().to(a.dtype)
        return equal, same_again, a.float().to(a.dtype), a.view(2, 4).float().to(a.dtype)

    a = torch.randn(8, device=device).bfloat16()
    found = compiled(f)(a)
    same(found, f(a))
    assert results == [["add", "to", "to", "to"]]
    assert len({each.data_ptr() for each in (a, *found)}) == 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x, labels):
        hidden = torch.exp(self.up(x))
        logits = self.head(torch.tanh(hidden))
        return F.cross_entropy(logits, labels), hidden


def writing_over(monkeypatch):
    """Has fusions fill what they may write over with NaN. Returns a list, to which that is added."""
    donated = []

    def compile_donating(function, names):
        places = [i for i, name in enumerate(inspect.signature(function).parameters) if name in names]

        def run(*args):
            results = function(*args)
            donated.extend(args[i].fill_(float("nan")) for i in places)
            return results

        return run

    monkeypatch.setattr(fusion, "compile_donating", compile_donating)
    return donated


def test_a_backward_writes_over_what_it_reads_last(device, transform, monkeypatch):
    """Not over what the caller has, nor where the graph is retained, or a replay is compared with an eager run."""
    donated = writing_over(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    for verify in (None, 2):
        donated.clear()
        model = Classifier().to(device, torch.bfloat16)
        twin = copy.deepcopy(model)
        plain, graphed = compiled(model), compiled(twin, transform(verify=verify))
        for retains in (False, False, True, False):
            x, labels = torch.randn(4, 8, device=device).bfloat16(), torch.randint(32, (4,), device=device)
            found = []
            for each in (plain, graphed):
                each.zero_grad()
                loss, hidden = each(x, labels)
                for again in (True, False)[not retains :]:
                    (loss + hidden.sum()).backward(retain_graph=again)
                found.append((loss, hidden))
            same(*found)
            same_state(model, twin)
        assert {tuple(each.shape) for each in donated} == (set() if verify else {(4, 16), (4, 32), (4,)})


@pytest.mark.parametrize("retains", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_graphed_step_writes_over_what_its_backward_reads_last(device, transform, backend, monkeypatch, retains):
    donated = writing_over(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    models = [Classifier().to(device, torch.bfloat16)]
    models.append(copy.deepcopy(models[0]))

    def training(model, function, retains):
        def step(x, labels):
            model.zero_grad()
            loss, hidden = function(x, labels)
            if retains:
                loss.backward(retain_graph=True)
            (loss + hidden.sum()).backward()
            return loss, hidden

        return step

    functions = [compiled(models[0]), compiled(models[1], transform())]
    plain, whole = [training(m, f, retains) for m, f in zip(models, functions)]
    graphed = thunder_cg.graphed_step(whole, modules=[functions[1]], backend=backend)
    for _ in range(5):
        x, labels = torch.randn(4, 8, device=device).bfloat16(), torch.randint(32, (4,), device=device)
        same(plain(x, labels), graphed(x, labels))
        same_state(*models)
    report = thunder_cg.explain(graphed)
    assert report.captures == 1 and report.replays
    assert {tuple(each.shape) for each in donated} == {(4, 16), (4, 32), (4,)}


def test_what_hooks_keep_of_a_graphed_step_is_not_written_over(device, transform, backend, monkeypatch):
    """In a capture, too, whose calls of compiled functions run eagerly whether there are hooks or not."""
    donated = writing_over(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    model = Classifier().to(device, torch.bfloat16)
    twin = copy.deepcopy(model)

    def training(model, function):
        def step(x, labels):
            kept = []
            model.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                loss, hidden = function(x, labels)
            (loss + hidden.sum()).backward()
            return [loss, hidden, *(each.sum() for each in kept)]

        return step

    functions = compiled(model), compiled(twin, transform())
    plain, whole = training(model, functions[0]), training(twin, functions[1])
    graphed = thunder_cg.graphed_step(whole, modules=[functions[1]], backend=backend)
    for _ in range(6):
        x, labels = torch.randn(4, 8, device=device).bfloat16(), torch.randint(32, (4,), device=device)
        same(plain(x, labels), graphed(x, labels))
        same_state(model, twin)
    assert thunder_cg.explain(graphed).replays and not donated


class TimesOnes(nn.Module):
    """Inductor (2.11) makes one tensor of the weight and what it is multiplied to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        weight = self.weight * torch.ones_like(self.weight)
        return torch.tanh(x @ weight).sum() + (weight.sin() * weight.cos()).sum(), x * torch.ones_like(x)


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.nightly_after(1)
def test_a_result_that_equals_an_argument_has_memory_of_its_own(device, transform, backend, is_step):
    """Else a backward would write over the weight, as over a saved value that it reads last."""
    model = TimesOnes().to(device)
    twin = copy.deepcopy(model)

    def training(model, function):
        def step(x):
            model.zero_grad()
            loss, equal = function(x)
            equal.add_(1.0)
            loss.backward()
            return loss, equal - x

        return step

    functions = compiled(model), compiled(twin, transform())
    plain, graphed = training(model, functions[0]), training(twin, functions[1])
    if is_step:
        graphed = thunder_cg.graphed_step(graphed, modules=[functions[1]], backend=backend)
    weight = model.weight.detach().clone()
    for _ in range(4):
        x = torch.randn(16, 16, device=device)
        found = plain(x)
        same(found, graphed(x))
        torch.testing.assert_close(found[1], torch.ones_like(x))
        assert torch.equal(model.weight, weight) and torch.equal(twin.weight, weight)
        same_state(model, twin)


def _equal(x, b):
    """Inductor (2.11) makes one tensor of each value and what it is multiplied by ones to, unless it is told not to."""
    before = b * torch.ones_like(b)
    b.add_(1.0)
    y, z = torch.exp(x), torch.tanh(x)
    same_y, same_z = y * torch.ones_like(y), z + torch.zeros_like(z)
    y.add_(x.sum().item())
    return before, y, same_y, z, same_z


def test_equal_results_have_memory_of_their_own(device, transform):
    """One may be written in the same fusion, in a later one, or by the caller."""
    plain, graphed = compiled(_equal), compiled(_equal, transform())
    for _ in range(3):
        x, b = torch.randn(4, 4, device=device), torch.randn(4, device=device)
        found = []
        for each in (_equal, plain, graphed):
            results = each(x, written := b.clone())
            results[3].add_(1.0)
            found.append([*results, written])
        same(found[1], found[2])
        torch.testing.assert_close(found[0], found[1])


class Equal(Classifier):
    def forward(self, x, labels):
        hidden = self.up(x)
        return F.cross_entropy(self.head(torch.tanh(hidden)), labels), torch.neg(torch.neg(hidden))


def test_a_backward_does_not_write_over_what_the_caller_has(device, transform, monkeypatch):
    """Inductor may return one tensor as two results, and a warm-up without memory for a copy hands it out."""

    def compile_once(function, **_):
        places: list[int] = []

        def run(*args):
            results = [*function(*args)]
            if not places:  # not in a capture, where the host cannot compare
                places.extend(next(i for i, e in enumerate(results) if torch.equal(e, each)) for each in results)
            return [results[i] for i in places]

        return run

    def fail(*_):
        raise torch.OutOfMemoryError

    donated = writing_over(monkeypatch)
    monkeypatch.setattr(torch, "compile", compile_once)
    model = Equal().to(device, torch.bfloat16)
    twin = copy.deepcopy(model)
    plain, graphed = compiled(model), compiled(twin, transform())
    for has_memory in (False, True, True):
        x, labels = torch.randn(4, 8, device=device).bfloat16(), torch.randint(32, (4,), device=device)
        with monkeypatch.context() as patches:
            if not has_memory:
                patches.setattr(outputs._Copy, "allocate", fail)
            found = [each(x, labels) for each in (plain, graphed)]
        for loss, hidden in found:
            (loss + hidden.sum()).backward()
        same(*found)
        same_state(model, twin)
        assert bool(donated) is has_memory


def _computed_anew(a, b):
    x = a * 2
    y = x + b
    b.add_(1.0)
    z = b * a.sum().item() + x
    a.mul_(2.0)
    return y + a, z + y, x * 1.0


def _read_before(a, b):
    x = a * 2
    n = a.sum().item()
    y = b + x
    b.mul_(2.0)
    return (y * n,)


def _written_again(a, b):
    a.add_(1.0)
    x, y = a * b, b * 2
    n = x.sum().item()
    x.mul_(2.0)
    return ((y + 1) * n,)


def _nothing_read(a, b):
    x = b + 1
    y = x * x.sum().item()
    n = y.sum().item()
    x.add_(1)
    return (y * n,)


def _views(a, b):
    x = a[4:]
    b[0] = a.sum().item()
    a.mul_(b)
    x.add_(b[0])
    return (a + 1,)


@pytest.mark.filterwarnings("ignore:Inductor cannot compile .* it writes an argument that shares memory")
@pytest.mark.parametrize(
    "fn",
    [
        _computed_anew,
        _views,
        *(pytest.param(fn, marks=pytest.mark.nightly) for fn in (_read_before, _written_again, _nothing_read)),
    ],
)
def test_writes_in_place_between_fusions(fn, transform, device):
    """Thunder computes anew what is cheap, in an order of its own: not so what is written, or read before it is."""
    options = {"executors": thunder_cg.executors(), "debug_options": thunder.DebugOptions(check_traces=2)}
    plain, captured = (thunder.jit(fn, transforms=t, **options) for t in ([], [transform()]))
    memory = torch.arange(24.0, device=device)
    for start in (0, 0, 0, 1, 8):  # at another offset, PyTorch takes an argument and its view for other memory
        calls = []
        for each in (fn, plain, captured):
            inputs = [memory.clone()[start : start + 8], torch.ones(8, device=device)]
            calls.append([*each(*inputs), *inputs])
        for expected, *found in zip(*calls):
            assert all(torch.equal(expected, other) for other in found)


@pytest.mark.filterwarnings("ignore:Inductor cannot compile .*recompile_limit")
def test_more_layouts_than_dynamo_compiles_run_op_by_op(transform, device):
    def fn(a):
        return torch.sin(a) * 2 + a

    plain, captured = (thunder.jit(fn, executors=thunder_cg.executors(), transforms=t) for t in ([], [transform()]))
    with torch._dynamo.config.patch(recompile_limit=1):
        for step in (4, 5, 6, 4, 5, 4, 4, 5):
            a = torch.rand(24, device=device).as_strided((4, 4), (step, 1))
            found = plain(a)
            assert torch.equal(found, captured(a))
            torch.testing.assert_close(found, fn(a))
    (op,) = [op for op in thunder_cg.explain(captured).traces[0].ops if op.fused]
    assert "too many layouts" in op.detail


def test_a_written_argument_that_requires_grad(transform, device):
    """Inductor refuses it for a view of what is written; a graph, which has it detached, would run other kernels."""

    def fn(a, b):
        v = a.view(-1)
        v.add_(1.0)
        a.mul_(2.0)
        return torch.sin(v) * b, v, a

    with torch.no_grad():
        calls = []
        for transforms in ([], [transform()]):
            compiled = thunder.jit(fn, executors=thunder_cg.executors(), transforms=transforms)
            calls.append([])
            for seed in range(4):
                torch.manual_seed(seed)
                a = torch.rand(4, 4, device=device, requires_grad=True)
                result, _, same_a = compiled(a, torch.rand(16, device=device))
                assert same_a is a
                calls[-1] += [result, a.detach()]
    assert not any(op.detail and "op by op" in op.detail for t in thunder_cg.explain(compiled).traces for op in t.ops)
    assert all(map(torch.equal, *calls))
