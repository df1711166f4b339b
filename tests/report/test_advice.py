"""Each cause's advice, followed to the letter on a model that has the cause, leaves nothing eager."""

from __future__ import annotations

import copy
import logging
import random
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import thunder
import torch
from support import run_what_inductor_gets
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from thunder_cg import CaptureError, cudagraph_transform, explain, plan, thunderfx
from thunder_cg.analysis.advice import for_size
from thunder_cg.report import CauseReport
from thunder_cg.tools.explain import _not_captured

Function = Callable[[torch.Tensor], torch.Tensor]

executor = OperatorExecutor("advice_ex")
unknown = executor.register_operator("unknown", meta=lambda x: TensorProxy(like=x), fn=torch.sin)
OUTSIDE = torch.tensor([1.0, 2.0])
TABLE = np.array([1.0, 2.0], dtype=np.float32)
TENSOR = torch.from_numpy(TABLE)


def around(middle: Function) -> Function:
    """The function with enough around it for a region before and one after."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(middle(torch.tanh(torch.relu(x) * 2))) * 3)

    return whole


def causes(fn: Function, transform: Callable[..., Any], jit: dict[str, Any]) -> tuple[CauseReport, ...]:
    executors = [executor, *thunder.get_default_executors()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "symbolic values" are experimental
        compiled = thunder.jit(around(fn), executors=executors, transforms=[transform], **jit)
        compiled(torch.ones(2))
        return explain(compiled).causes


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def lists(x: torch.Tensor) -> torch.Tensor:
    a, b = x.tolist()
    return x * a + b


def unbinds(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a, b = x.unbind()
    return x * a + b


def selects(x: torch.Tensor) -> torch.Tensor:
    return x + x[x > 0].sum()


def keeps_size(x: torch.Tensor) -> torch.Tensor:
    return x + torch.where(x > 0, x, 0.0).sum(0, keepdim=True)


def makes(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0])


class Sliced(torch.nn.Module):
    """What a number bounds that changes, as the position of a decoder does, with the number and with a tensor."""

    def __init__(self, fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.fn = torch.nn.Linear(4, 4), fn

    def forward(self, x: torch.Tensor, i: Any) -> torch.Tensor:
        return torch.tanh(self.fn(self.linear(x), i)) * 2


def sliced(x: torch.Tensor, i: int) -> torch.Tensor:
    return x[i : i + 2]


@pytest.mark.parametrize("compiles", ["jit", "thunderfx"])
@pytest.mark.parametrize(
    ("fn", "numbers", "advice", "better"),
    [
        (
            sliced,
            [0, 1, 2, 3],
            "if it bounds a slice, x[i + torch.arange(n, device=...)]",
            lambda x, i: x[i + torch.arange(2)],
        ),
        (
            torch.nn.functional.dropout,
            [0.1, 0.2, 0.3, 0.4],
            "if it is the p of a dropout, x * (torch.rand_like(x) >= p) / (1 - p)",
            lambda x, p: x * (torch.rand_like(x) >= p) / (1 - p),
        ),
    ],
    ids=["slice", "dropout"],
)
@pytest.mark.nightly_after(1)
def test_advice_for_a_number_that_changes_where_no_tensor_can_be(fn, numbers, advice, better, compiles):
    def compiled(model: torch.nn.Module) -> Any:
        torch._dynamo.reset()
        if compiles == "thunderfx":
            return thunderfx(model, backend="tape")
        return thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])

    if compiles == "jit":  # Dynamo compiles no version for each
        changing = compiled(Sliced(fn))
        for number in numbers[:3]:
            changing(torch.randn(6, 4), number)
        (change,) = explain(changing).changes
        assert advice in change.fix
    mended = compiled(Sliced(better))
    for number in numbers:
        mended(torch.randn(6, 4), torch.tensor(number)).sum().backward()
    report = explain(mended)
    assert [len(trace.regions) for trace in report.traces] == [1, 1] and not (report.changes or report.causes)
    assert not (report.breaks or report.outside) and "2 of 4 calls and 2 of 4 backwards replayed" in str(report)


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (lambda x: x[x.argmax() : x.argmax() + 1], "bounds a slice, x[i + torch.arange(n)] is x[i : i + n]"),
        (
            lambda x: x[torch.where(x > 0)[0]],
            "nonzero_static(mask, size=n) in the place of nonzero and torch.where(mask)",
        ),
    ],
    ids=["slice", "where"],
)
def test_advice_of_a_module_that_does_not_compile_as_a_number_is_unknown(fn, advice):
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(x)

    compiled = thunder.jit(Reads(), transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises((ValueError, NotImplementedError)):
        compiled(torch.ones(2))
    assert "To try: for a " in str(explain(compiled)) and advice in str(explain(compiled))


@torch.library.custom_op("thunder_cg_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@pytest.mark.parametrize(
    ("of_size", "operator", "advice"),
    [
        (
            torch.nonzero,
            "nonzero returns, which x[mask] and torch.where(mask) call,",
            "torch.where(mask, x, 0.0), with mask.unsqueeze(-1)",
        ),
        (positive, "thunder_cg_tests.positive", "do what this line does outside of the compiled function"),
    ],
)
@pytest.mark.nightly_after(1)
def test_advice_where_dynamo_ends_a_graph_as_a_size_is_not_known(of_size, operator, advice):
    torch._dynamo.reset()
    compiled = thunderfx(lambda x: of_size(x.sin() * 2).sum() * 2, backend="tape")
    compiled(torch.ones(3))
    (ended,) = explain(compiled).breaks
    returns = operator if "returns" in operator else f"{operator} returns"
    assert ended.reason == f"the size of what {returns} depends on what tensors hold"
    assert ended.fix.startswith(advice)


def test_advice_for_ctc_loss():
    """As models of speech have it."""

    def whole(x):
        return torch.ctc_loss(x.log_softmax(-1), torch.tensor([[1]]), (4,), (1,)) * 2

    torch._dynamo.reset()
    compiled = thunderfx(whole, backend="tape")
    compiled(torch.ones(4, 1, 3))
    (ended,) = explain(compiled).breaks
    assert ended.fix == "return the log-probabilities, and call ctc_loss on them outside of the compiled function"


@pytest.mark.parametrize("compiles", ["jit", "thunderfx"])
@pytest.mark.nightly_after(1)
def test_advice_for_bincount_holds_in_training(compiles):
    class Counts(torch.nn.Linear):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(super().forward(x)), (at[:, None] == torch.arange(4)).sum(0)

    assert "(x[:, None] == torch.arange(n)).sum(0) in the place of bincount" in for_size("torch.bincount")
    transforms = [cudagraph_transform(backend="tape")]
    model = Counts(4, 4)
    compiled = thunder.jit(model, transforms=transforms) if compiles == "jit" else thunderfx(model, backend="tape")
    at = torch.tensor([1, 3, 3])
    for _ in range(3):
        y, found = compiled(torch.randn(3, 4), at)
        y.sum().backward()
        assert torch.equal(found, torch.bincount(at, minlength=4))
    assert not explain(compiled).causes and not explain(compiled).outside


@pytest.mark.parametrize(
    ("fn", "jit", "options", "advice", "better", "better_jit"),
    [
        (reads, {}, {}, "operators take a 0-dim tensor in the place of a number", lambda x: x * x.sum(), {}),
        (makes, {}, {}, "make the tensor once, outside of the compiled function", lambda x: x + OUTSIDE, {}),
        (makes, {}, {}, "or with torch.full or torch.arange", lambda x: x + torch.arange(1, 3, dtype=x.dtype), {}),
        (
            lambda x: x + torch.nn.functional.one_hot(x.long(), 2).sum(0),
            {},
            {},
            "on a CPU, write (x[..., None] == torch.arange(n, device=x.device)).long()",
            lambda x: x + (x.long()[..., None] == torch.arange(2, device=x.device)).long().sum(0),
            {},
        ),
        (unknown, {}, {}, "the same kernels for the same shapes, and does nothing besides, pass allow=", None, {}),
        (torch.sin, {}, {"deny": ["torch.sin"]}, "remove 'torch.sin' from deny=", None, {}),
        (
            torch.sin,
            {"cache": "symbolic values"},
            {},
            'compile with the default cache="constant values"',
            torch.sin,
            {},
        ),
    ],
    ids=["item", "tensor", "tensor-full", "one_hot", "unknown", "denied", "symbolic"],
)
@pytest.mark.nightly_after(4)
def test_advice(transform, backend, fn, jit, options, advice, better, better_jit):
    if backend == "cuda":
        pytest.skip("constants of this file are on the CPU")
    found = causes(fn, transform(**options), jit)
    assert any(advice in cause.fix for cause in found), found
    if better is not None:
        assert causes(better, transform(), better_jit) == ()
        return
    allowed = re.findall(r"allow=\['([^']+)'\]", found[0].fix)  # else a name in deny= is removed
    assert causes(fn, transform(allow=allowed), jit) == ()
    assert len(found) == 1 and found[0].added_regions == 1


COUNTS = torch.tensor([1, 2])


def repeats(x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, COUNTS)


def repeats_by_index(x: torch.Tensor) -> torch.Tensor:
    return x[torch.searchsorted(COUNTS.cumsum(0), torch.arange(3), right=True)]


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.sum()
    return x * scale


@pytest.mark.parametrize(
    ("fn", "advice", "better"),
    [
        (reads, "in training with torch.no_grad(): number = x.sum()", without_gradient),
        (lists, "Tensor.unbind in the place of tolist(), which gives 0-dim tensors", unbinds),
        (selects, "torch.where(mask, x, 0.0), with mask.unsqueeze(-1) for rows, in the place of x[mask]", keeps_size),
        (repeats, "x[torch.searchsorted(counts.cumsum(0), torch.arange(n), right=True)]", repeats_by_index),
    ],
    ids=["item", "tolist", "mask", "repeat"],
)
@pytest.mark.nightly_after(2)
def test_advice_for_a_graph_break_of_dynamo_gives_one_region_and_the_same_gradient(fn, advice, better):
    """With Dynamo's own advice for the last two, Inductor gets a piece of the graph."""
    x = torch.tensor([0.1, 0.2], requires_grad=True)
    (wanted,) = torch.autograd.grad(around(fn)(x).sum(), x)
    torch._dynamo.reset()
    broken = thunderfx(around(fn), backend="tape")
    broken(x.detach())
    breaks = explain(broken).breaks
    assert not any("Data dependent operator" in found.reason for found in breaks)
    assert breaks and all(advice in found.fix and "dynamic_output_shape" not in found.fix for found in breaks)
    torch._dynamo.reset()
    mended = thunderfx(around(better), backend="tape")
    (gradient,) = torch.autograd.grad(mended(x).sum(), x)
    torch.testing.assert_close(gradient, wanted)
    report = explain(mended)
    assert [len(trace.regions) for trace in report.traces] == [1, 1]
    assert not (report.breaks or report.outside or report.causes)


