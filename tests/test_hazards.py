"""What makes a CUDA graph wrong in silence, one short test each.

Every test compares with uncaptured Thunder, bit for bit.

| hazard                                                        | test                                   |
| ------------------------------------------------------------- | -------------------------------------- |
| an output changes when the next call runs                     | test_outputs_are_kept                  |
| writing into an output breaks a later call                    | test_outputs_may_be_written            |
| outputs that share memory stop sharing it                     | test_outputs_that_alias                |
| an output that is returned twice becomes two                  | test_outputs_returned_twice            |
| a view of an input is no view any more                        | test_views_of_inputs                   |
| an input that is returned is another tensor                   | test_returned_inputs                   |
| so is one that is passed twice                                | test_returned_inputs_passed_twice      |
| a view of an input is taken for the input                     | test_views_that_outlive_what_they_show |
| what was detached from an input is a view of it again         | test_detached_inputs                   |
| so is a view of that, and requires grad                       | test_views_of_detached_inputs          |
| a view of a parameter is no view any more                     | test_views_of_parameters               |
| in-place writes to an input are lost                          | test_written_inputs                    |
| a view of a written input is taken for an older one           | test_views_of_written_inputs           |
| so is the version of what is written in inference mode        | test_versions_in_inference_mode        |
| a view that is written is none that Thunder knows             | test_written_views                     |
| an operator writes its input because it is asked to            | test_inplace_operators                 |
| a strided view shows more than the tensor it is taken of      | test_strided_views                     |
| so does one of a tensor that a region has made                | test_strided_views_of_results          |
| an operator resizes its arguments                             | test_resized_arguments                 |
| what PyTorch does not allow to write is written               | test_written_leaves                    |
| a write through one alias is not seen through the other       | test_aliased_arguments                 |
| parts of one tensor are taken for the same part               | test_parts_of_one_tensor_as_arguments  |
| a view of another dtype, or a conjugated one, is taken for it   | test_views_of_another_kind_as_arguments |
| arguments that overlap are read one for the other             | test_overlapping_arguments_read        |
| a gradient goes to a detached argument of the same memory     | test_detached_arguments                |
| a parameter is read before an argument is written             | test_arguments_that_overlap_parameters |
| a view of an argument is taken for one of a parameter         | test_views_that_overlap_parameters     |
| buffers are updated more than once a call                     | test_batchnorm_statistics              |
| so are they in inference mode                                 | test_statistics_in_inference_mode      |
| a reassigned buffer                                           | test_reassigned_buffer                 |
| the layout of an input changes                                | test_layouts                           |
| a conjugate that is taken only when it is read                 | test_lazy_conjugates                   |
| no inputs at all                                              | test_no_inputs                         |
| a parameter moves                                             | test_swapped_parameters                |
| a parameter keeps its address and changes its strides         | test_transposed_parameter              |
| a parameter that moves at every call                          | test_restless_parameter                |
| a weight changes between forward and backward                 | test_weight_changed_before_backward    |
| several forwards before a backward                            | test_forwards_in_flight                |
| forwards without a backward                                   | test_abandoned_forwards                |
| gradients change when the next step runs                      | test_gradients_are_kept                |
| a gradient is what the forward saved in the arena             | test_saved_gradients                   |
| gradients share memory that autograd would have copied        | test_gradients_that_share_memory       |
| gradient accumulation                                         | test_gradient_accumulation             |
| evaluation between forward and backward                       | test_evaluation_in_between             |
| torch.autograd.grad                                           | test_autograd_grad                     |
| the incoming gradient's layout changes                        | test_gradient_layouts                  |
| saved tensors travel through hooks                            | test_saved_tensor_hooks                |
| hooks keep saved tensors for longer than their graph lives    | test_checkpointed_from_outside         |
| a graph is retained and run again                             | test_retained_graph                    |
| a gradient without memory of its own                          | test_sparse_gradients                  |
| so have gradients of embeddings, and what is computed of them | test_sparse_gradients_of_embeddings    |
| an operator returns a tensor without memory of its own        | test_sparse_results                    |
| many gradients come in at once, by vmap                       | test_gradients_in_a_batch              |
| a gradient is zeros without any memory                        | test_zeros_without_memory              |
| a kernel is chosen by whether its operand requires grad       | test_kernels_that_ask_for_grad         |
| a kernel is chosen by whether its arguments are one tensor    | test_one_tensor_for_several_arguments  |
| a tensor is not on the device that the trace says             | test_seed_on_the_host                  |
| a write to an output is not noticed through another           | test_versions_of_outputs               |
| results share memory, and one of them has no elements         | test_results_without_elements          |
| a dispatch mode does not see what runs                        | test_dispatch_modes                    |
| random numbers freeze, or the generator stands still          | test_random_numbers                    |
| a capture changes what a graph draws that is still to run     | test_draws_while_another_captures      |
| a number read from a tensor freezes                           | test_item                              |
| so does one that is an index                                  | test_indices_that_are_numbers          |
| a number is stored where the mask of another call says        | test_numbers_stored_by_a_mask          |
| what an operator calls is captured in another call's memory   | test_calls_in_operators                |
| an operator keeps, writes or returns its input                | test_opaque_operators                  |
| so does one that is eager for another reason as well          | test_opaque_operators_with_numbers     |
| a side effect of an operator happens at capture only          | test_side_effects                      |
| an operator raises and later does not                         | test_operator_that_raises              |
| a capture fails                                               | test_failed_capture                    |
| strict=True raises where nothing failed                       | test_strict_training                   |
| a capture is interrupted half way                             | test_interrupted_capture               |
| two threads share memory                                      | test_threads                           |
| more calls in flight than arenas                              | test_too_many_in_flight                |
| a model in many parts, all in flight at once                  | test_functions_share_an_arena          |
| a part writes over what another one has saved                 | test_functions_beside_another_one      |
| backwards of several parts overwrite each other's memory      | test_backwards_that_share_memory       |
| so do those that run on several threads                       | test_backwards_on_several_threads      |
| memory that a region may reuse has another name               | test_memory_with_two_names             |
| so has memory that the forward saved                          | test_saved_memory_with_two_names       |
| so has memory that a region without a graph passes on         | test_memory_that_is_passed_on          |
| another capture is under way                                  | test_outer_capture                     |
| a switch that kernels are chosen by is flipped                | test_switches                          |
| memory of a dropped model stays                               | test_dropped_models                    |
| one transform for several models                              | test_several_models                    |
| inference mode, then not                                      | test_inference_mode                    |
| an operator reshapes what it has made, in place               | test_results_reshaped_in_place         |
| Thunder connects a call to autograd in spite of no_grad       | test_gradients_despite_no_grad         |
| an input that might have been written counts as written       | test_versions_of_what_is_only_read     |
| a parameter is frozen between forward and backward            | test_frozen_before_backward            |
| what has left is still written, or read, by what comes later  | test_results_that_leave_early          |
| what a backward reads moves, or has another layout            | test_backward_inputs_that_vary         |
| outputs in reference cycles hold every arena                  | test_outputs_in_reference_cycles       |
| kept outputs make every call collect garbage                  | test_outputs_that_are_really_kept      |
| memory that was given back is still read or replayed          | test_released_memory                   |
| so is what a memory budget has discarded                      | test_discarded_recordings              |
"""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import thunder
import torch
from models import Dropout, LayerNorm, Linear, Precomputed
from support import on_threads, programs, regions, replays, same, same_state
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from thunder_cg import CaptureError, explain, release
from thunder_cg.errors import SharedMemoryError
from thunder_cg.runtime.arena import Arena, CallMemory
from thunder_cg.runtime.early_outputs import CopiedEarly, EarlyCopier
from thunder_cg.runtime.region import RuntimeRegion

CALLS = 5


