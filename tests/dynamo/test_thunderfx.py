"""thunder_cg.thunderfx: a drop-in for Thunder's own, in which what Thunder can trace is one trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import operator

import numpy as np
import pytest
import thunder.dynamo
import torch
from support import fast_path_calls, programs, regions, replays, same, same_training
from thunder.core import transforms
from thunder.dynamo import utils
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from thunder_cg import OptionError, cudagraph_transform, explain, graphed_step, thunderfx
from thunder_cg.compat.dynamo import _condition
from thunder_cg.compat.fx import DataDependentOutputException, DynamicOutputShapeException, dtype_of_casts
from thunder_cg.compat.guards import attribute_writes_are_reported
from thunder_cg.dynamo.compiler import _called_directly
from thunder_cg.dynamo.own_symbols import trace_multi_head_attention
from thunder_cg.errors import NotCompiledError, SkipReason, TransformConflictError
from thunder_cg.report.programs import jitted_parts

logger = logging.getLogger("a model")


class Fallbacks(nn.Module):
    """Operators that Thunder calls as they are, and that Thunder's own thunderfx gives to Inductor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.addmm(self.bias, x, self.weight)
        mask = y.new_ones(y.shape) * y.detach().sign()
        return self.out(torch.sinc(y) * mask)


def outside(compiled) -> list[str]:
    return [
        f"{part.operator} at {part.line}: {SkipReason(part.reason, part.fix)}" for part in explain(compiled).outside
    ]


@pytest.fixture
def pair(backend, device):
    """A model compiled by Thunder's own thunderfx, and a copy compiled with graphs."""

    def make(model, **options):
        model = model.to(device)
        twin = copy.deepcopy(model)
        return model, thunder.dynamo.thunderfx(model), twin, thunderfx(twin, backend=backend, debug=True, **options)

    return make


def test_the_signature_is_that_of_what_was_compiled(backend):
    def forward(x, *, labels=None):
        return x

    assert inspect.signature(thunderfx(forward, backend=backend)) == inspect.signature(forward)
    model = Fallbacks()
    assert inspect.signature(thunderfx(model, backend=backend)) == inspect.signature(model.forward)
    assert inspect.signature(thunderfx(model.forward, backend=backend)) == inspect.signature(model.forward)


def test_steady_calls_check_arguments_alone(pair, device):
    """Not what each graph of Dynamo's has, nor what Thunder reads of PyTorch where it traces a ``reshape``."""
    _, _, model, compiled = pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Unflatten(1, (2, 2))))
    with torch.no_grad():
        for _ in range(4):
            same(compiled(x := torch.randn(2, 4, device=device)), model(x))
    (jitted,) = jitted_parts(compiled._backend)
    assert jitted._forward_fn._certain()[0]._guard.keywords == ()


@pytest.mark.parametrize("how", ["one result", "several results"])
def test_the_only_piece_of_a_graph_is_called_directly(how, pair, device, monkeypatch):
    """Not through the modules of FX, each of which passes on all parameters."""

    class Model(nn.Linear):
        def forward(self, x):
            y = torch.tanh(super().forward(x))
            return y if how == "one result" else (y, y.sin())

    _, _, model, compiled = pair(Model(4, 4))
    with torch.no_grad():
        for _ in range(4):
            same(compiled(x := torch.randn(2, 4, device=device)), model(x))
        monkeypatch.setattr(torch.fx.graph_module._WrappedCall, "__call__", None)
        same(compiled(x), model(x))


@pytest.mark.parametrize("how", ["returns an input", "does more", "swaps results", "leaves out an input"])
def test_a_graph_around_a_piece(how):
    """It is called itself where it does more than to call its piece with its inputs."""

    def piece(x, y):
        return x + 1, y * 2

    graph, root = torch.fx.Graph(), nn.Module()
    root.piece = thunder.jit(torch.fx.symbolic_trace(piece))
    x, y, z = map(graph.placeholder, "xyz")
    call = graph.call_module("piece", (y, x))
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(2)]
    if how == "does more":
        graph.call_function(torch.neg, (z,))
    if how == "swaps results":
        items.reverse()
    graph.output((*items, x) if how == "returns an input" else (*items,))
    whole = torch.fx.GraphModule(root, graph)
    inputs = torch.randn(3, 2)
    is_direct = how == "leaves out an input"
    assert (_called_directly(whole) is not whole) is is_direct
    same(_called_directly(whole)(*inputs), whole(*inputs))


@pytest.mark.nightly
def test_layers_that_repeat_are_tried_once(backend, device, monkeypatch):
    """A trial traces and differentiates an operator."""
    tried = []
    value_and_grad = transforms.value_and_grad
    monkeypatch.setattr(transforms, "value_and_grad", lambda fn: tried.append(fn) or value_and_grad(fn))

    def trials(layers: int) -> int:
        tried.clear()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(layers)))
        compiled = thunderfx(model.to(device), backend=backend)
        compiled(torch.randn(3, 4, device=device)).sum().backward()
        assert not outside(compiled)
        return len(tried)

    assert trials(3) == trials(2) > 0


def test_an_operator_is_tried_once_for_sizes_that_are_equal_alike(monkeypatch):
    """Where it takes no integers. Each layer of a model for images has another size."""
    tried = []
    real = utils.try_execute_thunder_symbol
    monkeypatch.setattr(utils, "try_execute_thunder_symbol", lambda *args: tried.append(args[1].name) or real(*args))

    def trials(*shapes: tuple[int, ...]) -> list[str]:
        tried.clear()
        fn = lambda *xs: [torch.sin(x) + x.mean(-1, keepdim=True) for x in xs]  # noqa: E731
        compiled = thunderfx(fn, backend="tape", dynamic=False)
        compiled(*(torch.randn(shape, requires_grad=True) for shape in shapes))
        assert not outside(compiled)
        return [name.partition("_")[0] for name in tried]

    assert trials((2, 3, 4), (5, 6, 7)).count("sin") == 1
    assert trials((2, 3, 4), (5, 6, 7)).count("mean") == 2, "an integer may depend on the sizes"
    for other in ((2, 2, 4), (1, 3, 4), (0, 3, 4), (3, 4)):
        assert trials((2, 3, 4), other).count("sin") == 2, other


@pytest.mark.usefixtures("cut")
def test_an_operator_is_tried_with_each_kind_of_arguments(pair, device):
    """Thunder traces only the first two."""

    class Clones(nn.Module):
        def forward(self, x):
            kept = torch.clone(x) + torch.clone(x, memory_format=torch.preserve_format)
            return kept + torch.clone(x, memory_format=torch.channels_last)

    model, _, _, compiled = pair(Clones())
    x = torch.randn(2, 3, 4, 4, requires_grad=True, device=device)
    same(compiled(x), model(x))
    (left,) = outside(compiled)
    assert left.startswith("clone at ") and "preserve_format" in left