@pytest.mark.parametrize(
    ("fn", "operators", "advice", "better"),
    [
        (
            lambda x: torch.vmap(lambda row: row.sum() * 2)(x),
            "sum, mul",
            "write it without the transform, as x.sum(-1) for torch.vmap(torch.sum)(x)",
            lambda x: x.sum(-1) * 2,
        ),
        (
            lambda x: torch.func.grad(lambda row: row.exp().sum())(x),
            "exp, sum",
            "write it without the transform",
            torch.exp,
        ),
        (lambda x: torch.from_numpy(np.cos(x.numpy())), "numpy.cos", "call PyTorch's function of that name", torch.cos),
        (
            lambda x: x + torch.from_numpy(TABLE[x.int().numpy()]),
            "numpy.getitem",
            "call PyTorch's function of that name, or index a tensor, which is made of the array once, outside",
            lambda x: x + TENSOR[x.int()],
        ),
        (lambda x: torch.asarray(x) + 1, "asarray", "use other operators, or one of your own with", lambda x: x + 1),
    ],
    ids=["vmap", "grad", "numpy", "table", "unknown"],
)
@pytest.mark.nightly_after(2)
@pytest.mark.usefixtures("cut")
def test_advice_for_what_inductor_gets(monkeypatch, fn, operators, advice, better):
    """The operators are the user's, without those that Dynamo makes of a transform; so are names of inputs."""
    run_what_inductor_gets(monkeypatch)
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    torch._dynamo.reset()
    broken, mended = (thunderfx(around(each), backend="tape") for each in (fn, better))
    torch.testing.assert_close(broken(x), mended(x))
    said = str(explain(broken))
    assert re.search(rf"\n      {operators} of .*, (is|are) left to Inductor: ", said), said
    assert f"        to change it: {advice}" in said
    assert "nesting" not in said and "_batch_dim" not in said and "for_grad" not in said
    report = explain(mended)
    assert [len(trace.regions) for trace in report.traces] == [1] and not (report.outside or report.causes)