class MLP(nn.Module):
    def __init__(self, width: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.first = Linear(width, width)
        self.norm = LayerNorm(width)
        self.second = Linear(width, width)
        self.drop = Dropout(p)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def plain_of(model, number=0, compiled={}):  # noqa: B006
    """An `MLP` without graphs. All tests share it, so that Thunder compiles it once, and each gives it its weights."""
    key = repr(model), next(model.parameters()).device, number
    module, jmodel = compiled.get(key) or compiled.setdefault(key, (own := copy.deepcopy(model), thunder.jit(own)))
    for mine, its in zip(module.parameters(), model.parameters()):
        mine.data, mine.grad = its.detach().clone(), None
        mine.requires_grad_(its.requires_grad)
    return jmodel.train(model.training)


@pytest.fixture
def twins(twins, transform, device):
    def make(fn, jit=None, **options):
        if not isinstance(fn, MLP):
            return twins(fn, jit, **options)
        return plain_of(fn.to(device)), thunder.jit(fn, transforms=[transform(**options)])

    return make


def work(x):
    """Several kernels, so that there is something to capture."""
    return torch.tanh(x * 2 + 1) * torch.cos(x)


def test_outputs_are_kept(twins, device):
    plain, graphed = twins(lambda x: (work(x), work(x).sum()))
    xs = [torch.randn(4, 4, device=device) for _ in range(CALLS)]
    kept = [graphed(x) for x in xs]
    same([plain(x) for x in xs], kept)
    assert replays(graphed) >= CALLS - 1


def test_outputs_may_be_written(twins, device):
    plain, graphed = twins(lambda x: (work(x), x.sum() * 2 + 1))
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        a, b = plain(x), graphed(x)
        same(a, b)
        for t in b:
            t.fill_(7)
    assert replays(graphed) >= CALLS - 1


def test_outputs_that_alias(twins, device):
    def fn(x):
        y = work(x)
        return y, y, y.view(-1), y[1:], y.t()

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        for outputs in (a := plain(x), b := graphed(x)):
            outputs[2][5] = 100.0
        same(a, b)


def test_outputs_returned_twice(twins, device):
    def fn(x, w):
        y, t = work(w) * x, x.t()
        return y, t, y.view_as(y), t.to(y.dtype)  # Thunder takes them for the same

    for f in twins(fn):
        for _ in range(CALLS):
            x = torch.randn(4, 4, device=device)
            w = torch.ones(4, 4, device=device, requires_grad=True)
            y, t, again, also = f(x, w)
            once = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
            assert y is again and t is also
            y.mul_(2)
            same(torch.autograd.grad(again.sum(), w)[0], 2 * once)


def test_arguments_of_two_storages(twins, device):
    """Each storage has a check of its own of how the arguments lie in it."""

    def fn(a, b, c, d):
        a.add_(1)
        return (a * b).sin() + (c * d).sum()

    _, graphed = twins(fn)  # Thunder alone takes `b` for `a`
    for _ in range(4):
        x, y = torch.randn(2, 8, device=device), torch.randn(4, 3, device=device)
        expected = fn(*x.clone(), *y[::3].clone())
        torch.testing.assert_close(graphed(*x, *y[::3]), expected)


def test_views_of_inputs(twins, device):
    plain, graphed = twins(lambda x: (work(x) + x.sum(), x.view(-1), x.t(), x[:, 1:]))
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        y = x.clone()
        a, b = plain(x), graphed(y)
        same(a, b)
        for view in b[1:]:
            assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        b[1][0] = 9.0
        assert y[0, 0] == 9.0


def test_returned_inputs(twins, device):
    _, graphed = twins(lambda x, y: (x, work(y) * work(x), y))
    for _ in range(CALLS):
        x, y = torch.randn(2, 4, 4, device=device)
        a, _, b = graphed(x, y)
        assert a is x and b is y


def test_returned_inputs_passed_twice(twins, device):
    """What autograd does not know for an input becomes a result with a gradient."""

    def fn(x, y, w):
        a, b = x.to(torch.float32), y.to(torch.float32)  # which they are already
        return a, work(w) + a * b, b

    w = torch.randn(4, 4, device=device, requires_grad=True)
    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        for f in (plain, graphed):
            a, result, b = f(x, x, w)
            assert a is x and b is x and not x.requires_grad and result.requires_grad


def test_views_that_outlive_what_they_show(twins, device):
    """Python gives a tensor the identity of one that has died, as names of the input do on the way through a region."""

    def fn(x):
        y = work(x)
        z = x.detach()
        return y, z[1:], z.view(-1)

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))


@pytest.mark.parametrize("inference", [False, True])
def test_detached_inputs(twins, device, inference):
    plain, graphed = twins(lambda x: (work(x), x.t().detach(), x.t(), x[1:].detach(), x.reshape(-1)))
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        with torch.inference_mode(inference):
            a, b = plain(x), graphed(x)
        same(a, b)
        assert [t._is_view() for t in a] == [t._is_view() for t in b] == [False, False, True, False, True]
        version = x._version
        b[1].mul_(2)
        assert x._version > version


def test_views_of_detached_inputs(twins, device):
    plain, graphed = twins(lambda x, w: (torch.tanh(x @ w) * 2, w.detach().t(), w.t(), x.detach()[0]))
    for _ in range(CALLS):
        x, w = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device, requires_grad=True)
        with torch.no_grad():
            results = [fn(x, w) for fn in (plain, graphed)]
        for a, b in zip(*results):
            same(a, b)
            assert (a.requires_grad, a._is_view(), a._base is w) == (b.requires_grad, b._is_view(), b._base is w)
        results[1][1].mul_(2.0)
        same(w.detach(), results[0][2].detach().t())
    assert replays(graphed) == CALLS - 1


def test_views_of_parameters(twins, device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return work(x @ self.w) * 2, self.w.t()

    with torch.no_grad():
        plain, graphed = twins(Tied())
        for _ in range(CALLS):
            x = torch.randn(4, 4, device=device)
            same(plain(x), graphed(x))
            _, view = graphed(x)
            assert view.untyped_storage().data_ptr() == graphed.w.untyped_storage().data_ptr()
            for model in (plain, graphed):
                model.w.mul_(1.5)


def test_written_inputs(twins, device):
    def fn(x, y):
        x.mul_(2)
        y[:, 0] = x.sum(1)
        return work(x) + y

    plain, graphed = twins(fn)
    x, y = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    u, v = x.clone(), y.clone()
    for _ in range(CALLS):
        versions = u._version, v._version
        same(plain(x, y), graphed(u, v))
        same((x, y), (u, v))
        assert u._version > versions[0] and v._version > versions[1]
    strided = [torch.arange(32.0, device=device).view(4, 8)[:, ::2] for _ in range(2)]
    for _ in range(CALLS):
        same(plain(strided[0], y), graphed(strided[1], v))
        same(strided[0], strided[1])
    assert replays(graphed) > 0


@pytest.mark.filterwarnings("ignore::thunder_cg.WrongGradientWarning")
def test_views_of_written_inputs(twins, device):
    def fn(x):
        x[:, 1:] = work(x[:, 1:])
        return x[:, 1:]

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(3, 4, device=device, requires_grad=True).clone()
        y = x.detach().requires_grad_().clone()
        found, expected = graphed(x), plain(y)
        assert found.grad_fn == expected.grad_fn  # autograd raises if the input was written after the view was made
        same(found.detach(), expected.detach())
        same(x.detach(), y.detach())
    assert replays(graphed) == CALLS - 1


def test_versions_in_inference_mode(twins, device):
    def fn(x):
        x.mul_(2)
        return work(x)

    for f in twins(fn):
        x = torch.randn(4, 4, device=device)
        for _ in range(CALLS):
            version = x._version
            with torch.inference_mode():
                f(x)
            assert x._version > version


DROPS = ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"]
INPLACE = [*((name, (0.5, True, True)) for name in DROPS), ("elu", (1.0, True)), ("silu", (True,))]


@pytest.mark.parametrize(("name", "options"), INPLACE)
@pytest.mark.nightly_after(2)
def test_inplace_operators(twins, device, name, options):
    """What Thunder hands on to PyTorch as it is, and what it writes out."""
    operator = getattr(nn.functional, name)
    size = {"dropout1d": (2, 3, 4), "dropout3d": (2, 3, 4, 4, 4)}.get(name, (2, 3, 4, 4))

    def fn(x, w):
        y = work(x)
        early = torch.cos(y) + torch.tan(y)  # where tan is eager, the sum is in another region
        z = operator(y, *options)
        return early, work(y), work(z), operator(w, *options)

    for deny in ([], ["tan"]):
        plain, graphed = twins(fn, deny=deny)
        for step in range(CALLS):
            x, w = torch.randn(2, *size, device=device)
            found = []
            for f in (plain, graphed):
                torch.manual_seed(step)
                written = w.clone()
                found.append((f(x.clone(), written), written, written._version > 0))
                assert found[-1][0][-1].data_ptr() == written.data_ptr()
            same(*found)
        assert replays(graphed) >= CALLS - 1


def test_strided_views(twins, device):
    """Offsets count from where a storage begins, and an input's may begin before it, and go on behind it."""

    def read(x, y):
        return work(x), work(x.as_strided((2, 2), (1, 2), 0)), x.as_strided_scatter(y, (2,), (1,), 0)

    def write(x, y):
        x.as_strided((2,), (1,), 2).mul_(y)
        return work(x), work(y), x.as_strided((2,), (1,), 10)

    def behind(x, y):
        return work(x), work(x.as_strided((6,), (1,))), x.as_strided((2,), (2,))

    for fn in (read, write, behind):
        plain, graphed = twins(fn)
        for _ in range(CALLS):
            memory, y = torch.randn(16, device=device), torch.randn(2, device=device)
            a, b = memory.clone(), memory.clone()
            same((plain(a[8:12], y), a), (graphed(b[8:12], y), b))
        if fn is not write:
            assert replays(graphed) >= CALLS - 1


def test_strided_views_of_results(twins, device):
    def fn(x):
        y = work(x)
        z = y[2:6]
        shown = z.as_strided((4,), (1,), 0)
        once = work(shown) + work(z)
        shown.mul_(2)
        return z, once, work(y)

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(8, device=device)
        same(plain(x), graphed(x))
    assert replays(graphed) >= CALLS - 1


def test_resized_arguments(twins, device):
    """A range that is empty gets an element for each channel."""

    def fn(x, low, high, scale, zero, on):
        return torch.fused_moving_avg_obs_fake_quant(work(x), on, on, low, high, scale, zero, 0.1, 0, 255, 0, True) * 2

    plain, graphed = twins(fn)
    on = torch.ones(1, dtype=torch.int64, device=device)
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device)
        found = []
        for f in (plain, graphed):
            state = [torch.empty(0, device=device) for _ in range(2)]
            state += [torch.ones(4, device=device), torch.zeros(4, dtype=torch.int32, device=device)]
            found.append((f(x, *state, on), state))
        same(*found)
    assert replays(graphed) >= CALLS - 1