@pytest.mark.usefixtures("cut")
def test_an_operator_is_tried_with_a_gradient_after_one_without(pair, device):
    """Thunder has no derivative of it."""

    class Truncates(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                start = torch.div(x, 2, rounding_mode="trunc")
            return start + x + torch.div(x, 2, rounding_mode="trunc")

    model, _, _, compiled = pair(Truncates())
    x = torch.randn(3, 4, requires_grad=True, device=device)
    same(compiled(x), model(x))
    assert [each.split(" at ")[0] for each in outside(compiled)] == ["div"]


def test_a_deep_copy_is_compiled_itself(backend, device):
    """Also one of a model whose forward is compiled: it has its own parameters."""
    model = Fallbacks().to(device)
    plain = copy.deepcopy(model)
    model.forward = thunderfx(model.forward, backend=backend)
    x = torch.randn(3, 4, device=device)
    with torch.no_grad():
        model(x)
        twin = copy.deepcopy(model)
        model.weight.zero_()
        for _ in range(3):
            torch.testing.assert_close(twin(x), plain(x))
    assert replays(twin.forward) == 2 and replays(model.forward) == 0


def test_a_reproducer_that_thunder_saves_has_the_transform():
    """The script imports Thunder alone, and is written with what this function returns."""
    transform = cudagraph_transform(deny=["torch.cos", "torch.sin"], backend="tape", max_arenas=3)
    said = utils.thunder_options_to_str({"transforms": [transform]})
    (made,) = eval(f"dict({said})")["transforms"]
    assert made.options == transform.options and made is not transform


def test_thunders_compiler_is_copied_with_the_transform(transform, device):
    """As Lightning does for each ``torch.compile`` of a module."""
    backend = copy.deepcopy(thunder.dynamo.ThunderCompiler(transforms=[transform()]))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    compiled, x = torch.compile(model, backend=backend), torch.randn(3, 4, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x))
    assert sum(map(replays, backend.subgraph_infos[0].thunder_compiled_fns)) == 2


def test_fallbacks_stay_in_one_region_each_way(pair, device):
    model, plain, twin, graphed = pair(Fallbacks())
    for _ in range(4):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        expected, found = plain(x), graphed(y)
        torch.testing.assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-4)
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert [len(program.regions) for program in programs(graphed)] == [1, 1] and not outside(graphed)
    assert replays(graphed) == 6
    assert len(plain._backend.subgraph_infos[0].thunder_compiled_fns) > 1, "the test would not see what is different"


def test_what_modules_have_is_not_copied(pair, device):
    """A buffer, an attribute, and an item of a dictionary, in inference."""

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(64, 4))
            self.mask, self.others = torch.rand(64, 4, device=device), {"angles": torch.rand(64, 4, device=device)}

        def forward(self, x):
            return x * self.table[:1] + self.mask[:1] + self.others["angles"][:1]

    plain, _, twin, graphed = pair(Tables())
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(2, 4, device=device)
            same(plain(x), graphed(x))
            plain.mask[0] = twin.mask[0] = i  # in place: the graph reads it there
    (region,) = regions(graphed)
    assert region["bytes_in"] == 2 * 4 * 4 and region["replays"] >= 4


def test_a_plain_thunderfx_is_not_affected(pair, device):
    before = set(utils.auto_register_ops), utils.is_node_supported_by_thunder
    model, plain, _, graphed = pair(Fallbacks())
    x = torch.randn(3, 4, device=device)
    graphed(x)
    assert (utils.auto_register_ops, utils.is_node_supported_by_thunder) == before
    plain(x)
    reasons = [str(reason.info) for reason in plain._backend.subgraph_infos[0].split_reasons]
    assert any("addmm" in reason and "only has an automatic torch fallback" in reason for reason in reasons)
    torch._dynamo.reset()
    first = thunder.dynamo.thunderfx(model)
    first(x)
    assert len(first._backend.subgraph_infos[0].thunder_compiled_fns) > 1


def test_a_torch_compile_around_it(pair, device):
    """`generate` of Transformers compiles the whole model on a GPU: without care, it would inline the original."""
    plain, _, _, graphed = pair(Fallbacks())
    compiled_outside = []

    def outer(graph, inputs):
        compiled_outside.append(graph)
        return graph

    whole = torch.compile(lambda x: graphed(x * 2) + 1, backend=outer)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 4, device=device)
            torch.testing.assert_close(whole(x), plain(x * 2) + 1)
    assert len(compiled_outside) == 2, "what is before it, and what is behind"
    assert [region["replays"] for region in regions(graphed)] == [3]


@pytest.mark.parametrize("how", ["vmap", "grad", "jacrev"])
@pytest.mark.usefixtures("cut")
@pytest.mark.nightly_after(2)
def test_transforms_of_torch_func(backend, device, how):
    """Masks of Transformers 4 are made with vmap, where Thunder's own thunderfx raises. Inductor gets them."""

    def fn(x):
        if how == "vmap":
            inside = torch.vmap(lambda row, scale: torch.sin(row) * scale + row.sum(), in_dims=(0, None))(x, x[0] * 2)
        elif how == "jacrev":  # whose second transform takes tensors of the first
            inside = torch.func.jacrev(lambda y: torch.sin(y) * y.sum())(x[0] * 2).sum(0)
        else:
            inside = torch.func.grad(lambda y: (torch.sin(y) * y).sum())(x * 2)
        return torch.tanh(inside) + x

    graphed = thunderfx(fn, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4, device=device)
            torch.testing.assert_close(graphed(x), fn(x))
    assert "is inside of torch.vmap or another transform of torch.func" in str(explain(graphed))
    assert all(part.cost.endswith("and 1 of Inductor's") for part in explain(graphed).outside)
    assert replays(graphed) > 0