def test_advice_for_an_assert(monkeypatch):
    def checks(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        torch._assert_async(torch.isfinite(y).all(), "not finite")  # as Dynamo has an assert; pytest has another
        return y.cos()

    run_what_inductor_gets(monkeypatch)
    torch._dynamo.reset()
    compiled = thunderfx(checks, backend="tape")
    compiled(torch.ones(2))
    said = str(explain(compiled))
    assert " is left to Inductor: it is an assert on what a tensor holds, which Thunder does not trace\n" in said
    assert "        to change it: check before or after the call\n" in said


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.nightly_after(1)
def test_advice_for_an_argument_that_is_written(monkeypatch, in_place):
    run_what_inductor_gets(monkeypatch)
    torch._dynamo.reset()
    compiled = thunderfx(lambda x: torch.cos(torch.sin(x.mul_(2) if in_place else x * 2)), backend="tape")
    compiled(torch.tensor([0.1, 0.2], requires_grad=True) * 1)
    report = explain(compiled)
    said = "to change it: compute a new tensor, as x = x * 2 for x.mul_(2)" in str(report)
    assert (said, bool(report.outside)) == (in_place, in_place)
    assert sum(len(trace.regions) for trace in report.traces) == 2


def test_advice_for_random_numbers_of_python():
    torch._dynamo.reset()
    broken = thunderfx(around(lambda x: x * random.random()), backend="tape")
    mended = thunderfx(around(lambda x: x * torch.rand(())), backend="tape")
    for compiled in (broken, mended):
        compiled(torch.ones(3))
    (found,) = explain(broken).breaks
    assert found.reason == "Random.random(), which Dynamo does not trace" and "torch.rand" in found.fix
    report = explain(mended)
    assert not (report.breaks or report.causes) and len(report.traces) == 1


@pytest.mark.nightly
def test_advice_for_a_branch_on_random_numbers_of_python():
    """As MusicGen of Transformers has it, to skip layers in training."""

    def skipping(x):
        return x if random.uniform(0, 1) < 0.0 else torch.sin(x)

    def choosing(x):
        return torch.where(torch.rand((), device=x.device) < 0.0, x, torch.sin(x))

    torch._dynamo.reset()
    broken, mended = (thunderfx(around(fn), backend="tape") for fn in (skipping, choosing))
    for compiled in (broken, mended):
        compiled(torch.ones(3))
    reason, fix = {(each.reason.partition(",")[0], each.fix) for each in explain(broken).breaks}.pop()
    assert reason == "a branch on a random number of Python's" and "torch.where(torch.rand((), device=x.device)" in fix
    report = explain(mended)
    assert not (report.breaks or report.outside) and len(report.traces) == 1


def test_advice_for_a_module_that_is_converted_in_the_forward():
    """As routers of experts of Switch Transformers have it."""

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(x)
            self.classifier = self.classifier.to(torch.float32)
            return self.classifier(x)

    torch._dynamo.reset()
    compiled = thunderfx(Router(), backend="tape")
    compiled(torch.ones(3))
    found = explain(compiled).breaks
    assert found and all(each.reason.startswith("new parameters") for each in found), found
    assert all("convert before the call" in each.fix for each in found)


def test_advice_for_a_loop_that_dynamo_does_not_trace():
    """Dynamo hints at an error of the code's own, which the code does not have."""

    def fn(x):
        for _ in range(random.randint(1, 2)):
            x = torch.sin(x)
        return x

    torch._dynamo.reset()
    compiled = thunderfx(fn, backend="tape")
    compiled(torch.ones(3))
    (found,) = explain(compiled).breaks
    assert found.fix.startswith("do what this line does outside of the compiled function")


def test_advice_for_a_context_manager():
    """As the CTC loss of models of Transformers has it, which runs without cuDNN."""

    def fn(x):
        y = x.sin() * 2
        with torch.backends.cudnn.flags(enabled=False):
            return y.cos() * 3

    compiled = thunderfx(fn, backend="tape")
    compiled(torch.ones(3))
    breaks = explain(compiled).breaks
    assert breaks and all(each.fix.startswith("enter it around the call") for each in breaks)
    assert all("context manager" in each.reason for each in breaks)


@pytest.mark.nightly
def test_advice_for_a_gradient_of_an_input_and_for_a_lock():
    """As models of speech of Transformers have the former, and its models that return hidden states the latter."""
    lock, weight = threading.Lock(), torch.nn.Parameter(torch.ones(2))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x[:, None]
            if not is_left_out:
                y.requires_grad = True
            if not is_made:
                with lock:
                    is_made.append(1)
            return torch.sin(y * weight)

    def breaks() -> list[str]:
        torch._dynamo.reset()
        compiled = thunderfx(Model(), backend="tape")
        compiled(torch.ones(2))
        return [found.fix for found in explain(compiled).breaks]

    is_left_out, is_made = False, list[int]()
    fixes = breaks()
    assert any("has a gradient anyway" in fix for fix in fixes), fixes
    is_left_out = True
    is_made.clear()
    fixes = breaks()
    assert fixes and all("arguments, before it is compiled" in fix for fix in fixes), fixes
    assert not breaks(), "it was called once"


@pytest.mark.nightly
def test_the_advice_for_a_lock_makes_a_segformer_one_region_each_way():
    """Its encoder is always asked for hidden states. Without the advice, what was cut stays cut in later calls."""
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
    sizes |= {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    without = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "drop_path_rate")
    sizes |= {"decoder_hidden_size": 8, "num_labels": 3, **dict.fromkeys(without, 0.0)}
    plain = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes)).train()
    cut, whole = copy.deepcopy(plain), copy.deepcopy(plain)

    def report(model: torch.nn.Module) -> Any:
        torch._dynamo.reset()
        compiled = thunderfx(model, backend="tape")
        for seed in range(4):
            torch.manual_seed(seed)
            batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2, 32, 32))}
            for each, call in ((model, compiled), (plain, plain)):
                each.zero_grad()
                call(**batch).loss.backward()
            for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters()):
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)
        return explain(compiled)

    before = report(cut)
    assert len(before.traces) > 2 and any("LLaVA and SegFormer" in found.fix for found in before.breaks), before.breaks
    whole(torch.randn(2, 3, 32, 32))
    after = report(whole)
    assert not after.breaks and not after.outside
    assert [[region.replays for region in trace.regions] for trace in after.traces] == [[3], [3]]


