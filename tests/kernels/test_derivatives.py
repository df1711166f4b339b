"""Derivatives in closed form: values and gradients are PyTorch's, and what is kept between the two is small."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import thunder
import torch
from support import programs, same, same_state
from thunder.core.transforms import grad
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import thunder_cg
from thunder_cg.compat.compiled import computation_and_inputs
from thunder_cg.compat.cuda import chooses_cudnn_attention
from thunder_cg.kernels import attention, derivatives, embedding, loss, normalization


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, bias=False)
        self.batch_norm = nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm([8, 6, 6])
        self.head = nn.Linear(288, 11)
        self.last_norm = nn.LayerNorm(11, bias=False)

    def forward(self, images, labels):
        x = self.batch_norm(self.convolution(images))
        x = torch.relu(x - F.adaptive_avg_pool2d(x, 1))
        x = self.last_norm(self.head(F.gelu(self.layer_norm(x)).flatten(1)))
        each = F.cross_entropy(x, labels, reduction="none", ignore_index=2)
        return F.cross_entropy(x, labels), each, F.gelu(x, approximate="tanh")


def test_a_model(transform, device, deterministic):
    torch.manual_seed(0)
    model = Net().double().to(device)
    twin, graphed = copy.deepcopy(model), copy.deepcopy(model)
    executors = [derivatives.executor, derivatives.fused_executor]
    plain = thunder.jit(twin, executors=executors)
    captured = thunder.jit(graphed, executors=executors, transforms=[transform(strict=True)])
    for _ in range(4):
        images, labels = batch(device)
        for each in (model, plain, captured):
            each.zero_grad()
            mean, rows, x = each(images, labels)
            (mean + 0.3 * rows.sum() + x.square().sum()).backward()
        same_state(twin, graphed)
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(model.buffers(), twin.buffers()):
            torch.testing.assert_close(p, q)


def batch(device):
    return torch.randn(4, 3, 8, 8, device=device, dtype=torch.float64), torch.tensor([1, 2, 3, 10], device=device)


def _all_of_them(images, kernels, weight):
    x = F.relu(F.conv2d(images, kernels, padding=1))
    x = F.batch_norm(F.max_pool2d(x, 2), None, None, training=True)
    x = F.gelu(F.layer_norm(x * F.adaptive_avg_pool2d(x, 1), (4,), weight), approximate="tanh")
    return F.cross_entropy(x.flatten(1), torch.tensor([1, 2, 3, 0], device=x.device), reduction="sum")


@pytest.mark.parametrize("all_executors", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_thunders_functional_grad(transform, device, all_executors):
    """It traces each derivative, by the names of the operator's arguments, and passes numbers as proxies."""
    ours = [derivatives.executor, derivatives.fused_executor]
    compiled = thunder.jit(
        _all_of_them, executors=thunder_cg.executors() if all_executors else ours, transforms=[transform(strict=True)]
    )
    gradients = grad(compiled)
    for _ in range(3):
        shapes = (4, 3, 8, 8), (5, 3, 3, 3), (4,)
        inputs = [torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True) for shape in shapes]
        expected = torch.autograd.grad(_all_of_them(*inputs), inputs)
        torch.testing.assert_close([*gradients(*inputs)], [*expected])