def test_hooks_of_saved_tensors_after_a_transform(backend, device):
    """Transforms forbid them inside. Thunder, which traces that, left it so for the whole process."""

    def fn(x):
        return torch.func.jacrev(lambda y: torch.sin(y) * y.sum())(x[0] * 2).sum(0).tanh() + x

    x = torch.randn(3, 4, device=device)
    with torch.no_grad():
        torch.testing.assert_close(thunderfx(fn, backend=backend)(x), fn(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pass


def test_several_shapes_and_no_grad(pair, device):
    plain, _, _, graphed = pair(Fallbacks(), dynamic=False)  # Thunder's own raises on GPUs from the second shape on
    with torch.no_grad():
        for rows in (2, 3, 2, 3, 2, 3, 2, 3):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(graphed(x), plain(x))
    assert len(programs(graphed)) == 2 and not outside(graphed)
    assert [region["replays"] for region in regions(graphed)] == [3, 3] and fast_path_calls(graphed) > 0


def test_dynamic_shapes(pair, device):
    plain, _, _, graphed = pair(Fallbacks(), dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 4, 2, 3, 4, 2, 3, 4):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(graphed(x), plain(x))


def test_parameters_that_are_trained_later(backend, device):
    """Guards of PyTorch's do not look at `requires_grad` of parameters, which would have no gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))).to(device)
    graphed = thunderfx(model, backend=backend, debug=True)
    for trains in (False, False, False, True, True, True, False, True):
        model[0].requires_grad_(trains)
        x = torch.randn(2, 4, device=device)
        parameters = [each for each in model.parameters() if each.requires_grad]
        of_graph, of_model = (
            torch.autograd.grad(fn(x).sum(), parameters, allow_unused=True) for fn in (graphed, model)
        )
        assert all(each is not None for each in of_graph)
        torch.testing.assert_close(of_graph, of_model)
    assert replays(graphed) > 0


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.nightly_after(1)
def test_a_smaller_last_batch_leaves_full_ones_to_their_graph(backend, device, trains):
    """Dynamo asks its newest version first, which is for any size: full batches would be captured once more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    graphed = thunderfx(model, backend=backend)
    for rows in (4, 4, 3, 4, 3, 5, 4, 3, 5, 4):
        x = torch.randn(rows, 4, device=device)
        with torch.set_grad_enabled(trains):
            same(graphed(x), model(x))
    assert [trace.calls for trace in explain(graphed).traces if trace.calls] == [5, 3, 2]
    assert len(graphed._backend.subgraph_infos) == 2 and "later calls take" not in str(explain(graphed))


def test_only_the_sizes_that_an_earlier_graph_has_are_left_to_it(device, backend):
    graphed = thunderfx(lambda x: torch.tanh(x).sin(), backend=backend)
    for rows, columns in ((4, 6), (4, 5), (3, 5), (4, 6), (4, 7), (3, 6), (4, 5)):
        graphed(torch.ones(rows, columns, device=device))
    assert len(graphed._backend.subgraph_infos) == 3, "(4, 6), (4, n) and (m, n)"
    assert sorted(trace.calls for trace in explain(graphed).traces) == [1, 1, 1, 2, 2]


def test_a_range_of_sizes_that_the_user_gives(device):
    """Dynamo raises if a guard refuses a size of the range."""
    graphed = thunderfx(lambda x: torch.tanh(x).sin(), backend="tape")
    for rows in (4, 3, 5):
        x = torch.ones(rows, 2, device=device)
        if rows != 4:
            torch._dynamo.mark_dynamic(x, 0, min=2, max=8)
        same(graphed(x), x.tanh().sin())
    assert len(graphed._backend.subgraph_infos) == 2
    assert explain(graphed).traces[0].remark == "later calls take graph 1, which is for more sizes or numbers"


@pytest.mark.nightly
def test_a_float_that_an_operator_has_to_know_is_constant(backend, device):
    """Also with dynamic shapes and as it changes, where Dynamo has each epsilon read on the host, and compiles anew."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()).to(device)
    graphed = thunderfx(model, backend=backend, dynamic=True)
    for rows in (2, 2, 3):
        x = torch.randn(rows, 4, device=device)
        torch.testing.assert_close(graphed(x), model(x))
    if not attribute_writes_are_reported():
        pytest.skip("on Python 3.13.0, torch.compile misses the change as well")
    for model[1].eps in (0.5, 0.5, 2.0):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(graphed(x), model(x))
    assert not any(op.name == "Tensor.item" for trace in explain(graphed).traces for op in trace.ops)


def test_a_float_that_thunder_would_guess_is_a_constant():
    """Thunder takes an `alpha` that it does not know for 1. Dynamo does not compile for each value by itself here."""

    def fn(x, number):
        return checkpoint(lambda y, alpha: torch.add(torch.sin(y), y, alpha=alpha), x, number, use_reentrant=False) * 2

    graphed = thunderfx(fn, backend="tape")
    with torch.no_grad():
        for number in (0.1, 0.3, 0.3):
            x = torch.randn(3, 4)
            torch.testing.assert_close(graphed(x, number), fn(x, number))
    assert [trace.counts["eager"] for trace in explain(graphed).traces] == [0, 0]


def test_graph_breaks(pair, device):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Fallbacks(), Fallbacks()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    _, plain, _, graphed = pair(Broken())
    for _ in range(4):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(graphed(x), plain(x))
        graphed(x).sum().backward()
    assert {program.kind for program in programs(graphed)} == {"forward", "backward"} and not outside(graphed)
    assert [len(program.regions) for program in programs(graphed)] == [1, 1, 1, 1]


def test_functions_between_graph_breaks_share_an_arena(backend, device):
    """In each of them, one backward waits for those of the later ones."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = torch.tanh(self.first(x)) * 2
            torch._dynamo.graph_break()
            x = torch.tanh(self.second(x)) * 2
            torch._dynamo.graph_break()
            return torch.tanh(self.third(x)) * 2

    model = Broken().to(device)
    twin = copy.deepcopy(model)
    graphed = thunderfx(model, backend=backend)
    for _ in range(6):
        x = torch.randn(3, 4, device=device)
        for each in (twin, graphed):
            each(x).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    assert len(programs(graphed)) == 6 and replays(graphed) >= 6 * 2
    assert len({arena for program in programs(graphed) for arena in program.pair.arenas()}) == 1


def test_a_view_of_an_argument_is_written_in_place_after_the_call(backend, device):
    """As DeBERTa's scores were. Autograd lets nobody write to a view that a function of its own has returned."""

    graphed = thunderfx(lambda x: x.view(4, 2, 2).permute(1, 0, 2), backend=backend)
    for _ in range(4):
        w = torch.randn(4, 4, device=device, requires_grad=True)
        heads = graphed(w * 1)
        heads /= 2
        heads.sum().backward()
        same(w.grad, torch.full_like(w, 0.5))


def test_training(backend, device):
    """Without a fallback that Inductor would have got, both are the same program."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    twin = copy.deepcopy(model)

    class Named:
        """What `same_training` needs of a compiled module."""

        def __init__(self, module, compiled):
            self.module, self.compiled = module, compiled
            self.parameters, self.named_parameters = module.parameters, module.named_parameters
            self.named_buffers, self.state_dict = module.named_buffers, module.state_dict

        def __call__(self, *args):
            return self.compiled(*args)

    plain, graphed = thunder.dynamo.thunderfx(model), thunderfx(twin, backend=backend)
    same_training(Named(model, plain), Named(twin, graphed), [(torch.randn(3, 4, device=device),) for _ in range(6)])
    assert replays(graphed) == 10


def test_two_models_in_one_process(backend, device):
    torch.manual_seed(0)
    models = [Fallbacks().to(device), Fallbacks().to(device)]
    compiled = [thunderfx(model, backend=backend) for model in models]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4, device=device)
            for model, graphed in zip(models, compiled):
                torch.testing.assert_close(graphed(x), model(x))
    assert all(replays(graphed) == 2 for graphed in compiled)


def test_options_reach_whom_they_are_for(backend, device):
    seen = []

    class Sees(thunder.core.transform_common.Transform):
        def transform_trace_post_optimization(self, trace, **kwargs):
            seen.append(trace)
            return trace

    def fn(x):
        return torch.sin(x) * 2

    options = {"backend": backend, "deny": ["sin"], "transforms": [Sees()], "fullgraph": True}
    graphed = thunderfx(fn, **options)
    graphed(torch.randn(4, device=device))
    assert seen and len(options["transforms"]) == 1
    eager = [op.name for trace in explain(graphed).traces for op in trace.ops if op.verdict == "eager"]
    assert eager[0] == "torch.sin"
    with pytest.raises(OptionError):
        thunderfx(fn, backend="no such")
    with pytest.raises(
        OptionError, match=r"thunderfx\(alow=\['sin'\]\): expected an option of .*; did you mean allow=\?"
    ):
        thunderfx(fn, backend=backend, alow=["sin"])
    thunderfx(fn, backend=backend, my_executors_option=1)
    jitted = thunder.jit(fn, transforms=[cudagraph_transform(backend=backend)])
    for compiled, maker in (
        (graphed, "thunderfx"),
        (jitted, "thunder.jit"),
        (graphed_step(fn, backend=backend), "graphed_step"),
    ):
        with pytest.raises(OptionError, match=rf"thunderfx\(fn=.*{maker} made this: pass what it was made of"):
            thunderfx(compiled, backend=backend)
    with pytest.raises(OptionError, match=r"thunderfx\(fn=None\): expected a function or module"):
        thunderfx(None, backend=backend)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        thunderfx(lambda x: (torch._dynamo.graph_break(), x)[1], backend=backend, fullgraph=True)(torch.ones(1))


@pytest.mark.nightly_after(3)
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: torch.row_stack([x, x * 2]), "a list of tensors, whose gradients"),
        (lambda x: torch.nn.functional.dropout1d(x[None])[0], "would draw again in its backward"),
        (lambda x: torch.norm(x, "nuc"), "gets other gradients"),
        (lambda x: x / torch.dot(x[0], x[1]), "gradient Thunder does not sum"),  # as spectral_norm divides a weight
        (lambda x: x / x.sum().detach(), "gradient Thunder does not sum"),
        (lambda x: x / x.detach().abs().amax(), "gradient Thunder does not sum"),
        (lambda x: x - x.mean(), "gradient Thunder does not sum"),
    ],
    ids=["list", "draws", "norm", "0-dim", "0-dim, detached", "detached, 0-dim", "mean"],
)
@pytest.mark.usefixtures("cut")
def test_what_thunder_traces_wrongly_is_left_to_inductor(fn, reason):
    graphed = thunderfx(lambda x: fn(torch.sin(x)), backend="tape")
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        torch.manual_seed(1)
        found = graphed(x)
        found.sum().backward()
        torch.manual_seed(1)
        expected = fn(torch.sin(y))
        expected.sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(x.grad, y.grad)
    assert len(outside(graphed)) == 1 and reason in outside(graphed)[0]


def test_a_0_dim_tensor_without_a_gradient_stays_in_thunder():
    model = torch.nn.Linear(4, 4)
    graphed = thunderfx(lambda x: (y := model(x)) / y.abs().amax(), backend="tape")
    with torch.no_grad():
        for _ in range(3):
            graphed(torch.randn(2, 4))
    assert not explain(graphed).outside and replays(graphed) == 2


def test_the_line_of_what_is_left_to_inductor_inside_of_a_checkpoint():
    def drops(x):
        return torch.nn.functional.dropout1d(x[None])[0]

    graphed = thunderfx(lambda x: checkpoint(drops, torch.sin(x), use_reentrant=False), backend="tape")
    graphed(torch.randn(3, 4, requires_grad=True)).sum().backward()
    (found,) = outside(graphed)
    assert f"at test_thunderfx.py:{drops.__code__.co_firstlineno + 1}" in found and "it may draw" in found


@pytest.mark.usefixtures("cut")
def test_no_grad_that_begins_and_ends_in_different_parts():
    def fn(x):
        y = torch.sin(x)
        with torch.no_grad():
            scale = torch.vander(torch.cos(y[:, 0]), 4) + 1  # Inductor's
            scale = scale * 2
        return y * scale

    graphed = thunderfx(fn, backend="tape")
    for _ in range(4):
        x = torch.randn(3, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        found = graphed(x)
        assert torch.is_grad_enabled()
        same(found, fn(y))
        found.sum().backward()
        fn(y).sum().backward()
        same(x.grad, y.grad)
    assert [part.operator for part in explain(graphed).outside] == ["vander"]
    assert all(program.replays == 2 for program in programs(graphed) if program.regions)


def _cell(bias, x, w):
    """Its results are float32, also where it computes in bfloat16."""
    return torch.lstm_cell(x, (x, x), w, w, bias, bias)[0]


@pytest.mark.parametrize("operator", [torch.addmm, _cell], ids=["addmm", "lstm_cell"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.usefixtures("cut")
@pytest.mark.nightly_after(2)
def test_autocast(inside, operator):
    def fn(b, x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return operator(b, x, w) + 1

    rows = 16 if operator is _cell else 4
    tensors = torch.randn(rows), torch.randn(4, 4), torch.randn(rows, 4)
    graphed = thunderfx(fn, backend="tape")
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        for _ in range(3):
            found, expected = graphed(*tensors), fn(*tensors)
            if operator is _cell and inside:  # Inductor's, which may round less often
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
            else:
                same(found, expected)
    assert ["another dtype under autocast" in each for each in outside(graphed)] == [True] * (
        inside and operator is _cell
    )


@pytest.mark.nightly
def test_autocast_casts_more_than_layers(backend, device):
    """Thunder casts for layers alone: a loss would be bfloat16, in which 4.7 and 4.71 are the same number."""
    f = nn.functional

    def fn(x, y, z):
        losses = f.cross_entropy(x, torch.arange(4, device=device)), f.mse_loss(x, x + 1), x.sum(-1), x.cumsum(-1)
        attention = f.scaled_dot_product_attention(y[None], y[None], y[None], y[:, :4])
        norms = f.layer_norm(x, (8,), z, z), x.norm(dim=-1), x.softmax(-1)
        return *losses, *norms, attention, torch.baddbmm(z, y[None], torch.prelu(y, z).t()[None] @ y)

    tensors = torch.randn(4, 8).bfloat16().to(device), torch.randn(4, 8, device=device), torch.randn(8, device=device)
    graphed = thunderfx(fn, backend=backend)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        entropy = f.cross_entropy(tensors[0].float(), torch.arange(4, device=device))  # on CUDA, PyTorch rounds inside
        for _ in range(2):
            for found, expected in zip(graphed(*tensors), (entropy, *fn(*tensors)[1:])):
                tolerance = 1e-5 if expected.dtype is torch.float32 else 0.02
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not outside(graphed)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum(),
        lambda x: x.prod(-1),
        lambda x: x.cumsum(0),
        lambda x: torch.cumprod(x, 0),
        lambda x: x.softmax(-1),
        lambda x: nn.functional.log_softmax(x, -1),
        lambda x: x.norm(dim=-1),
        lambda x: nn.functional.normalize(x),
        lambda x: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device="cuda")),
        lambda x: torch.relu(x),
    ],
)
def test_dtypes_that_autocast_gives_operators_of_cuda(monkeypatch, call):
    """Sums and softmax get no casts there, but the dtype of what they return."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    graph = torch.fx.Graph()
    with FakeTensorMode(), torch.autocast("cuda", torch.float16):
        x = torch.empty(4, 4, dtype=torch.float16, device="cuda")
        placeholder = graph.placeholder("x")
        placeholder.meta["example_value"] = x
        call(torch.fx.Proxy(placeholder))
        *_, node = graph.nodes
        node.meta["example_value"] = call(x)
        assert dtype_of_casts(node) == (None if node.meta["example_value"].dtype is x.dtype else torch.float32)
        assert (dtype_of_casts(node) is None) == (node.target is torch.relu)


def test_weights_of_attention_under_autocast_on_cuda(monkeypatch):
    """They are float32, where Thunder would return float16."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    graph = torch.fx.Graph()
    node = graph.call_function(nn.functional.multi_head_attention_forward)
    graph.output(graph.call_function(operator.getitem, (node, 1)))
    with FakeTensorMode():
        attention, x = nn.MultiheadAttention(8, 2, device="cuda"), torch.empty(4, 2, 8, device="cuda")
        for enabled in (True, False):
            with torch.autocast("cuda", torch.float16, enabled=enabled):
                node.meta["example_value"] = attention(x, x, x)
            trace_multi_head_attention(node)
            assert (node.target is nn.functional.multi_head_attention_forward) == enabled


def test_an_autocast_to_another_dtype_in_an_autocast_around_the_call():
    """Thunder would cast the gradients of what is inside to the dtype of the outer one, and raise."""

    def fn(x):
        with torch.autocast("cpu", torch.float16):
            return x @ x.t()

    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = graphed(x), fn(x)
        assert found.dtype is torch.float16
        same(found, expected)
        same(*(torch.autograd.grad(each.sum(), x) for each in (found, expected)))


def test_autocast_casts_in_checkpointed_functions():
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(lambda y: nn.functional.mse_loss(y @ y.T, y.T @ y), x, use_reentrant=False)

    graphed = thunderfx(fn, backend="tape")
    for _ in range(2):
        x = torch.randn(4, 4, requires_grad=True)
        torch.testing.assert_close(graphed(x), fn(x))


def test_a_second_graph_transform_is_refused(backend):
    with pytest.raises(
        TransformConflictError, match=r"thunderfx has one itself; pass its options, as in thunderfx\(fn"
    ):
        thunderfx(torch.tanh, transforms=[cudagraph_transform(backend=backend)])


class Logs(nn.Module):
    """As models of Transformers warn before the loss: Dynamo cannot go on in the middle of a property."""

    def __init__(self, **how) -> None:
        super().__init__()
        self.how = how

    @property
    def loss(self):
        logger.warning("looked up", **self.how)
        return torch.sum

    def forward(self, x):
        y = torch.sin(x) * 2
        z = self.loss(y)
        return z * 2


def test_a_graph_break_that_dynamo_cannot_go_on_from_has_its_reason(backend, device):
    """Dynamo gives it "step_unsupported". It has the reason when it tries the function around it, or one inside."""
    model = Logs(stacklevel=2)
    for function in (model, lambda x: model(x)):
        compiled = thunderfx(function, backend=backend)
        compiled(torch.ones(3, device=device))
        (broken,) = explain(compiled).breaks
        assert broken.reason.startswith("logging.Logger method not supported") and "ignore_logging" in broken.fix
        assert broken.source == 'logger.warning("looked up", **self.how)' and "called from" in broken.line
        torch._dynamo.reset()
    assert "TORCH_LOGS" in explain(compiled).breaks[0].fix, "Dynamo has forgotten"


def test_the_report_says_how_to_leave_out_the_checks_of_transformers(backend, device):
    def fn(x):
        y = torch.sin(x)
        torch._check_tensor_all(y <= 1)
        return y * 2 + y

    graphed = thunderfx(fn, backend=backend)
    for _ in range(2):
        x = torch.randn(4, 4, device=device)
        same(graphed(x), fn(x))
    assert "TRANSFORMERS_DISABLE_TORCH_CHECK=1" in explain(graphed).breaks[0].fix


def test_calls_of_a_logger_are_made_after_the_graph(backend, device, caplog):
    def function(x):
        logger.log(logging.INFO, "%s rows", x.shape[0])
        y = Logs()(x)
        torch._dynamo.graph_break()
        logger.warning("behind")
        return torch.cos(y) * 2

    caplog.set_level("INFO", logger.name)
    x = torch.ones(3, device=device)
    compiled = thunderfx(function, backend=backend)
    for _ in range(4):
        compiled(x)
    said = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert said == ["3 rows", "looked up", "behind"] * 4, "in each call, and in their order"
    assert [len(program.regions) for program in programs(compiled)] == [1, 1] and len(explain(compiled).breaks) == 1

    caplog.clear()
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning}):
        thunderfx(Logs(), backend=backend, fullgraph=True)(x)
    assert "looked up" not in caplog.messages
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"logging\.Logger"):
        torch.compile(Logs(), backend="eager", fullgraph=True)(x)  # as ever


def test_the_report_says_that_dynamo_compiles_a_function_no_more(backend, device):
    """Dynamo runs what is past its limit in plain Python, and instances of one class share the limit."""

    class Model(nn.Module):
        def forward(self, x, sizes):
            return torch.sin(x) * len(sizes) + x

    first, second = (thunderfx(Model(), backend=backend) for _ in range(2))
    x = torch.randn(4, device=device)
    with torch._dynamo.config.patch(recompile_limit=1):
        for sizes in ([1], [1], [1], [1, 2], [1, 2]):
            first(x, sizes)
        second(x, [1])
        said, nothing = str(explain(first)), str(explain(second))
    fix = "To change that: set torch._dynamo.config.recompile_limit higher"
    assert "1 of 3 calls replayed" in said and "2 more calls ran in plain Python, without Thunder." in said
    assert "Dynamo compiles forward (test_thunderfx.py:" in said and "it has 1 compiled version, and" in said
    assert "holds only for `len(sizes) == 1`; keep the length" in said and fix in said
    assert "nothing to change" not in said and "if it is a cache that grows, write it in place" in said
    assert nothing.startswith("Nothing is compiled. 1 call ran in plain Python") and fix in nothing
    assert "of other functions or instances with the same code" in nothing
    torch._dynamo.reset()
    second(x, [1])
    report = explain(second)
    assert report.traces and not report.limits and report.python_calls == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("cut")
def test_a_whole_step_with_what_inductor_got(backend, device):
    """On the tape, which sees no kernels of Inductor's, its operators are recorded one by one."""

    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x).relu() + 1
            y = torch.ops.aten.native_layer_norm(y, (4,), None, None, 1e-5)[0]
            return (super().forward(y) * 2).square().mean()

    model = Model(4, 4, device=device)
    twin = copy.deepcopy(model)
    compiled = thunderfx(model, backend=backend)
    own, twins = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin))

    def step(x, fn=compiled, optimizer=own):
        optimizer.zero_grad()
        loss = fn(x)
        loss.backward()
        optimizer.step()
        return loss

    graphed = graphed_step(step, backend=backend)
    for _ in range(6):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(graphed(x), step(x, twin, twins))
    assert graphed.replays >= 1 and [each.operator for each in explain(compiled).outside] == ["aten.native_layer_norm"]