@pytest.mark.filterwarnings("ignore::thunder_cg.WrongGradientWarning")
def test_written_leaves(twins, device):
    def fn(x, y):
        z = x.view_as(x)  # another name for x, which an eager operator gives to the region
        n = y.sum().item()
        z.copy_(work(y) * n)
        return work(z) * 2

    for f in twins(fn):
        for _ in range(CALLS):
            x, y = torch.randn(4, 4, device=device, requires_grad=True), torch.randn(4, 4, device=device)
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                f(x, y)


@pytest.mark.filterwarnings("ignore::thunder_cg.WrongGradientWarning")
def test_leaves_written_by_a_fusion(twins, device):
    def fn(x):
        x.mul_(2)
        return work(x)

    for f in twins(fn, {"executors": ["torchcompile"]}):
        for _ in range(CALLS):
            with pytest.raises(RuntimeError):  # Dynamo's, for PyTorch's
                f(torch.randn(4, 4, device=device, requires_grad=True))


def test_aliased_arguments(twins, device):
    def fn(x, y):
        x.add_(1)
        return work(y) * 2 + x

    plain, graphed = twins(fn)
    base = torch.randn(8, device=device)
    for make in (lambda b: (b, b), lambda b: (b, b.view(8)), lambda b: (b, b.clone())):
        for _ in range(4):
            a, b = base.clone(), base.clone()
            same(plain(*make(a)), graphed(*make(b)))
            same(a, b)