def test_what_is_computed_once_more(transform, device):
    """What is cheap: Inductor fuses it with what needs it."""
    compiled = thunder.jit(Net().double().to(device), executors=thunder_cg.executors(), transforms=[transform()])
    computation_and_inputs(compiled, batch(device), {})
    forward, backward = (
        [[each.sym.name for each in op.symbol.subsymbols] for op in program.ops.ops if op.is_fusion]
        for program in programs(compiled)
    )
    assert len(forward) == len(backward) == 1, "one fusion each way"
    new = {"normalization_gradients", "cross_entropy_gradient", "gelu_gradient", "convolution_backward_weight"}
    assert new <= {*backward[0]} and "normalization_apply" in backward[0]
    assert not {"convolution", "normalization_statistics", "linear", "cross_entropy"}.intersection(backward[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(F.gelu(self.up(x))) + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.nightly_after(1)
def test_what_a_product_takes_is_kept(transform, device, autocast):
    """Its own backward needs it. But weights are converted again."""
    compiled = thunder.jit(Block().to(device), executors=thunder_cg.executors(), transforms=[transform()])
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        computation_and_inputs(compiled, (torch.randn(2, 8, device=device),), {})
    forward, backward = programs(compiled)
    names = {each.sym.name for op in backward.ops.ops if op.is_fusion for each in op.symbol.subsymbols}
    assert "gelu_gradient" in names and not {"gelu", "normalization_apply", "linear"} & names, names
    saved = tree_leaves(forward.ops.ops[-1].symbol.args[1])
    copies = [
        each for each in saved if getattr(each, "shape", None) in {(32, 8), (8, 32)} and "bfloat16" in str(each.dtype)
    ]
    assert len(copies) <= 1, copies  # of three weights: Thunder's rematerialization may take one for the least


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(torch.sin(block(x)) + x)
        return x


def test_sums_of_residual_blocks_are_kept(transform, device):
    compiled = thunder.jit(Residual().to(device), executors=thunder_cg.executors(), transforms=[transform()])
    computation_and_inputs(compiled, (torch.randn(2, 3, 8, 8, device=device),), {})
    (names,) = (
        [each.sym.name for each in op.symbol.subsymbols] for op in programs(compiled)[1].ops.ops if op.is_fusion
    )
    assert "relu_gradient" in names and not {"sin", "convolution", "relu"}.intersection(names), names


def test_statistics_move_in_the_forward(device):
    """Also where there is no backward."""
    model = nn.Sequential(nn.BatchNorm1d(4)).to(device)
    twin = copy.deepcopy(model)
    compiled = thunder.jit(model, executors=[derivatives.fused_executor])
    x = torch.randn(8, 4, device=device)
    with torch.no_grad():
        compiled(x), twin(x)
    compiled(x), twin(x)
    for a, b in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(a, b)
    model.eval(), twin.eval()
    torch.testing.assert_close(compiled(x), twin(x))


_NORMS = {  # of (4, 6, 5): the shape of the parameters, the axes of the statistics, and those of the parameters
    "batch": ((6,), [0, 2], [1]),
    "layer": ((6, 5), [1, 2], [1, 2]),
    "layer, all axes": ((4, 6, 5), [0, 1, 2], [0, 1, 2]),
}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", _NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms(device, kind, affine, dtype):
    a = torch.randn(4, 5, 6, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    size, over, along = _NORMS[kind]
    parameters = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    weight, bias = parameters if affine else (None, None)
    if kind == "batch":
        expected = F.batch_norm(a, None, None, weight, bias, training=True)
    else:
        expected = F.layer_norm(a, size, weight, bias)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [a, *(parameters if affine else [])], gradient)
    with torch.no_grad():
        mean, _, scale = normalization._statistics(a, over, 1e-5)
        result = normalization._apply(a, mean, scale, weight, bias, along)
        if (device, kind) != ("cuda", "batch"):  # on a GPU, PyTorch keeps strides that are neither usual layout
            assert result.stride() == expected.stride()
        close(result, expected)
        found = normalization._gradients(gradient, a, mean, scale, weight, over, along)
    for expected, of in zip(gradients, found):
        close(of.to(dtype), expected)


@pytest.mark.parametrize("geometry", [(2,), (3, 2, 1), ((3, 2), None, (1, 0), (1, 2)), (5, [1], [2], 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pool(device, layout, geometry):
    """A byte of each window is kept, not an index of eight. Equal maxima, NaN and -inf count as in PyTorch."""
    a = torch.randint(4, (2, 3, 11, 13), device=device).double().contiguous(memory_format=layout)
    a[0, 0, 4:, :5], a[0, 1, 5, 5] = -torch.inf, torch.nan
    twin = a.clone().requires_grad_()
    expected = F.max_pool2d(twin, *geometry)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    compiled = thunder.jit(lambda a: F.max_pool2d(a, *geometry), executors=[derivatives.fused_executor])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        found = compiled(a.requires_grad_())
    assert torch.int8 in [each.dtype for each in saved] and torch.int64 not in [each.dtype for each in saved]
    found.backward(gradient)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a.grad, twin.grad)


def close(found, expected):
    wide = expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9 if wide else 3e-2, atol=1e-9 if wide else 6e-2)


@pytest.mark.parametrize("pixels", [(), (2, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(device, reduction, is_weighed, smoothing, pixels):
    logits = torch.randn(6, 5, *pixels, device=device, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        logits[0] *= 1e4  # exponentials overflow unless the largest is taken off
        logits[1, 2] = 0.0 if smoothing else -torch.inf  # a class that is masked
    target = torch.tensor([0, 4, -100, 2, 1, -100], device=device).view(6, *[1] * len(pixels)).repeat(1, *pixels)
    weight = torch.rand(5, device=device, dtype=torch.float64) if is_weighed else None
    options = weight, -100, reduction, smoothing
    expected = F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
    gradient = torch.rand_like(expected)
    (of_logits,) = torch.autograd.grad(expected, logits, gradient)
    with torch.no_grad():
        found, logsumexp = loss._cross_entropy(logits, target, *options)
        same_gradient = loss._gradient(gradient, logits, target, logsumexp, *options)
    close(found, expected)
    close(same_gradient, of_logits)


def test_negative_classes_are_refused():
    """Inductor would take -1 for the last class."""
    logits, target = torch.randn(4, 5), torch.tensor([-1, 2, -100, 4])
    assert loss._classes(logits, target, -100).tolist() == [5, 2, 0, 4]
    with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
        loss._cross_entropy(logits, target, None, -100, "mean", 0.0)


def test_which_losses_are_ours(device):
    """Not those of probabilities. Thunder includes ignored targets in the mean of smoothed losses."""
    compiled = thunder.jit(F.cross_entropy, executors=[derivatives.fused_executor])
    x, labels = torch.randn(6, 5, 3, device=device), torch.randint(5, (6, 3), device=device)
    labels[:3] = -100
    for target, is_ours in ((labels, True), (x.softmax(1), False)):
        found = compiled(x, target, label_smoothing=0.1)
        torch.testing.assert_close(found, F.cross_entropy(x, target, label_smoothing=0.1))
        assert ("= cross_entropy(" in str(thunder.last_traces(compiled)[-1])) is is_ours


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("masked", ["not", "causal", "bools"])
def test_attention_by_cudnn(masked):
    torch.manual_seed(0)
    shape = 2, 4, 128, 64
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool).tril(3) if masked == "bools" else None
    if torch._fused_sdp_choice(*leaves, mask, 0.0, masked == "causal") != 3:
        pytest.skip("PyTorch would not choose cuDNN here")

    def fn(q, k, v, mask):
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=masked == "causal")

    transforms = [thunder_cg.cudagraph_transform()]
    plain, captured = (thunder.jit(fn, executors=thunder_cg.executors(), transforms=each) for each in ([], transforms))
    gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        results = []
        for each in (fn, plain, captured):
            y = each(*leaves, mask)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, gradient)])
        same(results[1][0], results[2][0])
        for a, b, c in zip(*results):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(b, c, rtol=2e-2, atol=2e-2)
    names = [op.name for program in programs(captured) for op in program.ops.ops]
    assert any("cudnn_attention_forward" in n for n in names) and any("cudnn_attention_backward" in n for n in names)
    with torch.no_grad():
        close(captured(*leaves, mask), fn(*leaves, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_decode_step_by_cudnn(dtype):
    """One query, and a mask that says how many keys there are."""
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 512, 512))
    seen = (torch.arange(512, device="cuda") <= 300).view(1, 1, 1, -1)
    mask = seen if dtype is torch.bool else torch.where(seen, 0.0, float("-inf")).to(dtype)
    if torch._fused_sdp_choice(q, k, v, mask) != 3:
        pytest.skip("PyTorch would not choose cuDNN here")
    captured = thunder.jit(
        F.scaled_dot_product_attention, executors=thunder_cg.executors(), transforms=[thunder_cg.cudagraph_transform()]
    )
    with torch.no_grad():
        for _ in range(4):
            close(captured(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    assert "cudnn_attention(" in str(thunder.last_traces(captured)[-1])


def test_masks_for_cudnn(monkeypatch):
    """On a CPU, with PyTorch's own attention in the place of cuDNN's."""
    q, k, v = (torch.randn(2, 2, n, 8) for n in (1, 6, 6))
    seen = (torch.arange(6) <= 3).view(1, 1, 1, -1)
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(attention, "cudnn_attention", lambda q, k, v, bias, *args, **kw: (fused(q, k, v, bias), None))
    monkeypatch.setattr(attention, "chooses_cudnn_attention", lambda *args: True)
    compiled = thunder.jit(fused, executors=[attention.executor])
    for mask in (seen, torch.where(seen, 0.0, float("-inf"))):
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v, mask), fused(q, k, v, mask))
        assert "cudnn_attention(" in str(thunder.last_traces(compiled)[-1])
    leaves = [each.requires_grad_() for each in (q, k, v)]
    compiled(*leaves, mask.requires_grad_())
    assert "cudnn" not in str(thunder.last_traces(compiled)[-1])  # it has no derivative of the mask


@pytest.mark.parametrize("trains", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["trains", "infers"])
def test_attention_within_a_fusion(monkeypatch, trains):
    """In training it is between fusions, so that a backward frees what a layer saved as soon as it has read that."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    q = torch.randn(2, 2, 6, 8, requires_grad=trains)
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(attention, "cudnn_attention", lambda q, k, v, *args, **kw: (fused(q, k, v), torch.ones(1)))
    monkeypatch.setattr(attention, "chooses_cudnn_attention", lambda *args: True)
    compiled = thunder.jit(lambda q: torch.tanh(fused(torch.sin(q), q, q)), executors=thunder_cg.executors())
    torch.testing.assert_close(compiled(q), torch.tanh(fused(torch.sin(q), q, q)))
    found = [each.sym.name for each in thunder.last_traces(compiled)[-1].bound_symbols if "del" not in each.sym.name]
    between = ["Inductor0", "cudnn_attention_forward", "Inductor1"]
    assert [name for name in found if "Inductor" in name or "cudnn" in name] == (between if trains else ["Inductor0"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_numbers_on_the_host_are_in_no_fusion(caplog):
    """Those that Inductor would move to the GPU keep none of the operators there eager. One warning is for all."""

    def fn(x, numbers):
        for n in numbers:
            x = torch.tanh(x * 2) + torch.sin(n.to("cuda") + 1)
        return x

    x, numbers = torch.randn(8, device="cuda"), [torch.tensor(2.0), torch.tensor(3.0)]
    captured = thunder.jit(fn, executors=thunder_cg.executors(), transforms=[thunder_cg.cudagraph_transform()])
    for _ in range(4):
        close(captured(x, numbers), fn(x, numbers))
    report = thunder_cg.explain(captured)
    (trace,) = report.traces
    assert len(trace.regions) == 1 and sum(op.verdict == "eager" for op in trace.ops) == 2, str(report)
    said = [each.getMessage() for each in caplog.records if each.name.startswith("thunder_cg")]
    assert len(said) == 1, said


def test_a_trace_for_a_gpu_that_is_not_here():
    """As `plan` makes it on a machine without one; and where fake tensors are made."""
    layouts = [((2, 4, 8, 64), torch.bfloat16)] * 3
    with FakeTensorMode(), torch.inference_mode():
        assert not chooses_cudnn_attention(torch.device("cpu"), layouts, True, None, True)
    if not torch.cuda.is_available():
        assert not chooses_cudnn_attention(torch.device("cuda", 0), layouts, True, None, True)


def test_what_cudnn_gets_is_compact():
    expanded = torch.ones(2, 1, 8, 4).expand(2, 3, 8, 4)
    across = torch.ones(2, 3, 4, 8).transpose(2, 3)
    between = torch.ones(2, 8, 3, 4).transpose(1, 2)  # heads between positions, as models have it
    assert [attention._compact(each) is each for each in (expanded, across, between)] == [False, False, True]
    assert torch.equal(attention._compact(expanded), expanded)


def test_attention_elsewhere_is_not_cudnns(device):
    q = torch.randn(1, 2, 8, 4, device=device)
    compiled = thunder.jit(F.scaled_dot_product_attention, executors=[attention.executor])
    torch.testing.assert_close(compiled(q, q, q), F.scaled_dot_product_attention(q, q, q))
    assert "cudnn" not in str(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_an_embedding(device, padding, dtype):
    """Many sums of one row are right in 16 bits, too."""
    weight = torch.randn(50, 6, device=device, dtype=dtype, requires_grad=True)
    indices = torch.tensor([[3, 7, 0, 7], [49, 3, 7, 7]], device=device).repeat(5, 1)
    gradient = torch.rand(10, 4, 6, device=device, dtype=dtype)
    (expected,) = torch.autograd.grad(F.embedding(indices, weight.float(), padding), weight, gradient.float())
    torch.testing.assert_close(embedding._gradient(gradient, indices, 50, padding), expected.to(dtype))


def test_which_embeddings_are_ours(transform, device):
    """Those of 16 bits with fewer indices than rows."""
    executors = [derivatives.fused_executor]
    for dtype, count, padding, is_ours in (
        (torch.bfloat16, 19, -3, True),
        (torch.bfloat16, 20, None, False),
        (torch.float32, 19, None, False),
    ):
        model = nn.Embedding(20, 4, padding_idx=padding).to(device, dtype)
        twin, graphed = copy.deepcopy(model), copy.deepcopy(model)
        plain = thunder.jit(twin, executors=executors)
        captured = thunder.jit(graphed, executors=executors, transforms=[transform()])
        for seed in range(3):
            indices = torch.arange(count, device=device) // 2 + seed
            for each in (model, plain, captured):
                each.zero_grad()
                each(indices).square().sum().backward()
            same_state(twin, graphed)
            torch.testing.assert_close(twin.weight.grad, model.weight.grad)
        assert ("embedding_gradient(" in str(thunder.last_backward_traces(plain)[-1])) is is_ours