def test_advice_for_what_dynamo_does_not_trace():
    """The line is the user's, also where a function of Python's library has the break."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            self.losses.append(y.sum().item())
            return y

    def makes_sparse(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.cos(y) + torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), [1.0], (3,)).to_dense()

    def finds_logger(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        logging.getLogger("test_advice").debug("%s", y.shape)
        return torch.cos(y) * 2

    def warns(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        warnings.warn("of what this does", stacklevel=2)
        return torch.cos(y) * 2

    for function, reason, advice in (
        (Keeps(), "list.append(), which Dynamo does not trace", "change it after the call, with what"),
        (makes_sparse, "torch.sparse_coo_tensor(), which Dynamo does not trace", "call it outside of the"),
        (finds_logger, "Builtin `operator.*` comparison with constant", "do what this line does outside of"),
        (warns, "warnings.warn()", "torch._dynamo.config.reorderable_logging_functions.add(warnings.warn)"),
    ):
        torch._dynamo.reset()
        compiled = thunderfx(function, backend="tape")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(3):
                compiled(torch.full((3,), i + 0.5))
        breaks = explain(compiled).breaks
        line = getattr(function, "forward", function).__code__.co_firstlineno + 2
        found = next(each for each in breaks if each.reason.startswith(reason))
        assert advice in found.fix and str(found.line).startswith(f"test_advice.py:{line}")
        assert all(each.fix for each in breaks)


class _Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("fn", "x", "advice"),
    [
        (lambda x: x * float(np.mean(x.numpy())), torch.ones(2), "for NumPy in what is compiled, call PyTorch's func"),
        (lambda x: OUTSIDE[x.item()] * 2, torch.tensor(1), "keep the value on the device, as a 0-dim tensor"),
        (lambda x: x.index_add(0, torch.tensor([0]), x[:1]), torch.ones(2).requires_grad_(), "which has PyTorch's"),
        (
            _Recurrent(),
            torch.ones(3, 2),
            "for nn.LSTM, nn.GRU and nn.RNN, use thunder_cg.thunderfx with torch._dynamo.c",
        ),
    ],
    ids=["numpy", "index", "gradient", "rnn"],
)
@pytest.mark.nightly_after(2)
def test_advice_of_what_thunder_does_not_follow(fn, x, advice):
    compiled = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(Exception, match=r"."):
        compiled(x)
    assert advice in str(explain(compiled))
    config = {"allow_rnn": True} if isinstance(fn, torch.nn.Module) else {}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(config):
        mended = thunderfx((lambda x: OUTSIDE[x] * 2) if "0-dim" in advice else fn, backend="tape")
        torch.testing.assert_close(mended(x), fn(x))


def test_an_error_below_an_installed_package_has_the_users_line_too():
    """As ``torchvision.ops.nms``, whose code is not the user's."""

    code = compile("def of(x):\n    return x.sinc_of_nobody()", "/usr/lib/site-packages/package/boxes.py", "exec")
    package: dict[str, Any] = {}
    exec(code, package)
    of_package = package["of"]

    def calls(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(of_package(x))

    compiled = thunder.jit(calls, transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(AttributeError):
        compiled(torch.ones(2))
    line = calls.__code__.co_firstlineno + 1
    assert f"AttributeError at boxes.py:2, called from test_advice.py:{line}: " in str(explain(compiled))


def test_advice_for_print():
    def prints(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        print("the sum is", y.sum())
        return torch.cos(y) * 2

    torch._dynamo.reset()
    broken = thunderfx(prints, backend="tape")
    broken(torch.ones(3))
    (found,) = explain(broken).breaks
    assert found.reason == "print()" and "torch._dynamo.config.reorderable_logging_functions.add(print)" in found.fix
    torch._dynamo.reset()
    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        mended = thunderfx(prints, backend="tape")
        torch.testing.assert_close(mended(torch.ones(3)), prints(torch.ones(3)))
    assert not explain(mended).breaks and len(explain(mended).traces) == 1


def test_graph_breaks_before_the_first_operator_are_said():
    """No graph ends there, so Dynamo's graphs do not have them."""

    def prints(x: torch.Tensor) -> torch.Tensor:
        print("called")
        return x

    def begins(x: torch.Tensor) -> torch.Tensor:
        ids, rows = torch.unique(prints(x), return_inverse=True)
        return (ids * 2 + 1)[rows].sin()

    torch._dynamo.reset()
    compiled, other = thunderfx(begins, backend="tape"), thunderfx(lambda x: x.sin() + 1, backend="tape")
    compiled(torch.ones(3))
    other(torch.ones(3))
    line, start = prints.__code__.co_firstlineno + 1, f"begins (test_advice.py:{begins.__code__.co_firstlineno})"
    said = str(explain(compiled))
    assert (
        f'\n  test_advice.py:{line}: print("called")\n      graph break after the start of {start}, called from '
        in said
    )
    unique = f"graph break after the start of {start}: the size of what torch.unique returns depends on what tensors"
    assert f"\n  test_advice.py:{line + 4}: ids, rows = torch.unique(prints(x), return_inverse=True)\n" in said
    assert f"\n      {unique}" in said and not explain(other).breaks


class _Packed(_Recurrent):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(torch.tanh(x), lengths, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0])[0] * 2


class _Padded(_Recurrent):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[0])[:, None] < lengths
        return torch.where(mask[..., None], self.layer(torch.tanh(x))[0], 0.0) * 2


@pytest.mark.nightly
def test_advice_for_packed_sequences(monkeypatch):
    """With ``allow_rnn``, Dynamo would raise for them."""
    run_what_inductor_gets(monkeypatch)
    packed, padded = _Packed(), _Padded()
    padded.load_state_dict(packed.state_dict())
    inputs = torch.randn(4, 2, 2), torch.tensor([2, 4])
    torch._dynamo.reset()
    broken = thunderfx(packed, backend="tape")
    broken(*inputs)
    said = str(explain(broken))
    assert (
        "packed sequence, which Dynamo does not trace\n        to change it: give the layer the padded tensor" in said
    )
    assert "to change it: set torch._dynamo.config.allow_rnn = True" in said and "it has to get a padded tensor" in said
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        mended = thunderfx(padded, backend="tape")
        torch.testing.assert_close(mended(*inputs), packed(*inputs))
    assert not explain(mended).breaks


def test_advice_for_a_graph_break_in_a_loop_of_which_dynamo_compiles_nothing():
    def mended(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[i].sum() / lengths[i] for i in range(2)]) * 2

    def looped(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        means = []
        for i in range(2):
            means.append(x[i].sum() / lengths[i].item())
        return torch.stack(means) * 2

    inputs = torch.ones(2, 3), torch.tensor([1, 3])
    broken, better = (thunderfx(fn, backend="tape") for fn in (looped, mended))
    torch.testing.assert_close(broken(*inputs), better(*inputs))
    said = str(explain(broken))
    line = looped.__code__.co_firstlineno + 3
    assert said.startswith("Nothing is compiled. 1 call ran in plain Python, without Thunder.\nWhat is not in a graph")
    assert f"\n  test_advice.py:{line}: means.append(x[i].sum() / lengths[i].item())\n" in said
    assert "into Python, in a loop, so Dynamo compiles nothing of the function, and has not looked for more " in said
    assert "to change it: leave the read out: operators take a 0-dim tensor" in said
    torch._dynamo.reset()
    strict = thunderfx(looped, backend="tape", strict=True)
    for call in (1, 2):
        with pytest.raises(CaptureError, match=rf"looped, call {call}: it ran without Thunder, in plain Python or in"):
            strict(*inputs)
    report = explain(better)
    assert len(report.traces[0].regions) == 1 and not (report.breaks or report.outside or report.causes)

    def outer(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return looped(x, lengths)

    called = thunderfx(outer, backend="tape")  # in which no operator comes before the call or after it
    called(*inputs)
    assert "so Dynamo compiles nothing of looped (test_advice.py:" in str(explain(called))


class _BreaksTwice(torch.nn.Module):
    """In a loop of what it calls, and in one of its own: Dynamo goes on after the first, and not after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if x.norm().item() > 1:
                x = x / 2
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.halved(torch.tanh(self.a(x)))
        for _ in range(2):
            x = torch.tanh(self.a(x))
            print("once")
        return torch.tanh(x) * 2


def test_all_that_dynamo_leaves_to_python_is_said():
    torch._dynamo.reset()
    compiled = thunderfx(_BreaksTwice(), backend="tape")
    for _ in range(3):
        compiled(torch.ones(2, 4))
    first, second = _BreaksTwice.halved.__code__.co_firstlineno, _BreaksTwice.forward.__code__.co_firstlineno
    parts = f"halved (test_advice.py:{first}) and forward (from test_advice.py:{second + 1} on)"
    said = str(explain(compiled))
    assert f"\nNot in these numbers are {parts}, which Dynamo leaves to plain Python, as said below.\n" in said
    assert (
        f"\n  test_advice.py:{first + 2}: if x.norm().item() > 1:\n      graph break after _BreaksTwice, graph 0"
        in said
    )
    assert f'\n  test_advice.py:{second + 4}: print("once")\n      graph break after the start of forward (from' in said
    assert f"so Dynamo compiles nothing of forward (from test_advice.py:{second + 1} on), and has not looked" in said
    assert "to change it: choose with torch.where" in said and "reorderable_logging_functions.add(print)" in said
    why = _not_captured({"f": explain(compiled)})
    said = f"not captured: f: forward (from test_advice.py:{second + 1} on) is left to plain Python"
    assert said in why, "the command exits with 1"


class _Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def test_advice_for_a_dict_whose_items_are_attributes():
    def keeps(x: torch.Tensor) -> torch.Tensor:
        found = _Attributes()
        found.x = torch.tanh(x) * 2
        return torch.tanh(found.x) * 3

    torch._dynamo.reset()
    compiled = thunderfx(keeps, backend="tape")
    compiled(torch.ones(3))
    first, *_ = explain(compiled).breaks
    assert first.reason == "Dynamo does not know how to trace method `__setattr__` of class `_Attributes`"
    assert first.fix == "Avoid calling `_Attributes.__setattr__` in your code."
    assert "Not in these numbers is keeps (from test_advice.py" in str(explain(compiled))


def test_advice_of_a_module_that_does_not_compile_as_the_size_of_a_result_is_unknown():
    class Selects(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return selects(x)

    compiled = thunder.jit(Selects(), transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(NotImplementedError):
        compiled(torch.ones(2))
    said = str(explain(compiled))
    assert "torch.where(mask, x, 0.0)" in said and "thunderfx" not in said


@pytest.mark.parametrize("compiles", ["jit", "thunderfx"])
@pytest.mark.nightly_after(1)
def test_advice_for_a_mask_before_a_loss_gives_the_same_loss(compiles):
    def masks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = y > 0
        return torch.nn.functional.cross_entropy(x[mask], y[mask])

    def better(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x, torch.where(y > 0, y, -100))

    def compiled_by(fn: Callable[..., Any]) -> Any:
        options = {"transforms": [cudagraph_transform(backend="tape")]}
        return thunder.jit(fn, **options) if compiles == "jit" else thunderfx(fn, backend="tape")

    compiled = compiled_by(masks)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    with pytest.raises(NotImplementedError) if compiles == "jit" else nullcontext():
        compiled(x, y)
    assert "cross_entropy(logits, torch.where(mask, target, -100)) in the place" in str(explain(compiled))
    torch._dynamo.reset()
    torch.testing.assert_close(compiled_by(better)(x, y), masks(x, y))


def test_advice_for_a_tensor_that_an_earlier_compilation_has_kept():
    kept: dict[str, torch.Tensor] = {}

    def caches(x: torch.Tensor, name: str) -> torch.Tensor:
        if not kept:
            kept["x"] = torch.arange(3) * 2
        return x * kept["x"]

    compiled = thunder.jit(caches, transforms=[cudagraph_transform(backend="tape")])
    compiled(torch.ones(3), "a")
    with pytest.raises(AssertionError, match="has history None"):
        compiled(torch.ones(3), "b")
    said = str(explain(compiled))
    assert "an earlier compilation has left in a cache" in said and "dict.__setitem__ at test_advice.py:" in said


def test_advice_of_a_plan_for_what_is_made_on_another_device_holds_after_it_is_moved():
    """Else the next report would say that it copies numbers to the device."""
    report = plan(around(makes), torch.ones(2, device="meta"))
    (cause,) = (each for each in report.causes if each.name == "torch.tensor")
    assert "make the tensor once, outside of the compiled function" in cause.fix and "on a cuda device" in cause.fix
    on_device = torch.tensor([1.0, 2.0], device="meta")
    assert plan(around(lambda x: x + on_device), torch.ones(2, device="meta")).causes == ()


def test_advice_for_collectives_that_dynamo_does_not_trace(tmp_path):
    def broadcasts(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.distributed.broadcast(y, 0)
        return y + 1

    def reduces(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = torch.distributed.all_reduce(y, async_op=True)
        work.wait()
        return y + 1

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fixes = []
        for function in (broadcasts, reduces):
            torch._dynamo.reset()
            broken = thunderfx(function, backend="tape")
            torch.testing.assert_close(broken(torch.ones(3)), function(torch.ones(3)))
            fixes.append([found.fix for found in explain(broken).breaks])
    finally:
        torch.distributed.destroy_process_group()
    assert all("compile with thunder.jit" in fix for fix in fixes[0])
    assert all("leave out async_op=True" in fix for fix in fixes[1]) and all(fixes)


_AT, _MASK = torch.tensor([0, 2]), torch.tensor([True, False, True])
_TABLE = torch.nn.Embedding(10, 4)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize(
    ("fn", "advice", "better"),
    [
        (
            lambda x: torch.tanh(x.index_put((_MASK,), torch.zeros(2, 4))),
            "x.scatter(dim, index, source) or x.index_copy(dim, index, source)",
            lambda x: torch.tanh(x.index_copy(0, _AT, torch.zeros(2, 4))),
        ),
        (
            lambda x: torch.abs(torch.complex(x, x * 2)),
            "compute with the real and the imaginary part as two tensors",
            lambda x: (x**2 + (x * 2) ** 2).sqrt(),
        ),
        (
            lambda x: x * torch.nn.functional.embedding(_AT, _TABLE.weight, max_norm=1.0).sum(0),
            "leave it out, and write before the call: weight.data.copy_(weight.renorm(2, 0, max_norm))",
            lambda x: x * torch.nn.functional.embedding(_AT, _TABLE.weight).sum(0),
        ),
    ],
    ids=["index_put", "complex", "max_norm"],
)
@pytest.mark.usefixtures("cut")
def test_advice_for_what_has_other_gradients(monkeypatch, fn, advice, better):
    run_what_inductor_gets(monkeypatch)
    with torch.no_grad():
        _TABLE.weight.copy_(_TABLE.weight.renorm(2, 0, 1.0))
    x = torch.rand(3, 4, requires_grad=True)
    torch._dynamo.reset()
    broken, mended = (thunderfx(around(each), backend="tape") for each in (fn, better))
    for compiled in (broken, mended):
        torch.testing.assert_close(compiled(x), around(fn)(x))
    assert advice in str(explain(broken))
    report = explain(mended)
    assert [len(trace.regions) for trace in report.traces] == [1, 1] and not (report.outside or report.causes)


def test_data_of_a_tensor_is_detached(monkeypatch):
    """Where somebody writes to it, in the graph or later, Inductor gets it, and the advice is to detach."""

    def scales(x: torch.Tensor) -> torch.Tensor:
        return x / x.data.abs().amax(-1, keepdim=True)

    def writes(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.data.mul_(2)
        return y.sin()

    run_what_inductor_gets(monkeypatch)
    for function in (scales, writes, lambda x: (x.sin() * 2, (x * 2).data)):
        torch._dynamo.reset()
        compiled, x = thunderfx(function, backend="tape"), torch.rand(3, requires_grad=True)
        torch.testing.assert_close(compiled(x), function(x))
        found = explain(compiled).outside
        assert (not found) if function is scales else found[0].fix.endswith("write to x under torch.no_grad()")
        assert function is scales or found[0].operator == "Tensor.data"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"device": "meta"}, "move the inputs to the device of the parameters"),
        ({"dtype": torch.float64}, "cast the in"),
    ],
)
def test_advice_for_inputs_that_do_not_fit_the_parameters(options, advice):
    compiled = thunder.jit(torch.nn.Linear(4, 4), transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(RuntimeError):
        compiled(torch.ones(2, 4, **options))
    assert advice in str(explain(compiled))


class _PicksRows(torch.nn.Module):
    """Sums what a layer with a bias makes of the rows that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x)[mask]).relu().sum(0) + torch.unique(x).sum() * 0