def test_parts_of_one_tensor_as_arguments(twins, device):
    """Thunder alone takes them for one tensor, if something is written in place: this compares with PyTorch."""

    def fn(unused, x, y):
        x.add_(1)
        return y * 2

    _, graphed = twins(fn)
    base = torch.arange(16.0, device=device).view(4, 4)
    apart = (lambda b: (b[:2], b[2:]), lambda b: b.chunk(2, 1), lambda b: (b[::2], b[1::2]), lambda b: (b, b))
    for make in (*apart, *apart):
        a, b = base.clone(), base.clone()
        same(graphed(None, *make(a)), fn(None, *make(b)))
        same(a, b)
    for make in (lambda b: (b[:2], b[1:3]), lambda b: (b, b.t()), lambda b: (b[:, :2], b[:, 1:3])):
        with pytest.raises(SharedMemoryError, match="pass the whole tensor and take its parts inside"):
            graphed(None, *make(base.clone()))


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.mT,
        lambda y: y.type(torch.float32),
        lambda y: F.dropout(y, 0.5, False),
        lambda y: y.ravel(),
        lambda y: torch.moveaxis(y, 0, 1),
    ],
    ids=["mT", "type", "dropout", "ravel", "moveaxis"],
)
@pytest.mark.nightly_after(3)
def test_written_views(transform, device, view):
    """Thunder alone does not know most of them, and reads old values of what they show: this is as in PyTorch."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, device=device)

        def forward(self, x, c):
            y = c * 2
            view(y).mul_(3)
            return self.linear(x) * y

    model = Writes()
    graphed = thunder.jit(copy.deepcopy(model), transforms=[transform()])
    for grad in (torch.enable_grad, torch.no_grad):
        for _ in range(CALLS):
            x, c = torch.randn(2, 4, 4, device=device)
            with grad():
                same(graphed(x, c), model(x, c))


def test_views_of_another_kind_as_arguments(transform, device):
    """Of other element sizes, or conjugated when they are read."""

    def fn(x, y):
        x.mul_(2)
        return y * 2

    doubles = torch.arange(8.0, device=device, dtype=torch.float64)
    floats, numbers = doubles.view(torch.float32), torch.view_as_complex(doubles.clone().view(4, 2))
    jfn, swapped = (thunder.jit(each, transforms=[transform()]) for each in (fn, lambda y, x: fn(x, y)))
    for x, y in ((floats[4:8], doubles[4:6]), (numbers, numbers), (floats[4:8], doubles[4:6]), (numbers, numbers)):
        before, expected = x.clone(), y.clone() * 4 if x is y else y * 2
        for result in (jfn(x, y), swapped(y, x.copy_(before))):
            same(result, expected)
    overlapping = (floats[4:8], doubles[:4]), (floats[2:6], doubles[2:4]), (numbers, numbers.conj())
    for x, y in overlapping:
        with pytest.raises(SharedMemoryError, match="two arguments overlap"):
            jfn(x, y)
        with pytest.raises(SharedMemoryError, match="two arguments overlap"):
            swapped(y, x)


def test_detached_arguments(transform, device):
    """Thunder alone reads the first in the place of the other, whose gradient is lost: this compares with PyTorch."""

    def fn(value, loss, average):
        average.mul_(0.9).add_(value, alpha=0.1)
        return loss * 2

    def overwritten(value, loss):
        value.mul_(2)
        return loss * 2

    jfn, joverwritten = (thunder.jit(each, transforms=[transform()]) for each in (fn, overwritten))
    averages = [torch.ones(1, device=device) for _ in range(2)]
    for _ in range(CALLS):
        x, gradients = torch.randn(4, device=device, requires_grad=True), []
        for each, average in zip((jfn, fn), averages):
            loss = x.square().mean(0, keepdim=True)
            gradients += torch.autograd.grad(each(loss.detach(), loss, average).sum(), x)
        same(*gradients)
        same(*averages)
    with pytest.raises(SharedMemoryError, match="with a gradient"):
        joverwritten(loss.detach(), loss)
    with torch.no_grad():
        same(joverwritten(loss.detach(), loss), loss * 2)


@pytest.mark.parametrize(
    "make", [lambda b: b[0], lambda b: b[1], lambda b: b.t()[:3]], ids=["first", "row", "transposed"]
)
@pytest.mark.nightly_after(2)
def test_overlapping_arguments_read(twins, device, make):
    """Thunder alone raises, or reads one in the place of the other: this compares with PyTorch."""

    def fn(x, y):
        z = x.sin()
        z[1:] += y
        return z * 2

    _, graphed = twins(fn)
    for step in range(CALLS):
        base = torch.randn(4, 4, device=device)
        x, part = base + 0, base[2]
        same(graphed(x, make(x)), fn(x, make(x)))
        if step > 1:
            same(graphed(base, part), fn(base, part))
    assert replays(graphed) > 0


def test_an_overlapping_argument_that_is_written(twins, device):
    def fn(x, y):
        y += x[1]
        return x * 2

    _, graphed = twins(fn)
    base = torch.randn(4, 4, device=device)
    with pytest.raises(SharedMemoryError, match="one of them is written in place"):
        graphed(base, base[0])


def test_batchnorm_statistics(twins, device):
    plain, graphed = twins(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    )
    for step in range(CALLS + 2):
        x = torch.randn(2, 3, 8, 8, device=device)
        for model in (plain, graphed):
            model.train(step != 3)
            model.zero_grad()
            model(x).square().mean().backward()
        same_state(plain, graphed)
    assert plain.get_buffer("1.num_batches_tracked") == CALLS + 1
    assert replays(graphed) > 0


def test_statistics_in_inference_mode(twins, device):
    plain, graphed = twins(nn.Sequential(nn.Tanh(), nn.BatchNorm1d(3), nn.Tanh()))
    for _ in range(CALLS):
        x = torch.randn(2, 3, 8, device=device)
        with torch.inference_mode():
            same(plain(x), graphed(x))
        same_state(plain, graphed)


def test_reassigned_buffer(twins, device):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(4))

        def forward(self, x):
            self.state = self.state * 0.5 + x.mean(0)
            return work(x) + self.state

    plain, graphed = twins(Counter())
    for _ in range(CALLS):
        x = torch.randn(3, 4, device=device)
        same(plain(x), graphed(x))
        same(plain.state, graphed.state)


def test_layouts(twins, device):
    plain, graphed = twins(lambda x: (work(x).sum(0), work(x), x.view_as(x)))
    base = torch.randn(64, device=device)
    dense = base[:16].view(4, 4)
    inputs = [
        dense,
        dense.t(),
        base[1:17].view(4, 4),
        base[:4].expand(4, 4),
        base[:4].view(4, 1).expand(4, 4),
        base.as_strided((4, 4), (1, 1)),
        base.as_strided((4, 4), (9, 2), 3),
        base[:0].view(0, 4),
        base[:0].expand(4, 0),
    ]
    for x in inputs * 4:
        same(plain(x), graphed(x))
    assert replays(graphed) > 0


def test_lazy_conjugates(twins, device):
    def fn(x, w):
        y = (x * 2 + 1) * w
        z = y.conj()
        return z * x + y, z, x.view(-1)

    plain, graphed = twins(fn)
    for step in range(2 * CALLS):
        x = torch.randn(4, 4, dtype=torch.complex64, device=device)
        w = x.conj().imag if step % 2 else x.imag  # which is negated when it is read
        x = x.conj() if step % 2 else x
        a, b = plain(x, w), graphed(x, w)
        assert [t.is_conj() for t in a] == [t.is_conj() for t in b]
        same([t.resolve_conj() for t in a], [t.resolve_conj() for t in b])
    assert replays(graphed) == 2 * (CALLS - 1)


def test_no_inputs(twins, device):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self):
            return work(self.w @ self.w)

    plain, graphed = twins(Constant())
    for _ in range(CALLS):
        a, b = plain(), graphed()
        same(a, b)
        (a.sum() + 1).backward()
        (b.sum() + 1).backward()
    same_state(plain, graphed)
    plain, graphed = twins(lambda: work(torch.ones(4, 4, device=device)) + torch.arange(4, device=device))
    for _ in range(CALLS):
        same(plain(), graphed())


def test_swapped_parameters(twins, device):
    plain, graphed = twins(MLP())
    other = MLP().to(device).state_dict()
    for step in range(3 * CALLS):
        if step % CALLS == CALLS - 1:
            for model in (plain, graphed):
                torch.manual_seed(step)
                if step // CALLS == 0:
                    model.first.weight.data = torch.randn(8, 8, device=device)
                elif step // CALLS == 1:
                    model.load_state_dict(other, strict=False)
                else:
                    with torch.no_grad():
                        model.second.weight.normal_()
        x = torch.randn(3, 8, device=device)
        a, b = plain(x), graphed(x)
        same(a, b)
        a.sum().backward()
        b.sum().backward()
        same_state(plain, graphed)


def test_transposed_parameter(twins, device):
    plain, graphed = twins(MLP())
    for step in range(2 * CALLS):
        if step == CALLS:
            for model in (plain, graphed):
                model.first.weight.data = model.first.weight.data.t()
        x = torch.randn(3, 8, device=device)
        with torch.no_grad():
            same(plain(x), graphed(x))


def test_restless_parameter(twins, device):
    plain, graphed = twins(MLP())
    keep = []
    for _ in range(12):
        weight = torch.randn(8, 8, device=device)
        keep.append(weight)
        for model in (plain, graphed):
            model.first.weight.data = weight.clone()
            keep.append(model.first.weight.data)
        x = torch.randn(3, 8, device=device)
        with torch.no_grad():
            same(plain(x), graphed(x))
    assert regions(graphed)[0]["captures"] < 8, "a parameter that keeps moving has to be copied, not captured again"


def test_weight_changed_before_backward(twins, device):
    plain, graphed = twins(MLP())
    for step in range(CALLS):
        x = torch.randn(3, 8, device=device)
        for model in (plain, graphed):
            loss = model(x).square().sum()
            if step % 2:
                with torch.no_grad():
                    model.second.weight.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
        same_state(plain, graphed)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.nightly_after(2)
def test_forwards_in_flight(twins, device, order):
    plain, graphed = twins(MLP(p=0.3))
    for step in range(4):
        x = torch.randn(3, 4, 8, device=device)
        for model in (plain, graphed):
            torch.manual_seed(step)
            losses = [model(xi).square().sum() for xi in x]
            for i in order:
                losses[i].backward()
        same_state(plain, graphed)
    assert replays(graphed) > 6


def test_abandoned_forwards(twins, device):
    plain, graphed = twins(MLP())
    for step in range(10):
        x = torch.randn(4, 8, device=device)
        a, b = plain(x), graphed(x)
        same(a, b)
        if step in (0, 6, 8, 9):
            a.square().sum().backward()
            b.square().sum().backward()
        same_state(plain, graphed)
        del a, b
    other = torch.randn(2, 8, device=device)
    for _ in range(4):  # another recording in the same arena, then the first one again
        same(plain(other), graphed(other))
        a, b = plain(x), graphed(x)
        a.square().sum().backward()
        b.square().sum().backward()
        same_state(plain, graphed)


def test_gradients_are_kept(twins, device):
    plain, graphed = twins(MLP())
    kept = []
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        grads = []
        for model, leaf in ((plain, x), (graphed, y)):
            model.zero_grad(set_to_none=True)
            model(leaf).square().sum().backward()
            grads.append([p.grad for p in model.parameters()] + [leaf.grad])
        kept.append(grads)
    for a, b in kept:
        same(a, b)


def test_saved_gradients(twins, device):
    plain, graphed = twins(lambda x, w, y: Precomputed.apply(x + w.t(), torch.sin(y * 2) * 3))
    kept = []
    for step in range(CALLS):
        torch.manual_seed(step)
        leaves = [torch.randn(shape, device=device) for shape in ((4, 3), (3, 4), ())]
        for fn in (plain, graphed):
            mine = [leaf.clone().requires_grad_() for leaf in leaves]
            loss = fn(*mine)
            loss.backward(retain_graph=step == 3)
            kept.append([leaf.grad for leaf in mine])
            del loss
    same(kept[::2], kept[1::2])
    assert replays(graphed) >= CALLS - 2


def test_gradients_that_share_memory(twins, device):
    """Autograd keeps a gradient that another one is a view of, or that the caller holds, only as a copy."""

    class Sum(nn.Module):
        def __init__(self, *shapes):
            super().__init__()
            self.terms = nn.ParameterList(torch.randn(shape) for shape in shapes)

        def forward(self, x):
            found = torch.tanh(x * self.terms[0])
            for i in range(1, len(self.terms)):
                found = found + self.terms[i].view(x.shape)
            return found

    shapes = [(4, 8), (4, 8), (32,)], [(4, 8), (32,), (4, 8), (4, 8)], [(4, 8), (1, 4, 8)], [(4, 8), (4, 8)]
    for model in [Sum(*each) for each in shapes]:
        plain, graphed = twins(model)
        for _ in range(6):
            x, cotangent = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
            held = [cotangent.clone() for _ in range(2)]
            for jmodel, mine in zip((plain, graphed), held):
                jmodel.zero_grad()
                jmodel(x).backward(mine)
                nn.utils.clip_grad_norm_(jmodel.parameters(), 0.1)
                jmodel(2 * x).square().sum().backward()
            same(*held)
            same_state(plain, graphed)


def test_gradient_accumulation(twins, device):
    plain, graphed = twins(MLP())
    for step in range(3 * CALLS):
        x = torch.randn(4, 8, device=device)
        for model in (plain, graphed):
            model(x).square().sum().backward()
            if step % 3 == 2:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                model.zero_grad(set_to_none=step % 2 == 0)
        same_state(plain, graphed)


def test_evaluation_in_between(twins, device):
    plain, graphed = twins(MLP(p=0.2))
    for step in range(CALLS):
        x, e = torch.randn(2, 4, 8, device=device)
        results = []
        for model in (plain, graphed):
            torch.manual_seed(step)
            loss = model(x).square().sum()
            model.eval()
            with torch.no_grad():
                results.append(model(e))
            results.append(model(e))
            model.train()
            loss.backward()
        same(results[0].detach(), results[2].detach())
        same(results[1].detach(), results[3].detach())
        same_state(plain, graphed)


def test_autograd_grad(twins, device):
    plain, graphed = twins(MLP())
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device)
        grads = [
            torch.autograd.grad(model(x).square().sum(), list(model.parameters())[:3]) for model in (plain, graphed)
        ]
        same(*grads)


def test_gradient_layouts(twins, device):
    plain, graphed = twins(MLP())
    ways = [
        lambda y: y.sum().backward(),
        lambda y: y.mean(0).sum().backward(),
        lambda y: y.backward(torch.ones_like(y)),
        lambda y: y.t().backward(torch.arange(32.0, device=y.device).view(8, 4)),
        lambda y: y[1:3].sum().backward(),
    ]
    for way in ways * 3 + ways[::-1]:
        x = torch.randn(4, 8, device=device)
        for model in (plain, graphed):
            model.zero_grad()
            way(model(x))
        same_state(plain, graphed)


def test_saved_tensor_hooks(twins, device):
    plain, graphed = twins(MLP())
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device)
        for model in (plain, graphed):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.cpu() * 2 if t.is_floating_point() else t, lambda t: t.to(device)
            ):
                model(x).square().sum().backward()
        same_state(plain, graphed)


def test_checkpointed_from_outside(twins, device):
    plain, graphed = twins(MLP(p=0.3))
    for reentrant in (False, True):
        for step in range(CALLS):
            leaves = [torch.ones(3, 8, device=device, requires_grad=True) for _ in range(2)]
            for model, leaf in zip((plain, graphed), leaves):
                torch.manual_seed(step)
                y = checkpoint(model, leaf, use_reentrant=reentrant)
                checkpoint(model, y, use_reentrant=reentrant).square().sum().backward()
            same(leaves[0].grad, leaves[1].grad)
            same_state(plain, graphed)


def test_retained_graph(twins, device):
    plain, graphed = twins(lambda x: (work(x), work(x) * 3))
    for step in range(2 * CALLS):
        x = torch.randn(4, 4, device=device)
        grads = []
        for f in (plain, graphed):
            leaf = x.clone().requires_grad_()
            a, b = f(leaf)
            for output in (a, b, a)[: 1 + step % 3]:
                output.square().sum().backward(retain_graph=True)
            (a.sum() + b.sum()).backward()
            grads.append(leaf.grad)
        same(*grads)
    assert replays(graphed) > 2 * CALLS


def test_sparse_gradients(twins, device):
    plain, graphed = twins(lambda w: work(w) * 2)
    rows = torch.tensor([0, 2], device=device)
    for sparse in (True, False, True, False, False, True):
        w = torch.randn(4, 4, device=device)
        grads = []
        for f in (plain, graphed):
            leaf = w.clone().requires_grad_()
            nn.functional.embedding(rows, f(leaf), sparse=sparse).sum().backward()
            grads.append(leaf.grad.to_dense())
        same(*grads)


def test_gradients_in_a_batch(twins, device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain, graphed = twins(model, jit={"thunderfx_disable_split_autograd": True})
    for step in range(CALLS):
        x = torch.randn(2, 4, device=device)
        for jmodel in (plain, graphed):
            jmodel.zero_grad()
            jmodel(x).sum().backward()
        same_state(plain, graphed)
        if step % 2:
            basis = torch.eye(8, device=device).view(8, 2, 4)
            same(
                *[
                    torch.autograd.grad(jmodel(x), list(jmodel.parameters()), basis, is_grads_batched=True)
                    for jmodel in (plain, graphed)
                ]
            )
    assert replays(graphed) > CALLS


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_of_embeddings(twins, device, bag):
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = (nn.EmbeddingBag if bag else nn.Embedding)(8, 4, sparse=True)
            self.last = nn.Linear(4, 4)

        def forward(self, i, w):
            made = (nn.functional.embedding_bag if bag else nn.functional.embedding)(i, work(w), sparse=True)
            return self.last(work(self.rows(i))) * work(made)

    plain, graphed = twins(Embeds())
    kept = []
    for _ in range(CALLS):
        i = torch.randint(0, 8, (3, 2) if bag else (6,), device=device)
        w = torch.randn(8, 4, device=device)
        grads = []
        for model in (plain, graphed):
            model.zero_grad(set_to_none=True)
            leaf = w.clone().requires_grad_()
            model(i, leaf).sum().backward()
            grads.append([leaf.grad, *(p.grad for p in model.parameters())])
        kept.append(grads)
    for grads in kept:
        assert [g.layout for g in grads[0]] == [g.layout for g in grads[1]] and grads[1][1].is_sparse
        same(*([g.to_dense() for g in found] for found in grads))
    assert replays(graphed) >= CALLS - 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_results(twins, device, operator):
    where = torch.arange(4, device=device)[None]

    def rows(x, y):
        return torch.sparse_coo_tensor(where, x * y, (4, 4), is_coalesced=True)

    ex, made = operator("rows", rows, lambda x, y: like(x))

    def fn(x):
        y = work(x)
        z = torch.tan(y)
        return made(y, z), work(y), work(z)

    plain, graphed = twins(fn, jit={"executors": [ex, *thunder.get_default_executors()]}, allow=["rows"], deny=["tan"])
    kept = []
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        kept.append((plain(x), graphed(x)))
    for results in kept:
        assert results[1][0].is_sparse
        same(*((a.to_dense(), b, c) for a, b, c in results))
    failures = [region["failure"] for region in regions(graphed)]
    assert failures[0] is None and "CaptureRefused" in failures[1] and "sparse_coo" in failures[1]


@pytest.mark.parametrize("deny", [(), ["torch.sgn_vjp"]], ids=["made in a region", "given to a region"])
def test_zeros_without_memory(twins, device, deny):
    """PyTorch's derivative of sgn is a ZeroTensor, and so are products with one."""
    plain, graphed = twins(lambda x: work(torch.sgn(work(x))), deny=deny)
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        (mine,) = torch.autograd.grad(plain(a).sum(), a)
        (its,) = torch.autograd.grad(graphed(b).sum(), b)
        same(mine + 0.0, its + 0.0)
        assert mine._is_zerotensor() == its._is_zerotensor()
    assert replays(graphed) >= CALLS - 1