def test_functions_of_numpy_keep_the_names_of_their_arguments():
    def fn(x):
        return x + torch.from_numpy(np.stack([np.arange(3), np.arange(3)], axis=1).sum(axis=1, keepdims=True))

    graphed = thunderfx(fn, backend="tape")
    x = torch.randn(3, 2)
    same(graphed(x), fn(x))


def _padded(x, n):
    return nn.functional.pad(x, (n, n), "reflect")[..., 1:].sin()


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize(
    ("sized", "number"),
    [
        (lambda x, n: x.new_zeros(n, 4).sum(0) + x[:, :n].sum(), np.int64),
        (lambda x, n: x.relu().repeat(n, 1).sum(0) * n, np.int64),
        (lambda x, n: torch.zeros(n * 2, 4).sum(0) + x.sin(), np.int64),
        (_padded, torch.tensor),
        (lambda x, n: n.expand(n) * 2 + x.new_zeros(4, n) * n.cos(), torch.tensor),
    ],
)
def test_sizes_in_tensors(sized, number):
    """Dynamo passes numbers of NumPy's as tensors, too, and Thunder's own thunderfx raises a KeyError."""
    graphed = thunderfx(sized, backend="tape")
    for n in (2, 2, 3, 3, 3):
        x = torch.randn(3, 4)
        same(graphed(x, number(n)), sized(x, number(n)))
    reasons = {each.operator: each.reason for each in explain(graphed).outside}
    assert reasons.keys() <= {"numpy.item", "numpy.mul", "expand"}
    assert "numpy.mul" in reasons or "a size, from a tensor" in reasons["numpy.item"]


