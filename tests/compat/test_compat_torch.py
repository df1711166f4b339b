"""What the package relies on of PyTorch's private names."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support import on_threads
from torch import nn
from torch.utils import _pytree

from thunder_cg.compat import operators
from thunder_cg.compat.autograd import backward_keeps_graph
from thunder_cg.compat.fx import drop_switches_of_saved_tensor_hooks
from thunder_cg.compat.guards import addresses_equal, attribute_writes_are_reported, dictionary_guard, tensor_guards
from thunder_cg.compat.settings import (
    Settings,
    any_autocast_enabled,
    default_device_is_set,
    dispatch_mode_count,
    forward_ad_level,
    function_mode_count,
    functorch_is_active,
    is_below_autograd,
    is_traced,
    kernel_settings,
    only_device_modes,
    saved_tensors_hooks,
)
from thunder_cg.compat.tensors import (
    autograd_base,
    copy_all_,
    empty_strided,
    has_storage,
    is_view,
    is_zero_tensor,
    may_overlap_itself,
    read_as,
    tensors_in,
    tree_leaves,
    tree_map_only,
    version,
)
from thunder_cg.compat.torch_compile import compile_donating, timing_kernels_in


def test_tensors_without_memory_views_and_versions() -> None:
    x = torch.randn(4, requires_grad=True)
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert is_zero_tensor(torch._efficientzerotensor(3)) and not is_zero_tensor(x)
    assert zeros.shape == x.shape
    base = torch.zeros(4)
    view = base[1:]
    assert is_view(view) and not is_view(base)
    assert autograd_base(view) is base and autograd_base(base) is None
    before = version(view)
    base.add_(1)
    assert version(view) == before + 1
    negated = read_as(base, conj=False, neg=True)
    assert negated.is_neg() and negated.tolist() == (-base).tolist()
    assert read_as(negated, conj=False, neg=True).tolist() == base.tolist()
    assert has_storage(base) and not has_storage(torch.zeros(2).to_sparse())
    assert may_overlap_itself(base.expand(2, 4)) and not may_overlap_itself(base)


_Pair = namedtuple("_Pair", "first second")


def test_trees_are_read_as_by_pytorch() -> None:
    x = torch.ones(2)
    tree = [(x, 1, None), {"b": [2.0, "text"], "a": nn.Parameter(x)}, _Pair(x, [True]), x.shape, OrderedDict(z=x, y=())]
    leaves, same = tree_leaves(tree), _pytree.tree_leaves(tree)
    assert len(leaves) == len(same) and all(one is other for one, other in zip(leaves, same))
    assert [id(each) for each in tensors_in(tree)] == [id(each) for each in same if isinstance(each, torch.Tensor)]
    for kind, fn in ((torch.Tensor, torch.Tensor.numel), (int, float), ((int, str), str)):
        assert str(tree_map_only(kind, fn, tree)) == str(_pytree.tree_map_only(kind, fn, tree))


def test_memory_and_copies() -> None:
    empty = empty_strided("cpu")((2, 3), (1, 2), torch.float64)
    assert empty.shape == (2, 3) and empty.stride() == (1, 2) and empty.dtype is torch.float64
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    copy_all_(targets, sources)
    assert all(t.eq(1).all() for t in targets)


def test_addresses_and_metadata_are_compared_in_one_call() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(3)]
    addresses = [t.data_ptr() for t in tensors]
    assert addresses_equal(tensors, addresses, [0, 1])
    assert not addresses_equal([tensors[0], torch.zeros(3)], addresses, [0, 1])
    assert addresses_equal([tensors[0], torch.zeros(3)], addresses, [0])
    strict, loose = tensor_guards(tensors), tensor_guards(tensors, strides=False)
    other = [torch.zeros(3, 2).t(), torch.zeros(3)]
    assert strict.check(*tensors) and loose.check(*other) and not strict.check(*other)
    assert not loose.check(tensors[0].double(), tensors[1])
    assert not loose.check(tensors[0].requires_grad_(), tensors[1])


def test_writes_to_watched_dictionaries_show() -> None:
    module, plain = nn.Linear(2, 2), {"a": 1}
    unchanged = dictionary_guard([plain])
    assert unchanged()
    plain["a"] = 2
    assert not unchanged()
    if not attribute_writes_are_reported():  # CPython 3.13.0
        assert not dictionary_guard([module])()
        return
    unchanged = dictionary_guard([module])
    assert unchanged()
    module.training = False
    assert not unchanged()


def test_what_is_active_on_a_thread() -> None:
    assert dispatch_mode_count() == function_mode_count() == 0
    assert forward_ad_level() == -1 and not is_traced() and saved_tensors_hooks() is None
    with torch.autograd.forward_ad.dual_level():
        assert forward_ad_level() == 0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert saved_tensors_hooks() is not None
    with torch.device("cpu"):
        assert function_mode_count() == 1 and only_device_modes() and default_device_is_set()
    torch.set_default_device("cpu")
    assert default_device_is_set()
    torch.set_default_device(None)
    assert not default_device_is_set()
    with torch.overrides.TorchFunctionMode():
        assert not only_device_modes()
    with torch.autocast("cpu"):
        assert any_autocast_enabled()
    assert not any_autocast_enabled() and not default_device_is_set()
    seen = []
    torch.func.vmap(lambda x: seen.append(functorch_is_active()) or x)(torch.zeros(2))
    assert seen == [True] and not functorch_is_active()


def test_autograd_can_be_switched_off_below() -> None:
    assert not is_below_autograd()
    with torch.no_grad(), torch.inference_mode(False):
        assert not is_below_autograd()
    with torch._C._AutoDispatchBelowAutograd():
        assert is_below_autograd()
    found = []
    on_threads(lambda: found.append(not is_below_autograd()))
    assert found == [True]


@pytest.mark.parametrize("keep", [False, True])
def test_a_backward_tells_whether_it_keeps_its_graph(keep: bool) -> None:
    assert not backward_keeps_graph()
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: found.append(backward_keeps_graph()))
    y.sum().backward(retain_graph=keep)
    assert found == [keep]


def set_precision(high: bool) -> None:
    torch.set_float32_matmul_precision("medium" if high else "highest")


@pytest.mark.parametrize(
    ("group", "switch"),
    [
        (Settings.MATMUL, set_precision),
        (Settings.ATTENTION, torch.backends.cuda.enable_math_sdp),
        (Settings.CUDNN, partial(setattr, torch.backends.cudnn, "benchmark")),
        (Settings.NONE, torch.use_deterministic_algorithms),
    ],
    ids=["matmul", "attention", "cudnn", "all"],
)
def test_settings_change_with_the_public_switches(group, switch) -> None:
    if switch is set_precision:
        set_precision(False)  # from here on it is set, and no default
    read, read_others = kernel_settings(group), kernel_settings(Settings.ALL & ~group)
    before = read(), read_others()
    switch(on := group is not Settings.ATTENTION)
    try:
        assert read() != before[0]
        assert (read_others() == before[1]) is bool(group)
    finally:
        switch(not on)
    assert (read(), read_others()) == before and hash((*before[0], *before[1]))


def test_all_that_torch_compile_guards_is_a_setting() -> None:
    """Thunder's traces fix the grad mode and autocast. What else it guards is in ``Settings.GUARDED``."""
    known = {"grad_mode", "autocast_state", "deterministic_algorithms", "deterministic_algorithms_warn_only"}
    known |= {"allow_tf32", "allow_fp16_reduce", "allow_bf16_reduce", "num_threads", "default_dtype"}
    known |= {"torch_function", "torch_function_all_disabled"}
    assert set(json.loads(torch._C._dynamo.guards.GlobalStateGuard().__getstate__())) <= known