def test_kernels_that_ask_for_grad(twins, device):
    """``matmul`` folds the batch if what it folds it for requires grad, whether gradients are recorded or not."""
    plain, graphed = twins(lambda v, x: work(torch.matmul(v, x)))
    for _ in range(CALLS):
        v, x = torch.randn(64, device=device, requires_grad=True), torch.randn(5, 64, 33, device=device)
        same(plain(v, x).detach(), graphed(v, x).detach())
    assert replays(graphed) >= CALLS - 1


def test_seed_on_the_host(twins, device, backend):
    """An attention that runs without a graph leaves its seed there, whatever the trace says, for its backward."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self):
            w = self.w[None, None]
            return nn.functional.scaled_dot_product_attention(w, w, w)[0, 0]

    plain, graphed = twins(Attention())
    for _ in range(CALLS):
        for model in (plain, graphed):
            model().square().sum().backward()
        same_state(plain, graphed)
    if backend == "cuda":
        (backward,) = regions(graphed)  # the attention alone is too small for one
        assert "is on cpu, and the graph on cuda:0" in backward["failure"]
    else:
        assert replays(graphed) == 2 * (CALLS - 1)


def test_versions_of_outputs(twins, device):
    def fn(x, z):
        y = work(x)
        return y, y.t(), torch.view_as_real(z)

    z = torch.randn(4, dtype=torch.complex64, device=device)
    for f in twins(fn):
        for _ in range(CALLS):
            x = torch.randn(4, 4, device=device, requires_grad=True)
            y, t, real = f(x, z)
            version = z._version
            losses = (t.square().sum(), (z * x[0]).abs().sum())
            with torch.no_grad():
                y.mul_(2)
                real.mul_(2)
            assert z._version > version
            for loss in losses:
                with pytest.raises(RuntimeError, match=r"modified.*inplace"):
                    loss.backward()


def test_results_without_elements(twins, device):
    """``data_ptr()`` of a tensor without elements is 0, wherever it lies in its memory."""
    plain, graphed = twins(lambda x: (*torch.split(work(x), [0, 3, 1]), torch.view_as_real(x)[2:2], x[3:].real))
    for _ in range(CALLS):
        x = torch.randn(4, 4, dtype=torch.complex64, device=device)
        for mine, its in zip(plain(x), graphed(x)):
            same(mine, its)
            assert mine.stride() == its.stride()
    assert replays(graphed) >= CALLS - 1


def test_dispatch_modes(twins, device):
    class Halves(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 0.5 if "tanh" in str(func) else result

    plain, graphed = twins(MLP())
    plain_fn, graphed_fn = twins(lambda x: work(x) + 1)
    for step in range(3 * CALLS):
        x = torch.randn(4, 8, device=device)
        for f in (plain_fn, graphed_fn, plain, graphed):
            f(x)  # Thunder cannot compile under a dispatch mode
        with Halves() if step % 3 == 1 else nullcontext():
            same(plain_fn(x), graphed_fn(x))
        losses = [model(x).square().sum() for model in (plain, graphed)]
        with Halves() if step % 3 == 2 else nullcontext():
            for loss in losses:
                loss.backward()
        same_state(plain, graphed)
    assert replays(graphed_fn) > 0


def test_random_numbers(twins, device):
    plain, graphed = twins(MLP(p=0.5))
    states = []
    for model in (plain, graphed):
        torch.manual_seed(3)
        drawn = []
        for _ in range(CALLS):
            y = model(torch.ones(4, 8, device=device))
            y.sum().backward()
            drawn += [y.detach(), torch.rand(3, device=device)]
        states.append(drawn)
    same(*states)
    same_state(plain, graphed)
    assert not torch.equal(states[1][0], states[1][2])


def test_draws_while_another_captures(twins, device):
    """On CUDA the first graph waits until the second has been captured."""
    first, second = twins(lambda x: work(torch.rand_like(x)) + x), twins(lambda x: work(torch.rand_like(x)) * x)
    x = torch.randn(4, 4, device=device)
    for rows in (2, 3):  # the second warms up and captures for each
        y = torch.randn(rows, 4, device=device)
        results = []
        for f, g in zip(first, second):
            torch.manual_seed(rows)
            results.append([])
            for _ in range(3):
                if device == "cuda":
                    torch.cuda._sleep(20_000_000)
                results[-1] += [f(x), g(y)]
        same(*results)
    assert replays(first[1]) == 5 and replays(second[1]) == 4


def test_item(twins, device):
    def fn(x):
        y = work(x)
        n = y.sum().item()
        z = work(y * n)
        return z, n

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))
    assert [r["replays"] for r in regions(graphed)] == [CALLS - 1] * 2


def test_indices_that_are_numbers(twins, device):
    """PyTorch reads an index without a dimension on the host."""

    def fn(x, cache, k):
        y = work(x)
        cache[k] = y[0]
        cache[:, k] = 1.5
        return work(cache) + work(y[:, k])

    plain, graphed = twins(fn)
    for step in range(CALLS):
        x, cache = torch.randn(2, 4, 4, device=device)
        found = []
        for f in (plain, graphed):
            mine = cache.clone()
            found.append((f(x, mine, torch.tensor(step % 4, device=device)), mine))
        same(*found)
    (trace,) = explain(graphed).to_dict()["traces"]
    waits = [op["name"] for op in trace["ops"] if op["reason"] == "waits for the device"]
    assert sorted(waits) == ["Tensor.__getitem__", "Tensor.__setitem__", "Tensor.__setitem__"]
    assert [region["failure"] for region in regions(graphed)] == [None] * len(regions(graphed))
    assert replays(graphed) >= CALLS - 1


def test_numbers_stored_by_a_mask(twins, device):
    """PyTorch fills in a number without reading the mask on the host."""

    def fn(x, places):
        y = work(x)
        y[x > 0] = -1.0
        places[y[:, 0] > 0] = 7
        return work(y) * places

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x, places = torch.randn(4, 3, device=device, requires_grad=True), torch.arange(4, device=device)
        found = []
        for f in (plain, graphed):
            mine, written = x.detach().clone().requires_grad_(), places[:, None].expand(4, 3).clone()
            y = f(mine, written)
            y.sum().backward()
            found.append((y, written, mine.grad))
        same(*found)
    assert [(region["failure"], region["replays"]) for region in regions(graphed)] == [(None, CALLS - 1)] * 2
    assert not any(trace.counts["eager"] for trace in explain(graphed).traces)


@pytest.fixture
def operator():
    """Registers ``fn`` as an operator of the user's own with a fresh executor."""
    made = []

    def make(name, fn, meta):
        ex = thunder.extend.OperatorExecutor(f"mine_{name}")
        thunder.extend.register_executor(ex)
        made.append(ex)
        return ex, ex.register_operator(name, fn=fn, meta=meta)

    yield make
    for ex in made:
        thunder.extend.deregister_executor(ex)