def test_inductor_does_not_read_tensors(monkeypatch):
    """Nor does Dynamo give up the function, so that Thunder has the rest."""

    def refuse(graph, inputs):
        raise DataDependentOutputException("aten.equal.default")

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    graphed = thunderfx(_padded, backend="tape")
    for _ in range(3):
        x = torch.randn(3, 4)
        same(graphed(x, torch.tensor(2)), _padded(x, torch.tensor(2)))
    assert replays(graphed) == 2


def test_inductor_makes_no_sizes_that_depend_on_data(monkeypatch):
    """It raises after it has changed the piece so that it returns a tuple, as it does on a GPU."""

    def refuse(graph, inputs):
        def fail(graph, inputs):
            raise DynamicOutputShapeException("aten.nonzero.default")

        return torch._inductor.compile_fx.make_graph_return_tuple(graph, inputs, fail)

    def masked(x, rows):
        return (x * 2).index_put((rows,), x[:2].sin()) * x

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    graphed = thunderfx(masked, backend="tape")
    for _ in range(3):
        x, rows = torch.randn(3, 4), torch.tensor([True, False, True])
        same(graphed(x, rows), masked(x, rows))


class Cubes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


@pytest.mark.parametrize("fn", [lambda x: x * 2, Cubes.apply], ids=["operator", "autograd function"])
def test_graphs_that_cannot_be_split_are_left_to_inductor(fn):
    def counting(x, n):
        return nn.functional.pad(fn(x), (n, 0)) + n.add_(1)

    graphed = thunderfx(counting, backend="tape")
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        same(graphed(x, torch.tensor(2)), counting(x, torch.tensor(2)))
        same(*(torch.autograd.grad(each(x, torch.tensor(2)).sum(), x) for each in (graphed, counting)))
    reasons = {each.reason for each in explain(graphed).outside}
    assert len(reasons) == 1 and "splitter does not take: KeyError: s" in reasons.pop()