def test_names_of_operators_of_libraries() -> None:
    @torch.library.custom_op("thunder_cg_names::pure", mutates_args=())
    def pure(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.library.custom_op("thunder_cg_names::writes", mutates_args=("x",))
    def writes(x: torch.Tensor) -> None:
        x.add_(1)

    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)

    @torch.library.custom_op("thunder_cg_names::draws", mutates_args=(), tags=tags)
    def draws(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    ours = torch.ops.thunder_cg_names
    assert operators.library_name(ours.pure) == operators.library_name(ours.pure.default) == "thunder_cg_names.pure"
    others = (ours.writes, ours.draws, torch.ops.aten.add, torch.ops._c10d_functional.wait_tensor, torch.add, "add")
    assert [operators.library_name(other) for other in others] == [None] * len(others)
    assert operators.is_cudagraph_unsafe(ours.draws) and operators.is_cudagraph_unsafe(
        partial(print, ours.draws.default)
    )
    assert not operators.is_cudagraph_unsafe(ours.pure) and not operators.is_cudagraph_unsafe(print)


def test_inductor_times_kernels_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor.runtime.benchmarking import benchmarker

    inside: list[str] = []
    timed: list[tuple[str, ...]] = []

    @contextmanager
    def place(nbytes: int) -> Iterator[None]:
        inside.append(f"{nbytes} bytes")
        yield
        inside.pop()

    def benchmark(self: object, kernel: str) -> None:
        timed.append((kernel, *inside))
        compile_fx.clone_preserve_strides(torch.ones(2))

    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", benchmark)
    monkeypatch.setattr(type(benchmarker), "L2_cache_size", 64, raising=False)
    monkeypatch.setattr(compile_fx, "clone_preserve_strides", lambda tensor: timed.append(("a copy", *inside)))
    with timing_kernels_in(place):
        benchmarker.benchmark_gpu("first")
        on_threads(lambda: benchmarker.benchmark_gpu("another thread's"))
    benchmarker.benchmark_gpu("last")
    assert timed == [
        ("first", "64 bytes"),
        ("a copy", "64 bytes", "8 bytes"),
        *(("another thread's",), ("a copy",), ("last",), ("a copy",)),
    ]


def test_inductor_writes_over_what_it_may() -> None:
    """Also where its caches have what it made of the same function without that."""

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weighted = torch.exp(c) - b
        return weighted @ a, weighted

    tensors = [torch.randn(8, 8) for _ in range(3)]
    for names, written in (({"c"}, [False, False, True]), (set[str](), [False] * 3), ({"b"}, [False, True, False])):
        mine = [each.clone() for each in tensors]
        with torch.no_grad():
            for found, expected in zip(compile_donating(function, names)(*mine), function(*tensors)):
                torch.testing.assert_close(found, expected)
        assert [not torch.equal(a, b) for a, b in zip(mine, tensors)] == written


def test_a_graph_does_not_switch_hooks_of_saved_tensors():
    """Whoever traces a switch of Dynamo's leaves the process so."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    switches = [torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable]
    graph.call_function(switches[0], ("not here",))
    y = graph.call_function(torch.sin, (x,))
    graph.call_function(switches[1])
    graph.output(y)
    drop_switches_of_saved_tensor_hooks(graph)
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    assert y.target is torch.sin