def like(x):
    return thunder.core.proxies.TensorProxy(like=x)


def test_calls_in_operators(device, operator, transform):
    """The allocator gives a thread memory of the first pool that it has begun to use, which is the outer call's."""
    inner = thunder.jit(work, transforms=[transform()])
    ex, call = operator("call", lambda x: inner(x), like)
    plain = thunder.jit(lambda x: work(work(work(x))))
    jit = {"executors": [ex, *thunder.get_default_executors()]}
    graphed = thunder.jit(lambda x: work(call(work(x))), transforms=[transform(allow=["call"])], **jit)
    with torch.no_grad():  # as in the operator
        inner(torch.randn(4, 4, device=device))
        for _ in range(CALLS):
            x = torch.randn(4, 4, device=device)
            same(plain(x), graphed(x))
        assert [region["replays"] for region in regions(graphed)] == [CALLS - 1]
        assert [region["captures"] for region in regions(inner)] == [0]
        same(work(x), inner(x))
    assert [region["captures"] for region in regions(inner)] == [1]


def test_opaque_operators(twins, device, operator):
    kept = {}
    ex, keep = operator("keep", lambda x: kept.setdefault(len(kept), x).clone(), like)
    ex2, write = operator("write", lambda x: x.mul_(3).clone(), like)
    ex3, view = operator("view", lambda x: x[:], like)

    def fn(x):
        y = work(x)
        a = keep(y)
        b = write(y)
        c = view(y)
        return work(a + b) + c, c, work(y)

    plain, graphed = twins(fn, jit={"executors": [ex, ex2, ex3, *thunder.get_default_executors()]})
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))
    held = [kept[i].clone() for i in range(2 * CALLS)]
    for i in range(0, 2 * CALLS, 2):
        same(held[i], held[i + 1])


def test_opaque_operators_with_numbers(twins, device, operator):
    """What is eager for another reason may still keep its input."""
    kept = []
    ex, keep = operator("keep_scaled", lambda x, n: kept.append(x) or x * n, lambda x, n: like(x))

    def fn(x):
        y = work(x)
        return work(keep(work(y) * 2, y.sum().item()))

    plain, graphed = twins(fn, jit={"executors": [ex, *thunder.get_default_executors()]})
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))
    same(kept[::2], kept[1::2])


def test_side_effects(twins, device, operator):
    log = []
    ex, note = operator("note", lambda x: log.append(1) or x + 1, like)
    _, graphed = twins(lambda x: work(note(work(x))), jit={"executors": [ex, *thunder.get_default_executors()]})
    for i in range(CALLS):
        graphed(torch.randn(4, 4, device=device))
        assert len(log) == i + 1


def test_operator_that_raises(twins, device, operator):
    broken = [False]

    def flaky(x):
        if broken[0]:
            raise ValueError("flaky")
        return x * 3

    ex, op = operator("flaky", flaky, like)

    def fn(x):
        return work(op(work(x)))

    jit = {"executors": [ex, *thunder.get_default_executors()]}
    for options in ({}, {"allow": ["flaky"]}):
        plain, graphed = twins(fn, jit=jit, **options)
        for step in range(3 * CALLS):
            broken[0] = step % 3 == (0 if step < 6 else 1)
            x = torch.randn(4, 4, device=device)
            if broken[0] and not (options and replays(graphed)):
                for f in (plain, graphed):
                    with pytest.raises(ValueError, match="flaky"):
                        f(x)
            elif not broken[0]:
                same(plain(x), graphed(x))
        assert replays(graphed) > 0


def test_failed_capture(twins, transform, device, operator):
    ex, sync = operator("sync", lambda x: x * x.sum().item(), like)

    def fn(x):
        return work(sync(work(x)))

    jit = {"executors": [ex, *thunder.get_default_executors()]}
    plain, graphed = twins(fn, jit=jit, allow=["sync"])
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))
        same(torch.rand(2, device=device).shape, (2,))
    (region,) = regions(graphed)
    assert region["captures"] == 0 and "sync" in region["failure"] and "test_hazards.py" in region["failure"]
    torch.manual_seed(1)
    drop = twins(MLP(p=0.5))
    for step in range(CALLS):  # random draws and captures still work
        x = torch.randn(4, 8, device=device)
        results = []
        for f in drop:
            torch.manual_seed(step)
            results.append(f(x).detach())
        same(*results)
    assert replays(drop[1]) > 0
    strict = thunder.jit(fn, transforms=[transform(allow=["sync"], strict=True)], **jit)
    strict(x := torch.randn(4, 4, device=device))
    with pytest.raises(CaptureError, match=r"CUDAGraph1.*sync"):
        strict(x)


def test_strict_training(twins, device):
    plain, graphed = twins(lambda x: (work(x), work(x) * 3, x.sum() * 2), strict=True)
    ways = [lambda o: o[0].sum(), lambda o: o[1].mean(), lambda o: o[2]]
    for step in range(2 * CALLS):
        x = torch.randn(4, 4, device=device)
        grads = []
        for f in (plain, graphed):
            leaf = x.clone().requires_grad_()
            ways[step % 5 % 3](f(leaf)).backward()
            grads.append(leaf.grad)
        same(*grads)
    assert replays(graphed) > CALLS


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_interrupted_capture(twins, device, monkeypatch, kind):
    record = RuntimeRegion._record
    pending = [kind]

    def interrupted(self, call, args):
        results = record(self, call, args)
        if call.program.kind in pending:
            pending.clear()
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(RuntimeRegion, "_record", interrupted)
    plain, graphed = twins(MLP())
    for _ in range(CALLS + 2):
        x = torch.randn(4, 8, device=device)
        for model in (plain, graphed):
            model.zero_grad()
            try:
                model(x).square().sum().backward()
            except KeyboardInterrupt:
                model.zero_grad()
                model(x).square().sum().backward()
        same_state(plain, graphed)
    assert not pending
    assert replays(graphed) > CALLS


def test_threads(twins, device):
    plain, graphed = twins(MLP())
    graphed(torch.randn(4, 8, device=device)).sum().backward()
    plain(torch.randn(4, 8, device=device)).sum().backward()

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(4, 8, generator=generator).to(device)
            with torch.no_grad():
                expected = nn.functional.linear(x, plain.first.weight, plain.first.bias)
                expected = plain.second(torch.relu(plain.norm(expected)))
            torch.testing.assert_close(graphed(x), expected)

    on_threads(*(partial(run, seed) for seed in range(4)))


def test_too_many_in_flight(twins, device):
    plain, graphed = twins(MLP(), max_arenas=2)
    for _ in range(3):
        x = torch.randn(5, 4, 8, device=device)
        for model in (plain, graphed):
            losses = [model(xi).square().sum() for xi in x]
            for loss in losses:
                loss.backward()
        same_state(plain, graphed)
    forward = explain(graphed).to_dict()["traces"][0]
    assert any("all 2 memory pools are in use" in reason for reason in forward["fallbacks"])


def test_functions_share_an_arena(transform, device):
    """As the many parts that thunderfx makes of a model: all their forwards are in flight before the first backward."""
    shared = transform(max_arenas=1)
    models = [MLP().to(device) for _ in range(4)]
    plain = [plain_of(model, number) for number, model in enumerate(models)]
    graphed = [thunder.jit(model, transforms=[shared]) for model in models]
    for _ in range(4):
        x = torch.randn(4, 8, device=device)
        for some in (plain, graphed):
            sum(model(x).square().sum() for model in some).backward()
        for a, b in zip(plain, graphed):
            same_state(a, b)
    assert [replays(model) for model in graphed] == [6] * 4
    assert not any(trace["fallbacks"] for model in graphed for trace in explain(model).to_dict()["traces"])
    assert len({arena for model in graphed for program in programs(model) for arena in program.pair.arenas()}) == 1