def test_the_report_says_that_numpy_draws_other_numbers_under_dynamo():
    """As in the masks of a Wav2Vec2 that trains."""

    def mask(x):
        return torch.sin(x) * torch.from_numpy(np.random.rand(2, 3) > 0.5) + x

    compiled = thunderfx(mask, backend="tape")
    compiled(torch.ones(2, 3))
    found = {each.operator: (each.reason, each.fix) for each in explain(compiled).outside}
    reason, fix = found["numpy.random.rand"]
    assert reason.endswith("and so other numbers than NumPy would") and fix.startswith("with torch._dynamo.config.use")
    assert "NumPy's" in found["numpy.gt"][0]


def test_the_report_says_why_dynamo_compiled_anew(backend, device):
    class Model(nn.Module):
        def forward(self, x, flag, sizes):
            return (torch.sin(x) if flag else torch.cos(x)) * len(sizes) + x

    model, other, twin = (thunderfx(Model(), backend=backend) for _ in range(3))
    x = torch.randn(4, device=device)
    for flag, sizes in ((True, [1]), (False, [1]), (True, [1, 2]), (True, [1, 2, 3])):
        twin(x, flag, sizes)  # Dynamo looks at its version first, and says that it is of another function
        model(x, flag, sizes)
    other(x, True, [1])
    found = explain(model).recompilations
    assert {each.condition.partition(" ")[0] for each in found} == {"flag", "len(sizes)"}
    assert sum(each.count for each in found) == 3 and all("test_thunderfx.py:" in each.line for each in found)
    said = str(explain(model)).splitlines()
    anew = next(line for line in said if line.startswith("Dynamo compiled forward (test_thunderfx.py:"))
    assert "anew 3 times, as calls did not meet: `" in anew and "`len(sizes) == " in anew
    assert said[said.index(anew) + 1].startswith("Each version warms up and has graphs of its own. To have fewer: pass")
    assert not explain(other).recompilations and "anew" not in str(explain(other))


def test_a_global_variable_of_another_file_has_its_name_alone():
    reason = "0/0: len(G['__import_train'].seen) == G['most']   # seen.append(x)  # code/train.py:7 in f"
    assert _condition(reason, None) == ("len(seen) == most", "train.py:7")


class _Counts(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.calls, self.seen = start, []

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.sin(x) * self.calls + x


class _Keeps(_Counts):
    def forward(self, x):
        y = torch.sin(x) + x
        self.seen.append(y)
        return y


class _KeepsAfterwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        return torch.sin(x) + x


@pytest.mark.parametrize(
    ("model", "condition", "advice", "better"),
    [
        (_Counts(0), "self.calls == 0", "if calls change self.calls, make it a tensor", _Counts(torch.zeros(()))),
        (_Keeps(0), "not self.seen", "add to self.seen after the call, not in it", _KeepsAfterwards()),
    ],
)
@pytest.mark.nightly_after(1)
def test_the_report_says_what_to_do_about_what_a_module_changes_itself(model, condition, advice, better):
    compiled, mended = thunderfx(model, backend="tape"), thunderfx(better, backend="tape")
    x = torch.randn(4)
    for _ in range(4):
        compiled(x)
    found = explain(compiled)
    torch._dynamo.reset()  # the better one may share its code
    for _ in range(4):
        better.seen.append(mended(x))
    assert condition in [each.condition for each in found.recompilations]
    assert f"To have fewer: {advice}" in str(found) and "pass what changes" not in str(found)
    assert replays(mended) == 3 and not explain(mended).recompilations


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0/1: n == 4   # y = x + n  # code/train.py:8 in f", ("n == 4", "train.py:8")),
        ("0/1: n == 4   # y = x + n  # code/train.py:8 in f (_dynamo/guards.py:3 in g)", ("n == 4", "train.py:8")),
        ("4/1: x.size()[0] != 59  # (thunder_cg/compat/dynamo.py:183 in _leave)", ("x.size()[0] != 59", "")),
    ],
)
def test_a_condition_has_the_users_line_or_none(said, expected):
    assert _condition(said, None) == expected


def test_the_report_gives_each_advice_about_compilations_once():
    def joins(x, past):
        return torch.sin(x if past is None else torch.cat([past, x])) * 2

    compiled = thunderfx(joins, backend="tape")
    for past in (None, torch.ones(1), torch.ones(2)):
        compiled(torch.ones(2), past)
    (line,) = [line for line in str(explain(compiled)).splitlines() if "To have fewer" in line]
    assert line.count("if it is a cache that grows") == 1 and "pad to a few sizes" in line


@pytest.mark.nightly
def test_blocks_that_are_compiled_one_by_one(backend, device):
    """They share code, of which Dynamo compiles a few versions: of each block here, whatever others have."""

    class Block(nn.Module):
        def forward(self, x):
            return torch.tanh(x) + x

    with torch._dynamo.config.patch(recompile_limit=2):
        blocks = [thunderfx(Block(), backend=backend) for _ in range(4)]
        for rows in (2, 2, 2, 3):
            x = torch.randn(rows, 4, device=device)
            for block in blocks:
                torch.testing.assert_close(block(x), torch.tanh(x) + x)
        assert [replays(block) for block in blocks] == [2] * 4
        assert not any(explain(block).limits or explain(block).python_calls for block in blocks)


def test_the_report_says_that_dynamo_had_no_graph_for_calls(backend, device):
    def function(x):
        return x

    compiled = thunderfx(function, backend=backend)
    compiled(torch.ones(2, device=device))
    with pytest.raises(TypeError):
        compiled()
    said = "Nothing is compiled. 1 call ran in plain Python, without Thunder: Dynamo had no graph for them."
    assert str(explain(compiled)).startswith(said)