class _MasksRows(_PicksRows):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.unsqueeze(-1)
        y = self.layer(torch.where(mask, torch.tanh(x), 0.0)).relu()
        return torch.where(mask, y, 0.0).sum((0, 1))


def test_advice_for_rows_that_a_mask_picks_before_a_layer_with_a_bias():
    mended, broken = _MasksRows().requires_grad_(False), _PicksRows()
    broken.load_state_dict(mended.state_dict())
    x, mask = torch.randn(2, 3, 4), torch.arange(6).view(2, 3) % 3 > 0
    compiled = thunderfx(broken, backend="tape")
    torch.testing.assert_close(compiled(x, mask), mended(x, mask))
    picks, unique = explain(compiled).breaks
    assert "mask.unsqueeze(-1) for rows" in picks.fix and "mask once more before a sum" in picks.fix
    assert "torch.unique" in unique.reason and unique.fix == for_size("unique")
    compiled = thunderfx(mended, backend="tape")
    compiled(x, mask)
    report = explain(compiled)
    assert len(report.traces[0].regions) == 1 and not (report.breaks or report.outside or report.causes)


def test_advice_for_an_operator_that_is_registered_with_thunder() -> None:
    @torch.library.custom_op("advice::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    thunder.torch._register_custom_op(doubled)
    middle = around(lambda x: torch.ops.advice.doubled(x))
    (said,) = [line for line in str(plan(middle, torch.ones(2))).splitlines() if "executors=[" in line]
    advised = re.search(r"executors=(\[.*\])", said)
    assert advised is not None
    compiled = thunder.jit(
        middle,
        executors=eval(advised[1], {"thunder": thunder}),
        transforms=[cudagraph_transform(backend="tape", allow=["advice::doubled"])],
    )
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(2)), middle(torch.ones(2)), rtol=0, atol=0)
    assert "there is nothing to change" in str(explain(compiled))