def test_functions_beside_another_one(transform, device):
    """The second function was captured beside one version of the first, and is called beside another one."""
    shared = transform()
    models = [MLP().to(device) for _ in range(2)]
    plain = [plain_of(model, number) for number, model in enumerate(models)]
    graphed = [thunder.jit(model, transforms=[shared]) for model in models]
    for rows in (4, 4, 4, 6, 6, 6, 4, 6, 4, 6, 6, 4):
        x, y = torch.randn(rows, 8, device=device), torch.randn(4, 8, device=device)
        for some in (plain, graphed):
            first, second = (model(z).square().sum() for model, z in zip(some, (x, y)))
            second.backward()
            first.backward()
        for a, b in zip(plain, graphed):
            same_state(a, b)
    assert all(replays(model) > 10 for model in graphed)


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.nightly_after(1)
def test_backwards_that_share_memory(transform, device, monkeypatch, is_apart):
    """In the order of autograd and in others, with gradients of other layouts, and with a graph that is retained."""
    monkeypatch.setattr(CallMemory, "belongs_apart", lambda *_: is_apart)
    if is_apart:
        monkeypatch.setattr(Arena, "join", lambda *_, **__: False)
    shared = transform()
    models = [MLP().to(device) for _ in range(3)]
    plain = [plain_of(model, number) for number, model in enumerate(models)]
    graphed = [thunder.jit(model, transforms=[shared]) for model in models]

    def in_order(some, x):
        for model in some:
            x = model(x).tanh()
        x.square().sum().backward()

    def apart(some, x):
        losses = [model(x) for model in some]
        for i, loss in enumerate(losses):
            loss.backward(torch.full_like(loss, 0.5) if i else torch.ones_like(loss).t().contiguous().t())

    def retained(some, x):
        losses = [model(x).square().sum() for model in some]
        losses[1].backward(retain_graph=True)
        for loss in losses:
            loss.backward()

    for step in (in_order, in_order, in_order, apart, apart, apart, in_order, retained, retained, in_order, apart):
        x = torch.randn(4, 8, device=device)
        step(plain, x)
        step(graphed, x)
        for a, b in zip(plain, graphed):
            same_state(a, b)
    arenas = [recording.scratch for model in graphed for recording in _backwards(model)]
    assert len(set(map(id, arenas))) == 1 and (arenas[0] is not None) == is_apart
    used = weakref.ref(arenas[0] or programs(graphed[0])[0].pair.recordings[0].arena)
    del models, graphed, arenas, a, b
    gc.collect()
    assert used() is None, "an arena outlives the models that used it"


def _backwards(jmodel):
    return [backward for recording in programs(jmodel)[0].pair.recordings for backward in recording.backwards]


def test_backwards_on_several_threads(transform, device):
    """One thread's backward finds the other's in the memory that it was captured in, and runs eagerly."""
    shared = transform()
    models = [MLP().to(device) for _ in range(4)]
    plain = [plain_of(model, number) for number, model in enumerate(models)]
    graphed = [thunder.jit(model, transforms=[shared]) for model in models]

    def train(some, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(4, 8, generator=generator).to(device)
            for model in some:
                x = model(x).tanh()
            x.square().sum().backward()

    for some in (plain, graphed):
        train(some, 7)  # Thunder compiles on one thread at a time
        on_threads(*(partial(train, some[i : i + 2], i) for i in (0, 2)))
    for a, b in zip(plain, graphed):
        same_state(a, b)


def test_outer_capture(twins, device, backend):
    plain, graphed = twins(lambda x: work(x) + 1)
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        graphed(x)
    if backend == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = graphed(x)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
    else:
        from thunder_cg.runtime.tape import TapeBackend

        graph, (y,) = TapeBackend().pool(x.device).capture(lambda t: [graphed(t)], [x])
        x.normal_()
        graph.replay()
    same(plain(x), y.clone())


def test_switches(twins, device):
    _, graphed = twins(MLP())
    x = torch.randn(4, 8, device=device)
    torch.set_float32_matmul_precision("highest")  # from here on it is set, and no default
    with torch.no_grad():
        for _ in range(4):
            graphed(x)
        before = regions(graphed)[0]
        torch.set_float32_matmul_precision("medium")
        try:
            for _ in range(3):
                graphed(x)
        finally:
            torch.set_float32_matmul_precision("highest")
        after = regions(graphed)[0]
        torch.backends.cudnn.benchmark = True
        try:
            for _ in range(3):
                graphed(x)
        finally:
            torch.backends.cudnn.benchmark = False
        last = regions(graphed)[0]
    assert before["captures"] == 1 and after["captures"] == 2, "a graph captured in one precision served another"
    assert last["captures"] == 2, "a graph without convolutions depends on how they are chosen"


def test_dropped_models(transform, device):
    shared = transform()
    model = MLP(64).to(device)
    jmodel = thunder.jit(model, transforms=[shared])
    for _ in range(4):
        jmodel(torch.randn(4, 64, device=device)).sum().backward()
    program = weakref.ref(jmodel._lc_cs.interpreter_cache[0].computation_traces[-1])
    arenas = shared._shared.arenas._arenas
    assert any(ref() is not None for ref in arenas)
    del jmodel, model
    gc.collect()
    assert program() is None
    assert all(ref() is None for ref in arenas), "an arena outlives the models that used it"


def test_several_models(transform, device):
    shared = transform()
    models = [MLP(8).to(device), MLP(16).to(device)]
    plains = [plain_of(model) for model in models]
    graphed = [thunder.jit(model, transforms=[shared]) for model in models]
    for step in range(CALLS):
        for rows in (4, 2):
            for width, a, b in zip((8, 16), plains, graphed):
                x = torch.randn(rows, width, device=device)
                same(a(x).detach(), b(x).detach())
                if step % 2:
                    a(x).sum().backward()
                    b(x).sum().backward()
                    same_state(a, b)
    assert all(replays(g) > 0 for g in graphed)


def test_inference_mode(twins, device):
    plain, graphed = twins(MLP().requires_grad_(False))
    for step in range(3 * CALLS):
        x = torch.randn(4, 8, device=device)
        with torch.inference_mode(step % 4 == 1), torch.no_grad():
            same(plain(x), graphed(x))
            y = graphed(x)
            assert y.is_inference() == torch.is_inference_mode_enabled()
    assert replays(graphed) > 0


def test_results_reshaped_in_place(twins, device):
    plain, graphed = twins(lambda v, m: work(v @ m) + m @ v)
    for _ in range(CALLS):
        v, m = torch.randn(4, device=device), torch.randn(4, 4, device=device)
        same(plain(v, m), graphed(v, m))
    assert replays(graphed) >= CALLS - 1


@pytest.mark.filterwarnings("ignore:.*puts that off to the backward")
def test_gradients_despite_no_grad(twins, device):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x, y):
            x.t().mul_(0.5)
            return work(y) + work(y @ self.w)

    plain, graphed = twins(Writes())
    for _ in range(CALLS):
        x, y = torch.randn(2, 4, 4, device=device)
        with torch.no_grad():
            a, b = plain(x.clone(), y), graphed(x.clone(), y)
        same(a.detach(), b.detach())
        assert a.requires_grad == b.requires_grad and (a.grad_fn is None) == (b.grad_fn is None)
    assert replays(graphed) >= CALLS - 1


def test_versions_of_what_is_only_read(twins, device):
    """A conversion may return its argument, so what writes its result might write the argument."""

    def fn(x, w):
        y = x.to(torch.bfloat16)
        y.mul_(2)
        z = w.to(torch.bfloat16)
        z.mul_(2)
        return work(y) + z

    plain, graphed = twins(fn)
    for f in (plain, graphed):
        for _ in range(CALLS):
            leaf = torch.randn(4, 4, device=device, requires_grad=True)
            x = leaf.exp()  # saved for its backward
            versions = x._version, leaf._version
            f(x.detach(), leaf.detach())
            assert (x._version, leaf._version) == versions
            x.sum().backward()
    assert replays(graphed) >= CALLS - 1


def test_frozen_before_backward(twins, device):
    plain, graphed = twins(MLP())
    for step in range(2 * CALLS):
        x = torch.randn(3, 8, device=device)
        for model in (plain, graphed):
            model.zero_grad(set_to_none=True)
            loss = model(x).square().sum()
            model.second.weight.requires_grad_(step % 3 != 2)
            loss.backward()
            model.second.weight.requires_grad_(True)
        assert (graphed.second.weight.grad is None) == (step % 3 == 2)
        same_state(plain, graphed)
    assert replays(graphed) > 0


def test_memory_with_two_names(twins, device):
    """An eager operator writes to what a region made, and another region reads that by the name it has then."""

    def fn(x, y):
        best, at = torch.max(work(x), 0)
        low, middle = best < 0.1, (best >= 0.1) & (best < 0.3)
        at[low] = -torch.ones_like(y[0])  # a number would be filled in, in the graph
        at[middle] = -torch.ones_like(y[0]) * 2
        first = at.clamp(min=0)
        labels = y[first].to(torch.int64)
        labels[at == -1] = 0
        labels[at == -2] = -1
        return first, labels, work(best)

    plain, graphed = twins(fn)
    y = torch.tensor([1, 2], device=device)
    for _ in range(CALLS):
        x = torch.randn(2, 64, device=device)
        same(plain(x, y), graphed(x, y))
    assert len(regions(graphed)) > 2 and replays(graphed) > CALLS


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