def test_the_report_says_that_dynamo_has_no_graph_for_calls_under_a_dispatch_mode(backend, device):
    compiled = thunderfx(lambda x: torch.sin(x) * 2, backend=backend)
    with FlopCounterMode(display=False):
        compiled(torch.ones(2, device=device))
    compiled(torch.ones(2, device=device))
    said = "under a TorchDispatchMode, such as a FlopCounterMode, nor of later ones if the first one ran so"
    assert explain(compiled).python_calls == 2 and said in str(explain(compiled))
    torch._dynamo.reset()
    for _ in range(3):
        compiled(torch.ones(2, device=device))
    assert replays(compiled) == 2


class Norm(nn.Module):
    def __init__(self, epsilon):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x):
        return torch.sin(x) * torch.rsqrt(x.pow(2).mean() + self.epsilon)


def test_what_is_dynamic_is_chosen_for_each_function(backend, device):
    """Dynamo compares a float with that of another model of the class, and would read it on the host in each call."""
    for size, epsilon in ((4, 1e-6), (5, 1e-5)):
        norm = thunderfx(Norm(epsilon), backend=backend)
        x = torch.ones(size, device=device)
        torch.testing.assert_close(norm(x), Norm(epsilon)(x))
        (graph,) = norm._backend.subgraph_infos
        assert not explain(norm).causes and graph.original_graph_module.graph.find_nodes(op="placeholder")[1:] == []
    for x in (torch.ones(6, device=device), torch.ones(7, device=device)):
        norm(x)
    assert len(norm._backend.subgraph_infos) == 2, "one for any size"

    inputs = []
    for epsilon in (1e-3, 1e-4):  # as if nothing else had been compiled, and as Dynamo does it
        plain = torch.compile(Norm(epsilon), backend=lambda graph, given: inputs.append(len(given)) or graph.forward)
        plain(torch.ones(2, device=device))
    assert inputs == [1, 2]


def test_the_report_says_what_to_do_about_a_float_that_changes(backend, device):
    compiled = thunderfx(lambda x, scale: torch.sin(x) * scale + torch.relu(x), backend=backend)
    for scale in (1.0, 2.0, torch.tensor(3.0, device=device)):
        compiled(torch.ones(4, device=device), scale)
    (cause,) = explain(compiled).causes
    assert cause.name == "Tensor.item" and "specialize_float" in cause.fix
    assert cause.fix.startswith("pass scale as a 0-dim tensor")
    assert [trace.counts["eager"] > 0 for trace in explain(compiled).traces] == [False, True, False], "as it advises"


def test_what_dynamo_raises_is_in_the_report(backend, device):
    def branches(x):
        y = torch.sin(x)
        return y + 1 if y.sum() > 0 else y

    compiled = thunderfx(branches, backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        compiled(torch.ones(4, device=device))
    line = f"test_thunderfx.py:{branches.__code__.co_firstlineno + 2}"
    problem = f"Unsupported at {line}: Data-dependent branching"
    said = " ".join(str(explain(compiled)).split())
    assert (
        f"Nothing is compiled. Dynamo or Thunder raised while it compiled, in 1 of 1 call: {problem}. To try:" in said
    )
    assert "To try: leave out fullgraph=True" in said
    for note in getattr(raised.value, "__notes__", ()):  # Python 3.11
        assert problem in note and "leave out fullgraph=True" in note


@pytest.mark.parametrize("option", [{"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}])
def test_inductors_options_are_refused_before_a_call(option):
    with pytest.raises(OptionError, match=f"thunderfx\\({next(iter(option))}=.*Inductor; drop it"):
        thunderfx(torch.sin, backend="tape", **option)


def test_attributes_are_the_modules():
    model = nn.Linear(2, 2)
    compiled = thunderfx(model, backend="tape")
    with pytest.raises(AttributeError, match=r"'weight'; take it from the module, or compile only its forward"):
        compiled.weight  # noqa: B018
    assert not hasattr(copy.deepcopy(compiled), "weight")
    model.forward = thunderfx(model.forward, backend="tape")
    with pytest.raises(NotCompiledError, match="only its part forward"):
        explain(model)


def test_training_and_evaluation_in_turns_leave_nothing_to_change(backend, device):
    compiled = thunderfx(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device), backend=backend)
    x = torch.ones(2, 4, device=device)

    def said():
        return [line for line in str(explain(compiled)).partition("\n\n")[0].splitlines() if "anew" not in line]

    for _ in range(2):
        compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
    assert not any("To have fewer" in line for line in said()), "a mode is no value to be passed as a tensor"
    for _ in range(2):
        compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
    before = said()
    assert before[-1].endswith("there is nothing to change.")
    assert "as calls did not meet: `the same mode: whether gradients are enabled`" in " ".join(
        str(explain(compiled)).split()
    )
    with torch.no_grad():
        explain(compiled).profile(x)
    assert said() == before, "calls of a profile are no calls in plain Python"


def test_the_report_has_the_users_names_and_promises_nothing_of_graphs_that_are_called_no_more(backend, device):
    """Dynamo calls a module of PyTorch's with ``*args``, and has names of its own for what a graph break leaves."""
    sizes = thunderfx(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device).requires_grad_(False), backend=backend)
    for size in (2, 3, 4):  # the third call takes the second graph
        sizes(torch.ones(size, 4, device=device))
    report = explain(sizes)
    said = str(report)
    assert "Sequential anew 1 time, as calls did not meet: `tensor 'input' size mismatch" in " ".join(said.split())
    assert "2 shapes of input so far" in said and "args[" not in said
    assert [(trace.awaiting_capture, trace.remark) for trace in report.traces] == [(1, None)] * 3

    torch._dynamo.reset()
    token = thunderfx(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device).requires_grad_(False), backend=backend)
    for size in (1, 2, 1, 1):  # no size that may change is 1
        token(torch.ones(size, 4, device=device))
    first, second = explain(token).traces
    assert (first.calls, first.replays, first.remark, second.calls) == (3, 1, None, 1)

    def breaks(x):
        scale = torch.sum(x).item()
        return torch.sin(x * scale) + x

    left = thunderfx(breaks, backend=backend)
    for i in range(3):
        left(torch.ones(4, device=device) + i)
    said = " ".join(str(explain(left)).split())
    line = breaks.__code__.co_firstlineno + 1
    found = f"breaks (from test_thunderfx.py:{line} on) anew 1 time, as calls did not meet: `a value from before the"
    assert found in said and "stack" not in said and "resume" not in said
    assert "To have fewer: change what ends the graph there, as said below." in said
    assert "it reads a number from before the graph break, and a graph would keep it" in said


def test_what_is_disabled_and_not_what_it_calls(backend, device):
    called = []

    def inner(x):
        called.append(torch.compiler.is_compiling())
        return torch.sin(x)

    def outer(x):
        return torch.compiler.disable(inner, recursive=False)(torch.cos(x)) * 2

    thunderfx(outer, backend=backend)(torch.ones(3, device=device))
    assert called == [False]


def test_numbers_that_are_only_counted(backend, device):
    """Thunder compiles anew for each number that it gets, and needs none of these."""

    class Cache:
        def __init__(self):
            self.length, self.calls = 0, 0
            self.sums = torch.zeros(3, device=device)

    def fn(x, cache):
        is_full, cache.length, cache.calls = cache.length >= 20, cache.length + x.shape[0], cache.calls + 1
        cache.sums.add_(x.sum(0))
        return cache.sums.sin() if is_full else cache.sums.cos()

    plain, cache = Cache(), Cache()
    graphed = thunderfx(fn, backend=backend)
    for i in range(1, 16):
        x = torch.randn(2, 3, device=device)
        same(graphed(x, cache), fn(x, plain))
        assert (cache.length, cache.calls) == (2 * i, i)
    traces = explain(graphed).traces
    assert len(traces) == 3, "a first one, one for other numbers, and one for a cache that is full"
    assert sum(trace.regions[0].replays for trace in traces) == 15 - 3, "each has one warm-up"


def test_numbers_that_a_module_counts(backend, device):
    """PyTorch's Dynamo compiles anew for each integer of a module."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.sin(x) * 2 if self.calls < 20 else x

    module, x = Counting(), torch.ones(3, device=device)
    graphed = thunderfx(module, backend=backend)
    for _ in range(8):
        same(graphed(x), torch.sin(x) * 2)
    report = explain(graphed)
    assert module.calls == 8 and len(report.traces) == 2 and sum(trace.replays for trace in report.traces) == 5
    assert "if calls change self.calls, make it a tensor, and write it in place; if it bounds a slice" in str(report)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_at_a_graph_break(backend, device, create_graph):
    """``torch.autograd.grad`` runs Thunder's nodes under Dynamo's eyes, which compiles nothing of them."""
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)).to(device)

    def forces(x):
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=create_graph)
        return torch.sin(gradient) * 2

    compiled = thunderfx(forces, backend=backend)
    for _ in range(4):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        torch.testing.assert_close(compiled(x), forces(x))
    report = explain(compiled)
    assert {trace.function[-7:] for trace in report.traces} == {"graph 0", "graph 1"} and not report.recompilations
    (found,) = report.breaks
    assert "call torch.autograd.grad or backward outside of the compiled function" in found.fix
    energy = thunderfx(net, backend=backend)
    for _ in range(3):
        torch.autograd.grad(energy(x).sum(), x)
    assert not explain(energy).breaks


def test_a_piece_that_inductor_cannot_compile_runs_by_itself(backend, device, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise torch._inductor.exc.InductorError(AssertionError("no code for s14 + s15"), None)

    monkeypatch.setattr("thunder_cg.dynamo.pieces.compile_each_way", fails)
    monkeypatch.setattr(torch._inductor, "compile", fails)
    compiled = thunderfx(lambda x: torch.vmap(torch.sin)(torch.tanh(x)) * 2, backend=backend)
    x = torch.randn(8, device=device)
    for _ in range(4):
        assert torch.equal(compiled(x), torch.sin(torch.tanh(x)) * 2)
    assert "Inductor raised AssertionError: no code for s14 + s15; the operators there run one by one" in caplog.text
    (piece,) = explain(compiled).outside
    assert "PyTorch does not compile it by itself" in piece.apart


def test_an_lstm_in_training(backend, device):
    """Inductor (2.11) raises for one on a CPU whose input has no gradient."""
    model = nn.LSTM(4, 4).to(device)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = thunderfx(lambda x: torch.tanh(model(x)[0]) * 2, backend=backend)
        for _ in range(4):
            compiled(torch.randn(5, 3, 4, device=device)).sum().backward()
    (layer,) = (*explain(compiled).outside, *explain(compiled).joined)  # on a GPU, a graph holds it
    assert layer.operator == "lstm" and "nothing has to change" in layer.fix
    assert replays(compiled) > 0 and all(p.grad is not None for p in model.parameters())


def test_a_hook_that_keeps_what_it_sees():
    if not attribute_writes_are_reported():
        pytest.skip("Python 3.13.0, where Dynamo compiles nothing anew for it")
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.GELU()), []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    compiled = thunderfx(model, backend="tape")
    for _ in range(3):
        compiled(torch.ones(2, 4))
    said = str(explain(compiled))
    assert "`len(a variable of a hook of fn.1) == 1`" in said and "To have fewer: have the hook write to a" in said


@pytest.mark.parametrize(
    ("values", "condition", "fix"),
    [
        (("a", "b", "c"), "mode == 'a'", "keep it to a few values."),
        ((torch.float32, torch.float64), "dtype mismatch", "cast to one dtype before the call."),
        (([1], [1, 2]), "len(mode) == 1", "keep the length; if it is a cache"),
    ],
    ids=["a string", "a dtype", "a length"],
)
@pytest.mark.nightly_after(2)
def test_what_to_do_about_compilations(values, condition, fix):
    def function(x, mode):
        return torch.sin(x) * (len(mode) if isinstance(mode, list) else 2 + (mode == "a"))

    compiled = thunderfx(function, backend="tape")
    for value in values:
        is_dtype = isinstance(value, torch.dtype)
        compiled(torch.ones(2, dtype=value if is_dtype else None), None if is_dtype else value)
    said = str(explain(compiled))
    assert condition in said and f"To have fewer: {fix}" in said


def _scales(y):
    y.data.mul_(2)
    return torch.tanh(y)


def _clamps(y):
    data = y.data
    data.clamp_(-1, 1)
    return torch.tanh(y) + data


def _sets(y):
    y.data[:, 0] = 0
    return torch.tanh(y)


@pytest.mark.parametrize("function", [_scales, _clamps, _sets])
def test_what_is_written_through_data_keeps_its_gradient(pair, device, function):
    """In Thunder's own thunderfx, it has none."""

    class Writes(nn.Linear):
        def forward(self, x):
            return function(super().forward(x))

    model, _, _, graphed = pair(Writes(4, 4))
    twin = graphed._func._orig_mod
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        results = [each(x) for each in (model, graphed)]
        torch.testing.assert_close(*results)
        for result in results:
            result.sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


class _Casts(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.second, self.inside = nn.Linear(4, 4), nn.Linear(4, 4), inside

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if self.inside else contextlib.nullcontext():
            y = self.second(torch.tanh(self.first(x)))
            with torch.autocast("cpu", enabled=not self.inside):  # Thunder raises if another one is around
                return self.second(y.float()) + self.first(x)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.nightly_after(1)
def test_layers_under_autocast_are_one_piece(inside):
    """Thunder's own thunderfx tries a layer without autocast, and so gives Inductor each one after the first."""
    model = _Casts(inside)
    twin = copy.deepcopy(model)
    compiled = thunderfx(model, backend="tape")
    for _ in range(4):
        x = torch.randn(2, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            found, expected = compiled(x), twin(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
    report = explain(compiled)
    assert not (report.outside or report.causes) and [len(trace.regions) for trace in report.traces] == [1, 1]
    gradients = [[p.grad for p in each.parameters()] for each in (model, twin)]
    torch.testing.assert_close(*gradients, atol=0.05, rtol=0.05)


def test_what_the_first_call_sets_is_said_and_the_second_version_tries_no_operator_again(monkeypatch):
    """As the configurations of Transformers' classifiers: an attribute of theirs is looked up by a method."""

    class Settings:
        kind = None

        def __getattribute__(self, name):
            return super().__getattribute__(name)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.settings = Settings()

        def forward(self, x):
            if self.settings.kind is None:
                self.settings.kind = "single"
            return (x.sin() * 2).exp()

    tried = []
    real = utils.try_execute_thunder_symbol
    monkeypatch.setattr(utils, "try_execute_thunder_symbol", lambda *args: tried.append(args) or real(*args))
    compiled, counts = thunderfx(Classifier(), backend="tape", dynamic=False), []
    for _ in range(2):
        compiled(torch.ones(3))
        counts.append(len(tried))
    assert counts[0] == counts[1] > 0
    (again,) = explain(compiled).recompilations
    assert again.condition == "self.settings.kind is None"
    assert "make self.settings.kind before the first call" in str(explain(compiled))