class Overlap(Weighted):
    """Writes its input before it reads its parameter."""

    def forward(self, x):
        x.mul_(work(x).sum().item())
        n = work(self.weight).sum().item()
        return work(x), work(self.weight * n)


def test_arguments_that_overlap_parameters(twins, device):
    """A plan must not move the read before the write, as a caller may pass a part of the parameter."""
    plain, graphed = twins(Overlap())
    with torch.no_grad():
        for step in range(CALLS):
            part = [model.get_parameter("weight").detach()[:2] for model in (plain, graphed)]
            inputs = part if step % 2 else torch.randn(2, 4, device=device).expand(2, 2, 4).clone()
            same(plain(inputs[0]), graphed(inputs[1]))
            same_state(plain, graphed)


class Windows(Weighted):
    def forward(self, x):
        return self.weight[1:], x[:, ::2], work(x)


def test_views_that_overlap_parameters(twins):
    plain, graphed = twins(Windows())
    with torch.no_grad():
        for _ in range(CALLS):
            results = [model(model.get_parameter("weight").detach()[:2]) for model in (plain, graphed)]
            same(*results)
            assert [[t.requires_grad for t in found] for found in results] == [[True, False, False]] * 2


class Products(nn.Module):
    """Its backward transposes what its forward saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x):
        h = work(torch.matmul(x, self.first))
        return work(torch.matmul(h, self.second)).sum()


def test_saved_memory_with_two_names(twins, device):
    plain, graphed = twins(Products(), deny=["torch.permute"])
    for _ in range(CALLS):
        x = torch.randn(6, 4, device=device)
        for model in (plain, graphed):
            model.zero_grad()
            model(x).backward()
        same_state(plain, graphed)
    assert "permute" in str(explain(graphed)) and replays(graphed) == 2 * (CALLS - 1)


class Squares(Weighted):
    """Its second region gets one memory by two names and writes it, so it cannot be captured, and saves its input."""

    def forward(self, x):
        h, g = work(torch.matmul(x, self.weight)), work(x)
        v = g.t()
        h = torch.addcmul(h, h, h)
        v.add_(g)
        return v, work(h).sum()


def test_memory_that_is_passed_on(twins, device):
    plain, graphed = twins(Squares(), deny=["torch.permute"])
    for _ in range(CALLS):
        x = torch.randn(4, 4, device=device)
        for model in (plain, graphed):
            model.zero_grad()
            _in_flight, (_, loss) = model(x), model(x)
            loss.backward()
        same_state(plain, graphed)
    assert "could not be captured" in str(explain(graphed)) and replays(graphed) > CALLS


@pytest.mark.usefixtures("each_leaves_alone")
def test_results_that_leave_early(twins, device, monkeypatch):
    went = []
    settle = EarlyCopier.finish

    def settles(self, results):
        settled = settle(self, results)
        went.append([isinstance(result, CopiedEarly) for result in settled])
        return settled

    monkeypatch.setattr(EarlyCopier, "finish", settles)

    def fn(x, y):
        early, written, viewed, read, reshaped = (work(x + i) for i in range(5))
        view = viewed.t()
        z = work(read) + y
        written.mul_(z)
        same = early.to(early.dtype)
        view = view + 1
        transposed = (reshaped * 2).t()
        return early, written, viewed, view, read, transposed, x.t(), same, work(y + z)

    plain, graphed = twins(fn)
    for _ in range(CALLS):
        x, y = (torch.randn(4, 4, device=device) for _ in range(2))
        same(plain(x, y), graphed(x, y))
    assert replays(graphed) >= CALLS - 1
    assert len(went) == 2 and went[0] == went[1]  # the warm-up and the capture, which is to have the same memory
    assert sum(went[0]) >= 3 and not went[0][-1]


class Attention(nn.Module):
    """Its kernel is another one if query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, q, k, v):
        m = self.layer
        weights = m.in_proj_weight, m.in_proj_bias, m.out_proj.weight, m.out_proj.bias
        return torch.tanh(torch._native_multi_head_attention(q, k, v, 8, 2, *weights, need_weights=False)[0])


@pytest.mark.parametrize("verify", [None, 1])
@pytest.mark.nightly_after(1)
def test_one_tensor_for_several_arguments(twins, device, verify):
    plain, graphed = twins(Attention().eval().requires_grad_(False), verify=verify)
    with torch.no_grad():
        for _ in range(CALLS):
            x, y, z = (torch.randn(2, 5, 8, device=device) for _ in range(3))
            for inputs in ((x, x, x), (x, y, z), (x, y, y), (x, x, x)):
                same(plain(*inputs), graphed(*inputs))
    assert replays(graphed) > 2 * CALLS and not any(region["quarantined"] for region in regions(graphed))


@pytest.mark.parametrize(
    "varies", ["parameters move", "another parameter as input", "another layout of gradients", "all of it"]
)
@pytest.mark.nightly_after(2)
def test_backward_inputs_that_vary(twins, device, varies):
    """No more captures than recordings may be kept, then replays only: what keeps moving is copied."""
    bound = 8
    plain, graphed = twins(MLP(), max_recordings=bound)

    def step(model, x, squared):
        model.zero_grad()
        x = nn.Parameter(x) if varies in ("another parameter as input", "all of it") else x
        y = model(x)
        (y.square() if squared else y).sum().backward()  # the gradient of a sum has strides of 0
        gradients = [x.grad, *(p.grad for p in model.parameters())]
        if varies in ("parameters move", "all of it"):
            for p in model.parameters():
                p.data = p.data - 0.1 * p.grad
        return y.detach(), gradients

    counts = []
    for number in range(60):
        x = torch.randn(4, 8, device=device)
        squared = varies not in ("another layout of gradients", "all of it") or bool(number % 2)
        same(step(plain, x, squared), step(graphed, x, squared))
        if number in (39, 59):
            traces = explain(graphed).to_dict()["traces"]
            counts.append([(t["eager_calls"], [region["captures"] for region in t["regions"]]) for t in traces])
    assert counts[0] == counts[1], f"still eager or captured after 40 steps: {traces[1]['fallbacks']}"
    assert all(captures <= bound for _, of_regions in counts[1] for captures in of_regions), counts[1]


@pytest.fixture
def no_collections():
    """Only those that the package asks for: what kind of garbage there is shows."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


class Output:
    """Keeps an output in a reference cycle, which only the garbage collector frees."""

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self


def test_outputs_in_reference_cycles(twins, device, no_collections):
    """All arenas look held until the garbage collector runs. Then calls replay, and the report says why, once."""
    plain, graphed = twins(MLP(), max_arenas=2)
    for _ in range(20):
        x = torch.randn(4, 8, device=device)
        same(plain(x).detach(), Output(graphed(x)).tensor.detach())
    forward = explain(graphed).to_dict()["traces"][0]
    assert forward["eager_calls"] <= 2, forward["fallbacks"]
    assert str(explain(graphed)).count("reference cycle") == 1


def test_outputs_that_are_really_kept(twins, device, no_collections):
    """Collecting garbage frees no arena then, and is too slow to be tried often: after 1, 2, 4, 8 and so on calls."""
    _, graphed = twins(MLP(), max_arenas=2)
    kept, collections = [], []
    gc.callbacks.append(note := lambda phase, info: collections.append(phase) if phase == "start" else None)
    try:
        for _ in range(70):
            kept.append(graphed(torch.randn(4, 8, device=device)))
    finally:
        gc.callbacks.remove(note)
    assert len(collections) <= 8
    assert explain(graphed).to_dict()["traces"][0]["eager_calls"] >= 67


def test_released_memory(twins, device):
    """Its calls in flight, and what leads to its recordings, are of a compiled function whose memory was given back."""
    plain, graphed = twins(MLP(p=0.5))
    x = torch.randn(4, 8, device=device)
    for at in range(6):
        results = []
        for jfn in (plain, graphed):
            torch.manual_seed(at)
            first = jfn(x)
            if jfn is graphed and at % 2:
                release(graphed)
            second = jfn(x)
            if jfn is graphed and at % 3 == 0:
                release(graphed)
            second.square().sum().backward()
            first.square().sum().backward()
            results.append([first.detach(), second.detach()])
        same(*results)
        same_state(plain, graphed)


def test_discarded_recordings(twins, device):
    plain, graphed = twins(MLP(p=0.5), memory_budget=2_000 if device == "cpu" else 3 * 2**20)
    batches = [torch.randn(rows, 8, device=device) for rows in (4, 6, 4, 6)]
    for at in range(6):
        results = []
        for jfn in (plain, graphed):
            torch.manual_seed(at)
            losses = [jfn(x).square().sum() for x in batches]
            for loss in losses[::-1]:
                loss.backward()
            with torch.no_grad():
                results.append([loss.detach() for loss in losses] + [jfn(x) for x in batches])
        same(*results)
        same_state(plain, graphed)
    assert replays(graphed) > 0
    assert device == "cuda" or sum(program.pair.discarded for program in programs(graphed)) > 0
